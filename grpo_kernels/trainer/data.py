"""Prompts: from a file, a folder, a hub or memory, or generated; and the order in which a run visits them."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub import HfApi
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name

from .tasks import TASKS, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILES = (".jsonl", ".json", ".csv", ".parquet")  # of rows; such a file is one split
HUB_SECONDS = 10  # until a hub has to have answered
EXPECTED = (
    f"{', '.join(map(repr, TASKS))}, a file ({', '.join(FILES)}), a folder, or a name that datasets.load_dataset reads"
)


class Prompt(NamedTuple):
    """prompt: text, or messages ({"role", "content"}), as the data has it, for rewards; ids: its tokens, the chat
    template applied to messages; columns: what else the row has."""

    prompt: str | list[dict[str, Any]]
    ids: list[int]
    columns: dict[str, Any]


class Columns(NamedTuple):
    """What a run makes of a row. prompt, answer: the columns with the prompt and with what rewards get as "answer";
    None: rewards get the columns as they are. system: a text that each prompt begins with, as a message."""

    prompt: str = "prompt"
    answer: str | None = None
    system: str | None = None


AS_THEY_ARE = Columns()
MOST_LEVELS = 100  # of lists and objects in a column: what copies them, or writes them as JSON, goes down by recursion
GIVEN_ROWS = ("the rows of train_dataset", "the rows of eval_dataset")  # as dataset_name and eval_dataset_name


def is_one_split(name: str | None) -> bool:
    """Whether a data set of that name has no splits to choose from: a file, or rows that Python passed."""
    return name is not None and (name.endswith(FILES) or name in GIVEN_ROWS)


def load_prompts(
    source: str | Iterable[Mapping[str, Any]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    split: str = "train",
    config: str | None = None,
    context: float = math.inf,
    columns: Columns = AS_THEY_ARE,
) -> list[Prompt]:
    """The prompts of `source`, in its order.

    source: the name of a generated task (tasks.py), with the splits "train" and "test"; a file *.jsonl, *.json (a list
    of objects, or one a line), *.csv or *.parquet, which is one split, whatever `split` says; a folder of such files or
    of `datasets`' save_to_disk, or a name on the hub, with its `config` and `split`; or the rows themselves. The prompt
    of a row is text or messages. A column that some rows of a file lack is None there, as `datasets` has it.
    context: the most tokens that the model leaves to a prompt. A longer one raises a ValueError, as do a source that
    cannot be read, an empty one, a row without a proper prompt, and messages without a chat template.
    """
    rows = _read_rows(source, split, config) if isinstance(source, str) else _rows_of(source, "the data")
    where = f"data set {source!r}" if isinstance(source, str) else "the data"
    if not rows:
        raise ValueError(f"{where} (split {split!r}) is empty; expected at least one row")
    for option, name in (("prompt_column", columns.prompt), ("answer_column", columns.answer)):
        if name is not None and name not in rows[0]:
            found = ", ".join(map(repr, rows[0])) or "no columns"
            raise ValueError(f'{where} has no column "{name}"; found {found}: {option} names it')
    if columns.answer not in (None, "answer") and "answer" in rows[0]:
        raise ValueError(f"{where} has a column 'answer' beside answer_column={columns.answer}; rename or drop one")
    prompts, ended = [], []
    for index, row in enumerate(rows):
        for name, value in row.items():
            if not is_flat(value):
                raise ValueError(
                    f"{where}, row {index}: the column {name!r} is nested more than {MOST_LEVELS} levels deep"
                )
        others = {"answer" if name == columns.answer else name: x for name, x in row.items() if name != columns.prompt}
        prompt = _with_system(row[columns.prompt], columns.system, f"{where}, row {index}")
        ids, appended = _encode(prompt, tokenizer, f"{where}, row {index}")
        ended += [(index, True)] if appended else []
        ended += [(index, False)] if ids[-1] == tokenizer.eos_token_id else []
        if len(ids) > context:
            raise ValueError(
                f"{where}, row {index}: the prompt has {len(ids)} tokens; the model leaves {context} to a prompt"
            )
        prompts.append(Prompt(prompt, ids, others))
    for appended, sentence in (
        (True, "which the tokenizer appends to a text: it is left out, since a completion goes on from its prompt"),
        (False, "after which no completion goes on: does the chat template heed add_generation_prompt?"),
    ):
        if these := [index for index, which in ended if which == appended]:
            share = f"{len(these):,} of {len(rows):,} prompts (the first in row {these[0]})"
            print(f"{where}: {share} end with an end of sequence, {tokenizer.eos_token!r}, {sentence}", file=sys.stderr)
    return prompts


def is_flat(value: Any) -> bool:
    """Whether lists and objects are nested at most MOST_LEVELS deep, found without recursion."""
    level: list[Any] = [(value,)]
    for _ in range(MOST_LEVELS + 1):
        inner = (part.values() if isinstance(part, Mapping) else part for part in level)
        level = list({id(x): x for part in inner for x in part if isinstance(x, (Mapping, list, tuple))}.values())
    return not level


def check_path(option: str, name: str) -> None:
    """Raise ValueError where `name` can only mean a path and nothing is there: a hub would be asked for it."""
    path = Path(name)
    is_path = path.suffix in FILES or name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
    is_path = is_path or (path.parent.name != "" and path.parent.exists())
    if is_path and not path.exists():
        raise ValueError(f"{option}={name}: there is no such file or folder in {Path.cwd()}")


@lru_cache(maxsize=8)
def check_hub(option: str, name: str, kind: str = "model") -> None:
    """Raise ValueError where `name` is no path and the hub does not have it, or is not reached and it was never read.

    transformers and datasets ask a hub that is not reached for half a minute, for each file. kind: "model", "dataset".
    """
    if Path(name).exists():
        return
    hub, there = HfApi(), f"{option}={name}: there is no such file or folder in {Path.cwd()}"
    try:
        hub.repo_info(name, repo_type=kind, timeout=HUB_SECONDS)
    except (GatedRepoError, OfflineModeIsEnabled):
        return  # whose own words come at once
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ValueError(f"{there}, and no such {kind} at {hub.endpoint}, or not for you") from error
    except HfHubHTTPError:
        return  # of a hub that has no such question, or is busy
    except Exception as error:  # of what makes the connection
        cached = Path(HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind)).exists()
        why = f"{hub.endpoint} is not reached: {error}"
        if not cached:
            raise ValueError(f"{there}, and {why}") from error
        print(f"{option}={name}: {why}; HF_HUB_OFFLINE=1 takes what was read before at once", file=sys.stderr)


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """A hash of all that a run takes from its prompts."""
    return hashlib.sha256(repr([(prompt.ids, prompt.columns) for prompt in prompts]).encode()).hexdigest()


def take(num_prompts: int, position: int, count: int, seed: int) -> list[int]:
    """Indices of the prompts at position, ..., position + count - 1 of an endless order: that of a run.

    Each epoch is a permutation of its own, made from (seed, epoch).
    A function of its arguments alone: a run that resumes needs no more than its position.
    """
    epochs = (divmod(i, num_prompts) for i in range(position, position + count))
    return [_permutation(num_prompts, epoch, seed)[i] for epoch, i in epochs]


@lru_cache(maxsize=2)  # a batch that crosses an epoch's end needs two
def _permutation(size: int, epoch: int, seed: int) -> Sequence[int]:
    order = list(range(size))
    random.Random(f"{seed} {epoch}").shuffle(order)  # text as seed: each pair has a stream of its own
    return order


# --- sources ----------------------------------------------------------------------------------------------------------


def _read_rows(source: str, split: str, config: str | None) -> list[Row]:
    check_path("dataset_name", source)
    path = Path(source)
    if source in TASKS or path.is_file():
        if config is not None:
            raise ValueError(f"dataset_config={config!r} with {source!r}; only data sets of `datasets` have one")
        return _generated(source, split) if source in TASKS else _read_file(path)
    import datasets

    if not Path(datasets.config.HF_DATASETS_CACHE, source.replace("/", "___")).exists():
        check_hub("dataset_name", source, "dataset")
    try:
        if (path / "dataset_dict.json").exists():
            found = datasets.load_from_disk(source)[split]
        elif (path / "state.json").exists():
            found = datasets.load_from_disk(source)
        else:
            found = datasets.load_dataset(source, config, split=split)
        rows: list[Row] = found.to_list()
    except Exception as error:  # load_dataset documents none of its errors, and they are of many types
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot load data set {source!r}, split {split!r}: {reason}; expected {EXPECTED}") from error
    return rows


def _read_file(path: Path) -> list[Row]:
    if path.suffix not in FILES:
        raise ValueError(f"cannot read {path}; expected {EXPECTED}")
    if path.suffix == ".parquet":
        from pyarrow import ArrowInvalid, parquet

        try:
            return list(parquet.read_table(path).to_pylist())
        except (ArrowInvalid, OSError) as error:
            raise ValueError(f"cannot read {path}: {error}") from error
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 ({error})"
        raise ValueError(f"cannot read {path}: {reason}") from error
    if path.suffix == ".csv":
        return _read_csv(path)
    if path.suffix == ".json" and text.lstrip()[:1] == "[":
        return _rows_of(from_json(text, str(path)), str(path))
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    rows = [_row(from_json(line, where := f"{path}, line {number}"), where) for number, line in numbered]
    return _with_all_columns(rows)


def from_json(text: str, where: str) -> Any:
    """Parse JSON; raises ValueError where it is none, with `where` it stands."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter of lists within lists, some hundred deep
        raise ValueError(f"{where} is not JSON: {error}") from error


def _read_csv(path: Path) -> list[Row]:
    """The first line has the names; all values are text."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            rows = list(csv.DictReader(file, strict=True))
        except csv.Error as error:
            raise ValueError(f"{path} is not CSV: {error}") from error
    for index, row in enumerate(rows):
        if None in row:
            raise ValueError(f"{path}, row {index} has more values than the first line has names")
    return list(rows)


def _rows_of(rows: Iterable[Any], where: str) -> list[Row]:
    return _with_all_columns([_row(row, f"{where}, row {index}") for index, row in enumerate(rows)])


def _row(row: Any, where: str) -> Row:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is {row!r:.60}; expected an object with the prompt under its name")
    return dict(row)


def _with_all_columns(rows: list[Row]) -> list[Row]:
    """None where a row lacks a column that others have."""
    names = {name: None for row in rows for name in row}
    return [{**names, **row} for row in rows]


def _generated(task: str, split: str) -> list[Row]:
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r} of the generated task {task!r}; expected 'train' or 'test'")
    return TASKS[task]()[("train", "test").index(split)]


def _with_system(prompt: Any, system: str | None, where: str) -> Any:
    """The prompt as messages that begin with the system's."""
    if system is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list):
        return prompt
    if messages and isinstance(messages[0], dict) and messages[0].get("role") == "system":
        raise ValueError(f"{where}: the prompt begins with a message of the system; expected no system_prompt with it")
    return [{"role": "system", "content": system}, *messages]


def _encode(prompt: Any, tokenizer: Any, where: str) -> tuple[list[int], bool]:
    """Token ids of a text, or of messages by the chat template; a beginning-of-sequence id at most once. And whether
    the tokenizer appends an end of sequence to a text, which is left out."""
    appended = False
    if isinstance(prompt, str):
        try:
            ids: list[int] = tokenizer(prompt)["input_ids"]
            if ids[-1:] == [tokenizer.eos_token_id]:
                own = tokenizer(prompt, add_special_tokens=False)["input_ids"]
                appended = ids[len(ids) - len(own) :] != own
                ids = ids[: len(ids) - appended]
        except Exception as error:  # half of a surrogate pair, which JSON can hold, is a TypeError of some
            raise ValueError(f"{where}: the tokenizer refuses the prompt {prompt!r:.80}: {error}") from error
        if ids[:2] == [tokenizer.bos_token_id] * 2:  # the text has one of its own
            ids = ids[1:]
    elif (
        isinstance(prompt, list)
        and prompt
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
        )
    ):
        if tokenizer.chat_template is None:
            raise ValueError(f"{where}: the prompt is a list of messages, and the tokenizer has no chat template")
        continued = prompt[-1]["role"] == "assistant"  # a last message of the assistant goes on
        try:
            ids = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=not continued, continue_final_message=continued, return_dict=True
            )["input_ids"]
        except Exception as error:  # templates raise what they like
            raise ValueError(f"{where}: the chat template refuses the messages: {error}") from error
    else:
        raise ValueError(
            f"{where}: the prompt is {prompt!r:.80}; expected a text or a list of messages "
            '{"role": ..., "content": ...}'
        )
    if not ids:
        raise ValueError(f"{where}: the prompt {prompt!r:.80} has no tokens")
    return ids, appended

"""Prompts: from a file, a folder, a hub or memory, or generated; and the order in which a run visits them."""

from __future__ import annotations

import copyreg
import csv
import hashlib
import inspect
import json
import math
import random
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub import HfApi, constants, errors
from huggingface_hub.file_download import repo_folder_name

from . import reason_of
from .tasks import TASKS, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILES = (".jsonl", ".json", ".csv", ".parquet")  # of rows; such a file is one split
EXPECTED = (
    f"{', '.join(map(repr, TASKS))}, a file ({', '.join(FILES)}), a folder, or a name that datasets.load_dataset reads"
)


class Prompt(NamedTuple):
    """prompt: text, or messages ({"role", "content"}) as `_messages` has them, for rewards; ids: its tokens, the chat
    template applied to messages; columns: what else the row has; teacher: the index of its teacher."""

    prompt: str | list[dict[str, Any]]
    ids: list[int]
    columns: dict[str, Any]
    teacher: int = 0


HUB_SECONDS = 10  # until a hub has to have answered
MOST_LEVELS = 100  # of lists and objects in a column: what copies and hashes them goes down by recursion
GIVEN_ROWS = ("the rows of train_dataset", "the rows of eval_dataset")  # as dataset_name and eval_dataset_name


def is_one_split(name: str | None) -> bool:
    """Says whether a data set of that name has no splits to choose from: a file, or rows that Python passed."""
    return name is not None and (name.endswith(FILES) or name in GIVEN_ROWS)


def load_prompts(
    source: str | Iterable[Mapping[str, Any]], *, tokenizer: PreTrainedTokenizerBase, split: str = "train",
    config: str | None = None, context: float = math.inf, prompt_column: str = "prompt",
    answer_column: str | None = None, system_prompt: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Prompt]:  # fmt: skip
    """Returns the prompts of `source`, in its order.

    source: the name of a generated task (tasks.py), with the splits "train" and "test"; a file, which is one split,
    whatever `split` says; a folder or a name on the hub, with its `config` and `split`; or the rows themselves. A
    column that some rows of a file lack is None there, as `datasets` has it. context: the most tokens that the model
    leaves to a prompt. answer_column: what rewards get as "answer"; "reward_model.ground_truth" is that part of a
    column of objects, as in verl's files. system_prompt: begins each prompt, as a message. chat_template_kwargs:
    variables of the chat template.
    Raises ValueError for a longer prompt, a source that cannot be read, an empty one, a row without a proper prompt,
    messages without a chat template, and variables that it does not read.
    """
    where = f"data set {source!r}" if isinstance(source, str) else "the data"
    rows = _rows_of(_read_rows(source, split, config) if isinstance(source, str) else source, where)
    if not rows:
        raise ValueError(f"{where} (split {split!r}) is empty; expected at least one row")
    outer = answer_column if answer_column in rows[0] else (answer_column or "").partition(".")[0] or None
    for option, name in (("prompt_column", prompt_column), ("answer_column", outer)):
        if name is not None and name not in rows[0]:
            columns = ", ".join(map(repr, rows[0])) or "no columns"
            raise ValueError(f'{where} has no column "{name}"; found {columns}: {option} names it')
    if answer_column not in (None, "answer") and "answer" in rows[0]:
        raise ValueError(f"{where} has a column 'answer' beside answer_column={answer_column}; rename or drop one")
    variables = dict(chat_template_kwargs or {})
    check_variables(variables, tokenizer)
    prompts, cut, ended, repeated, known, skipped = [], [], [], [], set(), []
    for index, row in enumerate(rows):
        others = {"answer" if name == answer_column else name: x for name, x in row.items() if name != prompt_column}
        try:
            if answer_column != outer:
                others["answer"] = _part(row, str(answer_column))
            if deep := [name for name, value in row.items() if not is_flat(value)]:
                raise ValueError(f"the column {deep[0]!r} is nested more than {MOST_LEVELS} levels deep")
            prompt = _with_system(_messages(row[prompt_column]), system_prompt)
            if isinstance(prompt, str):
                ids, appended = _encode_text(prompt, tokenizer)
                left_out = ""
            else:
                ids, left_out = _encode_messages(prompt, tokenizer, variables)
                appended = False
            if not ids:
                raise ValueError(f"the prompt {prompt!r:.80} has no tokens")
            if len(ids) > context:
                raise ValueError(f"the prompt has {len(ids)} tokens; the model leaves {context} to a prompt")
        except ValueError as error:
            raise ValueError(f"{where}, row {index}: {error}") from error
        cut += [index] * appended
        ended += [index] * (ids[-1] == tokenizer.eos_token_id)
        repeated += [index] * (tuple(ids) in known)
        known.add(tuple(ids))
        skipped += [(index, left_out)] * bool(left_out)
        prompts.append(Prompt(prompt, ids, others))
    end = f"end with an end of sequence, {tokenizer.eos_token!r}"
    for these, sentence in (
        (cut, f"{end}, which the tokenizer appends to a text: it is left out, as a completion goes on from its prompt"),
        (ended, f"{end}, after which no completion goes on: does the chat template heed add_generation_prompt?"),
        (repeated, "repeat an earlier one"),
    ):
        if these:
            share = f"{len(these):,} of {len(rows):,} prompts (the first in row {these[0]})"
            print(f"{where}: {share} {sentence}", file=sys.stderr)
    if skipped:
        share = f"{len(skipped):,} of {len(rows):,} prompts (the first in row {skipped[0][0]})"
        print(
            f"{where}: {share} end in a message of the assistant, which goes on from the start of a reply: what the "
            f"chat template would put before it, {skipped[0][1]!r}, is left out",
            file=sys.stderr,
        )
    if variables and all(isinstance(prompt.prompt, str) for prompt in prompts):
        raise ValueError(f"chat_template_kwargs={variables} has no effect: the prompts of {where} are texts")
    return prompts


def is_flat(value: Any, levels: int = MOST_LEVELS) -> bool:
    """Says whether lists and objects are nested at most so many levels deep."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return levels > 0 and all(is_flat(part, levels - 1) for part in parts if isinstance(part, (dict, list, tuple)))


def check_source(option: str, name: str | Path, kind: str = "model") -> None:
    """Raises ValueError where `name` is neither here nor at the hub, or that is not reached: without this, transformers
    and datasets ask it for half a minute for each file. kind: "model", "dataset"."""
    path, name = Path(name), str(name)
    if path.exists() or name in TASKS:
        return
    there = f"{option}={name}: there is no such file or folder in {Path.cwd()}"
    is_path = path.suffix in FILES or name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
    if is_path or (path.parent.name != "" and path.parent.exists()):
        raise ValueError(there)
    hub = HfApi()
    try:
        if not Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind)).exists():
            hub.repo_info(name, repo_type=kind, timeout=HUB_SECONDS)
    except (errors.GatedRepoError, errors.HFValidationError, errors.OfflineModeIsEnabled):
        return  # those who load it say so at once
    except errors.RepositoryNotFoundError as error:
        raise ValueError(f"{there}, and no such {kind} at {hub.endpoint}, or not for you") from error
    except errors.HfHubHTTPError:
        return  # of a hub that has no such question, or is busy
    except Exception as error:  # of what makes the connection
        raise ValueError(f"{there}, and {hub.endpoint} is not reached: {error}") from error


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Returns a hash of all that a run takes from its prompts, the same in every process. Raises ValueError for a
    column of what cannot be compared (an open file, say)."""
    digest = hashlib.sha256()
    for row, prompt in enumerate(prompts):
        digest.update(repr(prompt.ids).encode())
        for name, value in prompt.columns.items():
            try:
                digest.update(repr((name, canonical(value))).encode())
            except Exception as error:  # objects raise what they like
                reason = f"{type(value).__name__}, which no later run could compare: {reason_of(error)}"
                raise ValueError(f"the data, row {row}: the column {name!r} holds a {reason}") from error
    return digest.hexdigest()


def canonical(value: Any) -> str:
    """Returns a text that equal values have in every process. Of repr that is not so: sets come in any order, objects
    show their address, large arrays a part."""
    if type(value) in (str, bytes, bool, int, float, complex, type(None)):
        return repr(value)
    if isinstance(value, (set, frozenset)):
        parts = sorted(map(canonical, value))
    elif isinstance(value, dict):
        parts = sorted(f"{canonical(key)}: {canonical(x)}" for key, x in value.items())
    elif type(value) in (list, tuple):
        parts = [canonical(x) for x in value]
    elif hasattr(value, "__qualname__"):  # a class or a function
        return f"{value.__module__}.{value.__qualname__}"
    else:  # what pickle makes it of: a name, or a function, its arguments, a state, and iterators of items
        made = copyreg.dispatch_table.get(type(value), lambda x: x.__reduce_ex__(4))(value)
        made = (made,) if isinstance(made, str) else (*made[:3], *(list(items or ()) for items in made[3:5]))
        parts = [canonical(part) for part in made]
    return f"{type(value).__qualname__}({', '.join(parts)})"


def take(num_prompts: int, position: int, count: int, seed: int) -> list[int]:
    """Returns the indices of the prompts at position, ..., position + count - 1 of an endless order: that of a run.

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


def _read_rows(source: str, split: str, config: str | None) -> Iterable[Any]:
    path = Path(source)
    if config is not None and (source in TASKS or path.is_file()):
        raise ValueError(f"dataset_config={config!r} with {source!r}; only data sets of `datasets` have one")
    if source in TASKS:
        if split not in ("train", "test"):
            raise ValueError(f"split={split!r} of the generated task {source!r}; expected 'train' or 'test'")
        return TASKS[source]()[("train", "test").index(split)]
    import datasets

    try:
        if path.is_file() and path.suffix in (".json", ".jsonl"):  # datasets would make dates of texts
            return _read_json(path.read_text(encoding="utf-8-sig"))
        if path.suffix == ".csv":
            return _read_csv(path)
        if path.suffix == ".parquet":
            return datasets.Dataset.from_parquet(source).to_list()
        if (path / "dataset_dict.json").exists():
            return datasets.load_from_disk(source)[split].to_list()
        if (path / "state.json").exists():
            return datasets.load_from_disk(source).to_list()
        return datasets.load_dataset(source, config, split=split).to_list()
    except Exception as error:  # load_dataset documents none of its errors, and they are of many types
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot load data set {source!r}, split {split!r}: {reason}; expected {EXPECTED}") from error


def _read_csv(path: Path) -> list[Any]:
    """Reads a table whose first line has the names; all values are text, as which datasets would not take them."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file, strict=True))
    if any(None in row for row in rows):
        raise ValueError("a row has more values than the first line has names")
    return rows


def _read_json(text: str) -> list[Any]:
    """Returns the rows of a list of objects, or of an object a line."""
    if text.lstrip()[:1] == "[":
        return list(from_json(text, "it"))
    lines = enumerate(text.split("\n"), start=1)
    return [from_json(line, f"line {number}") for number, line in lines if line.strip()]


def from_json(text: str | bytes, where: str) -> Any:
    """Parses JSON; raises ValueError where it is none, with `where` it stands."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter of lists within lists, some hundred deep
        raise ValueError(f"{where} is not JSON: {error}") from error


def _rows_of(rows: Iterable[Any], where: str) -> list[Row]:
    """Objects with the same columns, None where a row lacks one."""
    rows = list(rows)
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"{where}, row {index} is {row!r:.60}; expected an object with the prompt by its name")
    names = {name: None for row in rows for name in row}
    return [{**names, **row} for row in rows]


def _part(row: Row, path: str) -> Any:
    """Returns what lies under the names of `path`, with dots between them."""
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"there is no {path!r}: {name!r} is looked up in {value!r:.60}")
        value = value[name]
    return value


def _with_system(prompt: Any, system: str | None) -> Any:
    """Returns the prompt as messages that begin with the system's."""
    if system is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages[0]["role"] == "system":
        raise ValueError("the prompt begins with a message of the system; expected no system_prompt with it")
    return [{"role": "system", "content": system}, *messages]


def _messages(prompt: Any) -> Any:
    """Returns a prompt: text, or messages whose content is text, from texts in a row joined where it is parts. A
    message with tool_calls may have none. Fields that are None are what other rows have."""
    if isinstance(prompt, str):
        return prompt
    if not (isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt)):
        raise ValueError(f"the prompt is {prompt!r:.80}; expected a text or a list of messages with role and content")
    messages = []
    for number, fields in enumerate(prompt):
        message = {name: value for name, value in fields.items() if value is not None}
        content, where = message.get("content", ""), f"message {number} of the prompt"
        if not isinstance(message.get("role"), str) or ("content" not in message and not message.get("tool_calls")):
            raise ValueError(f"{where} is {fields!r:.80}; expected role and content, or tool_calls for content")
        if isinstance(content, list):
            for part in content:
                if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                    raise ValueError(f"{where} has the part {part!r:.60}; expected texts alone: the model gets tokens")
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise ValueError(f"{where} has the content {content!r:.60}; expected a text, or a list of parts of text")
        messages.append({**message, "content": content})
    return messages


def check_variables(variables: Mapping[str, Any], tokenizer: Any) -> None:
    """Raises ValueError for variables of a chat template that it does not read, or that are none."""
    if not variables:
        return
    if tokenizer.chat_template is None:
        raise ValueError(f"chat_template_kwargs={variables}: the tokenizer has no chat template")
    arguments = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"tools", "documents", "kwargs"}
    template = tokenizer.get_chat_template(tools=variables.get("tools"))
    for name in variables:
        if name in arguments:
            raise ValueError(f"chat_template_kwargs={variables}: the trainer sets {name} itself")
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ValueError(f"chat_template_kwargs={variables}: the chat template does not read {name}")


def _encode_messages(messages: list[Any], tokenizer: Any, variables: Mapping[str, Any]) -> tuple[list[int], str]:
    """Returns token ids of messages by the chat template, and what it puts before a last message of the assistant that
    is left out.

    Such a message goes on, to the letter, from where a reply begins. A template may put more before it, an empty
    thought, say, or cut blanks off its end.
    """
    if tokenizer.chat_template is None:
        raise ValueError("the prompt is a list of messages, and the tokenizer has no chat template")

    def rendered(messages: list[Any], **options: bool) -> str:
        try:
            text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options, **variables)
        except Exception as error:  # templates raise what they like
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        return text

    last, left_out = messages[-1], ""
    if last["role"] == "assistant" and "tool_calls" not in last:
        text, content = rendered(messages, continue_final_message=True), last["content"]
        if not text.endswith(content) and text.endswith(content.rstrip()):
            text += content[len(content.rstrip()) :]
        if not text.endswith(content):
            raise ValueError(f"the chat template ends with {text[-40:]!r} where the last message is {content!r:.80}")
        before = text[: len(text) - len(content)]
        begun, ended = (rendered(messages[:-1], add_generation_prompt=x) if messages[1:] else "" for x in (True, False))
        if begun != ended and before.startswith(begun):
            text, left_out = begun + content, before[len(begun) :]
    else:
        text = rendered(messages, add_generation_prompt=True)
    for message in messages:
        if message.get("tool_calls"):
            plain = [{name: x for name, x in m.items() if name != "tool_calls"} for m in messages]
            if rendered(plain, add_generation_prompt=True) == rendered(messages, add_generation_prompt=True):
                raise ValueError("the chat template leaves out the tool_calls of the messages")
            break
    return tokenizer(text, add_special_tokens=False)["input_ids"], left_out


def _encode_text(prompt: str, tokenizer: Any) -> tuple[list[int], bool]:
    appended = False
    try:
        ids: list[int] = tokenizer(prompt)["input_ids"]
        if ids[-1:] == [tokenizer.eos_token_id]:
            text_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            appended = ids[len(ids) - len(text_ids) :] != text_ids
            ids = ids[: len(ids) - appended]
    except Exception as error:  # half of a surrogate pair, which JSON can hold, is a TypeError of some
        raise ValueError(f"the tokenizer refuses the prompt {prompt!r:.80}: {error}") from error
    if ids[:2] == [tokenizer.bos_token_id] * 2:  # the text has one of its own
        ids = ids[1:]
    return ids, appended

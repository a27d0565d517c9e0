"""What a run saves and goes on from: rollouts as JSON lines, and checkpoints, which appear whole or not at all, are
verified before they are read, and are read without unpickling."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from . import RunError
from .arguments import ARITHMETIC, TrainArguments, to_json
from .data import Prompt, fingerprint
from .rollout import Completion

CONFIG = "config.json"  # the options of the run in its output folder; in a checkpoint RUN, beside that of the model
CHECKSUMS, RUN, STATE, TENSORS, ROLLOUT = "checksums.json", "run.json", "state.json", "state.pt", "rollout.jsonl"
OWN = r"checkpoint-\d+|start-model-\d+|model|optimizer-\d+|config\.json|summary\.json"  # which are written beside
# What may differ between a checkpoint and the run that goes on from it.
FREE = {
    *("output_dir", "resume_from_checkpoint", "dry_run", "save_steps", "save_total_limit", "save_rollouts"),
    *(
        "logging_steps",
        "logging_samples",
        "report_to",
        "disable_tqdm",
        "eval_steps",
        "eval_num_samples",
        "eval_max_prompts",
    ),
    *("correct_at", "dataset_test_split", "eval_dataset_name", "vllm_gpu_memory_utilization", "vllm_max_model_length"),
}


def checkpoints(output: Path) -> list[Path]:
    """Folders checkpoint-N, the newest first."""
    found = [p for p in output.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted(found, key=_step_of, reverse=True)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def prune(output: Path, limit: int | None, step: int) -> None:
    """Keep `limit` checkpoints up to the one of `step`; later ones are damaged: a run went on from an earlier one."""
    written = [folder for folder in checkpoints(output) if _step_of(folder) <= step]
    for folder in written[limit or sys.maxsize :]:
        shutil.rmtree(folder, ignore_errors=True)


def find_checkpoint(output: Path, wanted: str | None) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` names. 'auto': the newest sound one, damaged ones passed over aloud.

    Raises RunError for a named one that is not sound.
    """
    for folder in checkpoints(output) if wanted == "auto" else [Path(wanted)] if wanted is not None else ():
        why = _problem(folder)
        if why is None:
            return folder
        if wanted != "auto":
            raise RunError(f"resume_from_checkpoint={wanted}: {why}")
        print(f"{folder} is passed over: {why}", file=sys.stderr)
    return None


def _problem(folder: Path) -> str | None:
    """Why a folder is no sound checkpoint of this trainer, or None."""
    if not folder.is_dir():
        return "there is no such folder"
    if not (folder / CHECKSUMS).is_file():
        return "it holds no checksums.json: it was not written by grpo-kernels train"
    try:
        sums = json.loads((folder / CHECKSUMS).read_text())
        wrong = [name for name, expected in sums.items() if _sha256(folder / name) != expected]
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    if wrong:
        return f"{', '.join(wrong)} is damaged: its checksum differs"
    missing = {RUN, STATE, TENSORS, ROLLOUT} - sums.keys()
    return f"it lacks {', '.join(sorted(missing))}" if missing else None


def check_same_run(path: Path, a: TrainArguments, num_processes: int) -> None:
    """Raise RunError where the options of a run, saved in the file `path`, differ from these."""
    config = to_json(a, num_processes)
    try:
        saved = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise RunError(f"{path} holds no options of a run: {error}") from None
    # A longer run changes no earlier step, unless the learning rate depends on the length.
    free = FREE | ({"max_steps"} if "constant" in config["lr_scheduler_type"] else set())
    changed = [
        f"{name}={config.get(name)!r} (was {saved.get(name)!r})"
        for name in sorted(saved.keys() | config.keys())
        if name not in free and saved.get(name) != config.get(name)
    ]
    if changed:
        length = (
            f": lr_scheduler_type={a.lr_scheduler_type} depends on it, a constant schedule does not, and a new run may "
            f"begin with model_name_or_path={path.parent}"
        )
        raise RunError(
            f"{path.parent} belongs to a run with other options: {', '.join(changed)}; expected the same"
            f"{', max_steps too' + length if 'max_steps' not in free else ''}. What may differ: "
            f"{', '.join(sorted(free - {'dry_run', 'output_dir', 'resume_from_checkpoint'}))}"
        )


def check_state(checkpoint: Path, a: TrainArguments, prompts: Sequence[Prompt], zero_stage: int) -> None:
    """Raise RunError where a run of the same options cannot go on from the state in a checkpoint."""
    state = json.loads((checkpoint / STATE).read_text())
    if state["prompts"] != fingerprint(prompts):
        name = a.dataset_name or ARITHMETIC
        raise RunError(f"{checkpoint} was written with other prompts: dataset_name={name} has changed since")
    written = state.get("zero_stage", 0)
    if written != zero_stage:
        raise RunError(
            f"{checkpoint} was written under ZeRO stage {written} (0: no DeepSpeed); this run has {zero_stage}"
        )
    if state["progress"]["step"] > a.max_steps:
        raise RunError(f"{checkpoint} is beyond max_steps={a.max_steps}; expected a later step")


# --- saved rollouts ---------------------------------------------------------------------------------------------------


def to_lines(rollout: Sequence[Completion]) -> str:
    """A completion a line; float32 numbers exactly as they are. What JSON lacks, such as dates, becomes text."""

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else str(value)

    return "".join(json.dumps(vars(c), default=plain) + "\n" for c in rollout)


def from_lines(path: Path) -> list[Completion]:
    found: list[Completion] = []
    try:
        for line in path.read_text().splitlines():
            values = dict(json.loads(line))
            for name in ("logps", "advantage", "old_logps", "ref_logps"):
                if values.get(name) is not None:
                    values[name] = torch.tensor(values[name], dtype=torch.float32)
            found.append(Completion(**values))
    except (ValueError, TypeError) as error:
        raise RunError(f"{path}, line {len(found) + 1}: {error}") from None
    return found


def rollout_path(folder: Path, index: int) -> Path:
    return folder / f"rollout-{index:06d}.jsonl"


def save_rollout(folder: Path, index: int, rollout: Sequence[Completion]) -> None:
    write_text(rollout_path(folder, index), to_lines(rollout))


def load_rollout(folder: Path, index: int) -> list[Completion]:
    """What `save_rollout` wrote; rewards included, advantages and log-probabilities of policies not."""
    unset: dict[str, Any] = {"advantage": None, "old_logps": None, "ref_logps": None, "dropped": False}
    return [replace(c, **unset) for c in from_lines(rollout_path(folder, index))]


def load_replay(a: TrainArguments, index: int, num_processes: int, vocab_size: int) -> list[Completion]:
    """A rollout of --replay. Raises RunError where it is not what options and model take."""
    path = rollout_path(Path(a.replay or ""), index)
    if not path.is_file():
        raise RunError(f"replay={a.replay}: {path.name} is missing; {a.max_steps} steps take {a.num_rollouts} rollouts")
    rollout, rows = load_rollout(path.parent, index), a.rows_per_rollout(num_processes)
    sizes = sorted({len(list(group)) for _, group in groupby(rollout, key=lambda c: c.group)})

    def are_ids(ids: Any) -> bool:
        return bool(ids) and isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab_size for i in ids)

    for right, sentence in (
        (len(rollout) == rows, f"{len(rollout)} completions; the options take {rows}"),
        (sizes == [a.num_generations], f"groups of {sizes} completions; num_generations={a.num_generations}"),
        (all(are_ids(c.prompt_ids) and are_ids(c.ids) for c in rollout),
         f"a prompt or a completion that is no list of token ids, 0 to {vocab_size - 1}, at least one"),
        (all(isinstance(c.reward, (int, float)) for c in rollout), "a reward that is no number"),
        (all(x is None or len(x) == len(c.ids) for c in rollout for x in (c.logps, c.kept)),
         "logps or kept ids of another number of tokens than its completion"),
        (not a.corrects or all(c.logps is not None for c in rollout),
         "completions without logps; expected those of the policy that sampled, or "
         "--no-vllm-importance-sampling-correction"),
        (a.loss != "eager" or all(c.kept is None for c in rollout), "truncated samples; loss='eager' is over all ids"),
    ):  # fmt: skip
        if not right:
            raise RunError(f"replay={a.replay}: {path.name} has {sentence}")
    return rollout


# --- files that are whole or absent -----------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> None:
    """Write a file that is whole at any moment, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def write_atomically(folder: Path, fill: Callable[[Path], object]) -> None:
    """Make `folder` by filling a temporary one beside it, with checksums, synced to the disk before it is renamed.

    Raises RunError where that fails (a full disk); what was there before stays.
    """
    partial, replaced = (folder.with_name(f".{folder.name}.{kind}") for kind in ("partial", "replaced"))
    _remove_leftover(folder)
    try:
        partial.mkdir(parents=True)
        fill(partial)
        sums = {path.name: _sha256(path) for path in sorted(partial.iterdir()) if path.is_file()}
        (partial / CHECKSUMS).write_text(json.dumps(sums, indent=1))
        for path in (*partial.iterdir(), partial):
            sync(path)
        if folder.exists():
            folder.replace(replaced)
        partial.replace(folder)
        sync(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException as error:
        _remove_leftover(folder)
        if not isinstance(error, Exception):  # a second Ctrl-C
            raise
        # safetensors and torch have errors of their own for a full disk
        full = getattr(error, "errno", None) == errno.ENOSPC or any(
            words in str(error) for words in ("space left", "unexpected pos")
        )
        why = "the disk is full" if full else str(error)
        raise RunError(f"{folder} could not be written: {why}; earlier checkpoints are unchanged") from error


def remove_leftovers(output: Path) -> None:
    """Remove what a process that was killed while it wrote has left, and put back what it had set aside."""
    for path in output.iterdir():
        if found := re.fullmatch(rf"\.({OWN})\.(partial|replaced)", path.name):
            path.unlink() if path.is_file() else _remove_leftover(output / found[1])


def _remove_leftover(folder: Path) -> None:
    partial, replaced = (folder.with_name(f".{folder.name}.{kind}") for kind in ("partial", "replaced"))
    shutil.rmtree(partial, ignore_errors=True)
    if replaced.exists() and not folder.exists():
        replaced.replace(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Have a file or a folder on the disk, as it is now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Checkpoints: a folder appears whole or not at all, is verified before it is read, and is read without unpickling."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKSUMS, CONFIG, STATE, TENSORS, ROLLOUT = "checksums.json", "run.json", "state.json", "state.pt", "rollout.jsonl"
# What may differ between a checkpoint and the run that goes on from it.
FREE = {
    *("output_dir", "resume_from_checkpoint", "overwrite_output_dir", "dry_run", "save_steps", "save_total_limit"),
    *("logging_samples", "report_to", "disable_tqdm", "eval_steps", "eval_num_samples", "eval_max_prompts"),
    *("dataset_test_split", "eval_dataset_name", "save_rollouts", "vllm_gpu_memory_utilization"),
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, or could not be written."""


def write_atomically(folder: Path, fill: Callable[[Path], object]) -> None:
    """Make `folder` by filling a temporary one beside it, with checksums, synced to the disk before it is renamed.

    Raises CheckpointError where that fails (a full disk); what was there before stays.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        fill(partial)
        sums = {path.name: _sha256(path) for path in sorted(partial.iterdir()) if path.is_file()}
        (partial / CHECKSUMS).write_text(json.dumps(sums, indent=1))
        for path in (*partial.iterdir(), partial):
            _sync(path)
        replaced = folder.with_name(f".{folder.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if folder.exists():
            folder.replace(replaced)
        partial.replace(folder)
        _sync(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except Exception as error:  # safetensors and torch have errors of their own for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        full = getattr(error, "errno", None) == errno.ENOSPC or any(
            words in str(error) for words in ("space left", "unexpected pos")
        )
        why = "the disk is full" if full else str(error)
        raise CheckpointError(f"{folder} could not be written: {why}; earlier checkpoints are unchanged") from error


def write_text(path: Path, text: str) -> None:
    """Write a file that is whole at any moment, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def problem(folder: Path) -> str | None:
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
    missing = {CONFIG, STATE, TENSORS, ROLLOUT} - sums.keys()
    return f"it lacks {', '.join(sorted(missing))}" if missing else None


def checkpoints(output: Path) -> list[Path]:
    """Folders checkpoint-N, the newest first."""
    found = [p for p in output.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def find_checkpoint(output: Path, wanted: str | None) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` names. 'auto': the newest sound one, damaged ones passed over aloud.

    Raises CheckpointError for a named one that is not sound.
    """
    if wanted is None:
        return None
    if wanted != "auto":
        why = problem(Path(wanted))
        if why:
            raise CheckpointError(f"resume_from_checkpoint={wanted}: {why}")
        return Path(wanted)
    for folder in checkpoints(output):
        why = problem(folder)
        if why is None:
            return folder
        print(f"{folder} is passed over: {why}", file=sys.stderr)
    return None


def check_same_run(path: Path, config: dict[str, Any]) -> None:
    """Raise CheckpointError where the options of a run, saved in the file `path`, differ from `config`."""
    try:
        saved = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} holds no options of a run: {error}") from None
    # A longer run changes no earlier step, unless the learning rate depends on the length.
    free = FREE | ({"max_steps"} if "constant" in str(config.get("lr_scheduler_type")) else set())
    changed = [
        f"{name}={config.get(name)!r} (was {saved.get(name)!r})"
        for name in sorted(saved.keys() | config.keys())
        if name not in free and saved.get(name) != config.get(name)
    ]
    if changed:
        raise CheckpointError(f"{path.parent} belongs to a run with other options: {', '.join(changed)}")


def prune(output: Path, limit: int | None, step: int) -> None:
    """Keep `limit` checkpoints up to the one of `step`; later ones are damaged: a run went on from an earlier one."""
    written = [folder for folder in checkpoints(output) if step_of(folder) <= step]
    for folder in written[limit or sys.maxsize :]:
        shutil.rmtree(folder, ignore_errors=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

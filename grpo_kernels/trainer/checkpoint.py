"""What changes from step to step; the output folder of a run; its checkpoints, which are verified before they are read,
and read without unpickling."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils import get_total_norm

from . import RunError, reason_of
from .adamw import is_low
from .arguments import TrainArguments, to_json
from .decoding import MIB
from .files import CHECKSUMS, checksums, discard, read_file
from .ranks import Ranks, whole
from .rollout import Completion

LOG, SAMPLES = "log.jsonl", "samples.jsonl"
CONFIG = "config.json"  # the options of the run in its output folder; in a checkpoint RUN, beside that of the model
RUN, STATE = "run.json", "state.pt"
OF_A_RUN = (LOG, SAMPLES, CONFIG, "summary.json", "report.html", "model")  # in an output folder
# What may differ between a checkpoint and the run that goes on from it.
FREE = {
    "output_dir", "resume_from_checkpoint", "dry_run", "save_steps", "save_total_limit", "logging_steps", "report_to",
    "eval_steps", "eval_num_samples", "eval_max_prompts", "correct_at", "dataset_test_split", "eval_dataset_name",
}  # fmt: skip


@dataclass
class Progress:
    """What changes from step to step beside weights and optimizer. Random numbers are none of it: each rollout has a
    stream of its own, made from the seed and its index.

    cursor: position in the order of the prompts. rollout: the one in use, of which `used` optimizer steps are made;
    rollout_numbers: its part of log.jsonl. log_sizes: of the files of RunLog, bytes, when this was saved.
    """

    beta: float
    step: int = 0
    cursor: int = 0
    rollout_index: int = 0
    used: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    evaluated_at: int | None = None
    held_out_reward: dict[str, float | None] = field(default_factory=dict)
    pass_at_1: dict[str, float | None] = field(default_factory=dict)
    rollout_numbers: dict[str, Any] = field(default_factory=dict)
    log_sizes: dict[str, int] = field(default_factory=dict)
    rollout: list[Completion] = field(default_factory=list)


def claim_folder(folder: Path, a: TrainArguments, num_processes: int) -> Path | None:
    """Returns the checkpoint to go on from, if any. Raises where the folder holds a run that these options do not
    continue."""
    requested, written, saved = a.resume_from_checkpoint, checkpoints(folder), folder / CONFIG
    checkpoint = find_checkpoint(folder, requested)
    continues = requested is not None and os.path.lexists(saved)
    if checkpoint is not None:  # a link in the folder, or a link to one in the folder, is one of the folder
        continues = folder.resolve() in (checkpoint.parent.resolve(), checkpoint.resolve().parent)
        saved = checkpoint / RUN
    existing = sorted(path.name for path in (*(folder / name for name in OF_A_RUN), *written) if os.path.lexists(path))
    if existing and not continues:
        raise ValueError(
            f"output_dir={folder} holds another run ({', '.join(existing[:3])} ...); expected a new folder, or "
            "--resume-from-checkpoint auto"
        )
    if checkpoint is not None or continues:
        check_same_run(saved, a, num_processes)
    if requested is not None and written and checkpoint is None:
        print(f"{folder} holds no sound checkpoint: the run begins at step 0", file=sys.stderr)
    return checkpoint


def check_same_start(folder: Path, checkpoint: Path | None, start_model: Path | None, ranks: Ranks) -> None:
    """Raises ValueError, on all ranks, where these do not find the same checkpoint in the folder of the run, or the
    start model of a run without a model: the first rank alone writes, and machines may have disks of their own."""
    found = "no checkpoint"
    if checkpoint is not None:
        found = f"{checkpoint.name} ({hashlib.sha256(read_file(checkpoint / CHECKSUMS)).hexdigest()[:8]})"
    elif start_model is not None:
        found = f"{start_model.name} {'there' if start_model.exists() else 'missing'}"
    views = ranks.gather([(found, platform.node())])
    for rank, (other, host) in enumerate(views):
        if other != views[0][0]:
            raise ValueError(
                f"output_dir={folder}: rank 0 on {views[0][1]} finds {views[0][0]}, rank {rank} on {host} {other}; "
                "expected a disk that all machines share, or a copy on each"
            )


def checkpoints(output: Path) -> list[Path]:
    """Returns the folders checkpoint-N, the newest first."""
    folders = [p for p in output.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted(folders, key=_step_of, reverse=True)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def prune(output: Path, limit: int | None, step: int) -> None:
    """Keeps `limit` checkpoints up to the one of `step`; later ones are damaged: a run went on from an earlier one. Of
    a link to another place the link goes."""
    written = [folder for folder in checkpoints(output) if _step_of(folder) <= step]
    for folder in written[limit or sys.maxsize :]:
        discard(folder)


def bytes_of_checkpoint(policy: Any, a: TrainArguments) -> int:
    """Returns bytes of weights (of an adapter the trained ones), AdamW's state and the reference policy; the rest is
    little."""
    size = 0
    for p in policy.parameters():
        if p.requires_grad:
            size += p.numel() * (p.itemsize * (1 + bool(a.beta)) + (12 if is_low(p) else 8))
        elif not a.use_peft:
            size += p.numel() * p.itemsize
    return size


def check_room(folder: Path, size: int) -> None:
    """Raises ValueError where a checkpoint of so many bytes has no room on the disk of a folder that may not be made
    yet."""
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    needed, free = size / MIB, shutil.disk_usage(parent).free / MIB
    if free < needed:
        sizes = f"a checkpoint takes {needed:,.1f} MiB, its disk has {free:,.1f} MiB left"
        raise ValueError(f"output_dir={folder}: {sizes}")


def find_checkpoint(output: Path, requested: str | None) -> Path | None:
    """Returns the checkpoint that `resume_from_checkpoint` names; None where there is none. 'auto': the newest sound
    one.

    Damaged ones are skipped with a warning. Raises RunError for a named one that is not sound.
    """
    named = [] if requested is None else [Path(requested).absolute()]
    for folder in checkpoints(output) if requested == "auto" else named:
        why = _problem(folder)
        if why is None:
            return folder
        if requested != "auto":
            raise RunError(f"resume_from_checkpoint={requested}: {why}")
        print(f"{folder} is skipped: {why}", file=sys.stderr)
    return None


def _problem(folder: Path) -> str | None:
    """Says why a folder is no sound checkpoint of this trainer; None where it is one."""
    if not folder.is_dir():
        return "there is no such folder"
    if not os.path.lexists(folder / CHECKSUMS):
        return "it holds no checksums.json: it was not written by grpo-kernels train"
    try:
        sums, actual = dict(json.loads(read_file(folder / CHECKSUMS))), checksums(folder)
        if missing := sums.keys() - actual.keys():
            return f"it has lost {', '.join(sorted(missing))}"
        if wrong := [name for name in sums if actual[name] != sums[name]]:
            return f"{', '.join(wrong)} is damaged: its checksum differs"
        if missing := {RUN, STATE} - sums.keys():
            return f"it lacks {', '.join(sorted(missing))}"
        state, _ = read_checkpoint(folder, mmap=True)
        held = state["reference"] or {}, *(state["optimizer"] or {"state": {}})["state"].values()
        files = ((path.name, load_file(path)) for path in sorted(folder.glob("*.safetensors")))
        for name, tensors in chain(((STATE, part) for part in held), files):
            if not math.isfinite(norm(x for x in tensors.values() if isinstance(x, Tensor))):
                return f"{name} has numbers that are not finite"
    except RunError as error:
        return str(error)
    except Exception as error:  # of many types: these are data, which may hold anything
        return reason_of(error)
    return None


def norm(tensors: Iterable[Tensor]) -> float:
    """Returns the Euclidean norm of all floating-point tensors: NaN or infinite where one of their numbers is, or is
    far beyond what a model computes with (1e19). Of tensors that FSDP2 shards it is a collective operation."""
    return float(whole(get_total_norm([x for x in tensors if x.is_floating_point() and x.numel()])))


def read_checkpoint(folder: Path, *, mmap: bool = False) -> tuple[dict[str, Any], Progress]:
    """Returns what STATE of a checkpoint holds: optimizer, scheduler, reference policy, and progress with the rollout
    in use.

    Raises RunError where it is not as `Run.save` writes it, whatever its checksum.
    """
    try:
        state = dict(torch.load(folder / STATE, map_location="cpu", weights_only=True, mmap=mmap))
        progress = Progress(**state["progress"])
        progress.rollout = [Completion(**values) for values in state["rollout"]]
        if state["scheduler"]["last_epoch"] != progress.step:
            raise ValueError("its schedule is at another step")
        if (state["optimizer"] is None) != (progress.step == 0):
            raise ValueError("its optimizer is that of another step")
    except Exception as error:  # of many types: these are data, which may hold anything
        reason = reason_of(error)[:300]  # torch's may be a page
        raise RunError(f"{STATE} is not as a run writes it: {reason}") from None
    return state, progress


def check_same_run(path: Path, a: TrainArguments, num_processes: int) -> None:
    """Raises RunError where the options of a run, saved in the file `path`, differ from these."""
    config = to_json(a, num_processes)
    try:
        saved = dict(json.loads(read_file(path)))
    except (ValueError, TypeError, OSError) as error:
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
            "; max_steps too, unless the schedule is constant: a new run may begin with "
            f"model_name_or_path={path.parent}" if "max_steps" not in free else ""
        )  # fmt: skip
        raise RunError(
            f"{path.parent} belongs to a run with other options: {', '.join(changed)}; expected the same{length}"
        )


def fingerprint_of_weights(lm: Any) -> str:
    """Returns a hash of the parameters that are not trained: of their names, types and shapes, and of the sums of the
    bits of their rows, which are exact in any order, and read as fast as memory is."""
    digest = hashlib.sha256()
    for name, tensor in lm.named_parameters():
        if not tensor.requires_grad:
            digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
            rows = tensor.detach().reshape(-1, max(1, *tensor.shape[-1:])).contiguous().view(torch.uint8)
            bits = rows.view(torch.int64) if rows.shape[1] % 8 == 0 else rows
            digest.update(bits.sum(-1, dtype=torch.int64).cpu().numpy().tobytes())
    return digest.hexdigest()


def check_state(checkpoint: Path, a: TrainArguments, inputs: dict[str, str]) -> None:
    """Raises RunError where a run of the same options cannot go on from the state in a checkpoint. inputs: fingerprints
    of what it does not hold, by "option=value"."""
    state, progress = read_checkpoint(checkpoint, mmap=True)
    for option, now in inputs.items():
        if dict(state.get("inputs", {})).get(option) != now:  # an earlier version has saved none
            what = "other prompts" if option.startswith("dataset_name") else "another model"
            raise RunError(f"{checkpoint} was written with {what}: {option} has changed since")
    if progress.step > a.max_steps:
        raise RunError(f"{checkpoint} is beyond max_steps={a.max_steps}; expected a later step")

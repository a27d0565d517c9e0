"""What changes from step to step, in memory and in a checkpoint."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from .accelerator import load_partition_states, partition_states, zero_stage
from .arguments import to_json
from .checkpoint import ROLLOUT, RUN, STATE, TENSORS, from_lines, prune, to_lines, write_atomically
from .data import fingerprint
from .rollout import Completion
from .run import Run


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


def save(made: Run, progress: Progress) -> None:
    """Write checkpoint-STEP; every rank calls it, the first one writes, and all raise where that fails."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, progress.log_sizes, stage = made.model_state(), made.log.sizes(), zero_stage(made.accelerator)
    tensors = {
        # torch makes a step with gradients of 0 where there was none, which AdamW would count.
        "optimizer": get_optimizer_state_dict(made.bare_policy, made.optimizer.optimizer, options=whole)
        if progress.step and not stage
        else None,
        "scheduler": made.scheduler.state_dict(),
        "reference": None if made.reference is None else made.reference.state_dict(),
    }
    state = {
        "progress": {name: value for name, value in vars(progress).items() if name != "rollout"},
        "prompts": fingerprint(made.prompts),
        "zero_stage": stage,
        **_environment(),
    }  # fmt: skip

    # DeepSpeed has no whole state of the optimizer: each rank writes its part, and the first puts them together.
    parts = {
        made.folder / f".optimizer-{i}.partial": f"optimizer-{i}.pt" for i in range(made.ranks.count if stage else 0)
    }

    def fill(folder: Path) -> None:
        made.write_model(folder, weights)
        for part, name in parts.items():
            part.replace(folder / name)
        torch.save(tensors, folder / TENSORS)
        (folder / STATE).write_text(json.dumps(state, indent=1))
        (folder / RUN).write_text(json.dumps(to_json(made.arguments, made.ranks.count), indent=1))
        # Columns and what functions gave to log_extra have done their work: rewards are known.
        (folder / ROLLOUT).write_text(to_lines([replace(c, columns={}, extra={}) for c in progress.rollout]))

    try:
        with made.ranks.raise_on_all():
            if stage:
                torch.save(partition_states(made.optimizer), list(parts)[made.ranks.index])
        with made.ranks.raise_on_all():
            if made.accelerator.is_main_process:
                write_atomically(made.folder / f"checkpoint-{progress.step}", fill)
                prune(made.folder, made.arguments.save_total_limit, progress.step)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)


def restore(made: Run) -> Progress:
    """The progress of `made.checkpoint`; its optimizer, scheduler and reference policy are loaded into `made`.

    The weights were read when the model was made.
    """
    folder = made.checkpoint
    assert folder is not None
    state = json.loads((folder / STATE).read_text())
    for name, now in _environment().items():
        if state[name] != now:
            print(f"{folder} was written with {name}={state[name]}, now {now}: results may differ", file=sys.stderr)
    tensors = torch.load(folder / TENSORS, map_location="cpu", weights_only=True)
    if tensors["optimizer"] is not None:
        options = StateDictOptions(full_state_dict=True, strict=False)  # a parameter without gradients has no state
        set_optimizer_state_dict(made.bare_policy, made.optimizer.optimizer, tensors["optimizer"], options=options)
    made.scheduler.load_state_dict(tensors["scheduler"])
    if zero_stage(made.accelerator):
        part = folder / f"optimizer-{made.ranks.index}.pt"
        load_partition_states(made.optimizer, torch.load(part, map_location="cpu", weights_only=True))
        for group, rate in zip(made.optimizer.param_groups, made.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
    if made.reference is not None:
        made.reference.load_state_dict(tensors["reference"])
    return Progress(**state["progress"], rollout=from_lines(folder / ROLLOUT))


def _environment() -> dict[str, Any]:
    """What results may depend on beside the options."""
    return {"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads()}

"""`grpo-kernels train --dry-run`: everything is checked, one step is made, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path

import torch
from accelerate.state import PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor

from ..benchmarks.machine import peak, restart_peak
from ..engine.memory import chunk_sizes
from .arguments import TrainArguments
from .run import Run, set_up
from .train import Trainer

MIB = 2**20
EAGER_COPIES = 3  # of the logits: log-softmax, its gradient and that of the logits are held at once


def dry_run(arguments: TrainArguments) -> int:
    """Set up, make one optimizer step, and say what it took; returns the exit status. Bad input raises ValueError."""
    PartialState(cpu=arguments.use_cpu)
    with tempfile.TemporaryDirectory() as folder:
        (shared,) = broadcast_object_list([folder])  # that of the first process
        scratch = dataclasses.replace(
            arguments, output_dir=str(Path(shared) / "run"), resume_from_checkpoint=None, save_rollouts=False,
            disable_tqdm=True,
        )  # fmt: skip
        made = set_up(scratch)
        try:
            return _report(made)
        finally:
            made.close()


def _report(made: Run) -> int:
    a, device, print = made.arguments, made.accelerator.device, made.accelerator.print
    print(
        f"model      {a.model_name_or_path or 'made for the arithmetic task'}, {made.ranks.count} processes, {device}"
    )
    print(f"data       {len(made.prompts):,} prompts, {len(made.held_out):,} held out")
    print(f"rewards    {', '.join(made.rewards.names) if made.rewards else 'those of the replayed rollouts'}")
    for name, size in estimate(made).items():
        print(f"memory     {size / MIB:10,.1f} MiB  {name}")
    before = restart_peak(device)
    trainer, begin = Trainer(made), time.perf_counter()
    made.log.start(0)
    trainer.collect()
    sampled = time.perf_counter()
    rollout = trainer.progress.rollout
    trainer.update()
    numbers = trainer.progress.rollout_numbers
    print(f"one step   rollout {sampled - begin:.2f} s, update {time.perf_counter() - sampled:.2f} s")
    if before is not None:
        print(f"memory     {(peak(device) - before) / MIB:10,.1f} MiB  more than before the step, at its peak")
    shown, text = rollout[0], made.sampler.text("", rollout[0].ids)
    print(f"prompt     {shown.prompt!r}\ncompletion {text!r}, reward {shown.reward}")
    for name, meaning in (
        ("zero_gradient_groups", "of the groups have equal rewards: nothing is learned from them"),
        ("completions/clipped_ratio", "of the completions do not end within max_completion_length"),
    ):
        print(f"note       {numbers[name]:.0%} {meaning}")
    return 0


def estimate(made: Run) -> dict[str, int]:
    """Bytes per component on this rank. Activations, which depend on the model's code, are not among them."""
    a = made.arguments
    parameters = [_local(p) for p in made.policy.parameters()]
    trained = [_local(p) for p in made.policy.parameters() if p.requires_grad]
    head = made.bare_policy.lm.get_output_embeddings().weight
    tokens = a.per_device_train_batch_size * a.max_completion_length
    rows = chunk_sizes(tokens, head.shape[0], torch.float32, head.dtype, made.accelerator.device, None).products
    logits = {
        "fused": rows * head.shape[0] * 4,
        "eager": EAGER_COPIES * tokens * head.shape[0] * 4,
    }
    other = "eager" if a.loss == "fused" else "fused"
    return {
        "parameters": sum(p.nbytes for p in parameters),
        "gradients": sum(p.nbytes for p in trained),
        "AdamW's two averages": 2 * sum(p.nbytes for p in trained),
        "reference policy": sum(p.nbytes for p in trained) if a.beta else 0,
        f"logits of the {a.loss} loss, at most (--loss {other}: {logits[other] / MIB:,.1f})": logits[a.loss],
    }


def _local(parameter: Tensor) -> Tensor:
    """This rank's part of a sharded parameter."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter

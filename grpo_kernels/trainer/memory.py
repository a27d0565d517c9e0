"""What to lower where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from . import RunError
from .arguments import TrainArguments

# Of allocators that raise RuntimeError: torch's for CPUs, cuBLAS, CUDA's runtime.
WORDS = ("DefaultCPUAllocator", "ALLOC_FAILED", "out of memory")


@contextmanager
def advice_on_memory(a: TrainArguments, phase: Callable[[], str]) -> Iterator[None]:
    """Make RunError, one sentence with the options to lower, of an allocation that fails within it.

    phase: what was going on, as the log names it; "set-up" before the first step.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        known = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in str(error) for word in WORDS)
        if not known:
            raise
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise RunError(f"out of memory ({phase()}): {reason[0]}; {_advice(a, phase())}") from error


def _advice(a: TrainArguments, phase: str) -> str:
    rows, peft = f"per_device_train_batch_size={a.per_device_train_batch_size}", [] if a.use_peft else ["use_peft"]
    at_once = a.per_device_generation_batch_size or a.rows_per_rollout(1)
    length = f"max_completion_length={a.max_completion_length}"
    if phase == "updates":
        checkpointing = [] if a.gradient_checkpointing or a.share_prompts else ["gradient_checkpointing"]
        further = " or ".join(checkpointing + peft)
        return (
            f"lower {rows} (with gradient_accumulation_steps={a.gradient_accumulation_steps} raised as much, steps "
            f"stay the same) or {length}{', or turn on ' + further if further else ''}"
        )
    if phase in ("sampling", "evaluation"):
        batch = f"per_device_generation_batch_size={at_once}"
        return f"lower {f'{rows} or vllm_gpu_memory_utilization' if a.use_vllm else batch} or {length}"
    if phase == "set-up":
        return f"a smaller model, fsdp over several GPUs{', or use_peft' if peft else ''} takes less"
    return "the rest of the machine's memory is taken"

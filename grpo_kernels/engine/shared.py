"""What the operators of the engine and fused_policy_loss have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def table_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for everything but float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_traced(hidden: Tensor) -> bool:
    """Whether torch.compile or a dispatch mode must see one operator instead of the operations inside it."""
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    return traced or type(hidden) not in (Tensor, torch.nn.Parameter)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph records these operations: then nothing may be read back to the host."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device) -> None:
    if is_capturing(device):
        raise ValueError("sparse_backward was given under capture of a CUDA graph; the number of entries is read")


def refuse_traced(**given: object) -> None:
    for name, x in given.items():
        if x is not None:
            raise ValueError(f"{name} is given to a call that is traced or compiled; it needs an eager one")


def requires_grad_flags(*inputs: Tensor | None) -> tuple[bool, ...]:
    """Which of them need gradients."""
    if not torch.is_grad_enabled():
        return (False,) * len(inputs)
    return tuple([x is not None and x.requires_grad for x in inputs])


def no_gradients(tensors: Sequence[Tensor | None]) -> list[None] | None:
    """What an operator's backward returns for this list: torch has a place for each entry if none of them is None."""
    return None if any(x is None for x in tensors) else [None] * len(tensors)

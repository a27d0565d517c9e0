"""Gradients that the forward pass has finished: how they wait for the backward, and how it hands them out.

The loss scale of float16 training (65,536 and more) arrives with the backward. Gradients rounded to float16 before
that would lose what the scale is there to save, so they wait in float32 and are rounded once, after the product with
grad_output. No factor is ever rounded to 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .backends import Backend

# The largest |d loss / d logit| that power_of_two_scale aims at, as an exponent of two. Entries of float16 gradients
# down to 2^-17 of it keep all their bits, and a ratio may reach 2^13 before one exceeds 65,504.
TARGET_EXPONENT = 3
PIECE_ELEMENTS = 2**24  # converted at a time, so that no second matrix of float32 is made


@dataclass(frozen=True)
class FinishedGradients:
    """What a forward pass leaves for its backward. Kept out of save_for_backward: hooks on saved tensors would move a
    (V, H) gradient to the host and back, and checkpointing would compute it twice.

    tensors: one per input, in `waiting_dtype` of its type, or None where not wanted. dtypes: of the inputs.
    scale: () float32, a power of two that every tensor holds as a factor, or None.
    """

    tensors: list[Tensor | None]
    dtypes: list[torch.dtype]
    backend: Backend
    scale: Tensor | None = None

    def without_scale(self) -> list[Tensor | None]:
        """In the types of the inputs: for a backward that computes them, whose grad_output they hold already."""
        if self.scale is None:
            return [None if x is None else x.to(t) for x, t in zip(self.tensors, self.dtypes, strict=True)]
        factor = 1 / self.scale
        return [None if x is None else times(x, factor, t) for x, t in zip(self.tensors, self.dtypes, strict=True)]


def waiting_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which the gradient of an input of `dtype` waits for the backward."""
    return torch.float32 if dtype == torch.float16 else dtype


def power_of_two_scale(largest: Tensor) -> Tensor:
    """() float32: the power of two that brings `largest` (), >= 0, near 2^TARGET_EXPONENT; 1 where that is 0 or NaN."""
    exponent = torch.frexp(largest.float()).exponent.clamp(-120, 120)
    scale = ((127 + TARGET_EXPONENT - exponent) << 23).to(torch.int32).view(torch.float32)  # the bits of a float32
    return torch.where((largest > 0) & largest.isfinite(), scale, 1.0)


def times(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x * factor () as a new tensor of `dtype`, rounded once: torch would round the factor to a 16-bit type of x."""
    if x.dtype.itemsize > 2 and dtype == x.dtype:
        return x * factor.to(x.dtype)
    if type(x) is not Tensor:  # a tracer plans memory by itself
        return (x.float() * factor).to(dtype)
    out = torch.empty_like(x, dtype=dtype)
    _write_product(x, factor, out)
    return out


def _write_product(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """out = x * factor in float32 or better, `out` may be x, piece by piece."""
    rows = max(1, PIECE_ELEMENTS * x.shape[0] // max(1, x.numel()))
    for source, target in zip(x.split(rows), out.split(rows), strict=True):
        target.copy_(source.to(torch.promote_types(source.dtype, torch.float32)) * factor)


def keeps_graph() -> bool:
    """Whether the backward in progress was asked to keep its graph for another one (retain_graph)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def deliver(saved: Tensor, factor: Tensor, backend: Backend, dtype: torch.dtype) -> Tensor:
    """The finished gradient times grad_output, in the type of its input.

    In place, a copy of a (V, H) gradient would double its memory; but not where the graph is kept for another backward,
    nor under a tracer (whose tensors are subclasses), which plans by itself. A factor of 1 costs nothing: a CPU looks
    at it here, the kernels of a GPU, which the host must not wait for, do so themselves.
    """
    if dtype != saved.dtype or type(saved) is not Tensor or keeps_graph():
        return times(saved, factor, dtype)
    if factor.device.type == "cpu" and factor.item() == 1.0:
        return saved
    if saved.is_contiguous():
        backend.scale(saved, factor)
    else:
        _write_product(saved, factor, saved)
    return saved


def deliver_once(ctx: Any, name: str, factor: Tensor) -> list[Tensor | None]:
    """`deliver` for `ctx.gradients` of an autograd.Function, which lets go of them unless the graph is kept."""
    gradients: FinishedGradients | None = ctx.gradients
    if gradients is None:
        raise RuntimeError(f"grpo_kernels.{name}: a second backward needs retain_graph=True in the first")
    if not keeps_graph():
        ctx.gradients = None
    if gradients.scale is not None:
        factor = factor / gradients.scale
    delivered: list[Tensor | None] = []
    for i, dtype in enumerate(gradients.dtypes):
        waiting = gradients.tensors[i]
        delivered.append(None if waiting is None else deliver(waiting, factor, gradients.backend, dtype))
        if ctx.gradients is None:
            gradients.tensors[i] = None  # one float32 gradient at a time is let go where float16 ones are handed out
    return delivered


def refuse_double_backward(name: str) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"grpo_kernels.{name} has no second derivative: backward ran with create_graph=True (double backward); "
            "use grpo_kernels.reference for that"
        )

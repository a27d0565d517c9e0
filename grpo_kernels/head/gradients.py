"""Gradients that the forward pass has finished: how they wait for the backward, and how it hands them out.

The loss scale of float16 training (65,536 and more) arrives with the backward. Gradients rounded to float16 before
that would lose what the scale is there to save, so they wait in float32 and are rounded once, after the product with
grad_output. No factor is ever rounded to 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks.plain import stored
from ..kernels.operations import Backend, KeptPairs

# Gradients of float16 logits are scaled so that the largest d loss / d logit of the call lies in [2^2, 2^3): those
# down to 2^-17 of it keep all their bits, and no sum over the vocabulary comes near 65,504.
TARGET_EXPONENT = 3
PIECE_ELEMENTS = 2**22  # converted at a time, so that no second whole matrix of float32 is made


class DeferredPairs(NamedTuple):
    """A share of the weight's gradient that is no matrix: dlogits (M,) of pairs of a token and an id, hidden (N, H)."""

    dlogits: Tensor
    hidden: Tensor
    version: int  # of hidden in the forward
    pairs: KeptPairs

    def add_to(self, total: Tensor, factor: Tensor, backend: Backend) -> None:
        """total (V, H) += factor * share, in the rows of the pairs' ids alone."""
        if self.hidden._version != self.version:
            raise RuntimeError("grpo_kernels: hidden was changed in place between the forward and the backward")
        backend.kept_dweight(self.dlogits * factor, self.hidden, self.pairs, total, add=True)


@dataclass
class PrecomputedGradients:
    """What a forward pass leaves for its backward.

    It is kept on the autograd node, not by save_for_backward: hooks on saved tensors (save_on_cpu) would move a (V, H)
    gradient to the host and back, and checkpointing would compute it a second time only to save it.

    tensors: one per input, in `stored_dtype` of its type, or None where not wanted. dtypes: of the inputs.
    scales: for each tensor the power of two that it holds as a factor, () float32, or None for 1.
    accumulate_into: the caller's float32 buffer that the weight's gradient, tensors[1] and `waiting`, is added to, if
        any.
    """

    tensors: list[Tensor | None]
    dtypes: Sequence[torch.dtype]
    backend: Backend
    scales: list[Tensor | None]
    accumulate_into: Tensor | None = None
    waiting: list[DeferredPairs] = field(default_factory=list)

    def without_scales(self) -> list[Tensor | None]:
        """The gradients in the types of the inputs, where no grad_output is left to come (fused_logps)."""
        waiting = zip(self.tensors, self.scales, self.dtypes, strict=True)
        return [None if x is None else scaled_copy(x, None if s is None else 1 / s, dtype) for x, s, dtype in waiting]


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which the gradient of an input of `dtype` is kept from the forward to the backward."""
    return torch.float32 if dtype == torch.float16 else dtype


def power_of_two_scale(largest: Tensor) -> Tensor:
    """() float32: the power of two that brings `largest` (), >= 0, into [2^(TARGET_EXPONENT - 1), 2^TARGET_EXPONENT).

    2^100 where `largest` is 0, which any other scale undercuts; 1 where it is infinite or NaN, as the gradient is then.
    """
    exponent = torch.frexp(largest.float()).exponent.clamp(-100, 100)
    exponent = torch.where(largest == 0, TARGET_EXPONENT - 100, exponent)
    scale = ((127 + TARGET_EXPONENT - exponent) << 23).to(torch.int32).view(torch.float32)  # the bits of a float32
    return torch.where(largest.isfinite(), scale, 1.0)


def scaled_copy(x: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x * factor () as a tensor of `dtype`, rounded once: torch would round the factor to a 16-bit type of x."""
    if factor is None:
        return x.to(dtype)
    if x.dtype.itemsize > 2 and dtype == x.dtype:
        return x * factor.to(x.dtype)
    if type(x) is not Tensor:  # a tracer plans memory by itself
        return (x.float() * factor).to(dtype)
    out = torch.empty_like(x, dtype=dtype)
    _write_product(x, factor, out)
    return out


def _write_product(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """out = x * factor in float32 or better; `out` may be x."""
    for source, target in zip(_pieces(x), _pieces(out), strict=True):
        target.copy_(source.to(torch.promote_types(source.dtype, torch.float32)) * factor)


def _pieces(x: Tensor) -> Iterator[Tensor]:
    """Views of a few rows each, whatever the strides of x."""
    matrices = x.unbind() if x.dim() == 3 else (x,)
    for matrix in matrices:
        yield from matrix.split(max(1, PIECE_ELEMENTS * matrix.shape[0] // max(1, matrix.numel())))


def add_scaled(total: Tensor, x: Tensor, factor: Tensor) -> None:
    """total += x * factor (), in float32, a few rows at a time."""
    for source, target in zip(_pieces(x), _pieces(total), strict=True):
        target.addcmul_(source.float(), factor.float())


def keeps_graph() -> bool:
    """Whether the backward in progress was asked to keep its graph for another one (retain_graph)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def scale_gradient(saved: Tensor, factor: Tensor, backend: Backend, dtype: torch.dtype) -> Tensor:
    """The finished gradient times grad_output, in the type of its input.

    In place, a copy of a (V, H) gradient would double its memory; but not where the graph is kept for another backward,
    nor under a tracer (whose tensors are subclasses), which plans by itself. A factor of 1 costs nothing: a CPU looks
    at it here, the kernels of a GPU, which the host must not wait for, do so themselves.
    """
    if dtype != saved.dtype or type(saved) is not Tensor or keeps_graph():
        return scaled_copy(saved, factor, dtype)
    if factor.device.type == "cpu" and factor.item() == 1.0:
        return saved
    if saved.is_contiguous():
        backend.scale(saved, factor)
    else:
        _write_product(saved, factor, saved)
    return saved


class _Precomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, compute, others, *inputs):
        """The others get what comes with the loss and has no gradient: autograd has nothing to do with it."""
        results, ctx.gradients = compute(*inputs)
        ctx.name = name
        others.extend(results[1:])
        return results[0]

    @staticmethod
    def backward(ctx, g_loss):
        refuse_double_backward(ctx.name)
        return None, None, None, *_scale_gradients(ctx, *stored(g_loss))


def compute_in_forward(
    name: str, compute: Callable[..., tuple[tuple[Tensor, ...], PrecomputedGradients]], *inputs: Tensor | None
) -> tuple[Tensor, ...]:
    """The results of `compute`, called under no_grad; the first, a loss, is differentiable in the inputs.

    name: of the public function, for errors.
    """
    others: list[Tensor] = []
    loss = _Precomputed.apply(name, compute, others, *inputs)
    return loss, *others


def _scale_gradients(ctx: Any, factor: Tensor) -> list[Tensor | None]:
    """`scale_gradient` for all of `ctx.gradients`, which it lets go of unless the graph is kept."""
    gradients: PrecomputedGradients | None = ctx.gradients
    if gradients is None:
        raise RuntimeError(f"grpo_kernels.{ctx.name}: a second backward needs retain_graph=True in the first")
    if not keeps_graph():
        ctx.gradients = None
    for share in gradients.waiting:
        assert gradients.accumulate_into is not None
        share.add_to(gradients.accumulate_into, factor, gradients.backend)
    scaled: list[Tensor | None] = []
    for i, (scale, dtype) in enumerate(zip(gradients.scales, gradients.dtypes, strict=True)):
        waiting = gradients.tensors[i]
        if waiting is None:
            scaled.append(None)
            continue
        here = factor if scale is None else factor / scale
        if i == 1 and gradients.accumulate_into is not None:
            add_scaled(gradients.accumulate_into, waiting, here)
            scaled.append(None)
        else:
            scaled.append(scale_gradient(waiting, here, gradients.backend, dtype))
        if ctx.gradients is None:
            gradients.tensors[i] = None  # what was converted need not wait for the others
    return scaled


def refuse_double_backward(name: str) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"grpo_kernels.{name} has no second derivative: backward ran with create_graph=True (double backward); "
            "use grpo_kernels.reference for that"
        )

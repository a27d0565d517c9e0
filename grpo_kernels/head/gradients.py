"""Gradients that the forward pass has finished: how they wait for the backward, and how the backward returns them.

The loss scale of float16 training (65,536 and more) arrives with the backward. Gradients rounded to float16 before that
would lose what the scale is there to save. So they wait in float32, and are rounded once, after the product with
grad_output. No factor is ever rounded to 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.operations import Backend
from .shared import refuse_when_traced

# Gradients of float16 logits are scaled so that the largest d loss / d logit of the call lies in [2^2, 2^3): those
# down to 2^-17 of it keep all their bits, and no sum over the vocabulary comes near 65,504.
TARGET_EXPONENT = 3
BLOCK_ELEMENTS = 2**22  # converted at a time, so that no second whole matrix of float32 is made


@dataclass
class PrecomputedGradients:
    """The gradients that a forward pass leaves for its backward.

    They are kept on the autograd node, not by save_for_backward: hooks on saved tensors (save_on_cpu) would move a (V,
        H) gradient to the host and back, and checkpointing would compute it a second time only to save it.

    tensors: one per input, in `held_dtype` of its type, or None where not wanted.
    dtypes: of the inputs.
    scales: for each tensor the power of two that it holds as a factor, () float32, or None for 1.
    accumulate_into: the caller's float32 buffer that the weight's gradient, tensors[1], is added to, if any.
    """

    tensors: list[Tensor | None]
    dtypes: Sequence[torch.dtype]
    backend: Backend
    scales: list[Tensor | None]
    accumulate_into: Tensor | None = None

    def without_scales(self) -> list[Tensor | None]:
        """Returns the gradients in the types of the inputs, for fused_logps, whose grad_output they include already."""
        gradients: list[Tensor | None] = []
        for x, scale, dtype in zip(self.tensors, self.scales, self.dtypes, strict=True):
            gradients.append(None if x is None else x.to(dtype) if scale is None else scaled_copy(x, 1 / scale, dtype))
        return gradients


def held_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which the gradient of an input of `dtype` waits for the backward."""
    return torch.float32 if dtype == torch.float16 else dtype


def power_of_two_scale(largest: Tensor) -> Tensor:
    """Returns the power of two, () float32, that brings `largest` () >= 0 into [2^(TARGET_EXPONENT - 1),
    2^TARGET_EXPONENT).

    It is 2^100 where `largest` is 0, more than any other scale; and 1 where `largest` is infinite or NaN, as the
    gradient is then.
    """
    exponent = torch.frexp(largest.float()).exponent.clamp(-100, 100)
    exponent = torch.where(largest == 0, TARGET_EXPONENT - 100, exponent)
    scale = ((127 + TARGET_EXPONENT - exponent) << 23).to(torch.int32).view(torch.float32)  # the bits of a float32
    return torch.where(largest.isfinite(), scale, 1.0)


def scaled_copy(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x * factor () in `dtype`, rounded once: torch itself would first round the factor to a 16-bit type of
    x."""
    fp32 = torch.promote_types(x.dtype, torch.float32)
    if dtype == fp32 or type(x) is not Tensor:  # a tracer, whose tensors are subclasses, plans memory by itself
        return (x.to(fp32) * factor).to(dtype)
    out = torch.empty_like(x, dtype=dtype)
    _write_product(x, factor, out)
    return out


def _write_product(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """Writes x * factor to `out`, computed in float32 or better; `out` may be x."""
    for source, target in zip(_blocks(x), _blocks(out), strict=True):
        target.copy_(source.to(torch.promote_types(source.dtype, torch.float32)) * factor)


def _blocks(x: Tensor) -> Iterator[Tensor]:
    """Yields views of a few rows each, whatever the strides of x."""
    matrices = x.unbind() if x.dim() == 3 else (x,)
    for matrix in matrices:
        yield from matrix.split(max(1, BLOCK_ELEMENTS * matrix.shape[0] // max(1, matrix.numel())))


class _Precomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, compute, others, *inputs):
        """Returns the loss, and adds to `others` the results that have no gradient, so that autograd does not see
        these."""
        results, ctx.gradients = compute(*inputs)
        ctx.name = name
        others.extend(results[1:])
        return results[0]

    @staticmethod
    def backward(ctx, g_loss):
        """Returns the gradients times grad_output, in the types of the inputs.

        It works in place: a copy of a (V, H) gradient would double its memory. It copies where the graph is kept for
            another backward (retain_graph), and under a tracer. A factor of 1 costs nothing: on a CPU it is read before
            the product; on a GPU, where the host must not wait, the kernel reads it.
        """
        refuse_double_backward(ctx.name)
        gradients: PrecomputedGradients | None = ctx.gradients
        if gradients is None:
            raise RuntimeError(f"grpo_kernels.{ctx.name}: a second backward needs retain_graph=True in the first")
        keeps_graph: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        if not keeps_graph:
            ctx.gradients = None
        g_loss, scaled = g_loss.resolve_neg(), []
        for i, (scale, dtype) in enumerate(zip(gradients.scales, gradients.dtypes, strict=True)):
            x, factor = gradients.tensors[i], g_loss if scale is None else g_loss / scale
            if x is None:
                pass
            elif i == 1 and gradients.accumulate_into is not None:
                for source, target in zip(_blocks(x), _blocks(gradients.accumulate_into), strict=True):
                    target.addcmul_(source.float(), factor.float())
                x = None
            elif dtype != x.dtype or type(x) is not Tensor or keeps_graph:
                x = scaled_copy(x, factor, dtype)
            elif factor.device.type != "cpu" or factor.item() != 1.0:
                if x.is_contiguous():
                    gradients.backend.scale(x, factor)
                else:
                    _write_product(x, factor, x)
            scaled.append(x)
            if not keeps_graph:
                gradients.tensors[i] = None  # what was converted need not wait for the others
        return None, None, None, *scaled


def compute_in_forward(
    name: str,
    compute: Callable[..., tuple[tuple[Tensor, ...], PrecomputedGradients]],
    first: Tensor,
    *inputs: Tensor | None,
) -> tuple[Tensor, ...]:
    """Returns the results of `compute`, called under no_grad; the first, a loss, is differentiable in the inputs.

    name: of the public function, for errors.
    """
    if not torch.compiler.is_compiling():  # which breaks the graph here
        refuse_when_traced(first, name, compute)  # kernels would take addresses of tensors that have none
    others: list[Tensor] = []
    loss = _Precomputed.apply(name, compute, others, first, *inputs)
    return loss, *others


def refuse_double_backward(name: str) -> None:
    """Raises RuntimeError where the backward runs with create_graph=True. name: of the public function."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"grpo_kernels.{name} has no second derivative: backward ran with create_graph=True (double backward); "
            "use grpo_kernels.reference for that"
        )

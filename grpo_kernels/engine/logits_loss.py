"""The loss from logits that the caller holds."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import get_backend
from ..config import GRPOConfig
from ..contract import TokenInputs
from .backward import FinishedGradients, refuse_double_backward, scale_saved_gradients
from .chunks import run
from .kept import make_token_mask
from .lm_head import GivenLogits
from .plan import make_plan
from .shared import is_capturing, table_dtype


class LogitsCall(NamedTuple):
    """What a call computes, besides the logits."""

    completion_ids: Tensor
    tokens: TokenInputs
    num_groups: int
    config: GRPOConfig
    backend: str
    wants_gradient: bool
    inplace: bool  # the gradient replaces the logits, if their memory allows it


def loss_from_logits(logits: Tensor, call: LogitsCall) -> tuple[Tensor, ...]:
    """(loss, logps, entropy, numbers of Sums) from logits (B, T, V) or (N, V); the loss is differentiable in them."""
    return _LossFromLogits.apply(logits, call)


class _LossFromLogits(torch.autograd.Function):
    """An autograd.Function, because a custom operator must not return the memory of its input."""

    @staticmethod
    def forward(ctx, logits, call):
        flat = logits.detach().reshape(-1, logits.shape[-1])
        reused = call.inplace and flat.data_ptr() == logits.data_ptr() and flat.stride(-1) == 1
        reused = reused and (flat.stride(0) >= flat.shape[1] or flat.shape[0] <= 1)  # rows that share memory cannot
        masked = call.tokens.kept_ids is not None  # logits of other ids become -inf
        if ((call.wants_gradient or masked) and not reused) or flat.stride(-1) != 1:
            flat = flat.clone(memory_format=torch.contiguous_format)
        results, gradients = _compute(flat, call)
        if gradients is not None:
            if reused:
                torch.autograd.graph.increment_version(logits)
            ctx.gradients = replace(gradients, tensors=[flat.view(logits.shape)])
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx, g_loss, *_):
        refuse_double_backward("grpo_loss_from_logits")
        gradient = None if g_loss is None else scale_saved_gradients(ctx, "grpo_loss_from_logits", g_loss)[0]
        return gradient, None


def _compute(logits: Tensor, call: LogitsCall) -> tuple[tuple[Tensor, ...], FinishedGradients | None]:
    """(results, gradient); where one is wanted it replaces `logits` (N, V).

    Every row is computed where it lies: rows that cannot have a gradient get zeros, and nothing is copied.
    """
    tokens, ids, gradients, kernels = call.tokens, call.completion_ids, call.wants_gradient, get_backend(call.backend)
    with torch.no_grad():
        dtype = table_dtype(logits.dtype)
        plan = make_plan(tokens, ids, call.config, call.num_groups, kernels, static_shapes=True, dtype=dtype)
        if gradients and tokens.completion_mask is not None:
            _clear_rows(logits, ~plan.tokens.scored)  # padding may hold NaN, which no coefficient of 0 would hide
        head = GivenLogits(logits)
        mask = make_token_mask(
            tokens.kept_ids, tokens.kept_counts, logits.shape[1], is_static=is_capturing(logits.device)
        )
        values, sums = run(head, plan, kernels, gradients=gradients, static_shapes=True, sampling_mask=mask)
        columns = values.columns.view(len(values.columns), *ids.shape)
    results = sums.loss.clone(), columns[0], columns[1], sums.numbers
    if not gradients:
        return results, None
    return results, FinishedGradients([logits], [logits.dtype], kernels, [head.gradient_scale])


def _clear_rows(x: Tensor, chosen: Tensor) -> None:
    """Zero these rows (N,) bool of x (N, V). Only they are written, except under capture, where all are."""
    if is_capturing(x.device):
        x.masked_fill_(chosen[:, None], 0.0)
    else:
        x.index_fill_(0, chosen.nonzero().squeeze(1), 0.0)

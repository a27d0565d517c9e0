"""The loss from logits that the caller holds.

Every row is computed where it lies: rows that cannot have a gradient get zeros, and nothing is copied.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..backends import get_backend
from .backward import FinishedGradients, finish_in_forward
from .lm_head import GivenLogits
from .loss_op import LossCall, loss_of_head
from .plan import make_plan
from .shared import is_capturing, table_dtype


def loss_from_logits(logits: Tensor, call: LossCall, *, inplace: bool) -> tuple[Tensor, ...]:
    """(loss, logps, entropy, numbers of Sums) from logits (B, T, V) or (N, V); the loss is differentiable in them.

    inplace: the gradient replaces the logits, if their memory allows it.
    """
    return finish_in_forward("grpo_loss_from_logits", partial(_compute, call=call, inplace=inplace), logits)


def _compute(logits: Tensor, *, call: LossCall, inplace: bool) -> tuple[tuple[Tensor, ...], FinishedGradients]:
    tokens, kernels = call.tokens, get_backend(call.backend)
    flat = logits.detach().reshape(-1, logits.shape[-1])
    reused = inplace and flat.data_ptr() == logits.data_ptr() and flat.stride(-1) == 1
    reused = reused and (flat.stride(0) >= flat.shape[1] or flat.shape[0] <= 1)  # rows that share memory cannot
    writes = any(call.wants) or tokens.kept_ids is not None  # gradients; -inf for ids that were not kept
    if (writes and not reused) or flat.stride(-1) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    dtype = table_dtype(logits.dtype)
    plan = make_plan(
        tokens, call.completion_ids, call.config, call.num_groups, kernels, static_shapes=True, dtype=dtype
    )
    if any(call.wants) and tokens.completion_mask is not None:
        _clear_rows(flat, ~plan.tokens.scored)  # padding may hold NaN, which no coefficient of 0 would hide
    head = GivenLogits(flat)
    results = loss_of_head(head, plan, kernels, call, static_shapes=True)
    if any(call.wants) and reused:
        torch.autograd.graph.increment_version(logits)
    gradient = flat.view(logits.shape) if any(call.wants) else None
    return results, FinishedGradients([gradient], [logits.dtype], kernels, [head.gradient_scale])


def _clear_rows(x: Tensor, chosen: Tensor) -> None:
    """Zero these rows (N,) bool of x (N, V). Only they are written, except under capture, where all are."""
    if is_capturing(x.device):
        x.masked_fill_(chosen[:, None], 0.0)
    else:
        x.index_fill_(0, chosen.nonzero().squeeze(1), 0.0)

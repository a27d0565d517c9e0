"""The loss from logits that the caller holds."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import GRPOConfig
from ..contract import Backend, TokenInputs
from .backward import FinishedGradients
from .chunks import run
from .kept import make_token_mask
from .lm_head import GivenLogits
from .plan import make_plan
from .shared import is_capturing, table_dtype


def loss_over_logits(
    logits: Tensor,
    completion_ids: Tensor,
    tokens: TokenInputs,
    num_groups: int,
    config: GRPOConfig,
    kernels: Backend,
    *,
    gradients: bool,
) -> tuple[tuple[Tensor, ...], FinishedGradients | None]:
    """((loss, logps, entropy, numbers of Sums), gradient); with `gradients` it replaces `logits` (N, V).

    Every row is computed where it lies: rows that cannot have a gradient get zeros, and nothing is copied.
    """
    with torch.no_grad():
        dtype = table_dtype(logits.dtype)
        plan = make_plan(tokens, completion_ids, config, num_groups, kernels, static_shapes=True, dtype=dtype)
        if gradients and tokens.completion_mask is not None:
            _clear_rows(logits, ~plan.tokens.scored)  # padding may hold NaN, which no coefficient of 0 would hide
        head = GivenLogits(logits)
        mask = make_token_mask(
            tokens.kept_ids, tokens.kept_counts, logits.shape[1], is_static=is_capturing(logits.device)
        )
        values, sums = run(head, plan, kernels, gradients=gradients, static_shapes=True, sampling_mask=mask)
        columns = values.columns.view(len(values.columns), *completion_ids.shape)
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

"""Custom operators that are O(N) or less: the loss from log-probabilities, statistics of rewards.

No `from __future__ import annotations` here, and Optional[X] for X | None: torch infers schemas from the annotations.
"""
# ruff: noqa: UP045

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from ..backends import get_backend
from ..checks.arguments import check_offsets, check_rewards_finite, check_token_values
from ..config import config_from_key
from ..contract import Sums, TokenInputs
from ..names import FIELD, MASK_SUMS
from .backward import refuse_double_backward, times
from .chunks import evaluate
from .plan import make_plan
from .shared import table_dtype


def empty_sums(like, per_token, tokens, num_groups, dtype):
    """Numbers of Sums without values, for tokens (B, T), or (N,) with offsets."""
    inputs = TokenInputs(*tokens)
    sequences = per_token.shape[0] if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
    size = Sums.size(sequences, num_groups) + (0 if inputs.kept_ids is None else len(MASK_SUMS))
    return like.new_empty(size, dtype=dtype)


@torch.library.custom_op("grpo_kernels::policy_loss", mutates_args=())
def policy_loss(
    logps: Tensor,
    entropy: Tensor,
    tokens: Sequence[Optional[Tensor]],
    num_groups: int,
    config_key: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, numbers of Sums, d loss / d logps, d loss / d entropy), all O(N) and in float32 or better."""
    inputs, config = TokenInputs(*tokens), config_from_key(config_key)  # type: ignore[arg-type]
    check_offsets(inputs.cu_seqlens, logps.numel())
    check_token_values(inputs)
    with torch.no_grad():
        kernels, dtype = get_backend(backend), table_dtype(logps.dtype)
        plan = make_plan(inputs, logps, config, num_groups, kernels, static_shapes=True, dtype=dtype)
        planned, values = plan.tokens, plan.tokens.values
        for known, given in ((values.logp, logps), (values.entropy, entropy)):
            known.copy_(torch.where(planned.scored, given.reshape(-1), 0.0))
        evaluate(plan, kernels)
        sums = kernels.sums(planned, plan.params, plan.group_index, plan.num_groups)
        weight_entropy = planned.table[FIELD["weight_entropy"]]
        gradients = (torch.where(planned.scored, g, 0.0) for g in (values.g_logp, weight_entropy))
    return sums.loss.clone(), sums.numbers, *(g.view(logps.shape) for g in gradients)


@policy_loss.register_fake
def _(logps, entropy, tokens, num_groups, config_key, backend):
    f, dtype = logps.new_empty, table_dtype(logps.dtype)
    numbers = empty_sums(logps, logps, tokens, num_groups, dtype)
    return f((), dtype=dtype), numbers, f(logps.shape, dtype=dtype), f(logps.shape, dtype=dtype)


def _save_policy(ctx, inputs, output):
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype
    ctx.save_for_backward(*output[-2:])


def _policy_gradients(ctx, g_loss, *_):
    refuse_double_backward("grpo_loss_from_logps")
    gradients: list[Optional[Tensor]] = [None, None]
    if g_loss is not None:
        gradients = [times(g, g_loss, dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
    return (*gradients, *[None] * 4)


policy_loss.register_autograd(_policy_gradients, setup_context=_save_policy)


@torch.library.custom_op("grpo_kernels::group_statistics", mutates_args=())
def group_statistics(
    rewards: Tensor,
    group_index: Tensor,
    num_groups: int,
    scale: str,
    baseline: str,
    ddof: int,
    eps: float,
    nan_is_no_verdict: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(advantages (B,), mean (num_groups,), std (num_groups,))."""
    check_rewards_finite("rewards", rewards, nan_is_no_verdict=nan_is_no_verdict)
    rewards, group_index = rewards.contiguous(), group_index.contiguous()
    return get_backend(backend).group_statistics(rewards, group_index, num_groups, scale, baseline, ddof, eps)


@group_statistics.register_fake
def _(rewards, group_index, num_groups, scale, baseline, ddof, eps, nan_is_no_verdict, backend):
    return rewards.new_empty(rewards.shape), rewards.new_empty(num_groups), rewards.new_empty(num_groups)

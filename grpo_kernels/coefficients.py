"""From log-probabilities to every token's gradient: ratio level, sequence weights and masks, objective. O(N) torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .params import FIELD
from .plan import Plan, sequence_slope

if TYPE_CHECKING:
    from .backends import Backend


class Coefficients(NamedTuple):
    """(N,) each: loss value and KL of a token before its weight, its log-ratio, and d loss / d logp."""

    value: Tensor
    kl: Tensor
    log_ratio: Tensor
    g_logp: Tensor


def evaluate(plan: Plan, backend: Backend, logps: Tensor, entropy: Tensor) -> Coefficients:
    """The objective of all tokens of `plan` at these log-probabilities and entropies (N,)."""
    table = plan.table
    token_log_ratio = logps - plan.field("base") if plan.params.has_base else torch.zeros_like(logps)
    token_log_ratio = torch.where(plan.mask, token_log_ratio, 0.0)
    if plan.whole_sequences:
        table = table.clone()
        table[FIELD["multiplier"]] *= _sequence_multiplier(plan, token_log_ratio, logps)
    log_ratio, slope = _raise_to_level(plan, token_log_ratio)
    value, d_ratio, d_direct, kl = backend.objective(log_ratio, logps, entropy, table, plan.params)
    g_logp = plan.field("weight_direct") * d_direct
    if plan.config.importance_sampling_level == "token" or not plan.whole_sequences:
        g_logp = g_logp + plan.field("weight_ratio") * d_ratio
    else:
        total = plan.sequence_sum(torch.where(plan.mask, plan.field("weight_direct") * d_ratio, 0.0))
        g_logp = g_logp + slope * plan.per_token(total)
    return Coefficients(value, kl, log_ratio, torch.where(plan.mask, g_logp, 0.0))


def _raise_to_level(plan: Plan, token_log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """(log-ratio that the surrogate sees (N,), its derivative by the token's own logp (N,))."""
    config = plan.config
    if config.importance_sampling_level == "token":
        return token_log_ratio, torch.ones_like(token_log_ratio)
    slope = sequence_slope(plan)
    if config.surrogate == "gmpo":
        # Sign-aware clamp of every token before the mean: it only ever makes the objective smaller.
        clamped = token_log_ratio.clamp(-config.epsilon_low, config.epsilon_high)
        positive = plan.field("advantage") > 0
        narrow = torch.where(positive, token_log_ratio.minimum(clamped), token_log_ratio.maximum(clamped))
        slope = torch.where(narrow == token_log_ratio, slope, 0.0)
        token_log_ratio = narrow
    total = plan.sequence_sum(torch.where(plan.mask, token_log_ratio, 0.0))
    if config.importance_sampling_level == "sequence":
        total = total / plan.lengths.clamp(min=1)
    return plan.per_token(total), slope


def _sequence_multiplier(plan: Plan, token_log_ratio: Tensor, logps: Tensor) -> Tensor:
    """(N,) what the whole sequence contributes to the multiplier of its tokens: VESPO's phi, the off-policy mask."""
    config, advantage = plan.config, plan.field("advantage")
    multiplier = torch.ones_like(logps)
    if config.surrogate == "vespo":
        multiplier = vespo_phi(plan, token_log_ratio)
    if config.off_policy_mask_threshold is not None:
        rollout = plan.field("rollout")
        if plan.has_rollout:  # tokens that the sampling engine could not score carry no evidence
            drift = torch.where(rollout.isnan(), 0.0, rollout - logps)
        else:
            drift = -token_log_ratio
        mean_drift = plan.sequence_sum(torch.where(plan.mask, drift, 0.0)) / plan.lengths.clamp(min=1)
        keep = (advantage >= 0) | (plan.per_token(mean_drift) <= config.off_policy_mask_threshold)
        multiplier = torch.where(keep, multiplier, 0.0)
    return multiplier


def vespo_phi(plan: Plan, token_log_ratio: Tensor) -> Tensor:
    """(N,) phi(w) = exp(lambda + k ln w - lambda w), w the weight of the whole sequence, rollout weight included."""
    config, low = plan.config, math.log(1e-8)
    log_w = token_log_ratio.clamp(-20.0, 20.0) + plan.field("rollout_weight").log().clamp(low, 20.0)
    log_w = plan.per_token(plan.sequence_sum(torch.where(plan.mask, log_w, 0.0)).clamp(low, 20.0))
    positive = plan.field("advantage") >= 0
    k = torch.full_like(log_w, config.vespo_k_neg).masked_fill(positive, config.vespo_k_pos)
    lam = torch.full_like(log_w, config.vespo_lambda_neg).masked_fill(positive, config.vespo_lambda_pos)
    return (lam + k * log_w - lam * log_w.exp()).exp()

"""GRPOLossOutput: what a loss call returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from . import metrics
from .config import GRPOConfig
from .inputs import LossInputs


@dataclass(frozen=True)
class GRPOLossOutput:
    """What a loss call returns; everything but `loss` is detached.

    loss: scalar, differentiable. logps, entropy: shape of completion_ids, float32, nats; 0 where masked or not scored.
    advantages: as used, (S,) or (B, T) or (N,).
    metrics: name -> scalar tensor. metric_sums: name -> (sum, count) tensors, to be added over ranks and micro-batches.
    groups: name -> (num_groups,) tensor, when groups are given: loss (its share; they add up to `loss`), kl,
        clip_ratio, tokens, and from rewards reward_mean and reward_std. Groups named by group_ids come in ascending
        order of their id.
    """

    loss: Tensor
    logps: Tensor
    entropy: Tensor | None
    advantages: Tensor
    metrics: dict[str, Tensor]
    metric_sums: dict[str, tuple[Tensor, Tensor]]
    groups: dict[str, Tensor] = field(default_factory=dict)


def assemble(
    config: GRPOConfig,
    inputs: LossInputs,
    loss: Tensor,
    logps: Tensor,
    entropy: Tensor | None,
    group_sums: Tensor,
    totals: Tensor,
    extrema: Tensor,
) -> GRPOLossOutput:
    """Name what the kernels summed: group_sums (num_groups, K), totals (K,), extrema (3,)."""
    tokens = inputs.tokens
    has_kl = tokens.ref_logps is not None and config.kl_estimator != "none"
    values, sums = metrics.collect(
        config,
        totals,
        extrema,
        has_kl=has_kl,
        has_rollout=tokens.rollout_logps is not None,
        has_weights=tokens.rollout_weights is not None,
    )
    groups: dict[str, Tensor] = {}
    if inputs.num_groups:
        groups = metrics.group_table(config, group_sums, has_kl=has_kl)
    if inputs.reward_statistics is not None:
        mean, std = inputs.reward_statistics
        groups |= {"reward_mean": mean, "reward_std": std}
        equal = (std == 0).to(totals.dtype)
        sums["equal_reward_groups"] = (equal.sum(), totals.new_full((), inputs.num_groups))
        values["equal_reward_groups"] = equal.mean()
    return GRPOLossOutput(loss, logps.detach(), entropy, tokens.advantages, values, sums, groups)

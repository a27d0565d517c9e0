"""GRPOLossOutput: what a loss call returns; its metrics from a backend's sums, without a host synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .config import GRPOConfig
from .contract import Sums, TokenInputs
from .inputs import LossInputs
from .names import COLUMN, COLUMNS


@dataclass(frozen=True, eq=False, repr=False)  # a dataclass, because DDP and FSDP search its fields for the loss
class GRPOLossOutput:
    """What a loss call returns; everything but `loss` is detached.

    loss: scalar, differentiable. logps, entropy: shape of completion_ids, float32 (float64 from float64), nats; 0 where
        masked or not scored. advantages: as used, in the shape that they were given in, (S,) from rewards. None of them
        shares the memory of an input; `advantages` is copied whenever it is asked for.

    These are tensors, computed at first access from the sums that the kernels return:

    metrics: name -> scalar; with an entropy bonus there is policy_loss, the loss without it. metric_sums: name ->
        (sum, count), to be added over ranks and micro-batches.
    sequences: name -> (S,): loss (the sequence's share: the shares add up to `loss`), tokens, and the mean of each
        metric over the sequence's tokens (0 for a sequence without tokens).
    groups: name -> (num_groups,), when groups are given: loss (the group's share), kl, clip_ratio, tokens, and from
        rewards reward_mean and reward_std. Groups of group_ids are in ascending order of their id.
    """

    loss: Tensor
    logps: Tensor
    entropy: Tensor | None
    _config: GRPOConfig
    _inputs: LossInputs
    _numbers: Tensor  # of Sums
    _named: dict[str, Any] = field(init=False, default_factory=dict)  # functools.cached_property has a lock

    def __repr__(self) -> str:
        return f"GRPOLossOutput(loss={self.loss}, logps of {tuple(self.logps.shape)})"

    @property
    def _sums(self) -> Sums:
        return self._inputs.sums(self._numbers)

    @property
    def advantages(self) -> Tensor:
        advantages = self._inputs.tokens.advantages.detach().clone()
        return advantages if self._inputs.reward_statistics is None else advantages.view(-1)

    @property
    def metrics(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._once("metrics", self._name_metrics)
        return found

    def _name_metrics(self) -> dict[str, Tensor]:
        found = means(self._sums, **self._collected)
        if self._config.has_entropy_bonus:
            found["policy_loss"] = policy_loss(self._sums, self._config, self._inputs.tokens)
        if self._inputs.reward_statistics is not None:
            found["equal_reward_groups"] = self._equal_reward_groups.mean()
        for name, (total, count) in mask_sums_and_counts(self._sums).items():
            found[name] = total / count.clamp(min=1)
        return found

    @property
    def metric_sums(self) -> dict[str, tuple[Tensor, Tensor]]:
        found: dict[str, tuple[Tensor, Tensor]] = self._once("metric_sums", self._name_metric_sums)
        return found

    def _name_metric_sums(self) -> dict[str, tuple[Tensor, Tensor]]:
        found = sums_and_counts(self._sums.totals, **self._collected)
        found |= mask_sums_and_counts(self._sums)
        if self._inputs.reward_statistics is not None:
            equal = self._equal_reward_groups
            found["equal_reward_groups"] = equal.sum(), equal.new_full((), self._inputs.num_groups)
        return found

    @property
    def sequences(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._once("sequences", self._name_sequences)
        return found

    def _name_sequences(self) -> dict[str, Tensor]:
        return sequence_table(self._sums.sequences, **self._collected)

    @property
    def groups(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._once("groups", self._name_groups)
        return found

    def _name_groups(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if self._inputs.num_groups:
            found = group_table(self._config, self._sums.groups, has_kl=self._collected["has_kl"])
        if self._inputs.reward_statistics is not None:
            mean, std = self._inputs.reward_statistics
            found["reward_mean"], found["reward_std"] = mean.clone(), std.clone()
        return found

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._named:
            with torch.inference_mode(False):  # what is kept outlives the mode of the first caller
                self._named[name] = make()
        return self._named[name]

    @property
    def _collected(self) -> dict[str, Any]:
        tokens = self._inputs.tokens
        return {
            "config": self._config,
            "has_kl": tokens.ref_logps is not None and self._config.kl_estimator != "none",
            "has_rollout": tokens.rollout_logps is not None,
            "has_weights": tokens.rollout_weights is not None,
        }

    @property
    def _equal_reward_groups(self) -> Tensor:
        """(num_groups,) 1 where all rewards are equal, so that the group has no gradient."""
        if self._inputs.reward_statistics is None:
            raise AttributeError("no rewards were given")
        _, std = self._inputs.reward_statistics
        return (std == 0).to(self._sums.totals.dtype)


# metric -> (column of the sum, column of the count). Across ranks: add sums and counts, then divide.
MEANS = {
    "entropy": ("entropy", "tokens"),
    "ratio/mean": ("ratio", "tokens"),
    "approx_kl": ("approx_kl", "tokens"),
    "zero_gradient": ("zero_gradient", "tokens"),
}
KL_MEANS = {"kl": ("kl", "tokens")}
CLIP_MEANS = {
    "clip_ratio/low": ("clip_low", "tokens"),
    "clip_ratio/high": ("clip_high", "tokens"),
}
CISPO_MEANS = {"cispo_clip_ratio": ("cispo_clip", "tokens")}
ROLLOUT_MEANS = {"rollout_mismatch/mean": ("mismatch", "mismatch_count")}
WEIGHT_MEANS = {
    "rollout_weight/mean": ("rollout_weight", "tokens"),
    "rollout_weight/mean_square": ("rollout_weight_sq", "tokens"),
}
_CLIPPING_SURROGATES = ("clip", "cispo_two_sided")


def _chosen(config: GRPOConfig, *, has_kl: bool, has_rollout: bool, has_weights: bool) -> dict[str, tuple[str, str]]:
    """metric -> (column of the sum, column of the count), for the metrics that this call has."""
    chosen = dict(MEANS)
    if has_kl:
        chosen |= KL_MEANS
    if config.surrogate in _CLIPPING_SURROGATES:
        chosen |= CLIP_MEANS
    if config.surrogate == "cispo":
        chosen |= CISPO_MEANS
    if has_rollout:
        chosen |= ROLLOUT_MEANS
    if has_weights:
        chosen |= WEIGHT_MEANS
    return chosen


def mask_sums_and_counts(sums: Sums) -> dict[str, tuple[Tensor, Tensor]]:
    """Of tokens with a sampling mask: how often the sampled id had to be added to the kept ones; and, over tokens whose
    logits were computed over the whole vocabulary, the probability mass of the kept ids (0 where there were none)."""
    if sums.mask is None:
        return {}
    tokens, added, mass, dense = sums.mask.clone().unbind()
    return {"sampling_mask/added": (added, tokens), "sampling_mask/kept_mass": (mass, dense)}


def sums_and_counts(totals: Tensor, config: GRPOConfig, **given: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """metric -> (sum, count) from totals (K,)."""
    column = dict(zip(COLUMNS, totals.unbind(), strict=True))
    # Copies, so that a caller may add the sums of other ranks in place.
    found = {
        name: (column[top].clone(), column[bottom].clone()) for name, (top, bottom) in _chosen(config, **given).items()
    }
    if config.surrogate in _CLIPPING_SURROGATES:
        found["clip_ratio/region"] = column["clip_low"] + column["clip_high"], column["tokens"].clone()
    return found


def means(sums: Sums, config: GRPOConfig, **given: bool) -> dict[str, Tensor]:
    """metric -> scalar."""
    found = _means(sums.totals, config, **given)
    found["ratio/min"], found["ratio/max"] = sums.extrema[0].clone(), sums.extrema[1].clone()
    if given["has_rollout"]:
        found["rollout_mismatch/max"] = sums.extrema[2].clone()
    if given["has_weights"]:  # effective sample size of the importance weights, as a share of the tokens
        mean_square = found["rollout_weight/mean_square"]
        # 0, not NaN, where every weight is 0 or there is no token
        found["rollout_ess"] = found["rollout_weight/mean"] ** 2 / torch.where(mean_square == 0, 1, mean_square)
    return found


def policy_loss(sums: Sums, config: GRPOConfig, tokens: TokenInputs) -> Tensor:
    """() the loss without its entropy bonus, whose weight is the same for all tokens."""
    column = dict(zip(COLUMNS, sums.totals.unbind(), strict=True))
    count = column["tokens"].clamp(min=1)
    coefficient = config.entropy_coef if tokens.entropy_coef is None else tokens.entropy_coef
    if tokens.entropy_normalizer is not None:
        return sums.loss + coefficient * column["entropy"] / tokens.entropy_normalizer
    bonus = coefficient * column["entropy"] / count
    if tokens.normalizer is None:
        return sums.loss + bonus
    if config.aggregation not in ("token_mean", "num_items"):
        count = count.new_full((), sums.num_sequences * (config.max_completion_length or 1))
    return sums.loss + bonus * count / tokens.normalizer


def sequence_table(sums: Tensor, config: GRPOConfig, **given: bool) -> dict[str, Tensor]:
    """Per sequence (S,): its share of the loss (they add up to it), its tokens, the mean of each metric over them."""
    own = {name: sums[:, COLUMN[name]].clone() for name in ("loss", "tokens")}
    return own | _means(sums, config, **given)


def _means(sums: Tensor, config: GRPOConfig, **given: bool) -> dict[str, Tensor]:
    """metric -> mean from sums (..., K)."""
    chosen = _chosen(config, **given)
    count = {bottom: sums[..., COLUMN[bottom]].clamp(min=1) for bottom in {bottom for _, bottom in chosen.values()}}
    mean = {bottom: dict(zip(COLUMNS, (sums / n.unsqueeze(-1)).unbind(-1), strict=True)) for bottom, n in count.items()}
    found = {name: mean[bottom][top] for name, (top, bottom) in chosen.items()}
    if config.surrogate in _CLIPPING_SURROGATES:
        clipped = sums[..., COLUMN["clip_low"]] + sums[..., COLUMN["clip_high"]]
        found["clip_ratio/region"] = clipped / count["tokens"]
    return found


def group_table(config: GRPOConfig, group_sums: Tensor, *, has_kl: bool) -> dict[str, Tensor]:
    """Per group (num_groups,): its share of the loss (they add up to it), means of kl and clip ratio, its tokens."""
    tokens = group_sums[:, COLUMN["tokens"]].clone()
    count = tokens.clamp(min=1)
    groups = {"loss": group_sums[:, COLUMN["loss"]].clone(), "tokens": tokens}
    if has_kl:
        groups["kl"] = group_sums[:, COLUMN["kl"]] / count
    clipped = group_sums[:, COLUMN["clip_low"]] + group_sums[:, COLUMN["clip_high"]]
    if config.surrogate == "cispo":
        clipped = group_sums[:, COLUMN["cispo_clip"]]
    groups["clip_ratio"] = clipped / count
    return groups

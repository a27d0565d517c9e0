"""Metrics from a backend's sums: names, numerators, denominators. Tensors only, never a host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import GRPOConfig
from .contract import Sums, TokenInputs
from .names import COLUMN, COLUMNS

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

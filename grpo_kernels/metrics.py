"""Metrics from a backend's sums: names, numerators, denominators. Tensors only, never a host synchronisation."""

from __future__ import annotations

from torch import Tensor

from .config import GRPOConfig
from .params import COLUMN, COLUMNS

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


def collect(
    config: GRPOConfig, totals: Tensor, extrema: Tensor, *, has_kl: bool, has_rollout: bool, has_weights: bool
) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """(metrics, metric_sums) from totals (K,) and extrema (3,) = ratio min, ratio max, mismatch max."""
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
    column = dict(zip(COLUMNS, totals.unbind(), strict=True))
    count = {bottom: column[bottom].clamp(min=1) for bottom in {bottom for _, bottom in chosen.values()}}
    mean = {bottom: dict(zip(COLUMNS, (totals / n).unbind(), strict=True)) for bottom, n in count.items()}
    sums = {name: (column[top], column[bottom]) for name, (top, bottom) in chosen.items()}
    metrics = {name: mean[bottom][top] for name, (top, bottom) in chosen.items()}
    if config.surrogate in _CLIPPING_SURROGATES:
        clipped = column["clip_low"] + column["clip_high"]
        sums["clip_ratio/region"] = clipped, column["tokens"]
        metrics["clip_ratio/region"] = clipped / count["tokens"]
    metrics["ratio/min"], metrics["ratio/max"] = extrema[0], extrema[1]
    if has_rollout:
        metrics["rollout_mismatch/max"] = extrema[2]
    if has_weights:  # effective sample size of the importance weights, as a share of the tokens
        metrics["rollout_ess"] = metrics["rollout_weight/mean"] ** 2 / metrics["rollout_weight/mean_square"]
    return metrics, sums


def group_table(config: GRPOConfig, group_sums: Tensor, *, has_kl: bool) -> dict[str, Tensor]:
    """Per group (num_groups,): its share of the loss (they add up to it), means of kl and clip ratio, its tokens."""
    tokens = group_sums[:, COLUMN["tokens"]]
    count = tokens.clamp(min=1)
    groups = {"loss": group_sums[:, COLUMN["loss"]], "tokens": tokens}
    if has_kl:
        groups["kl"] = group_sums[:, COLUMN["kl"]] / count
    clipped = group_sums[:, COLUMN["clip_low"]] + group_sums[:, COLUMN["clip_high"]]
    if config.surrogate == "cispo":
        clipped = group_sums[:, COLUMN["cispo_clip"]]
    groups["clip_ratio"] = clipped / count
    return groups

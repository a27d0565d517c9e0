"""GRPOLossOutput: what a loss call returns; its metrics from a backend's sums, without a host synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .contract import Sums
from .inputs import LossInputs
from .names import COLUMNS


@dataclass(frozen=True, eq=False, repr=False)  # a dataclass, because DDP and FSDP search its fields for the loss
class GRPOLossOutput:
    """What a loss call returns; everything but `loss` is detached.

    loss: scalar, differentiable. logps, entropy: shape of completion_ids, float32 (float64 from float64), nats; 0 where
        masked or not scored. divergence: likewise, to the teacher's distribution; None without a teacher.
        advantages: as used, in the shape that they were given in, (S,) from rewards. None of them
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
    _inputs: LossInputs
    _numbers: Tensor  # of Sums
    divergence: Tensor | None = None
    _computed: dict[str, Any] = field(init=False, default_factory=dict)  # functools.cached_property has a lock

    def __repr__(self) -> str:
        return f"GRPOLossOutput(loss={self.loss}, logps of {tuple(self.logps.shape)})"

    @property
    def advantages(self) -> Tensor:
        advantages = self._inputs.tokens.advantages.detach().clone()
        return advantages if self._inputs.reward_statistics is None else advantages.view(-1)

    @property
    def metrics(self) -> dict[str, Tensor]:
        return self._once("metrics", _metrics)

    @property
    def metric_sums(self) -> dict[str, tuple[Tensor, Tensor]]:
        return self._once("metric_sums", _metric_sums)

    @property
    def sequences(self) -> dict[str, Tensor]:
        return self._once("sequences", _sequences)

    @property
    def groups(self) -> dict[str, Tensor]:
        return self._once("groups", _groups)

    def _once(self, name: str, compute: Callable[[LossInputs, Sums], Any]) -> Any:
        if name not in self._computed:
            with torch.inference_mode(False):  # the results outlive the mode of the first caller
                self._computed[name] = compute(self._inputs, self._inputs.sums(self._numbers))
        return self._computed[name]


# metric -> (column of the sum, column of the count, what a call must have). Across ranks: add both, then divide.
_QUOTIENTS = {
    "entropy": ("entropy", "tokens", "tokens"),
    "ratio/mean": ("ratio", "tokens", "tokens"),
    "approx_kl": ("approx_kl", "tokens", "tokens"),
    "zero_gradient": ("zero_gradient", "tokens", "tokens"),
    "kl": ("kl", "tokens", "reference"),
    "clip_ratio/low": ("clip_low", "tokens", "clipping"),
    "clip_ratio/high": ("clip_high", "tokens", "clipping"),
    "cispo_clip_ratio": ("cispo_clip", "tokens", "cap"),
    "rollout_mismatch/mean": ("mismatch", "mismatch_count", "rollout"),
    "rollout_weight/mean": ("rollout_weight", "tokens", "weights"),
    "rollout_weight/mean_square": ("rollout_weight_sq", "tokens", "weights"),
    "divergence": ("divergence", "tokens", "teacher"),
}
_CLIPPING_SURROGATES = ("clip", "cispo_two_sided", "cispo_mask", "cispo_unified")


def _present(inputs: LossInputs) -> dict[str, bool]:
    """What this call has of what metrics need."""
    config, tokens = inputs.config, inputs.tokens
    return {
        "tokens": True,
        "reference": tokens.ref_logps is not None and config.kl_estimator != "none",
        "clipping": config.surrogate in _CLIPPING_SURROGATES,
        "cap": config.surrogate == "cispo",
        "rollout": tokens.rollout_logps is not None,
        "weights": tokens.rollout_weights is not None,
        "teacher": config.distill_coef != 0.0,
    }


def _columns(sums: Tensor) -> dict[str, Tensor]:
    """The columns of sums (..., K) by name; views."""
    return dict(zip(COLUMNS, sums.unbind(-1), strict=True))


def _pairs(inputs: LossInputs, column: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """metric -> (sum, count) of the metrics that this call has, from columns of one shape."""
    present = _present(inputs)
    found = {name: (column[top], column[bottom]) for name, (top, bottom, need) in _QUOTIENTS.items() if present[need]}
    if present["clipping"]:
        found["clip_ratio/region"] = column["clip_low"] + column["clip_high"], column["tokens"]
    return found


def _divide(pairs: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """name -> sum / count, 0 where there is nothing to count."""
    totals, counts = (torch.stack(x) for x in zip(*pairs.values(), strict=True))
    return dict(zip(pairs, (totals / counts.clamp(min=1)).unbind(), strict=True))


def _all_pairs(inputs: LossInputs, sums: Sums) -> dict[str, tuple[Tensor, Tensor]]:
    """metric -> (sum, count) of the batch; views."""
    column = _columns(sums.totals)
    found = _pairs(inputs, column)
    if sums.mask is not None:
        # How often the sampled id had to be added to the ids of a sampling mask; and the probability mass of the kept
        # ids, which only tokens have whose other logits were computed: NaN unless all with a mask are such.
        tokens, added, mass, dense = sums.mask.unbind()
        mass = torch.where(dense == tokens, mass, torch.nan)
        found |= {"sampling_mask/added": (added, tokens), "sampling_mask/kept_mass": (mass, tokens)}
    if sums.sparse is not None:
        # Of tokens with a gradient: entries of d loss / d logits that are left; whether they took products instead.
        pairs, dense, tokens = sums.sparse.unbind()
        found |= {"sparse/kept": (pairs, tokens), "sparse/dense": (dense, tokens)}
    if sums.teacher_mass is not None:  # the probability that a teacher of K ids gives them
        found["divergence/mass"] = sums.teacher_mass, column["tokens"]
    return found


def _equal_reward_groups(inputs: LossInputs, sums: Sums) -> Tensor | None:
    """(num_groups,) 1 where all rewards are equal, so that the group has no gradient; None without rewards."""
    if inputs.reward_statistics is None:
        return None
    _, std = inputs.reward_statistics
    return (std == 0).to(sums.totals.dtype)


def _metric_sums(inputs: LossInputs, sums: Sums) -> dict[str, tuple[Tensor, Tensor]]:
    """metric -> (sum, count): copies, so that a caller may add the sums of other ranks in place."""
    found = {name: (total.clone(), count.clone()) for name, (total, count) in _all_pairs(inputs, sums).items()}
    equal = _equal_reward_groups(inputs, sums)
    if equal is not None:
        found["equal_reward_groups"] = equal.sum(), equal.new_full((), inputs.num_groups)
    return found


def _metrics(inputs: LossInputs, sums: Sums) -> dict[str, Tensor]:
    """metric -> scalar."""
    found, column = _divide(_all_pairs(inputs, sums)), _columns(sums.totals)
    # Like the means, 0 where there is nothing to look at.
    counts = torch.stack([column[name] for name in ("tokens", "tokens", "mismatch_count")])
    ratio_min, ratio_max, mismatch_max = torch.where(counts > 0, sums.extrema, 0.0).unbind()
    found["ratio/min"], found["ratio/max"] = ratio_min, ratio_max
    if "rollout_mismatch/mean" in found:
        found["rollout_mismatch/max"] = mismatch_max
    if "rollout_weight/mean" in found:  # effective sample size of the importance weights, as a share of the tokens
        mean_square = found["rollout_weight/mean_square"]
        # 0, not NaN, where every weight is 0 or there is no token
        found["rollout_ess"] = found["rollout_weight/mean"] ** 2 / torch.where(mean_square == 0, 1, mean_square)
    if inputs.config.has_entropy_bonus:
        found["policy_loss"] = sums.loss + _entropy_bonus(inputs, sums)
    equal = _equal_reward_groups(inputs, sums)
    if equal is not None:
        found["equal_reward_groups"] = equal.mean()
    return found


def _entropy_bonus(inputs: LossInputs, sums: Sums) -> Tensor:
    """() what the loss has less for the entropy."""
    config, tokens, column = inputs.config, inputs.tokens, _columns(sums.totals)
    if config.entropy_kept_only:
        return sums.bonus
    coefficient = config.entropy_coef if tokens.entropy_coef is None else tokens.entropy_coef
    count = column["tokens"].clamp(min=1)
    own: Any = count  # the denominator of the aggregation, which `normalizer` replaces
    if config.aggregation not in ("token_mean", "num_items"):
        own = max(sums.num_sequences, 1) * (config.max_completion_length or 1)
    if config.entropy_aggregation == "loss":  # the sum of w H, w being the weights of the aggregation
        sequence = _columns(sums.sequences)
        entropy = sequence["entropy"]
        if config.aggregation == "seq_mean":
            entropy = entropy / sequence["tokens"].clamp(min=1)
        return coefficient * (entropy.sum() / (own if tokens.normalizer is None else tokens.normalizer))
    bonus = coefficient * column["entropy"]
    if tokens.entropy_normalizer is not None:
        return bonus / tokens.entropy_normalizer
    bonus = bonus / count
    return bonus if tokens.normalizer is None else bonus * own / tokens.normalizer


def _sequences(inputs: LossInputs, sums: Sums) -> dict[str, Tensor]:
    """(S,) each: the sequence's share of the loss, its tokens, the mean of each metric over them."""
    column = _columns(sums.sequences)
    return {name: column[name].clone() for name in ("loss", "tokens")} | _divide(_pairs(inputs, column))


def _groups(inputs: LossInputs, sums: Sums) -> dict[str, Tensor]:
    """(num_groups,) each: the group's share of the loss, its tokens, means of kl and clip ratio, of the rewards."""
    if not inputs.num_groups:
        return {}
    present, column = _present(inputs), _columns(sums.groups)
    count = column["tokens"].clamp(min=1)
    found = {name: column[name].clone() for name in ("loss", "tokens")}
    if present["reference"]:
        found["kl"] = column["kl"] / count
    clipped = column["cispo_clip"] if present["cap"] else column["clip_low"] + column["clip_high"]
    found["clip_ratio"] = clipped / count
    if inputs.reward_statistics is not None:
        mean, std = inputs.reward_statistics
        found["reward_mean"], found["reward_std"] = mean.clone(), std.clone()
    return found

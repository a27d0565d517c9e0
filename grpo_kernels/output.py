"""GRPOLossOutput: what a loss call returns; its metrics from a backend's sums, without a host synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .contract import Sums
from .inputs import LossInputs
from .names import COLUMN, COLUMNS


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
        found: dict[str, Tensor] = self._once("metrics", _metrics)
        return found

    @property
    def metric_sums(self) -> dict[str, tuple[Tensor, Tensor]]:
        found: dict[str, tuple[Tensor, Tensor]] = self._once("metric_sums", _metric_sums)
        return found

    @property
    def sequences(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._once("sequences", _sequences)
        return found

    @property
    def groups(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._once("groups", _groups)
        return found

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


def _quotients(inputs: LossInputs) -> dict[str, tuple[str, str]]:
    """metric -> (column of the sum, column of the count), for the metrics that this call has."""
    present = _present(inputs)
    return {name: (top, bottom) for name, (top, bottom, need) in _QUOTIENTS.items() if present[need]}


def _columns(sums: Tensor) -> dict[str, Tensor]:
    """The columns of sums (..., K) by name; views."""
    return dict(zip(COLUMNS, sums.unbind(-1), strict=True))


def _means(inputs: LossInputs, sums: Tensor) -> dict[str, Tensor]:
    """metric -> mean from sums (..., K)."""
    quotients = _quotients(inputs)
    count = {bottom: sums[..., COLUMN[bottom]].clamp(min=1) for _, bottom in quotients.values()}
    mean = {bottom: _columns(sums / n.unsqueeze(-1)) for bottom, n in count.items()}
    found = {name: mean[bottom][top] for name, (top, bottom) in quotients.items()}
    if "clip_ratio/low" in found:
        clipped = sums[..., COLUMN["clip_low"]] + sums[..., COLUMN["clip_high"]]
        found["clip_ratio/region"] = clipped / count["tokens"]
    return found


def _mask_sums(sums: Sums) -> dict[str, tuple[Tensor, Tensor]]:
    """How often the sampled id had to be added to the ids of a sampling mask; and, over tokens whose logits were
    computed over the whole vocabulary, the probability mass of the kept ids (0 where there were none)."""
    if sums.mask is None:
        return {}
    tokens, added, mass, dense = sums.mask.clone().unbind()
    return {"sampling_mask/added": (added, tokens), "sampling_mask/kept_mass": (mass, dense)}


def _sparse_sums(sums: Sums) -> dict[str, tuple[Tensor, Tensor]]:
    """Of tokens with a gradient: entries of d loss / d logits that are left; whether they took products instead."""
    if sums.sparse is None:
        return {}
    pairs, dense, tokens = sums.sparse.clone().unbind()
    return {"sparse/kept": (pairs, tokens), "sparse/dense": (dense, tokens.clone())}


def _teacher_sums(sums: Sums) -> dict[str, tuple[Tensor, Tensor]]:
    """The probability that a teacher of K ids gives them."""
    if sums.teacher_mass is None:
        return {}
    return {"divergence/mass": (sums.teacher_mass.clone(), sums.totals[COLUMN["tokens"]].clone())}


def _equal_reward_groups(inputs: LossInputs, sums: Sums) -> Tensor | None:
    """(num_groups,) 1 where all rewards are equal, so that the group has no gradient; None without rewards."""
    if inputs.reward_statistics is None:
        return None
    _, std = inputs.reward_statistics
    return (std == 0).to(sums.totals.dtype)


def _metric_sums(inputs: LossInputs, sums: Sums) -> dict[str, tuple[Tensor, Tensor]]:
    """metric -> (sum, count): copies, so that a caller may add the sums of other ranks in place."""
    column = _columns(sums.totals)
    found = {name: (column[top].clone(), column[bottom].clone()) for name, (top, bottom) in _quotients(inputs).items()}
    if "clip_ratio/low" in found:
        found["clip_ratio/region"] = column["clip_low"] + column["clip_high"], column["tokens"].clone()
    found |= _mask_sums(sums) | _sparse_sums(sums) | _teacher_sums(sums)
    equal = _equal_reward_groups(inputs, sums)
    if equal is not None:
        found["equal_reward_groups"] = equal.sum(), equal.new_full((), inputs.num_groups)
    return found


def _metrics(inputs: LossInputs, sums: Sums) -> dict[str, Tensor]:
    """metric -> scalar."""
    found = _means(inputs, sums.totals)
    found["ratio/min"], found["ratio/max"] = sums.extrema[0].clone(), sums.extrema[1].clone()
    if "rollout_mismatch/mean" in found:
        found["rollout_mismatch/max"] = sums.extrema[2].clone()
    if "rollout_weight/mean" in found:  # effective sample size of the importance weights, as a share of the tokens
        mean_square = found["rollout_weight/mean_square"]
        # 0, not NaN, where every weight is 0 or there is no token
        found["rollout_ess"] = found["rollout_weight/mean"] ** 2 / torch.where(mean_square == 0, 1, mean_square)
    if inputs.config.has_entropy_bonus:
        found["policy_loss"] = _policy_loss(inputs, sums)
    equal = _equal_reward_groups(inputs, sums)
    if equal is not None:
        found["equal_reward_groups"] = equal.mean()
    others = _mask_sums(sums) | _sparse_sums(sums) | _teacher_sums(sums)
    return found | {name: total / count.clamp(min=1) for name, (total, count) in others.items()}


def _policy_loss(inputs: LossInputs, sums: Sums) -> Tensor:
    """() the loss without its entropy bonus."""
    config, tokens, column = inputs.config, inputs.tokens, _columns(sums.totals)
    count = column["tokens"].clamp(min=1)
    coefficient = config.entropy_coef if tokens.entropy_coef is None else tokens.entropy_coef
    if config.entropy_kept_only:
        return sums.loss + sums.bonus
    if config.entropy_aggregation == "loss":
        return sums.loss + coefficient * _aggregated_entropy(inputs, sums)
    bonus = coefficient * column["entropy"]
    if tokens.entropy_normalizer is not None:
        return sums.loss + bonus / tokens.entropy_normalizer
    bonus = bonus / count
    if tokens.normalizer is None:
        return sums.loss + bonus
    if config.aggregation not in ("token_mean", "num_items"):
        count = count.new_full((), sums.num_sequences * (config.max_completion_length or 1))
    return sums.loss + bonus * count / tokens.normalizer


def _aggregated_entropy(inputs: LossInputs, sums: Sums) -> Tensor:
    """() sum of w H, w being the weights of the aggregation."""
    config, normalizer = inputs.config, inputs.tokens.normalizer
    sequences, count = _columns(sums.sequences), sums.totals[COLUMN["tokens"]].clamp(min=1)
    entropy = sequences["entropy"]
    if config.aggregation == "seq_mean":
        entropy = entropy / sequences["tokens"].clamp(min=1)
    if normalizer is not None:
        return entropy.sum() / normalizer
    if config.aggregation in ("token_mean", "num_items"):
        return entropy.sum() / count
    return entropy.sum() / (sums.num_sequences * (config.max_completion_length or 1))


def _sequences(inputs: LossInputs, sums: Sums) -> dict[str, Tensor]:
    """(S,) each: the sequence's share of the loss, its tokens, the mean of each metric over them."""
    own = {name: sums.sequences[:, COLUMN[name]].clone() for name in ("loss", "tokens")}
    return own | _means(inputs, sums.sequences)


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

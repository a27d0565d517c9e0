"""What is measured of a batch: sums over its scored tokens, and quotients of them. Computed when they are asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.fused_objective import COLUMNS, Sums
from ..loss_config import LossConfig
from .loss import clamp_ratio, weighted
from .rollout import derived_metrics, rollout_sums, sequences_of
from .sequences import segment_sums
from .surrogates import SURROGATE_RULES
from .tokens import TokenInputs, rules_of

# Sums over scored tokens with a sampling mask. The last two: of those that took the dense path (head/mask_paths.py),
# for which alone the mass is known.
MASK_SUMS = ("tokens", "added", "dense_kept_mass", "dense_tokens")
# With sparse_backward: pairs of a token and an id, tokens that took products instead, tokens with a gradient.
SPARSE_SUMS = ("pairs", "dense", "tokens")


@dataclass  # no NamedTuple, whose properties torch.compile of torch 2.8 cannot follow
class Batch:
    """Checked inputs of a loss; groups (0 where there are none); (mean, std) of the rewards per group."""

    tokens: TokenInputs
    config: LossConfig
    backend: str
    shape: torch.Size  # of the tokens, (B, T) or (N,)
    num_sequences: int
    num_groups: int = 0
    reward_statistics: list[Tensor] | None = None
    per_sequence: bool = False  # advantages and rollout weights were given with one value for each sequence
    advantages: Tensor | None = None  # as they were given, or computed from rewards

    @property
    def has_teacher(self) -> bool:
        return bool(self.config.distill_coef != 0.0)

    @property
    def record_fields(self) -> tuple[str, ...]:
        """Returns the names of the fields that GRPOLoss.value_and_metrics returns."""
        inputs, rules = self.tokens, rules_of(self.tokens, self.config, self.per_sequence, self.has_teacher)
        present = {
            "scored": inputs.completion_mask is not None or not (self.config.score_inactive or rules.all_have_gradient),
            "kl": rules.has_kl,
            "old": rules.has_old,
            "rollout": inputs.rollout_logps is not None,
            "rollout_weight": inputs.rollout_weights is not None,
            "divergence": self.has_teacher,
            "dentropy": rules.has_entropy,
        }
        always = ("logp", "entropy", "share", "log_ratio", "dlogp", "advantage")
        return *always, *(name for name, there in present.items() if there)

    def measured_shape(self, *, is_fused: bool) -> tuple[int, ...]:
        """Returns the shape of what GRPOLoss.value_and_metrics returns for metrics; is_fused: from the fused
        operation."""
        if is_fused:
            return (Sums.length(self.num_sequences, self.num_groups),)
        return len(self.record_fields), math.prod(self.shape)  # numel() would make a number of a symbol

    @property
    def others(self) -> dict[str, int]:
        """Returns how many numbers a call has besides those of its tokens, by what they belong to."""
        config, tokens = self.config, self.tokens
        present = {
            "mask": (tokens.allowed_ids is not None) * len(MASK_SUMS),
            "sparse": (config.sparse_backward is not None) * len(SPARSE_SUMS),
        }
        return {name: count for name, count in present.items() if count}


def column_sums(batch: Batch, record: Tensor) -> Sums:
    """Adds up the record of a call."""
    config, inputs = batch.config, batch.tokens
    field = dict(zip(batch.record_fields, record, strict=True))
    logp, advantage, zero = field["logp"], field["advantage"], record.new_zeros(record.shape[1])
    one = zero + 1
    ratio = clamp_ratio(config, field["log_ratio"]).value
    bounded = ratio if config.delta is None else ratio.clamp(max=config.delta)
    low, high, cap = config.epsilon_low, config.epsilon_high, zero
    clip_low = clip_high = zero
    if SURROGATE_RULES[config.surrogate].clips:
        clip_low, clip_high = (bounded < 1 - low) & (advantage < 0), (bounded > 1 + high) & (advantage > 0)
    elif config.surrogate == "cispo":
        cap = (bounded > high) & (advantage > 0)
    old = field.get("old", logp)
    if "old" in field:
        old = torch.where(old == torch.inf, logp, old)
    known = mismatch = zero
    if "rollout" in field:
        # Of the old policy, or where the ratio divides by the rollout of the current one.
        policy = logp if SURROGATE_RULES[config.surrogate].divides_by_rollout else old
        known = ~field["rollout"].isnan()
        mismatch = torch.where(known, (policy - field["rollout"]).abs(), 0.0)
    weight = field.get("rollout_weight", one)
    has_gradient = field["dlogp"] != 0
    if "dentropy" in field:
        has_gradient = has_gradient | (field["dentropy"] != 0)
    columns = {
        "loss": field["share"], "tokens": one, "kl": field.get("kl", zero), "entropy": field["entropy"], "ratio": ratio,
        "clip_low": clip_low, "clip_high": clip_high, "cispo_clip": cap, "approx_kl": old - logp, "mismatch": mismatch,
        "mismatch_count": known, "rollout_weight": weight, "rollout_weight_sq": weight**2,
        # with a teacher every scored token has a gradient, that of the divergence
        "zero_gradient": zero if batch.has_teacher else ~has_gradient, "divergence": field.get("divergence", zero),
    }  # fmt: skip
    matrix = torch.stack([columns[name].to(logp.dtype) for name in COLUMNS], 1)
    scored = None
    if "scored" in field:
        scored = field["scored"] != 0
        matrix = torch.where(scored[:, None], matrix, 0.0)
    sequences = sequences_of(batch.shape, inputs.cu_seqlens, record.device).sum(matrix)
    groups = matrix.new_zeros(0, len(COLUMNS))
    if inputs.group_index is not None:
        index, order = inputs.group_index.sort(stable=True)
        offsets = torch.searchsorted(index, torch.arange(batch.num_groups + 1, device=index.device))
        groups = segment_sums(sequences[order], offsets, sequences.dtype)
    return Sums(sequences, groups, sequences.sum(0), _extrema(ratio, mismatch, known, scored))


def _extrema(ratio: Tensor, mismatch: Tensor, known: Tensor, scored: Tensor | None) -> Tensor:
    """Returns the extrema (3,); infinite where nothing is measured."""
    if ratio.numel() == 0:
        return ratio.new_tensor([torch.inf, -torch.inf, -torch.inf])
    counted = known.bool() if scored is None else known.bool() & scored
    low, high = ratio, ratio
    if scored is not None:
        low, high = torch.where(scored, ratio, torch.inf), torch.where(scored, ratio, -torch.inf)
    return torch.stack([low.min(), high.max(), torch.where(counted, mismatch, -torch.inf).max()])


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


class Measured:
    """The sums of a call under the names of its metrics. others (M,): see Batch.others, with a teacher of K ids the
    probability of these behind them."""

    def __init__(self, batch: Batch, measured: Tensor, others: Tensor) -> None:
        """Adds up what a call measured: the record (fields, N), or the sums in one row."""
        self.batch = batch
        config, tokens = batch.config, batch.tokens
        if measured.dim() == 1:
            self.sums = Sums.of(measured, batch.num_sequences)
        else:
            self.sums = column_sums(batch, measured)
            field = dict(zip(batch.record_fields, measured, strict=True))
            if "dentropy" in field:  # what the loss has less for the entropy
                self.bonus = -weighted(field["dentropy"], field["entropy"]).sum()
        self.present = {
            "tokens": True,
            "reference": tokens.ref_logps is not None and config.kl_estimator != "none",
            "clipping": SURROGATE_RULES[config.surrogate].clips,
            "cap": config.surrogate == "cispo",
            "rollout": tokens.rollout_logps is not None,
            "weights": tokens.rollout_weights is not None,
            "teacher": batch.has_teacher,
        }
        sizes = batch.others if len(others) else {}  # a loss of log-probabilities has none
        parts = others.split([*sizes.values(), len(others) - sum(sizes.values())])
        self.others = dict(zip([*sizes, "teacher_mass"], parts, strict=True))
        totals = self.sums.totals
        self.of_rollout, self.rollout_extrema = rollout_sums(tokens, batch.shape, totals.device, totals.dtype)

    def pairs(self, sums: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns metric -> (sum, count) of the metrics that this call has, from sums (..., K); views."""
        column = _columns(sums)
        pairs = {
            name: (column[top], column[bottom])
            for name, (top, bottom, need) in _QUOTIENTS.items()
            if self.present[need]
        }
        if self.present["clipping"]:
            pairs["clip_ratio/region"] = column["clip_low"] + column["clip_high"], column["tokens"]
        return pairs

    def all_pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns metric -> (sum, count) of the batch; views."""
        all_pairs, others = self.pairs(self.sums.totals) | self.of_rollout, self.others
        if "mask" in others:
            # How often the sampled id had to be added to the ids of a sampling mask; and the probability mass of the
            # kept ids, which only tokens have whose other logits were computed: NaN unless all with a mask are such.
            tokens, added, mass, dense = others["mask"].unbind()
            mass = torch.where(dense == tokens, mass, torch.nan)
            all_pairs |= {"sampling_mask/added": (added, tokens), "sampling_mask/kept_mass": (mass, tokens)}
        if "sparse" in others:
            # Of tokens with a gradient: entries of d loss / d logits that are left; whether they took products instead.
            pairs, dense, tokens = others["sparse"].unbind()
            all_pairs |= {"sparse/kept": (pairs, tokens), "sparse/dense": (dense, tokens)}
        if len(others["teacher_mass"]):  # the probability that a teacher of K ids gives them
            all_pairs["divergence/mass"] = others["teacher_mass"][0], _columns(self.sums.totals)["tokens"]
        return all_pairs

    def metric_sums(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns metric -> (sum, count): copies, so that a caller may add the sums of other ranks in place."""
        sums = {name: (total.clone(), count.clone()) for name, (total, count) in self.all_pairs().items()}
        if (equal := self._equal_reward_groups()) is not None:
            sums["equal_reward_groups"] = equal.sum(), equal.new_full((), self.batch.num_groups)
        return sums

    def metrics(self, loss: Tensor) -> dict[str, Tensor]:
        """Returns metric -> scalar."""
        pairs, column = self.all_pairs(), _columns(self.sums.totals)
        metrics = _divide(pairs) | derived_metrics(pairs) | self.rollout_extrema
        # Like the means, 0 where there is nothing to look at.
        counts = torch.stack([column[name] for name in ("tokens", "tokens", "mismatch_count")])
        ratio_min, ratio_max, mismatch_max = torch.where(counts > 0, self.sums.extrema, 0.0).unbind()
        metrics["ratio/min"], metrics["ratio/max"] = ratio_min, ratio_max
        if "rollout_mismatch/mean" in metrics:
            metrics["rollout_mismatch/max"] = mismatch_max
        if self.batch.config.has_entropy_bonus:
            metrics["policy_loss"] = loss.detach() + self.bonus
        if (equal := self._equal_reward_groups()) is not None:
            metrics["equal_reward_groups"] = equal.mean()
        return metrics

    def of_sequences(self) -> dict[str, Tensor]:
        """Returns (S,) each: the sequence's share of the loss, its tokens, the mean of each metric over them."""
        column = _columns(self.sums.sequences)
        return {name: column[name].clone() for name in ("loss", "tokens")} | _divide(self.pairs(self.sums.sequences))

    def of_groups(self) -> dict[str, Tensor]:
        """Returns (num_groups,) each: the group's share of the loss, its tokens, means of kl, of the clip ratio and of
        the rewards."""
        if not self.batch.num_groups:
            return {}
        column = _columns(self.sums.groups)
        count = column["tokens"].clamp(min=1)
        means = {name: column[name].clone() for name in ("loss", "tokens")}
        if self.present["reference"]:
            means["kl"] = column["kl"] / count
        clipped = column["cispo_clip"] if self.present["cap"] else column["clip_low"] + column["clip_high"]
        means["clip_ratio"] = clipped / count
        if self.batch.reward_statistics is not None:
            mean, std = self.batch.reward_statistics
            means["reward_mean"], means["reward_std"] = mean.clone(), std.clone()
        return means

    def _equal_reward_groups(self) -> Tensor | None:
        """Returns 1 for each group whose rewards are all equal, so that it has no gradient, (num_groups,); None without
        rewards."""
        if self.batch.reward_statistics is None:
            return None
        _, std = self.batch.reward_statistics
        return (std == 0).to(self.sums.totals.dtype)


def _columns(sums: Tensor) -> dict[str, Tensor]:
    """Returns the columns of sums (..., K) by name; views."""
    return dict(zip(COLUMNS, sums.unbind(-1), strict=True))


def _divide(pairs: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Returns name -> sum / count, 0 where nothing is counted."""
    totals, counts = (torch.stack(x) for x in zip(*pairs.values(), strict=True))
    return dict(zip(pairs, (totals / counts.clamp(min=1)).unbind(), strict=True))

"""Which tokens of a batch count, and what each weighs in the loss: all that is known before any log-probability is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..loss_config import LossConfig
from .aggregation import Lengths, denominator, weight_of_tokens
from .sequences import Sequences, shares_ratio
from .surrogates import SURROGATE_RULES


class TokenInputs(NamedTuple):
    """What a caller gives besides hidden states, weight and ids, one value for each token: (B, T) or packed (N,),
    contiguous, in the type of the loss (`checks.tokens.per_token`). What is optional may be None."""

    advantages: Tensor
    completion_mask: Tensor | None = None  # bool
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    rollout_weights: Tensor | None = None
    rollout_logps: Tensor | None = None
    cu_seqlens: Tensor | None = None  # (S + 1,) int32 or int64, packed batches
    normalizer: Tensor | None = None  # scalar, replaces the denominator of the aggregation
    temperature: Tensor | None = None  # instead of config.temperature
    entropy_threshold: Tensor | None = None  # scalar
    entropy_coef: Tensor | None = None  # scalar, instead of config.entropy_coef
    entropy_normalizer: Tensor | None = None  # scalar, replaces the denominator of the entropy bonus
    group_index: Tensor | None = None  # (S,) int64 in [0, num_groups)
    token_weights: Tensor | None = None  # what scales a token's loss
    allowed_ids: Tensor | None = None  # (M,) of a SamplingMask
    allowed_counts: Tensor | None = None  # one per token


class Rules(NamedTuple):
    """What follows from the configuration and from which inputs a call has."""

    has_old: bool  # False: the ratio is logp / stop_gradient(logp), its logarithm 0
    has_kl: bool
    has_entropy: bool  # an entropy bonus
    has_threshold: bool  # of the entropy, below which tokens lose their surrogate
    whole_sequences: bool  # a token's gradient depends on the log-probabilities of its sequence
    all_have_gradient: bool  # every token that counts may have a gradient


@dataclass(slots=True)
class Tokens:
    """The tokens of a batch, (N,) each in the type of the loss. Padding has no weight, id 0 and temperature 1; in
    the other fields it may hold anything, NaN too.

    scored: bool, logps, entropy and metrics are wanted. has_gradient: bool, may have one: one that is not has a
    gradient of exactly 0. None in either: all tokens.
    """

    config: LossConfig
    rules: Rules
    sequences: Sequences
    lengths: Lengths
    ids: Tensor  # int64, 0 at padding
    scored: Tensor | None
    has_gradient: Tensor | None
    temperature: Tensor
    advantage: Tensor
    dloss_direct: Tensor  # d loss / d value, for what flows through logp itself; also the weight of the value
    dloss_via_ratio: Tensor  # the same for what flows through the ratio
    dloss_dentropy: Tensor  # d loss / d entropy
    old: Tensor | None = None  # what the ratio divides by; +inf: the token's own log-probability, ratio 1
    ref: Tensor | None = None
    rollout: Tensor | None = None  # NaN where unknown
    rollout_weight: Tensor | None = None
    surrogate_scale: Tensor | None = None  # scales only the surrogate
    entropy_threshold: float | Tensor | None = None

    def subset(self, take: Callable[[Tensor], Tensor], selected: slice | None = None) -> Tokens:
        """Returns what loss.evaluate reads of some tokens, those that take(x) returns of a tensor (N,); selected: which
        whole sequences they are."""
        part: dict[str, Any] = {n: take(x) for n in _EVALUATED if (x := getattr(self, n)) is not None}
        if self.dloss_via_ratio is self.dloss_direct:
            part["dloss_via_ratio"] = part["dloss_direct"]
        else:
            part["dloss_via_ratio"] = take(self.dloss_via_ratio)
        if selected is not None:
            sequences = self.sequences.subset(selected)
            part |= {"sequences": sequences, "lengths": Lengths(sequences, part.get("scored"), self.advantage.dtype)}
        return dataclasses.replace(self, **part)


_EVALUATED = (
    "scored", "advantage", "dloss_direct", "old", "ref", "rollout", "rollout_weight", "surrogate_scale",
)  # fmt: skip


def rules_of(inputs: TokenInputs, config: LossConfig, per_sequence: bool, has_teacher: bool) -> Rules:
    """Returns the rules of a call, kept with the configuration. per_sequence: advantages and rollout weights are the
    same for all tokens of a sequence."""
    key = per_sequence, has_teacher, *map(type, inputs)
    rules: Rules | None = config.derived.get(key)
    if rules is None:
        rules = config.derived[key] = _derive(inputs, config, per_sequence, has_teacher)
    return rules


def plan(
    inputs: TokenInputs, ids: Tensor, config: LossConfig, dtype: torch.dtype, *, per_sequence: bool = False,
    has_teacher: bool = False,
) -> Tokens:  # fmt: skip
    """Plans a batch of ids (B, T) or packed (N,), with inputs of that shape in `dtype`."""
    device, count, rules = ids.device, ids.numel(), rules_of(inputs, config, per_sequence, has_teacher)
    if inputs.cu_seqlens is None:
        sequences = Sequences.padded(ids.shape[0], ids.shape[1], device)
    else:
        sequences = Sequences(inputs.cu_seqlens.to(device=device, dtype=torch.int64), None, count)
    # Padding may hold anything: a token without weight has no gradient, and no measure reads it.
    per_token = (
        inputs.completion_mask, inputs.old_logps, inputs.rollout_logps, inputs.rollout_weights, inputs.token_weights,
        inputs.temperature,
    )  # fmt: skip
    mask, old, rollout, rollout_weight, token_weight, temperature = (
        None if x is None else x.view(-1) for x in per_token
    )
    lengths, advantage = Lengths(sequences, mask, dtype), inputs.advantages.view(-1)
    weight = weight_of_tokens(config, lengths, inputs.normalizer)
    dentropy = torch.zeros_like(weight)
    if rules.has_entropy:
        dentropy = _entropy_weight(inputs, config, lengths, weight, mask)
    scale = None if config.surrogate == "vespo" else rollout_weight  # VESPO's own weight takes its place
    if SURROGATE_RULES[config.surrogate].divides_by_rollout and rollout is not None:
        old, scale = _divide_by_rollout(rollout, old, scale)
    via_ratio = _weight_via_ratio(config, rules, lengths, weight)
    active = mask if rules.all_have_gradient else _may_have_gradient(config, rules, lengths, advantage, scale)
    if token_weight is not None:
        shared = via_ratio is weight
        weight = torch.where(weight != 0, weight * token_weight, 0.0)
        via_ratio = weight if shared else torch.where(via_ratio != 0, via_ratio * token_weight, 0.0)
    if temperature is None:
        temperature = torch.full((count,), float(config.temperature), dtype=dtype, device=device)
    elif mask is not None:
        temperature = torch.where(mask, temperature, 1.0)
    sampled = ids.reshape(-1).long()
    return Tokens(
        config, rules, sequences, lengths,
        sampled.contiguous() if mask is None else torch.where(mask, sampled, 0),
        scored=mask if config.score_inactive else active, has_gradient=active, temperature=temperature,
        advantage=advantage,
        dloss_direct=weight, dloss_via_ratio=via_ratio, dloss_dentropy=dentropy, old=old,
        ref=inputs.ref_logps.view(-1) if inputs.ref_logps is not None and rules.has_kl else None,
        rollout=rollout, rollout_weight=rollout_weight, surrogate_scale=scale,
        entropy_threshold=config.entropy_threshold if inputs.entropy_threshold is None else inputs.entropy_threshold,
    )  # fmt: skip


def _divide_by_rollout(rollout: Tensor, old: Tensor | None, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns (what the ratio divides by, the scale of the surrogate), (N,).

    Where the sampling engine's log-probability is not known, the ratio divides by the old policy's; without that it is
    1, and the token has no surrogate.
    """
    unknown = rollout.isnan()
    if old is not None:
        return torch.where(unknown, old, rollout), scale
    ones = torch.ones_like(rollout) if scale is None else scale
    return torch.where(unknown, torch.inf, rollout), torch.where(unknown, 0.0, ones)


def _weight_via_ratio(config: LossConfig, rules: Rules, lengths: Lengths, weight: Tensor) -> Tensor:
    """Returns d loss / d value for the gradient through the ratio, (N,).

    On-policy, the ratio of a sequence is 1, so that its chain rule is known before any logit is.
    """
    level, sequences = config.importance_sampling_level, lengths.sequences
    if not shares_ratio(level) or rules.whole_sequences:
        return weight
    total = sequences.sum(weight)
    via_ratio = sequences.to_tokens(total if level == "sequence_sum" else total / lengths.at_least_one)
    return via_ratio if lengths.mask is None else torch.where(lengths.mask, via_ratio, 0.0)


def _may_have_gradient(
    config: LossConfig, rules: Rules, lengths: Lengths, advantage: Tensor, scale: Tensor | None
) -> Tensor:
    """Returns which tokens' surrogates may have a gradient, (N,) bool."""
    mask, sequences = lengths.mask, lengths.sequences
    # Squared log-ratios have a gradient where the advantage is 0 too.
    active = torch.ones_like(advantage, dtype=torch.bool) if config.dppo_kl_tau or config.a2po_beta else advantage
    for factor in (scale, mask):
        active = active if factor is None else active.logical_and(factor)
    active = active.bool()
    if rules.whole_sequences or shares_ratio(config.importance_sampling_level):
        active = sequences.to_tokens(sequences.sum(active.to(lengths.dtype)) > 0)
        active = active if mask is None else active & mask
    return active


def _entropy_weight(
    inputs: TokenInputs, config: LossConfig, lengths: Lengths, weight: Tensor, mask: Tensor | None
) -> Tensor:
    """Returns d loss / d entropy of the bonus, (N,).

    It is -entropy_coef times the mean entropy of this call's tokens, scaled by this call's share of the normalizer
    (with B sequences of B_total: B / B_total; without one: 1).
    """
    number = 1.0 if inputs.entropy_coef is not None else config.entropy_coef
    if config.entropy_aggregation == "loss":
        each = -number * weight
    else:
        if inputs.entropy_normalizer is not None:
            each = -number / inputs.entropy_normalizer
        else:
            call_share: Tensor | float = 1.0
            if inputs.normalizer is not None:
                call_share = denominator(config, lengths, None) / inputs.normalizer
            each = -number * call_share / lengths.total
        each = each.to(weight.dtype).expand(weight.shape)
        each = each.contiguous() if mask is None else torch.where(mask, each, 0.0)
    return each if inputs.entropy_coef is None else each * inputs.entropy_coef.to(weight.dtype)


def _derive(inputs: TokenInputs, config: LossConfig, per_sequence: bool, has_teacher: bool) -> Rules:
    rule = SURROGATE_RULES[config.surrogate]
    has_rollout = inputs.rollout_logps is not None
    has_old = inputs.old_logps is not None or (rule.divides_by_rollout and has_rollout)
    has_kl = inputs.ref_logps is not None and config.kl_estimator != "none"
    has_entropy = inputs.entropy_coef is not None or config.has_entropy_bonus
    whole = _needs_whole_sequences(inputs, config, has_old, has_kl, per_sequence)
    has_threshold = inputs.entropy_threshold is not None or config.entropy_threshold is not None
    all_have_gradient = has_entropy or has_teacher or (config.beta != 0.0 and has_kl)
    return Rules(has_old, has_kl, has_entropy, has_threshold, whole, all_have_gradient)


def _needs_whole_sequences(
    inputs: TokenInputs, config: LossConfig, has_old: bool, has_kl: bool, per_sequence: bool
) -> bool:
    level = config.importance_sampling_level
    if config.off_policy_mask_threshold is not None and (has_old or inputs.rollout_logps is not None):
        return True
    if config.surrogate == "vespo" and (has_old or inputs.rollout_weights is not None):
        return True  # otherwise phi is 1
    if not shares_ratio(level):
        return level != "token" and has_old  # without one the ratio of the sequence is 1
    thresholded = inputs.entropy_threshold is not None or config.entropy_threshold is not None
    corrects = config.use_bias_correction_kl and has_kl
    return has_old or corrects or thresholded or inputs.token_weights is not None or not per_sequence

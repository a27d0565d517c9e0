"""The loss of tokens whose log-probabilities are known, and its gradient by them.

value          = surrogate_scale * surrogate(x, logp, A) + beta * KL(ref, logp) * (r if bias-corrected else 1)
grad_log_ratio = d value / d x      at fixed logp        x: the log-ratio of the token or of its sequence
grad_logp      = d value / d logp   at fixed x
d loss / d logp = dloss_via_ratio * grad_log_ratio + dloss_direct * grad_logp              (ratio of one token)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.fused_objective import COLUMN, ObjectiveInputs, Sums
from ..kernels.operations import Rows
from ..loss_config import LossConfig
from ..names import EXPONENT_LIMIT
from .kl import kl_estimate, times_ratio
from .sequences import off_policy_mask, sequence_log_ratio, shares_ratio, vespo_weight
from .surrogates import SURROGATE_RULES, Ratio
from .tokens import Tokens


class Objective(NamedTuple):
    """(N,) each."""

    log_ratio: Tensor  # what the surrogate sees: of the token, or of its sequence; not clamped
    value: Tensor  # of the loss, before the token's weight
    kl: Tensor | None  # the estimate before its weight, bias correction included
    dlogp: Tensor  # d loss / d logp
    left_out: Tensor  # whose value has no weight


def evaluate(tokens: Tokens, logp: Tensor, entropy: Tensor) -> Objective:
    """Evaluates the loss of these tokens, whole sequences where rules.whole_sequences says so. logp, entropy (N,)."""
    c, rules, A = tokens.config, tokens.rules, tokens.advantage
    old = logp if tokens.old is None else tokens.old
    if tokens.old is not None and SURROGATE_RULES[c.surrogate].divides_by_rollout:
        old = torch.where(old == torch.inf, logp, old)
    # Of each token alone at first; NaN where logp is, and where it has no ratio: -inf to itself.
    log_ratio, scale, dlog_ratio_dlogp = logp - old, tokens.surrogate_scale, None
    if rules.whole_sequences:
        log_ratio, scale, dlog_ratio_dlogp = _of_sequences(tokens, log_ratio, logp)
    ratio = clamp_ratio(c, log_ratio)
    value, grad_log_ratio, grad_logp = SURROGATE_RULES[c.surrogate].term(c, ratio, logp, A)
    if tokens.entropy_threshold is not None:
        below = (entropy < tokens.entropy_threshold) & ~log_ratio.isnan()
        value = torch.where(below, 0.0, value)
        grad_log_ratio, grad_logp = (
            x if x is None else torch.where(below, 0.0, x) for x in (grad_log_ratio, grad_logp)
        )
    if scale is not None:  # a scale of 0 drops what may be infinite; NaN stays
        dropped = (scale == 0) & ~log_ratio.isnan()
        value = torch.where(dropped, 0.0, scale * value)
        grad_log_ratio, grad_logp = (
            x if x is None else torch.where(dropped, 0.0, scale * x) for x in (grad_log_ratio, grad_logp)
        )
    kl = None
    if rules.has_kl and tokens.ref is not None:
        estimate = kl_estimate(c, logp, tokens.ref)
        kl, d_kl, shared = estimate.value, estimate.d_logp, shares_ratio(c.importance_sampling_level)
        if c.use_bias_correction_kl:
            kl, d_kl, still = times_ratio(estimate, ratio.value, ratio.clamped, shared=shared)
            if shared and c.beta != 0.0:
                moving = torch.where(still, 0.0, c.beta * kl)
                grad_log_ratio = moving if grad_log_ratio is None else grad_log_ratio + moving
        if c.beta != 0.0:
            value = value + c.beta * kl
            grad_logp = c.beta * d_kl if grad_logp is None else grad_logp + c.beta * d_kl
    dlogp, left_out = None, tokens.dloss_direct.logical_not()
    if grad_log_ratio is not None:
        if dlog_ratio_dlogp is not None and shares_ratio(c.importance_sampling_level):
            total = tokens.sequences.sum(weighted(tokens.dloss_direct, grad_log_ratio, left_out))
            dlogp = dlog_ratio_dlogp * tokens.sequences.to_tokens(total)
        else:
            same = tokens.dloss_via_ratio is tokens.dloss_direct
            dlogp = weighted(tokens.dloss_via_ratio, grad_log_ratio, left_out if same else None)
    if grad_logp is not None:
        direct = weighted(tokens.dloss_direct, grad_logp, left_out)
        dlogp = direct if dlogp is None else dlogp + direct
    assert dlogp is not None
    return Objective(log_ratio, value, kl, dlogp, left_out)


def clamp_ratio(c: LossConfig, log_ratio: Tensor) -> Ratio:
    """Returns the ratio within the clamps of its exponent."""
    bound = c.log_ratio_clamp
    high = EXPONENT_LIMIT if bound is None else min(bound, EXPONENT_LIMIT)
    clamped = log_ratio > high
    if bound is not None:
        clamped = clamped | (log_ratio < -bound)
    return Ratio(log_ratio, log_ratio.clamp(None if bound is None else -bound, high).exp(), clamped)


def weighted(weight: Tensor, derivative: Tensor, left_out: Tensor | None = None) -> Tensor:
    """Returns a derivative times a weight; 0 where the weight is 0, whatever the derivative is. left_out: weight == 0,
    where known."""
    return (weight * derivative).masked_fill_(weight.logical_not() if left_out is None else left_out, 0.0)


def _of_sequences(tokens: Tokens, token_log_ratio: Tensor, logp: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns (the log-ratio that the surrogate sees, the scale of the surrogate, d log-ratio / d logp of the
    token)."""
    c, sequences, A, scale = tokens.config, tokens.sequences, tokens.advantage, tokens.surrogate_scale
    scored = torch.ones_like(token_log_ratio, dtype=torch.bool) if tokens.scored is None else tokens.scored
    lengths = tokens.lengths.at_least_one
    token_log_ratio = torch.where(scored, token_log_ratio, 0.0)
    if c.surrogate == "vespo":
        scale = vespo_weight(c, sequences, scored, token_log_ratio, tokens.rollout_weight, A)
    if c.off_policy_mask_threshold is not None:
        drift = -token_log_ratio
        if tokens.rollout is not None:  # tokens that the sampling engine could not score are left out of the mean
            drift = torch.where(scored & ~tokens.rollout.isnan(), tokens.rollout - logp, 0.0)
        dropped = off_policy_mask(sequences, lengths, drift, A, c.off_policy_mask_threshold)
        scale = torch.where(dropped, 0.0, torch.ones_like(token_log_ratio) if scale is None else scale)
    log_ratio, dlog_ratio_dlogp = sequence_log_ratio(c, sequences, lengths, scored, token_log_ratio, A)
    return log_ratio, scale, dlog_ratio_dlogp


class DistillationLoss:
    """The divergence to a teacher's distribution alone: a loss without sampled ids. entropy, divergence (N,): of all
    tokens."""

    needs_sequences = needs_batch = False

    def __init__(self, tokens: Tokens, entropy: Tensor, divergence: Tensor) -> None:
        self.tokens, self.entropy, self.divergence = tokens, entropy, divergence
        self._nothing = torch.zeros_like(entropy)

    def __call__(self, rows: Rows, sequences: slice | None = None) -> tuple[Tensor, Tensor]:
        return self.gradients()

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Returns zeros: the row kernels have the gradient of the divergence."""
        return self._nothing, self._nothing

    def value_and_metrics(self) -> tuple[Tensor, Tensor]:
        """Returns (the loss (), sums of divergence and entropy over the tokens that count, and their number (3,))."""
        value = weighted(self.tokens.dloss_direct, self.tokens.config.distill_coef * self.divergence)
        columns = torch.stack([self.divergence, self.entropy, torch.ones_like(self.entropy)]).double()
        if self.tokens.scored is not None:
            columns = torch.where(self.tokens.scored, columns, 0.0)
        return value.sum(dtype=torch.float64).to(value.dtype), columns.sum(1).to(value.dtype)


Operation = Callable[[ObjectiveInputs, Tensor, Tensor, Tensor, Rows | None], Tensor | None]


class GRPOLoss:
    """The loss of a batch whose statistics become known chunk by chunk. logp, entropy (N,): of all tokens, 0 at first.

    needs_sequences: gradients need all tokens of a sequence; needs_batch: of the batch (a bonus over kept entropies).
    divergence (N,): to a teacher's distribution, which config.distill_coef weighs. fused: the operation `objective` of
    a backend that has this loss, and what it receives.
    """

    def __init__(
        self, tokens: Tokens, logp: Tensor, entropy: Tensor, divergence: Tensor | None = None,
        *, fused: tuple[Operation, ObjectiveInputs] | None = None,
    ) -> None:  # fmt: skip
        self.tokens, self.logp, self.entropy, self.divergence = tokens, logp, entropy, divergence
        self.fused = fused
        self.needs_sequences, self.needs_batch = tokens.rules.whole_sequences, bool(tokens.config.entropy_kept_only)
        self.dentropy = tokens.dloss_dentropy
        self._dlogp: Tensor | None = None
        self._sums: Tensor | None = None
        self._whole: Objective | None = None  # of all tokens, when all have been evaluated at once

    def __call__(self, rows: Rows, sequences: slice | None = None) -> tuple[Tensor, Tensor]:
        """Returns d loss / d logp and d loss / d entropy (N,), of which those of the rows are known. With
        `needs_sequences` the rows are all active tokens of these sequences."""
        length = self.tokens.sequences.row_length
        if self.needs_sequences and length is None:  # where packed sequences begin the host does not know
            return evaluate(self.tokens, self.logp, self.entropy).dlogp, self.dentropy
        if self._dlogp is None:
            self._dlogp = torch.zeros_like(self.logp)
        if self.fused is not None:
            operation, inputs = self.fused
            operation(inputs, self.logp, self.entropy, self._dlogp, rows)
            return self._dlogp, self.dentropy
        if self.needs_sequences and sequences is not None and length is not None:
            rows = Rows(sequences.start * length, sequences.stop * length)
            part = self.tokens.subset(rows.take, sequences)
        else:
            part = self.tokens.subset(rows.take)
        rows.put(self._dlogp, evaluate(part, rows.take(self.logp), rows.take(self.entropy)).dlogp)
        return self._dlogp, self.dentropy

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Returns the gradients of all tokens, whose statistics are known: they are evaluated once."""
        if self.fused is not None:
            if self._dlogp is None:
                self._dlogp = torch.empty_like(self.logp)
            if self._sums is None:
                operation, inputs = self.fused
                self._sums = operation(inputs, self.logp, self.entropy, self._dlogp, None)
            return self._dlogp, self.dentropy
        if self._whole is None:
            if self.needs_batch:
                self._keep_entropies()
            self._whole = evaluate(self.tokens, self.logp, self.entropy)
        return self._whole.dlogp, self.dentropy

    def _keep_entropies(self) -> None:
        """Gives the entropy bonus to the tokens that the threshold keeps, whose entropies are known now."""
        weight, threshold = self.dentropy, self.tokens.entropy_threshold
        assert threshold is not None  # config checks it
        counted = weight != 0
        kept = counted & ~(self.entropy < threshold)
        share = kept.sum().clamp(min=1) / counted.sum(dtype=weight.dtype)  # of two integers it had torch's default type
        self.dentropy = torch.where(kept, weight / share, 0.0)

    def value_and_metrics(self) -> tuple[Tensor, Tensor]:
        """Returns (the loss (), what metrics need), when all statistics are known: the record (fields, N), or from the
        fused operation Sums in one row."""
        self.gradients()
        if self._sums is not None:
            return Sums.of(self._sums, self.tokens.sequences.count).totals[COLUMN.loss].clone(), self._sums
        assert self._whole is not None
        tokens, (log_ratio, value, kl, dlogp, left_out) = self.tokens, self._whole
        if self.divergence is not None:
            value = value + tokens.config.distill_coef * self.divergence
        share = weighted(tokens.dloss_direct, value, left_out)
        if tokens.rules.has_entropy:
            share = share + weighted(self.dentropy, self.entropy)
        known = {
            "logp": self.logp, "entropy": self.entropy, "share": share, "log_ratio": log_ratio, "dlogp": dlogp,
            "advantage": tokens.advantage, "scored": tokens.scored, "kl": kl, "old": tokens.old,
            "rollout": tokens.rollout, "rollout_weight": tokens.rollout_weight, "divergence": self.divergence,
            "dentropy": self.dentropy if tokens.rules.has_entropy else None,
        }  # fmt: skip
        return share.sum(dtype=torch.float64).to(share.dtype), torch.stack(
            [x if x.dtype == share.dtype else x.to(share.dtype) for x in known.values() if x is not None]
        )

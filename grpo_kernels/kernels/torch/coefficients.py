"""From log-probabilities to the loss value and the gradient of every token, in plain torch. All O(N).

`token_objective` serves tokens whose gradient depends on themselves alone, `sequence_objective` those whose gradient
depends on their sequence: sequence ratios, sequence weights (VESPO) and masks (off-policy).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...contract import Rows, TokenValues
from ...names import FIELD, KernelParams, shares_ratio
from .objective import objective


def token_objective(rows: Rows, table: Tensor, values: TokenValues, params: KernelParams) -> None:
    """Writes log_ratio, value, kl and g_logp of these tokens from their logp and entropy."""
    table, columns = rows.take(table, 1), rows.take(values.columns, 1)
    logp, entropy = columns[0], columns[1]
    log_ratio = own_log_ratio(logp, table, params)
    value, d_ratio, d_direct, kl = objective(log_ratio, logp, entropy, table, params)
    g_logp = weighted(table, "weight_ratio", d_ratio) + weighted(table, "weight_direct", d_direct)
    found = torch.stack([logp, entropy, log_ratio, value, kl, g_logp])
    rows.put(values.columns[: len(found)], found, dim=1)


def sequence_objective(
    table: Tensor, scored: Tensor, offsets: Tensor, lengths: Tensor, values: TokenValues, params: KernelParams
) -> None:
    """`token_objective` of all scored tokens of these sequences, whose tokens are those of `table` (fields, N)."""
    sequences = _Sequences(table, scored, offsets, lengths)
    logp, entropy = values.logp, values.entropy
    own = torch.where(scored, own_log_ratio(logp, table, params), 0.0)
    table = table.clone()
    table[FIELD["multiplier"]] *= _sequence_multiplier(sequences, own, logp, params)
    log_ratio, slope = _raise_to_level(sequences, own, params)
    value, d_ratio, d_direct, kl = objective(log_ratio, logp, entropy, table, params)
    g_logp = weighted(table, "weight_direct", d_direct)
    if not shares_ratio(params.level):
        g_logp = g_logp + weighted(table, "weight_ratio", d_ratio)
    else:
        total = sequences.sum(weighted(table, "weight_direct", d_ratio))
        g_logp = g_logp + slope * sequences.spread(total)
    found = torch.stack([log_ratio, value, kl, g_logp])
    written = values.columns[2 : 2 + len(found)]
    written.copy_(torch.where(scored, found, written))


def own_log_ratio(logp: Tensor, table: Tensor, params: KernelParams) -> Tensor:
    """(N,) the raw log-ratio of the token alone; NaN where logp is, and where it has no ratio: -inf to itself."""
    if params.has_old:
        old = table[FIELD["old"]]
        return logp - torch.where(old == torch.inf, logp, old)
    return logp - logp


def weighted(table: Tensor, name: str, slope: Tensor) -> Tensor:
    """slope times a weight of the table; 0 where that is 0, whatever the slope is."""
    weight = table[FIELD[name]]
    return torch.where(weight != 0, weight * slope, 0.0)


class _Sequences:
    """Sums over whole sequences and back; tokens that are not scored take no part."""

    def __init__(self, table: Tensor, scored: Tensor, offsets: Tensor, lengths: Tensor) -> None:
        self.table, self.scored, self.offsets, self.lengths = table, scored, offsets, lengths

    def field(self, name: str) -> Tensor:
        return self.table[FIELD[name]]

    def sum(self, x: Tensor) -> Tensor:
        """(N,) -> (S,), in a fixed order on every device."""
        return torch.segment_reduce(torch.where(self.scored, x, 0.0), "sum", offsets=self.offsets, unsafe=True)

    def mean(self, x: Tensor) -> Tensor:
        return self.sum(x) / self.lengths.clamp(min=1)

    def spread(self, x: Tensor) -> Tensor:
        """(S,) -> (N,): every token gets the value of its sequence."""
        return x.repeat_interleave(self.offsets.diff(), output_size=self.scored.numel())


def _raise_to_level(sequences: _Sequences, own: Tensor, params: KernelParams) -> tuple[Tensor, Tensor]:
    """(log-ratio that the surrogate sees (N,), its derivative by the token's own logp (N,))."""
    slope = sequences.scored.to(own.dtype)
    if params.level == "token":
        return own, slope
    is_mean = params.level != "sequence_sum"
    if is_mean:
        slope = slope / sequences.spread(sequences.lengths.clamp(min=1))
    if params.surrogate == "gmpo":
        # Sign-aware clamp of every token before the mean: it only ever makes the objective smaller.
        clamped = own.clamp(-params.epsilon_low, params.epsilon_high)
        narrow = torch.where(sequences.field("advantage") > 0, own.minimum(clamped), own.maximum(clamped))
        slope = torch.where(narrow == own, slope, 0.0)
        own = narrow
    total = sequences.mean(own) if is_mean else sequences.sum(own)
    return sequences.spread(total), slope


def _sequence_multiplier(sequences: _Sequences, own: Tensor, logp: Tensor, params: KernelParams) -> Tensor:
    """(N,) what the whole sequence contributes to the multiplier of its tokens: VESPO's phi, the off-policy mask."""
    multiplier = torch.ones_like(own)
    if params.vespo:
        multiplier = vespo_phi(sequences, own, params)
    if params.off_policy_threshold != math.inf:
        rollout, advantage = sequences.field("rollout"), sequences.field("advantage")
        if params.has_rollout:  # tokens that the sampling engine could not score carry no evidence
            drift = torch.where(rollout.isnan(), 0.0, rollout - logp)
        else:
            drift = -own
        mean_drift = sequences.spread(sequences.mean(drift))
        multiplier = torch.where((advantage >= 0) | (mean_drift <= params.off_policy_threshold), multiplier, 0.0)
    return multiplier


def vespo_phi(sequences: _Sequences, own: Tensor, params: KernelParams) -> Tensor:
    """(N,) phi(w) = exp(lambda + k ln w - lambda w), w the weight of the whole sequence, rollout weight included."""
    low = math.log(1e-8)
    log_w = own.clamp(-20.0, 20.0) + sequences.field("rollout_weight").log().clamp(low, 20.0)
    log_w = sequences.spread(sequences.sum(log_w).clamp(low, 20.0))
    positive = sequences.field("advantage") >= 0
    k = torch.full_like(log_w, params.vespo_k_neg).masked_fill(positive, params.vespo_k_pos)
    lam = torch.full_like(log_w, params.vespo_lambda_neg).masked_fill(positive, params.vespo_lambda_pos)
    return (lam + k * log_w - lam * log_w.exp()).exp()

"""The objective of tokens whose gradient depends on their sequence: its ratio, VESPO's phi, the off-policy mask.

    log ratio    of the token; or the mean or the sum over the sequence, with GMPO's clamp of every token before it
    multiplier   the table's, times phi(w) = exp(lambda + k ln w - lambda w), w the weight of the whole sequence; 0
                 where the sequence drifted too far from the sampling engine and its advantage is negative
    d loss / d logp of a sequence ratio: every token has a share in the ratio of all tokens of the sequence

A program owns a few sequences and walks their tokens in blocks: sums first, then the objective of each token at them,
then, where the ratio is the sequence's, what every token gets of the whole gradient. Sums are float64 and in index
order. Tokens that are not scored are never read and keep what they hold. A token costs 24 to 30 floats read and 4 or 5
written.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ...contract import PlannedTokens
from ...names import KernelParams, shares_ratio
from ..launch import token_launch
from .arguments import Batch
from .layout import (
    ADVANTAGE,
    MULTIPLIER,
    ROLLOUT,
    ROLLOUT_WEIGHT,
    TOKEN_ENTROPY,
    TOKEN_G_LOGP,
    TOKEN_LOGP,
    WEIGHT_DIRECT,
    WEIGHT_RATIO,
)
from .objective import (
    Objective,
    clamp,
    load_token,
    own_log_ratio,
    scalars,
    store_objective,
    token_objective,
    variant,
    weighted,
)

LOWEST_LOG_WEIGHT: tl.constexpr = tl.constexpr(math.log(1e-8))
HIGHEST_LOG_WEIGHT: tl.constexpr = tl.constexpr(20.0)


@triton.jit
def counted_log_ratio(column, tokens, on, raw, p, SURROGATE: tl.constexpr):
    """A token's log ratio as its sequence counts it: GMPO clamps it where that makes the objective smaller."""
    if SURROGATE == "gmpo":
        A = tl.load(column + ADVANTAGE * tokens, mask=on, other=0.0)
        clamped = clamp(raw, -p.epsilon_low, p.epsilon_high)
        return tl.where(tl.where(A > 0.0, raw < clamped, raw > clamped), raw, clamped)
    return raw


@triton.jit
def sequence_multiplier(A, log_weight, mean_drift, p, VESPO: tl.constexpr, MASKS_OFF_POLICY: tl.constexpr):
    """What the sequence contributes to the multiplier of a token with this advantage."""
    positive = A >= 0.0
    multiplier = tl.full(A.shape, 1.0, tl.float32)
    if VESPO:
        k = tl.where(positive, p.vespo_k_pos, p.vespo_k_neg)
        slope = tl.where(positive, p.vespo_lambda_pos, p.vespo_lambda_neg)
        multiplier = tl.exp(slope + k * log_weight - slope * tl.exp(log_weight))
    if MASKS_OFF_POLICY:
        multiplier = tl.where(positive | (mean_drift <= p.off_policy_threshold), multiplier, 0.0)
    return multiplier


@triton.jit(do_not_specialize=["first", "last", "offsets", "lengths", "scored", "tokens"])
def sequence_objective_kernel(
    first, last, offsets, lengths, scored, batch, tokens, p, LEVEL: tl.constexpr, SHARES_RATIO: tl.constexpr,
    VESPO: tl.constexpr, MASKS_OFF_POLICY: tl.constexpr, HAS_ROLLOUT: tl.constexpr, VARIANT: tl.constexpr,
    SEQUENCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    SURROGATE: tl.constexpr = VARIANT.surrogate
    table, values = batch.table, batch.columns
    sequence = first + tl.program_id(0).to(tl.int64) * SEQUENCES + tl.arange(0, SEQUENCES)
    live = sequence < last
    start = tl.load(offsets + sequence, mask=live, other=0)
    stop = tl.load(offsets + sequence + 1, mask=live, other=0)
    length = tl.load(lengths + sequence, mask=live, other=0.0)
    length = tl.where(length > 1.0, length, 1.0).to(tl.float64)
    longest = tl.max(stop - start, 0)
    block = tl.arange(0, BLOCK)[None, :]

    ratio_sum = tl.zeros((SEQUENCES,), tl.float64)
    weight_sum = tl.zeros((SEQUENCES,), tl.float64)
    drift_sum = tl.zeros((SEQUENCES,), tl.float64)
    if LEVEL != "token" or VESPO or MASKS_OFF_POLICY:
        for done in range(0, longest, BLOCK):
            i = start[:, None] + done + block
            on = tl.load(scored + i, mask=i < stop[:, None], other=0) != 0
            column = table + i
            logp = tl.load(values + TOKEN_LOGP * tokens + i, mask=on, other=0.0)
            raw = own_log_ratio(column, tokens, on, logp, VARIANT.has_old)
            if LEVEL != "token":
                counted = counted_log_ratio(column, tokens, on, raw, p, SURROGATE)
                ratio_sum += tl.sum(counted.to(tl.float64), 1)
            if VESPO:
                weight = tl.log(tl.load(column + ROLLOUT_WEIGHT * tokens, mask=on, other=1.0))
                log_weight = clamp(raw, -20.0, 20.0) + clamp(weight, LOWEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT)
                weight_sum += tl.sum(log_weight.to(tl.float64), 1)
            if MASKS_OFF_POLICY:
                drift = -raw
                if HAS_ROLLOUT:  # tokens that the sampling engine could not score carry no evidence
                    rollout = tl.load(column + ROLLOUT * tokens, mask=on, other=float("nan"))
                    drift = tl.where(rollout == rollout, rollout - logp, 0.0)
                drift_sum += tl.sum(drift.to(tl.float64), 1)
    log_weight_of_all = clamp(weight_sum.to(tl.float32), LOWEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT)[:, None]
    mean_drift = (drift_sum / length).to(tl.float32)[:, None]
    divisor = length
    if LEVEL == "sequence_sum":
        divisor = tl.full((SEQUENCES,), 1.0, tl.float64)
    ratio_of_all = (ratio_sum / divisor).to(tl.float32)[:, None]

    through_ratio = tl.zeros((SEQUENCES,), tl.float64)
    for done in range(0, longest, BLOCK):
        i = start[:, None] + done + block
        on = tl.load(scored + i, mask=i < stop[:, None], other=0) != 0
        column, found = table + i, values + i
        logp = tl.load(found + TOKEN_LOGP * tokens, mask=on, other=0.0)
        entropy = tl.load(found + TOKEN_ENTROPY * tokens, mask=on, other=0.0)
        A = tl.load(column + ADVANTAGE * tokens, mask=on, other=0.0)
        of_sequence = sequence_multiplier(A, log_weight_of_all, mean_drift, p, VESPO, MASKS_OFF_POLICY)
        multiplier = weighted(tl.load(column + MULTIPLIER * tokens, mask=on, other=0.0), of_sequence)
        if LEVEL == "token":
            x = own_log_ratio(column, tokens, on, logp, VARIANT.has_old)
        else:
            x = tl.broadcast_to(ratio_of_all, (SEQUENCES, BLOCK))
        token = load_token(column, tokens, on, x, logp, entropy, multiplier)
        value, d_ratio, d_direct, kl = token_objective(p, token, VARIANT)
        weight_direct = tl.load(column + WEIGHT_DIRECT * tokens, mask=on, other=0.0)
        g_logp = weighted(weight_direct, d_direct)
        if not SHARES_RATIO:
            g_logp += weighted(tl.load(column + WEIGHT_RATIO * tokens, mask=on, other=0.0), d_ratio)
        else:
            through_ratio += tl.sum(tl.where(on, weighted(weight_direct, d_ratio), 0.0).to(tl.float64), 1)
        store_objective(found, tokens, on, Objective(x, value, kl, g_logp))

    if SHARES_RATIO:
        tl.debug_barrier()  # g_logp, which other threads may have written
        share = (through_ratio / divisor).to(tl.float32)[:, None]
        for done in range(0, longest, BLOCK):
            i = start[:, None] + done + block
            on = tl.load(scored + i, mask=i < stop[:, None], other=0) != 0
            found = values + i
            logp = tl.load(found + TOKEN_LOGP * tokens, mask=on, other=0.0)
            raw = own_log_ratio(table + i, tokens, on, logp, VARIANT.has_old)
            counted = counted_log_ratio(table + i, tokens, on, raw, p, SURROGATE)
            inside = counted == raw  # no slope where GMPO clamps
            g_logp = tl.load(found + TOKEN_G_LOGP * tokens, mask=on, other=0.0) + tl.where(inside, share, 0.0)
            tl.store(found + TOKEN_G_LOGP * tokens, g_logp, mask=on)


def sequence_objective(sequences: slice, row_length: int | None, planned: PlannedTokens, params: KernelParams) -> None:
    """log_ratio, value, kl and g_logp of the scored tokens of these sequences from their logp and entropy."""
    table, count = planned.table, sequences.stop - sequences.start
    if count:
        launch = token_launch(table.device)
        sequence_objective_kernel[(triton.cdiv(count, launch.sequences),)](
            sequences.start, sequences.stop, planned.offsets, planned.lengths, planned.scored.view(torch.uint8),
            Batch.of(table, planned.values), table.shape[1], scalars(params), LEVEL=params.level,
            SHARES_RATIO=shares_ratio(params.level), VESPO=params.vespo,
            MASKS_OFF_POLICY=params.off_policy_threshold != math.inf, HAS_ROLLOUT=params.has_rollout,
            VARIANT=variant(params), SEQUENCES=launch.sequences, BLOCK=launch.block, num_warps=launch.num_warps,
        )  # fmt: skip

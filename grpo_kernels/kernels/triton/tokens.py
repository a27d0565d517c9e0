"""Tokens after the vocabulary is gone: the objective from log-probabilities, and sums over everything.

`sums` goes tokens -> sequences -> groups and the batch, in float64 and in index order: no atomics, and two runs give
the same bits. A program owns a few sequences and walks their tokens in blocks; then one program per group, and one for
the whole batch, walks the rows of sequence sums. Tokens that are not scored are never read, and show 0.

Per token: token_objective reads 9 floats and writes 4; sums reads 13 floats and one byte. 16,384 tokens are 1 MB: both
are launches of a few microseconds on an H200, two for sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import PlannedTokens, Rows, Sums, TokenValues
from ...names import COLUMNS, KernelParams
from ..launch import token_launch
from .arguments import Batch
from .layout import (
    ADVANTAGE,
    COLUMN_COUNT,
    COLUMN_WIDTH,
    OLD,
    ROLLOUT,
    ROLLOUT_WEIGHT,
    SUM_APPROX_KL,
    SUM_CISPO_CLIP,
    SUM_CLIP_HIGH,
    SUM_CLIP_LOW,
    SUM_DIVERGENCE,
    SUM_ENTROPY,
    SUM_KL,
    SUM_LOSS,
    SUM_MISMATCH,
    SUM_MISMATCH_COUNT,
    SUM_RATIO,
    SUM_ROLLOUT_WEIGHT,
    SUM_ROLLOUT_WEIGHT_SQ,
    SUM_TOKENS,
    SUM_ZERO_GRADIENT,
    TOKEN_DIVERGENCE,
    TOKEN_ENTROPY,
    TOKEN_G_LOGP,
    TOKEN_KL,
    TOKEN_LOG_RATIO,
    TOKEN_LOGP,
    TOKEN_VALUE,
    WEIGHT_DIRECT,
    WEIGHT_ENTROPY,
)
from .objective import clamped_log_ratio, evaluate_token, scalars, store_objective, variant
from .rows import place, tokens_of


@triton.jit(do_not_specialize=["place", "count", "tokens"])
def token_objective_kernel(place, batch, count, tokens, p, VARIANT: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = rows < count
    token = tokens_of(rows, place, live)
    found = batch.columns + token
    logp = tl.load(found + TOKEN_LOGP * tokens, mask=live, other=0.0)
    entropy = tl.load(found + TOKEN_ENTROPY * tokens, mask=live, other=0.0)
    objective = evaluate_token(batch.table + token, tokens, live, logp, entropy, p, VARIANT)
    store_objective(found, tokens, live, objective)


@triton.jit
def add_column(sums, column, values):
    """sums (SEQUENCES, COLUMN_WIDTH) float64 with the row sums of values (SEQUENCES, BLOCK) added in one column."""
    here = tl.arange(0, COLUMN_WIDTH)[None, :] == column
    return sums + tl.where(here, tl.sum(values.to(tl.float64), 1)[:, None], 0.0)


@triton.jit(do_not_specialize=["scored", "offsets", "count", "tokens"])
def sequence_kernel(
    scored, batch, offsets, exact, extrema, numbers, count, tokens, p, HAS_OLD: tl.constexpr,
    DIVIDES_BY_ROLLOUT: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per sequence a row of COLUMNS in float64 and in float32; the least and largest ratio, the largest mismatch."""
    sequence = tl.program_id(0).to(tl.int64) * SEQUENCES + tl.arange(0, SEQUENCES)
    live = sequence < count
    start = tl.load(offsets + sequence, mask=live, other=0)
    stop = tl.load(offsets + sequence + 1, mask=live, other=0)
    sums = tl.zeros((SEQUENCES, COLUMN_WIDTH), tl.float64)
    ratio_min = tl.full((SEQUENCES,), float("inf"), tl.float32)
    ratio_max = tl.full((SEQUENCES,), -float("inf"), tl.float32)
    mismatch_max = tl.full((SEQUENCES,), -float("inf"), tl.float32)
    for first in range(0, tl.max(stop - start, 0), BLOCK):
        i = start[:, None] + first + tl.arange(0, BLOCK)[None, :]
        on = tl.load(scored + i, mask=i < stop[:, None], other=0) != 0
        token, found = batch.table + i, batch.columns + i
        log_p = tl.load(found + TOKEN_LOGP * tokens, mask=on, other=0.0)
        h = tl.load(found + TOKEN_ENTROPY * tokens, mask=on, other=0.0)
        tl.store(found + TOKEN_LOGP * tokens, log_p, mask=i < stop[:, None])  # 0 where not scored
        tl.store(found + TOKEN_ENTROPY * tokens, h, mask=i < stop[:, None])
        A = tl.load(token + ADVANTAGE * tokens, mask=on, other=0.0)
        weight = tl.load(token + WEIGHT_DIRECT * tokens, mask=on, other=0.0)
        weight_entropy = tl.load(token + WEIGHT_ENTROPY * tokens, mask=on, other=0.0)
        rollout = tl.load(token + ROLLOUT * tokens, mask=on, other=float("nan"))
        rollout_weight = tl.load(token + ROLLOUT_WEIGHT * tokens, mask=on, other=0.0)
        old = log_p
        if HAS_OLD:
            given = tl.load(token + OLD * tokens, mask=on, other=0.0)
            old = tl.where(given == float("inf"), log_p, given)
        ratio = tl.exp(clamped_log_ratio(p, tl.load(found + TOKEN_LOG_RATIO * tokens, mask=on, other=0.0)))
        bounded = tl.where(ratio < p.delta, ratio, p.delta)
        known = on & (rollout == rollout)
        policy = old
        if DIVIDES_BY_ROLLOUT:  # then the mismatch is that of the current policy
            policy = log_p
        mismatch = tl.where(known, tl.abs(policy - rollout), 0.0)
        by_value = tl.where(weight != 0.0, weight * tl.load(found + TOKEN_VALUE * tokens, mask=on, other=0.0), 0.0)
        by_entropy = tl.where(weight_entropy != 0.0, weight_entropy * h, 0.0)
        zero_gradient = (
            on & (tl.load(found + TOKEN_G_LOGP * tokens, mask=on, other=0.0) == 0.0) & (weight_entropy == 0.0)
        )

        sums = add_column(sums, SUM_LOSS, by_value.to(tl.float64) + by_entropy)
        sums = add_column(sums, SUM_TOKENS, on)
        sums = add_column(sums, SUM_KL, tl.load(found + TOKEN_KL * tokens, mask=on, other=0.0))
        sums = add_column(sums, SUM_ENTROPY, h)
        sums = add_column(sums, SUM_RATIO, tl.where(on, ratio, 0.0))
        sums = add_column(sums, SUM_CLIP_LOW, on & (bounded < 1.0 - p.epsilon_low) & (A < 0.0))
        sums = add_column(sums, SUM_CLIP_HIGH, on & (bounded > 1.0 + p.epsilon_high) & (A > 0.0))
        sums = add_column(sums, SUM_CISPO_CLIP, on & (bounded > p.epsilon_high) & (A > 0.0))
        sums = add_column(sums, SUM_APPROX_KL, old.to(tl.float64) - log_p)
        sums = add_column(sums, SUM_MISMATCH, mismatch)
        sums = add_column(sums, SUM_MISMATCH_COUNT, known)
        sums = add_column(sums, SUM_ROLLOUT_WEIGHT, rollout_weight)
        sums = add_column(sums, SUM_ROLLOUT_WEIGHT_SQ, rollout_weight.to(tl.float64) * rollout_weight)
        sums = add_column(sums, SUM_ZERO_GRADIENT, zero_gradient)
        sums = add_column(sums, SUM_DIVERGENCE, tl.load(found + TOKEN_DIVERGENCE * tokens, mask=on, other=0.0))

        low = tl.min(tl.where(on, ratio, float("inf")), 1)
        high = tl.max(tl.where(on, ratio, -float("inf")), 1)
        drift = tl.max(tl.where(known, mismatch, -float("inf")), 1)
        ratio_min = tl.where(low < ratio_min, low, ratio_min)
        ratio_max = tl.where(high > ratio_max, high, ratio_max)
        mismatch_max = tl.where(drift > mismatch_max, drift, mismatch_max)
    column = tl.arange(0, COLUMN_WIDTH)
    inside = live[:, None] & (column < COLUMN_COUNT)[None, :]
    at = sequence[:, None] * COLUMN_COUNT + column[None, :]
    tl.store(exact + at, sums, mask=inside)
    tl.store(numbers + at, sums.to(tl.float32), mask=inside)
    tl.store(extrema + 3 * sequence, ratio_min, mask=live)
    tl.store(extrema + 3 * sequence + 1, ratio_max, mask=live)
    tl.store(extrema + 3 * sequence + 2, mismatch_max, mask=live)


@triton.jit(do_not_specialize=["group_index", "count", "num_groups"])
def group_kernel(exact, extrema, group_index, numbers, count, num_groups, BLOCK: tl.constexpr):
    """Programs 0 .. num_groups - 1 add up the sequences of their group, the last one adds up all."""
    group = tl.program_id(0)
    everything = group == num_groups
    column = tl.arange(0, COLUMN_WIDTH)
    wanted = column < COLUMN_COUNT
    acc = tl.zeros((COLUMN_WIDTH,), tl.float64)
    ratio_min, ratio_max, mismatch_max = float("inf"), -float("inf"), -float("inf")
    for first in range(0, count, BLOCK):
        sequence = first + tl.arange(0, BLOCK).to(tl.int64)
        mine = sequence < count
        if group_index is not None:
            mine = mine & (everything | (tl.load(group_index + sequence, mask=mine, other=-1) == group))
        rows = exact + sequence[:, None] * COLUMN_COUNT + column[None, :]
        acc += tl.sum(tl.load(rows, mask=mine[:, None] & wanted[None, :], other=0.0), 0)
        low = tl.min(tl.load(extrema + 3 * sequence, mask=mine, other=float("inf")), 0)
        high = tl.max(tl.load(extrema + 3 * sequence + 1, mask=mine, other=-float("inf")), 0)
        drift = tl.max(tl.load(extrema + 3 * sequence + 2, mask=mine, other=-float("inf")), 0)
        ratio_min = tl.where(low < ratio_min, low, ratio_min)
        ratio_max = tl.where(high > ratio_max, high, ratio_max)
        mismatch_max = tl.where(drift > mismatch_max, drift, mismatch_max)
    # Behind the rows of the sequences: those of the groups, then that of all, then the extrema.
    row = numbers + (count + group).to(tl.int64) * COLUMN_COUNT
    tl.store(row + column, acc.to(tl.float32), mask=wanted)
    if everything:
        tl.store(row + COLUMN_COUNT, ratio_min)
        tl.store(row + COLUMN_COUNT + 1, ratio_max)
        tl.store(row + COLUMN_COUNT + 2, mismatch_max)


# --- launchers ------------------------------------------------------------------------------------------------------


def token_objective(rows: Rows, table: Tensor, values: TokenValues, params: KernelParams) -> None:
    """log_ratio, value, kl and g_logp of these tokens from their logp and entropy."""
    count = rows.count
    if count:
        launch = token_launch(table.device)
        block = launch.sequences * launch.block
        token_objective_kernel[(triton.cdiv(count, block),)](
            place(rows), Batch.of(table, values), count, table.shape[1], scalars(params),
            VARIANT=variant(params), BLOCK=block, num_warps=launch.num_warps,
        )  # fmt: skip


def sums(planned: PlannedTokens, params: KernelParams, group_index: Tensor | None, num_groups: int) -> Sums:
    """What contract.Backend.sums says."""
    groups = 0 if group_index is None else num_groups
    table, scored, offsets = planned.table, planned.scored, planned.offsets
    sequences, device = offsets.numel() - 1, table.device
    numbers = torch.empty(Sums.size(sequences, groups), dtype=torch.float32, device=device)
    exact = torch.empty(sequences, len(COLUMNS), dtype=torch.float64, device=device)
    extrema = torch.empty(sequences, 3, dtype=torch.float32, device=device)
    launch = token_launch(device)
    if sequences:
        sequence_kernel[(triton.cdiv(sequences, launch.sequences),)](
            scored.view(torch.uint8), Batch.of(table, planned.values), offsets, exact, extrema, numbers, sequences,
            table.shape[1], scalars(params), HAS_OLD=params.has_old, DIVIDES_BY_ROLLOUT=params.divides_by_rollout,
            SEQUENCES=launch.sequences, BLOCK=launch.block, num_warps=launch.num_warps,
        )  # fmt: skip
    group_kernel[(groups + 1,)](
        exact, extrema, group_index, numbers, sequences, groups, BLOCK=64, num_warps=4
    )  # fmt: skip
    return Sums(numbers, sequences, groups)

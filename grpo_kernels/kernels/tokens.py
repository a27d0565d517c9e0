"""Tokens after the vocabulary is gone: the objective at given log-probabilities, and sums over everything.

`reduce` goes tokens -> sequences -> groups and the batch, in float64 and in index order: no atomics, and two runs give
the same bits. A program owns a few sequences and walks their tokens in blocks; then one program per group, and one for
the whole batch, walks the rows of sequence sums. Unscored tokens are never read.

Per token: objective reads 7 floats and writes 4; reduce reads 13 floats and one byte. 16,384 tokens are 1 MB: both are
launches of a few microseconds on an H200, two for reduce.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..params import COLUMN, COLUMNS, FIELD, KernelParams
from .launch import token_launch
from .objective import clamped_log_ratio, scalars, token_objective

ADVANTAGE: tl.constexpr = tl.constexpr(FIELD["advantage"])
BASE: tl.constexpr = tl.constexpr(FIELD["base"])
REF: tl.constexpr = tl.constexpr(FIELD["ref"])
MULTIPLIER: tl.constexpr = tl.constexpr(FIELD["multiplier"])
WEIGHT_DIRECT: tl.constexpr = tl.constexpr(FIELD["weight_direct"])
WEIGHT_ENTROPY: tl.constexpr = tl.constexpr(FIELD["weight_entropy"])
ENTROPY_THRESHOLD: tl.constexpr = tl.constexpr(FIELD["entropy_threshold"])
ROLLOUT: tl.constexpr = tl.constexpr(FIELD["rollout"])
ROLLOUT_WEIGHT: tl.constexpr = tl.constexpr(FIELD["rollout_weight"])

LOSS: tl.constexpr = tl.constexpr(COLUMN["loss"])
TOKENS: tl.constexpr = tl.constexpr(COLUMN["tokens"])
KL_SUM: tl.constexpr = tl.constexpr(COLUMN["kl"])
ENTROPY: tl.constexpr = tl.constexpr(COLUMN["entropy"])
RATIO: tl.constexpr = tl.constexpr(COLUMN["ratio"])
CLIP_LOW: tl.constexpr = tl.constexpr(COLUMN["clip_low"])
CLIP_HIGH: tl.constexpr = tl.constexpr(COLUMN["clip_high"])
CISPO_CLIP: tl.constexpr = tl.constexpr(COLUMN["cispo_clip"])
APPROX_KL: tl.constexpr = tl.constexpr(COLUMN["approx_kl"])
MISMATCH: tl.constexpr = tl.constexpr(COLUMN["mismatch"])
MISMATCH_COUNT: tl.constexpr = tl.constexpr(COLUMN["mismatch_count"])
WEIGHT_SUM: tl.constexpr = tl.constexpr(COLUMN["rollout_weight"])
WEIGHT_SQUARES: tl.constexpr = tl.constexpr(COLUMN["rollout_weight_sq"])
ZERO_GRADIENT: tl.constexpr = tl.constexpr(COLUMN["zero_gradient"])
COLUMN_COUNT: tl.constexpr = tl.constexpr(len(COLUMNS))
WIDTH: tl.constexpr = tl.constexpr(triton.next_power_of_2(len(COLUMNS)))


@triton.jit(do_not_specialize=["log_ratio", "logp", "entropy", "table", "out", "count", "pitch"])
def objective_kernel(
    log_ratio, logp, entropy, table, out, count, pitch, p,
    SURROGATE: tl.constexpr, KL: tl.constexpr, BIAS_CORRECTION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    token = table + i
    value, d_ratio, d_direct, kl = token_objective(
        p,
        tl.load(log_ratio + i, mask=live, other=0.0),
        tl.load(logp + i, mask=live, other=0.0),
        tl.load(entropy + i, mask=live, other=0.0),
        tl.load(token + ADVANTAGE * pitch, mask=live, other=0.0),
        tl.load(token + REF * pitch, mask=live, other=0.0),
        tl.load(token + MULTIPLIER * pitch, mask=live, other=0.0),
        tl.load(token + ENTROPY_THRESHOLD * pitch, mask=live, other=0.0),
        SURROGATE, KL, BIAS_CORRECTION,
    )  # fmt: skip
    tl.store(out + i, value, mask=live)
    tl.store(out + count + i, d_ratio, mask=live)
    tl.store(out + 2 * count + i, d_direct, mask=live)
    tl.store(out + 3 * count + i, kl, mask=live)


@triton.jit
def add_column(sums, column, values):
    """sums (SEQUENCES, WIDTH) float64 with the row sums of values (SEQUENCES, BLOCK) added in one column."""
    here = tl.arange(0, WIDTH)[None, :] == column
    return sums + tl.where(here, tl.sum(values.to(tl.float64), 1)[:, None], 0.0)


@triton.jit(do_not_specialize=[
    "scored", "log_ratio", "logp", "entropy", "value", "kl", "g_logp", "table", "cu_seqlens", "count", "pitch",
])  # fmt: skip
def sequence_kernel(
    scored, log_ratio, logp, entropy, value, kl, g_logp, table, cu_seqlens, sums_out, extrema_out, count, pitch, p,
    HAS_BASE: tl.constexpr, AGAINST_ROLLOUT: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64) * SEQUENCES + tl.arange(0, SEQUENCES)
    live = sequence < count
    start = tl.load(cu_seqlens + sequence, mask=live, other=0)
    stop = tl.load(cu_seqlens + sequence + 1, mask=live, other=0)
    sums = tl.zeros((SEQUENCES, WIDTH), tl.float64)
    ratio_min = tl.full((SEQUENCES,), float("inf"), tl.float32)
    ratio_max = tl.full((SEQUENCES,), -float("inf"), tl.float32)
    mismatch_max = tl.full((SEQUENCES,), -float("inf"), tl.float32)
    for first in range(0, tl.max(stop - start, 0), BLOCK):
        i = start[:, None] + first + tl.arange(0, BLOCK)[None, :]
        on = tl.load(scored + i, mask=i < stop[:, None], other=0) != 0
        token = table + i
        log_p = tl.load(logp + i, mask=on, other=0.0)
        h = tl.load(entropy + i, mask=on, other=0.0)
        A = tl.load(token + ADVANTAGE * pitch, mask=on, other=0.0)
        weight = tl.load(token + WEIGHT_DIRECT * pitch, mask=on, other=0.0)
        weight_entropy = tl.load(token + WEIGHT_ENTROPY * pitch, mask=on, other=0.0)
        rollout = tl.load(token + ROLLOUT * pitch, mask=on, other=float("nan"))
        rollout_weight = tl.load(token + ROLLOUT_WEIGHT * pitch, mask=on, other=0.0)
        base = log_p
        if HAS_BASE:
            base = tl.load(token + BASE * pitch, mask=on, other=0.0)
        ratio = tl.exp(clamped_log_ratio(p, tl.load(log_ratio + i, mask=on, other=0.0)))
        bounded = tl.where(ratio < p.delta, ratio, p.delta)
        known = on & (rollout == rollout)
        trained = base
        if AGAINST_ROLLOUT:
            trained = log_p
        mismatch = tl.where(known, tl.abs(trained - rollout), 0.0)
        by_value = tl.where(weight != 0.0, weight * tl.load(value + i, mask=on, other=0.0), 0.0)
        by_entropy = tl.where(weight_entropy != 0.0, weight_entropy * h, 0.0)
        still = on & (tl.load(g_logp + i, mask=on, other=0.0) == 0.0) & (weight_entropy == 0.0)

        sums = add_column(sums, LOSS, by_value.to(tl.float64) + by_entropy)
        sums = add_column(sums, TOKENS, on)
        sums = add_column(sums, KL_SUM, tl.load(kl + i, mask=on, other=0.0))
        sums = add_column(sums, ENTROPY, h)
        sums = add_column(sums, RATIO, tl.where(on, ratio, 0.0))
        sums = add_column(sums, CLIP_LOW, on & (bounded < 1.0 - p.epsilon_low) & (A < 0.0))
        sums = add_column(sums, CLIP_HIGH, on & (bounded > 1.0 + p.epsilon_high) & (A > 0.0))
        sums = add_column(sums, CISPO_CLIP, on & (bounded > p.epsilon_high) & (A > 0.0))
        sums = add_column(sums, APPROX_KL, base.to(tl.float64) - log_p)
        sums = add_column(sums, MISMATCH, mismatch)
        sums = add_column(sums, MISMATCH_COUNT, known)
        sums = add_column(sums, WEIGHT_SUM, rollout_weight)
        sums = add_column(sums, WEIGHT_SQUARES, rollout_weight.to(tl.float64) * rollout_weight)
        sums = add_column(sums, ZERO_GRADIENT, still)

        low = tl.min(tl.where(on, ratio, float("inf")), 1)
        high = tl.max(tl.where(on, ratio, -float("inf")), 1)
        drift = tl.max(tl.where(known, mismatch, -float("inf")), 1)
        ratio_min = tl.where(low < ratio_min, low, ratio_min)
        ratio_max = tl.where(high > ratio_max, high, ratio_max)
        mismatch_max = tl.where(drift > mismatch_max, drift, mismatch_max)
    column = tl.arange(0, WIDTH)
    inside = live[:, None] & (column < COLUMN_COUNT)[None, :]
    tl.store(sums_out + sequence[:, None] * COLUMN_COUNT + column[None, :], sums, mask=inside)
    tl.store(extrema_out + 3 * sequence, ratio_min, mask=live)
    tl.store(extrema_out + 3 * sequence + 1, ratio_max, mask=live)
    tl.store(extrema_out + 3 * sequence + 2, mismatch_max, mask=live)


@triton.jit(do_not_specialize=["group_index", "count", "num_groups"])
def group_kernel(
    sums, extrema, group_index, group_out, totals, extrema_out, count, num_groups, BLOCK: tl.constexpr
):  # fmt: skip
    """Programs 0 .. num_groups - 1 add up the sequences of their group, the last one adds up all."""
    group = tl.program_id(0)
    everything = group == num_groups
    column = tl.arange(0, WIDTH)
    wanted = column < COLUMN_COUNT
    acc = tl.zeros((WIDTH,), tl.float64)
    ratio_min, ratio_max, mismatch_max = float("inf"), -float("inf"), -float("inf")
    for first in range(0, count, BLOCK):
        sequence = first + tl.arange(0, BLOCK).to(tl.int64)
        mine = sequence < count
        if group_index is not None:
            mine = mine & (everything | (tl.load(group_index + sequence, mask=mine, other=-1) == group))
        rows = sums + sequence[:, None] * COLUMN_COUNT + column[None, :]
        acc += tl.sum(tl.load(rows, mask=mine[:, None] & wanted[None, :], other=0.0), 0)
        low = tl.min(tl.load(extrema + 3 * sequence, mask=mine, other=float("inf")), 0)
        high = tl.max(tl.load(extrema + 3 * sequence + 1, mask=mine, other=-float("inf")), 0)
        drift = tl.max(tl.load(extrema + 3 * sequence + 2, mask=mine, other=-float("inf")), 0)
        ratio_min = tl.where(low < ratio_min, low, ratio_min)
        ratio_max = tl.where(high > ratio_max, high, ratio_max)
        mismatch_max = tl.where(drift > mismatch_max, drift, mismatch_max)
    if everything:
        tl.store(totals + column, acc.to(tl.float32), mask=wanted)
        tl.store(extrema_out, ratio_min)
        tl.store(extrema_out + 1, ratio_max)
        tl.store(extrema_out + 2, mismatch_max)
    else:
        tl.store(group_out + group.to(tl.int64) * COLUMN_COUNT + column, acc.to(tl.float32), mask=wanted)


# --- launchers ------------------------------------------------------------------------------------------------------


def objective(
    log_ratio: Tensor, logp: Tensor, entropy: Tensor, table: Tensor, params: KernelParams
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(value, d_ratio, d_direct, kl), (N,) each, at the raw log ratios (N,)."""
    count = log_ratio.numel()
    out = torch.empty(4, count, dtype=torch.float32, device=log_ratio.device)
    if count:
        launch = token_launch(log_ratio.device)
        block = launch.sequences * launch.block
        objective_kernel[(triton.cdiv(count, block),)](
            log_ratio, logp, entropy, table, out, count, table.stride(0), scalars(params),
            SURROGATE=params.surrogate, KL=params.kl, BIAS_CORRECTION=params.bias_correction,
            BLOCK=block, num_warps=launch.num_warps,
        )  # fmt: skip
    return out[0], out[1], out[2], out[3]


def reduce(
    scored: Tensor,
    log_ratio: Tensor,
    logp: Tensor,
    entropy: Tensor,
    value: Tensor,
    kl: Tensor,
    g_logp: Tensor,
    table: Tensor,
    params: KernelParams,
    cu_seqlens: Tensor,
    group_index: Tensor | None,
    num_groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(sequence_sums (S, K) float64, group_sums (num_groups, K), totals (K,), extrema (3,)); K as in params.COLUMNS."""
    sequences, device = cu_seqlens.numel() - 1, scored.device
    groups = 0 if group_index is None else num_groups
    sums = torch.empty(sequences, len(COLUMNS), dtype=torch.float64, device=device)
    extrema = torch.empty(sequences, 3, dtype=torch.float32, device=device)
    group_sums = torch.empty(groups, len(COLUMNS), dtype=torch.float32, device=device)
    totals, total_extrema = group_sums.new_empty(len(COLUMNS)), group_sums.new_empty(3)
    launch = token_launch(device)
    if sequences:
        sequence_kernel[(triton.cdiv(sequences, launch.sequences),)](
            scored.view(torch.uint8), log_ratio, logp, entropy, value, kl, g_logp, table, cu_seqlens, sums, extrema,
            sequences, table.stride(0), scalars(params),
            HAS_BASE=params.has_base,
            # DPPO and IPO divide by the rollout itself: there the current policy is compared with it.
            AGAINST_ROLLOUT=params.surrogate in ("dppo_tv", "ipo"),
            SEQUENCES=launch.sequences, BLOCK=launch.block, num_warps=launch.num_warps,
        )  # fmt: skip
    group_kernel[(groups + 1,)](
        sums, extrema, group_index, group_sums, totals, total_extrema, sequences, groups, BLOCK=64, num_warps=4
    )
    return sums, group_sums, totals, total_extrema

"""The loss of single tokens in one launch: objective/loss.py in closed form for clip, CISPO's family, SAPO, reinforce.

    value = surrogate_scale * surrogate(x, logp, A) + beta * KL(ref, logp)          x = logp - old, r = exp(clamp(x))
    d loss / d logp = dloss_via_ratio * d value / d x + dloss_direct * d value / d logp

token_kernel: d loss / d logp of a chunk's tokens, by their places. sequence_kernel: of all tokens, and the sums of
COLUMNS per sequence, of which a program owns a few and walks them in blocks; the program that ends last adds
them up for each group and for the batch. Sums are float64 and their order is fixed: two calls have the same bits.

Which surrogate and estimator, and which inputs are there, is compiled in; numbers of the configuration are not. A
factor of 0 selects 0: what it would multiply may be infinite. NaN logits stay NaN, whatever drops their token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...names import EXPONENT_LIMIT
from ..fused_objective import CLIPPING, COLUMN, COLUMNS, EXTREMA, Columns, ObjectiveInputs, memory_of_sums
from ..launch import launch_of
from ..operations import Rows
from .maths import expm1
from .rows import token_index, tokens_of

MAX_EXPONENT: tl.constexpr = tl.constexpr(EXPONENT_LIMIT)

COLUMN_COUNT: tl.constexpr = tl.constexpr(len(COLUMNS))
COLUMN_WIDTH: tl.constexpr = tl.constexpr(16)
MEASURES: tl.constexpr = tl.constexpr(len(COLUMNS) + len(EXTREMA))  # the extrema are the last
LANES: tl.constexpr = tl.constexpr(16)  # sequences that are added up at once,
ROWS: tl.constexpr = tl.constexpr(8)  # in so many rows of sums


class Variant(NamedTuple):
    """What is compiled in."""

    surrogate: str
    kl: str
    clips: bool  # there are metrics of a clip range
    column: Columns = COLUMN


class Token(NamedTuple):
    """What is known of tokens, (BLOCK,) each."""

    x: Any  # raw log-ratio
    ratio: Any
    value: Any
    kl: Any
    share: Any  # in the loss
    dlogp: Any
    A: Any


@triton.jit
def clamp(x, low, high):
    """Returns x within [low, high]; NaN stays NaN."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def clip(p, r, clamped, A):
    """Returns (value, d value / d x)."""
    low, high = 1.0 - p.epsilon_low, 1.0 + p.epsilon_high
    first, second = -A * tl.where(r > p.delta, p.delta, r), -A * clamp(r, low, high)
    takes_second = first < second
    moves = tl.where(takes_second, (r >= low) & (r <= high), ~(r > p.delta))
    value = tl.where(takes_second, second, first)
    bound = tl.where(A < 0.0, -A * p.dual_clip, float("inf"))
    still = clamped | ~moves | (value > bound)
    return tl.where(value > bound, bound, value), tl.where(still, 0.0, -A * r)


@triton.jit
def weighted_logp(p, r, logp, A, SURROGATE: tl.constexpr):
    """Returns (value, d value / d logp): the ratio within its bounds is a constant weight."""
    if SURROGATE == "reinforce":
        slope = tl.where(logp != logp, logp, -A)
    elif SURROGATE == "cispo":
        slope = -A * tl.where(r > p.epsilon_high, p.epsilon_high, r)
    else:
        low, high = 1.0 - p.epsilon_low, 1.0 + p.epsilon_high
        slope = -A * clamp(r, low, high)
    value = slope * logp
    if SURROGATE == "cispo_mask":
        drop = (r <= low) | (r >= high)
        slope, value = tl.where(drop, 0.0, slope), tl.where(drop, 0.0, value)
    if SURROGATE == "cispo_unified":
        drop = ((A > 0.0) & (r > high)) | ((A < 0.0) & (r < low))
        slope, value = tl.where(drop, 0.0, slope), tl.where(drop, 0.0, value)
    return value, slope


@triton.jit
def sapo(p, r, clamped, A):
    """Returns (value, d value / d x); the gate and its complement are each computed without cancellation."""
    tau = tl.where(A > 0.0, p.sapo_temperature_pos, p.sapo_temperature_neg)
    at = tau * (r - 1.0)
    decay = tl.exp(-tl.abs(at))
    far, near = decay / (1.0 + decay), 1.0 / (1.0 + decay)
    gate = tl.where(at < 0.0, far, near)
    return -(4.0 / tau) * gate * A, tl.where(clamped, 0.0, -4.0 * (far * near) * A * r)


@triton.jit
def kl_estimate(p, logp, ref, KL: tl.constexpr):
    """Returns (estimate under its clamps, d estimate / d logp)."""
    raw = ref - logp
    upper = p.kl_delta_clamp
    if KL == "k3":
        upper = tl.where(upper > MAX_EXPONENT, MAX_EXPONENT, upper)
    d = clamp(raw, -p.kl_delta_clamp, upper)
    if KL == "k1":
        free, slope = -d, tl.full(d.shape, 1.0, d.dtype)
    elif KL == "k2":
        free, slope = 0.5 * d * d, -d
    else:
        growth = expm1(d)
        free, slope = growth - d, -growth
    value = clamp(free, -p.kl_clamp, p.kl_clamp)
    still = (raw < -p.kl_delta_clamp) | (raw > upper) | (value != free) & (free == free)
    return value, tl.where(still, 0.0, slope)


@triton.jit
def weighted(weight, x):
    """Returns weight x, and 0 where the weight is 0, whatever x is."""
    return tl.where(weight != 0.0, weight * x, 0.0)


@triton.jit
def evaluate(at, live, logp, advantage, dloss_direct, dloss_via_ratio, old, ref, scale, p, VARIANT: tl.constexpr):
    SURROGATE: tl.constexpr = VARIANT.surrogate
    A = tl.load(advantage + at, mask=live, other=0.0)
    x = logp - logp
    if old is not None:
        x = logp - tl.load(old + at, mask=live, other=0.0)
    bound = tl.where(p.log_ratio_clamp < MAX_EXPONENT, p.log_ratio_clamp, MAX_EXPONENT)
    exponent = clamp(x, -p.log_ratio_clamp, bound)
    r, clamped = tl.exp(exponent), (x < -p.log_ratio_clamp) | (x > bound)
    grad_log_ratio, grad_logp = tl.zeros_like(A), tl.zeros_like(A)
    if SURROGATE == "clip":
        value, grad_log_ratio = clip(p, r, clamped, A)
    elif SURROGATE == "sapo":
        value, grad_log_ratio = sapo(p, r, clamped, A)
    else:
        value, grad_logp = weighted_logp(p, r, logp, A, SURROGATE)
    if scale is not None:
        factor = tl.load(scale + at, mask=live, other=0.0)
        drop = (factor == 0.0) & (x == x)
        value, grad_log_ratio = tl.where(drop, 0.0, factor * value), tl.where(drop, 0.0, factor * grad_log_ratio)
        grad_logp = tl.where(drop, 0.0, factor * grad_logp)
    kl = tl.zeros_like(A)
    KL: tl.constexpr = VARIANT.kl
    if KL != "none":
        kl, d_kl = kl_estimate(p, logp, tl.load(ref + at, mask=live, other=0.0), KL)
        penalised = p.beta != 0.0
        value += tl.where(penalised, p.beta * kl, 0.0)
        grad_logp += tl.where(penalised, p.beta * d_kl, 0.0)
    weight = tl.load(dloss_direct + at, mask=live, other=0.0)
    dlogp = weighted(tl.load(dloss_via_ratio + at, mask=live, other=0.0), grad_log_ratio) + weighted(weight, grad_logp)
    return Token(x, r, value, kl, weighted(weight, value), dlogp, A)


_PER_TOKEN = ["logp", "dlogp", "advantage", "dloss_direct", "dloss_via_ratio", "old", "ref", "scale"]


@triton.jit(do_not_specialize=["token_index", "first_token", "count", *_PER_TOKEN])
def token_kernel(
    token_index, first_token, count, logp, dlogp, advantage, dloss_direct, dloss_via_ratio, old, ref, scale, p,
    VARIANT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = rows < count
    at = tokens_of(rows, token_index, first_token, live)
    known = tl.load(logp + at, mask=live, other=0.0)
    token = evaluate(at, live, known, advantage, dloss_direct, dloss_via_ratio, old, ref, scale, p, VARIANT)
    tl.store(dlogp + at, token.dlogp, mask=live)


@triton.jit
def add_column(sums, column: tl.constexpr, values):
    """Returns sums (SEQUENCES, COLUMN_WIDTH) float64 with the row sums of values (SEQUENCES, BLOCK) added in one
    column."""
    is_column = tl.arange(0, COLUMN_WIDTH)[None, :] == column
    return sums + tl.where(is_column, tl.sum(values.to(tl.float64), 1)[:, None], 0.0)


@triton.jit
def smaller(x, y):
    """Returns the smaller of x and y; NaN stays NaN."""
    return tl.where((y < x) | (y != y), y, x)


@triton.jit
def larger(x, y):
    return tl.where((y > x) | (y != y), y, x)


@triton.jit
def add_sequences(exact, group_index, numbers, count, num_groups):
    """Stores the sums of the groups and of the batch, and the extrema, behind the rows of the sequences.

    It reads from the L2 cache, where other programs have written.
    """
    column, lane = tl.arange(0, COLUMN_WIDTH), tl.arange(0, LANES)
    wanted = column < COLUMN_COUNT
    for first_row in range(0, num_groups + 1, ROWS):
        row = first_row + tl.arange(0, ROWS)
        acc = tl.zeros((ROWS, COLUMN_WIDTH), tl.float64)
        for first in range(0, count, LANES):
            sequence = first + lane
            live = sequence < count
            at = exact + sequence[:, None].to(tl.int64) * MEASURES + column[None, :]
            sums = tl.load(at, mask=live[:, None] & wanted[None, :], other=0.0, cache_modifier=".cg")
            mine = (row == num_groups)[:, None] & live[None, :]
            if group_index is not None:
                group = tl.load(group_index + sequence, mask=live, other=-1)
                mine = mine | (row[:, None] == group[None, :])
            acc += tl.sum(tl.where(mine[:, :, None], sums[None, :, :], 0.0), 1)
        at = numbers + (count + row)[:, None].to(tl.int64) * COLUMN_COUNT + column[None, :]
        tl.store(at, acc.to(tl.float32), mask=(row <= num_groups)[:, None] & wanted[None, :])

    low = tl.full((LANES,), float("inf"), tl.float64)
    high, drift = -low, -low
    for first in range(0, count, LANES):
        live = first + lane < count
        at = exact + (first + lane).to(tl.int64) * MEASURES + COLUMN_COUNT
        low = smaller(low, tl.load(at, mask=live, other=float("inf"), cache_modifier=".cg"))
        high = larger(high, tl.load(at + 1, mask=live, other=-float("inf"), cache_modifier=".cg"))
        drift = larger(drift, tl.load(at + 2, mask=live, other=-float("inf"), cache_modifier=".cg"))
    extrema = numbers + (count + num_groups + 1).to(tl.int64) * COLUMN_COUNT
    tl.store(extrema, tl.reduce(low, 0, smaller).to(tl.float32))
    tl.store(extrema + 1, tl.reduce(high, 0, larger).to(tl.float32))
    tl.store(extrema + 2, tl.reduce(drift, 0, larger).to(tl.float32))


_PER_BATCH = ["offsets", "count", "scored", "entropy", "rollout", "rollout_weight", "group_index", "num_groups"]


@triton.jit(do_not_specialize=[*_PER_BATCH, *_PER_TOKEN])
def sequence_kernel(
    offsets, count, scored, entropy, rollout, rollout_weight, group_index, num_groups, numbers, exact, counter,
    logp, dlogp, advantage, dloss_direct, dloss_via_ratio, old, ref, scale, p, VARIANT: tl.constexpr,
    SEQUENCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores for each sequence a row of COLUMNS in float64 and in float32, and in float64 the least and largest ratio
    and the largest mismatch."""
    sequence = tl.program_id(0).to(tl.int64) * SEQUENCES + tl.arange(0, SEQUENCES)
    live = sequence < count
    start = tl.load(offsets + sequence, mask=live, other=0)
    stop = tl.load(offsets + sequence + 1, mask=live, other=0)
    sums = tl.zeros((SEQUENCES, COLUMN_WIDTH), tl.float64)
    low = tl.full((SEQUENCES,), float("inf"), tl.float32)
    high, drift = -low, -low
    for first in range(0, tl.max(stop - start, 0), BLOCK):
        at = start[:, None] + first + tl.arange(0, BLOCK)[None, :]
        inside = at < stop[:, None]
        known = tl.load(logp + at, mask=inside, other=0.0)
        token = evaluate(at, inside, known, advantage, dloss_direct, dloss_via_ratio, old, ref, scale, p, VARIANT)
        tl.store(dlogp + at, token.dlogp, mask=inside)

        on = inside
        if scored is not None:
            on = inside & (tl.load(scored + at, mask=inside, other=0) != 0)
        COLUMN: tl.constexpr = VARIANT.column
        sums = add_column(sums, COLUMN.loss, tl.where(on, token.share, 0.0))
        sums = add_column(sums, COLUMN.tokens, on)
        sums = add_column(sums, COLUMN.kl, tl.where(on, token.kl, 0.0))
        sums = add_column(sums, COLUMN.entropy, tl.where(on, tl.load(entropy + at, mask=on, other=0.0), 0.0))
        sums = add_column(sums, COLUMN.ratio, tl.where(on, token.ratio, 0.0))
        bounded = tl.where(token.ratio > p.delta, p.delta, token.ratio)
        if VARIANT.clips:
            sums = add_column(sums, COLUMN.clip_low, on & (bounded < 1.0 - p.epsilon_low) & (token.A < 0.0))
            sums = add_column(sums, COLUMN.clip_high, on & (bounded > 1.0 + p.epsilon_high) & (token.A > 0.0))
        if VARIANT.surrogate == "cispo":
            sums = add_column(sums, COLUMN.cispo_clip, on & (bounded > p.epsilon_high) & (token.A > 0.0))
        sums = add_column(sums, COLUMN.approx_kl, tl.where(on, -token.x, 0.0))
        if rollout is not None:
            sampled = tl.load(rollout + at, mask=on, other=float("nan"))
            has_rollout = on & (sampled == sampled)
            policy = known
            if old is not None:
                policy = tl.load(old + at, mask=on, other=0.0)
            mismatch = tl.abs(policy - sampled)
            sums = add_column(sums, COLUMN.mismatch, tl.where(has_rollout, mismatch, 0.0))
            sums = add_column(sums, COLUMN.mismatch_count, has_rollout)
            drift = larger(drift, tl.reduce(tl.where(has_rollout, mismatch, -float("inf")), 1, larger))
        weight = on.to(tl.float32)
        if rollout_weight is not None:
            weight = tl.load(rollout_weight + at, mask=on, other=0.0)
        sums = add_column(sums, COLUMN.rollout_weight, weight)
        sums = add_column(sums, COLUMN.rollout_weight_sq, weight.to(tl.float64) * weight)
        sums = add_column(sums, COLUMN.zero_gradient, on & (token.dlogp == 0.0))
        least, most = tl.where(on, token.ratio, float("inf")), tl.where(on, token.ratio, -float("inf"))
        low, high = smaller(low, tl.reduce(least, 1, smaller)), larger(high, tl.reduce(most, 1, larger))
    column = tl.arange(0, COLUMN_WIDTH)
    wanted = live[:, None] & (column < COLUMN_COUNT)[None, :]
    tl.store(exact + sequence[:, None] * MEASURES + column[None, :], sums, mask=wanted)
    tl.store(numbers + sequence[:, None] * COLUMN_COUNT + column[None, :], sums.to(tl.float32), mask=wanted)
    extrema = exact + sequence * MEASURES + COLUMN_COUNT
    tl.store(extrema, low.to(tl.float64), mask=live)
    tl.store(extrema + 1, high.to(tl.float64), mask=live)
    tl.store(extrema + 2, drift.to(tl.float64), mask=live)

    tl.debug_barrier()  # all threads have written before one of them counts the program
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        add_sequences(exact, group_index, numbers, count, num_groups)


# --- launchers ------------------------------------------------------------------------------------------------------


def objective(
    inputs: ObjectiveInputs, logp: Tensor, entropy: Tensor, dlogp: Tensor, rows: Rows | None
) -> Tensor | None:
    """Writes d loss / d logp (N,) of these tokens. Without rows of all tokens; then it returns Sums in one row."""
    launch, count = launch_of(logp.device).tokens, inputs.num_sequences
    loss_inputs = (
        logp, dlogp, inputs.advantage, inputs.dloss_direct, inputs.dloss_via_ratio, inputs.old, inputs.ref,
        inputs.surrogate_scale, inputs.numbers, Variant(inputs.surrogate, inputs.kl, inputs.surrogate in CLIPPING),
    )  # fmt: skip
    if rows is not None:
        block = launch.sequences * launch.block
        if rows.count:
            token_kernel[(triton.cdiv(rows.count, block),)](
                *token_index(rows, inputs.offsets), rows.count, *loss_inputs, BLOCK=block, num_warps=launch.num_warps
            )  # fmt: skip
        return None
    numbers, exact, counter = memory_of_sums(inputs)
    scored = None if inputs.scored is None else inputs.scored.view(torch.uint8)
    sequence_kernel[(max(1, triton.cdiv(count, launch.sequences)),)](
        inputs.offsets, count, scored, entropy, inputs.rollout, inputs.rollout_weight, inputs.group_index,
        inputs.num_groups, numbers, exact, counter, *loss_inputs, SEQUENCES=launch.sequences, BLOCK=launch.block,
        num_warps=launch.num_warps,
    )  # fmt: skip
    return numbers

"""Rows of logits: their statistics and their gradient.

The gradient takes in that of the divergence to a teacher (teacher.py) whose rows are given beside the logits.

    u = logit + bias
    y = u, or cap * tanh(scale * u / cap)          z = y * to_z          to_z = scale / T, or 1 / T with a softcap
    S = sum_j e^(z_j - m)    lse = m + log S       logp = (z_id - m) - log S, -log1p(S - 1) at z_id = m
    entropy = log S - sum_j e^(z_j - m) (z_j - m) / S           (nothing cancels: both terms are >= 0)
    dz_j = dlogp (1[j = id] - p_j) - dentropy p_j (log p_j + entropy),    du_j = dz_j * dz/du

A program owns `ROWS` rows (one on a GPU), of the tokens `token_index` or from `first_token` on, and walks them in
blocks. What belongs to a token is read and written at its place in the batch.

An exponential is 2^t with t = (y - max) * to_z log2(e): its error grows with the distance from the maximum, where the
term no longer counts. Sums of a block are float32 trees, sums over blocks float64.

The statistics run from the end of the row to its start and the gradient from the start to the end, so that it begins
with what the L2 cache still holds. The gradient may overwrite the logits, in float32 or as 16-bit values over the front
of the same row: a block is read by all threads before any of them writes, and what is written lies at or before what
has been read.

A mask keeps 128-bit accesses only if it provably never ends within 16 bytes, so blocks end at the last multiple of
`GROUP` columns. Where V is no multiple (`RAGGED`), half a block follows for the columns that are left, in a loop of one
turn, without which LLVM keeps its addresses and masks from one sweep to the other; otherwise it is not compiled. Rows
must provably start on 16 bytes as well: chunk_row_stride aligns the scratch's; a caller's own logits may have any row
stride, and are then read one by one.

Per logit of a (C, V) float32 chunk with 16-bit gradients:
    statistics     reads 4 bytes; 1 exponential, about 8 operations
    gradient       reads 4, writes 2; 1 exponential, about 8
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch_of
from ..operations import LogitChunk, PolicyTransform, Rows, TeacherTransform
from .divergence import LogProbParams, TeacherPair, divergence_gradient
from .maths import INV_LN2, LN2, expm1, exponent, log1p, softcap

GROUP: tl.constexpr = tl.constexpr(16)  # Triton's compiler only keeps track of whether 16 divides an integer
PER_TOKEN = "ids", "token_index", "first_token", "temperature"  # arguments that no kernel of rows is specialised for


@triton.jit
def logit_scales(p, temperature, CAPPED: tl.constexpr):
    """Returns (to_z, dz/du without the softcap's slope) in float64."""
    dz_du = p.logit_scale / temperature.to(tl.float64)
    if CAPPED:
        return 1.0 / temperature.to(tl.float64), dz_du
    return dz_du, dz_du


class Row(NamedTuple):
    """The rows of a program, (ROWS,) each unless told."""

    at: Any  # places in the chunk
    token: Any  # places in the batch
    live: Any
    ids: Any  # sampled
    known: Any  # there is a sampled id
    temperature: Any
    u: Any  # pointers to their first logits
    bias: Any  # pointer to (V,), or None
    vocab: Any  # number of columns


class RowSums(NamedTuple):
    """What a sweep gathers of a row, relative to its largest y so far: (ROWS,) each."""

    top: Any  # that maximum, float32
    exps: Any  # sum of 2^t, float64
    moment: Any  # sum of 2^t t, float64


class GradientTerms(NamedTuple):
    """What the gradient du_j = 2^t (constant + linear t) slope_j is computed from; the sampled id has du_id. (ROWS,)
    each."""

    top: Any
    to_exponent: Any
    constant: Any
    linear: Any
    du_id: Any
    known: Any  # there is a sampled id, and a gradient
    is_zero: Any  # without a gradient, whatever the row holds


class RowOptions(NamedTuple):
    """What is compiled into a kernel of rows."""

    capped: bool  # the logits have a softcap
    ragged: bool  # the vocabulary does not end at a multiple of GROUP
    rows: int
    block: int
    overlap: bool = False  # what is written lies over logits of a wider type
    teacher_capped: bool = False
    divergence: str | None = None


class Logits(NamedTuple):
    """(C, V) and its bias."""

    data: Tensor
    bias: Tensor | None
    vocab: int
    row_stride: int


class TeacherStatistics(NamedTuple):
    """Of all tokens; see operations.TeacherLogits."""

    divergence: Tensor
    policy_kl: Tensor
    lse: Tensor


TeacherScalars = namedtuple("TeacherScalars", TeacherTransform._fields[1:])  # type: ignore[misc]


class Gradient(NamedTuple):
    data: Tensor
    row_stride: int


@triton.jit
def rows_of_program(logits, ids, token_index, first_token, temperature, count, ROWS: tl.constexpr):
    """Returns the first fields of Row: a function of Triton 3.4 returns no None, which the bias may be."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    token = tokens_of(rows, token_index, first_token, live)
    id_ = tl.load(ids + token, mask=live, other=-1)
    T = tl.load(temperature + token, mask=live, other=1.0)
    known = live & (id_ >= 0) & (id_ < logits.vocab)
    return rows, token, live, id_, known, T, rows_of(logits, rows)


@triton.jit
def tokens_of(rows, token_index, first_token, live):
    """Returns the positions of rows in the batch: from first_token on, or where that is -1, those of `token_index`.

    Which of the two is known at run time only: a captured call leaves no row out, where its warm-up did, and compiles
    nothing.
    """
    listed = tl.load(token_index + rows, mask=live & (first_token < 0), other=0)
    return tl.where(first_token < 0, listed, rows + first_token)


@triton.jit
def rows_of(matrix, rows):
    """Returns pointers to the first elements of rows."""
    return matrix.data + rows * matrix.row_stride


@triton.jit
def no_sums(ROWS: tl.constexpr):
    """Returns RowSums of no column."""
    return RowSums(
        tl.full((ROWS,), -float("inf"), tl.float32), tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
    )


@triton.jit
def add_block(y, sums, to_exponent):
    """Returns RowSums with a block y (ROWS, BLOCK) added."""
    block_top = tl.max(y, 1)
    new_top = tl.where(block_top > sums.top, block_top, sums.top)
    # Before the first finite logit any finite reference will do: all terms are 0, or NaN.
    reference = tl.where(new_top == -float("inf"), 0.0, new_top)
    t = exponent(y, reference[:, None], to_exponent[:, None])
    e = tl.exp2(t)
    # Every earlier t falls by this much.
    fall = tl.where(sums.top == -float("inf"), 0.0, (new_top - sums.top) * to_exponent)
    factor = tl.exp2(-fall).to(tl.float64)
    moment = (sums.moment - sums.exps * fall) * factor + tl.sum(e * t, 1).to(tl.float64)
    exps = sums.exps * factor + tl.sum(e, 1).to(tl.float64)
    return RowSums(new_top, exps, moment)


@triton.jit
def load_logits(row, columns, end, wanted):
    """Returns the float32 logits (ROWS, COLUMNS), bias included; 0 where none is wanted."""
    logits = tl.load(row.u[:, None] + columns[None, :], mask=wanted, other=0.0).to(tl.float32)
    if row.bias is not None:
        # A row of its own: the same threads hold a column of it and of the logits.
        logits += tl.load((row.bias + columns)[None, :], mask=(columns < end)[None, :], other=0.0)
    return logits


@triton.jit
def load_sampled(row, known):
    """Returns the float32 logit of each row's sampled id, bias included."""
    logit = tl.load(row.u + row.ids, mask=known, other=0.0).to(tl.float32)
    if row.bias is not None:
        logit += tl.load(row.bias + row.ids, mask=known, other=0.0)
    return logit


# --- statistics -----------------------------------------------------------------------------------------------------


@triton.jit
def add_columns(row, left_out, first, end, sums, to_exponent, p, CAPPED: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns RowSums with the columns from `first` to `end` added, at most COLUMNS, except the column left out of each
    row."""
    columns = first + tl.arange(0, COLUMNS)
    inside = row.live[:, None] & (columns < end)[None, :]
    y, _ = softcap(load_logits(row, columns, end, inside), p.logit_scale, p.softcap, CAPPED)
    y = tl.where(inside & (columns[None, :] != left_out[:, None]), y, -float("inf"))
    return add_block(y, sums, to_exponent)


@triton.jit
def row_sums(row, left_out, to_z, p, CAPPED: tl.constexpr, OPTIONS: tl.constexpr):
    """Returns RowSums of rows without the column `left_out` of each; -1: of whole rows."""
    BLOCK: tl.constexpr = OPTIONS.block
    to_exponent = (to_z * INV_LN2).to(tl.float32)
    sums = no_sums(OPTIONS.rows)
    end = row.vocab
    if OPTIONS.ragged:
        end = row.vocab // GROUP * GROUP
        for first in range(end, row.vocab, BLOCK // 2):
            sums = add_columns(row, left_out, first, row.vocab, sums, to_exponent, p, CAPPED, BLOCK // 2)
    blocks = tl.cdiv(end, BLOCK)
    for i in range(blocks):
        first = (blocks - 1 - i) * BLOCK
        sums = add_columns(row, left_out, first, end, sums, to_exponent, p, CAPPED, BLOCK)
    return sums


@triton.jit
def add_sampled(others, y_id, known, to_z):
    """Returns (top, log S relative to it, entropy, logp) from RowSums of the other ids.

    The others would be lost next to the sampled id's exponential where p is near 1. Where it is the largest, log S is
    therefore log1p(sum of the others).
    """
    counts = known & (y_id != -float("inf"))
    ahead = (y_id.to(tl.float64) - others.top.to(tl.float64)) * to_z
    leads = counts & (ahead > 0.0)
    follows = counts & (leads == 0)
    fall = tl.exp(-tl.where(leads, ahead, 0.0))
    rest = others.exps * fall
    e = tl.exp(tl.where(follows, ahead, 0.0))
    total = tl.where(leads, 1.0 + rest, others.exps + tl.where(follows, e, 0.0))
    log_sum = tl.where(leads, log1p(rest), tl.log(total))
    moment = LN2 * others.moment + tl.where(follows & (e > 0.0), e * ahead, 0.0)
    of_leader = tl.where(fall > 0.0, fall * (LN2 * others.moment - ahead * others.exps), 0.0)
    top = tl.where(leads, y_id, others.top)
    logp = (y_id - top).to(tl.float64) * to_z - log_sum
    return top, log_sum, log_sum - tl.where(leads, of_leader, moment) / total, logp


@triton.jit(do_not_specialize=[*PER_TOKEN, "count"])
def statistics_kernel(
    logits, ids, token_index, first_token, temperature, stats, count, p, OPTIONS: tl.constexpr
):  # fmt: skip
    at = rows_of_program(logits, ids, token_index, first_token, temperature, count, OPTIONS.rows)
    row = Row(at[0], at[1], at[2], at[3], at[4], at[5], at[6], logits.bias, logits.vocab)
    to_z, _ = logit_scales(p, row.temperature, OPTIONS.capped)
    others = row_sums(row, tl.where(row.known, row.ids, -1), to_z, p, OPTIONS.capped, OPTIONS)
    y_id, _ = softcap(load_sampled(row, row.known), p.logit_scale, p.softcap, OPTIONS.capped)
    top, log_sum, entropy, logp = add_sampled(others, y_id, row.known, to_z)
    logp = tl.where(row.known, logp, float("nan"))  # an id outside the vocabulary has no probability
    tl.store(stats.logp + row.token, logp.to(tl.float32), mask=row.live)
    tl.store(stats.entropy + row.token, entropy.to(tl.float32), mask=row.live)
    tl.store(stats.lse + row.token, top.to(tl.float64) * to_z + log_sum, mask=row.live)


# --- gradient -------------------------------------------------------------------------------------------------------


@triton.jit
def split_lse(lse, to_z):
    """Returns (top, log_sum): lse in units of y, rounded to float32, and what the rounding leaves."""
    top = (lse / to_z).to(tl.float32)
    return top, lse - top.to(tl.float64) * to_z


@triton.jit
def load_terms(row, stats, dlogp, dentropy, scales, p, OPTIONS: tl.constexpr):
    """Returns (GradientTerms, log_sum, d loss / d logp, d loss / d entropy); 1 - p of the sampled id comes from
    expm1."""
    to_z, dz_du = scales
    top, log_sum = split_lse(tl.load(stats.lse + row.token, mask=row.live, other=0.0), to_z)
    entropy = tl.load(stats.entropy + row.token, mask=row.live, other=0.0)
    dlogp = tl.load(dlogp + row.token, mask=row.live, other=0.0)
    dentropy = tl.load(dentropy + row.token, mask=row.live, other=0.0)
    to_exponent = (to_z * INV_LN2).to(tl.float32)
    is_zero = (dlogp == 0.0) & (dentropy == 0.0)
    factor = -tl.exp(-log_sum) * dz_du
    at_log_p_zero = dlogp + tl.where(dentropy == 0.0, 0.0, dentropy * (entropy - log_sum))
    constant, linear = (factor * at_log_p_zero).to(tl.float32), (factor * LN2 * dentropy).to(tl.float32)

    known = row.known & ~is_zero
    y_id, slope_id = softcap(load_sampled(row, known), p.logit_scale, p.softcap, OPTIONS.capped)
    log_p = (y_id - top).to(tl.float64) * to_z - log_sum
    dz_id = -dlogp * expm1(log_p.to(tl.float32))
    has_entropy_grad = (dentropy != 0.0) & (log_p > -1e30)
    dz_id -= tl.where(has_entropy_grad, dentropy * (tl.exp(log_p) * (log_p + entropy)).to(tl.float32), 0.0)
    du_id = dz_id * dz_du.to(tl.float32) * slope_id
    return GradientTerms(top, to_exponent, constant, linear, du_id, known, is_zero), log_sum, dlogp, dentropy


@triton.jit
def add_divergence(row, terms, pair, p, OPTIONS: tl.constexpr):
    """Returns the GradientTerms with the divergence's gradient at the sampled id added. A row is zero where it has
    neither gradient."""
    is_zero = terms.is_zero & (pair.ddivergence == 0.0)
    known = row.known & ~is_zero
    y1, slope = softcap(load_sampled(row, known), p.logit_scale, p.softcap, OPTIONS.capped)
    y2, _ = softcap(load_sampled(pair.row, known), pair.q.logit_scale, pair.q.softcap, OPTIONS.teacher_capped)
    of_id = tl.sum(divergence_gradient(y1[:, None], y2[:, None], pair, OPTIONS), 1) * slope
    du_id = tl.where(terms.known, terms.du_id, 0.0) + tl.where(known, of_id, 0.0)
    return GradientTerms(terms.top, terms.to_exponent, terms.constant, terms.linear, du_id, known, is_zero)


@triton.jit
def gradient_of(row, columns, end, wanted, terms, pair, p, OPTIONS: tl.constexpr):
    """Returns the gradient (ROWS, COLUMNS) of these columns; anything where none is wanted. `pair`: None without a
    teacher."""
    y, slope = softcap(load_logits(row, columns, end, wanted), p.logit_scale, p.softcap, OPTIONS.capped)
    if OPTIONS.divergence is not None:
        u = load_logits(pair.row, columns, end, wanted)
        other, _ = softcap(u, pair.q.logit_scale, pair.q.softcap, OPTIONS.teacher_capped)
    t = exponent(y, terms.top[:, None], terms.to_exponent[:, None])
    value = tl.exp2(t) * (terms.constant[:, None] + terms.linear[:, None] * t)
    if OPTIONS.divergence is not None:
        value += divergence_gradient(y, other, pair, OPTIONS)
    value *= slope
    return tl.where(columns[None, :] == row.ids[:, None], terms.du_id[:, None], value)


@triton.jit
def store_columns(row, du, first, end, terms, pair, p, OPTIONS: tl.constexpr, COLUMNS: tl.constexpr):
    """Stores the gradient of the columns from `first` to `end`, at most COLUMNS."""
    columns = first + tl.arange(0, COLUMNS)
    wanted = row.live[:, None] & (columns < end)[None, :]
    # A zero-gradient row is not read: whatever it holds, its gradient is 0.
    value = gradient_of(row, columns, end, wanted & ~terms.is_zero[:, None], terms, pair, p, OPTIONS)
    value = tl.where(terms.is_zero[:, None], 0.0, value)
    if OPTIONS.overlap:  # 16-bit values over float32 logits that another thread may not have read yet
        tl.debug_barrier()
    tl.store(du[:, None] + columns[None, :], value.to(du.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=[*PER_TOKEN, "dlogp", "dentropy", "count", "weight"])
def gradient_kernel(
    logits, ids, token_index, first_token, temperature, stats, dlogp, dentropy, count, gradient, p, teacher,
    teacher_stats, weight, q, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of rows; with a `teacher` that of the divergence too, from the `teacher_stats` of its
    kernel."""
    BLOCK: tl.constexpr = OPTIONS.block
    at = rows_of_program(logits, ids, token_index, first_token, temperature, count, OPTIONS.rows)
    row = Row(at[0], at[1], at[2], at[3], at[4], at[5], at[6], logits.bias, logits.vocab)
    scales = logit_scales(p, row.temperature, OPTIONS.capped)
    terms, log_sum, _, _ = load_terms(row, stats, dlogp, dentropy, scales, p, OPTIONS)
    pair = None
    if OPTIONS.divergence is not None:  # Triton 3.4 cannot compare a tuple that holds None
        at = rows_of_program(teacher, ids, token_index, first_token, temperature, count, OPTIONS.rows)
        other = Row(at[0], at[1], at[2], at[3], at[4], at[5], at[6], teacher.bias, teacher.vocab)
        to_z, _ = logit_scales(q, row.temperature, OPTIONS.teacher_capped)
        other_top, other_log_sum = split_lse(tl.load(teacher_stats.lse + row.token, mask=row.live, other=0.0), to_z)
        policy, other_side = LogProbParams(terms.top, scales[0], log_sum), LogProbParams(other_top, to_z, other_log_sum)
        ddivergence = tl.load(weight + row.token, mask=row.live, other=0.0)
        policy_kl = tl.load(teacher_stats.policy_kl + row.token, mask=row.live, other=0.0)
        pair = TeacherPair(other, policy, other_side, ddivergence, ddivergence * scales[1].to(tl.float32), policy_kl, q)
        terms = add_divergence(row, terms, pair, p, OPTIONS)

    du = rows_of(gradient, row.at)
    tl.debug_barrier()  # every thread has read the sampled logit before any writes over it
    end = row.vocab
    if OPTIONS.ragged:
        end = row.vocab // GROUP * GROUP
    for first in range(0, end, BLOCK):
        store_columns(row, du, first, end, terms, pair, p, OPTIONS, BLOCK)
    if OPTIONS.ragged:
        for first in range(end, row.vocab, BLOCK // 2):
            store_columns(row, du, first, row.vocab, terms, pair, p, OPTIONS, BLOCK // 2)


# --- launchers ------------------------------------------------------------------------------------------------------


def statistics(chunk: LogitChunk) -> None:
    """Writes logp, entropy and lse of logits (C, V)."""
    grid, options = row_options(chunk)
    statistics_kernel[grid](*read_by(chunk), chunk.stats, len(chunk.logits), scalars(chunk.transform), **options)


def gradient(chunk: LogitChunk, dlogp: Tensor, dentropy: Tensor, out: Tensor) -> None:
    """Writes d loss / d logits (C, V)."""
    grid, options = row_options(chunk, out)
    gradient_kernel[grid](
        *read_by(chunk), chunk.stats, dlogp.contiguous(), dentropy.contiguous(), len(chunk.logits),
        Gradient(out, out.stride(0)), scalars(chunk.transform), *teacher_of(chunk),
        **options,
    )  # fmt: skip


def scalars(transform: PolicyTransform) -> PolicyTransform:
    """Returns the transform with floats, which Triton does not compile in as it does integers of 1."""
    return PolicyTransform(*map(float, transform))


def read_by(chunk: LogitChunk) -> tuple[Logits, Tensor, Tensor, int, Tensor]:
    """Returns what kernels of rows take first: logits, ids, token_index, first_token, temperature."""
    return logits_of(chunk.logits, chunk.bias), chunk.ids, *token_index(chunk.rows, chunk.ids), chunk.temperature


def logits_of(logits: Tensor, bias: Tensor | None) -> Logits:
    return Logits(logits, bias, logits.shape[1], logits.stride(0))


def token_index(rows: Rows, unread: Tensor) -> tuple[Tensor, int]:
    """Returns what tokens_of takes for a chunk: (token_index, first_token).

    unread: any int64 tensor, to have a pointer where there is no index.
    """
    return (unread, rows.start) if rows.index is None else (rows.index, -1)


def row_options(chunk: LogitChunk, out: Tensor | None = None) -> tuple[tuple[int], dict[str, Any]]:
    """Returns (grid, compile-time options) of a kernel that writes rows of `out`."""
    logits, softcap = chunk.logits, chunk.transform.softcap
    count, vocab = logits.shape
    launch = launch_of(logits.device).rows
    overlap = out is not None and out.data_ptr() == logits.data_ptr() and out.dtype != logits.dtype
    options = RowOptions(softcap != 0.0, vocab % GROUP.value != 0, launch.rows, launch.block, overlap)
    if chunk.teacher is not None:
        transform = chunk.teacher.transform
        options = options._replace(teacher_capped=transform.softcap != 0.0, divergence=transform.divergence)
    return (triton.cdiv(count, launch.rows),), {"OPTIONS": options, "num_warps": launch.num_warps}


def teacher_of(chunk: LogitChunk) -> tuple[Any, ...]:
    """Returns (logits, statistics of all tokens, weights of the divergences, scalars) of a chunk's teacher; four None
    without one."""
    teacher = chunk.teacher
    if teacher is None:
        return None, None, None, None
    teacher_stats = TeacherStatistics(teacher.divergence, teacher.policy_kl, teacher.lse)
    numbers = TeacherScalars._make(map(float, teacher.transform[1:]))
    return logits_of(teacher.logits, teacher.bias), teacher_stats, teacher.weight, numbers

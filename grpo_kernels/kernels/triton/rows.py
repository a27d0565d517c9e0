"""Rows of logits: their statistics, their gradient, and both in one launch with the objective in between.

The gradient takes in that of the divergence to a teacher (teacher.py) whose rows are given beside the logits.

    u = logit + bias
    y = u, or cap * tanh(scale * u / cap)          z = y * to_z          to_z = scale / T, or 1 / T with a softcap
    S = sum_j e^(z_j - m)    lse = m + log S       logp = (z_id - m) - log S
    entropy = log S - sum_j e^(z_j - m) (z_j - m) / S           (nothing cancels: both terms are >= 0)
    dz_j = g_logp (1[j = id] - p_j) - g_entropy p_j (log p_j + entropy),    du_j = dz_j * dz/du

A program owns `ROWS` rows (one on a GPU), of the tokens `index` or from `start` on, and walks them in blocks. What
belongs to a token is read and written at its place in the batch: column `token` of the table and of the values.

An exponential is 2^t with t = (y - max) * to_z log2(e): its error grows with the distance from the maximum, where the
term no longer counts. Sums of a block are float32 trees, sums over blocks float64.

Each row is read twice. The statistics run from the end of the row to its start and the gradient from the start to the
end, so that the second sweep begins with what the L2 cache still holds. The gradient may overwrite the logits, in
float32 or as 16-bit values over the front of the same row: a block is read by all threads before any of them writes,
and what is written lies at or before what has been read.

A mask keeps 128-bit accesses only if it provably never ends within 16 bytes, so blocks end at the last multiple of
`GROUP` columns. Where V is no multiple (`RAGGED`), half a block follows for the columns that are left; otherwise it is
not compiled. Rows must provably start on 16 bytes as well: chunk_row_stride aligns those of the scratch; a caller's own
logits may have any row stride, and are then read one by one. Registers for that half block (sm_90, V = 50,257):
    40 as it is; 64 and no 128-bit access if all blocks were masked by V
    97 without the loop of one turn around it: LLVM keeps its addresses and masks from one sweep to the other
    48 instead of 32 in the gradient alone with fewer columns: Triton spreads those over threads in another way, and has
       all that is known of a row twice

Per logit of a (C, V) float32 chunk with 16-bit gradients:
    statistics     reads 4 bytes; 1 exponential, about 8 operations
    gradient       reads 4, writes 2; 1 exponential, about 8
    single pass    reads 8 (the second 4 in part from L2), writes 2; 2 exponentials, about 16
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...contract import LogitChunk, RowGradients, Rows
from ..launch import row_launch
from .arguments import Batch
from .divergence import Pair, Side, divergence_slope
from .layout import TEMPERATURE, TOKEN_ENTROPY, TOKEN_G_LOGP, TOKEN_LOGP, WEIGHT_ENTROPY
from .maths import INV_LN2, LN2, expm1, exponent, softcap
from .objective import Variant, evaluate_token, scalars, store_objective, variant

GROUP: tl.constexpr = tl.constexpr(16)  # Triton's compiler only keeps track of whether 16 divides an integer


@triton.jit
def logit_scales(p, temperature, CAPPED: tl.constexpr):
    """(to_z, chain = dz/du without the softcap's slope) in float64."""
    chain = p.logit_scale / temperature.to(tl.float64)
    if CAPPED:
        return 1.0 / temperature.to(tl.float64), chain
    return chain, chain


class Row(NamedTuple):
    """The rows of a program, (ROWS,) each unless told."""

    u: Any  # pointers to their first logits
    bias: Any  # pointer to (V,), or None
    live: Any
    ids: Any  # sampled
    vocab: Any  # number of columns


class RowSums(NamedTuple):
    """What a sweep gathers of a row, relative to its largest y so far: (ROWS,) each."""

    top: Any  # that maximum, float32
    exps: Any  # sum of 2^t, float64
    moment: Any  # sum of 2^t t, float64


class Statistics(NamedTuple):
    """(ROWS,) each; z - lse = (y - top) to_z - log_sum."""

    top: Any
    log_sum: Any
    logp: Any
    entropy: Any


class Slopes(NamedTuple):
    """du_j = 2^t (constant + linear t) slope_j for all but the sampled id, which has du_id; (ROWS,) each."""

    top: Any
    to_exponent: Any
    constant: Any
    linear: Any
    du_id: Any
    known: Any  # there is a sampled id
    is_zero: Any  # without a gradient, whatever the row holds


class RowOptions(NamedTuple):
    """What is compiled into a kernel of rows."""

    capped: bool  # the logits have a softcap
    ragged: bool  # the vocabulary does not end at a multiple of GROUP
    rows: int
    block: int
    overlap: bool = False  # gradients of a narrower type lie over the logits
    variant: Variant | None = None  # of the objective
    teacher: RowOptions | None = None  # of the teacher's rows
    divergence: str | None = None


class Logits(NamedTuple):
    """(C, V) and its bias."""

    data: Tensor
    bias: Tensor | None
    vocab: int
    row_stride: int


class TeacherValues(NamedTuple):
    """Of all tokens; see contract.TeacherLogits."""

    offset: Tensor
    lse: Tensor


class TeacherScalars(NamedTuple):
    """TeacherParams, but for the divergence."""

    divergence_beta: float
    logit_scale: float
    softcap: float


class Gradient(NamedTuple):
    """RowGradients, or nothing. What rounding took, (C,), is asked for on a CPU alone."""

    data: Tensor | None = None
    row_stride: int | None = None
    rounding_error: Tensor | None = None


@triton.jit
def no_sums(ROWS: tl.constexpr):
    """RowSums of no column."""
    return RowSums(
        tl.full((ROWS,), -float("inf"), tl.float32), tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
    )


@triton.jit
def add_block(y, sums, to_exponent):
    """RowSums extended by a block y (ROWS, BLOCK)."""
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
    """The float32 logits (ROWS, COLUMNS), bias included; 0 where none is wanted."""
    logits = tl.load(row.u[:, None] + columns[None, :], mask=wanted, other=0.0).to(tl.float32)
    if row.bias is not None:
        # A row of its own: the same threads hold a column of it and of the logits.
        logits += tl.load((row.bias + columns)[None, :], mask=(columns < end)[None, :], other=0.0)
    return logits


@triton.jit
def load_sampled(row, known):
    """The float32 logit of each row's sampled id, bias included."""
    logit = tl.load(row.u + row.ids, mask=known, other=0.0).to(tl.float32)
    if row.bias is not None:
        logit += tl.load(row.bias + row.ids, mask=known, other=0.0)
    return logit


@triton.jit
def add_columns(row, first, end, sums, to_exponent, p, OPTIONS: tl.constexpr, COLUMNS: tl.constexpr):
    """add_block with the logits of the columns from `first` to `end`, at most COLUMNS."""
    columns = first + tl.arange(0, COLUMNS)
    inside = row.live[:, None] & (columns < end)[None, :]
    y, _ = softcap(load_logits(row, columns, end, inside), p.logit_scale, p.softcap, OPTIONS.capped)
    y = tl.where(inside, y, -float("inf"))
    return add_block(y, sums, to_exponent)


@triton.jit
def row_sums(row, to_z, p, OPTIONS: tl.constexpr):
    """RowSums of whole rows."""
    BLOCK: tl.constexpr = OPTIONS.block
    to_exponent = (to_z * INV_LN2).to(tl.float32)
    sums = no_sums(OPTIONS.rows)
    end = row.vocab
    if OPTIONS.ragged:
        end = row.vocab // GROUP * GROUP
        for first in range(end, row.vocab, BLOCK // 2):
            sums = add_columns(row, first, row.vocab, sums, to_exponent, p, OPTIONS, BLOCK // 2)
    blocks = tl.cdiv(end, BLOCK)
    for i in range(blocks):
        first = (blocks - 1 - i) * BLOCK
        sums = add_columns(row, first, end, sums, to_exponent, p, OPTIONS, BLOCK)
    return sums


@triton.jit
def row_statistics(row, to_z, p, OPTIONS: tl.constexpr):
    sums = row_sums(row, to_z, p, OPTIONS)
    log_sum = tl.log(sums.exps)
    entropy = (log_sum - LN2 * (sums.moment / sums.exps)).to(tl.float32)
    known = row.live & (row.ids >= 0) & (row.ids < row.vocab)
    y_id, _ = softcap(load_sampled(row, known), p.logit_scale, p.softcap, OPTIONS.capped)
    logp = ((y_id - sums.top).to(tl.float64) * to_z - log_sum).to(tl.float32)
    logp = tl.where(known, logp, float("nan"))  # an id outside the vocabulary has no probability
    return Statistics(sums.top, log_sum, logp, entropy)


@triton.jit
def gradient_of(row, columns, end, wanted, slopes, pair, p, OPTIONS: tl.constexpr):
    """The gradient (ROWS, COLUMNS) of these columns; anything where none is wanted. `pair`: None without a teacher."""
    y, slope = softcap(load_logits(row, columns, end, wanted), p.logit_scale, p.softcap, OPTIONS.capped)
    if OPTIONS.divergence is not None:
        TEACHER: tl.constexpr = OPTIONS.teacher
        u = load_logits(pair.row, columns, end, wanted)
        other, _ = softcap(u, pair.q.logit_scale, pair.q.softcap, TEACHER.capped)
    t = exponent(y, slopes.top[:, None], slopes.to_exponent[:, None])
    value = tl.exp2(t) * (slopes.constant[:, None] + slopes.linear[:, None] * t)
    if OPTIONS.divergence is not None:
        value += divergence_slope(y, other, pair, OPTIONS)
    value *= slope
    return tl.where(columns[None, :] == row.ids[:, None], slopes.du_id[:, None], value)


@triton.jit
def store_columns(row, du, first, end, slopes, pair, p, OPTIONS: tl.constexpr, COLUMNS: tl.constexpr):
    """The gradient of the columns from `first` to `end`, at most COLUMNS."""
    columns = first + tl.arange(0, COLUMNS)
    wanted = row.live[:, None] & (columns < end)[None, :]
    # A zero-gradient row is not read: whatever it holds, its gradient is 0.
    value = gradient_of(row, columns, end, wanted & ~slopes.is_zero[:, None], slopes, pair, p, OPTIONS)
    value = tl.where(slopes.is_zero[:, None], 0.0, value)
    if OPTIONS.overlap:  # 16-bit values over float32 logits that another thread may not have read yet
        tl.debug_barrier()
    tl.store(du[:, None] + columns[None, :], value.to(du.dtype.element_ty), mask=wanted)


@triton.jit
def rows_of(matrix, rows):
    """Pointers to their first elements."""
    return matrix.data + rows * matrix.row_stride


@triton.jit
def row_slopes(row, found, g_logp, g_entropy, scales, p, OPTIONS: tl.constexpr):
    """From the Statistics `found`; 1 - p of the sampled id comes from expm1."""
    to_z, chain = scales
    to_exponent = (to_z * INV_LN2).to(tl.float32)
    is_zero = (g_logp == 0.0) & (g_entropy == 0.0)
    factor = -tl.exp(-found.log_sum) * chain
    at_log_p_zero = g_logp + tl.where(g_entropy == 0.0, 0.0, g_entropy * (found.entropy - found.log_sum))
    constant, linear = (factor * at_log_p_zero).to(tl.float32), (factor * LN2 * g_entropy).to(tl.float32)

    known = row.live & ~is_zero & (row.ids >= 0) & (row.ids < row.vocab)
    y_id, slope_id = softcap(load_sampled(row, known), p.logit_scale, p.softcap, OPTIONS.capped)
    log_p = (y_id - found.top).to(tl.float64) * to_z - found.log_sum
    pull = -g_logp * expm1(log_p.to(tl.float32))
    bent = (g_entropy != 0.0) & (log_p > -1e30)
    pull -= tl.where(bent, g_entropy * (tl.exp(log_p) * (log_p + found.entropy)).to(tl.float32), 0.0)
    du_id = pull * chain.to(tl.float32) * slope_id
    return Slopes(found.top, to_exponent, constant, linear, du_id, known, is_zero)


@triton.jit
def add_divergence(row, slopes, pair, p, OPTIONS: tl.constexpr):
    """The Slopes with what the sampled id gets of the divergence; only a row without either gradient is zero."""
    TEACHER: tl.constexpr = OPTIONS.teacher
    is_zero = slopes.is_zero & (pair.g_divergence == 0.0)
    known = row.live & ~is_zero & (row.ids >= 0) & (row.ids < row.vocab)
    y1, slope = softcap(load_sampled(row, known), p.logit_scale, p.softcap, OPTIONS.capped)
    y2, _ = softcap(load_sampled(pair.row, known), pair.q.logit_scale, pair.q.softcap, TEACHER.capped)
    of_id = tl.sum(divergence_slope(y1[:, None], y2[:, None], pair, OPTIONS), 1) * slope
    du_id = tl.where(slopes.known, slopes.du_id, 0.0) + tl.where(known, of_id, 0.0)
    return Slopes(slopes.top, slopes.to_exponent, slopes.constant, slopes.linear, du_id, known, is_zero)


@triton.jit
def row_gradient(row, gradient, rows, found, g_logp, g_entropy, pair, scales, p, OPTIONS: tl.constexpr):
    BLOCK: tl.constexpr = OPTIONS.block
    du = rows_of(gradient, rows)
    slopes = row_slopes(row, found, g_logp, g_entropy, scales, p, OPTIONS)
    if OPTIONS.divergence is not None:
        slopes = add_divergence(row, slopes, pair, p, OPTIONS)

    tl.debug_barrier()  # every thread has read the sampled logit before any writes over it
    end = row.vocab
    if OPTIONS.ragged:
        end = row.vocab // GROUP * GROUP
    for first in range(0, end, BLOCK):
        store_columns(row, du, first, end, slopes, pair, p, OPTIONS, BLOCK)
    if OPTIONS.ragged:
        for first in range(end, row.vocab, BLOCK // 2):
            store_columns(row, du, first, row.vocab, slopes, pair, p, OPTIONS, BLOCK // 2)
    if gradient.rounding_error is not None:
        rounded = slopes.du_id.to(du.dtype.element_ty).to(tl.float32)
        tl.store(gradient.rounding_error + rows, tl.where(slopes.known, slopes.du_id - rounded, 0.0), mask=row.live)


@triton.jit
def tokens_of(rows, place, live):
    """Places of rows in the batch. `place`: the token of row 0 where tokens follow it, or a pointer to all places."""
    if place.dtype.is_ptr():
        token = tl.load(place + rows, mask=live, other=0)
    else:
        token = rows + place
    return token


@triton.jit
def split_lse(lse, to_z):
    """(top, log_sum): lse in units of y, rounded to float32, and what the rounding leaves."""
    top = (lse / to_z).to(tl.float32)
    return top, lse - top.to(tl.float64) * to_z


@triton.jit
def store_statistics(columns, lse, token, tokens, live, found, to_z):
    total = found.top.to(tl.float64) * to_z + found.log_sum
    tl.store(columns + TOKEN_LOGP * tokens + token, found.logp, mask=live)
    tl.store(columns + TOKEN_ENTROPY * tokens + token, found.entropy, mask=live)
    tl.store(lse + token, total, mask=live)


@triton.jit(do_not_specialize=["ids", "place", "temperature", "count", "tokens"])
def statistics_kernel(logits, ids, place, temperature, values, count, tokens, p, OPTIONS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * OPTIONS.rows + tl.arange(0, OPTIONS.rows)
    live = rows < count
    token = tokens_of(rows, place, live)
    id_ = tl.load(ids + token, mask=live, other=0)
    to_z, _ = logit_scales(p, tl.load(temperature + token, mask=live, other=1.0), OPTIONS.capped)
    row = Row(rows_of(logits, rows), logits.bias, live, id_, logits.vocab)
    found = row_statistics(row, to_z, p, OPTIONS)
    store_statistics(values.columns, values.lse, token, tokens, live, found, to_z)


@triton.jit(do_not_specialize=["ids", "place", "temperature", "g_logp", "g_entropy", "count", "tokens", "weight"])
def gradient_kernel(
    logits, ids, place, temperature, values, g_logp, g_entropy, count, tokens, gradient, p, teacher, kept, weight, q,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """With a `teacher` also the gradient of the divergence, from what its kernel has `kept`."""
    rows = tl.program_id(0).to(tl.int64) * OPTIONS.rows + tl.arange(0, OPTIONS.rows)
    live = rows < count
    token = tokens_of(rows, place, live)
    id_ = tl.load(ids + token, mask=live, other=0)
    T = tl.load(temperature + token, mask=live, other=1.0)
    scales = logit_scales(p, T, OPTIONS.capped)
    top, log_sum = split_lse(tl.load(values.lse + token, mask=live, other=0.0), scales[0])
    h = tl.load(values.columns + TOKEN_ENTROPY * tokens + token, mask=live, other=0.0)
    by_logp = tl.load(g_logp + token, mask=live, other=0.0)
    by_entropy = tl.load(g_entropy + token, mask=live, other=0.0)
    row = Row(rows_of(logits, rows), logits.bias, live, id_, logits.vocab)
    found = Statistics(top, log_sum, None, h)
    pair = None
    if OPTIONS.divergence is not None:  # Triton 3.4 cannot compare a tuple that holds None
        TEACHER: tl.constexpr = OPTIONS.teacher
        other = Row(rows_of(teacher, rows), teacher.bias, live, id_, teacher.vocab)
        to_z, _ = logit_scales(q, T, TEACHER.capped)
        other_top, other_log_sum = split_lse(tl.load(kept.lse + token, mask=live, other=0.0), to_z)
        policy, other_side = Side(top, scales[0], log_sum), Side(other_top, to_z, other_log_sum)
        g_divergence = tl.load(weight + token, mask=live, other=0.0)
        offset = tl.load(kept.offset + token, mask=live, other=0.0)
        pair = Pair(other, policy, other_side, g_divergence, g_divergence * scales[1].to(tl.float32), offset, q)
    row_gradient(row, gradient, rows, found, by_logp, by_entropy, pair, scales, p, OPTIONS)


@triton.jit(do_not_specialize=["ids", "place", "count", "tokens"])
def single_pass_kernel(logits, ids, place, batch, count, tokens, gradient, p, OPTIONS: tl.constexpr):
    """Statistics and objective, and where there is a `gradient` to write that as well."""
    rows = tl.program_id(0).to(tl.int64) * OPTIONS.rows + tl.arange(0, OPTIONS.rows)
    live = rows < count
    token = tokens_of(rows, place, live)
    id_ = tl.load(ids + token, mask=live, other=0)
    column = batch.table + token
    scales = logit_scales(p, tl.load(column + TEMPERATURE * tokens, mask=live, other=1.0), OPTIONS.capped)
    row = Row(rows_of(logits, rows), logits.bias, live, id_, logits.vocab)
    found = row_statistics(row, scales[0], p, OPTIONS)
    store_statistics(batch.columns, batch.lse, token, tokens, live, found, scales[0])

    VARIANT: tl.constexpr = OPTIONS.variant
    objective = evaluate_token(column, tokens, live, found.logp, found.entropy, p, VARIANT)
    store_objective(batch.columns + token, tokens, live, objective)
    if gradient.data is not None:
        # Read back, not kept: 40 registers instead of 46 to 64 (see above), as the objective's end here with it.
        tl.debug_barrier()
        g_logp = tl.load(batch.columns + TOKEN_G_LOGP * tokens + token, mask=live, other=0.0)
        g_entropy = tl.load(column + WEIGHT_ENTROPY * tokens, mask=live, other=0.0)
        row_gradient(row, gradient, rows, found, g_logp, g_entropy, None, scales, p, OPTIONS)


# --- launchers ------------------------------------------------------------------------------------------------------


def statistics(chunk: LogitChunk) -> None:
    """logp, entropy and lse of logits (C, V)."""
    grid, options = row_options(chunk)
    statistics_kernel[grid](
        logits_of(chunk), chunk.ids, place(chunk.rows), chunk.temperature, chunk.values, len(chunk.logits),
        len(chunk.ids), scalars(chunk.params), **options,
    )  # fmt: skip


def logits_gradient(chunk: LogitChunk, g_logp: Tensor, g_entropy: Tensor, gradients: RowGradients) -> None:
    """d loss / d logits (C, V)."""
    grid, options = row_options(chunk, gradients)
    gradient_kernel[grid](
        logits_of(chunk), chunk.ids, place(chunk.rows), chunk.temperature, chunk.values, g_logp, g_entropy,
        len(chunk.logits), len(chunk.ids), gradient_to(gradients), scalars(chunk.params), *teacher_of(chunk), **options,
    )  # fmt: skip


def single_pass(chunk: LogitChunk, table: Tensor, gradients: RowGradients | None = None) -> None:
    """Everything about tokens that depend on themselves alone."""
    grid, options = row_options(chunk, gradients, variant(chunk.params))
    single_pass_kernel[grid](
        logits_of(chunk), chunk.ids, place(chunk.rows), Batch.of(table, chunk.values), len(chunk.logits),
        len(chunk.ids), gradient_to(gradients), scalars(chunk.params), **options,
    )  # fmt: skip


def place(rows: Rows) -> int | Tensor:
    """What tokens_of takes for a chunk."""
    return rows.start if rows.index is None else rows.index


def row_options(
    chunk: LogitChunk, gradients: RowGradients | None = None, variant: Variant | None = None
) -> tuple[tuple[int], dict[str, Any]]:
    """(grid, what is compiled in)."""
    logits = chunk.logits
    count, vocab = logits.shape
    launch = row_launch("rows", logits.device, vocab, logits.dtype)
    dlogits = logits if gradients is None else gradients.dlogits
    overlap = dlogits.data_ptr() == logits.data_ptr() and dlogits.dtype != logits.dtype
    ragged = vocab % GROUP.value != 0
    options = RowOptions(chunk.params.softcap != 0.0, ragged, launch.rows, launch.block, overlap, variant)
    if chunk.teacher is not None:
        other = options._replace(capped=chunk.teacher.params.softcap != 0.0)
        options = options._replace(teacher=other, divergence=chunk.teacher.params.divergence)
    return (triton.cdiv(count, launch.rows),), {"OPTIONS": options, "num_warps": launch.num_warps}


def logits_of(chunk: LogitChunk) -> Logits:
    return Logits(chunk.logits, chunk.bias, chunk.logits.shape[1], chunk.logits.stride(0))


def teacher_of(chunk: LogitChunk) -> tuple[Logits, TeacherValues, Tensor, TeacherScalars] | tuple[None, ...]:
    """(its logits, what is kept of all tokens, the weights of their divergence, its numbers), or as many None."""
    given = chunk.teacher
    if given is None:
        return None, None, None, None
    logits = Logits(given.logits, given.bias, given.logits.shape[1], given.logits.stride(0))
    params = given.params
    numbers = TeacherScalars(params.divergence_beta, params.logit_scale, params.softcap)
    return logits, TeacherValues(given.offset, given.lse), given.weight, numbers


def gradient_to(gradients: RowGradients | None) -> Gradient:
    if gradients is None:
        return Gradient()
    return Gradient(gradients.dlogits, gradients.dlogits.stride(0), gradients.rounding_error)

"""Rows of logits: their statistics, their gradient, and both in one launch with the objective in between.

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
Predicted on an H200 (4.3 TB/s) at C x V = 16,384 x 128,256: statistics 2.0 ms, gradient 2.9 ms, single pass 3.7 to 4.9
ms; the exponentials (16 per cycle and multiprocessor) take 0.6 ms per sweep and hide behind the reads. A bias, 4 bytes
per logit more, is the same for all rows and comes from L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import KernelParams, LogitChunk, RowGradients, RowStats, TokenValues
from ..launch import row_launch
from .layout import ENTROPY, G_LOGP, LOGP, TEMPERATURE, WEIGHT_ENTROPY
from .maths import INV_LN2, LN2, expm1, softcap
from .objective import evaluate_token, scalars, store_objective, variant

GROUP: tl.constexpr = tl.constexpr(16)  # Triton's compiler only keeps track of whether 16 divides an integer
LOWEST_EXPONENT: tl.constexpr = tl.constexpr(-200.0)  # 2^t is exactly 0 there, and t stays finite: -inf gives 0


@triton.jit
def exponent(y, reference, to_exponent):
    """t of 2^t; NaN stays NaN."""
    t = (y - reference) * to_exponent
    return tl.where(t < LOWEST_EXPONENT, LOWEST_EXPONENT, t)


@triton.jit
def logit_scales(p, temperature, CAPPED: tl.constexpr):
    """(to_z, chain = dz/du without the softcap's slope) in float64."""
    chain = p.logit_scale / temperature.to(tl.float64)
    if CAPPED:
        return 1.0 / temperature.to(tl.float64), chain
    return chain, chain


@triton.jit
def add_block(y, top, exps, moment, to_exponent):
    """Running maximum (float32), sum of 2^t and sum of 2^t t (float64), extended by a block y (ROWS, BLOCK)."""
    block_top = tl.max(y, 1)
    new_top = tl.where(block_top > top, block_top, top)
    # Before the first finite logit any finite reference will do: all terms are 0, or NaN.
    reference = tl.where(new_top == -float("inf"), 0.0, new_top)
    t = exponent(y, reference[:, None], to_exponent[:, None])
    e = tl.exp2(t)
    fall = tl.where(top == -float("inf"), 0.0, (new_top - top) * to_exponent)  # every earlier t falls by this much
    factor = tl.exp2(-fall).to(tl.float64)
    moment = (moment - exps * fall) * factor + tl.sum(e * t, 1).to(tl.float64)
    exps = exps * factor + tl.sum(e, 1).to(tl.float64)
    return new_top, exps, moment


@triton.jit
def load_logits(u, bias, columns, end, wanted):
    """The float32 logits (ROWS, COLUMNS) of rows that start at pointers `u`, bias included; 0 where none is wanted."""
    logits = tl.load(u[:, None] + columns[None, :], mask=wanted, other=0.0).to(tl.float32)
    if bias is not None:
        # A row of its own: the same threads hold a column of it and of the logits.
        logits += tl.load((bias + columns)[None, :], mask=(columns < end)[None, :], other=0.0)
    return logits


@triton.jit
def load_sampled(u, bias, ids, known):
    """The float32 logit of each row's sampled id, bias included."""
    logit = tl.load(u + ids, mask=known, other=0.0).to(tl.float32)
    if bias is not None:
        logit += tl.load(bias + ids, mask=known, other=0.0)
    return logit


@triton.jit
def add_columns(
    u, bias, live, first, end, top, exps, moment, to_exponent, p, CAPPED: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """add_block with the logits of the columns from `first` to `end`, at most COLUMNS."""
    columns = first + tl.arange(0, COLUMNS)
    inside = live[:, None] & (columns < end)[None, :]
    y, _ = softcap(load_logits(u, bias, columns, end, inside), p.logit_scale, p.softcap, CAPPED)
    y = tl.where(inside, y, -float("inf"))
    return add_block(y, top, exps, moment, to_exponent)


@triton.jit
def row_statistics(
    u, bias, live, ids, vocab, to_z, p,
    CAPPED: tl.constexpr, RAGGED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(top, log_sum, logp, entropy) of rows that start at pointers `u` (ROWS,); z - lse = (y - top) to_z - log_sum."""
    to_exponent = (to_z * INV_LN2).to(tl.float32)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    exps = tl.zeros((ROWS,), tl.float64)
    moment = tl.zeros((ROWS,), tl.float64)
    end = vocab
    if RAGGED:
        end = vocab // GROUP * GROUP
        for first in range(end, vocab, BLOCK // 2):
            top, exps, moment = add_columns(
                u, bias, live, first, vocab, top, exps, moment, to_exponent, p, CAPPED, BLOCK // 2
            )
    blocks = tl.cdiv(end, BLOCK)
    for i in range(blocks):
        first = (blocks - 1 - i) * BLOCK
        top, exps, moment = add_columns(u, bias, live, first, end, top, exps, moment, to_exponent, p, CAPPED, BLOCK)
    log_sum = tl.log(exps)
    entropy = (log_sum - LN2 * (moment / exps)).to(tl.float32)
    known = live & (ids >= 0) & (ids < vocab)
    y_id, _ = softcap(load_sampled(u, bias, ids, known), p.logit_scale, p.softcap, CAPPED)
    logp = ((y_id - top).to(tl.float64) * to_z - log_sum).to(tl.float32)
    logp = tl.where(known, logp, float("nan"))  # an id outside the vocabulary has no probability
    return top, log_sum, logp, entropy


@triton.jit
def store_columns(
    u, du, bias, live, zero_gradient, first, end, ids, du_id, top, constant, linear, to_exponent, p,
    CAPPED: tl.constexpr, OVERLAP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient of the columns from `first` to `end`, at most COLUMNS."""
    columns = first + tl.arange(0, COLUMNS)
    wanted = live[:, None] & (columns < end)[None, :]
    # A zero-gradient row is not read: whatever it holds, its gradient is 0.
    logits = load_logits(u, bias, columns, end, wanted & ~zero_gradient[:, None])
    y, slope = softcap(logits, p.logit_scale, p.softcap, CAPPED)
    t = exponent(y, top[:, None], to_exponent[:, None])
    value = tl.exp2(t) * (constant[:, None] + linear[:, None] * t) * slope
    value = tl.where(columns[None, :] == ids[:, None], du_id[:, None], value)
    value = tl.where(zero_gradient[:, None], 0.0, value)
    if OVERLAP:  # 16-bit values over float32 logits that another thread may not have read yet
        tl.debug_barrier()
    tl.store(du[:, None] + columns[None, :], value.to(du.dtype.element_ty), mask=wanted)


@triton.jit
def row_gradient(
    u, du, bias, rounding_error, rows, live, ids, vocab, top, log_sum, entropy, g_logp, g_entropy, to_z, chain, p,
    CAPPED: tl.constexpr, OVERLAP: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """du_j = 2^t (constant + linear t) slope_j for all but the sampled id, whose 1 - p comes from expm1."""
    to_exponent = (to_z * INV_LN2).to(tl.float32)
    zero_gradient = (g_logp == 0.0) & (g_entropy == 0.0)
    factor = -tl.exp(-log_sum) * chain
    at_log_p_zero = g_logp + tl.where(g_entropy == 0.0, 0.0, g_entropy * (entropy - log_sum))
    constant, linear = (factor * at_log_p_zero).to(tl.float32), (factor * LN2 * g_entropy).to(tl.float32)

    known = live & ~zero_gradient & (ids >= 0) & (ids < vocab)
    y_id, slope_id = softcap(load_sampled(u, bias, ids, known), p.logit_scale, p.softcap, CAPPED)
    log_p = (y_id - top).to(tl.float64) * to_z - log_sum
    pull = -g_logp * expm1(log_p.to(tl.float32))
    bent = (g_entropy != 0.0) & (log_p > -1e30)
    pull -= tl.where(bent, g_entropy * (tl.exp(log_p) * (log_p + entropy)).to(tl.float32), 0.0)
    du_id = pull * chain.to(tl.float32) * slope_id

    tl.debug_barrier()  # every thread has read the sampled logit before any writes over it
    end = vocab
    if RAGGED:
        end = vocab // GROUP * GROUP
    for first in range(0, end, BLOCK):
        store_columns(
            u, du, bias, live, zero_gradient, first, end, ids, du_id, top, constant, linear, to_exponent, p,
            CAPPED, OVERLAP, BLOCK,
        )  # fmt: skip
    if RAGGED:
        for first in range(end, vocab, BLOCK // 2):
            store_columns(
                u, du, bias, live, zero_gradient, first, vocab, ids, du_id, top, constant, linear, to_exponent, p,
                CAPPED, OVERLAP, BLOCK // 2,
            )  # fmt: skip
    if rounding_error is not None:
        rounded = du_id.to(du.dtype.element_ty).to(tl.float32)
        tl.store(rounding_error + rows, tl.where(known, du_id - rounded, 0.0), mask=live)


@triton.jit
def tokens_of(rows, start, index, live):
    """Places of rows in the batch."""
    if index is not None:
        return tl.load(index + rows, mask=live, other=0)
    return rows + start


@triton.jit
def store_statistics(values, lse, token, tokens, live, logp, total, entropy):
    tl.store(values + LOGP * tokens + token, logp, mask=live)
    tl.store(values + ENTROPY * tokens + token, entropy, mask=live)
    tl.store(lse + token, total, mask=live)


@triton.jit(do_not_specialize=["ids", "start", "index", "temperature", "values", "lse", "count", "tokens"])
def statistics_kernel(
    logits, bias, ids, start, index, temperature, values, lse, count, tokens, vocab, row_stride, p,
    CAPPED: tl.constexpr, RAGGED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    token = tokens_of(rows, start, index, live)
    id_ = tl.load(ids + token, mask=live, other=0)
    to_z, _ = logit_scales(p, tl.load(temperature + token, mask=live, other=1.0), CAPPED)
    u = logits + rows * row_stride
    top, log_sum, logp, h = row_statistics(u, bias, live, id_, vocab, to_z, p, CAPPED, RAGGED, ROWS, BLOCK)
    store_statistics(values, lse, token, tokens, live, logp, top.to(tl.float64) * to_z + log_sum, h)


@triton.jit(do_not_specialize=[
    "rounding_error", "ids", "start", "index", "temperature", "values", "lse", "g_logp", "g_entropy", "count", "tokens",
])  # fmt: skip
def gradient_kernel(
    logits, grad, bias, rounding_error, ids, start, index, temperature, values, lse, g_logp, g_entropy,
    count, tokens, vocab, row_stride, grad_row_stride, p,
    CAPPED: tl.constexpr, OVERLAP: tl.constexpr, RAGGED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    token = tokens_of(rows, start, index, live)
    id_ = tl.load(ids + token, mask=live, other=0)
    to_z, chain = logit_scales(p, tl.load(temperature + token, mask=live, other=1.0), CAPPED)
    # lse in units of y, rounded to float32; what the rounding leaves goes into log_sum.
    given = tl.load(lse + token, mask=live, other=0.0)
    top = (given / to_z).to(tl.float32)
    log_sum = given - top.to(tl.float64) * to_z
    h = tl.load(values + ENTROPY * tokens + token, mask=live, other=0.0)
    by_logp = tl.load(g_logp + token, mask=live, other=0.0)
    by_entropy = tl.load(g_entropy + token, mask=live, other=0.0)
    row_gradient(
        logits + rows * row_stride, grad + rows * grad_row_stride, bias, rounding_error, rows, live,
        id_, vocab, top, log_sum, h,
        by_logp, by_entropy, to_z, chain, p, CAPPED, OVERLAP, RAGGED, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=[
    "rounding_error", "ids", "start", "index", "table", "values", "lse", "count", "tokens",
])  # fmt: skip
def single_pass_kernel(
    logits, grad, bias, rounding_error, ids, start, index, table, values, lse,
    count, tokens, vocab, row_stride, grad_row_stride, p,
    SURROGATE: tl.constexpr, KL: tl.constexpr, HAS_OLD: tl.constexpr, BIAS_CORRECTION: tl.constexpr,
    CAPPED: tl.constexpr, OVERLAP: tl.constexpr, RAGGED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Statistics and objective, and where there is a `grad` the gradient."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    token = tokens_of(rows, start, index, live)
    id_ = tl.load(ids + token, mask=live, other=0)
    column = table + token
    to_z, chain = logit_scales(p, tl.load(column + TEMPERATURE * tokens, mask=live, other=1.0), CAPPED)
    u = logits + rows * row_stride
    top, log_sum, logp, h = row_statistics(u, bias, live, id_, vocab, to_z, p, CAPPED, RAGGED, ROWS, BLOCK)
    store_statistics(values, lse, token, tokens, live, logp, top.to(tl.float64) * to_z + log_sum, h)

    x, value, kl, g_logp = evaluate_token(column, tokens, live, logp, h, p, SURROGATE, KL, HAS_OLD, BIAS_CORRECTION)
    store_objective(values + token, tokens, live, x, value, kl, g_logp)
    if grad is not None:
        # Read back, not kept: 40 registers instead of 46 to 64 (see above), as the objective's end here with it.
        tl.debug_barrier()
        g_logp = tl.load(values + G_LOGP * tokens + token, mask=live, other=0.0)
        g_entropy = tl.load(column + WEIGHT_ENTROPY * tokens, mask=live, other=0.0)
        row_gradient(
            u, grad + rows * grad_row_stride, bias, rounding_error, rows, live, id_, vocab, top, log_sum, h,
            g_logp, g_entropy, to_z, chain, p, CAPPED, OVERLAP, RAGGED, BLOCK,
        )  # fmt: skip


# --- launchers ------------------------------------------------------------------------------------------------------


def statistics(chunk: LogitChunk, temperature: Tensor, values: TokenValues, params: KernelParams) -> None:
    """logp, entropy and lse of logits (C, V)."""
    logits, rows, ids, bias = chunk
    count, vocab = logits.shape
    launch = row_launch("rows", logits.device, vocab, logits.dtype)
    statistics_kernel[(triton.cdiv(count, launch.rows),)](
        logits, bias, ids, rows.start, rows.index, temperature, *values,
        count, ids.shape[0], vocab, logits.stride(0), scalars(params),
        CAPPED=params.softcap != 0.0, RAGGED=is_ragged(vocab),
        ROWS=launch.rows, BLOCK=launch.block, num_warps=launch.num_warps,
    )  # fmt: skip


def logits_gradient(
    chunk: LogitChunk,
    temperature: Tensor,
    values: TokenValues,
    g_logp: Tensor,
    g_entropy: Tensor,
    params: KernelParams,
    gradients: RowGradients,
) -> None:
    """d loss / d logits (C, V)."""
    logits, rows, ids, bias = chunk
    grad, rounding_error = gradients
    count, vocab = logits.shape
    launch = row_launch("rows", logits.device, vocab, logits.dtype)
    gradient_kernel[(triton.cdiv(count, launch.rows),)](
        logits, grad, bias, rounding_error, ids, rows.start, rows.index, temperature, *values, g_logp, g_entropy,
        count, ids.shape[0], vocab, logits.stride(0), grad.stride(0), scalars(params),
        CAPPED=params.softcap != 0.0, OVERLAP=overlaps(logits, grad), RAGGED=is_ragged(vocab),
        ROWS=launch.rows, BLOCK=launch.block, num_warps=launch.num_warps,
    )  # fmt: skip


def single_pass(
    chunk: LogitChunk, table: Tensor, values: TokenValues, params: KernelParams, gradients: RowGradients | None
) -> None:
    """Everything about tokens that depend on themselves alone."""
    logits, rows, ids, bias = chunk
    grad, rounding_error = (None, None) if gradients is None else gradients
    count, vocab = logits.shape
    launch = row_launch("rows", logits.device, vocab, logits.dtype)
    single_pass_kernel[(triton.cdiv(count, launch.rows),)](
        logits, grad, bias, rounding_error, ids, rows.start, rows.index, table, *values,
        count, ids.shape[0], vocab, logits.stride(0), None if grad is None else grad.stride(0), scalars(params),
        CAPPED=params.softcap != 0.0, OVERLAP=grad is not None and overlaps(logits, grad), RAGGED=is_ragged(vocab),
        ROWS=launch.rows, BLOCK=launch.block, num_warps=launch.num_warps, **variant(params),
    )  # fmt: skip


def empty_stats(count: int, device: torch.device) -> RowStats:
    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    return RowStats(empty(torch.float32), empty(torch.float64), empty(torch.float32))


def is_ragged(vocab: int) -> bool:
    return vocab % GROUP.value != 0


def overlaps(logits: Tensor, grad: Tensor) -> bool:
    """Whether gradients of a narrower type lie over the front of the rows that they come from."""
    return grad.data_ptr() == logits.data_ptr() and grad.dtype != logits.dtype

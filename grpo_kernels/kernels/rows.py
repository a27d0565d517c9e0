"""Rows of logits: their statistics, their gradient, and both in one launch with the objective in between.

    y = u, or cap * tanh(scale * u / cap)          z = y * to_z          to_z = scale / T, or 1 / T with a softcap
    S = sum_j e^(z_j - m)    lse = m + log S       logp = (z_id - m) - log S
    entropy = log S - sum_j e^(z_j - m) (z_j - m) / S           (nothing cancels: both terms are >= 0)
    dz_j = g_logp (1[j = id] - p_j) - g_entropy p_j (log p_j + entropy),    du_j = dz_j * dz/du

A program owns `ROWS` rows (one on a GPU) and walks them in blocks. An exponential is 2^t with t = (y - max) * to_z
log2(e): its error grows with the distance from the maximum, where the term no longer counts. Sums of a block are
float32 trees, sums over blocks float64.

Each row is read twice. The statistics run from the end of the row to its start and the gradient from the start to the
end, so that the second sweep begins with what the L2 cache still holds. The gradient may overwrite the logits, in
float32 or as 16-bit values over the front of the same row: a block is read by all threads before any of them writes,
and what is written lies at or before what has been read.

A mask keeps 128-bit accesses only if it provably never ends within 16 bytes, so blocks end at the last multiple of
`GROUP` columns. Where V is no multiple (`RAGGED`), half a block follows for the columns that are left; otherwise it is
not compiled. Rows must provably start on 16 bytes as well: chunk_pitch sees to it in the scratch; a caller's own logits
may have any pitch, and are then read one by one. What registers say about that half block (sm_90, V = 50,257):
    40 as it is; 64 and no 128-bit access if all blocks were masked by V
    97 without the loop of one turn around it: LLVM keeps its addresses and masks from one sweep to the other
    48 instead of 32 in the gradient alone with fewer columns: Triton spreads those over threads in another way, and has
       all that is known of a row twice

Per logit of a (C, V) float32 chunk with 16-bit gradients:
    stats       reads 4 bytes; 1 exponential, about 8 operations
    gradient    reads 4, writes 2; 1 exponential, about 8
    fused       reads 8 (the second 4 in part from L2), writes 2; 2 exponentials, about 16
Predicted on an H200 (4.3 TB/s) at C x V = 16,384 x 128,256: stats 2.0 ms, gradient 2.9 ms, fused 3.7 to 4.9 ms; the
exponentials (16 per cycle and multiprocessor) take 0.6 ms per sweep and hide behind the reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..params import FIELD, KernelParams, RowStats
from .launch import row_launch
from .maths import INV_LN2, LN2, expm1, softcap
from .objective import d_loss_d_logp, scalars, token_objective

ADVANTAGE: tl.constexpr = tl.constexpr(FIELD["advantage"])
BASE: tl.constexpr = tl.constexpr(FIELD["base"])
REF: tl.constexpr = tl.constexpr(FIELD["ref"])
MULTIPLIER: tl.constexpr = tl.constexpr(FIELD["multiplier"])
WEIGHT_RATIO: tl.constexpr = tl.constexpr(FIELD["weight_ratio"])
WEIGHT_DIRECT: tl.constexpr = tl.constexpr(FIELD["weight_direct"])
WEIGHT_ENTROPY: tl.constexpr = tl.constexpr(FIELD["weight_entropy"])
TEMPERATURE: tl.constexpr = tl.constexpr(FIELD["temperature"])
ENTROPY_THRESHOLD: tl.constexpr = tl.constexpr(FIELD["entropy_threshold"])

GROUP: tl.constexpr = tl.constexpr(16)  # Triton knows of an integer whether 16 divides it, and nothing in between
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
def add_columns(
    u, live, first, end, top, exps, moment, to_exponent, p, CAPPED: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """add_block with the logits of the columns from `first` to `end`, at most COLUMNS."""
    columns = first + tl.arange(0, COLUMNS)
    inside = live[:, None] & (columns < end)[None, :]
    logits = tl.load(u[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    y, _ = softcap(logits, p.logit_scale, p.softcap, CAPPED)
    y = tl.where(inside, y, -float("inf"))
    return add_block(y, top, exps, moment, to_exponent)


@triton.jit
def row_statistics(
    u, live, ids, vocab, to_z, p, CAPPED: tl.constexpr, RAGGED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
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
                u, live, first, vocab, top, exps, moment, to_exponent, p, CAPPED, BLOCK // 2
            )
    blocks = tl.cdiv(end, BLOCK)
    for i in range(blocks):
        first = (blocks - 1 - i) * BLOCK
        top, exps, moment = add_columns(u, live, first, end, top, exps, moment, to_exponent, p, CAPPED, BLOCK)
    log_sum = tl.log(exps)
    entropy = (log_sum - LN2 * (moment / exps)).to(tl.float32)
    known = live & (ids >= 0) & (ids < vocab)
    y_id, _ = softcap(tl.load(u + ids, mask=known, other=0.0).to(tl.float32), p.logit_scale, p.softcap, CAPPED)
    logp = ((y_id - top).to(tl.float64) * to_z - log_sum).to(tl.float32)
    logp = tl.where(known, logp, float("nan"))  # an id outside the vocabulary has no probability
    return top, log_sum, logp, entropy


@triton.jit
def store_columns(
    u, du, live, silent, first, end, ids, du_id, top, constant, linear, to_exponent, p,
    CAPPED: tl.constexpr, OVERLAP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient of the columns from `first` to `end`, at most COLUMNS."""
    columns = first + tl.arange(0, COLUMNS)
    wanted = live[:, None] & (columns < end)[None, :]
    # A silent row is not read: whatever it holds, its gradient is 0.
    logits = tl.load(u[:, None] + columns[None, :], mask=wanted & ~silent[:, None], other=0.0).to(tl.float32)
    y, slope = softcap(logits, p.logit_scale, p.softcap, CAPPED)
    t = exponent(y, top[:, None], to_exponent[:, None])
    value = tl.exp2(t) * (constant[:, None] + linear[:, None] * t) * slope
    value = tl.where(columns[None, :] == ids[:, None], du_id[:, None], value)
    value = tl.where(silent[:, None], 0.0, value)
    if OVERLAP:  # 16-bit values over float32 logits that another thread may not have read yet
        tl.debug_barrier()
    tl.store(du[:, None] + columns[None, :], value.to(du.dtype.element_ty), mask=wanted)


@triton.jit
def row_gradient(
    u, du, residual, rows, live, ids, vocab, top, log_sum, entropy, g_logp, g_entropy, to_z, chain, p,
    CAPPED: tl.constexpr, OVERLAP: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """du_j = 2^t (constant + linear t) slope_j for all but the sampled id, whose 1 - p comes from expm1."""
    to_exponent = (to_z * INV_LN2).to(tl.float32)
    silent = (g_logp == 0.0) & (g_entropy == 0.0)
    factor = -tl.exp(-log_sum) * chain
    at_log_p_zero = g_logp + tl.where(g_entropy == 0.0, 0.0, g_entropy * (entropy - log_sum))
    constant, linear = (factor * at_log_p_zero).to(tl.float32), (factor * LN2 * g_entropy).to(tl.float32)

    known = live & ~silent & (ids >= 0) & (ids < vocab)
    y_id, slope_id = softcap(tl.load(u + ids, mask=known, other=0.0).to(tl.float32), p.logit_scale, p.softcap, CAPPED)
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
            u, du, live, silent, first, end, ids, du_id, top, constant, linear, to_exponent, p,
            CAPPED, OVERLAP, BLOCK,
        )  # fmt: skip
    if RAGGED:
        for first in range(end, vocab, BLOCK // 2):
            store_columns(
                u, du, live, silent, first, vocab, ids, du_id, top, constant, linear, to_exponent, p,
                CAPPED, OVERLAP, BLOCK // 2,
            )  # fmt: skip
    if residual is not None:
        rounded = du_id.to(du.dtype.element_ty).to(tl.float32)
        tl.store(residual + rows, tl.where(known, du_id - rounded, 0.0), mask=live)


@triton.jit(do_not_specialize=["ids", "temperature", "count"])
def statistics_kernel(
    logits, ids, temperature, logp, lse, entropy, count, vocab, pitch, p,
    CAPPED: tl.constexpr, RAGGED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    id_ = tl.load(ids + rows, mask=live, other=0)
    to_z, _ = logit_scales(p, tl.load(temperature + rows, mask=live, other=1.0), CAPPED)
    u = logits + rows * pitch
    top, log_sum, log_p, h = row_statistics(u, live, id_, vocab, to_z, p, CAPPED, RAGGED, ROWS, BLOCK)
    tl.store(logp + rows, log_p, mask=live)
    tl.store(lse + rows, top.to(tl.float64) * to_z + log_sum, mask=live)
    tl.store(entropy + rows, h, mask=live)


@triton.jit(do_not_specialize=["residual", "ids", "temperature", "lse", "entropy", "g_logp", "g_entropy", "count"])
def gradient_kernel(
    logits, grad, residual, ids, temperature, lse, entropy, g_logp, g_entropy, count, vocab, pitch, grad_pitch, p,
    CAPPED: tl.constexpr, OVERLAP: tl.constexpr, RAGGED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    id_ = tl.load(ids + rows, mask=live, other=0)
    to_z, chain = logit_scales(p, tl.load(temperature + rows, mask=live, other=1.0), CAPPED)
    # lse in units of y, rounded to float32; what the rounding leaves goes into log_sum.
    given = tl.load(lse + rows, mask=live, other=0.0)
    top = (given / to_z).to(tl.float32)
    log_sum = given - top.to(tl.float64) * to_z
    h = tl.load(entropy + rows, mask=live, other=0.0)
    by_logp = tl.load(g_logp + rows, mask=live, other=0.0)
    by_entropy = tl.load(g_entropy + rows, mask=live, other=0.0)
    row_gradient(
        logits + rows * pitch, grad + rows * grad_pitch, residual, rows, live, id_, vocab, top, log_sum, h,
        by_logp, by_entropy, to_z, chain, p, CAPPED, OVERLAP, RAGGED, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["residual", "ids", "table", "count", "table_pitch"])
def fused_kernel(
    logits, grad, residual, ids, table, logp, lse, entropy, count, vocab, pitch, grad_pitch, table_pitch, p,
    SURROGATE: tl.constexpr, KL: tl.constexpr, HAS_BASE: tl.constexpr, BIAS_CORRECTION: tl.constexpr,
    CAPPED: tl.constexpr, OVERLAP: tl.constexpr, RAGGED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    id_ = tl.load(ids + rows, mask=live, other=0)
    token = table + rows
    to_z, chain = logit_scales(p, tl.load(token + TEMPERATURE * table_pitch, mask=live, other=1.0), CAPPED)
    u = logits + rows * pitch
    top, log_sum, log_p, h = row_statistics(u, live, id_, vocab, to_z, p, CAPPED, RAGGED, ROWS, BLOCK)
    tl.store(logp + rows, log_p, mask=live)
    tl.store(lse + rows, top.to(tl.float64) * to_z + log_sum, mask=live)
    tl.store(entropy + rows, h, mask=live)

    g_logp, g_entropy = token_gradient(token, table_pitch, live, log_p, h, p, SURROGATE, KL, HAS_BASE, BIAS_CORRECTION)
    row_gradient(
        u, grad + rows * grad_pitch, residual, rows, live, id_, vocab, top, log_sum, h,
        g_logp, g_entropy, to_z, chain, p, CAPPED, OVERLAP, RAGGED, BLOCK,
    )  # fmt: skip


@triton.jit
def token_gradient(
    token, pitch, live, logp, entropy, p,
    SURROGATE: tl.constexpr, KL: tl.constexpr, HAS_BASE: tl.constexpr, BIAS_CORRECTION: tl.constexpr,
):  # fmt: skip
    """(d loss / d logp, d loss / d entropy) of tokens whose column of the row table starts at `token`."""
    A = tl.load(token + ADVANTAGE * pitch, mask=live, other=0.0)
    ref = tl.load(token + REF * pitch, mask=live, other=0.0)
    multiplier = tl.load(token + MULTIPLIER * pitch, mask=live, other=0.0)
    threshold = tl.load(token + ENTROPY_THRESHOLD * pitch, mask=live, other=0.0)
    x = tl.zeros_like(logp)
    if HAS_BASE:
        x = logp - tl.load(token + BASE * pitch, mask=live, other=0.0)
    _, d_ratio, d_direct, _ = token_objective(
        p, x, logp, entropy, A, ref, multiplier, threshold, SURROGATE, KL, BIAS_CORRECTION
    )
    weight_ratio = tl.load(token + WEIGHT_RATIO * pitch, mask=live, other=0.0)
    weight_direct = tl.load(token + WEIGHT_DIRECT * pitch, mask=live, other=0.0)
    g_entropy = tl.load(token + WEIGHT_ENTROPY * pitch, mask=live, other=0.0)
    return d_loss_d_logp(d_ratio, d_direct, weight_ratio, weight_direct), g_entropy


# --- launchers ------------------------------------------------------------------------------------------------------


def stats(logits: Tensor, ids: Tensor, temperature: Tensor, params: KernelParams) -> RowStats:
    """Statistics (C,) of logits (C, V)."""
    count, vocab = logits.shape
    out = empty_stats(count, logits.device)
    rows, block, num_warps = row_launch("rows", logits.device, vocab, logits.dtype)
    statistics_kernel[(triton.cdiv(count, rows),)](
        logits, ids, temperature, *out, count, vocab, logits.stride(0), scalars(params),
        CAPPED=params.softcap != 0.0, RAGGED=is_ragged(vocab), ROWS=rows, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip
    return out


def gradient(
    logits: Tensor,
    grad: Tensor,
    ids: Tensor,
    temperature: Tensor,
    lse: Tensor,
    entropy: Tensor,
    g_logp: Tensor,
    g_entropy: Tensor,
    params: KernelParams,
    residual: Tensor | None,
) -> None:
    """d loss / d logits into `grad` (C, V), which may start where the logits start."""
    count, vocab = logits.shape
    rows, block, num_warps = row_launch("rows", logits.device, vocab, logits.dtype)
    gradient_kernel[(triton.cdiv(count, rows),)](
        logits, grad, residual, ids, temperature, lse, entropy, g_logp, g_entropy,
        count, vocab, logits.stride(0), grad.stride(0), scalars(params),
        CAPPED=params.softcap != 0.0, OVERLAP=overlaps(logits, grad), RAGGED=is_ragged(vocab),
        ROWS=rows, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip


def fused(
    logits: Tensor, grad: Tensor, ids: Tensor, table: Tensor, params: KernelParams, residual: Tensor | None
) -> RowStats:
    """Statistics (C,), and d loss / d logits into `grad`, for tokens whose gradient depends on themselves alone."""
    count, vocab = logits.shape
    out = empty_stats(count, logits.device)
    rows, block, num_warps = row_launch("rows", logits.device, vocab, logits.dtype)
    fused_kernel[(triton.cdiv(count, rows),)](
        logits, grad, residual, ids, table, *out,
        count, vocab, logits.stride(0), grad.stride(0), table.stride(0), scalars(params),
        SURROGATE=params.surrogate, KL=params.kl, HAS_BASE=params.has_base, BIAS_CORRECTION=params.bias_correction,
        CAPPED=params.softcap != 0.0, OVERLAP=overlaps(logits, grad), RAGGED=is_ragged(vocab),
        ROWS=rows, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip
    return out


def empty_stats(count: int, device: torch.device) -> RowStats:
    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    return RowStats(empty(torch.float32), empty(torch.float64), empty(torch.float32))


def is_ragged(vocab: int) -> bool:
    return vocab % GROUP.value != 0


def overlaps(logits: Tensor, grad: Tensor) -> bool:
    """Whether gradients of a narrower type lie over the front of the rows that they come from."""
    return grad.data_ptr() == logits.data_ptr() and grad.dtype != logits.dtype

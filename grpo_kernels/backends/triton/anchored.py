"""Hidden states to exponentials relative to the sampled token, and the scale that makes them d loss / d logits.

    u = h . W_j + b_j, y and z as in rows.py        t_j = z_j - z_id        E_j = e^(t_j) dy/du_j
    R = sum_(j != id) e^(t_j)        S = 1 + R        lse = z_id + log S        logp = -log1p(R)
    entropy = log S - sum_j e^(t_j) t_j / S        v = -(d loss / d logp) chain / S
    E_id <- (1 - S) dy/du_id = -R dy/du_id         d loss / d u_j = v E_j for every j

With the sampled token as the anchor the epilogue of the product stores E, no pass over rows follows, and the gradients
of hidden states and weights are plain products with E: v (E W) and E^T (v h). logp and 1 - p keep their digits where p
is near 1: R is summed without the sampled token. The caller guarantees that no gradient goes through the entropy.

    anchor        z_id: one dot product per row
    exponential   the product; E in bf16, per row and part of the vocabulary the sums of e^t and e^t t
    scale         per row: parts in a fixed order and float64, statistics, objective, v, E_id
    repair        rows whose R passes 2^80 (p below e^-55): logits again, twice, and E relative to the row's maximum;
                  v = -(d loss / d logp) chain / S' and E_id - S' with the S' of that maximum

bfloat16 has the range of float32: exponents end at 2^100, far above what an unrepaired row holds, so nothing overflows.
A program of repair returns at once for any other row: no host decides, none waits. A repaired row reads the whole
weight twice through one multiprocessor, tens of milliseconds when alone; a row of NaN is not repaired.

Predicted on an H200 in bf16 at N, H, V = 16,384, 4,096, 128,256 (790 TFLOP/s, 4.3 TB/s):
    anchor        two rows of H: 0.27 GB, 0.06 ms
    exponential   2 N H V = 17.2 TFLOP: 21.8 ms; reads 8.4 GB, writes 4.2 GB meanwhile: 2.9 ms
                  epilogue, not overlapped: 1 exponential (0.6 ms) and about 20 instructions per logit, 1.4 ms at best
    scale         16 bytes per row and part: 19 MB, 0.01 ms
    repair        0.01 ms
together 24 to 25 ms, where the vendor's product and rows.py's fused pass take 26 to 28.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import FIELD, KernelParams, RowStats
from .layout import TEMPERATURE
from .maths import INV_LN2, LN2, expm1, log1p, softcap
from .matmul import (
    COMBINED_PARTS,
    COMBINED_ROWS,
    column_of,
    is_id,
    part_block,
    place,
    prepare,
    product,
    quarters,
    to_logits,
)
from .objective import evaluate_token, scalars, variant
from .rows import add_block, empty_stats, exponent, logit_scales

HIGHEST_EXPONENT: tl.constexpr = tl.constexpr(100.0)  # of 2; sums over a vocabulary stay below 2^128
LARGEST_REST: tl.constexpr = tl.constexpr(2.0**80)  # a row beyond it is repaired

ANCHOR_ROWS, ANCHOR_BLOCK = 8, 512
REPAIR_COLUMNS, REPAIR_BLOCK, REPAIR_WARPS = 32, 256, 8


@triton.jit(do_not_specialize=["ids", "count"])
def anchor_kernel(
    hidden, weight, bias, ids, y_ids, slope_ids, count, vocab, width, hidden_row_stride, weight_row_stride, p,
    CAPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y and the softcap's slope of the sampled ids; 0 and 1 for an id outside the vocabulary."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    id_ = column_of(tl.load(ids + rows, mask=live, other=-1), vocab).to(tl.int64)
    known = live & (id_ >= 0)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, width, BLOCK):
        inner = first + tl.arange(0, BLOCK)
        wanted = known[:, None] & (inner < width)[None, :]
        h = tl.load(hidden + rows[:, None] * hidden_row_stride + inner[None, :], mask=wanted, other=0.0)
        w = tl.load(weight + id_[:, None] * weight_row_stride + inner[None, :], mask=wanted, other=0.0)
        sums += h.to(tl.float32) * w.to(tl.float32)
    u = tl.sum(sums, 1)
    if bias is not None:
        u += tl.load(bias + id_, mask=known, other=0.0).to(tl.float32)
    y, slope = softcap(u, p.logit_scale, p.softcap, CAPPED)
    tl.store(y_ids + rows, y, mask=live)
    tl.store(slope_ids + rows, slope, mask=live)


@triton.jit
def store_exponentials(
    acc, bias, first_column, vocab, ids, y_id, to_exponent, exps_at, live, rest, moment, p,
    CAPPED: tl.constexpr, EVEN_V: tl.constexpr,
):  # fmt: skip
    """The epilogue: stores E of logits (BLOCK_M, columns), extends the sums over all but the sampled id."""
    columns = first_column + tl.arange(0, acc.shape[1])
    y, slope = to_logits(acc, bias, columns, vocab, p, CAPPED, EVEN_V)
    t = exponent(y, y_id[:, None], to_exponent[:, None])
    t = tl.where(t > HIGHEST_EXPONENT, HIGHEST_EXPONENT, t)
    e = tl.exp2(t)
    rounded = (e * slope).to(exps_at.dtype.element_ty)
    e = tl.where(is_id(ids, first_column, acc.shape[1]), 0.0, e)
    rest += tl.sum(e, 1).to(tl.float64)
    moment += tl.sum(e * t, 1).to(tl.float64)
    tl.store(exps_at[:, None] + columns[None, :], rounded, mask=live[:, None] & (columns < vocab)[None, :])
    return rest, moment


@triton.jit(do_not_specialize=["ids", "temperature", "count", "parts", "per_part", "group"])
def exponential_kernel(
    hidden, weight, bias, ids, temperature, y_ids, exps, partials,
    count, vocab, width, hidden_row_stride, weight_row_stride, parts, per_part, group, exps_row_stride, p,
    CAPPED: tl.constexpr, TMA: tl.constexpr, EVEN_H: tl.constexpr, EVEN_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """E (N, V); sums of 2^t and 2^t t over one part of the vocabulary, without the sampled id, to `partials`."""
    token_tile, part = place(tl.cdiv(count, BLOCK_M), parts, group)
    rows = token_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = rows < count
    id_ = column_of(tl.load(ids + rows, mask=live, other=-1), vocab)
    to_z, _chain = logit_scales(p, tl.load(temperature + rows, mask=live, other=1.0), CAPPED)
    to_exponent = (to_z * INV_LN2).to(tl.float32)
    y_id = tl.load(y_ids + rows, mask=live, other=0.0)
    exps_at = exps + rows.to(tl.int64) * exps_row_stride
    rest = tl.zeros((BLOCK_M,), tl.float64)
    moment = tl.zeros((BLOCK_M,), tl.float64)
    first_tile = part * per_part
    last_tile = tl.minimum(first_tile + per_part, tl.cdiv(vocab, BLOCK_V))
    for tile in tl.range(first_tile, last_tile, flatten=True):
        acc = product(
            hidden, weight, token_tile * BLOCK_M, tile * BLOCK_V, count, vocab, width,
            hidden_row_stride, weight_row_stride, TMA, EVEN_H, BLOCK_M, BLOCK_V, BLOCK_H,
        )  # fmt: skip
        pieces = quarters(acc)
        for i in tl.static_range(4):
            rest, moment = store_exponentials(
                pieces[i], bias, tile * BLOCK_V + i * (BLOCK_V // 4), vocab, id_, y_id, to_exponent, exps_at, live,
                rest, moment, p, CAPPED, EVEN_V,
            )  # fmt: skip
    at = partials + part.to(tl.int64) * count + rows
    tl.store(at, rest, mask=live)
    tl.store(at + parts.to(tl.int64) * count, moment, mask=live)


@triton.jit(do_not_specialize=["ids", "table", "count", "parts", "table_row_stride"])
def scale_kernel(
    partials, y_ids, slope_ids, ids, table, exps, logp, lse, entropy, scale, overflowed,
    count, vocab, parts, exps_row_stride, table_row_stride, p,
    SURROGATE: tl.constexpr, KL: tl.constexpr, HAS_OLD: tl.constexpr, BIAS_CORRECTION: tl.constexpr,
    CAPPED: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Statistics, v and E_id of every row; where the sum overflowed, repair_kernel writes them again."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    id_ = column_of(tl.load(ids + rows, mask=live, other=-1), vocab)
    known = live & (id_ >= 0)
    token = table + rows
    to_z, chain = logit_scales(p, tl.load(token + TEMPERATURE * table_row_stride, mask=live, other=1.0), CAPPED)
    rest = tl.zeros((ROWS,), tl.float64)
    moment = tl.zeros((ROWS,), tl.float64)
    for first in range(0, parts, PARTS):
        at, wanted = part_block(partials, rows, live, count, first, parts, PARTS)
        rest += tl.sum(tl.load(at, mask=wanted, other=0.0), 0)
        moment += tl.sum(tl.load(at + parts.to(tl.int64) * count, mask=wanted, other=0.0), 0)

    y_id = tl.load(y_ids + rows, mask=live, other=0.0)
    # Where the anchor is NaN, so are the hidden states: there is nothing to repair.
    lost = known & ~(rest <= LARGEST_REST) & (y_id == y_id)
    tl.store(overflowed + rows, lost.to(tl.int8), mask=live)
    log_sum = tl.where(known, log1p(rest), float("nan"))  # an id outside the vocabulary has no probability
    log_p = (-log_sum).to(tl.float32)
    h = (log_sum - LN2 * moment / (1.0 + rest)).to(tl.float32)
    tl.store(logp + rows, log_p, mask=live)
    tl.store(lse + rows, y_id.to(tl.float64) * to_z + log_sum, mask=live)
    tl.store(entropy + rows, h, mask=live)

    _, _, _, g_logp = evaluate_token(
        token, table_row_stride, live, log_p, h, p, SURROGATE, KL, HAS_OLD, BIAS_CORRECTION
    )
    v = (-g_logp * chain / (1.0 + rest)).to(tl.float32)
    tl.store(scale + rows, tl.where(g_logp == 0.0, 0.0, v), mask=live)
    slope_id = tl.load(slope_ids + rows, mask=live, other=0.0)
    at_id = exps + rows.to(tl.int64) * exps_row_stride + id_
    tl.store(at_id, (-rest.to(tl.float32) * slope_id).to(exps.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["ids", "table", "table_row_stride"])
def repair_kernel(
    hidden, weight, bias, ids, table, exps, logp, lse, entropy, scale, overflowed,
    vocab, width, hidden_row_stride, weight_row_stride, exps_row_stride, table_row_stride, p,
    SURROGATE: tl.constexpr, KL: tl.constexpr, HAS_OLD: tl.constexpr, BIAS_CORRECTION: tl.constexpr,
    CAPPED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, again, if its sum overflowed: as in rows.py relative to the maximum, from logits computed twice."""
    if tl.load(overflowed + tl.program_id(0)) == 0:
        return
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    live = rows >= 0
    h = hidden + rows * hidden_row_stride
    id_ = tl.load(ids + rows)
    token = table + rows
    to_z, chain = logit_scales(p, tl.load(token + TEMPERATURE * table_row_stride), CAPPED)
    to_exponent = (to_z * INV_LN2).to(tl.float32)

    top = tl.full((1,), -float("inf"), tl.float32)
    total = tl.zeros((1,), tl.float64)
    moment = tl.zeros((1,), tl.float64)
    y_id = tl.zeros((1,), tl.float32)
    slope_id = tl.zeros((1,), tl.float32)
    for first in range(0, vocab, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        y, slope = row_logits(h, weight, bias, columns, vocab, width, weight_row_stride, p, CAPPED, BLOCK)
        top, total, moment = add_block(y[None, :], top, total, moment, to_exponent)
        own = columns == id_
        y_id += tl.sum(tl.where(own, y, 0.0), 0)
        slope_id += tl.sum(tl.where(own, slope, 0.0), 0)
    log_sum = tl.log(total)
    log_p = ((y_id - top).to(tl.float64) * to_z - log_sum).to(tl.float32)
    nats = (log_sum - LN2 * (moment / total)).to(tl.float32)
    tl.store(logp + rows, log_p)
    tl.store(lse + rows, top.to(tl.float64) * to_z + log_sum)
    tl.store(entropy + rows, nats)
    _, _, _, g_logp = evaluate_token(
        token, table_row_stride, live, log_p, nats, p, SURROGATE, KL, HAS_OLD, BIAS_CORRECTION
    )  # fmt: skip
    tl.store(scale + rows, tl.where(g_logp == 0.0, 0.0, (-g_logp * chain / total).to(tl.float32)))

    # E_id - S' without the cancellation
    e_id = total.to(tl.float32) * expm1(log_p) * slope_id
    reference = tl.where(top == -float("inf"), 0.0, top)
    for first in range(0, vocab, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        y, slope = row_logits(h, weight, bias, columns, vocab, width, weight_row_stride, p, CAPPED, BLOCK)
        e = tl.exp2(exponent(y, reference, to_exponent)) * slope
        e = tl.where(columns == id_, e_id, e)
        tl.store(exps + rows * exps_row_stride + columns, e.to(exps.dtype.element_ty), mask=columns < vocab)


@triton.jit
def row_logits(
    h, weight, bias, columns, vocab, width, weight_row_stride, p, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """(y, slope of the softcap) of one row of hidden states at these columns; y is -inf past the vocabulary's end."""
    inside = columns < vocab
    w = weight + tl.where(inside, columns, 0).to(tl.int64) * weight_row_stride
    sums = tl.zeros((columns.shape[0], BLOCK), tl.float32)
    for first in range(0, width, BLOCK):
        inner = first + tl.arange(0, BLOCK)
        left = (inner < width)[None, :]
        h_block = tl.load(h[:, None] + inner[None, :], mask=left, other=0.0).to(tl.float32)
        sums += h_block * tl.load(w[:, None] + inner[None, :], mask=left, other=0.0).to(tl.float32)
    u = tl.sum(sums, 1)
    if bias is not None:
        u += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    y, slope = softcap(u, p.logit_scale, p.softcap, CAPPED)
    return tl.where(inside, y, -float("inf")), slope


def anchored(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    table: Tensor,
    exps: Tensor,
    params: KernelParams,
) -> tuple[RowStats, Tensor]:
    """Statistics (C,) and v (C,) fp32; `exps` (C, V) bf16 receives E.  d loss / d logits = v[:, None] * exps.

    For tokens whose gradient depends on themselves alone and not on their entropy.
    """
    (count, width), vocab = hidden.shape, weight.shape[0]
    work = prepare("anchored", hidden, weight)
    temperature = table[FIELD["temperature"]]
    row_strides = hidden.stride(0), weight.stride(0)
    out = empty_stats(count, hidden.device)
    # Three tensors, not three rows of one: each is to begin on 16 bytes, whatever the count.
    y_ids, slope_ids, scale = (torch.empty(count, dtype=torch.float32, device=hidden.device) for _ in range(3))
    partials = torch.empty(2, work.parts, count, dtype=torch.float64, device=hidden.device)
    overflowed = torch.empty(count, dtype=torch.int8, device=hidden.device)
    p, capped = scalars(params), params.softcap != 0.0
    compiled_in = dict(CAPPED=capped, **variant(params))
    results = *out, scale, overflowed

    anchor_kernel[(triton.cdiv(count, ANCHOR_ROWS),)](
        hidden, weight, bias, ids, y_ids, slope_ids, count, vocab, width, *row_strides, p,
        CAPPED=capped, ROWS=ANCHOR_ROWS, BLOCK=ANCHOR_BLOCK,
    )  # fmt: skip
    exponential_kernel[work.grid](
        *work.operands, bias, ids, temperature, y_ids, exps, partials, *work.numbers, exps.stride(0), p,
        CAPPED=capped, **work.options,
    )  # fmt: skip
    scale_kernel[(triton.cdiv(count, COMBINED_ROWS),)](
        partials, y_ids, slope_ids, ids, table, exps, *results,
        count, vocab, work.parts, exps.stride(0), table.stride(0), p,
        PARTS=COMBINED_PARTS, ROWS=COMBINED_ROWS, **compiled_in,
    )  # fmt: skip
    repair_kernel[(count,)](
        hidden, weight, bias, ids, table, exps, *results,
        vocab, width, *row_strides, exps.stride(0), table.stride(0), p,
        COLUMNS=REPAIR_COLUMNS, BLOCK=REPAIR_BLOCK, num_warps=REPAIR_WARPS, **compiled_in,
    )  # fmt: skip
    return out, scale

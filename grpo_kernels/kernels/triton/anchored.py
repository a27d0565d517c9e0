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
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import HeadChunk, RowStats, contiguous_rows
from .layout import TEMPERATURE
from .maths import INV_LN2, LN2, expm1, exponent, log1p, softcap
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
    rows_of_tile,
    to_logits,
)
from .objective import evaluate_token, scalars, variant
from .rows import add_block, logit_scales, no_sums

HIGHEST_EXPONENT: tl.constexpr = tl.constexpr(100.0)  # of 2; sums over a vocabulary stay below 2^128
LARGEST_REST: tl.constexpr = tl.constexpr(2.0**80)  # a row beyond it is repaired

ANCHOR_ROWS, ANCHOR_BLOCK = 8, 512
REPAIR_COLUMNS, REPAIR_BLOCK, REPAIR_WARPS = 32, 256, 8


class Work(NamedTuple):
    """The tensors that one kernel leaves for the next or for the caller."""

    y_ids: Tensor  # (N,) y of the sampled ids; 0 for an id outside the vocabulary
    slope_ids: Tensor  # (N,) the softcap's slope there; 1
    exps: Tensor  # E (N, V)
    exps_row_stride: int  # not as a Matrix: Triton 3.6 loses a number in a tuple inside a tuple if it is 1
    partials: Tensor  # (2, parts, N) float64: sums of 2^t and of 2^t t, without the sampled id
    stats: RowStats  # (N,)
    scale: Tensor  # (N,) v
    overflowed: Tensor  # (N,) whether repair_kernel has to write a row again


@triton.jit(do_not_specialize=["ids", "count"])
def anchor_kernel(
    hidden, weight, head, ids, work, count, CAPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y and slope of the sampled ids."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    id_ = column_of(tl.load(ids + rows, mask=live, other=-1), head.vocab).to(tl.int64)
    known = live & (id_ >= 0)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, head.width, BLOCK):
        inner = first + tl.arange(0, BLOCK)
        wanted = known[:, None] & (inner < head.width)[None, :]
        h = tl.load(hidden + rows[:, None] * head.hidden_row_stride + inner[None, :], mask=wanted, other=0.0)
        w = tl.load(weight + id_[:, None] * head.weight_row_stride + inner[None, :], mask=wanted, other=0.0)
        sums += h.to(tl.float32) * w.to(tl.float32)
    u = tl.sum(sums, 1)
    if head.bias is not None:
        u += tl.load(head.bias + id_, mask=known, other=0.0).to(tl.float32)
    y, slope = softcap(u, head.logit_scale, head.softcap, CAPPED)
    tl.store(work.y_ids + rows, y, mask=live)
    tl.store(work.slope_ids + rows, slope, mask=live)


@triton.jit
def store_exponentials(acc, first_column, rows, y_id, exps_at, sums, head, TILES: tl.constexpr):
    """The epilogue: stores E of logits (BLOCK_M, columns), extends the sums over all but the sampled id."""
    columns = first_column + tl.arange(0, acc.shape[1])
    y, slope = to_logits(acc, columns, head, TILES)
    t = exponent(y, y_id[:, None], rows.to_exponent[:, None])
    t = tl.where(t > HIGHEST_EXPONENT, HIGHEST_EXPONENT, t)
    e = tl.exp2(t)
    rounded = (e * slope).to(exps_at.dtype.element_ty)
    e = tl.where(is_id(rows.ids, first_column, acc.shape[1]), 0.0, e)
    rest, moment = sums
    rest += tl.sum(e, 1).to(tl.float64)
    moment += tl.sum(e * t, 1).to(tl.float64)
    tl.store(exps_at[:, None] + columns[None, :], rounded, mask=rows.live[:, None] & (columns < head.vocab)[None, :])
    return rest, moment


@triton.jit(do_not_specialize=["ids", "temperature", "count", "per_part"])
def exponential_kernel(hidden, weight, head, ids, temperature, work, count, per_part, TILES: tl.constexpr):
    """E, and the sums over one part of the vocabulary, `per_part` tiles."""
    BLOCK_M: tl.constexpr = TILES.block_m
    BLOCK_V: tl.constexpr = TILES.block_v
    token_tile, part = place(head.group)
    rows = rows_of_tile(token_tile, ids, temperature, count, head, TILES)
    y_id = tl.load(work.y_ids + rows.at, mask=rows.live, other=0.0)
    exps_at = work.exps + rows.at.to(tl.int64) * work.exps_row_stride
    sums = tl.zeros((BLOCK_M,), tl.float64), tl.zeros((BLOCK_M,), tl.float64)
    first_tile = part * per_part
    last_tile = tl.minimum(first_tile + per_part, tl.cdiv(head.vocab, BLOCK_V))
    for tile in tl.range(first_tile, last_tile, flatten=True):
        acc = product(hidden, weight, token_tile * BLOCK_M, tile * BLOCK_V, count, head, TILES)
        pieces = quarters(acc)
        for i in tl.static_range(4):
            sums = store_exponentials(
                pieces[i], tile * BLOCK_V + i * (BLOCK_V // 4), rows, y_id, exps_at, sums, head, TILES
            )  # fmt: skip
    rest, moment = sums
    at = work.partials + part.to(tl.int64) * count + rows.at
    tl.store(at, rest, mask=rows.live)
    tl.store(at + tl.num_programs(1).to(tl.int64) * count, moment, mask=rows.live)


@triton.jit(do_not_specialize=["ids", "table", "table_row_stride", "count", "parts"])
def scale_kernel(
    work, vocab, ids, table, table_row_stride, count, parts, p, CAPPED: tl.constexpr, VARIANT: tl.constexpr
):  # fmt: skip
    """Statistics, v and E_id of every row; where the sum overflowed, repair_kernel writes them again."""
    rows = tl.program_id(0) * COMBINED_ROWS + tl.arange(0, COMBINED_ROWS)
    live = rows < count
    id_ = column_of(tl.load(ids + rows, mask=live, other=-1), vocab)
    known = live & (id_ >= 0)
    token = table + rows
    to_z, chain = logit_scales(p, tl.load(token + TEMPERATURE * table_row_stride, mask=live, other=1.0), CAPPED)
    rest = tl.zeros((COMBINED_ROWS,), tl.float64)
    moment = tl.zeros((COMBINED_ROWS,), tl.float64)
    for first in range(0, parts, COMBINED_PARTS):
        at, wanted = part_block(work.partials, rows, live, count, first, parts)
        rest += tl.sum(tl.load(at, mask=wanted, other=0.0), 0)
        moment += tl.sum(tl.load(at + parts.to(tl.int64) * count, mask=wanted, other=0.0), 0)

    y_id = tl.load(work.y_ids + rows, mask=live, other=0.0)
    # Where the anchor is NaN, so are the hidden states: there is nothing to repair.
    lost = known & ~(rest <= LARGEST_REST) & (y_id == y_id)
    tl.store(work.overflowed + rows, lost.to(tl.int8), mask=live)
    log_sum = tl.where(known, log1p(rest), float("nan"))  # an id outside the vocabulary has no probability
    log_p = (-log_sum).to(tl.float32)
    h = (log_sum - LN2 * moment / (1.0 + rest)).to(tl.float32)
    tl.store(work.stats.logp + rows, log_p, mask=live)
    tl.store(work.stats.lse + rows, y_id.to(tl.float64) * to_z + log_sum, mask=live)
    tl.store(work.stats.entropy + rows, h, mask=live)

    g_logp = evaluate_token(token, table_row_stride, live, log_p, h, p, VARIANT).g_logp
    v = (-g_logp * chain / (1.0 + rest)).to(tl.float32)
    tl.store(work.scale + rows, tl.where(g_logp == 0.0, 0.0, v), mask=live)
    slope_id = tl.load(work.slope_ids + rows, mask=live, other=0.0)
    at_id = work.exps + rows.to(tl.int64) * work.exps_row_stride + id_
    tl.store(at_id, (-rest.to(tl.float32) * slope_id).to(work.exps.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["ids", "table", "table_row_stride"])
def repair_kernel(
    hidden, weight, head, ids, table, table_row_stride, work, p, CAPPED: tl.constexpr, VARIANT: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, again, if its sum overflowed: as in rows.py relative to the maximum, from logits computed twice."""
    if tl.load(work.overflowed + tl.program_id(0)) == 0:
        return
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    live = rows >= 0
    h = hidden + rows * head.hidden_row_stride
    id_ = tl.load(ids + rows)
    token = table + rows
    to_z, chain = logit_scales(p, tl.load(token + TEMPERATURE * table_row_stride), CAPPED)
    to_exponent = (to_z * INV_LN2).to(tl.float32)

    sums = no_sums(1)
    y_id = tl.zeros((1,), tl.float32)
    slope_id = tl.zeros((1,), tl.float32)
    for first in range(0, head.vocab, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        y, slope = row_logits(h, weight, head, columns, CAPPED, BLOCK)
        sums = add_block(y[None, :], sums, to_exponent)
        own = columns == id_
        y_id += tl.sum(tl.where(own, y, 0.0), 0)
        slope_id += tl.sum(tl.where(own, slope, 0.0), 0)
    top, total, moment = sums
    log_sum = tl.log(total)
    log_p = ((y_id - top).to(tl.float64) * to_z - log_sum).to(tl.float32)
    nats = (log_sum - LN2 * (moment / total)).to(tl.float32)
    tl.store(work.stats.logp + rows, log_p)
    tl.store(work.stats.lse + rows, top.to(tl.float64) * to_z + log_sum)
    tl.store(work.stats.entropy + rows, nats)
    g_logp = evaluate_token(token, table_row_stride, live, log_p, nats, p, VARIANT).g_logp
    tl.store(work.scale + rows, tl.where(g_logp == 0.0, 0.0, (-g_logp * chain / total).to(tl.float32)))

    # E_id - S' without the cancellation
    e_id = total.to(tl.float32) * expm1(log_p) * slope_id
    reference = tl.where(top == -float("inf"), 0.0, top)
    for first in range(0, head.vocab, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        y, slope = row_logits(h, weight, head, columns, CAPPED, BLOCK)
        e = tl.exp2(exponent(y, reference, to_exponent)) * slope
        e = tl.where(columns == id_, e_id, e)
        at = work.exps + rows * work.exps_row_stride + columns
        tl.store(at, e.to(work.exps.dtype.element_ty), mask=columns < head.vocab)


@triton.jit
def row_logits(h, weight, head, columns, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """(y, slope of the softcap) of one row of hidden states at these columns; y is -inf past the vocabulary's end."""
    inside = columns < head.vocab
    w = weight + tl.where(inside, columns, 0).to(tl.int64) * head.weight_row_stride
    sums = tl.zeros((columns.shape[0], BLOCK), tl.float32)
    for first in range(0, head.width, BLOCK):
        inner = first + tl.arange(0, BLOCK)
        left = (inner < head.width)[None, :]
        h_block = tl.load(h[:, None] + inner[None, :], mask=left, other=0.0).to(tl.float32)
        sums += h_block * tl.load(w[:, None] + inner[None, :], mask=left, other=0.0).to(tl.float32)
    u = tl.sum(sums, 1)
    if head.bias is not None:
        u += tl.load(head.bias + columns, mask=inside, other=0.0).to(tl.float32)
    y, slope = softcap(u, head.logit_scale, head.softcap, CAPPED)
    return tl.where(inside, y, -float("inf")), slope


def anchored(chunk: HeadChunk, table: Tensor, exponentials: Tensor) -> tuple[RowStats, Tensor]:
    """Statistics (C,) and v (C,) fp32; `exponentials` (C, V) bf16 receives E; d loss / d logits = v[:, None] E.

    For tokens whose gradient depends on themselves alone and not on their entropy.
    """
    hidden, weight, bias, ids, temperature, params = chunk
    hidden, count, vocab = contiguous_rows(hidden), hidden.shape[0], weight.shape[0]
    launch = prepare("anchored", hidden, weight, bias, params)
    parts = launch.grid[1]
    # Tensors of their own, not rows of one: each is to begin on 16 bytes, whatever the count.
    y_ids, slope_ids, scale = (torch.empty(count, dtype=torch.float32, device=hidden.device) for _ in range(3))
    work = Work(
        y_ids, slope_ids, exponentials, exponentials.stride(0),
        partials=torch.empty(2, parts, count, dtype=torch.float64, device=hidden.device),
        stats=RowStats.empty(count, hidden.device), scale=scale,
        overflowed=torch.empty(count, dtype=torch.int8, device=hidden.device),
    )  # fmt: skip
    p, capped, objective = scalars(params), launch.tiles.capped, variant(params)

    anchor_kernel[(triton.cdiv(count, ANCHOR_ROWS),)](
        hidden, weight, launch.head, ids, work, count, CAPPED=capped, ROWS=ANCHOR_ROWS, BLOCK=ANCHOR_BLOCK
    )  # fmt: skip
    exponential_kernel[launch.grid](
        *launch.operands, launch.head, ids, temperature, work, count, launch.per_part,
        TILES=launch.tiles, **launch.options,
    )  # fmt: skip
    scale_kernel[(triton.cdiv(count, COMBINED_ROWS.value),)](
        work, vocab, ids, table, table.stride(0), count, parts, p, CAPPED=capped, VARIANT=objective
    )  # fmt: skip
    repair_kernel[(count,)](
        hidden, weight, launch.head, ids, table, table.stride(0), work, p,
        CAPPED=capped, VARIANT=objective, COLUMNS=REPAIR_COLUMNS, BLOCK=REPAIR_BLOCK, num_warps=REPAIR_WARPS,
    )  # fmt: skip
    return work.stats, scale

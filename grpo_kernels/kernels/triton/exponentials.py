"""Rows of logits to exponentials relative to the sampled id, and the scale of each row that makes them d loss / d
logits.

    y and z as in rows.py        t_j = z_j - z_id        E_j = e^(t_j) dy/du_j
    R = sum_(j != id) e^(t_j)        S = 1 + R        lse = z_id + log S        logp = -log1p(R)
    entropy = log S - sum_j e^(t_j) t_j / S        row_scale = dz_du / S
    d loss / d u_j = -dlogp row_scale E_j        d loss / d u_id = dlogp sampled        sampled = row_scale R dy/du_id

The sampled id as the reference is known before the row is: one read and one write of the row yield its statistics and
its gradient, up to a number per row, and the gradients of hidden states and weights are plain products with E. logp
and 1 - p keep their digits where p is near 1: R is summed without the sampled id, for which 0 is stored. The caller
guarantees that no gradient goes through the entropy. E may lie over the front of the logits' rows, as in rows.py.

Rows whose R passes 2^80 (p below e^-55) are repaired: logits again, twice, from hidden states and weight, E relative to
the row's maximum, and row_scale = dz_du / S' with the S' of that maximum. bfloat16 has the range of float32:
exponents end at 2^100, far above what an unrepaired row holds, so nothing overflows. A program of repair returns at
once for any other row: no host decides, none waits. A repaired row reads the whole weight twice through one
multiprocessor, tens of milliseconds when nothing else runs; a row of NaN is not repaired.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operations import HeadChunk, LogitChunk, RowScales, Statistics, contiguous_rows
from .maths import INV_LN2, LN2, expm1, exponent, log1p, softcap
from .matmul import Head, head_of
from .rows import (
    GROUP,
    PER_TOKEN,
    Row,
    add_block,
    load_logits,
    load_sampled,
    logit_scales,
    no_sums,
    read_by,
    row_options,
    rows_of_program,
    scalars,
    token_index,
    tokens_of,
)

HIGHEST_EXPONENT: tl.constexpr = tl.constexpr(100.0)  # of 2; sums over a vocabulary stay below 2^128
LARGEST_REST: tl.constexpr = tl.constexpr(2.0**80)  # a row beyond it is repaired

REPAIR_COLUMNS, REPAIR_BLOCK, REPAIR_WARPS = 32, 256, 8


class ExpOutput(NamedTuple):
    """What the kernels write: exponentials of C rows, and the statistics of their tokens."""

    exps: Tensor  # E (C, V)
    row_stride: int  # its; not as a Matrix: Triton 3.6 loses a number in a tuple inside a tuple if it is 1
    stats: Statistics
    scales: RowScales
    overflowed: Tensor  # (C,) int8: whether repair_kernel has to write a row again

    @classmethod
    def of(cls, exps: Tensor, stats: Statistics) -> ExpOutput:
        overflowed = torch.empty(len(exps), dtype=torch.int8, device=exps.device)
        return cls(exps, exps.stride(0), stats, RowScales.empty(exps), overflowed)


@triton.jit
def add_exponentials(y, slope, y_id, to_exponent, is_id, sums):
    """Returns E of y (ROWS, COLUMNS), 0 at the sampled id, and the sums of 2^t and of 2^t t with the others added."""
    t = exponent(y, y_id[:, None], to_exponent[:, None])
    t = tl.where(t > HIGHEST_EXPONENT, HIGHEST_EXPONENT, t)
    e = tl.where(is_id, 0.0, tl.exp2(t))
    rest, moment = sums
    return e * slope, (rest + tl.sum(e, 1).to(tl.float64), moment + tl.sum(e * t, 1).to(tl.float64))


@triton.jit
def store_statistics(sums, y_id, slope_id, known, live, rows, token, scales, out):
    """Stores the statistics and RowScales of rows. Where the sum overflowed, repair_kernel writes them again."""
    rest, moment = sums
    to_z, dz_du = scales
    # Where the sampled id's logit is NaN, so are the hidden states: there is nothing to repair.
    lost = known & ~(rest <= LARGEST_REST) & (y_id == y_id)
    tl.store(out.overflowed + rows, lost.to(tl.int8), mask=live)
    log_sum = tl.where(known, log1p(rest), float("nan"))  # an id outside the vocabulary has no probability
    entropy = (log_sum - LN2 * moment / (1.0 + rest)).to(tl.float32)
    tl.store(out.stats.logp + token, (-log_sum).to(tl.float32), mask=live)
    tl.store(out.stats.lse + token, y_id.to(tl.float64) * to_z + log_sum, mask=live)
    tl.store(out.stats.entropy + token, entropy, mask=live)
    row_scale = dz_du / (1.0 + rest)
    tl.store(out.scales.row_scale + rows, row_scale.to(tl.float32), mask=live)
    sampled = tl.where(known, row_scale * rest * slope_id, 0.0)
    tl.store(out.scales.sampled + rows, sampled.to(tl.float32), mask=live)


# --- from logits ----------------------------------------------------------------------------------------------------


@triton.jit
def store_columns(
    row, exps_at, first, end, y_id, to_exponent, sums, p, OPTIONS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Stores E of the columns from `first` to `end`, at most COLUMNS; returns the sums with them added."""
    columns = first + tl.arange(0, COLUMNS)
    inside = row.live[:, None] & (columns < end)[None, :]
    y, slope = softcap(load_logits(row, columns, end, inside), p.logit_scale, p.softcap, OPTIONS.capped)
    y = tl.where(inside, y, -float("inf"))
    e, sums = add_exponentials(y, slope, y_id, to_exponent, columns[None, :] == row.ids[:, None], sums)
    if OPTIONS.overlap:  # over float32 logits that another thread may not have read yet
        tl.debug_barrier()
    tl.store(exps_at[:, None] + columns[None, :], e.to(exps_at.dtype.element_ty), mask=inside)
    return sums


@triton.jit(do_not_specialize=[*PER_TOKEN, "count"])
def rows_kernel(logits, ids, token_index, first_token, temperature, count, out, p, OPTIONS: tl.constexpr):
    BLOCK: tl.constexpr = OPTIONS.block
    ROWS: tl.constexpr = OPTIONS.rows
    at = rows_of_program(logits, ids, token_index, first_token, temperature, count, ROWS)
    row = Row(at[0], at[1], at[2], at[3], at[4], at[5], at[6], logits.bias, logits.vocab)
    scales = logit_scales(p, row.temperature, OPTIONS.capped)
    to_exponent = (scales[0] * INV_LN2).to(tl.float32)
    y_id, slope_id = softcap(load_sampled(row, row.known), p.logit_scale, p.softcap, OPTIONS.capped)
    exps_at = out.exps + row.at * out.row_stride
    sums = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
    tl.debug_barrier()  # every thread has read the sampled logit before any writes over it
    end = row.vocab
    if OPTIONS.ragged:
        end = row.vocab // GROUP * GROUP
    for first in range(0, end, BLOCK):
        sums = store_columns(row, exps_at, first, end, y_id, to_exponent, sums, p, OPTIONS, BLOCK)
    if OPTIONS.ragged:
        for first in range(end, row.vocab, BLOCK // 2):
            sums = store_columns(row, exps_at, first, row.vocab, y_id, to_exponent, sums, p, OPTIONS, BLOCK // 2)
    store_statistics(sums, y_id, slope_id, row.known, row.live, row.at, row.token, scales, out)


def exponentials(chunk: LogitChunk, head: HeadChunk, out: Tensor) -> RowScales:
    """Writes E of logits (C, V) to `out` (C, V) bfloat16, and the statistics."""
    grid, options = row_options(chunk, out)
    written = ExpOutput.of(out, chunk.stats)
    rows_kernel[grid](*read_by(chunk), len(out), written, scalars(chunk.transform), **options)
    hidden = contiguous_rows(head.hidden)
    head = head._replace(weight=contiguous_rows(head.weight))
    repair(hidden, head_of(hidden, head), head, written)
    return written.scales


# --- repair ---------------------------------------------------------------------------------------------------------


@triton.jit
def row_logits(h, weight, head, columns, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Returns (y, slope of the softcap) of one row of hidden states at these columns; y is -inf past the vocabulary's
    end."""
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


@triton.jit(do_not_specialize=PER_TOKEN)
def repair_kernel(
    hidden, weight, head, ids, token_index, first_token, temperature, out, CAPPED: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes one row again if its sum overflowed: relative to the maximum, as in rows.py, from logits computed
    twice."""
    if tl.load(out.overflowed + tl.program_id(0)) == 0:
        return
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    h = hidden + rows * head.hidden_row_stride
    token = tokens_of(rows, token_index, first_token, rows >= 0)
    id_ = tl.load(ids + token)
    to_z, dz_du = logit_scales(head, tl.load(temperature + token), CAPPED)
    to_exponent = (to_z * INV_LN2).to(tl.float32)

    sums = no_sums(1)
    y_id = tl.zeros((1,), tl.float32)
    slope_id = tl.zeros((1,), tl.float32)
    for first in range(0, head.vocab, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        y, slope = row_logits(h, weight, head, columns, CAPPED, BLOCK)
        sums = add_block(y[None, :], sums, to_exponent)
        is_sampled = columns == id_
        y_id += tl.sum(tl.where(is_sampled, y, 0.0), 0)
        slope_id += tl.sum(tl.where(is_sampled, slope, 0.0), 0)
    top, total, moment = sums
    log_sum = tl.log(total)
    logp = ((y_id - top).to(tl.float64) * to_z - log_sum).to(tl.float32)
    tl.store(out.stats.logp + token, logp)
    tl.store(out.stats.lse + token, top.to(tl.float64) * to_z + log_sum)
    tl.store(out.stats.entropy + token, (log_sum - LN2 * (moment / total)).to(tl.float32))
    tl.store(out.scales.row_scale + rows, (dz_du / total).to(tl.float32))
    tl.store(out.scales.sampled + rows, (-expm1(logp) * slope_id * dz_du).to(tl.float32))

    reference = tl.where(top == -float("inf"), 0.0, top)
    for first in range(0, head.vocab, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        y, slope = row_logits(h, weight, head, columns, CAPPED, BLOCK)
        e = tl.exp2(exponent(y, reference, to_exponent)) * slope
        e = tl.where(columns == id_, 0.0, e)
        at = out.exps + rows * out.row_stride + columns
        tl.store(at, e.to(out.exps.dtype.element_ty), mask=columns < head.vocab)


def repair(hidden: Tensor, head: Head, chunk: HeadChunk, out: ExpOutput) -> None:
    """Writes rows that overflowed again."""
    repair_kernel[(len(hidden),)](
        hidden, chunk.weight, head, chunk.ids, *token_index(chunk.rows, chunk.ids), chunk.temperature, out,
        CAPPED=head.softcap != 0.0, COLUMNS=REPAIR_COLUMNS, BLOCK=REPAIR_BLOCK, num_warps=REPAIR_WARPS,
    )  # fmt: skip

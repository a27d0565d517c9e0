"""Hidden states to log-probability, log-sum-exp and entropy, without logits: rows.py's statistics in an epilogue.

    u = h . W_j + b_j        y, z, lse, logp and entropy from u as in rows.py

partial_kernel runs over one part of the vocabulary per program (matmul.py) and leaves per row the maximum, the sums
relative to it and, from the same product as the sums, the sampled id's logit: logp is never above 0. combine_kernel
puts the parts together in float64, always in the same order. Sums are float32 trees within a quarter of a tile.

Predicted on an H200 in bf16 at N, H, V = 16,384, 4,096, 128,256 (790 TFLOP/s, 4.3 TB/s):
    partial     2 N H V = 17.2 TFLOP: 21.8 ms; reads 8.4 GB of weights (once per 16 token tiles) meanwhile: 2.0 ms
                epilogue, not overlapped: 1 exponential (0.6 ms) and about 20 instructions per logit, 1.4 ms at best
    combine     24 bytes per row and part, 70 parts: 28 MB, 0.01 ms
together 24 to 25 ms, 88 to 91 % of the bare product; the vendor's product with float32 logits written (8.4 GB) and read
again by rows.py takes 24 to 26.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import KernelParams, RowStats
from .maths import INV_LN2, LN2
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
from .objective import scalars
from .rows import add_block, empty_stats, logit_scales


@triton.jit
def add_logits(
    acc, bias, first_column, vocab, ids, top, exps, moment, y_id, to_exponent, p,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, EVEN_V: tl.constexpr,
):  # fmt: skip
    """The epilogue: what the rows have gathered so far, extended by logits (BLOCK_M, columns)."""
    columns = first_column + tl.arange(0, acc.shape[1])
    y, _ = to_logits(acc, bias, columns, vocab, p, CAPPED, EVEN_V)
    top, exps, extended = add_block(y, top, exps, moment, to_exponent)
    if ENTROPY:
        moment = extended
    y_id += tl.sum(tl.where(is_id(ids, first_column, acc.shape[1]), y, 0.0), 1)
    return top, exps, moment, y_id


@triton.jit(do_not_specialize=["ids", "temperature", "count", "parts", "per_part", "group"])
def partial_kernel(
    hidden, weight, bias, ids, temperature, partials, y_ids,
    count, vocab, width, hidden_row_stride, weight_row_stride, parts, per_part, group, p,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, TMA: tl.constexpr, EVEN_H: tl.constexpr, EVEN_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Maximum, sum of 2^t, sum of 2^t t over one part to `partials` (3, parts, N); y of the sampled id to `y_ids`."""
    token_tile, part = place(tl.cdiv(count, BLOCK_M), parts, group)
    rows = token_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = rows < count
    id_ = column_of(tl.load(ids + rows, mask=live, other=-1), vocab)
    to_z, _chain = logit_scales(p, tl.load(temperature + rows, mask=live, other=1.0), CAPPED)
    to_exponent = (to_z * INV_LN2).to(tl.float32)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    exps = tl.zeros((BLOCK_M,), tl.float64)
    moment = tl.zeros((BLOCK_M,), tl.float64)
    y_id = tl.zeros((BLOCK_M,), tl.float32)
    first_tile = part * per_part
    last_tile = tl.minimum(first_tile + per_part, tl.cdiv(vocab, BLOCK_V))
    for tile in tl.range(first_tile, last_tile, flatten=True):
        acc = product(
            hidden, weight, token_tile * BLOCK_M, tile * BLOCK_V, count, vocab, width,
            hidden_row_stride, weight_row_stride, TMA, EVEN_H, BLOCK_M, BLOCK_V, BLOCK_H,
        )  # fmt: skip
        pieces = quarters(acc)
        for i in tl.static_range(4):
            top, exps, moment, y_id = add_logits(
                pieces[i], bias, tile * BLOCK_V + i * (BLOCK_V // 4), vocab, id_, top, exps, moment, y_id, to_exponent,
                p, CAPPED, ENTROPY, EVEN_V,
            )  # fmt: skip
    plane = parts.to(tl.int64) * count
    at = partials + part.to(tl.int64) * count + rows
    tl.store(at, top.to(tl.float64), mask=live)
    tl.store(at + plane, exps, mask=live)
    tl.store(at + 2 * plane, moment, mask=live)
    own = (id_ >= first_tile * BLOCK_V) & (id_ < last_tile * BLOCK_V)
    tl.store(y_ids + rows, y_id, mask=live & own)


@triton.jit(do_not_specialize=["ids", "temperature", "count", "parts"])
def combine_kernel(
    partials, y_ids, ids, temperature, logp, lse, entropy, count, vocab, parts, p,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The parts of a row relative to the largest maximum; an id outside the vocabulary has no probability."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    known = live & (column_of(tl.load(ids + rows, mask=live, other=-1), vocab) >= 0)
    to_z, _chain = logit_scales(p, tl.load(temperature + rows, mask=live, other=1.0), CAPPED)
    plane = parts.to(tl.int64) * count
    top = tl.full((ROWS,), -float("inf"), tl.float64)
    for first in range(0, parts, PARTS):
        at, wanted = part_block(partials, rows, live, count, first, parts, PARTS)
        top = tl.maximum(top, tl.max(tl.load(at, mask=wanted, other=-float("inf")), 0))
    exps = tl.zeros((ROWS,), tl.float64)
    moment = tl.zeros((ROWS,), tl.float64)
    for first in range(0, parts, PARTS):
        at, wanted = part_block(partials, rows, live, count, first, parts, PARTS)
        tops = tl.load(at, mask=wanted, other=-float("inf"))
        part_exps = tl.load(at + plane, mask=wanted, other=0.0)
        # The sums of a part without a finite logit are 0, or NaN, relative to anything.
        fall = tl.where(tops == -float("inf"), 0.0, (top[None, :] - tops) * (to_z * INV_LN2)[None, :])
        factor = tl.exp2(-fall.to(tl.float32)).to(tl.float64)
        exps += tl.sum(part_exps * factor, 0)
        if ENTROPY:
            moment += tl.sum((tl.load(at + 2 * plane, mask=wanted, other=0.0) - part_exps * fall) * factor, 0)
    log_sum = tl.log(exps)
    h = tl.zeros((ROWS,), tl.float32)
    if ENTROPY:
        h = (log_sum - LN2 * (moment / exps)).to(tl.float32)
    y_id = tl.load(y_ids + rows, mask=known, other=0.0).to(tl.float64)
    log_p = tl.where(known, (y_id - top) * to_z - log_sum, float("nan"))
    tl.store(logp + rows, log_p.to(tl.float32), mask=live)
    tl.store(lse + rows, top * to_z + log_sum, mask=live)
    tl.store(entropy + rows, h, mask=live)


def linear_logp(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    temperature: Tensor,
    params: KernelParams,
    *,
    entropy: bool,
) -> RowStats:
    """Statistics (N,) of softcap(hidden (N, H) weight (V, H)^T + bias (V,)); without `entropy`, zeros in its place."""
    (count, _), vocab = hidden.shape, weight.shape[0]
    work = prepare("linear_logp", hidden, weight)
    partials = torch.empty(3, work.parts, count, dtype=torch.float64, device=hidden.device)
    y_ids = torch.empty(count, dtype=torch.float32, device=hidden.device)
    out = empty_stats(count, hidden.device)
    p, capped = scalars(params), params.softcap != 0.0
    partial_kernel[work.grid](
        *work.operands, bias, ids, temperature, partials, y_ids, *work.numbers, p,
        CAPPED=capped, ENTROPY=entropy, **work.options,
    )  # fmt: skip
    combine_kernel[(triton.cdiv(count, COMBINED_ROWS),)](
        partials, y_ids, ids, temperature, *out, count, vocab, work.parts, p,
        CAPPED=capped, ENTROPY=entropy, PARTS=COMBINED_PARTS, ROWS=COMBINED_ROWS,
    )  # fmt: skip
    return out

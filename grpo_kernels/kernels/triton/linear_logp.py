"""Hidden states to log-probability, log-sum-exp and entropy, without logits: rows.py's statistics in an epilogue.

    u = h . W_j + b_j        y, z, lse, logp and entropy from u as in rows.py

partial_kernel runs over one part of the vocabulary per program (matmul.py) and leaves per row the maximum, the sums
relative to it and, from the same product as the sums, the sampled id's logit: logp is never above 0. combine_kernel
puts the parts together in float64, always in the same order. Sums are float32 trees within a quarter of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...contract import HeadChunk, RowStats, contiguous_rows
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
    rows_of_tile,
    to_logits,
)
from .rows import RowSums, add_block, logit_scales, no_sums


@triton.jit
def add_logits(acc, first_column, rows, sums, y_id, head, ENTROPY: tl.constexpr, TILES: tl.constexpr):
    """The epilogue: what the rows have gathered so far, extended by logits (BLOCK_M, columns)."""
    columns = first_column + tl.arange(0, acc.shape[1])
    y, _ = to_logits(acc, columns, head, TILES)
    extended = add_block(y, sums, rows.to_exponent)
    moment = sums.moment
    if ENTROPY:
        moment = extended.moment
    y_id += tl.sum(tl.where(is_id(rows.ids, first_column, acc.shape[1]), y, 0.0), 1)
    return RowSums(extended.top, extended.exps, moment), y_id


@triton.jit(do_not_specialize=["ids", "temperature", "count", "per_part"])
def partial_kernel(
    hidden, weight, head, ids, temperature, partials, y_ids, count, per_part, ENTROPY: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """Of one part of the vocabulary, `per_part` tiles, the (3, parts, N) maximum, sum of 2^t and sum of 2^t t.

    And y of the sampled ids, (N,).
    """
    BLOCK_M: tl.constexpr = TILES.block_m
    BLOCK_V: tl.constexpr = TILES.block_v
    token_tile, part = place(head.group)
    rows = rows_of_tile(token_tile, ids, temperature, count, head, TILES)
    sums = no_sums(BLOCK_M)
    y_id = tl.zeros((BLOCK_M,), tl.float32)
    first_tile = part * per_part
    last_tile = tl.minimum(first_tile + per_part, tl.cdiv(head.vocab, BLOCK_V))
    for tile in tl.range(first_tile, last_tile, flatten=True):
        acc = product(hidden, weight, token_tile * BLOCK_M, tile * BLOCK_V, count, head, TILES)
        pieces = quarters(acc)
        for i in tl.static_range(4):
            sums, y_id = add_logits(
                pieces[i], tile * BLOCK_V + i * (BLOCK_V // 4), rows, sums, y_id, head, ENTROPY, TILES
            )  # fmt: skip
    plane = tl.num_programs(1).to(tl.int64) * count
    at = partials + part.to(tl.int64) * count + rows.at
    tl.store(at, sums.top.to(tl.float64), mask=rows.live)
    tl.store(at + plane, sums.exps, mask=rows.live)
    tl.store(at + 2 * plane, sums.moment, mask=rows.live)
    own = (rows.ids >= first_tile * BLOCK_V) & (rows.ids < last_tile * BLOCK_V)
    tl.store(y_ids + rows.at, y_id, mask=rows.live & own)


@triton.jit(do_not_specialize=["ids", "temperature", "count", "parts"])
def combine_kernel(
    partials, y_ids, head, ids, temperature, out, count, parts, CAPPED: tl.constexpr, ENTROPY: tl.constexpr
):  # fmt: skip
    """The parts of a row relative to the largest maximum; an id outside the vocabulary has no probability."""
    rows = tl.program_id(0) * COMBINED_ROWS + tl.arange(0, COMBINED_ROWS)
    live = rows < count
    known = live & (column_of(tl.load(ids + rows, mask=live, other=-1), head.vocab) >= 0)
    to_z, _chain = logit_scales(head, tl.load(temperature + rows, mask=live, other=1.0), CAPPED)
    plane = parts.to(tl.int64) * count
    top = tl.full((COMBINED_ROWS,), -float("inf"), tl.float64)
    for first in range(0, parts, COMBINED_PARTS):
        at, wanted = part_block(partials, rows, live, count, first, parts)
        top = tl.maximum(top, tl.max(tl.load(at, mask=wanted, other=-float("inf")), 0))
    exps = tl.zeros((COMBINED_ROWS,), tl.float64)
    moment = tl.zeros((COMBINED_ROWS,), tl.float64)
    for first in range(0, parts, COMBINED_PARTS):
        at, wanted = part_block(partials, rows, live, count, first, parts)
        tops = tl.load(at, mask=wanted, other=-float("inf"))
        part_exps = tl.load(at + plane, mask=wanted, other=0.0)
        # The sums of a part without a finite logit are 0, or NaN, relative to anything.
        fall = tl.where(tops == -float("inf"), 0.0, (top[None, :] - tops) * (to_z * INV_LN2)[None, :])
        factor = tl.exp2(-fall.to(tl.float32)).to(tl.float64)
        exps += tl.sum(part_exps * factor, 0)
        if ENTROPY:
            moment += tl.sum((tl.load(at + 2 * plane, mask=wanted, other=0.0) - part_exps * fall) * factor, 0)
    log_sum = tl.log(exps)
    h = tl.zeros((COMBINED_ROWS,), tl.float32)
    if ENTROPY:
        h = (log_sum - LN2 * (moment / exps)).to(tl.float32)
    y_id = tl.load(y_ids + rows, mask=known, other=0.0).to(tl.float64)
    log_p = tl.where(known, (y_id - top) * to_z - log_sum, float("nan"))
    tl.store(out.logp + rows, log_p.to(tl.float32), mask=live)
    tl.store(out.lse + rows, top * to_z + log_sum, mask=live)
    tl.store(out.entropy + rows, h, mask=live)


def linear_logp(chunk: HeadChunk, *, entropy: bool) -> RowStats:
    """Statistics (C,) of a chunk; without `entropy`, zeros in its place."""
    hidden, ids, temperature = contiguous_rows(chunk.hidden), chunk.ids, chunk.temperature
    count = hidden.shape[0]
    work = prepare("linear_logp", hidden, chunk.weight, chunk.bias, chunk.params)
    parts = work.grid[1]
    partials = torch.empty(3, parts, count, dtype=torch.float64, device=hidden.device)
    y_ids = torch.empty(count, dtype=torch.float32, device=hidden.device)
    out = RowStats.empty(count, hidden.device)
    partial_kernel[work.grid](
        *work.operands, work.head, ids, temperature, partials, y_ids, count, work.per_part,
        ENTROPY=entropy, TILES=work.tiles, **work.options,
    )  # fmt: skip
    combine_kernel[(triton.cdiv(count, COMBINED_ROWS.value),)](
        partials, y_ids, work.head, ids, temperature, out, count, parts, CAPPED=work.tiles.capped, ENTROPY=entropy
    )  # fmt: skip
    return out

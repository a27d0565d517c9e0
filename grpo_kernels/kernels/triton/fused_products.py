"""Products hidden weight^T with the softmax in their epilogue, without logits; matmul.py has the product itself.

fused_logp: statistics. partial_kernel runs over one part of the vocabulary per program and leaves per row the maximum,
the sums relative to it and, from the same product as the sums, the sampled id's logit: logp is never above 0.
combine_kernel puts the parts together in float64, always in the same order. Sums are float32 trees within a quarter of
a tile.

fused_exponentials: what exponentials.py computes.
    sampled       y of the sampled ids: one dot product per row
    exponential   the product, whose epilogue stores E; per row and part of the vocabulary the sums of e^t and e^t t
    finish        per row: parts in a fixed order and float64, statistics, RowScales
    repair        rows whose sum overflowed
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operations import HeadChunk, RowScales
from .exponentials import ExpOutput, add_exponentials, repair, store_statistics
from .maths import INV_LN2, LN2, softcap
from .matmul import (
    COMBINED_PARTS,
    COMBINED_ROWS,
    column_of,
    is_id,
    part_block,
    prepare,
    product,
    quarters,
    rows_of_tile,
    tile_of_program,
    to_logits,
)
from .rows import PER_TOKEN, RowSums, add_block, logit_scales, no_sums, token_index, tokens_of

SAMPLED_ROWS, SAMPLED_BLOCK = 8, 512
PER_ROW = *PER_TOKEN, "count"  # arguments that no kernel is specialised for


def per_row(chunk: HeadChunk) -> tuple[Tensor, Tensor]:
    """Returns ids and temperature of a chunk's rows, (C,): kernels of tiles read them without an index."""
    return chunk.rows.take(chunk.ids), chunk.rows.take(chunk.temperature)


# --- log-probabilities ----------------------------------------------------------------------------------------------


@triton.jit
def add_logits(acc, first_column, rows, sums, y_id, head, ENTROPY: tl.constexpr, TILES: tl.constexpr):
    """Returns the sums of the rows with those of logits (BLOCK_M, columns) added: the epilogue of the product."""
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
    hidden, weight, head, ids, temperature, partials, y_ids, count, per_part, group, ENTROPY: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Stores the (3, parts, N) maximum, sum of 2^t and sum of 2^t t over one part of the vocabulary, `per_part` tiles.

    It also stores y of the sampled ids, (N,).
    """
    BLOCK_M: tl.constexpr = TILES.block_m
    BLOCK_V: tl.constexpr = TILES.block_v
    token_tile, part = tile_of_program(group)
    rows = rows_of_tile(token_tile, ids, temperature, count, head, TILES)
    sums = no_sums(BLOCK_M)
    y_id = tl.zeros((BLOCK_M,), tl.float32)
    first_tile = part * per_part
    last_tile = tl.minimum(first_tile + per_part, tl.cdiv(head.vocab, BLOCK_V))
    for tile in tl.range(first_tile, last_tile, flatten=True):
        acc = product(hidden, weight, token_tile * BLOCK_M, tile * BLOCK_V, head.width, TILES)
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
    has_sampled = (rows.ids >= first_tile * BLOCK_V) & (rows.ids < last_tile * BLOCK_V)
    tl.store(y_ids + rows.at, y_id, mask=rows.live & has_sampled)


@triton.jit(do_not_specialize=[*PER_ROW, "parts"])
def combine_kernel(
    partials, y_ids, head, ids, temperature, token_index, first_token, out, count, parts, CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
):  # fmt: skip
    """Combines the parts of a row relative to the largest maximum; an id outside the vocabulary has no probability."""
    rows = tl.program_id(0) * COMBINED_ROWS + tl.arange(0, COMBINED_ROWS)
    live = rows < count
    known = live & (column_of(tl.load(ids + rows, mask=live, other=-1), head.vocab) >= 0)
    to_z, _dz_du = logit_scales(head, tl.load(temperature + rows, mask=live, other=1.0), CAPPED)
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
    token = tokens_of(rows, token_index, first_token, live)
    tl.store(out.logp + token, log_p.to(tl.float32), mask=live)
    tl.store(out.lse + token, top * to_z + log_sum, mask=live)
    tl.store(out.entropy + token, h, mask=live)


def fused_logp(chunk: HeadChunk, entropy: bool) -> None:
    """Writes the statistics of a chunk; without `entropy`, 0 in its place."""
    launch, ids, temperature = prepare("fused_logp", chunk), *per_row(chunk)
    count, parts, device = len(launch.hidden), launch.grid[1], launch.hidden.device
    partials = torch.empty(3, parts, count, dtype=torch.float64, device=device)
    y_ids = torch.empty(count, dtype=torch.float32, device=device)
    partial_kernel[launch.grid](
        *launch.operands, launch.head, ids, temperature, partials, y_ids, count, launch.per_part, launch.group,
        ENTROPY=entropy, TILES=launch.tiles, **launch.options,
    )  # fmt: skip
    combine_kernel[(triton.cdiv(count, COMBINED_ROWS.value),)](
        partials, y_ids, launch.head, ids, temperature, *token_index(chunk.rows, chunk.ids), chunk.stats, count, parts,
        CAPPED=launch.tiles.capped, ENTROPY=entropy,
    )  # fmt: skip


# --- exponentials ---------------------------------------------------------------------------------------------------


class PartialSums(NamedTuple):
    """The tensors that one kernel leaves for the next."""

    y_ids: Tensor  # (C,) y of the sampled ids; 0 for an id outside the vocabulary
    slope_ids: Tensor  # (C,) the softcap's slope there; 1
    sums: Tensor  # (2, parts, C) float64: sums of 2^t and of 2^t t, without the sampled id


@triton.jit(do_not_specialize=["ids", "count"])
def sampled_kernel(
    hidden, weight, head, ids, partial, count, CAPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Stores y and the softcap's slope of the sampled ids."""
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
    tl.store(partial.y_ids + rows, y, mask=live)
    tl.store(partial.slope_ids + rows, slope, mask=live)


@triton.jit
def store_tile(acc, first_column, rows, y_id, exps_at, sums, head, TILES: tl.constexpr):
    """Stores E of logits (BLOCK_M, columns), and returns the sums over all but the sampled id with them added: the
    epilogue."""
    columns = first_column + tl.arange(0, acc.shape[1])
    y, slope = to_logits(acc, columns, head, TILES)
    is_sampled = is_id(rows.ids, first_column, acc.shape[1])
    e, sums = add_exponentials(y, slope, y_id, rows.to_exponent, is_sampled, sums)
    inside = rows.live[:, None] & (columns < head.vocab)[None, :]
    tl.store(exps_at[:, None] + columns[None, :], e.to(exps_at.dtype.element_ty), mask=inside)
    return sums


@triton.jit(do_not_specialize=["ids", "temperature", "count", "per_part"])
def exponential_kernel(
    hidden, weight, head, ids, temperature, partial, out, count, per_part, group, TILES: tl.constexpr
):  # fmt: skip
    """Stores E, and the sums over one part of the vocabulary, `per_part` tiles."""
    BLOCK_M: tl.constexpr = TILES.block_m
    BLOCK_V: tl.constexpr = TILES.block_v
    token_tile, part = tile_of_program(group)
    rows = rows_of_tile(token_tile, ids, temperature, count, head, TILES)
    y_id = tl.load(partial.y_ids + rows.at, mask=rows.live, other=0.0)
    exps_at = out.exps + rows.at.to(tl.int64) * out.row_stride
    sums = tl.zeros((BLOCK_M,), tl.float64), tl.zeros((BLOCK_M,), tl.float64)
    first_tile = part * per_part
    last_tile = tl.minimum(first_tile + per_part, tl.cdiv(head.vocab, BLOCK_V))
    for tile in tl.range(first_tile, last_tile, flatten=True):
        acc = product(hidden, weight, token_tile * BLOCK_M, tile * BLOCK_V, head.width, TILES)
        pieces = quarters(acc)
        for i in tl.static_range(4):
            sums = store_tile(pieces[i], tile * BLOCK_V + i * (BLOCK_V // 4), rows, y_id, exps_at, sums, head, TILES)
    rest, moment = sums
    at = partial.sums + part.to(tl.int64) * count + rows.at
    tl.store(at, rest, mask=rows.live)
    tl.store(at + tl.num_programs(1).to(tl.int64) * count, moment, mask=rows.live)


@triton.jit(do_not_specialize=[*PER_ROW, "parts"])
def finish_kernel(
    head, ids, temperature, token_index, first_token, partial, out, count, parts, CAPPED: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * COMBINED_ROWS + tl.arange(0, COMBINED_ROWS)
    live = rows < count
    id_ = column_of(tl.load(ids + rows, mask=live, other=-1), head.vocab)
    scales = logit_scales(head, tl.load(temperature + rows, mask=live, other=1.0), CAPPED)
    rest = tl.zeros((COMBINED_ROWS,), tl.float64)
    moment = tl.zeros((COMBINED_ROWS,), tl.float64)
    for first in range(0, parts, COMBINED_PARTS):
        at, wanted = part_block(partial.sums, rows, live, count, first, parts)
        rest += tl.sum(tl.load(at, mask=wanted, other=0.0), 0)
        moment += tl.sum(tl.load(at + parts.to(tl.int64) * count, mask=wanted, other=0.0), 0)
    y_id = tl.load(partial.y_ids + rows, mask=live, other=0.0)
    slope_id = tl.load(partial.slope_ids + rows, mask=live, other=0.0)
    token = tokens_of(rows, token_index, first_token, live)
    store_statistics((rest, moment), y_id, slope_id, live & (id_ >= 0), live, rows, token, scales, out)


def fused_exponentials(chunk: HeadChunk, out: Tensor) -> RowScales:
    """Writes E to `out` (C, V) bfloat16, and the statistics."""
    launch, ids, temperature = prepare("fused_exponentials", chunk), *per_row(chunk)
    hidden, head, capped = launch.hidden, launch.head, launch.tiles.capped
    count, parts = len(hidden), launch.grid[1]
    # Tensors of their own, not rows of one: each is to begin on 16 bytes, whatever the count.
    y_ids, slope_ids = (torch.empty(count, dtype=torch.float32, device=hidden.device) for _ in range(2))
    sums = torch.empty(2, parts, count, dtype=torch.float64, device=hidden.device)
    partial, written = PartialSums(y_ids, slope_ids, sums), ExpOutput.of(out, chunk.stats)
    sampled_kernel[(triton.cdiv(count, SAMPLED_ROWS),)](
        hidden, chunk.weight, head, ids, partial, count, CAPPED=capped, ROWS=SAMPLED_ROWS, BLOCK=SAMPLED_BLOCK
    )  # fmt: skip
    exponential_kernel[launch.grid](
        *launch.operands, head, ids, temperature, partial, written, count, launch.per_part, launch.group,
        TILES=launch.tiles, **launch.options,
    )  # fmt: skip
    finish_kernel[(triton.cdiv(count, COMBINED_ROWS.value),)](
        head, ids, temperature, *token_index(chunk.rows, chunk.ids), partial, written, count, parts, CAPPED=capped
    )  # fmt: skip
    repair(hidden, head, chunk, written)
    return written.scales

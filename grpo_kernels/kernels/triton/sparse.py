"""Rows of d loss / d logits as pairs of an id and a number, by systematic sampling (operations.SparseRule).

A program owns rows and walks them in blocks, as in rows.py. Shares of the level theta s are integers in units of
1 / SPARSE_ONE. An entry that is kept as it is has a share of exactly 1: it passes one integer wherever the running sum
stands, and leaves the sum's fraction alone. So one sum says everything: the entries up to j that are kept are the whole
part after j, and j is kept where that grows.

The total of a block tells how many of its entries are kept, and the next block follows where none is. Otherwise, and if
there is room, the block is read again from the cache in parts of a column per thread, with a prefix sum over each. One
over a whole block would hold all of it in 64 bits: 128 registers and spills instead of 62 (sm_90), and each number
would change threads to be stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..operations import SPARSE_ONE, LogitChunk, SparseRows, SparseRule
from .rows import (
    GROUP,
    PER_TOKEN,
    Row,
    gradient_of,
    load_terms,
    logit_scales,
    read_by,
    row_options,
    rows_of_program,
    scalars,
)

ONE: tl.constexpr = tl.constexpr(float(SPARSE_ONE))
BITS: tl.constexpr = tl.constexpr(SPARSE_ONE.bit_length() - 1)
FRACTION: tl.constexpr = tl.constexpr(SPARSE_ONE - 1)


class Sink(NamedTuple):
    """Where the pairs of the rows go, and the levels; (ROWS,) each unless told."""

    ids: Any  # pointers to their first pairs
    numbers: Any
    capacity: Any  # one number for all
    level: Any  # theta s, what a sampled entry becomes
    to_share: Any  # of |du|, in units of 1 / SPARSE_ONE


class Progress(NamedTuple):
    """(ROWS,) each."""

    sum: Any  # the fraction of the running sum, int64
    pairs: Any  # how many so far, those without room too


@triton.jit
def mixed(x):
    """Returns a hash of 32-bit integers: the last steps of murmur3; csrc/cpu/sparse.cpp."""
    x += 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def start_of_sum(token, lse, first_id):
    """Returns where the running sums of tokens begin; csrc/cpu/sparse.cpp."""
    bits = lse.to(tl.float32).to(tl.uint32, bitcast=True)
    word = mixed(mixed(mixed(token.to(tl.uint32)) + bits) + first_id.to(tl.uint32))
    return (word >> 1).to(tl.int64)


@triton.jit
def shares_of(row, columns, end, terms, sink, p, OPTIONS: tl.constexpr):
    """Returns (gradients, whether they are kept as they are, their shares); a column beyond `end` has a share of 0."""
    wanted = (row.live & ~terms.is_zero)[:, None] & (columns < end)[None, :]
    value = gradient_of(row, columns, end, wanted, terms, None, p, OPTIONS)
    share = tl.abs(value) * sink.to_share[:, None]
    exact = ~(share < ONE) | (columns[None, :] == row.ids[:, None])  # NaN and infinity too
    steps = (tl.where(exact, ONE, share) + 0.5).to(tl.uint32).to(tl.int64)
    return value, exact, tl.where(wanted, steps, 0)


@triton.jit
def add_up(progress, steps, sink):
    """Returns Progress behind these columns, field by field, and whether any row has a pair among them that is to be
    stored."""
    total = progress.sum + tl.sum(steps, 1)
    kept = (total >> BITS).to(tl.int32)
    stores = tl.max(tl.where(progress.pairs < sink.capacity, kept, 0), 0) > 0
    return total & FRACTION, progress.pairs + kept, stores


@triton.jit
def store_part(row, first, end, terms, sink, progress, p, OPTIONS: tl.constexpr, COLUMNS: tl.constexpr):
    """Stores the pairs of the columns from `first` to `end`, at most COLUMNS; returns Progress behind them."""
    columns = first + tl.arange(0, COLUMNS)
    value, exact, steps = shares_of(row, columns, end, terms, sink, p, OPTIONS)
    fraction, pairs, stores = add_up(progress, steps, sink)
    if stores:
        after = progress.sum[:, None] + tl.cumsum(steps, 1)
        at = progress.pairs[:, None] + (after >> BITS).to(tl.int32) - 1
        stored = ((after >> BITS) != ((after - steps) >> BITS)) & (at < sink.capacity)
        sampled = tl.where(value < 0.0, -sink.level[:, None], sink.level[:, None])
        tl.store(sink.ids[:, None] + at, columns[None, :], mask=stored)
        tl.store(sink.numbers[:, None] + at, tl.where(exact, value, sampled), mask=stored)
    return Progress(fraction, pairs)


@triton.jit
def store_block(row, first, end, terms, sink, progress, p, OPTIONS: tl.constexpr, PART: tl.constexpr):
    """Does what store_part does for a block, by parts of PART columns where there is something to store."""
    BLOCK: tl.constexpr = OPTIONS.block
    _, _, steps = shares_of(row, first + tl.arange(0, BLOCK), end, terms, sink, p, OPTIONS)
    fraction, pairs, stores = add_up(progress, steps, sink)
    if stores:  # what the parts find holds: compiled differently, a share may round differently
        for part in range(first, tl.minimum(first + BLOCK, end), PART):
            progress = store_part(row, part, end, terms, sink, progress, p, OPTIONS, PART)
    else:
        progress = Progress(fraction, pairs)
    return progress


@triton.jit(do_not_specialize=[*PER_TOKEN, "dlogp", "dentropy", "count", "first_id"])
def sparse_kernel(
    logits, ids, token_index, first_token, temperature, stats, dlogp, dentropy, count, pair_ids, numbers, counts,
    capacity, theta, first_id, p, OPTIONS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = OPTIONS.rows  # Triton 3.4 takes no attribute in a shape
    at = rows_of_program(logits, ids, token_index, first_token, temperature, count, ROWS)
    row = Row(at[0], at[1], at[2], at[3], at[4], at[5], at[6], logits.bias, logits.vocab)
    scales = logit_scales(p, row.temperature, OPTIONS.capped)
    terms, _, by_logp, by_entropy = load_terms(row, stats, dlogp, dentropy, scales, p, OPTIONS)

    level = theta * (scales[1].to(tl.float32) * (tl.abs(by_logp) + tl.abs(by_entropy)))
    level = tl.where(terms.is_zero, 1.0, level)  # such a row has no entries: any number will do
    sink = Sink(pair_ids + row.at * capacity, numbers + row.at * capacity, capacity, level, 1.0 / level * ONE)
    lse = tl.load(stats.lse + row.token, mask=row.live, other=0.0)
    progress = Progress(start_of_sum(row.token, lse, first_id), tl.zeros((ROWS,), tl.int32))
    end = row.vocab
    if OPTIONS.ragged:
        end = row.vocab // GROUP * GROUP
    for first in range(0, end, OPTIONS.block):
        progress = store_block(row, first, end, terms, sink, progress, p, OPTIONS, PART)
    if OPTIONS.ragged:
        for first in range(end, row.vocab, PART):
            progress = store_part(row, first, row.vocab, terms, sink, progress, p, OPTIONS, PART)
    tl.store(counts + row.at, tl.minimum(progress.pairs, capacity + 1), mask=row.live)


def sparse_gradient(chunk: LogitChunk, dlogp: Tensor, dentropy: Tensor, rule: SparseRule, out: SparseRows) -> None:
    """Writes d loss / d logits (C, V) as pairs."""
    grid, options = row_options(chunk)
    part = min(32 * options["num_warps"], options["OPTIONS"].block)
    sparse_kernel[grid](
        *read_by(chunk), chunk.stats, dlogp.contiguous(), dentropy.contiguous(), len(chunk.logits), *out,
        out.ids.shape[1], rule.theta, rule.first_id, scalars(chunk.transform), PART=part, **options,
    )  # fmt: skip

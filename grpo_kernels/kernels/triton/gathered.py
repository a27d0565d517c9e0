"""The three products over a few ids of each token, K_t of token t: those of its sampling mask, for example.

    sampled dense-dense product    logits_tj = h_t . W_j + b_j              j in K_t
    sparse-dense product           dhidden_t = sum_j dlogits_tj W_j         j in K_t
    its transpose                  dweight_j = sum_t dlogits_tj h_t         t with j in K_t

Each reads one row of W, or of h, per pair of a token and an id: 2 H bytes in 16 bits, the rest is small. A program owns
SLOTS ids of one token, a part of one token's row of dhidden, or a part of one id's row of dweight; sums are float32, in
an order that depends on the ids alone. The transpose has its pairs sorted by id. A tile of a sum is so wide that each
thread has whole columns of it, in which it adds up by itself.

The rows of ids come from those of the mask: a program finds a token's sampled id among its kept ones, and writes them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operations import AllowedIdRows, GatheredIds, TokenIdPairs, TokenMask, contiguous_rows

# Of a tile in which rows of W are read: whole lines, 16 in flight per program.
SLOTS: tl.constexpr = tl.constexpr(16)
WIDTH: tl.constexpr = tl.constexpr(128)
SUM_SLOTS: tl.constexpr = tl.constexpr(8)
SUM_WIDTH: tl.constexpr = tl.constexpr(1024)  # columns of a sum that a program owns: 128 threads of 16 bytes
IDS: tl.constexpr = tl.constexpr(64)  # of a row that are looked at together


class Matrix(NamedTuple):
    """Rows of numbers without gaps inside a row."""

    data: Tensor
    row_stride: int  # elements from one row to the next

    @classmethod
    def of(cls, x: Tensor) -> Matrix:
        return cls(x, x.stride(0))


@triton.jit
def mask_ids(ids, position, live, total):
    """Returns ids of the mask, 0 where not live. Counts that do not add up to the number of ids lead to no address
    outside."""
    return tl.load(ids + position, mask=live & (position >= 0) & (position < total), other=0).to(tl.int64)


_PER_CALL = ["ids", "ends", "sampled", "index", "total", "local_first", "local_count", "vocab", "added"]


@triton.jit(do_not_specialize=_PER_CALL)
def ids_kernel(
    ids, ends, sampled, index, total, local_first, local_count, vocab, allowed, token_of, columns, added, slots
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(index + row)
    first = tl.load(ends + token - 1, mask=token > 0, other=0)
    count = tl.load(ends + token) - first
    wanted = tl.load(sampled + token)
    position = tl.arange(0, IDS).to(tl.int64)
    before = tl.zeros((IDS,), tl.int64)
    num_local = tl.zeros((IDS,), tl.int64)
    wrong = tl.zeros((IDS,), tl.int64)
    sampled_end = tl.zeros((IDS,), tl.int64)  # 1 behind the sampled id
    for start in range(0, count, IDS):
        live = start + position < count
        id_ = mask_ids(ids, first + start + position, live, total)
        before += (live & (id_ < local_first)).to(tl.int64)
        num_local += (live & (id_ >= local_first) & (id_ < local_first + local_count)).to(tl.int64)
        wrong += (live & ((id_ < 0) | (id_ >= vocab))).to(tl.int64)
        sampled_end = tl.where(live & (id_ == wanted), start + position + 1, sampled_end)
    skipped, held, behind = tl.sum(before, 0), tl.sum(num_local, 0), tl.max(sampled_end, 0)
    local = wanted - local_first
    is_here = (local >= 0) & (local < local_count) & (tl.sum(wrong, 0) == 0)
    extra = tl.where(is_here & (behind == 0), local, -1)
    for start in range(0, slots, IDS):
        slot = start + position
        id_ = mask_ids(ids, first + skipped + slot, slot < held, total) - local_first
        id_ = tl.minimum(tl.maximum(id_, 0), local_count - 1)
        id_ = tl.where(slot < held, id_, tl.where(slot == held, extra, -1))
        tl.store(allowed + row * slots + slot, id_.to(tl.int32), mask=slot < slots)
        tl.store(token_of + row * slots + slot, (tl.zeros_like(slot) + token).to(tl.int32), mask=slot < slots)
    column = tl.where(behind == 0, held, behind - 1 - skipped)
    tl.store(columns + token, tl.where(is_here, column, -1))
    tl.store(added + row, (behind == 0).to(tl.uint8))


@triton.jit
def number_of_ids(ids, slots):
    """Returns how many entries of a row are used: they come first."""
    used = tl.zeros((IDS,), tl.int32)
    for start in range(0, slots, IDS):
        slot = start + tl.arange(0, IDS)
        used += (tl.load(ids + slot, mask=slot < slots, other=-1) >= 0).to(tl.int32)
    return tl.sum(used, 0)


@triton.jit(do_not_specialize=["index", "ids", "logits"])
def logits_kernel(hidden, weight, bias, index, ids, logits, slots, width):
    blocks = (slots + SLOTS - 1) // SLOTS
    row = tl.program_id(0).to(tl.int64) // blocks
    slot = tl.program_id(0) % blocks * SLOTS + tl.arange(0, SLOTS)
    position = row * slots + slot
    id_ = tl.load(ids + position, mask=slot < slots, other=-1).to(tl.int64)
    used = id_ >= 0
    h = hidden.data + tl.load(index + row) * hidden.row_stride
    rows = weight.data + tl.where(used, id_, 0)[:, None] * weight.row_stride
    total = tl.zeros((SLOTS, WIDTH), tl.float32)
    for first in range(0, tl.where(tl.max(id_, 0) >= 0, width, 0), WIDTH):
        columns = first + tl.arange(0, WIDTH)
        inside = columns < width
        x = tl.load(h + columns, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(rows + columns[None, :], mask=used[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += w * x[None, :]
    row_logits = tl.sum(total, 1)
    if bias is not None:
        row_logits += tl.load(bias + tl.where(used, id_, 0), mask=used, other=0.0)
    tl.store(logits + position, tl.where(used, row_logits, -float("inf")), mask=slot < slots)


@triton.jit
def sum_of_rows(factors, rows, begin, end, matrix, columns, inside):
    """Returns the sum of factors[i] times row rows[i] of the matrix over i from `begin` to `end`, at SUM_WIDTH
    columns."""
    total = tl.zeros((SUM_WIDTH,), tl.float32)
    for first in range(begin, end, SUM_SLOTS):
        position = first + tl.arange(0, SUM_SLOTS)
        live = position < end
        factor = tl.load(factors + position, mask=live, other=0.0)
        row = matrix.data + tl.load(rows + position, mask=live, other=0).to(tl.int64)[:, None] * matrix.row_stride
        x = tl.load(row + columns[None, :], mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += tl.sum(x * factor[:, None], 0)
    return total


@triton.jit(do_not_specialize=["index", "ids", "dlogits"])
def dhidden_kernel(dlogits, weight, index, ids, dhidden, slots, width):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SUM_WIDTH + tl.arange(0, SUM_WIDTH)
    inside = columns < width
    ids += row * slots
    total = sum_of_rows(dlogits + row * slots, ids, 0, number_of_ids(ids, slots), weight, columns, inside)
    target = dhidden.data + tl.load(index + row) * dhidden.row_stride + columns
    tl.store(target, total.to(dhidden.data.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["starts", "factors", "tokens"])
def dweight_kernel(factors, tokens, hidden, starts, dweight, width, ADD: tl.constexpr):
    id_ = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(starts + id_), tl.load(starts + id_ + 1)
    if end > begin or not ADD:
        columns = tl.program_id(1) * SUM_WIDTH + tl.arange(0, SUM_WIDTH)
        inside = columns < width
        total = sum_of_rows(factors, tokens, begin, end, hidden, columns, inside)
        target = dweight.data + id_ * dweight.row_stride + columns
        if ADD:
            total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, total.to(dweight.data.dtype.element_ty), mask=inside)


# --- launchers ------------------------------------------------------------------------------------------------------


def allowed_ids(mask: TokenMask, sampled: Tensor, local_vocab: range, vocab_size: int, out: AllowedIdRows) -> None:
    """Writes `out`: see operations.py."""
    (rows, ids), token_of, columns, added = out
    ids_kernel[(ids.shape[0],)](
        mask.ids, mask.ends, sampled, rows.index, mask.ids.numel(), local_vocab.start, len(local_vocab), vocab_size,
        ids, token_of, columns, added.view(torch.uint8), ids.shape[1], num_warps=1,
    )  # fmt: skip


def gathered_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, gathered: GatheredIds, logits: Tensor) -> None:
    """Writes logits (C, K) float32; -inf where an entry is not used."""
    count, slots = gathered.ids.shape
    logits_kernel[(count * triton.cdiv(slots, SLOTS.value),)](
        Matrix.of(contiguous_rows(hidden)), Matrix.of(contiguous_rows(weight)), bias, gathered.rows.index, gathered.ids,
        logits, slots, hidden.shape[1], num_warps=4,
    )  # fmt: skip


def gathered_dhidden(dlogits: Tensor, weight: Tensor, gathered: GatheredIds, dhidden: Tensor) -> None:
    """Writes the tokens' rows of dhidden (N, H), from dlogits (C, K) float32."""
    count, slots = gathered.ids.shape
    dhidden_kernel[(count, triton.cdiv(weight.shape[1], SUM_WIDTH.value))](
        dlogits, Matrix.of(contiguous_rows(weight)), gathered.rows.index, gathered.ids, Matrix.of(dhidden), slots,
        weight.shape[1], num_warps=4,
    )  # fmt: skip


def gathered_dweight(dlogits: Tensor, hidden: Tensor, pairs: TokenIdPairs, dweight: Tensor, *, add: bool) -> None:
    """Adds to dweight (V, H), or writes it, 0 for ids that no token has."""
    starts, order = pairs.by_id(dweight.shape[0])
    # In the order of the ids, so that a program waits for one read less before those of h.
    factors, tokens = dlogits[order], pairs.token_of[order]
    dweight_kernel[(dweight.shape[0], triton.cdiv(hidden.shape[1], SUM_WIDTH.value))](
        factors, tokens, Matrix.of(contiguous_rows(hidden)), starts, Matrix.of(dweight), hidden.shape[1], ADD=add,
        num_warps=4,
    )  # fmt: skip

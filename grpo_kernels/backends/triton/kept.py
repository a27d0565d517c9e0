"""The three products over the ids that truncated sampling kept, K_t of them for token t.

    sampled dense-dense product    logits_tj = h_t . W_j + b_j              j in K_t
    sparse-dense product           dhidden_t = sum_j dlogits_tj W_j         j in K_t
    its transpose                  dweight_j = sum_t dlogits_tj h_t         t with j in K_t

Each reads one row of W, or of h, per pair of a token and an id: 2 H bytes in 16 bits, the rest is small. A program owns
SLOTS ids of one token, a part of one token's row of dhidden, or a part of one id's row of dweight; sums are float32, in
an order that depends on the ids alone. The transpose has its pairs sorted by id.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...contract import KeptIds, KeptPairs, contiguous_rows
from .arguments import Matrix

# Of a tile in which rows of W are read: whole lines, 16 in flight per program.
SLOTS = 16
WIDTH: tl.constexpr = tl.constexpr(128)
SUM_WIDTH: tl.constexpr = tl.constexpr(512)  # columns of a sum that a program owns


@triton.jit(do_not_specialize=["index", "ids"])
def logits_kernel(hidden, weight, bias, index, ids, logits, slots, width, SLOTS: tl.constexpr):
    blocks = slots // SLOTS
    row = tl.program_id(0).to(tl.int64) // blocks
    place = row * slots + tl.program_id(0) % blocks * SLOTS + tl.arange(0, SLOTS)
    id_ = tl.load(ids + place).to(tl.int64)
    used = id_ >= 0
    h = hidden.data + tl.load(index + row) * hidden.row_stride
    rows = weight.data + tl.where(used, id_, 0)[:, None] * weight.row_stride
    total = tl.zeros((SLOTS, WIDTH), tl.float32)
    for first in range(0, width, WIDTH):
        columns = first + tl.arange(0, WIDTH)
        inside = columns < width
        x = tl.load(h + columns, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(rows + columns[None, :], mask=used[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += w * x[None, :]
    found = tl.sum(total, 1)
    if bias is not None:
        found += tl.load(bias + tl.where(used, id_, 0), mask=used, other=0.0)
    tl.store(logits + place, tl.where(used, found, -float("inf")))


@triton.jit(do_not_specialize=["index", "ids"])
def dhidden_kernel(dlogits, weight, index, ids, dhidden, slots, width, SLOTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SUM_WIDTH + tl.arange(0, SUM_WIDTH)
    inside = columns < width
    total = tl.zeros((SUM_WIDTH,), tl.float32)
    for first in range(0, slots, SLOTS):
        place = row * slots + first + tl.arange(0, SLOTS)
        id_ = tl.load(ids + place).to(tl.int64)
        used = id_ >= 0
        rows = weight.data + tl.where(used, id_, 0)[:, None] * weight.row_stride
        w = tl.load(rows + columns[None, :], mask=used[:, None] & inside[None, :], other=0.0).to(tl.float32)
        factor = tl.load(dlogits + place)
        total += tl.sum(w * tl.where(used, factor, 0.0)[:, None], 0)
    target = dhidden.data + tl.load(index + row) * dhidden.row_stride + columns
    tl.store(target, total.to(dhidden.data.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["starts", "order", "token_of"])
def dweight_kernel(
    dlogits, hidden, starts, order, token_of, dweight, width, ADD: tl.constexpr, SLOTS: tl.constexpr
):  # fmt: skip
    id_ = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(starts + id_), tl.load(starts + id_ + 1)
    if end > begin or not ADD:
        columns = tl.program_id(1) * SUM_WIDTH + tl.arange(0, SUM_WIDTH)
        inside = columns < width
        total = tl.zeros((SUM_WIDTH,), tl.float32)
        for first in range(begin, end, SLOTS):
            place = first + tl.arange(0, SLOTS)
            live = place < end
            pair = tl.load(order + place, mask=live, other=0)
            factor = tl.load(dlogits + pair, mask=live, other=0.0)
            token = tl.load(token_of + pair, mask=live, other=0).to(tl.int64)
            rows = hidden.data + token[:, None] * hidden.row_stride
            h = tl.load(rows + columns[None, :], mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
            total += tl.sum(h * factor[:, None], 0)
        target = dweight.data + id_ * dweight.row_stride + columns
        if ADD:
            total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, total.to(dweight.data.dtype.element_ty), mask=inside)


# --- launchers ------------------------------------------------------------------------------------------------------


def kept_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, kept: KeptIds, logits: Tensor) -> None:
    """Into logits (C, K) float32; -inf where not used."""
    count, slots = kept.ids.shape
    tile = min(SLOTS, slots)
    logits_kernel[(count * (slots // tile),)](
        Matrix.of(contiguous_rows(hidden)), Matrix.of(contiguous_rows(weight)), bias, kept.rows.index, kept.ids, logits,
        slots, hidden.shape[1], SLOTS=tile, num_warps=4,
    )  # fmt: skip


def kept_dhidden(dlogits: Tensor, weight: Tensor, kept: KeptIds, dhidden: Tensor) -> None:
    """Into the tokens' rows of dhidden (N, H), from dlogits (C, K) float32."""
    count, slots = kept.ids.shape
    dhidden_kernel[(count, triton.cdiv(weight.shape[1], SUM_WIDTH.value))](
        dlogits, Matrix.of(contiguous_rows(weight)), kept.rows.index, kept.ids, Matrix.of(dhidden), slots,
        weight.shape[1], SLOTS=min(SLOTS, slots), num_warps=4,
    )  # fmt: skip


def kept_dweight(dlogits: Tensor, hidden: Tensor, pairs: KeptPairs, dweight: Tensor, *, add: bool) -> None:
    """Into dweight (V, H): added, or written, 0 where no token kept an id."""
    starts, order = pairs.by_id(dweight.shape[0])
    dweight_kernel[(dweight.shape[0], triton.cdiv(hidden.shape[1], SUM_WIDTH.value))](
        dlogits, Matrix.of(contiguous_rows(hidden)), starts, order, pairs.token_of, Matrix.of(dweight), hidden.shape[1],
        ADD=add, SLOTS=SLOTS, num_warps=4,
    )  # fmt: skip

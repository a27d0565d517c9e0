"""Scaling: of finished gradients in place, and of rows to their place in a gradient. csrc/cuda/scale.cuh.

`scale` is how backward hands out gradients that the forward pass finished, x *= factor. The factor is stored on the
device. Where it is 1, as it nearly always is, nothing else is read or written: so few programs end within microseconds,
and a (V, H) gradient is not read and written again.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch_of
from ..operations import HeadChunk, RowScales, contiguous_rows
from .rows import PER_TOKEN, token_index, tokens_of

BLOCK_SIZE = 4096  # numbers that a program loads at once
REST_SIZE = 512  # the same behind the last whole block
MAX_PROGRAMS = 1024  # they take turns; what a large GPU holds at once


@triton.jit(do_not_specialize=["factor", "count"])
def scale_kernel(x, factor, count, BLOCK: tl.constexpr, REST: tl.constexpr):
    """Multiplies x by the factor, in float32."""
    multiplier = tl.load(factor)
    if multiplier != 1.0:
        # Whole blocks need no mask: one that ends at a number of unknown divisors would take the wide loads away.
        blocks = count // BLOCK
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            at = x + tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(at, (tl.load(at).to(tl.float32) * multiplier).to(x.dtype.element_ty))
        if tl.program_id(0) == blocks % tl.num_programs(0):
            for first in range(tl.cast(blocks, tl.int64) * BLOCK, count, REST):
                rest = first + tl.arange(0, REST)
                value = tl.load(x + rest, mask=rest < count).to(tl.float32)
                tl.store(x + rest, (value * multiplier).to(x.dtype.element_ty), mask=rest < count)


def scale(x: Tensor, factor: Tensor) -> None:
    """Multiplies x by a factor in place, a float32 scalar on its device."""
    programs = min(triton.cdiv(x.numel(), BLOCK_SIZE), MAX_PROGRAMS)
    if programs:
        scale_kernel[(programs,)](x, factor, x.numel(), BLOCK=BLOCK_SIZE, REST=REST_SIZE, num_warps=4)


# --- rows of hidden states and of their gradient --------------------------------------------------------------------


@triton.jit(do_not_specialize=[*PER_TOKEN, "dlogp", "count"])
def scale_rows_kernel(
    x, x_stride, dlogp, scales, ids, token_index, first_token, weight, weight_stride, vocab, out, out_stride, count,
    width, IS_PRODUCT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    token = tokens_of(rows, token_index, first_token, live)
    slope = tl.load(dlogp + token, mask=live, other=0.0)
    factor = -slope * tl.load(scales.row_scale + rows, mask=live, other=0.0)
    place = rows
    if IS_PRODUCT:
        place = token
        id_ = tl.load(ids + token, mask=live, other=-1)
        known = (id_ >= 0) & (id_ < vocab)
        entry = slope * tl.load(scales.sampled + rows, mask=live, other=0.0)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)[None, :]
        inside = live[:, None] & (columns < width)
        value = tl.load(x + rows[:, None] * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        value *= factor[:, None]
        if IS_PRODUCT:
            w = tl.load(weight + id_[:, None] * weight_stride + columns, mask=inside & known[:, None], other=0.0)
            value += entry[:, None] * w.to(tl.float32)
        value = tl.where(slope[:, None] == 0.0, 0.0, value)
        tl.store(out + place[:, None] * out_stride + columns, value.to(out.dtype.element_ty), mask=inside)


def scale_rows(
    x: Tensor, dlogp: Tensor, scales: RowScales, head: HeadChunk, out: Tensor, *, is_product: bool
) -> None:  # fmt: skip
    """Writes rows of x (C, H), scaled, to `out`; see operations.Backend."""
    x, weight = contiguous_rows(x), contiguous_rows(head.weight) if is_product else head.weight
    (count, width), launch = x.shape, launch_of(x.device).rows
    if count:
        scale_rows_kernel[(triton.cdiv(count, launch.rows),)](
            x, x.stride(0), dlogp, scales, head.ids, *token_index(head.rows, head.ids), weight, weight.stride(0),
            len(weight), out, out.stride(0), count, width, IS_PRODUCT=is_product, ROWS=launch.rows,
            BLOCK=launch.block // 4, num_warps=4,
        )  # fmt: skip

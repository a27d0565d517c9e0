"""Numbers in place, x *= factor: how backward hands out gradients that the forward pass finished. csrc/cuda/scale.cuh.

The device alone knows the factor. Where that is 1, as it nearly always is, nothing else is read or written: so few
programs come and go in microseconds, and a (V, H) gradient need not be moved twice.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_SIZE = 4096  # numbers that a program loads at once
MOST_PROGRAMS = 1024  # they take turns; what a large GPU holds at once


@triton.jit
def scale_kernel(x, factor, count, BLOCK: tl.constexpr):
    """The factor multiplies in float32."""
    multiplier = tl.load(factor)
    if multiplier != 1.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        for first in range(start, count, tl.num_programs(0) * BLOCK):
            at = first + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < count).to(tl.float32)
            tl.store(x + at, (value * multiplier).to(x.dtype.element_ty), mask=at < count)


def scale(x: Tensor, factor: Tensor) -> None:
    """x *= factor, a float32 scalar on its device."""
    programs = min(triton.cdiv(x.numel(), BLOCK_SIZE), MOST_PROGRAMS)
    if programs:
        scale_kernel[(programs,)](x, factor, x.numel(), BLOCK=BLOCK_SIZE, num_warps=4)

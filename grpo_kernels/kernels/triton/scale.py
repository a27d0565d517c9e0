"""Numbers in place, x *= factor: how backward hands out gradients that the forward pass finished. csrc/cuda/scale.cuh.

The factor is stored on the device. Where it is 1, as it nearly always is, nothing else is read or written: so few
programs end within microseconds, and a (V, H) gradient is not read and written again.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

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

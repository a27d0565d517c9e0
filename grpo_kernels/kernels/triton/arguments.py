"""What kernels take together, and hand to the functions that they call: named tuples.

A launch gives Triton the fields of a tuple one by one and specialises all of them: do_not_specialize ends at tuples. So
of what the host passes, a tuple may hold what the lm_head determines and tensors that begin on 16 bytes in every call:
whole allocations, or a caller's tensors copied to one where they do not. Counts and views of a batch stay arguments of
their own. Compile-time options that are handed on together are one hashable tuple, a single tl.constexpr.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...contract import TokenValues


class Matrix(NamedTuple):
    """Rows of numbers without gaps inside a row."""

    data: Any  # the tensor; in a kernel the pointer to its first element
    row_stride: Any  # elements from one row to the next

    @classmethod
    def of(cls, x: Tensor) -> Matrix:
        return cls(x, x.stride(0))


class Batch(NamedTuple):
    """All that is kept per token of a batch, in whole tensors: the table, and the values that kernels write."""

    table: Tensor  # (TABLE_FIELDS, N)
    columns: Tensor  # (VALUE_FIELDS, N)
    lse: Tensor  # (N,) float64

    @classmethod
    def of(cls, table: Tensor, values: TokenValues) -> Batch:
        return cls(table, *values)

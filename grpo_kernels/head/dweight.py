"""dweight = dlogits^T h (V, H), summed over the chunks of a call."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..kernels.operations import Backend, TokenIdPairs
from .products import BLOCK_ROWS, add_product, product


class WeightGradient:
    """The sum of dweight over chunks.

    held_dtype: the type of the sum; each chunk rounds a 16-bit one once more.
    rounds_once: the products of chunks are float32 too. A CPU returns float32 for float32 inputs alone, so they are
        converted; its products of bfloat16 take less time, and round their result.

    Attributes:
        total: the sum, None before the first chunk.
    """

    def __init__(
        self, weight: Tensor, grad_dtype: torch.dtype, held_dtype: torch.dtype, backend: Backend, *, rounds_once: bool
    ) -> None:
        self.weight, self.held_dtype, self.backend, self.rounds_once = weight, held_dtype, backend, rounds_once
        self.total: Tensor | None = None
        self.sums_in_float32 = grad_dtype.itemsize == 2 and held_dtype == torch.float32

    def add(self, dlogits: Tensor, h: Tensor) -> None:
        """Adds the product of a chunk: dlogits (P, V), h (P, H)."""
        h = h.to(dlogits.dtype)
        if not self.sums_in_float32:
            self.total = torch.mm(dlogits.T, h) if self.total is None else self.total.addmm_(dlogits.T, h)
        elif h.device.type == "cpu" and h.dtype == torch.bfloat16:  # which `product` would convert
            first, total = self._total_to_write()
            h = h.float() if self.rounds_once else h
            for block in row_blocks(self.weight, BLOCK_ROWS):
                product_rows = torch.mm(dlogits[:, block].T.to(h.dtype), h)
                total[block] = product_rows if first else total[block] + product_rows
        elif self.total is None:
            self.total = product(dlogits.T, h)
        else:
            add_product(self.total, dlogits.T, h)

    def add_pairs(self, dlogits: Tensor, hidden: Tensor, pairs: TokenIdPairs) -> None:
        """Adds the products of pairs of a token and an id: dlogits (M,) of the pairs, hidden (N, H)."""
        first, total = self._total_to_write()
        self.backend.gathered_dweight(dlogits, hidden, pairs, total, add=not first)

    def _total_to_write(self) -> tuple[bool, Tensor]:
        """Returns (whether nothing was added yet, the sum); before the first chunk the sum is uninitialised memory."""
        first = self.total is None
        if self.total is None:
            dtype = self.weight.dtype if self.held_dtype.itemsize == 2 else self.held_dtype
            self.total = torch.empty_like(self.weight, dtype=dtype, memory_format=torch.contiguous_format)
        return first, self.total


def row_blocks(weight: Tensor, rows: int) -> Iterator[slice]:
    """Yields the rows of a weight (V, H) as slices of at most `rows`."""
    for start in range(0, weight.shape[0], rows):
        yield slice(start, min(start + rows, weight.shape[0]))

"""Logits that the caller already holds, behind the interface of `LMHead`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..contract import RowGradients, Rows
from .backward import power_of_two_scale
from .chunk import Chunk
from .vocab_parallel import VocabSlice


class GivenLogits:
    """All rows are at hand, and are overwritten with their gradient."""

    def __init__(self, logits: Tensor) -> None:
        """`logits` (N, V); their gradient may hold the factor `gradient_scale`."""
        self.buffer = logits
        self.gradient_scale: Tensor | None = None
        self.num_tokens = self.sequence_rows = logits.shape[0]
        self.grad_dtype = logits.dtype
        self.strategy = "rows"
        self.folded_bias: Tensor | None = None
        self.vocab_slice: VocabSlice | None = None
        self.vocab_size = logits.shape[1]

    def columns(self, ids: Tensor) -> Tensor:
        """Where the logits of the sampled ids (N,) are in their rows."""
        return ids

    def chunks(self, index: Tensor | None) -> list[Chunk]:
        """All rows: none is left out, `index` is None."""
        assert index is None
        return self.chunks_of([Rows(0, self.num_tokens)]) if self.num_tokens else []

    def chunks_of(self, parts: Sequence[Rows]) -> list[Chunk]:
        return [Chunk(rows, max(rows.count, 1), in_place=True) for rows in parts]

    def packed_rows(self, longest: int) -> int:
        """All sequences are one chunk."""
        return self.sequence_rows

    def logits(self, rows: Rows) -> Tensor:
        return rows.take(self.buffer)

    def row_gradients(self, chunk: Chunk, rows: Rows, logits: Tensor) -> RowGradients:
        return RowGradients(logits)

    def scale_gradients(self, largest: Tensor) -> Tensor:
        """() the scale of the gradients of all logits, which are one chunk."""
        self.gradient_scale = power_of_two_scale(largest)
        return self.gradient_scale

    def accumulate(self, chunk: Chunk, ids: Tensor) -> None:
        """The gradient is where it belongs already."""

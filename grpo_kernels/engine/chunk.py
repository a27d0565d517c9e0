"""Chunks of tokens: whose gradients go through one pair of products, and whose logits are there at a time."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..contract import Rows


def visited(index: Tensor | None, num_tokens: int) -> Rows:
    """The tokens of `index`, or all."""
    if index is None or index.numel() == num_tokens:
        return Rows(0, num_tokens)
    return Rows(0, index.numel(), index)


@dataclass
class Chunk:
    """A product chunk: rows whose gradients go through one pair of products, with logits of `logits_rows` at a time.

    in_place: gradients lie over the logits, which are those of all its rows.
    """

    rows: Rows
    logits_rows: int
    in_place: bool

    def row_chunks(self) -> list[Rows]:
        return self.rows.split(self.logits_rows)

    def place(self, rows: Rows) -> slice:
        """Of a row chunk among the rows of this one."""
        return slice(rows.start - self.rows.start, rows.stop - self.rows.start)

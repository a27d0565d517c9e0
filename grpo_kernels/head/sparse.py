"""Sparse gradients, config.sparse_backward: products over the few entries of d loss / d logits that are left.

A row kernel writes the entries of a chunk as pairs of an id and a number (operations.SparseRule says which). Pairs are
collected, and go through the products over few ids, as those of tokens with a sampling mask do: all at the end, or
before that in portions, where they would take more memory than a quarter of a chunk's logits. A token whose pairs would
take longer there than its share of two dense products gets those, from its logits computed again: its gradient is
exact. So is that of a token with a sampling mask, however many ids it keeps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.operations import GatheredIds, LogitChunk, Rows, SparseRows, SparseRule, TokenIdPairs, TokenMask
from ..kernels.torch.gathered import padded
from .chunk_size import reads_block_host
from .lm_head import LMHead
from .mask_paths import id_positions, max_gathered_ids, split

_PAIR_BYTES = 48  # in the products: as it is, in matrices, and in the order of the ids


class ChunkPairs(NamedTuple):
    """The pairs of a chunk."""

    tokens: Tensor  # (R,) int64, those with pairs
    counts: Tensor  # (R,) int64
    ids: Tensor  # (M,) int32, one token after another
    values: Tensor  # (M,)


class SparsePairs:
    """The sparse gradients of a call, as pairs of an id and a number, and how many tokens have them."""

    def __init__(self, head: LMHead, theta: float, dtype: torch.dtype) -> None:
        self.head, self.dtype = head, dtype
        self.rule = SparseRule(theta, 0 if head.vocab_slice is None else head.vocab_slice.first)
        self.capacity = max_gathered_ids(len(head.weight), head.weight.device)
        self.coefficients: tuple[Tensor, Tensor] | None = None  # of the last chunk that was added
        self._buffers: SparseRows | None = None
        self._buffered_rows: list[Rows] = []  # to the buffers
        self._waiting: list[ChunkPairs] = []
        self._dense: list[Tensor] = []
        self._num_pairs = self._num_waiting = 0
        # A tensor: the host waits for no number that it does not need.
        self._num_tokens = torch.zeros((), dtype=torch.int64, device=head.weight.device)
        self.buffer_bytes = head.scratch.rows * len(head.weight) * head.logits_dtype.itemsize // 3

    def add(self, chunk: LogitChunk, coefficients: tuple[Tensor, Tensor], exact: Tensor | None) -> None:
        """Adds the pairs of a chunk's tokens; those in `exact` (N,) bool get none.

        coefficients: d loss / d logp and d loss / d entropy (N,), which are known for this chunk's tokens.
        """
        pairs = self._room_for(chunk.rows, len(chunk.ids))
        self.coefficients, self._exact = coefficients, exact
        self.head.backend.sparse_gradient(chunk, *coefficients, self.rule, pairs)

    def _collect(self) -> None:
        """Moves the pairs from the buffers to the list of those that wait for their products."""
        if self._buffers is None or self.coefficients is None or not self._buffered_rows:
            return
        device = self.head.weight.device
        index = torch.cat([rows.tokens(device) for rows in self._buffered_rows])
        pairs, self._buffered_rows = self._buffers.rows(0, len(index)), []
        has_gradient = torch.stack([x[index] != 0 for x in self.coefficients]).any(0)
        is_dense = has_gradient & (pairs.counts > self.capacity)
        if self._exact is not None:
            is_dense |= has_gradient & self._exact[index]
        with_pairs = ((pairs.counts > 0) & ~is_dense).nonzero().squeeze(1)
        counts = pairs.counts[with_pairs].long()
        _, pair_index = id_positions(with_pairs * self.capacity, counts)
        pair_data = (x.view(-1)[pair_index] for x in (pairs.ids, pairs.values))
        self._waiting.append(ChunkPairs(index[with_pairs], counts, *pair_data))
        self._dense.append(index[is_dense])
        self._num_pairs += len(pair_index)
        self._num_waiting += len(pair_index)
        self._num_tokens += has_gradient.sum()
        # With float16 the scale of the sums is known after the dense products alone.
        if self._num_waiting * _PAIR_BYTES > self.buffer_bytes and self.head.grad_dtype != torch.float16:
            self._multiply()

    def dense(self) -> Tensor:
        """Returns the tokens that take dense products, (D,) int64."""
        self._collect()
        return torch.cat([*self._dense, torch.empty(0, dtype=torch.int64, device=self.head.weight.device)])

    def multiply_pairs(self) -> None:
        """Computes the products of all pairs that are left; call it after the products of the tokens in `dense`."""
        self._collect()
        self._buffers = None
        if self.head.wants[0]:  # all ranks with a slice of the vocabulary add theirs up, those without a pair too
            self.head.dhidden_to_write(every_row=False)
        if self._waiting:
            self._multiply()

    def _multiply(self) -> None:
        """Computes the products of the pairs that wait."""
        head = self.head
        tokens, counts, ids, values = (torch.cat(x) for x in zip(*self._waiting, strict=True))
        self._waiting, self._num_waiting = [], 0
        if head.wants[0]:
            self._add_dhidden(tokens, counts, ids, values)
        token_of = tokens.to(torch.int32).repeat_interleave(counts, output_size=len(ids))
        head.add_pairs(values, TokenIdPairs(ids, token_of))

    def _add_dhidden(self, tokens: Tensor, counts: Tensor, ids: Tensor, values: Tensor) -> None:
        head = self.head
        all_tokens = torch.ones_like(counts, dtype=torch.bool)
        mask = TokenMask(ids, counts, counts.cumsum(0))
        for rows, width in split(mask, all_tokens, all_tokens, len(head.weight)).matrices:
            first, count = rows.take(mask.firsts)[:, None], rows.take(counts)[:, None]
            (row_ids, is_used), (dlogits, _) = (padded(x, first, count, width) for x in (ids, values))
            gathered = GatheredIds(Rows(0, rows.count, rows.take(tokens)), torch.where(is_used, row_ids, -1))
            head.backend.gathered_dhidden(dlogits, head.weight, gathered, head.dhidden_to_write(every_row=False))

    def sums(self) -> Tensor:
        """Returns the numbers of SPARSE_SUMS; over ranks with slices of the vocabulary the sum of the pairs, and the
        mean of the tokens."""
        numbers = self._num_pairs, sum(map(len, self._dense)), 0
        sums = torch.tensor(numbers, dtype=torch.float64, device=self.head.weight.device)
        sums[2] = self._num_tokens
        if self.head.vocab_slice is not None:
            self.head.vocab_slice.add_up(sums)
            sums[1:] /= len(self.head.vocab_slice.sizes)
        return sums

    def _room_for(self, rows: Rows, num_tokens: int) -> SparseRows:
        used = sum(buffered.count for buffered in self._buffered_rows)
        if self._buffers is None or used + rows.count > len(self._buffers.counts):
            self._collect()
            used = 0
        if self._buffers is None or rows.count > len(self._buffers.counts):
            device = self.head.weight.device
            row_bytes = 8 * self.capacity + 1
            # Where a read of the counts makes the host wait, pairs of many chunks are counted at once.
            fit = self.buffer_bytes // row_bytes if reads_block_host(device) else 0
            shape = max(rows.count, min(fit, num_tokens)), self.capacity
            self._buffers = SparseRows(
                torch.empty(shape, dtype=torch.int32, device=device),
                torch.empty(shape, dtype=self.dtype, device=device),
                torch.empty(shape[0], dtype=torch.int32, device=device),
            )
        self._buffered_rows.append(rows)
        return self._buffers.rows(used, used + rows.count)

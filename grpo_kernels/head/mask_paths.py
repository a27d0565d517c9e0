"""Tokens with a sampling mask: which logits they need, and two paths that compute them.

A token that keeps K ids needs K logits, h . W_j for its kept ids j, and nothing else of the vocabulary: its
log-probability, entropy and gradients are those of a row of K logits.

    gather  products over the kept ids (the backends' gathered_* operations): O(K H) per token. Tokens with similar
            counts share a matrix; entries that a token does not use hold the logit -inf.
    dense   the products over the whole vocabulary; logits of other ids become -inf before the row kernel reads them.

DENSE_LOGITS_PER_GATHERED_ID decides between them: it is the number of dense logits that take as long as one gathered
id, forward and backward. Measured on a CPU (SmolLM2-135M's head, 2,048 tokens, float32 and bfloat16, 8 to 512 kept
ids: 26 to 36); predicted for GPUs: on an H200 a kept id moves 6 H bytes in 16 bits, 1.4 ps per hidden dimension at 4.3
TB/s; a dense logit takes 6 H operations, 7.5 fs at 800 teraflops.

The host reads once per call which token takes which path, and how many tokens each path has (`split`).

Where a rank holds a slice of the vocabulary (vocab_parallel.py), the mask and the paths are the same on all ranks. A
rank computes the logits of the kept ids whose rows of the weight it has. The rank that has the sampled id adds it where
it is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks.arguments import check_allowed_ids, checks_values
from ..kernels.operations import AllowedIdRows, GatheredIds, LogitChunk, Rows, Statistics, TokenIdPairs, TokenMask
from .chunk_size import Selection
from .lm_head import HeldLogits, LMHead
from .vocab_parallel import VocabSlice

DENSE_LOGITS_PER_GATHERED_ID = {"cpu": 30, "cuda": 190}
# Columns of the narrowest matrix, one of them for a sampled id that is missing, and the factor to the next width. On
# a GPU an entry that is not used costs some 100 bytes where an id takes 6 H, and a matrix five launches.
WIDTHS = {"cpu": (12, 2), "cuda": (64, 4)}


def max_gathered_ids(vocab_size: int, device: torch.device) -> int:
    """Returns how many kept ids a token can have before the gather path takes longer than the dense path."""
    return int(vocab_size // DENSE_LOGITS_PER_GATHERED_ID.get(device.type, DENSE_LOGITS_PER_GATHERED_ID["cuda"]))


def make_token_mask(ids: Tensor | None, counts: Tensor | None, vocab_size: int, *, is_static: bool) -> TokenMask | None:
    """Returns the mask from the tensors of a SamplingMask; None where there is none."""
    if ids is None or counts is None:
        return None
    check_allowed_ids(ids, counts, vocab_size)
    if is_static:
        raise ValueError(
            "sampling_mask was given with static_shapes=True or under capture of a CUDA graph; the number of kept ids "
            "decides shapes: call without either"
        )
    counts = counts.reshape(-1).contiguous()
    return TokenMask(ids.contiguous(), counts, counts.cumsum(0))


def id_positions(firsts: Tensor, counts: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns (row, position) of every id of rows that have counts[row] ids each, which stand together from firsts[row]
    on.

    total: the sum of `counts`, where the host knows it; without it the sum is read back.
    """
    row = torch.repeat_interleave(counts, output_size=total)
    position = (firsts - (counts.cumsum(0) - counts))[row]
    return row, position.add_(torch.arange(row.numel(), device=row.device))


# --- which path ---------------------------------------------------------------------------------------------------


@cache
def _widths(most: int, device: torch.device, dtype: torch.dtype) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """Returns (widths of the matrices for tokens with at most `most` ids, numbers of ids in `dtype` from which on a
    token takes the next path, numbers of the groups of `split`)."""
    least, factor = WIDTHS.get(device.type, WIDTHS["cuda"])
    widths = [least] if most else []
    while widths and widths[-1] <= most:
        widths.append(widths[-1] * factor)
    bounds = torch.tensor([1, *widths[:-1], most + 1] if most else [1], dtype=dtype, device=device)
    return tuple(widths), bounds, torch.arange(2 + len(widths), device=device)


class Split(NamedTuple):
    """The scored tokens of a batch with a sampling mask, by their paths."""

    selection: Selection  # those of dense products
    matrices: list[tuple[Rows, int]]  # the others: their rows, the width of their matrix
    is_dense: Tensor | None  # (N,) bool: the tokens with a mask that take dense products; None: there are none


def split(
    mask: TokenMask, scored: Tensor, active: Tensor, vocab_size: int, *,
    may_gather: Tensor | None = None, offsets: Tensor | None = None,
) -> Split:  # fmt: skip
    """Sorts the tokens by their paths, with one read on the host.

    scored, active: (N,) bool; active tokens are scored.
    may_gather: (N,) bool; no other token takes the gather path.
    offsets: (S + 1,) of the sequences, where the selection is to have their `lengths`.
    """
    device = mask.ids.device
    widths, bounds, groups = _widths(max_gathered_ids(vocab_size, device), device, mask.counts.dtype)
    # The path of each token, by its number of ids: 0 without any, 1 to k for the k matrices, k + 1 for dense products.
    path, dense = torch.bucketize(mask.counts, bounds, right=True), len(widths) + 1
    if may_gather is not None:
        path = torch.where(may_gather | (path == 0), path, dense)
    is_dense = scored & (path == dense)
    # In this order: dense products with a gradient, those without, each matrix, tokens that are not scored.
    group = torch.where((path == 0) | (path == dense), (~active).long(), path + 1)
    group = torch.where(scored, group, dense + 1)
    order = group.argsort(stable=True)
    sizes = torch.cat([(group == groups[:, None]).sum(1), is_dense.sum()[None]])
    if offsets is not None:
        before = torch.nn.functional.pad((group == 0).cumsum(0), (1, 0))
        sizes = torch.cat([sizes, before[offsets]])
    read = sizes.tolist()
    (active_size, other_size, *matrix_sizes), num_dense, ends = read[: dense + 1], read[dense + 1], read[dense + 2 :]
    first, matrices = active_size + other_size, []
    for width, size in zip(widths, matrix_sizes, strict=True):
        if size:
            matrices.append((Rows(0, size, order[first : first + size]), width))
        first += size
    lengths = None if offsets is None else [stop - start for start, stop in pairwise(ends)]
    return Split(
        Selection.from_order(order, active_size, other_size, lengths), matrices, is_dense if num_dense else None
    )


# --- gather ------------------------------------------------------------------------------------------------------


def empty_matrices(matrices: Sequence[tuple[Rows, int]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Returns one block of memory, and the matrices in it, one after another."""
    shapes = [(rows.count, width) for rows, width in matrices]
    sizes = [rows * width for rows, width in shapes]
    block = torch.empty(sum(sizes), dtype=dtype, device=device)
    return [block, *(part.view(shape) for part, shape in zip(block.split(sizes), shapes, strict=True))]


class GatheredMatrix(Rows):
    """Tokens with similar numbers of ids, as one chunk: their ids and logits (C, K), and the logits of a teacher that
    has the same ids."""

    teacher_logits: Tensor | None = None

    def __init__(self, rows: Rows, ids: Tensor, logits: Tensor) -> None:
        super().__init__(rows.start, rows.stop, rows.index)
        self.gathered, self.logits = GatheredIds(rows, ids), logits


class GatheredLogits(HeldLogits):
    """The logits of kept ids, all computed at once. A matrix of them is a chunk; their gradients are added to those of
    `head`."""

    def __init__(
        self, mask: TokenMask, matrices: Sequence[tuple[Rows, int]], sampled: Tensor, head: LMHead, dtype: torch.dtype
    ) -> None:
        """Computes the logits. sampled (N,): ids of the whole vocabulary."""
        device, self.backend, self.vocab_slice = sampled.device, head.backend, head.vocab_slice
        first = 0 if self.vocab_slice is None else self.vocab_slice.first
        local_vocab = range(first, first + len(head.weight))
        self.head, self.grad_dtype = head, dtype
        self.num_tokens = sum(rows.count for rows, _ in matrices)
        self._local_ids = torch.empty_like(sampled)
        self.added = torch.empty(self.num_tokens, dtype=torch.bool, device=device)
        ids, *id_parts = empty_matrices(matrices, torch.int32, device)
        token_of, *token_parts = empty_matrices(matrices, torch.int32, device)
        self.numbers, *logit_parts = empty_matrices(matrices, dtype, device)
        self.pairs = TokenIdPairs(ids, token_of)
        added_parts = self.added.split([rows.count for rows, _ in matrices])
        self.matrices: list[GatheredMatrix] = []
        parts = zip(id_parts, token_parts, added_parts, logit_parts, strict=True)
        for (rows, _), (matrix_ids, tokens, added, logits) in zip(matrices, parts, strict=True):
            matrix = GatheredMatrix(rows, matrix_ids, logits)
            allowed_rows = AllowedIdRows(matrix.gathered, tokens, self._local_ids, added)
            self.backend.allowed_ids(mask, sampled, local_vocab, head.vocab_size, allowed_rows)
            self.backend.gathered_logits(head.hidden_matrix, head.weight, head.folded_bias, matrix.gathered, logits)
            self.matrices.append(matrix)

    @property
    def index(self) -> Tensor:
        """Returns the tokens, (C,) int64."""
        return torch.cat([matrix.index for matrix in self.matrices if matrix.index is not None])

    def local_ids(self, ids: Tensor) -> Tensor:
        """Returns the columns of the sampled ids (N,) in their matrices; -1 where a row does not have its id. Entries
        of other tokens are not defined, and nothing reads them."""
        return self._local_ids

    def chunks(self, index: Tensor | None, holds: str = "logits") -> Sequence[Rows]:
        """Returns all matrices; `index` is None."""
        assert index is None
        return self.matrices

    def logits(self, rows: Rows) -> Tensor:
        assert isinstance(rows, GatheredMatrix)
        return rows.logits

    def accumulate(self, rows: Rows, dlogits: Tensor) -> None:
        """Writes dhidden of a matrix; `add_dweight` adds dweight and dbias of all."""
        if self.head.wants[0]:
            assert isinstance(rows, GatheredMatrix)
            dhidden = self.head.dhidden_to_write(every_row=self.num_tokens == self.head.num_tokens)
            self.backend.gathered_dhidden(dlogits, self.head.weight, rows.gathered, dhidden)

    def add_dweight(self) -> None:
        """Adds dweight and dbias of all tokens, once, after the dense products."""
        self.head.add_pairs(self.numbers, self.pairs)


# --- dense --------------------------------------------------------------------------------------------------------


class DenseMask:
    """Sets the logits of ids that were not kept to -inf, chunk by chunk.

    masked: (N,) bool, the tokens with a mask.
    ids: (N,) int64, columns of the sampled ids, -1 where another rank has them.

    Attributes:
        full: statistics over all ids, taken before.
        added: (N,) bool, of the tokens seen so far: this rank has the sampled id, and it was not among the kept ones.
    """

    def __init__(
        self, mask: TokenMask, masked: Tensor, ids: Tensor, dtype: torch.dtype, vocab_slice: VocabSlice | None
    ) -> None:
        self.mask, self.first_id = mask, 0
        if vocab_slice is not None:
            self.mask, self.first_id = of_slice(mask, vocab_slice), vocab_slice.first
        self.masked, self.ids, self.vocab_slice = masked, ids, vocab_slice
        self.tokens = torch.arange(ids.numel(), device=ids.device)
        self.added = torch.zeros_like(masked)
        self.full = Statistics.zeros(ids.numel(), ids.device, dtype)

    def apply(self, chunk: LogitChunk) -> None:
        """Sets the logits of a chunk's masked tokens to -inf, except those of kept ids and of the sampled one."""
        logits, vocab_size = chunk.logits, chunk.logits.shape[1]
        masked = chunk.rows.take(self.masked)
        masked_rows = masked.nonzero().squeeze(1)
        token = chunk.rows.take(self.tokens)[masked_rows]
        sampled = self.ids[token]
        has_column, sampled = sampled >= 0, sampled.clamp(0, vocab_size - 1)
        allowed = (~masked)[:, None].repeat(1, vocab_size)
        has_invalid_id = None
        if checks_values(token.device) and token.device.type == "cpu":
            mark_by_slices(allowed, masked_rows, self.mask, token, self.first_id)
        else:
            has_invalid_id = mark_by_indices(allowed, masked_rows, self.mask, token, self.first_id)
        marked = allowed[masked_rows, sampled]
        self.added[token] = has_column & ~marked
        allowed[masked_rows, sampled] = has_column | marked
        logits.masked_fill_(allowed.logical_not_(), -torch.inf)
        if has_invalid_id is not None:
            logits.masked_fill_(torch.zeros_like(masked).index_copy(0, masked_rows, has_invalid_id)[:, None], torch.nan)

    def sums(self, stats: Statistics) -> Tensor:
        """Returns (3,) over the masked tokens, all of which were seen: how many sampled ids were added; the sum of the
        kept ids' probability among all ids; how many tokens. The same on all ranks."""
        added, full = self.added.sum(), self.full.lse
        if self.vocab_slice is not None:
            self.vocab_slice.add_up(added)
            full = self.vocab_slice.gather(full).logsumexp(0)
        mass = torch.where(self.masked, (stats.lse - full).exp(), 0.0).sum()
        return torch.stack([added.to(mass.dtype), mass, self.masked.sum().to(mass.dtype)])


def of_slice(mask: TokenMask, vocab_slice: VocabSlice) -> TokenMask:
    """Returns the mask of the ids in this rank's slice, which are a contiguous range of each token's ids."""
    owner = vocab_slice.owner(mask.ids)

    def number_of(is_counted: Tensor) -> Tensor:
        """Returns how many ids of each token (N,) are counted; is_counted (M,) bool."""
        before = torch.nn.functional.pad(is_counted.cumsum(0), (1, 0))
        return before[mask.ends] - before[mask.firsts]

    local_counts = number_of(owner == vocab_slice.rank)
    return TokenMask(mask.ids, local_counts, mask.firsts + number_of(owner < vocab_slice.rank) + local_counts)


def mark_by_slices(allowed: Tensor, rows: Tensor, mask: TokenMask, token: Tensor, first_id: int) -> None:
    """Sets allowed[rows[i], j - first_id] = True for the ids j of token[i].

    It reads two numbers per token, and is for a CPU, where it takes a tenth of the time of indices (512 tokens of
    16,384 ids: 0.09 s against 1.2 s).
    """
    ranges = zip(rows.tolist(), mask.firsts[token].tolist(), mask.counts[token].tolist(), strict=True)
    for row, first, count in ranges:
        allowed[row].index_fill_(0, mask.ids[first : first + count].long() - first_id, True)


def mark_by_indices(allowed: Tensor, rows: Tensor, mask: TokenMask, token: Tensor, first_id: int) -> Tensor:
    """Does the same without a read per token. Returns bool per row: an id of the token is not in the vocabulary."""
    masked_row, id_index = id_positions(mask.firsts[token], mask.counts[token].long())
    ids, vocab_size = mask.ids[id_index].long() - first_id, allowed.shape[1]
    wrong = ((ids < 0) | (ids >= vocab_size)).to(torch.int32)
    allowed.view(-1).index_fill_(0, rows[masked_row] * vocab_size + ids.clamp(0, vocab_size - 1), True)
    return wrong.new_zeros(len(rows)).scatter_reduce_(0, masked_row, wrong, "amax") > 0

"""Tokens with a sampling mask: which logits they need, and two ways to get them.

A token that keeps K ids needs K logits, h . W_j for its kept ids j, and nothing else of the vocabulary: its
log-probability, entropy and gradients are those of a row of K logits.

    gathers    products over kept ids (backends' kept_*): O(K H) per token. Tokens that keep nearly as many ids stand in
               one matrix, whose width is a power of two; places that a token does not use hold the logit -inf.
    dense      the products over the whole vocabulary; logits of other ids become -inf before the row kernel reads them.

DENSE_LOGITS_PER_KEPT_ID decides: how many logits of the dense products take as long as the gathers of one kept id,
forward and backward. Measured on a CPU (SmolLM2-135M's head, 2,048 tokens, float32 and bfloat16, 8 to 512 kept ids: 26
to 36); predicted for GPUs: on an H200 a kept id moves 6 H bytes in 16 bits, 1.4 ps per hidden dimension at 4.3 TB/s; a
dense logit takes 6 H operations, 7.5 fs at 800 teraflops.

Where a rank holds a slice of the vocabulary (vocab_parallel.py), the mask and the choice are the same on all ranks. A
rank computes the logits of the kept ids whose rows of the weight it has, in matrices as wide as the rank with the most
ids needs. The rank that has the sampled id adds it where it is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks.arguments import check_kept_ids, checks_values
from ..contract import KeptIds, KeptPairs, LogitChunk, Rows, TokenValues, no_values
from .lm_head import HeldLogits, LMHead
from .vocab_parallel import VocabSlice

DENSE_LOGITS_PER_KEPT_ID = {"cpu": 30, "cuda": 190}
LEAST_WIDTH = {"cpu": 8, "cuda": 16}  # on a GPU the rows of one of Triton's tiles


def most_kept(vocab_size: int, device: torch.device) -> int:
    """How many ids of a token take at most as long in gathers as the token does in dense products."""
    return int(vocab_size // DENSE_LOGITS_PER_KEPT_ID.get(device.type, DENSE_LOGITS_PER_KEPT_ID["cuda"]))


class TokenMask(NamedTuple):
    """A SamplingMask, flat; or the part of it that lies in a slice of the vocabulary."""

    ids: Tensor  # (M,) int32 or int64
    counts: Tensor  # (N,) how many each token has
    firsts: Tensor  # (N,) int64: where those of each token begin
    first_id: int = 0  # of the slice

    def gathers(self, vocab_size: int) -> Tensor:
        """(N,) bool: the tokens with a mask for which gathers take less time than the dense products."""
        return (self.counts > 0) & (self.counts <= most_kept(vocab_size, self.counts.device))

    def of_slice(self, vocab_slice: VocabSlice) -> TokenMask:
        """The ids in this rank's slice, which are a range of each token's."""
        owner = vocab_slice.owner(self.ids)
        before, own = self._counted(owner < vocab_slice.rank), self._counted(owner == vocab_slice.rank)
        return TokenMask(self.ids, own, self.firsts + before, vocab_slice.first)

    def _counted(self, chosen: Tensor) -> Tensor:
        """(N,) how many ids of each token are among the chosen (M,) bool."""
        ends = torch.nn.functional.pad(chosen.cumsum(0, dtype=torch.int32), (1, 0))
        return ends[self.firsts + self.counts] - ends[self.firsts]


def make_token_mask(ids: Tensor | None, counts: Tensor | None, vocab_size: int, *, is_static: bool) -> TokenMask | None:
    """From the tensors of a SamplingMask; None where there is none."""
    if ids is None or counts is None:
        return None
    check_kept_ids(ids, counts, vocab_size)
    if is_static:
        raise ValueError(
            "sampling_mask was given with static_shapes=True or under capture of a CUDA graph; the number of kept ids "
            "decides shapes: call without either"
        )
    counts = counts.reshape(-1)
    return TokenMask(ids, counts, counts.cumsum(0) - counts)


@dataclass(frozen=True)
class MaskRows:
    """The kept ids of the tokens `index` (C,), in order: sampled ids that were not among them are added.

    In a slice of the vocabulary: those that this rank has, as rows of its weight; a token may have none.
    """

    index: Tensor  # (C,) int64
    ids: Tensor  # (M,) int32, ascending within a token
    counts: Tensor  # (C,) int64
    slots: Tensor  # (C,) int64: ids that its matrix must have room for: the largest `counts` of all ranks
    places: Tensor  # (C,) int64: place of the sampled id in its row; -1 where an id is not in the vocabulary, or the
    # sampled one not in the slice
    added: Tensor  # (C,) bool; the same on all ranks

    def of_slice(self, vocab_slice: VocabSlice) -> MaskRows:
        """The part of this rank."""
        rank, ranks = vocab_slice.rank, len(vocab_slice.sizes)
        owner = vocab_slice.owner(self.ids)
        row = torch.repeat_interleave(self.counts, output_size=self.ids.numel())
        counts = torch.bincount(row.mul_(ranks).add_(owner), minlength=self.index.numel() * ranks).view(-1, ranks)
        own = counts[:, rank]
        places = self.places - counts[:, :rank].sum(1)
        places = torch.where((places >= 0) & (places < own), places, -1)
        ids = self.ids[owner == rank] - vocab_slice.first
        return MaskRows(self.index, ids, own, counts.amax(1), places, self.added)


def mask_rows(mask: TokenMask, ids: Tensor, index: Tensor, vocab_size: int) -> MaskRows:
    """The kept ids of tokens `index` (C,), each of which keeps one; ids (N,) are the sampled ones.

    The keys row * V + id are in order, so that one binary search per row finds its sampled id.
    """
    counts, sampled = mask.counts[index].long(), ids[index]
    row, ids = _ids_of(mask, index, counts)
    outside = None
    if not checks_values(ids.device):  # where values are checked, such ids were refused
        outside = _outside(ids, row, index.numel(), vocab_size) | (sampled < 0) | (sampled >= vocab_size)
    # Memory is read at rows of the weight even then.
    keys = ids.clamp(0, vocab_size - 1).long().add_(row, alpha=vocab_size)
    sampled_keys = torch.arange(index.numel(), device=index.device) * vocab_size + sampled.clamp(0, vocab_size - 1)
    slot = torch.searchsorted(keys, sampled_keys)
    added = keys[slot.clamp(max=keys.numel() - 1)] != sampled_keys
    if bool(added.any()):
        keys = torch.cat([keys, sampled_keys[added]]).sort().values
        counts = counts + added
        row = torch.repeat_interleave(counts, output_size=keys.numel())
        slot = torch.searchsorted(keys, sampled_keys)
    places = slot - (counts.cumsum(0) - counts)
    if outside is not None:
        places = torch.where(outside, -1, places)
    return MaskRows(index, keys.sub_(row, alpha=vocab_size).to(torch.int32), counts, counts, places, added)


def _ids_of(mask: TokenMask, index: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """(row of each id, the ids) of tokens `index` (C,) in ascending order, which keep so many."""
    if index.numel() == mask.counts.numel():  # all of them: nothing is copied
        # Without output_size: on a GPU the sum of counts is not checked, and a kernel that finds it wrong aborts.
        return torch.repeat_interleave(counts), mask.ids
    row, place = places_of(mask.firsts[index], counts)
    return row, mask.ids[place]


def places_of(firsts: Tensor, counts: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    """(row, place) of each id of rows of so many ids; those of a row stand together from its place in `firsts` on.
    `total`, the sum of `counts`, spares a read where the host knows it."""
    row = torch.repeat_interleave(counts, output_size=total)
    place = (firsts - (counts.cumsum(0) - counts))[row]
    return row, place.add_(torch.arange(row.numel(), device=row.device))


def _outside(ids: Tensor, row: Tensor, rows: int, vocab_size: int) -> Tensor:
    """(rows,) bool: an id of the row is not in the vocabulary. An error only where values are looked at, else NaN."""
    wrong = ((ids < 0) | (ids >= vocab_size)).to(torch.int32)
    return wrong.new_zeros(rows).scatter_reduce_(0, row, wrong, "amax") > 0


# --- gathers ------------------------------------------------------------------------------------------------------


def make_matrices(
    index: Tensor, flat_ids: Tensor, counts: Tensor, slots: Tensor
) -> tuple[list[KeptIds], KeptPairs, Tensor]:
    """Matrices of the ids by width, whose ids are views of those of the pairs, one after another; and the places of
    `flat_ids` (M,) among the pairs. A token of `index` gets at most 2 times its `slots` places, or LEAST_WIDTH. One
    read of the number of tokens per width."""
    device = index.device
    least = LEAST_WIDTH.get(device.type, LEAST_WIDTH["cuda"])
    widths = least * 2 ** torch.arange(32, device=device)
    kind = torch.searchsorted(widths, slots)
    order = kind.sort(stable=True).indices
    width = widths[kind[order]]
    begin = torch.empty_like(width)
    begin[order] = width.cumsum(0) - width
    sizes = torch.bincount(kind, minlength=1).tolist()
    total = sum(size * (least << k) for k, size in enumerate(sizes))

    ids = torch.full((total,), -1, dtype=torch.int32, device=device)
    places = places_of(begin, counts, flat_ids.numel())[1]
    ids.scatter_(0, places, flat_ids)  # on a CPU in half the time of an assignment by indices
    token_of = index[order].to(torch.int32).repeat_interleave(width, output_size=total)

    matrices, first, start = [], 0, 0
    for k, size in enumerate(sizes):
        if size:
            columns = least << k
            tokens = Rows(0, size, index[order[first : first + size]])
            matrices.append(KeptIds(tokens, ids[start : start + size * columns].view(size, columns)))
            first, start = first + size, start + size * columns
    return matrices, KeptPairs(ids, token_of), places


def in_matrices(numbers: Tensor, matrices: Iterable[KeptIds]) -> list[Tensor]:
    """Views of one number per pair, in the shapes of the matrices."""
    shapes = [kept.ids.shape for kept in matrices]
    return [part.view(s) for part, s in zip(numbers.split([s.numel() for s in shapes]), shapes, strict=True)]


class KeptLogits(HeldLogits):
    """Logits of kept ids, computed at once: a matrix of them is a chunk. Their gradient goes into those of `head`."""

    def __init__(self, rows: MaskRows, head: LMHead, dtype: torch.dtype) -> None:
        self.vocab_slice = head.vocab_slice
        if self.vocab_slice is not None:
            rows = rows.of_slice(self.vocab_slice)
        self.head, self.index, self.places, self.grad_dtype = head, rows.index, rows.places, dtype
        self.added = rows.added
        self.num_tokens = rows.index.numel()
        matrices, self.pairs, self.pair_places = make_matrices(rows.index, rows.ids, rows.counts, rows.slots)
        self.numbers = torch.empty(self.pairs.ids.numel(), dtype=dtype, device=rows.index.device)
        self._matrices: dict[int, tuple[KeptIds, Tensor]] = {}  # by their rows
        for kept, logits in zip(matrices, in_matrices(self.numbers, matrices), strict=True):
            head.backend.kept_logits(head.hidden_matrix, head.weight, head.folded_bias, kept, logits)
            self._matrices[id(kept.rows)] = kept, logits

    def matrices_of(self, numbers: Tensor, fill: float) -> dict[int, Tensor]:
        """By the rows of a matrix: one number for each kept id (M,), in the order of the mask, beside its logit."""
        spread = torch.full_like(self.numbers, fill).scatter_(0, self.pair_places, numbers.to(self.numbers.dtype))
        parts = in_matrices(spread, [kept for kept, _ in self._matrices.values()])
        return dict(zip(self._matrices, parts, strict=True))

    def columns(self, ids: Tensor) -> Tensor:
        """Where the logits of the sampled ids (N,) are in the rows of their matrices; -1 where the row has no logit of
        it. Tokens of no matrix have 0, which nothing reads."""
        return torch.zeros_like(ids).index_copy_(0, self.index, self.places)

    def chunks(self, index: Tensor | None) -> Iterator[Rows]:
        """All of them: none is left out, `index` is None."""
        assert index is None
        for kept, _ in self._matrices.values():
            yield kept.rows

    def logits(self, rows: Rows) -> Tensor:
        return self._matrices[id(rows)][1]

    def scale_gradients(self, largest: Tensor) -> Tensor:
        raise NotImplementedError  # float16 gradients have a scale; these are float32 or float64

    def accumulate(self, rows: Rows, ids: Tensor) -> None:
        """dhidden of a matrix; `finish` has the rest."""
        if self.head.wants[0]:
            kept, dlogits = self._matrices[id(rows)]
            self.head.backend.kept_dhidden(dlogits, self.head.weight, kept, self.head.dhidden_for(kept.rows))

    def finish(self) -> None:
        """dweight and dbias of all tokens, once, after the dense products."""
        self.head.add_pairs(self.numbers, self.pairs)


# --- dense --------------------------------------------------------------------------------------------------------


class DenseMask:
    """Sets the logits of ids that were not kept to -inf, chunk by chunk. `full`: statistics over all ids, before.

    ids (N,) are the columns of the sampled ones, -1 where another rank has them. `added` (N,) bool, of the tokens seen:
    the sampled id is here, and was not among the kept ones.
    """

    def __init__(
        self, mask: TokenMask, index: Tensor, ids: Tensor, dtype: torch.dtype, vocab_slice: VocabSlice | None
    ) -> None:
        self.mask = mask if vocab_slice is None else mask.of_slice(vocab_slice)
        self.index, self.ids, self.vocab_slice = index, ids, vocab_slice
        self.tokens = torch.arange(ids.numel(), device=ids.device)
        self.added = torch.zeros_like(ids, dtype=torch.bool)
        self.masked = self.added.index_fill(0, index, True)
        self.full = no_values(ids.numel(), dtype, ids.device)

    def apply(self, chunk: LogitChunk) -> None:
        """To the logits of a chunk, of which those of masked tokens change."""
        logits, vocab_size = chunk.logits, chunk.logits.shape[1]
        masked = chunk.rows.take(self.masked)
        here = masked.nonzero().squeeze(1)
        token = chunk.rows.take(self.tokens)[here]
        sampled = self.ids[token]
        is_here, sampled = sampled >= 0, sampled.clamp(0, vocab_size - 1)
        kept = (~masked)[:, None].repeat(1, vocab_size)
        outside = None
        if checks_values(token.device) and token.device.type == "cpu":
            mark_by_slices(kept, here, self.mask, token)
        else:
            outside = mark_by_indices(kept, here, self.mask, token)
        marked = kept[here, sampled]
        self.added[token] = is_here & ~marked
        kept[here, sampled] = is_here | marked
        logits.masked_fill_(kept.logical_not_(), -torch.inf)
        if outside is not None:
            logits.masked_fill_(torch.zeros_like(masked).index_copy(0, here, outside)[:, None], torch.nan)

    def sums(self, values: TokenValues) -> Tensor:
        """(3,) over the tokens, all of which were seen: sampled ids added; the probability that the kept ids have
        among all; how many tokens. The same on all ranks."""
        added, full = self.added.sum(), self.full.lse[self.index]
        if self.vocab_slice is not None:
            self.vocab_slice.add_up(added)
            full = self.vocab_slice.gather(full).logsumexp(0)
        mass = (values.lse[self.index] - full).exp().sum()
        return torch.stack([added.to(mass.dtype), mass, mass.new_full((), self.index.numel())])


def mark_by_slices(kept: Tensor, here: Tensor, mask: TokenMask, token: Tensor) -> None:
    """kept[here[i], j] = True for the ids j of token[i]. Reads two numbers per token: for a CPU, where it takes a tenth
    of the time of indices (512 tokens of 16,384 ids: 0.09 s against 1.2 s)."""
    ranges = zip(here.tolist(), mask.firsts[token].tolist(), mask.counts[token].tolist(), strict=True)
    for row, first, count in ranges:
        kept[row].index_fill_(0, mask.ids[first : first + count].long() - mask.first_id, True)


def mark_by_indices(kept: Tensor, here: Tensor, mask: TokenMask, token: Tensor) -> Tensor:
    """The same without a read. (rows,) bool: an id of the token is not in the vocabulary."""
    row, place = places_of(mask.firsts[token], mask.counts[token].long())
    ids, vocab_size = mask.ids[place].long() - mask.first_id, kept.shape[1]
    outside = _outside(ids, row, len(here), vocab_size)
    kept.view(-1).index_fill_(0, here[row] * vocab_size + ids.clamp(0, vocab_size - 1), True)
    return outside

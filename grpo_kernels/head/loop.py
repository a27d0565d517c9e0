"""The loop over chunks of tokens: logits and log-probabilities, the loss of them, the gradients of the lm_head.

At the right the operations of the products, with N tokens, H hidden dimensions, a vocabulary of V:

    for chunk in chunks:                       a loss of single tokens, or of whole sequences that fit a chunk: 6 NHV
        chunk.forward()                        logits and statistics | one fused product | gathered ids | given logits
        chunk.backward(*loss(chunk.rows))      dlogits in place; dhidden = dlogits W, dweight += dlogits^T h
    all forward, the loss, then forward and backward of rows with a gradient                                 8 NHV

A loss says what its gradients need to be known first: `needs_sequences`, `needs_batch`. It is called with the rows of a
chunk and returns (dlogp, dentropy) (N,); `gradients` returns them for all tokens. Tokens without a gradient are left
out of the last two products, masked ones of all three: the host reads their numbers once per call. With static shapes,
and where there are so few rows that leaving some out saves nothing, every row is computed and nothing is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.operations import HeadChunk, LogitChunk, PolicyTransform, Rows, Statistics, TokenMask
from ..kernels.torch.rows import gradient_of_sampled
from ..kernels.torch.transform import transformed
from ..objective.metrics import MASK_SUMS
from .chunk_size import Selection, select_rows
from .k_ids import TopKIds, TopKLogps
from .lm_head import GivenLogits, LMHead, SampledEntries
from .mask_paths import DenseMask, GatheredLogits, split
from .sparse import SparsePairs
from .teacher import GatheredTeacher, GivenTopK, PolicyTopK, TeacherHead, TeacherHeads, TopKHead

Head = LMHead | GivenLogits | GatheredLogits


class Loss(Protocol):
    """What the loop calls once the statistics of a chunk's tokens are known."""

    needs_sequences: bool  # gradients need all tokens of a sequence
    needs_batch: bool  # of the batch

    def __call__(self, rows: Rows, sequences: slice | None = None) -> tuple[Tensor, Tensor]: ...

    def gradients(self) -> tuple[Tensor, Tensor]: ...


class TokenBatch:
    """The tokens (N,) of a call: their head, their statistics, and how the gradients of their logits are computed."""

    def __init__(
        self, head: Head, ids: Tensor, temperature: Tensor, transform: PolicyTransform, stats: Statistics,
        *, sparse_backward: float | None = None, teacher: TeacherHead | TopKHead | TopKLogps | None = None,
    ) -> None:  # fmt: skip
        self.head, self.backend, self.vocab_slice = head, head.backend, head.vocab_slice
        self.sampled_ids = ids  # of the whole vocabulary
        self.ids = head.local_ids(ids)
        self.temperature, self.transform, self.stats, self.teacher = temperature, transform, stats, teacher
        heads = teacher.heads if isinstance(teacher, (TeacherHead, TopKHead)) else None
        self.several_teachers: TeacherHeads | None = None if heads is None or heads.teacher_of is None else heads
        self.mask: DenseMask | None = None
        self.gathered_batch: TokenBatch | None = None  # tokens that keep few ids, by products over those
        self.gathered_logits: GatheredLogits | None = None
        self.pairs: SparsePairs | None = None
        if sparse_backward is not None and isinstance(head, LMHead):  # which GivenLogits refuse
            self.pairs = SparsePairs(head, sparse_backward, stats.logp.dtype)

    def add_mask(
        self, mask: TokenMask, scored: Tensor | None, active: Tensor | None, offsets: Tensor | None = None
    ) -> Selection | None:
        """Restricts the tokens `scored` (N,) bool to their kept ids.

        Tokens with few kept ids become a batch of their own, whose statistics are computed at once. Returns the
        selection of the other tokens, None for all; with `offsets` (S + 1,) it has their numbers per sequence. active
        (N,) bool: may have a gradient.
        """
        head, dtype = self.head, self.stats.logp.dtype
        scored = torch.ones_like(self.ids, dtype=torch.bool) if scored is None else scored
        if not isinstance(head, LMHead):  # given logits are there already: nothing is saved by gathers
            self.mask = DenseMask(mask, scored & (mask.counts > 0), self.ids, dtype, head.vocab_slice)
            return None
        # Gathered rows have the ids of such a teacher only, and those of the mask are the same.
        holds = self.teacher.holds(self.sampled_ids) if isinstance(self.teacher, GivenTopK) else None
        paths = split(
            mask, scored, scored if active is None else active, head.vocab_size, may_gather=holds, offsets=offsets
        )
        if paths.is_dense is not None:
            self.mask = DenseMask(mask, paths.is_dense, self.ids, dtype, head.vocab_slice)
        if paths.matrices:
            logits = GatheredLogits(mask, paths.matrices, self.sampled_ids, head, dtype)
            self.gathered_logits = logits
            self.gathered_batch = TokenBatch(logits, self.sampled_ids, self.temperature, self.transform, self.stats)
            if isinstance(self.teacher, GivenTopK):
                self.gathered_batch.teacher = GatheredTeacher(self.teacher, logits, self.temperature)
            for chunk in self.gathered_batch.chunks(None, Chunk):
                chunk.forward()
        return paths.selection

    # --- chunks -------------------------------------------------------------------------------------------------------

    def chunks(self, index: Tensor | None, kind: type[Chunk]) -> list[Chunk]:
        """Returns the chunks of the tokens `index`; None: of all tokens. Those of a chunk have one teacher."""
        parts = [(0, index)] if self.several_teachers is None else self.several_teachers.split(index)
        self.head.reserve(kind.holds)
        return [
            kind(self, rows, teacher_number=number)
            for number, tokens in parts
            for rows in self.head.chunks(tokens, kind.holds)
        ]

    def sequences(self, index: Tensor | None, lengths: list[int], kind: type[Chunk]) -> list[Chunk]:
        """Returns chunks of whole sequences, which have `lengths` tokens each among the tokens `index`."""
        head, holds, chunks = self.head, kind.holds, []
        rows = select_rows(index, head.num_tokens)
        max_rows = min(head.rows_of_sequences(holds), max(head.rows_of(holds), *lengths, 1))
        for start, stop, sequences in sequence_chunks(lengths, max_rows):
            chunk_rows = Rows(start, stop, None if rows.index is None else rows.index[start:stop])
            chunks.append(kind(self, chunk_rows, sequences))
        head.reserve(holds, [chunk.rows.count for chunk in chunks])
        return chunks

    @property
    def reads_logits(self) -> bool:
        """Returns whether statistics and gradients need the logits themselves, so that no fused product can serve."""
        return not isinstance(self.head, LMHead) or self.mask is not None or self.teacher is not None

    def chunk_kind(self, has_entropy: bool) -> type[Chunk]:
        """Returns the class of chunks whose gradient is computed while their logits are in memory."""
        if has_entropy or self.reads_logits or self.pairs is not None or not self.head.takes_exponentials:
            return Chunk
        if "exponentials" in self.head.fused_products:
            return FusedExponentials
        if self.backend.exponentials is None:
            return Chunk
        return Exponentials

    def normalise_teacher(self, index: Tensor | None) -> None:
        """Computes the log-sum-exps of teachers of the policy's likeliest ids, for these tokens (None: all)."""
        teacher = self.teacher
        if not isinstance(teacher, PolicyTopK) or teacher.mass is None or teacher.heads is None:
            return
        for number, tokens in teacher.heads.split(index):
            if number >= 0:
                head, transform = teacher.heads.heads[number], PolicyTransform(*teacher.heads.transforms[number][2:])
                rows = select_rows(tokens, len(self.ids))
                teacher_rows, count = teacher.heads.rows(rows), head.num_tokens
                temperature = torch.ones(count, dtype=self.temperature.dtype, device=self.temperature.device)
                teacher_rows.put(temperature, rows.take(self.temperature))
                stats = Statistics.zeros(count, temperature.device, temperature.dtype)
                ids = torch.zeros(count, dtype=torch.int64, device=temperature.device)
                TokenBatch(head, ids, temperature, transform, stats).forward(teacher_rows.index, entropy=False)
                rows.put(teacher.stats.lse, teacher_rows.take(stats.lse))
                head.free()

    def forward(self, index: Tensor | None, *, entropy: bool = True) -> None:
        """Computes the statistics of these tokens (None: all), and nothing else."""
        fused = self.backend.fused_logp
        if self.reads_logits or fused is None or "logp" not in self.head.fused_products:
            for chunk in self.chunks(index, Chunk):
                chunk.forward()
            return
        for rows in self.head.chunks(index, "statistics"):
            fused(self.head_chunk(rows), entropy=entropy)

    def backward(self, dlogp: Tensor, dentropy: Tensor, *, every_row: bool = False) -> None:
        """Adds the gradients of every token with a coefficient other than 0, from logits that are computed again."""
        index = None
        if not every_row:
            has_gradient = (dlogp != 0) | (dentropy != 0)
            if self.teacher is not None:
                has_gradient |= self.teacher.weight != 0
            if self.gathered_logits is not None:
                has_gradient.index_fill_(0, self.gathered_logits.index, False)
            index = has_gradient.nonzero().squeeze(1)
        for chunk in self.chunks(index, Chunk):
            chunk.recompute_logits()
            chunk.backward(dlogp, dentropy)
        self.flush_sparse()
        self.backward_gathered(dlogp, dentropy)

    def backward_gathered(self, dlogp: Tensor, dentropy: Tensor) -> None:
        """Adds the gradients of tokens that keep few ids, whose logits are all in memory; call it after all dense
        products."""
        if self.gathered_batch is not None and self.gathered_logits is not None:
            for chunk in self.gathered_batch.chunks(None, Chunk):
                chunk.recompute_logits()
                chunk.backward(dlogp, dentropy)
            self.gathered_logits.add_dweight()

    def flush_sparse(self) -> None:
        """Adds the sparse gradients that are left, and exact ones for tokens with too many pairs; call it after all
        dense chunks."""
        if self.pairs is None:
            return
        if self.pairs.coefficients is not None:
            for chunk in self.chunks(self.pairs.dense(), Chunk):
                chunk.recompute_logits()
                chunk.add_gradient(*self.pairs.coefficients)
        self.pairs.multiply_pairs()

    def mask_sums(self) -> Tensor:
        """Returns the numbers of metrics.MASK_SUMS."""
        sums = self.stats.logp.new_zeros(len(MASK_SUMS))
        if self.gathered_logits is not None:
            sums[0] = self.gathered_logits.num_tokens
            torch.sum(self.gathered_logits.added, 0, dtype=sums.dtype, out=sums[1])
        if self.mask is not None:
            dense_sums = self.mask.sums(self.stats)
            sums[0] += dense_sums[2]
            sums[1:] += dense_sums
        return sums

    # --- rows ---------------------------------------------------------------------------------------------------------

    def head_chunk(self, rows: Rows) -> HeadChunk:
        head = self.head
        assert isinstance(head, LMHead)
        per_token = self.ids, self.temperature, self.stats, self.transform
        return HeadChunk(head.hidden_rows(rows), head.weight, head.bias, rows, *per_token)

    def sampled_logps(self, chunk: LogitChunk) -> Tensor:
        """Returns log-probabilities (C,) float64 of the sampled ids, from logits and log-sum-exps: the backward of
        log-probabilities has nothing else."""
        rows = chunk.rows
        ids = rows.take(self.ids).clamp(min=0)[:, None]
        bias = None if chunk.bias is None else chunk.bias[ids].double()
        z, _ = transformed(chunk.logits.gather(1, ids).double(), bias, rows.take(self.temperature), self.transform)
        return z[:, 0] - rows.take(self.stats.lse)

    def sampled_entries(self, rows: Rows, logp: Tensor, dlogp: Tensor, dentropy: Tensor) -> SampledEntries:
        """Returns d loss / d logits of a chunk at the sampled ids. logp (C,): theirs; dlogp, dentropy (N,): d loss / d
        logp and d loss / d entropy."""
        ids, temperature = rows.take(self.ids), rows.take(self.temperature)
        dlogp_rows, dentropy_rows = rows.take(dlogp), rows.take(dentropy)
        lse, entropy = rows.take(self.stats.lse), rows.take(self.stats.entropy)
        values = gradient_of_sampled(logp, torch.where(dentropy_rows == 0, 0.0, entropy), dlogp_rows, dentropy_rows)
        values = values * (self.transform.logit_scale / temperature)
        if self.transform.softcap:
            tanh = (lse + logp) * temperature / self.transform.softcap  # tanh of the logit over the cap
            values = values * (1 - tanh * tanh)
        has_gradient = (dlogp_rows != 0) | (dentropy_rows != 0)
        return SampledEntries(ids, torch.where(has_gradient, values, 0.0).float())


class Chunk:
    """Tokens whose logits are computed, or in memory already. Their gradient overwrites the logits."""

    holds = "logits"  # as in LMHead.rows_of

    def __init__(
        self, batch: TokenBatch, rows: Rows, sequences: slice | None = None, *, teacher_number: int = 0
    ) -> None:
        self.batch, self.rows, self.sequences, self.teacher_number = batch, rows, sequences, teacher_number
        self.teacher = batch.teacher if teacher_number >= 0 else None

    def forward(self) -> None:
        """Computes the logits and writes the statistics of the tokens."""
        batch, rows = self.batch, self.rows
        chunk = self._compute_logits()
        if batch.mask is not None:
            batch.backend.statistics(chunk._replace(stats=batch.mask.full))
            batch.mask.apply(chunk)
        batch.backend.statistics(chunk)
        if batch.vocab_slice is not None:
            batch.vocab_slice.combine(rows, batch.sampled_ids, batch.stats)
        if self.teacher is not None:
            self.teacher.after_statistics(chunk, batch.backend, self.teacher_number)

    def recompute_logits(self) -> None:
        """Computes the logits of tokens whose statistics are known."""
        chunk = self._compute_logits()
        if self.batch.mask is not None:
            self.batch.mask.apply(chunk)

    def _compute_logits(self) -> LogitChunk:
        batch, teacher = self.batch, None
        logits = batch.head.logits(self.rows)
        if isinstance(self.teacher, TeacherHead):
            teacher = self.teacher.beside(batch.head, self.rows, self.teacher_number)
        per_token = batch.ids, batch.temperature, batch.stats, batch.transform, batch.head.folded_bias, teacher
        self.logit_chunk = LogitChunk(logits, self.rows, *per_token)
        return self.logit_chunk

    def backward(self, dlogp: Tensor, dentropy: Tensor) -> None:
        """Adds the chunk's part of the gradients of the head, from d loss / d logp and d loss / d entropy (N,)."""
        batch = self.batch
        if batch.pairs is None:
            self.add_gradient(dlogp, dentropy)
        else:
            batch.pairs.add(self.logit_chunk, (dlogp, dentropy), None if batch.mask is None else batch.mask.masked)

    def add_gradient(self, dlogp: Tensor, dentropy: Tensor) -> None:
        """Writes the gradient of the logits and adds its products."""
        batch, chunk, rows = self.batch, self.logit_chunk, self.rows
        head, weight = batch.head, None if self.teacher is None else self.teacher.weight
        dlogits = head.row_gradients(rows, chunk.logits)
        if not isinstance(head, GatheredLogits) and head.grad_dtype == torch.float16 and rows.count:
            largest = torch.maximum(rows.take(dlogp).abs(), rows.take(dentropy).abs())
            if weight is not None:
                largest = torch.maximum(largest, rows.take(weight).abs())
            scale = head.scale_gradients(
                (largest * (batch.transform.logit_scale / rows.take(batch.temperature))).amax()
            )
            dlogp, dentropy = dlogp * scale, dentropy * scale
            weight = None if weight is None else weight * scale
        if weight is not None and chunk.teacher is not None:
            chunk = chunk._replace(teacher=chunk.teacher._replace(weight=weight))
        patch = None
        if weight is not None and isinstance(self.teacher, TopKIds):
            chunk, dlogp, dentropy, patch = self.teacher.patch(chunk, batch.sampled_ids, (dlogp, dentropy, weight))
        rounds = isinstance(head, LMHead) and head.grad_dtype.itemsize == 2
        logp = batch.sampled_logps(chunk) if rounds else None  # before the gradient takes the place of the logits
        batch.backend.gradient(chunk, dlogp, dentropy, dlogits)
        if patch is not None:
            patch.write(dlogits)
        if isinstance(head, LMHead) and logp is not None:
            sampled = batch.sampled_entries(rows, logp, dlogp, dentropy)
            head.accumulate(rows, dlogits, sampled if weight is None else sampled.as_rounded(dlogits))
        else:
            head.accumulate(rows, dlogits)


class Exponentials(Chunk):
    """Tokens whose logits are read once and overwritten by exponentials of them. The loss decides the scale of these
    later."""

    def forward(self) -> None:
        batch, head = self.batch, self.batch.head
        assert isinstance(head, LMHead) and batch.backend.exponentials is not None
        chunk = self._compute_logits()
        self.exponentials = head.row_gradients(self.rows, chunk.logits)
        self.scales = batch.backend.exponentials(chunk, batch.head_chunk(self.rows), self.exponentials)

    def backward(self, dlogp: Tensor, dentropy: Tensor) -> None:
        head = self.batch.head
        assert isinstance(head, LMHead)
        head.accumulate_scaled(self.batch.head_chunk(self.rows), self.exponentials, dlogp.contiguous(), self.scales)


class FusedExponentials(Exponentials):
    """Tokens whose product stores exponentials in place of logits."""

    holds = "exponentials"

    def forward(self) -> None:
        batch, head = self.batch, self.batch.head
        assert isinstance(head, LMHead) and batch.backend.fused_exponentials is not None
        self.exponentials = head.scratch.gradients(self.rows.count)
        self.scales = batch.backend.fused_exponentials(batch.head_chunk(self.rows), self.exponentials)


def sequence_chunks(lengths: list[int], most: int) -> Iterator[tuple[int, int, slice]]:
    """Yields runs of whole sequences with at most `most` tokens together: (first token, end of the last, the
    sequences)."""
    first = start = stop = 0
    for i, length in enumerate(lengths):
        if stop - start + length > most and stop > start:
            yield start, stop, slice(first, i)
            first, start = i, stop
        stop += length
    if stop > start:
        yield start, stop, slice(first, len(lengths))


def run(
    batch: TokenBatch, loss: Loss, selection: Selection, *, gradients: bool, has_entropy: bool, every_row: bool
) -> None:
    """Computes the statistics of a batch and, with `gradients`, adds the gradients of the loss to those of the head.

    has_entropy: a gradient goes through the entropy. every_row: no shape depends on the data.
    """
    if batch.teacher is not None:
        batch.normalise_teacher(selection.scored)
    kind, lengths = batch.chunk_kind(has_entropy), selection.lengths
    fits = lengths is not None and max(lengths, default=0) <= batch.head.rows_of_sequences(kind.holds)
    fits = fits and batch.several_teachers is None  # the tokens of a sequence may have different ones
    if not gradients or loss.needs_batch or (loss.needs_sequences and not fits):
        batch.forward(selection.scored)
        if gradients:
            batch.backward(*loss.gradients(), every_row=every_row)
        return
    if selection.scored_only is not None:
        batch.forward(selection.scored_only)
    if loss.needs_sequences and lengths is not None:
        chunks = batch.sequences(selection.has_gradient, lengths, kind)
    else:
        chunks = batch.chunks(selection.has_gradient, kind)
    for chunk in chunks:
        chunk.forward()
        # The statistics of a single chunk are the last ones: the loss of all tokens is evaluated once.
        chunk.backward(*(loss(chunk.rows, chunk.sequences) if len(chunks) > 1 else loss.gradients()))
    batch.flush_sparse()
    if batch.gathered_batch is not None:
        batch.backward_gathered(*loss.gradients())

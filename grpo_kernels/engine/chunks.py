"""The chunk loop: a GEMM, a row kernel, two GEMMs; then one reduction. Three ways, chosen by the plan.

    single pass  per chunk: logits -> row kernel (statistics, objective, gradient) -> dhidden, dweight             6 NHV
    staged       for whole sequences: logits -> statistics -> coefficients -> gradient -> products                 6 NHV
    recompute    statistics of all rows; coefficients; logits again for rows with a gradient -> products           8 NHV
Zero-gradient rows get only the forward GEMM, or none if `score_inactive=False`: one read of the counts on the host per
call. With static shapes, and where there are so few rows that leaving some out saves nothing, every row is computed and
nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..contract import Backend, FoldingBackend, LogitChunk, Rows, RowStats, Sums, TokenValues
from ..names import FIELD, KernelParams
from .kept import DenseMask, KeptLogits, TokenMask, mask_rows
from .lm_head import GivenLogits, LMHead
from .memory import Chunk, visited
from .plan import Plan

Head = LMHead | GivenLogits | KeptLogits
# (chunk, its range of sequences) -> (d loss / d logp, d loss / d entropy) (N,), of which the chunk's are read
CoefficientFn = Callable[[Rows, slice], tuple[Tensor, Tensor]]


class Scorer:
    """Runs row kernels over chunks of one batch; they write what they find to `values`."""

    def __init__(
        self, head: Head, ids: Tensor, temperature: Tensor, params: KernelParams, backend: Backend, values: TokenValues
    ) -> None:
        self.head, self.temperature, self.params, self.backend = head, temperature, params, backend
        self.vocab_slice = head.vocab_slice
        self.sampled_ids = ids  # of the whole vocabulary
        self.ids = head.columns(ids)
        self.values = values
        self.mask: DenseMask | None = None

    def score(self, index: Tensor | None, *, entropy: bool = True) -> None:
        """logp, entropy and lse of these tokens (None: of all), nothing else."""
        for rows in self._row_chunks(index):
            if self._computes_logits:
                self._statistics(rows)
            else:
                self._linear_logp(rows, entropy)

    def evaluate(self, index: Tensor | None, table: Tensor) -> None:
        """`score`, and the objective of each token by itself."""
        for rows in self._row_chunks(index):
            if self.vocab_slice is not None:
                self._statistics(rows)
                self.backend.token_objective(rows, table, self.values, self.params)
            elif self._computes_logits:
                self.backend.single_pass(self._logits(rows), table, self.values, self.params)
            else:
                self._linear_logp(rows, entropy=True)
                self.backend.token_objective(rows, table, self.values, self.params)

    def single_pass(self, index: Tensor | None, table: Tensor) -> None:
        """Everything about tokens whose gradient depends on themselves alone."""
        head = self.head
        # The scale of float16, which follows from the coefficients, or the other ranks' statistics have to come first.
        if head.grad_dtype == torch.float16 or self.vocab_slice is not None:
            self.staged(((chunk, slice(0)) for chunk in head.chunks(index)), self._token_coefficients(table))
            return
        for chunk in head.chunks(index):
            for rows in chunk.row_chunks():
                read = self._logits(rows)
                written = head.row_gradients(chunk, rows, read.logits)
                self.backend.single_pass(read, table, self.values, self.params, written)
            head.accumulate(chunk, self.ids)

    def anchored(self, index: Tensor | None, table: Tensor) -> None:
        """`single_pass` without logits, for tokens whose gradient does not go through their entropy."""
        head, backend = cast(LMHead, self.head), cast(FoldingBackend, self.backend)
        for chunk in head.chunks(index):
            rows, exponentials = chunk.rows, head.exponentials(chunk)
            stats, scale = backend.anchored(
                head.hidden_rows(rows), head.weight, head.bias, rows.take(self.ids), rows.take(table, 1), exponentials,
                self.params,
            )  # fmt: skip
            self._put(rows, stats)
            backend.token_objective(rows, table, self.values, self.params)
            head.accumulate_scaled(chunk, exponentials, scale)

    def staged(self, chunks: Iterable[tuple[Chunk, slice]], coefficients: CoefficientFn) -> None:
        """Statistics of a row chunk, then its coefficients, then its gradients from the same logits."""
        for chunk, sequences in chunks:
            for rows in chunk.row_chunks():
                read = self._statistics(rows)
                self._gradient(chunk, read, *coefficients(rows, sequences))
            self.head.accumulate(chunk, self.ids)

    def gradient(self, g_logp: Tensor, g_entropy: Tensor, *, static_shapes: bool = False) -> None:
        """Gradients of every token with a non-zero coefficient, from its logits computed again."""
        index = None if static_shapes else ((g_logp != 0) | (g_entropy != 0)).nonzero().squeeze(1)
        for chunk in self.head.chunks(index):
            for rows in chunk.row_chunks():
                self._gradient(chunk, self._logits(rows, again=True), g_logp, g_entropy)
            self.head.accumulate(chunk, self.ids)

    @property
    def _computes_logits(self) -> bool:
        return self.head.strategy == "rows" or self.mask is not None

    def _token_coefficients(self, table: Tensor) -> CoefficientFn:
        """What `single_pass` computes between its statistics and its gradient."""

        def coefficients(rows: Rows, sequences: slice) -> tuple[Tensor, Tensor]:
            self.backend.token_objective(rows, table, self.values, self.params)
            return self.values.g_logp, table[FIELD["weight_entropy"]]

        return coefficients

    def _linear_logp(self, rows: Rows, entropy: bool) -> None:
        head, backend = cast(LMHead, self.head), cast(FoldingBackend, self.backend)
        stats = backend.linear_logp(
            head.hidden_rows(rows), head.weight, head.bias, rows.take(self.ids), rows.take(self.temperature),
            self.params, entropy=entropy,
        )  # fmt: skip
        self._put(rows, stats)

    def _row_chunks(self, index: Tensor | None) -> Iterator[Rows]:
        """To be scored alone; without logits as many rows at a time as products take."""
        for chunk in self.head.chunks(index):
            yield from chunk.row_chunks() if self._computes_logits else [chunk.rows]

    def _logits(self, rows: Rows, *, again: bool = False) -> LogitChunk:
        chunk = LogitChunk(self.head.logits(rows), rows, self.ids, self.head.folded_bias)
        if self.mask is not None:
            if not again:
                self.backend.statistics(chunk, self.temperature, self.mask.full, self.params)
            self.mask.apply(chunk)
        return chunk

    def _statistics(self, rows: Rows) -> LogitChunk:
        read = self._logits(rows)
        self.backend.statistics(read, self.temperature, self.values, self.params)
        if self.vocab_slice is not None:
            self.vocab_slice.combine(rows, self.sampled_ids, self.values)
        return read

    def _gradient(self, chunk: Chunk, read: LogitChunk, g_logp: Tensor, g_entropy: Tensor) -> None:
        head, rows = self.head, read.rows
        written = head.row_gradients(chunk, rows, read.logits)
        if head.grad_dtype == torch.float16 and rows.count:
            steepness = self.params.logit_scale / rows.take(self.temperature)
            largest = (torch.maximum(rows.take(g_logp).abs(), rows.take(g_entropy).abs()) * steepness).amax()
            scale = head.scale_gradients(largest)
            g_logp, g_entropy = g_logp * scale, g_entropy * scale
        self.backend.logits_gradient(read, self.temperature, self.values, g_logp, g_entropy, self.params, written)

    def _put(self, rows: Rows, stats: RowStats) -> None:
        rows.put(self.values.logp, stats.logp)
        rows.put(self.values.entropy, stats.entropy)
        rows.put(self.values.lse, stats.lse)


def run(
    head: Head,
    plan: Plan,
    backend: Backend,
    *,
    gradients: bool,
    static_shapes: bool = False,
    sampling_mask: TokenMask | None = None,
) -> tuple[TokenValues, Sums]:
    """Score a batch and, with `gradients`, leave the gradients of the loss in `head`."""
    tokens, table = plan.tokens, plan.tokens.table
    scorer = Scorer(head, tokens.ids, table[FIELD["temperature"]], plan.params, backend, tokens.values)
    visit = _everything(plan) if static_shapes else _visit(plan, gradients)
    kept, mask_sums = None, None
    if sampling_mask is not None:
        kept, added = add_mask(scorer, sampling_mask, tokens.scored)
        visit = _without(visit, kept, plan)
    if kept is not None:
        kept.score(None)
    index = None if kept is None else cast(KeptLogits, kept.head).index  # of tokens with few kept ids
    if plan.whole_sequences:
        _run_sequences(scorer, plan, visit, gradients=gradients, static_shapes=static_shapes, kept=index)
    else:
        if gradients:
            anchored = head.strategy == "anchored" and not plan.entropy_has_gradient and scorer.mask is None
            (scorer.anchored if anchored else scorer.single_pass)(visit.active, table)
            if visit.rest is not None:
                scorer.evaluate(visit.rest, table)
        else:
            scorer.evaluate(visit.active, table)
        if index is not None:
            backend.token_objective(Rows(0, len(index), index), table, tokens.values, plan.params)
    if kept is not None and gradients:
        kept.gradient(*_coefficients(plan), static_shapes=True)
        cast(KeptLogits, kept.head).finish()
    if sampling_mask is not None:
        masked = (tokens.scored & (sampling_mask.counts > 0)).sum().to(added.dtype)
        mask_sums = torch.nn.functional.pad(torch.stack([masked, added]), (0, 2))
        if scorer.mask is not None:
            mask_sums[1:] += scorer.mask.sums(tokens.values)
    sums = backend.sums(tokens, plan.params, plan.group_index, plan.num_groups)
    if mask_sums is not None:
        sums = replace(sums, numbers=torch.cat([sums.numbers, mask_sums]))
    return tokens.values, sums


def add_mask(scorer: Scorer, mask: TokenMask, scored: Tensor) -> tuple[Scorer | None, Tensor]:
    """(a scorer of the tokens that take the way of gathers, if there are any; () how many sampled ids it added).

    The others stay with `scorer`, which applies the mask to their logits. scored (N,) bool.
    """
    head, ids, dtype = cast(LMHead | GivenLogits, scorer.head), scorer.sampled_ids, scorer.values.columns.dtype
    gathers = scored & mask.gathers(head.vocab_size)
    if isinstance(head, GivenLogits):
        gathers = torch.zeros_like(scored)  # the logits are there already
    added = torch.zeros((), dtype=dtype, device=ids.device)
    dense = (scored & (mask.counts > 0) & ~gathers).nonzero().squeeze(1)
    if dense.numel():
        scorer.mask = DenseMask(mask, dense, scorer.ids, dtype, head.vocab_slice)
    index = gathers.nonzero().squeeze(1)
    if not index.numel():
        return None, added
    rows = mask_rows(mask, ids, index, head.vocab_size)
    kept = KeptLogits(rows, cast(LMHead, head), dtype)
    beside = Scorer(kept, ids, scorer.temperature, scorer.params, scorer.backend, scorer.values)
    return beside, added + rows.added.sum()


def _without(visit: _Visit, kept: Scorer | None, plan: Plan) -> _Visit:
    """`visit` without the tokens that take the way of gathers."""
    if kept is None:
        return visit
    others = torch.ones_like(plan.tokens.scored)
    others[cast(KeptLogits, kept.head).index] = False
    every = torch.arange(others.numel(), device=others.device) if visit.active is None else visit.active
    active = every[others[every]]
    rest = None if visit.rest is None else visit.rest[others[visit.rest]]
    lengths = visit.lengths
    if lengths is not None:
        before = torch.nn.functional.pad(torch.zeros_like(others).index_fill(0, active, True).cumsum(0), (1, 0))
        lengths = before[plan.tokens.offsets].diff().tolist()
    return _Visit(active, rest if rest is not None and rest.numel() else None, lengths)


def evaluate(plan: Plan, backend: Backend) -> None:
    """The objective of all tokens of the plan, whose logp and entropy are known."""
    if plan.whole_sequences:
        backend.sequence_objective(slice(0, plan.num_sequences), plan.row_length, plan.tokens, plan.params)
    else:
        num_tokens = plan.tokens.scored.numel()
        backend.token_objective(Rows(0, num_tokens), plan.tokens.table, plan.tokens.values, plan.params)


class _Visit(NamedTuple):
    """Tokens with a gradient (None: all tokens, and no others), tokens that are scored alone, and the number of active
    tokens per sequence where that matters and is known on the host."""

    active: Tensor | None
    rest: Tensor | None
    lengths: list[int] | None


def _visit(plan: Plan, gradients: bool) -> _Visit:
    """One read of the counts on the host."""
    order, counts = plan.tokens.order, plan.tokens.counts
    assert order is not None and counts is not None  # the plan was made with ordered=True
    active, rest, *per_sequence = counts.tolist()
    if not gradients:
        active, rest = active + rest, 0
    lengths = per_sequence if plan.whole_sequences else None
    if active == order.numel():
        return _Visit(None, None, lengths)
    return _Visit(order[:active], order[active : active + rest] if rest else None, lengths)


def _everything(plan: Plan) -> _Visit:
    """`_visit` of static shapes: all tokens. The lengths of packed sequences are not known on the host."""
    return _Visit(None, None, None if plan.row_length is None else [plan.row_length] * plan.num_sequences)


def _run_sequences(
    scorer: Scorer, plan: Plan, visit: _Visit, *, gradients: bool, static_shapes: bool, kept: Tensor | None
) -> None:
    """The ways of tokens whose gradient depends on their sequence; those of `kept` (C,) int64 are scored already."""
    tokens, backend, lengths = plan.tokens, scorer.backend, visit.lengths
    staged = gradients and lengths is not None and max(lengths, default=0) <= scorer.head.sequence_rows
    weight_entropy = tokens.table[FIELD["weight_entropy"]]
    if staged and lengths is not None:

        def coefficients(rows: Rows, sequences: slice) -> tuple[Tensor, Tensor]:
            backend.sequence_objective(sequences, plan.row_length, tokens, plan.params)
            return tokens.values.g_logp, weight_entropy

        head = cast(LMHead | GivenLogits, scorer.head)
        size = head.packed_rows(max(lengths, default=0))
        scorer.staged(packed_chunks(head, sequence_chunks(visit.active, lengths, head.num_tokens, size)), coefficients)
    else:
        scorer.score(visit.active)
    if visit.rest is not None:
        scorer.score(visit.rest)
    if not staged or visit.rest is not None or kept is not None:
        evaluate(plan, backend)
    if gradients and not staged:
        g_logp, g_entropy = _coefficients(plan)
        if kept is not None:
            g_logp, g_entropy = (g.index_fill(0, kept, 0.0) for g in (g_logp, g_entropy))
        scorer.gradient(g_logp, g_entropy, static_shapes=static_shapes)


def _coefficients(plan: Plan) -> tuple[Tensor, Tensor]:
    """(N,) d loss / d logp and d loss / d entropy, 0 at tokens without a gradient."""
    tokens = plan.tokens
    both = tokens.values.g_logp, tokens.table[FIELD["weight_entropy"]]
    g_logp, g_entropy = (torch.where(tokens.active, g, 0.0) for g in both)
    return g_logp, g_entropy


def packed_chunks(head: LMHead | GivenLogits, packed: Iterable[tuple[Rows, slice]]) -> Iterator[tuple[Chunk, slice]]:
    """With the rows of each part as a chunk."""
    parts = list(packed)
    return zip(head.chunks_of([rows for rows, _ in parts]), (sequences for _, sequences in parts), strict=True)


def sequence_chunks(
    index: Tensor | None, lengths: list[int], num_tokens: int, size: int
) -> Iterator[tuple[Rows, slice]]:
    """Pack whole sequences into chunks: (their tokens, their range of sequences); `lengths`: tokens per sequence."""
    rows = visited(index, num_tokens)
    if rows.stop <= size:
        if rows.stop:
            yield rows, slice(0, len(lengths))
        return
    first, start, stop, index = 0, 0, 0, rows.index
    for i in range(len(lengths) + 1):
        if i == len(lengths) or stop - start + lengths[i] > size:
            if stop > start:
                yield Rows(start, stop, None if index is None else index[start:stop]), slice(first, i)
            first, start = i, stop
        if i < len(lengths):
            stop += lengths[i]

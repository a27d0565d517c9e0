"""The chunk loop: a GEMM, a row kernel, two GEMMs; then one reduction. Three ways, chosen by the plan.

    single pass  per chunk: logits -> row kernel (statistics, objective, gradient) -> dhidden, dweight             6 NHV
    staged       for whole sequences: logits -> statistics -> coefficients -> gradient -> products                 6 NHV
    recompute    statistics of all rows; coefficients; logits again for rows with a gradient -> products           8 NHV
Zero-gradient rows get only the forward GEMM, or none if `score_inactive=False`: one read of the counts on the host per
call. With static shapes every row is computed and nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..contract import FIELD, Backend, FoldingBackend, KernelParams, Rows, RowStats, Sums, TokenValues
from .lm_head import Chunk, GivenLogits, LMHead
from .plan import Plan

Head = LMHead | GivenLogits
# (chunk, its range of sequences) -> (d loss / d logp, d loss / d entropy) (N,), of which the chunk's are read
CoefficientFn = Callable[[Rows, slice], tuple[Tensor, Tensor]]


class Scorer:
    """Runs row kernels over chunks of one batch; they write what they find to `values`."""

    def __init__(
        self, head: Head, ids: Tensor, temperature: Tensor, params: KernelParams, backend: Backend, values: TokenValues
    ) -> None:
        self.head, self.ids, self.temperature, self.params, self.backend = head, ids, temperature, params, backend
        self.values = values

    def score(self, index: Tensor | None, *, entropy: bool = True) -> None:
        """logp, entropy and lse of these tokens (None: of all), nothing else."""
        for rows in self._row_chunks(index):
            if self.head.strategy == "rows":
                self._statistics(rows)
            else:
                self._linear_logp(rows, entropy)

    def evaluate(self, index: Tensor | None, table: Tensor) -> None:
        """`score`, and the objective of each token by itself."""
        for rows in self._row_chunks(index):
            if self.head.strategy == "rows":
                logits, bias = self.head.logits(rows), self.head.folded_bias
                self.backend.single_pass(logits, rows, self.ids, table, self.values, self.params, bias)
            else:
                self._linear_logp(rows, entropy=True)
                self.backend.token_objective(rows, table, self.values, self.params)

    def single_pass(self, index: Tensor | None, table: Tensor) -> None:
        """Everything about tokens whose gradient depends on themselves alone."""
        head = self.head
        if head.grad_dtype == torch.float16:  # a scale, which follows from the coefficients, must come first
            self.staged(((chunk, slice(0)) for chunk in head.chunks(index)), self._token_coefficients(table))
            return
        for chunk in head.chunks(index):
            for rows in chunk.row_chunks():
                logits = head.logits(rows)
                gradient, error = head.gradient_buffer(chunk, rows, logits), head.rounding_error(chunk, rows)
                self.backend.single_pass(
                    logits, rows, self.ids, table, self.values, self.params, head.folded_bias, gradient, error
                )
            head.accumulate(chunk, self.ids)

    def anchored(self, index: Tensor | None, table: Tensor) -> None:
        """`single_pass` without logits, for tokens whose gradient does not go through their entropy."""
        head, backend = cast(LMHead, self.head), cast(FoldingBackend, self.backend)
        for chunk in head.chunks(index):
            rows, exponentials = chunk.rows, head.exponentials(chunk)
            given = head.hidden_rows(rows), head.weight, head.bias, rows.take(self.ids), rows.take(table, 1)
            stats, scale = backend.anchored(*given, exponentials, self.params)
            self._put(rows, stats)
            backend.token_objective(rows, table, self.values, self.params)
            head.accumulate_scaled(chunk, exponentials, scale)

    def staged(self, chunks: Iterable[tuple[Chunk, slice]], coefficients: CoefficientFn) -> None:
        """Statistics of a chunk, then its coefficients, then its gradients from the same logits."""
        for chunk, sequences in chunks:
            logits = self._statistics(chunk.rows)
            self._gradient(chunk, chunk.rows, logits, *coefficients(chunk.rows, sequences))
            self.head.accumulate(chunk, self.ids)

    def gradient(self, g_logp: Tensor, g_entropy: Tensor, *, static_shapes: bool = False) -> None:
        """Gradients of every token with a non-zero coefficient, from its logits computed again."""
        index = None if static_shapes else ((g_logp != 0) | (g_entropy != 0)).nonzero().squeeze(1)
        for chunk in self.head.chunks(index):
            for rows in chunk.row_chunks():
                self._gradient(chunk, rows, self.head.logits(rows), g_logp, g_entropy)
            self.head.accumulate(chunk, self.ids)

    def _token_coefficients(self, table: Tensor) -> CoefficientFn:
        """What `single_pass` computes between its statistics and its gradient."""

        def coefficients(rows: Rows, sequences: slice) -> tuple[Tensor, Tensor]:
            self.backend.token_objective(rows, table, self.values, self.params)
            return self.values.g_logp, table[FIELD["weight_entropy"]]

        return coefficients

    def _linear_logp(self, rows: Rows, entropy: bool) -> None:
        head, backend = cast(LMHead, self.head), cast(FoldingBackend, self.backend)
        given = head.hidden_rows(rows), head.weight, head.bias, rows.take(self.ids), rows.take(self.temperature)
        self._put(rows, backend.linear_logp(*given, self.params, entropy=entropy))

    def _row_chunks(self, index: Tensor | None) -> Iterator[Rows]:
        for chunk in self.head.chunks(index):
            yield from chunk.row_chunks()

    def _statistics(self, rows: Rows) -> Tensor:
        logits, bias = self.head.logits(rows), self.head.folded_bias
        self.backend.statistics(logits, rows, self.ids, self.temperature, self.values, self.params, bias)
        return logits

    def _gradient(self, chunk: Chunk, rows: Rows, logits: Tensor, g_logp: Tensor, g_entropy: Tensor) -> None:
        head = self.head
        gradient, error = head.gradient_buffer(chunk, rows, logits), head.rounding_error(chunk, rows)
        if head.grad_dtype == torch.float16 and rows.count:
            steepness = self.params.logit_scale / rows.take(self.temperature)
            largest = (torch.maximum(rows.take(g_logp).abs(), rows.take(g_entropy).abs()) * steepness).amax()
            scale = head.scale_gradients(largest)
            g_logp, g_entropy = g_logp * scale, g_entropy * scale
        self.backend.logits_gradient(
            logits, gradient, rows, self.ids, self.temperature, self.values, g_logp, g_entropy, self.params,
            head.folded_bias, error,
        )  # fmt: skip

    def _put(self, rows: Rows, stats: RowStats) -> None:
        rows.put(self.values.logp, stats.logp)
        rows.put(self.values.entropy, stats.entropy)
        rows.put(self.values.lse, stats.lse)


def run(
    head: Head, plan: Plan, backend: Backend, *, gradients: bool, static_shapes: bool = False
) -> tuple[TokenValues, Sums]:
    """Score a batch and, with `gradients`, leave the gradients of the loss in `head`."""
    tokens, table = plan.tokens, plan.tokens.table
    scorer = Scorer(head, tokens.ids, table[FIELD["temperature"]], plan.params, backend, tokens.values)
    visit = _everything(plan) if static_shapes else _visit(plan, gradients)
    if plan.whole_sequences:
        _run_sequences(scorer, plan, visit, gradients=gradients, static_shapes=static_shapes)
    elif gradients:
        anchored = head.strategy == "anchored" and not plan.entropy_has_gradient
        (scorer.anchored if anchored else scorer.single_pass)(visit.active, table)
        if visit.rest is not None:
            scorer.evaluate(visit.rest, table)
    else:
        scorer.evaluate(visit.active, table)
    values = tokens.values
    if static_shapes and not plan.all_scored:
        values = values.only(tokens.scored)
    return values, sums(plan, backend, values)


def sums(plan: Plan, backend: Backend, values: TokenValues) -> Sums:
    """Loss and metrics from what is known of every token."""
    tokens, groups = plan.tokens, (plan.group_index, plan.num_groups)
    return backend.sums(tokens.scored, tokens.table, values, plan.params, tokens.offsets, *groups)


def evaluate(plan: Plan, backend: Backend) -> None:
    """The objective of all tokens of the plan, whose logp and entropy are known."""
    if plan.whole_sequences:
        _sequence_objective(plan, backend, slice(0, plan.num_sequences))
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
    order, counts = cast(Tensor, plan.tokens.order), cast(Tensor, plan.tokens.counts)
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


def _run_sequences(scorer: Scorer, plan: Plan, visit: _Visit, *, gradients: bool, static_shapes: bool) -> None:
    """The ways of tokens whose gradient depends on their sequence."""
    tokens, backend, lengths = plan.tokens, scorer.backend, visit.lengths
    staged = gradients and lengths is not None and max(lengths, default=0) <= scorer.head.sequence_rows
    weight_entropy = tokens.table[FIELD["weight_entropy"]]
    if staged and lengths is not None:

        def coefficients(rows: Rows, sequences: slice) -> tuple[Tensor, Tensor]:
            _sequence_objective(plan, backend, sequences)
            return tokens.values.g_logp, weight_entropy

        head = scorer.head
        packed = sequence_chunks(visit.active, lengths, head.num_tokens, head.sequence_rows)
        scorer.staged(((head.chunk_of(rows), sequences) for rows, sequences in packed), coefficients)
    else:
        scorer.score(visit.active)
    if visit.rest is not None:
        scorer.score(visit.rest)
    if not staged or visit.rest is not None:
        evaluate(plan, backend)
    if gradients and not staged:
        moved = (torch.where(tokens.active, g, 0.0) for g in (tokens.values.g_logp, weight_entropy))
        scorer.gradient(*moved, static_shapes=static_shapes)


def _sequence_objective(plan: Plan, backend: Backend, sequences: slice) -> None:
    tokens = plan.tokens
    given = tokens.table, tokens.scored, tokens.offsets, tokens.lengths, tokens.values
    backend.sequence_objective(sequences, plan.row_length, *given, plan.params)


def sequence_chunks(
    index: Tensor | None, lengths: list[int], num_tokens: int, size: int
) -> Iterator[tuple[Rows, slice]]:
    """Pack whole sequences into chunks: (their tokens, their range of sequences); `lengths`: tokens per sequence."""
    first = start = stop = 0
    if index is not None and index.numel() == num_tokens:
        index = None
    for i in range(len(lengths) + 1):
        if i == len(lengths) or stop - start + lengths[i] > size:
            if stop > start:
                yield Rows(start, stop, None if index is None else index[start:stop]), slice(first, i)
            first, start = i, stop
        if i < len(lengths):
            stop += lengths[i]

"""The chunk loop: a GEMM, a row kernel, two GEMMs; then the O(N) reduction. Three ways, chosen by the plan.

    fused      for a chunk: logits -> row kernel (statistics, objective, gradient) -> dhidden, dweight            6 NHV
    staged     for whole sequences: logits -> statistics -> coefficients (O(N) torch) -> gradient -> products     6 NHV
    recompute  statistics of all rows; coefficients; logits again for rows with a gradient -> products            8 NHV
Rows that cannot have a gradient get the first product alone, and none where nobody wants their log-probabilities: one
read of the counts on the host per call. With static shapes every row is computed and nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from .backends import Backend, FoldingBackend
from .coefficients import Coefficients, evaluate
from .head import Chunk, GivenLogits, LMHead, Rows
from .params import FIELD, KernelParams, RowStats
from .plan import Plan

Head = LMHead | GivenLogits
# (chunk, its statistics, its range of sequences) -> (d loss / d logp, d loss / d entropy) of its rows
CoefficientFn = Callable[[Rows, RowStats, slice], tuple[Tensor, Tensor]]


class Scorer:
    """Runs row kernels over chunks of one batch and keeps the statistics per token, 0 at tokens never visited."""

    def __init__(self, head: Head, ids: Tensor, temperature: Tensor, params: KernelParams, backend: Backend) -> None:
        self.head, self.ids, self.temperature, self.params, self.backend = head, ids, temperature, params, backend

    @cached_property
    def stats(self) -> RowStats:
        """(N,) each; what it starts with, unless the first chunk is the whole batch."""
        zero = torch.zeros_like(self.temperature)
        return RowStats(logp=zero, lse=torch.zeros_like(zero, dtype=torch.float64), entropy=zero.clone())

    def score(self, index: Tensor | None, *, entropy: bool = True) -> None:
        """Statistics of these tokens (None: of all), nothing else."""
        for chunk in self.head.chunks(index):
            for rows in chunk.row_chunks():
                if self.head.strategy == "rows":
                    self._statistics(rows)
                else:
                    self._keep(rows, self._linear_logp(rows, entropy))

    def fused(self, index: Tensor | None, table: Tensor) -> None:
        """Statistics and gradients of tokens whose gradient depends on themselves alone."""
        head = self.head
        if head.grad_dtype == torch.float16:  # a scale, which follows from the coefficients, must come first
            self.staged(((chunk, slice(0)) for chunk in head.chunks(index)), partial(self._token_coefficients, table))
            return
        for chunk in head.chunks(index):
            for rows in chunk.row_chunks():
                logits = head.logits(rows)
                gradient, error = head.gradient_buffer(chunk, rows, logits), head.rounding_error(chunk, rows)
                ids = rows.take(self.ids)
                self._keep(rows, self.backend.fused(logits, gradient, ids, rows.take(table, 1), self.params, error))
            head.accumulate(chunk, self.ids)

    def anchored(self, index: Tensor | None, table: Tensor) -> None:
        """`fused` without logits, for tokens whose gradient does not go through their entropy."""
        head, backend = cast(LMHead, self.head), cast(FoldingBackend, self.backend)
        for chunk in head.chunks(index):
            rows, exponentials = chunk.rows, head.exponentials(chunk)
            given = head.hidden_rows(rows), head.weight, head.bias, rows.take(self.ids), rows.take(table, 1)
            stats, scale = backend.anchored(*given, exponentials, self.params)
            self._keep(rows, stats)
            head.accumulate_scaled(chunk, exponentials, scale)

    def staged(self, chunks: Iterable[tuple[Chunk, slice]], coefficients: CoefficientFn) -> None:
        """Statistics of a chunk, then its coefficients, then its gradients from the same logits."""
        for chunk, sequences in chunks:
            logits, stats = self._statistics(chunk.rows)
            self._gradient(chunk, chunk.rows, logits, stats, *coefficients(chunk.rows, stats, sequences))
            self.head.accumulate(chunk, self.ids)

    def gradient(self, g_logp: Tensor, g_entropy: Tensor, *, static_shapes: bool = False) -> None:
        """Gradients of every token with a non-zero coefficient, from its logits computed again."""
        index = None if static_shapes else ((g_logp != 0) | (g_entropy != 0)).nonzero().squeeze(1)
        for chunk in self.head.chunks(index):
            for rows in chunk.row_chunks():
                stats = RowStats(*(rows.take(x) for x in self.stats))
                given = self.head.logits(rows), stats, rows.take(g_logp), rows.take(g_entropy)
                self._gradient(chunk, rows, *given)
            self.head.accumulate(chunk, self.ids)

    def _token_coefficients(
        self, table: Tensor, rows: Rows, stats: RowStats, sequences: slice
    ) -> tuple[Tensor, Tensor]:
        """What the fused kernel computes between its statistics and its gradient."""
        table = rows.take(table, 1)
        log_ratio = stats.logp - table[FIELD["base"]] if self.params.has_base else torch.zeros_like(stats.logp)
        slopes = self.backend.objective(log_ratio, stats.logp, stats.entropy, table, self.params)[1:3]
        g_logp = table[FIELD["weight_ratio"]] * slopes[0] + table[FIELD["weight_direct"]] * slopes[1]
        return g_logp, table[FIELD["weight_entropy"]]

    def _linear_logp(self, rows: Rows, entropy: bool) -> RowStats:
        head, backend = cast(LMHead, self.head), cast(FoldingBackend, self.backend)
        given = head.hidden_rows(rows), head.weight, head.bias, rows.take(self.ids), rows.take(self.temperature)
        return backend.linear_logp(*given, self.params, entropy=entropy)

    def _statistics(self, rows: Rows) -> tuple[Tensor, RowStats]:
        logits = self.head.logits(rows)
        stats = self.backend.stats(logits, rows.take(self.ids), rows.take(self.temperature), self.params)
        self._keep(rows, stats)
        return logits, stats

    def _gradient(
        self, chunk: Chunk, rows: Rows, logits: Tensor, stats: RowStats, g_logp: Tensor, g_entropy: Tensor
    ) -> None:
        gradient, error = self.head.gradient_buffer(chunk, rows, logits), self.head.rounding_error(chunk, rows)
        ids, temperature = rows.take(self.ids), rows.take(self.temperature)
        if self.head.grad_dtype == torch.float16 and g_logp.numel():
            steepness = self.params.logit_scale / temperature
            largest = (torch.maximum(g_logp.abs(), g_entropy.abs()) * steepness).amax()
            scale = self.head.scale_gradients(largest)
            g_logp, g_entropy = g_logp * scale, g_entropy * scale
        self.backend.gradient(
            logits, gradient, ids, temperature, stats.lse, stats.entropy, g_logp, g_entropy, self.params, error
        )

    def _keep(self, rows: Rows, stats: RowStats) -> None:
        if rows.index is None and rows.count == self.head.num_tokens:
            self.stats = stats
            return
        for everywhere, here in zip(self.stats, stats, strict=True):
            rows.put(everywhere, here)


class LossResult(NamedTuple):
    """loss (); d loss / d logp, d loss / d entropy (N,); sums of params.COLUMNS per group (G, K) and in all (K,).

    extrema (3,): ratio min, ratio max, mismatch max.
    """

    loss: Tensor
    g_logp: Tensor
    g_entropy: Tensor
    group_sums: Tensor
    totals: Tensor
    extrema: Tensor


def run(
    head: Head, plan: Plan, ids: Tensor, backend: Backend, *, gradients: bool, static_shapes: bool = False
) -> tuple[RowStats, LossResult]:
    """Score a batch and, with `gradients`, leave the gradients of the loss in `head`."""
    scorer = Scorer(head, ids, plan.field("temperature"), plan.params, backend)
    active, rest, lengths = _everything(plan) if static_shapes else _partition(plan, gradients)
    if not gradients:
        scorer.score(active)
    elif not plan.whole_sequences:
        anchored = head.strategy == "anchored" and plan.config.entropy_coef == 0.0
        (scorer.anchored if anchored else scorer.fused)(active, plan.table)
    elif lengths is not None and max(lengths, default=0) <= head.sequence_rows:
        _staged(scorer, plan, active, lengths)
    else:
        scorer.score(active)
        coefficients = evaluate(plan, backend, scorer.stats.logp, scorer.stats.entropy)
        moved = (coefficients.g_logp, plan.field("weight_entropy"))
        scorer.gradient(*(torch.where(plan.active, g, 0.0) for g in moved), static_shapes=static_shapes)
    if rest is not None:
        scorer.score(rest)
    stats = scorer.stats
    if static_shapes:  # padding was computed too
        stats = RowStats(*(torch.where(plan.active | plan.scored, x, 0.0) for x in stats))
    return stats, finish(plan, backend, stats.logp, stats.entropy)


def _partition(plan: Plan, gradients: bool) -> tuple[Tensor | None, Tensor | None, list[int] | None]:
    """(active tokens, tokens that are scored alone, active tokens per sequence where it matters): one host read.

    None for active tokens: all of them, and no others.
    """
    first = plan.active if gradients else plan.active | plan.scored
    rest = plan.scored & ~first
    numbers = torch.stack([first.sum(), rest.sum()])
    if plan.whole_sequences:
        numbers = torch.cat([numbers, plan.sequence_sum(plan.active.to(plan.table.dtype)).long()])
    active, scored, *rows = numbers.tolist()
    lengths = rows if plan.whole_sequences else None
    if active == first.numel() and (lengths is None or plan.row_length is not None):
        return None, None, lengths
    order = torch.where(first, 0, torch.where(rest, 1, 2)).argsort(stable=True)
    return order[:active], order[active : active + scored], lengths


def _everything(plan: Plan) -> tuple[None, None, list[int] | None]:
    """`_partition` of static shapes: all tokens. The lengths of packed sequences are not known on the host."""
    return None, None, None if plan.row_length is None else [plan.row_length] * plan.lengths.numel()


def finish(plan: Plan, backend: Backend, logps: Tensor, entropy: Tensor) -> LossResult:
    """Loss, per-token gradients and metric sums from log-probabilities and entropies (N,)."""
    c: Coefficients = evaluate(plan, backend, logps, entropy)
    _, group_sums, totals, extrema = backend.reduce(
        plan.scored,
        c.log_ratio,
        logps,
        entropy,
        c.value,
        c.kl,
        c.g_logp,
        plan.table,
        plan.params,
        plan.cu_seqlens,
        plan.group_index,
        plan.num_groups,
    )
    return LossResult(totals[0].clone(), c.g_logp, plan.field("weight_entropy"), group_sums, totals, extrema)


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


def _staged(scorer: Scorer, plan: Plan, active: Tensor | None, lengths: list[int]) -> None:
    counts = None if active is None else plan.sequence_sum(plan.active.to(plan.table.dtype)).long()

    def coefficients(rows: Rows, stats: RowStats, sequences: slice) -> tuple[Tensor, Tensor]:
        if active is None or counts is None:
            part = plan.slice_sequences(sequences)
        else:
            part = plan.take_sequences(active[rows.start : rows.stop], counts[sequences])
        c = evaluate(part, scorer.backend, stats.logp, stats.entropy)
        return c.g_logp, part.field("weight_entropy")

    packed = sequence_chunks(active, lengths, scorer.head.num_tokens, scorer.head.sequence_rows)
    scorer.staged(((scorer.head.chunk_of(rows), sequences) for rows, sequences in packed), coefficients)

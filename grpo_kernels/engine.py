"""The chunk loop: a GEMM, a row kernel, two GEMMs; then the O(N) reduction. Three ways, chosen by the plan.

    fused      for a chunk: logits -> row kernel (statistics, objective, gradient) -> dhidden, dweight            6 NHV
    staged     for whole sequences: logits -> statistics -> coefficients (O(N) torch) -> gradient -> products     6 NHV
    recompute  statistics of all rows; coefficients; logits again for rows with a gradient -> products            8 NHV
Rows that cannot have a gradient get the first product alone, and none where nobody wants their log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .backends import Backend, RowStats
from .coefficients import Coefficients, evaluate
from .head import GivenLogits, LMHead, Rows, chunk
from .params import KernelParams
from .plan import Plan

Head = LMHead | GivenLogits
# (chunk, its statistics, its range of sequences) -> (d loss / d logp, d loss / d entropy) of its rows
CoefficientFn = Callable[[Rows, RowStats, slice], tuple[Tensor, Tensor]]


class Scorer:
    """Runs row kernels over chunks of one batch and keeps the statistics per token, 0 at tokens never visited."""

    def __init__(self, head: Head, ids: Tensor, temperature: Tensor, params: KernelParams, backend: Backend) -> None:
        self.head, self.ids, self.temperature, self.params, self.backend = head, ids, temperature, params, backend
        zero = torch.zeros_like(temperature)
        self.stats = RowStats(logp=zero, lse=torch.zeros_like(zero, dtype=torch.float64), entropy=zero.clone())

    def score(self, index: Tensor) -> None:
        """Statistics of these tokens, nothing else."""
        for rows in self._chunks(index):
            self._statistics(rows)

    def fused(self, index: Tensor, table: Tensor) -> None:
        """Statistics and gradients of tokens whose gradient depends on themselves alone."""
        for rows in self._chunks(index):
            logits = self.head.logits(rows)
            gradient = self.head.gradient_buffer(logits)
            ids, residual = rows.take(self.ids), self.head.residual(rows)
            stats = self.backend.fused(logits, gradient, ids, rows.take(table, 1), self.params, residual)
            self._keep(rows, stats)
            self.head.accumulate(rows, gradient, ids, residual)

    def staged(self, chunks: Iterator[tuple[Rows, slice]], coefficients: CoefficientFn) -> None:
        """Statistics of a chunk, then its coefficients, then its gradients from the same logits."""
        for rows, sequences in chunks:
            logits, stats = self._statistics(rows)
            self._gradient(rows, logits, stats, *coefficients(rows, stats, sequences))

    def gradient(self, g_logp: Tensor, g_entropy: Tensor) -> None:
        """Gradients of every token with a non-zero coefficient, from its logits computed again."""
        for rows in self._chunks(((g_logp != 0) | (g_entropy != 0)).nonzero().squeeze(1)):
            stats = RowStats(*(rows.take(x) for x in self.stats))
            self._gradient(rows, self.head.logits(rows), stats, rows.take(g_logp), rows.take(g_entropy))

    def _chunks(self, index: Tensor) -> Iterator[Rows]:
        return chunk(index, self.head.num_tokens, self.head.chunk_rows)

    def _statistics(self, rows: Rows) -> tuple[Tensor, RowStats]:
        logits = self.head.logits(rows)
        stats = self.backend.stats(logits, rows.take(self.ids), rows.take(self.temperature), self.params)
        self._keep(rows, stats)
        return logits, stats

    def _gradient(self, rows: Rows, logits: Tensor, stats: RowStats, g_logp: Tensor, g_entropy: Tensor) -> None:
        gradient, residual = self.head.gradient_buffer(logits), self.head.residual(rows)
        ids, temperature = rows.take(self.ids), rows.take(self.temperature)
        self.backend.gradient(
            logits, gradient, ids, temperature, stats.lse, stats.entropy, g_logp, g_entropy, self.params, residual
        )
        self.head.accumulate(rows, gradient, ids, residual)

    def _keep(self, rows: Rows, stats: RowStats) -> None:
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


def run(head: Head, plan: Plan, ids: Tensor, backend: Backend, *, gradients: bool) -> tuple[RowStats, LossResult]:
    """Score a batch and, with `gradients`, leave the gradients of the loss in `head`."""
    scorer = Scorer(head, ids, plan.field("temperature"), plan.params, backend)
    if not gradients:
        scorer.score((plan.active | plan.scored).nonzero().squeeze(1))
        return scorer.stats, finish(plan, backend, scorer.stats.logp, scorer.stats.entropy)
    active = plan.active.nonzero().squeeze(1)
    scorer.score((plan.scored & ~plan.active).nonzero().squeeze(1))
    if not plan.whole_sequences:
        scorer.fused(active, plan.table)
    else:
        counts = plan.sequence_sum(plan.active.to(plan.table.dtype)).long()
        if counts.numel() == 0 or int(counts.max()) <= head.chunk_rows:
            _staged(scorer, plan, active, counts, head.chunk_rows)
        else:
            scorer.score(active)
            coefficients = evaluate(plan, backend, scorer.stats.logp, scorer.stats.entropy)
            keep = plan.active
            scorer.gradient(
                torch.where(keep, coefficients.g_logp, 0.0), torch.where(keep, plan.field("weight_entropy"), 0.0)
            )
    return scorer.stats, finish(plan, backend, scorer.stats.logp, scorer.stats.entropy)


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


def sequence_chunks(index: Tensor, counts: Tensor, num_tokens: int, size: int) -> Iterator[tuple[Rows, slice]]:
    """Pack whole sequences into chunks: (their tokens, their range of sequences); `counts` (S,) tokens per sequence."""
    first = start = stop = 0
    lengths: list[int] = counts.tolist()
    everything = index.numel() == num_tokens
    for i in range(len(lengths) + 1):
        if i == len(lengths) or stop - start + lengths[i] > size:
            if stop > start:
                yield Rows(start, stop) if everything else Rows(start, stop, index[start:stop]), slice(first, i)
            first, start = i, stop
        if i < len(lengths):
            stop += lengths[i]


def _staged(scorer: Scorer, plan: Plan, active: Tensor, counts: Tensor, size: int) -> None:
    def coefficients(rows: Rows, stats: RowStats, sequences: slice) -> tuple[Tensor, Tensor]:
        part = plan.take_sequences(active[rows.start : rows.stop], counts[sequences])
        c = evaluate(part, scorer.backend, stats.logp, stats.entropy)
        return c.g_logp, part.field("weight_entropy")

    scorer.staged(sequence_chunks(active, counts, scorer.head.num_tokens, size), coefficients)

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
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..contract import Backend, HeadChunk, LogitChunk, Rows, RowStats, Sums, TokenMask, TokenValues
from ..names import FIELD, MASK_SUMS, KernelParams
from .kept import DenseMask, KeptLogits, split
from .lm_head import GivenLogits, LMHead
from .memory import visited
from .plan import Plan, keep_entropies
from .sparse import SparsePairs
from .teacher import KeptTeacher, TeacherHead, TopKHead, write_over

Head = LMHead | GivenLogits | KeptLogits
# (chunk, its range of sequences) -> (d loss / d logp, d loss / d entropy) (N,), of which the chunk's are read
CoefficientFn = Callable[[Rows, slice], tuple[Tensor, Tensor]]


class Scorer:
    """Runs row kernels over chunks of one batch; they write their results to `values`."""

    head: Head

    def __init__(
        self, head: Head, ids: Tensor, temperature: Tensor, params: KernelParams, backend: Backend, values: TokenValues
    ) -> None:
        self.given = ids, temperature, params, backend, values  # what another scorer gets besides its head
        self.head, self.temperature, self.params, self.backend = head, temperature, params, backend
        self.vocab_slice = head.vocab_slice
        self.sampled_ids = ids  # of the whole vocabulary
        self.ids = head.columns(ids)
        self.values = values
        self.mask: DenseMask | None = None
        self.teacher: TeacherHead | TopKHead | None = None
        self.gathered: KeptScorer | None = None

    def add_mask(
        self, mask: TokenMask, scored: Tensor, active: Tensor | None = None, offsets: Tensor | None = None
    ) -> Visit | None:
        """Restrict the tokens `scored` (N,) bool to their kept ids. Those with few get a scorer of their own: they are
        scored by `score_gathered`, and part of `gradient`. Returns the others, None for all; with `offsets` (S + 1,)
        their numbers per sequence. `active` (N,) bool: see `Visit`; None: all that are scored."""
        head, dtype = self.head, self.values.columns.dtype
        if not isinstance(head, LMHead):  # given logits are there already: nothing is saved by gathers
            self.mask = DenseMask(mask, scored & (mask.counts > 0), self.ids, dtype, head.vocab_slice)
            return None
        # Gathered rows have the ids of such a teacher alone, and those of the mask are the same.
        holds = self.teacher.holds(self.sampled_ids) if isinstance(self.teacher, TopKHead) else None
        active = scored if active is None else active
        found = split(mask, scored, active, head.vocab_size, gathers=holds, offsets=offsets)
        if found.is_dense is not None:
            self.mask = DenseMask(mask, found.is_dense, self.ids, dtype, head.vocab_slice)
        if found.matrices:
            logits = KeptLogits(mask, found.matrices, self.sampled_ids, head, dtype)
            self.gathered = KeptScorer(logits, *self.given)
            if isinstance(self.teacher, TopKHead):
                self.gathered.teacher = KeptTeacher(self.teacher, logits, self.temperature)
        return Visit.of(found.order, *found.counts, found.lengths)

    def score(self, index: Tensor | None, *, entropy: bool = True) -> None:
        """logp, entropy and lse of these tokens (None: of all), nothing else."""
        computes_logits = self.head.strategy == "rows" or self.mask is not None or self.teacher is not None
        for rows in self.head.chunks(index):
            if computes_logits:
                self._statistics(rows)
            else:
                self._put(rows, self.backend.linear_logp(self._head_chunk(rows), entropy=entropy))

    def score_gathered(self) -> None:
        if self.gathered is not None:
            self.gathered.score(None)

    def single_pass(self, index: Tensor | None, table: Tensor) -> None:
        """Statistics, objective and gradient of tokens whose gradient depends on themselves alone."""
        for rows in self.head.chunks(index):
            read = self._logits(rows)
            self.backend.single_pass(read, table, self.head.row_gradients(rows, read.logits))
            self._accumulate(rows)

    def anchored(self, index: Tensor | None, table: Tensor) -> None:
        """`single_pass` without logits, for tokens whose gradient does not go through their entropy."""
        head = cast(LMHead, self.head)
        for rows in head.chunks(index, exponentials=True):
            exponentials = head.scratch.gradients(rows.count)
            stats, scale = self.backend.anchored(self._head_chunk(rows), rows.take(table, 1), exponentials)
            self._put(rows, stats)
            self.backend.token_objective(rows, table, self.values, self.params)
            head.accumulate_scaled(rows, exponentials, scale)

    def staged(self, chunks: Iterable[tuple[Rows, slice]], coefficients: CoefficientFn) -> None:
        """Statistics of a chunk, then its coefficients, then its gradients from the same logits."""
        for rows, sequences in chunks:
            read = self._statistics(rows)
            self._gradient(read, *coefficients(rows, sequences))
            self._accumulate(rows)
        self._finish()

    def gradient(self, g_logp: Tensor, g_entropy: Tensor, *, static_shapes: bool = False) -> None:
        """Gradients of every token with a non-zero coefficient, from its logits computed again."""
        index = None
        if not static_shapes:
            has_gradient = (g_logp != 0) | (g_entropy != 0)
            if self.teacher is not None:
                has_gradient |= self.teacher.weight != 0
            if self.gathered is not None:
                has_gradient.index_fill_(0, self.gathered.head.index, False)
            index = has_gradient.nonzero().squeeze(1)
        self._gradient_of(index, g_logp, g_entropy)
        if self.gathered is not None:
            self.gathered.gradient(g_logp, g_entropy, static_shapes=True)

    def _gradient_of(self, index: Tensor | None, g_logp: Tensor, g_entropy: Tensor) -> None:
        for rows in self.head.chunks(index):
            self._gradient(self._logits(rows, again=True), g_logp, g_entropy)
            self._accumulate(rows)
        self._finish()

    def _accumulate(self, rows: Rows) -> None:
        """After the gradients of a chunk."""
        self.head.accumulate(rows, self.ids)

    def _finish(self) -> None:
        """After all chunks with a gradient."""

    def _head_chunk(self, rows: Rows) -> HeadChunk:
        head, ids, temperature = cast(LMHead, self.head), rows.take(self.ids), rows.take(self.temperature)
        return HeadChunk(head.hidden_rows(rows), head.weight, head.bias, ids, temperature, self.params)

    def _logits(self, rows: Rows, *, again: bool = False) -> LogitChunk:
        logits = self.head.logits(rows)
        teacher = self.teacher.beside(self.head, rows) if isinstance(self.teacher, TeacherHead) else None
        given = self.temperature, self.values, self.params, self.head.folded_bias
        chunk = LogitChunk(logits, rows, self.ids, *given, teacher)
        if self.mask is not None:
            if not again:
                self.backend.statistics(chunk._replace(values=self.mask.full))
            self.mask.apply(chunk)
        return chunk

    def _statistics(self, rows: Rows) -> LogitChunk:
        read = self._logits(rows)
        self.backend.statistics(read)
        if self.vocab_slice is not None:
            self.vocab_slice.combine(rows, self.sampled_ids, self.values)
        if isinstance(self.teacher, TopKHead):
            self.teacher.put_divergence(read, self.backend)
        return read

    def _gradient(self, read: LogitChunk, g_logp: Tensor, g_entropy: Tensor) -> None:
        head, rows, weight = self.head, read.rows, None if self.teacher is None else self.teacher.weight
        written = head.row_gradients(rows, read.logits)
        if head.grad_dtype == torch.float16 and rows.count:
            steepness = self.params.logit_scale / rows.take(self.temperature)
            largest = torch.maximum(rows.take(g_logp).abs(), rows.take(g_entropy).abs())
            if weight is not None:
                largest = torch.maximum(largest, rows.take(weight).abs())
            scale = head.scale_gradients((largest * steepness).amax())
            g_logp, g_entropy = g_logp * scale, g_entropy * scale
            weight = None if weight is None else weight * scale
        if weight is not None and read.teacher is not None:
            read = read._replace(teacher=read.teacher._replace(weight=weight))
        entries = None
        if weight is not None and isinstance(self.teacher, TopKHead):
            read, g_logp, g_entropy, entries = self.teacher.entries(read, (g_logp, g_entropy, weight))
        self.backend.logits_gradient(read, g_logp, g_entropy, written)
        if entries is not None:
            write_over(entries, written)

    def _put(self, rows: Rows, stats: RowStats) -> None:
        rows.put(self.values.logp, stats.logp)
        rows.put(self.values.entropy, stats.entropy)
        rows.put(self.values.lse, stats.lse)


class KeptScorer(Scorer):
    """The tokens that keep few ids, by products over those ids alone.

    Their gradients come after those of all other tokens, to whose dweight they are added.
    """

    head: KeptLogits

    def _finish(self) -> None:
        self.head.finish()


class SparseScorer(Scorer):
    """Gradients of the logits as pairs of an id and a number (sparse.py)."""

    head: LMHead

    def __init__(self, theta: float, head: LMHead, *given: Any) -> None:
        super().__init__(head, *given)
        self.pairs = SparsePairs(head, theta, self.values.columns.dtype)

    def _gradient(self, read: LogitChunk, g_logp: Tensor, g_entropy: Tensor) -> None:
        self.pairs.add(read, (g_logp, g_entropy), None if self.mask is None else self.mask.masked)

    def _accumulate(self, rows: Rows) -> None:
        """The pairs wait."""

    def _finish(self) -> None:
        if self.pairs.coefficients is not None:
            exact = Scorer(self.head, *self.given)
            exact.mask = self.mask
            exact._gradient_of(self.pairs.dense(), *self.pairs.coefficients)
        self.pairs.finish()


def new_scorer(theta: float | None, head: Head, *given: Any) -> Scorer:
    """theta: config.sparse_backward, which GivenLogits refuse."""
    return Scorer(head, *given) if theta is None else SparseScorer(theta, cast(LMHead, head), *given)


def run(
    head: LMHead | GivenLogits,
    plan: Plan,
    backend: Backend,
    *,
    gradients: bool,
    sampling_mask: TokenMask | None = None,
    teacher: TeacherHead | TopKHead | None = None,
) -> tuple[TokenValues, Sums]:
    """Score a batch and, with `gradients`, leave the gradients of the loss in `head`."""
    tokens, table, config, rules = plan.tokens, plan.tokens.table, plan.config, plan.rules
    given = tokens.ids, table[FIELD["temperature"]], plan.params, backend, tokens.values
    scorer = new_scorer(config.sparse_backward, head, *given)
    if teacher is not None:
        weight = config.distill_coef * table[FIELD["weight_direct"]]
        teacher.weight, scorer.teacher = torch.where(tokens.scored, weight, 0.0), teacher
    visit = None
    if sampling_mask is not None:
        offsets = tokens.offsets if rules.whole_sequences else None
        visit = scorer.add_mask(sampling_mask, tokens.scored, tokens.active, offsets)
        scorer.score_gathered()  # whose sequences may hold other tokens
    visit = _visit(plan) if visit is None else visit
    lengths = visit.lengths
    fits = lengths is not None and max(lengths, default=0) <= head.sequence_rows
    # What comes between statistics and gradient: the scale of float16, which follows from the coefficients; the other
    # ranks' statistics; entries that are written over. Pairs read the logits a second time.
    is_staged = head.grad_dtype == torch.float16 or scorer.vocab_slice is not None or isinstance(teacher, TopKHead)
    is_staged = is_staged or config.sparse_backward is not None
    reads_logits = scorer.mask is not None or teacher is not None
    one_pass = gradients and (fits or not rules.whole_sequences) and not config.entropy_kept_only
    if not one_pass:
        scorer.score(visit.scored)
    elif lengths is not None:
        scorer.staged(whole_sequences(head, visit.active, lengths), objective_of(plan, backend))
    elif is_staged:
        scorer.staged(((rows, slice(0)) for rows in head.chunks(visit.active)), objective_of(plan, backend))
    elif head.strategy == "anchored" and rules.entropy_coef == 0.0 and not reads_logits:
        scorer.anchored(visit.active, table)
    else:
        scorer.single_pass(visit.active, table)
    if one_pass and visit.rest is not None:
        scorer.score(visit.rest)
    if not one_pass or visit.rest is not None or scorer.gathered is not None:
        evaluate(plan, backend)
    bonus = keep_entropies(tokens) if config.entropy_kept_only else None
    if gradients and not one_pass:
        scorer.gradient(*_coefficients(plan), static_shapes=plan.is_static)
    elif gradients and scorer.gathered is not None:
        scorer.gathered.gradient(*_coefficients(plan), static_shapes=True)

    if teacher is not None:
        added = config.distill_coef * tokens.values.divergence
        tokens.values.value.add_(torch.where(tokens.scored, added, 0.0))
    sums = backend.sums(tokens, plan.params, plan.group_index, plan.num_groups)
    if teacher is not None:
        sums.column("zero_gradient").zero_()  # every scored token has a gradient, that of the divergence
    others = []
    if sampling_mask is not None:
        others.append(_mask_sums(scorer))
    if isinstance(teacher, TopKHead):
        others.append(torch.where(tokens.scored, teacher.mass, 0.0).sum()[None])
    if isinstance(scorer, SparseScorer):
        others.append(scorer.pairs.sums())
    if bonus is not None:
        others.append(bonus)
    if others:
        sums = replace(sums, numbers=torch.cat([sums.numbers, *(x.to(sums.numbers.dtype) for x in others)]))
    return tokens.values, sums


def objective_of(plan: Plan, backend: Backend) -> CoefficientFn:
    """The objective of tokens, or of the sequences that they are in, whose logp and entropy are known."""
    tokens, weight_entropy = plan.tokens, plan.tokens.table[FIELD["weight_entropy"]]

    def coefficients(rows: Rows, sequences: slice) -> tuple[Tensor, Tensor]:
        if plan.rules.whole_sequences:
            backend.sequence_objective(sequences, plan.row_length, tokens, plan.params)
        else:
            backend.token_objective(rows, tokens.table, tokens.values, plan.params)
        return tokens.values.g_logp, weight_entropy

    return coefficients


def evaluate(plan: Plan, backend: Backend) -> None:
    """The objective of all tokens of the plan."""
    objective_of(plan, backend)(Rows(0, plan.tokens.scored.numel()), slice(0, plan.num_sequences))


class Visit(NamedTuple):
    """Indices of tokens; None: all of them, or in `rest` none."""

    active: Tensor | None  # may have a gradient
    rest: Tensor | None  # the others that are scored
    scored: Tensor | None  # both
    lengths: list[int] | None  # active tokens per sequence, with whole sequences, if known on the host

    @classmethod
    def of(cls, order: Tensor, active: int, rest: int, lengths: list[int] | None) -> Visit:
        """order (N,): so many active tokens, so many others, anything."""
        first, both = (None if count == order.numel() else order[:count] for count in (active, active + rest))
        return cls(first, order[active : active + rest] if rest else None, both, lengths)


def _visit(plan: Plan) -> Visit:
    """All tokens with static shapes; else by one read of the counts on the host."""
    order, counts, lengths = plan.tokens.order, plan.tokens.counts, None
    if order is None or counts is None:
        if plan.rules.whole_sequences and plan.row_length is not None:  # of packed ones the host does not know lengths
            lengths = [plan.row_length] * plan.num_sequences
        return Visit(None, None, None, lengths)
    active, rest, *per_sequence = counts.tolist()
    return Visit.of(order, active, rest, per_sequence if plan.rules.whole_sequences else None)


def _coefficients(plan: Plan) -> tuple[Tensor, Tensor]:
    """(N,) d loss / d logp and d loss / d entropy, 0 at tokens without a gradient."""
    tokens = plan.tokens
    both = tokens.values.g_logp, tokens.table[FIELD["weight_entropy"]]
    g_logp, g_entropy = (torch.where(tokens.active, g, 0.0) for g in both)
    return g_logp, g_entropy


def _mask_sums(scorer: Scorer) -> Tensor:
    """MASK_SUMS."""
    sums = scorer.values.columns.new_zeros(len(MASK_SUMS))
    if scorer.gathered is not None:
        sums[0] = scorer.gathered.head.num_tokens
        torch.sum(scorer.gathered.head.added, 0, dtype=sums.dtype, out=sums[1])
    if scorer.mask is not None:
        of_dense = scorer.mask.sums(scorer.values)
        sums[0] += of_dense[2]
        sums[1:] += of_dense
    return sums


def whole_sequences(
    head: LMHead | GivenLogits, index: Tensor | None, lengths: list[int]
) -> Iterator[tuple[Rows, slice]]:
    """Pack the tokens `index`, so many per sequence, into chunks of whole sequences: (chunk, range of sequences)."""
    rows, size = visited(index, head.num_tokens), min(head.sequence_rows, max(head.rows, *lengths, 1))
    parts, first, start, stop = [], 0, 0, 0
    if 0 < rows.count <= size:
        parts, lengths = [(rows, slice(0, len(lengths)))], []
    for i in range(len(lengths) + 1):
        if i == len(lengths) or stop - start + lengths[i] > size:
            if stop > start:
                part = Rows(start, stop, None if rows.index is None else rows.index[start:stop])
                parts.append((part, slice(first, i)))
            first, start = i, stop
        if i < len(lengths):
            stop += lengths[i]
    return zip(head.chunks_of([part for part, _ in parts]), (sequences for _, sequences in parts), strict=True)

"""The teacher of a call: a second head whose logits are computed next to those of each chunk, or K ids per token.

Where a chunk has a teacher's logits, the row kernel computes the divergence and adds its gradient to that of the
objective. This costs the teacher's forward product, 2 NH'V, and every scored token has a gradient. On a slice of the
vocabulary the divergence is computed again, once the log-sum-exps of both sides over all of it are known.

Of several teachers each has tokens of its own: a chunk holds the tokens of one teacher, or those of none.

With K ids (k_ids.py) the divergence is over these. With mode "tail" the row's statistics are taken a second time,
without the K ids: the mass of the policy's other ids is then a sum of its own, not a difference, and the row kernel
computes their probabilities relative to it, so that a small mass is not rounded to 0.

For the K ids S of a token, l = log p - log q, m = (1 - b) p + b q; P and Q are the masses of S:
    tail         one more outcome of mass 1 - P and 1 - Q: D as over the vocabulary, dD/dz_j = p_j slope of j's outcome
    renormalize  D between p / P and q / Q; its gradient is 0 outside of S

A TopKTeacher comes with S and q. A Teacher with `top_k` has the policy's likeliest ids as S: its logits of them are
products with gathered rows of its weight, 2 NKH'. The normaliser that "tail" needs takes a pass over the teacher's
whole vocabulary, before the policy's: 2 NH'V, and never two chunks of logits in memory.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks.arguments import name_first, products_dtype
from ..checks.plain import check_not_released
from ..config import as_constant
from ..kernels.operations import (
    Backend,
    GatheredIds,
    LogitChunk,
    Rows,
    Statistics,
    TeacherLogits,
    TeacherTransform,
)
from ..kernels.torch.teacher import slopes, sums
from ..loss_config import LossConfig
from ..teacher import AnyTeacher, SeveralTeachers, Teacher, TopKTeacher, has_full_vocab, heads_of
from .k_ids import TopKGradient, TopKIds, exact_z
from .lm_head import LMHead
from .mask_paths import GatheredLogits, GatheredMatrix
from .shared import refuse_capture
from .vocab_parallel import VocabSlice

# The smallest mass that the teacher's other ids can have: float32 log-probabilities cannot tell less from 0.
MIN_TAIL_MASS = 2.0**-24


def _lm_head(
    teacher: Teacher, config: LossConfig, backend: Backend, compute_dtype: torch.dtype | None, **options: Any
) -> LMHead:
    """Returns the teacher's head. compute_dtype: of the policy's products; a 16-bit one is that of autocast, which is
    off here."""
    inputs = teacher.hidden, teacher.weight, teacher.bias
    check_not_released("Teacher.weight", teacher.weight)  # it may have been released since the forward
    if compute_dtype is None or compute_dtype.itemsize > 2:
        compute_dtype = products_dtype(*inputs)
    logits_dtype = config.logits_dtype
    if logits_dtype is not None:  # of the policy: float32, or its own type, which need not be the teacher's
        logits_dtype = logits_dtype if logits_dtype.itemsize > 2 else None
    return LMHead(inputs, backend, compute_dtype=compute_dtype, logits_dtype=logits_dtype, **options)


def transform_of(teacher: Teacher | None, config: LossConfig) -> TeacherTransform:
    """Returns the scalars of the divergence to a Teacher; None: to a teacher that is known by its probabilities."""
    scale, softcap = (1.0, None) if teacher is None else (teacher.logit_scale, teacher.logit_softcap)
    beta = 0.5 if config.divergence_beta is None else config.divergence_beta
    return TeacherTransform(config.divergence or "reverse_kl", beta, float(scale), float(softcap or 0.0))


class TeacherHeads:
    """The lm_heads of the teachers of a call, and which tokens each of them has. options: of an LMHead."""

    def __init__(
        self, teacher: Teacher | SeveralTeachers, config: LossConfig, backend: Backend,
        compute_dtype: torch.dtype | None, **options: Any,
    ) -> None:  # fmt: skip
        teachers = heads_of(teacher)
        self.heads = [_lm_head(each, config, backend, compute_dtype, **options) for each in teachers]
        self.transforms = [transform_of(each, config) for each in teachers]
        # (N,) int64 each: whose tokens, and which rows of its hidden states; None: one teacher has all, in their order.
        self.teacher_of: Tensor | None = None
        self.row_of: Tensor | None = None
        if isinstance(teacher, SeveralTeachers):
            refuse_capture(teacher.teacher_of.device, "teacher_of", "the number of each teacher's tokens")
            self.teacher_of, last = teacher.teacher_of.reshape(-1), len(teachers) - 1
            wrong = (teacher.teacher_of < -1) | (teacher.teacher_of > last)
            name_first("teacher_of", teacher.teacher_of, wrong, f"-1 (none) to {last}, the last index of teacher")
            self.row_of = torch.zeros_like(self.teacher_of)
            counts = dict.fromkeys(range(last + 1), 0)
            for number, tokens in self.split(None):
                assert tokens is not None
                counts[number] = len(tokens)
                self.row_of[tokens] = torch.arange(len(tokens), device=tokens.device)
            for i, head in enumerate(self.heads):
                if head.num_tokens != counts[i]:
                    raise ValueError(
                        f"teacher[{i}].hidden has {head.num_tokens} tokens; expected {counts[i]}, those with "
                        f"teacher_of {i}"
                    )

    def split(self, index: Tensor | None) -> list[tuple[int, Tensor | None]]:
        """Returns the tokens `index` (None: all) by teacher: (its number, -1 for none; the tokens)."""
        if self.teacher_of is None:
            return [(0, index)]
        teacher_of = self.teacher_of if index is None else self.teacher_of[index]
        numbers = range(-1, len(self.heads))
        order = teacher_of.argsort(stable=True)
        counts = (teacher_of[None] == torch.tensor(numbers, device=order.device)[:, None]).sum(1).tolist()
        parts = (order if index is None else index[order]).split(counts)
        return [(number, tokens) for number, tokens in zip(numbers, parts, strict=True) if len(tokens)]

    def rows(self, rows: Rows) -> Rows:
        """Returns the rows of their teacher's hidden states that these tokens, all of one teacher, have."""
        return rows if self.row_of is None else Rows(0, rows.count, rows.take(self.row_of))


class TeacherHead:
    """The logits of teachers, and what row kernels store of each token. `weight` (N,): d loss / d divergence."""

    heads: TeacherHeads | None = None

    def __init__(
        self, teacher: Teacher | SeveralTeachers, config: LossConfig, backend: Backend,
        compute_dtype: torch.dtype | None, count: int, dtype: torch.dtype, vocab_slice: VocabSlice | None,
    ) -> None:  # fmt: skip
        self.heads = TeacherHeads(teacher, config, backend, compute_dtype)
        self.vocab_slice, self.logits_dtype = vocab_slice, self.heads.heads[0].logits_dtype
        self.policy_kl = torch.zeros(count, dtype=dtype, device=self.heads.heads[0].hidden.device)
        self.lse = self.policy_kl.new_zeros(count, dtype=torch.float64)
        self.weight, self.divergence = torch.zeros_like(self.policy_kl), torch.zeros_like(self.policy_kl)

    def beside(self, head: Any, rows: Rows, number: int) -> TeacherLogits:
        """Returns the logits of teacher `number` for the rows whose logits `head`, an LMHead, has just computed."""
        assert self.heads is not None
        teacher_head, out = self.heads.heads[number], head.scratch.teacher_logits(rows.count)
        per_token = self.weight, self.divergence, self.policy_kl, self.lse
        logits = teacher_head.logits(self.heads.rows(rows), out)
        return TeacherLogits(logits, teacher_head.folded_bias, self.heads.transforms[number], *per_token)

    def after_statistics(self, chunk: LogitChunk, backend: Backend, number: int = 0) -> None:
        """Replaces the divergence of a slice of the vocabulary by that of all ranks; does nothing without slices."""
        if self.vocab_slice is not None:
            local_lse = chunk.rows.take(self.lse).contiguous()
            chunk.rows.put(self.lse, self.vocab_slice.gather(local_lse).logsumexp(0))
            totals = backend.divergence(chunk)
            self.vocab_slice.add_up(totals)
            for destination, x in zip((self.divergence, self.policy_kl), totals, strict=True):
                chunk.rows.put(destination, x)


# --- K ids -----------------------------------------------------------------------------------------------------------


class TopKHead(TopKIds):
    """A divergence over K ids. weight (N,): d loss / d divergence; log_q (N, K): the teacher's, -inf where not used."""

    log_q: Tensor
    mass: Tensor | None  # (N,) of the teacher; None where it is not known
    heads: TeacherHeads | None = None

    def __init__(
        self, ids: Tensor | int, mode: str, transform: TeacherTransform, stats: Statistics, *vocab: Any
    ) -> None:
        super().__init__(ids, stats, *vocab)
        self.mode, self.transform, self.tail = mode, transform, stats if mode == "tail" else None
        self.divergence = torch.zeros_like(stats.logp)

    def after_statistics(self, chunk: LogitChunk, backend: Backend, number: int = 0) -> None:
        """Computes the divergence of a chunk, whose statistics are known. The logits are the same afterwards."""
        rows = chunk.rows
        if self.tail is not None:
            positions, _ = self._positions(rows.take(self.ids))
            top_logits = chunk.logits[positions]
            chunk.logits[positions] = -torch.inf  # scatter_ would copy all of the logits, whose rows have gaps
            backend.statistics(chunk._replace(stats=self.tail, teacher=None))
            chunk.logits[positions] = top_logits
            if self.vocab_slice is not None:
                self.vocab_slice.combine(rows, torch.zeros_like(self.ids[:, 0]), self.tail)
        log_p, _ = self._log_p(chunk, rows.take(self.ids))
        divergence, _ = sums(*self._outcomes(chunk, log_p), self.transform)
        rows.put(self.divergence, divergence)

    def _outcomes(self, chunk: LogitChunk, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the log-probabilities of the policy and of the teacher, (C, K or K + 1) each, between which the
        divergence is."""
        rows, log_q = chunk.rows, chunk.rows.take(self.log_q)
        log_p = log_p.masked_fill(~rows.take(self.used), -torch.inf)
        if self.mode == "renormalize":
            return log_p - log_p.logsumexp(1, keepdim=True), log_q - log_q.logsumexp(1, keepdim=True)
        if self.tail is None or self.mass is None:
            return log_p, log_q
        log_tail = rows.take(self.tail.lse) - rows.take(chunk.stats.lse)
        log_teacher_tail = (1 - rows.take(self.mass)).clamp(min=MIN_TAIL_MASS).log()
        has_tail = log_tail > -torch.inf  # else every id is among the K
        log_tails = torch.stack([log_tail, torch.where(has_tail, log_teacher_tail, -torch.inf)], 1)
        return torch.cat([log_p, log_tails[:, :1]], 1), torch.cat([log_q, log_tails[:, 1:]], 1)

    def _sum_gradient(self, chunk: LogitChunk, log_p: Tensor) -> TopKGradient:
        """Returns the gradient of the divergence; an entry that a token does not use repeats that of its first id."""
        outcomes = self._outcomes(chunk, log_p)
        p = outcomes[0].exp()
        dlogp_term = slopes(*outcomes, 0.0, self.transform)
        mean = dlogp_term.sum(1)
        d_top_k = dlogp_term - p * mean[:, None]
        d_other, d_tail = torch.zeros_like(mean) if self.mode == "renormalize" else -mean, torch.zeros_like(mean)
        if self.tail is not None:
            d_top_k, d_tail = d_top_k[:, :-1], dlogp_term[:, -1]
        return TopKGradient(torch.where(chunk.rows.take(self.used), d_top_k, d_top_k[:, :1]), d_other, d_tail)


class GivenTopK(TopKHead):
    """The ids of a TopKTeacher."""

    def __init__(self, teacher: TopKTeacher, *options: Any) -> None:
        k = teacher.ids.shape[-1]
        ids, logps = teacher.ids.reshape(-1, k).long(), teacher.logps.reshape(-1, k).double()
        order = torch.where(ids >= 0, ids, torch.iinfo(torch.int64).max).argsort(1)  # as a sampling mask has them
        ids, logps = ids.gather(1, order), logps.gather(1, order)
        used = ids >= 0
        # Places that a token does not use repeat its first id; 0 for a token without any, which is padding.
        super().__init__(torch.where(used, ids, ids[:, :1]).clamp_(min=0), teacher.mode, *options)
        self.used, self.log_q = used, torch.where(used, logps, -torch.inf)
        self.mass = self.log_q.exp().sum(1)

    def holds(self, sampled: Tensor) -> Tensor:
        """Returns (N,) bool: the sampled id (N,) is among the K, or there is none."""
        return ((self.ids == sampled[:, None]) & self.used).any(1) | (sampled < 0)


class PolicyTopK(TopKHead):
    """The policy's likeliest ids, and the teachers' logits of them.

    stats: of the teachers; a pass over its whole vocabulary writes them before the first chunk, unless the mode is
        "renormalize".
    """

    def __init__(
        self, teacher: Teacher | SeveralTeachers, config: LossConfig, backend: Backend,
        compute_dtype: torch.dtype | None, *options: Any,
    ) -> None:  # fmt: skip
        first = heads_of(teacher)[0]
        assert first.top_k is not None
        super().__init__(first.top_k, first.mode, *options)
        head_options = dict(chunk_rows=config.chunk_rows, vocab_slice=self.vocab_slice)
        self.heads = TeacherHeads(teacher, config, backend, compute_dtype, **head_options)
        self.stats = Statistics.zeros(len(self.ids), self.ids.device, self.divergence.dtype)
        self.log_q = self.stats.lse.new_zeros(self.ids.shape)
        self.mass = None if self.mode == "renormalize" else torch.zeros_like(self.stats.lse)

    def after_statistics(self, chunk: LogitChunk, backend: Backend, number: int = 0) -> None:
        """Finds the likeliest ids of a chunk, computes the log-probabilities of them by teacher `number`, and the
        divergence."""
        assert self.heads is not None
        rows, head, ids = chunk.rows, self.heads.heads[number], self._likeliest(chunk)
        rows.put(self.ids, ids)
        local_ids = pad(self._local_ids(ids), (0, -ids.shape[1] % 4), value=-1).to(torch.int32)
        gathered = GatheredIds(Rows(0, rows.count, self.heads.rows(rows).tokens(ids.device)), local_ids)
        u = torch.empty(local_ids.shape, dtype=torch.promote_types(head.weight.dtype, torch.float32), device=ids.device)
        backend.gathered_logits(head.hidden_matrix, head.weight, head.folded_bias, gathered, u)
        u = u[:, : ids.shape[1]]
        if self.mass is not None:
            u = u.to(head.logits_dtype)  # as those under the normaliser were rounded
        z, _ = exact_z(u, rows.take(chunk.temperature), self.heads.transforms[number])
        log_q = self._on_all_ranks(z, ids)
        if self.mass is not None:
            log_q = log_q - rows.take(self.stats.lse)[:, None]
            rows.put(self.mass, log_q.exp().sum(1))
        rows.put(self.log_q, log_q)
        super().after_statistics(chunk, backend)


class GatheredTeacher(TeacherHead):
    """The log-probabilities of a TopKTeacher whose ids are the tokens' sampling mask, as logits next to the kept
    logits."""

    def __init__(self, top_k: GivenTopK, head: GatheredLogits, temperature: Tensor) -> None:
        self.transform, self.weight, self.divergence = top_k.transform, top_k.weight, top_k.divergence
        self.policy_kl, self.lse = torch.zeros_like(top_k.weight), torch.zeros_like(top_k.log_q[:, 0])
        self.vocab_slice, log_q = top_k.vocab_slice, top_k.log_q
        if self.vocab_slice is not None:  # the ids of this rank, and none behind them
            is_local = top_k.used & (self.vocab_slice.local_ids(top_k.ids) >= 0)
            log_q = torch.where(is_local, log_q, -torch.inf).gather(1, (~is_local).byte().argsort(dim=1, stable=True))
        # A row kernel divides by the temperature again. The ids of a row stand in the order of `log_q`.
        log_q = log_q * temperature.double()[:, None]
        for matrix in head.matrices:
            width = min(log_q.shape[1], matrix.logits.shape[1])
            matrix.teacher_logits = torch.full_like(matrix.logits, -torch.inf)
            matrix.teacher_logits[:, :width] = matrix.take(log_q)[:, :width]

    def beside(self, head: Any, rows: Rows, number: int) -> TeacherLogits:
        assert isinstance(rows, GatheredMatrix) and rows.teacher_logits is not None
        per_token = self.weight, self.divergence, self.policy_kl, self.lse
        return TeacherLogits(rows.teacher_logits, None, self.transform, *per_token)


def new_teacher(
    teacher: AnyTeacher, config: LossConfig, backend: Backend, compute_dtype: torch.dtype | None, count: int,
    dtype: torch.dtype, vocab_size: int, vocab_slice: VocabSlice | None,
) -> TeacherHead | TopKHead:  # fmt: skip
    """Returns what a call computes with a teacher: `count` tokens, values in `dtype`."""
    if isinstance(teacher, TopKTeacher):
        tail = Statistics.zeros(count, teacher.ids.device, dtype)
        return GivenTopK(teacher, transform_of(None, config), tail, vocab_size, vocab_slice)
    if has_full_vocab(teacher):
        return TeacherHead(teacher, config, backend, compute_dtype, count, dtype, vocab_slice)
    tail = Statistics.zeros(count, heads_of(teacher)[0].hidden.device, dtype)
    options = transform_of(None, config), tail, vocab_size, vocab_slice
    return PolicyTopK(teacher, config, backend, compute_dtype, *options)


# --- what an operator receives ----------------------------------------------------------------------------------------


def teacher_to_key(teacher: AnyTeacher | None) -> tuple[str, list[Tensor | None]]:
    """Returns a teacher as an operator receives it: text, "" for none, and tensors. Texts of several end in "|"."""
    if teacher is None:
        return "", []
    if isinstance(teacher, SeveralTeachers):
        keys, tensors = zip(*map(teacher_to_key, teacher.teachers), strict=True)
        return "".join(f"{key}|" for key in keys), [teacher.teacher_of, *(x for each in tensors for x in each)]
    if isinstance(teacher, TopKTeacher):
        return teacher.mode, [teacher.ids, teacher.logps]
    scale, softcap, top_k = as_constant((teacher.logit_scale, teacher.logit_softcap, teacher.top_k))
    return f"{scale!r};{softcap!r};{top_k!r};{teacher.mode}", [teacher.hidden, teacher.weight, teacher.bias]


def teacher_from_key(key: str, tensors: Sequence[Any]) -> AnyTeacher | None:
    """Returns what `teacher_to_key` received."""
    if "|" in key:
        keys, each = key.split("|")[:-1], (len(tensors) - 1) // key.count("|")
        teachers = [teacher_from_key(one, tensors[1 + i * each :][:each]) for i, one in enumerate(keys)]
        return SeveralTeachers(tuple(teachers), tensors[0])  # type: ignore[arg-type]
    *numbers, mode = key.split(";")
    arguments: list[Any] = [*tensors, *map(ast.literal_eval, numbers), mode]
    if not key:
        return None
    return Teacher(*arguments) if numbers else TopKTeacher(*arguments)


def knows_mass(key: str) -> bool:
    """Returns whether a call with this teacher knows the teacher's probability of K ids."""
    *numbers, mode = key.partition("|")[0].split(";")
    return bool(key) and (not numbers or (numbers[-1] != "None" and mode != "renormalize"))

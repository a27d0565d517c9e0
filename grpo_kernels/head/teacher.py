"""The teacher of a call: a second head whose logits stand beside those of each chunk, or K ids per token.

A row kernel that finds a teacher's logits in its chunk computes the divergence and adds its gradient to that of the
objective, which costs the teacher's forward product, 2 NH'V. Every scored token has a gradient then.

Outside of K ids dD/dz_j is p_j times one number of the token, so the row kernel gets that with d loss / d logp. The
entries of the K ids, and that of the sampled id, are then written over, exact, from their logits: O(NK) in plain torch,
on every backend. With mode "tail" the row's statistics are taken a second time, without the K ids: the rest of the
policy's mass comes from its own sum, not from a difference, and the row kernel computes the others' probabilities
relative to it, which a small rest does not round to 0.

Per ids S of a token, l = log p - log q, m = (1 - b) p + b q; P and Q the masses of S:
    tail         one more outcome of mass 1 - P and 1 - Q: D as over the vocabulary, dD/dz_j = p_j slope of j's outcome
    truncate     sums over S alone: reverse_kl p_j ([j in S] (l_j + 1) - D - P), forward_kl Q p_j - [j in S] q_j
    renormalize  of p / P and q / Q; 0 outside of S
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks.arguments import products_dtype
from ..checks.plain import check_gathered
from ..config import GRPOConfig
from ..kernels.operations import (
    Backend,
    LogitChunk,
    RowGradients,
    Rows,
    Statistics,
    TeacherLogits,
    TeacherTransform,
)
from ..teacher import Teacher, TopKTeacher
from .kept import KeptLogits
from .lm_head import LMHead

# The least mass of the ids that the teacher leaves out: what float32 log-probabilities tell from none.
MIN_TAIL_MASS = 2.0**-24


class TeacherHead:
    """Logits of a teacher, and what its row kernels keep of each token. `weight` (N,): d loss / d divergence."""

    def __init__(self, teacher: Teacher, config: GRPOConfig, backend: Backend, count: int, dtype: torch.dtype) -> None:
        inputs = teacher.hidden, teacher.weight, teacher.bias
        check_gathered("Teacher.weight", teacher.weight)  # it may have been released since the forward
        compute_dtype, logits_dtype = products_dtype(*inputs), config.logits_dtype
        if logits_dtype is not None:  # of the policy: float32, or its own type, which need not be the teacher's
            logits_dtype = logits_dtype if logits_dtype.itemsize > 2 else None
        self.head = LMHead(inputs, backend, compute_dtype=compute_dtype, logits_dtype=logits_dtype, chunk_rows=1)
        self.transform = config.teacher_transform(teacher)
        self.offset = torch.zeros(count, dtype=dtype, device=teacher.hidden.device)
        self.lse = self.offset.new_zeros(count, dtype=torch.float64)
        self.weight, self.divergence = torch.zeros_like(self.offset), torch.zeros_like(self.offset)

    @property
    def logits_dtype(self) -> torch.dtype:
        return self.head.logits_dtype

    def beside(self, head: Any, rows: Rows) -> TeacherLogits:
        """For the rows whose logits `head`, an LMHead, has just computed."""
        logits = self.head.logits(rows, head.scratch.teacher_logits(rows.count))
        given = self.weight, self.divergence, self.offset, self.lse
        return TeacherLogits(logits, self.head.folded_bias, self.transform, *given)


# --- K ids -----------------------------------------------------------------------------------------------------------


class TopKGradients(NamedTuple):
    """D (C,), dD/dz of the K ids (C, K); of another id: dD/dz = p_j outside + (share of j in the rest) of_rest (C,)."""

    divergence: Tensor
    inside: Tensor
    outside: Tensor
    of_rest: Tensor


class Entries(NamedTuple):
    """Logits of a chunk that are written over: their columns (C, K + 1), the sampled one last, and their gradient."""

    columns: Tensor
    gradient: Tensor


class TopKHead:
    """What belongs to the tokens of a call. `weight` (N,): d loss / d divergence."""

    weight: Tensor

    def __init__(self, teacher: TopKTeacher, transform: TeacherTransform, dtype: torch.dtype) -> None:
        k = teacher.ids.shape[-1]
        ids, logps = teacher.ids.reshape(-1, k).long(), teacher.logps.reshape(-1, k).double()
        order = torch.where(ids >= 0, ids, torch.iinfo(torch.int64).max).argsort(1)  # as a sampling mask has them
        ids, logps = ids.gather(1, order), logps.gather(1, order)
        used = ids >= 0
        # Places that a token does not use repeat its first id; 0 for a token without any, which is padding.
        self.ids = torch.where(used, ids, ids[:, :1]).clamp_(min=0)
        self.used, self.log_q = used, torch.where(used, logps, -torch.inf)
        self.mass = self.log_q.exp().sum(1)
        self.transform, self.mode = transform, teacher.mode
        self.rest = Statistics.zeros(len(ids), ids.device, dtype)  # without the K ids
        self.divergence = torch.zeros_like(self.rest.logp)

    def holds(self, sampled: Tensor) -> Tensor:
        """(N,) bool: the sampled id (N,) is among the K."""
        return ((self.ids == sampled[:, None]) & self.used).any(1)

    def put_divergence(self, chunk: LogitChunk, backend: Backend) -> None:
        """After the statistics of a chunk, whose logits are as before afterwards."""
        rows = chunk.rows
        if self.mode == "tail":
            place = _places(chunk.logits, rows.take(self.ids))
            kept = chunk.logits[place]
            chunk.logits[place] = -torch.inf  # scatter_ would copy all of the logits, whose rows have gaps
            backend.statistics(chunk._replace(stats=self.rest))
            chunk.logits[place] = kept
        log_p, _ = _log_p(chunk, rows.take(self.ids))
        found = self._slopes(chunk, log_p)
        rows.put(self.divergence, found.divergence.to(self.divergence.dtype))

    def entries(
        self, chunk: LogitChunk, coefficients: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[LogitChunk, Tensor, Tensor, Entries]:
        """(chunk, d loss / d logp and d loss / d entropy for the row kernel, whose result is right for the other ids;
        entries). coefficients (N,): these two and d loss / d divergence. To be called before the gradient takes the
        place of the logits."""
        rows, stats, sampled = chunk.rows, chunk.stats, chunk.rows.take(chunk.ids)
        dlogp, dentropy, weight = (rows.take(x).double()[:, None] for x in coefficients)
        columns = torch.cat([rows.take(self.ids), sampled[:, None]], 1)
        log_p, chain = _log_p(chunk, columns)
        found = self._slopes(chunk, log_p[:, :-1])
        p = log_p.exp()
        log_rest = self._log_rest(rows, stats)
        outside, of_rest = found.outside[:, None], found.of_rest[:, None]
        is_inside = (columns[:, :-1] == sampled[:, None]) & rows.take(self.used)
        inside = torch.where(is_inside, found.inside, 0.0).sum(1, keepdim=True)  # of the sampled id, if it is there
        share = (log_p[:, -1:] - log_rest).exp()
        of_sampled = torch.where(is_inside.any(1, keepdim=True), inside, p[:, -1:] * outside + share * of_rest)
        slope = torch.where(weight != 0, weight * torch.cat([found.inside, of_sampled], 1), 0.0)
        entropy = torch.where(dentropy != 0, rows.take(stats.entropy).double()[:, None], 0.0)
        weighted_logp = torch.where(p == 0, 0.0, p * (log_p + entropy))
        gradient = slope - dlogp * p - dentropy * weighted_logp + dlogp * (columns == sampled[:, None])
        # The row kernel computes e^(z_j - lse) (-dlogp - dentropy (z_j - lse + H)); here lse is that of the rest, so
        # the coefficients are times its mass, and H moves along.
        mass = log_rest.exp()
        g_others = mass * dlogp - torch.where(weight != 0, weight * (mass * outside + of_rest), 0.0)
        lse, moved = rows.take(stats.lse)[:, None] + log_rest, rows.take(stats.entropy).double()[:, None] + log_rest
        others = Statistics(*(x.clone() for x in stats))
        at_logp, at_entropy = (x.clone() for x in coefficients[:2])
        changed = (others.lse, lse), (others.entropy, moved), (at_logp, g_others), (at_entropy, mass * dentropy)
        for kept, x in changed:
            rows.put(kept, x.squeeze(1).to(kept.dtype))
        return chunk._replace(stats=others), at_logp, at_entropy, Entries(columns, gradient * chain)

    def _log_rest(self, rows: Rows, stats: Statistics) -> Tensor:
        """(C, 1) log of the policy's mass outside of the K ids; 0 where it is not needed, or there is no other id."""
        if self.mode != "tail":
            return torch.zeros(rows.count, 1, dtype=torch.float64, device=stats.lse.device)
        log_rest = (rows.take(self.rest.lse) - rows.take(stats.lse))[:, None]
        return torch.where(log_rest > -torch.inf, log_rest, 0.0)

    def _slopes(self, chunk: LogitChunk, log_p: Tensor) -> TopKGradients:
        """log_p (C, K); where a place is not used its entry is that of the id that it repeats."""
        rows, transform = chunk.rows, self.transform
        used, log_q, lse = rows.take(self.used), rows.take(self.log_q), rows.take(chunk.stats.lse)
        log_p = log_p.masked_fill(~used, -torch.inf)
        if self.mode == "renormalize":
            log_p, log_q = (x - x.logsumexp(1, keepdim=True) for x in (log_p, log_q))
        outcomes = log_p, log_q
        if self.mode == "tail":
            log_rest = rows.take(self.rest.lse) - lse
            others = (1 - rows.take(self.mass)).clamp(min=MIN_TAIL_MASS).log()
            has_rest = log_rest > -torch.inf  # else every id is among the K
            rest = torch.stack([log_rest, torch.where(has_rest, others, -torch.inf)], 1)
            outcomes = torch.cat([log_p, rest[:, :1]], 1), torch.cat([log_q, rest[:, 1:]], 1)
        p = outcomes[0].exp()
        divergence, dlogp_term = _divergence(*outcomes, transform)
        if self.mode == "truncate" and transform.divergence == "reverse_kl":
            dlogp_term = dlogp_term + p  # whose sum over all outcomes is 1 in the other modes
        mean = dlogp_term.sum(1)
        inside = dlogp_term - p * mean[:, None]
        outside, of_rest = torch.zeros_like(mean) if self.mode == "renormalize" else -mean, torch.zeros_like(mean)
        if self.mode == "tail":
            inside, of_rest = inside[:, :-1], dlogp_term[:, -1]
        # A place that is not used has the entry of the id that it repeats.
        return TopKGradients(divergence, torch.where(used, inside, inside[:, :1]), outside, of_rest)


class KeptTeacher(TeacherHead):
    """The ids of a TopKTeacher where they are a token's sampling mask: its log-probabilities beside the kept logits."""

    def __init__(self, top_k: TopKHead, head: KeptLogits, temperature: Tensor) -> None:
        self.transform, self.weight, self.divergence = top_k.transform, top_k.weight, top_k.divergence
        self.offset, self.lse = torch.zeros_like(top_k.weight), torch.zeros_like(top_k.mass)
        # A row kernel divides by the temperature again. The ids of a row stand in the order of `log_q`.
        log_q, self._logits = top_k.log_q * temperature.double()[:, None], {}
        for rows in head.chunks(None):
            logits = head.logits(rows)
            width = min(log_q.shape[1], logits.shape[1])
            self._logits[id(rows)] = torch.full_like(logits, -torch.inf)
            self._logits[id(rows)][:, :width] = rows.take(log_q)[:, :width]

    def beside(self, head: Any, rows: Rows) -> TeacherLogits:
        return TeacherLogits(
            self._logits[id(rows)], None, self.transform, self.weight, self.divergence, self.offset, self.lse
        )


def _divergence(log_p: Tensor, log_q: Tensor, transform: TeacherTransform) -> tuple[Tensor, Tensor]:
    """(D (C,), p dD/dp (C, outcomes)); "reverse_kl": without the p of its derivative."""
    p, q, b = log_p.exp(), log_q.exp(), transform.divergence_beta
    if transform.divergence == "reverse_kl":
        dlogp_term = p * _ratio(log_p, log_q)
        return dlogp_term.sum(1), dlogp_term
    if transform.divergence == "forward_kl":
        return (q * _ratio(log_q, log_p)).sum(1), -q
    log_m = torch.logaddexp(log_p + math.log(1 - b), log_q + math.log(b))
    dlogp_term = (1 - b) * p * _ratio(log_p, log_m)
    return (b * q * _ratio(log_q, log_m)).sum(1) + dlogp_term.sum(1), dlogp_term


def _places(matrix: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of these columns (C, K) of the rows of a matrix."""
    return torch.arange(len(matrix), device=matrix.device)[:, None], columns


def write_over(entries: Entries, written: RowGradients) -> None:
    """Behind the row kernel; what rounding takes from the sampled id's entry is that of the new one."""
    dlogits, rounding_error = written
    rounded = entries.gradient.to(dlogits.dtype)
    dlogits[_places(dlogits, entries.columns)] = rounded
    if rounding_error is not None:
        rounding_error.copy_((entries.gradient - rounded.double())[:, -1])


def _log_p(chunk: LogitChunk, columns: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probabilities, derivative of z by the logits) of these columns (C, K), in float64."""
    transform = chunk.transform
    u = chunk.logits[_places(chunk.logits, columns)].double()
    if chunk.bias is not None:
        u = u + chunk.bias.double()[columns]
    temperature = chunk.rows.take(chunk.temperature).double()[:, None]
    z, chain = u * transform.logit_scale, transform.logit_scale / temperature
    if transform.softcap:
        tanh = (z / transform.softcap).tanh()
        z, chain = torch.where(z == -torch.inf, z, tanh * transform.softcap), chain * (1 - tanh * tanh)
    return z / temperature - chunk.rows.take(chunk.stats.lse)[:, None], chain


def _ratio(log_a: Tensor, log_b: Tensor) -> Tensor:
    """log(a / b), 0 where a is 0."""
    return torch.where(log_a == -torch.inf, 0.0, log_a - log_b)


def new_teacher(
    teacher: Teacher | TopKTeacher | None, config: GRPOConfig, backend: Backend, count: int, dtype: torch.dtype
) -> TeacherHead | TopKHead | None:
    """What the engine keeps of a teacher, for so many tokens with values in `dtype`."""
    if teacher is None:
        return None
    if isinstance(teacher, Teacher):
        return TeacherHead(teacher, config, backend, count, dtype)
    return TopKHead(teacher, config.teacher_transform(None), dtype)

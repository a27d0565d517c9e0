"""Rows of logits beside a teacher's: the divergence of their distributions p and q, and its gradient.

    reverse_kl  D = sum p (log p - log q)                dD/dz = p (log p - log q - D)
    forward_kl  D = sum q (log q - log p)                dD/dz = p - q
    jsd         D = b KL(q|m) + (1 - b) KL(p|m)          dD/dz = (1 - b) p (log(p / m) - KL(p|m)),  m = (1 - b) p + b q

The policy's statistics are known (rows.py). The divergence takes one sweep over the teacher's row for its log-sum-exp
and one over both; the gradient one over both, in which it is added to that of the objective. Per logit of float32 rows:
    divergence     reads 12 bytes; 3 exponentials, and with jsd 2 logarithms
    gradient       reads 8, writes 2; 1 exponential, 2 with forward_kl, 2 and a logarithm with jsd
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...contract import LogitChunk, RowGradients, TeacherLogits
from ...names import DIVERGENCES, FIELD, TeacherParams
from . import rows
from .layout import TOKEN_DIVERGENCE, TOKEN_ENTROPY
from .maths import INV_LN2, softcap
from .objective import scalars
from .rows import (
    GROUP,
    Logits,
    Row,
    RowOptions,
    Statistics,
    exponent,
    gradient_to,
    load_logits,
    load_sampled,
    logit_scales,
    logits_of,
    place,
    row_options,
    row_slopes,
    row_sums,
    rows_of,
    split_lse,
    tokens_of,
)
from .tokens import token_objective

REVERSE_KL: tl.constexpr = tl.constexpr(DIVERGENCES.index("reverse_kl"))
FORWARD_KL: tl.constexpr = tl.constexpr(DIVERGENCES.index("forward_kl"))
JSD: tl.constexpr = tl.constexpr(DIVERGENCES.index("jsd"))
LEAST: tl.constexpr = tl.constexpr(1e-37)  # a ratio of probabilities below it counts as 0


class TeacherScalars(NamedTuple):
    """TeacherParams, but for the divergence."""

    divergence_beta: float
    logit_scale: float
    softcap: float


class PairOptions(NamedTuple):
    """What is compiled into a kernel of two rows."""

    policy: RowOptions
    teacher: RowOptions
    divergence: int


class TeacherValues(NamedTuple):
    """Of all tokens; see contract.TeacherLogits."""

    offset: Tensor
    lse: Tensor


class Side(NamedTuple):
    """How a row's y becomes log-probabilities: (y - top) to_z - rest, (ROWS,) each."""

    top: Any
    to_z: Any
    rest: Any


@triton.jit
def probabilities(y, side):
    """(log p, p) of y (ROWS, COLUMNS); where y is -inf they are -inf and exactly 0."""
    log_p = (y - side.top[:, None]) * side.to_z[:, None].to(tl.float32) - side.rest[:, None].to(tl.float32)
    return log_p, tl.exp2(exponent(log_p, 0.0, INV_LN2))


@triton.jit
def log_of_ratio(p, m):
    """log(p / m), 0 where p is."""
    ratio = p / tl.where(m > LEAST, m, LEAST)
    return tl.where(ratio < LEAST, 0.0, tl.log(tl.where(ratio < LEAST, 1.0, ratio)))


@triton.jit
def add_divergence(row, other, first, end, sums, sides, p, q, OPTIONS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums, extended by the columns from `first` to `end`, at most COLUMNS: (D, 0); with jsd (KL(q|m), KL(p|m))."""
    total, of_policy = sums
    policy, teacher = sides
    columns = first + tl.arange(0, COLUMNS)
    inside = row.live[:, None] & (columns < end)[None, :]
    y1, _ = softcap(load_logits(row, columns, end, inside), p.logit_scale, p.softcap, OPTIONS.policy.capped)
    y2, _ = softcap(load_logits(other, columns, end, inside), q.logit_scale, q.softcap, OPTIONS.teacher.capped)
    log_p, prob_p = probabilities(y1, policy)
    log_q, prob_q = probabilities(y2, teacher)
    prob_p, prob_q = tl.where(inside, prob_p, 0.0), tl.where(inside, prob_q, 0.0)
    if OPTIONS.divergence == JSD:
        m = prob_p * (1.0 - q.divergence_beta) + prob_q * q.divergence_beta
        of_p = tl.sum(prob_p * log_of_ratio(prob_p, m), 1).to(tl.float64)
        of_q = tl.sum(prob_q * log_of_ratio(prob_q, m), 1).to(tl.float64)
        return total + of_q, of_policy + of_p
    # An id that the weighing distribution excludes adds nothing, whatever the difference is.
    if OPTIONS.divergence == REVERSE_KL:
        term = tl.where(prob_p == 0.0, 0.0, prob_p * (log_p - log_q))
    else:
        term = tl.where(prob_q == 0.0, 0.0, prob_q * (log_q - log_p))
    return total + tl.sum(term, 1).to(tl.float64), of_policy


@triton.jit(do_not_specialize=["place", "temperature", "count", "tokens"])
def divergence_kernel(logits, teacher, place, temperature, values, kept, count, tokens, p, q, OPTIONS: tl.constexpr):
    TEACHER: tl.constexpr = OPTIONS.teacher
    # The compiler trades registers for occupancy: with these blocks it spills at most one register.
    BLOCK: tl.constexpr = OPTIONS.policy.block if OPTIONS.divergence == JSD else OPTIONS.policy.block // 2
    ROWS: tl.constexpr = OPTIONS.policy.rows
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    token = tokens_of(rows, place, live)
    T = tl.load(temperature + token, mask=live, other=1.0)
    to_z1, _ = logit_scales(p, T, OPTIONS.policy.capped)
    to_z2, _ = logit_scales(q, T, OPTIONS.teacher.capped)
    row = Row(rows_of(logits, rows), logits.bias, live, None, logits.vocab)
    other = Row(rows_of(teacher, rows), teacher.bias, live, None, teacher.vocab)
    top, rest = split_lse(tl.load(values.lse + token, mask=live, other=0.0), to_z1)
    found = row_sums(other, to_z2, q, TEACHER)
    log_sum = tl.log(found.exps)
    sides = Side(top, to_z1, rest), Side(found.top, to_z2, log_sum)
    sums = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
    end = row.vocab
    if OPTIONS.policy.ragged:
        end = row.vocab // GROUP * GROUP
    for first in range(0, end, BLOCK):
        sums = add_divergence(row, other, first, end, sums, sides, p, q, OPTIONS, BLOCK)
    if OPTIONS.policy.ragged:
        for first in range(end, row.vocab, BLOCK):
            sums = add_divergence(row, other, first, row.vocab, sums, sides, p, q, OPTIONS, BLOCK)
    total, offset = sums
    if OPTIONS.divergence == JSD:
        total = q.divergence_beta * total + (1.0 - q.divergence_beta) * offset
    elif OPTIONS.divergence == REVERSE_KL:
        offset = total
    tl.store(values.columns + TOKEN_DIVERGENCE * tokens + token, total.to(tl.float32), mask=live)
    tl.store(kept.offset + token, offset.to(tl.float32), mask=live)
    tl.store(kept.lse + token, found.top.to(tl.float64) * to_z2 + log_sum, mask=live)


class PairSlopes(NamedTuple):
    """What the gradient of a row needs of its teacher, (ROWS,) each: d loss / dD times the chain rule's scale."""

    weight: Any
    offset: Any
    is_zero: Any
    du_id: Any


@triton.jit
def divergence_slope(y1, y2, sides, pair, q, OPTIONS: tl.constexpr):
    """weight dD/dz of (ROWS, COLUMNS)."""
    policy, teacher = sides
    log_p, prob_p = probabilities(y1, policy)
    log_q, prob_q = probabilities(y2, teacher)
    if OPTIONS.divergence == FORWARD_KL:
        return pair.weight[:, None] * (prob_p - prob_q)
    if OPTIONS.divergence == REVERSE_KL:
        slope = pair.weight[:, None] * prob_p * (log_p - log_q - pair.offset[:, None])
        return tl.where(prob_p == 0.0, 0.0, slope)
    m = prob_p * (1.0 - q.divergence_beta) + prob_q * q.divergence_beta
    scale = pair.weight[:, None] * (1.0 - q.divergence_beta)
    return scale * prob_p * (log_of_ratio(prob_p, m) - pair.offset[:, None])


@triton.jit
def store_pair(row, other, du, first, end, slopes, sides, pair, p, q, OPTIONS: tl.constexpr, COLUMNS: tl.constexpr):
    """The gradient of the columns from `first` to `end`, at most COLUMNS."""
    columns = first + tl.arange(0, COLUMNS)
    wanted = row.live[:, None] & (columns < end)[None, :]
    read = wanted & ~pair.is_zero[:, None]
    y1, slope = softcap(load_logits(row, columns, end, read), p.logit_scale, p.softcap, OPTIONS.policy.capped)
    y2, _ = softcap(load_logits(other, columns, end, read), q.logit_scale, q.softcap, OPTIONS.teacher.capped)
    t = exponent(y1, slopes.top[:, None], slopes.to_exponent[:, None])
    value = tl.exp2(t) * (slopes.constant[:, None] + slopes.linear[:, None] * t)
    value = (value + divergence_slope(y1, y2, sides, pair, q, OPTIONS)) * slope
    value = tl.where(columns[None, :] == row.ids[:, None], pair.du_id[:, None], value)
    value = tl.where(pair.is_zero[:, None], 0.0, value)
    if OPTIONS.policy.overlap:  # 16-bit values over float32 logits that another thread may not have read yet
        tl.debug_barrier()
    tl.store(du[:, None] + columns[None, :], value.to(du.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["ids", "place", "temperature", "g_logp", "g_entropy", "weight", "count", "tokens"])
def pair_gradient_kernel(
    logits, teacher, ids, place, temperature, values, kept, g_logp, g_entropy, weight, count, tokens, gradient, p, q,
    OPTIONS: tl.constexpr
):  # fmt: skip
    POLICY: tl.constexpr = OPTIONS.policy
    BLOCK: tl.constexpr = OPTIONS.policy.block
    ROWS: tl.constexpr = OPTIONS.policy.rows
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    token = tokens_of(rows, place, live)
    id_ = tl.load(ids + token, mask=live, other=0)
    T = tl.load(temperature + token, mask=live, other=1.0)
    scales = logit_scales(p, T, OPTIONS.policy.capped)
    to_z2, _ = logit_scales(q, T, OPTIONS.teacher.capped)
    row = Row(rows_of(logits, rows), logits.bias, live, id_, logits.vocab)
    other = Row(rows_of(teacher, rows), teacher.bias, live, id_, teacher.vocab)
    top1, rest1 = split_lse(tl.load(values.lse + token, mask=live, other=0.0), scales[0])
    top2, rest2 = split_lse(tl.load(kept.lse + token, mask=live, other=0.0), to_z2)
    h = tl.load(values.columns + TOKEN_ENTROPY * tokens + token, mask=live, other=0.0)
    by_logp = tl.load(g_logp + token, mask=live, other=0.0)
    by_entropy = tl.load(g_entropy + token, mask=live, other=0.0)
    by_divergence = tl.load(weight + token, mask=live, other=0.0)
    slopes = row_slopes(row, Statistics(top1, rest1, None, h), by_logp, by_entropy, scales, p, POLICY)

    is_zero = slopes.is_zero & (by_divergence == 0.0)
    sides = Side(top1, scales[0], rest1), Side(top2, to_z2, rest2)
    offset = tl.load(kept.offset + token, mask=live, other=0.0)
    chained = by_divergence * scales[1].to(tl.float32)
    pair = PairSlopes(chained, offset, is_zero, slopes.du_id)
    known = live & ~is_zero & (id_ >= 0) & (id_ < row.vocab)
    y1, slope = softcap(load_sampled(row, known), p.logit_scale, p.softcap, OPTIONS.policy.capped)
    y2, _ = softcap(load_sampled(other, known), q.logit_scale, q.softcap, OPTIONS.teacher.capped)
    of_id = tl.sum(divergence_slope(y1[:, None], y2[:, None], sides, pair, q, OPTIONS), 1) * slope
    du_id = tl.where(slopes.known, slopes.du_id, 0.0) + tl.where(known, of_id, 0.0)
    pair = PairSlopes(chained, offset, is_zero, du_id)

    du = rows_of(gradient, rows)
    tl.debug_barrier()  # every thread has read the sampled logit before any writes over it
    end = row.vocab
    if OPTIONS.policy.ragged:
        end = row.vocab // GROUP * GROUP
    for first in range(0, end, BLOCK):
        store_pair(row, other, du, first, end, slopes, sides, pair, p, q, OPTIONS, BLOCK)
    if OPTIONS.policy.ragged:
        for first in range(end, row.vocab, BLOCK // 2):
            store_pair(row, other, du, first, row.vocab, slopes, sides, pair, p, q, OPTIONS, BLOCK // 2)
    if gradient.rounding_error is not None:
        rounded = du_id.to(du.dtype.element_ty).to(tl.float32)
        tl.store(gradient.rounding_error + rows, tl.where(known, du_id - rounded, 0.0), mask=live)


# --- launchers: those of rows.py, for chunks with and without a teacher ----------------------------------------------


def statistics(chunk: LogitChunk) -> None:
    rows.statistics(chunk)
    if chunk.teacher is not None:
        _divergence(chunk, chunk.teacher)


def logits_gradient(chunk: LogitChunk, g_logp: Tensor, g_entropy: Tensor, gradients: RowGradients) -> None:
    if chunk.teacher is None:
        rows.logits_gradient(chunk, g_logp, g_entropy, gradients)
    else:
        _gradient(chunk, chunk.teacher, g_logp, g_entropy, gradients)


def single_pass(chunk: LogitChunk, table: Tensor, gradients: RowGradients | None = None) -> None:
    if chunk.teacher is None:
        rows.single_pass(chunk, table, gradients)
        return
    statistics(chunk)
    token_objective(chunk.rows, table, chunk.values, chunk.params)
    if gradients is not None:
        logits_gradient(chunk, chunk.values.g_logp, table[FIELD["weight_entropy"]], gradients)


def _divergence(chunk: LogitChunk, teacher: TeacherLogits) -> None:
    """The divergence, its offset and the teacher's log-sum-exp of a chunk's tokens, whose own is known."""
    grid, options = _options(chunk, teacher, None)
    divergence_kernel[grid](
        logits_of(chunk), _logits(teacher), place(chunk.rows), chunk.temperature, chunk.values,
        TeacherValues(teacher.offset, teacher.lse), len(chunk.logits), len(chunk.ids), scalars(chunk.params),
        _scalars(teacher.params), **options,
    )  # fmt: skip


def _gradient(
    chunk: LogitChunk, teacher: TeacherLogits, g_logp: Tensor, g_entropy: Tensor, gradients: RowGradients
) -> None:
    """d loss / d logits (C, V), the divergence's share included."""
    grid, options = _options(chunk, teacher, gradients)
    pair_gradient_kernel[grid](
        logits_of(chunk), _logits(teacher), chunk.ids, place(chunk.rows), chunk.temperature, chunk.values,
        TeacherValues(teacher.offset, teacher.lse), g_logp, g_entropy, teacher.weight, len(chunk.logits),
        len(chunk.ids), gradient_to(gradients), scalars(chunk.params), _scalars(teacher.params), **options,
    )  # fmt: skip


def _options(
    chunk: LogitChunk, teacher: TeacherLogits, gradients: RowGradients | None
) -> tuple[tuple[int], dict[str, Any]]:
    grid, options = row_options(chunk, gradients)
    policy = options["OPTIONS"]
    other = policy._replace(capped=teacher.params.softcap != 0.0, overlap=False)
    pair = PairOptions(policy, other, DIVERGENCES.index(teacher.params.divergence))
    return grid, options | {"OPTIONS": pair}


def _logits(teacher: TeacherLogits) -> Logits:
    return Logits(teacher.logits, teacher.bias, teacher.logits.shape[1], teacher.logits.stride(0))


def _scalars(params: TeacherParams) -> TeacherScalars:
    return TeacherScalars(params.divergence_beta, params.logit_scale, params.softcap)

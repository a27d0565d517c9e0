"""The divergence of rows of logits and a teacher's; divergence.py has the formulas, rows.py the gradient.

The policy's statistics are known (rows.py). The divergence takes one sweep over the teacher's row for its log-sum-exp
and one over both; the gradient one over both, in which it is added to that of the objective. Per logit of float32 rows:
    divergence     reads 12 bytes; 3 exponentials, and with jsd 2 logarithms
    gradient       reads 8, writes 2; 1 exponential, 2 with forward_kl, 2 and a logarithm with jsd
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...contract import LogitChunk, RowGradients
from ...names import FIELD
from . import rows
from .divergence import Side, log_of_ratio, probabilities
from .layout import TOKEN_DIVERGENCE
from .maths import softcap
from .objective import scalars
from .rows import (
    GROUP,
    Row,
    load_logits,
    logit_scales,
    logits_of,
    place,
    row_options,
    row_sums,
    rows_of,
    split_lse,
    teacher_of,
    tokens_of,
)
from .tokens import token_objective


@triton.jit
def add_columns(row, other, first, end, sums, sides, p, q, OPTIONS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums, extended by the columns from `first` to `end`, at most COLUMNS: (D, 0); with jsd (KL(q|m), KL(p|m))."""
    TEACHER: tl.constexpr = OPTIONS.teacher
    total, of_policy = sums
    policy, teacher = sides
    columns = first + tl.arange(0, COLUMNS)
    inside = row.live[:, None] & (columns < end)[None, :]
    y1, _ = softcap(load_logits(row, columns, end, inside), p.logit_scale, p.softcap, OPTIONS.capped)
    y2, _ = softcap(load_logits(other, columns, end, inside), q.logit_scale, q.softcap, TEACHER.capped)
    log_p, prob_p = probabilities(y1, policy)
    log_q, prob_q = probabilities(y2, teacher)
    prob_p, prob_q = tl.where(inside, prob_p, 0.0), tl.where(inside, prob_q, 0.0)
    if OPTIONS.divergence == "jsd":
        m = prob_p * (1.0 - q.divergence_beta) + prob_q * q.divergence_beta
        of_p = tl.sum(prob_p * log_of_ratio(prob_p, m), 1).to(tl.float64)
        of_q = tl.sum(prob_q * log_of_ratio(prob_q, m), 1).to(tl.float64)
        return total + of_q, of_policy + of_p
    # An id that the weighing distribution excludes adds nothing, whatever the difference is.
    if OPTIONS.divergence == "reverse_kl":
        term = tl.where(prob_p == 0.0, 0.0, prob_p * (log_p - log_q))
    else:
        term = tl.where(prob_q == 0.0, 0.0, prob_q * (log_q - log_p))
    return total + tl.sum(term, 1).to(tl.float64), of_policy


@triton.jit(do_not_specialize=["place", "temperature", "count", "tokens"])
def divergence_kernel(logits, teacher, place, temperature, values, kept, count, tokens, p, q, OPTIONS: tl.constexpr):
    TEACHER: tl.constexpr = OPTIONS.teacher
    # The compiler trades registers for occupancy: with these blocks it spills at most one register.
    BLOCK: tl.constexpr = OPTIONS.block if OPTIONS.divergence == "jsd" else OPTIONS.block // 2
    ROWS: tl.constexpr = OPTIONS.rows
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    token = tokens_of(rows, place, live)
    T = tl.load(temperature + token, mask=live, other=1.0)
    to_z1, _ = logit_scales(p, T, OPTIONS.capped)
    to_z2, _ = logit_scales(q, T, TEACHER.capped)
    row = Row(rows_of(logits, rows), logits.bias, live, None, logits.vocab)
    other = Row(rows_of(teacher, rows), teacher.bias, live, None, teacher.vocab)
    top, rest = split_lse(tl.load(values.lse + token, mask=live, other=0.0), to_z1)
    found = row_sums(other, to_z2, q, TEACHER)
    log_sum = tl.log(found.exps)
    sides = Side(top, to_z1, rest), Side(found.top, to_z2, log_sum)
    sums = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
    end = row.vocab
    if OPTIONS.ragged:
        end = row.vocab // GROUP * GROUP
    for first in range(0, end, BLOCK):
        sums = add_columns(row, other, first, end, sums, sides, p, q, OPTIONS, BLOCK)
    if OPTIONS.ragged:
        for first in range(end, row.vocab, BLOCK):
            sums = add_columns(row, other, first, row.vocab, sums, sides, p, q, OPTIONS, BLOCK)
    total, offset = sums
    if OPTIONS.divergence == "jsd":
        total = q.divergence_beta * total + (1.0 - q.divergence_beta) * offset
    elif OPTIONS.divergence == "reverse_kl":
        offset = total
    tl.store(values.columns + TOKEN_DIVERGENCE * tokens + token, total.to(tl.float32), mask=live)
    tl.store(kept.offset + token, offset.to(tl.float32), mask=live)
    tl.store(kept.lse + token, found.top.to(tl.float64) * to_z2 + log_sum, mask=live)


# --- launchers: those of rows.py, for chunks with and without a teacher ----------------------------------------------


def statistics(chunk: LogitChunk) -> None:
    """Statistics of the logits; with a teacher also the divergence, its offset and the teacher's log-sum-exp."""
    rows.statistics(chunk)
    if chunk.teacher is not None:
        grid, options = row_options(chunk)
        logits, kept, _, numbers = teacher_of(chunk)
        divergence_kernel[grid](
            logits_of(chunk), logits, place(chunk.rows), chunk.temperature, chunk.values, kept, len(chunk.logits),
            len(chunk.ids), scalars(chunk.params), numbers, **options,
        )  # fmt: skip


def single_pass(chunk: LogitChunk, table: Tensor, gradients: RowGradients | None = None) -> None:
    if chunk.teacher is None:
        rows.single_pass(chunk, table, gradients)
        return
    statistics(chunk)
    token_objective(chunk.rows, table, chunk.values, chunk.params)
    if gradients is not None:
        rows.logits_gradient(chunk, chunk.values.g_logp, table[FIELD["weight_entropy"]], gradients)

"""The divergence of rows of logits and a teacher's; divergence.py has the formulas, rows.py the gradient.

The policy's statistics are known (rows.py). The divergence takes one sweep over the teacher's row for its log-sum-exp
and one over both; the gradient one over both, in which it is added to that of the objective. Per logit of float32 rows:
    divergence     reads 12 bytes; 3 exponentials, and with jsd 2 logarithms
    gradient       reads 8, writes 2; 1 exponential, 2 with forward_kl, 2 and a logarithm with jsd
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..operations import LogitChunk
from . import rows
from .divergence import LogProbParams, log_of_ratio, probabilities
from .maths import softcap
from .rows import (
    GROUP,
    PER_TOKEN,
    Row,
    load_logits,
    logit_scales,
    read_by,
    row_options,
    row_sums,
    rows_of_program,
    scalars,
    split_lse,
    teacher_of,
)


@triton.jit
def add_columns(row, other, first, end, sums, sides, p, q, OPTIONS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns the sums with the columns from `first` to `end` added, at most COLUMNS: (D, 0); with jsd (KL(q|m),
    KL(p|m))."""
    total, of_policy = sums
    policy, teacher = sides
    columns = first + tl.arange(0, COLUMNS)
    inside = row.live[:, None] & (columns < end)[None, :]
    y1, _ = softcap(load_logits(row, columns, end, inside), p.logit_scale, p.softcap, OPTIONS.capped)
    y2, _ = softcap(load_logits(other, columns, end, inside), q.logit_scale, q.softcap, OPTIONS.teacher_capped)
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


@triton.jit(do_not_specialize=[*PER_TOKEN, "count"])
def divergence_kernel(
    logits, ids, token_index, first_token, temperature, stats, teacher, teacher_stats, count, p, q,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    # The compiler trades registers for occupancy: with these blocks it spills at most one register.
    BLOCK: tl.constexpr = OPTIONS.block if OPTIONS.divergence == "jsd" else OPTIONS.block // 2
    ROWS: tl.constexpr = OPTIONS.rows
    at = rows_of_program(logits, ids, token_index, first_token, temperature, count, ROWS)
    row = Row(at[0], at[1], at[2], at[3], at[4], at[5], at[6], logits.bias, logits.vocab)
    at = rows_of_program(teacher, ids, token_index, first_token, temperature, count, ROWS)
    other = Row(at[0], at[1], at[2], at[3], at[4], at[5], at[6], teacher.bias, teacher.vocab)
    to_z1, _ = logit_scales(p, row.temperature, OPTIONS.capped)
    to_z2, _ = logit_scales(q, row.temperature, OPTIONS.teacher_capped)
    top, rest = split_lse(tl.load(stats.lse + row.token, mask=row.live, other=0.0), to_z1)
    other_sums = row_sums(other, tl.full((OPTIONS.rows,), -1, tl.int64), to_z2, q, OPTIONS.teacher_capped, OPTIONS)
    log_sum = tl.log(other_sums.exps)
    sides = LogProbParams(top, to_z1, rest), LogProbParams(other_sums.top, to_z2, log_sum)
    sums = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
    end = row.vocab
    if OPTIONS.ragged:
        end = row.vocab // GROUP * GROUP
    for first in range(0, end, BLOCK):
        sums = add_columns(row, other, first, end, sums, sides, p, q, OPTIONS, BLOCK)
    if OPTIONS.ragged:
        for first in range(end, row.vocab, BLOCK):
            sums = add_columns(row, other, first, row.vocab, sums, sides, p, q, OPTIONS, BLOCK)
    total, policy_kl = sums
    if OPTIONS.divergence == "jsd":
        total = q.divergence_beta * total + (1.0 - q.divergence_beta) * policy_kl
    elif OPTIONS.divergence == "reverse_kl":
        policy_kl = total
    tl.store(teacher_stats.divergence + row.token, total.to(tl.float32), mask=row.live)
    tl.store(teacher_stats.policy_kl + row.token, policy_kl.to(tl.float32), mask=row.live)
    tl.store(teacher_stats.lse + row.token, other_sums.top.to(tl.float64) * to_z2 + log_sum, mask=row.live)


def statistics(chunk: LogitChunk) -> None:
    """Writes the statistics of the logits; with a teacher also the divergence, policy_kl and the teacher's
    log-sum-exp."""
    rows.statistics(chunk)
    if chunk.teacher is not None:
        grid, options = row_options(chunk)
        logits, teacher_stats, _, numbers = teacher_of(chunk)
        divergence_kernel[grid](
            *read_by(chunk), chunk.stats, logits, teacher_stats, len(chunk.logits), scalars(chunk.transform), numbers,
            **options,
        )  # fmt: skip

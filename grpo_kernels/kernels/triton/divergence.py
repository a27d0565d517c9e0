"""The divergence of a policy's distribution p and a teacher's q, in kernels.

    reverse_kl  D = sum p (log p - log q)                dD/dz = p (log p - log q - D)
    forward_kl  D = sum q (log q - log p)                dD/dz = p - q
    jsd         D = b KL(q|m) + (1 - b) KL(p|m)          dD/dz = (1 - b) p (log(p / m) - KL(p|m)),  m = (1 - b) p + b q

b is the teacher's share of the mixture. teacher.py has the kernel of D; rows.py adds the derivative to its gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .maths import INV_LN2, exponent

LEAST: tl.constexpr = tl.constexpr(1e-37)  # a ratio of probabilities below it counts as 0


class LogProbParams(NamedTuple):
    """What turns a row's y into log-probabilities (y - top) to_z - rest; (ROWS,) each."""

    top: Any
    to_z: Any
    rest: Any


class TeacherPair(NamedTuple):
    """What the gradient of rows needs of the policy and of the teacher, (ROWS,) each unless told."""

    row: Any  # rows.Row of the teacher
    policy: Any  # LogProbParams
    teacher: Any
    ddivergence: Any  # d loss / dD
    weight: Any  # that times the chain rule's scale
    policy_kl: Any  # of operations.TeacherLogits
    q: Any  # TeacherScalars


@triton.jit
def probabilities(y, side):
    """Returns (log p, p) of y (ROWS, COLUMNS); where y is -inf they are -inf and exactly 0."""
    log_p = (y - side.top[:, None]) * side.to_z[:, None].to(tl.float32) - side.rest[:, None].to(tl.float32)
    return log_p, tl.exp2(exponent(log_p, 0.0, INV_LN2))


@triton.jit
def log_of_ratio(p, m):
    """Returns log(p / m), 0 where p is 0."""
    ratio = p / tl.where(m > LEAST, m, LEAST)
    return tl.where(ratio < LEAST, 0.0, tl.log(tl.where(ratio < LEAST, 1.0, ratio)))


@triton.jit
def divergence_gradient(y1, y2, pair, OPTIONS: tl.constexpr):
    """Returns weight dD/dz, (ROWS, COLUMNS)."""
    log_p, prob_p = probabilities(y1, pair.policy)
    log_q, prob_q = probabilities(y2, pair.teacher)
    if OPTIONS.divergence == "forward_kl":
        return pair.weight[:, None] * (prob_p - prob_q)
    if OPTIONS.divergence == "reverse_kl":
        value = pair.weight[:, None] * prob_p * (log_p - log_q - pair.policy_kl[:, None])
        return tl.where(prob_p == 0.0, 0.0, value)
    beta = pair.q.divergence_beta
    m = prob_p * (1.0 - beta) + prob_q * beta
    scale = pair.weight[:, None] * (1.0 - beta)
    return scale * prob_p * (log_of_ratio(prob_p, m) - pair.policy_kl[:, None])

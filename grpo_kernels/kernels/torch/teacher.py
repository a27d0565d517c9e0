"""The divergence to a teacher's distribution and its gradient, in plain torch: over the vocabulary, or over K outcomes
of a token (head/teacher.py).

reverse_kl  D = sum p (log p - log q)                dD/dz = p (log p - log q - D)
forward_kl  D = sum q (log q - log p)                dD/dz = p - q
jsd         D = b KL(q|m) + (1 - b) KL(p|m)          dD/dz = (1 - b) p (log(p / m) - KL(p|m)),  m = (1 - b) p + b q
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..operations import Rows, TeacherLogits, TeacherTransform
from .transform import minus_lse, transformed


def put_divergence(rows: Rows, teacher: TeacherLogits, log_p: Tensor, temperature: Tensor) -> None:
    """Writes the divergence, policy_kl and the teacher's log-sum-exp of a chunk's tokens. log_p (C, V)."""
    z, _ = transformed(teacher.logits, teacher.bias, temperature, teacher.transform)
    lse = z.double().logsumexp(-1)
    results = sums(log_p, minus_lse(z, lse), teacher.transform)
    for destination, x in zip((teacher.divergence, teacher.policy_kl), results, strict=True):
        rows.put(destination, x)
    rows.put(teacher.lse, lse)


def sums(log_p: Tensor, log_q: Tensor, params: TeacherTransform) -> tuple[Tensor, Tensor]:
    """Returns the divergence and policy_kl, (C,) each, of log-probabilities (C, V) or of a slice of them."""
    if params.divergence == "reverse_kl":
        return (divergence := _kl(log_p, log_q)), divergence
    if params.divergence == "forward_kl":
        return (divergence := _kl(log_q, log_p)), torch.zeros_like(divergence)
    log_m = _log_mixture(log_p, log_q, params)
    policy_kl = _kl(log_p, log_m)
    return params.divergence_beta * _kl(log_q, log_m) + (1 - params.divergence_beta) * policy_kl, policy_kl


def divergence_gradient(rows: Rows, teacher: TeacherLogits, log_p: Tensor, temperature: Tensor) -> Tensor:
    """Returns weight times dD / dz (C, V), 0 where the weight is. log_p (C, V)."""
    weight, policy_kl, lse = (rows.take(x)[:, None] for x in (teacher.weight, teacher.policy_kl, teacher.lse))
    z, _ = transformed(teacher.logits, teacher.bias, temperature, teacher.transform)
    log_q, params = minus_lse(z, lse.squeeze(1)), teacher.transform
    slope = slopes(log_p, log_q, 1.0 if params.divergence == "forward_kl" else policy_kl, params)
    return torch.where(weight != 0, weight * slope, 0.0).to(log_p.dtype)


def slopes(log_p: Tensor, log_q: Tensor, policy_kl: Tensor | float, params: TeacherTransform) -> Tensor:
    """Returns dD/dz (C, V) over a whole distribution, from the policy_kl of `sums` (forward_kl: 1).

    With 0 in its place it is p dD/dp; for reverse_kl without the p that comes from p log p.
    """
    p = log_p.exp()
    if params.divergence == "forward_kl":
        return p * policy_kl - log_q.exp()
    is_jsd = params.divergence == "jsd"
    other = _log_mixture(log_p, log_q, params) if is_jsd else log_q
    slope = p * (_difference(log_p, other) - policy_kl) * (1 - params.divergence_beta if is_jsd else 1.0)
    return slope.masked_fill_(p == 0, 0.0)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Returns sum a log(a / b), (C,)."""
    a = log_a.exp()
    return (a * _difference(log_a, log_b)).masked_fill_(a == 0, 0.0).sum(-1)


def _difference(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Returns log a - log b; any finite number where a is 0."""
    return (log_a - log_b).masked_fill_(log_a == -torch.inf, 0.0)


def _log_mixture(log_p: Tensor, log_q: Tensor, params: TeacherTransform) -> Tensor:
    b = params.divergence_beta
    return torch.logaddexp(log_p + math.log(1 - b), log_q + math.log(b))

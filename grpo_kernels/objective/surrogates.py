"""The policy term of a token and its derivatives. A surrogate is a function and a row of SURROGATE_RULES.

    grad_log_ratio = d value / d x        at fixed logp       x: the log-ratio of the token or its sequence, r = e^x
    grad_logp      = d value / d logp     at fixed x

Sources of the formulas: reference.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..loss_config import LossConfig
from .sequences import LEVELS, WEIGHT_LEVELS, Level

Surrogate = Literal[
    "clip", "cispo", "cispo_two_sided", "cispo_mask", "cispo_unified", "sapo", "vespo", "reinforce", "gmpo", "dppo_tv",
    "dppo_kl", "ipo", "a2po",
]  # fmt: skip


class Ratio(NamedTuple):
    """Of tokens (N,): the raw log-ratio, the ratio within all clamps of its exponent, and where such a clamp acts."""

    log: Tensor
    value: Tensor
    clamped: Tensor


class Term(NamedTuple):
    """A surrogate's value and its two partial derivatives, (N,) each; None: 0 everywhere."""

    value: Tensor
    grad_log_ratio: Tensor | None = None
    grad_logp: Tensor | None = None


def clip(c: LossConfig, ratio: Ratio, logp: Tensor, A: Tensor) -> Term:
    r, minus_A = ratio.value, -A
    bounded = r if c.delta is None else r.clamp(max=c.delta)
    first, second = bounded * minus_A, r.clamp(1 - c.epsilon_low, 1 + c.epsilon_high) * minus_A
    value = torch.maximum(first, second)
    if c.delta is None:  # within the clip range both are the same
        still, grad_log_ratio = (first < second) | ratio.clamped, first
    else:
        inside = (r >= 1 - c.epsilon_low) & (r <= 1 + c.epsilon_high)
        still, grad_log_ratio = (
            ~torch.where(first >= second, r <= c.delta, inside) & ~r.isnan() | ratio.clamped,
            r * minus_A,
        )
    if c.dual_clip is not None:
        bound = torch.where(A < 0, c.dual_clip * minus_A, torch.inf)
        still = still | (value > bound)
        value = torch.minimum(value, bound)
    return Term(value, grad_log_ratio.masked_fill_(still, 0.0))


def _weighted_logp(weight: Tensor | None, logp: Tensor, A: Tensor, drop: Tensor | None = None) -> Term:
    """Returns the term -weight A logp. Its weight is a constant: all gradient goes through logp."""
    grad_logp = torch.where(logp.isnan(), torch.nan, -A) if weight is None else -weight * A
    value = grad_logp * logp
    if drop is not None:
        value, grad_logp = torch.where(drop, 0.0, value), torch.where(drop, 0.0, grad_logp)
    return Term(value, None, grad_logp)


def cispo(c: LossConfig, ratio: Ratio, logp: Tensor, A: Tensor) -> Term:
    return _weighted_logp(ratio.value.clamp(max=c.epsilon_high), logp, A)


def cispo_two_sided(c: LossConfig, ratio: Ratio, logp: Tensor, A: Tensor) -> Term:
    return _weighted_logp(ratio.value.clamp(1 - c.epsilon_low, 1 + c.epsilon_high), logp, A)


def cispo_mask(c: LossConfig, ratio: Ratio, logp: Tensor, A: Tensor) -> Term:
    r, low, high = ratio.value, 1 - c.epsilon_low, 1 + c.epsilon_high
    return _weighted_logp(r.clamp(low, high), logp, A, (r <= low) | (r >= high))


def cispo_unified(c: LossConfig, ratio: Ratio, logp: Tensor, A: Tensor) -> Term:
    r, low, high = ratio.value, 1 - c.epsilon_low, 1 + c.epsilon_high
    return _weighted_logp(r.clamp(low, high), logp, A, ((A > 0) & (r > high)) | ((A < 0) & (r < low)))


def reinforce(c: LossConfig, ratio: Ratio, logp: Tensor, A: Tensor) -> Term:
    """Returns REINFORCE's term; also VESPO's, whose weight of the whole sequence multiplies the term."""
    return _weighted_logp(None, logp, A)


def sapo(c: LossConfig, ratio: Ratio, logp: Tensor, A: Tensor) -> Term:
    r = ratio.value
    tau = torch.full_like(A, c.sapo_temperature_neg).masked_fill(A > 0, c.sapo_temperature_pos)
    gate = torch.sigmoid(tau * (r - 1))
    grad_log_ratio = torch.where(ratio.clamped, 0.0, -4 * gate * (1 - gate) * A * r)
    return Term(-(4 / tau) * gate * A, grad_log_ratio)


def gmpo(c: LossConfig, ratio: Ratio, logp: Tensor, A: Tensor) -> Term:
    value = -A * ratio.value
    return Term(value, torch.where(ratio.clamped, 0.0, value))


def _trust_region(c: LossConfig, ratio: Ratio, logp: Tensor, A: Tensor, drop: Tensor) -> Term:
    x, tau = ratio.log, c.dppo_kl_tau
    quadratic, d_quadratic = tau * x * x, 2 * tau * x
    if c.ratio_cap is not None:
        term = _weighted_logp(ratio.value.clamp(max=c.ratio_cap), logp, A, drop)
        return Term(term.value + quadratic, d_quadratic, term.grad_logp)
    value = torch.where(drop, 0.0, -ratio.value * A)
    return Term(value + quadratic, torch.where(ratio.clamped, 0.0, value) + d_quadratic)


def dppo_tv(c: LossConfig, ratio: Ratio, logp: Tensor, A: Tensor) -> Term:
    change = logp.exp() - (logp - ratio.log).exp()
    drop = ((A > 0) & (change > c.epsilon_high)) | ((A <= 0) & (change < -c.epsilon_low))
    return _trust_region(c, ratio, logp, A, drop)


def dppo_kl(c: LossConfig, ratio: Ratio, logp: Tensor, A: Tensor) -> Term:
    x, now, before = ratio.log, logp.exp(), (logp - ratio.log).exp()
    kl = -before * x + (1 - before) * ((1 - before + 1e-8) / (1 - now + 1e-8)).log()  # of the sampled id or not
    drop = torch.where(A > 0, (x > 0) & (kl > c.epsilon_high), (x < 0) & (kl > c.epsilon_low))
    return _trust_region(c, ratio, logp, A, drop)


def ipo(c: LossConfig, ratio: Ratio, logp: Tensor, A: Tensor) -> Term:
    drop = (logp.exp() - (logp - ratio.log).exp()).abs() > c.epsilon_high
    return _trust_region(c, ratio, logp, A, drop)


def a2po(c: LossConfig, ratio: Ratio, logp: Tensor, A: Tensor) -> Term:
    residual = c.a2po_beta * ratio.log - A
    return Term(residual.square(), 2 * c.a2po_beta * residual)


class SurrogateRule(NamedTuple):
    """What a surrogate allows: its ratio levels (the first is the default) and the options that it reads."""

    term: Callable[[LossConfig, Ratio, Tensor, Tensor], Term]
    levels: tuple[Level, ...]
    options: dict[str, float]  # option name -> default
    divides_by_rollout: bool = False  # its ratio is one to the sampling engine, not to the old policy
    clips: bool = False  # it has a clip range, of which there are metrics


_CLIP_OPTIONS = {"epsilon_low": 0.2, "epsilon_high": 0.2}
_TRUST_REGION = {"dppo_kl_tau": 1e-3, "ratio_cap": math.inf}
_OF_VESPO = {"vespo_k_pos": 2.0, "vespo_k_neg": 3.0, "vespo_lambda_pos": 3.0, "vespo_lambda_neg": 2.0}
SURROGATE_RULES = {
    "clip": SurrogateRule(clip, LEVELS, {**_CLIP_OPTIONS, "delta": math.inf, "dual_clip": math.inf}, clips=True),
    "cispo": SurrogateRule(cispo, WEIGHT_LEVELS, {"epsilon_high": 5.0}),
    "cispo_two_sided": SurrogateRule(cispo_two_sided, WEIGHT_LEVELS, _CLIP_OPTIONS, clips=True),
    "cispo_mask": SurrogateRule(cispo_mask, WEIGHT_LEVELS, _CLIP_OPTIONS, clips=True),
    "cispo_unified": SurrogateRule(cispo_unified, WEIGHT_LEVELS, _CLIP_OPTIONS, clips=True),
    "sapo": SurrogateRule(sapo, LEVELS, {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}),
    # Its weight is that of the sequence at either level, which is that of the KL's ratio.
    "vespo": SurrogateRule(reinforce, ("token", "sequence"), _OF_VESPO),
    "reinforce": SurrogateRule(reinforce, ("token",), {}),
    "gmpo": SurrogateRule(gmpo, ("sequence",), _CLIP_OPTIONS),
    "dppo_tv": SurrogateRule(dppo_tv, ("token",), {**_CLIP_OPTIONS, **_TRUST_REGION}, divides_by_rollout=True),
    "dppo_kl": SurrogateRule(dppo_kl, ("token",), {**_CLIP_OPTIONS, **_TRUST_REGION}, divides_by_rollout=True),
    "ipo": SurrogateRule(ipo, ("token",), {"epsilon_high": 0.1, **_TRUST_REGION}, divides_by_rollout=True),
    # Of tokens it is REINFORCE with k2, up to a constant.
    "a2po": SurrogateRule(a2po, ("sequence_sum", "sequence"), {"a2po_beta": 1e-3}),
}

"""The per-token objective and its derivatives in closed form, on O(N) tensors; csrc/objective.h in torch.

    value    = keep * multiplier * surrogate(x, logp, A) + beta * KL(ref - logp) * (r if bias-corrected else 1)
    d_ratio  = d value / d x         at fixed logp    x is the log-ratio of the token or of its sequence
    d_direct = d value / d logp      at fixed x
    d loss / d logp = weight_ratio * d_ratio + weight_direct * d_direct           (ratio of one token)

Coefficients are selected, never multiplied by a mask: 0 * inf at a clipped or dropped token would be NaN. NaN logits
make the multiplier NaN, even where a clip, a threshold or a factor of 0 would have dropped them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...names import EXPONENT_LIMIT, FIELD, PRODUCT_LIMIT, KernelParams, shares_ratio


class Objective(NamedTuple):
    """(N,) each; `kl` includes the bias correction."""

    value: Tensor
    d_ratio: Tensor
    d_direct: Tensor
    kl: Tensor


class Term(NamedTuple):
    """A surrogate's value and its two partial derivatives."""

    value: Tensor
    d_ratio: Tensor
    d_direct: Tensor


def objective(log_ratio: Tensor, logp: Tensor, entropy: Tensor, table: Tensor, p: KernelParams) -> Objective:
    """Value and derivatives per token; `log_ratio` (N,) is raw, `table` (fields, N) is described in contract.py."""
    A, ref = table[FIELD["advantage"]], table[FIELD["ref"]]
    x, clamp_acts = clamp_log_ratio(log_ratio, p)
    r = x.exp()
    multiplier = torch.where(entropy < table[FIELD["entropy_threshold"]], 0.0, table[FIELD["multiplier"]])
    multiplier = torch.where(log_ratio.isnan() | logp.isnan() | entropy.isnan(), torch.nan, multiplier)
    term = SURROGATES[p.surrogate](p, r, log_ratio, logp, A, clamp_acts)
    dropped = multiplier == 0.0
    value, d_ratio, d_direct = (torch.where(dropped, 0.0, multiplier * part) for part in term)

    kl, d_kl, d_product = kl_divergence(p, logp, ref)
    if p.bias_correction:
        product = kl * r
        beyond = product.abs() > PRODUCT_LIMIT
        kl = product.clamp(-PRODUCT_LIMIT, PRODUCT_LIMIT)
        if not shares_ratio(p.level):  # the ratio moves with the token's own logp: one derivative for both factors
            d_kl = torch.where(clamp_acts, d_kl, d_product)
        d_kl = torch.where(beyond, 0.0, d_kl * r)
        clamp_acts = clamp_acts | beyond
    if p.beta != 0.0:
        value = value + p.beta * kl
        d_direct = d_direct + p.beta * d_kl
        if p.bias_correction and shares_ratio(p.level):
            d_ratio = d_ratio + torch.where(clamp_acts, 0.0, p.beta * kl)
    return Objective(value, d_ratio, d_direct, kl)


def clamp_log_ratio(log_ratio: Tensor, p: KernelParams) -> tuple[Tensor, Tensor]:
    """(clamped log-ratio, where the clamp acts)."""
    x = log_ratio.clamp(-p.log_ratio_clamp, min(p.log_ratio_clamp, EXPONENT_LIMIT))
    return x, x != log_ratio


# --- surrogates: (params, ratio, raw log-ratio, logp, A, clamp_acts) -> Term --------------------------------------


def clip(p: KernelParams, r: Tensor, x: Tensor, logp: Tensor, A: Tensor, clamp_acts: Tensor) -> Term:
    low, high = 1 - p.epsilon_low, 1 + p.epsilon_high
    first, second = r.clamp(max=p.delta) * A, r.clamp(low, high) * A
    loss = -torch.minimum(first, second)
    moving = torch.where(first <= second, r <= p.delta, (r >= low) & (r <= high)) & ~clamp_acts
    bound = torch.where(A < 0, -p.dual_clip * A, torch.inf)
    moving &= loss <= bound
    return Term(torch.minimum(loss, bound), torch.where(moving, -A * r, 0.0), torch.zeros_like(A))


def weighted(p: KernelParams, r: Tensor, x: Tensor, logp: Tensor, A: Tensor, clamp_acts: Tensor) -> Term:
    """The ratio within bounds is a constant weight here: all gradient goes through logp."""
    low, high = p.weight_low, p.weight_high
    drop = torch.zeros_like(r, dtype=torch.bool)
    if p.outside == "drop":
        drop = ~((low < r) & (r < high))
    elif p.outside == "drop_outward":
        drop = ((A > 0) & (r > high)) | ((A < 0) & (r < low))
    return _weighted_logp(r.clamp(low, high), logp, A, drop)


def sapo(p: KernelParams, r: Tensor, x: Tensor, logp: Tensor, A: Tensor, clamp_acts: Tensor) -> Term:
    tau = torch.full_like(A, p.sapo_temperature_neg).masked_fill(A > 0, p.sapo_temperature_pos)
    gate = torch.sigmoid(tau * (r - 1))
    return Term(
        -(4 / tau) * gate * A, torch.where(clamp_acts, 0.0, -4 * gate * (1 - gate) * A * r), torch.zeros_like(A)
    )


def gmpo(p: KernelParams, r: Tensor, x: Tensor, logp: Tensor, A: Tensor, clamp_acts: Tensor) -> Term:
    return Term(-A * r, torch.where(clamp_acts, 0.0, -A * r), torch.zeros_like(A))


def dppo_tv(p: KernelParams, r: Tensor, x: Tensor, logp: Tensor, A: Tensor, clamp_acts: Tensor) -> Term:
    change = logp.exp() - (logp - x).exp()
    drop = ((A > 0) & (change > p.epsilon_high)) | ((A <= 0) & (change < -p.epsilon_low))
    return _trust_region(p, r, x, logp, A, clamp_acts, drop)


def dppo_kl(p: KernelParams, r: Tensor, x: Tensor, logp: Tensor, A: Tensor, clamp_acts: Tensor) -> Term:
    now, before = logp.exp(), (logp - x).exp()
    kl = -before * x + (1 - before) * ((1 - before + 1e-8) / (1 - now + 1e-8)).log()  # of the sampled id or not
    drop = torch.where(A > 0, (x > 0) & (kl > p.epsilon_high), (x < 0) & (kl > p.epsilon_low))
    return _trust_region(p, r, x, logp, A, clamp_acts, drop)


def ipo(p: KernelParams, r: Tensor, x: Tensor, logp: Tensor, A: Tensor, clamp_acts: Tensor) -> Term:
    drop = (logp.exp() - (logp - x).exp()).abs() > p.epsilon_high
    return _trust_region(p, r, x, logp, A, clamp_acts, drop)


SURROGATES = {f.__name__: f for f in (clip, weighted, sapo, gmpo, dppo_tv, dppo_kl, ipo)}


def _weighted_logp(weight: Tensor, logp: Tensor, A: Tensor, drop: Tensor) -> Term:
    value, slope = (torch.where(drop, 0.0, x) for x in (-weight * A * logp, -weight * A))
    return Term(value, torch.zeros_like(A), slope)


def _trust_region(
    p: KernelParams, r: Tensor, x: Tensor, logp: Tensor, A: Tensor, clamp_acts: Tensor, drop: Tensor
) -> Term:
    quadratic, slope = p.dppo_kl_tau * x * x, 2 * p.dppo_kl_tau * x
    if p.ratio_cap != math.inf:
        value, _, d_direct = _weighted_logp(r.clamp(max=p.ratio_cap), logp, A, drop)
        return Term(value + quadratic, slope, d_direct)
    value = torch.where(drop, 0.0, -r * A)
    return Term(value + quadratic, torch.where(clamp_acts, 0.0, value) + slope, torch.zeros_like(A))


# --- KL to the reference policy -----------------------------------------------------------------------------------


def kl_divergence(p: KernelParams, logp: Tensor, ref: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(estimate, its derivative with respect to logp, that of its product with a factor that is 1 and grows like the
    probability)."""
    if p.kl == "none":
        return (torch.zeros_like(logp),) * 3
    d = (ref - logp).clamp(-p.kl_delta_clamp, p.kl_delta_clamp)
    inside = d == ref - logp
    value, slope, both = KL_ESTIMATORS[p.kl.removesuffix("+")](d)
    bounded = value.clamp(-p.kl_clamp, p.kl_clamp)
    inside &= bounded == value
    if p.kl.endswith("+"):  # straight-through: the value of the estimator, the gradient of k2 without a clamp
        return bounded, logp - ref, bounded + (logp - ref)
    if p.kl == "k3":
        inside &= d <= EXPONENT_LIMIT
    slope, both = torch.where(inside, slope, 0.0), torch.where(inside, both, bounded)
    return bounded, torch.where(inside, both, 0.0) if p.score_term else slope, both


# (value, slope, value + slope): of k3 both are some exp(d), of which nothing is left in their sum.


def _k1(d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return -d, torch.ones_like(d), 1 - d


def _k2(d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return d * d / 2, -d, d * (d / 2 - 1)


def _k3(d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    e = d.clamp(max=EXPONENT_LIMIT)
    return e.expm1() - e, -e.expm1(), -e


def _abs(d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return d.abs(), -d.sign(), d.abs() - d.sign()


KL_ESTIMATORS = {"k1": _k1, "k2": _k2, "k3": _k3, "abs": _abs}

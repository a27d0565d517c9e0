"""The estimate of the KL to a reference policy from d = ref - logp of the sampled id, and its derivatives."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..names import EXPONENT_LIMIT, PRODUCT_LIMIT

KLEstimator = Literal["none", "k1", "k2", "k3", "abs", "k1+", "k3+"]
KL_ESTIMATORS: tuple[KLEstimator, ...] = get_args(KLEstimator)


class KL(NamedTuple):
    """(N,) each. `product`: the derivative of the estimate times a factor that is 1 and grows like the probability."""

    value: Tensor
    slope: Tensor
    product: Tensor


def kl_estimate(c: Any, logp: Tensor, ref: Tensor) -> KL:
    """Returns the estimate of config.kl_estimator under its clamps; slope: d value / d logp."""
    name, (bound_of_d, bound) = c.kl_estimator, c.kl_clamps
    raw = d = ref - logp
    outside = None
    if bound_of_d is not None:
        d = raw.clamp(-bound_of_d, bound_of_d)
        outside = d != raw
    value, slope, product = _ESTIMATORS[name.removesuffix("+")](d)
    if bound is not None:
        free, value = value, value.clamp(-bound, bound)
        outside = value != free if outside is None else outside | (value != free)
    if name.endswith("+"):  # straight-through: the value of the estimator, the gradient of k2 without a clamp
        return KL(value, -raw, value - raw)
    if name == "k3":
        beyond = d > EXPONENT_LIMIT
        outside = beyond if outside is None else outside | beyond
    if outside is not None:
        slope, product = torch.where(outside, 0.0, slope), torch.where(outside, value, product)
    if c.kl_score_term:
        slope = product if outside is None else torch.where(outside, 0.0, product)
    return KL(value, slope, product)


def times_ratio(kl: KL, ratio: Tensor, clamped: Tensor, *, shared: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Multiplies the estimate by the ratio (bias correction, arXiv:2512.02556): (value, d value / d logp, where it does
    not move with the ratio). shared: the ratio is that of a sequence; else it moves with the token's own logp."""
    free = kl.value * ratio
    value = free.clamp(-PRODUCT_LIMIT, PRODUCT_LIMIT)
    beyond = free.abs() > PRODUCT_LIMIT
    slope = kl.slope if shared else torch.where(clamped, kl.slope, kl.product)
    return value, torch.where(beyond, 0.0, slope * ratio), clamped | beyond


# (value, slope, value + slope): of k3 both are some exp(d), of which nothing is left in their sum.


def _k1(d: Tensor) -> KL:
    return KL(-d, torch.ones_like(d), 1 - d)


def _k2(d: Tensor) -> KL:
    return KL(d * d / 2, -d, d * (d / 2 - 1))


def _k3(d: Tensor) -> KL:
    e = d.clamp(max=EXPONENT_LIMIT)
    growth = e.expm1()
    return KL(growth - e, -growth, -e)


def _abs(d: Tensor) -> KL:
    sign = d.sign()
    return KL(d.abs(), -sign, d.abs() - sign)


_ESTIMATORS = {"k1": _k1, "k2": _k2, "k3": _k3, "abs": _abs}

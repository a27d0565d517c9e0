"""The estimate of the KL to a reference policy from d = ref - logp of the sampled id, and its derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..loss_config import LossConfig
from ..names import EXPONENT_LIMIT, PRODUCT_LIMIT

KLEstimator = Literal["none", "k1", "k2", "k3", "abs", "k1+", "k3+"]
KL_ESTIMATORS: tuple[KLEstimator, ...] = get_args(KLEstimator)


class KL(NamedTuple):
    """(N,) each. `product`: the derivative of the estimate times a factor that is 1 and grows like the probability;
    None where nothing asks for it."""

    value: Tensor
    d_logp: Tensor
    product: Tensor | None


def kl_estimate(c: LossConfig, logp: Tensor, ref: Tensor) -> KL:
    """Returns the estimate of config.kl_estimator under its clamps; d_logp: d value / d logp."""
    name, (bound_of_d, bound) = c.kl_estimator, c.kl_clamps
    raw = d = ref - logp
    outside = None
    if bound_of_d is not None:
        d = raw.clamp(-bound_of_d, bound_of_d)
        outside = d != raw
    value, d_logp = _ESTIMATORS[name.removesuffix("+")](d)
    if bound is not None:
        free, value = value, value.clamp(-bound, bound)
        outside = value != free if outside is None else outside | (value != free)
    if name.endswith("+"):  # straight-through: the value of the estimator, the gradient of k2 without a clamp
        return KL(value, -raw, value - raw if c.use_bias_correction_kl else None)
    if name == "k3":
        beyond = d > EXPONENT_LIMIT
        outside = beyond if outside is None else outside | beyond
    product = PRODUCTS[name](d) if c.use_bias_correction_kl or c.kl_score_term else None
    if product is not None and outside is not None:
        product = torch.where(outside, 0.0 if c.kl_score_term else value, product)
    if c.kl_score_term and product is not None:
        d_logp = product
    elif outside is not None:
        d_logp = torch.where(outside, 0.0, d_logp)
    return KL(value, d_logp, product)


def times_ratio(kl: KL, ratio: Tensor, clamped: Tensor, *, shared: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Multiplies the estimate by the ratio (bias correction, arXiv:2512.02556): (value, d value / d logp, where it does
    not move with the ratio). shared: the ratio is that of a sequence; else it moves with the token's own logp."""
    free = kl.value * ratio
    value = free.clamp(-PRODUCT_LIMIT, PRODUCT_LIMIT)
    beyond = free.abs() > PRODUCT_LIMIT
    d_logp = kl.d_logp
    if not shared:
        assert kl.product is not None
        d_logp = torch.where(clamped, d_logp, kl.product)
    return value, torch.where(beyond, 0.0, d_logp * ratio), clamped | beyond


def _k3(d: Tensor) -> tuple[Tensor, Tensor]:
    e = d.clamp(max=EXPONENT_LIMIT)
    growth = e.expm1()
    return growth - e, -growth


# (value, d value / d logp) from d
_ESTIMATORS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "k1": lambda d: (-d, torch.ones_like(d)),
    "k2": lambda d: (d * d / 2, -d),
    "k3": _k3,
    "abs": lambda d: (d.abs(), -d.sign()),
}
# value + d_logp: of k3 both are some exp(d), of which nothing is left in their sum. What kl_score_term can be used
# with.
PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: 1 - d,
    "k2": lambda d: d * (d / 2 - 1),
    "k3": lambda d: -d.clamp(max=EXPONENT_LIMIT),
    "abs": lambda d: d.abs() - d.sign(),
}

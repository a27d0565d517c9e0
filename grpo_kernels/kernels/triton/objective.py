"""The loss of one token and its derivatives: csrc/objective.h for blocks of tokens.

    value = keep * multiplier * surrogate(x, logp, A) + beta * KL(logp, ref) * (r if bias-corrected else 1)
    r     = exp(clamp(x)),   keep = not entropy < entropy_threshold

x is the raw log ratio: logp - old for a token, a mean or sum of those for a sequence, 0 without old. The total
derivative with respect to logp is d_ratio * dx/dlogp + d_direct. Where a clamp acts, the derivative is 0. A factor that
is 0 selects an exact 0 and is never multiplied with something that may be infinite. NaN logits make the
multiplier NaN, even where a clip, a threshold or a factor of 0 would have dropped them.

The `Variant` is compiled in; the numbers of KernelParams (`Scalars`) are run-time float32 values. Kernels pass the
address of a token's own column of a batch's table and values, and `tokens`, the number of columns, from one field to
the next.
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ... import names
from ...names import KernelParams, integers_first, shares_ratio
from .layout import (
    ADVANTAGE,
    ENTROPY_THRESHOLD,
    MULTIPLIER,
    OLD,
    REF,
    TOKEN_G_LOGP,
    TOKEN_KL,
    TOKEN_LOG_RATIO,
    TOKEN_VALUE,
    WEIGHT_DIRECT,
    WEIGHT_RATIO,
)
from .maths import expm1

MAX_EXPONENT: tl.constexpr = tl.constexpr(names.EXPONENT_LIMIT)
MAX_PRODUCT: tl.constexpr = tl.constexpr(names.PRODUCT_LIMIT)


_NUMBERS = integers_first(KernelParams)[1]  # its float32 fields
Scalars = namedtuple("Scalars", _NUMBERS)  # type: ignore[misc]


def scalars(params: KernelParams) -> Any:
    return Scalars(*(float(getattr(params, name)) for name in _NUMBERS))


class Variant(NamedTuple):
    """What of a token's objective is compiled in."""

    surrogate: str
    kl: str
    has_old: bool
    bias_correction: bool
    corrects_by_sequence: bool  # the ratio of that is shared by the tokens of a sequence
    score_term: bool
    outside: str
    caps_ratio: bool


def variant(params: KernelParams) -> Variant:
    caps = params.ratio_cap != math.inf
    corrects = params.bias_correction, params.bias_correction and shares_ratio(params.level)
    return Variant(params.surrogate, params.kl, params.has_old, *corrects, params.score_term, params.outside, caps)


class Token(NamedTuple):
    """What the objective reads of tokens."""

    x: Any  # raw log ratio
    logp: Any
    entropy: Any
    A: Any  # advantage
    ref: Any  # log-probability under the reference policy
    multiplier: Any
    threshold: Any  # of the entropy


class Objective(NamedTuple):
    """What tokens that depend on themselves alone contribute."""

    x: Any  # raw log ratio
    value: Any
    kl: Any
    g_logp: Any  # d loss / d logp


@triton.jit
def clamp(x, low, high):
    """x within [low, high]; NaN stays."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


# --- surrogates: (value, d_ratio, d_direct); their derivatives ignore the clamp of x, token_objective applies it ----


@triton.jit
def clip(p, r, A):
    low, high = 1.0 - p.epsilon_low, 1.0 + p.epsilon_high
    unclipped = tl.where(r < p.delta, r, p.delta) * A
    clipped = clamp(r, low, high) * A
    first = unclipped <= clipped
    moving = tl.where(first, r <= p.delta, (low <= r) & (r <= high))
    value = -tl.where(first, unclipped, clipped)
    bound = -p.dual_clip * A
    dual = (A < 0.0) & (value > bound)
    zero = tl.zeros_like(A)
    return tl.where(dual, bound, value), tl.where(moving & ~dual, -A * r, zero), zero


@triton.jit
def weighted_logp(p, r, logp, A, VARIANT: tl.constexpr):
    """The ratio within bounds is a constant weight here: all gradient goes through logp."""
    OUTSIDE: tl.constexpr = VARIANT.outside
    coefficient = clamp(r, p.weight_low, p.weight_high) * A
    value = -coefficient * logp
    if OUTSIDE != "clamp":
        if OUTSIDE == "drop":
            drop = ~((p.weight_low < r) & (r < p.weight_high))
        else:
            drop = ((A > 0.0) & (r > p.weight_high)) | ((A < 0.0) & (r < p.weight_low))
        coefficient, value = tl.where(drop, 0.0, coefficient), tl.where(drop, 0.0, value)
    return value, tl.zeros_like(logp), -coefficient


@triton.jit
def sapo(p, r, A):
    tau = tl.where(A > 0.0, p.sapo_temperature_pos, p.sapo_temperature_neg)
    # sigmoid and its complement, each without cancellation: s (1 - s) stays exact far away from r = 1
    decay = tl.exp(-tl.abs(tau * (r - 1.0)))
    far_side, near_side = decay / (1.0 + decay), 1.0 / (1.0 + decay)
    s = tl.where(tau * (r - 1.0) >= 0.0, near_side, far_side)
    return -(4.0 / tau) * s * A, -4.0 * (far_side * near_side) * A * r, tl.zeros_like(A)


@triton.jit
def gmpo(r, A):
    return -A * r, -A * r, tl.zeros_like(A)


@triton.jit
def probability_change(x, logp):
    """p - q: the change of the token's probability since it was sampled. x is raw: the quadratic has no clamp."""
    return tl.exp(logp) - tl.exp(logp - x)


@triton.jit
def is_in_trust_region(p, x, logp, A, VARIANT: tl.constexpr):
    SURROGATE: tl.constexpr = VARIANT.surrogate
    if SURROGATE == "dppo_kl":  # of the sampled id against all others
        now, before = tl.exp(logp), tl.exp(logp - x)
        kl = -before * x + (1.0 - before) * tl.log((1.0 - before + 1e-8) / (1.0 - now + 1e-8))
        drop = tl.where(A > 0.0, (x > 0.0) & (kl > p.epsilon_high), (x < 0.0) & (kl > p.epsilon_low))
    elif SURROGATE == "ipo":
        drop = ~(tl.abs(probability_change(x, logp)) <= p.epsilon_high)
    else:
        change = probability_change(x, logp)
        drop = tl.where(A > 0.0, change > p.epsilon_high, change < -p.epsilon_low)
    return ~drop


@triton.jit
def trust_region(p, clamped, r, x, logp, A, VARIANT: tl.constexpr):
    keep = is_in_trust_region(p, x, logp, A, VARIANT)
    quadratic, slope = p.dppo_kl_tau * x * x, 2.0 * p.dppo_kl_tau * x
    if VARIANT.caps_ratio:
        coefficient = tl.where(r < p.ratio_cap, r, p.ratio_cap) * A
        value, d_ratio = tl.where(keep, -coefficient * logp, 0.0) + quadratic, slope
        d_direct = tl.where(keep, -coefficient, 0.0)
    else:
        policy = tl.where(keep, -r * A, 0.0)
        value, d_ratio, d_direct = policy + quadratic, tl.where(clamped, 0.0, policy) + slope, tl.zeros_like(A)
    return value, d_ratio, d_direct


@triton.jit
def surrogate(p, clamped, r, x, logp, A, VARIANT: tl.constexpr):
    """(value, d_ratio, d_direct) of the surrogate of this name."""
    SURROGATE: tl.constexpr = VARIANT.surrogate
    if SURROGATE == "dppo_tv" or SURROGATE == "dppo_kl" or SURROGATE == "ipo":  # these treat the clamp of x themselves
        value, d_ratio, d_direct = trust_region(p, clamped, r, x, logp, A, VARIANT)
    else:
        if SURROGATE == "clip":
            value, d_ratio, d_direct = clip(p, r, A)
        elif SURROGATE == "weighted":
            value, d_ratio, d_direct = weighted_logp(p, r, logp, A, VARIANT)
        elif SURROGATE == "sapo":
            value, d_ratio, d_direct = sapo(p, r, A)
        else:
            tl.static_assert(SURROGATE == "gmpo", "unknown surrogate")
            value, d_ratio, d_direct = gmpo(r, A)
        d_ratio = tl.where(clamped, 0.0, d_ratio)
    return value, d_ratio, d_direct


# --- KL estimators of d = ref - logp: (value, derivative with respect to logp, their sum), of which in k3, where both
# are some exp(d), nothing would be left ------------------------------------------------------------------------------


@triton.jit
def kl_k1(d):
    return -d, tl.full(d.shape, 1.0, d.dtype), 1.0 - d


@triton.jit
def kl_k2(d):
    return 0.5 * d * d, -d, d * (0.5 * d - 1.0)


@triton.jit
def kl_k3(d):
    """exp(d) - 1 - d; expm1 keeps the digits of a small d."""
    growth = expm1(d)
    return growth - d, -growth, -d


@triton.jit
def kl_abs(d):
    slope = tl.where(d > 0.0, -1.0, tl.where(d < 0.0, 1.0, 0.0))
    return tl.abs(d), slope, tl.abs(d) + slope


@triton.jit
def kl_divergence(p, logp, ref, VARIANT: tl.constexpr):
    """(estimate, d/dlogp, that of its product with a factor that is 1 and grows like the probability) under both
    clamps."""
    KL: tl.constexpr = VARIANT.kl
    raw = ref - logp
    upper = p.kl_delta_clamp
    if KL == "k3" or KL == "k3+":
        upper = tl.where(upper > MAX_EXPONENT, MAX_EXPONENT, upper)
    d = clamp(raw, -p.kl_delta_clamp, upper)
    if KL == "k1":
        estimate, slope, both = kl_k1(d)
    elif KL == "k2":
        estimate, slope, both = kl_k2(d)
    elif KL == "k3":
        estimate, slope, both = kl_k3(d)
    elif KL == "abs":
        estimate, slope, both = kl_abs(d)
    elif KL == "k1+":
        estimate, slope, both = kl_k1(d)
    else:
        tl.static_assert(KL == "k3+", "unknown KL estimator")
        estimate, slope, both = kl_k3(d)
    value = clamp(estimate, -p.kl_clamp, p.kl_clamp)
    if KL == "k1+" or KL == "k3+":  # straight-through: the value of the one, the gradient of k2 without a clamp
        slope, both = -raw, value - raw
    else:
        if VARIANT.score_term:
            slope = both
        clamped = (raw < -p.kl_delta_clamp) | (raw > upper) | (value != estimate)
        slope, both = tl.where(clamped, 0.0, slope), tl.where(clamped, value, both)
    return value, slope, both


# --- the token ------------------------------------------------------------------------------------------------------


@triton.jit
def clamped_log_ratio(p, x):
    """The log ratio that is exponentiated: at most 80 even without a clamp."""
    return clamp(x, -p.log_ratio_clamp, tl.where(p.log_ratio_clamp < MAX_EXPONENT, p.log_ratio_clamp, MAX_EXPONENT))


@triton.jit
def token_objective(p, token, VARIANT: tl.constexpr):
    """(value before its weight, d value / d x, d value / d logp at fixed x, KL without beta)."""
    x, logp, entropy = token.x, token.logp, token.entropy
    multiplier = tl.where(entropy < token.threshold, 0.0, token.multiplier)
    multiplier = tl.where((x != x) | (logp != logp) | (entropy != entropy), float("nan"), multiplier)
    exponent = clamped_log_ratio(p, x)
    clamped = exponent != x
    r = tl.exp(exponent)
    value, d_ratio, d_direct = surrogate(p, clamped, r, x, logp, token.A, VARIANT)
    kept = multiplier != 0.0
    value = tl.where(kept, multiplier * value, 0.0)
    d_ratio = tl.where(kept, multiplier * d_ratio, 0.0)
    d_direct = tl.where(kept, multiplier * d_direct, 0.0)
    kl = tl.zeros_like(x)
    if VARIANT.kl != "none":
        kl, slope, both = kl_divergence(p, logp, token.ref, VARIANT)
        if VARIANT.bias_correction:
            product = kl * r
            kl = clamp(product, -MAX_PRODUCT, MAX_PRODUCT)
            beyond = tl.abs(product) > MAX_PRODUCT
            if not VARIANT.corrects_by_sequence:  # the ratio moves with the token's own logp
                slope = tl.where(clamped, slope, both)
            slope = tl.where(beyond, 0.0, slope * r)
            clamped = clamped | beyond
        penalised = p.beta != 0.0
        value += tl.where(penalised, p.beta * kl, 0.0)
        d_direct += tl.where(penalised, p.beta * slope, 0.0)
        if VARIANT.corrects_by_sequence:
            d_ratio += tl.where(penalised & ~clamped, p.beta * kl, 0.0)
    return value, d_ratio, d_direct, kl


@triton.jit
def weighted(weight, slope):
    """A weight of 0 selects 0, whatever the slope."""
    return tl.where(weight != 0.0, weight * slope, 0.0)


@triton.jit
def own_log_ratio(column, tokens, live, logp, HAS_OLD: tl.constexpr):
    """The raw log ratio of the token alone; `column` points to its column of the table. NaN where logp is, and where it
    has no ratio: -inf divided by itself."""
    if HAS_OLD:
        old = tl.load(column + OLD * tokens, mask=live, other=0.0)
        return logp - tl.where(old == float("inf"), logp, old)
    return logp - logp


@triton.jit
def load_token(column, tokens, live, x, logp, entropy, multiplier):
    """The rest of a Token from its column of the table."""
    A = tl.load(column + ADVANTAGE * tokens, mask=live, other=0.0)
    ref = tl.load(column + REF * tokens, mask=live, other=0.0)
    threshold = tl.load(column + ENTROPY_THRESHOLD * tokens, mask=live, other=0.0)
    return Token(x, logp, entropy, A, ref, multiplier, threshold)


@triton.jit
def evaluate_token(column, tokens, live, logp, entropy, p, VARIANT: tl.constexpr):
    """The Objective of tokens that depend on themselves alone."""
    x = own_log_ratio(column, tokens, live, logp, VARIANT.has_old)
    multiplier = tl.load(column + MULTIPLIER * tokens, mask=live, other=0.0)
    token = load_token(column, tokens, live, x, logp, entropy, multiplier)
    value, d_ratio, d_direct, kl = token_objective(p, token, VARIANT)
    g_logp = weighted(tl.load(column + WEIGHT_RATIO * tokens, mask=live, other=0.0), d_ratio)
    g_logp += weighted(tl.load(column + WEIGHT_DIRECT * tokens, mask=live, other=0.0), d_direct)
    return Objective(x, value, kl, g_logp)


@triton.jit
def store_objective(column, tokens, live, objective):
    """`column` points to the token's column of the values."""
    tl.store(column + TOKEN_LOG_RATIO * tokens, objective.x, mask=live)
    tl.store(column + TOKEN_VALUE * tokens, objective.value, mask=live)
    tl.store(column + TOKEN_KL * tokens, objective.kl, mask=live)
    tl.store(column + TOKEN_G_LOGP * tokens, objective.g_logp, mask=live)

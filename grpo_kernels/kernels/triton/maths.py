"""Functions on blocks that Triton's own language lacks, from exp2 and log alone: the same code on every target.

libdevice has them for NVIDIA, in other files for AMD, and not in the interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
INV_LN2: tl.constexpr = tl.constexpr(1.4426950408889634)
LOWEST_EXPONENT: tl.constexpr = tl.constexpr(-200.0)  # 2^t is exactly 0 there, and t stays finite: -inf gives 0


@triton.jit
def exponent(y, reference, to_exponent):
    """Returns t of 2^t; NaN stays NaN."""
    t = (y - reference) * to_exponent
    return tl.where(t < LOWEST_EXPONENT, LOWEST_EXPONENT, t)


@triton.jit
def expm1(x):
    """Returns e^x - 1 with the relative accuracy of log: (u - 1) x / log u is right for any u near e^x (Kahan)."""
    u = tl.exp(x)
    near = u == 1.0
    inside = tl.where(near | (u == 0.0), 2.0, u)
    ratio = (inside - 1.0) * x / tl.log(inside)
    return tl.where(near, x, tl.where(u == 0.0, -1.0, ratio))


@triton.jit
def log1p(x):
    """Returns log(1 + x) with the relative accuracy of log: log(u) x / (u - 1) is right for u = 1 + x as rounded
    (Kahan)."""
    u = 1.0 + x
    near = u == 1.0
    inside = tl.where(near, 2.0, u)
    return tl.where(near, x, tl.log(inside) * (x / (inside - 1.0)))


@triton.jit
def tanh_pair(x):
    """Returns (tanh x, 1 - tanh^2 x), both with relative accuracy; where (1 - e) / (1 + e) cancels, by Cephes'
    polynomial."""
    magnitude = tl.abs(x)
    e = tl.exp2(magnitude * (-2.0 * INV_LN2))
    inverse = 1.0 / (1.0 + e)
    far = (1.0 - e) * inverse
    z = x * x
    near = -5.70498872745e-3
    near = near * z + 2.06390887954e-2
    near = near * z - 5.37397155531e-2
    near = near * z + 1.33314422036e-1
    near = near * z - 3.33332819422e-1
    near = near * z * x + x
    value = tl.where(magnitude < 0.625, near, tl.where(x < 0.0, -far, far))
    return value, 4.0 * e * inverse * inverse


@triton.jit
def softcap(u, scale, cap, CAPPED: tl.constexpr):
    """Returns (y, dy/du without the scale): y = cap tanh(scale u / cap), or u itself where nothing is capped.

    A logit of -inf, an id that is excluded, stays one, and the slope is 0 there: what is added for it changes no finite
    logit, and takes no register as a selection would.
    """
    if CAPPED:
        value, slope = tanh_pair(u * (scale / cap))
        return value * cap + tl.minimum(u, 0.0) * 1e-37, slope
    return u, tl.full(u.shape, 1.0, tl.float32)

"""Names and numbers that need no torch and belong to no room of their own."""

from __future__ import annotations

import math
from typing import Literal, get_args

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]  # of the policy's distribution and a teacher's
DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)  # in the order of csrc/layout.h
AdvantageScale = Literal["group", "batch", "mean", "none"]
ADVANTAGE_SCALES: tuple[AdvantageScale, ...] = get_args(AdvantageScale)
AdvantageBaseline = Literal["mean", "leave_one_out", "length_weighted", "pass_at_k", "none"]
ADVANTAGE_BASELINES: tuple[AdvantageBaseline, ...] = get_args(AdvantageBaseline)

# exp(88.7) is the largest float32. Exponents of ratios and of k3 stop here, with gradient 0 like every other clamp; and
# so does the bias-corrected KL, the product of the two, at the same number.
EXPONENT_LIMIT = 80.0
PRODUCT_LIMIT = math.exp(EXPONENT_LIMIT)


def add_op_namespace_prefix(op_name: str) -> str:
    """Returns the full name of a custom operator, below the name that this copy of the package is imported by.

    Two copies in one process, one of them loaded from the Hugging Face Hub, then register operators of their own. The
    function has the name that kernel-builder looks for where operators are registered.
    """
    return f"{__name__.partition('.')[0]}::{op_name}"

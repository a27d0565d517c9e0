"""Which losses have a fused kernel, `Backend.objective`, and the numbers that it reads. Losses of single tokens that
people run; objective/ has every other one.
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

CLIPPING = ("clip", "cispo_two_sided", "cispo_mask", "cispo_unified")  # with metrics of a clip range
SURROGATES = (*CLIPPING, "cispo", "sapo", "reinforce")
ESTIMATORS = ("none", "k1", "k2", "k3")
COLUMNS, EXTREMA = 15, 3  # of objective.metrics.Sums

_OPTIONS = (
    "epsilon_low", "epsilon_high", "delta", "dual_clip", "sapo_temperature_pos", "sapo_temperature_neg", "beta",
    "log_ratio_clamp",
)  # fmt: skip
Numbers = namedtuple("Numbers", (*_OPTIONS, "kl_delta_clamp", "kl_clamp"))  # type: ignore[misc]


def has_kernel(c: Any, rules: Any, dtype: torch.dtype) -> bool:
    """Returns whether the fused kernels have the loss of a GRPOConfig and its objective.tokens.Rules; dtype: of what is
    computed."""
    kl_is_plain = c.kl_estimator in ESTIMATORS and not c.kl_score_term and not c.use_bias_correction_kl
    return (
        c.surrogate in SURROGATES and (kl_is_plain or not rules.has_kl) and dtype == torch.float32
        and not rules.whole_sequences and not rules.has_entropy and not rules.has_threshold
        and c.distill_coef == 0.0
    )  # fmt: skip


def numbers_of(config: Any) -> Any:
    """Returns the Numbers of a GRPOConfig; a bound that it does not have is infinite."""
    given = (*(getattr(config, name) for name in _OPTIONS), *config.kl_clamps)
    return Numbers._make(math.inf if x is None else float(x) for x in given)


def memory_of_sums(sequences: int, groups: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what a fused kernel writes: objective.metrics.Sums in one row, float32; rows of float64 per sequence; how
    many programs have ended, 0 in int32."""
    sums = torch.empty((sequences + groups + 1) * COLUMNS + EXTREMA, dtype=torch.float32, device=device)
    exact = torch.empty(sequences, COLUMNS + EXTREMA, dtype=torch.float64, device=device)
    return sums, exact, torch.zeros(1, dtype=torch.int32, device=device)

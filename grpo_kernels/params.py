"""The contract between the engine and a backend's kernels: the row table and the scalar parameters.

`csrc/layout.h` repeats these names for the compiled backends; a test holds the two equal.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# One fp32 row per field, one column per token: what a row kernel needs to know of a token besides its logits.
TABLE_FIELDS = (
    "advantage",
    "base",  # the log-probability that the ratio divides by (old policy, or the rollout engine for DPPO and IPO)
    "ref",  # log-probability under the reference policy
    "multiplier",  # rollout weight, off-policy mask, VESPO's phi: everything that scales the surrogate alone
    "weight_ratio",  # d loss / d (token value), for the part of the gradient that flows through the ratio
    "weight_direct",  # the same for the part that flows through logp itself; also the weight of the value in the loss
    "weight_entropy",  # d loss / d entropy
    "temperature",
    "entropy_threshold",  # -inf keeps every token
    "rollout",  # log-probability under the sampling engine, NaN where unknown; for metrics
    "rollout_weight",  # importance weight as given; for metrics
)
FIELD = {name: i for i, name in enumerate(TABLE_FIELDS)}

SURROGATES = ("clip", "cispo", "cispo_two_sided", "sapo", "reinforce", "gmpo", "dppo_tv", "ipo")
KL_ESTIMATORS = ("none", "k1", "k2", "k3", "abs", "k1+", "k3+")

# Columns of a backend's `reduce`: sums over the scored tokens of a sequence, a group, the batch.
COLUMNS = (
    "loss",
    "tokens",
    "kl",
    "entropy",
    "ratio",
    "clip_low",
    "clip_high",
    "cispo_clip",
    "approx_kl",
    "mismatch",
    "mismatch_count",
    "rollout_weight",
    "rollout_weight_sq",
    "zero_gradient",
)
COLUMN = {name: i for i, name in enumerate(COLUMNS)}

# exp(88.7) is the largest float32. Exponents of ratios and of k3 stop here, with gradient 0 like every other clamp; and
# so does the bias-corrected KL, the product of the two, at the same number.
EXPONENT_LIMIT = 80.0
PRODUCT_LIMIT = math.exp(EXPONENT_LIMIT)


def chunk_pitch(vocab_size: int, device: torch.device) -> int:
    """Elements from one row of the scratch to the next: on a GPU each starts on 16 bytes, whatever the vocabulary.

    8 elements would do, but what Triton knows of an integer is whether 16 divides it.
    """
    return vocab_size if device.type == "cpu" else -(-vocab_size // 16) * 16


class RowStats(NamedTuple):
    """(C,) each, nats: log-probability of the token, log-sum-exp, entropy.

    lse is float64: logits near 1e4 leave a float32 lse an error of 1e-3, and the probabilities of the gradient with it.
    """

    logp: Tensor
    lse: Tensor
    entropy: Tensor


class KernelParams(NamedTuple):
    """Scalars of the per-token objective; `math.inf` switches a clamp off. Run-time values, never compiled in."""

    surrogate: str = "clip"
    kl: str = "none"
    has_base: bool = True
    bias_correction: bool = False
    beta: float = 0.0
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float = math.inf
    dual_clip: float = math.inf
    log_ratio_clamp: float = math.inf
    kl_delta_clamp: float = math.inf
    kl_clamp: float = math.inf
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    logit_scale: float = 1.0
    softcap: float = 0.0  # 0: no softcap

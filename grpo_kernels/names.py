"""Names and numbers that Python and Triton share. It imports nothing of the package, and no torch.

The order of every list is the order of the codes that kernels receive.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

Aggregation = Literal["seq_mean", "token_mean", "fixed_length", "num_items", "seq_sum"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
EntropyAggregation = Literal["token_mean", "loss"]  # of the entropy bonus
# Of the ratio: the token's, the mean over its sequence, the sum, the mean with the gradient of the token's own.
Level = Literal["token", "sequence", "sequence_sum", "sequence_token"]
LEVELS: tuple[Level, ...] = get_args(Level)
WEIGHT_LEVELS = LEVELS[:3]  # of a ratio that is a constant: the fourth differs in the gradient alone
KLEstimator = Literal["none", "k1", "k2", "k3", "abs", "k1+", "k3+"]
KL_ESTIMATORS: tuple[KLEstimator, ...] = get_args(KLEstimator)
Surrogate = Literal[
    "clip", "cispo", "cispo_two_sided", "cispo_mask", "cispo_unified", "sapo", "vespo", "reinforce", "gmpo", "dppo_tv",
    "dppo_kl", "ipo",
]  # fmt: skip
# Of the kernels: "weighted" is -w(r) A logp, w the ratio within bounds, which is a constant to the gradient: all of
# CISPO's, REINFORCE, and VESPO with a multiplier of the whole sequence.
SURROGATES = "clip", "weighted", "sapo", "gmpo", "dppo_tv", "dppo_kl", "ipo"
# What "weighted" does with a ratio outside of the bounds: take the bound; weigh 0; weigh 0 where the advantage pushes
# outwards, else take the bound.
OUTSIDE = "clamp", "drop", "drop_outward"
Divergence = Literal["reverse_kl", "forward_kl", "jsd"]  # of the policy's distribution and a teacher's
DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)
AdvantageScale = Literal["group", "batch", "mean", "none"]
ADVANTAGE_SCALES: tuple[AdvantageScale, ...] = get_args(AdvantageScale)
AdvantageBaseline = Literal["mean", "leave_one_out", "length_weighted", "pass_at_k", "none"]
ADVANTAGE_BASELINES: tuple[AdvantageBaseline, ...] = get_args(AdvantageBaseline)

# One fp32 row per field, one column per token: what a row kernel needs to know of a token besides its logits.
TABLE_FIELDS = (
    "advantage",
    "old",  # the log-probability that the ratio divides by (old policy, or the rollout engine for DPPO and IPO);
    # +inf: the token's own, ratio 1
    "ref",  # log-probability under the reference policy
    "multiplier",  # rollout weight, off-policy mask, VESPO's phi: everything that scales the surrogate alone
    "weight_ratio",  # d loss / d (token value), for the part of the gradient that flows through the ratio
    "weight_direct",  # the same for the part that flows through logp itself; also the weight of the value in the loss
    "weight_entropy",  # d loss / d entropy
    "temperature",
    "entropy_threshold",  # -inf keeps every token
    "rollout",  # log-probability under the sampling engine, NaN where unknown; for metrics
    "rollout_weight",  # importance weight as given, 1 where there is none; for metrics
)
FIELD = {name: i for i, name in enumerate(TABLE_FIELDS)}

# One fp32 row per field, one column per token: what the kernels compute for a token. 0 where nothing was computed.
VALUE_FIELDS = (
    "logp",  # log-probability of the sampled id, nats
    "entropy",  # nats
    "log_ratio",  # what the surrogate sees: of the token, or of its sequence; not clamped
    "value",  # of the loss, before the token's weight
    "kl",  # estimate of the KL to the reference, before its weight
    "g_logp",  # d loss / d logp
    "divergence",  # to the teacher's distribution, nats
)

# Columns of a backend's `sums`: over the scored tokens of a sequence, a group, the batch.
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
    "divergence",
)
COLUMN = {name: i for i, name in enumerate(COLUMNS)}

# Sums over scored tokens with a sampling mask. The last two: of those that took the dense way (head/kept.py), for
# which alone the mass is known.
MASK_SUMS = ("tokens", "added", "dense_kept_mass", "dense_tokens")
# With sparse_backward: pairs of a token and an id, tokens that took products instead, tokens with a gradient.
SPARSE_SUMS = ("pairs", "dense", "tokens")
# One in the fixed-point running sum of sparse gradients, which a kernel keeps modulo this.
SPARSE_ONE = 2**31

# exp(88.7) is the largest float32. Exponents of ratios and of k3 stop here, with gradient 0 like every other clamp; and
# so does the bias-corrected KL, the product of the two, at the same number.
EXPONENT_LIMIT = 80.0
PRODUCT_LIMIT = math.exp(EXPONENT_LIMIT)


def shares_ratio(level: str) -> bool:
    """Whether all tokens of a sequence have a share in the gradient of its ratio."""
    return level in ("sequence", "sequence_sum")


class KernelParams(NamedTuple):
    """Scalars of the per-token objective; `math.inf` switches a clamp off. Run-time values, never compiled in."""

    surrogate: str = "clip"
    kl: str = "none"
    has_old: bool = True  # False: the ratio is logp / stop_gradient(logp), its logarithm 0
    bias_correction: bool = False  # the KL is multiplied by the ratio
    score_term: bool = False  # and by exp(logp - stop_gradient(logp))
    outside: str = "clamp"
    level: str = "token"
    has_rollout: bool = False  # log-probabilities of the sampling engine were given
    vespo: bool = False  # the multiplier is VESPO's phi of the sequence; the surrogate is "weighted"
    divides_by_rollout: bool = False  # the field "old" holds the rollout where that is known
    beta: float = 0.0
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    weight_low: float = 1.0  # bounds of "weighted"
    weight_high: float = 1.0
    delta: float = math.inf
    dual_clip: float = math.inf
    dppo_kl_tau: float = 1e-3  # weight of the squared log-ratio
    ratio_cap: float = math.inf  # below it the surrogate of DPPO and IPO is -min(r, cap) A logp
    log_ratio_clamp: float = math.inf
    kl_delta_clamp: float = math.inf
    kl_clamp: float = math.inf
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    logit_scale: float = 1.0
    softcap: float = 0.0  # 0: no softcap
    off_policy_threshold: float = math.inf  # of the mean drift from the sampling engine, nats
    vespo_k_pos: float = 2.0
    vespo_k_neg: float = 3.0
    vespo_lambda_pos: float = 3.0
    vespo_lambda_neg: float = 2.0


class PlanRules(NamedTuple):
    """Scalars of the plan. Run-time values, never compiled in."""

    aggregation: str = "num_items"
    divides_by_rollout: bool = False  # the ratio is one to the sampling engine, where that is known
    multiplies_rollout_weight: bool = True  # False: VESPO's phi takes its place
    level: str = "token"
    whole_sequences: bool = False  # a token's gradient depends on the log-probabilities of its sequence
    needs_advantage: bool = True  # the surrogate has no gradient where the advantage is 0
    kl_has_gradient: bool = False  # the KL term has a gradient
    score_inactive: bool = True
    max_completion_length: float = 0.0
    entropy_coef: float = 0.0
    temperature: float = 1.0
    entropy_threshold: float = -math.inf


class TeacherParams(NamedTuple):
    """Scalars of the divergence to a teacher's distribution."""

    divergence: str = "reverse_kl"
    divergence_beta: float = 0.5  # of "jsd": the teacher's share of the mixture
    logit_scale: float = 1.0
    softcap: float = 0.0  # 0: no softcap


def integers_first(struct: Any) -> tuple[list[str], list[str]]:
    """(members that kernels receive as int32: codes and flags, members that are float32)."""
    floats = [name for name, default in struct._field_defaults.items() if isinstance(default, float)]
    return [name for name in struct._fields if name not in floats], floats

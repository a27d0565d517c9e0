"""Which losses have a fused kernel, `Backend.objective`, and what it receives of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kernels.fused_objective import ESTIMATORS, SURROGATES, Numbers, ObjectiveInputs
from ..loss_config import LossConfig
from .tokens import Rules, Tokens


def has_kernel(c: LossConfig, rules: Rules, dtype: torch.dtype) -> bool:
    """Returns whether the fused kernels have a loss; dtype: of what is computed."""
    kl_is_plain = c.kl_estimator in ESTIMATORS and not c.kl_score_term and not c.use_bias_correction_kl
    return (
        c.surrogate in SURROGATES and (kl_is_plain or not rules.has_kl) and dtype == torch.float32
        and not rules.whole_sequences and not rules.has_entropy and not rules.has_threshold
        and c.distill_coef == 0.0
    )  # fmt: skip


def objective_inputs(tokens: Tokens, group_index: Tensor | None, num_groups: int) -> ObjectiveInputs:
    """Returns what the fused operation receives of a batch. group_index (S,)."""
    c, (kl_delta_clamp, kl_clamp) = tokens.config, tokens.config.kl_clamps
    options = {name: getattr(c, name) for name in Numbers._fields if not name.startswith("kl_")}
    options |= {"kl_delta_clamp": kl_delta_clamp, "kl_clamp": kl_clamp}
    return ObjectiveInputs(
        tokens.advantage, tokens.dloss_direct, tokens.dloss_via_ratio, tokens.old, tokens.ref, tokens.surrogate_scale,
        tokens.rollout, tokens.rollout_weight, tokens.scored, tokens.sequences.offsets, group_index,
        0 if group_index is None else num_groups, c.surrogate, "none" if tokens.ref is None else c.kl_estimator,
        Numbers(**{name: math.inf if x is None else float(x) for name, x in options.items()}),
    )  # fmt: skip

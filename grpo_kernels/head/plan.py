"""The plan of one call: which tokens count, their row table and weights. All O(N).

A backend's `plan` kernel fills the table; kernels/torch/plan.py says what it computes. This file has the
rest: which options are there, and what follows from the configuration alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import SURROGATE_RULES, GRPOConfig
from ..contract import Backend, PlannedTokens, TokenInputs, is_per_sequence
from ..names import FIELD, KernelParams, PlanRules, shares_ratio


class Plan(NamedTuple):
    """Everything O(N) that the engine needs."""

    tokens: PlannedTokens
    params: KernelParams
    rules: PlanRules
    config: GRPOConfig
    group_index: Tensor | None
    num_groups: int
    row_length: int | None  # T of a (B, T) batch, None for a packed one
    is_static: bool  # all rows are computed, since nothing is read back to the host

    @property
    def num_sequences(self) -> int:
        return self.tokens.lengths.numel()


def make_plan(
    inputs: TokenInputs,
    ids: Tensor,
    config: GRPOConfig,
    num_groups: int,
    backend: Backend,
    *,
    static_shapes: bool,
    dtype: torch.dtype,
    has_teacher: bool = False,
) -> Plan:
    """The plan of a batch of ids (B, T) or packed (N,), with its row table in `dtype` (float32, or float64)."""
    constant = _constant_per_sequence(inputs, ids.shape)
    key = (
        constant, inputs.old_logps is None, inputs.ref_logps is None, inputs.rollout_logps is None,
        inputs.rollout_weights is None, inputs.entropy_threshold is None, inputs.entropy_coef is None,
        inputs.token_weights is None,
    )  # fmt: skip
    found = config.derived.get(key)
    if found is None:
        found = config.derived[key] = _rules(inputs, config, constant)
    params, rules = found
    if has_teacher:  # like the KL's: every scored token has a gradient
        rules = rules._replace(kl_has_gradient=True)
    # With a sampling mask the tokens are in another order, see kept.py.
    tokens = backend.plan(inputs, ids, rules, dtype, ordered=not static_shapes and inputs.kept_counts is None)
    if rules.entropy_coef != 0.0:
        _weigh_entropy(tokens.table, inputs, config)
    if inputs.token_weights is not None:
        _weigh_tokens(tokens, inputs.token_weights, ids.shape)
    row_length = ids.shape[1] if inputs.cu_seqlens is None else None
    return Plan(tokens, params, rules, config, inputs.group_index, num_groups, row_length, static_shapes)


def keep_entropies(tokens: PlannedTokens) -> Tensor:
    """Give the entropy bonus to the tokens that the threshold keeps, whose entropies are known now. Returns its value
    (1,)."""
    weight, entropy = tokens.table[FIELD["weight_entropy"]], tokens.values.entropy
    counted = weight != 0
    kept = counted & ~(entropy < tokens.table[FIELD["entropy_threshold"]])
    share = kept.sum().clamp(min=1) / counted.sum(dtype=weight.dtype)  # of two integers it had torch's default type
    weight.copy_(torch.where(kept, weight / share, 0.0))
    return -torch.where(kept, weight * entropy, 0.0).sum().view(1)


def _weigh_entropy(table: Tensor, inputs: TokenInputs, config: GRPOConfig) -> None:
    """What no plan kernel reads of the entropy bonus: numbers that are tensors, and another aggregation."""
    weight, coefficient, normalizer = table[FIELD["weight_entropy"]], inputs.entropy_coef, inputs.entropy_normalizer
    if config.entropy_aggregation == "loss":
        each = (config.entropy_coef if coefficient is None else coefficient) * table[FIELD["weight_direct"]]
        weight.copy_(torch.where(weight != 0, -each, 0.0))
    elif normalizer is not None:
        each = (config.entropy_coef if coefficient is None else coefficient) / normalizer
        weight.copy_(torch.where(weight != 0, -each, 0.0))
    elif coefficient is not None:
        weight.mul_(coefficient)


def _weigh_tokens(tokens: PlannedTokens, weights: Tensor, shape: torch.Size) -> None:
    """They scale what a token's value weighs in the loss. Padding, whatever it holds, weighs nothing anyway."""
    count = tokens.scored.numel()
    if is_per_sequence(weights, shape, tokens.lengths.numel()):
        weights = weights.reshape(-1).repeat_interleave(tokens.offsets.diff(), output_size=count)
    for name in ("weight_ratio", "weight_direct"):
        weight = tokens.table[FIELD[name]]
        weight.copy_(torch.where(weight != 0, weight * weights.reshape(-1).to(weight.dtype), 0.0))


def _constant_per_sequence(inputs: TokenInputs, shape: torch.Size) -> bool:
    """Whether advantages and rollout weights have one value per sequence."""
    sequences = shape[0] if inputs.cu_seqlens is None else inputs.cu_seqlens.numel() - 1
    weights = inputs.rollout_weights
    if weights is not None and not is_per_sequence(weights, shape, sequences):
        return False
    return is_per_sequence(inputs.advantages, shape, sequences)


def _rules(inputs: TokenInputs, config: GRPOConfig, constant: bool) -> tuple[KernelParams, PlanRules]:
    """What follows from the configuration and from which inputs are given; `constant`: see _constant_per_sequence."""
    surrogate = SURROGATE_RULES[config.surrogate]
    has_rollout = inputs.rollout_logps is not None
    has_old = inputs.old_logps is not None or (surrogate.divides_by_rollout and has_rollout)
    params = config.kernel_params(has_old=has_old, has_rollout=has_rollout)
    if inputs.ref_logps is None:
        params = params._replace(kl="none", bias_correction=False, score_term=False)
    temperature, threshold = config.temperature, config.entropy_threshold
    whole = _needs_whole_sequences(inputs, config, params, constant)
    rules = PlanRules(
        aggregation=config.aggregation,
        level=params.level,
        divides_by_rollout=surrogate.divides_by_rollout,
        multiplies_rollout_weight=config.surrogate != "vespo",  # VESPO's phi replaces it
        whole_sequences=whole,
        needs_advantage=not config.pushes_without_advantage,
        kl_has_gradient=config.beta != 0.0 and params.kl != "none",
        score_inactive=config.score_inactive,
        max_completion_length=float(config.max_completion_length or 0),
        entropy_coef=1.0 if inputs.entropy_coef is not None else float(config.entropy_coef),
        temperature=1.0 if isinstance(temperature, Tensor) else float(temperature),
        entropy_threshold=-math.inf if threshold is None or isinstance(threshold, Tensor) else float(threshold),
    )
    return params, rules


def _needs_whole_sequences(inputs: TokenInputs, config: GRPOConfig, params: KernelParams, constant: bool) -> bool:
    if config.off_policy_mask_threshold is not None and (params.has_old or params.has_rollout):
        return True
    if config.surrogate == "vespo" and (params.has_old or inputs.rollout_weights is not None):
        return True  # otherwise phi is 1
    if not shares_ratio(params.level):
        return params.level != "token" and params.has_old  # without one the ratio of the sequence is 1
    thresholded = inputs.entropy_threshold is not None or config.entropy_threshold is not None
    weighted = inputs.token_weights is not None
    return params.has_old or params.bias_correction or thresholded or weighted or not constant

"""Aggregation rules. Every rule is linear, loss = sum_t w_t l_t, so it is one weight per token, computed once.

A rule gives the per-token numerator and the denominator of its weight; `normalizer` replaces the denominator by a
global one, so that micro-batches and data-parallel ranks add up to the loss of one big batch. Nothing is all-reduced.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...names import PlanRules


class Counts(NamedTuple):
    """What a rule may look at: mask (N,) fp32, its sum per sequence (S,) and of each token's sequence (N,)."""

    mask: Tensor
    lengths: Tensor
    length_of_token: Tensor

    @property
    def sequences(self) -> int:
        return self.lengths.numel()

    @property
    def tokens(self) -> Tensor:
        return self.lengths.sum().clamp(min=1)


Numerator = Tensor
Denominator = Tensor | float


def seq_mean(counts: Counts, rules: PlanRules) -> tuple[Numerator, Denominator]:
    """m / max(sum_t m, 1) / B: GRPO, SAPO, GSPO."""
    return counts.mask / counts.length_of_token.clamp(min=1), counts.sequences


def token_mean(counts: Counts, rules: PlanRules) -> tuple[Numerator, Denominator]:
    """m / max(sum m, 1): BNPO, PPO."""
    return counts.mask, counts.tokens


def fixed_length(counts: Counts, rules: PlanRules) -> tuple[Numerator, Denominator]:
    """m / (B max_completion_length): Dr. GRPO."""
    return counts.mask, counts.sequences * rules.max_completion_length


def num_items(counts: Counts, rules: PlanRules) -> tuple[Numerator, Denominator]:
    """m / num_items_in_batch: DAPO, CISPO, VESPO. Without num_items_in_batch, the tokens of this call."""
    return counts.mask, counts.tokens


def seq_sum(counts: Counts, rules: PlanRules) -> tuple[Numerator, Denominator]:
    """m / B: LUSPO, prime-rl."""
    return counts.mask, counts.sequences


RULES = {f.__name__: f for f in (seq_mean, token_mean, fixed_length, num_items, seq_sum)}


def token_weights(counts: Counts, rules: PlanRules, normalizer: Tensor | None) -> tuple[Tensor, Tensor]:
    """(weight of the token's value in the loss (N,), weight of its entropy in the loss (N,)).

    The entropy bonus is -entropy_coef times the mean entropy of this call's tokens, scaled by this call's share of the
    normaliser (with B sequences of B_total: B / B_total; without a normaliser: 1).
    """
    numerator, denominator = RULES[rules.aggregation](counts, rules)
    divisor = denominator if normalizer is None else normalizer
    weight = numerator / divisor
    if rules.entropy_coef == 0.0:
        return weight, torch.zeros_like(weight)
    share = 1.0 if normalizer is None else denominator / normalizer
    return weight, -rules.entropy_coef * share / counts.tokens * counts.mask

"""Every rule of aggregation is linear: one weight per token, a numerator over a denominator.

`normalizer` replaces the denominator: with a global one micro-batches and data-parallel ranks add up to the loss of one
big batch. Nothing is all-reduced.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from ..loss_config import LossConfig
from .sequences import Sequences

Aggregation = Literal["seq_mean", "token_mean", "fixed_length", "num_items", "seq_sum"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
EntropyAggregation = Literal["token_mean", "loss"]  # of the entropy bonus


class Lengths:
    """How many tokens count, in the type of the loss: computed when a rule asks for them."""

    def __init__(self, sequences: Sequences, mask: Tensor | None, dtype: torch.dtype) -> None:
        self.sequences, self.mask, self.dtype = sequences, mask, dtype

    @cached_property
    def of_sequences(self) -> Tensor:
        """Returns the number of tokens of each sequence that count, (S,)."""
        if self.mask is None:
            return self.sequences.offsets.diff().to(self.dtype)
        return self.sequences.sum(self.mask, self.dtype)

    @cached_property
    def at_least_one(self) -> Tensor:
        """Returns the same numbers, at least 1, (S,)."""
        return self.of_sequences.clamp(min=1)

    @cached_property
    def total(self) -> Tensor:
        """Returns the number of all tokens that count, (), at least 1."""
        if self.mask is None:
            number = max(1, self.sequences.num_tokens)
            return torch.full((), number, dtype=self.dtype, device=self.sequences.offsets.device)
        return self.mask.sum(dtype=self.dtype).clamp(min=1)


def weight_of_tokens(c: LossConfig, lengths: Lengths, normalizer: Tensor | None) -> Tensor:
    """Returns the weight of each token in the loss (N,), 0 at padding."""
    below, mask, sequences, dtype = denominator(c, lengths, normalizer), lengths.mask, lengths.sequences, lengths.dtype
    if c.aggregation == "seq_mean":  # GRPO, SAPO, GSPO
        weight = sequences.to_tokens(lengths.at_least_one.reciprocal() / below)
        return weight if mask is None else torch.where(mask, weight, 0.0)
    if not isinstance(below, Tensor):
        below = torch.full((), below, dtype=dtype, device=sequences.offsets.device)
    below = below.to(dtype)
    return below.reciprocal().repeat(sequences.num_tokens) if mask is None else mask / below


def denominator(c: LossConfig, lengths: Lengths, normalizer: Tensor | None) -> Tensor | int:
    """Returns what the loss is divided by, besides the length of each sequence for seq_mean."""
    if normalizer is not None:
        return normalizer
    if c.aggregation in ("token_mean", "num_items"):  # BNPO, PPO; DAPO, CISPO, VESPO, whose count may be a normalizer
        return lengths.total
    # seq_mean; fixed_length: Dr. GRPO; seq_sum: LUSPO, prime-rl
    return max(lengths.sequences.count, 1) * (c.max_completion_length or 1)

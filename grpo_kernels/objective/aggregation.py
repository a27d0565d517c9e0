"""Every rule of aggregation is linear: one weight per token, a numerator over a denominator.

`normalizer` replaces the denominator: with a global one micro-batches and data-parallel ranks add up to the loss of one
big batch. Nothing is all-reduced.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["seq_mean", "token_mean", "fixed_length", "num_items", "seq_sum"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
EntropyAggregation = Literal["token_mean", "loss"]  # of the entropy bonus


def weight_of_sequences(
    rule: Aggregation, lengths: Tensor, normalizer: Tensor | None, max_completion_length: int | None
) -> Tensor:
    """Returns the weight of a token of each sequence in the loss, (S,) or (). lengths (S,): tokens that count."""
    if rule == "seq_mean":  # GRPO, SAPO, GSPO
        return lengths.clamp(min=1).reciprocal() / denominator(rule, lengths, normalizer, max_completion_length)
    one = torch.ones((), dtype=lengths.dtype, device=lengths.device)
    return one / denominator(rule, lengths, normalizer, max_completion_length)


def denominator(
    rule: Aggregation, lengths: Tensor, normalizer: Tensor | None, max_completion_length: int | None
) -> Tensor | int:
    if normalizer is not None:
        return normalizer
    if rule in ("token_mean", "num_items"):  # BNPO, PPO; DAPO, CISPO, VESPO, whose global count is a normalizer
        return lengths.sum().clamp(min=1)
    # seq_mean; fixed_length: Dr. GRPO; seq_sum: LUSPO, prime-rl
    return max(len(lengths), 1) * (max_completion_length or 1)

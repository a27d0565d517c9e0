"""What whole sequences say of their tokens: ratios of a sequence, VESPO's weight, the off-policy mask."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from ..loss_config import LossConfig

# Of the ratio: the token's, the mean over its sequence, the sum, the mean with the gradient of the token's own.
Level = Literal["token", "sequence", "sequence_sum", "sequence_token"]
LEVELS: tuple[Level, ...] = get_args(Level)
WEIGHT_LEVELS = LEVELS[:3]  # of a ratio that is a constant: the fourth differs in the gradient alone


def shares_ratio(level: str | None) -> bool:
    """Returns whether all tokens of a sequence have a share in the gradient of its ratio."""
    return level in ("sequence", "sequence_sum")


def segment_sums(x: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """Adds up rows of x (N, ...) from each of the offsets (S + 1,) to the next, in a fixed order, to `dtype`.

    In float64 until the end: a running sum in float32 is off by 1e-2 after a million numbers.
    """
    return torch.segment_reduce(x.double(), "sum", offsets=offsets, axis=0, unsafe=True).to(dtype)


class Sequences:
    """The sequences of a batch, or neighbours among them: sums over their tokens, and back.

    offsets (S + 1,) int64: where each begins among the tokens. row_length: T of a padded (B, T) batch, else None.
    """

    def __init__(self, offsets: Tensor, row_length: int | None, num_tokens: int) -> None:
        self.offsets, self.row_length, self.num_tokens = offsets, row_length, num_tokens

    @classmethod
    def padded(cls, count: int, length: int, device: torch.device) -> Sequences:
        """Returns those of a (B, T) batch."""
        if length == 0:
            return cls(torch.zeros(count + 1, dtype=torch.int64, device=device), 0, 0)
        return cls(torch.arange(0, (count + 1) * length, length, device=device), length, count * length)

    @property
    def count(self) -> int:
        return len(self.offsets) - 1

    def sum(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Adds up (N, ...) to (S, ...) of `dtype`, default that of x, in a fixed order, in float64 until the end."""
        dtype = dtype or x.dtype
        if self.row_length is not None:  # one launch less, and on a GPU segment_reduce has one thread for a sequence
            return x.view(self.count, self.row_length, *x.shape[1:]).sum(1, dtype=torch.float64).to(dtype)
        return segment_sums(x, self.offsets, dtype)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Gives every token the number of its sequence: (S,) to (N,), contiguous."""
        lengths = self.offsets.diff() if self.row_length is None else self.row_length
        return x.repeat_interleave(lengths, output_size=self.num_tokens)

    def subset(self, selected: slice) -> Sequences:
        """Returns neighbours of a padded batch by themselves."""
        assert self.row_length is not None
        first = selected.start * self.row_length
        offsets = self.offsets[selected.start : selected.stop + 1] - first
        return Sequences(offsets, self.row_length, (selected.stop - selected.start) * self.row_length)


def sequence_log_ratio(
    c: LossConfig, sequences: Sequences, lengths: Tensor, scored: Tensor, log_ratio: Tensor, A: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (log-ratio that the surrogate sees (N,), its derivative by the token's own logp (N,)).

    log_ratio (N,): those of the tokens, 0 where not scored; lengths (S,): scored tokens, at least 1.
    """
    level, dlog_ratio_dlogp = c.importance_sampling_level, scored.to(log_ratio.dtype)
    if level == "token":
        return log_ratio, dlog_ratio_dlogp
    is_mean = level != "sequence_sum"
    if is_mean:
        dlog_ratio_dlogp = dlog_ratio_dlogp / sequences.to_tokens(lengths)
    if c.surrogate == "gmpo":
        # Sign-aware clamp of every token before the mean: it only ever makes the objective smaller.
        clamped = log_ratio.clamp(-c.epsilon_low, c.epsilon_high)
        smaller = torch.where(A > 0, log_ratio.minimum(clamped), log_ratio.maximum(clamped))
        dlog_ratio_dlogp = torch.where(smaller == log_ratio, dlog_ratio_dlogp, 0.0)
        log_ratio = smaller
    total = sequences.sum(log_ratio)
    return sequences.to_tokens(total / lengths if is_mean else total), dlog_ratio_dlogp


def off_policy_mask(sequences: Sequences, lengths: Tensor, drift: Tensor, A: Tensor, threshold: float) -> Tensor:
    """Returns (N,) bool: sequences with A < 0 whose mean drift from the sampling engine, nats, exceeds the threshold
    (DeepSeek-V3.2, arXiv:2512.02556). drift (N,): 0 where unknown or not scored."""
    mean = sequences.to_tokens(sequences.sum(drift) / lengths)
    return (A < 0) & (mean > threshold)


def vespo_weight(
    c: LossConfig, sequences: Sequences, scored: Tensor, log_ratio: Tensor, rollout_weight: Tensor | None, A: Tensor
) -> Tensor:
    """Returns (N,) phi(w) = exp(lambda + k ln w - lambda w), w the weight of the whole sequence, with the rollout's."""
    low = math.log(1e-8)
    log_w = log_ratio.clamp(-20.0, 20.0)
    if rollout_weight is not None:
        log_w = torch.where(scored, log_w + rollout_weight.log().clamp(low, 20.0), 0.0)
    log_w = sequences.to_tokens(sequences.sum(log_w).clamp(low, 20.0))
    positive = A >= 0
    k = torch.full_like(log_w, c.vespo_k_neg).masked_fill(positive, c.vespo_k_pos)
    lam = torch.full_like(log_w, c.vespo_lambda_neg).masked_fill(positive, c.vespo_lambda_pos)
    return (lam + k * log_w - lam * log_w.exp()).exp()

"""The loss of single tokens in one launch, `Backend.objective`: which losses it has, what it receives, the sums that it
returns. Losses that people run; objective/ has every other one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CLIPPING = ("clip", "cispo_two_sided", "cispo_mask", "cispo_unified")  # with metrics of a clip range
SURROGATES = (*CLIPPING, "cispo", "sapo", "reinforce")
ESTIMATORS = ("none", "k1", "k2", "k3")


class Numbers(NamedTuple):
    """The options that a kernel reads; a bound that a loss does not have is infinite."""

    epsilon_low: float
    epsilon_high: float
    delta: float
    dual_clip: float
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    beta: float
    log_ratio_clamp: float
    kl_delta_clamp: float
    kl_clamp: float


class ObjectiveInputs(NamedTuple):
    """What the operation receives of a batch: per token (N,) float32 unless told; None: there is none."""

    advantage: Tensor
    dloss_direct: Tensor
    dloss_via_ratio: Tensor
    old: Tensor | None
    ref: Tensor | None
    surrogate_scale: Tensor | None
    rollout: Tensor | None
    rollout_weight: Tensor | None
    scored: Tensor | None  # bool
    offsets: Tensor  # (S + 1,) int64
    group_index: Tensor | None  # (S,) int64
    num_groups: int  # 0 without group_index
    surrogate: str
    kl: str  # "none" without ref
    numbers: Numbers

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1


class Columns(NamedTuple):
    """Sums over the scored tokens of a sequence, a group, the batch: the place of each in a row. The same as in
    csrc/cuda/objective.cuh, which tests/test_objective_kernel.py compares."""

    loss: int = 0
    tokens: int = 1
    kl: int = 2
    entropy: int = 3
    ratio: int = 4
    clip_low: int = 5
    clip_high: int = 6
    cispo_clip: int = 7
    approx_kl: int = 8
    mismatch: int = 9
    mismatch_count: int = 10
    rollout_weight: int = 11
    rollout_weight_sq: int = 12
    zero_gradient: int = 13
    divergence: int = 14


COLUMN = Columns()
COLUMNS = Columns._fields
EXTREMA = ("ratio_min", "ratio_max", "mismatch_max")


class Sums(NamedTuple):
    """Sums of COLUMNS, and EXTREMA."""

    sequences: Tensor  # (S, K)
    groups: Tensor  # (num_groups, K)
    totals: Tensor  # (K,)
    extrema: Tensor

    @classmethod
    def of(cls, numbers: Tensor, num_sequences: int) -> Sums:
        """Returns views of the numbers of a row, which begins with the sequences and ends with the extrema."""
        rows = numbers[: -len(EXTREMA)].view(-1, len(COLUMNS))
        return cls(rows[:num_sequences], rows[num_sequences:-1], rows[-1], numbers[-len(EXTREMA) :])

    @staticmethod
    def length(num_sequences: int, num_groups: int) -> int:
        """Returns how many numbers there are."""
        return (num_sequences + num_groups + 1) * len(COLUMNS) + len(EXTREMA)


def memory_of_sums(inputs: ObjectiveInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what a kernel writes: Sums in one row, float32; a row of float64 per sequence; how many programs have
    ended, 0 in int32."""
    count, device = inputs.num_sequences, inputs.offsets.device
    sums = torch.empty(Sums.length(count, inputs.num_groups), dtype=torch.float32, device=device)
    exact = torch.empty(count, len(COLUMNS) + len(EXTREMA), dtype=torch.float64, device=device)
    return sums, exact, torch.zeros(1, dtype=torch.int32, device=device)

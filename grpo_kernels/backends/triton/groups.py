"""Advantages from rewards: A = (reward - baseline) / (std + eps), two passes in float64. csrc/cpu/groups.cpp in Triton.

NaN rewards are left out of every statistic and get A = 0. Rewards that are all equal have exactly that mean and a
standard deviation of exactly 0, which sums could miss by a rounding: an advantage of 1e-17 / eps is not 0.

One program per group walks all B rewards and looks at its own: 12 bytes per reward and pass, three passes from the L2
cache, in a fixed order. 4,096 rewards in 512 groups are 75 MB of cache reads, some 20 microseconds on an H200.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_SIZE = 1024


@triton.jit
def load_group(rewards, group_index, group, first, count, WHOLE_BATCH: tl.constexpr, BLOCK: tl.constexpr):
    """(rewards in float64, whether they are of this group, whether they also count: not NaN) of a block."""
    i = first + tl.arange(0, BLOCK).to(tl.int64)
    mine = i < count
    if not WHOLE_BATCH:
        mine = mine & (tl.load(group_index + i, mask=mine, other=-1) == group)
    reward = tl.load(rewards + i, mask=mine, other=0.0).to(tl.float64)
    return reward, mine, mine & (reward == reward)


@triton.jit
def moments(rewards, group_index, group, count, ddof, WHOLE_BATCH: tl.constexpr, BLOCK: tl.constexpr):
    """(number of rewards, mean, std, whether all are equal); NaN mean and std without any."""
    n = tl.zeros((), tl.int64)
    total = tl.zeros((), tl.float64)
    low = tl.full((), float("inf"), tl.float64)
    high = tl.full((), -float("inf"), tl.float64)
    for first in range(0, count, BLOCK):
        reward, _, counts = load_group(rewards, group_index, group, first, count, WHOLE_BATCH, BLOCK)
        n += tl.sum(counts.to(tl.int64), 0)
        total += tl.sum(tl.where(counts, reward, 0.0), 0)
        low = tl.minimum(low, tl.min(tl.where(counts, reward, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(counts, reward, -float("inf")), 0))
    equal = low == high
    mean = tl.where(equal, low, total / tl.where(n == 0, 1, n))
    squares = tl.zeros((), tl.float64)
    for first in range(0, count, BLOCK):
        reward, _, counts = load_group(rewards, group_index, group, first, count, WHOLE_BATCH, BLOCK)
        distance = tl.where(counts, reward - mean, 0.0)
        squares += tl.sum(distance * distance, 0)
    degenerate = equal | (n <= ddof)
    std = tl.where(degenerate, 0.0, tl.sqrt(squares / tl.where(degenerate, 1, n - ddof)))
    return n, tl.where(n == 0, float("nan"), mean), tl.where(n == 0, float("nan"), std), equal


class GroupStatistics(NamedTuple):
    """Advantages (B,); mean and std (num_groups,)."""

    advantages: Tensor
    mean: Tensor
    std: Tensor


@triton.jit(do_not_specialize=["rewards", "group_index", "count", "ddof"])
def group_statistics_kernel(
    rewards, group_index, out, count, ddof, eps, SCALE: tl.constexpr, BASELINE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    group = tl.program_id(0)
    n, mean, std, equal = moments(rewards, group_index, group, count, ddof, False, BLOCK)
    tl.store(out.mean + group, mean.to(tl.float32))
    tl.store(out.std + group, std.to(tl.float32))
    divisor = std + eps
    if SCALE == "batch":
        _, _, batch_std, _ = moments(rewards, group_index, group, count, ddof, True, BLOCK)
        divisor = batch_std + eps
    elif SCALE == "none":
        divisor = tl.full((), 1.0, tl.float64)
    for first in range(0, count, BLOCK):
        reward, mine, counts = load_group(rewards, group_index, group, first, count, False, BLOCK)
        numerator = reward
        if BASELINE != "none":
            numerator = tl.where(equal, 0.0, reward - mean)
        if BASELINE == "leave_one_out":  # reward - mean of the others; a group of one is equal
            numerator = numerator * (n / tl.where(n > 1, n - 1, 1))
        some = counts & (numerator != 0.0)
        advantage = tl.where(some, numerator / tl.where(some, divisor, 1.0), 0.0)
        i = first + tl.arange(0, BLOCK).to(tl.int64)
        tl.store(out.advantages + i, advantage.to(tl.float32), mask=mine)


def group_statistics(
    rewards: Tensor, group_index: Tensor, num_groups: int, scale: str, baseline: str, ddof: int, eps: float
) -> GroupStatistics:
    """Of float32 rewards (B,) in groups group_index (B,)."""
    out = GroupStatistics(torch.empty_like(rewards), rewards.new_empty(num_groups), rewards.new_empty(num_groups))
    if num_groups:
        group_statistics_kernel[(num_groups,)](
            rewards, group_index, out, rewards.numel(), ddof, eps,
            SCALE=scale, BASELINE=baseline, BLOCK=BLOCK_SIZE, num_warps=4,
        )  # fmt: skip
    return out

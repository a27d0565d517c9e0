"""Advantages from rewards: A = (reward - baseline) / (std + eps), with the mean and std of each group, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def group_statistics(
    rewards: Tensor, group_index: Tensor, num_groups: int, scale: str, baseline: str, ddof: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(advantages (B,), mean (num_groups,), std (num_groups,)) of rewards (B,) in groups group_index (B,).

    NaN rewards are left out of every statistic and get advantage 0. Groups of equal rewards get exactly 0 and std 0.
    Nothing waits for a device, and no atomics: equal calls give the same bits.
    """
    valid = ~rewards.isnan()
    r = torch.where(valid, rewards, 0.0).double()
    order = group_index.argsort(stable=True)
    # not bincount, which reads the largest index
    sizes = group_index.new_zeros(num_groups).index_add_(0, group_index, torch.ones_like(group_index))

    def per_group(x: Tensor, reduce: str) -> Tensor:
        return torch.segment_reduce(x[order], reduce, lengths=sizes, unsafe=True)

    def std_of(squares: Tensor, count: Tensor) -> Tensor:
        return (squares / (count - ddof).clamp(min=1)).sqrt()

    count, total = per_group(valid.double(), "sum"), per_group(r, "sum")
    low = per_group(torch.where(valid, r, torch.inf), "min")
    high = per_group(torch.where(valid, r, -torch.inf), "max")
    # The rounded mean of equal rewards need not equal them. NaN for a group without a verdict.
    mean = torch.where(low == high, low, total / count)
    centred = torch.where(valid, r - mean[group_index], 0.0)
    std = std_of(per_group(centred**2, "sum"), count)
    std = torch.where(count > ddof, std, torch.where(count > 0, 0.0, torch.nan))

    if baseline == "mean":
        advantages = centred
    elif baseline == "leave_one_out":  # r - mean of the others
        advantages = centred * (count / (count - 1).clamp(min=1))[group_index]
    else:
        advantages = r
    if scale == "group":
        advantages = advantages / (std + eps)[group_index]
    elif scale == "batch":
        number = valid.sum()
        distances = torch.where(valid, r - r.sum() / number, 0.0)
        advantages = advantages / (std_of((distances**2).sum(), number) + eps)
    advantages = torch.where(valid, advantages, 0.0)
    return advantages.to(rewards.dtype), mean.to(rewards.dtype), std.to(rewards.dtype)

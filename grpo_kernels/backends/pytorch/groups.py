"""Group statistics of rewards and advantages, in plain torch. csrc/cpu/groups.cpp is the compiled counterpart."""

from __future__ import annotations

import torch
from torch import Tensor


def group_statistics(
    rewards: Tensor, group_index: Tensor, num_groups: int, scale: str, baseline: str, ddof: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(advantages (B,), mean (num_groups,), std (num_groups,)) of rewards (B,) in groups group_index (B,).

    NaN rewards are left out of every statistic and get advantage 0. Groups of equal rewards get exactly 0 and std 0.
    """
    valid = ~rewards.isnan()
    r = torch.where(valid, rewards, 0.0).double()
    count = _group_sum(valid.double(), group_index, num_groups)
    mean = _group_sum(r, group_index, num_groups) / count  # NaN for a group without a verdict
    low, high = r.new_full((num_groups,), torch.inf), r.new_full((num_groups,), -torch.inf)
    low = low.scatter_reduce(0, group_index, torch.where(valid, r, torch.inf), "amin")
    high = high.scatter_reduce(0, group_index, torch.where(valid, r, -torch.inf), "amax")
    equal = low == high
    mean = torch.where(equal, low, mean)  # the rounded mean of equal rewards need not equal them
    centred = torch.where(valid, r - mean[group_index], 0.0)
    std = (_group_sum(centred**2, group_index, num_groups) / (count - ddof).clamp(min=1)).sqrt()
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
        centred = torch.where(valid, r - r.sum() / valid.sum(), 0.0)
        spread = ((centred**2).sum() / (valid.sum() - ddof).clamp(min=1)).sqrt()
        advantages = advantages / (spread + eps)
    advantages = torch.where(valid, advantages, 0.0)
    return advantages.to(rewards.dtype), mean.to(rewards.dtype), std.to(rewards.dtype)


def _group_sum(x: Tensor, group_index: Tensor, num_groups: int) -> Tensor:
    """Sums in the order of the batch within each group: no atomics, same bits every time."""
    order = group_index.argsort(stable=True)
    sizes = torch.bincount(group_index, minlength=num_groups)
    return torch.segment_reduce(x[order], "sum", lengths=sizes, axis=0, unsafe=True)

"""Advantages from rewards: A = (reward - baseline) / (std + eps), with the mean and std of each group, in float64."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ..checks.arguments import check_rewards_finite


def group_statistics(
    rewards: Tensor,
    group_index: Tensor,
    num_groups: int,
    group_size: int,
    scale: str,
    baseline: str,
    ddof: int,
    eps: float,
    nan_is_no_verdict: bool,
    lengths: Optional[Tensor] = None,  # noqa: UP045  # torch infers a schema from it
) -> tuple[Tensor, Tensor, Tensor]:
    """(advantages (B,), mean (num_groups,), std (num_groups,)) of rewards (B,) in groups group_index (B,).

    group_size: the size of all groups where each is adjacent rows, 0 otherwise. lengths (B,), of the completions, are
    weights of the baseline "length_weighted".
    NaN rewards are left out of every statistic and get advantage 0. Groups of equal rewards get exactly 0 and std 0.
    No atomics: equal calls give the same bits.
    """
    check_rewards_finite("rewards", rewards, nan_is_no_verdict=nan_is_no_verdict)
    weights = torch.ones_like(rewards) if lengths is None else lengths.to(rewards.dtype)
    numbers = scale, baseline, ddof, eps
    if group_size:
        rows, weights = rewards.view(num_groups, group_size), weights.reshape(num_groups, group_size)
        advantages, mean, std = _statistics_of_rows(rows, weights, *numbers)
        return advantages.view(-1), mean, std
    order = group_index.argsort(stable=True)
    row, sizes = group_index[order], group_index.bincount(minlength=num_groups)
    column = torch.arange(len(row), device=row.device) - (sizes.cumsum(0) - sizes)[row]
    table = rewards.new_full((2, num_groups, int(sizes.max())), torch.nan)
    table[:, row, column] = torch.stack([rewards, weights])[:, order]
    advantages, mean, std = _statistics_of_rows(table[0], table[1], *numbers)
    return torch.empty_like(rewards).index_put_((order,), advantages[row, column]), mean, std


traced_group_statistics = torch.library.custom_op("grpo_kernels::group_statistics", group_statistics, mutates_args=())


@traced_group_statistics.register_fake
def _(rewards, group_index, num_groups, *_):  # type: ignore[no-untyped-def]
    return rewards.new_empty(rewards.shape), rewards.new_empty(num_groups), rewards.new_empty(num_groups)


def _statistics_of_rows(
    rewards: Tensor, weights: Tensor, scale: str, baseline: str, ddof: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of rewards and weights (num_groups, size), a group in each row, NaN where a row has fewer."""

    def std_of(centred: Tensor, count: Tensor, dim: tuple[int, ...]) -> Tensor:
        return (centred.square().nansum(dim, keepdim=True) / (count - ddof).clamp(min=1)).sqrt()

    valid = rewards == rewards  # not NaN
    r = rewards.double()
    count = valid.sum(1, keepdim=True, dtype=torch.float64)
    mean = r.nansum(1, keepdim=True) / count  # NaN for a group without a verdict
    if rewards.dtype == torch.float64:  # the rounded mean of equal rewards need not equal them; of float32 it does
        low = torch.where(valid, r, torch.inf).amin(1, keepdim=True)
        mean = torch.where(((r == low) | ~valid).all(1, keepdim=True), low, mean)
    centred = r - mean
    std = torch.where(count > 0, std_of(centred, count, (1,)), torch.nan)

    if baseline == "mean":
        advantages = centred
    elif baseline == "leave_one_out":  # r - mean of the others
        advantages = centred * (count / (count - 1).clamp(min=1))
    elif baseline == "length_weighted":  # of deviations from the mean, which are 0 where rewards are equal
        w = torch.where(valid, weights.double(), 0.0)
        advantages = centred - (w * centred).nansum(1, keepdim=True) / w.sum(1, keepdim=True).clamp(min=1)
    elif baseline == "pass_at_k":
        ordered, place = torch.where(valid, r, -torch.inf).sort(stable=True, dim=1, descending=True)
        gap = ordered[:, :1] - (ordered[:, 1:2] if r.shape[1] > 1 else ordered[:, :1])
        gap = torch.where(count > 1, gap, 0.0)
        advantages = torch.zeros_like(r).scatter_(1, place[:, :1], gap)
    else:
        advantages = r
    if scale == "group":
        advantages = advantages / (std + eps)
    elif scale == "mean":
        advantages = torch.where(mean > 0, advantages / mean, 0.0)
    elif scale == "batch":
        number = count.sum()
        advantages = advantages / (std_of(r - r.nansum() / number, number, (0, 1)) + eps)
    advantages = torch.where(valid, advantages, 0.0)
    return advantages.to(rewards.dtype), mean.flatten().to(rewards.dtype), std.flatten().to(rewards.dtype)

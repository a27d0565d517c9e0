"""Advantages from rewards: per group of completions of one prompt, or per step of a completion."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .backends import choose_backend
from .checks.arguments import NUMBERS, check_number, check_rewards_finite, check_tensor, checks_values
from .engine import token_ops
from .names import ADVANTAGE_BASELINES, ADVANTAGE_SCALES


class Groups(NamedTuple):
    """group_index (S,) int64 in [0, num_groups)."""

    index: Tensor  # type: ignore[assignment]  # these names hide two methods of tuple
    count: int  # type: ignore[assignment]


class GroupStatistics(NamedTuple):
    """advantages (B,); reward mean and standard deviation per group (num_groups,)."""

    advantages: Tensor
    mean: Tensor
    std: Tensor


def group_advantages(
    rewards: Tensor,
    *,
    num_generations: int | None = None,
    group_ids: Tensor | None = None,
    scale: str = "group",
    baseline: str = "mean",
    ddof: int = 1,
    eps: float = 1e-4,
) -> Tensor:
    """Group-relative advantages (B,) float32, A = (r - baseline) / (std + eps)   (DeepSeekMath, arXiv:2402.03300).

    rewards (B,); NaN = no verdict: left out of the statistics, advantage 0. A group of equal rewards gets exactly 0.
    An infinite reward raises, on a GPU with GRPO_KERNELS_DEBUG=1.
    Groups are `num_generations` adjacent rows, or named by integer `group_ids` (B,), any order, any sizes.
    scale: divide by the std of the "group", of the whole "batch", or "none" (Dr. GRPO). baseline: "mean",
    "leave_one_out" (RLOO: the mean of the others) or "none". ddof, eps: 1, 1e-4 as TRL; 1, 1e-6 as verl; 0, 1e-8 as the
    papers' text.

    Raises ValueError where the groups do not fit the batch, or where a group of one is scaled by its std.
    """
    check_rewards(rewards)
    groups = resolve_groups(rewards.shape[0], num_generations, group_ids, rewards)
    return group_statistics(rewards, groups, scale=scale, baseline=baseline, ddof=ddof, eps=eps).advantages


def group_statistics(
    rewards: Tensor,
    groups: Groups,
    *,
    scale: str,
    baseline: str,
    ddof: int,
    eps: float,
    nan_is_no_verdict: bool = True,
    backend: str = "auto",
) -> GroupStatistics:
    """`group_advantages` of groups that `resolve_groups` made, with the statistics of each group."""
    if scale not in ADVANTAGE_SCALES:
        raise ValueError(f"scale={scale!r}; expected one of {', '.join(ADVANTAGE_SCALES)}")
    if baseline not in ADVANTAGE_BASELINES:
        raise ValueError(f"baseline={baseline!r}; expected one of {', '.join(ADVANTAGE_BASELINES)}")
    check_number("eps", eps, 0.0)
    if not isinstance(ddof, int) or ddof not in (0, 1):
        raise ValueError(f"ddof={ddof!r}; expected 0 or 1")
    rewards = rewards.detach()
    if rewards.dtype != torch.float64:
        rewards = rewards.float()
    name = choose_backend(backend, rewards.device, rewards.dtype)
    if scale == "group" and ddof == 1 and checks_values(rewards.device):
        smallest = int(torch.bincount(groups.index, minlength=groups.count).min())
        if smallest == 1:
            raise ValueError("a group of one completion has no standard deviation: scale='group' needs groups of >= 2")
    numbers = scale, baseline, ddof, float(eps), nan_is_no_verdict
    return GroupStatistics(*token_ops.group_statistics(rewards, groups.index, groups.count, *numbers, name))


def process_advantages(
    step_rewards: Tensor,
    step_ends: Tensor,
    length: int,
    *,
    num_generations: int | None = None,
    group_ids: Tensor | None = None,
    gamma: float = 1.0,
    scale: str = "group",
    baseline: str = "mean",
    ddof: int = 1,
    eps: float = 1e-4,
) -> Tensor:
    """Advantages (B, length) from rewards of steps: process supervision (DeepSeekMath 4.1.3), multi-turn with gamma.

    step_rewards (B, K), NaN where a completion has fewer steps; step_ends (B, K) the index of each step's last token,
    in order. Rewards are normalised over all steps of all completions of a group; a token gets the sum of the
    normalised rewards of the steps that end at or after it, the k-th of them times gamma**k. Tokens after the last
    step get 0.
    """
    check_rewards(step_rewards, dims=2)
    check_rewards_finite("step_rewards", step_rewards)
    check_tensor("step_ends", step_ends, step_rewards)
    if step_ends.shape != step_rewards.shape or step_ends.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"step_ends is {step_ends.dtype} of shape {tuple(step_ends.shape)}; expected integers of the shape of "
            f"step_rewards, {tuple(step_rewards.shape)}"
        )
    check_number("gamma", gamma, 0.0, 1.0)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"length={length!r}; expected an integer >= 1")
    batch, steps = step_rewards.shape
    groups = resolve_groups(batch, num_generations, group_ids, step_rewards)
    per_step = Groups(groups.index.repeat_interleave(steps, output_size=batch * steps), groups.count)
    flat = group_statistics(
        step_rewards.reshape(-1), per_step, scale=scale, baseline=baseline, ddof=ddof, eps=eps
    ).advantages
    normalised = flat.view(batch, steps)  # absent steps: 0
    absent = step_rewards.isnan()
    ends = torch.where(absent, length, step_ends)
    if checks_values(step_ends.device):
        outside = ((ends < 0) | (ends >= length)) & ~absent
        if bool(outside.any() | (ends.diff(dim=1) < 0).any()):
            raise ValueError(f"step_ends must not decrease and must lie in 0 .. {length - 1}, as length={length}")
    following = torch.zeros(batch, steps + 1, dtype=flat.dtype, device=flat.device)
    for k in range(steps - 1, -1, -1):
        following[:, k] = normalised[:, k] + gamma * following[:, k + 1]
    position = torch.arange(length, device=flat.device).expand(batch, length).contiguous()
    return following.gather(1, torch.searchsorted(ends.contiguous(), position))


def resolve_groups(num_sequences: int, num_generations: int | None, group_ids: Tensor | None, like: Tensor) -> Groups:
    """Groups of a batch of sequences: adjacent, or named by integers."""
    if (num_generations is None) == (group_ids is None):
        given = "neither" if group_ids is None else "both"
        raise ValueError(f"groups come from num_generations or group_ids: give one of the two, got {given}")
    if num_generations is not None:
        if isinstance(num_generations, bool) or not isinstance(num_generations, int) or num_generations < 1:
            raise ValueError(f"num_generations={num_generations!r}; expected an integer >= 1")
        if num_sequences % num_generations:
            raise ValueError(
                f"num_generations={num_generations} does not divide the batch of {num_sequences} completions; "
                "use group_ids for groups of different sizes"
            )
        count = num_sequences // num_generations
        index = torch.arange(num_sequences, device=like.device) // num_generations
        return Groups(index, count)
    check_tensor("group_ids", group_ids, like)
    if group_ids.shape != (num_sequences,) or group_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"group_ids is {group_ids.dtype} of shape {tuple(group_ids.shape)}; expected integers ({num_sequences},)"
        )
    names, index = torch.unique(group_ids, return_inverse=True)
    return Groups(index, names.numel())


def check_rewards(rewards: Tensor, dims: int = 1) -> None:
    """rewards are real numbers with `dims` dimensions."""
    name, shape = ("rewards", "(B,)") if dims == 1 else ("step_rewards", "(B, K)")
    check_tensor(name, rewards)
    if rewards.dim() != dims or rewards.shape[0] == 0:
        raise ValueError(f"{name} has shape {tuple(rewards.shape)}; expected {shape} with B >= 1")
    if rewards.dtype not in NUMBERS:
        raise TypeError(f"{name} is {rewards.dtype}; expected real numbers")

"""Advantages from rewards, and the threshold of an entropy mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .checks.arguments import (
    NUMBERS,
    check_finite,
    check_float,
    check_numbers,
    check_tensor,
    checks_values,
    constant,
)
from .checks.plain import check_kind, check_shape
from .checks.tokens import (
    check_token_tensor,
)
from .config import check_count, check_ddof, check_number, check_one_of
from .head.shared import is_traced
from .names import ADVANTAGE_BASELINES, ADVANTAGE_SCALES, add_op_namespace_prefix

_FINITE = "a finite number: smaller rewards, or a scale that divides by their deviation"
_REWARD = "a finite number, or NaN for no verdict, in float32"
_VERDICT = "a finite number; for completions without a verdict pass advantages=group_advantages(rewards, ...), with NaN"


class Groups(NamedTuple):
    """group_index (S,) int64 in [0, num_groups); the size of all groups where each is adjacent rows, 0 otherwise."""

    index: Tensor  # type: ignore[assignment]  # these names hide two methods of tuple
    count: int  # type: ignore[assignment]
    size: int = 0


def group_advantages(
    rewards: Tensor,
    *,
    num_generations: int | None = None,
    group_ids: Tensor | None = None,
    scale: str = "group",
    baseline: str = "mean",
    ddof: int = 1,
    eps: float = 1e-4,
    lengths: Tensor | None = None,
) -> Tensor:
    """Returns group-relative advantages (B,), A = (r - baseline) / (std + eps)   (DeepSeekMath, arXiv:2402.03300).

    rewards (B,); NaN = no verdict: left out of the statistics, advantage 0. A group of equal rewards gets exactly 0.
    A reward that float32 does not hold raises, and so does an infinite advantage, on a GPU with GRPO_KERNELS_DEBUG=1.
    Advantages are float32, or float64 from float64.
    Groups are `num_generations` adjacent rows, or named by integer `group_ids` (B,), any order, any sizes.
    scale: divide by the std of the "group", of the whole "batch", by the group's "mean" (0 where that is not positive:
    MaxRL), or "none" (Dr. GRPO). baseline: "mean", "leave_one_out" (RLOO: the mean of the others), "length_weighted"
    (OPO, arXiv:2505.23585: the mean with `lengths` (B,), tokens of the completions, as weights), "pass_at_k"
    (arXiv:2503.19595: the best of a group gets its distance to the second best, the others 0) or "none". ddof, eps: 1,
    1e-4 as TRL; 1, 1e-6 as verl; 0, 1e-8 as the papers' text.

    Raises ValueError where the groups do not fit the batch, where a group of one is scaled by its std or compared with
    the others ("leave_one_out"), and for groups of one with any baseline but "none".
    """
    check_rewards(rewards)
    groups = resolve_groups(rewards.shape[0], num_generations, group_ids, rewards)
    numbers: Any = {"scale": scale, "baseline": baseline, "ddof": ddof, "eps": eps}
    return group_statistics(rewards, groups, **numbers, lengths=lengths)[0]


def combine_advantages(
    rewards: Tensor,
    weights: Tensor | Sequence[float] | None = None,
    *,
    num_generations: int | None = None,
    group_ids: Tensor | None = None,
    mode: str = "normalize_then_sum",
    whiten: str = "batch",
    completion_mask: Tensor | None = None,
    ddof: int = 1,
    eps: float = 1e-4,
) -> Tensor:
    """Returns advantages (B,) float32 from several rewards (B, K), with `weights` (K,), 1 by default.

    mode: "normalize_then_sum" (GDPO, arXiv:2601.05242): each reward less its group's mean, over its group's std + eps,
    then the weighted sum; "sum": only the weighted sum (REINFORCE++, arXiv:2501.03262), without groups. NaN is a
    reward that was not given; a completion with none at all has no verdict and gets 0.
    whiten: less the mean, over the std + eps, of the "batch" of completions, of their "tokens" (each completion counts
    as often as `completion_mask` (B, T) has tokens of it), or "none".
    """
    check_rewards(rewards, dims=2)
    check_finite("rewards", rewards.float(), _REWARD, allows_nan=True)
    eps, ddof = check_number("eps", eps, low=0.0), check_ddof("ddof", ddof)
    check_one_of("mode", mode, ("normalize_then_sum", "sum"))
    check_one_of("whiten", whiten, ("batch", "tokens", "none"))
    count, kinds = rewards.shape
    weights = torch.as_tensor([1.0] * kinds if weights is None else weights, device=rewards.device)
    check_shape("weights", weights, weights.shape == (kinds,), f"({kinds},), one for each kind of reward")
    if (whiten == "tokens") != (completion_mask is not None):
        raise ValueError(f"whiten={whiten!r} with completion_mask={completion_mask}; expected both only for 'tokens'")
    if completion_mask is not None:
        check_tensor("completion_mask", completion_mask, rewards)
        fits = completion_mask.dim() == 2 and len(completion_mask) == count
        check_shape("completion_mask", completion_mask, fits, f"({count}, T)")
        check_token_tensor("completion_mask", completion_mask, completion_mask.shape, -1, rewards)
    rewards = rewards.detach().to(torch.float64)
    parts, valid = rewards.nan_to_num(nan=0.0), ~rewards.isnan()
    if mode == "normalize_then_sum":
        groups = resolve_groups(count, num_generations, group_ids, rewards)
        numbers: Any = {"scale": "group", "baseline": "mean", "ddof": ddof, "eps": eps}
        parts = torch.stack([group_statistics(r, groups, **numbers)[0] for r in rewards.unbind(1)], 1)
    elif num_generations is not None or group_ids is not None:
        raise ValueError("num_generations and group_ids have no effect with mode='sum'; leave them out")
    total, known = parts @ weights.to(parts), valid.any(1)
    if whiten != "none":
        size = known.double() if completion_mask is None else completion_mask.bool().sum(1).double() * known
        number = size.sum()
        centred = total - (size * total).sum() / number.clamp(min=1)
        deviation = ((size * centred.square()).sum() / (number - ddof).clamp(min=1)).sqrt()
        total = centred / (deviation + eps)
    advantages = torch.where(known, total, 0.0).float()
    check_finite("advantages", advantages, _FINITE)
    return advantages


def group_statistics(
    rewards: Tensor,
    groups: Groups,
    *,
    scale: str,
    baseline: str,
    ddof: int,
    eps: float,
    nan_is_no_verdict: bool = True,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `group_advantages` (B,) of these groups, mean and std of their rewards (num_groups,)."""
    check_one_of("scale", scale, ADVANTAGE_SCALES)
    check_one_of("baseline", baseline, ADVANTAGE_BASELINES)
    eps, ddof = check_number("eps", eps, low=0.0), check_ddof("ddof", ddof)
    if (baseline == "length_weighted") != (lengths is not None):
        raise ValueError(f"baseline={baseline!r} with lengths={lengths}; expected both only for 'length_weighted'")
    if lengths is not None:
        check_tensor("lengths", lengths, rewards)
        check_kind("lengths", lengths, lengths.shape == rewards.shape, f"numbers {tuple(rewards.shape)}", NUMBERS)
    rewards = rewards.detach()
    if rewards.dtype != torch.float64:
        rewards = rewards.float()
    if (scale == "group" and ddof == 1) or baseline == "leave_one_out":
        smallest = groups.size
        if not smallest and checks_values(rewards.device):
            smallest = int(torch.bincount(groups.index, minlength=groups.count).min())
        if smallest == 1:
            what = "standard deviation: scale='group'" if scale == "group" and ddof == 1 else f"other one: {baseline=}"
            raise ValueError(f"a group of one completion has no {what} needs groups of >= 2")
    if groups.size == 1 and baseline != "none":
        raise ValueError(f"a group of one completion has an advantage of 0 by baseline={baseline!r}; expected >= 2")
    numbers = scale, baseline, ddof, float(eps), nan_is_no_verdict
    compute = _traced_statistics if is_traced(rewards) else _statistics_of_groups
    return compute(rewards, *groups, *numbers, lengths)


def _statistics_of_groups(
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
    """Returns (advantages (B,), mean (num_groups,), std (num_groups,)) of rewards (B,) in groups group_index (B,).

    group_size: the size of all groups where each is adjacent rows, 0 otherwise. lengths (B,), of the completions, are
    weights of the baseline "length_weighted".
    NaN rewards are left out of every statistic and get advantage 0. Groups of equal rewards get exactly 0 and std 0.
    No atomics: equal calls give the same bits.
    """
    expected = _REWARD if nan_is_no_verdict else _VERDICT
    check_finite("rewards", rewards.float(), expected, allows_nan=nan_is_no_verdict)
    weights = torch.ones_like(rewards) if lengths is None else lengths.to(rewards.dtype)
    numbers = scale, baseline, ddof, eps
    if group_size:
        rows, weights = rewards.view(num_groups, group_size), weights.reshape(num_groups, group_size)
        advantages, mean, std = _statistics_of_rows(rows, weights, *numbers)
        check_finite("advantages", advantages.view(-1), _FINITE)
        return advantages.view(-1), mean, std
    order = group_index.argsort(stable=True)
    row, sizes = group_index[order], group_index.bincount(minlength=num_groups)
    column = torch.arange(len(row), device=row.device) - (sizes.cumsum(0) - sizes)[row]
    table = rewards.new_full((2, num_groups, int(sizes.max())), torch.nan)
    table[:, row, column] = torch.stack([rewards, weights])[:, order]
    advantages, mean, std = _statistics_of_rows(table[0], table[1], *numbers)
    advantages = torch.empty_like(rewards).index_put_((order,), advantages[row, column])
    check_finite("advantages", advantages, _FINITE)
    return advantages, mean, std


_traced_statistics = torch.library.custom_op(
    add_op_namespace_prefix("group_statistics"), _statistics_of_groups, mutates_args=()
)


@_traced_statistics.register_fake
def _(rewards, group_index, num_groups, *_):  # type: ignore[no-untyped-def]
    return rewards.new_empty(rewards.shape), rewards.new_empty(num_groups), rewards.new_empty(num_groups)


def _statistics_of_rows(
    rewards: Tensor, weights: Tensor, scale: str, baseline: str, ddof: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the same of rewards and weights (num_groups, size), a group in each row, NaN where a row has fewer."""

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
    """Returns advantages (B, length) from rewards of steps: process supervision (DeepSeekMath 4.1.3), or turns.

    step_rewards (B, K), NaN where a completion has fewer steps; step_ends (B, K) the index of each step's last token,
    in order. Rewards are normalised over all steps of all completions of a group; a token gets the sum of the
    normalised rewards of the steps that end at or after it, the k-th of them times gamma**k. Tokens after the last
    step get 0.
    """
    check_rewards(step_rewards, dims=2, name="step_rewards")
    check_finite("step_rewards", step_rewards.float(), _REWARD, allows_nan=True)
    check_tensor("step_ends", step_ends, step_rewards)
    expected = f"integers of the shape of step_rewards, {tuple(step_rewards.shape)}"
    check_kind("step_ends", step_ends, step_ends.shape == step_rewards.shape, expected)
    gamma = check_number("gamma", gamma, low=0.0, high=1.0)
    length = check_count("length", length)
    batch, steps = step_rewards.shape
    groups = resolve_groups(batch, num_generations, group_ids, step_rewards)
    index = groups.index.repeat_interleave(steps, output_size=batch * steps)
    per_step = Groups(index, groups.count, groups.size * steps)
    numbers: Any = {"scale": scale, "baseline": baseline, "ddof": ddof, "eps": eps}
    flat, _, _ = group_statistics(step_rewards.reshape(-1), per_step, **numbers)
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
    """Returns the groups of a batch of sequences: adjacent, or named by integers."""
    if (num_generations is None) == (group_ids is None):
        arguments = "neither" if group_ids is None else "both"
        raise ValueError(f"groups come from num_generations or group_ids: give one of the two, got {arguments}")
    if num_generations is not None:
        num_generations = check_count("num_generations", num_generations)
        if num_sequences % num_generations:
            raise ValueError(
                f"num_generations={num_generations} does not divide the batch of {num_sequences} completions; "
                "use group_ids for groups of different sizes"
            )
        count = num_sequences // num_generations
        index = torch.arange(num_sequences, device=like.device) // num_generations
        return Groups(index, count, num_generations)
    check_tensor("group_ids", group_ids, like)
    check_kind("group_ids", group_ids, group_ids.shape == (num_sequences,), f"integers ({num_sequences},)")
    names, index = torch.unique(group_ids, return_inverse=True)
    return Groups(index, names.numel())


def check_rewards(rewards: Tensor, dims: int = 1, name: str = "rewards") -> None:
    """Checks that rewards are real numbers with `dims` dimensions."""
    shape = "(B,)" if dims == 1 else "(B, K)"
    check_tensor(name, rewards)
    check_shape(name, rewards, rewards.dim() == dims and rewards.shape[0] > 0, f"{shape} with B >= 1")
    if rewards.dtype not in NUMBERS:
        raise TypeError(f"{name} is {rewards.dtype}; expected real numbers")
    constant(name, rewards)


def entropy_quantile(entropy: Tensor, completion_mask: Tensor | None = None, *, top: float = 0.2) -> Tensor:
    """Returns the entropy () in nats above which the `top` share of the unmasked tokens lies, an entropy_threshold.

    entropy (B, T) or (N,) of the whole batch, as `fused_logps(..., entropy=True)` returns it under no_grad.
    Data-parallel ranks gather their entropies first, so that all take the same threshold (arXiv:2506.01939, the
    "80/20 rule"). NaN where there is no unmasked token: no entropy is below it.
    """
    top = check_number("top", top, above=0.0, high=1.0)
    check_float("entropy", entropy)
    mask = None
    if completion_mask is not None:
        check_token_tensor("completion_mask", completion_mask, entropy.shape, -1, entropy)
        mask = completion_mask.bool()
    if checks_values(entropy.device):
        check_numbers("entropy", entropy, mask)
    values = entropy.detach().to(torch.promote_types(entropy.dtype, torch.float32))
    if mask is not None:
        values = values.masked_fill(~mask, torch.nan)
    if values.numel() == 0:
        return values.new_full((), torch.nan)
    # torch.nanquantile takes 2^24 elements at most, which a batch with long padding has.
    ordered = values.reshape(-1).sort().values  # NaN is last
    place = (1 - top) * (ordered.isnan().logical_not().sum() - 1).clamp(min=0).double()
    low, high = ordered.gather(0, torch.stack([place.floor(), place.ceil()]).long())
    return low.lerp(high, place.frac().to(low.dtype))

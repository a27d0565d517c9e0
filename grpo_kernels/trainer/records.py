"""The numbers of log.jsonl: sums and counts over all rows, passes and ranks, divided once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .batch import groups_of, without_gradient
from .ranks import Ranks
from .rollout import Completion


def pass_numbers(out: Any, inputs: dict[str, Any]) -> dict[str, float]:
    """Sums and extremes, nats, of a forward and backward pass: of the loss's result `out` and its arguments. All are
    read from the device at once."""
    mask = inputs["completion_mask"]
    found = {"tokens": mask.sum(), "loss": out.loss.detach()}
    found |= {name: out.metrics[name] for name in ("ratio/min", "ratio/max")}
    found["log_ratio_first_max"] = _largest_difference(out.logps, inputs.get("old_logps"), mask)
    found["rollout_mismatch/max"] = _largest_difference(out.logps, inputs.get("rollout_logps"), mask)
    for name, (total, count) in out.metric_sums.items():
        found |= {f"{name} sum": total, f"{name} count": count}
    if "kl" in out.sequences:
        tokens = out.sequences["tokens"]
        found["kl_sequence sum"] = (out.sequences["kl"] * tokens).sum()
        found["kl_sequence count"] = (tokens > 0).sum()
    numbers = dict(zip(found, torch.stack([x.to(torch.float64) for x in found.values()]).tolist(), strict=True))
    if not numbers.pop("tokens"):
        del numbers["ratio/min"], numbers["ratio/max"]
    return numbers


def step_record(passes: list[dict[str, float]], ranks: Ranks, *, first: bool) -> dict[str, float]:
    """The numbers of an optimizer step from those of its passes on all ranks.

    first: this was the rollout's first step, before which the policy was the one that sampled.
    """
    everything = ranks.gather(passes)
    found = {}
    for name in sorted({name for numbers in everything for name in numbers}):
        join = min if name.endswith("min") else max if name.endswith("max") else math.fsum
        found[name] = join([numbers[name] for numbers in everything if name in numbers])
    for name in [name.removesuffix(" sum") for name in found if name.endswith(" sum")]:
        total, count = found.pop(f"{name} sum"), found.pop(f"{name} count")
        found[name] = total / count if count else 0.0
    found["loss"] /= ranks.count
    if not first:  # what later steps see is the policy's own movement
        for name in ("log_ratio_first_max", "rollout_mismatch/max", "rollout_mismatch/mean"):
            found.pop(name, None)
    if found.get("rollout_weight/mean_square"):
        found["rollout_ess"] = found["rollout_weight/mean"] ** 2 / found["rollout_weight/mean_square"]
    return found


def _largest_difference(logps: Tensor, others: Tensor | None, mask: Tensor) -> Tensor:
    """() of unmasked tokens, 0 without any; a log-probability that is not known counts as equal."""
    if others is None:
        return logps.new_zeros(())
    return (logps - others).masked_fill(~mask, 0.0).abs().nan_to_num(0.0).amax()


def rollout_record(rollout: Sequence[Completion], num_generations: int) -> dict[str, Any]:
    """Rewards, advantages and lengths of a rollout; without completions that have no verdict, where rewards count."""
    groups = groups_of(rollout, num_generations)
    rewards = [_scored(c.reward for c in group) for group in groups]
    everything = [reward for group in rewards for reward in group]
    lengths = [len(c.ids) for c in rollout]
    found: dict[str, Any] = {
        "unscored": len(rollout) - len(everything),
        "zero_gradient_groups": statistics.fmean(without_gradient(group) for group in groups),
        "dropped_groups": sum(group[0].dropped for group in groups),
        "completions/count": len(rollout),
        "completions/mean_length": statistics.fmean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": statistics.fmean(not c.ended for c in rollout),
        "completions/unique_ratio": statistics.fmean(
            len({tuple(c.ids) for c in group}) / len(group) for group in groups
        ),
    }
    if everything:
        low, high = min(everything), max(everything)
        found |= {
            "reward": statistics.fmean(everything),
            "reward_std": statistics.pstdev(everything),
            "reward_min": low,
            "reward_max": high,
            "reward_group_std": statistics.fmean(statistics.pstdev(group) if group else 0.0 for group in rewards),
            # Where all rewards of the rollout are equal to each other, no group is better or worse.
            "all_min_groups": statistics.fmean(all(c.reward == low < high for c in group) for group in groups),
            "all_max_groups": statistics.fmean(all(c.reward == high > low for c in group) for group in groups),
        }
    for name in rollout[0].rewards:
        if scored := _scored(c.rewards.get(name, math.nan) for c in rollout):
            found[f"rewards/{name}/mean"] = statistics.fmean(scored)
            found[f"rewards/{name}/std"] = statistics.pstdev(scored)
    return found | _advantages(rollout)


def _scored(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _advantages(rollout: Sequence[Completion]) -> dict[str, Any]:
    values = torch.cat([c.advantage.reshape(-1) for c in rollout if c.advantage is not None])
    reach = max(values.abs().max().item(), 1e-6)
    counts, edges = torch.histogram(values.float(), bins=20, range=(-reach, reach))
    return {
        "advantage_mean": values.mean().item(),
        "advantage_std": values.std(unbiased=False).item(),
        "advantage_min": values.min().item(),
        "advantage_max": values.max().item(),
        "advantage_histogram": {"edges": edges.tolist(), "counts": counts.int().tolist()},
    }

"""The numbers of log.jsonl: sums and counts over all rows, passes and ranks, divided once."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .batch import groups_of, is_scored, without_gradient
from .ranks import Ranks
from .rollout import Completion


class UpdateSums:
    """Metrics of the passes of one optimizer step, nats."""

    def __init__(self) -> None:
        self.numbers: Counter[str] = Counter()
        self.low, self.high = math.inf, -math.inf  # importance ratio
        self.log_ratio = self.mismatch = 0.0  # largest so far

    def add(self, out: Any, inputs: dict[str, Any]) -> None:
        """out: the loss's result on a pass; inputs: its arguments. All numbers are read from the device at once."""
        sums = {"loss": out.loss.detach()}
        for name, (total, count) in out.metric_sums.items():
            sums |= {f"{name} sum": total, f"{name} count": count}
        if "kl" in out.sequences:
            tokens = out.sequences["tokens"]
            sums["kl_sequence sum"] = (out.sequences["kl"] * tokens).sum()
            sums["kl_sequence count"] = (tokens > 0).sum()
        mask = inputs["completion_mask"]
        others = [mask.sum(), out.metrics["ratio/min"], out.metrics["ratio/max"]]
        others += [_largest_difference(out.logps, inputs.get(name), mask) for name in ("old_logps", "rollout_logps")]
        *values, tokens_here, low, high, log_ratio, mismatch = torch.stack(
            [x.to(torch.float64) for x in (*sums.values(), *others)]
        ).tolist()
        self.numbers.update(dict(zip(sums, values, strict=True)))
        if tokens_here:
            self.low, self.high = min(self.low, low), max(self.high, high)
        self.log_ratio, self.mismatch = max(self.log_ratio, log_ratio), max(self.mismatch, mismatch)

    def record(self, ranks: Ranks, *, first: bool) -> dict[str, float]:
        """first: this was the rollout's first step, before which the policy was the one that sampled."""
        # Ranks may differ in what they have seen: every rank sums the same names.
        names = sorted(set(ranks.gather(list(self.numbers))))
        sums = ranks.sum({name: float(self.numbers[name]) for name in names})
        low, high, log_ratio, mismatch = zip(
            *ranks.gather([(self.low, self.high, self.log_ratio, self.mismatch)]), strict=True
        )
        found = {"loss": sums["loss"] / ranks.count}
        for name in names:
            if name.endswith(" sum"):
                count = sums[name[:-4] + " count"]
                found[name[:-4]] = sums[name] / count if count else 0.0
        if math.isfinite(min(low)):
            found |= {"ratio/min": min(low), "ratio/max": max(high)}
        if first:
            found["log_ratio_first_max"] = max(log_ratio)
            found["rollout_mismatch/max"] = max(mismatch)
        else:  # what later steps see is the policy's own movement
            found.pop("rollout_mismatch/mean", None)
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
    rewards = [c.reward for c in rollout if not math.isnan(c.reward)]
    found: dict[str, Any] = {"unscored": len(rollout) - len(rewards)}
    if rewards:
        found |= {
            "reward": statistics.fmean(rewards),
            "reward_std": statistics.pstdev(rewards),
            "reward_min": min(rewards),
            "reward_max": max(rewards),
            "reward_group_std": statistics.fmean(_std(group) for group in groups),
            "all_min_groups": _share(groups, min(rewards), max(rewards)),
            "all_max_groups": _share(groups, max(rewards), min(rewards)),
        }
    for name in rollout[0].rewards:
        scored = [c.rewards[name] for c in rollout if not math.isnan(c.rewards.get(name, math.nan))]
        if scored:
            found |= {
                f"rewards/{name}/mean": statistics.fmean(scored),
                f"rewards/{name}/std": statistics.pstdev(scored),
            }
    found["zero_gradient_groups"] = statistics.fmean(without_gradient(group) for group in groups)
    found["dropped_groups"] = sum(group[0].dropped for group in groups)
    return found | _advantages(rollout) | _completions(rollout, groups)


def _std(group: Sequence[Completion]) -> float:
    rewards = [c.reward for c in group if not math.isnan(c.reward)]
    return statistics.pstdev(rewards) if rewards else 0.0


def _share(groups: Sequence[Sequence[Completion]], value: float, other: float) -> float:
    """Share of groups in which all rewards are `value`; 0 where all rewards of the rollout are equal to each other."""
    return 0.0 if value == other else statistics.fmean(all(c.reward == value for c in group) for group in groups)


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


def _completions(rollout: Sequence[Completion], groups: Sequence[Sequence[Completion]]) -> dict[str, float]:
    lengths = [len(c.ids) for c in rollout]
    return {
        "completions/count": len(rollout),
        "completions/mean_length": statistics.fmean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": statistics.fmean(not c.ended for c in rollout),
        "completions/unique_ratio": statistics.fmean(
            len({tuple(c.ids) for c in group}) / len(group) for group in groups
        ),
    }


def tokens_of(rows: Sequence[Completion], arguments: Any) -> int:
    """Tokens in the loss."""
    return sum(len(c.ids) for c in rows if is_scored(c, arguments))

"""The numbers of a step, and where they go: log.jsonl, samples.jsonl, a progress bar, and trackers of accelerate."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from ..objective.rollout import derived_metrics
from .arguments import TrainArguments
from .batch import groups_of, without_gradient
from .checkpoint import LOG, SAMPLES
from .files import append, read_file, sync, write_text
from .monitor import Monitor
from .ranks import Ranks
from .records import is_number, parse_record, plain, records_of
from .rollout import Completion

# Beside the progress bar, or in the lines that stand for it.
SHOWN = ("reward", "kl", "divergence", "entropy", "grad_norm")
QUIET_S = 30.0
EXTREMES = ("/min", "/max")
# Trackers get TRL's names, with its prefixes train/ and eval/, so that runs of both trainers share their plots: here
# are those that differ from the names in log.jsonl.
TRL_NAMES = {
    "zero_gradient_groups": "frac_reward_zero_std", "clip_ratio/low": "clip_ratio/low_mean",
    "clip_ratio/high": "clip_ratio/high_mean", "clip_ratio/region": "clip_ratio/region_mean",
    "rollout_mismatch/mean": "sampling/sampling_logp_difference/mean",
    "rollout_mismatch/max": "sampling/sampling_logp_difference/max",
    **{f"rollout_weight/{x}": f"sampling/importance_sampling_ratio/{x}" for x in ("mean", "min", "max")},
}  # fmt: skip


class RunLog:
    """Records of a run, with the failures that the monitor sees in them; only the first rank writes."""

    def __init__(self, folder: Path, accelerator: Accelerator, arguments: TrainArguments):
        self.accelerator, self.writes, self.arguments = accelerator, accelerator.is_main_process, arguments
        self.paths = {name: folder / name for name in (LOG, SAMPLES)} if self.writes else {}
        self.monitor, self.phase_name = Monitor(), ""
        hidden = arguments.dry_run or not self.writes or None  # None: where stderr is no terminal
        self.said = time.monotonic()
        self.bar = tqdm(total=arguments.max_steps, desc="GRPO", disable=hidden, dynamic_ncols=True)

    def start(self, step: int, sizes: dict[str, int]) -> None:
        """Begins, or goes on after the checkpoint of `step`: what was written beyond the sizes at that time is cut off.
        What a loss of power has damaged is left out, with a warning."""
        for name, path in self.paths.items():
            append(path, "")
            written, size = read_file(path), sizes.get(name, 0)
            if (missing := size - len(written)) > 0:
                self.say(f"{path} is {missing:,} bytes shorter than at step {step}: records of steps are lost")
            records, problem = records_of(written[:size])
            if problem:
                self.say(f"{path}: {problem}")
            lines = written[:size].splitlines()
            if written != (text := b"".join(lines[i] + b"\n" for i in records)):
                write_text(path, text.decode())
            if name == LOG:
                self.monitor = Monitor(records.values())
        self.bar.n = step
        self.bar.refresh()

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of the files, which are on the disk then: a checkpoint counts on them."""
        for path in self.paths.values():
            sync(path)
        return {name: path.stat().st_size for name, path in self.paths.items()}

    def phase(self, name: str) -> None:
        """Shows what takes the time now, beside the progress bar."""
        self.phase_name = name
        self.bar.set_description(f"GRPO, {name}")

    def part(self, done: int, total: int) -> None:
        """Shows how far the phase is: where there is no progress bar, a line after half a minute without one."""
        self.bar.set_description(f"GRPO, {self.phase_name} {done:,}/{total:,}")
        if self.bar.disable and time.monotonic() - self.said > QUIET_S:
            self.say(f"{self.phase_name}: {done:,} of {total:,}")

    def record(self, record: dict[str, Any]) -> None:
        """Writes one optimizer step, or one evaluation."""
        record = plain(record)
        alarms = self.monitor.update(record)
        if alarms:
            record["warnings"] = [{"kind": a.kind, "severity": a.severity, "message": a.message} for a in alarms]
        for alarm in alarms:
            self.say(f"step {record['step']}: {alarm.severity}: {alarm.message}")
        self._append(LOG, json.dumps(record))
        kind, metrics = ("eval", record["evaluation"]) if "evaluation" in record else ("train", record)
        numbers = {k: v for k, v in metrics.items() if is_number(v) and k != "step"}
        self.accelerator.log({f"{kind}/{TRL_NAMES.get(k, k)}": v for k, v in numbers.items()}, step=record["step"])
        if "loss" in record:
            shown = {k: f"{numbers[k]:.3g}" for k in SHOWN if k in numbers}
            self.bar.update(1)
            self.bar.set_postfix(shown)
            if self.bar.disable and record["step"] % self.arguments.logging_steps == 0:
                words = ", ".join(f"{k} {x}" for k, x in shown.items())
                self.say(f"step {record['step']} of {self.bar.total}: {words}, {record['seconds']:.0f} s")

    def sample(self, sample: dict[str, Any]) -> None:
        """Writes one completion; values of `log_extra` that cannot be written, or read again, are left out, by name."""
        try:
            text = json.dumps(plain(sample))
        except (ValueError, TypeError, RecursionError):
            text = ""
        if parse_record(text) is None:
            names = ", ".join(map(str, sample.get("extra", {})))
            text = json.dumps(plain({**sample, "extra": f"cannot be written as JSON: {names}"}))
        self._append(SAMPLES, text)

    def say(self, text: str) -> None:
        """Prints a line above the progress bar."""
        self.said = time.monotonic()
        if self.writes:
            tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        self.bar.close()

    def _append(self, name: str, text: str) -> None:
        if self.writes:
            append(self.paths[name], f"{text}\n")


def pass_numbers(out: Any, inputs: dict[str, Any]) -> dict[str, float]:
    """Returns sums and extremes, nats, of a forward and backward pass: of the loss's result `out` and its arguments.
    All are read from the device at once."""
    mask = inputs["completion_mask"]
    tensors = {"tokens": mask.sum(), "loss": out.loss.detach()}
    tensors |= {name: x for name, x in out.metrics.items() if name.endswith(EXTREMES)}
    tensors["log_ratio_first_max"] = _largest_difference(out.logps, inputs.get("old_logps"), mask)
    tensors["rollout_mismatch/max"] = _largest_difference(out.logps, inputs.get("rollout_logps"), mask)
    for name, (total, count) in out.metric_sums.items():
        tensors |= {f"{name} sum": total, f"{name} count": count}
    if "kl" in out.sequences:
        tokens = out.sequences["tokens"]
        tensors["kl_sequence sum"] = (out.sequences["kl"] * tokens).sum()
        tensors["kl_sequence count"] = (tokens > 0).sum()
    numbers = dict(zip(tensors, torch.stack([x.to(torch.float64) for x in tensors.values()]).tolist(), strict=True))
    if not numbers.pop("tokens"):  # 0 would stand for no extreme
        numbers = {name: x for name, x in numbers.items() if not name.endswith(EXTREMES)}
    return numbers


def step_record(passes: list[dict[str, float]], ranks: Ranks, *, first: bool) -> dict[str, float]:
    """Returns the numbers of an optimizer step from those of its passes on all ranks.

    first: this was the rollout's first step, before which the policy was the one that sampled.
    """
    everything = ranks.gather(passes)
    record = {}
    for name in sorted({name for numbers in everything for name in numbers}):
        join = min if name.endswith("min") else max if name.endswith("max") else sum
        record[name] = join([numbers[name] for numbers in everything if name in numbers])
    pairs = {}
    for name in [name.removesuffix(" sum") for name in record if name.endswith(" sum")]:
        total, count = record.pop(f"{name} sum"), record.pop(f"{name} count")
        if count:  # without a scored token there is no mean
            record[name] = total / count
            pairs[name] = torch.tensor(total, dtype=torch.float64), torch.tensor(count, dtype=torch.float64)
    record |= {name: x.item() for name, x in derived_metrics(pairs).items()}
    record["loss"] /= ranks.count
    if not first:  # what later steps see is the policy's own movement
        for name in ("log_ratio_first_max", "rollout_mismatch/max", "rollout_mismatch/mean"):
            record.pop(name, None)
    return record


def _largest_difference(logps: Tensor, others: Tensor | None, mask: Tensor) -> Tensor:
    """Returns the largest absolute difference () of unmasked tokens, 0 without any; a log-probability that is not known
    counts as equal."""
    if others is None:
        return logps.new_zeros(())
    return (logps - others).masked_fill(~mask, 0.0).abs().nan_to_num(0.0).amax()


def rollout_record(rollout: Sequence[Completion], num_generations: int) -> dict[str, Any]:
    """Rewards, advantages and lengths of a rollout; without completions that have no verdict, where rewards count."""
    groups = groups_of(rollout, num_generations)
    rewards = [[c.reward for c in group if not math.isnan(c.reward)] for group in groups]
    scored = [reward for group in rewards for reward in group]
    low, high = min(scored, default=0.0), max(scored, default=0.0)
    lengths = [len(c.ids) for c in rollout]
    record: dict[str, Any] = {
        "unscored": len(rollout) - len(scored),
        "zero_gradient_groups": fmean(without_gradient(group) for group in groups),
        "dropped_groups": sum(group[0].dropped for group in groups),
        "completions/count": len(rollout),
        "completions/mean_length": fmean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": fmean(not c.ended for c in rollout),
        "completions/unique_ratio": fmean(len({tuple(c.ids) for c in group}) / len(group) for group in groups),
    }
    rejected = [c.rejected for c in rollout if c.rejected is not None]
    if rejected:
        record["rollout_rejected"] = torch.cat(rejected).double().mean().item()
    if scored:
        record |= _moments(torch.tensor(scored, dtype=torch.float64), "reward", "reward_std")
        record["reward_min"], record["reward_max"] = low, high
        # Where all rewards of the rollout are equal to each other, no group is better or worse.
        record["reward_group_std"] = fmean(pstdev(group) if group else 0.0 for group in rewards)
        record["all_min_groups"] = fmean(all(c.reward == low < high for c in group) for group in groups)
        record["all_max_groups"] = fmean(all(c.reward == high > low for c in group) for group in groups)
    for name in rollout[0].rewards:
        values = torch.tensor([c.rewards.get(name, math.nan) for c in rollout], dtype=torch.float64)
        values = values[~values.isnan()]
        if len(values):
            record |= _moments(values, f"rewards/{name}/mean", f"rewards/{name}/std")
    return record


def _moments(values: Tensor, mean: str, std: str) -> dict[str, float]:
    return {mean: values.mean().item(), std: values.std(unbiased=False).item()}

"""Synthetic logs of training runs: a healthy one, and one for each failure that the monitor must find."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def progress(step: int, steps: int) -> float:
    """Share of problems solved: from 0.35 to 0.95, fast at first."""
    return 0.35 + 0.6 * (1 - math.exp(-4 * step / steps))


def step_record(step: int, steps: int, noise: random.Random) -> Record:
    """A step of a run that learns a task with rewards 0 and 1; magnitudes are those of a run on generated sums."""
    solved, gauss = progress(step, steps), noise.gauss
    reward = min(1.0, max(0.0, solved + 0.04 * gauss(0, 1)))
    best, worst = solved**5, (1 - solved) ** 5
    entropy = max(0.02, 0.9 - 0.75 * solved + 0.02 * gauss(0, 1))
    kl = 0.3 * step / steps + 0.02 * abs(gauss(0, 1))
    std = math.sqrt(reward * (1 - reward))
    rollout, rewards, update = 0.6 + 0.05 * noise.random(), 0.02, 0.35 + 0.05 * noise.random()
    record = {
        "step": step, "loss": 0.002 * gauss(0, 1), "grad_norm": 0.4 * math.exp(0.25 * gauss(0, 1)), "kl": kl,
        "kl_sequence": 3.5 * kl, "entropy": entropy, "ratio/mean": 1 + 0.001 * gauss(0, 1), "ratio/min": 0.6,
        "ratio/max": 1.5, "clip_ratio/low": 0.004, "clip_ratio/high": 0.006, "learning_rate": 2e-4,
        "relative_step": 0.999,
        "clip_ratio/region": 0.01 + 0.005 * noise.random(), "approx_kl": 0.003,
        "divergence": 0.5 - 0.3 * solved + 0.02 * gauss(0, 1), "rollout_mismatch/mean": 2e-3 * noise.random(),
        "rollout_ess": 0.9 + 0.05 * noise.random(), "rollout_ratio/ess": 0.999, "rollout_ratio_sequence/ess": 0.95,
        "rollout_weight/dropped": 0.02, "rollout_weight/above": 0.01, "rollout_weight/below": 0.0,
        "rollout_rejected": 0.0,
        "reward": reward, "reward_std": std, "reward_min": 0.0, "reward_max": 1.0, "reward_group_std": 0.8 * std,
        "rewards/arithmetic/mean": reward, "rewards/arithmetic/std": std, "zero_gradient_groups": best + worst,
        "all_min_groups": worst, "all_max_groups": best, "unscored": 0, "completions/count": 256,
        "completions/mean_length": 3.4 + 0.1 * gauss(0, 1), "completions/max_length": 5,
        "completions/clipped_ratio": 0.03 * noise.random(), "completions/unique_ratio": 0.8 - 0.6 * solved,
        "tokens_per_second": 900 / (rollout + rewards + update), "seconds": step * 1.02, "seconds/rollout": rollout,
        "seconds/rewards": rewards, "seconds/update": update, "slowest_reward": "arithmetic",
    }  # fmt: skip
    if step % 2:  # the first of two updates of a rollout, at a ratio of 1 and with another gradient
        record |= {"log_ratio_first_max": 0.0, "approx_kl": 0.0, "grad_norm": 5 * record["grad_norm"]}
        record |= dict.fromkeys(("clip_ratio/low", "clip_ratio/high", "clip_ratio/region"), 0.0)
    return record


def evaluation_record(step: int, accuracy: float) -> Record:
    spread = 1 - (1 - accuracy) ** 2
    return {
        "step": step,
        "evaluation": {
            "reward": accuracy, "reward_error": math.sqrt(accuracy * (1 - accuracy) / 400), "greedy_reward": accuracy,
            "pass_at_1": accuracy, "pass_at_k": {"1": accuracy, "2": spread, "4": 1 - (1 - spread) ** 2},
            "majority_at_k": accuracy, "best_of_n": 1 - (1 - spread) ** 2, "greedy": accuracy + 0.01,
            "mean_length": 3.4, "problems": 400, "samples": 4,
        },
    }  # fmt: skip


def log(
    steps: int = 200,
    *,
    seed: int = 0,
    every: int = 50,
    spoil: Callable[[Record, float], None] | None = None,
    accuracy: Callable[[float], float] | None = None,
) -> list[Record]:
    """Records of a run. spoil(record, share of the run) changes a record; accuracy(share): of evaluations."""
    noise = random.Random(seed)
    records = []
    for step in range(steps + 1):
        share = step / steps
        if step:
            record = step_record(step, steps, noise)
            if spoil:
                spoil(record, share)
            records.append(record)
        if step % every == 0:
            records.append(evaluation_record(step, (accuracy or (lambda s: progress(s * steps, steps)))(share)))
    return records


def _from(start: float, **changes: Any) -> Callable[[Record, float], None]:
    """From this share of the run on, metrics (with "/" written "__") are these numbers, or functions of the old value
    and the share."""

    def spoil(record: Record, share: float) -> None:
        for name, change in changes.items() if share > start else ():
            key = name.replace("__", "/")
            record[key] = change(record[key], share) if callable(change) else change

    return spoil


# kind of alarm -> (what spoils the run, severity); accuracy of evaluations only for reward hacking
FAILURES: dict[str, tuple[Callable[[Record, float], None], str]] = {
    "reward_hacking": (_from(0), "warning"),
    "mode_collapse": (
        _from(0, entropy=lambda value, share: value * math.exp(-4 * share), reward=0.35, all_max_groups=0.1,
              completions__unique_ratio=lambda _, share: 0.9 - 0.75 * share, all_min_groups=0.3,
              zero_gradient_groups=0.4), "critical"),
    "kl_explosion": (
        _from(0, kl=lambda _, share: 0.01 * math.exp(9 * share), kl_sequence=lambda _, share: math.exp(9 * share)),
        "critical"),
    "divergence_rises": (_from(0.5, divergence=lambda value, share: value + 2 * share), "warning"),
    "gradient_instability": (_from(0.7, grad_norm=lambda value, _: 50 * value), "critical"),
    "vanishing_steps": (_from(0.5, relative_step=0.0), "critical"),
    "no_learning_signal": (
        _from(0, zero_gradient_groups=0.78, all_min_groups=0.7, all_max_groups=0.08), "warning"),
    "unscored": (_from(0.5, unscored=40), "warning"),
    "length_bias": (
        _from(0, completions__mean_length=lambda _, share: 200 * (1 + 2 * share),
              reward=lambda _, share: 0.35 + 0.01 * math.sin(200 * share)), "warning"),
    "truncation": (_from(0.5, completions__clipped_ratio=1.0), "critical"),
    "first_ratio": (_from(0.5, log_ratio_first_max=0.2), "warning"),
    "clipping": (_from(0.5, clip_ratio__region=0.4, approx_kl=0.05), "warning"),
    "rollout_mismatch": (_from(0.5, rollout_mismatch__mean=0.1), "warning"),
    "off_policy": (_from(0.5, rollout_ess=lambda _, share: 0.6 - 0.55 * share), "critical"),
}  # fmt: skip


def failing(kind: str, steps: int = 200) -> list[Record]:
    flat = (lambda share: 0.4) if kind == "reward_hacking" else None
    return log(steps, spoil=FAILURES[kind][0], accuracy=flat)


def samples(steps: int, *, per_step: int = 4) -> list[Record]:
    """Completions, two of each prompt."""
    noise = random.Random(0)
    rows = []
    for i in range(per_step * steps):
        step, problem = i // per_step + 1, i // 2
        right = noise.random() < progress(step, steps)
        rows.append({
            "step": step, "prompt": f"{problem}+1=", "completion": f"The sum is {problem + (1 if right else 10)}",
            "reward": float(right), "advantage": 0.9 if right else -1.1, "rewards": {"arithmetic": float(right)},
            "tokens": 5,
        })  # fmt: skip
    return rows


def write_run(
    folder: Path, records: list[Record], rows: list[Record], *, max_steps: int | None = None, finished: bool = True
) -> Path:
    """The files that a run leaves in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = max((record["step"] for record in records), default=0)
    for name, lines in (("log.jsonl", records), ("samples.jsonl", rows)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    config = {"output_dir": str(folder), "loss_type": "dapo", "max_steps": max_steps or steps}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if finished:
        (folder / "summary.json").write_text(json.dumps({"steps": steps, "seconds": 1.02 * steps}), encoding="utf-8")
    return folder

"""report.html of a run: its state, the diagnosis in words, plots, and sample completions, in one file without network.

`write_report` reads what a run has written so far, be it finished, running or broken, and fills the template
`report.html` beside this file, whose script draws the plots from JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from .files import read_file, write_text
from .monitor import ENTROPY, KL_PER_TOKEN, RULES, WINDOW, Monitor
from .records import Record, counted, finite, is_number, parse, records_of

TEMPLATE = Path(__file__).with_name("report.html")
SAMPLE_STEPS, SAMPLES_PER_STEP, SAMPLE_LENGTH = 40, 8, 2000


class Chart(NamedTuple):
    """lines: labels by metric, drawn where it is known. kinds: alarms to shade. limit: of the monitor."""

    title: str
    unit: str
    lines: dict[str, str]
    kinds: tuple[str, ...] = ()
    limit: float | None = None
    log: bool = False


CHARTS = [
    Chart("Reward", "mean", {"reward": "training", "eval/reward": "held out", "eval/greedy_reward": "greedy"},
          ("reward_hacking",)),
    Chart("Held-out accuracy", "share of problems",
          {"eval/pass_at_1": "pass@1", "eval/pass_at_n": "pass@n", "eval/majority_at_k": "majority@n",
           "eval/greedy": "greedy"}),
    Chart("KL", "nats per token", {"kl": "to the reference", "divergence": "to the teacher"},
          ("kl_explosion", "divergence_rises"), KL_PER_TOKEN),
    Chart("Entropy", "nats per token", {"entropy": "entropy"}, ("mode_collapse",), ENTROPY),
    Chart("Gradient norm", "before clipping, log scale", {"grad_norm": "norm"}, ("gradient_instability",), log=True),
    Chart("Learning rate", "of AdamW", {"learning_rate": "rate"}, ("vanishing_steps",)),
    Chart("Groups of equal rewards", "share of groups",
          {"zero_gradient_groups": "all", "all_min_groups": "lowest", "all_max_groups": "highest"},
          ("no_learning_signal",), RULES["no_learning_signal"].warning),
    Chart("Spread of rewards", "standard deviation", {"reward_std": "all", "reward_group_std": "within groups"}),
    Chart("Clipped tokens", "share of tokens",
          {"clip_ratio/region": "all", "clip_ratio/low": "low", "clip_ratio/high": "high", "cispo_clip_ratio": "CISPO"},
          ("clipping",), RULES["clipping"].warning),
    Chart("Importance ratio", "lowest, mean, highest",
          {"ratio/min": "lowest", "ratio/mean": "mean", "ratio/max": "highest"}, ("first_ratio",)),
    Chart("Length", "tokens", {"completions/mean_length": "mean", "completions/max_length": "longest"},
          ("length_bias", "truncation")),
    Chart("Completions", "share",
          {"completions/clipped_ratio": "truncated", "completions/unique_ratio": "distinct in a group"},
          ("truncation",)),
    Chart("Unscored completions", "count", {"unscored": "unscored"}, ("unscored",)),
    Chart("Rollout mismatch", "mean |difference of logps|, nats", {"rollout_mismatch/mean": "mean"},
          ("rollout_mismatch",), RULES["rollout_mismatch"].warning),
    Chart("Effective sample size", "share",
          {"rollout_ess": "weights", "rollout_ratio/ess": "token ratios", "rollout_ratio_sequence/ess": "products"},
          ("off_policy",), RULES["off_policy"].warning),
    Chart("Bounded weights", "share of tokens",
          {"rollout_weight/dropped": "0", "rollout_weight/above": "from above", "rollout_weight/below": "from below",
           "rollout_rejected": "out of the loss"}),
    Chart("Seconds per step", "by part",
          {"seconds/rollout": "rollout", "seconds/rewards": "rewards", "seconds/update": "update"}),
]  # fmt: skip


def run(argv: Sequence[str]) -> int:
    """Runs `grpo-kernels report DIR`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="grpo-kernels report", description="Write DIR/report.html, a page on its own."
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="output folder of a run, which may be running")
    folder = parser.parse_args(argv).folder
    try:
        print(write_report(folder))
    except (ValueError, OSError) as error:
        print(f"grpo-kernels report: {error}", file=sys.stderr)
        return 2
    return 0


def write_report(folder: str | Path) -> Path:
    """Writes `report.html` into the output folder of a run and returns its path.

    A run that goes on, a broken last line and missing files are no errors: the report says what it found. Raises
    ValueError where `folder` holds none of a run.
    """
    folder = Path(folder)
    if not any((folder / name).exists() for name in ("config.json", "log.jsonl")):
        raise ValueError(f"{folder} holds neither config.json nor log.jsonl; expected the output folder of a run")
    data = json.dumps(collect(folder), allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    # A completion may hold anything: "</script>" would end the script element.
    page = TEMPLATE.read_text(encoding="utf-8").replace("/*DATA*/null", data.replace("<", "\\u003c"), 1)
    write_text(folder / "report.html", page.encode("utf-8", "replace").decode())  # without lone surrogates
    return folder / "report.html"


def collect(folder: Path) -> dict[str, Any]:
    """Returns everything that the page shows, as plain JSON."""
    notes: list[str] = []
    # After a resume that could not truncate the log, the later record of a step holds.
    lines = {(line["step"], "evaluation" in line): line for line in read_lines(folder / "log.jsonl", notes)}
    log = [lines[key] for key in sorted(lines)]
    records = [line for line in log if "evaluation" not in line]
    evaluations = [flat(line) for line in log if "evaluation" in line]
    config, summary = (read_object(folder / name, notes) for name in ("config.json", "summary.json"))
    monitor = Monitor(log)
    # Of every kind: "critical" or "warning" now, "past", "ok", or "unmeasured", where its metrics are not in the log.
    checks = {kind: "ok" if kind in monitor.measured else "unmeasured" for kind in RULES}
    checks |= {alarm.kind: alarm.severity if alarm.last is None else "past" for alarm in monitor.alarms}
    series = series_of(records) | series_of(evaluations)
    charts = charts_of(series)
    return {
        "title": folder.resolve().name,
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        **state_of(folder, records, config, summary),
        "tiles": tiles_of(records, evaluations, summary),
        "episodes": [
            {**asdict(alarm), "title": RULES[alarm.kind].title, "advice": RULES[alarm.kind].advice}
            for alarm in monitor.alarms
        ],
        "checks": [{"title": RULES[kind].title, "state": state} for kind, state in checks.items()],
        "charts": [chart._asdict() for chart in charts],
        "last": records[-1]["step"] if records else 0,
        "series": {key: series[key] for chart in charts for key in chart.lines if key in series},
        "samples": samples_of(read_lines(folder / "samples.jsonl", notes)),
        "config": [[name, json.dumps(value, ensure_ascii=False)] for name, value in config.items()],
        "notes": notes,
    }


def read_lines(path: Path, notes: list[str]) -> list[Record]:
    """Returns the records of log.jsonl or samples.jsonl; lines that are none are noted."""
    if not os.path.lexists(path):
        notes.append(f"There is no {path.name}.")
        return []
    records, problem = records_of(read_file(path))
    notes += [f"{path.name}: {problem}."] if problem else []
    return list(records.values())


def read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    value = parse(read_file(path)) if os.path.lexists(path) else {}
    if not isinstance(value, dict):
        notes.append(f"{path.name} could not be read.")
        return {}
    return value


def state_of(folder: Path, records: list[Record], config: Record, summary: Record) -> dict[str, Any]:
    """Returns state ("finished", "unfinished" or "empty"), the sentence about it, and what the run trained."""
    last, goal = records[-1]["step"] if records else 0, config.get("max_steps")
    if summary:
        state, text = "finished", f"Finished after {counted(last, 'step')}."
    elif records:
        age = timedelta(seconds=max(0, round(time.time() - (folder / "log.jsonl").stat().st_mtime)))
        out_of = f" of {goal}" if goal else ""
        state, text = "unfinished", f"Step {last}{out_of}; the log was last written {age} before this report."
    else:
        state, text = "empty", "No step is logged yet."
    facts = [str(config[name]) for name in ("model_name_or_path", "dataset_name", "loss_type") if config.get(name)]
    return {"state": state, "sentence": text, "facts": facts}


def tiles_of(records: list[Record], evaluations: list[Record], summary: Record) -> list[dict[str, str]]:
    """Returns label, value and value at the start: of evaluations the first and the last, of steps means."""
    known = [record["eval/pass_at_1"] for record in evaluations if record.get("eval/pass_at_1") is not None]
    held_out = ("Held-out pass@1", "eval/pass_at_1") if known else ("Held-out reward", "eval/reward")
    tiles = []
    for (label, key), rows, size, form in (
        (held_out, evaluations, 1, "{:.3f}"),
        (("Reward", "reward"), records, WINDOW, "{:.3g}"),
        (("Truncated", "completions/clipped_ratio"), records, WINDOW, "{:.0%}"),
        (("Tokens per second", "tokens_per_second"), records, WINDOW, "{:,.0f}"),
    ):
        values = [value for row in rows if (value := finite(row.get(key))) is not None]
        size = min(size, max(1, len(values) // 2))
        parts = values[:-size][:size], values[-size:]
        # The sum of large numbers is beyond what a float holds.
        before, now = (form.format(sum(x / len(part) for x in part)) if part else "" for part in parts)
        tiles.append({"label": label, "value": now or "–", "before": before})
    seconds = finite((summary or (records[-1] if records else {})).get("seconds"))
    shown = str(timedelta(seconds=round(seconds))) if seconds is not None and 0 <= seconds < 1e12 else "–"
    return [*tiles, {"label": "Time", "value": shown, "before": ""}]


def flat(record: Record) -> Record:
    """Returns an evaluation with keys eval/...; eval/pass_at_n is pass@k for the largest k."""
    numbers = {"step": record["step"]} | {f"eval/{key}": value for key, value in record["evaluation"].items()}
    if at_k := record["evaluation"].get("pass_at_k"):
        numbers["eval/pass_at_n"] = at_k[max(at_k, key=int)]
    return numbers


def series_of(records: list[Record]) -> dict[str, dict[str, list[Any]]]:
    """Returns each number of the records, "y", with its steps, "x"; a value that is not finite is None."""
    series: dict[str, dict[str, list[Any]]] = {}
    for record in records:
        for key, value in record.items():
            if is_number(value):
                line = series.setdefault(key, {"x": [], "y": []})
                line["x"].append(record["step"])
                line["y"].append(finite(value))
    return series


def charts_of(series: dict[str, Any]) -> list[Chart]:
    """Returns the charts that have data: `CHARTS`, and of what a reward function gave or logged one each."""
    names = [key.split("/")[1] for key in series if key.startswith("rewards/") and key.endswith("/mean")]
    reward_charts = [
        Chart(f"Reward {name}", "", {f"rewards/{name}/mean": "mean", f"rewards/{name}/std": "std"}) for name in names
    ]
    logged = [name for name in series if name.startswith("metrics/")]
    metric_charts = [Chart(name.removeprefix("metrics/"), "", {name: "mean"}) for name in logged]
    return [chart for chart in [*CHARTS, *reward_charts, *metric_charts] if series.keys() & chart.lines]


def samples_of(rows: list[Record]) -> list[dict[str, Any]]:
    """Returns completions at up to `SAMPLE_STEPS` steps, evenly, with the first and the last."""
    by_step: dict[int, list[Record]] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(row)
    steps, count = sorted(by_step), min(SAMPLE_STEPS, len(by_step))
    chosen = [steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)]
    return [{"step": step, "rows": list(map(show_sample, by_step[step][:SAMPLES_PER_STEP]))} for step in chosen]


def show_sample(row: Record) -> dict[str, Any]:
    return {
        "prompt": shorten(row.get("prompt")),
        "completion": shorten(row.get("completion")),
        **{name: finite(row.get(name)) for name in ("reward", "advantage", "tokens")},
        "rewards": {name: finite(value) for name, value in row.get("rewards", {}).items()},
    }


def shorten(text: Any) -> str:
    """Messages become lines "role: content"; long texts lose their middle."""
    if isinstance(text, list):
        text = "\n".join(f"{m.get('role')}: {m.get('content')}" if isinstance(m, dict) else str(m) for m in text)
    text, half = str(text or ""), SAMPLE_LENGTH // 2
    if len(text) <= SAMPLE_LENGTH:
        return text
    return f"{text[:half]} […{len(text) - SAMPLE_LENGTH:,} characters left out…] {text[-half:]}"

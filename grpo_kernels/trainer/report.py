"""report.html of a run: its state, the diagnosis in words, plots, and sample completions, in one file without network.

`write_report` reads what a run has written so far, be it finished, running or broken, and fills the template
`report.html` beside this file, whose script draws the plots from JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from .files import naming
from .monitor import (
    CLIPPED,
    ENTROPY,
    KINDS,
    KL_PER_SEQUENCE,
    KL_PER_TOKEN,
    MISMATCH,
    WINDOW,
    ZERO_GRADIENT_WARNING,
    Episode,
    diagnose,
)
from .records import Record, is_number, parse, parse_record
from .tasks import ARITHMETIC_MODEL, ARITHMETIC_SUMS

TEMPLATE = Path(__file__).with_name("report.html")
POINTS = 100_000  # values of all series together; longer series are thinned
SAMPLE_STEPS, SAMPLES_PER_STEP, SAMPLE_LENGTH = 40, 8, 2000
HISTOGRAMS = 120


class Chart(NamedTuple):
    """lines: labels by metric, drawn where it is known. kinds: alarms whose episodes are shaded. thresholds: (value or
    None, label). band: keys of the first line's lower and upper edge."""

    title: str
    unit: str
    lines: dict[str, str]
    kinds: tuple[str, ...] = ()
    thresholds: tuple[tuple[float | None, str], ...] = ()
    band: tuple[str, ...] = ()
    log: bool = False


FIRST = "What matters first"
NOT_PLOTTED = {"step", "rollout", "seconds", "completions/count"}


def all_charts(evaluation: Record, config: Record) -> dict[str, tuple[Chart, ...]]:
    """The charts in groups. What is in none of them is plotted by its name. evaluation: the first one."""
    start, n = flat(evaluation) if evaluation else {}, evaluation.get("evaluation", {}).get("samples", "n")
    k = max(map(int, start.get("eval/pass_at_k") or [1]))
    return {
        FIRST: (
            Chart("Reward", "mean", {"reward": "training", "eval/reward": "held out"},
                  ("reward_hacking", "reward_outliers", "constant_reward")),
            Chart("Held-out accuracy", "share of problems",
                  {"eval/pass_at_1": "pass@1", "eval/pass_at_n": f"pass@{k}", "eval/majority_at_k": f"majority@{n}",
                   "eval/greedy": "greedy"}, (), ((finite(start.get("eval/pass_at_n")), f"pass@{k} at the start"),)),
            Chart("KL to the reference", "nats per token", {"kl": "KL"}, ("kl_explosion",),
                  ((KL_PER_TOKEN, "limit, with 10 per sequence"),)),
            Chart("Entropy", "nats per token", {"entropy": "entropy"}, ("mode_collapse",),
                  ((ENTROPY, "limit, with repeated completions"),)),
            Chart("Gradient norm", "before clipping, log scale", {"grad_norm": "norm"}, ("gradient_instability",),
                  ((finite(config.get("max_grad_norm")) or None, "max_grad_norm"),), log=True),
            Chart("Learning rate", "of AdamW", {"learning_rate": "rate"}),
        ),
        "Rewards and advantages": (
            Chart("Range of rewards", "shaded: lowest to highest", {"reward": "mean"}, ("reward_outliers",),
                  band=("reward_min", "reward_max")),
            Chart("Spread of rewards", "standard deviation",
                  {"reward_std": "all", "reward_group_std": "within groups"}),
            Chart("Advantages", "normalised rewards and their range",
                  {"advantage_mean": "mean", "advantage_std": "std"}, band=("advantage_min", "advantage_max")),
            Chart("Without gradient", "share of groups, and of tokens",
                  {"zero_gradient_groups": "equal rewards", "all_min_groups": "all lowest",
                   "all_max_groups": "all highest", "zero_gradient": "tokens"}, ("no_learning_signal",),
                  ((ZERO_GRADIENT_WARNING, "limit, less all highest"),)),
            Chart("Unscored completions", "count", {"unscored": "unscored"}, ("unscored",)),
        ),
        "Policy": (
            Chart("Clipped tokens", "share of tokens",
                  {"clip_ratio/region": "all", "clip_ratio/low": "low", "clip_ratio/high": "high",
                   "cispo_clip_ratio": "CISPO"}, ("clipping",), ((CLIPPED, "limit"),)),
            Chart("Importance ratio", "shaded: lowest to highest", {"ratio/mean": "mean"},
                  band=("ratio/min", "ratio/max")),
            Chart("First log-ratio", "largest, nats", {"log_ratio_first_max": "first update"}, ("first_ratio",)),
            Chart("KL per sequence", "nats", {"kl_sequence": "KL"}, ("kl_explosion",), ((KL_PER_SEQUENCE, "limit"),)),
            Chart("Divergence to the teacher", "nats per token", {"divergence": "mean"}, ("divergence_rises",)),
            Chart("Loss", "near 0 by construction", {"loss": "loss"}, ("gradient_instability",)),
        ),
        "Completions": (
            Chart("Length", "tokens, shaded: shortest to longest",
                  {"completions/mean_length": "mean", "eval/mean_length": "held out"}, ("length_bias",),
                  band=("completions/min_length", "completions/max_length")),
            Chart("Truncated", "share of completions", {"completions/clipped_ratio": "no end"}, ("truncation",)),
            Chart("Diversity", "distinct completions of a group, share", {"completions/unique_ratio": "distinct"},
                  ("mode_collapse",)),
            Chart("Held out", "reward",
                  {"eval/best_of_n": f"best of {n}", "eval/reward": "mean", "eval/greedy_reward": "greedy"}),
        ),
        "Rollouts against the model": (
            Chart("Mismatch", "mean |difference of logps|, nats", {"rollout_mismatch/mean": "mean"}, ("off_policy",),
                  ((MISMATCH, "limit"),)),
            Chart("Importance weights", "mean weight; effective sample size, share",
                  {"rollout_weight/mean": "weight", "rollout_ess": "sample size"}, ("off_policy",)),
        ),
        "Speed": (
            Chart("Tokens per second", "completion tokens", {"tokens_per_second": "tokens/s"}),
            Chart("Seconds per step", "by part",
                  {"seconds/rollout": "rollout", "seconds/rewards": "rewards", "seconds/update": "update"},
                  ("slow_rewards",)),
        ),
    }  # fmt: skip


def run(argv: Sequence[str]) -> int:
    """`grpo-kernels report DIR`; returns the exit status."""
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
    """Write `report.html` into the output folder of a run and return its path.

    A run that goes on, a broken last line and missing files are no errors: the report says what it found. Raises
    ValueError where `folder` holds none of a run.
    """
    folder = Path(folder)
    if not any((folder / name).exists() for name in ("config.json", "log.jsonl")):
        raise ValueError(f"{folder} holds neither config.json nor log.jsonl; expected the output folder of a run")
    # "<" would end the script element, as in "</script>"; a completion may hold anything.
    data = json.dumps(collect(folder), allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace(
        "<", "\\u003c"
    )
    page = TEMPLATE.read_text(encoding="utf-8").replace("/*DATA*/null", data.replace("\u2028", "\\u2028"), 1)
    path, temporary = folder / "report.html", folder / f".report.html.{os.getpid()}"
    with naming(path):
        temporary.write_text(page, encoding="utf-8", errors="replace")  # lone surrogates
    os.replace(temporary, path)
    return path


def collect(folder: Path) -> dict[str, Any]:
    """Everything that the page shows, as plain JSON."""
    notes: list[str] = []
    # After a resume that could not truncate the log, the later record of a step holds.
    lines = {(line["step"], "evaluation" in line): line for line in read_lines(folder / "log.jsonl", notes)}
    log = [lines[key] for key in sorted(lines)]
    records = [line for line in log if "evaluation" not in line]
    evaluations = [line for line in log if "evaluation" in line]
    config, summary = (read_object(folder / name, notes) for name in ("config.json", "summary.json"))
    episodes, checked = diagnose(log)
    # Of every kind: "critical" or "warning" now, "past", "ok", or "unmeasured", where its metrics are not in the log.
    checks = dict.fromkeys(KINDS, "unmeasured") | dict.fromkeys(checked, "ok")
    checks |= {e.alarm.kind: "past" if e.last is not None else e.alarm.severity for e in episodes}
    rows = read_lines(folder / "samples.jsonl", notes)
    steps = [record["step"] for record in records]
    series = series_of(records, steps) | series_of([flat(record) for record in evaluations], [])
    return {
        "title": folder.resolve().name,
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        **state_of(folder, records, evaluations, config, summary),
        "episodes": [show_episode(episode) for episode in episodes],
        "checks": [{"title": KINDS[kind].title, "state": state} for kind, state in checks.items()],
        "first": FIRST,
        "groups": groups_of(series, histograms_of(records), evaluations, config),
        "steps": steps,
        "series": series,
        "samples": samples_of(rows, [episode.first for episode in episodes]),
        "samples_note": "" if config.get("model_name_or_path") or not config else f"Here {ARITHMETIC_SUMS}.",
        "config": [[name, json.dumps(value, ensure_ascii=False)] for name, value in config.items()],
        "notes": notes,
    }


# --- files ------------------------------------------------------------------------------------------------------------


def read_lines(path: Path, notes: list[str]) -> list[Record]:
    """The records of log.jsonl or samples.jsonl; lines that are none are noted."""
    if not path.is_file():
        notes.append(f"There is no {path.name}.")
        return []
    found, odd = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if (record := parse_record(line)) is not None:
            found.append(record)
        elif line.strip():
            odd.append(number)
    if odd:
        notes.append(f"{path.name}: {len(odd)} of the lines could not be read; the first is line {odd[0]}.")
    return found


def read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    found = parse(path.read_bytes()) if path.is_file() else {}
    if not isinstance(found, dict):
        notes.append(f"{path.name} could not be read.")
        return {}
    return found


# --- state and diagnosis ----------------------------------------------------------------------------------------------


def state_of(
    folder: Path, records: list[Record], evaluations: list[Record], config: Record, summary: Record
) -> dict[str, Any]:
    """state: "finished", "unfinished" or "empty"; the sentence about it; the tiles: label, value, earlier value."""
    last, goal = records[-1]["step"] if records else 0, config.get("max_steps")
    seconds = finite(summary.get("seconds", records[-1].get("seconds") if records else None))
    seconds = -1 if seconds is None else seconds
    if summary:
        state, text = "finished", f"Finished after {last:,} step{'' if last == 1 else 's'}"
    elif records:
        age = timedelta(seconds=max(0, round(time.time() - (folder / "log.jsonl").stat().st_mtime)))
        state = "unfinished"
        text = f"Step {last}{f' of {goal}' if goal else ''}; the log was last written {age} before this report"
    else:
        state, text = "empty", "No step is logged yet"
    accuracy, held_out = (
        [value for record in evaluations if (value := finite(record["evaluation"].get(key))) is not None]
        for key in ("pass_at_1", "reward")
    )
    binary = accuracy and len(accuracy) == len(held_out)
    judged, known = ("Held-out pass@1", accuracy) if binary else ("Held-out reward", held_out)
    measured = {
        name: [*before, *now]
        for name, key in (("The reward", "reward"), ("The divergence to the teacher", "divergence"))
        for now, before in [ends(records, key)]
        if before and len(records) > WINDOW
    }
    for name, values in ({judged: known} if len(known) > 1 else measured).items():
        falls = values is measured.get("The divergence to the teacher")
        moved = values[-1] < values[0] if falls else values[-1] > values[0]
        verb = ("fell" if falls else "rose") if moved else f"did not {'fall' if falls else 'rise'}:"
        text += f". {name} {verb} from {values[0]:.3f} to {values[-1]:.3f}"
    tiles = [
        tile(judged, known[-1:], known[:-1][:1], "{:.3f}"),
        tile("Reward", *ends(records, "reward"), "{:.3g}"),
        tile("Truncated", *ends(records, "completions/clipped_ratio"), "{:.0%}"),
        tile("Unscored", [sum(r.get("unscored") or 0 for r in records)] if records else [], [], "{:,.0f}"),
        tile("Tokens per second", ends(records, "tokens_per_second")[0], [], "{:,.0f}"),
        tile("Time", [timedelta(seconds=round(seconds))] if 0 <= seconds < 1e12 else [], [], "{}"),
    ]
    facts = [config.get("model_name_or_path") or (ARITHMETIC_MODEL if config else None), config.get("loss_type")]
    facts += [f"{config['num_generations']} completions per prompt" if "num_generations" in config else None]
    return {"state": state, "sentence": f"{text}.", "tiles": tiles, "facts": [str(fact) for fact in facts if fact]}


def tile(label: str, now: Sequence[Any], before: Sequence[Any], form: str) -> dict[str, str]:
    value, earlier = ("".join(map(form.format, values)) for values in (now, before))
    return {"label": label, "value": value or "–", "before": earlier}


def ends(records: list[Record], key: str) -> tuple[list[float], list[float]]:
    """Mean of the last and of the first `WINDOW` values, or of each half of fewer: each a list of one or none."""
    values = [value for record in records if (value := finite(record.get(key))) is not None]
    if len(values) < 2:
        return values, []
    size = min(WINDOW, len(values) // 2)
    return [sum(values[-size:]) / size], [sum(values[:size]) / size]


def show_episode(episode: Episode) -> dict[str, Any]:
    alarm = episode.alarm
    return {
        "kind": alarm.kind, "title": KINDS[alarm.kind].title, "severity": alarm.severity, "first": episode.first,
        "last": episode.last, "seen": alarm.seen, "advice": alarm.advice,
    }  # fmt: skip


# --- series -----------------------------------------------------------------------------------------------------------


def flat(record: Record) -> Record:
    """An evaluation with keys eval/...; eval/pass_at_n is pass@k for the largest k."""
    found = {"step": record["step"]} | {f"eval/{key}": value for key, value in record["evaluation"].items()}
    at_k = record["evaluation"].get("pass_at_k") or {}
    if at_k and max(map(int, at_k)) > 1:
        found["eval/pass_at_n"] = at_k[str(max(map(int, at_k)))]
    return found


def series_of(records: list[Record], steps: list[int]) -> dict[str, dict[str, list[Any]]]:
    """Each number of the records: "y", and "x" where its steps are not all of `steps`; a value that is not finite is
    None. Of long logs each series keeps the lowest and the highest value of each stretch."""
    found: dict[str, tuple[list[int], list[float | None]]] = {}
    for record in records:
        for key, value in record.items():
            if is_number(value) and key not in NOT_PLOTTED:
                x, y = found.setdefault(key, ([], []))
                x.append(record["step"])
                y.append(float(f"{value:.5g}") if math.isfinite(value) else None)
    result = {}
    for key, (x, y) in found.items():
        keep = thin(y, max(50, POINTS // len(found)))
        result[key] = {"y": [y[i] for i in keep]}
        if len(keep) < len(x) or x != steps:
            result[key]["x"] = [x[i] for i in keep]
    return result


def thin(values: Sequence[float | None], limit: int) -> list[int]:
    """Indices of at most `limit` values, with the lowest (None is lower than all) and the highest of each stretch."""
    if len(values) <= limit:
        return list(range(len(values)))
    stretches = max(1, limit // 2)
    keep = set()
    for part in range(stretches):
        start, stop = part * len(values) // stretches, (part + 1) * len(values) // stretches
        order = sorted(range(start, stop), key=lambda i: -math.inf if (v := values[i]) is None else v)
        keep |= {order[0], order[-1]}
    return sorted(keep)


def groups_of(
    series: dict[str, Any], histograms: list[Record], evaluations: list[Record], config: Record
) -> list[dict[str, Any]]:
    """The charts that have data, in groups; functions of the reward and metrics of the user are added."""
    charts = {group: list(entries) for group, entries in all_charts(next(iter(evaluations), {}), config).items()}
    names = [key.split("/")[1] for key in series if key.startswith("rewards/") and key.endswith("/mean")]
    charts["Rewards and advantages"] += [
        Chart(f"Reward {name}", "", {f"rewards/{name}/mean": "mean", f"rewards/{name}/std": "std"}) for name in names
    ]
    shown = {key for entries in charts.values() for chart in entries for key in (*chart.lines, *chart.band)}
    rest = [key for key in series if key not in shown and not key.startswith("eval/")]
    charts["Other metrics"] = [Chart(key, "", {key: key}) for key in rest]
    result = []
    for group, entries in charts.items():
        found = [chart._asdict() for chart in entries if series.keys() & chart.lines]
        if group == "Rewards and advantages" and histograms:
            distribution = Chart("Distribution of advantages", "share of completions, darker: more", {})
            found.append(distribution._asdict() | {"columns": histograms})
        if found or group == FIRST:
            result.append({"title": group, "charts": found})
    return result


def histograms_of(records: list[Record]) -> list[dict[str, Any]]:
    """Distributions of advantages at up to `HISTOGRAMS` steps: counts as shares of the largest."""
    result = []
    for record in pick([r for r in records if "advantage_histogram" in r], HISTOGRAMS):
        edges, counts = record["advantage_histogram"]["edges"], record["advantage_histogram"]["counts"]
        total = sum(counts) or 1
        shares = [float(f"{count / total:.3g}") for count in counts]
        result.append({"step": record["step"], "edges": [float(f"{e:.4g}") for e in edges], "shares": shares})
    return result


def pick(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the items, evenly, with the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


# --- samples ----------------------------------------------------------------------------------------------------------


def samples_of(rows: list[Record], alarms: Iterable[int]) -> dict[str, Any]:
    """Completions at up to `SAMPLE_STEPS` steps, those where an alarm began among them."""
    by_step: dict[int, list[Record]] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(row)
    steps = sorted(by_step)
    chosen = {step for step in list(dict.fromkeys(alarms))[: SAMPLE_STEPS // 4] if step in by_step}
    chosen |= set(pick(steps, SAMPLE_STEPS - len(chosen)))
    found = [
        {"step": step, "rows": list(map(show_sample, by_step[step][:SAMPLES_PER_STEP]))} for step in sorted(chosen)
    ]
    return {"steps": found, "of": len(steps)}


def show_sample(row: Record) -> dict[str, Any]:
    return {
        "prompt": shorten(row.get("prompt")),
        "completion": shorten(row.get("completion")),
        "reward": finite(row.get("reward")),
        "advantage": finite(row.get("advantage")),
        "rewards": {name: finite(value) for name, value in row.get("rewards", {}).items()},
        "tokens": finite(row.get("tokens")),
    }


def shorten(text: Any) -> str:
    """Messages become lines "role: content"; long texts lose their middle."""
    if isinstance(text, list):
        text = "\n".join(f"{m.get('role')}: {m.get('content')}" if isinstance(m, dict) else str(m) for m in text)
    text, half = str(text or ""), SAMPLE_LENGTH // 2
    if len(text) <= SAMPLE_LENGTH:
        return text
    return f"{text[:half]} […{len(text) - SAMPLE_LENGTH:,} characters left out…] {text[-half:]}"


def finite(value: Any) -> float | None:
    if not is_number(value) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.4g}")

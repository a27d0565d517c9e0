"""report.html of a run: its state, the diagnosis in words, plots, and sample completions, in one file without network.

`write_report` reads what a run has written so far, be it finished, running or broken, and fills the template
`report.html` beside this file, whose script draws the plots from JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from .charts import NOT_PLOTTED, flat, groups_of, pick
from .files import write_text
from .monitor import KINDS, WINDOW, Monitor
from .records import Record, finite, is_number, parse, records_of
from .tasks import ARITHMETIC_MODEL, ARITHMETIC_SUMS

TEMPLATE = Path(__file__).with_name("report.html")
POINTS = 100_000  # values of all series together; longer series are thinned
SAMPLE_STEPS, SAMPLES_PER_STEP, SAMPLE_LENGTH = 40, 8, 2000


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
    data = json.dumps(collect(folder), allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    # A completion may hold anything: "</script>" would end the script element.
    page = TEMPLATE.read_text(encoding="utf-8").replace("/*DATA*/null", data.replace("<", "\\u003c"), 1)
    write_text(folder / "report.html", page.encode("utf-8", "replace").decode())  # without lone surrogates
    return folder / "report.html"


def collect(folder: Path) -> dict[str, Any]:
    """Everything that the page shows, as plain JSON."""
    notes: list[str] = []
    # After a resume that could not truncate the log, the later record of a step holds.
    lines = {(line["step"], "evaluation" in line): line for line in read_lines(folder / "log.jsonl", notes)}
    log = [lines[key] for key in sorted(lines)]
    records = [line for line in log if "evaluation" not in line]
    evaluations = [line for line in log if "evaluation" in line]
    config, summary = (read_object(folder / name, notes) for name in ("config.json", "summary.json"))
    found = Monitor(log)
    # Of every kind: "critical" or "warning" now, "past", "ok", or "unmeasured", where its metrics are not in the log.
    checks = dict.fromkeys(KINDS, "unmeasured") | dict.fromkeys(found.checked(), "ok")
    checks |= {e.alarm.kind: "past" if e.last is not None else e.alarm.severity for e in found.episodes}
    steps = [record["step"] for record in records]
    series = series_of(records, steps) | series_of([flat(record) for record in evaluations], [])
    return {
        "title": folder.resolve().name,
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        **state_of(folder, records, evaluations, config, summary),
        "episodes": [
            {**asdict(e.alarm), "title": KINDS[e.alarm.kind].title, "first": e.first, "last": e.last}
            for e in found.episodes
        ],
        "checks": [{"title": KINDS[kind].title, "state": state} for kind, state in checks.items()],
        "groups": groups_of(series, records, evaluations, config),
        "steps": steps,
        "series": series,
        "samples": samples_of(read_lines(folder / "samples.jsonl", notes), [e.first for e in found.episodes]),
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
    found, problem = records_of(path.read_bytes())
    notes += [f"{path.name}: {problem}."] if problem else []
    return list(found.values())


def read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    found = parse(path.read_bytes()) if path.is_file() else {}
    if not isinstance(found, dict):
        notes.append(f"{path.name} could not be read.")
        return {}
    return found


# --- state ------------------------------------------------------------------------------------------------------------


def state_of(
    folder: Path, records: list[Record], evaluations: list[Record], config: Record, summary: Record
) -> dict[str, Any]:
    """state: "finished", "unfinished" or "empty"; the sentence about it; the tiles: label, value, earlier value."""
    last, goal = records[-1]["step"] if records else 0, config.get("max_steps")
    if summary:
        state, text = "finished", f"Finished after {last:,} step{'' if last == 1 else 's'}"
    elif records:
        age = timedelta(seconds=max(0, round(time.time() - (folder / "log.jsonl").stat().st_mtime)))
        state = "unfinished"
        text = f"Step {last}{f' of {goal}' if goal else ''}; the log was last written {age} before this report"
    else:
        state, text = "empty", "No step is logged yet"
    held_out = [record["evaluation"] for record in evaluations]
    known, accuracy = (finite_values(held_out, key) for key in ("reward", "pass_at_1"))
    judged = "Held-out reward"
    if accuracy and len(accuracy) == len(known):
        judged, known = "Held-out pass@1", accuracy
    moves = {judged: (known[:1], known[-1:])} if len(known) > 1 else {}
    if not moves and len(records) > WINDOW:
        moves = {"The reward": ends(records, "reward"), "The divergence to the teacher": ends(records, "divergence")}
    for name, values in moves.items():
        for before, now in zip(*values, strict=False):
            text += f". {name} {'rose' if now > before else 'did not change:' if now == before else 'fell'}"
            text += f" from {before:.3f} to {now:.3f}"
    seconds = finite((summary or (records[-1] if records else {})).get("seconds"))
    tiles: dict[str, tuple[Sequence[Any], Sequence[Any], str]] = {
        judged: (known[:-1][:1], known[-1:], "{:.3f}"),
        "Reward": (*ends(records, "reward"), "{:.3g}"),
        "Truncated": (*ends(records, "completions/clipped_ratio"), "{:.0%}"),
        "Unscored": ([], [sum(finite_values(records, "unscored"))] if records else [], "{:,.0f}"),
        "Tokens per second": ([], ends(records, "tokens_per_second")[1], "{:,.0f}"),
        "Time": ([], [timedelta(seconds=round(seconds))] if seconds is not None and 0 <= seconds < 1e12 else [], "{}"),
    }

    def show(values: Sequence[Any], form: str) -> str:
        return "".join(map(form.format, values))

    facts = [config.get("model_name_or_path") or (ARITHMETIC_MODEL if config else None), config.get("loss_type")]
    facts += [f"{config['num_generations']} completions per prompt" if "num_generations" in config else None]
    return {
        "state": state,
        "sentence": f"{text}.",
        "tiles": [
            {"label": label, "value": show(now, form) or "–", "before": show(before, form)}
            for label, (before, now, form) in tiles.items()
        ],
        "facts": [str(fact) for fact in facts if fact],
    }


def ends(records: list[Record], key: str) -> tuple[list[float], list[float]]:
    """Mean of the first and of the last `WINDOW` values, or of each half of fewer: each a list of one or none."""
    values = finite_values(records, key)
    if len(values) < 2:
        return [], values
    size = min(WINDOW, len(values) // 2)
    return [sum(values[:size]) / size], [sum(values[-size:]) / size]


def finite_values(records: list[Record], key: str) -> list[float]:
    return [value for record in records if (value := finite(record.get(key))) is not None]


# --- series -----------------------------------------------------------------------------------------------------------


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
    size, keep = math.ceil(2 * len(values) / limit), set()
    for start in range(0, len(values), size):
        stretch = range(start, min(start + size, len(values)))
        order = sorted(stretch, key=lambda i: -math.inf if (value := values[i]) is None else value)
        keep |= {order[0], order[-1]}
    return sorted(keep)


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

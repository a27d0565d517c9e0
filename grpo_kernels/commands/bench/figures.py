"""Pictures of a result document. Each is a function from the document to a Figure, or to None where data is lacking."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from ...trainer.files import replacing
from .machine import OUT_OF_MEMORY, Document, Record, Report

WIDTH, DPI = 9.0, 200  # inches, pixels per inch: twice the 900 pixels that a README shows
STYLE = {"figure.constrained_layout.use": True, "font.size": 8, "axes.titlesize": 8, "axes.titlelocation": "left"}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True}
STYLE |= {"grid.color": "#e6e6e6", "lines.linewidth": 1.3, "lines.markersize": 4}
GREY = "#6b6b6b"
CUT = 4.0  # times the floor; longer bars end there, so that the others differ visibly
COLOURS = {"ours": "#d1410c", "eager": GREY, "compiled": "#989898", "trl": "#0b6fb3", "quack": "#b89600"}
COLOURS |= {"liger": "#0a8f6a", "liger-native": "#4fb08e", "verl": "#8e44ad", "verl-torch": "#b583c9"}
COLOURS |= {"cut-cross-entropy": "#8c6d31"}


def draw(document: Document, folder: Path, prefix: str = "", selected: str = "") -> list[Path]:
    """Draws `prefix` + name + ".png" for each picture, or the `selected` one, that has data. Returns the files."""
    written = []
    for name, picture in PICTURES.items():
        if selected in ("", name) and (figure := picture(document)) is not None:
            written.append(folder / f"{prefix}{name}.png")
            with replacing(written[-1]) as file:
                figure.savefig(file, dpi=DPI, format="png")
    return written


def sheet(document: Document, title: str, panels: int, row_height: float) -> tuple[Figure, Any]:
    """Returns a figure and `panels` axes in two columns; small print below has machine, versions and date."""
    environment = document["environment"]
    machine = f"{environment['device']}, driver {environment['driver']}"
    if environment["device"] == "cpu":
        machine = f"{environment['cpu']}, {environment['threads']} threads, {environment['cpu_capability']}"
    versions = [f"{package} {version}" for package, version in environment["versions"].items() if version]
    columns = min(2, panels)
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(WIDTH, rows * row_height + 0.7))  # no pyplot: no display, no global state
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, weight="bold")
    small_print = textwrap.fill(", ".join([machine, *versions, environment["date"][:10]]), 175)
    figure.supxlabel(small_print, x=0.01, ha="left", fontsize=6.5, color=GREY)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[panels:]:
        axis.remove()
    return figure, axes[:panels]


@rc_context(STYLE)
def time(document: Document) -> Figure | None:
    """Draws the time of a step over that of the bare products: a panel for each head of a model, the fastest on top."""
    panels = []
    for record in _steps(document):
        ratios = [(_value(report, "ratio_to_floor"), name, report["title"]) for name, report in _peers(record)]
        rows = sorted((ratio, name, title) for ratio, name, title in ratios if ratio is not None)
        panels += [(record["case"], rows)] if len(rows) > 1 else []
    if not panels:
        return None
    height = 0.15 * max(len(rows) for _, rows in panels) + 0.75
    title = "Time over that of the bare matrix products: forward and backward"
    figure, axes = sheet(document, title, len(panels), height)
    for axis, (case, rows) in zip(axes, panels, strict=True):
        colours, lengths = [COLOURS.get(name, GREY) for _, name, _ in rows], [min(ratio, CUT) for ratio, *_ in rows]
        axis.barh(range(len(rows)), lengths, color=colours, height=0.6)
        labels = [f"{ratio:.2f}×" if ratio < math.inf else OUT_OF_MEMORY for ratio, *_ in rows]
        axis.set_yticks(range(len(rows)), [f"{row[2]}: {label}" for row, label in zip(rows, labels, strict=True)])
        axis.yaxis.tick_right()
        name = f"{case['head']}, N {case['tokens']:,}, H {case['hidden_size']:,}, V {case['vocab_size']:,}"
        axis.set(title=f"{name}, {case['dtype']}", xlabel="time over that of the bare products")
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.axvline(1.0, color="black", linewidth=0.8)
    return figure


@rc_context(STYLE)
def memory(document: Document) -> Figure | None:
    """Draws peak memory by length of completions, for the first head with three lengths of equally many completions: a
    curve for each implementation, with crosses at the top where memory ran out."""
    groups: dict[Any, list[Record]] = {}
    for record in _steps(document):
        case = record["case"]
        if "peak_bytes" in record["implementations"].get("ours", {}):
            groups.setdefault((case["head"], case["dtype"], case["tokens"] // case["length"]), []).append(record)
    records = next((group for group in groups.values() if len(group) > 2), [])
    if not records:
        return None
    curves: dict[str, dict[int, float]] = {}
    titles = {}
    for record in records:
        for name, report in _peers(record):
            titles[name] = report["title"]
            if (peak := _value(report, "peak_bytes")) is not None:
                curves.setdefault(name, {})[record["case"]["length"]] = peak / 2**20
    figure, (axis,) = sheet(document, "Peak memory beyond inputs and gradients", 1, 2.5)
    for name, peaks in curves.items():
        finite = {x: y for x, y in peaks.items() if y < math.inf}
        exhausted = [x for x in peaks if x not in finite]
        label = f"{titles[name]}: {OUT_OF_MEMORY}" if exhausted else titles[name]
        colour, width = COLOURS.get(name, GREY), 2.2 if name == "ours" else 1.3
        axis.plot([*finite], [*finite.values()], "o-", color=colour, label=label, linewidth=width)
        axis.plot(exhausted, [0.97] * len(exhausted), "x", color=colour, transform=axis.get_xaxis_transform())
    case, lengths = records[0]["case"], sorted(curves["ours"])
    name = f"{case['head']}, H {case['hidden_size']:,}, V {case['vocab_size']:,}, {case['dtype']}"
    axis.set(title=name, xlabel=f"tokens per completion, {case['tokens'] // case['length']} completions")
    axis.set(xscale="log", yscale="log", ylabel="peak memory")
    axis.set_xticks(lengths, [f"{x:,}" for x in lengths])
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g} MiB"))
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_minor_locator(NullLocator())
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=7)
    return figure


PICTURES: dict[str, Callable[[Document], Figure | None]] = {"time": time, "memory": memory}


def is_plain_step(record: Record) -> bool:
    """Returns whether a case is a step in which every token has a gradient, over the whole vocabulary."""
    case = record["case"]
    return case["mode"] == "step" and not case["idle_share"] and not case.get("kept_ids")


def _steps(document: Document) -> list[Record]:
    """Returns the plain steps with heads of models."""
    return [record for record in document["cases"] if is_plain_step(record) and record["case"]["head"] != "custom"]


def _peers(record: Record) -> list[tuple[str, Report]]:
    """Returns names and reports of what users choose among: ours with default settings, and the others."""
    reports = record["implementations"].items()
    return [(name, report) for name, report in reports if name != "floor" and not name.startswith("ours-")]


def _value(report: Report, key: str) -> float | None:
    """Returns a number of a report, infinity where memory ran out, None where there is none."""
    if key in report:
        return float(report[key])
    errors = (report.get(name, "") for name in ("error", "memory_error"))
    return math.inf if any(error.startswith(OUT_OF_MEMORY) for error in errors) else None

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
from .machine import OUT_OF_MEMORY, Document

WIDTH, DPI = 9.0, 200  # inches, pixels per inch: twice the 900 pixels that a README shows
STYLE = {"figure.constrained_layout.use": True, "font.size": 8, "axes.titlesize": 8, "axes.titlelocation": "left"}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True}
STYLE |= {"grid.color": "#e6e6e6", "lines.linewidth": 1.3, "lines.markersize": 4}
GREY = "#6b6b6b"
CUT = 4.0  # times the floor; longer bars end there, so that the others differ visibly
COLOURS = {"ours": "#d1410c", "eager": GREY, "compiled": "#989898", "trl": "#0b6fb3", "quack": "#b89600"}
COLOURS |= {"liger": "#0a8f6a", "liger-native": "#4fb08e", "verl": "#8e44ad", "verl-torch": "#b583c9"}
COLOURS |= {"cut-cross-entropy": "#8c6d31"}


def draw(document: Document, folder: Path, prefix: str = "", wanted: str = "") -> list[Path]:
    """Draws `prefix` + name + ".png" for each picture, or the `wanted` one, that has data. Returns the files."""
    written = []
    for name, picture in PICTURES.items():
        if wanted in ("", name) and (figure := picture(document)) is not None:
            written.append(folder / f"{prefix}{name}.png")
            with replacing(written[-1]) as file:
                figure.savefig(file, dpi=DPI, format="png")
    return written


def sheet(document: Document, title: str, panels: int, row_height: float) -> tuple[Figure, Any]:
    """Returns a figure and `panels` axes in two columns; small print below has machine, versions and date."""
    where = document["environment"]
    machine = f"{where['device']}, driver {where['driver']}"
    if where["device"] == "cpu":
        machine = f"{where['cpu']}, {where['threads']} threads, {where['cpu_capability']}"
    versions = [f"{package} {version}" for package, version in where["versions"].items() if version]
    columns = min(2, panels)
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(WIDTH, rows * row_height + 0.7))  # no pyplot: no display, no global state
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, weight="bold")
    small_print = textwrap.fill(", ".join([machine, *versions, where["date"][:10]]), 175)
    figure.supxlabel(small_print, x=0.01, ha="left", fontsize=6.5, color=GREY)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[panels:]:
        axis.remove()
    return figure, axes[:panels]


@rc_context(STYLE)
def time(document: Document) -> Figure | None:
    """Draws the time of a step over that of the bare products: a panel for each head of a model, the fastest on top."""
    panels = []
    for case in _steps(document):
        found = [(_value(entry, "ratio_to_floor"), name, entry["title"]) for name, entry in _peers(case)]
        rows = sorted((ratio, name, title) for ratio, name, title in found if ratio is not None)
        panels += [(case["case"], rows)] if len(rows) > 1 else []
    if not panels:
        return None
    height = 0.15 * max(len(rows) for _, rows in panels) + 0.75
    title = "Time over that of the bare matrix products: forward and backward"
    figure, axes = sheet(document, title, len(panels), height)
    for axis, (of, rows) in zip(axes, panels, strict=True):
        colours, lengths = [COLOURS.get(name, GREY) for _, name, _ in rows], [min(ratio, CUT) for ratio, *_ in rows]
        axis.barh(range(len(rows)), lengths, color=colours, height=0.6)
        ends = [f"{ratio:.2f}×" if ratio < math.inf else OUT_OF_MEMORY for ratio, *_ in rows]
        axis.set_yticks(range(len(rows)), [f"{row[2]}: {end}" for row, end in zip(rows, ends, strict=True)])
        axis.yaxis.tick_right()
        name = f"{of['head']}, N {of['tokens']:,}, H {of['hidden_size']:,}, V {of['vocab_size']:,}, {of['dtype']}"
        axis.set(title=name, xlabel="time over that of the bare products", ylim=(len(rows) - 0.4, -0.6))
        axis.axvline(1.0, color="black", linewidth=0.8)
    return figure


@rc_context(STYLE)
def memory(document: Document) -> Figure | None:
    """Draws peak memory by length of completions, for the first head with three lengths of equally many completions: a
    curve for each implementation, with crosses at the top where memory ran out."""
    groups: dict[Any, list[Document]] = {}
    for case in _steps(document):
        of = case["case"]
        if "peak_bytes" in case["implementations"].get("ours", {}):
            groups.setdefault((of["head"], of["dtype"], of["tokens"] // of["length"]), []).append(case)
    cases = next((group for group in groups.values() if len(group) > 2), [])
    if not cases:
        return None
    curves: dict[str, dict[int, float]] = {}
    titles = {}
    for case in cases:
        for name, entry in _peers(case):
            titles[name] = entry["title"]
            if (peak := _value(entry, "peak_bytes")) is not None:
                curves.setdefault(name, {})[case["case"]["length"]] = peak / 2**20
    figure, (axis,) = sheet(document, "Peak memory beyond inputs and gradients", 1, 2.5)
    for name, points in curves.items():
        finite = {x: y for x, y in points.items() if y < math.inf}
        lost = [x for x in points if x not in finite]
        label = f"{titles[name]}: {OUT_OF_MEMORY}" if lost else titles[name]
        colour, width = COLOURS.get(name, GREY), 2.2 if name == "ours" else 1.3
        axis.plot([*finite], [*finite.values()], "o-", color=colour, label=label, linewidth=width)
        axis.plot(lost, [0.97] * len(lost), "x", color=colour, transform=axis.get_xaxis_transform())
    of, lengths = cases[0]["case"], sorted(curves["ours"])
    name = f"{of['head']}, H {of['hidden_size']:,}, V {of['vocab_size']:,}, {of['dtype']}"
    axis.set(title=name, xlabel=f"tokens per completion, {of['tokens'] // of['length']} completions")
    axis.set(xscale="log", yscale="log", ylabel="peak memory")
    axis.set_xticks(lengths, [f"{x:,}" for x in lengths])
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g} MiB"))
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_minor_locator(NullLocator())
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=7)
    return figure


PICTURES: dict[str, Callable[[Document], Figure | None]] = {"time": time, "memory": memory}


def is_plain_step(case: Document) -> bool:
    """Returns whether a case is a step in which every token has a gradient, over the whole vocabulary."""
    of = case["case"]
    return of["mode"] == "step" and not of["idle_share"] and not of.get("kept_ids")


def _steps(document: Document) -> list[Document]:
    """Returns the plain steps with heads of models."""
    return [case for case in document["cases"] if is_plain_step(case) and case["case"]["head"] != "custom"]


def _peers(case: Document) -> list[tuple[str, Document]]:
    """Returns names and reports of what users choose among: ours with default settings, and the others."""
    entries = case["implementations"].items()
    return [(name, entry) for name, entry in entries if name != "floor" and not name.startswith("ours-")]


def _value(entry: Document, key: str) -> float | None:
    """Returns a number of a report, infinity where memory ran out, None where there is none."""
    if key in entry:
        return float(entry[key])
    errors = (entry.get(name, "") for name in ("error", "memory_error"))
    return math.inf if any(error.startswith(OUT_OF_MEMORY) for error in errors) else None

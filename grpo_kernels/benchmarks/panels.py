"""What the pictures are made of: style, colours, a sheet of axes, lines with their names beside them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullLocator

from .machine import OUT_OF_MEMORY

Record: TypeAlias = dict[str, Any]  # of JSON

WIDTH, DPI = 9.0, 200  # inches: two pixels for each of the 900 that a README shows
STYLE = {
    "figure.constrained_layout.use": True,
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
}
OURS, VARIANT, GREY = "#d1410c", "#df8440", "#6b6b6b"
COLOURS = {
    "ours": OURS,
    "floor": "#000000",
    "eager": GREY,
    "compiled": "#989898",
    "trl": "#0b6fb3",
    "liger": "#0a8f6a",
    "liger-native": "#4fb08e",
    "verl": "#8e44ad",
    "verl-torch": "#b583c9",
    "cut-cross-entropy": "#8c6d31",
    "quack": "#b89600",
}
BESIDE: Record = {"textcoords": "offset points", "va": "center", "fontsize": 7.5}  # of a label
UNITS = {
    "B": FuncFormatter(lambda x, _: f"{x / 2**30:g} GiB" if x >= 2**30 else f"{x / 2**20:g} MiB"),
    "s": EngFormatter("s"),
    "×": FuncFormatter(lambda x, _: f"{x:g}×"),
}


def colour_of(name: str) -> str:
    return COLOURS.get(name, VARIANT if name.startswith("ours-") else GREY)


def weight_of(name: str) -> str:
    return "bold" if name == "ours" else "normal"


def save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    return path


def sheet(document: Record, title: str, rows: int, columns: int, row_height: float) -> tuple[Figure, Any]:
    """A figure and its axes, (rows, columns); below them in small print where the document was measured, and when."""
    environment = document["environment"]
    machine = f"{environment['device']}, driver {environment['driver']}"
    if environment["device"] == "cpu":
        machine = f"{environment['cpu']}, {environment['threads']} threads, {environment['cpu_capability']}"
    versions = [f"{package} {version}" for package, version in environment["versions"].items() if version]
    small_print = textwrap.fill(", ".join([machine, *versions, environment["date"][:10]]), 175)
    figure = Figure(figsize=(WIDTH, rows * row_height + 0.7))  # no pyplot: no display, no global state
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, weight="bold")
    figure.supxlabel(small_print, x=0.01, ha="left", fontsize=6.5, color=GREY)
    return figure, figure.subplots(rows, columns, squeeze=False)


class Line(NamedTuple):
    """One implementation; `crosses` are where memory ran out."""

    name: str
    title: str
    points: dict[float, float]
    crosses: list[float]

    def over(self, base: dict[float, float]) -> Line:
        return self._replace(points={x: y / base[x] for x, y in self.points.items() if x in base}, crosses=[])


def plot_lines(axis: Axes, lines: Sequence[Line], unit: str, height: float) -> None:
    """Lines with their names at the right; above them a row of crosses for each that ran out of memory."""
    xs = sorted({x for line in lines for x in (*line.points, *line.crosses)})
    ys = [y for line in lines for y in line.points.values()] or [1.0]
    exhausted = [line for line in lines if line.crosses]
    gap = 9.5 / (72 * 0.75 * height)  # between two lines of text, in parts of the axis
    room = 1 - gap * len(exhausted)
    axis.set_xscale("linear" if 0.0 in xs else "log")
    axis.set_xticks(xs, [f"{x // 1024}k" if x and x % 1024 == 0 else f"{x:,g}" for x in xs])
    axis.xaxis.set_minor_locator(NullLocator())
    if unit == "×" or 0.0 in xs:
        axis.set_ylim(0.0, 1.05 * max(ys) / room)
    else:
        low, high = 0.8 * min(ys), 1.25 * max(ys)
        axis.set(yscale="log", ylim=(low, low * (high / low) ** (1 / room)))
        axis.yaxis.set_major_locator(LogLocator(base=4 if unit == "B" else 10, numticks=10))
        axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(UNITS[unit])
    for line in lines:
        look: Record = {"linewidth": 2.2, "zorder": 3} if line.name == "ours" else {}
        dash = "o--" if line.name == "floor" else "o-"
        axis.plot([*line.points], [*line.points.values()], dash, color=colour_of(line.name), label=line.title, **look)
    to_axis = axis.transScale + axis.transLimits
    labels = [(to_axis.transform([*line.points.items()][-1])[1], line) for line in lines if not line.crosses]
    labels.sort(key=lambda label: label[0])
    for y, (_, line) in zip(_apart([y for y, _ in labels], gap), labels, strict=True):
        _name(axis, line, line.title, y)
    for row, line in enumerate(exhausted):
        y, text = 1 - gap * (row + 0.5), f"{line.title}: {OUT_OF_MEMORY}"
        crosses: Record = dict(color=colour_of(line.name), label=text, transform=axis.get_xaxis_transform())
        axis.plot(line.crosses, [y] * len(line.crosses), "x", **crosses)
        _name(axis, line, text, y)


def _name(axis: Axes, line: Line, text: str, y: float) -> None:
    """To the right of the axis."""
    axis.annotate(
        text, (1, y), (4, 0), "axes fraction", color=colour_of(line.name), weight=weight_of(line.name), **BESIDE
    )


def _apart(ys: Sequence[float], gap: float) -> list[float]:
    """Ascending `ys`, moved to be at least `gap` apart: the mean of moving up alone and of moving down alone."""
    up, down = list(ys), list(ys)
    for i in range(1, len(up)):
        up[i] = max(up[i], up[i - 1] + gap)
        down[-i - 1] = min(down[-i - 1], down[-i] - gap)
    return [(a + b) / 2 for a, b in zip(up, down, strict=True)]

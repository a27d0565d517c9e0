"""Pictures of a result document. Each is a function from the document to a Figure, or to None where data is lacking."""

from __future__ import annotations

import itertools
import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from .machine import OUT_OF_MEMORY, Document

WIDTH, DPI = 9.0, 200  # inches: two pixels for each of the 900 that a README shows
STYLE = {"figure.constrained_layout.use": True, "font.size": 8, "axes.titlesize": 8, "axes.titlelocation": "left"}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True}
STYLE |= {"grid.color": "#e6e6e6", "lines.linewidth": 1.3, "lines.markersize": 4}
OURS, GREY = "#d1410c", "#6b6b6b"
COLOURS = {"ours": OURS, "floor": "#000000", "eager": GREY, "compiled": "#989898", "trl": "#0b6fb3", "quack": "#b89600"}
COLOURS |= {"liger": "#0a8f6a", "liger-native": "#4fb08e", "verl": "#8e44ad", "verl-torch": "#b583c9"}
COLOURS |= {"cut-cross-entropy": "#8c6d31"}
SWEPT = {
    "tokens": "tokens, N",
    "hidden_size": "hidden size, H",
    "kept_ids": "kept ids of a token, K",
    "idle_share": "share of prompts with equal rewards",
    "length": "tokens per completion",
}
ERRORS = {
    "loss": "loss",
    "logps_max": "log-probabilities, nats",
    "dhidden": "gradient of hidden",
    "dweight": "gradient of weight",
}


class Line(NamedTuple):
    """One implementation: values by what varies; infinity where memory ran out."""

    name: str
    title: str
    points: dict[float, float]

    @property
    def finite(self) -> dict[float, float]:
        return {x: y for x, y in self.points.items() if y < math.inf}


class Panel(NamedTuple):
    """Curves over `xlabel`; without one, a row for each line with the median and the range of its points."""

    title: str
    lines: list[Line]
    unit: str
    xlabel: str = ""


def draw(document: Document, folder: Path, prefix: str = "", without: Sequence[str] = ()) -> list[Path]:
    """Write a PNG, named after `prefix` and the picture, for every picture that the document has data for."""
    figures = {name: picture(document) for name, picture in PICTURES.items() if name not in without}
    return [save(figure, folder / f"{prefix}{name}.png") for name, figure in figures.items() if figure is not None]


def save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    return path


def sheet(document: Document, title: str, rows: int, columns: int, row_height: float) -> tuple[Figure, Any]:
    """A figure and its axes, (rows, columns); below them in small print where the document was measured, and when."""
    where = document["environment"]
    machine = f"{where['device']}, driver {where['driver']}"
    if where["device"] == "cpu":
        machine = f"{where['cpu']}, {where['threads']} threads, {where['cpu_capability']}"
    versions = [f"{package} {version}" for package, version in where["versions"].items() if version]
    figure = Figure(figsize=(WIDTH, rows * row_height + 0.7))  # no pyplot: no display, no global state
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, weight="bold")
    small_print = textwrap.fill(", ".join([machine, *versions, where["date"][:10]]), 175)
    figure.supxlabel(small_print, x=0.01, ha="left", fontsize=6.5, color=GREY)
    return figure, figure.subplots(rows, columns, squeeze=False)


@rc_context(STYLE)
def plot(document: Document, title: str, panels: Sequence[Panel]) -> Figure | None:
    """The panels in two columns; None where there is none."""
    if not panels:
        return None
    columns, height = min(2, len(panels)), 2.5 if panels[0].xlabel else 0.15 * max(len(p.lines) for p in panels) + 0.55
    figure, axes = sheet(document, title, math.ceil(len(panels) / columns), columns, height)
    for axis, panel in itertools.zip_longest(axes.flat, panels):
        if panel is None:
            axis.set_axis_off()
            continue
        axis.set(title=panel.title, xlabel=panel.xlabel)
        (_plot_curves if panel.xlabel else _plot_rows)(axis, panel)
    return figure


def _plot_rows(axis: Axes, panel: Panel) -> None:
    labels = []
    for y, line in enumerate(panel.lines):
        values, colour = list(line.finite.values()), _colour(line.name)
        labels.append(f"{line.title}: {OUT_OF_MEMORY}")
        if values:
            median = statistics.median(values)
            axis.plot([min(values), max(values)], [y, y], color=colour, alpha=0.5, linewidth=2.5)
            axis.plot([median], [y], "o", color=colour, label=line.title)
            labels[-1] = f"{line.title}  {_format(panel.unit)(median, None)}"
    axis.set_yticks(range(len(labels)), labels)
    axis.yaxis.tick_right()
    axis.set_ylim(len(panel.lines) - 0.4, -0.6)
    if panel.unit == "×":
        axis.axvline(1.0, color="black", linewidth=0.8)
    else:
        axis.set_xscale("log")
        low, high = (math.log10(x) for x in axis.get_xlim())
        axis.set_xlim(10 ** math.floor(low), 10 ** math.ceil(high))  # whole decades have labels
        axis.xaxis.set_minor_locator(NullLocator())


def _plot_curves(axis: Axes, panel: Panel) -> None:
    """With crosses at the top where memory ran out."""
    xs = sorted({x for line in panel.lines for x in line.points})
    linear = panel.unit == "×" or 0.0 in xs
    for line in panel.lines:
        colour, lost = _colour(line.name), [x for x in line.points if x not in line.finite]
        label = f"{line.title}: {OUT_OF_MEMORY}" if lost else line.title
        dash, width = "o--" if line.name == "floor" else "o-", 2.2 if line.name == "ours" else 1.3
        axis.plot([*line.finite], [*line.finite.values()], dash, color=colour, label=label, linewidth=width)
        axis.plot(lost, [0.97] * len(lost), "x", color=colour, transform=axis.get_xaxis_transform())
    axis.set(xscale="linear" if 0.0 in xs else "log", yscale="linear" if linear else "log")
    axis.set_xticks(xs, [f"{x // 1024}k" if x and x % 1024 == 0 else f"{x:,g}" for x in xs])
    if linear:
        axis.set_ylim(bottom=0.0)
    elif panel.unit == "B":
        axis.yaxis.set_major_locator(LogLocator(base=4))
        axis.yaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(_format(panel.unit)))
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=7)


def _format(unit: str) -> Callable[[float, Any], str]:
    return {
        "B": lambda x, _: f"{x / 2**30:.3g} GiB" if x >= 2**30 else f"{x / 2**20:.3g} MiB",
        "s": lambda x, _: f"{x:.3g} s" if x >= 1 else f"{1e3 * x:.3g} ms",
        "×": lambda x, _: f"{x:.2f}×",
        "": lambda x, _: f"{x:.1e}".replace("e-0", "e-"),
    }[unit]


def _colour(name: str) -> str:
    return COLOURS.get(name, "#df8440" if name.startswith("ours-") else GREY)


# --- pictures ---------------------------------------------------------------------------------------------------------


def time(document: Document) -> Figure | None:
    """Time of a step over that of the bare products: a panel per head and type; in it the fastest on top."""
    panels = []
    for case in _case_per_head(document):
        floor = case["implementations"].get("floor", {}).get("seconds", {}).get("median")
        lines = []
        for name, entry in case["implementations"].items() if floor else ():
            if _is_peer(name) and (median := _seconds(entry)):
                times = entry["seconds"] if median < math.inf else {}
                samples = [times.get(key, math.inf) / floor for key in ("min", "median", "max")]
                lines.append(Line(name, entry["title"], dict(enumerate(samples))))
        lines.sort(key=lambda line: line.points[1])
        if any(line.name != "ours" for line in lines):
            panels.append(Panel(_describe(case["case"]), lines, "×"))
    return plot(document, "Time over that of the bare matrix products: forward and backward", panels)


def errors(document: Document) -> Figure | None:
    """Errors against float64: a panel per type and quantity, a sample per case."""
    cases = [case for case in document["cases"] if not case["case"]["idle_share"]]
    panels = []
    for dtype in dict.fromkeys(case["case"]["dtype"] for case in cases):
        found = [case["implementations"] for case in cases if case["case"]["dtype"] == dtype]
        for quantity, title in ERRORS.items():
            lines: dict[str, Line] = {}
            for number, (name, entry) in enumerate(pair for one in found for pair in one.items()):
                if _is_peer(name) and (error := (entry.get("errors") or {}).get(quantity)):
                    lines.setdefault(name, Line(name, entry["title"], {})).points[number] = error
            panels += [Panel(f"{dtype}: {title}", [*lines.values()], "")] if lines else []
    return plot(document, "Errors against float64", panels)


def sweep(document: Document, fields: Sequence[str], wanted: Callable[[str], bool], unit: str = "s") -> Figure | None:
    """A row per sweep of a field: bytes; or seconds, and beside them the ratio to the bare products.

    For prompts without gradient it is the ratio to the time without such prompts. Sampling masks have no ratio, but
    what memory bandwidth allows.
    """
    masked = "kept_ids" in fields
    if masked:
        document = document | {"cases": [case for case in document["cases"] if case["case"].get("kept_ids")]}
    panels = []
    swept = [(field, cases) for field in fields for cases in _sweeps(document, field)]
    for field, cases in swept:
        case, label = cases[0]["case"], SWEPT[field]
        lines = _lines(cases, field, _peak_bytes if unit == "B" else _seconds, wanted)
        if not lines:
            continue
        if field == "length":
            label += f", {case['tokens'] // case['length']} completions"
        panels.append(Panel(_describe(case, "tokens" if field == "length" else field), lines, unit, label))
        if masked:
            bound = {one["case"][field]: one["predicted"]["ways"]["kept"]["seconds"] for one in cases}
            lines.append(Line("floor", "bandwidth bound", bound))
        elif unit == "s":
            floor = next((line.finite for line in lines if line.name == "floor"), {})
            relative = []
            for line in lines:
                own = dict.fromkeys(line.finite, line.finite[0.0]) if 0.0 in line.finite else {}
                base = own if field == "idle_share" else floor
                relative.append(line._replace(points={x: y / base[x] for x, y in line.finite.items() if x in base}))
            over = "over its own time without such prompts" if field == "idle_share" else "over the bare products"
            panels.append(Panel(over, [line for line in relative if line.points], "×", label))
    time = "Time with sampling masks" if masked else f"Time against {SWEPT[fields[0]]}"
    return plot(document, "Peak memory beyond inputs and gradients" if unit == "B" else time, panels)


# --- what a document holds --------------------------------------------------------------------------------------------


def _seconds(entry: Document) -> float | None:
    """The median; infinity where memory ran out."""
    return entry["seconds"]["median"] if "seconds" in entry else _exhausted(entry, "error")


def _peak_bytes(entry: Document) -> float | None:
    return entry.get("peak_bytes") or _exhausted(entry, "memory_error") or _exhausted(entry, "error")


def _exhausted(entry: Document, key: str) -> float | None:
    return math.inf if entry.get(key, "").startswith(OUT_OF_MEMORY) else None


def _sweeps(document: Document, field: str) -> list[list[Document]]:
    """Groups of three cases or more, ascending, that differ in `field` alone, and in what follows from it."""
    groups: dict[str, dict[float, Document]] = {}
    for case in document["cases"]:
        of = case["case"]
        follows = {"tokens": "length", "length": "tokens"}.get(field, "head")
        same = {key: value for key, value in of.items() if key not in (field, follows)}
        completions = of["tokens"] // of["length"] if field == "length" else None
        groups.setdefault(f"{same} {completions}", {}).setdefault(of.get(field, 0), case)
    return [[group[value] for value in sorted(group)] for group in groups.values() if len(group) >= 3]


def _lines(
    sweep: Sequence[Document], field: str, value: Callable[[Document], float | None], wanted: Callable[[str], bool]
) -> list[Line]:
    """A line for each implementation with a point; no lines where no implementation has two points."""
    lines = []
    for name in dict.fromkeys(name for case in sweep for name in case["implementations"] if wanted(name)):
        entries = {case["case"][field]: case["implementations"].get(name, {}) for case in sweep}
        points = {x: y for x, entry in entries.items() if (y := value(entry)) is not None}
        line = Line(name, next((e["title"] for e in entries.values() if "title" in e), name), points)
        lines += [line] if line.finite else []
    return lines if any(len(line.finite) > 1 for line in lines) else []


def _case_per_head(document: Document) -> list[Document]:
    """For each type and head the step with the most times, then the most tokens; none that was made for a sweep."""
    best: dict[tuple[Any, ...], tuple[tuple[Any, ...], Document]] = {}
    for case in document["cases"]:
        of, found = case["case"], case["implementations"].values()
        if of["mode"] == "step" and not (of["idle_share"] or of.get("kept_ids") or of["head"] == "custom"):
            rank = sum("seconds" in entry for entry in found), of["beta"] > 0, of["tokens"]
            key = of["head"], of["dtype"]
            if key not in best or rank > best[key][0]:
                best[key] = rank, case
    cases = [case for _, case in best.values()]
    dtypes = [case["case"]["dtype"] for case in cases]
    return sorted(cases, key=lambda case: dtypes.index(case["case"]["dtype"]))


def _describe(case: Document, *without: str) -> str:
    parts = [] if case["head"] == "custom" or "hidden_size" in without else [case["head"]]
    sizes = {"tokens": "N", "hidden_size": "H", "vocab_size": "V"}
    parts += [f"{letter} {case[field]:,}" for field, letter in sizes.items() if field not in without]
    parts += [case["dtype"]]
    parts += [f"{case['kept_ids']} ids kept"] if case.get("kept_ids") and "kept_ids" not in without else []
    return ", ".join(parts if case["beta"] else [*parts, "no KL"])


def _is_peer(name: str) -> bool:
    """The implementations that a user chooses among: ours in its default setting, and the others."""
    return name != "floor" and not name.startswith("ours-")


HEADS = ("time", "errors")  # a case for each head, as no sweep has
PICTURES: dict[str, Callable[[Document], Figure | None]] = {
    "time": time,
    "memory": partial(sweep, fields=["length"], wanted=_is_peer, unit="B"),
    "errors": errors,
    "idle": partial(
        sweep, fields=["idle_share"], wanted=lambda name: name in ("floor", "ours-unscored") or _is_peer(name)
    ),
    "kept": partial(sweep, fields=["kept_ids", "hidden_size"], wanted=lambda name: name in ("ours", "ours-unmasked")),
    "tokens": partial(sweep, fields=["tokens"], wanted=lambda name: name == "floor" or _is_peer(name)),
}

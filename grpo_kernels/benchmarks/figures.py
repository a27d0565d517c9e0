"""Pictures of a result document. Each is a function from the document to a Figure, or to None where data is lacking."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from .machine import OUT_OF_MEMORY, Document

WIDTH, DPI = 9.0, 200  # inches: two pixels for each of the 900 that a README shows
STYLE = {"figure.constrained_layout.use": True, "font.size": 8, "axes.titlesize": 8, "axes.titlelocation": "left"}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True}
STYLE |= {"grid.color": "#e6e6e6", "lines.linewidth": 1.3, "lines.markersize": 4}
GREY = "#6b6b6b"
CUT = 4.0  # times the floor: farther ones are an arrow at the edge, with their number, or the others would touch
COLOURS = {"ours": "#d1410c", "eager": GREY, "compiled": "#989898", "trl": "#0b6fb3", "quack": "#b89600"}
COLOURS |= {"liger": "#0a8f6a", "liger-native": "#4fb08e", "verl": "#8e44ad", "verl-torch": "#b583c9"}
COLOURS |= {"cut-cross-entropy": "#8c6d31"}
SWEPT = {
    "tokens": "tokens, N",
    "hidden_size": "hidden size, H",
    "kept_ids": "kept ids of a token, K",
    "idle_share": "share of prompts with equal rewards",
    "length": "tokens per completion",
}


def draw(document: Document, folder: Path, prefix: str = "", without: Sequence[str] = ()) -> list[Path]:
    """Write a PNG, named after `prefix` and the picture, for every picture that the document has data for."""
    written = []
    for name, picture in PICTURES.items():
        if name not in without and (figure := picture(document)) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            written.append(folder / f"{prefix}{name}.png")
            figure.savefig(written[-1], dpi=DPI)
    return written


def sheet(document: Document, title: str, panels: int, row_height: float) -> tuple[Figure, Any]:
    """A figure with axes in two columns; below them in small print where the document was measured, and when."""
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
    """Time of a step over that of the bare products: a panel per case of a real head; in it the fastest on top."""
    panels = []
    for case in document["cases"]:
        of, entries = case["case"], case["implementations"].items()
        special = of["idle_share"], of.get("kept_ids"), of.get("divergence"), not of["beta"], of["head"] == "custom"
        ratios = [(_value(entry, "ratio_to_floor"), name, entry["title"]) for name, entry in entries if _is_peer(name)]
        rows = sorted((ratio, name, title) for ratio, name, title in ratios if ratio is not None)
        if of["mode"] == "step" and not any(special) and len(rows) > 1:
            panels.append((of, rows))
    if not panels:
        return None
    height = 0.15 * max(len(rows) for _, rows in panels) + 0.75
    title = "Time over that of the bare matrix products: forward and backward"
    figure, axes = sheet(document, title, len(panels), height)
    for axis, (fields, rows) in zip(axes, panels, strict=True):
        lengths = [min(ratio, CUT) for ratio, *_ in rows]
        axis.barh(range(len(rows)), lengths, color=[_colour(name) for _, name, _ in rows], height=0.6)
        labels = [
            f"{title}  {ratio:.2f}×" if ratio < math.inf else f"{title}: {OUT_OF_MEMORY}" for ratio, _, title in rows
        ]
        axis.set_yticks(range(len(rows)), labels)
        axis.yaxis.tick_right()
        axis.set(title=_describe(fields), xlabel="time over that of the bare products", ylim=(len(rows) - 0.4, -0.6))
        axis.axvline(1.0, color="black", linewidth=0.8)
    return figure


@rc_context(STYLE)
def sweep(
    document: Document,
    title: str,
    fields: Sequence[str],
    wanted: Callable[[str], bool],
    key: str = "ratio_to_floor",
    masked: bool = False,
) -> Figure | None:
    """A panel per sweep of one of `fields`, over cases with or without sampling masks: a curve per implementation, with
    crosses at the top where memory ran out."""
    cases = [case for case in document["cases"] if bool(case["case"].get("kept_ids")) == masked]
    titles = {name: entry["title"] for case in cases for name, entry in case["implementations"].items()}
    panels = []
    for field in fields:
        for swept in _sweeps(cases, field):
            curves = {name: _points(swept, field, name, key) for name in titles if wanted(name)}
            if any(sum(y < math.inf for y in points.values()) > 1 for points in curves.values()):
                panels.append((field, swept[0]["case"], curves))
    if not panels:
        return None
    figure, axes = sheet(document, title, len(panels), 2.5)
    unit = " MiB" if key == "peak_bytes" else "×"
    for axis, (field, case, curves) in zip(axes, panels, strict=True):
        xs = sorted({x for points in curves.values() for x in points})
        for name, points in curves.items():
            finite = {x: y for x, y in points.items() if y < math.inf}
            lost = [x for x in points if x not in finite]
            if finite:
                label = f"{titles[name]}: {OUT_OF_MEMORY}" if lost else titles[name]
                width, colour = 2.2 if name == "ours" else 1.3, _colour(name)
                axis.plot([*finite], [*finite.values()], "o-", color=colour, label=label, linewidth=width)
                axis.plot(lost, [0.97] * len(lost), "x", color=colour, transform=axis.get_xaxis_transform())
        completions = f", {case['tokens'] // case['length']} completions" if field == "length" else ""
        axis.set(title=_describe(case, "tokens" if field == "length" else field), xlabel=SWEPT[field] + completions)
        axis.set(xscale="linear" if 0.0 in xs else "log", yscale="log")
        axis.set_ylabel("peak memory" if key == "peak_bytes" else "time over the bare products'")
        axis.set_xticks(xs, [f"{x // 1024}k" if x and x % 1024 == 0 else f"{x:,g}" for x in xs])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}{unit}"))
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=7)
    return figure


# --- what a document holds --------------------------------------------------------------------------------------------


def _value(entry: Document, key: str) -> float | None:
    """A ratio, or a peak of memory in MiB; infinity where memory ran out."""
    unit, errors = (2**20, ("error", "memory_error")) if key == "peak_bytes" else (1, ("error",))
    if key in entry:
        return float(entry[key] / unit)
    return math.inf if any(entry.get(name, "").startswith(OUT_OF_MEMORY) for name in errors) else None


def _sweeps(cases: Sequence[Document], field: str) -> list[list[Document]]:
    """Groups of three cases or more, ascending, that differ in `field` alone, and in what follows from it."""
    groups: dict[str, dict[float, Document]] = {}
    for case in cases:
        of = case["case"]
        follows = {"tokens": "length", "length": "tokens"}.get(field, "head")
        same = {key: value for key, value in of.items() if key not in (field, follows)}
        completions = of["tokens"] // of["length"] if field == "length" else None
        groups.setdefault(f"{same} {completions}", {}).setdefault(of.get(field, 0), case)
    return [[group[value] for value in sorted(group)] for group in groups.values() if len(group) >= 3]


def _points(cases: Sequence[Document], field: str, name: str, key: str) -> dict[float, float]:
    values = {case["case"][field]: _value(case["implementations"].get(name, {}), key) for case in cases}
    return {x: y for x, y in values.items() if y is not None}


def _describe(case: Document, *without: str) -> str:
    parts = [] if case["head"] == "custom" or "hidden_size" in without else [case["head"]]
    sizes = {"tokens": "N", "hidden_size": "H", "vocab_size": "V"}
    parts += [f"{letter} {case[field]:,}" for field, letter in sizes.items() if field not in without]
    parts += [case["dtype"]]
    parts += [f"{case['kept_ids']} ids kept"] if case.get("kept_ids") and "kept_ids" not in without else []
    return ", ".join(parts if case["beta"] else [*parts, "no KL"])


def _colour(name: str) -> str:
    return COLOURS.get(name, "#df8440" if name.startswith("ours-") else GREY)


def _is_peer(name: str) -> bool:
    """The implementations that a user chooses among: ours in its default setting, and the others."""
    return name != "floor" and not name.startswith("ours-")


OVER = "over that of the bare matrix products"
PICTURES: dict[str, Callable[[Document], Figure | None]] = {
    "time": time,
    "memory": partial(
        sweep, title="Peak memory beyond inputs and gradients", fields=["length"], wanted=_is_peer, key="peak_bytes"
    ),
    "idle": partial(
        sweep, title=f"Time {OVER}", fields=["idle_share"],
        wanted=lambda name: name == "ours-unscored" or _is_peer(name),
    ),
    "kept": partial(
        sweep, title=f"Time with sampling masks {OVER}", fields=["kept_ids", "hidden_size"], masked=True,
        wanted=lambda name: name in ("ours", "ours-unmasked"),
    ),
    "tokens": partial(sweep, title=f"Time {OVER}", fields=["tokens"], wanted=_is_peer),
}  # fmt: skip

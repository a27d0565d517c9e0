"""Pictures of a result document. Each is a function from the document to a Figure, or to None where data is lacking."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from .machine import OUT_OF_MEMORY
from .panels import BESIDE, STYLE, UNITS, WIDTH, Line, Record, colour_of, plot_lines, save, sheet, weight_of

Wanted: TypeAlias = Callable[[str], bool]  # names of implementations

MODES = {"step": "forward and backward", "frozen": "lm_head frozen", "forward": "log-probabilities alone"}
SWEPT = {  # field of a case -> its name, and the field that follows from it
    "tokens": ("tokens, N", "length"),
    "hidden_size": ("hidden size, H", "head"),
    "vocab_size": ("vocabulary, V", "head"),
    "generations": ("completions per prompt, G", "length"),
    "idle_share": ("share of prompts with equal rewards", ""),
    "kept_ids": ("kept ids of a token, K", ""),
}
ERRORS = {
    "loss": "loss\nrelative",
    "logps_max": "log-probabilities\ngreatest, nats",
    "dhidden": "gradient of hidden\nrelative",
    "dweight": "gradient of weight\nrelative",
}


def draw(document: Record, folder: Path, prefix: str = "", without: Sequence[str] = ()) -> list[Path]:
    """Write a PNG, named after `prefix` and the picture, for every picture that the document has data for."""
    figures = {name: picture(document) for name, picture in PICTURES.items() if name not in without}
    return [save(figure, folder / f"{prefix}{name}.png") for name, figure in figures.items() if figure is not None]


# --- time of each implementation over the floor -----------------------------------------------------------------------


class Ratios(NamedTuple):
    """Of an implementation's median, fastest and slowest round to the floor's median; zeros where memory ran out."""

    name: str
    title: str
    median: float = 0.0
    low: float = 0.0
    high: float = 0.0


@rc_context(STYLE)
def time(document: Record, mode: str, wanted: Wanted) -> Figure | None:
    """Time over that of the bare products: a block per head and type, in two columns; in it the fastest on top."""
    blocks = [(case["case"], _ratios(case["implementations"], wanted)) for case in _case_per_head(document, mode)]
    blocks = [(case, ratios) for case, ratios in blocks if any(r.name != "ours" for r in ratios)]
    if not blocks:
        return None
    half = (len(blocks) + 1) // 2
    columns = [column for column in (blocks[:half], blocks[half:]) if column]
    tallest = max(sum(len(ratios) + 2 for _, ratios in column) for column in columns)
    title = f"Time over that of the bare matrix products: {MODES[mode]}"
    figure, axes = sheet(document, title, 1, len(columns), 0.15 * tallest + 0.3)
    for axis, column in zip(axes[0], columns, strict=True):
        _blocks(axis, column, 0.95 * WIDTH / len(columns))
        axis.set_ylim(tallest - 1, -1)
    return figure


def _ratios(found: Record, wanted: Wanted) -> list[Ratios]:
    floor = found.get("floor", {}).get("seconds", {}).get("median")
    ratios = []
    for name, entry in found.items() if floor else ():
        if wanted(name) and (seconds := _seconds(entry)):
            times = [entry["seconds"][key] / floor for key in ("median", "min", "max")] if seconds < math.inf else []
            ratios.append(Ratios(name, entry["title"], *times))
    return sorted(ratios, key=lambda r: r.median or math.inf)


def _blocks(axis: Axes, blocks: Sequence[tuple[Record, list[Ratios]]], width: float) -> None:
    """A line per implementation: a dot with its spread, or a cross; its name and number. The axis is `width` inches."""
    timed = [r for _, ratios in blocks for r in ratios if r.median]
    furthest = max((r.high for r in timed), default=2.0)
    left, right, y = min([1.0, *(r.low for r in timed)]), furthest, 0
    for case, ratios in blocks:
        axis.annotate(_describe(case, "mode"), (1.0, y), (4, 0), color="#444444", **BESIDE)
        for row, r in enumerate(ratios, y + 1):
            colour, end = colour_of(r.name), r.high or furthest
            if r.median:
                text = f"{r.title}  {r.median:.2f}"
                axis.plot([1.0, r.median], [row, row], color=colour, alpha=0.4, linewidth=0.9)
                axis.plot([r.low, r.high], [row, row], color=colour, alpha=0.5, linewidth=2.5)
                axis.plot([r.median], [row], "o", color=colour, label=r.title)
            else:
                text = f"{r.title}: {OUT_OF_MEMORY}"
                axis.plot([end], [row], "x", color=colour, label=text)
            axis.annotate(text, (end, row), (6, 0), color=colour, weight=weight_of(r.name), **BESIDE)
            share = (8 + 4.2 * len(text)) / 72 / width  # of the axis, for this text
            right = max(right, left + (end - left) / (1 - share))
        y += len(ratios) + 2
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_xlim(left - 0.02 * (right - left), right)
    axis.xaxis.set_major_formatter(UNITS["×"])
    axis.yaxis.set_major_locator(NullLocator())
    axis.spines["left"].set_visible(False)


# --- errors of each implementation ------------------------------------------------------------------------------------


@rc_context(STYLE)
def errors(document: Record) -> Figure | None:
    """Errors against float64: a row per type, a column per quantity, a dot per case; the bar is their median."""
    found: dict[str, dict[str, list[Record]]] = {}  # type -> name -> entry of every case
    for case in document["cases"]:
        for name, entry in case["implementations"].items():
            if _is_peer(name) and entry.get("errors") and not case["case"]["idle_share"]:
                found.setdefault(case["case"]["dtype"], {}).setdefault(name, []).append(entry)
    if not found:
        return None
    row_height = 0.17 * max(map(len, found.values())) + 0.6
    figure, axes = sheet(document, "Errors against float64", len(found), len(ERRORS), row_height)
    for row, (dtype, of_type) in zip(axes, found.items(), strict=True):
        for axis, quantity in zip(row, ERRORS, strict=True):
            _error_panel(axis, of_type, quantity)
            axis.tick_params(labelleft=axis is row[0])
        row[0].set_ylabel(dtype)
    for axis, title in zip(axes[0], ERRORS.values(), strict=True):
        axis.set_title(title)
    return figure


def _error_panel(axis: Axes, of_type: dict[str, list[Record]], quantity: str) -> None:
    for y, (name, entries) in enumerate(of_type.items()):
        values, colour = [e["errors"][quantity] for e in entries if e["errors"].get(quantity)], colour_of(name)
        if values:
            median = statistics.median(values)
            axis.plot(values, [y] * len(values), "o", color=colour, alpha=0.4, markersize=3)
            axis.plot([median], [y], "|", color=colour, markersize=9, markeredgewidth=1.8, label=entries[0]["title"])
            number = f"{median:.1e}".replace("e-0", "e-")
            axis.annotate(number, (1, y), (4, 0), axis.get_yaxis_transform(), color=colour, **BESIDE)
    axis.set(xscale="log", ylim=(len(of_type) - 0.4, -0.6))
    low, high = (math.log10(x) for x in axis.get_xlim())
    axis.set_xlim(10 ** math.floor(low), 10 ** math.ceil(high))  # whole decades: at least two have a label
    axis.xaxis.set_major_locator(LogLocator(numticks=5))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_yticks(range(len(of_type)), [entries[0]["title"] for entries in of_type.values()])


# --- what grows with what ---------------------------------------------------------------------------------------------


@rc_context(STYLE)
def memory(document: Record) -> Figure | None:
    """Peak memory against the length of completions where their number is fixed, else against tokens."""
    field, sweeps = max(
        ("length", _sweeps(document, "tokens", lambda case: case["tokens"] // case["length"])),
        ("tokens", _sweeps(document, "tokens")),
        key=lambda option: max(map(len, option[1]), default=0),
    )
    panels = [(sweep[0]["case"], _lines(sweep, field, _peak_bytes, _is_peer)) for sweep in sweeps]
    panels = [(case, lines) for case, lines in panels if lines]
    if not panels:
        return None
    rows, columns = -(-len(panels) // 2), min(2, len(panels))
    figure, axes = sheet(document, "Peak memory beyond inputs and gradients", rows, columns, 3.0)
    for axis, (case, lines) in zip(axes.flat, panels, strict=False):
        completions = f"tokens per completion, {case['tokens'] // case['length']} completions"
        axis.set(title=_describe(case, "tokens"), xlabel=completions if field == "length" else SWEPT[field][0])
        plot_lines(axis, lines, "B", 3.0)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    return figure


@rc_context(STYLE)
def times(document: Record, field: str, wanted: Wanted) -> Figure | None:
    """A row per sweep: seconds, and the ratio to the floor, or for prompts without gradient to the time without."""
    sweeps = [(sweep[0]["case"], _lines(sweep, field, _seconds, wanted)) for sweep in _sweeps(document, field)]
    sweeps = [(case, lines) for case, lines in sweeps if lines]
    if not sweeps:
        return None
    label, idle = SWEPT[field][0], field == "idle_share"
    figure, axes = sheet(document, f"Time against {label}", len(sweeps), 2, 2.5)
    for (left, right), (case, lines) in zip(axes, sweeps, strict=True):
        floor = next((line.points for line in lines if line.name == "floor"), {})
        own = [dict.fromkeys(line.points, line.points[0.0]) if 0.0 in line.points else {} for line in lines]
        relative = [line.over(base if idle else floor) for line, base in zip(lines, own, strict=True)]
        left.set(title=_describe(case, field), xlabel=label)
        right.set(title=f"over {'its own time without such prompts' if idle else 'the bare products'}", xlabel=label)
        plot_lines(left, lines, "s", 2.5)
        plot_lines(right, [line for line in relative if line.points], "×", 2.5)
    return figure


@rc_context(STYLE)
def kept(document: Record) -> Figure | None:
    """Sampling masks: time against the kept ids of a token, and against H, beside what memory bandwidth allows."""
    found = [(field, sweep) for field in ("kept_ids", "hidden_size") for sweep in _sweeps(document, field)]
    found = [(field, sweep) for field, sweep in found if sweep[0]["case"].get("kept_ids")]
    rows = list(dict.fromkeys(sweep[0]["case"]["dtype"] for _, sweep in found))
    if not found:
        return None
    figure, axes = sheet(document, "Time with sampling masks", len(rows), 2, 2.5)
    for axis in axes.flat:
        axis.set_axis_off()
    for field, sweep in found:
        case = sweep[0]["case"]
        axis = axes[rows.index(case["dtype"]), int(field == "hidden_size")]
        lines = _lines(sweep, field, _seconds, lambda name: name in ("ours", "ours-unmasked"))
        bound = {one["case"][field]: one["predicted"]["ways"]["kept"]["seconds"] for one in sweep}
        kept_ids = "" if field == "kept_ids" else f", {case['kept_ids']} ids kept"
        axis.set_axis_on()
        axis.set(title=_describe(case, field) + kept_ids, xlabel=SWEPT[field][0])
        plot_lines(axis, [*lines, Line("floor", "bandwidth bound", bound, [])], "s", 2.5)
    return figure


# --- what a document holds --------------------------------------------------------------------------------------------


def _seconds(entry: Record) -> float | None:
    """The median; infinity where memory ran out."""
    return entry["seconds"]["median"] if "seconds" in entry else _exhausted(entry, "error")


def _peak_bytes(entry: Record) -> float | None:
    return entry.get("peak_bytes") or _exhausted(entry, "memory_error") or _exhausted(entry, "error")


def _exhausted(entry: Record, key: str) -> float | None:
    return math.inf if entry.get(key, "").startswith(OUT_OF_MEMORY) else None


def _sweeps(document: Record, field: str, fixed: Callable[[Record], object] = lambda case: None) -> list[list[Record]]:
    """Groups of three cases or more, ascending, that differ in `field` alone and, where given, agree in `fixed`."""
    groups: dict[str, dict[float, Record]] = {}
    for case in document["cases"]:
        if field in case["case"]:
            same = {key: value for key, value in case["case"].items() if key not in (field, SWEPT[field][1])}
            groups.setdefault(f"{same} {fixed(case['case'])}", {}).setdefault(case["case"][field], case)
    return [[group[value] for value in sorted(group)] for group in groups.values() if len(group) >= 3]


def _lines(
    sweep: Sequence[Record], field: str, measure: Callable[[Record], float | None], wanted: Wanted
) -> list[Line]:
    """A line for each implementation with a point; no lines where no implementation has two points."""
    lines = []
    for name in dict.fromkeys(name for case in sweep for name in case["implementations"] if wanted(name)):
        entries = {case["case"][field]: case["implementations"].get(name, {}) for case in sweep}
        found = {x: y for x, entry in entries.items() if (y := measure(entry)) is not None}
        points = {x: y for x, y in found.items() if y < math.inf}
        if points:
            title = next(entry["title"] for entry in entries.values() if "title" in entry)
            lines.append(Line(name, title, points, [x for x in found if x not in points]))
    return lines if any(len(line.points) > 1 for line in lines) else []


def _case_per_head(document: Record, mode: str) -> list[Record]:
    """Of each type and head the case with the most times, then with the most tokens; none that was made for a sweep."""
    swept = [case for field in ("hidden_size", "vocab_size") for sweep in _sweeps(document, field) for case in sweep]
    best: dict[object, tuple[object, Record]] = {}
    for case in document["cases"]:
        of, found = case["case"], case["implementations"].values()
        made_for_a_sweep = of["idle_share"] or of.get("kept_ids") or (of["head"] == "custom" and case in swept)
        if of["mode"] == mode and not made_for_a_sweep:
            ranked = (sum("seconds" in entry for entry in found), of["beta"] > 0, of["tokens"]), case
            key = tuple(of[field] for field in ("head", "hidden_size", "vocab_size", "dtype"))
            best[key] = max(best.get(key, ranked), ranked, key=lambda pair: pair[0])
    cases = [case for _, case in best.values()]
    dtypes = [case["case"]["dtype"] for case in cases]
    return sorted(cases, key=lambda case: dtypes.index(case["case"]["dtype"]))


def _describe(case: Record, *without: str) -> str:
    parts = [] if case["head"] == "custom" or {"hidden_size", "vocab_size"} & {*without} else [case["head"]]
    sizes = {"tokens": "N", "hidden_size": "H", "vocab_size": "V"}
    parts += [f"{letter} {case[field]:,}" for field, letter in sizes.items() if field not in without]
    parts += [case["dtype"]]
    parts += [MODES[case["mode"]]] if case["mode"] != "step" and "mode" not in without else []
    return ", ".join(parts if case["beta"] else [*parts, "no KL"])


def _is_peer(name: str) -> bool:
    """The implementations that a user chooses among: ours in its default setting, and the others."""
    return name != "floor" and not name.startswith("ours-")


def _is_timed(name: str) -> bool:
    return name == "floor" or _is_peer(name)


def _is_backend(name: str) -> bool:
    return name.startswith("ours") and name != "ours-unscored"


def _is_idle(name: str) -> bool:
    return name in ("ours", "ours-unscored", "floor", "eager", "trl", "liger")


HEADS = ("time", "time-frozen", "time-forward", "backends", "errors")  # a case for each head, as no sweep has
PICTURES: dict[str, Callable[[Record], Figure | None]] = {
    "time": functools.partial(time, mode="step", wanted=_is_peer),
    "time-frozen": functools.partial(time, mode="frozen", wanted=_is_peer),
    "time-forward": functools.partial(time, mode="forward", wanted=_is_peer),
    "backends": functools.partial(time, mode="step", wanted=_is_backend),
    "memory": memory,
    "errors": errors,
    "idle": functools.partial(times, field="idle_share", wanted=_is_idle),
    "scaling-tokens": functools.partial(times, field="tokens", wanted=_is_timed),
    "scaling-vocabulary": functools.partial(times, field="vocab_size", wanted=_is_timed),
    "scaling-hidden": functools.partial(times, field="hidden_size", wanted=_is_timed),
    "kept": kept,
    "scaling-generations": functools.partial(times, field="generations", wanted=_is_timed),
}

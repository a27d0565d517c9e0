"""The pictures and tables of the committed results: `make figures`.

Pictures go to bench/figures, named after their file of results: cpu.json gives cpu-time.png, ... Tables go between
the markers of README.md and bench/README.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from textwrap import fill
from typing import Any, NamedTuple

import dweight_sum
from matplotlib import rc_context
from sparse import show

from grpo_kernels.benchmarks.cases import Case
from grpo_kernels.benchmarks.figures import COLOURS, CUT, DPI, STYLE, draw, sheet
from grpo_kernels.benchmarks.implementations import IMPLEMENTATIONS
from grpo_kernels.benchmarks.machine import Document, read
from grpo_kernels.benchmarks.show import memory_text, table

ROOT = Path(__file__).resolve().parent.parent
RESULTS, FIGURES = ROOT / "bench" / "results", ROOT / "bench" / "figures"
PAGES = (ROOT / "README.md", ROOT / "bench" / "README.md")
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
RIVALS = (*(name for name in IMPLEMENTATIONS if not name.startswith("ours")), "ours-unmasked")
SPARSE = Path("sparse/cpu.json")  # of sparse.py, below RESULTS
DWEIGHT = Path("dweight/cpu.json")  # of dweight_sum.py
DISTILLATION = Path("distillation/cpu.json")  # the set teacher
LEARNING = Path("trainer/time-to-reward.json")  # of time_to_reward.py
GPU = "gpu-h200.json"
H100, H100_LAB = (
    Path("gpu/h100-targets.json"),
    Path("gpu/h100-lab.jsonl"),
)  # of gpu.py; of a script for this one machine
LAB = {"eager": "eager", "trl": "trl"}  # its names for the trainers
GOAL = 0.9  # reward of an evaluation
LEARNERS = {
    "TRL": "#0b6fb3",
    "TRL, FusedGRPOTrainer": "#0a8f6a",
    "grpo-kernels train": "#d1410c",
    "grpo-kernels train, sparse": "#8a3fb0",
    "grpo-kernels train, vLLM": "#b08a00",
}
# Setting and unit: sooner in minutes, as soon in steps, the same in float32, and a task that takes more steps.
LEARNING_PANELS = (
    ("times table, full, bfloat16", "clock"), ("times table, full, bfloat16", "evaluated"),
    ("times table, full, float32", "clock"), ("largest number, full, bfloat16", "clock"),
)  # fmt: skip
TRAINERS = ("eager", "trl", "liger", "verl", "verl-torch")
CAPTIONS = {
    "time": "Time of a step over that of the three bare products",
    "memory": "Peak memory against the length of completions; a cross is out of memory",
    "idle": "Time against the share of prompts whose rewards are all equal",
    "tokens": "Time against the number of tokens",
    "kept": "Time with sampling masks",
}


def main() -> None:
    for path in sorted(RESULTS.glob("*.json")):
        document = read(path)
        written = draw(document, FIGURES, f"{path.stem}-", ("time",) if path.stem.endswith("-sweeps") else ())
        print(f"{path.name}: {', '.join(picture.name for picture in written) or 'nothing to draw'}")
    for name, picture in PICTURES.items():
        if (RESULTS / name).exists():
            picture(read(RESULTS / name), FIGURES)
    for page in PAGES:
        text = page.read_text()
        if BEGIN in text:
            before, rest = text.split(BEGIN)
            page.write_text(f"{before}{BEGIN}\n{section(page)}\n{END}{rest.split(END)[1]}")


def section(page: Path) -> str:
    """Markdown of everything between the markers of a page: a summary on the front page, all results on the other."""
    if page.parent == ROOT:
        cpu, sweeps, h200, h100 = (read(RESULTS / name) for name in ("cpu.json", "cpu-sweeps.json", GPU, H100))
        pairs = {
            "CPU": [*comparisons(cpu), *comparisons(sweeps)],
            "H200": comparisons(h200),
            "H100": [*comparisons(h100["targets"]), *lab_comparisons(_lab())],
        }
        machines = {
            "CPU": (cpu, "cpu.json, cpu-sweeps.json"),
            "H200": (h200, GPU),
            "H100": (h100, f"{H100}, {H100_LAB}"),
        }
        measured, places = summary(pairs), []
        for name, (document, files) in machines.items():
            tokens = [pair.tokens for pair in pairs[name]]
            counts = " to ".join(dict.fromkeys(f"{end(tokens):,}" for end in (min, max)))
            places.append(f"{_place(document)}: {counts} tokens ({files}).")
        places = fill(" ".join(places), 120)
        parts = [measured, places, learning_summary(read(RESULTS / LEARNING))]
        return "\n\n".join([*parts, "![Evaluated reward over minutes and steps](bench/figures/time-to-reward.png)"])
    parts = [] if list(RESULTS.glob("gpu*.json")) else ["No GPU has been measured yet."]
    for path in sorted(RESULTS.glob("*.json"), key=lambda path: path.stem):
        document = read(path)
        parts.append(f"**{path.name}.** {_place(document)}: `{document['command']}`")
        parts.append(_measurements(document))
        for name, caption in CAPTIONS.items():
            picture = FIGURES / f"{path.stem}-{name}.png"
            if picture.exists():
                parts.append(f"![{caption}]({Path(os.path.relpath(picture, page.parent)).as_posix()})")
    for name, text in TEXTS.items():
        if (RESULTS / name).exists():
            parts.append(text(read(RESULTS / name)))
    return "\n\n".join(parts)


def _lab() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / H100_LAB).read_text().splitlines()]


def _place(document: Document) -> str:
    """On what it was measured, and when."""
    where = document["environment"]
    device = f"{where['cpu']}, {where['threads']} threads" if where["device"] == "cpu" else where["device"]
    return f"{device}, {where['date'][:10]}"


class Pair(NamedTuple):
    """Of a step: its tokens, the times of ours and theirs, and their peaks of memory; 0 where not measured."""

    trainer: str
    tokens: int
    times: tuple[float, float]
    peaks: tuple[float, float]


def comparisons(document: Document) -> list[Pair]:
    """Each trainer beside ours, in the steps of models' heads in which every token has a gradient."""
    found = []
    for case in document["cases"]:
        of, entries = case["case"], case["implementations"]
        special = of["mode"] != "step", of["idle_share"], of.get("kept_ids"), of.get("divergence"), _is_narrow(of)
        for name in TRAINERS if not any(special) else ():
            if name in entries:
                pair = entries["ours"], entries[name]
                times = tuple(entry.get("seconds", {}).get("median", 0.0) for entry in pair)
                found.append(Pair(name, of["tokens"], times, tuple(entry.get("peak_bytes", 0) for entry in pair)))
    return [pair for pair in found if all(pair.times) or all(pair.peaks)]


def _is_narrow(case: dict[str, Any]) -> bool:
    """Whether it is a point of a sweep over the hidden size, and no model's head."""
    return case["head"] == "custom" and case["tokens"] < 4096


def lab_comparisons(lines: Sequence[dict[str, Any]]) -> list[Pair]:
    """The same of the H100's own script, whose sections begin with a line about the machine."""
    found: list[Pair] = []
    ours: dict[str, dict[str, Any]] = {}
    for line in lines:
        if "device" in line:
            ours = {}
        elif line.get("who") == "auto":
            ours[line["head"]] = line
        elif "ms" in line and (mine := ours.get(line["head"])) and line["who"] in LAB:
            times, peaks = ((mine[key], line[key]) for key in ("ms", "peak_MiB"))
            found.append(Pair(LAB[line["who"]], line["N"], times, peaks))
    return found


def summary(places: dict[str, Sequence[Pair]]) -> str:
    """How many times the time of ours a step of each trainer takes, and ours of its memory, over all cases."""
    titles, rows = ["this package against"], {name: [IMPLEMENTATIONS[name].title] for name in TRAINERS}
    for place, pairs in places.items():
        titles += [f"{place}: faster", "memory, of theirs"]
        for name, cells in rows.items():
            own = [pair for pair in pairs if pair.trainer == name]
            times = [pair.times[1] / pair.times[0] for pair in own if all(pair.times)]
            peaks = [pair.peaks[0] / pair.peaks[1] for pair in own if all(pair.peaks)]
            cells += [_range(times, ".1f", " x"), _range(peaks, ".2f")]
    return f"""\
A step (forward, backward, the head's gradient) of models' heads. Faster: their median time over ours, least to most of
all cases. Memory: our peak over theirs; above 1 ours takes more. `chunk_rows` bounds it:

{table(titles, list(rows.values()))}"""


def _range(ratios: Sequence[float], form: str, unit: str = "") -> str:
    ends = [f"{end(ratios):{form}}" for end in (min, max)] if ratios else []
    return f"{' to '.join(dict.fromkeys(ends))}{unit}" if ends else ""


# --- memory of GPUs ---------------------------------------------------------------------------------------------------

MARKERS = {"llama-3-8b": "o", "qwen2.5-7b": "s", "qwen2.5-1.5b": "^", "gemma-2-2b": "D", "llama3-8b": "o"}


def draw_gpu_memory(document: Document, folder: Path) -> None:
    """Memory of a step over its time, a panel per card: a point for each implementation and head."""
    h200 = [
        (case["case"]["head"], name, entry["ratio_to_floor"], entry["peak_bytes"] / 2**20)
        for case in read(RESULTS / GPU)["cases"]
        if case["case"]["mode"] == "step" and case["case"]["head"] in MARKERS and not case["case"].get("kept_ids")
        for name, entry in case["implementations"].items()
        if name in ("ours", *TRAINERS) and entry.get("seconds") and entry.get("peak_bytes")
    ]
    names = {"auto": "ours", "rows 2048": "ours, 2,048 rows", "rows 4096": "ours, 4,096 rows", **LAB}
    h100 = [
        (line["head"], names[line["who"]], line["x_floor"], line["peak_MiB"])
        for line in _lab()
        if line.get("who") in names and "x_floor" in line
    ]
    with rc_context(STYLE):
        title = "Memory of a step over its time: 16,384 tokens in bfloat16"
        figure, axes = sheet(document["targets"], title, 2, 3.2)
        for axis, card, points in zip(axes, ("NVIDIA H100", "NVIDIA H200"), (h100, h200), strict=True):
            for head, name, time, mib in points:
                kind, rows = name.partition(", ")[::2]
                fill_of = "none" if rows else COLOURS[kind]
                label = f"{IMPLEMENTATIONS[kind].title}{', ' + rows if rows else ''}"
                axis.plot(
                    [min(time, CUT)], [mib], MARKERS[head], color=COLOURS[kind], markerfacecolor=fill_of, label=label
                )
            if far := [(time, mib) for _, _, time, mib in points if time > CUT]:
                times, mibs = zip(*far, strict=True)
                text = f"{min(times):.0f} to {max(times):.0f} x →"
                axis.annotate(text, (CUT, max(mibs)), ha="right", xytext=(0, 6), textcoords="offset points")
            axis.set(title=card, xlabel="time, of the three bare matrix products", yscale="log", xlim=(0.9, CUT + 0.15))
            axis.set_ylabel("MiB beside inputs and gradients")
            labels = dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
            axis.legend(labels.values(), labels, frameon=False, fontsize=6.5)
        figure.savefig(folder / "gpu-memory.png", dpi=DPI)


# --- sparse gradients ------------------------------------------------------------------------------------------------


def draw_sparse(document: Document, folder: Path) -> None:
    """Time of the exact step and error of dhidden against theta: a line per type and temperature."""
    with rc_context(STYLE):
        figure, axes = sheet(document, "Steps with sparse gradients, the head of SmolLM2-135M-Instruct", 2, 2.3)
        for batch in document["batches"]:
            for dtype in dict.fromkeys(row["dtype"] for row in batch["rows"] if "dtype" in row):
                rows = [row for row in batch["rows"] if row.get("dtype") == dtype and row["theta"]]
                ys = [row["of_exact"] for row in rows], [row["errors"]["dhidden"] for row in rows]
                for axis, y in zip(axes, ys, strict=True):
                    label = f"{dtype.removeprefix('torch.')}, T {batch['temperature']}"
                    axis.plot([row["theta"] for row in rows], y, "o-", label=label)
        axes[0].set(ylabel="time, of the exact step", ylim=(0.0, None))
        axes[1].set(ylabel="relative error of dhidden", yscale="log")
        for axis in axes:
            axis.set_xscale("log", base=2)
            axis.set_xlabel("theta")
        axes[0].legend(frameon=False)
        figure.savefig(folder / "sparse.png", dpi=DPI)


def _sparse(document: Document) -> str:
    tables = [
        f"{batch['tokens']:,} tokens sampled at T {batch['temperature']}, {batch['entropy']:.2f} nats:\n\n{show(batch)}"
        for batch in document["batches"]
    ]
    head = f"""\
**{SPARSE}.** {_place(document)}: `python bench/sparse.py`, `GRPOConfig(sparse_backward=theta)` on the head of
SmolLM2-135M-Instruct. Medians of interleaved rounds, relative errors against float64 from the same inputs."""
    return "\n\n".join([head, *tables, "![Time and error against theta](figures/sparse.png)"])


def _dweight(document: Document) -> str:
    place = f"{_place(document)}: `python bench/dweight_sum.py`."
    return f"""\
**{DWEIGHT}.** {place}
What adding up the shares of chunks in bfloat16 rounds of the weight's gradient, on samples of SmolLM2-135M-Instruct;
"float32" is a float32 sum, rounded at the end:

{dweight_sum.show(document)}"""


def _distillation(document: Document) -> str:
    """A row per case and implementation; of teachers that are known at few ids a row per case."""
    rows, others = [], []
    for case in document["cases"]:
        of, entries = case["case"], case["implementations"]
        if not of["divergence"]:
            of_step = (1 / entries[name]["ours_to_this"] for name in ("ours-tail", "ours-renormalize"))
            others.append((f"{of['head']}, {of['dtype']}", *(f"{ratio:.3f}" for ratio in of_step)))
            continue
        title = f"{of['head']}, {of['tokens']:,} tokens, {of['dtype']}, {of['divergence']}"
        for name, entry in entries.items():
            if name != "floor":
                errors = entry.get("errors") or {}
                wrong = (f"{errors[key]:.1e}" if key in errors else "" for key in ("dhidden", "dweight"))
                ratios = (_number(entry, key, ".2f") for key in ("ratio_to_floor", "ours_to_this"))
                rows.append((title, entry["title"], *ratios, *wrong, memory_text(entry)))
    titles = "case", "", "time of F_t", "ours of this", "error of dhidden", "of dweight", "peak MiB"
    return f"""\
**{DISTILLATION}.** {_place(document)}:
`grpo-kernels bench --set teacher`. The divergence to a teacher of the same shape, forward and backward; medians of
interleaved rounds, relative errors against float64 from the same inputs:

{table(titles, rows)}

A teacher of 64 ids, time of the step without a teacher:

{table(("head", "step with tail", "renormalize alone"), others)}"""


def _h100(document: Document) -> str:
    """What gpu.py measured there; and the steps of a script for that machine, in its two runs."""
    targets, rows = document["targets"], []
    for line in _lab():
        if "x_floor" in line:
            errors = (f"{line[name]:.1e}" if name in line else "" for name in ("dhidden", "dweight"))
            who = {"floor": "bare products", "auto": "ours", "triton": "ours, Triton", "trl": "TRL"}.get(line["who"])
            who = who or line["who"].replace("rows", "ours, chunk_rows").replace("sparse", "ours, sparse")
            spread = f"{line['ms']:.1f} ({line['low']:.1f} to {line['high']:.1f})"
            rows.append((line["head"], who, spread, f"{line['x_floor']:.3f}", f"{line['peak_MiB']:,.0f}", *errors))
    titles = "head", "", "ms (least to most)", "of bare products", "peak MiB", "error of dhidden", "of dweight"
    return f"""\
**{H100}.** {_place(targets)}: `{targets["command"]}`

{_measurements(targets)}

**{H100_LAB}.** The same machine and day, 16,384 tokens in bfloat16, one process for each of two runs:

{table(titles, rows)}

![Memory of a step over its time](figures/gpu-memory.png)

A circle is the head of Llama-3-8B, a square Qwen2.5-7B's, a triangle Qwen2.5-1.5B's, a diamond Gemma-2-2B's."""


# --- how soon a model learns ------------------------------------------------------------------------------------------


def draw_learning(document: Document, folder: Path) -> None:
    """Evaluated reward, a panel for each of `LEARNING_PANELS`: each seed, and their mean."""
    kinds = _rounds(document)
    with rc_context(STYLE):
        title = "How soon SmolLM2-135M-Instruct learns: evaluated reward"
        figure, axes = sheet(document, title, len(LEARNING_PANELS), 2.6)
        for (kind, unit), axis in zip(LEARNING_PANELS, axes, strict=True):
            rounds, scale = kinds[kind], 60.0 if unit == "clock" else 1.0
            for name in rounds[0]:
                curves, colour = [found[name]["evaluations"] for found in rounds], LEARNERS[name]
                rows = [([e[unit] / scale for e in curve], [e["reward"] for e in curve]) for curve in curves]
                for x, y in rows:
                    axis.plot(x, y, color=colour, alpha=0.25, linewidth=0.8)
                mean = [list(map(fmean, zip(*values, strict=True))) for values in zip(*rows, strict=True)]
                axis.plot(*mean, color=colour, label=name)
            axis.set(title=kind, ylabel="evaluated reward")
            axis.set_xlabel("minutes of training" if unit == "clock" else "optimizer steps")
            axis.axhline(GOAL, color="#989898", linewidth=0.6, linestyle=":")
            axis.legend(frameon=False)
        figure.savefig(folder / "time-to-reward.png", dpi=DPI)


def _rounds(document: Document) -> dict[str, list[dict[str, Any]]]:
    """What the contestants told, for each seed, by task and setting."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for found in document["rounds"]:
        kind = ", ".join((found["task"].replace("-", " "), *found["setting"].split("-")))
        kinds.setdefault(kind, []).append(found["contestants"])
    return kinds


def _learners(rounds: Sequence[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    """Of each contestant its name, minutes to the goal by seed, their median of TRL's median, mean seconds of a step
    and its parts, and MiB."""
    of = median(_minutes_to_goal(found["TRL"]) for found in rounds)
    for name in rounds[0]:
        own = [found[name] for found in rounds]
        minutes = [_minutes_to_goal(one) for one in own]
        of_trl = f"{median(minutes) / of:.2f}" if all(map(isfinite, (*minutes, of))) else ""
        steps = [step["seconds"] for one in own for step in one["steps"]]
        parts = {part: fmean(step[part] for step in steps) for part in steps[0]}
        yield name, minutes, of_trl, {"step": sum(parts.values())} | parts, median(one["peak_mib"] for one in own)


def _learning(document: Document) -> str:
    """A row per setting and contestant."""
    rows: list[list[str]] = []
    for kind, rounds in _rounds(document).items():
        title = f"{kind}, {len(rounds)} seed{'s' * (len(rounds) > 1)}"
        for name, minutes, of_trl, seconds, mib in _learners(rounds):
            rows.append([title, name, _spread(minutes, ".2f"), of_trl])
            rows[-1] += [f"{number:.1f}" for number in seconds.values()]
            reward = fmean(found[name]["evaluations"][-1]["reward"] for found in rounds)
            rows[-1] += [f"{1 - seconds['head'] / seconds['step']:.2f}", f"{mib:,.0f}", f"{reward:.2f}"]
    note = fill(document.get("note", ""), 120)
    titles = "setting", "", f"minutes to {GOAL}", "of TRL's", *(f"{part}, s" for part in seconds), "without head"
    return f"""\
**{LEARNING}.** {_place(document)}: `python bench/time_to_reward.py`, contestants step by step in turns.
Minutes are median (least to most) of the time that a contestant's steps took until its first evaluation at {GOAL}, and
"of TRL's" is the quotient of two medians;
"without head" is the share of a step that would be left if its head took no time, which is sampling and the body.
{note}

{table((*titles, "peak MiB", "reward after"), rows)}

![Evaluated reward over minutes and steps](figures/time-to-reward.png)"""


def learning_summary(document: Document) -> str:
    """A row per contestant, in bfloat16."""
    rounds, rows = _rounds(document)["times table, full, bfloat16"], []
    for name, minutes, of_trl, seconds, mib in _learners(rounds):
        numbers = of_trl, f"{seconds['step']:.1f}", f"{seconds['head']:.1f}", f"{mib / 1024:.1f}"
        rows.append((name, _spread(minutes, ".2f"), *numbers))
    return f"""\
Training SmolLM2-135M-Instruct on the times table, on the same CPU, in bfloat16: minutes until {GOAL:.0%} of the answers
are right, median of {len(rounds)} seeds (least to most), with the same prompts and options. A step's other seconds are
sampling and the model's body; `grpo-kernels train` runs each prompt once for all its completions (`--share-prompts`):

{table(("", "minutes", "of TRL's", "step, s", "its head, s", "peak GiB"), rows)}"""


def _minutes_to_goal(one: dict[str, Any]) -> float:
    """inf where the reward stayed below."""
    return min((e["clock"] / 60 for e in one["evaluations"] if e["reward"] >= GOAL), default=float("inf"))


def _spread(numbers: Sequence[float], form: str) -> str:
    if not all(map(isfinite, numbers)):
        return f"not reached by {sum(not isfinite(number) for number in numbers)}"
    return f"{median(numbers):{form}} ({min(numbers):{form}} to {max(numbers):{form}})"


# --- tables -----------------------------------------------------------------------------------------------------------


def _measurements(document: Document) -> str:
    """A row per case of a real head: ours, its ratio to the bare products and to each rival, its memory and errors."""
    cases = [case for case in document["cases"] if not _is_narrow(case["case"])]
    entries = {name: [case["implementations"].get(name, {}) for case in cases] for name in ("ours", *RIVALS)}
    columns = {"ours, ms (least to most)": [_times(entry) for entry in entries["ours"]]}
    for name in RIVALS:
        title = next((str(entry["title"]) for entry in entries[name] if "title" in entry), name)
        form = ".3f" if name.startswith("ours-") else ".2f"
        columns[f"of {title}"] = [_number(entry, "ours_to_this", form) for entry in entries[name]]
    columns["peak MiB"] = [memory_text(entry) for entry in entries["ours"]]
    columns["of eager's"] = [_number(entry, "memory_ratio_to_eager", ".3f") for entry in entries["ours"]]
    for title, quantity in (("error of dhidden", "dhidden"), ("of a log-probability", "logps_max")):
        pairs = zip(entries["ours"], entries["eager"], strict=True)
        columns[f"{title} (eager's)"] = [_errors(ours, eager, quantity) for ours, eager in pairs]
    columns = {title: cells for title, cells in columns.items() if any(cells)}
    rows = [[str(Case(**case["case"])), *cells] for case, *cells in zip(cases, *columns.values(), strict=True)]
    what = "Medians of ours, and ratios to the bare products and to each rival; memory beyond inputs and gradients"
    return f"{what}; errors against float64:\n\n{table(('case (N, H, V)', *columns), rows)}"


def _times(entry: Document) -> str:
    numbers = [entry["seconds"][key] * 1e3 for key in ("median", "min", "max")] if "seconds" in entry else []
    return "{:,.0f} ({:,.0f} to {:,.0f})".format(*numbers) if numbers else ""


def _errors(ours: Document, eager: Document, quantity: str) -> str:
    found = [(entry.get("errors") or {}).get(quantity) for entry in (ours, eager)]
    first, second = (f"{error:.1e}" if error else "" for error in found)
    return f"{first} ({second})" if second else first


def _number(entry: Document, key: str, form: str) -> str:
    return format(entry[key], form) if key in entry else entry.get("error", "").split(":")[0]


PICTURES = {H100: draw_gpu_memory, SPARSE: draw_sparse, LEARNING: draw_learning}
TEXTS = {H100: _h100, DWEIGHT: _dweight, SPARSE: _sparse, DISTILLATION: _distillation, LEARNING: _learning}

if __name__ == "__main__":
    main()

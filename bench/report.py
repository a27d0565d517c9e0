"""The pictures and tables of the committed results: `make figures`.

Pictures go to bench/figures, named after their file of results: cpu.json gives cpu-time.png, ... Tables go between
the markers of README.md and bench/README.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from textwrap import fill
from typing import Any

from learning import EXPERIMENTS
from matplotlib import rc_context
from sparse import show

from grpo_kernels.benchmarks.cases import Case
from grpo_kernels.benchmarks.figures import DPI, STYLE, draw, sheet
from grpo_kernels.benchmarks.implementations import IMPLEMENTATIONS
from grpo_kernels.benchmarks.machine import Document, read
from grpo_kernels.benchmarks.show import memory_text, table

ROOT = Path(__file__).resolve().parent.parent
RESULTS, FIGURES = ROOT / "bench" / "results", ROOT / "bench" / "figures"
PAGES = (ROOT / "README.md", ROOT / "bench" / "README.md")
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
RIVALS = (*(name for name in IMPLEMENTATIONS if not name.startswith("ours")), "ours-unmasked")
SPARSE = Path("sparse/cpu.json")  # of sparse.py, below RESULTS
SPARSE_LEARNING, TEACHER = (Path(EXPERIMENTS[name].output) for name in ("sparse", "teacher"))  # of learning.py
DISTILLATION = Path("distillation/cpu.json")  # the set teacher
LEARNING = Path("trainer/time-to-reward.json")  # of time_to_reward.py
GPU = "gpu-h200.json"
GOAL = 0.9  # reward of an evaluation
LEARNERS = {
    "TRL": "#0b6fb3",
    "TRL, FusedGRPOTrainer": "#0a8f6a",
    "grpo-kernels train": "#d1410c",
    "grpo-kernels train, sparse": "#8a3fb0",
    "grpo-kernels train, vLLM": "#b08a00",
}
TRAINERS = ("eager", "trl", "liger", "verl", "verl-torch")
ARMS = ("#6b6b6b", "#d1410c", "#0b6fb3")
ARM_PICTURES: dict[Path, tuple[str, str, list[tuple[str, str, str, dict[str, Any], dict[str, Any]]]]] = {
    # file -> name of the picture, its title, panels of a metric in a setting: their titles, lines and axes
    SPARSE_LEARNING: ("sparse-learning", "Learning with sparse gradients, by theta", [
        ("chat", "sparse/kept", "chat: entries that a token keeps", {"linewidth": 0.8}, {"yscale": "log"}),
        ("chat", "seconds/update", "chat: seconds of an update", {"linewidth": 0.8}, {"ylim": (0.0, None)}),
    ]),
    TEACHER: ("teacher", "GRPO, a teacher's distribution, and both", [(
        "arithmetic, dapo", "divergence", "reverse KL to the teacher, nats per token",
        {"alpha": 0.5, "linewidth": 0.6}, {"yscale": "log"},
    )]),
}  # fmt: skip
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
        measured = [read(path) for path in (RESULTS / "cpu.json", RESULTS / GPU) if path.exists()]
        both = summary(measured), learning_summary(read(RESULTS / LEARNING))
        return "\n\n".join([*both, "![Evaluated reward over minutes and steps](bench/figures/time-to-reward.png)"])
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


def _place(document: Document) -> str:
    """On what it was measured, and when."""
    where = document["environment"]
    device = f"{where['cpu']}, {where['threads']} threads" if where["device"] == "cpu" else where["device"]
    return f"{device}, {where['date'][:10]}"


def summary(documents: Sequence[Document]) -> str:
    """How much faster a step is than that of each trainer, and how much less memory it takes, over all cases."""
    titles, places, rows = ["this package against"], [], {IMPLEMENTATIONS[name].title: [] for name in TRAINERS}
    for document in documents:
        where, cases = document["environment"], [case for case in document["cases"] if case["case"]["mode"] == "step"]
        device = "CPU" if where["device"] == "cpu" else where["device"]
        titles += [f"{device}, faster", "less memory"]
        heads = len({(case["case"]["hidden_size"], case["case"]["vocab_size"]) for case in cases})
        types = " and ".join(dict.fromkeys(case["case"]["dtype"] for case in cases))
        named = f"{where['cpu']}, {where['threads']} threads" if device == "CPU" else device
        places.append(f"{heads} models' heads in {types} on {named}")
        for name in TRAINERS:
            entries = [case["implementations"] for case in cases if name in case["implementations"]]
            pairs = [(entry["ours"], entry[name]) for entry in entries]
            times = [1 / theirs["ours_to_this"] for _, theirs in pairs if "ours_to_this" in theirs]
            memory = [
                theirs["peak_bytes"] / ours["peak_bytes"]
                for ours, theirs in pairs
                if ours.get("peak_bytes") and theirs.get("peak_bytes")
            ]
            rows[IMPLEMENTATIONS[name].title] += [_range(times), _range(memory)]
    return f"""\
Steps of {"; of ".join(places)}:
median time, or peak memory, of the other over ours. `chunk_rows` bounds a GPU's chunk, a twelfth of its memory at most:

{table(titles, [(name, *cells) for name, cells in rows.items()])}"""


def _range(ratios: Sequence[float]) -> str:
    ends = [f"{end(ratios):.1f}" for end in (min, max)] if ratios else []
    return f"{' to '.join(dict.fromkeys(ends))} x" if ends else ""


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
        axes[0].set(title="time of the exact step", ylim=(0.0, None))
        axes[1].set(title="relative error of dhidden", yscale="log")
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


def draw_arms(name: Path, document: Document, folder: Path) -> None:
    """Evaluated reward over steps, each seed and their mean, a panel per setting; then the panels of ARM_PICTURES."""
    picture, title, others = ARM_PICTURES[name]
    settings, arms = _settings(document), list(zip(_arms(document), ARMS, strict=True))
    with rc_context(STYLE):
        figure, axes = sheet(document, title, len(settings) + len(others), 2.3)
        for setting, axis in zip(settings, axes, strict=False):
            for arm, colour in arms:
                curves = [found["evaluations"] for found in _runs(document, setting, arm)]
                for curve in curves:
                    axis.plot(*_curve(curve, "reward"), color=colour, alpha=0.25, linewidth=0.8)
                means = [fmean(e["reward"] for e in same) for same in zip(*curves, strict=True)]
                axis.plot(_curve(curves[0], "reward")[0], means, color=colour, label=arm)
            axis.set(title=f"evaluated reward: {setting}", xlabel="optimizer steps")
        for (setting, metric, title, line, scale), axis in zip(others, axes[len(settings) :], strict=True):
            for arm, colour in arms:
                for found in _runs(document, setting, arm):
                    if metric in found["steps"][0]:
                        axis.plot(*_curve(found["steps"], metric), color=colour, **line)
            axis.set(title=title, xlabel="optimizer steps", **scale)
        axes[0].legend(frameon=False)
        figure.savefig(folder / f"{picture}.png", dpi=DPI)


def _settings(document: Document) -> list[str]:
    return list(dict.fromkeys(found["setting"] for found in document["runs"]))


def _arms(document: Document) -> list[str]:
    return list(dict.fromkeys(found["arm"] for found in document["runs"]))


def _runs(document: Document, setting: str, arm: str) -> list[dict[str, Any]]:
    return [found for found in document["runs"] if (found["setting"], found["arm"]) == (setting, arm)]


def _curve(records: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """A step whose tokens had no gradient has no number of some metrics."""
    known = [record for record in records if name in record]
    return [record["step"] for record in known], [record[name] for record in known]


def _arms_text(name: Path, document: Document) -> str:
    """A row per setting: the last evaluation of each arm; for sparse gradients also what a token kept."""
    where, arms, rows = document["environment"], _arms(document), []
    is_sparse = name == SPARSE_LEARNING
    for setting in _settings(document):
        runs = [_runs(document, setting, arm) for arm in arms]
        ends = [_spread([found["evaluations"][-1]["reward"] for found in group], ".3f") for group in runs]
        curves = [_curve(found["steps"], "sparse/kept")[1] for found in runs[1]] if is_sparse else []
        kept = [fmean(curve[k] for curve in curves) for k in (0, -1)] if is_sparse else []
        rows.append((setting, str(len(runs[0])), *ends, *(f"{number:,.0f}" for number in kept)))
    last = (f"kept at {arms[1]}: first step", "last step") if is_sparse else ()
    return f"""\
**{name}.** {where["cpu"]}, {where["threads"]} threads, {where["date"][:10]}: `python bench/learning.py`. Evaluated
reward after the last step, median of the seeds (least to most):

{table(("run", "seeds", *arms, *last), rows)}

![Evaluated reward over steps](figures/{ARM_PICTURES[name][0]}.png)"""


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


# --- how soon a model learns ------------------------------------------------------------------------------------------


def draw_learning(document: Document, folder: Path) -> None:
    """Evaluated reward over minutes and over steps, a row per task and setting: each seed, and their mean."""
    kinds = _rounds(document)
    with rc_context(STYLE):
        figure, axes = sheet(document, "Evaluated reward of SmolLM2-135M-Instruct", 2 * len(kinds), 2.3)
        for k, (kind, rounds) in enumerate(kinds.items()):
            for name in rounds[0]:
                curves, colour = [found[name]["evaluations"] for found in rounds], LEARNERS[name]
                for axis, unit in ((axes[2 * k], "clock"), (axes[2 * k + 1], "evaluated")):
                    scale = 60.0 if unit == "clock" else 1.0
                    rows = [([e[unit] / scale for e in curve], [e["reward"] for e in curve]) for curve in curves]
                    for x, y in rows:
                        axis.plot(x, y, color=colour, alpha=0.25, linewidth=0.8)
                    mean = [list(map(fmean, zip(*values, strict=True))) for values in zip(*rows, strict=True)]
                    axis.plot(*mean, color=colour, label=name)
                    axis.set_xlabel("minutes" if unit == "clock" else "optimizer steps")
                    axis.set_title(kind)
                    axis.axhline(GOAL, color="#989898", linewidth=0.6, linestyle=":")
        for axis in axes[::2]:  # not every contestant is in every row
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
    """Of each contestant its name, minutes to the goal by seed, these of TRL's, mean seconds of a step and its parts,
    and MiB."""
    for name in rounds[0]:
        own = [found[name] for found in rounds]
        minutes = [_minutes_to_goal(one) for one in own]
        of_trl = [mine / _minutes_to_goal(found["TRL"]) for mine, found in zip(minutes, rounds, strict=True)]
        steps = [step["seconds"] for one in own for step in one["steps"]]
        parts = {part: fmean(step[part] for step in steps) for part in steps[0]}
        yield name, minutes, of_trl, {"step": sum(parts.values())} | parts, median(one["peak_mib"] for one in own)


def _learning(document: Document) -> str:
    """A row per setting and contestant."""
    rows: list[list[str]] = []
    for kind, rounds in _rounds(document).items():
        title = f"{kind}, {len(rounds)} seed{'s' * (len(rounds) > 1)}"
        for name, minutes, of_trl, seconds, mib in _learners(rounds):
            rows.append([title, name, _spread(minutes, ".1f"), _spread(of_trl, ".2f")])
            rows[-1] += [f"{number:.1f}" for number in seconds.values()]
            reward = fmean(found[name]["evaluations"][-1]["reward"] for found in rounds)
            rows[-1] += [f"{1 - seconds['head'] / seconds['step']:.2f}", f"{mib:,.0f}", f"{reward:.2f}"]
    note = fill(document.get("note", ""), 120)
    titles = "setting", "", f"minutes to {GOAL}", "of TRL's", *(f"{part}, s" for part in seconds), "without head"
    return f"""\
**{LEARNING}.** {_place(document)}: `python bench/time_to_reward.py`, contestants step by step in turns.
Minutes are median (least to most) of the time that a contestant's steps took until its first evaluation at {GOAL};
"without head" is the share of a step that would be left if its head took no time, which is sampling and the body.
{note}

{table((*titles, "peak MiB", "reward after"), rows)}

![Evaluated reward over minutes and steps](figures/time-to-reward.png)"""


def learning_summary(document: Document) -> str:
    """A row per contestant, in bfloat16."""
    rounds, rows = _rounds(document)["times table, full, bfloat16"], []
    for name, minutes, of_trl, seconds, mib in _learners(rounds):
        numbers = f"{median(of_trl):.2f}", f"{seconds['step']:.1f}", f"{seconds['head']:.1f}", f"{mib / 1024:.1f}"
        rows.append((name, _spread(minutes, ".1f"), *numbers))
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
    cases = [case for case in document["cases"] if case["case"]["head"] != "custom"]
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


PICTURES = {SPARSE: draw_sparse, LEARNING: draw_learning} | {name: partial(draw_arms, name) for name in ARM_PICTURES}
TEXTS = {
    SPARSE: _sparse, SPARSE_LEARNING: partial(_arms_text, SPARSE_LEARNING), DISTILLATION: _distillation,
    TEACHER: partial(_arms_text, TEACHER), LEARNING: _learning,
}  # fmt: skip

if __name__ == "__main__":
    main()

"""The pictures and tables of the committed results: `make figures`.

Pictures go to bench/figures, named after their file of results: cpu.json gives cpu-time.png, ... Tables go between
the markers of README.md and bench/README.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import inf, isfinite, log2
from pathlib import Path
from statistics import fmean, median
from textwrap import fill
from typing import Any, NamedTuple

from matplotlib import rc_context

from grpo_kernels.benchmarks.cases import Case, make_case
from grpo_kernels.benchmarks.figures import COLOURS, CUT, DPI, STYLE, draw, sheet
from grpo_kernels.benchmarks.machine import Document, read
from grpo_kernels.benchmarks.show import memory_text, table

ROOT = Path(__file__).resolve().parent.parent
RESULTS, FIGURES = ROOT / "bench" / "results", ROOT / "bench" / "figures"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
H100, LAB = "gpu/h100-targets.json", "gpu/h100-lab.jsonl"  # of gpu.py; of a script for this one machine
FILES = ("cpu.json", "cpu-masks.json", "cpu-sweeps.json", "gpu-h200.json", H100, LAB, "distillation/cpu.json")
PLACES = {"CPU": ("cpu.json", "cpu-sweeps.json"), "H200": ("gpu-h200.json",), "H100": (H100, LAB)}
TRAINERS = {
    "eager": "eager PyTorch", "trl": "TRL", "liger": "Liger", "verl": "verl, Triton",
    "verl-torch": "verl, torch in chunks",
}  # fmt: skip
CAPTIONS = {  # by how a picture's name ends
    "time": "Time of a step over that of the three bare products",
    "sweeps-memory": "Peak memory against the length of completions; a cross is out of memory",
    "gpu-memory": "Memory of a step over its time: Llama-3-8B (circles), Qwen2.5-7B (squares), Qwen2.5-1.5B "
    "(triangles), Gemma-2-2B (diamonds)",
    "reward": "Evaluated reward over minutes and steps",
}
GOAL = 0.9  # reward of an evaluation
LEARNERS = {
    "TRL": "#0b6fb3", "TRL, FusedGRPOTrainer": "#0a8f6a", "grpo-kernels train": "#d1410c",
    "grpo-kernels train, sparse": "#8a3fb0", "grpo-kernels train, vLLM": "#b08a00",
}  # fmt: skip
# Setting and unit: sooner in minutes, as soon in steps, the same in float32, and a task that takes more steps.
LEARNING_PANELS = (
    ("times table, full, bfloat16", "clock"), ("times table, full, bfloat16", "evaluated"),
    ("times table, full, float32", "clock"), ("largest number, full, bfloat16", "clock"),
)  # fmt: skip


def main() -> None:
    documents = {name: load(name) for name in FILES}
    pictures = {}
    for name, wanted in (("cpu.json", "time"), ("cpu-sweeps.json", "memory"), ("gpu-h200.json", "time")):
        pictures[name] = [path.name for path in draw(documents[name], FIGURES, f"{Path(name).stem}-", wanted)]
    draw_gpu_memory({"NVIDIA H100": documents[LAB], "NVIDIA H200": documents["gpu-h200.json"]})
    pictures[LAB] = ["gpu-memory.png"]
    learning = read(RESULTS / "trainer/time-to-reward.json")
    draw_learning(learning)
    rewrite(ROOT / "README.md", summary(documents), learning_summary(learning), shown("bench/", "time-to-reward.png"))
    sections = [section(name, document, pictures.get(name, [])) for name, document in documents.items()]
    more = sparse(read(RESULTS / "sparse/cpu.json")), dweight(read(RESULTS / "dweight/cpu.json"))
    rewrite(ROOT / "bench/README.md", *sections, *more, learning_table(learning), shown("", "time-to-reward.png"))


def load(name: str) -> Document:
    """Returns a document of `grpo-kernels bench`. bench/gpu.py has one inside its own; the lines of LAB make one."""
    if name != LAB:
        document = read(RESULTS / name)
        return document if "cases" in document else document["targets"]
    cases: list[dict[str, Any]] = []
    for line in map(json.loads, (RESULTS / LAB).read_text().splitlines()):
        if line.get("who") == "floor":
            case = make_case(f"{line['head'].replace('llama3', 'llama-3')}:{line['N']}")
            cases.append({"case": asdict(case), "implementations": {}})
        if "x_floor" in line:
            title = {"floor": "bare matrix products", "auto": "ours", "triton": "ours, Triton"}.get(line["who"])
            title = title or TRAINERS.get(line["who"]) or line["who"].replace("rows", "ours, chunk_rows")
            seconds = {key: line[name] / 1e3 for key, name in (("median", "ms"), ("min", "low"), ("max", "high"))}
            names = {"dhidden": "dhidden", "dweight": "dweight", "logp_max": "logps_max"}
            found = cases[-1]["implementations"]
            found["ours" if line["who"] == "auto" else line["who"]] = report = {
                "title": title, "seconds": seconds, "ratio_to_floor": line["x_floor"],
                "peak_bytes": line["peak_MiB"] * 2**20,
                "errors": {to: line[name] for name, to in names.items() if name in line},
            }  # fmt: skip
            if "ours" in found:
                report["ours_to_this"] = found["ours"]["seconds"]["median"] / seconds["median"]
    command = "(a script for this machine, a process for each of two runs)"
    return {"environment": load(H100)["environment"], "command": command, "cases": cases}


def rewrite(page: Path, *parts: str) -> None:
    """Puts the parts between the markers of a page."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{chr(10).join(f'{part}{chr(10)}' for part in parts)}{END}{rest.split(END)[1]}")


def shown(folder: str, *names: str) -> str:
    """Returns links to pictures of bench/figures from a page below which bench is `folder`."""
    captions = {name: text for name in names for end, text in CAPTIONS.items() if Path(name).stem.endswith(end)}
    return "\n\n".join(f"![{text}]({folder}figures/{name})" for name, text in captions.items())


def place(document: Document) -> str:
    """Returns on what it was measured, and when."""
    where = document["environment"]
    device = f"{where['cpu']}, {where['threads']} threads" if where["device"] == "cpu" else where["device"]
    return f"{device}, {where['date'][:10]}"


# --- benchmarks -------------------------------------------------------------------------------------------------------


def section(name: str, document: Document, pictures: Sequence[str]) -> str:
    """Returns a row per case: ours, its ratio to everybody else, its memory and errors; and the pictures."""
    cases = [case for case in document["cases"] if not _is_narrow(case["case"])]
    reports = [case["implementations"] for case in cases]
    titles = {name: one["title"] for found in reports for name, one in found.items() if name != "ours"}
    ours = [found.get("ours", {}) for found in reports]
    columns = {"ours, ms (least to most)": [_times(one) for one in ours]}
    for who, title in titles.items():
        form = ".3f" if who.startswith("ours-") else ".2f"
        columns[f"of {title}"] = [_number(found.get(who, {}), "ours_to_this", form) for found in reports]
    columns["peak MiB"] = [memory_text(one) for one in ours]
    columns["of eager's"] = [_number(one, "memory_ratio_to_eager", ".3f") for one in ours]
    for title, key in (("error of dhidden", "dhidden"), ("of a log-probability", "logps_max")):
        columns[f"{title} (eager's)"] = [_errors(found, key) for found in reports]
    columns = {title: cells for title, cells in columns.items() if any(cells)}
    rows = [[str(Case(**case["case"])), *cells] for case, *cells in zip(cases, *columns.values(), strict=True)]
    parts = [f"**{name}.** {place(document)}: `{document['command']}`", table(("case (N, H, V)", *columns), rows)]
    return "\n\n".join([*parts, *([shown("", *pictures)] if pictures else [])])


def _times(entry: Document) -> str:
    numbers = [entry["seconds"][key] * 1e3 for key in ("median", "min", "max")] if "seconds" in entry else []
    return "{:,.0f} ({:,.0f} to {:,.0f})".format(*numbers) if numbers else ""


def _errors(found: Document, key: str) -> str:
    numbers = [(found.get(who, {}).get("errors") or {}).get(key) for who in ("ours", "eager")]
    first, second = (f"{error:.1e}" if error else "" for error in numbers)
    return f"{first} ({second})" if second else first


def _number(entry: Document, key: str, form: str) -> str:
    return format(entry[key], form) if key in entry else entry.get("error", "").split(":")[0]


def _is_narrow(case: dict[str, Any]) -> bool:
    """Whether it is a point of a sweep over the hidden size, and no model's head."""
    return case["head"] == "custom" and case["tokens"] < 4096


class Pair(NamedTuple):
    """Of a step: its tokens, the times of ours and theirs, and their peaks of memory; 0 where not measured."""

    trainer: str
    tokens: int
    times: tuple[float, ...]
    peaks: tuple[float, ...]


def comparisons(document: Document) -> Iterator[Pair]:
    """Yields each trainer beside ours, in the steps of models' heads in which every token has a gradient."""
    for case in document["cases"]:
        of, entries = case["case"], case["implementations"]
        special = of["mode"] != "step", of["idle_share"], of.get("kept_ids"), of.get("divergence"), _is_narrow(of)
        for name in TRAINERS if not any(special) else ():
            both = [entries[who] for who in ("ours", name)] if name in entries else []
            times = tuple(one.get("seconds", {}).get("median", 0.0) for one in both)
            peaks = tuple(one.get("peak_bytes", 0) for one in both)
            if both and (all(times) or all(peaks)):
                yield Pair(name, of["tokens"], times, peaks)


def summary(documents: dict[str, Document]) -> str:
    """Returns how many times the time of ours a step of each trainer takes, and ours of its memory, over all cases."""
    titles, rows, places = ["this package against"], {name: [title] for name, title in TRAINERS.items()}, []
    for where, files in PLACES.items():
        pairs = [pair for name in files for pair in comparisons(documents[name])]
        titles += [f"{where}: faster", "memory, of theirs"]
        for name, cells in rows.items():
            own = [pair for pair in pairs if pair.trainer == name]
            cells.append(_range([pair.times[1] / pair.times[0] for pair in own if all(pair.times)], ".1f", " x"))
            cells.append(_range([pair.peaks[0] / pair.peaks[1] for pair in own if all(pair.peaks)], ".2f"))
        counts = _range([pair.tokens for pair in pairs], ",")
        places.append(f"{place(documents[files[0]])}: {counts} tokens ({', '.join(files)}).")
    return f"""\
A step (forward, backward, the head's gradient) of models' heads. Faster: their median time over ours, least to most of
all cases. Memory: our peak over theirs; above 1 ours takes more. `chunk_rows` bounds it:

{table(titles, list(rows.values()))}

{fill(" ".join(places), 120)}"""


def _range(ratios: Sequence[float], form: str, unit: str = "") -> str:
    ends = [f"{end(ratios):{form}}" for end in (min, max)] if ratios else []
    return f"{' to '.join(dict.fromkeys(ends))}{unit}" if ends else ""


MARKERS = {"llama-3-8b": "o", "qwen2.5-7b": "s", "qwen2.5-1.5b": "^", "gemma-2-2b": "D"}


def draw_gpu_memory(documents: dict[str, Document]) -> None:
    """Draws memory of a step over its time, a panel per card: a point for each implementation and head."""
    with rc_context(STYLE):
        title = "Memory of a step over its time: 16,384 tokens in bfloat16"
        figure, axes = sheet(documents["NVIDIA H100"], title, 2, 3.2)
        for axis, (card, document) in zip(axes, documents.items(), strict=True):
            far: list[tuple[float, float]] = []
            for case in document["cases"]:
                is_plain = case["case"]["mode"] == "step" and not case["case"].get("kept_ids")
                for name, one in case["implementations"].items() if is_plain else ():
                    is_ours, marker = name in ("ours", "rows 2048", "rows 4096"), MARKERS[case["case"]["head"]]
                    if (is_ours or name in TRAINERS) and "ratio_to_floor" in one:
                        colour, time = COLOURS["ours" if is_ours else name], one["ratio_to_floor"]
                        label, fill_of = one["title"], "none" if name.startswith("rows") else colour
                        style: dict[str, Any] = dict(color=colour, markerfacecolor=fill_of, label=label)
                        axis.plot([min(time, CUT)], [one["peak_bytes"] / 2**20], marker, **style)
                        far += [(time, one["peak_bytes"] / 2**20)] if time > CUT else []
            if far:
                text = f"{min(far)[0]:.0f} to {max(far)[0]:.0f} x →"
                top = max(mib for _, mib in far)
                axis.annotate(text, (CUT, top), ha="right", xytext=(0, 6), textcoords="offset points")
            axis.set(title=card, xlabel="time, of the three bare matrix products", yscale="log", xlim=(0.9, CUT + 0.15))
            axis.set_ylabel("MiB beside inputs and gradients")
            labels = dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
            axis.legend(labels.values(), labels, frameon=False, fontsize=6.5)
        figure.savefig(FIGURES / "gpu-memory.png", dpi=DPI)


# --- a chat model's head: chat_head.py --------------------------------------------------------------------------------


def sparse(document: Document) -> str:
    """Returns a table per temperature: a row per type and theta."""
    parts = [
        f"""\
**sparse/cpu.json.** {place(document)}: `python bench/chat_head.py`, `GRPOConfig(sparse_backward=theta)` on the head of
SmolLM2-135M-Instruct. Medians of interleaved rounds, relative errors against float64 from the same inputs."""
    ]
    titles = "theta", "type", "kept", "by products", "error of dhidden", "of dweight", "time of exact", "of products"
    for batch in document["batches"]:
        what = f"{batch['tokens']:,} tokens sampled at T {batch['temperature']}, {batch['entropy']:.2f} nats:"
        rows = []
        for one in batch["rows"]:
            theta = one.get("model") or (f"2^{log2(one['theta']):.0f}" if one["theta"] else "exact")
            rows.append([theta, one.get("dtype", "model in float64").removeprefix("torch.")])
            rows[-1] += [_number(one, "kept", ",.0f"), _number(one, "dense", ".1%")]
            rows[-1] += [f"{one['errors'][name]:.1e}" for name in ("dhidden", "dweight")]
            rows[-1] += [_number(one, name, ".2f") for name in ("of_exact", "of_products")] + [memory_text(one)]
        parts += [what, table((*titles, "peak MiB"), rows)]
    return "\n\n".join(parts)


def dweight(document: Document) -> str:
    """Returns a row for each way to add up, and its error over that of one rounding."""
    batches = [batch["errors"] for batch in document["batches"]]
    temperatures = [batch["temperature"] for batch in document["batches"]]
    titles = [f"{what} {t}" for t in temperatures for what in ("error, T", "of one chunk's, T")]
    rows = [
        (name, *(cell for errors in batches for cell in (f"{errors[name]:.2e}", f"{errors[name] / errors['1']:.2f}")))
        for name in batches[0]
    ]
    return f"""\
**dweight/cpu.json.** {place(document)}: `python bench/chat_head.py`. What adding up the shares of chunks in bfloat16
rounds of the weight's gradient, on samples of SmolLM2-135M-Instruct; "float32" is a float32 sum, rounded at the end:

{table(("chunks", *titles), rows)}"""


# --- how soon a model learns: time_to_reward.py -----------------------------------------------------------------------


def rounds_of(document: Document) -> dict[str, list[dict[str, Any]]]:
    """Returns what the contestants told, for each seed, by task and setting."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for found in document["rounds"]:
        kind = ", ".join((found["task"].replace("-", " "), *found["setting"].split("-")))
        kinds.setdefault(kind, []).append(found["contestants"])
    return kinds


def draw_learning(document: Document) -> None:
    """Draws the evaluated reward, a panel for each of `LEARNING_PANELS`: each seed, and their mean."""
    kinds = rounds_of(document)
    with rc_context(STYLE):
        title = "How soon SmolLM2-135M-Instruct learns: evaluated reward"
        figure, axes = sheet(document, title, len(LEARNING_PANELS), 2.6)
        for (kind, unit), axis in zip(LEARNING_PANELS, axes, strict=True):
            scale = 60.0 if unit == "clock" else 1.0
            for name in kinds[kind][0]:
                curves = [found[name]["evaluations"] for found in kinds[kind]]
                rows = [([e[unit] / scale for e in curve], [e["reward"] for e in curve]) for curve in curves]
                for x, y in rows:
                    axis.plot(x, y, color=LEARNERS[name], alpha=0.25, linewidth=0.8)
                mean = [list(map(fmean, zip(*values, strict=True))) for values in zip(*rows, strict=True)]
                axis.plot(*mean, color=LEARNERS[name], label=name)
            axis.set(title=kind, ylabel="evaluated reward")
            axis.set_xlabel("minutes of training" if unit == "clock" else "optimizer steps")
            axis.axhline(GOAL, color="#989898", linewidth=0.6, linestyle=":")
            axis.legend(frameon=False)
        figure.savefig(FIGURES / "time-to-reward.png", dpi=DPI)


class Learner(NamedTuple):
    """Of a contestant: minutes to the goal, their median of TRL's; mean seconds of a step and of its head; GiB."""

    name: str
    minutes: str
    of_trl: str
    step: float
    head: float
    memory: float
    reward: float


def learners(rounds: Sequence[dict[str, Any]]) -> Iterator[Learner]:
    minutes = {
        name: [
            min((e["clock"] / 60 for e in found[name]["evaluations"] if e["reward"] >= GOAL), default=inf)
            for found in rounds
        ]
        for name in rounds[0]
    }
    for name, own in minutes.items():
        text, lost = f"not reached by {sum(not isfinite(x) for x in own)}", not all(map(isfinite, own))
        if not lost:
            text = f"{median(own):.2f} ({min(own):.2f} to {max(own):.2f})"
        of_trl = "" if lost or not all(map(isfinite, minutes["TRL"])) else f"{median(own) / median(minutes['TRL']):.2f}"
        seconds = [step["seconds"] for found in rounds for step in found[name]["steps"]]
        step, head = fmean(sum(one.values()) for one in seconds), fmean(one["head"] for one in seconds)
        memory = median(found[name]["peak_mib"] for found in rounds) / 1024
        yield Learner(
            name, text, of_trl, step, head, memory, fmean(f[name]["evaluations"][-1]["reward"] for f in rounds)
        )


def learning_table(document: Document) -> str:
    """Returns a row per setting and contestant."""
    rows = [
        (f"{kind}, {len(rounds)} seed{'s' * (len(rounds) > 1)}", one.name, one.minutes, one.of_trl, f"{one.step:.1f}",
         f"{one.head:.1f}", f"{1 - one.head / one.step:.2f}", f"{one.memory:.1f}", f"{one.reward:.2f}")
        for kind, rounds in rounds_of(document).items()
        for one in learners(rounds)
    ]  # fmt: skip
    titles = "setting", "", f"minutes to {GOAL}", "of TRL's", "step, s", "head, s", "without head", "peak GiB"
    return f"""\
**trainer/time-to-reward.json.** {place(document)}: `python bench/time_to_reward.py`, contestants step by step in turns.
Minutes are median (least to most) of the time that a contestant's steps took until its first evaluation at {GOAL}, and
"of TRL's" is the quotient of two medians;
"without head" is the share of a step that would be left if its head took no time, which is sampling and the body.
{fill(document.get("note", ""), 120)}

{table((*titles, "reward after"), rows)}"""


def learning_summary(document: Document) -> str:
    """Returns a row per contestant, in bfloat16."""
    rounds = rounds_of(document)["times table, full, bfloat16"]
    rows = [
        (one.name, one.minutes, one.of_trl, f"{one.step:.1f}", f"{one.head:.1f}", f"{one.memory:.1f}")
        for one in learners(rounds)
    ]
    return f"""\
Training SmolLM2-135M-Instruct on the times table, on the same CPU, in bfloat16: minutes until {GOAL:.0%} of the answers
are right, median of {len(rounds)} seeds (least to most), with the same prompts and options. A step's other seconds are
sampling and the model's body; `grpo-kernels train` runs each prompt once for all its completions (`--share-prompts`):

{table(("", "minutes", "of TRL's", "step, s", "its head, s", "peak GiB"), rows)}"""


if __name__ == "__main__":
    main()

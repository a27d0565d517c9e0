"""The pictures and tables of the committed results: `make figures`.

Pictures go to bench/figures, named after their file of results: cpu.json gives cpu-time.png, ... Tables go between
the markers of README.md and bench/README.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from grpo_kernels.commands.bench import figures
from grpo_kernels.commands.bench.cases import Case
from grpo_kernels.commands.bench.command import memory_text, table
from grpo_kernels.commands.bench.machine import Document

ROOT = Path(__file__).resolve().parent.parent
RESULTS, FIGURES = ROOT / "bench" / "results", ROOT / "bench" / "figures"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
H100, LAB = "gpu/h100-targets.json", "gpu/h100-lab.json"  # of gpu.py; of a script for this one machine
FILES = ("cpu.json", "cpu-masks.json", "cpu-sweeps.json", "gpu-h200.json", H100, LAB)
PLACES = {"CPU": ("cpu.json", "cpu-sweeps.json"), "H200": ("gpu-h200.json",), "H100": (H100, LAB)}
TRAINERS = {
    "eager": "eager PyTorch", "trl": "TRL", "liger": "Liger", "verl": "verl, Triton",
    "verl-torch": "verl, torch in chunks",
}  # fmt: skip
CAPTIONS = {
    "time": "Time of a step over that of the three bare products",
    "memory": "Peak memory against the length of completions; a cross is out of memory",
}
DRAWN = {"cpu.json": "time", "cpu-sweeps.json": "memory", "gpu-h200.json": "time"}


def main() -> None:
    documents = {name: load(name) for name in FILES}
    sections = []
    for name, document in documents.items():
        sections.append(section(name, document))
        if wanted := DRAWN.get(name):
            (path,) = figures.draw(document, FIGURES, f"{Path(name).stem}-", wanted)
            sections.append(f"![{CAPTIONS[wanted]}](figures/{path.name})")
    with rc_context(figures.STYLE):
        truncated(load("truncated/learning.json")).savefig(FIGURES / "truncated-sampling.png", dpi=figures.DPI)
    rewrite(ROOT / "README.md", summary(documents))
    rewrite(ROOT / "bench/README.md", *sections)


def load(name: str) -> Document:
    """Returns a document of `grpo-kernels bench`, which bench/gpu.py has inside its own."""
    document = json.loads((RESULTS / name).read_text())
    found: Document = document.get("targets", document)
    for case in found.get("cases", ()):
        case["case"].pop("divergence", None)  # "" in these files, of an earlier revision
    return found


def rewrite(page: Path, *parts: str) -> None:
    """Puts the parts between the markers of a page."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{chr(10).join(f'{part}{chr(10)}' for part in parts)}{END}{rest.split(END)[1]}")


def truncated(document: Document) -> Figure:
    """Draws the runs of truncated_sampling.py: a line for each seed, of means over ten steps."""
    title = "The times table, sampled with top_k 20 of 256 ids: three seeds"
    figure, axes = figures.sheet(document, title, 2, 2.6)
    ratio = "sampling/importance_sampling_ratio/mean"
    names = {"reward": "reward", ratio: "mean weight of a sequence: importance ratio, at most 3"}
    for axis, (key, name) in zip(axes, names.items(), strict=True):
        for trainer, colour in (("TRL", "trl"), ("FusedGRPOTrainer", "ours")):
            for seed, run in enumerate(document["runs"][trainer]):
                means = [sum(run[key][i : i + 10]) / 10 for i in range(len(run[key]) - 9)]
                label = None if seed else trainer
                axis.plot(range(5, 5 + len(means)), means, color=figures.COLOURS[colour], label=label)
        axis.set(title=name, xlabel="optimizer step", ylim=0)
        axis.legend(frameon=False)
    return figure


def place(document: Document) -> str:
    """Returns on what it was measured, and when."""
    where = document["environment"]
    device = f"{where['cpu']}, {where['threads']} threads" if where["device"] == "cpu" else where["device"]
    return f"{device}, {where['date'][:10]}"


def section(name: str, document: Document) -> str:
    """Returns a row per case: ours, its ratio to everybody else, its memory and errors."""
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
    head = f"**{name}.** {place(document)}: `{document['environment']['command']}`"
    return f"{head}\n\n{table(('case (N, H, V)', *columns), rows)}"


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


def ratios(document: Document) -> Iterator[tuple[int, str, str, float]]:
    """Yields (tokens, trainer, what, ratio) of the steps of models' heads in which every token has a gradient.

    what: "time", a trainer's over ours; "memory", our peak over its.
    """
    for case in filter(figures.is_plain_step, document["cases"]):
        tokens, found = case["case"]["tokens"], case["implementations"]
        peak = found.get("ours", {}).get("peak_bytes")
        for name in TRAINERS.keys() & found.keys() if not _is_narrow(case["case"]) else ():
            one = found[name]
            if "ours_to_this" in one:
                yield tokens, name, "time", 1 / one["ours_to_this"]
            if peak and "peak_bytes" in one:
                yield tokens, name, "memory", peak / one["peak_bytes"]


def summary(documents: dict[str, Document]) -> str:
    """Returns how many times the time of ours a step of each trainer takes, and ours of its memory, over all cases."""
    titles, rows, places = ["this package against"], {name: [title] for name, title in TRAINERS.items()}, []
    for where, files in PLACES.items():
        found = [one for name in files for one in ratios(documents[name])]
        titles += [f"{where}: faster", "memory, of theirs"]
        for trainer, cells in rows.items():
            for what, form, unit in (("time", ".1f", " x"), ("memory", ".2f", "")):
                cells.append(_range([x for _, *of, x in found if of == [trainer, what]], form, unit))
        counts = _range([tokens for tokens, *_ in found], ",")
        places.append(f"{place(documents[files[0]])}: {counts} tokens ({', '.join(files)}).")
    return f"""\
A step (forward, backward, the head's gradient) of models' heads. Faster: their median time over ours, least to most of
all cases. Memory: our peak over theirs; above 1 ours takes more. `chunk_rows` bounds it:

{table(titles, list(rows.values()))}

{fill(" ".join(places), 120)}"""


def _range(numbers: Sequence[float], form: str, unit: str = "") -> str:
    ends = [f"{end(numbers):{form}}" for end in (min, max)] if numbers else []
    return f"{' to '.join(dict.fromkeys(ends))}{unit}" if ends else ""


if __name__ == "__main__":
    main()

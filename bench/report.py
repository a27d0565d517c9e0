"""The pictures, tables and numbers of the committed results: `make figures`.

Pictures go to bench/figures, named after their file of results: cpu.json gives cpu-time.png, ... Tables go between
the markers of PAGES, and numbers into their sentences (quotes.py). With --check, `make check-figures`, nothing is
written, and a table or number that differs from its file, or names none, is an error.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from chart import chart
from matplotlib import rc_context
from matplotlib.figure import Figure
from quotes import differences, filled, generations, text_of, unquoted

from grpo_kernels.commands.bench import figures
from grpo_kernels.commands.bench.cases import Case
from grpo_kernels.commands.bench.command import memory_text, table
from grpo_kernels.commands.bench.machine import Document, Report, code_digest

ROOT = Path(__file__).resolve().parent.parent
RESULTS, FIGURES = ROOT / "bench" / "results", ROOT / "bench" / "figures"
PAGES = ("README.md", "bench/README.md", "bench/RESULTS.md", "grpo_kernels/README.md",
         "grpo_kernels/integrations/README.md", "grpo_kernels/trainer/README.md")  # fmt: skip
# One page is generated as a whole; the other has thresholds of alarms, which nobody measures.
WITHOUT_MARKERS = ("bench/RESULTS.md", "grpo_kernels/trainer/README.md")
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
# Limits that this code or glibc sets, and nobody measures.
EXCEPTIONS = (
    "within 1 GiB", "within 512 MiB", "within 1.5 GiB", "512 MiB of logits", "64 MiB allow", "one of 50 MiB",
    "blocks of 32 MiB",
)  # fmt: skip
H100, LAB = "gpu/h100-targets.json", "gpu/h100-lab.json"  # written by gpu.py; by a script for this one machine
FILES = (
    "cpu.json", "cpu-masks.json", "cpu-sweeps.json", "cpu-host.json", "distillation/cpu.json", "steps/top-k.json",
    "gpu-h200.json", H100, LAB,
)  # fmt: skip
ERRORS = ("cpu-precision.json", "dweight/cpu.json", "sparse/cpu.json")
PLACES = {"CPU": ("cpu.json", "cpu-sweeps.json"), "H200": ("gpu-h200.json",), "H100": (H100, LAB)}
TRAINERS = {
    "eager": "eager PyTorch", "compiled": "eager PyTorch, compiled", "trl": "TRL", "liger": "Liger, PyTorch head",
    "liger-native": "Liger, native head", "verl": "verl, Triton", "verl-torch": "verl, torch in chunks",
}  # fmt: skip
CAPTIONS = {
    "time": "Time of a step over that of the three bare products",
    "memory": "Peak memory against the length of completions; a cross is out of memory",
    "learning": "Reward, entropy and norm of the gradient over steps, the gradient of the head summed in either type",
}
# On the front page: a step in bfloat16 with the head of a model.
CHART = {"gpu-h200.json": ("llama-3-8b", "Llama-3-8B"), "cpu.json": ("smollm2-135m", "SmolLM2-135M")}
DRAWN = {"cpu.json": "time", "cpu-sweeps.json": "memory", "gpu-h200.json": "time"}


def main() -> int:
    """Writes pages and pictures, or compares them with --check. Returns the exit status: 1 if there are problems."""
    pages = {name: (ROOT / name).read_text() for name in PAGES}
    new_pages, problems = filled_pages(pages)
    if "--check" in sys.argv:
        problems += [f"{name}: {line}" for name, page in pages.items() for line in differences(page, new_pages[name])]
        if (FIGURES / "step.svg").read_text() != step():
            problems.append("bench/figures/step.svg is not that of its files: make figures")
    else:
        draw()
        for name, page in new_pages.items():
            (ROOT / name).write_text(page)
    print("\n".join(problems) or "every number is that of its file")
    return 1 if problems else 0


def filled_pages(pages: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Returns the pages with tables and numbers from the files, and a line for each number without a file."""
    other_revisions, problems = generations(RESULTS, code_digest(ROOT))
    tables = {
        "README.md": [summary({name: load(name) for name in FILES})],
        "bench/README.md": other_revisions or ["Nothing: all files are of the code as it is."],
        "bench/RESULTS.md": [*sections(), *(errors(name, load(name)) for name in ERRORS),
                             f"![{CAPTIONS['learning']}](figures/dweight-learning.png)",
                             time_to_reward(load("trainer/time-to-reward.json"))],
        "grpo_kernels/README.md": [rounding(load("truncated/rounding.json"))],
    }  # fmt: skip
    new_pages = {}
    for name, page in pages.items():
        new_pages[name], missing = filled(rewrite(page, *tables[name]) if name in tables else page, RESULTS)
        unmarked = unquoted(page, EXCEPTIONS) if name not in WITHOUT_MARKERS else ()
        problems += [f"{name}: {problem}" for problem in (*missing, *unmarked)]
    return new_pages, problems


def draw() -> None:
    """Draws all pictures into bench/figures."""
    for name, picture in DRAWN.items():
        figures.draw(load(name), FIGURES, f"{Path(name).stem}-", picture)
    (FIGURES / "step.svg").write_text(step())
    with rc_context(figures.STYLE):
        truncated(load("truncated/learning.json")).savefig(FIGURES / "truncated-sampling.png", dpi=figures.DPI)
        dweight_learning(load("dweight/learning.json")).savefig(FIGURES / "dweight-learning.png", dpi=figures.DPI)


def step() -> str:
    """Returns the chart of the front page: a step of ours and of the trainers on each machine of CHART."""
    panels = {}
    for name, (head, model) in CHART.items():
        document = load(name)
        fields = {"head": head, "dtype": "bfloat16"}.items()
        records = filter(figures.is_plain_step, document["cases"])
        record = next(record for record in records if fields <= record["case"].items())
        environment = document["environment"]
        machine = f"CPU, {environment['threads']} threads" if environment["device"] == "cpu" else environment["device"]
        panels[f"{machine}: head of {model}, {record['case']['tokens']:,} tokens"] = record["implementations"]
    return chart(panels, {"ours": "grpo-kernels"} | TRAINERS)


def sections() -> Iterator[str]:
    """Yields the table of each of FILES, and its picture if it has one."""
    for name in FILES:
        yield section(name, load(name))
        if picture := DRAWN.get(name):
            yield f"![{CAPTIONS[picture]}](figures/{Path(name).stem}-{picture}.png)"


def load(name: str) -> Document:
    """Returns a document of `grpo-kernels bench`; bench/gpu.py has it inside its own."""
    try:
        document = json.loads((RESULTS / name).read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"bench/results/{name}: {error}")
    inner: Document = document.get("targets", document)
    for record in inner.get("cases", ()):
        case = record["case"]
        case["mode"] = case.pop("divergence", "") or case["mode"]  # two fields of an earlier revision
    return inner


def rewrite(page: str, *parts: str) -> str:
    """Returns a page with `parts` between its markers."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{chr(10).join(f'{part}{chr(10)}' for part in parts)}{END}{rest.split(END)[1]}"


def truncated(document: Document) -> Figure:
    """Draws the runs of truncated_sampling.py, as means over ten steps."""
    ratio = "sampling/importance_sampling_ratio/mean"
    names = {"reward": "reward", ratio: "mean weight of a sequence: importance ratio, at most 3"}
    runs = {
        trainer: [{key: means(run[key]) for key in names} for run in document["runs"][trainer]]
        for trainer in ("TRL", "FusedGRPOTrainer")
    }
    return curves(document, "The times table, sampled with top_k 20 of 256 ids: three seeds", names, runs)


def dweight_learning(document: Document) -> Figure:
    """Draws the runs of dweight_learning.py."""
    names = {"reward": "reward", "entropy": "entropy, nats", "grad_norm": "norm of the gradient"}
    names["evaluation"] = "reward of greedy completions, of held-out prompts"
    runs: dict[str, list[dict[str, dict[int, float]]]] = {"float32": [], "weight": []}
    keys = ("reward", "entropy", "grad_norm")
    for run in document["runs"]:
        values = {key: {x["step"]: x[key] for x in run["log"] if key in x} for key in keys}
        evaluations = {x["step"]: x["evaluation"]["greedy_reward"] for x in run["log"] if "evaluation" in x}
        runs[run["dweight_sum"]].append(values | {"evaluation": evaluations})
    labelled = {f"dweight_sum={name}": values for name, values in runs.items()}
    return curves(document, "The gradient of the head summed in float32, and in 16 bits: three seeds", names, labelled)


def means(values: list[float]) -> dict[int, float]:
    """Returns means over ten steps, by the step in their middle."""
    return {i + 5: sum(values[i : i + 10]) / 10 for i in range(len(values) - 9)}


def curves(
    document: Document, title: str, names: dict[str, str], runs: dict[str, list[dict[str, dict[int, float]]]]
) -> Figure:
    """Draws a panel for each of `names`, with a line for each run: a value by optimizer step."""
    figure, axes = figures.sheet(document, title, len(names), 2.6)
    for axis, (key, name) in zip(axes, names.items(), strict=True):
        for (label, seed_runs), colour in zip(runs.items(), ("trl", "ours"), strict=True):
            for seed, run in enumerate(seed_runs):
                legend = None if seed else label
                axis.plot([*run[key]], [*run[key].values()], color=figures.COLOURS[colour], label=legend)
        axis.set(title=name, xlabel="optimizer step", ylim=0)
        axis.legend(frameon=False)
    return figure


def place(document: Document) -> str:
    """Returns the device that a document was measured on, and the date."""
    environment = document["environment"]
    device = environment["device"]
    if device == "cpu":
        device = f"{environment['cpu']}, {environment['threads']} threads"
    return f"{device}, {environment['date'][:10]}"


def section(file: str, document: Document) -> str:
    """Returns a table with a row per case: ours, its ratio to every other implementation, its memory and errors."""
    records = [record for record in document["cases"] if not _is_narrow(record["case"])]
    all_reports = [record["implementations"] for record in records]
    titles = {name: report["title"] for reports in all_reports for name, report in reports.items() if name != "ours"}
    ours = [reports.get("ours", {}) for reports in all_reports]
    columns = {"ours, ms (least to most)": [_times(report) for report in ours]}
    for name, title in titles.items():
        form = ".3f" if name.startswith("ours-") else ".2f"
        columns[f"of {title}"] = [_number(reports.get(name, {}), "ours_to_this", form) for reports in all_reports]
    columns["peak MiB"] = [memory_text(report) for report in ours]
    columns["of eager's"] = [_number(report, "memory_ratio_to_eager", ".3f") for report in ours]
    for title, key in (("error of dhidden", "dhidden"), ("of a log-probability", "logps_max")):
        columns[f"{title} (eager's)"] = [_errors(reports, key) for reports in all_reports]
    columns = {title: cells for title, cells in columns.items() if any(cells)}
    cases = [str(Case(**record["case"])) for record in records]
    rows = [[case, *cells] for case, *cells in zip(cases, *columns.values(), strict=True)]
    heading = f"**{file}.** {place(document)}: `{document['environment']['command']}`"
    return f"{heading}\n\n{table(('case (N, H, V)', *columns), rows)}"


def errors(name: str, document: Document) -> str:
    """Returns tables with a row per implementation: time, memory, entries of sparse gradients, errors."""
    columns = {
        "ms": ("seconds > median", ",.0f", "ms"), "of bare matrix products": ("ratio_to_floor", ".2f"),
        "peak MiB": ("peak_bytes", ",.0f", "MiB"), "ids of a token": ("metrics > sparse/kept", ",.0f"),
        "tokens with all, %": ("metrics > sparse/dense", ".1f", "%"), "error of dhidden": ("errors > dhidden", ".2e"),
        "of dweight": ("errors > dweight", ".2e"), "of log-probabilities, nats": ("errors > logps_rms", ".1e"),
    }  # fmt: skip
    if not any("ratio_to_floor" in one for case in document["cases"] for one in case["implementations"].values()):
        del columns["ms"]  # of one round
    parts = [f"**{name}.** {place(document)}: `{document['environment']['command']}`"]
    for record in document["cases"]:
        reports = record["implementations"].values()
        cells = {title: [_cell(report, *quote) for report in reports] for title, quote in columns.items()}
        cells = {title: column for title, column in cells.items() if any(column)}
        rows = zip((report["title"] for report in reports), *cells.values(), strict=True)
        parts += [f"{Case(**record['case'])}:", table(("", *cells), list(rows))]
    return "\n\n".join(parts)


def time_to_reward(document: Document) -> str:
    """Returns a table with a row per trainer and setting: minutes to an evaluated reward of 0.9, and parts of a
    step."""
    columns = {
        "of TRL's": ("of_trl", ".2f"), "step, s": ("step_seconds", ".1f"), "head, s": ("head_seconds", ".1f"),
        "without head": ("without_head", ".2f"), "peak MiB": ("peak_mib", ",.0f"),
        "reward after": ("reward_after", ".2f"),
    }  # fmt: skip
    rows = []
    for result in document["summary"]:
        reached = [minutes for minutes in result["minutes"] if minutes]
        spread = f"{statistics.median(reached):.2f} ({_range(reached, '.2f')})" if reached else ""
        minutes = spread if len(reached) == result["seeds"] else f"not reached by {result['seeds'] - len(reached)}"
        setting = f"{result['task']}, {result['setting']}, {result['seeds']} seeds"
        rows.append([setting, result["contestant"], minutes, *(_cell(result, *quote) for quote in columns.values())])
    return (
        f"**trainer/time-to-reward.json.** {place(document)}: contestants step by step in turns. Minutes are median "
        "(least to most) of the time that a contestant's steps took until its first evaluation at 0.9; without head is "
        f"the share of a step that would be left if its head took no time. {document['note']}\n\n"
        f"{table(('setting', '', 'minutes to 0.9', *columns), rows)}"
    )


def rounding(document: Document) -> str:
    """Returns a table with a row per sampling: how far ids and ratios of an engine that rounds are from a trainer's."""
    columns = {
        "other ids": ("tokens with other ids", ".0f", "%"), "over all ids": ("all > mean error", ".3f"),
        "over the engine's": ("engine > mean error", ".4f"), "over the recomputed": ("recomputed > mean error", ".4f"),
    }  # fmt: skip
    engines = {name: value for name, value in document.items() if isinstance(value, dict) and name != "environment"}
    rows = [
        [sampling, engine, *(_cell(comparison, *quote) for quote in columns.values())]
        for engine, samplings in engines.items()
        for sampling, comparison in samplings.items()
    ]
    titles = [title + (", %" if unit == ["%"] else "") for title, (_, _, *unit) in columns.items()]
    return table(("sampling", "engine", *titles), rows)


def _cell(entry: Document, *quote: str) -> str:
    """Returns the number at an expression, in a format and a unit, or "" where there is none."""
    try:
        return text_of(entry, *quote)
    except LookupError:
        return ""


def _times(report: Report) -> str:
    """Returns the median, least and most time of a report, in ms."""
    numbers = [report["seconds"][key] * 1e3 for key in ("median", "min", "max")] if "seconds" in report else []
    form = ",.1f" if numbers and numbers[0] < 10 else ",.0f"
    return f"{numbers[0]:{form}} ({numbers[1]:{form}} to {numbers[2]:{form}})" if numbers else ""


def _errors(reports: dict[str, Report], key: str) -> str:
    """Returns an error of ours, and that of eager in brackets."""
    numbers = [(reports.get(name, {}).get("errors") or {}).get(key) for name in ("ours", "eager")]
    our_error, eager_error = (f"{error:.1e}" if error else "" for error in numbers)
    return f"{our_error} ({eager_error})" if eager_error else our_error


def _number(report: Report, key: str, form: str) -> str:
    """Returns a number of a report, or in a word why there is none."""
    return format(report[key], form) if key in report else report.get("error", "").split(":")[0]


def _is_narrow(case: dict[str, Any]) -> bool:
    """Returns whether a case is a point of a sweep over the hidden size, and not a model's head."""
    return case["head"] == "custom" and case["tokens"] < 4096 and case["vocab_size"] > 1000


def ratios(document: Document) -> Iterator[tuple[int, str, str, float]]:
    """Yields (tokens, trainer, what, ratio) of the steps of models' heads in which every token has a gradient.

    what: "time", a trainer's over ours; "memory", our peak over its.
    """
    for record in filter(figures.is_plain_step, document["cases"]):
        tokens, reports = record["case"]["tokens"], record["implementations"]
        peak = reports.get("ours", {}).get("peak_bytes")
        for name in TRAINERS.keys() & reports.keys() if not _is_narrow(record["case"]) else ():
            report = reports[name]
            if "ours_to_this" in report:
                yield tokens, name, "time", 1 / report["ours_to_this"]
            if peak and "peak_bytes" in report:
                yield tokens, name, "memory", peak / report["peak_bytes"]


def has_single_calls(document: Document) -> bool:
    """Returns whether a trainer has a single time, and no median, in a step with a model's head."""
    records = filter(figures.is_plain_step, document["cases"])
    reports = (report for record in records for report in record["implementations"].values())
    return any(len(report.get("seconds", {}).get("times", ())) == 1 for report in reports)


def summary(documents: dict[str, Document]) -> str:
    """Returns a table with a row per trainer: its time over ours, our memory over its, least to most of all cases."""
    titles, rows, sentences = ["this package against"], {name: [title] for name, title in TRAINERS.items()}, []
    for machine, files in PLACES.items():
        case_ratios = [ratio for name in files for ratio in ratios(documents[name])]
        titles += [f"{machine}: faster", "memory, of theirs"]
        for trainer, cells in rows.items():
            for quantity, form, unit in (("time", ".1f", " x"), ("memory", ".2f", "")):
                cells.append(_range([x for _, *key, x in case_ratios if key == [trainer, quantity]], form, unit))
        token_counts = _range([tokens for tokens, *_ in case_ratios], ",")
        places = [place(documents[file]) for file in files]
        machines = "; ".join(dict.fromkeys(places))
        sentences.append(f"{machines}: {token_counts} tokens ({', '.join(files)}).")
    if names := [name for files in PLACES.values() for name in files if has_single_calls(documents[name])]:
        sentences.append(f"Where a rival takes seconds, some cases of {', '.join(names)} have a single call of it.")
    rows = {trainer: cells for trainer, cells in rows.items() if any(cells[1:])}
    return f"""\
One step, forward and backward, of the loss with the `lm_head` of several models. Faster: the median time of each
package over ours, least to most of all cases. Memory: our peak over theirs, beside inputs and gradients; above 1 ours
takes more:

{table(titles, list(rows.values()))}

{fill(" ".join(sentences), 120, break_on_hyphens=False)}"""


def _range(numbers: Sequence[float], form: str, unit: str = "") -> str:
    """Returns the least and the most of numbers."""
    ends = [f"{end(numbers):{form}}" for end in (min, max)] if numbers else []
    return f"{' to '.join(dict.fromkeys(ends))}{unit}" if ends else ""


if __name__ == "__main__":
    sys.exit(main())

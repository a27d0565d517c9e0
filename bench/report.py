"""The pictures and tables of the committed results: `make figures`.

Pictures go to bench/figures, named after their file of results: cpu.json gives cpu-time.png, ... Tables go between
the markers of README.md and bench/README.md.
"""

from __future__ import annotations

import os
from pathlib import Path

from grpo_kernels.benchmarks.cases import Case
from grpo_kernels.benchmarks.figures import draw
from grpo_kernels.benchmarks.implementations import IMPLEMENTATIONS
from grpo_kernels.benchmarks.machine import Document, read
from grpo_kernels.benchmarks.show import memory_text, table

ROOT = Path(__file__).resolve().parent.parent
RESULTS, FIGURES = ROOT / "bench" / "results", ROOT / "bench" / "figures"
PAGES = (ROOT / "README.md", ROOT / "bench" / "README.md")
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
RIVALS = (*(name for name in IMPLEMENTATIONS if not name.startswith("ours")), "ours-unmasked")
TRAINERS = ("eager", "trl", "liger", "verl-torch")
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
    for page in PAGES:
        text = page.read_text()
        if BEGIN in text:
            before, rest = text.split(BEGIN)
            page.write_text(f"{before}{BEGIN}\n{section(page)}\n{END}{rest.split(END)[1]}")


def section(page: Path) -> str:
    """Markdown of everything between the markers of a page: a summary on the front page, all results on the other."""
    if page.parent == ROOT:
        return summary(read(RESULTS / "cpu.json"))
    parts = [] if list(RESULTS.glob("gpu*.json")) else ["No GPU has been measured yet."]
    for path in sorted(RESULTS.glob("*.json"), key=lambda path: path.stem):
        document = read(path)
        where = document["environment"]
        device = f"{where['cpu']}, {where['threads']} threads" if where["device"] == "cpu" else where["device"]
        parts.append(f"**{path.name}.** {device}, {where['date'][:10]}: `{document['command']}`")
        parts.append(_measurements(document))
        for name, caption in CAPTIONS.items():
            picture = FIGURES / f"{path.stem}-{name}.png"
            if picture.exists():
                parts.append(f"![{caption}]({Path(os.path.relpath(picture, page.parent)).as_posix()})")
    return "\n\n".join(parts)


def summary(document: Document) -> str:
    """How much faster a step is than that of each trainer, and how much less memory it takes, over all cases."""
    where, cases = document["environment"], document["cases"]
    entries = [case["implementations"] for case in cases if case["case"]["mode"] == "step"]
    rows = []
    for name in TRAINERS:
        both = [(case["ours"], case[name]) for case in entries if name in case]
        times = [1 / theirs["ours_to_this"] for _, theirs in both if "ours_to_this" in theirs]
        key = "memory_ratio_to_eager"
        memory = [theirs[key] / ours[key] for ours, theirs in both if key in ours and key in theirs]
        ranges = (f"{min(ratios):.1f} to {max(ratios):.1f} x" if ratios else "" for ratios in (times, memory))
        rows.append((both[0][1]["title"], *ranges))
    heads = len({(case["case"]["hidden_size"], case["case"]["vocab_size"]) for case in cases})
    return f"""\
Steps of {heads} models' heads in float32 and bfloat16 on {where["cpu"]}, {where["threads"]} threads, no GPU. A number
is the other's median time, or peak memory, over that of this package; a range is that over the cases:

{table(("this package against", "faster", "less memory"), rows)}"""


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


if __name__ == "__main__":
    main()

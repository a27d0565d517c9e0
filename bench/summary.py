"""The README's Measurements section, from the committed results: `python bench/summary.py` rewrites it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_kernels.benchmarks.document import Document, read
from grpo_kernels.benchmarks.show import memory_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS, FIGURES = ROOT / "bench" / "results", ROOT / "bench" / "figures"
README = ROOT / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
RIVALS = ("eager", "compiled", "trl", "liger", "liger-native", "verl", "verl-torch", "cut-cross-entropy", "quack")
CAPTIONS = {
    "time": "Time of a step over that of the three bare products",
    "time-forward": "The same for log-probabilities alone",
    "errors": "Errors against float64",
    "memory": "Peak memory against the length of completions; a cross is out of memory",
    "idle": "Time against the share of prompts whose rewards are all equal",
    "scaling-tokens": "Time against the number of tokens",
    "kept": "Time with sampling masks, beside the bandwidth bound",
}


def section() -> str:
    """Markdown of everything between the markers."""
    parts = []
    if not list(RESULTS.glob("gpu*.json")):
        parts.append("No GPU has been measured yet.")
    for path in sorted(RESULTS.glob("*.json"), key=lambda path: path.stem):
        document = read(path)
        parts += [f"**{path.name}.** {_machine(document)}", *_tables(document), *_pictures(path.stem)]
    return "\n\n".join(parts)


def main() -> None:
    text = README.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    README.write_text(f"{before}{BEGIN}\n{section()}\n{END}{after}")


def _machine(document: Document) -> str:
    """The device, the date and the command; driver and versions are in the JSON."""
    found = document["environment"]
    device = f"{found['cpu']}, {found['threads']} threads" if found["device"] == "cpu" else found["device"]
    return f"{device}, {found['date'][:10]}: `{document['command']}`"


def _tables(document: Document) -> list[str]:
    """Of the heads of real models with a KL term; of the times of a sweep the pictures say more."""
    if "runs" in document:
        return [_learning(document)]
    masked = [found for found in document["cases"] if found["case"].get("kept_ids")]
    steps = [found for found in document["cases"] if found["case"]["mode"] == "step" and found["case"]["beta"]]
    steps = [found for found in steps if found not in masked]
    is_sweep = any(found["case"]["head"] == "custom" for found in steps)
    return [
        text for text in ("" if is_sweep else _times(steps), _memory(steps), _idle(document), _masks(masked)) if text
    ]


def _times(cases: Sequence[Document]) -> str:
    timed = [found for found in cases if "seconds" in found["implementations"].get("ours", {})]
    rivals = [
        name for name in RIVALS if any("ours_to_this" in found["implementations"].get(name, {}) for found in timed)
    ]
    rows = []
    for found in timed:
        ours = found["implementations"]["ours"]
        times = ours["seconds"]
        median = f"{times['median'] * 1e3:,.0f} ({times['min'] * 1e3:,.0f} to {times['max'] * 1e3:,.0f})"
        ratios = [_ratio(found["implementations"].get(name, {})) for name in rivals]
        rows.append([_shape(found), found["case"]["dtype"], median, f"{ours['ratio_to_floor']:.2f}", *ratios])
    if not rows:
        return ""
    titles = [_title(timed, name) for name in rivals]
    header = ["head (N, H, V)", "type", "ours, ms", "of the three products", *(f"of {title}" for title in titles)]
    what = "the median of ours (and its spread), and its ratio to the three bare products and to each rival"
    return f"Forward and backward: {what}, in its fastest setting:\n\n{_table(header, rows)}"


def _memory(cases: Sequence[Document]) -> str:
    weighed = [found for found in cases if "peak_bytes" in found["implementations"].get("ours", {})]
    rivals = [name for name in RIVALS if any(memory_text(found["implementations"].get(name, {})) for found in weighed)]
    rows = []
    for found in weighed:
        peaks = [memory_text(found["implementations"].get(name, {})) for name in ("ours", *rivals)]
        ratio = found["implementations"]["ours"].get("memory_ratio_to_eager")
        rows.append([_shape(found), found["case"]["dtype"], *peaks, f"{ratio:.3f}" if ratio else ""])
    if not rows:
        return ""
    header = ["head (N, H, V)", "type", "ours", *(_title(weighed, name) for name in rivals), "ours of eager"]
    return f"Peak memory of a step beyond its inputs and gradients, MiB:\n\n{_table(header, rows)}"


def _idle(document: Document) -> str:
    """Half the prompts without a gradient, to none: each in units of the floor of its own process."""
    found: dict[tuple[str, str, float], dict[str, Any]] = {}
    for case in document["cases"]:
        if case["case"]["beta"] == 0.0 and "ratio_to_floor" in case["implementations"].get("ours", {}):
            found[_shape(case), case["case"]["dtype"], case["case"]["idle_share"]] = case["implementations"]
    rows = []
    for (shape, dtype, share), half in found.items():
        if share == 0.5 and (shape, dtype, 0.0) in found:
            dense = found[shape, dtype, 0.0]["ours"]["ratio_to_floor"]
            names = ("ours", "ours-unscored")
            rows.append([shape, dtype, *(f"{half[name]['ratio_to_floor'] / dense:.2f}" for name in names)])
    if not rows:
        return ""
    header = ["head (N, H, V)", "type", "every token scored", "`score_inactive=False`"]
    return f"Half the prompts with equal rewards, beta 0, of the time without such prompts:\n\n{_table(header, rows)}"


def _masks(cases: Sequence[Document]) -> str:
    """Of the first head: the sweep over H is in the picture."""
    rows = []
    for found in cases:
        case, of = found["case"], found["implementations"]
        if case["head"] == "custom" or "seconds" not in of.get("ours", {}):
            continue
        medians = [of[name]["seconds"]["median"] for name in ("ours", "ours-unmasked")]
        kept = f"{case['kept_ids']}" + (
            f", of {case['masked_share']:.0%} of the tokens" if case["masked_share"] < 1 else ""
        )
        pairs = case["tokens"] * case["masked_share"] * case["kept_ids"]
        memory = f"{of['ours']['peak_bytes'] / pairs:.0f}" if "peak_bytes" in of["ours"] else ""
        what = "scoring" if case["mode"] == "forward" else "step"
        rows.append(
            [
                _shape(found),
                case["dtype"],
                what,
                kept,
                f"{medians[0] * 1e3:,.0f}",
                f"{medians[0] / medians[1]:.3f}",
                memory,
            ]
        )
    if not rows:
        return ""
    header = ["head (N, H, V)", "type", "call", "kept ids", "ms", "of the call without mask", "bytes per kept id"]
    what = "Sampling masks, against the same call without; memory is beyond inputs and gradients"
    return f"{what}:\n\n{_table(header, rows)}"


def _learning(document: Document) -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for run in document["runs"]:
        ends = f"{run['pass_at_1_before']:.3f} to {run['pass_at_1_after']:.3f}"
        rows.setdefault((run["loss_type"], "ours" if run["loss"] == "fused" else "eager"), []).append(ends)
    seeds = sorted({run["seed"] for run in document["runs"]})
    header = ["loss_type", "loss", *(f"seed {seed}" for seed in seeds)]
    steps = len(document["runs"][0]["reward"])
    what = f"`grpo-kernels train` with its defaults, held-out pass@1 before and after {steps} optimizer steps"
    return f"{what}:\n\n{_table(header, [[*key, *ends] for key, ends in rows.items()])}"


def _pictures(stem: str) -> list[str]:
    if (FIGURES / f"{stem}.png").exists():
        return [f"![Learning curves]({_link(f'{stem}.png')})"]
    drawn = {caption: f"{stem}-{name}.png" for name, caption in CAPTIONS.items()}
    return [f"![{caption}]({_link(name)})" for caption, name in drawn.items() if (FIGURES / name).exists()]


def _link(name: str) -> str:
    return (FIGURES / name).relative_to(ROOT).as_posix()


def _shape(found: Document) -> str:
    case = found["case"]
    return f"{case['head']} ({case['tokens']}, {case['hidden_size']}, {case['vocab_size']})"


def _title(cases: Sequence[Document], name: str) -> str:
    title = next(found["implementations"][name]["title"] for found in cases if name in found["implementations"])
    return str(title)


def _ratio(report: dict[str, Any]) -> str:
    if "ours_to_this" in report:
        return f"{report['ours_to_this']:.2f}"
    return report.get("error", "").split(":")[0]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()

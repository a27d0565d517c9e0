"""The pictures and tables of the committed results: `make figures`.

Pictures go to bench/figures, named after their file of results: cpu.json gives cpu-time.png, cpu-errors.png, ... Tables
go between the markers of README.md and bench/README.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from grpo_kernels.benchmarks.figures import GREY, HEADS, OURS, STYLE, draw, save, sheet
from grpo_kernels.benchmarks.machine import Document, read
from grpo_kernels.benchmarks.show import memory_text, table

ROOT = Path(__file__).resolve().parent.parent
RESULTS, FIGURES = ROOT / "bench" / "results", ROOT / "bench" / "figures"
PAGES = (ROOT / "README.md", ROOT / "bench" / "README.md")
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
# The eager loss is drawn below, wide and pale: what coincides is seen to coincide.
LOOKS = {
    "eager": {"color": GREY, "alpha": 0.45, "linewidth": 4, "solid_capstyle": "round"},
    "fused": {"color": OURS, "linewidth": 1},
}
SMOOTHING = 20  # optimizer steps


def main() -> None:
    for path in sorted(RESULTS.glob("*.json")):
        document = read(path)
        if "runs" in document:
            written = [save(learning(document), FIGURES / f"{path.stem}.png")]
        else:
            written = draw(document, FIGURES, f"{path.stem}-", HEADS if path.stem.endswith("-sweeps") else ())
        print(f"{path.name}: {', '.join(picture.name for picture in written) or 'nothing to draw'}")
    for page in PAGES:
        text = page.read_text()
        if BEGIN in text:
            before, rest = text.split(BEGIN)
            page.write_text(f"{before}{BEGIN}\n{section(page)}\n{END}{rest.split(END)[1]}")


def section(page: Path) -> str:
    """Markdown of everything between the markers of a page."""
    parts = [] if list(RESULTS.glob("gpu*.json")) else ["No GPU has been measured yet."]
    for path in sorted(RESULTS.glob("*.json"), key=lambda path: path.stem):
        document = read(path)
        where = document["environment"]
        device = f"{where['cpu']}, {where['threads']} threads" if where["device"] == "cpu" else where["device"]
        parts.append(f"**{path.name}.** {device}, {where['date'][:10]}: `{document['command']}`")
        parts += [_learning(document)] if "runs" in document else _tables(document)
        drawn = {"Learning curves": f"{path.stem}.png"}
        drawn |= {caption: f"{path.stem}-{name}.png" for name, caption in CAPTIONS.items()}
        parts += [
            f"![{caption}]({Path(os.path.relpath(FIGURES / name, page.parent)).as_posix()})"
            for caption, name in drawn.items()
            if (FIGURES / name).exists()
        ]
    return "\n\n".join(parts)


# --- tables -----------------------------------------------------------------------------------------------------------


def _tables(document: Document) -> list[str]:
    """Of the heads of real models; of the times of a sweep the pictures say more."""
    cases = [case for case in document["cases"] if not case["case"].get("kept_ids")]
    masked = [case for case in document["cases"] if case["case"].get("kept_ids") and case["case"]["head"] != "custom"]
    steps = [case for case in cases if case["case"]["mode"] == "step" and case["case"]["beta"]]
    timed = [] if any(case["case"]["head"] == "custom" for case in steps) else _with(steps, "seconds")
    weighed = _with(steps, "peak_bytes")
    times = _against(timed, lambda found: f"{found['ours_to_this']:.2f}" if "ours_to_this" in found else "")
    memory = _against(weighed, memory_text)
    return [text for text in (
        _titled(
            "Forward and backward: the median of ours (and its spread), and its ratio to the three bare products and "
            "to each rival, in its fastest setting",
            ["head (N, H, V)", "type", "ours, ms", "of the three products", *(f"of {title}" for title, _ in times)],
            [[*_case(case), _spread(case), f"{case['implementations']['ours']['ratio_to_floor']:.2f}",
              *(cells[i] for _, cells in times)] for i, case in enumerate(timed)],
        ),
        _titled(
            "Peak memory of a step beyond its inputs and gradients, MiB",
            ["head (N, H, V)", "type", "ours", *(title for title, _ in memory), "ours of eager"],
            [[*_case(case), memory_text(case["implementations"]["ours"]), *(cells[i] for _, cells in memory),
              f"{case['implementations']['ours'].get('memory_ratio_to_eager', float('nan')):.3f}".replace("nan", "")]
             for i, case in enumerate(weighed)],
        ),
        _titled(
            "Half the prompts with equal rewards, beta 0, of the time without such prompts",
            ["head (N, H, V)", "type", "every token scored", "`score_inactive=False`"],
            _idle(document),
        ),
        _titled(
            "Sampling masks, against the same call without; memory is beyond inputs and gradients",
            ["head (N, H, V)", "type", "call", "kept ids", "ms", "of the call without mask", "bytes per kept id"],
            [_mask(case) for case in _with(masked, "seconds")],
        ),
    ) if text]  # fmt: skip


def _titled(what: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"{what}:\n\n{table(header, rows)}" if rows else ""


def _with(cases: Sequence[Document], what: str) -> list[Document]:
    return [case for case in cases if what in case["implementations"].get("ours", {})]


def _against(cases: Sequence[Document], text: Callable[[Document], str]) -> list[tuple[str, list[str]]]:
    """(title, a cell per case) of each rival that has one."""
    found = []
    for name in RIVALS:
        entries = [case["implementations"].get(name, {}) for case in cases]
        cells = [text(entry) or entry.get("error", "").split(":")[0] for entry in entries]
        if any(map(text, entries)):
            found.append((next(str(entry["title"]) for entry in entries if "title" in entry), cells))
    return found


def _case(found: Document) -> list[str]:
    case = found["case"]
    return [f"{case['head']} ({case['tokens']}, {case['hidden_size']}, {case['vocab_size']})", case["dtype"]]


def _spread(found: Document) -> str:
    median, low, high = (found["implementations"]["ours"]["seconds"][key] * 1e3 for key in ("median", "min", "max"))
    return f"{median:,.0f} ({low:,.0f} to {high:,.0f})"


def _idle(document: Document) -> list[list[str]]:
    """Half the prompts without a gradient, to none: each in units of the floor of its own process."""
    found = {
        (*_case(case), case["case"]["idle_share"]): case["implementations"]
        for case in _with(document["cases"], "ratio_to_floor")
        if case["case"]["beta"] == 0.0
    }
    rows = []
    for (shape, dtype, share), half in found.items():
        if share == 0.5 and (shape, dtype, 0.0) in found:
            dense = found[shape, dtype, 0.0]["ours"]["ratio_to_floor"]
            ratios = (half[name]["ratio_to_floor"] / dense for name in ("ours", "ours-unscored"))
            rows.append([shape, dtype, *(f"{ratio:.2f}" for ratio in ratios)])
    return rows


def _mask(found: Document) -> list[str]:
    case, ours = found["case"], found["implementations"]["ours"]
    share = f", of {case['masked_share']:.0%} of the tokens" if case["masked_share"] < 1 else ""
    pairs = case["tokens"] * case["masked_share"] * case["kept_ids"]
    call, own = "scoring" if case["mode"] == "forward" else "step", ours["seconds"]["median"]
    ratio = own / found["implementations"]["ours-unmasked"]["seconds"]["median"]
    memory = f"{ours['peak_bytes'] / pairs:.0f}" if "peak_bytes" in ours else ""
    return [*_case(found), call, f"{case['kept_ids']}{share}", f"{own * 1e3:,.0f}", f"{ratio:.3f}", memory]


# --- learning curves --------------------------------------------------------------------------------------------------


def _learning(document: Document) -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for run in document["runs"]:
        ends = f"{run['pass_at_1_before']:.3f} to {run['pass_at_1_after']:.3f}"
        rows.setdefault((run["loss_type"], "ours" if run["loss"] == "fused" else "eager"), []).append(ends)
    seeds = sorted({run["seed"] for run in document["runs"]})
    what = "`grpo-kernels train` with its defaults, held-out pass@1 before and after"
    header = ["loss_type", "loss", *(f"seed {seed}" for seed in seeds)]
    return _titled(
        f"{what} {len(document['runs'][0]['reward'])} optimizer steps",
        header,
        [[*key, *ends] for key, ends in rows.items()],
    )


@rc_context(STYLE)
def learning(document: Document) -> Figure:
    """A panel per kind of loss, a line per seed: the reward of the samples, and held-out pass@1 before and after."""
    figure, axes = sheet(document, "GRPO on two-digit addition, from three seeds: reward, smoothed", 2, 2, 2.4)
    kinds = dict.fromkeys(run["loss_type"] for run in document["runs"])
    for axis, kind in zip(axes.flat, kinds, strict=False):
        ends = []
        for loss, look in LOOKS.items():
            runs = [run for run in document["runs"] if (run["loss_type"], run["loss"]) == (kind, loss)]
            for run in runs:
                windows = (run["reward"][max(0, i - SMOOTHING + 1) : i + 1] for i in range(len(run["reward"])))
                label = (loss if loss == "eager" else "ours") if run is runs[0] else None
                axis.plot([sum(window) / len(window) for window in windows], **look, label=label)
                if loss == "fused":
                    ends.append(f"{run['pass_at_1_before']:.2f} to {run['pass_at_1_after']:.2f}")
        axis.set(title=f"{kind}: held-out pass@1 {', '.join(ends)}", xlabel="optimizer step", ylim=(0, 1))
        axis.legend(loc="lower right", frameon=False)
    return figure


if __name__ == "__main__":
    main()

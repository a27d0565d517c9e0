"""The README's Measurements section, from the committed results: `python bench/summary.py` rewrites it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
RIVALS = {"eager": "eager", "compiled_eager": "compiled eager", "trl": "TRL", "liger": "Liger"}


def section() -> str:
    """Markdown of everything between the markers."""
    times, memory = (json.loads((RESULTS / name).read_text()) for name in ("cpu.json", "memory.json"))
    return "\n\n".join([_machine(times), _times(times), _equal_rewards(times), _memory(memory)])


def main() -> None:
    text = README.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    README.write_text(f"{before}{BEGIN}\n{section()}\n{END}{after}")


def _machine(results: dict[str, Any]) -> str:
    found = results["environment"]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items() if number)
    return (
        f"On a CPU: {found['cpu']}, {found['threads']} threads, {found['cpu_capability']}; {versions}; "
        f"{found['date'][:10]}. GRPO with k3, token level, trained head; forward + backward, medians of interleaved "
        "rounds. No GPU has been measured yet."
    )


def _times(results: dict[str, Any]) -> str:
    rows = []
    for case in results["cases"]:
        found = case["implementations"]
        ours = found["ours"]
        cells = [_shape(case), case["dtype"], f"{ours['seconds']['median']:.2f} s", f"{ours['ratio_to_floor']:.2f}"]
        rows.append(cells + [_ratio(found.get(name, {})) for name in RIVALS])
    header = ["head (N, H, V)", "type", "ours", "of three products", *(f"of {name}" for name in RIVALS.values())]
    return "Time of ours, and its ratio to the three bare products and to each rival:\n\n" + _table(header, rows)


def _equal_rewards(results: dict[str, Any]) -> str:
    rows = []
    for case in results["cases"]:
        if "equal_rewards" not in case:
            continue
        ratio = case["equal_rewards"]["ratio_to_dense"]
        rows.append([_shape(case), case["dtype"], f"{ratio['half_scored']:.2f}", f"{ratio['half_unscored']:.2f}"])
    header = ["head (N, H, V)", "type", "every token scored", "`score_inactive=False`"]
    return "Half the groups with equal rewards, beta 0, of the time without such groups:\n\n" + _table(header, rows)


def _memory(results: dict[str, Any]) -> str:
    measured = results["cases"][0]["implementations"]
    names = {"ours": "ours"} | {name: title for name, title in RIVALS.items() if name in measured}
    rows = []
    for case in results["cases"]:
        found = case["implementations"]
        peaks = [_mebibytes(found.get(name, {})) for name in names]
        rows.append([_shape(case), case["dtype"], *peaks, f"{found['ours']['ratio_to_eager']:.3f}"])
    header = ["head (N, H, V)", "type", *names.values(), "ours of eager"]
    return "Peak memory beyond inputs and gradients, MiB, each in a process of its own:\n\n" + _table(header, rows)


def _shape(case: dict[str, Any]) -> str:
    shape = case["shape"]
    return f"{shape['name']} ({shape['tokens']}, {shape['hidden_size']}, {shape['vocab_size']})"


def _ratio(found: dict[str, Any]) -> str:
    return f"{found['ours_to_this']:.2f}" if "ours_to_this" in found else found.get("missing") or found.get("error", "")


def _mebibytes(found: dict[str, Any]) -> str:
    if "peak_bytes" in found:
        return f"{found['peak_bytes'] / 2**20:,.0f}"
    return "out of memory" if "out of memory" in found.get("error", "") else found.get("missing", "")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()

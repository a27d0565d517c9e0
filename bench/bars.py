"""The targets of this project, against results: the BARS of grpo_kernels/benchmarks/cases.py.

    python bench/bars.py [bench/results/cpu.json ...]       # also the report of bench/gpu.py

Files from one device are taken together. A ratio is one of medians of the same process, or of peak memory. A bar whose
case was not measured says so.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_kernels.benchmarks.cases import BARS, Bar, Case, make_case
from grpo_kernels.benchmarks.machine import OUT_OF_MEMORY, Document, read
from grpo_kernels.benchmarks.show import table

Found = dict[str, dict[str, Any]]
RESULTS = Path(__file__).parent / "results"


def value_of(bar: Bar, document: Document) -> float | None:
    """The value in the first case that has it; None where it was not measured."""
    dense = bar._replace(fields=bar.fields | {"idle_share": 0.0})  # of another process: each in units of its own floor
    values: dict[str, Callable[[Found, Found], float]] = {
        "time": lambda found, _: found[bar.rival]["ours_to_this"],
        "memory": lambda found, _: found["ours"]["peak_bytes"] / found[bar.rival]["peak_bytes"],
        "idle": lambda found, base: found[bar.rival]["ratio_to_floor"] / base["ours"]["ratio_to_floor"],
        "floor": lambda found, _: found[bar.rival]["ratio_to_floor"],
        "kept bytes": lambda found, _: found["ours"]["peak_bytes"] / found["ours"]["pairs"],
        "logps": lambda found, _: found["ours"]["errors"]["logps_max"],
    }
    for found, base in itertools.product(find(bar, document), list(find(dense, document)) or [{}]):
        with contextlib.suppress(KeyError):
            return float(values[bar.what](found, base))
    return None


def find(bar: Bar, document: Document) -> Iterator[Found]:
    """The cases of a bar, whatever their length. A peer that ran out of memory needs more than the device has."""
    wanted = asdict(make_case(bar.shape, bar.dtype, **bar.fields))
    memory = document["environment"].get("device_memory")
    for case in document["cases"]:
        there = asdict(Case(**case["case"]))
        if all(there[name] == value for name, value in wanted.items() if name not in ("head", "length")):
            lost = {"peak_bytes": memory} if memory else {}
            pairs = {"pairs": there["tokens"] * there["kept_ids"]}
            yield {
                name: pairs | one | (lost if OUT_OF_MEMORY in one.get("error", "") else {})
                for name, one in case["implementations"].items()
                if name != "ours" or "error" not in one
            }


def report(document: Document) -> str:
    """A line per bar of the document's kind of device."""
    bars = BARS["cpu" if document["environment"]["device"] == "cpu" else "cuda"]
    rows = [_row(str(bar), value_of(bar, document), bar.limit) for bar in bars]
    if step := document.get("trl_step", {}).get("steps", {}).get("dapo"):  # of bench/trl_step.py
        ours, trl = step["FusedGRPOTrainer"], step["TRL"]
        rows.append(_row("TRL's step, time", ours["of_trl"], 1.0))
        rows.append(_row("TRL's step, memory", ours["peak_bytes"] / trl["peak_bytes"], 1.0))
    return table(("bar", "found", "at most", ""), rows)


def _row(what: str, value: float | None, limit: float) -> list[str]:
    verdict = "not measured" if value is None else "met" if value <= limit else "MISSED"
    return [what, "" if value is None else f"{value:.3g}", f"{limit:.3g}", verdict]


def read_results(path: Path) -> Document:
    """The document of `grpo-kernels bench`, or of bench/gpu.py, which holds such a document."""
    document = read(path)
    if "cases" in document:
        return document
    benches = [document[name] for name in ("targets", "teacher") if name in document]
    return {
        "environment": (benches or [document])[0]["environment"],
        "cases": [case for bench in benches for case in bench["cases"]],
        "trl_step": document.get("trl_step", {}),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [*sorted(RESULTS.glob("cpu*.json"), key=lambda path: len(path.name)), RESULTS / "distillation/cpu.json"]
    parser.add_argument("results", nargs="*", type=Path, default=default)
    documents = [read_results(path) for path in parser.parse_args(arguments).results]
    for device_name in dict.fromkeys(document["environment"]["device"] for document in documents):
        same = [document for document in documents if document["environment"]["device"] == device_name]
        where = same[0]["environment"]
        print(f"{device_name}, {where['cpu']}, {where['date'][:10]}")
        merged = {key: value for document in same for key, value in document.items()}
        print(report(merged | {"environment": where, "cases": [c for document in same for c in document["cases"]]}))


if __name__ == "__main__":
    main()

"""Measurements in a terminal: a table per case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .cases import MODES, Case
from .document import Document
from .limits import way_of

_HEADER = (
    *("", "median ms", "min", "max", "predicted", "to floor", "to eager", "peak MiB", "predicted"),
    *("gradients", "logp", "setting"),
)


def case_table(found: Document) -> str:
    """Time, its spread and ratios, peak memory, errors against float64; or why there is nothing.

    Beside time and memory stands what limits.py predicts for this device, where it has a model. Errors are those of the
    gradients, the larger one, relative to its norm; and the largest of a log-probability, nats.
    """
    case = Case(**found["case"])
    lines = [f"{case}: {MODES[case.mode]}"]
    if "error" in found:
        lines.append(f"  {found['error']}")
    ways = found.get("predicted", {}).get("ways", {})
    modelled = {name: ways.get(way_of(name, case.kept_ids), {}) for name in found["implementations"]}
    rows = [_row(name, report, modelled[name]) for name, report in found["implementations"].items()]
    return "\n".join([*lines, table(_HEADER, rows)])


def headline(environment: Document) -> str:
    """Where and with what, in one line."""
    where = f"{environment['device']}, driver {environment['driver']}" if environment["driver"] else environment["cpu"]
    versions = ", ".join(f"{name} {number}" for name, number in environment["versions"].items() if number)
    return f"{where}, {environment['threads']} threads; {versions}; backends {', '.join(environment['backends'])}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left; a row that is shorter than the header holds a remark at its end."""
    lines = [header, *rows]
    whole = [line for line in lines if len(line) == len(header)]
    widths = [max(len(line[i]) for line in whole) for i in range(len(header))]
    widths[0] = max(len(line[0]) for line in lines)
    padded = (
        [
            cell.rjust(width) if i and len(line) == len(header) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=False))
        ]
        for line in lines
    )
    return "\n".join(("  " + "  ".join(cells)).rstrip() for cells in padded)


def _row(name: str, report: dict[str, Any], predicted: dict[str, Any]) -> list[str]:
    remark = report.get("missing") or report.get("error")
    if "seconds" not in report and "peak_bytes" not in report:
        return [name, remark or report.get("memory_error") or "not measured"]
    times = report.get("seconds", {})
    cells = [f"{times[key] * 1e3:.1f}" if times else "" for key in ("median", "min", "max")]
    cells.append(f"{predicted['seconds'] * 1e3:.1f}" if times and predicted else "")
    cells += [f"{report[key]:.2f}" if key in report else "" for key in ("ratio_to_floor", "ratio_to_eager")]
    cells.append(memory_text(report))
    weighed = "peak_bytes" in report and predicted
    cells.append(f"{predicted['peak_bytes'] / 2**20:,.0f}" if weighed else "")
    errors = report.get("errors") or {}
    for names in (("dhidden", "dweight"), ("logps_max",)):
        found = [errors[name] for name in names if name in errors]
        cells.append(f"{max(found):.1e}" if found else "")
    return [name, *cells, report.get("setting", "")]


def memory_text(report: dict[str, Any]) -> str:
    """Peak memory in MiB, or that it was out of memory."""
    if "peak_bytes" in report:
        return f"{report['peak_bytes'] / 2**20:,.0f}"
    return report.get("memory_error", "").split(":")[0]

"""Measurements as tables, in a terminal and in Markdown: one form for both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .cases import MODES, Case
from .machine import Document

_HEADER = (
    *("", "median ms", "min", "max", "to floor", "to eager", "peak MiB", "gradients", "logp"),
    "why there is none",
)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown with aligned columns: the first and the last to the left, the last one as wide as it needs."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    widths[-1] = max(3, len(header[-1]))
    lines = [header, ["-" * max(3, width) for width in widths], *rows]
    last = len(header) - 1
    return "\n".join(
        "| "
        + " | ".join(
            cell.rjust(w) if 0 < i < last else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in lines
    )


def case_table(found: Document) -> str:
    """Time, its spread and ratios, peak memory, errors against float64; or why there is nothing.

    Errors are those of the gradients, the larger one, relative to its norm; and the largest of a log-probability, nats.
    """
    case = Case(**found["case"])
    lines = [f"{case}: {MODES[case.mode]}", *([found["error"]] if "error" in found else [])]
    rows = [_row(name, report) for name, report in found["implementations"].items()]
    return "\n".join([*lines, *([table(_HEADER, rows)] if rows else [])])


def headline(environment: Document) -> str:
    """Where and with what, in one line."""
    where = f"{environment['device']}, driver {environment['driver']}" if environment["driver"] else environment["cpu"]
    versions = ", ".join(f"{name} {number}" for name, number in environment["versions"].items() if number)
    return f"{where}, {environment['threads']} threads; {versions}; backends {', '.join(environment['backends'])}"


def memory_text(report: dict[str, Any]) -> str:
    """Peak memory in MiB, or that it was out of memory."""
    if "peak_bytes" in report:
        return f"{report['peak_bytes'] / 2**20:,.0f}"
    return str(report.get("memory_error", "").split(":")[0])


def _row(name: str, report: dict[str, Any]) -> list[str]:
    times, errors = report.get("seconds", {}), report.get("errors") or {}
    cells = [f"{times[key] * 1e3:.1f}" if times else "" for key in ("median", "min", "max")]
    cells += [f"{report[key]:.2f}" if key in report else "" for key in ("ratio_to_floor", "ratio_to_eager")]
    cells.append(memory_text(report))
    for names in (("dhidden", "dweight"), ("logps_max",)):
        found = [errors[quantity] for quantity in names if quantity in errors]
        cells.append(f"{max(found):.1e}" if found else "")
    nothing = "" if "peak_bytes" in report else report.get("memory_error") or "not measured"
    why = report.get("missing") or report.get("error") or ("" if times else nothing)
    return [name, *cells, why]

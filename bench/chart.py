"""The chart of the front page: time and peak memory of a step, ours and others', as an SVG.

It is drawn to be read at a width of 400 pixels, has a background of its own, and takes dark colours where the reader's
system is dark. It is text, so `make check-figures` compares it like a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape

from grpo_kernels.commands.bench.machine import OUT_OF_MEMORY, Report

WIDTH, ROW, BAR = 560, 23, 14  # pixels: width of the picture, height of a row and of a bar
Reports = Mapping[str, Report]  # by implementation
LETTER = 7.6  # mean width of a letter
NUMBER = 78  # width of the number after a bar
CUT = 4.0  # times ours; a longer time has a bar with a gap
STYLE = """\
text { font: 15px system-ui, -apple-system, "Segoe UI", "Liberation Sans", Arial, sans-serif; fill: #1f2328 }
.title, .ours text { font-weight: 600 }
.quiet { fill: #59636e }
.paper { fill: #ffffff }
rect.bar { fill: #9aa4ae }
.ours rect.bar { fill: #d1410c }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.quiet { fill: #9198a1 }
.paper { fill: #0d1117 }
rect.bar { fill: #6a737d }
.ours rect.bar { fill: #f0733d }
}"""


def chart(panels: Mapping[str, Reports], names: Mapping[str, str]) -> str:
    """Returns the SVG. panels: titles, and reports by implementation; names: implementations to show, with labels."""
    label_width = 14 + round(LETTER * max(map(len, names.values())))
    column_width = (WIDTH - label_width) // 2
    columns, longest = (label_width, label_width + column_width), column_width - NUMBER
    lines, y = [], 8
    for title, reports in panels.items():
        lines.append(_text(8, y + 16, title, "title"))
        lines += [_text(x, y + 39, label, "quiet") for x, label in zip(columns, ("time", "peak memory"), strict=True)]
        y += 46
        for row in _rows({name: reports[name] for name in names if name in reports}, names, columns, longest, y):
            lines.append(row)
            y += ROW
        y += 14
    start = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}">'
    background = '<rect class="paper" width="100%" height="100%"/>'
    return "\n".join((start, f"<style>\n{STYLE}\n</style>", background, *lines, "</svg>\n"))


def _rows(reports: Reports, names: Mapping[str, str], columns: tuple[int, int], longest: int, y: int) -> Iterator[str]:
    """Yields a row for each implementation, the fastest on top and those without a time at the end, from y on."""
    seconds = {name: report["seconds"]["median"] for name, report in reports.items() if "seconds" in report}
    reasons = {name: _reason(report, "error") for name, report in reports.items() if name not in seconds}
    reasons = {name: reason for name, reason in reasons.items() if reason}
    peaks = {name: reports[name]["peak_bytes"] for name in (*seconds, *reasons) if "peak_bytes" in reports[name]}
    slowest, largest = min(max(seconds.values()), CUT * seconds["ours"]), max(peaks.values())
    for i, name in enumerate((*sorted(seconds, key=seconds.__getitem__), *reasons)):
        top = y + ROW * i
        parts = [_text(8, top + 16, names[name])]
        if name in seconds:
            parts += _bar(columns[0], top, longest, seconds[name] / slowest, _time(seconds[name]))
        else:
            parts.append(_text(columns[0], top + 16, reasons[name], "quiet"))
        if name in peaks:
            parts += _bar(columns[1], top, longest, peaks[name] / largest, _memory(peaks[name]))
        else:
            reason = _reason(reports[name], "memory_error") or "not measured"
            parts.append(_text(columns[1], top + 16, reason, "quiet"))
        yield f"<g{_class('ours' * (name == 'ours'))}>{''.join(parts)}</g>"


def _reason(report: Report, key: str) -> str:
    """Returns why an implementation that runs on this machine has no number, or ""."""
    if report.get(key, "").startswith(OUT_OF_MEMORY):
        return OUT_OF_MEMORY
    return f"only {report['fewer_tokens']:,} tokens" if "fewer_tokens" in report and key == "error" else ""


def _bar(x: int, top: int, longest: int, share: float, number: str) -> Iterable[str]:
    """Returns a bar, this share of the longest one, and its number; a share above 1 has the longest bar, with a gap."""
    length = max(2, round(longest * min(share, 1.0)))
    bar = f'<rect class="bar" x="{x}" y="{top + (ROW - BAR) // 2}" width="{length}" height="{BAR}"/>'
    gap = f'<path class="paper" d="M{x + length - 16} {top}l-6 {ROW}h5l6-{ROW}z"/>' if share > 1 else ""
    return bar, gap, _text(x + length + 6, top + 16, number)


def _text(x: int, y: int, text: str, kind: str = "") -> str:
    """Returns a text element."""
    return f'<text x="{x}" y="{y}"{_class(kind)}>{escape(text)}</text>'


def _class(name: str) -> str:
    """Returns the attribute of a class, or nothing."""
    return f' class="{name}"' if name else ""


def _time(seconds: float) -> str:
    """Returns a time in s or ms."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _memory(size: float) -> str:
    """Returns a size in GiB or MiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"

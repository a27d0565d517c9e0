"""Numbers that a page quotes from bench/results: each is followed by a comment that says where it comes from.

    1.33<!-- gpu/h100-lab.json > cases > [case.head=llama-3-8b] > implementations > sparse > ratio_to_floor : .2f -->

The steps of a path are keys and indices, `*` for all entries, [a.b=c; d] for the entries that have c at a.b and any
value at d, and median() for the median of a list. Several numbers are written as a range, "1.4 to 1.7". `A / B` is the
quotient of two paths, or of a number and a path, number by number. After the colon come a format of Python's and, if
the page gives the number in one, a unit of UNITS. The contents of files are compared and formatted, never executed.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator
from datetime import date
from itertools import zip_longest
from pathlib import Path
from typing import Any

UNITS = {"": 1.0, "%": 0.01, "ms": 1e-3, "minutes": 60.0, "MiB": 2.0**20, "GiB": 2.0**30}
_NUMBER = r"\d(?:[\d,]*\d)?(?:\.\d+)?(?:e[-+]?\d+)?"
_RANGE = rf"{_NUMBER}(?:\s+to\s+{_NUMBER})?"
_QUOTE = re.compile(rf"({_RANGE})<!--\s+(\S+\.json)\s+>\s+(.*?)\s+:\s+(\S+?)(?:\s+(\S+))?\s+-->", re.DOTALL)
# Text outside of sentences: code, addresses, comments, and tables that are generated as a whole.
_WRITTEN = r"<!-- (?:results:begin|table) -->.*?<!-- (?:results:end|end of table) -->"
_ASIDE = rf"{_WRITTEN}|^```.*?^```|^ {{4}}\S[^\n]*|`[^`]*`|\]\([^)]*\)|<!--.*?-->"
# Names that a version or a setting follows.
_NAMES = (
    r"TRL|vLLM|SGLang|Liger|verl|torch|Triton|CUDA|Python|OpenRLHF|capability|section|clip|beta|temperature|top_p|min_p"
)
_NAMED = re.compile(rf"\b(?:{_NAMES})[\s|]+$")
_UNIT = re.compile(r"\s*(?:%|(?:x(?!\s*\d)|F|s|ms|us|seconds|[KMG]iB|times)\b)")


def text_of(document: Any, expression: str, form: str, unit: str = "") -> str:
    """Returns the number at an expression as text, or the range of several; LookupError where there is none."""
    numbers = sorted(x / UNITS[unit] for x in _numbers(document, expression))
    return " to ".join(dict.fromkeys(format(x, form) for x in (numbers[0], numbers[-1])))


def filled(page: str, results: Path) -> tuple[str, list[str]]:
    """Returns a page with the numbers of its files, and a line for each number whose file or field is missing."""
    problems: list[str] = []

    def number(match: re.Match[str]) -> str:
        written, name, expression, form, unit = match.groups()
        try:
            text = text_of(json.loads((results / name).read_text()), " ".join(expression.split()), form, unit or "")
            if not re.fullmatch(_RANGE, text):
                raise ValueError(f"{form} gives {text!r}, which cannot be read as a number")
        except (OSError, LookupError, TypeError, ValueError, ZeroDivisionError) as error:
            problems.append(f"{_line(page, match)}: {written}: {name}: {error}")
            return match[0]
        same = text == " ".join(written.split())  # a range may be on two lines
        return match[0] if same else text + match[0].removeprefix(written)

    return _QUOTE.sub(number, page), problems


def differences(page: str, new_page: str) -> list[str]:
    """Returns a line for each number of a page that is not that of its file, and one for the first line that differs
    otherwise.

    `new_page` is the page as `filled` returns it, with the tables that its files give.
    """
    texts, numbers = [page, new_page], []
    old_quotes, new_quotes = ([*_QUOTE.finditer(text)] for text in texts)
    if len(old_quotes) == len(new_quotes):  # else one is in a table, which its file replaces
        pairs = [(old, new) for old, new in zip(old_quotes, new_quotes, strict=True) if old[1] != new[1]]
        numbers = [f"{_line(page, old)}: {old[1]}, which is {new[1]} in {old[2]}" for old, new in pairs]
        texts = [_QUOTE.sub("", text) for text in texts]
    lines = zip_longest(*(text.split("\n") for text in texts))
    tables = [f"{i}: its files give {(new or old)[:120]!r}" for i, (old, new) in enumerate(lines, 1) if old != new]
    return numbers + tables[:1]


def unquoted(page: str, exceptions: tuple[str, ...]) -> Iterator[str]:
    """Yields a line for each measured number that no comment follows, or one that cannot be read.

    A number is measured if it has decimals or a unit, except for versions and settings, which follow their name, and
    `exceptions`, pieces of text that need no comment.
    """
    prose = re.sub("|".join([_QUOTE.pattern, _ASIDE, *map(re.escape, exceptions)]), _blank, page, flags=re.M | re.S)
    for match in re.finditer(rf"(?<![\w.^/:-]){_RANGE}(?![\w^-]|\.\d)", prose):
        measured = "." in match[0] or _UNIT.match(prose, match.end()) or page.startswith("<!--", match.end())
        if measured and not _NAMED.search(prose[: match.start()][-30:]):
            yield f"{_line(page, match)}: {match[0]} names no file"


def _blank(match: re.Match[str]) -> str:
    """Returns spaces for the characters of a match, and its line breaks."""
    return re.sub(r"\S", " ", match[0])


def _line(page: str, match: re.Match[str]) -> int:
    """Returns the number of the line in which a match begins."""
    return page.count("\n", 0, match.start()) + 1


def generations(results: Path, digest: str | None) -> tuple[list[str], list[str]]:
    """Returns a line for each revision whose results are of other code than today's, and a line for each file that does
    not say of which code it is, or is no JSON object."""
    files_by_revision: dict[str, list[tuple[date, str]]] = {}
    problems = []
    for path in sorted(results.rglob("*.json")):
        name = path.relative_to(results).as_posix()
        try:
            document = json.loads(path.read_text())
        except ValueError as error:
            problems.append(f"{name}: {error}")
            continue
        if not isinstance(document, dict):
            problems.append(f"{name} holds a {type(document).__name__}; expected an object")
            continue
        parts = [part for part in (document, *document.values()) if isinstance(part, dict)]
        environment = next((part["environment"] for part in parts if "digest" in part.get("environment", {})), None)
        if environment is None:
            problems.append(f"{name} does not say of which code it is")
        elif digest is None or environment["digest"] != digest:
            entry = date.fromisoformat(environment["date"][:10]), name
            files_by_revision.setdefault(environment["revision"] or "that was not recorded", []).append(entry)
    lines = []
    for revision, entries in sorted(files_by_revision.items(), key=lambda item: min(item[1])):
        days = " to ".join(dict.fromkeys(f"{day.day} {day:%B %Y}" for day in (min(entries)[0], max(entries)[0])))
        files = ", ".join(f"[{name}](results/{name})" for _, name in entries)
        lines.append(f"- {days}, revision {revision}: {files}")
    return lines, problems


def _numbers(document: Any, expression: str) -> list[float]:
    """Returns the numbers at an expression: a path, or a quotient of paths."""
    numbers, *divisors = (_at(document, part) for part in expression.split(" / "))
    for divisor in divisors:
        count, divisor_count = len(numbers), len(divisor)
        if 1 < min(count, divisor_count) != max(count, divisor_count):
            raise LookupError(f"{count} numbers over {divisor_count} at {expression}")
        numbers = [numbers[i % count] / divisor[i % divisor_count] for i in range(max(count, divisor_count))]
    return numbers


def _at(document: Any, path: str) -> list[float]:
    """Returns the numbers at a path; LookupError where there is nothing, or something else."""
    if re.fullmatch(_NUMBER, path):
        return [float(path)]
    nodes = [document]
    for step in path.split(" > "):
        nodes = [child for node in nodes for child in _step(node, step)]
        if not nodes:
            raise LookupError(f"nothing at {step} of {path}")
    if not all(isinstance(node, int | float) and math.isfinite(node) for node in nodes):
        raise LookupError(f"no number at {path}")
    return nodes


def _step(node: Any, step: str) -> list[Any]:
    """Returns the values that a step of a path leads to from a node."""
    entries = list(node.values()) if isinstance(node, dict) else node
    if not isinstance(entries, list):
        return []
    if step == "*":
        return entries
    if step == "median()":
        return [statistics.median(entries)] if entries else []
    if step.startswith("["):
        return [entry for entry in entries if all(_has(entry, part) for part in step.strip("[]").split("; "))]
    key: Any = int(step) if isinstance(node, list) else step
    try:
        return [node[key]]
    except LookupError:
        raise LookupError(f"there is no {step}") from None


def _has(entry: Any, condition: str) -> bool:
    """Returns whether an entry has the value of "a.b=value", or any at "a.b"."""
    path, _, value = condition.partition("=")
    for key in path.split("."):
        if not isinstance(entry, dict) or key not in entry:
            return False
        entry = entry[key]
    return not value or str(entry) == value

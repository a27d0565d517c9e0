"""What the files of a run hold: lines of log.jsonl and samples.jsonl, and objects such as summary.json, read back.

A file may be damaged, or somebody else's: what these functions return has the types that its readers expect.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

Record = dict[str, Any]


def plain(value: Any) -> Any:
    """Returns a value as JSON has it: NaN and infinite numbers as None, what is no value of JSON as text."""
    return json.loads(json.dumps(value, default=str), parse_constant=lambda name: None)


def parse(text: str | bytes) -> Any:
    """Returns the value of a text of JSON; None for one that cannot be read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def parse_record(line: str | bytes) -> Record | None:
    """Returns the record of a line, with an integer as its step; None where the line is none, or holds a value of
    another type than the trainer writes under that name."""
    record = parse(line)
    if not isinstance(record, dict) or not _has_known_types(record):
        return None
    step = record.get("step")
    return {**record, "step": int(step)} if step is not None and 0 <= step < 2**53 else None


def records_of(text: bytes) -> tuple[dict[int, Record], str]:
    """Returns the records of a file by their lines, from 0, and what is to say of the lines that are none, or ""."""
    lines = text.splitlines()
    records = {i: record for i, line in enumerate(lines) if (record := parse_record(line)) is not None}
    odd = [i + 1 for i, line in enumerate(lines) if i not in records and line.strip()]
    problem = f"{len(odd)} of {len(lines):,} lines cannot be read and are left out; the first is line {(odd or [0])[0]}"
    return records, problem if odd else ""


def is_number(value: Any) -> bool:
    """Says whether it is a number that float() takes, NaN and infinity among them."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 1e308
    return isinstance(value, float)


def finite(value: Any) -> float | None:
    """Returns a number to five digits; None for what is none, or not finite."""
    if not is_number(value):
        return None
    value = value if isinstance(value, int) else float(f"{value:.5g}")  # which may round up to infinity
    return value if math.isfinite(value) else None


def counted(count: int, noun: str) -> str:
    """Returns "1 prompt", "2 prompts", "2 processes"."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def _has_known_types(record: Any) -> bool:
    """Says whether its values are numbers or None, but for those of `_TYPES`."""
    return isinstance(record, dict) and all(
        _TYPES[name](value) if name in _TYPES else value is None or is_number(value) for name, value in record.items()
    )


def _is_pass_at_k(value: Any) -> bool:
    return _has_known_types(value) and all(len(k) < 10 and k.isdecimal() and str(int(k)) == k for k in value)


_TYPES: dict[str, Callable[[Any], bool]] = {
    "evaluation": _has_known_types, "rewards": _has_known_types, "pass_at_k": _is_pass_at_k,
    "warnings": lambda value: isinstance(value, list),
    "examples": lambda value: isinstance(value, list) and all(isinstance(x, dict) for x in value),
    **dict.fromkeys(("slowest_reward", "prompt", "completion", "extra"), lambda value: True),
}  # fmt: skip

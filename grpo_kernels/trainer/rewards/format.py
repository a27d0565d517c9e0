"""Reward for the form of a completion: 1.0 or 0.0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .answers import text_of

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]


def has_form(text: str) -> bool:
    """Whether `text` is <think>...</think><answer>...</answer>: each tag once, in order, with blanks alone around the
    blocks. Without a regular expression, so that no text takes longer than another."""
    places = [text.find(tag) for tag in TAGS]
    if any(text.count(tag) != 1 for tag in TAGS) or places != sorted(places):
        return False
    between = text[places[1] + len(TAGS[1]) : places[2]]
    after = text[places[3] + len(TAGS[3]) :]
    return not (text[: places[0]] + between + after).strip()


def compiled(pattern: str) -> re.Pattern[str]:
    """`pattern` as the reward takes it: "." is any character. Raises ValueError where it is no regular expression."""
    try:
        return re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"reward_pattern={pattern!r} is no regular expression: {error}") from None


def format(completions: Sequence[Any], pattern: str | None = None, **_: Any) -> list[float]:
    """1 if the whole completion has the form. `pattern`: a regular expression in place of it; "." is any character."""
    if pattern is None:
        return [float(has_form(text_of(completion))) for completion in completions]
    expression = compiled(pattern)
    return [float(expression.fullmatch(text_of(completion).strip()) is not None) for completion in completions]

"""Generated tasks: rows to train on and rows that are held out, made here without a network.

`arithmetic` is for the small model that is made for it (arithmetic.py); the others are for chat models.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any, TypeAlias

Row: TypeAlias = "dict[str, Any]"
Rows: TypeAlias = tuple[list[Row], list[Row]]  # to train on, held out
ARITHMETIC = "arithmetic"
ARITHMETIC_MODEL = "arithmetic model (sums are written ones first: 40+56= goes on with 69)"
HELD_OUT = 400  # problems of the arithmetic task
LARGEST_ROWS, LARGEST_HELD_OUT = 512, 64


def arithmetic() -> Rows:
    """Returns two-digit additions: all 10,000 in the order of a hash, cut in two. Every run holds out the same ones, so
    that no evaluation, whatever its seed, meets what a model was trained on."""
    rows: list[Row] = [
        {"prompt": f"{a:02d}+{b:02d}=", "answer": str(a + b)[::-1]} for a in range(100) for b in range(100)
    ]
    rows.sort(key=lambda row: hashlib.sha256(row["prompt"].encode()).digest())
    return rows[HELD_OUT:], rows[:HELD_OUT]


def times_table() -> Rows:
    """Returns the 64 products of 2 to 9. The held-out rows are among them: this is a task of memory."""
    rows = [_question(f"What is {a} times {b}?", a * b) for a in range(2, 10) for b in range(2, 10)]
    random.Random("times table").shuffle(rows)  # the first ones are shown, and are not all easy
    return rows, rows[:32]


def largest_number() -> Rows:
    """Asks which of four numbers from 10 to 99 is the largest. No question is in both parts."""
    order = random.Random("largest number")
    questions: dict[str, Row] = {}
    while len(questions) < LARGEST_ROWS + LARGEST_HELD_OUT:
        numbers = order.sample(range(10, 100), 4)
        text = f"Which of the numbers {', '.join(map(str, numbers[:3]))} and {numbers[3]} is the largest?"
        questions[text] = _question(text, max(numbers))
    rows = list(questions.values())
    return rows[LARGEST_HELD_OUT:], rows[:LARGEST_HELD_OUT]


def _question(text: str, answer: int) -> Row:
    return {"prompt": [{"role": "user", "content": f"{text} Answer with the number only."}], "answer": str(answer)}


TASKS: dict[str, Callable[[], Rows]] = {
    "arithmetic": arithmetic, "times-table": times_table, "largest-number": largest_number,
}  # fmt: skip

"""Reward for programs that pass tests: 1.0 if all of them are passed, else 0.0.

The column `tests` holds a list for each row (or its JSON text). A test is data, so that what it expects stays here and
is compared here; the sandbox gets inputs only. A program cannot pass by leaving early, by overwriting functions, or by
objects that equal everything. Three forms:

    {"input": "1 2\\n", "output": "3\\n"}      what the program prints, blanks at ends of lines apart; exit status 0
    {"call": "add(1, 2)", "output": 3}        the value of an expression after the program has run
    "assert add(1, 2) == 3"                   the same, as MBPP writes it; the right side is a literal

Lists and tuples are alike, numbers with a fraction are equal within 1e-6 of their size. Programs may start threads and
write files into their working folder; other processes and sockets (asyncio as well) they cannot have.
"""

from __future__ import annotations

import ast
import json
import math
import os
import queue
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from .answers import text_of
from .sandbox import Limits, Sandbox

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


class Test(NamedTuple):
    """Either `stdin` or `call` is given."""

    stdin: str | None
    call: str | None
    output: Any


def read_test(test: Any) -> Test:
    """Raises: ValueError."""
    if isinstance(test, str):
        try:
            [statement] = ast.parse(test.strip()).body
            assert isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare)
            assert [type(operator) for operator in statement.test.ops] == [ast.Eq]
            return Test(None, ast.unparse(statement.test.left), ast.literal_eval(statement.test.comparators[0]))
        except (AssertionError, SyntaxError, ValueError):
            raise ValueError(f'test {test[:80]!r} is not "assert EXPRESSION == LITERAL"') from None
    if isinstance(test, dict) and "output" in test and ("input" in test) != ("call" in test):
        if "call" in test:
            return Test(None, str(test["call"]), test["output"])
        return Test(str(test["input"]), None, str(test["output"]))
    raise ValueError(f"test {str(test)[:80]!r} has not the keys output and either input or call")


def read_tests(tests: Any) -> list[Test]:
    """Raises: ValueError, also for no test at all: nothing would pass every program."""
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
    except ValueError:
        raise ValueError(f"tests {tests[:80]!r} is no JSON text") from None
    if not isinstance(tests, (list, tuple)) or not tests:
        raise ValueError(f"tests is {str(tests)[:80]!r}, expected a list that is not empty")
    return [read_test(test) for test in tests]


def program_in(text: str) -> str:
    """The last fenced block, or all of the text."""
    blocks = FENCED.findall(text)
    return blocks[-1] if blocks else text


def decode(data: Any) -> Any:
    """What `encode` of inside.py wrote. A program may have written anything: at worst this raises."""
    if not isinstance(data, list):
        return data
    kind, items = data
    return {"list": list, "set": set, "dict": dict}[kind](
        tuple(map(decode, items)) if kind == "set" else map(decode, items)
    )


def same(expected: Any, found: Any) -> bool:
    """Equality of plain values. `found` has been made of JSON text here, so that it has no methods of its own."""
    if isinstance(expected, (list, tuple)):
        alike = isinstance(found, list) and len(found) == len(expected)
        return alike and all(same(*pair) for pair in zip(expected, found, strict=True))
    if isinstance(expected, dict):
        alike = isinstance(found, dict) and found.keys() == expected.keys()
        return alike and all(same(value, found[key]) for key, value in expected.items())
    if isinstance(expected, float) and type(found) in (int, float):
        return math.isclose(expected, found, rel_tol=1e-6, abs_tol=1e-6)
    return bool(expected == found)


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def passes(program: str, tests: Sequence[Test], sandbox: Sandbox) -> bool:
    calls = [test for test in tests if test.call is not None]
    if calls:
        outcome = sandbox.run(program, calls=[str(test.call) for test in calls])
        try:
            values = [decode(answer["value"]) for answer in json.loads(outcome.values)]
            if not all(same(test.output, value) for test, value in zip(calls, values, strict=True)):
                return False
        except (ValueError, TypeError, LookupError, RecursionError):
            return False
    for test in tests:
        if test.stdin is not None:
            outcome = sandbox.run(program, stdin=test.stdin)
            if outcome.status or lines_of(outcome.stdout) != lines_of(test.output):
                return False
    return True


class Code:
    """The reward, with as many sandboxes as it has threads: a share of the cores for each process of this machine.

    Raises:
        SandboxUnavailable: at once, see `Sandbox`.
    """

    __name__ = "code"

    def __init__(self, limits: Limits = Limits(), workers: int | None = None) -> None:  # noqa: B008
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        workers = workers or max(1, min(16, (os.cpu_count() or 1) // ranks))
        self._threads = ThreadPoolExecutor(workers)
        self._all = [Sandbox(limits) for _ in range(workers)]
        self._free: queue.SimpleQueue[Sandbox] = queue.SimpleQueue()
        for sandbox in self._all:
            self._free.put(sandbox)
        self._all[0].run("")  # what this machine refuses or lacks is said now

    def __call__(self, completions: Sequence[Any], tests: Sequence[Any], **_: Any) -> list[float]:
        return list(self._threads.map(self._score, completions, map(read_tests, tests)))

    def _score(self, completion: Any, tests: list[Test]) -> float:
        sandbox = self._free.get()
        try:
            return float(passes(program_in(text_of(completion)), tests, sandbox))
        finally:
            self._free.put(sandbox)

    def close(self) -> None:
        self._threads.shutdown()
        for sandbox in self._all:
            sandbox.close()

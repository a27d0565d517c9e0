"""Reward for programs that pass tests: 1.0 if all of them are passed, else 0.0 (or the share that is passed).

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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from .answers import text_of
from .inside import encode
from .sandbox import WALL_PER_CPU, Limits, Outcome, Sandbox

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


class Test(NamedTuple):
    """Either `stdin` or `call` is given."""

    stdin: str | None
    call: str | None
    output: Any  # of a call: as `encode` (inside.py) returns it


def read_test(test: Any) -> Test:
    """Raises: ValueError."""
    if isinstance(test, str):
        try:
            [statement] = ast.parse(test.strip()).body
            assert isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare)
            assert [type(operator) for operator in statement.test.ops] == [ast.Eq]
            value = ast.literal_eval(statement.test.comparators[0])
            return Test(None, ast.unparse(statement.test.left), encode(value))
        except (AssertionError, SyntaxError, ValueError, TypeError):
            raise ValueError(f'test {test[:80]!r} is not "assert EXPRESSION == LITERAL"') from None
    if isinstance(test, dict) and "output" in test and ("input" in test) != ("call" in test):
        if "call" in test:
            return Test(None, str(test["call"]), encode(test["output"]))
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


def same(expected: Any, found: Any) -> bool:
    """Equality of two results of `encode`; `found` may be anything, since a program may have written it."""
    if isinstance(expected, list):
        return isinstance(found, list) and len(expected) == len(found) and all(map(same, expected, found))
    if isinstance(expected, float) and isinstance(found, (int, float)):
        return math.isclose(expected, found, rel_tol=1e-6, abs_tol=1e-6)
    return bool(expected == found)


def matches(expected: list[Any], line: str) -> bool:
    """Whether a program's line of JSON is the value. Its length is bounded, and with it the time that this takes: in an
    equal value no number is more than three times as long."""
    if len(line) > 3 * len(json.dumps(expected)) + 100:
        return False
    try:
        return same(expected, json.loads(line))
    except (ValueError, ArithmeticError, RecursionError):
        return False


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def verdicts(program: str, tests: Sequence[Test], sandbox: Sandbox) -> Iterator[bool]:
    """Whether the program passes each test, calls first. Where a limit stops it, it fails the tests that are left. All
    tests together may wait as long as one, where a program waits if it takes more time than its CPU time explains."""
    calls = [test for test in tests if test.call is not None]
    most = left = float(sandbox.limits.wall_seconds)

    def run(**given: Any) -> Outcome:
        nonlocal left
        outcome = sandbox.run(program, wall_seconds=left, **given)
        left = min(most, max(0.0, left - outcome.elapsed + WALL_PER_CPU * outcome.seconds))
        return outcome

    stopped = ""
    if calls:
        outcome = run(calls=[str(test.call) for test in calls])
        lines = outcome.values.split("\n", len(calls)) + [""] * len(calls)
        stopped = outcome.reason
        yield from (matches(test.output, line) for test, line in zip(calls, lines, strict=False))
    for test in tests:
        if test.stdin is not None:
            if not stopped:
                outcome = run(stdin=test.stdin)
                stopped = outcome.reason
            yield not stopped and not outcome.status and lines_of(outcome.stdout) == lines_of(test.output)


class Code:
    """The reward, with as many sandboxes as it has threads: a share of the cores for each process of this machine.

    partial_credit: the share of the tests that are passed, where the reward else is 1 for all and 0.

    Raises:
        SandboxUnavailable: at once, see `Sandbox`.
    """

    __name__ = "code"

    def __init__(
        self,
        limits: Limits = Limits(),  # noqa: B008
        workers: int | None = None,
        *,
        partial_credit: bool = False,
    ) -> None:
        self.partial_credit = partial_credit
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
        text = text_of(completion)
        program = [text, *FENCED.findall(text)][-1]  # the last fenced block, or all of the text
        sandbox = self._free.get()
        try:
            found = verdicts(program, tests, sandbox)
            if self.partial_credit:
                return sum(found) / len(tests)
            return float(all(found))
        finally:
            self._free.put(sandbox)

    def close(self) -> None:
        self._threads.shutdown()
        for sandbox in self._all:
            sandbox.close()

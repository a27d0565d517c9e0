"""The tests marked `gpu` for `gpu_report.py`: in an order, and so that one test cannot take the others with it.

A test that hangs, kills its process or breaks the CUDA context costs itself alone: the rest goes on in a new process.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_work import Ended, Work

# Seconds, of one test: one of CUDA's kernels computes for seconds; Triton and torch.compile compile first.
SILENCE, COMPILING = 40.0, 150.0
WORKERS = 8
# The families of thousands come last, and share the processor.
FAMILIES = ("real_vocabulary", "as_exact_as_eager_float32")
# Parts of the names of test functions, most valuable first; "" stands for all others.
ORDER = ("half_precision", "more_logits", "same_bits", "cuda_graph", "streams", "memory", "compile", "", *FAMILIES)
# After one of these every later call of the same process fails.
POISON = re.compile(r"CUDA error|CUDA_ERROR_|unspecified launch failure|illegal (memory access|instruction)")
CORE = ("half_precision", "more_logits", "same_bits", "cuda_graph")
ENDS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"


def rank(test: str) -> int:
    function = test.split("::")[-1].split("[")[0]
    return next((place for place, name in enumerate(ORDER) if name and name in function), ORDER.index(""))


def is_core(test: str) -> bool:
    return ORDER[rank(test)] in CORE


def silence(line: str) -> float:
    """Seconds, after this last line of `pytest -v`: the test that it names is what runs."""
    if line.startswith("[gw"):
        return COMPILING  # of a test that has ended: which others run is not said
    function, _, parameters = line.partition("::")[2].partition("[")
    if function and "compile" not in function and "cuda" in parameters.partition("]")[0].split("-"):
        return SILENCE
    return COMPILING


def concerns(test: str, broken: Sequence[str]) -> bool:
    """Whether a test runs one of these, as in "cuda/linear"; without rows a backend has nothing left."""
    parts = set(test.partition("[")[2].rstrip("]").split("-"))
    pairs = (name.split("/") for name in broken)
    return any(backend in parts and (strategy == "rows" or strategy in parts) for backend, strategy in pairs)


def run(work: Work, tests: Sequence[str], variables: dict[str, str]) -> list[str]:
    """Run them, sorted by `rank`, and leave counts, failures and what was not run in the record; those that passed."""
    outcomes: dict[str, str] = {}
    messages: dict[str, str] = {}
    family = [test for test in tests if ORDER[rank(test)] in FAMILIES]
    alone(work, tests[: len(tests) - len(family)], variables, outcomes, messages)
    if work.environment.get("versions", {}).get("pytest-xdist"):
        together(work, family, variables, outcomes, messages)
    alone(work, [test for test in family if test not in outcomes], variables, outcomes, messages)
    for failure in work.record.get("failed", ()):
        work.record.setdefault("failures", []).append("{how} {test}: {message}".format(**failure))
    if tests and "PASSED" not in outcomes.values():
        work.fail(f"none of {len(tests)} tests passed")
    if len(outcomes) < len(tests):
        work.record["note"] = f"{len(tests) - len(outcomes)} of {len(tests)} not run, for want of time"
    return [test for test, how in outcomes.items() if how == "PASSED"]


def alone(
    work: Work, tests: Sequence[str], variables: dict[str, str], outcomes: dict[str, str], messages: dict[str, str]
) -> None:
    """One after another; what breaks its process is the last of it, and the rest gets a new one."""
    while tests and work.left > 10:
        ended = pytest(work, tests, variables)
        found, said = outcomes_of(ended.output), messages_of(ended.output)
        current = next((test for test in tests if test not in found), None)
        poisoned = next((test for test in found if POISON.search(said.get(test, ""))), None)
        if poisoned is not None:
            done = list(found)
            found = {test: found[test] for test in done[: done.index(poisoned) + 1]}
        elif current and f"\n{current}" in ended.output and work.left > 1:  # begun, and it is not the stage that ended
            found[current] = "HUNG" if ended.stopped else "CRASHED"
            said[current] = ended.stopped or f"exit status {ended.code}"
        outcomes |= found
        messages |= {test: said[test] for test in found if test in said}
        record(work, tests, outcomes, messages)
        if not found:
            if work.left > 1:
                work.expect(ended, "pytest")
            return
        tests = [test for test in tests if test not in found]


def together(
    work: Work, tests: Sequence[str], variables: dict[str, str], outcomes: dict[str, str], messages: dict[str, str]
) -> None:
    """Several processes. What a broken context may have failed has no outcome yet: it gets one alone."""
    if not tests or work.left < 30:
        return
    workers = max(1, min(WORKERS, (os.cpu_count() or 1) // 2))
    ended = pytest(work, tests, variables, "-n", str(workers))
    found, said = outcomes_of(ended.output), messages_of(ended.output)
    innocent = {test: how for test, how in found.items() if how == "PASSED" or not POISON.search(said.get(test, ""))}
    outcomes |= innocent
    messages |= {test: said[test] for test in innocent if test in said}
    record(work, tests, outcomes, messages)


def pytest(work: Work, tests: Sequence[str], variables: dict[str, str], *options: str) -> Ended:
    command = ("-m", "pytest", "-m", "gpu", "-v", "-rfE", "--tb=short", "-p", "no:cacheprovider", *options, *tests)
    return work.python(*command, silence=silence, variables=variables)


def outcomes_of(output: str) -> dict[str, str]:
    """In the order in which they ended: of `pytest -v`, whose lines come as tests do, alone or from workers."""
    plain = rf"^(?P<test>\S+::.+?) (?P<how>{ENDS})\b"
    worker = rf"^\[gw\d+\] (?:\[ *\d+%\] )?(?P<how>{ENDS}) (?P<test>\S+::.+?)\s*$"
    lines = (re.match(plain, line) or re.match(worker, line) for line in output.splitlines())
    return {line["test"]: line["how"] for line in lines if line}


def messages_of(output: str) -> dict[str, str]:
    """Of the summary at the end, which a stopped process never wrote."""
    return dict(re.findall(r"^(?:FAILED|ERROR) (\S+::.+?) - (.*)$", output, re.MULTILINE))


def record(work: Work, tests: Sequence[str], outcomes: dict[str, str], messages: dict[str, str]) -> None:
    bad = [test for test, how in outcomes.items() if how in ("FAILED", "ERROR", "HUNG", "CRASHED")]
    work.record["counts"] = dict(Counter(outcomes.values()))
    work.record["failed"] = [{"test": test, "how": outcomes[test], "message": messages.get(test, "")} for test in bad]
    work.say(", ".join(f"{count} {how.lower()}" for how, count in work.record["counts"].items()) or "nothing yet")
    work.save()

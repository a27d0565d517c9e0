"""`pytest bench`: every implementation of every case of a set, as pytest-benchmark shows and stores benchmarks.

pytest-benchmark times all rounds of one benchmark before the next, and a slow minute of the machine would hit one of
them alone. So the rounds of a case are taken interleaved, in a process of their own
(grpo_kernels/benchmarks/measure.py), and handed over afterwards, as a clock that goes through the times taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from grpo_kernels.benchmarks.document import Document
from grpo_kernels.benchmarks.sets import Job


class RecordedClock:
    """A timer for pytest-benchmark, which reads it before and after each round."""

    def __init__(self) -> None:
        self._readings: Iterator[float] = iter(())

    def load(self, durations: Sequence[float]) -> None:
        self._readings = iter([reading for duration in durations for reading in (0.0, duration)])

    def __call__(self) -> float:
        return next(self._readings)


CLOCK = RecordedClock()


@pytest.mark.benchmark(timer=CLOCK)
def test_bench(job: Job, name: str, measured: Callable[[Job], Document | None], benchmark: Any) -> None:
    found = measured(job)
    if found is None:
        pytest.skip("out of time")
    if "error" in found:
        pytest.fail(found["error"])
    report = found["implementations"][name]
    reason = report.get("missing") or report.get("error")
    if reason:
        fault = name.startswith("ours") and "error" in report and not reason.startswith(("out of memory", "not run"))
        (pytest.fail if fault else pytest.skip)(f"{name}: {reason}")
    benchmark.group = str(job.case)
    benchmark.extra_info.update({key: value for key, value in report.items() if key not in ("seconds", "tried")})
    benchmark.extra_info.update(predicted=found["predicted"], clocks=found.get("clocks"))
    if "seconds" not in report:
        pytest.skip("memory alone is measured of this case, see the table")
    times = report["seconds"]["times"]
    CLOCK.load(times)
    benchmark.pedantic(lambda: None, rounds=len(times))

"""Options of the benchmarks, and the tables at their end."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grpo_kernels.benchmarks.document import Document
from grpo_kernels.benchmarks.run import Run
from grpo_kernels.benchmarks.sets import SETS, Job, jobs
from grpo_kernels.benchmarks.show import case_table, headline

_RUN = pytest.StashKey[Run]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("grpo-kernels")
    group.addoption("--set", default="heads", choices=tuple(SETS), help="which measurements; default: heads")
    group.addoption("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: the GPU, if any")
    group.addoption("--rounds", type=int, help="of interleaved timing")
    group.addoption("--minutes", type=float, help="stop after these")
    group.addoption("--resume", action="store_true", help="keep what the results have, measure the rest")
    group.addoption("--results", type=Path, default=Path("build/bench.json"), help="default: build/bench.json")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One benchmark per case and implementation, those of a case one after another."""
    device = torch.device(metafunc.config.getoption("--device"))
    pairs = [(job, name) for job in jobs(metafunc.config.getoption("--set"), device.type) for name in job.names()]
    metafunc.parametrize(("job", "name"), pairs, ids=[f"{job.case}-{name}" for job, name in pairs])


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest) -> Callable[[Job], Document | None]:
    """The results of a job: measured once, for all its implementations, at the first request."""
    option = request.config.getoption
    run = Run(
        torch.device(option("--device")),
        command=shlex.join(["python", "-m", "pytest", *sys.argv[1:]]),
        output=option("--results"),
        rounds=option("--rounds"),
        minutes=option("--minutes"),
        resume=option("--resume"),
    )
    request.config.stash[_RUN] = run
    return functools.cache(run.measure)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    run = config.stash.get(_RUN, None)
    if run is None:
        return
    terminalreporter.section("measurements")
    terminalreporter.write_line(headline(run.document["environment"]))
    for case in run.document["cases"]:
        terminalreporter.write_line(f"\n{case_table(case)}")
    for case in run.document["not_run"]:
        terminalreporter.write_line(f"not run, out of time: {case}")
    terminalreporter.write_line(f"\nwritten: {run.output}")

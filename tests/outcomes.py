"""A pytest plugin: `--outcomes FILE` gets a line of JSON when a test is selected, when it begins and when it ends.

A run that is cut off has its results there; bench/gpu.py reads them. With it a worker of pytest-xdist ends after a CUDA
error, since every later test of its process would fail, and xdist starts another.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

# All later calls of a process fail.
CUDA_ERROR = ("CUDA error", "CUDA_ERROR_", "illegal memory access", "illegal instruction")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="file for a line of JSON when a test is selected, begins and ends")


def pytest_configure(config: pytest.Config) -> None:
    if file := config.option.outcomes:
        config.pluginmanager.register(Outcomes(file, getattr(config, "workerinput", {}).get("workerid", "")))


class Outcomes:
    """Hooks of the process that runs pytest, or of one of its workers ("gw0", ...), which report to that."""

    def __init__(self, file: Path, worker: str) -> None:
        self.file, self.worker = file, worker
        if not worker:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("")

    def write(self, *tests: str, outcome: str, said: str = "") -> None:
        lines = [json.dumps({"test": test, "outcome": outcome, "said": said}) + "\n" for test in tests]
        with self.file.open("a") as log:
            log.write("".join(lines))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self.worker in ("", "gw0"):
            self.write(*(item.nodeid for item in session.items), outcome="selected")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if not self.worker:
            self.write(nodeid, outcome="begun")

    @pytest.hookimpl(trylast=True)  # after xdist's, which sends the report
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        place = getattr(report.longrepr, "reprcrash", None)
        said = place.message if place else report.longreprtext
        if not self.worker:
            if report.outcome != "passed" or report.when == "call":
                self.write(report.nodeid, outcome=report.outcome, said=said[:300])
        elif report.failed and any(error in said for error in CUDA_ERROR):
            os._exit(1)

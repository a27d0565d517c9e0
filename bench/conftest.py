"""Options of `pytest bench`: a benchmark per case of a set and implementation, those of a case one after another."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels.commands.bench.cases import SETS, jobs
from grpo_kernels.commands.bench.table import select


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --set and --device."""
    parser.addoption("--set", default="quick", choices=tuple(SETS), help="which cases; default: quick")
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.addoption("--device", default=default_device, help="default: the GPU, if any")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes a test for each implementation of each timed job."""
    device = torch.device(metafunc.config.getoption("--device"))
    timed = [job for job in jobs(metafunc.config.getoption("--set"), device.type) if job.rounds != 0]
    steps = [(job.case, name, device) for job in timed for name in select(job.against)]
    metafunc.parametrize(("case", "name", "device"), steps, ids=str)

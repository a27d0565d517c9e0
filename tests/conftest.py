"""Settings of the whole suite: one thread per xdist worker, the same random numbers every time, the backends."""

from __future__ import annotations

import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", "torch"])
def backend(request) -> str:
    """Every backend that runs on a CPU; a missing one is a failure, never a skip."""
    return request.param

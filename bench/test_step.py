"""`pytest bench`: a step of each implementation, as pytest-benchmark times, groups, stores and compares it.

    python -m pytest bench --benchmark-autosave                 # the set quick
    python -m pytest bench --benchmark-compare                  # after a change: beside what was saved last
    python -m pytest bench --set heads --benchmark-columns median,min,max,rounds

Each result is compared with float64 first. The rounds of an implementation follow one another here; `grpo-kernels
bench`, which measured the tables of the README, interleaves them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from grpo_kernels.commands.bench.cases import Case
from grpo_kernels.commands.bench.inputs import Inputs, make_inputs
from grpo_kernels.commands.bench.machine import synchronize
from grpo_kernels.commands.bench.measure import prepare
from grpo_kernels.commands.bench.reference import Reference, off_policy, reference
from grpo_kernels.commands.bench.table import IMPLEMENTATIONS


@lru_cache(maxsize=1)  # tests of one case follow one another
def batch(case: Case, device: torch.device) -> Inputs:
    """Returns the inputs of a case."""
    return off_policy(make_inputs(case, device))


@lru_cache(maxsize=1)
def exact(case: Case, device: torch.device, objective: str) -> Reference | None:
    """Returns the exact result of a case, None without an objective."""
    return None if objective == "none" else reference(batch(case, device), case.mode, objective)


def test_step(case: Case, name: str, device: torch.device, benchmark: Any) -> None:
    inputs, exact_result = batch(case, device), exact(case, device, IMPLEMENTATIONS[name].objective)
    step, report = prepare(name, inputs, case.mode, exact_result, device)
    if step is None and "missing" in report:
        pytest.skip(f"{name}: {report['missing']}")
    assert step is not None, report["error"]
    benchmark.extra_info |= report
    benchmark.group = str(case)
    benchmark(lambda: (step(inputs), synchronize(device)))

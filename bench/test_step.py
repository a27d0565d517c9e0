"""`pytest bench`: a step of each implementation, as pytest-benchmark times, groups, stores and compares it.

    python -m pytest bench --benchmark-autosave                 # the set quick
    python -m pytest bench --benchmark-compare                  # after a change: beside what was saved last
    python -m pytest bench --set heads --benchmark-columns median,min,max,rounds

Each result is compared with float64 first. Rounds of one implementation follow one another here; `grpo-kernels bench`,
which interleaves them, is behind the README's tables.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from grpo_kernels.benchmarks.cases import Case
from grpo_kernels.benchmarks.implementations import IMPLEMENTATIONS, Unsupported
from grpo_kernels.benchmarks.inputs import Inputs, make_inputs
from grpo_kernels.benchmarks.machine import synchronize
from grpo_kernels.benchmarks.reference import Reference, errors, off_policy, reference, why_wrong


@functools.lru_cache(maxsize=1)  # tests of one case follow one another
def batch(case: Case, device: torch.device) -> Inputs:
    return off_policy(make_inputs(case, device))


@functools.lru_cache(maxsize=1)
def exact(case: Case, device: torch.device, objective: str) -> Reference:
    return reference(batch(case, device), case.mode, objective)


def test_step(case: Case, name: str, device: torch.device, benchmark: Any) -> None:
    implementation = IMPLEMENTATIONS[name]
    if reason := implementation.unavailable_reason(device, case.torch_dtype):
        pytest.skip(f"{name}: {reason}")
    inputs = batch(case, device)
    try:
        step = implementation.make_step(inputs, case.mode)
    except Unsupported as unsupported:
        pytest.skip(f"{name}: {unsupported}")

    def timed() -> object:
        result = step(inputs)
        synchronize(device)
        return result

    if implementation.objective != "none":
        right, result = exact(case, device, implementation.objective), step(inputs)
        found = errors(right, result)
        assert why_wrong(right, result, found, case.torch_dtype) is None
        benchmark.extra_info |= {"errors": found}
    benchmark.group = str(case)
    benchmark(timed)

"""Interleaved timing: A B C ... A B C ... in one process, so that a slow minute of the machine hits everybody alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from report import synchronize


def seconds(step: Callable[[], object], device: torch.device) -> float:
    """Wall-clock time of one call; what it returns is freed outside the time."""
    gc.collect()
    synchronize(device)
    start = time.perf_counter()
    result = step()
    synchronize(device)
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def interleave(steps: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """`rounds` times of every step, in turn. Each step has to have run once before."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(seconds(step, device))
    return times


def summary(times: list[float]) -> dict[str, Any]:
    """Median, spread and the raw times, in seconds."""
    return {"median": statistics.median(times), "min": min(times), "max": max(times), "times": times}

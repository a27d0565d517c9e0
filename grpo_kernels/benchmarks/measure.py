"""One case, in one process: every implementation is checked, then timed in interleaved rounds.

A B C, B C A, C A B, ...: a slow minute of the machine hits everybody alike.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .cases import Case
from .implementations import Result, Step, Unserved, implementations
from .inputs import Inputs, make_inputs
from .machine import OUT_OF_MEMORY, clocks, describe, limit_memory, peak, restart_peak, synchronize
from .process import Died, Tell, apart
from .reference import Reference, errors, off_policy, reference, why_wrong
from .witness import witness

Found = dict[str, dict[str, Any]]
NOT_RUN = "not run: out of time"
SHORT_S = 1.0  # of a call: repeated whoever makes it
FAR = 1.5  # times the fastest
BASES = ("ours", "floor", "eager", "ours-unmasked")  # of ratios
SILENCE_S = {"cpu": 300.0, "cuda": 120.0}  # a first call may compile for a minute; one that takes longer hangs


def measure(
    case: Case,
    names: Sequence[str],
    device: str,
    rounds: int,
    tuned: bool,
    deadline: float,
    tell: Tell = lambda text: None,
) -> dict[str, Any]:
    """{"implementations": name -> what was found, "clocks": before and after}; `deadline` as time.time() counts.

    `tuned`: every setting of an implementation is tried and the fastest timed; else its first, the documented one.

    Runs in a process of its own. One that kills the process, hangs, or leaves the device in a state of error costs
    itself alone: its end is its result, and the others are measured again without it.
    """
    lost: Found = {}
    while True:
        remaining = [name for name in names if name not in lost]
        try:
            found = apart(
                _measure,
                case,
                remaining,
                device,
                rounds,
                tuned,
                deadline,
                tell=tell,
                silence_s=SILENCE_S[torch.device(device).type],
            )
        except Died as death:
            if death.said not in remaining:
                return {"error": str(death), "implementations": lost}
            lost[death.said] = {"error": str(death)}
            continue
        measured = found["implementations"] | lost
        return found | {"implementations": {name: measured[name] for name in names}}


def _measure(
    case: Case, names: Sequence[str], device_name: str, rounds: int, tuned: bool, deadline: float, tell: Tell
) -> dict[str, Any]:
    device = torch.device(device_name)
    if device.type == "cpu":
        limit_memory()
    before = clocks(device)
    found: Found = {name: {"title": implementations()[name].title} for name in names}
    tell("inputs")
    inputs = off_policy(make_inputs(case, device))
    right: dict[str, Reference] = {}
    ready: dict[str, Step] = {}
    for name in names:
        if time.time() > deadline:
            found[name]["error"] = NOT_RUN
            continue
        objective = implementations()[name].objective
        if objective != "none" and objective not in right:
            tell("reference")
            right[objective] = reference(inputs, case.mode, objective)
        tell(name)
        step = _prepare(name, inputs, case, right.get(objective), device, tuned, found[name])
        if step is not None:
            ready[name] = step
    right.clear()
    steps = {name: functools.partial(step, inputs) for name, step in ready.items()}
    for name, times in interleave(steps, rounds, device, deadline, tell).items():
        found[name] |= times
    compare(found)
    return {"implementations": found, "clocks": {"before": before, "after": clocks(device)}}


def compare(found: Found) -> None:
    """Add the ratios of medians: "ratio_to_floor", "ratio_to_eager", "ours_to_this"."""
    medians = {name: report["seconds"]["median"] for name, report in found.items() if "seconds" in report}
    for name, median in medians.items():
        for base in ("floor", "eager"):
            if base in medians:
                found[name][f"ratio_to_{base}"] = median / medians[base]
        if "ours" in medians:
            found[name]["ours_to_this"] = medians["ours"] / median


def interleave(
    steps: Mapping[str, Callable[[], object]], rounds: int, device: torch.device, deadline: float, tell: Tell
) -> Found:
    """`rounds` times of every step, in turn; fewer, but at least one, where the deadline comes first.

    Who takes seconds and FAR times as long as the fastest is left at one round, unless others are divided by it
    (BASES): whether it is 3.1 or 3.2 times is not worth the minutes.

    Each step has to have run before. "seconds" are by the clock on a CPU and by events on a GPU; "wall_seconds", on a
    GPU, are by the clock until the device has finished.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    order = list(steps)
    for number in range(rounds):
        if number and time.time() > deadline:
            break
        if number == 1:
            first = {name: taken[0][0] for name, taken in times.items()}
            enough = max(SHORT_S, FAR * min(first.values()))
            order = [name for name in order if name in BASES or first[name] <= enough]
        for name in order:
            tell(name)
            times[name].append(seconds(steps[name], device))
        order = order[1:] + order[:1]
    return {name: _summaries(taken, device) for name, taken in times.items()}


def seconds(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """(by events, by the clock) of one call; what it returns is freed outside the time. A CPU has the clock alone."""
    gc.collect()
    synchronize(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
    start = time.perf_counter()
    if events:
        events[0].record()
    result = step()
    if events:
        events[1].record()
    synchronize(device)
    wall = time.perf_counter() - start
    del result
    return (events[0].elapsed_time(events[1]) * 1e-3 if events else wall), wall


def _summaries(taken: list[tuple[float, float]], device: torch.device) -> dict[str, Any]:
    by_events, by_clock = ([pair[i] for pair in taken] for i in range(2))
    return {"seconds": summary(by_events)} | ({"wall_seconds": summary(by_clock)} if device.type == "cuda" else {})


def summary(times: list[float]) -> dict[str, Any]:
    """Median, spread and the raw times, in seconds."""
    return {"median": statistics.median(times), "min": min(times), "max": max(times), "times": times}


def _prepare(
    name: str,
    inputs: Inputs,
    case: Case,
    right: Reference | None,
    device: torch.device,
    tuned: bool,
    report: dict[str, Any],
) -> Step | None:
    """The fastest right setting of an implementation, or None; `report` gets what was found."""
    implementation = implementations()[name]
    why = implementation.why_not(device, case.torch_dtype)
    if why is not None:
        report["missing"] = why
        return None
    try:
        settings = implementation.settings(inputs, case.mode)
    except Unserved as reason:
        report["missing"] = str(reason)
        return None
    except Exception as error:
        report["error"] = _survivable(error)
        return None
    if not tuned:
        settings = dict([*settings.items()][:1])
    tried = {setting: _try(step, inputs, right, device, len(settings) > 1) for setting, step in settings.items()}
    usable = [setting for setting, trial in tried.items() if "error" not in trial]
    best = min(usable, key=lambda setting: tried[setting].get("trial_seconds", 0.0)) if usable else next(iter(tried))
    report |= {"setting": best} | tried[best] | ({"tried": tried} if len(settings) > 1 else {})
    return settings[best] if usable else None


def _try(step: Step, inputs: Inputs, right: Reference | None, device: torch.device, trial: bool) -> dict[str, Any]:
    """Run a step for the first time and compare its results; with `trial`, time a second run."""
    report: dict[str, Any] = {"errors": None}
    try:
        start = time.perf_counter()
        with witness() as calls:
            result = step(inputs)
        if calls:
            report["ran"] = dict(calls)
        synchronize(device)
        report["first_call_seconds"] = time.perf_counter() - start
        if right is not None:
            report["errors"] = errors(right, result)
            wrong = why_wrong(right, result, report["errors"], inputs.hidden.dtype)
            if wrong:
                return report | {"error": f"wrong result: {wrong}"}
        del result
        if device.type == "cuda":
            report |= gpu_peak(step, inputs, device)
        if trial:
            report["trial_seconds"], _ = seconds(functools.partial(step, inputs), device)
    except Exception as error:  # a setting that fails is a result
        return report | {"error": _survivable(error)}
    return report


def gpu_peak(step: Step, inputs: Inputs, device: torch.device) -> dict[str, int]:
    """Bytes beyond the inputs and what is returned, as torch's allocator counts, of a step that has run before."""
    before = restart_peak(device)
    assert before is not None
    result = step(inputs)
    synchronize(device)
    returned = returned_bytes(result)
    return {"peak_bytes": peak(device) - before - returned, "returned_bytes": returned}


def returned_bytes(result: Result) -> int:
    """Of the gradients: what every implementation has to return."""
    return sum(gradient.nbytes for gradient in (result.dhidden, result.dweight) if gradient is not None)


def _survivable(error: Exception) -> str:
    """A line about the error; raises it again if it leaves the device, and so this process, unusable."""
    text = describe(error)
    if OUT_OF_MEMORY not in text and torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise error from None
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return text

"""One case: every implementation is checked, then timed in interleaved rounds; memory; which kernels ran.

A B C, B C A, C A B, ...: a slow minute of the machine hits everybody alike.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..backends import available_backends, get_backend
from .cases import Case, make_case
from .implementations import Result, Step, Unsupported, implementations
from .inputs import Inputs, make_inputs
from .machine import OUT_OF_MEMORY, clocks, describe, limit_memory, peak, restart_peak, synchronize
from .process import Died, OnProgress, run_in_subprocess
from .reference import Reference, errors, off_policy, reference, why_wrong

Found = dict[str, dict[str, Any]]
NOT_RUN = "not run: out of time"
SHORT_S = 1.0  # of a call: repeated whoever makes it
FAR = 1.5  # times the fastest
BASES = ("ours", "floor", "eager", "ours-unmasked")  # of ratios
SILENCE_S = {"cpu": 300.0, "cuda": 120.0}  # a first call may compile for a minute; one that takes longer hangs
# Not the floor, which has a buffer that no loss needs; not compiled eager, whose peak includes the compiler.
WITHOUT_MEMORY = ("floor", "compiled")
# Methods of a backend that do a loss's work on rows of logits, or instead of them.
METHODS = ("single_pass", "statistics", "logits_gradient", "linear_logp", "anchored", "kept_logits")


def measure(
    case: Case,
    names: Sequence[str],
    device: str,
    rounds: int,
    tuned: bool,
    deadline: float,
    on_progress: OnProgress = lambda text: None,
    silence_s: float | None = None,
) -> dict[str, Any]:
    """{"implementations": name -> what was found, "clocks": before and after}; `deadline` as time.time() counts.

    `tuned`: every setting of an implementation is tried and the fastest timed; else its first, the documented one.

    Runs in a process of its own. One that kills the process, is silent for `silence_s`, or leaves the device in a state
    of error costs itself alone: its end is its result, and the others are measured again without it.
    """
    lost: Found = {}
    while True:
        remaining = [name for name in names if name not in lost]
        try:
            found = run_in_subprocess(
                _measure, case, remaining, device, rounds, tuned, deadline,
                on_progress=on_progress, silence_s=silence_s or SILENCE_S[torch.device(device).type],
            )  # fmt: skip
        except Died as death:
            if death.last_message not in remaining:
                return {"error": str(death), "implementations": lost}
            lost[death.last_message] = {"error": str(death)}
            continue
        measured = found["implementations"] | lost
        return found | {"implementations": {name: measured[name] for name in names}}


def _measure(
    case: Case,
    names: Sequence[str],
    device_name: str,
    rounds: int,
    tuned: bool,
    deadline: float,
    on_progress: OnProgress,
) -> dict[str, Any]:
    device = torch.device(device_name)
    if device.type == "cpu":
        limit_memory()
    before = clocks(device)
    found: Found = {name: {"title": implementations()[name].title} for name in names}
    on_progress("inputs")
    inputs = off_policy(make_inputs(case, device))
    right: dict[str, Reference] = {}
    ready: dict[str, Callable[[], object]] = {}
    for name in names:
        if time.time() > deadline:
            found[name]["error"] = NOT_RUN
            continue
        objective = implementations()[name].objective
        if objective != "none" and objective not in right:
            on_progress("reference")
            right[objective] = reference(inputs, case.mode, objective)
        on_progress(name)
        step = _prepare(name, inputs, case, right.get(objective), device, tuned, found[name])
        if step is not None:
            ready[name] = functools.partial(step, inputs)
    right.clear()
    gc.collect()
    gc.freeze()  # what lives now is not looked at before each call
    for name, times in interleave(ready, rounds, device, deadline, on_progress).items():
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
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    deadline: float,
    on_progress: OnProgress,
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
            on_progress(name)
            times[name].append(seconds(steps[name], device))
        order = order[1:] + order[:1]
    clocks_read = ("seconds", "wall_seconds") if device.type == "cuda" else ("seconds",)
    return {
        name: {key: summary([pair[i] for pair in taken]) for i, key in enumerate(clocks_read)}
        for name, taken in times.items()
    }


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
    missing = implementation.unavailable_reason(device, case.torch_dtype)
    if missing is not None:
        report["missing"] = missing
        return None
    try:
        settings = implementation.settings(inputs, case.mode)
    except Unsupported as reason:
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
        with count_kernel_calls() as calls:
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
            report |= _peak_of_call(step, inputs, device) or {}
        if trial:
            report["trial_seconds"], _ = seconds(functools.partial(step, inputs), device)
    except Exception as error:  # a setting that fails is a result
        return report | {"error": _survivable(error)}
    return report


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


# --- memory -----------------------------------------------------------------------------------------------------------


def measure_peak_memory(
    case: Case, name: str, on_progress: OnProgress = lambda text: None, silence_s: float | None = None
) -> dict[str, Any]:
    """{"peak_bytes", "returned_bytes"} of a call of an implementation's first setting, on a CPU, in a fresh process.

    There: a tiny call (thread pools, lazily loaded libraries), the inputs, a reset of the kernel's high-water mark of
    resident memory, one call, and its peak less what was resident before and less the returned gradients. Eager's peak
    comes before its gradients exist, so this counts them in its favour. {"memory_error"} where it fails, {} where it
    cannot run. On a GPU torch's allocator counts, in the process that measures time.
    """
    if name in WITHOUT_MEMORY or implementations()[name].unavailable_reason(torch.device("cpu"), case.torch_dtype):
        return {}
    try:
        found: dict[str, Any] = run_in_subprocess(
            _measure_peak_memory, case, name, on_progress=on_progress, silence_s=silence_s or SILENCE_S["cpu"]
        )
    except Died as death:
        return {"memory_error": str(death)}
    return found


def _measure_peak_memory(case: Case, name: str, on_progress: OnProgress) -> dict[str, Any]:
    device = torch.device("cpu")
    limit_memory()
    on_progress(name)
    settings = implementations()[name].settings
    kept_ids = min(case.kept_ids, 8)  # with a sampling mask other libraries are loaded
    tiny_case = make_case("32x64x512", case.dtype, mode=case.mode, beta=case.beta, kept_ids=kept_ids)
    tiny = make_inputs(tiny_case, device)
    try:
        next(iter(settings(tiny, case.mode).values()))(tiny)
        inputs = make_inputs(case, device)
        step = next(iter(settings(inputs, case.mode).values()))
    except Unsupported:
        return {}
    found = _peak_of_call(step, inputs, device)
    return found or {"memory_error": "this system has no high-water mark of memory that can be reset"}


def _peak_of_call(step: Step, inputs: Inputs, device: torch.device) -> dict[str, int] | None:
    """Bytes beyond the inputs and the returned gradients."""
    before = restart_peak(device)
    if before is None:
        return None
    returned = _returned_bytes(step(inputs))
    synchronize(device)
    return {"peak_bytes": peak(device) - before - returned, "returned_bytes": returned}


def _returned_bytes(result: Result) -> int:
    return sum(gradient.nbytes for gradient in (result.dhidden, result.dweight) if gradient is not None)


# --- which kernels ran ------------------------------------------------------------------------------------------------


@contextmanager
def count_kernel_calls() -> Iterator[Counter[str]]:
    """Calls inside, as {"cuda.single_pass": 4}, of every backend that is available here: which one really ran."""
    calls: Counter[str] = Counter()
    patched: list[tuple[Any, str]] = []

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return method(*arguments, **options)

        return call

    try:
        for name in available_backends():
            backend = get_backend(name)
            for method in METHODS:
                if hasattr(backend, method):
                    setattr(backend, method, counted(f"{name}.{method}", getattr(backend, method)))
                    patched.append((backend, method))
        yield calls
    finally:
        for backend, method in patched:
            delattr(backend, method)  # the class has the original

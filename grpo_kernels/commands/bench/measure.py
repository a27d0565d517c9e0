"""Measures one case: every implementation is checked and timed once, then all in interleaved rounds; then memory.

Rounds go A B C, B C A, C A B, ..., so that a slow minute of the machine slows all of them. A time is the median of
LEAST or more of them. An implementation whose rounds would take too long is measured with fewer tokens, in a case of
its own.
"""

from __future__ import annotations

import functools
import gc
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...trainer.memory import peak, restart_peak
from .baselines import Step, Unsupported
from .cases import Case
from .inputs import Inputs, make_inputs
from .machine import OUT_OF_MEMORY, Report, describe, limit_memory, synchronize
from .process import NOT_RUN, Died, OnProgress, run_in_subprocess
from .reference import Reference, errors, off_policy, reference, why_wrong
from .table import IMPLEMENTATIONS

Reports = dict[str, Report]  # by implementation
Run = Callable[..., Any]  # run_in_subprocess with its options for progress, silence and deadline
LEAST = 5  # rounds of a median, unless fewer are asked for
MAX_DIVISOR = 8  # of the tokens: with still fewer, reading the weight takes most of the time
BASES = ("floor", "eager", "trl-trainer")  # implementations that all are compared with
# The floor has a buffer that no loss needs, and the peak of compiled eager includes the compiler.
WITHOUT_MEMORY = ("floor", "compiled")
# The report of an implementation that had its turn has one of these keys.
_RESULT = {"seconds", "error", "missing", "fewer_tokens"}
CPU = torch.device("cpu")


class Options(NamedTuple):
    device: str
    rounds: int
    deadline: float  # as time.time() counts
    most_s: float = math.inf  # for the rounds of one implementation


def measure(case: Case, names: Sequence[str], options: Options, run: Run = run_in_subprocess) -> dict[str, Any]:
    """Returns {"implementations": name -> report}, and "error" where the case itself failed.

    The case runs in a process of its own. An implementation that kills the process, is silent for too long, or leaves
    the device in a state of error affects no other: this is its result, and the others are measured again without it,
    first those that have no time yet.
    """
    reports, is_over = titles(names), False
    failed: Reports = {}
    while not is_over:
        remaining = [name for name in names if name not in failed and "fewer_tokens" not in reports[name]]
        remaining.sort(key=lambda name: "seconds" in reports[name])
        try:
            new_reports, reason = run(_measure, case, remaining, options, time.time()), NOT_RUN
        except Died as death:
            new_reports, reason = death.last_result or {}, str(death)
            if reason != NOT_RUN and death.last_message not in remaining:
                return {"error": reason, "implementations": failed}
            if reason != NOT_RUN:
                failed[death.last_message] = {"error": reason}
        for name, report in new_reports.items():
            reports[name] |= report
        # One that was too slow is no reason to measure the others again, once these have their results.
        has_all = all(_RESULT & reports[name].keys() for name in names if name not in failed)
        is_over = reason == NOT_RUN or (has_all and reason.startswith(NOT_RUN))
    reports |= failed
    for report in reports.values():
        if len(report.get("seconds", {}).get("times", ())) < min(LEAST, options.rounds):
            report.pop("seconds", None)
        if not _RESULT & report.keys():
            report["error"] = NOT_RUN
    _add_ratios(reports)
    return {"implementations": reports}


def titles(names: Sequence[str]) -> Reports:
    """Returns the reports that a case starts with, which have titles only."""
    return {name: {"title": IMPLEMENTATIONS[name].title} for name in names}


def _measure(case: Case, names: Sequence[str], options: Options, begin: float, on_progress: OnProgress) -> Reports:
    """Measures a case in this process. Returns the reports of its implementations."""
    device, reports, set_up_s = torch.device(options.device), titles(names), 0.0
    if device.type == "cpu":
        limit_memory()
    on_progress("inputs")
    inputs = off_policy(make_inputs(case, device))
    exact_results: dict[str, Reference | None] = {"none": None}
    calls: dict[str, Callable[[], object]] = {}
    for name in names:
        objective = IMPLEMENTATIONS[name].objective
        if objective not in exact_results:
            on_progress("reference")
            exact_results[objective] = reference(inputs, case.mode, objective)
        rounds_s = min(LEAST, options.rounds) * sum(reports[timed]["seconds"]["median"] for timed in calls)
        if (left_s := options.deadline - rounds_s - time.time()) < 0:
            break
        set_up_s = set_up_s or time.time() - begin
        on_progress(name)
        # A first call, except that of ours, may take half of the time left. Then SIGALRM ends this process, and the
        # others are measured in a new one, if there is time to set it up.
        limited = name != "ours" and set_up_s < left_s / 2 < math.inf
        signal.setitimer(signal.ITIMER_REAL, left_s / 2 if limited else 0)
        try:
            step, report = prepare(name, inputs, case.mode, exact_results[objective], device)
            if step is not None:
                call = functools.partial(step, inputs)
                once_s = seconds(call, device)
                divisor = _divisor(case, options.rounds * once_s / max(options.most_s, 1e-9))
                if divisor == 1:
                    calls[name] = call
                    report |= _timed([once_s])
                else:
                    report |= {"fewer_tokens": case.tokens // divisor} if divisor else {"error": NOT_RUN}
        except Exception as error:  # an error of an implementation is its result
            report = {"error": _survivable(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        reports[name] |= report
        on_progress(name, reports)
    exact_results.clear()
    gc.collect()
    gc.freeze()  # collections before each call skip the objects of now

    for name, times in interleave(calls, options.rounds, device, options.deadline, on_progress):
        reports[name] |= _timed(times)
        on_progress(name, reports)
    return reports


def _divisor(case: Case, excess: float) -> int:
    """Returns the smallest divisor of the case's length by which tokens have to be divided, where a measurement takes
    `excess` times as long as it may; 0 if too few tokens would be left."""
    fitting = (d for d in range(1, MAX_DIVISOR + 1) if case.length % d == 0 and d >= excess)
    return next(fitting, 0)


def _timed(times: list[float]) -> dict[str, Any]:
    """Returns the part of a report that holds the times, in seconds."""
    return {"seconds": {"median": statistics.median(times), "min": min(times), "max": max(times), "times": times}}


def _add_ratios(reports: Reports) -> None:
    """Adds to reports the ratios of their medians to those of BASES, of the median of ours to theirs, and the median
    and quartiles of the ratios to the floor's time in the same round, from which a clock that drifts is gone."""
    medians = {name: report["seconds"]["median"] for name, report in reports.items() if "seconds" in report}
    floor_times = reports["floor"]["seconds"]["times"] if "floor" in medians else []
    for name, median in medians.items():
        reports[name] |= {f"ratio_to_{base}": median / medians[base] for base in BASES if base in medians}
        reports[name] |= {"ours_to_this": medians["ours"] / median} if "ours" in medians else {}
        if ratios := [
            time / floor for time, floor in zip(reports[name]["seconds"]["times"], floor_times, strict=False)
        ]:
            quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            reports[name]["ratio_by_round"] = dict(zip(("low", "median", "high"), quartiles, strict=True))


def interleave(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    deadline: float = math.inf,
    on_progress: OnProgress = lambda text: None,
) -> Iterator[tuple[str, list[float]]]:
    """Times `rounds` of every step, in turn; LEAST of them where the deadline comes first. Each step has to have run
    before.

    Yields after each call the name of its step and the times of this step so far, in seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for number in range(rounds):
        if number >= LEAST and time.time() > deadline:
            break
        for name in order:
            on_progress(name)
            if device.type == "cuda":  # its clock follows the power of the work just before: repeat this step's work
                steps[name]()
            times[name].append(seconds(steps[name], device))
            yield name, list(times[name])
        order = order[1:] + order[:1]


def seconds(step: Callable[[], object], device: torch.device) -> float:
    """Times one call, by the clock on a CPU, by events on a GPU; what the call returns is freed outside of the time."""
    gc.collect()
    synchronize(device)
    if device.type == "cpu":
        start = time.perf_counter()
        result = step()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    result = step()  # noqa: F841  (freed when this returns)
    end.record()
    synchronize(device)
    return begin.elapsed_time(end) * 1e-3


def prepare(
    name: str, inputs: Inputs, mode: str, exact: Reference | None, device: torch.device
) -> tuple[Step | None, dict[str, Any]]:
    """Calls an implementation for the first time and checks the result. Returns its step, None where it is missing or
    wrong, and its report."""
    try:
        step = IMPLEMENTATIONS[name].step(inputs, mode)
    except Unsupported as reason:
        return None, {"missing": str(reason)}
    start = time.perf_counter()
    result = step(inputs)
    synchronize(device)
    report: dict[str, Any] = {"errors": None, "first_call_seconds": time.perf_counter() - start}
    if exact is not None:
        report["errors"] = errors(exact, result)
        mistake = why_wrong(exact, result, report["errors"], inputs.hidden.dtype)
        if mistake and not IMPLEMENTATIONS[name].estimate:
            return None, report | {"error": f"wrong result: {mistake}"}
    if result.metrics:
        report["metrics"] = {key: value.item() for key, value in result.metrics.items()}
    del result
    if device.type == "cuda":
        report |= peak_of_call(step, inputs, device)
    return step, report


def _survivable(error: Exception) -> str:
    """Returns a line about the error; raises it again if it leaves the device, and so this process, unusable."""
    text = describe(error)
    if torch.cuda.is_available():
        if OUT_OF_MEMORY not in text:
            torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return text


def measure_peak_memory(case: Case, name: str, run: Run = run_in_subprocess) -> dict[str, Any]:
    """Returns "peak_bytes" and "returned_bytes" of a call on a CPU; "memory_error" where it fails, nothing where it
    cannot run. The call has a process of its own, because libraries keep memory between calls."""
    try:
        return {} if name in WITHOUT_MEMORY else run(_measure_peak_memory, case, name)
    except Died as death:
        return {"memory_error": str(death)}


def _measure_peak_memory(case: Case, name: str, on_progress: OnProgress) -> dict[str, Any]:
    """Returns the same as `measure_peak_memory`, of a call in this process."""
    limit_memory()
    on_progress(name)
    kept_ids = min(case.kept_ids, 8)  # a sampling mask loads other libraries
    sizes: dict[str, Any] = dict(tokens=32, hidden_size=64, vocab_size=512, length=8, generations=4)
    tiny = replace(case, **sizes, kept_ids=kept_ids, temperature=0.0)
    try:
        for step_case in (tiny, case):  # the first call starts threads and loads lazy libraries
            inputs = make_inputs(step_case, CPU)
            step = IMPLEMENTATIONS[name].step(inputs, case.mode)
            if step_case is tiny:
                step(inputs)
    except Unsupported:
        return {}
    return peak_of_call(step, inputs, CPU)


def peak_of_call(step: Step, inputs: Inputs, device: torch.device) -> dict[str, Any]:
    """Returns the peak of a call in bytes beyond inputs and returned gradients, and the bytes of these gradients.
    Eager's peak comes before its gradients exist, so that this counts in its favour."""
    bytes_before = restart_peak(device)
    if bytes_before is None:
        return {"memory_error": "this system has no high-water mark of memory that can be reset"}
    result = step(inputs)
    returned_bytes = sum(gradient.nbytes for gradient in (result.dhidden, result.dweight) if gradient is not None)
    synchronize(device)
    return {"peak_bytes": peak(device) - bytes_before - returned_bytes, "returned_bytes": returned_bytes}

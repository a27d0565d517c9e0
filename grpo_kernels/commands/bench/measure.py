"""Measures one case: every implementation is checked and timed once, then all in interleaved rounds; then memory.

Rounds go A B C, B C A, C A B, ..., so that a slow minute of the machine slows everybody alike. A time is the median of
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
from .machine import OUT_OF_MEMORY, describe, limit_memory, synchronize
from .process import NOT_RUN, Died, OnProgress, run_in_subprocess
from .reference import Reference, errors, off_policy, reference, why_wrong
from .table import IMPLEMENTATIONS

Found = dict[str, dict[str, Any]]
Run = Callable[..., Any]  # run_in_subprocess with its options for progress, silence and deadline
LEAST = 5  # rounds of a median, unless fewer are asked for
FEWEST = 8  # divides the tokens at most by this: with fewer, reading the weight takes most of the time
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
    found, is_over = titles(names), False
    lost: Found = {}
    while not is_over:
        remaining = [name for name in names if name not in lost and "fewer_tokens" not in found[name]]
        remaining.sort(key=lambda name: "seconds" in found[name])
        try:
            reports, why = run(_measure, case, remaining, options, time.time()), NOT_RUN
        except Died as death:
            reports, why = death.found or {}, str(death)
            if why != NOT_RUN and death.last_message not in remaining:
                return {"error": why, "implementations": lost}
            if why != NOT_RUN:
                lost[death.last_message] = {"error": why}
        for name, report in reports.items():
            found[name] |= report
        # One that was too slow is no reason to measure the others again, once these have their results.
        has_all = all(_RESULT & found[name].keys() for name in names if name not in lost)
        is_over = why == NOT_RUN or (has_all and why.startswith(NOT_RUN))
    found |= lost
    for report in found.values():
        if len(report.get("seconds", {}).get("times", ())) < min(LEAST, options.rounds):
            report.pop("seconds", None)
        if not _RESULT & report.keys():
            report["error"] = NOT_RUN
    _add_ratios(found)
    return {"implementations": found}


def titles(names: Sequence[str]) -> Found:
    """Returns the reports that a case starts with, which have titles only."""
    return {name: {"title": IMPLEMENTATIONS[name].title} for name in names}


def _measure(case: Case, names: Sequence[str], options: Options, begin: float, on_progress: OnProgress) -> Found:
    """Measures a case in this process. Returns the reports of its implementations."""
    device, found, set_up = torch.device(options.device), titles(names), 0.0
    if device.type == "cpu":
        limit_memory()
    on_progress("inputs")
    inputs = off_policy(make_inputs(case, device))
    exact: dict[str, Reference | None] = {"none": None}
    ready: dict[str, Callable[[], object]] = {}
    for name in names:
        objective = IMPLEMENTATIONS[name].objective
        if objective not in exact:
            on_progress("reference")
            exact[objective] = reference(inputs, case.mode, objective)
        rounds = min(LEAST, options.rounds) * sum(found[one]["seconds"]["median"] for one in ready)
        if (left := options.deadline - rounds - time.time()) < 0:
            break
        set_up = set_up or time.time() - begin
        on_progress(name)
        # A first call, except that of ours, may take half of the time left. Then SIGALRM ends this process, and the
        # others are measured in a new one, if there is time to set it up.
        limited = name != "ours" and set_up < left / 2 < math.inf
        signal.setitimer(signal.ITIMER_REAL, left / 2 if limited else 0)
        try:
            step, report = prepare(name, inputs, case.mode, exact[objective], device)
            if step is not None:
                call = functools.partial(step, inputs)
                once = seconds(call, device)
                divisor = _divisor(case, options.rounds * once / max(options.most_s, 1e-9))
                if divisor == 1:
                    ready[name] = call
                    report |= _timed([once])
                else:
                    report |= {"fewer_tokens": case.tokens // divisor} if divisor else {"error": NOT_RUN}
        except Exception as error:  # an error of an implementation is its result
            report = {"error": _survivable(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        found[name] |= report
        on_progress(name, found)
    exact.clear()
    gc.collect()
    gc.freeze()  # collections before each call skip the objects of now

    for name, times in interleave(ready, options.rounds, device, options.deadline, on_progress):
        found[name] |= _timed(times)
        on_progress(name, found)
    return found


def _divisor(case: Case, excess: float) -> int:
    """Returns the smallest divisor of the case's length by which tokens have to be divided, where a measurement takes
    `excess` times as long as it may; 0 if too few tokens would be left."""
    fitting = (d for d in range(1, FEWEST + 1) if case.length % d == 0 and d >= excess)
    return next(fitting, 0)


def _timed(times: list[float]) -> dict[str, Any]:
    """Returns the part of a report that holds the times, in seconds."""
    return {"seconds": {"median": statistics.median(times), "min": min(times), "max": max(times), "times": times}}


def _add_ratios(found: Found) -> None:
    """Adds to reports the ratios of their medians to those of BASES, and of the median of ours to theirs."""
    medians = {name: report["seconds"]["median"] for name, report in found.items() if "seconds" in report}
    for name, median in medians.items():
        found[name] |= {f"ratio_to_{base}": median / medians[base] for base in BASES if base in medians}
        found[name] |= {"ours_to_this": medians["ours"] / median} if "ours" in medians else {}


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
        wrong = why_wrong(exact, result, report["errors"], inputs.hidden.dtype)
        if wrong and not IMPLEMENTATIONS[name].estimate:
            return None, report | {"error": f"wrong result: {wrong}"}
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
    kept = min(case.kept_ids, 8)  # a sampling mask loads other libraries
    tiny = replace(case, tokens=32, hidden_size=64, vocab_size=512, length=8, generations=4, kept_ids=kept)
    try:
        for one in (tiny, case):  # the first call starts threads and loads lazy libraries
            inputs = make_inputs(one, CPU)
            step = IMPLEMENTATIONS[name].step(inputs, case.mode)
            if one is tiny:
                step(inputs)
    except Unsupported:
        return {}
    return peak_of_call(step, inputs, CPU)


def peak_of_call(step: Step, inputs: Inputs, device: torch.device) -> dict[str, Any]:
    """Returns the peak of a call in bytes beyond inputs and returned gradients, and the bytes of these gradients.
    Eager's peak comes before its gradients exist, so that this counts in its favour."""
    before = restart_peak(device)
    if before is None:
        return {"memory_error": "this system has no high-water mark of memory that can be reset"}
    result = step(inputs)
    returned = sum(gradient.nbytes for gradient in (result.dhidden, result.dweight) if gradient is not None)
    synchronize(device)
    return {"peak_bytes": peak(device) - before - returned, "returned_bytes": returned}

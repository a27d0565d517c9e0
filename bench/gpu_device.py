"""What probes ask of the device: its place, its clock, its memory. Everything that is CUDA's own stands here."""

from __future__ import annotations

import json
import re
import statistics
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch

PLACE = "cuda"
WARM_UP, ROUNDS = 2, 5
# After one of these every later call of the same process fails.
STICKY = re.compile(r"CUDA error|CUDA_ERROR_|unspecified launch failure|illegal (memory access|instruction)")
OUT_OF_DEVICE = 3  # exit status of a process whose device context is lost


def synchronize() -> None:
    torch.cuda.synchronize()


def multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def milliseconds(call: Callable[[], object]) -> float:
    """Of one call, by events on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def free_memory() -> int:
    """Bytes, after torch's cache has been given back."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def median_milliseconds(call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Of several calls; `before` runs ahead of each and is not timed."""
    samples = []
    for _ in range(WARM_UP + ROUNDS):
        before()
        samples.append(milliseconds(call))
    return statistics.median(samples[WARM_UP:])


# --- what a probe says: lines of JSON -------------------------------------------------------------------------------


def say(**facts: object) -> None:
    print(json.dumps(facts, default=str), flush=True)


under_way = ""  # what is tried at present


def at(what: str) -> None:
    """Announce what is tried next: after a hang, the last announcement names it."""
    global under_way
    under_way = what
    say(at=what)


def each(items: Iterable[str], run: Callable[[str], dict[str, Any] | None]) -> int:
    """Run the items one by one and say how each ended; after one that fails the next is run if the device answers.

    Exit status: 0, 1 where something failed, OUT_OF_DEVICE where the rest was not tried.
    """
    failed = 0
    for item in items:
        global under_way
        under_way = ""
        say(begin=item)
        start = time.perf_counter()
        try:
            found: dict[str, Any] = {"ok": True, **(run(item) or {})}
        except Exception as error:
            found = {"ok": False, "error": describe(error), "kind": type(error).__name__, "at": under_way}
            if not isinstance(error, AssertionError):
                found["traceback"] = traceback.format_exc()[-2000:]
        failed |= not found["ok"]
        usable = found["ok"] or answers()
        say(end=item, seconds=round(time.perf_counter() - start, 2), **found)
        if not usable:
            return OUT_OF_DEVICE
    return int(failed)


def describe(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Of a compiler's error the line that says what; of others the first.
    told = next((line for line in lines if "error:" in line), lines[0] if lines else "")
    return f"{type(error).__name__}: {told}"[:600]


def answers() -> bool:
    """Whether this process can still use the device."""
    try:
        synchronize()
        return float(torch.ones(4, device=PLACE).sum()) == 4.0
    except RuntimeError:
        return False

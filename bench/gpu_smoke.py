"""Every kernel's first contact with a GPU: which are broken, and how. Later stages leave out what is broken."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import gpu_items
import gpu_tiles
from gpu_build import WATCHED
from gpu_machine import sources
from gpu_work import child_environment

if TYPE_CHECKING:
    from gpu_work import Report, Settings, Work

# From what cannot go wrong to what never ran anywhere, one process each; CUDA's first, since nothing is compiled.
STRATEGIES = tuple(f"{backend}/{name}" for backend in ("cuda", "triton") for name in ("rows", "linear", "anchored"))
BUILT = "build: "  # begins why a strategy is left out that was not built
# The kernels that wait for barriers, and sizes with the watchdog: one tile; more stages than the ring has; pairs of
# blocks with several items; with several tiles per part, and rows and columns that are not there.
GUARDED = ("cuda/linear", "cuda/anchored")
FIRST_SIZES = ((1, 8, 2), (130, 320, 1000), (2304, 512, 20000), (2171, 328, 5000))
NOT_TRIED = "there was no time to try it"


def smoke(work: Work) -> None:
    """A mismatch costs its size, a hang or a lost device the rest of its process."""
    built = {name: why for name, why in work.left_out.items() if why.startswith(BUILT)}
    work.report["left_out"] = built  # what an earlier call found was said of other kernels, or is found again
    if not contact(work):
        return
    for name in STRATEGIES:
        if name in work.left_out:
            continue
        if work.left < gpu_items.LEAST:
            work.stop(f"out of time before {name}")
            work.leave_out(name, NOT_TRIED)
            continue
        if not (guarded(work, name) and tried(work, name)) and not usable(work, name):
            break
    if work.left_out:
        work.record["note"] = f"left out from here on: {', '.join(work.left_out)}"


def guarded(work: Work, name: str) -> bool:
    """A product of CUDA's, ahead of the real one, with the watchdog: whether it neither hung nor lost the device.

    Only ahead of it: a watched product runs its stages one after another, so that some faults are the real one's alone.
    """
    if name not in GUARDED or not watched():
        return True
    told = gpu_items.run(work, f"smoke/{name}", [gpu_tiles.text(size) for size in FIRST_SIZES], variables=watched())
    lost = {size: found for size, found in told.ended.items() if found.get("lost")}
    work.record.setdefault("watched", {})[name] = told.ended
    for size, found in lost.items():
        work.fail(f"{name} with the watchdog at {size}: {found['error']}; {found.get('said', '')[-600:]}")
        work.leave_out(name, f"{found['error']} at {size}, with the watchdog")
    work.save()
    return not lost


def tried(work: Work, name: str) -> bool:
    """Every size of a strategy; whether the process has survived them."""
    sizes = sizes_of(name)
    told = gpu_items.run(work, f"smoke/{name}", sizes)
    judge(work, name, sizes, told)
    work.save()
    return not any(found.get("lost") for found in told.ended.values())


def sizes_of(name: str) -> list[str]:
    return [gpu_tiles.text(size) for size in gpu_tiles.SIZES[name]]


def contact(work: Work) -> bool:
    """A product of torch's, and an image of ours that loads, with a kernel that runs; whether the device answers."""
    told = gpu_items.run(work, "first", ["product", "cuda/load"])
    probes = work.record.setdefault("probes", {})
    probes |= told.ended
    for name, found in told.ended.items():
        if not found["ok"]:
            work.fail(f"{name}: {found['error']}")
    if not told.ended.get("product", {}).get("ok"):
        work.report["device_lost"] = "the device does not even multiply matrices for torch"
        return False
    load = told.ended.get("cuda/load", {"ok": False, "error": NOT_TRIED})
    if not load["ok"]:
        work.leave_out("cuda/rows", f"cuda/load: {load['error']}")
    return not load.get("lost") or usable(work, "cuda/load")


def usable(work: Work, after: str) -> bool:
    """Whether a new process still finds a device to talk to."""
    told = gpu_items.run(work, "first", ["product"])
    if not told.ended.get("product", {}).get("ok"):
        work.report["device_lost"] = f"the device stopped answering after {after}"
    return "device_lost" not in work.report


def judge(work: Work, name: str, sizes: list[str], told: gpu_items.Told) -> None:
    """Put the outcome of a strategy into the record, and leave it out where it is not right at every size."""
    bad = {size: found for size, found in told.ended.items() if not found["ok"]}
    explained = [f for f in told.facts if "wrong" in f]
    record: dict[str, Any] = {"ok": not bad and len(told.ended) == len(sizes), "sizes": told.ended}
    if explained:
        record["wrong"] = explained
    work.record.setdefault("probes", {})[name] = record
    for size, found in bad.items():
        work.fail(f"{name} at {size}: {found['error']}" + (f"; {found['said'][-300:]}" if found.get("said") else ""))
    for fact in explained:
        for text in fact["wrong"][:4]:
            work.say(f"  {name} at {fact['item']}, {fact.get('dtype')}: {text}")
    if bad:
        size, found = next(iter(bad.items()))
        work.leave_out(name, NOT_TRIED if found.get("unfinished") else f"{found['error']} at {size}")
    elif len(told.ended) < len(sizes):
        work.leave_out(name, NOT_TRIED)
    else:
        seconds = sum(found["seconds"] for found in told.ended.values())
        work.say(f"{name}: ok at {len(sizes)} sizes, {seconds:.0f} s")


def watched() -> dict[str, str]:
    """Variables under which the kernels with the watchdog come first, where they have been built."""
    if not list(WATCHED.glob("grpo_kernels/_cuda.*so")):
        return {}
    return {"PYTHONPATH": os.pathsep.join([str(WATCHED), child_environment()["PYTHONPATH"]])}


def outdated(settings: Settings, report: Report) -> bool:
    """Whether what the report says of these kernels was said of others."""
    record = report["stages"].get("smoke")
    return record is not None and record.get("sources") not in (None, sources())

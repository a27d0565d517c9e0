"""The stages of `gpu_report.py` that time things, each with what the smoke stage has left of it."""

from __future__ import annotations

import csv
import io
import shutil
from typing import TYPE_CHECKING, Any

import gpu_items
from gpu_machine import PROBES, watched_clocks
from gpu_smoke import STRATEGIES

if TYPE_CHECKING:
    from gpu_work import Work

# Heads of gpu_events.py; the first is worth most.
HEADS = ("llama-3-8b", "qwen2.5-7b", "gemma-2-2b", "qwen2.5-1.5b")
SECTIONS = ("SpeedOfLight", "Occupancy", "LaunchStats")
PROFILED = "llama-3-8b"
NCU_MOST = 90.0  # seconds


def usable(work: Work, *strategies: str) -> list[str]:
    return [name for name in strategies if name not in work.left_out]


def headline(work: Work) -> None:
    """Steps of ours beside three bare products: of CUDA's kernels, then of Triton's, so that neither can take both."""
    cuda = usable(work, "cuda/rows", "cuda/anchored")
    triton = usable(work, "triton/rows", "triton/anchored")
    if cuda:
        cuda.append("ours")
    elif triton and cuda_is_gone(work):  # else backend="auto" takes CUDA's, which load and are broken
        triton.append("ours")
    groups = [cuda, triton]
    if not any(groups):
        groups = [["torch/rows"]]
        work.record["note"] = "no kernels are left: the torch backend"
    interleaved(work, "headline", groups)
    table(work)


def cuda_is_gone(work: Work) -> bool:
    """Whether backend="auto" cannot take CUDA's kernels, because there are none."""
    return bool(work.environment.get("package", {}).get("backends", {}).get("cuda"))


def sweep(work: Work) -> None:
    """Rows per chunk, of the kernels that `auto` would take."""
    groups = [usable(work, "cuda/rows", "cuda/anchored") or usable(work, "triton/rows", "triton/anchored")]
    if not any(groups):
        raise work.cannot("no kernels are left")
    interleaved(work, "sweep", groups)
    table(work)


def kept(work: Work) -> None:
    """Sampling masks: products over the kept ids. They are no strategy: where they fail, `rows` stays in."""
    rows = usable(work, "cuda/rows", "triton/rows")
    names = usable(work, *(name.replace("rows", "kept") for name in rows))
    if not names:
        raise work.cannot("no kernels are left")
    interleaved(work, "kept", [[name] for name in names])
    table(work)


def interleaved(work: Work, probe: str, groups: list[list[str]]) -> None:
    """Every head with every group of names; a name that takes its process down is left out of the heads after it."""
    measured = work.record.setdefault("measured", [])
    with watched_clocks(work):
        for names in groups:
            heads = list(HEADS)
            while names and heads and work.left > gpu_items.LEAST:
                told = gpu_items.run(work, f"{probe}/{','.join(names)}", heads)
                measured += [fact for fact in told.facts if "name" in fact]
                work.save()
                lost = next((head for head in heads if told.ended.get(head, {}).get("lost")), None)
                for head in heads:
                    found = told.ended.get(head)
                    if found and not found["ok"]:
                        (work.stop if found.get("unfinished") else work.fail)(f"{head}: {found['error']}")
                if lost is None:
                    break
                culprit = (told.ended[lost].get("at") or told.at).partition(" ")[0]
                if culprit not in names:  # not in what is ours: that head is not measured
                    heads = heads[heads.index(lost) + 1 :]
                    continue
                names.remove(culprit)
                if "/" in culprit:
                    work.leave_out(culprit, f"{probe}, {lost}: {told.ended[lost]['error']}")
                heads = heads[heads.index(lost) :]
    for fact in measured:
        if "error" in fact and "/" in fact["name"]:
            work.leave_out(fact["name"].split(" ")[0], f"{probe}, {fact['head']}: {fact['error']}")
    if not any("milliseconds" in fact for fact in measured):
        work.fail("nothing was measured")


def table(work: Work) -> None:
    """A line per head: the floor, and everybody's multiple of it."""
    lines: dict[str, list[str]] = {}
    for fact in work.record["measured"]:
        if "ratio_to_floor" in fact:
            text = f"{fact['name']} {fact['ratio_to_floor']:.3f}"
            lines.setdefault(fact["head"], []).append(text)
    for head, texts in lines.items():
        work.say(f"{head}: {', '.join(texts)}")
    work.record["note"] = work.record.get("note") or f"{len(lines)} of {len(HEADS)} heads"


def events(work: Work) -> None:
    """Each kernel alone, and the bare products: a process for each kind, most valuable first."""
    measured: list[dict[str, Any]] = work.record.setdefault("measured", [])
    first = usable(work, "cuda/rows")
    for name in [*first, "products", *usable(work, *(name for name in STRATEGIES if name not in first))]:
        if work.left < gpu_items.LEAST:
            work.stop(f"out of time before {name}")
            break
        with watched_clocks(work):
            told = gpu_items.run(work, f"events/{name}", HEADS)
        measured += [fact for fact in told.facts if "milliseconds" in fact or "left_out" in fact]
        for head, found in told.ended.items():
            if not found["ok"]:
                (work.stop if found.get("unfinished") else work.fail)(f"{name}, {head}: {found['error']}")
                if found.get("lost") and name != "products":
                    work.leave_out(name, f"events, {head}: {found['error']}")
        work.save()
    work.record["note"] = f"{len(measured)} measured"


def profile(work: Work) -> None:
    """One step by torch.profiler; then what ncu says of one kernel of each kind, where it is installed."""
    told = gpu_items.run(work, "profile", [PROFILED])
    work.record["steps"] = [fact for fact in told.facts if "kernels" in fact]
    for head, found in told.ended.items():
        if not found["ok"]:
            work.fail(f"{head}: {found['error']}")
    work.save()
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if ncu is None:
        work.record["ncu"] = "not installed"
        return
    command = [ncu, "--clock-control", "none", "--kernel-name", "regex:^gk_", "--csv", "--page", "details"]
    command += [part for section in SECTIONS for part in ("--section", section)]
    names = usable(work, *(name for name in STRATEGIES if name.startswith("cuda")))
    if not names or work.left < gpu_items.LEAST:
        work.record["ncu"] = "no CUDA kernels are left" if not names else "no time was left"
        return
    ended = work.run([*command, *work.settings.python, PROBES, "kernels", *names], most=NCU_MOST)
    work.record["ncu"] = counters(ended.output) or ended.output[-1000:]
    work.expect(ended, "ncu")


def counters(output: str) -> dict[str, dict[str, str]]:
    """Kernel -> metric -> value with its unit, of ncu's CSV among other lines."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    found: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        if row.get("Metric Name"):
            kernel = found.setdefault(row["Kernel Name"].partition("(")[0], {})
            kernel[row["Metric Name"]] = f"{row['Metric Value']} {row['Metric Unit']}".strip()
    return found

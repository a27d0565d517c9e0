"""One step as the device saw it, by torch.profiler; and each kernel once, for ncu to look into.

Gaps between kernels are what the host takes; the names of the products say which kernels cuBLAS chose.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import gpu_device
import gpu_events
import gpu_headline
from gpu_device import at, say
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

NAME = 120  # characters of a kernel's name
KERNELS_TOKENS = 2048  # of the calls that ncu sees


class Span(NamedTuple):
    """A kernel on the device, in microseconds."""

    name: str
    start: float
    end: float


def profile(head: str) -> dict[str, Any]:
    inputs, step = gpu_headline.batch(head), gpu_headline.make_step(gpu_headline.OURS)
    for number in range(3):
        at(f"call {number}")
        step(inputs)
    gpu_device.synchronize()
    at("under the profiler")
    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step(inputs)
        gpu_device.synchronize()
    spans = [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if event.device_type != DeviceType.CPU
    ]
    say(head=head, **summarize(spans))
    return {}


def summarize(spans: Sequence[Span]) -> dict[str, Any]:
    """Milliseconds: from the first kernel to the end of the last, in kernels, in gaps; each kernel by its name."""
    if not spans:
        return {"kernels": 0}
    ordered = sorted(spans, key=lambda span: span.start)
    busy_until, gaps = ordered[0].start, []
    for before, span in zip([None, *ordered], ordered, strict=False):
        if before is not None and span.start > busy_until:
            gaps.append((span.start - busy_until, span.name[:NAME]))
        busy_until = max(busy_until, span.end)
    total = busy_until - ordered[0].start
    took: defaultdict[str, float] = defaultdict(float)
    for span in ordered:
        took[span.name[:NAME]] += (span.end - span.start) / 1e3
    calls = Counter(span.name[:NAME] for span in ordered)
    idle = sum(gap for gap, _ in gaps)
    return {
        "kernels": len(ordered),
        "milliseconds": total / 1e3,
        "idle_milliseconds": idle / 1e3,
        "longest_gaps": [{"milliseconds": gap / 1e3, "before": name} for gap, name in sorted(gaps, reverse=True)[:8]],
        "by_kernel": {
            name: {"milliseconds": round(took[name], 4), "calls": calls[name]}
            for name in sorted(took, key=lambda name: -took[name])
        },
    }


def kernels(which: str) -> dict[str, Any]:
    """Every kernel of "backend/strategy" once, at a size that fills the GPU but is replayed quickly."""
    backend, strategy = which.split("/")
    kinds = {"rows": gpu_events.row_kernels, "linear": gpu_events.linear, "anchored": gpu_events.anchored}
    _, width, vocab = gpu_events.shape("qwen2.5-1.5b")
    for name, call, before, _ in kinds[strategy](backend, KERNELS_TOKENS, width, vocab):
        at(name)
        before()
        call()
    gpu_device.synchronize()
    return {}

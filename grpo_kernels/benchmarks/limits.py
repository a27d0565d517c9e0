"""What the hardware would allow: FLOPs, bytes, seconds and memory of a case, on a named device or on the one here.

    python -m grpo_kernels.benchmarks.limits --device H200 --shapes llama-3-8b:16384 --mode step

A product takes the longer of its multiply-adds and its memory traffic. A pass over logits is memory traffic. Caches are
ideal, each operand moves once per chunk, parts follow one another, and launches, exponentials and what is O(N) are left
out: a lower limit. Memory is what the benchmarks measure: the high-water mark less inputs and returned gradients.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..engine.memory import capacity_of, chunk_sizes, default_logits_dtype, gpu_capacity
from .cases import DTYPES, MODES, Case, make_case
from .measure import seconds
from .show import table

ROW_RATE = 0.9  # of a copy's bandwidth, which a row kernel reaches on a GPU: assumed
KEPT_BYTES = 64  # per kept id, which the sorted pairs may hold


@dataclass(frozen=True)
class Device:
    """FLOP/s of a large matrix product by type; bytes/s that a copy reads and writes together; bytes of memory."""

    name: str  # as torch gives it
    type: str  # of torch.device
    flops: dict[str, float]
    bandwidth: float
    memory: float = math.inf
    source: str = ""  # where the rates are from
    multiprocessors: int = 0  # of a GPU


def _gpu(
    name: str, half: float, single: float, bandwidth: float, memory: float, processors: int, source: str
) -> Device:
    """TFLOP/s, TB/s and GB."""
    rates = {"bfloat16": half * 1e12, "float16": half * 1e12, "float32": single * 1e12}
    return Device(name, "cuda", rates, bandwidth * 1e12, memory * 1e9, source, processors)


DEVICES = {
    "H200": _gpu("NVIDIA H200", 790, 54, 4.3, 141, 132, "products and copies measured by others"),
    "H100": _gpu("NVIDIA H100 80GB HBM3", 790, 54, 3.0, 80, 132, "as an H200; copies 0.9 of the datasheet"),
    "A100": _gpu("NVIDIA A100-SXM4-80GB", 250, 15.6, 1.6, 80, 108, "datasheet times 0.8"),
    "B200": _gpu("NVIDIA B200", 1800, 60, 6.4, 180, 148, "datasheet times 0.8"),
}


def find_device(name: str, case: Case) -> Device:
    """A row of DEVICES, by its key or torch's name for it, or a torch.device that is here: its row, else `measured`."""
    here = torch.device(name) if name.startswith(("cpu", "cuda")) else None
    full_name = torch.cuda.get_device_name(here) if here is not None and here.type == "cuda" else name
    known = next((device for key, device in DEVICES.items() if full_name in (key, device.name)), None)
    if known is None and here is None:
        raise ValueError(f"device={name!r}; expected cpu, cuda or one of {', '.join(DEVICES)}")
    return known or measured(torch.device(name), case.torch_dtype, case.hidden_size, case.vocab_size)


@functools.cache
def measured(device: torch.device, dtype: torch.dtype, hidden_size: int, vocab_size: int) -> Device:
    """In a second: the mean rate of the three products, over H and a slice of V, and that of a copy."""
    rows, enough = (512, 2e10) if device.type == "cpu" else (4096, 3e12)  # FLOP of a call
    columns = min(vocab_size, max(256, int(enough / (6 * rows * hidden_size))))
    kind = torch.float32 if device.type == "cpu" and dtype == torch.float16 else dtype  # no usable float16 product
    h, w = (torch.randn(n, hidden_size, device=device).to(kind) for n in (rows, columns))
    logits = h @ w.T
    took = median_seconds(lambda: (torch.mm(h, w.T, out=logits), torch.mm(logits, w), torch.mm(logits.T, h)), device)
    source, target = torch.ones(2, 2**28, dtype=torch.uint8, device=device)  # more than caches hold
    rates = {str(dtype).removeprefix("torch."): 6 * rows * hidden_size * columns / took}
    bandwidth = 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device)
    if device.type == "cpu":
        return Device("cpu", "cpu", rates, bandwidth, source="measured here just now")
    properties = torch.cuda.get_device_properties(device)
    size, processors = properties.total_memory, properties.multi_processor_count
    return Device(properties.name, "cuda", rates, bandwidth, size, "measured here just now", processors)


def median_seconds(work: Callable[[], object], device: torch.device, budget: float = 0.3) -> float:
    """Of the calls that fit into `budget` seconds of the clock, after one that warms up."""
    times: list[float] = []
    work()
    end = time.perf_counter() + budget
    while len(times) < 3 or time.perf_counter() < end:
        times.append(seconds(work, device))
    return statistics.median(times)


# --- a case -----------------------------------------------------------------------------------------------------------


class Prediction(NamedTuple):
    seconds: float
    flops: int
    bytes: int
    peak_bytes: int


class _Model:
    """Adds up the parts of a case: products and passes over memory. Methods of a way return its peak of memory."""

    def __init__(self, case: Case, device: Device) -> None:
        self.case, self.device = case, device
        self.tokens, self.width, self.vocab = case.tokens, case.hidden_size, case.vocab_size
        self.item, self.weight = case.torch_dtype.itemsize, case.hidden_size * case.vocab_size  # bytes; elements
        self.seconds, self.flops, self.bytes = 0.0, 0, 0

    def product(self, tokens: int, bytes: int) -> None:
        """One of the three matrix products, over the hidden size and the vocabulary."""
        flops = 2 * tokens * self.weight
        self.flops, self.bytes = self.flops + flops, self.bytes + bytes
        self.seconds += max(flops / self.device.flops[self.case.dtype], bytes / self.device.bandwidth)

    def move(self, bytes: int, rate: float = 1.0) -> None:
        self.bytes += bytes
        self.seconds += bytes / (rate * self.device.bandwidth)

    def gradients(self, tokens: int, rows: int, dlogits: int) -> None:
        """The products of dhidden and, where the head is trained, dweight, `rows` tokens at a time."""
        chunks = math.ceil(tokens / rows)
        moved = tokens * (self.vocab * dlogits + self.width * self.item)
        if tokens and self.case.mode != "forward":
            self.product(tokens, moved + chunks * self.weight * self.item)
        if tokens and self.case.mode == "step":
            added = (2 * chunks - 1) * 4 if chunks > 1 else self.item  # bytes of sums in float32, per element
            self.product(tokens, moved + self.weight * added)
            self.move(self.weight * (4 + self.item) * (chunks > 1))

    def floor(self) -> int:
        logits = self.tokens * self.vocab * self.item
        self.product(self.tokens, logits + (self.tokens * self.width + self.weight) * self.item)
        self.gradients(self.tokens, self.tokens, self.item)
        return logits

    def kept(self) -> int:
        """Products over kept ids, bound by memory, where each row is read every time; other tokens as `rows`."""
        masked = round(self.tokens * self.case.masked_share)
        pairs, products = masked * self.case.kept_ids, {"step": 3, "frozen": 2, "forward": 1}[self.case.mode]
        self.flops += products * 2 * pairs * self.width
        rate = 1.0 if self.device.type == "cpu" else ROW_RATE
        self.move(products * (pairs + masked) * self.width * self.item, rate)
        self.move(self.weight * self.item * (self.case.mode == "step"), rate)
        self.tokens -= masked
        return KEPT_BYTES * pairs + (self.rows() if self.tokens else 0)

    def rows(self) -> int:
        kind, on_cpu = torch.device(self.device.type), self.device.type == "cpu"
        active = 0 if self.case.mode == "forward" else self.tokens - idle_tokens(self.case)
        logits_dtype = default_logits_dtype(self.case.torch_dtype, kind)
        grad_dtype = logits_dtype if on_cpu else self.case.torch_dtype
        capacity = capacity_of(kind) if on_cpu else gpu_capacity(self.device.memory, self.device.multiprocessors)
        wants, shape = (self.case.mode != "forward", self.case.mode == "step", False), (self.vocab, self.width)
        sizes = chunk_sizes(self.tokens, shape, logits_dtype, grad_dtype, kind, wants, capacity=capacity)
        for count, written in ((active, grad_dtype.itemsize), (self.tokens - active, 0)):
            chunks, logits = math.ceil(count / sizes.logits), count * self.vocab * logits_dtype.itemsize
            self.product(count, logits + (count * self.width + chunks * self.weight) * self.item)
            self.move(logits + count * self.vocab * written, 1.0 if on_cpu else ROW_RATE)
        self.gradients(active, sizes.products, grad_dtype.itemsize)
        peak = sizes.scratch_bytes(self.vocab, logits_dtype, grad_dtype)
        if wants[1] and sizes.products < active and self.item < 4:  # sums in float32, beside the scratch or the cast
            peak = max(peak, self.weight * self.item) + self.weight * (4 - self.item)
        return peak


def idle_tokens(case: Case) -> int:
    """Zero-gradient tokens: those of prompts with equal rewards, where there is no KL term."""
    per_prompt, share = case.length * case.generations, 1.0 if case.generations == 1 else case.idle_share
    return 0 if case.beta != 0 else round(case.tokens // per_prompt * share) * per_prompt


def ways(case: Case) -> list[str]:
    """What there is a model of.

    "floor": the matrix products of the mode, over all tokens at once. "rows": this library, logits, a row kernel and
    two products. "kept": this library with a sampling mask, which reads a row of the weight and one of the hidden
    states for each kept id.
    """
    return ["floor", "rows", *(["kept"] if case.kept_ids else [])]


def predict(case: Case, device: Device, way: str = "rows") -> Prediction:
    """What a way of `ways` should cost at least."""
    model = _Model(case, device)
    peak = {"floor": model.floor, "kept": model.kept, "rows": model.rows}[way]()
    return Prediction(model.seconds, model.flops, model.bytes, peak)


def predictions(case: Case, device: torch.device) -> dict[str, Any]:
    """For the JSON of a run: {"device", "source", "ways": way -> a Prediction's fields}."""
    rates = find_device(str(device), case)
    found = {way: predict(case, rates, way)._asdict() for way in ways(case)}
    return {"device": rates.name, "source": rates.source, "ways": found}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="H200", help=f"{', '.join(DEVICES)}; cpu or cuda: measured here")
    parser.add_argument("--shapes", nargs="+", default=["llama-3-8b:16384", "qwen2.5-1.5b:16384"])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--mode", choices=MODES, default="step")
    parser.add_argument("--kept-ids", type=int, default=0, help="of a sampling mask, per token; default: no mask")
    chosen = parser.parse_args(argv)
    for shape in chosen.shapes:
        case = make_case(shape, chosen.dtype, mode=chosen.mode, kept_ids=chosen.kept_ids)
        device = find_device(chosen.device, case)
        rows = []
        for way in ways(case):
            one, floor = predict(case, device, way), predict(case, device, "floor")
            cells = one.flops / 1e12, one.bytes / 1e9, one.seconds * 1e3, one.seconds / floor.seconds
            rows.append([way, *(f"{cell:.2f}" for cell in cells), f"{one.peak_bytes / 2**20:,.0f}"])
        print(f"{case} on {device.name} ({device.source})\n")
        print(table(("", "TFLOP", "GB", "ms", "of floor", "memory MiB"), rows), end="\n\n")


if __name__ == "__main__":
    main()

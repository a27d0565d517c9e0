"""What the hardware would allow: FLOPs, bytes, seconds and memory of a case, on a named device or on the one here.

    python -m grpo_kernels.benchmarks.limits --device H200 --shapes llama-3-8b:16384 --mode step

A product takes the longer of its multiply-adds and its memory traffic; on a GPU its multiply-adds take whole waves of
tiles over the multiprocessors. A pass over logits is memory traffic. Caches are ideal, each operand moves once per
chunk, parts follow one another, and exponentials and what is O(N) are left out: a lower limit. Memory is what the
benchmarks measure: the high-water mark less inputs and returned gradients.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..engine.memory import TILE_COLUMNS, TILE_ROWS, capacity_of, chunk_sizes, default_logits_dtype, gpu_capacity
from .cases import DTYPES, MODES, Case, make_case
from .machine import synchronize
from .show import WAYS, table

LAUNCHES = {"floor": 3, "eager": 60, "kept": 110}  # of a call; otherwise those of _chunked
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
    multiprocessors: int = 0  # 0: waves of tiles are not modelled, as on a CPU
    launch: float = 4e-6  # seconds of the host per operator


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
    for key, known in DEVICES.items():
        if full_name in (key, known.name):
            return known
    if here is None:
        raise ValueError(f"device={name!r}; expected cpu, cuda or one of {', '.join(DEVICES)}")
    return measured(here, case.torch_dtype, case.hidden_size, case.vocab_size)


@functools.cache
def measured(device: torch.device, dtype: torch.dtype, hidden_size: int, vocab_size: int) -> Device:
    """In a second: the mean rate of the three products, over H and a slice of V, and that of a copy."""
    on_cpu = device.type == "cpu"
    rows, enough = (512, 2e10) if on_cpu else (4096, 3e12)  # FLOP of a call
    columns = min(vocab_size, max(256, int(enough / (6 * rows * hidden_size))))
    kind = torch.float32 if on_cpu and dtype == torch.float16 else dtype  # a CPU has no usable float16 product
    h, w = (torch.randn(n, hidden_size, device=device).to(kind) for n in (rows, columns))
    logits = h @ w.T
    products: tuple[Callable[[], object], ...] = (
        lambda: torch.mm(h, w.T, out=logits),
        lambda: torch.mm(logits, w),
        lambda: torch.mm(logits.T, h),
    )
    took = median_seconds(lambda: [product() for product in products], device)
    source = torch.ones(2**28, dtype=torch.uint8, device=device)  # more than caches hold
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device)
    rates = {str(dtype).removeprefix("torch."): 6 * rows * hidden_size * columns / took}
    if on_cpu:
        return Device("cpu", "cpu", rates, bandwidth, source="measured here just now", launch=2e-6)
    properties = torch.cuda.get_device_properties(device)
    size, processors = properties.total_memory, properties.multi_processor_count
    return Device(properties.name, "cuda", rates, bandwidth, size, "measured here just now", processors)


def median_seconds(work: Callable[[], object], device: torch.device, budget: float = 0.3) -> float:
    """Of the calls that fit into `budget` seconds, after one that warms up."""
    times: list[float] = []
    work()
    while len(times) < 3 or sum(times) < budget:
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


# --- a case -----------------------------------------------------------------------------------------------------------


class Prediction(NamedTuple):
    seconds: float
    flops: int
    bytes: int
    peak_bytes: int


class Part(NamedTuple):
    """FLOPs and bytes, and how much longer than at full rate each takes."""

    flops: int
    bytes: int
    waves: float = 1.0
    rate: float = 1.0

    def seconds(self, device: Device, dtype: str) -> float:
        computing = self.waves * self.flops / device.flops[dtype] if self.flops else 0.0
        return max(computing, self.bytes / (self.rate * device.bandwidth))


def supported_ways(case: Case, device: Device) -> tuple[str, ...]:
    missing = {"linear": device.type == "cpu" or case.dtype == "float32", "kept": not case.kept_ids}
    missing["unscored"] = case.mode == "forward"
    return tuple(way for way in WAYS if not missing.get(way))


def idle_tokens(case: Case) -> int:
    """Zero-gradient tokens: those of prompts with equal rewards, where there is no KL term."""
    if case.beta != 0:
        return 0
    per_prompt = case.length * case.generations
    return round(case.tokens // per_prompt * (1.0 if case.generations == 1 else case.idle_share)) * per_prompt


def predict(case: Case, device: Device, way: str = "rows") -> Prediction:
    """What `way` should cost at least; ValueError where it does not serve the case."""
    if way not in supported_ways(case, device):
        raise ValueError(f"{way!r} does not serve {case} on {device.name}")
    model = {"floor": _floor, "eager": _eager, "kept": _kept}.get(way)
    parts, peak, launches = model(case, device) if model else _chunked(case, device, way)
    time = sum(part.seconds(device, case.dtype) for part in parts) + device.launch * launches
    return Prediction(time, sum(part.flops for part in parts), sum(part.bytes for part in parts), peak)


def predictions(case: Case, device: torch.device) -> dict[str, Any]:
    """For the JSON of a run: {"device", "source", "ways": way -> a Prediction's fields}."""
    rates = find_device(str(device), case)
    found = {way: predict(case, rates, way)._asdict() for way in supported_ways(case, rates)}
    return {"device": rates.name, "source": rates.source, "ways": found}


def _product(rows: int, columns: int, depth: int, bytes: int, device: Device, count: float = 1.0) -> Part:
    """(rows, depth) x (depth, columns), `count` times; fewer tiles than multiprocessors split the sum instead."""
    tiles, processors = math.ceil(rows / TILE_ROWS) * math.ceil(columns / TILE_COLUMNS), device.multiprocessors
    waves = math.ceil(tiles / processors) * processors / tiles if processors and tiles >= processors else 1.0
    return Part(round(2 * count * rows * columns * depth), bytes, waves)


def _products(case: Case, device: Device, tokens: int, rows: int, dlogits: int, mode: str) -> Iterator[Part]:
    """Those of the gradients, `rows` at a time: dhidden and, where the head is trained, dweight."""
    h, v, item = case.hidden_size, case.vocab_size, case.torch_dtype.itemsize
    chunks = math.ceil(tokens / rows) if tokens else 0
    rows = min(rows, tokens)
    if chunks and mode != "forward":
        yield _product(rows, h, v, tokens * (v * dlogits + h * item) + chunks * v * h * item, device, tokens / rows)
    if chunks and mode == "step":
        added = (2 * chunks - 1) * 4 if chunks > 1 else item  # bytes of sums in float32, per element
        yield _product(v, h, rows, tokens * (v * dlogits + h * item) + v * h * added, device, tokens / rows)
        if chunks > 1:
            yield Part(0, v * h * (4 + item))


def _floor(case: Case, device: Device) -> tuple[list[Part], int, int]:
    n, h, v, item = case.tokens, case.hidden_size, case.vocab_size, case.torch_dtype.itemsize
    logits = _product(n, v, h, (n * v + n * h + v * h) * item, device)
    return [logits, *_products(case, device, n, n, item, case.mode)], n * v * item, LAUNCHES["floor"]


def _eager(case: Case, device: Device) -> tuple[list[Part], int, int]:
    """implementations/torch_.py: logits, float32 copy, log_softmax; backward in float32 as far as the first product."""
    parts, logits_bytes, _ = _floor(case, device)
    cells, item = case.tokens * case.vocab_size, case.torch_dtype.itemsize
    cast = item + 4 if item < 4 else 0
    moved, held = (cast + 8, max(cast, 8)) if case.mode == "forward" else (2 * cast + 24, 12)
    returned = {"step": 1, "frozen": 0}.get(case.mode, 0) * case.vocab_size * case.hidden_size * item
    return [*parts, Part(0, moved * cells)], max(held * cells - returned, logits_bytes), LAUNCHES["eager"]


def _kept(case: Case, device: Device) -> tuple[list[Part], int, int]:
    """Products over kept ids, bound by memory, where each row is read every time; other tokens as `rows`."""
    masked = round(case.tokens * case.masked_share)
    pairs, item = masked * case.kept_ids, case.torch_dtype.itemsize
    moved = (pairs + masked) * case.hidden_size * item
    dweight = case.vocab_size * case.hidden_size * item
    rate = ROW_RATE if device.type == "cuda" else 1.0
    written = {"step": (0, 0, dweight), "frozen": (0, 0), "forward": (0,)}[case.mode]
    parts = [Part(2 * pairs * case.hidden_size, moved + more, rate=rate) for more in written]
    rest, peak, launches = _chunked(case, device, "rows", case.tokens - masked) if masked < case.tokens else ([], 0, 0)
    return [*parts, *rest], KEPT_BYTES * pairs + peak, LAUNCHES["kept"] + launches


def _chunked(case: Case, device: Device, way: str, tokens: int | None = None) -> tuple[list[Part], int, int]:
    n, h, v, item = tokens or case.tokens, case.hidden_size, case.vocab_size, case.torch_dtype.itemsize
    kind, on_cpu = torch.device(device.type), device.type == "cpu"
    idle = 0 if way == "recompute" else idle_tokens(case)
    active = 0 if case.mode == "forward" else n - idle
    scored = 0 if way == "unscored" else n - active
    logits_dtype = default_logits_dtype(case.torch_dtype, kind)
    grad_dtype = logits_dtype if on_cpu else case.torch_dtype
    capacity = capacity_of(kind) if on_cpu else gpu_capacity(device.memory, device.multiprocessors)
    wants = (case.mode != "forward", case.mode == "step", False)
    sizes = chunk_sizes(n, (v, h), logits_dtype, grad_dtype, kind, wants, capacity=capacity)
    rate = 1.0 if on_cpu else ROW_RATE
    parts, launches = [], 12
    # (tokens, bytes per logit that the product writes, that passes over it move)
    passes = [(active, logits_dtype.itemsize, logits_dtype.itemsize + grad_dtype.itemsize)]
    passes.append((scored, 0, 0) if way == "linear" else (scored, logits_dtype.itemsize, logits_dtype.itemsize))
    if way == "recompute":
        passes = [(n, logits_dtype.itemsize, logits_dtype.itemsize + (item if active else 0))] * (2 if active else 1)
    for count, written, moved in passes:
        if count:
            rows = min(sizes.logits, count)
            chunks = math.ceil(count / rows)
            bytes = count * (v * written + h * item) + chunks * v * h * item
            parts.append(_product(rows, v, h, bytes, device, count / rows))
            parts.append(Part(0, count * v * moved, rate=rate))
            launches += 2 * chunks
    gradients = list(_products(case, device, active, sizes.products, grad_dtype.itemsize, case.mode))
    peak = sizes.scratch_bytes(v, logits_dtype, grad_dtype) if active or way != "linear" else 0
    if wants[1] and sizes.products < active:  # sums in float32, beside the scratch or the cast
        peak = max(peak, v * h * item) + v * h * (4 - item) if item < 4 else peak
    return [*parts, *gradients], peak, launches + 2 * math.ceil(active / sizes.products)


def report(case: Case, device: Device) -> str:
    """A table of the ways to compute a case."""
    found = {way: predict(case, device, way) for way in supported_ways(case, device)}
    rows = []
    for way, one in found.items():
        cells = one.flops / 1e12, one.bytes / 1e9, one.seconds * 1e3, one.seconds / found["floor"].seconds
        rows.append([way, *(f"{cell:.2f}" for cell in cells), f"{one.peak_bytes / 2**20:,.0f}"])
    header = ("", "TFLOP", "GB", "ms", "of floor", "memory MiB")
    return f"{case} on {device.name} ({device.source})\n\n{table(header, rows)}"


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
        print(report(case, find_device(chosen.device, case)), end="\n\n")


if __name__ == "__main__":
    main()

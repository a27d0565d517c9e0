"""What hardware can do: rates to plan with, of named devices or measured on the one that is here."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .cases import Case
from .machine import synchronize


@dataclass(frozen=True)
class Device:
    """Rates to plan with: FLOP/s of a large matrix product by type, bytes/s that a copy reads and writes together.

    `flops`: where every wave of tiles is full and the results are written in the type of the inputs.
    """

    name: str  # as torch gives it
    type: str  # of torch.device
    flops: dict[str, float]
    bandwidth: float
    launch: float = 4e-6  # seconds of the host per small operator; assumed, where it is not measured
    memory: float = float("inf")  # bytes
    source: str = ""  # where the rates are from
    multiprocessors: int = 0  # 0: tiles and waves are not modelled, as on a CPU
    gap: float = 0.0  # seconds between a kernel and the next one on its stream
    read: float = 0.0  # seconds of a host that waits for the device and reads a few bytes of it


# Both assumed, for any GPU: the end of a kernel and the start of the next; a copy of a few bytes to a host that waits.
_GAP, _READ = 2e-6, 20e-6


def _datasheet(
    name: str, half: float, single: float, bandwidth: float, memory: float, multiprocessors: int, copies: float = 0.8
) -> Device:
    """TFLOP/s (dense), TB/s, GB of NVIDIA's datasheets. Large products reach about 0.8 of that, copies `copies`."""
    rates = {"bfloat16": half * 0.8e12, "float16": half * 0.8e12, "float32": single * 0.8e12}
    source = "datasheet times 0.8" + ("" if copies == 0.8 else f", bandwidth times {copies}")
    return Device(
        name, "cuda", rates, bandwidth * copies * 1e12, memory=memory * 1e9, source=source,
        multiprocessors=multiprocessors, gap=_GAP, read=_READ,
    )  # fmt: skip


DEVICES = {
    "H200": Device(
        "NVIDIA H200",
        "cuda",
        {"bfloat16": 790e12, "float16": 790e12, "float32": 67 * 0.8e12},
        4.3e12,
        memory=141e9,
        source="bfloat16 product and copy rates measured by others; float32: datasheet times 0.8",
        multiprocessors=132,
        gap=_GAP,
        read=_READ,
    ),
    # Copies: 4.3 of 4.8 TB/s on an H200, which has the same chip.
    "H100": _datasheet("NVIDIA H100 80GB HBM3", 989, 67, 3.35, 80, 132, copies=0.9),
    "A100": _datasheet("NVIDIA A100-SXM4-80GB", 312, 19.5, 2.039, 80, 108),
    "B200": _datasheet("NVIDIA B200", 2250, 75, 8.0, 180, 148),
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


_COPIED = 2**28  # bytes, more than caches hold
_SMALL_LAUNCHES = 200
_HERE = "measured here just now"


@functools.cache
def measured(device: torch.device, dtype: torch.dtype, hidden_size: int, vocab_size: int) -> Device:
    """In a second or two: the mean rate of the three products, over H and a slice of V, and that of a copy."""
    on_cpu = device.type == "cpu"
    # A CPU has no usable float16 product: this library takes float32 there. On a GPU epilogues need float32's rate.
    kinds = {dtype: torch.float32 if on_cpu and dtype == torch.float16 else dtype}
    kinds |= {} if on_cpu else {torch.float32: torch.float32}
    rates = {
        str(key).removeprefix("torch."): _product_rate(device, kinds[key], hidden_size, vocab_size) for key in kinds
    }
    source = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    target, few = torch.empty_like(source), torch.zeros(8, device=device)
    bandwidth = 2 * _COPIED / _seconds(lambda: target.copy_(source), device)
    launch = _seconds(lambda: [few.add_(1) for _ in range(_SMALL_LAUNCHES)], device) / _SMALL_LAUNCHES
    if on_cpu:
        return Device("cpu", "cpu", rates, bandwidth, launch, source=_HERE)
    torch.cuda.empty_cache()  # what is measured next may be in another process
    properties = torch.cuda.get_device_properties(device)
    return Device(
        properties.name, device.type, rates, bandwidth, launch, properties.total_memory, _HERE,
        multiprocessors=properties.multi_processor_count, gap=_GAP, read=_READ,
    )  # fmt: skip


def _product_rate(device: torch.device, dtype: torch.dtype, hidden_size: int, vocab_size: int) -> float:
    """FLOP/s."""
    rows, enough = (512, 2e10) if device.type == "cpu" else (4096, 3e12)  # FLOP of a call
    columns = min(vocab_size, max(256, int(enough / (6 * rows * hidden_size))))
    h, w = (torch.randn(n, hidden_size, device=device).to(dtype) for n in (rows, columns))
    logits = h @ w.T

    def products() -> None:
        torch.mm(h, w.T, out=logits)
        torch.mm(logits, w)
        torch.mm(logits.T, h)

    return 6 * rows * hidden_size * columns / _seconds(products, device)


def _seconds(work: Callable[[], object], device: torch.device, budget: float = 0.3) -> float:
    """Median of the calls that fit into `budget` seconds, after one that warms up."""
    times: list[float] = []
    work()
    while len(times) < 3 or sum(times) < budget:
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)

"""Peak memory of one forward + backward: `python bench/memory.py [--shapes ...] [--against ours eager]`. Linux.

Each measurement has a freshly executed process of its own, one after another. There: a tiny call (thread pools, lazily
loaded libraries), the inputs, a reset of the kernel's high-water mark of resident memory, one step, and
    peak - resident before the step - bytes of the two returned gradients.
That is what a step needs on top of what any step needs. Eager's peak comes before its gradients exist, so this counts
them in its favour.
The allocator is glibc's as it comes: blocks of 32 MiB and more are mapped one by one and go back when freed. Memory
that matrix libraries take for packed operands is counted.
"""

from __future__ import annotations

import argparse
import os
import resource
from pathlib import Path
from typing import Any

import torch
from inputs import make_inputs
from peers import PEERS, missing
from report import OUT_OF_MEMORY, RESULTS, environment, isolated, synchronize, table, write
from shapes import DTYPES, SHAPES, WEIGHED, Shape

_MIB = 2**20
_RESERVE = 1024 * _MIB  # left to the rest of the machine
_TINY = Shape("warm-up", 32, 64, 512)


def main() -> None:
    options = _parser().parse_args()
    document: dict[str, Any] = {
        "environment": environment(torch.device(options.device)),
        "allocator": {k: v for k, v in os.environ.items() if k.startswith(("MALLOC_", "LD_PRELOAD", "GLIBC_TUNABLES"))},
        "cases": [],
    }
    for shape in options.shapes:
        for dtype in options.dtypes:
            found = {name: _weigh_apart(shape, dtype, options.device, name) for name in options.against}
            eager = found.get("eager", {}).get("peak_bytes")
            for report in found.values():
                if eager and "peak_bytes" in report:
                    report["ratio_to_eager"] = report["peak_bytes"] / eager
            document["cases"].append({"shape": SHAPES[shape]._asdict(), "dtype": dtype, "implementations": found})
            print(_show(SHAPES[shape], dtype, found), flush=True)
            write(options.output, document)
    print(f"written: {options.output}")


def _weigh_apart(shape: str, dtype: str, device: str, name: str) -> dict[str, Any]:
    why = missing(name)
    return {"missing": why} if why is not None else isolated(_weigh, shape, dtype, device, name)


def _weigh(shape_name: str, dtype_name: str, device_name: str, name: str) -> dict[str, Any]:
    """Peak of the first setting of an implementation; runs in a process of its own."""
    device, dtype, shape = torch.device(device_name), getattr(torch, dtype_name), SHAPES[shape_name]
    if device.type == "cpu":
        _limit_memory()
    tiny = make_inputs(_TINY, dtype, device, length=16)
    next(iter(PEERS[name].variants(tiny).values()))(tiny)
    inputs = make_inputs(shape, dtype, device)
    setting, step = next(iter(PEERS[name].variants(inputs).items()))
    before = _restart_peak(device)
    _, dhidden, dweight = step(inputs)
    synchronize(device)
    returned = dhidden.nbytes + dweight.nbytes
    peak = _peak(device) - before - returned
    logits = shape.logits_bytes(dtype.itemsize)
    return {"setting": setting, "peak_bytes": peak, "returned_bytes": returned, "of_all_logits": peak / logits}


def _limit_memory() -> None:
    """Make an allocation that the machine cannot hold fail here, before the kernel kills some process."""
    limit = _meminfo("MemAvailable") - _RESERVE
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _restart_peak(device: torch.device) -> int:
    """Set the high-water mark to what is held now, and return that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def _status(field: str) -> int:
    return _kib_field(Path("/proc/self/status"), field)


def _meminfo(field: str) -> int:
    return _kib_field(Path("/proc/meminfo"), field)


def _kib_field(path: Path, field: str) -> int:
    """Bytes of a line such as `VmHWM:   123 kB`."""
    line = next(line for line in path.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def _show(shape: Shape, dtype: str, found: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, report in found.items():
        if "peak_bytes" in report:
            ratio = f"{report['ratio_to_eager']:.3f}" if "ratio_to_eager" in report else ""
            peak, share = f"{report['peak_bytes'] / _MIB:.0f}", f"{report['of_all_logits']:.2f}"
            rows.append([name, peak, share, ratio, report["setting"]])
        else:
            text = report.get("missing") or report["error"]
            rows.append([name, OUT_OF_MEMORY if text.startswith(OUT_OF_MEMORY) else text])
    header = ("", "peak MiB", "of all logits", "to eager", "setting")
    return f"\n{shape}, {dtype}: peak memory beyond inputs and returned gradients\n{table(header, rows)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(WEIGHED), metavar="NAME")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    # compiled_eager would be charged with the compiler
    names = [name for name in PEERS if name not in ("floor", "compiled_eager")]
    parser.add_argument("--against", nargs="+", choices=PEERS, default=names, metavar="NAME")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=RESULTS / "memory.json")
    return parser


if __name__ == "__main__":
    main()

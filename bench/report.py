"""What every benchmark shares: a fresh process per case, the description of the machine, tables, JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

import grpo_kernels

RESULTS = Path(__file__).parent / "results"
OUT_OF_MEMORY = "out of memory"
_PACKAGES = ("torch", "trl", "liger-kernel", "transformers", "triton")


def isolated(function: Callable[..., dict[str, Any]], *arguments: object) -> dict[str, Any]:
    """`function(*arguments)` in a newly executed interpreter; a failure becomes {"error": ...}."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            return {"error": f"{OUT_OF_MEMORY}: the process was killed"}
        except Exception as error:  # a benchmark goes on with its next case
            return {"error": describe(error)}


def describe(error: BaseException) -> str:
    """One line; out of memory by that name."""
    first = (str(error).strip().splitlines() or [""])[0][:300]
    text = f"{type(error).__name__}: {first}"
    exhausted = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)
    return f"{OUT_OF_MEMORY}: {text}" if exhausted else text


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, processor, threads, date."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {"grpo-kernels": grpo_kernels.__version__} | {name: _version(name) for name in _PACKAGES},
        "backends": grpo_kernels.available_backends(),
    }


def write(path: Path, document: dict[str, Any]) -> None:
    """Write JSON; called after every case, so that an interrupted run leaves what it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines if len(line) == len(header)) for i in range(len(header))]
    padded = (
        [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=False))
        ]
        for line in lines
    )
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a timer sees finished work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()

"""Where something was measured: device, driver, versions, date; a device's memory; and the JSON of a run.

That JSON is {"environment", "command", "cases", "not_run"}. A case is {"case": its fields, "date",
"implementations": name -> what was found}.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import resource
from pathlib import Path
from typing import Any

import torch

from ... import __version__, available_backends
from ...trainer.files import write_text
from ...trainer.memory import bytes_of
from ..env import driver_version, package_version, processor

Document = dict[str, Any]
OUT_OF_MEMORY = "out of memory"
_PEERS = ("trl", "liger-kernel", "verl", "cut-cross-entropy", "quack-kernels", "nvidia-cutlass-dsl")
PACKAGES = ("triton", "transformers", *_PEERS, "numpy")
_RESERVE = 2**30  # bytes left to the rest of the machine


def environment(device: torch.device) -> dict[str, Any]:
    """Everything a reader needs to judge a number, ready for JSON."""
    on_gpu = device.type == "cuda"
    kept = ("GRPO_KERNELS_", "MALLOC_", "PYTORCH_")
    return {
        "date": now(),
        "device": torch.cuda.get_device_name(device) if on_gpu else str(device),
        "driver": driver_version() if on_gpu else None,
        "device_memory": torch.cuda.get_device_properties(device).total_memory if on_gpu else None,
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        # Of torch its own, which names its CUDA; the metadata of PyPI's wheels do not.
        "versions": {"grpo-kernels": __version__, "torch": str(torch.__version__)}
        | {name: package_version(name) for name in PACKAGES},
        "backends": available_backends(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(kept)},
    }


def write(path: Path, document: Document) -> None:
    """Atomically: an interrupted run keeps what was there before."""
    write_text(path, json.dumps(document, indent=1, default=str) + "\n")


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a timer sees finished work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(error: BaseException) -> str:
    """One line; out of memory by that name."""
    first = (str(error).strip().splitlines() or [""])[0][:300]
    text = f"{type(error).__name__}: {first}"
    exhausted = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)
    return f"{OUT_OF_MEMORY}: {text}" if exhausted else text


def limit_memory() -> None:
    """Make an allocation that the machine cannot hold fail here, before the kernel kills some process. Linux."""
    available = bytes_of("/proc/meminfo", "MemAvailable")
    if available is not None:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (max(0, available - _RESERVE), most))

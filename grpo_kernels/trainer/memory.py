"""The high-water mark of memory: of torch's allocator on a GPU, of resident memory on a CPU with Linux."""

from __future__ import annotations

import re
from pathlib import Path

import torch


def restart_peak(device: torch.device) -> int | None:
    """Sets the high-water mark to what is held now, and returns that in bytes; None where the system has none."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return bytes_of("/proc/self/status", "VmRSS")


def peak(device: torch.device) -> int:
    """Returns the bytes at the high-water mark since `restart_peak`."""
    found = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else bytes_of("/proc/self/status", "VmHWM")
    assert found is not None
    return found


def bytes_of(path: str, name: str) -> int | None:
    """Returns the bytes of a line such as `VmHWM:   123 kB`; None where the system has none."""
    try:
        found = re.search(rf"^{name}:\s*(\d+) kB", Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None

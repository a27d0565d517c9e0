"""The high-water mark of memory: of torch's allocator on a GPU, of resident memory on a CPU with Linux. What to lower
where there is none left."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from . import RunError

# Of allocators that raise RuntimeError: torch's for CPUs, cuBLAS, CUDA's runtime.
OUT_OF_MEMORY = ("DefaultCPUAllocator", "ALLOC_FAILED", "out of memory")


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
    size = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else bytes_of("/proc/self/status", "VmHWM")
    assert size is not None
    return size


def bytes_of(path: str, name: str) -> int | None:
    """Returns the bytes of a line such as `VmHWM:   123 kB`; None where the system has none."""
    try:
        match = re.search(rf"^{name}:\s*(\d+) kB", Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


def available(device: torch.device) -> int:
    """Returns the bytes that tensors could take on a GPU; of another device no limit is known."""
    if device.type != "cuda":
        return sys.maxsize
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@contextmanager
def advice_on_memory(phase: Callable[[], str]) -> Iterator[None]:
    """Makes RunError, with the options to lower, of an allocation that fails within it. phase: what was going on."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not (known or any(words in str(error) for words in OUT_OF_MEMORY)):
            raise
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise RunError(
            f"out of memory ({phase()}): {reason[0]}; lower per_device_train_batch_size, with "
            "gradient_accumulation_steps raised as much, or max_completion_length. Less memory is taken with "
            "gradient_checkpointing, with use_peft, with fsdp over several GPUs, or by a smaller model"
        ) from error

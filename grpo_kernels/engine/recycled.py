"""The scratch of the engine on a CPU: large tensors in memory of earlier ones that were freed.

glibc never keeps a freed block of 32 MiB or more: the next one is fresh from the system, which maps and clears its
pages one by one when they are first written. Of 1,024 rows of logits of 49,152 ids that takes as long as the product
that fills them. So the last blocks are kept here when their tensors are freed, and the system is told that it may take
them back: it does when memory is short, and until then using them again costs next to nothing. Tensors that a caller
gets, gradients, are ordinary ones.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections import deque
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

LEAST_BYTES = 32 * 2**20  # from here on glibc never keeps a freed block
_MOST_BLOCKS = 2  # of one call: logits and their gradients
# Bytes that no tensor uses, the latest last. Only operations that the interpreter does not divide touch it: a tensor
# may be freed by any thread, in the middle of any function.
_kept: deque[Tensor] = deque(maxlen=_MOST_BLOCKS)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty; a large one on a CPU lies in a block that is kept when the tensor and its views are freed."""
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST_BYTES or device.type != "cpu" or not hasattr(mmap, "MADV_FREE"):
        return torch.empty(shape, dtype=dtype, device=device)
    block = _take(size)
    if block is None:
        block = _new(size)
    memory = (ctypes.c_char * size).from_address(block.data_ptr())
    weakref.finalize(memory, _keep, block).atexit = False  # the tensor holds `memory`, and nothing else does
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def forget() -> None:
    """Give what is kept back to the system."""
    _kept.clear()


def _take(size: int) -> Tensor | None:
    """The smallest kept block that has so many bytes and not twice as many, if there is one."""
    found = _all()
    fitting = [block for block in found if size <= block.nbytes <= 2 * size]
    chosen = min(fitting, key=lambda block: block.nbytes) if fitting else None
    _kept.extend(block for block in found if block is not chosen)
    return chosen


def _all() -> list[Tensor]:
    """Remove and return all kept blocks."""
    found: list[Tensor] = []
    with suppress(IndexError):
        while True:
            found.append(_kept.popleft())
    return found


def _new(size: int) -> Tensor:
    """In large pages where Linux gives them: the first touch of 113 MB took 35 ms instead of 64."""
    try:
        block = torch.empty(size, dtype=torch.uint8, device="cpu")
    except RuntimeError:  # no memory within the limits of the process, which count what is kept; nobody else holds it
        forget()
        block = torch.empty(size, dtype=torch.uint8, device="cpu")
    _advise("MADV_HUGEPAGE", block)
    return block


def _keep(block: Tensor) -> None:
    """Keep it, and of the others the latest that fit into an eighth of the machine's memory with it."""
    _advise("MADV_FREE", block)
    kept, room = [], _machine_memory() // 8
    for x in (block, *reversed(_all())):
        room -= x.nbytes
        if room < 0:
            break
        kept.append(x)
    _kept.extend(reversed(kept))


@cache
def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _advise(name: str, block: Tensor) -> None:
    """madvise for the pages of a block, where the system supports the advice."""
    advice = getattr(mmap, name, None)
    if advice is None:
        return
    address, page = block.data_ptr(), mmap.PAGESIZE
    first, last = -(-address // page) * page, (address + block.nbytes) // page * page
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(advice))

"""What the engine allocates: how many rows of logits at a time, and in which type."""

from __future__ import annotations

import ctypes
import mmap
import threading
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import chunk_row_stride

# 16-bit products on a CPU may add this many chunks to a 16-bit dweight, which rounds once per chunk: what the exact
# entry of the sampled id saves (see lm_head.py) pays for that. Beyond it, sums are kept in float32.
ROUNDED_CHUNKS = 3
_BYTES_PER_MIB = 2**20
_FRESH_BYTES = 32 * _BYTES_PER_MIB  # from here on glibc never keeps a freed block
_lock = threading.Lock()
_kept: list[Tensor] = []  # at most one block of bytes
_CPU_BUDGET = 512 * _BYTES_PER_MIB
_LEAST_GPU_BUDGET = 4096 * _BYTES_PER_MIB
_GPU_SHARE = 1 / 16
_GPU_LOGITS_ROWS = 2048
_GPU_PRODUCT_ROWS = 20480  # a batch of 16,384 tokens and some is one chunk


class ChunkSizes(NamedTuple):
    """Rows at a time.

    products: in a pair of products, dlogits W and dlogits^T h
    logits: of logits; fewer than `products` only where gradients of logits are narrower, and get a buffer of their own
    sequences: whose gradients must lie over their logits, because all logits of a sequence come before its gradients
    """

    products: int
    logits: int
    sequences: int


def memory_budget(device: torch.device) -> int:
    """Bytes of a chunk, logits and their gradients together: of a GPU's memory a sixteenth, and 4 GiB at least."""
    if device.type == "cpu":
        return _CPU_BUDGET
    known = device.type == "cuda" and torch.cuda.is_available()
    return gpu_budget(torch.cuda.get_device_properties(device).total_memory if known else 0)


def gpu_budget(total_memory: float) -> int:
    """`memory_budget` of a GPU with so many bytes."""
    return max(_LEAST_GPU_BUDGET, int(total_memory * _GPU_SHARE))


@cache
def chunk_sizes(
    num_rows: int,
    vocab_size: int,
    logits_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    device: torch.device,
    chunk_rows: int | None = None,
    budget: int | None = None,
) -> ChunkSizes:
    """From N, V and a memory budget; `chunk_rows` of the caller stands for `products` and `sequences`.

    A product chunk reads W and reads and writes dweight once, so it must be long enough to hide that behind its
    4 P H V operations. CPU: 512 rows of float32 cost about 2 % of the products; 16-bit rows are worth fewer bytes and
    round a 16-bit dweight, so a chunk holds more of them. GPU: V H bytes cost what 184 rows of products do (H200), and
    one chunk alone needs no float32 sum besides.
    """
    on_cpu = device.type == "cpu"
    budget = memory_budget(device) if budget is None else budget
    row_bytes, grad_bytes = vocab_size * logits_dtype.itemsize, vocab_size * grad_dtype.itemsize
    longest = (512 if grad_dtype.itemsize > 2 else 1366) if on_cpu else _GPU_PRODUCT_ROWS
    few = 512 if on_cpu else _GPU_LOGITS_ROWS

    def bounded(rows: int, wanted: int) -> int:
        return max(1, min(max(min(rows, wanted), 16) if chunk_rows is None else chunk_rows, num_rows))

    # Gradients over the logits.
    together = bounded(budget // row_bytes, longest if grad_bytes == row_bytes or not on_cpu else few)
    if grad_bytes == row_bytes or grad_dtype == torch.float16:
        # The scale of float16 gradients is found from all rows of a chunk, before the first is written.
        return ChunkSizes(together, together, together)
    few = max(16, min(few, budget // 2 // row_bytes))
    products = bounded((budget - few * row_bytes) // grad_bytes, longest)
    if products <= 2 * few:  # a buffer of their own would take as much
        return ChunkSizes(products, products, together)
    return ChunkSizes(products, few, together)


def default_logits_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """float32 wherever the matrix product can return it; on a CPU that costs a float32 product and is a choice."""
    if dtype == torch.bfloat16 and device.type == "cpu":
        return dtype
    return torch.float32 if dtype.itemsize == 2 else dtype


def allocate_rows(rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A scratch (rows, V) of logits or their gradients; out of memory, the error names the setting that helps."""
    row_stride = chunk_row_stride(vocab_size, device)
    try:
        if device.type == "cpu" and rows * row_stride * dtype.itemsize >= _FRESH_BYTES:
            return _take(rows * row_stride * dtype.itemsize).view(dtype).view(rows, row_stride)
        block = torch.empty((rows, row_stride), dtype=dtype, device=device)
        return block if row_stride == vocab_size else block[:, :vocab_size]
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
            raise
        size = rows * vocab_size * dtype.itemsize / _BYTES_PER_MIB
        raise type(error)(
            f"no memory for one chunk of logits, {rows} x {vocab_size} {dtype} = {size:.0f} MiB: "
            f"set GRPOConfig.chunk_rows below {rows}. ({error})"
        ) from error


def allocate_gradient(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory of a gradient that is about to be written. On a CPU in large pages where Linux gives them:
    its first touch of 113 MB took 35 ms instead of 64."""
    x = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and x.nbytes >= _FRESH_BYTES:
        _advise("MADV_HUGEPAGE", x.data_ptr(), x.nbytes)
    return x


def release_rows(scratch: Tensor | None) -> None:
    """Keep a large scratch on a CPU for the next call: the latest alone, and where the system may take it back.

    Such a block is fresh from the system each time, which maps and clears its pages one by one at the first touch:
    1,024 rows of logits of 49,152 ids took 59 ms more than their product did in pages that were there (63 ms).
    """
    if scratch is None or scratch.device.type != "cpu" or not _FRESH_BYTES <= scratch.nbytes <= _CPU_BUDGET:
        return
    block = torch.empty(0, dtype=torch.uint8, device="cpu").set_(scratch.untyped_storage())
    # Linux may take these pages when memory is short; until it does, using them again costs next to nothing.
    _advise("MADV_FREE", block.data_ptr(), block.nbytes)
    with _lock:
        _kept[:] = [block]


def _take(size: int) -> Tensor:
    with _lock:
        block = _kept.pop() if _kept else None
    if block is None or block.nbytes < size:
        block = None  # freed before the next one is made
        block = torch.empty(size, dtype=torch.uint8, device="cpu")
    return block[:size]


def _advise(name: str, address: int, size: int) -> None:
    """madvise for these pages, where the system supports the advice."""
    advice = getattr(mmap, name, None)
    if advice is None:
        return
    first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(advice))

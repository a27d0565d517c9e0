"""What the engine allocates: how many rows of logits at a time, and in which type."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import chunk_row_stride
from . import recycled
from .products import cpu_multiplies

# 16-bit products on a CPU may add this many chunks to a 16-bit dweight, which rounds once per chunk: what the exact
# entry of the sampled id saves (see lm_head.py) pays for that. Beyond it, sums are kept in float32.
ROUNDED_CHUNKS = 3
_BYTES_PER_MIB = 2**20
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
    """float32 wherever the matrix product can return it; on a CPU that has products of bfloat16 it is a choice."""
    if device.type == "cpu" and cpu_multiplies(dtype):
        return dtype
    return torch.float32 if dtype.itemsize == 2 else dtype


def allocate_rows(rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A scratch (rows, V) of logits or their gradients; out of memory, the error names the setting that helps."""
    row_stride = chunk_row_stride(vocab_size, device)
    try:
        block = recycled.empty((rows, row_stride), dtype, device)
        return block if row_stride == vocab_size else block[:, :vocab_size]
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
            raise
        size = rows * vocab_size * dtype.itemsize / _BYTES_PER_MIB
        raise type(error)(
            f"no memory for one chunk of logits, {rows} x {vocab_size} {dtype} = {size:.0f} MiB: "
            f"set GRPOConfig.chunk_rows below {rows}. ({error})"
        ) from error

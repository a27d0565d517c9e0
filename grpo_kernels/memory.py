"""What the engine allocates: how many rows of logits at a time, and in which type."""

from __future__ import annotations

import torch
from torch import Tensor

from .params import chunk_pitch

# 16-bit products on a CPU may add this many chunks to a 16-bit dweight, which rounds once per chunk: what the exact
# entry of the sampled id saves (see head.py) pays for that. Beyond it, sums are kept in float32.
ROUNDED_CHUNKS = 3
_BYTES_PER_MIB = 2**20


def default_chunk_rows(num_rows: int, vocab_size: int, itemsize: int, device: torch.device) -> int:
    """Rows of logits to hold at a time, from N, V and a memory budget.

    Each chunk reads and writes dweight once, so a chunk must be long enough to hide that behind 6 C H V operations, and
    a chunk as long as N saves no memory. CPU: 512 rows of float32 cost about 2 % of the products; 16-bit rows are worth
    fewer bytes and round a 16-bit dweight, so a chunk holds more of them. GPU: 4,096 rows.
    """
    if device.type == "cpu":
        rows, budget = 512 if itemsize > 2 else 1366, 512 * _BYTES_PER_MIB
    else:
        rows, budget = 4096, 4096 * _BYTES_PER_MIB
    rows = max(min(rows, budget // (vocab_size * itemsize)), 16)
    return max(1, min(rows, num_rows))


def default_logits_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """float32 wherever the matrix product can return it; on a CPU that costs a float32 product and is a choice."""
    if dtype == torch.bfloat16 and device.type == "cpu":
        return dtype
    return torch.promote_types(dtype, torch.float32)


def allocate_chunk(rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The scratch (rows, V) of logits; out of memory, the error names the setting that helps."""
    pitch = chunk_pitch(vocab_size, device)
    try:
        return torch.empty((rows, pitch), dtype=dtype, device=device)[:, :vocab_size]
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
            raise
        size = rows * vocab_size * dtype.itemsize / _BYTES_PER_MIB
        raise type(error)(
            f"no memory for one chunk of logits, {rows} x {vocab_size} {dtype} = {size:.0f} MiB: "
            f"set GRPOConfig.chunk_rows below {rows}. ({error})"
        ) from error

"""Matrix products on a GPU with float32 results from 16-bit inputs, by whatever the torch at hand offers.

torch.mm and torch.addmm take `out_dtype` on NVIDIA GPUs, the latter not in every release, and not in builds for AMD
GPUs. Each is tried once per process; what is missing is computed in more steps, with one warning.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor

# Rows of a sum that are added or converted at a time, where torch has no product for the whole.
BLOCK_ROWS = 4096
# cuBLAS splits the sum of a product among thread blocks where its result has fewer tiles (of 128 x 256) than the GPU
# has multiprocessors (132 on an H100), and torch's default lets it round the parts to bfloat16.
SPLIT_SUM_ELEMENTS = 160 * 128 * 256


@cache
def returns_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether torch.mm returns float32 from inputs of a 16-bit `dtype` on this device. A CPU never does."""
    return device.type != "cpu" and _takes_out_dtype("mm", device, dtype, "W is converted to float32")


@cache
def adds_to_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether torch.addmm adds a product of a 16-bit `dtype` to a float32 matrix in place."""
    instead = "products are added to dweight in a step of their own"
    return returns_float32(device, dtype) and _takes_out_dtype("addmm", device, dtype, instead)


_DEVICE_ERRORS = ("out of memory", "CUDA error", "ALLOC_FAILED", "NOT_INITIALIZED", "CUBLAS_WORKSPACE_CONFIG")


def _takes_out_dtype(name: str, device: torch.device, dtype: torch.dtype, instead: str) -> bool:
    a, total = (torch.zeros(16, 16, dtype=t, device=device) for t in (dtype, torch.float32))
    factors = (a, a) if name == "mm" else (total, a, a)
    try:
        getattr(torch, name)(*factors, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        # A full or a broken device says nothing about what torch has: the error goes on, and the next call tries again.
        if isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in _DEVICE_ERRORS):
            raise
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"grpo_kernels: torch {torch.__version__} has no torch.{name} with out_dtype=float32 for {dtype} on "
            f"{device} ({reason}): {instead}, which takes longer",
            stacklevel=2,
        )
        return False
    return True


@cache
def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Returns whether torch's products of a 16-bit `dtype` on this CPU are faster than those of float32.

    Those of float16 never are. Without AVX-512, AMX or bfloat16 instructions oneDNN has none of bfloat16 either, and
    torch's own loops take 10 to 100 times as long as a product in float32 (2.13, AVX2: dlogits W of 128 x 49,152 x 576
    by one thread 11 s against 0.12).
    """
    mkldnn: bool = torch.backends.mkldnn.is_available()
    return dtype == torch.bfloat16 and mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b (M, N) in float32 from 16-bit a (M, K) and b (K, N), on a GPU."""
    if returns_float32(a.device, a.dtype):
        return torch.mm(a, b, out_dtype=torch.float32)
    out = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    b_fp32 = b.float()
    for out_block, rows in zip(out.split(BLOCK_ROWS), a.split(BLOCK_ROWS), strict=True):
        torch.mm(rows.float(), b_fp32, out=out_block)
    return out


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a @ b to `total` (M, N) float32, in place; a (M, K) and b (K, N) of a 16-bit type, on a GPU."""
    if adds_to_float32(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        return
    for out_block, rows in zip(total.split(BLOCK_ROWS), a.split(BLOCK_ROWS), strict=True):
        out_block += product(rows, b)


_lock, _depth, _restore = threading.Lock(), 0, False
_UNCHANGED = nullcontext()
_matmul = torch.backends.cuda.matmul
_allows_fp16_accumulation = torch._C._get_cublas_allow_fp16_accumulation  # what its attribute asks, in less time


def pinned_matmul_precision(device: torch.device) -> AbstractContextManager[None]:
    """Turns off autocast, and the process-wide switch torch.backends.cuda.matmul.allow_fp16_accumulation, while it is
    entered.

    With that switch on, torch raises where a product is to return float32. The last of several threads to leave turns
    it on again; until then it is off for the whole process, whose float16 products are more exact meanwhile.
    """
    if not (_depth or _allows_fp16_accumulation() or torch.is_autocast_enabled(device.type)):
        return _UNCHANGED
    return _pinned(device)


@contextmanager
def _pinned(device: torch.device) -> Iterator[None]:
    global _depth, _restore
    with _lock:
        _depth += 1
        if _matmul.allow_fp16_accumulation:
            _matmul.allow_fp16_accumulation, _restore = False, True
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and _restore:
                _matmul.allow_fp16_accumulation, _restore = True, False

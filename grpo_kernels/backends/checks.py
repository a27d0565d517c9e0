"""What the backends with kernels of their own check before an address leaves Python: a kernel would read it wrongly."""

from __future__ import annotations

import torch
from torch import Tensor

from ..params import TABLE_FIELDS

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_matrices(logits: Tensor, grad: Tensor | None = None) -> None:
    """(C, V) each, with contiguous rows at any pitch; `grad` may have a type of its own."""
    for name, matrix in (("logits", logits), ("grad", grad)):
        if matrix is None:
            continue
        if matrix.dtype not in LOGITS_DTYPES or matrix.dim() != 2:
            raise ValueError(f"{name}: expected a matrix in float32, bfloat16 or float16, got {matrix.dtype}")
        if matrix.shape != logits.shape or matrix.device != logits.device:
            raise ValueError(
                f"{name} has shape {tuple(matrix.shape)} on {matrix.device}, "
                f"logits {tuple(logits.shape)} on {logits.device}"
            )
        if matrix.shape[1] > 1 and matrix.stride(1) != 1:
            raise ValueError(f"{name}: expected a matrix with contiguous rows, got strides {matrix.stride()}")


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """hidden (C, H) and weight (V, H) of one type on one device; bias (V,), if any, contiguous."""
    if hidden.dtype != weight.dtype or hidden.dim() != 2 or hidden.shape[1:] != weight.shape[1:]:
        raise ValueError(
            f"expected hidden (C, H) and weight (V, H) of one type, got {hidden.dtype} {tuple(hidden.shape)} and "
            f"{weight.dtype} {tuple(weight.shape)}"
        )
    if hidden.device != weight.device or (bias is not None and bias.device != weight.device):
        raise ValueError(f"expected the lm_head on {hidden.device}, where the hidden states are")
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        raise ValueError(f"weight: expected a matrix with contiguous rows, got strides {weight.stride()}")
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        raise ValueError(f"bias: expected a contiguous ({weight.shape[0]},), got {tuple(bias.shape)}")


def check_table(table: Tensor, like: Tensor) -> None:
    """float32, one row per field of params.TABLE_FIELDS, one column per row of `like`, on its device."""
    shape = (len(TABLE_FIELDS), like.shape[0])
    if table.shape != shape or table.dtype != torch.float32 or (shape[1] > 1 and table.stride(1) != 1):
        raise ValueError(
            f"table: expected float32 {shape} with contiguous fields, got {table.dtype} {tuple(table.shape)}"
        )
    if table.device != like.device:
        raise ValueError(f"table: expected it on {like.device}, got {table.device}")


def check_vectors(like: Tensor, **vectors: tuple[Tensor | None, torch.dtype]) -> None:
    """Each is absent, or contiguous, of its type, with one value per row of `like`, on its device."""
    for name, (vector, dtype) in vectors.items():
        if vector is None:
            continue
        if vector.dtype != dtype or vector.shape != like.shape[:1] or vector.device != like.device:
            raise ValueError(
                f"{name}: expected {dtype} ({like.shape[0]},) on {like.device}, "
                f"got {vector.dtype} {tuple(vector.shape)} on {vector.device}"
            )
        if not vector.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous vector")


def check_scaled(x: Tensor, factor: Tensor) -> None:
    """x: contiguous, float32, bfloat16 or float16; factor: float32 () on its device."""
    if x.dtype not in LOGITS_DTYPES or not x.is_contiguous():
        raise ValueError(
            f"x: expected it contiguous in float32, bfloat16 or float16, got {x.dtype} with strides {x.stride()}"
        )
    if factor.dtype != torch.float32 or factor.dim() != 0 or factor.device != x.device:
        raise ValueError(
            f"factor: expected {torch.float32} () on {x.device}, got {factor.dtype} {tuple(factor.shape)} on "
            f"{factor.device}"
        )


def contiguous_rows(x: Tensor) -> Tensor:
    """The matrix, or a copy if its rows are not contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()

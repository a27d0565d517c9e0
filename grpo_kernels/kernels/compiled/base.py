"""What the compiled backends (csrc) share: tensors are handed over to the module of the binding, which takes their
addresses."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from ..operations import LogitChunk

PACKAGE = Path(__file__).parents[2]
INTERFACE = 20  # csrc/layout.h has the same numbers
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def version_problem(module: ModuleType, kind: str) -> str:
    """Returns why a module that was built from another version must not be called, or nothing."""
    if getattr(module, "INTERFACE", None) == INTERFACE:
        return ""
    return f"the compiled {kind} kernels are of another version: build again, pip install -e . or make test"


def why_not_built(name: str) -> str:
    """Returns what setup.py said when it did not build this module, or nothing."""
    reason = PACKAGE / f"{name}.missing"
    return reason.read_text(encoding="utf-8").strip() if reason.exists() else ""


def matrix(x: Tensor | None) -> tuple[Tensor | None, int, int]:
    """Returns (x, code of its type, row stride) of a matrix with contiguous rows; of none, a null pointer."""
    return (None, 0, 0) if x is None else (x, DTYPES[x.dtype], x.stride(0))


def row_arguments(
    chunk: LogitChunk, dlogp: Tensor | None = None, dentropy: Tensor | None = None, out: Tensor | None = None
) -> tuple[object, ...]:
    """Returns the fields of gk::RowArgs."""
    logits, rows, ids, temperature, stats, transform, bias, _ = chunk
    if dlogp is not None and dentropy is not None:  # one that autograd expanded from one number has a stride of 0
        dlogp, dentropy = dlogp.contiguous(), dentropy.contiguous()
    return (
        *matrix(logits), *logits.shape, bias, ids, rows.start, rows.index, temperature, *stats, dlogp, dentropy,
        *matrix(out), *transform,
    )  # fmt: skip

"""The compiled CPU kernels (csrc/cpu).

`load()` never raises: without the compiled module the caller gets the reason and another backend does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from ...contract import KeptPairs, contiguous_rows
from ...names import INTERFACE
from ..torch.backend import scale_in_pieces
from .base import CompiledBackend, Result


class CpuBackend(CompiledBackend):
    """CompiledBackend on the CPU, in torch's number of threads."""

    name = "cpu"

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module)
        self.has_amx = module.has_amx()

    def call(self, function: Callable[..., Result], device: torch.device, *arguments: object) -> Result:
        return function(*arguments, torch.get_num_threads())

    def add_rows(self, target: Tensor, ids: Tensor, scale: Tensor, rows: Tensor) -> None:
        rows = contiguous_rows(rows)
        self.module.add_rows(*self._matrix(target), rows, rows.stride(0), *rows.shape, ids, scale)

    def add_transposed(self, target: Tensor, source: Tensor, *, add: bool) -> None:
        self.call(
            self.module.add_transposed, target.device, *self._matrix(target), source,
            source.stride(0), *target.shape, add,
        )  # fmt: skip

    def kept_dweight(self, dlogits: Tensor, hidden: Tensor, pairs: KeptPairs, dweight: Tensor, *, add: bool) -> None:
        hidden = contiguous_rows(hidden)
        given = self._pairs(dlogits, hidden, pairs, len(dweight))
        self.call(self.module.kept_dweight, hidden.device, given, *self._matrix(dweight), add)

    scale = staticmethod(scale_in_pieces)  # there is nothing to gain on torch, which has threads and vectors too


def load() -> tuple[CpuBackend | None, str]:
    """(backend, "") or (None, the reason why the compiled kernels cannot be used)."""
    try:
        from ... import _cpu  # type: ignore[attr-defined]  # compiled; may be absent

        if getattr(_cpu, "INTERFACE", None) != INTERFACE:
            return None, "the compiled CPU kernels are of another version: build again, pip install -e . or make test"
        _cpu.cpu_isa()  # reads GRPO_KERNELS_CPU_ISA: a wrong value is reported here, not in the middle of a loss
    except (ImportError, ValueError) as error:
        return None, f"the compiled CPU kernels cannot be used: {error}"
    return CpuBackend(_cpu), ""

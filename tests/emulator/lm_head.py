"""The emulated head kernels as functions of torch tensors."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from grpo_kernels.backends.compiled.base import pack
from grpo_kernels.contract import RowStats
from grpo_kernels.names import KernelParams

from .build import EMULATOR, HERE, ROOT, build
from .kernels import DTYPES, empty_stats

POINTERS = (
    "hidden",
    "weight",
    "bias",
    "ids",
    "temperature",
    "table",
    "exponentials",
    "scale",
    "logp",
    "lse",
    "entropy",
)
SIZES = (
    "rows",
    "width",
    "vocab",
    "hidden_row_stride",
    "weight_row_stride",
    "exponentials_row_stride",
    "table_row_stride",
)
PARAMS_BYTES = len(pack(KernelParams()))


class HeadArgs(ctypes.Structure):
    """csrc/cuda/api.h"""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in SIZES),
        ("dtype", ctypes.c_int32),
        ("params", ctypes.c_uint8 * PARAMS_BYTES),
    ]


def build_head(csrc: Path = ROOT / "csrc", flags: tuple[str, ...] = ("-O2",)) -> Path:
    """The library that HeadKernels loads."""
    sources = [csrc / "cuda" / "lm_head_sm90.cu", csrc / "cuda" / "lm_head.cpp"]
    return build([*sources, *EMULATOR, HERE / "sm90.cpp", HERE / "lm_head_calls.cpp"], csrc, [*flags], "lm_head.so")


class HeadKernels:
    """`multiprocessors` decides how the work is split; `order` as in emulator.h and sm90.h."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.gk_head.restype = ctypes.c_char_p
        self.library.gk_serves_head.restype = ctypes.c_bool
        self.library.gk_items_cover.restype = ctypes.c_bool
        self.library.gk_head_args_size.restype = ctypes.c_size_t
        self.library.gk_head_workspace.restype = ctypes.c_size_t
        assert self.library.gk_head_args_size() == ctypes.sizeof(HeadArgs)

    def use(self, multiprocessors: int = 132, order: int = 0, capability: int = 90) -> None:
        self.library.gk_emulator_device(f"{capability},{multiprocessors}".encode())
        self.library.gk_emulator_order(order)

    def serves(self, hidden: Tensor, weight: Tensor, exponentials: Tensor | None = None) -> bool:
        args = head_args(hidden, weight, None, None, KernelParams(), exponentials=exponentials)
        return self.library.gk_serves_head(ctypes.byref(args))

    def covers(self, row_blocks: int, tiles: int, per_part: int, group: int) -> bool:
        return self.library.gk_items_cover(row_blocks, tiles, per_part, group)

    def workspace(self, rows: int, width: int, vocab: int) -> int:
        """Bytes that a product of this size asks for."""
        return self.library.gk_head_workspace(ctypes.byref(HeadArgs(rows=rows, width=width, vocab=vocab)))

    def linear_logp(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperature: Tensor,
        params: KernelParams,
        *,
        entropy: bool = True,
    ) -> RowStats:
        out = empty_stats(len(ids))
        given = out._asdict() if entropy else {**out._asdict(), "entropy": None}
        self._call(False, head_args(hidden, weight, bias, ids, params, temperature=temperature, **given))
        return out

    def anchored(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        table: Tensor,
        exponentials: Tensor,
        params: KernelParams,
    ) -> tuple[RowStats, Tensor]:
        out, scale = empty_stats(len(ids)), torch.full((len(ids),), torch.nan)
        given = {**out._asdict(), "table": table, "exponentials": exponentials, "scale": scale}
        self._call(True, head_args(hidden, weight, bias, ids, params, **given))
        return out, scale

    def _call(self, anchored: bool, args: HeadArgs) -> None:
        error = self.library.gk_head(anchored, ctypes.byref(args))
        if error:
            raise RuntimeError(error.decode())


def head_args(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor | None,
    params: KernelParams,
    **given: Tensor | None,
) -> HeadArgs:
    tensors = dict(given, hidden=hidden, weight=weight, bias=bias, ids=ids)
    row_strides = {
        f"{n}_row_stride": tensors[n].stride(0)
        for n in ("hidden", "weight", "exponentials", "table")
        if tensors.get(n) is not None
    }
    return HeadArgs(
        **{name: None if x is None else x.data_ptr() for name, x in tensors.items()},
        **row_strides,
        rows=hidden.shape[0],
        width=hidden.shape[1],
        vocab=weight.shape[0],
        dtype=DTYPES.index(hidden.dtype),
        params=(ctypes.c_uint8 * PARAMS_BYTES)(*pack(params)),
    )

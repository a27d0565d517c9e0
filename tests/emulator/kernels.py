"""The emulated kernels as functions of torch tensors. Shapes and types are the caller's business: these are tests."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import params as contract
from grpo_kernels.params import KernelParams, RowStats

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALES = ("group", "batch", "none")
BASELINES = ("mean", "leave_one_out", "none")


class Launch(NamedTuple):
    kernel: str
    grid: int
    block: int
    shared: int
    cluster: int


class Kernels:
    """Those of a library of build_kernels."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.gk_call.restype = ctypes.c_char_p
        self.library.gk_emulator_last_kernel.restype = ctypes.c_char_p

    def use(self, device: tuple[int, ...] | None = None, order: int = 0) -> None:
        """Capability, multiprocessors, shared memory per block and per multiprocessor, L2 bytes; None is an H200."""
        self.library.gk_emulator_device(",".join(map(str, device or ())).encode())
        self.library.gk_emulator_order(order)

    def last_launch(self) -> Launch:
        values = (self.library.gk_emulator_last_launch(i) for i in range(4))
        return Launch(self.library.gk_emulator_last_kernel().decode(), *values)

    def call(self, function: str, values: list[int | Tensor | None], numbers: list[float]) -> None:
        addresses = [v.data_ptr() if isinstance(v, Tensor) else v or 0 for v in values]
        error = self.library.gk_call(
            function.encode(),
            (ctypes.c_int64 * len(values))(*addresses),
            len(values),
            (ctypes.c_double * 16)(*numbers),
        )
        if error:
            raise RuntimeError(error.decode())

    # --- rows of logits -------------------------------------------------------------------------------------------

    def rows(self, function: str, logits: Tensor, ids: Tensor, params: KernelParams, **given: Tensor | None) -> None:
        grad, table = given.get("grad"), given.get("table")
        names = ("temperature", "logp", "lse", "entropy", "g_logp", "g_entropy")
        self.call(
            function,
            [
                *(logits, DTYPES.index(logits.dtype), logits.stride(0), *logits.shape),
                *((grad, DTYPES.index(grad.dtype), grad.stride(0)) if grad is not None else (None, 0, 0)),
                *(ids, given.get("residual"), table, 0 if table is None else table.stride(0)),
                *(given.get(name) for name in names),
            ],
            numbers_of(params),
        )

    def stats(self, logits: Tensor, ids: Tensor, temperature: Tensor, params: KernelParams) -> RowStats:
        out = empty_stats(len(logits))
        self.rows("stats", logits, ids, params, temperature=temperature, **out._asdict())
        return out

    def gradient(self, logits, grad, ids, temperature, lse, entropy, g_logp, g_entropy, params, residual=None) -> None:
        self.rows(
            "gradient", logits, ids, params, grad=grad, temperature=temperature, lse=lse, entropy=entropy,
            g_logp=g_logp, g_entropy=g_entropy, residual=residual,
        )  # fmt: skip

    def fused(self, logits, grad, ids, table, params, residual=None) -> RowStats:
        out = empty_stats(len(logits))
        self.rows("fused", logits, ids, params, grad=grad, table=table, residual=residual, **out._asdict())
        return out

    # --- tokens and rewards ---------------------------------------------------------------------------------------

    def objective(self, log_ratio, logp, entropy, table, params) -> tuple[Tensor, ...]:
        out = torch.full((4, len(logp)), torch.nan)
        values = [len(logp), log_ratio, logp, entropy, table, table.stride(0), out]
        self.call("objective", values, numbers_of(params))
        return tuple(out)

    def reduce(
        self, scored, log_ratio, logp, entropy, value, kl, g_logp, table, params, cu_seqlens, group_index, groups
    ) -> tuple[Tensor, ...]:
        sequences, columns = len(cu_seqlens) - 1, len(contract.COLUMNS)
        shapes = ((sequences, columns), (groups, columns), (columns,), (3,))
        out = [torch.full(shape, torch.nan) for shape in shapes]
        tokens = [scored, log_ratio, logp, entropy, value, kl, g_logp, table, len(scored), table.stride(0)]
        self.call("reduce", [*tokens, cu_seqlens, sequences, group_index, groups, *out], numbers_of(params))
        return tuple(out)

    def group_statistics(self, rewards, group_index, groups, scale, baseline, ddof, eps) -> tuple[Tensor, ...]:
        out = [torch.full((n,), torch.nan) for n in (len(rewards), groups, groups)]
        codes = [SCALES.index(scale), BASELINES.index(baseline), ddof]
        self.call("group_statistics", [rewards, group_index, len(rewards), groups, *codes, *out], [eps])
        return tuple(out)

    def scale(self, x: Tensor, factor: Tensor) -> None:
        self.call("scale", [x, DTYPES.index(x.dtype), x.numel(), factor], [])


def empty_stats(rows: int) -> RowStats:
    return RowStats(*(torch.full((rows,), torch.nan, dtype=t) for t in (torch.float32, torch.float64, torch.float32)))


def numbers_of(params: KernelParams) -> list[float]:
    codes = {"surrogate": contract.SURROGATES.index(params.surrogate), "kl": contract.KL_ESTIMATORS.index(params.kl)}
    return [codes.get(name, value) for name, value in params._asdict().items()]

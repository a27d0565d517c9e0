"""The compiled backends (csrc): tensors are checked here, addresses are handed over to the module of the binding."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import ModuleType

import torch
from torch import Tensor

from ..params import KernelParams, RowStats
from .base import GatheringBackend
from .checks import check_matrices, check_table, check_vectors

INTERFACE = 4  # of csrc/layout.h


class CompiledBackend(GatheringBackend):
    """Row kernels for logits (C, V) in fp32, bf16 or fp16, any row pitch; everything per token is fp32."""

    name: str
    device_type: str

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.dtypes = {getattr(torch, name): code for code, name in enumerate(module.DTYPES)}

    def where(self, device: torch.device) -> AbstractContextManager[int]:
        """Gives the last argument of each compiled function, which must be called inside: threads, or a stream."""
        raise NotImplementedError

    def workspace(self, sequences: int, device: torch.device) -> Tensor | None:
        """Scratch memory of `reduce`, if it needs any."""
        return None

    # --- rows of logits -------------------------------------------------------------------------------------------

    def fused(
        self,
        logits: Tensor,
        grad: Tensor,
        ids: Tensor,
        table: Tensor,
        params: KernelParams,
        residual: Tensor | None = None,
    ) -> RowStats:
        """Statistics (C,); d loss / d logits goes to `grad` (C, V), it may start where logits start."""
        check_matrices(logits, grad)
        check_table(table, logits)
        check_vectors(logits, ids=(ids, torch.int64), residual=(residual, torch.float32))
        outputs = row_stats(logits)
        with self.where(self._served(logits)) as where:
            self.module.fused(
                *self._logits(logits, ids), *self._matrix(grad), address(residual), table.data_ptr(), table.stride(0),
                *map(address, outputs), self.params(params), where,
            )  # fmt: skip
        return outputs

    def stats(self, logits: Tensor, ids: Tensor, temperature: Tensor, params: KernelParams) -> RowStats:
        """Statistics (C,)."""
        check_matrices(logits)
        check_vectors(logits, ids=(ids, torch.int64), temperature=(temperature, torch.float32))
        outputs = row_stats(logits)
        with self.where(self._served(logits)) as where:
            self.module.stats(
                *self._logits(logits, ids), temperature.data_ptr(), *map(address, outputs), self.params(params), where
            )
        return outputs

    def gradient(
        self,
        logits: Tensor,
        grad: Tensor,
        ids: Tensor,
        temperature: Tensor,
        lse: Tensor,
        entropy: Tensor,
        g_logp: Tensor,
        g_entropy: Tensor,
        params: KernelParams,
        residual: Tensor | None = None,
    ) -> None:
        """Writes d loss / d logits to `grad` from d loss / d logp and d loss / d entropy (C,) and the statistics."""
        check_matrices(logits, grad)
        single = torch.float32
        check_vectors(
            logits, ids=(ids, torch.int64), temperature=(temperature, single), lse=(lse, torch.float64),
            entropy=(entropy, single), g_logp=(g_logp, single), g_entropy=(g_entropy, single),
            residual=(residual, single),
        )  # fmt: skip
        per_row = temperature, lse, entropy, g_logp, g_entropy
        with self.where(self._served(logits)) as where:
            self.module.gradient(
                *self._logits(logits, ids), *self._matrix(grad), address(residual), *map(address, per_row),
                self.params(params), where,
            )  # fmt: skip

    # --- tokens and rewards ---------------------------------------------------------------------------------------

    def objective(
        self, log_ratio: Tensor, logp: Tensor, entropy: Tensor, table: Tensor, params: KernelParams
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(N,) each: value, d_ratio, d_direct, kl of every token at the given raw log ratios (N,)."""
        check_table(table, log_ratio)
        single = torch.float32
        check_vectors(log_ratio, log_ratio=(log_ratio, single), logp=(logp, single), entropy=(entropy, single))
        out = output((4, log_ratio.numel()), log_ratio.device)
        with self.where(self._served(log_ratio)) as where:
            self.module.objective(
                log_ratio.numel(), *map(address, (log_ratio, logp, entropy, table)), table.stride(0), out.data_ptr(),
                self.params(params), where,
            )  # fmt: skip
        return out[0], out[1], out[2], out[3]

    def reduce(
        self,
        scored: Tensor,
        log_ratio: Tensor,
        logp: Tensor,
        entropy: Tensor,
        value: Tensor,
        kl: Tensor,
        g_logp: Tensor,
        table: Tensor,
        params: KernelParams,
        cu_seqlens: Tensor,
        group_index: Tensor | None,
        num_groups: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(sequence_sums (S, K), group_sums (num_groups, K), totals (K,), extrema (3,)); K as in params.COLUMNS."""
        check_table(table, scored)
        single = torch.float32
        check_vectors(
            scored, scored=(scored, torch.bool), log_ratio=(log_ratio, single), logp=(logp, single),
            entropy=(entropy, single), value=(value, single), kl=(kl, single), g_logp=(g_logp, single),
        )  # fmt: skip
        check_vectors(cu_seqlens, cu_seqlens=(cu_seqlens, torch.int64))
        check_vectors(cu_seqlens[1:], group_index=(group_index, torch.int64))
        device = self._served(scored)
        sequences, columns = cu_seqlens.numel() - 1, len(self.module.COLUMNS)
        groups = 0 if group_index is None else num_groups
        shapes = (sequences, columns), (groups, columns), (columns,), (3,)
        sums, group_sums, totals, extrema = (output(shape, device) for shape in shapes)
        per_token = scored, log_ratio, logp, entropy, value, kl, g_logp, table
        workspace = self.workspace(sequences, device)
        with self.where(device) as where:
            self.module.reduce(
                scored.numel(), *map(address, per_token), table.stride(0), sequences, address(cu_seqlens),
                address(group_index), groups, *map(address, (sums, group_sums, totals, extrema)), self.params(params),
                address(workspace), where,
            )  # fmt: skip
        return sums, group_sums, totals, extrema

    def group_statistics(
        self, rewards: Tensor, group_index: Tensor, num_groups: int, scale: str, baseline: str, ddof: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(advantages (B,), mean (num_groups,), std (num_groups,)); NaN rewards are left out and get 0."""
        check_vectors(rewards, rewards=(rewards, torch.float32), group_index=(group_index, torch.int64))
        groups = (num_groups,)
        outputs = output(rewards.shape, rewards.device), output(groups, rewards.device), output(groups, rewards.device)
        with self.where(self._served(rewards)) as where:
            self.module.group_statistics(
                rewards.data_ptr(), group_index.data_ptr(), rewards.numel(), num_groups,
                self.module.SCALES.index(scale), self.module.BASELINES.index(baseline), ddof, eps,
                *map(address, outputs), where,
            )  # fmt: skip
        return outputs

    # --- arguments of the compiled functions ----------------------------------------------------------------------

    def params(self, params: KernelParams) -> tuple[float, ...]:
        """The values in the order of gk::Params."""
        if params.logit_scale <= 0 or params.softcap < 0:
            raise ValueError("logit_scale must be positive, softcap positive or 0")
        values = params._asdict()
        values["surrogate"] = self.module.SURROGATES.index(params.surrogate)
        values["kl"] = self.module.KL_ESTIMATORS.index(params.kl)
        return tuple(values[name] for name in self.module.PARAMS)

    def _logits(self, logits: Tensor, ids: Tensor) -> tuple[int, ...]:
        return *self._matrix(logits), *logits.shape, ids.data_ptr()

    def _matrix(self, matrix: Tensor) -> tuple[int, int, int]:
        """(address, code of the type, row pitch)."""
        return matrix.data_ptr(), self.dtypes[matrix.dtype], matrix.stride(0)

    def _served(self, x: Tensor) -> torch.device:
        """The tensor's device, if its memory is what these kernels can read."""
        if x.device.type != self.device_type:
            raise ValueError(f"backend {self.name!r} serves tensors on {self.device_type}, got one on {x.device}")
        return x.device


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def row_stats(like: Tensor) -> RowStats:
    """Uninitialised statistics of the rows of `like`, on its device."""
    shape, device = like.shape[:1], like.device
    return RowStats(output(shape, device), output(shape, device, torch.float64), output(shape, device))


def output(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory that a kernel fills, in the type that it writes: what torch.set_default_dtype says is nothing to it."""
    return torch.empty(shape, dtype=dtype, device=device)

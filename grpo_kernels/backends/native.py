"""The compiled CPU kernels (csrc/cpu): shapes and types are checked here, addresses are handed over.

`load()` never raises: without the compiled module the caller gets the reason and another backend does the work.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..params import KernelParams, RowStats

INTERFACE = 2  # of csrc/layout.h


class NativeBackend:
    """Row kernels for logits (C, V) in fp32, bf16 or fp16 on the CPU, any row pitch; everything per token is fp32."""

    name = "cpu"

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.dtypes = {getattr(torch, name): code for code, name in enumerate(module.DTYPES)}

    def strategies(self, hidden: Tensor, weight: Tensor) -> tuple[str, ...]:
        """Those of strategy.py that serve these inputs."""
        return ("rows",)

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
        rows = logits.shape[0]
        outputs = _row_stats(rows)
        pitch = self._check_table(table, rows)
        self.module.fused(
            *self._logits(logits, ids), *self._gradient(grad, logits, residual), table.data_ptr(), pitch,
            *(t.data_ptr() for t in outputs), self._params(params), torch.get_num_threads(),
        )  # fmt: skip
        return outputs

    def stats(self, logits: Tensor, ids: Tensor, temperature: Tensor, params: KernelParams) -> RowStats:
        """Statistics (C,)."""
        rows = logits.shape[0]
        outputs = _row_stats(rows)
        self.module.stats(
            *self._logits(logits, ids), *_addresses(rows, temperature), *(t.data_ptr() for t in outputs),
            self._params(params), torch.get_num_threads(),
        )  # fmt: skip
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
        rows = logits.shape[0]
        (temperature_at,) = _addresses(rows, temperature)
        (lse_at,) = _addresses(rows, lse, dtypes=(torch.float64,))
        per_row = temperature_at, lse_at, *_addresses(rows, entropy, g_logp, g_entropy)
        self.module.gradient(
            *self._logits(logits, ids), *self._gradient(grad, logits, residual), *per_row,
            self._params(params), torch.get_num_threads(),
        )  # fmt: skip

    # --- tokens and rewards ---------------------------------------------------------------------------------------

    def objective(
        self, log_ratio: Tensor, logp: Tensor, entropy: Tensor, table: Tensor, params: KernelParams
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(N,) each: value, d_ratio, d_direct, kl of every token at the given raw log ratios (N,)."""
        tokens = log_ratio.numel()
        out = torch.empty(4, tokens)
        pitch = self._check_table(table, tokens)
        self.module.objective(
            tokens, *_addresses(tokens, log_ratio, logp, entropy), table.data_ptr(), pitch, out.data_ptr(),
            self._params(params), torch.get_num_threads(),
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
        tokens, sequences, columns = scored.numel(), cu_seqlens.numel() - 1, len(self.module.COLUMNS)
        groups = 0 if group_index is None else num_groups
        sums = torch.empty(sequences, columns), torch.empty(groups, columns), torch.empty(columns), torch.empty(3)
        per_token = _addresses(tokens, log_ratio, logp, entropy, value, kl, g_logp)
        (scored_at,) = _addresses(tokens, scored, dtypes=(torch.uint8, torch.bool))
        (cu_seqlens_at,) = _addresses(sequences + 1, cu_seqlens, dtypes=(torch.int64,))
        group_at = 0
        if group_index is not None:
            (group_at,) = _addresses(sequences, group_index, dtypes=(torch.int64,))
        pitch = self._check_table(table, tokens)
        self.module.reduce(
            tokens, scored_at, *per_token, table.data_ptr(), pitch, sequences, cu_seqlens_at, group_at, groups,
            *(t.data_ptr() for t in sums), self._params(params), torch.get_num_threads(),
        )  # fmt: skip
        return sums

    def add_rows(self, target: Tensor, ids: Tensor, scale: Tensor, rows: Tensor) -> None:
        """target[ids] += scale * rows, equal ids in order; target (V, H) bf16 or fp32, rows (C, H) bf16."""
        if target.shape[1:] != rows.shape[1:]:
            raise ValueError(f"target has shape {tuple(target.shape)}, rows {tuple(rows.shape)}")
        target_dtype, target_pitch = self._matrix(target, "target")
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        rows_dtype, rows_pitch = self._matrix(rows, "rows")
        (ids_at,) = _addresses(rows.shape[0], ids, dtypes=(torch.int64,))
        (scale_at,) = _addresses(rows.shape[0], scale)
        self.module.add_rows(
            target.data_ptr(), target_dtype, target_pitch, target.shape[0],
            rows.data_ptr(), rows_dtype, rows_pitch, *rows.shape, ids_at, scale_at,
        )  # fmt: skip

    def group_statistics(
        self,
        rewards: Tensor,
        group_index: Tensor,
        num_groups: int,
        scale: str,
        baseline: str,
        ddof: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(advantages (B,), mean (num_groups,), std (num_groups,)); NaN rewards are left out and get 0."""
        count = rewards.numel()
        advantages, mean, std = torch.empty(count), torch.empty(num_groups), torch.empty(num_groups)
        (rewards_at,) = _addresses(count, rewards)
        (index_at,) = _addresses(count, group_index, dtypes=(torch.int64,))
        self.module.group_statistics(
            rewards_at, index_at, count, num_groups,
            self.module.SCALES.index(scale), self.module.BASELINES.index(baseline), ddof, eps,
            advantages.data_ptr(), mean.data_ptr(), std.data_ptr(),
        )  # fmt: skip
        return advantages, mean, std

    # --- arguments of the compiled functions ----------------------------------------------------------------------

    def _logits(self, logits: Tensor, ids: Tensor) -> tuple[int, ...]:
        dtype, pitch = self._matrix(logits, "logits")
        (ids_at,) = _addresses(logits.shape[0], ids, dtypes=(torch.int64,))
        return logits.data_ptr(), dtype, pitch, *logits.shape, ids_at

    def _gradient(self, grad: Tensor, logits: Tensor, residual: Tensor | None) -> tuple[int, int, int, int]:
        if grad.shape != logits.shape:
            raise ValueError(f"grad has shape {tuple(grad.shape)}, logits {tuple(logits.shape)}")
        residual_at = 0
        if residual is not None:
            (residual_at,) = _addresses(logits.shape[0], residual)
        return grad.data_ptr(), *self._matrix(grad, "grad"), residual_at

    def _matrix(self, matrix: Tensor, what: str) -> tuple[int, int]:
        """(dtype code, row pitch)."""
        if matrix.device.type != "cpu" or matrix.dtype not in self.dtypes:
            raise ValueError(
                f"{what}: expected {'/'.join(self.module.DTYPES)} on the CPU, got {matrix.dtype} on {matrix.device}"
            )
        if matrix.dim() != 2 or (matrix.shape[1] > 1 and matrix.stride(1) != 1):
            raise ValueError(f"{what}: expected a matrix with contiguous rows, got strides {matrix.stride()}")
        return self.dtypes[matrix.dtype], matrix.stride(0)

    def _check_table(self, table: Tensor, rows: int) -> int:
        """The pitch between two fields of a valid table."""
        if (
            table.shape != (len(self.module.TABLE_FIELDS), rows)
            or table.dtype != torch.float32
            or table.device.type != "cpu"
        ):
            raise ValueError(
                f"table: expected fp32 ({len(self.module.TABLE_FIELDS)}, {rows}) on the CPU, got {table.shape}"
            )
        if rows > 1 and table.stride(1) != 1:
            raise ValueError("table: expected contiguous fields")
        return table.stride(0)

    def _params(self, params: KernelParams) -> tuple[float, ...]:
        if params.logit_scale <= 0 or params.softcap < 0:
            raise ValueError("logit_scale must be positive, softcap positive or 0")
        values = params._asdict()
        values["surrogate"] = self.module.SURROGATES.index(params.surrogate)
        values["kl"] = self.module.KL_ESTIMATORS.index(params.kl)
        return tuple(values[name] for name in self.module.PARAMS)


def _row_stats(rows: int) -> RowStats:
    return RowStats(torch.empty(rows), torch.empty(rows, dtype=torch.float64), torch.empty(rows))


def _addresses(count: int, *vectors: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> list[int]:
    """Addresses of contiguous vectors; what a kernel would read wrongly is refused here."""
    for vector in vectors:
        if vector.device.type != "cpu" or vector.dtype not in dtypes or vector.numel() != count:
            raise ValueError(
                f"expected {count} values of {dtypes[0]} on the CPU, got {vector.dtype} {tuple(vector.shape)}"
            )
        if not vector.is_contiguous():
            raise ValueError("expected a contiguous vector")
    return [vector.data_ptr() for vector in vectors]


def load() -> tuple[NativeBackend | None, str]:
    """(backend, "") or (None, the reason why the compiled kernels cannot be used)."""
    try:
        from .. import _cpu  # type: ignore[attr-defined]  # compiled; may be absent

        if getattr(_cpu, "INTERFACE", None) != INTERFACE:
            return None, "the compiled CPU kernels are of another version: build again, pip install -e . or make test"
        _cpu.cpu_isa()  # reads GRPO_KERNELS_CPU_ISA: a wrong value is reported here, not in the middle of a loss
    except (ImportError, ValueError) as error:
        return None, f"the compiled CPU kernels cannot be used: {error}"
    return NativeBackend(_cpu), ""

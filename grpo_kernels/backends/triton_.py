"""The Triton kernels behind the backend interface: any NVIDIA GPU from Ampere on, AMD's where Triton goes.

Tensors are checked here; kernels are launched on the device and the current stream of their tensors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..kernels import groups, rows, tokens
from ..kernels.anchored import anchored
from ..kernels.launch import preferred_strategy
from ..kernels.linear_logp import linear_logp
from ..params import TABLE_FIELDS, KernelParams, RowStats
from ..strategy import STRATEGIES
from .torch_ import TorchBackend

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonBackend:
    """Row kernels for logits (C, V) in fp32, bf16 or fp16, any row pitch; everything per token is fp32."""

    name = "triton"

    def strategies(self, hidden: Tensor, weight: Tensor) -> tuple[str, ...]:
        """Those of strategy.py that serve these inputs, best first: as the table of launch.py says."""
        if weight.dtype.itemsize != 2 or weight.stride(-1) != 1:  # float32 products are the vendor's
            return ("rows",)
        served = ("linear", "rows") if weight.dtype == torch.float16 else STRATEGIES  # float16 cannot hold e^(z - z_id)
        best = preferred_strategy(weight.device, weight.shape[1], weight.shape[0], weight.dtype)
        return (best, *(name for name in served if name != best)) if best in served else served

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
        _check_matrices(logits, grad)
        _check_table(table, logits.shape[0])
        _check_vectors(logits, ids=(ids, torch.int64), residual=(residual, torch.float32))
        with _on(logits.device):
            return rows.fused(logits, grad, ids, table, params, residual)

    def stats(self, logits: Tensor, ids: Tensor, temperature: Tensor, params: KernelParams) -> RowStats:
        """Statistics (C,)."""
        _check_matrices(logits)
        _check_vectors(logits, ids=(ids, torch.int64), temperature=(temperature, torch.float32))
        with _on(logits.device):
            return rows.stats(logits, ids, temperature, params)

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
        _check_matrices(logits, grad)
        single = torch.float32
        _check_vectors(
            logits, ids=(ids, torch.int64), temperature=(temperature, single), lse=(lse, torch.float64),
            entropy=(entropy, single), g_logp=(g_logp, single), g_entropy=(g_entropy, single),
            residual=(residual, single),
        )  # fmt: skip
        with _on(logits.device):
            rows.gradient(logits, grad, ids, temperature, lse, entropy, g_logp, g_entropy, params, residual)

    def linear_logp(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperature: Tensor,
        params: KernelParams,
        *,
        entropy: bool,
    ) -> RowStats:
        """Statistics (C,) of hidden (C, H) and weight (V, H) without logits; entropy=False leaves it at 0."""
        hidden = _contiguous_rows(hidden)
        _check_head(hidden, weight, bias)
        _check_vectors(hidden, ids=(ids, torch.int64), temperature=(temperature, torch.float32))
        with _on(hidden.device):
            return linear_logp(hidden, weight, bias, ids, temperature, params, entropy=entropy)

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
        """Statistics (C,) and scale (C,); d loss / d logits = scale[:, None] * exponentials, written (C, V).

        For tokens whose gradient depends on themselves alone and does not go through their entropy.
        """
        hidden = _contiguous_rows(hidden)
        _check_head(hidden, weight, bias)
        _check_table(table, hidden.shape[0])
        _check_vectors(hidden, ids=(ids, torch.int64))
        with _on(hidden.device):
            return anchored(hidden, weight, bias, ids, table, exponentials, params)

    def objective(
        self, log_ratio: Tensor, logp: Tensor, entropy: Tensor, table: Tensor, params: KernelParams
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(N,) each: value, d_ratio, d_direct, kl of every token at the given raw log ratios (N,)."""
        _check_table(table, log_ratio.numel())
        single = torch.float32
        _check_vectors(log_ratio, log_ratio=(log_ratio, single), logp=(logp, single), entropy=(entropy, single))
        with _on(table.device):
            return tokens.objective(log_ratio, logp, entropy, table, params)

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
        _check_table(table, scored.numel())
        single = torch.float32
        _check_vectors(
            scored, scored=(scored, torch.bool), log_ratio=(log_ratio, single), logp=(logp, single),
            entropy=(entropy, single), value=(value, single), kl=(kl, single), g_logp=(g_logp, single),
        )  # fmt: skip
        _check_vectors(cu_seqlens, cu_seqlens=(cu_seqlens, torch.int64))
        _check_vectors(cu_seqlens[1:], group_index=(group_index, torch.int64))
        with _on(table.device):
            return tokens.reduce(
                scored, log_ratio, logp, entropy, value, kl, g_logp, table, params, cu_seqlens, group_index, num_groups
            )

    def add_rows(self, target: Tensor, ids: Tensor, scale: Tensor, rows: Tensor) -> None:
        """target[ids] += scale * rows. On a CPU alone, where the interpreter runs: GPU products need no correction."""
        TorchBackend().add_rows(target, ids, scale, rows)

    def group_statistics(
        self, rewards: Tensor, group_index: Tensor, num_groups: int, scale: str, baseline: str, ddof: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(advantages (B,), mean (num_groups,), std (num_groups,)); NaN rewards are left out and get 0."""
        _check_vectors(rewards, rewards=(rewards, torch.float32), group_index=(group_index, torch.int64))
        with _on(rewards.device):
            return groups.group_statistics(rewards, group_index, num_groups, scale, baseline, ddof, eps)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors' own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _check_matrices(logits: Tensor, grad: Tensor | None = None) -> None:
    for name, matrix in (("logits", logits), ("grad", grad)):
        if matrix is None:
            continue
        if matrix.dtype not in LOGITS_DTYPES or matrix.dim() != 2:
            raise ValueError(f"{name}: expected a matrix in float32, bfloat16 or float16, got {matrix.dtype}")
        if matrix.shape != logits.shape or matrix.device != logits.device:
            raise ValueError(f"{name} is {tuple(matrix.shape)} on {matrix.device}, logits {tuple(logits.shape)}")
        if matrix.shape[1] > 1 and matrix.stride(1) != 1:
            raise ValueError(f"{name}: expected a matrix with contiguous rows, got strides {matrix.stride()}")


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if hidden.dtype != weight.dtype or hidden.dim() != 2 or hidden.shape[1:] != weight.shape[1:]:
        raise ValueError(
            f"expected hidden (C, H) and weight (V, H) of one type, got {hidden.dtype} {tuple(hidden.shape)} and "
            f"{weight.dtype} {tuple(weight.shape)}"
        )
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        raise ValueError(f"weight: expected a matrix with contiguous rows, got strides {weight.stride()}")
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        raise ValueError(f"bias: expected a contiguous ({weight.shape[0]},), got {tuple(bias.shape)}")


def _check_table(table: Tensor, count: int) -> None:
    shape = (len(TABLE_FIELDS), count)
    if table.shape != shape or table.dtype != torch.float32 or (count > 1 and table.stride(1) != 1):
        raise ValueError(f"table: expected float32 {shape} with contiguous fields, got {table.dtype} {table.shape}")


def _check_vectors(like: Tensor, **vectors: tuple[Tensor | None, torch.dtype]) -> None:
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

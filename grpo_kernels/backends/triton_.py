"""The Triton kernels behind the backend interface: any NVIDIA GPU from Ampere on, AMD's where Triton goes.

Tensors are checked here; kernels are launched on the device and the current stream of their tensors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..kernels import groups, rows, tokens
from ..kernels.anchored import anchored
from ..kernels.launch import architecture, best_first, shipped_table
from ..kernels.linear_logp import linear_logp
from ..kernels.scale import scale
from ..params import KernelParams, RowStats
from ..strategy import STRATEGIES
from .base import GatheringBackend
from .checks import check_head, check_matrices, check_scaled, check_table, check_vectors, contiguous_rows
from .torch_ import TorchBackend


class TritonBackend(GatheringBackend):
    """Row kernels for logits (C, V) in fp32, bf16 or fp16, any row pitch; everything per token is fp32."""

    name = "triton"

    def why_not(self, device: torch.device) -> str:
        """Why these kernels cannot run on this device, or nothing."""
        if architecture(device) in shipped_table():
            return ""
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        return f"the Triton kernels need compute capability 8.0, {name} has {major}.{minor}"

    def strategies(self, hidden: Tensor, weight: Tensor) -> tuple[str, ...]:
        """Those of strategy.py that serve these inputs, best first: as the table of launch.py says."""
        if weight.dtype.itemsize != 2 or weight.stride(-1) != 1:  # float32 products are the vendor's
            return ("rows",)
        served = ("linear", "rows") if weight.dtype == torch.float16 else STRATEGIES  # float16 cannot hold e^(z - z_id)
        return best_first("strategy", served, weight)

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
        with _on(logits.device):
            return rows.fused(logits, grad, ids, table, params, residual)

    def stats(self, logits: Tensor, ids: Tensor, temperature: Tensor, params: KernelParams) -> RowStats:
        """Statistics (C,)."""
        check_matrices(logits)
        check_vectors(logits, ids=(ids, torch.int64), temperature=(temperature, torch.float32))
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
        check_matrices(logits, grad)
        single = torch.float32
        check_vectors(
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
        hidden = contiguous_rows(hidden)
        check_head(hidden, weight, bias)
        check_vectors(hidden, ids=(ids, torch.int64), temperature=(temperature, torch.float32))
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
        hidden = contiguous_rows(hidden)
        check_head(hidden, weight, bias)
        check_table(table, hidden)
        check_vectors(hidden, ids=(ids, torch.int64))
        with _on(hidden.device):
            return anchored(hidden, weight, bias, ids, table, exponentials, params)

    def objective(
        self, log_ratio: Tensor, logp: Tensor, entropy: Tensor, table: Tensor, params: KernelParams
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(N,) each: value, d_ratio, d_direct, kl of every token at the given raw log ratios (N,)."""
        check_table(table, log_ratio)
        single = torch.float32
        check_vectors(log_ratio, log_ratio=(log_ratio, single), logp=(logp, single), entropy=(entropy, single))
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
        check_table(table, scored)
        single = torch.float32
        check_vectors(
            scored, scored=(scored, torch.bool), log_ratio=(log_ratio, single), logp=(logp, single),
            entropy=(entropy, single), value=(value, single), kl=(kl, single), g_logp=(g_logp, single),
        )  # fmt: skip
        check_vectors(cu_seqlens, cu_seqlens=(cu_seqlens, torch.int64))
        check_vectors(cu_seqlens[1:], group_index=(group_index, torch.int64))
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
        check_vectors(rewards, rewards=(rewards, torch.float32), group_index=(group_index, torch.int64))
        with _on(rewards.device):
            return groups.group_statistics(rewards, group_index, num_groups, scale, baseline, ddof, eps)

    def scale(self, x: Tensor, factor: Tensor) -> None:
        """x *= factor, float32 (); x, contiguous, is not touched where that is 1."""
        check_scaled(x, factor)
        with _on(x.device):
            scale(x, factor)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors' own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

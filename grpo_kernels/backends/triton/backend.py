"""The Triton kernels behind the backend interface: any NVIDIA GPU from Ampere on, AMD's where Triton goes.

Kernels are launched on the device and the current stream of their tensors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ...contract import (
    KeptIds,
    KeptPairs,
    LogitChunk,
    PlannedTokens,
    RowGradients,
    Rows,
    RowStats,
    Sums,
    TokenInputs,
    TokenValues,
)
from ...names import KernelParams, PlanRules
from ..checks import KernelBackend, contiguous_rows
from ..launch import architecture, best_first, shipped_table
from ..pytorch.backend import add_rows
from ..strategy import STRATEGIES
from . import groups, tokens
from . import rows as row_kernels
from .anchored import anchored
from .kept import kept_dhidden, kept_dweight, kept_logits
from .linear_logp import linear_logp
from .plan import plan
from .scale import scale
from .sequences import sequence_objective


class TritonBackend(KernelBackend):
    """KernelBackend by Triton's kernels."""

    name = "triton"

    def unavailable_reason(self, device: torch.device) -> str:
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

    def plan(
        self,
        inputs: TokenInputs,
        ids: Tensor,
        rules: PlanRules,
        dtype: torch.dtype,
        *,
        ordered: bool,
    ) -> PlannedTokens:
        """What pytorch/plan.py computes, in float32."""
        with _on(ids.device):
            return plan(inputs, ids, rules, ordered=ordered)

    def single_pass(
        self,
        chunk: LogitChunk,
        table: Tensor,
        values: TokenValues,
        params: KernelParams,
        gradients: RowGradients | None = None,
    ) -> None:
        with _on(table.device):
            row_kernels.single_pass(chunk, table, values, params, gradients)

    def statistics(self, chunk: LogitChunk, temperature: Tensor, values: TokenValues, params: KernelParams) -> None:
        with _on(temperature.device):
            row_kernels.statistics(chunk, temperature, values, params)

    def logits_gradient(
        self,
        chunk: LogitChunk,
        temperature: Tensor,
        values: TokenValues,
        g_logp: Tensor,
        g_entropy: Tensor,
        params: KernelParams,
        gradients: RowGradients,
    ) -> None:
        with _on(temperature.device):
            row_kernels.logits_gradient(chunk, temperature, values, g_logp, g_entropy, params, gradients)

    def token_objective(self, rows: Rows, table: Tensor, values: TokenValues, params: KernelParams) -> None:
        with _on(table.device):
            tokens.token_objective(rows, table, values, params)

    def sequence_objective(
        self, sequences: slice, row_length: int | None, planned: PlannedTokens, params: KernelParams
    ) -> None:
        with _on(planned.table.device):
            sequence_objective(sequences, planned, params)

    def sums(self, planned: PlannedTokens, params: KernelParams, group_index: Tensor | None, num_groups: int) -> Sums:
        with _on(planned.table.device):
            return tokens.sums(planned, params, group_index, 0 if group_index is None else num_groups)

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
        with _on(hidden.device):
            return linear_logp(contiguous_rows(hidden), weight, bias, ids, temperature, params, entropy=entropy)

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
        with _on(hidden.device):
            return anchored(contiguous_rows(hidden), weight, bias, ids, table, exponentials, params)

    def add_rows(self, target: Tensor, ids: Tensor, scale: Tensor, rows: Tensor) -> None:
        """target[ids] += scale * rows. On a CPU alone, where the interpreter runs: GPU products need no correction."""
        add_rows(target, ids, scale, rows)

    def group_statistics(
        self, rewards: Tensor, group_index: Tensor, num_groups: int, scale: str, baseline: str, ddof: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        with _on(rewards.device):
            return groups.group_statistics(rewards, group_index, num_groups, scale, baseline, ddof, eps)

    def kept_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, kept: KeptIds, logits: Tensor) -> None:
        with _on(weight.device):
            kept_logits(contiguous_rows(hidden), contiguous_rows(weight), bias, kept, logits)

    def kept_dhidden(self, dlogits: Tensor, weight: Tensor, kept: KeptIds, dhidden: Tensor) -> None:
        with _on(weight.device):
            kept_dhidden(dlogits, contiguous_rows(weight), kept, dhidden)

    def kept_dweight(self, dlogits: Tensor, hidden: Tensor, pairs: KeptPairs, dweight: Tensor, *, add: bool) -> None:
        with _on(hidden.device):
            kept_dweight(dlogits, contiguous_rows(hidden), pairs, dweight, add=add)

    def scale(self, x: Tensor, factor: Tensor) -> None:
        with _on(x.device):
            scale(x, factor)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors' own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

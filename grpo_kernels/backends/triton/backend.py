"""The Triton kernels behind the backend interface: any NVIDIA GPU from Ampere on, AMD's where Triton goes.

Tensors are checked here; kernels are launched on the device and the current stream of their tensors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ...contract import KernelParams, PlannedTokens, PlanRules, Rows, RowStats, Sums, TokenInputs, TokenValues
from ..checks import (
    check_head,
    check_matrices,
    check_rewards,
    check_scaled,
    check_table,
    check_tokens,
    check_vectors,
    contiguous_rows,
)
from ..launch import architecture, best_first, shipped_table
from ..pytorch.backend import TorchBackend
from ..strategy import STRATEGIES
from . import groups, tokens
from . import rows as row_kernels
from .anchored import anchored
from .linear_logp import linear_logp
from .plan import plan
from .scale import scale
from .sequences import sequence_objective


class TritonBackend:
    """Row kernels for logits (C, V) in fp32, bf16 or fp16, any row stride; everything per token is fp32."""

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

    def plan(
        self, inputs: TokenInputs, ids: Tensor, rules: PlanRules, dtype: torch.dtype, *, ordered: bool
    ) -> PlannedTokens:
        """What pytorch/plan.py computes, in float32."""
        with _on(ids.device):
            return plan(inputs, ids, rules, ordered=ordered)

    def single_pass(
        self,
        logits: Tensor,
        rows: Rows,
        ids: Tensor,
        table: Tensor,
        values: TokenValues,
        params: KernelParams,
        bias: Tensor | None = None,
        grad: Tensor | None = None,
        rounding_error: Tensor | None = None,
    ) -> None:
        """Statistics and objective of every row; with `grad` (C, V) d loss / d logits, it may start where logits do."""
        check_matrices(logits, grad, rows, bias, rounding_error)
        check_tokens(ids, values, table=table)
        with _on(logits.device):
            row_kernels.single_pass(logits, rows, ids, table, values, params, bias, grad, rounding_error)

    def statistics(
        self,
        logits: Tensor,
        rows: Rows,
        ids: Tensor,
        temperature: Tensor,
        values: TokenValues,
        params: KernelParams,
        bias: Tensor | None = None,
    ) -> None:
        """logp, entropy and lse of every row."""
        check_matrices(logits, None, rows, bias)
        check_tokens(ids, values, temperature=temperature)
        with _on(logits.device):
            row_kernels.statistics(logits, rows, ids, temperature, values, params, bias)

    def logits_gradient(
        self,
        logits: Tensor,
        grad: Tensor,
        rows: Rows,
        ids: Tensor,
        temperature: Tensor,
        values: TokenValues,
        g_logp: Tensor,
        g_entropy: Tensor,
        params: KernelParams,
        bias: Tensor | None = None,
        rounding_error: Tensor | None = None,
    ) -> None:
        """Writes d loss / d logits to `grad` from d loss / d logp and d loss / d entropy (N,) and the statistics."""
        check_matrices(logits, grad, rows, bias, rounding_error)
        check_tokens(ids, values, temperature=temperature, g_logp=g_logp, g_entropy=g_entropy)
        given = ids, temperature, values, g_logp, g_entropy, params, bias, rounding_error
        with _on(logits.device):
            row_kernels.logits_gradient(logits, grad, rows, *given)

    def token_objective(self, rows: Rows, table: Tensor, values: TokenValues, params: KernelParams) -> None:
        """log_ratio, value, kl and g_logp of these tokens from their logp and entropy."""
        check_tokens(None, values, table=table)
        with _on(table.device):
            tokens.token_objective(rows, table, values, params)

    def sequence_objective(
        self,
        sequences: slice,
        row_length: int | None,
        table: Tensor,
        scored: Tensor,
        offsets: Tensor,
        lengths: Tensor,
        values: TokenValues,
        params: KernelParams,
    ) -> None:
        """`token_objective` of the scored tokens of whole sequences, which depend on each other."""
        check_tokens(None, values, table=table, scored=scored)
        with _on(table.device):
            sequence_objective(sequences, table, scored, offsets, lengths, values, params)

    def sums(
        self,
        scored: Tensor,
        table: Tensor,
        values: TokenValues,
        params: KernelParams,
        offsets: Tensor,
        group_index: Tensor | None,
        num_groups: int,
    ) -> Sums:
        """Sums of params.COLUMNS over the scored tokens."""
        check_tokens(None, values, table=table, scored=scored)
        with _on(table.device):
            return tokens.sums(scored, table, values, params, offsets, group_index, num_groups)

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

    def add_rows(self, target: Tensor, ids: Tensor, scale: Tensor, rows: Tensor) -> None:
        """target[ids] += scale * rows. On a CPU alone, where the interpreter runs: GPU products need no correction."""
        TorchBackend().add_rows(target, ids, scale, rows)

    def group_statistics(
        self, rewards: Tensor, group_index: Tensor, num_groups: int, scale: str, baseline: str, ddof: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(advantages (B,), mean (num_groups,), std (num_groups,)); NaN rewards are left out and get 0."""
        check_rewards(rewards, group_index)
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

"""The contract's per-token methods for backends whose row functions take the values of their own rows."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...contract import FIELD, KernelParams, PlannedTokens, PlanRules, Rows, RowStats, Sums, TokenInputs, TokenValues
from .coefficients import sequence_objective, token_objective
from .plan import plan_tokens


class _RowFunctions(Protocol):
    def fused(
        self,
        logits: Tensor,
        grad: Tensor,
        ids: Tensor,
        table: Tensor,
        params: KernelParams,
        rounding_error: Tensor | None = None,
    ) -> RowStats: ...

    def stats(self, logits: Tensor, ids: Tensor, temperature: Tensor, params: KernelParams) -> RowStats: ...

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
        rounding_error: Tensor | None = None,
    ) -> None: ...

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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


class GatheringBackend:
    """Gathers what belongs to a chunk's tokens, calls the row functions, and writes back what they return."""

    def plan(
        self, inputs: TokenInputs, ids: Tensor, rules: PlanRules, dtype: torch.dtype, *, ordered: bool
    ) -> PlannedTokens:
        return plan_tokens(inputs, ids, rules, dtype, ordered=ordered)

    def single_pass(
        self: _RowFunctions,
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
        own, chosen = rows.take(table, 1), rows.take(ids)
        logits = _with_bias(logits, bias)
        if grad is None:
            found = self.stats(logits, chosen, own[FIELD["temperature"]], params)
        else:
            found = self.fused(logits, grad, chosen, own, params, rounding_error)
        _put(rows, values, found)
        token_objective(rows, table, values, params)

    def statistics(
        self: _RowFunctions,
        logits: Tensor,
        rows: Rows,
        ids: Tensor,
        temperature: Tensor,
        values: TokenValues,
        params: KernelParams,
        bias: Tensor | None = None,
    ) -> None:
        _put(rows, values, self.stats(_with_bias(logits, bias), rows.take(ids), rows.take(temperature), params))

    def logits_gradient(
        self: _RowFunctions,
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
        per_row = (ids, temperature, values.lse, values.entropy, g_logp, g_entropy)
        own = [rows.take(x).contiguous() for x in per_row]
        logits = _with_bias(logits, bias)
        self.gradient(logits, grad, own[0], own[1], own[2], own[3], own[4], own[5], params, rounding_error)

    def token_objective(self, rows: Rows, table: Tensor, values: TokenValues, params: KernelParams) -> None:
        token_objective(rows, table, values, params)

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
        if row_length is not None:
            first, last = sequences.start * row_length, sequences.stop * row_length
            table, scored = table[:, first:last], scored[first:last]
            values = TokenValues(values.columns[:, first:last], values.lse[first:last])
            offsets = offsets[sequences.start : sequences.stop + 1] - first
            lengths = lengths[sequences]
        # Where packed sequences begin is not known on the host: all are computed, those of other chunks once more.
        sequence_objective(table, scored, offsets, lengths, values, params)

    def sums(
        self: _RowFunctions,
        scored: Tensor,
        table: Tensor,
        values: TokenValues,
        params: KernelParams,
        offsets: Tensor,
        group_index: Tensor | None,
        num_groups: int,
    ) -> Sums:
        logp, entropy, log_ratio, value, kl, g_logp = values.columns
        per_token = scored, log_ratio, logp, entropy, value, kl, g_logp, table
        found = self.reduce(*per_token, params, offsets, group_index, num_groups)
        groups = 0 if group_index is None else num_groups
        return Sums(torch.cat([x.reshape(-1) for x in found]), offsets.numel() - 1, groups)


def _with_bias(logits: Tensor, bias: Tensor | None) -> Tensor:
    return logits if bias is None else logits.to(torch.promote_types(logits.dtype, bias.dtype)) + bias


def _put(rows: Rows, values: TokenValues, found: RowStats) -> None:
    rows.put(values.logp, found.logp)
    rows.put(values.entropy, found.entropy)
    rows.put(values.lse, found.lse)

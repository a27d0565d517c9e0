"""The backends with kernels of their own: every tensor is checked here, once, before a kernel gets its address."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import (
    KeptIds,
    KeptPairs,
    KernelParams,
    LogitChunk,
    PlannedTokens,
    RowGradients,
    Rows,
    RowStats,
    Sums,
    TokenValues,
)
from .checks import (
    check_chunk,
    check_head,
    check_kept,
    check_pairs,
    check_rewards,
    check_scaled,
    check_table,
    check_tokens,
    check_vectors,
    contiguous_rows,
)


class CheckedBackend:
    """The contract's methods; a subclass has the same with an underscore, and gets tensors that fit.

    Logits (C, V) are in fp32, bf16 or fp16, at any row stride; everything per token is fp32.
    """

    adds_transposed = False

    def values_are_valid(
        self, ids: Tensor, vocab_size: int, mask: Tensor | None, numbers: tuple[Tensor | None, ...]
    ) -> bool:
        """Not known."""
        return False

    def single_pass(
        self,
        chunk: LogitChunk,
        table: Tensor,
        values: TokenValues,
        params: KernelParams,
        gradients: RowGradients | None = None,
    ) -> None:
        """Statistics and objective of every row, and with `gradients` d loss / d logits."""
        check_chunk(chunk, gradients)
        check_tokens(values, ids=chunk.ids, table=table)
        self._single_pass(chunk, table, values, params, gradients)

    def statistics(self, chunk: LogitChunk, temperature: Tensor, values: TokenValues, params: KernelParams) -> None:
        """logp, entropy and lse of every row."""
        check_chunk(chunk)
        check_tokens(values, ids=chunk.ids, temperature=temperature)
        self._statistics(chunk, temperature, values, params)

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
        """d loss / d logits from d loss / d logp and d loss / d entropy (N,) and the statistics."""
        check_chunk(chunk, gradients)
        check_tokens(values, ids=chunk.ids, temperature=temperature, g_logp=g_logp, g_entropy=g_entropy)
        self._logits_gradient(chunk, temperature, values, g_logp, g_entropy, params, gradients)

    def token_objective(self, rows: Rows, table: Tensor, values: TokenValues, params: KernelParams) -> None:
        """log_ratio, value, kl and g_logp of these tokens from their logp and entropy."""
        check_tokens(values, table=table)
        self._token_objective(rows, table, values, params)

    def sequence_objective(
        self, sequences: slice, row_length: int | None, planned: PlannedTokens, params: KernelParams
    ) -> None:
        """`token_objective` of the scored tokens of whole sequences, which depend on each other."""
        check_tokens(planned.values, table=planned.table, scored=planned.scored)
        self._sequence_objective(sequences, planned, params)

    def sums(self, planned: PlannedTokens, params: KernelParams, group_index: Tensor | None, num_groups: int) -> Sums:
        """Sums of contract.COLUMNS over the scored tokens."""
        check_tokens(planned.values, table=planned.table, scored=planned.scored)
        return self._sums(planned, params, group_index, 0 if group_index is None else num_groups)

    def group_statistics(
        self, rewards: Tensor, group_index: Tensor, num_groups: int, scale: str, baseline: str, ddof: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(advantages (B,), mean (num_groups,), std (num_groups,)); NaN rewards are left out and get 0."""
        check_rewards(rewards, group_index)
        return self._group_statistics(rewards, group_index, num_groups, scale, baseline, ddof, eps)

    def scale(self, x: Tensor, factor: Tensor) -> None:
        """x *= factor, float32 (); x, contiguous, is not touched where that is 1."""
        check_scaled(x, factor)
        self._scale(x, factor)

    def kept_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, kept: KeptIds, logits: Tensor) -> None:
        """Logits (C, K) of kept ids, -inf in places that are not used. hidden (N, H), bias (V,) float32."""
        hidden, weight = contiguous_rows(hidden), contiguous_rows(weight)
        check_kept(kept, logits, hidden=hidden, weight=weight)
        self._kept_logits(hidden, weight, bias, kept, logits)

    def kept_dhidden(self, dlogits: Tensor, weight: Tensor, kept: KeptIds, dhidden: Tensor) -> None:
        """The tokens' rows of dhidden (N, H) from dlogits (C, K)."""
        weight = contiguous_rows(weight)
        check_kept(kept, dlogits, weight=weight, dhidden=dhidden)
        self._kept_dhidden(dlogits, weight, kept, dhidden)

    def kept_dweight(self, dlogits: Tensor, hidden: Tensor, pairs: KeptPairs, dweight: Tensor, *, add: bool) -> None:
        """dweight (V, H) from dlogits (M,) of all pairs: added, or written, 0 for ids without a pair."""
        hidden = contiguous_rows(hidden)
        check_pairs(pairs, dlogits, hidden=hidden, dweight=dweight)
        self._kept_dweight(dlogits, hidden, pairs, dweight, add)

    # --- what a subclass has ---------------------------------------------------------------------------------------

    def _single_pass(
        self,
        chunk: LogitChunk,
        table: Tensor,
        values: TokenValues,
        params: KernelParams,
        gradients: RowGradients | None,
    ) -> None:
        raise NotImplementedError

    def _statistics(self, chunk: LogitChunk, temperature: Tensor, values: TokenValues, params: KernelParams) -> None:
        raise NotImplementedError

    def _logits_gradient(
        self,
        chunk: LogitChunk,
        temperature: Tensor,
        values: TokenValues,
        g_logp: Tensor,
        g_entropy: Tensor,
        params: KernelParams,
        gradients: RowGradients,
    ) -> None:
        raise NotImplementedError

    def _token_objective(self, rows: Rows, table: Tensor, values: TokenValues, params: KernelParams) -> None:
        raise NotImplementedError

    def _sequence_objective(self, sequences: slice, planned: PlannedTokens, params: KernelParams) -> None:
        raise NotImplementedError

    def _sums(self, planned: PlannedTokens, params: KernelParams, group_index: Tensor | None, groups: int) -> Sums:
        raise NotImplementedError

    def _group_statistics(
        self, rewards: Tensor, group_index: Tensor, num_groups: int, scale: str, baseline: str, ddof: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def _scale(self, x: Tensor, factor: Tensor) -> None:
        raise NotImplementedError

    def _kept_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, kept: KeptIds, logits: Tensor) -> None:
        raise NotImplementedError

    def _kept_dhidden(self, dlogits: Tensor, weight: Tensor, kept: KeptIds, dhidden: Tensor) -> None:
        raise NotImplementedError

    def _kept_dweight(self, dlogits: Tensor, hidden: Tensor, pairs: KeptPairs, dweight: Tensor, add: bool) -> None:
        raise NotImplementedError


class CheckedProducts:
    """The same for the products of a FoldingBackend."""

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
        return self._linear_logp(hidden, weight, bias, ids, temperature, params, entropy=entropy)

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
        return self._anchored(hidden, weight, bias, ids, table, exponentials, params)

    def _linear_logp(
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
        raise NotImplementedError

    def _anchored(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        table: Tensor,
        exponentials: Tensor,
        params: KernelParams,
    ) -> tuple[RowStats, Tensor]:
        raise NotImplementedError

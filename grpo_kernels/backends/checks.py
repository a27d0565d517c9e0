"""What tensors have to be before a kernel gets their addresses: it would read others wrongly.

The public functions have checked what a caller gives, and everything between them and a kernel is the engine's own. So
these checks can only find a mistake of the engine. They cost 2 us a kernel, as much as a small kernel itself, and are
made where GRPO_KERNELS_CHECK_CALLS=1 is set when the package is imported: in every test.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..contract import KeptIds, KeptPairs, LogitChunk, PlannedTokens, RowGradients, TokenValues
from ..names import TABLE_FIELDS, KernelParams

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_chunk(chunk: LogitChunk, gradients: RowGradients | None = None) -> None:
    """Logits and dlogits are matrices of one shape, with contiguous rows at any stride, and a token for each row."""
    logits, rows, _, bias = chunk
    shape, device = logits.shape, logits.device
    _check_matrix("logits", logits, shape, device)
    count, vocab = shape
    if gradients is not None:
        _check_matrix("dlogits", gradients.dlogits, shape, device)
        if gradients.rounding_error is not None:
            _check_vector("rounding_error", gradients.rounding_error, count, torch.float32, device)
    if bias is not None:
        _check_vector("bias", bias, vocab, torch.float32, device)
    if rows.stop - rows.start != count:
        raise ValueError(f"logits has shape {tuple(shape)}; expected {rows.count} rows")
    index = rows.index
    if index is not None and (index.dtype != torch.int64 or index.shape[0] != count or not index.is_contiguous()):
        found = f"{index.dtype} {tuple(index.shape)}"
        raise ValueError(f"rows: expected contiguous int64 tokens ({count},), got {found}")


def _check_matrix(name: str, x: Tensor, shape: torch.Size, device: torch.device) -> None:
    if x.dtype not in LOGITS_DTYPES or x.dim() != 2:
        raise ValueError(f"{name}: expected a matrix in float32, bfloat16 or float16, got {x.dtype}")
    if x.shape != shape or x.device != device:
        raise ValueError(f"{name} has shape {tuple(x.shape)} on {x.device}, logits {tuple(shape)} on {device}")
    if x.stride(1) != 1 and shape[1] > 1:
        raise ValueError(f"{name}: expected a matrix with contiguous rows, got strides {x.stride()}")


def check_tokens(
    values: TokenValues, *, table: Tensor | None = None, ids: Tensor | None = None, **vectors: Tensor
) -> None:
    """The values, table (fields, N), ids (N,) int64 and `vectors` (N,) are those of one batch of N tokens, contiguous.

    All are float32, but for ids and `scored`, which is bool.
    """
    columns, lse = values
    tokens, device = lse.shape[0], lse.device
    if columns.shape[1] != tokens or columns.dtype != torch.float32 or not columns.is_contiguous():
        raise ValueError(f"values: expected contiguous float32 (fields, {tokens}), got {columns.dtype} {columns.shape}")
    if table is not None:
        shape = (len(TABLE_FIELDS), tokens)
        if table.shape != shape or table.dtype != torch.float32 or not table.is_contiguous() or table.device != device:
            found = f"{table.dtype} {tuple(table.shape)} on {table.device}"
            raise ValueError(f"table: expected contiguous float32 {shape} on {device}, got {found}")
    if ids is not None:
        _check_vector("ids", ids, tokens, torch.int64, device)
    for name, x in vectors.items():
        _check_vector(name, x, tokens, torch.bool if name == "scored" else torch.float32, device)


def _check_vector(name: str, x: Tensor, size: int, dtype: torch.dtype, device: torch.device) -> None:
    if x.dtype != dtype or x.shape != (size,) or x.device != device:
        found = f"{x.dtype} {tuple(x.shape)} on {x.device}"
        raise ValueError(f"{name}: expected {dtype} ({size},) on {device}, got {found}")
    if not x.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous vector")


def check_rewards(rewards: Tensor, group_index: Tensor) -> None:
    """rewards (B,) float32 and their groups (B,) int64, contiguous."""
    count, device = rewards.numel(), rewards.device
    _check_vector("rewards", rewards, count, torch.float32, device)
    _check_vector("group_index", group_index, count, torch.int64, device)


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """hidden (C, H) and weight (V, H) of one type on one device; bias (V,), if any, contiguous."""
    if hidden.dtype != weight.dtype or hidden.dim() != 2 or hidden.shape[1:] != weight.shape[1:]:
        raise ValueError(
            f"expected hidden (C, H) and weight (V, H) of one type, got {hidden.dtype} {tuple(hidden.shape)} and "
            f"{weight.dtype} {tuple(weight.shape)}"
        )
    if hidden.device != weight.device or (bias is not None and bias.device != weight.device):
        raise ValueError(f"expected the lm_head on {hidden.device}, where the hidden states are")
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        raise ValueError(f"weight: expected a matrix with contiguous rows, got strides {weight.stride()}")
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        raise ValueError(f"bias: expected a contiguous ({weight.shape[0]},), got {tuple(bias.shape)}")


def check_table(table: Tensor, like: Tensor) -> None:
    """float32, one row per field of names.TABLE_FIELDS, one column per row of `like`, on its device."""
    shape = (len(TABLE_FIELDS), like.shape[0])
    if table.shape != shape or table.dtype != torch.float32 or (shape[1] > 1 and table.stride(1) != 1):
        raise ValueError(
            f"table: expected float32 {shape} with contiguous fields, got {table.dtype} {tuple(table.shape)}"
        )
    if table.device != like.device:
        raise ValueError(f"table: expected it on {like.device}, got {table.device}")


def check_vectors(like: Tensor, **vectors: tuple[Tensor | None, torch.dtype]) -> None:
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


def check_scaled(x: Tensor, factor: Tensor) -> None:
    """x: contiguous, float32, bfloat16 or float16; factor: float32 () on its device."""
    if x.dtype not in LOGITS_DTYPES or not x.is_contiguous():
        raise ValueError(
            f"x: expected it contiguous in float32, bfloat16 or float16, got {x.dtype} with strides {x.stride()}"
        )
    if factor.dtype != torch.float32 or factor.dim() != 0 or factor.device != x.device:
        raise ValueError(
            f"factor: expected {torch.float32} () on {x.device}, got {factor.dtype} {tuple(factor.shape)} on "
            f"{factor.device}"
        )


def check_kept(kept: KeptIds, numbers: Tensor, **matrices: Tensor) -> None:
    """ids (C, K) int32 and numbers (C, K) float32, contiguous; matrices with contiguous rows of equal width."""
    index, device = kept.rows.index, kept.ids.device
    if index is None:
        raise ValueError("kept: expected the tokens as an index")
    _check_vector("index", index, kept.ids.shape[0], torch.int64, device)
    for name, x, dtype in (("ids", kept.ids, torch.int32), ("logits", numbers, torch.float32)):
        if x.dtype != dtype or x.shape != kept.ids.shape or not x.is_contiguous() or x.device != device:
            found = f"{x.dtype} {tuple(x.shape)} on {x.device}"
            raise ValueError(f"{name}: expected contiguous {dtype} {tuple(kept.ids.shape)} on {device}, got {found}")
    _check_widths(device, matrices)


def check_pairs(pairs: KeptPairs, dlogits: Tensor, **matrices: Tensor) -> None:
    """ids and token_of (M,) int32, dlogits (M,) float32, contiguous; matrices with contiguous rows of equal width."""
    count, device = pairs.ids.numel(), pairs.ids.device
    for name, x, dtype in (
        ("ids", pairs.ids, torch.int32), ("token_of", pairs.token_of, torch.int32), ("dlogits", dlogits, torch.float32)
    ):  # fmt: skip
        _check_vector(name, x, count, dtype, device)
    _check_widths(device, matrices)


def _check_widths(device: torch.device, matrices: dict[str, Tensor]) -> None:
    """On one device, with contiguous rows of equal width."""
    for name, x in matrices.items():
        _check_matrix(name, x, x.shape, device)
    if len({x.shape[1] for x in matrices.values()}) > 1:
        raise ValueError(f"expected rows of one width, got {[tuple(x.shape) for x in matrices.values()]}")


def contiguous_rows(x: Tensor) -> Tensor:
    """The matrix, or a copy if its rows are not contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()


# --- which method checks what -----------------------------------------------------------------------------------------


def _single_pass(
    chunk: LogitChunk, table: Tensor, values: TokenValues, params: KernelParams, gradients: RowGradients | None = None
) -> None:
    check_chunk(chunk, gradients)
    check_tokens(values, ids=chunk.ids, table=table)


def _statistics(chunk: LogitChunk, temperature: Tensor, values: TokenValues, params: KernelParams) -> None:
    check_chunk(chunk)
    check_tokens(values, ids=chunk.ids, temperature=temperature)


def _logits_gradient(
    chunk: LogitChunk,
    temperature: Tensor,
    values: TokenValues,
    g_logp: Tensor,
    g_entropy: Tensor,
    params: KernelParams,
    gradients: RowGradients,
) -> None:
    check_chunk(chunk, gradients)
    check_tokens(values, ids=chunk.ids, temperature=temperature, g_logp=g_logp, g_entropy=g_entropy)


def _planned(planned: PlannedTokens) -> None:
    check_tokens(planned.values, table=planned.table, scored=planned.scored)


def _linear_logp(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    temperature: Tensor,
    params: KernelParams,
    *,
    entropy: bool,
) -> None:
    check_head(contiguous_rows(hidden), weight, bias)
    check_vectors(hidden, ids=(ids, torch.int64), temperature=(temperature, torch.float32))


def _anchored(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    table: Tensor,
    exponentials: Tensor,
    params: KernelParams,
) -> None:
    check_head(contiguous_rows(hidden), weight, bias)
    check_table(table, hidden)
    check_vectors(hidden, ids=(ids, torch.int64))


_CHECKS: dict[str, Callable[..., None]] = {
    "single_pass": _single_pass,
    "statistics": _statistics,
    "logits_gradient": _logits_gradient,
    "token_objective": lambda rows, table, values, params: check_tokens(values, table=table),
    "sequence_objective": lambda sequences, row_length, planned, params: _planned(planned),
    "sums": lambda planned, params, group_index, num_groups: _planned(planned),
    "group_statistics": lambda rewards, group_index, *options: check_rewards(rewards, group_index),
    "scale": lambda x, factor: check_scaled(x, factor),
    "kept_logits": lambda hidden, weight, bias, kept, logits: check_kept(
        kept, logits, hidden=contiguous_rows(hidden), weight=contiguous_rows(weight)
    ),
    "kept_dhidden": lambda dlogits, weight, kept, dhidden: check_kept(
        kept, dlogits, weight=contiguous_rows(weight), dhidden=dhidden
    ),
    "kept_dweight": lambda dlogits, hidden, pairs, dweight, *, add: check_pairs(
        pairs, dlogits, hidden=contiguous_rows(hidden), dweight=dweight
    ),
    "linear_logp": _linear_logp,
    "anchored": _anchored,
}


class KernelBackend:
    """A backend with kernels of its own. Logits (C, V) are in fp32, bf16 or fp16, at any row stride; everything per
    token is fp32."""

    has_amx = False

    def __init_subclass__(cls) -> None:
        if os.environ.get("GRPO_KERNELS_CHECK_CALLS") == "1":
            for name in cls.__dict__.keys() & _CHECKS.keys():
                setattr(cls, name, _after_check(_CHECKS[name], getattr(cls, name)))


def _after_check(check: Callable[..., None], method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def checked(self: KernelBackend, *given: Any, **named: Any) -> Any:
        check(*given, **named)
        return method(self, *given, **named)

    return checked

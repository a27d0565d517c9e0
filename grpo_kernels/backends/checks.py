"""What tensors have to be before a kernel gets their addresses: it would read others wrongly.

The public functions have checked what a caller gives, and everything between them and a kernel is the engine's own. So
these checks can only find a mistake of the engine. They cost 2 us a kernel, as much as a small kernel itself, and are
made where GRPO_KERNELS_CHECK_CALLS=1 is set when the package is imported: in every test.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import KeptIds, KeptPairs, LogitChunk, RowGradients, TokenValues
from ..names import TABLE_FIELDS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # of logits, weights, hidden states and their gradients
SINGLE, INT32, INT64, BOOL = (torch.float32,), (torch.int32,), (torch.int64,), (torch.bool,)
CONTIGUOUS, CONTIGUOUS_ROWS, STRIDED = "contiguous", "contiguous rows", "any strides"


class Expected(NamedTuple):
    """A tensor, or None where it is optional, and what it has to be."""

    tensor: Tensor | None
    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]
    layout: str = CONTIGUOUS


def check_tensors(tensors: dict[str, Expected]) -> None:
    """ValueError for a tensor of another type, shape or layout, or on another device than the first one."""
    device = next(expected.tensor.device for expected in tensors.values() if expected.tensor is not None)
    for name, (x, dtypes, shape, layout) in tensors.items():
        if x is None:
            continue
        fits = x.dtype in dtypes and x.shape == shape and x.device == device
        if fits and layout == CONTIGUOUS:
            fits = x.is_contiguous()
        elif fits and layout == CONTIGUOUS_ROWS:
            fits = x.stride(1) == 1 or shape[1] <= 1
        if not fits:
            types = " or ".join(str(dtype) for dtype in dtypes)
            raise ValueError(
                f"{name}: expected {types} of shape {tuple(shape)}, {layout}, on {device}; "
                f"got {x.dtype} of shape {tuple(x.shape)}, strides {x.stride()}, on {x.device}"
            )


def contiguous_rows(x: Tensor) -> Tensor:
    """The matrix, or a copy if its rows are not contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()


def _chunk(chunk: LogitChunk, gradients: RowGradients | None = None) -> dict[str, Expected]:
    logits, rows, _, bias = chunk
    vocab, count = logits.shape[1], rows.stop - rows.start
    found = {
        "logits": Expected(logits, FLOATS, (count, vocab), CONTIGUOUS_ROWS),
        "bias": Expected(bias, SINGLE, (vocab,)),
        "rows": Expected(rows.index, INT64, (count,)),
    }
    if gradients is not None:
        found["dlogits"] = Expected(gradients.dlogits, FLOATS, (count, vocab), CONTIGUOUS_ROWS)
        found["rounding_error"] = Expected(gradients.rounding_error, SINGLE, (count,))
    return found


def _tokens(values: TokenValues, **others: Tensor) -> dict[str, Expected]:
    """`others` by name: the table (fields, N), and vectors (N,) of float32 but for ids and `scored`."""
    tokens = values.lse.shape[0]
    dtypes = {"ids": INT64, "scored": BOOL}
    vectors = {name: Expected(x, dtypes.get(name, SINGLE), (tokens,)) for name, x in others.items() if name != "table"}
    found = {"values": Expected(values.columns, SINGLE, (values.columns.shape[0], tokens)), **vectors}
    if "table" in others:
        found["table"] = Expected(others["table"], SINGLE, (len(TABLE_FIELDS), tokens))
    return found


def _head(hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor) -> dict[str, Expected]:
    (count, width), vocab, dtypes = hidden.shape, weight.shape[0], (hidden.dtype,)
    return {
        "hidden": Expected(hidden, FLOATS, (count, width), STRIDED),
        "weight": Expected(weight, dtypes, (vocab, width), CONTIGUOUS_ROWS),
        "bias": Expected(bias, FLOATS, (vocab,)),
        "ids": Expected(ids, INT64, (count,)),
    }


def _kept(kept: KeptIds, numbers: Tensor, **matrices: Tensor) -> dict[str, Expected]:
    count, slots = kept.ids.shape
    if kept.rows.index is None:
        raise ValueError("kept: expected the tokens as an index")
    return {
        "ids": Expected(kept.ids, INT32, (count, slots)),
        "index": Expected(kept.rows.index, INT64, (count,)),
        "logits": Expected(numbers, SINGLE, (count, slots)),
        **_equally_wide(matrices),
    }


def _pairs(pairs: KeptPairs, dlogits: Tensor, **matrices: Tensor) -> dict[str, Expected]:
    count = (pairs.ids.numel(),)
    return {
        "ids": Expected(pairs.ids, INT32, count),
        "token_of": Expected(pairs.token_of, INT32, count),
        "dlogits": Expected(dlogits, SINGLE, count),
        **_equally_wide(matrices),
    }


def _equally_wide(matrices: dict[str, Tensor]) -> dict[str, Expected]:
    width = next(iter(matrices.values())).shape[1]
    return {name: Expected(x, FLOATS, (x.shape[0], width), CONTIGUOUS_ROWS) for name, x in matrices.items()}


# What each method of a backend expects, from its arguments.
_EXPECTED: dict[str, Callable[..., dict[str, Expected]]] = {
    "single_pass": lambda chunk, table, values, params, gradients=None: (
        _chunk(chunk, gradients) | _tokens(values, ids=chunk.ids, table=table)
    ),
    "statistics": lambda chunk, temperature, values, params: (
        _chunk(chunk) | _tokens(values, ids=chunk.ids, temperature=temperature)
    ),
    "logits_gradient": lambda chunk, temperature, values, g_logp, g_entropy, params, gradients: (
        _chunk(chunk, gradients)
        | _tokens(values, ids=chunk.ids, temperature=temperature, g_logp=g_logp, g_entropy=g_entropy)
    ),
    "token_objective": lambda rows, table, values, params: _tokens(values, table=table),
    "sequence_objective": lambda sequences, row_length, planned, params: _tokens(
        planned.values, table=planned.table, scored=planned.scored
    ),
    "sums": lambda planned, params, group_index, num_groups: _tokens(
        planned.values, table=planned.table, scored=planned.scored
    ),
    "group_statistics": lambda rewards, group_index, *options: {
        "rewards": Expected(rewards, SINGLE, (rewards.numel(),)),
        "group_index": Expected(group_index, INT64, (rewards.numel(),)),
    },
    "scale": lambda x, factor: {"x": Expected(x, FLOATS, x.shape), "factor": Expected(factor, SINGLE, ())},
    "kept_logits": lambda hidden, weight, bias, kept, logits: _kept(
        kept, logits, hidden=contiguous_rows(hidden), weight=contiguous_rows(weight)
    ),
    "kept_dhidden": lambda dlogits, weight, kept, dhidden: _kept(
        kept, dlogits, weight=contiguous_rows(weight), dhidden=dhidden
    ),
    "kept_dweight": lambda dlogits, hidden, pairs, dweight, add: _pairs(
        pairs, dlogits, hidden=contiguous_rows(hidden), dweight=dweight
    ),
    "linear_logp": lambda hidden, weight, bias, ids, temperature, params, entropy: {
        **_head(hidden, weight, bias, ids),
        "temperature": Expected(temperature, SINGLE, hidden.shape[:1]),
    },
    "anchored": lambda hidden, weight, bias, ids, table, exponentials, params: {
        **_head(hidden, weight, bias, ids),
        "table": Expected(table, SINGLE, (len(TABLE_FIELDS), len(hidden)), CONTIGUOUS_ROWS),
    },
}


class KernelBackend:
    """A backend with kernels of its own. Logits (C, V) are in fp32, bf16 or fp16, at any row stride; everything per
    token is fp32."""

    has_amx = False

    def __init_subclass__(cls) -> None:
        if os.environ.get("GRPO_KERNELS_CHECK_CALLS") == "1":
            for name in cls.__dict__.keys() & _EXPECTED.keys():
                setattr(cls, name, _after_check(_EXPECTED[name], getattr(cls, name)))


def _after_check(expected: Callable[..., dict[str, Expected]], method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def checked(self: KernelBackend, *given: Any, **named: Any) -> Any:
        check_tensors(expected(*given, **named))
        return method(self, *given, **named)

    return checked

"""Arguments with a value for each token, or with one number: their checks by the table, and their expansion."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..argument import check_number
from ..objective.tokens import TokenInputs
from . import arguments
from .arguments import check_numbers, check_one_element, check_sizes, check_type, constant, name_first
from .table import ARGUMENTS, MASKS
from .table import TOKEN_ARGUMENTS as TOKEN_ARGUMENTS

# The fields of TokenInputs whose numbers have ends.
_WITH_ENDS = tuple(
    name
    for name in TokenInputs._fields
    if name in ARGUMENTS and (ARGUMENTS[name].low, ARGUMENTS[name].high) != (-math.inf, math.inf)
)


class TokenLayout(NamedTuple):
    """The tokens of a call: a batch (B, T), or packed (N,). num_sequences: -1 where it is not known."""

    shape: torch.Size
    num_sequences: int
    cu_seqlens: Tensor | None
    like: Tensor  # on the device of the call
    dtype: torch.dtype  # that the loss is computed in


def check_token_tensor(name: str, x: Tensor, shape: torch.Size, num_sequences: int, like: Tensor) -> None:
    """Checks that x has one value per token, `shape`, or where the table says so one per sequence: (S,), (S, 1).
    num_sequences: S, or -1 where it is not known."""
    row = ARGUMENTS[name]
    check_type(name, x, row.dtypes, like)
    if x.shape != shape:
        check_sizes(name, x, row, {"tokens": shape, "S": num_sequences})
    if row.dtypes is MASKS and x.dtype is not torch.bool and arguments.checks_values(x.device):
        # Weights per token, or the additive mask of an attention, would train on the padding.
        name_first(name, x, (x != 0) & (x != 1), "0 (masked) or 1")


def per_token(name: str, x: Tensor, layout: TokenLayout) -> Tensor:
    """Returns x with one value for each token, of the tokens' shape, contiguous, in the type of the loss; raises for a
    shape that the table does not allow. Kernels take addresses: nothing behind this looks at shapes again."""
    shapes, shape, offsets = ARGUMENTS[name].shapes, layout.shape, layout.cu_seqlens
    for_all = () in shapes and x.numel() == 1
    if for_all:
        check_one_element(name, x)
    else:
        check_token_tensor(name, x, shape, layout.num_sequences, layout.like)
    x = constant(name, x).to(device=layout.like.device, dtype=layout.dtype)
    if for_all:
        return x.reshape(()).expand(shape).contiguous()
    if offsets is not None and len(shapes) > 1:
        _refuse_two_meanings(name, x, offsets, shape[0])
    if x.shape != shape:
        per_sequence = x.reshape(-1, 1)
        x = (
            per_sequence.expand(shape)
            if offsets is None
            else per_sequence.squeeze(1).repeat_interleave(offsets.diff(), output_size=shape[0])
        )
    return x.contiguous()


def mask_per_token(mask: Tensor | None, shape: torch.Size, like: Tensor) -> Tensor | None:
    """Returns a completion_mask as bool, contiguous."""
    if mask is None:
        return None
    check_token_tensor("completion_mask", mask, shape, -1, like)
    mask = constant("completion_mask", mask).contiguous()
    return mask if mask.dtype is torch.bool else mask != 0


def one_number(name: str, x: Tensor | float, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a number, or a tensor of one element, as a tensor () of this type on the device of `like`."""
    if isinstance(x, Tensor):
        check_one_element(name, x)
        return constant(name, x).reshape(()).to(device=like.device, dtype=dtype)
    row = ARGUMENTS[name]
    number = check_number(name, x, low=row.low, above=row.above, dtype=dtype)
    return torch.full((), number, dtype=dtype, device=like.device)


def check_token_values(inputs: TokenInputs) -> None:
    """Refuses numbers of unmasked tokens that would make the loss NaN."""
    if arguments.checks_values(inputs.advantages.device):
        for name in _WITH_ENDS:
            if (x := getattr(inputs, name)) is not None:
                check_argument(name, x, inputs.completion_mask, inputs.cu_seqlens)


def check_argument(name: str, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None = None) -> None:
    """Checks the numbers of an argument of the table, in any shape that it may have."""
    row = ARGUMENTS[name]
    check_numbers(name, x, mask if row.shapes[0] else None, cu_seqlens, row)  # one number belongs to no token


def _refuse_two_meanings(name: str, x: Tensor, cu_seqlens: Tensor, num_tokens: int) -> None:
    """Refuses (S,) = (N,): one value per sequence is one per token, unless a sequence is empty and another longer."""
    sequences = cu_seqlens.numel() - 1
    if num_tokens != sequences or x.dim() != 1:
        return
    # While torch.compile traces, no offset is known, and the operator in the graph gets one value per token.
    known = arguments.checks_values(cu_seqlens.device)
    if torch.compiler.is_compiling() or (known and bool((cu_seqlens.diff() != 1).any())):
        raise ValueError(
            f"{name} has shape ({sequences},), and there are as many tokens as sequences, of which some may be empty: "
            f"it may hold one value per token or one per sequence. Pass ({sequences}, 1) for one per sequence, or "
            "leave empty sequences out of cu_seqlens"
        )

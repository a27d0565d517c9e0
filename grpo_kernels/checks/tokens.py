"""Arguments with a value for each token: which shapes, types and numbers they may have, and their expansion."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..config.argument import LARGEST, SMALLEST
from . import arguments
from .arguments import FLOATS, NUMBERS, THERE, check_numbers, check_one_element, check_tensor, constant, name_first

if TYPE_CHECKING:
    from ..objective.tokens import TokenInputs

HIGHEST_LOGP = 1.0  # nats: at most 0, but for the rounding of 16-bit logits


class Argument(NamedTuple):
    """What a tensor with one value for each token may be."""

    low: float = -math.inf
    high: float = math.inf
    expected: str = f"a number{THERE}"
    allows_nan: bool = False
    dtypes: tuple[torch.dtype, ...] = FLOATS
    per_sequence: bool = False  # also one value for each sequence, (S,) or (S, 1)
    for_all: bool = False  # also one value for all tokens, a tensor of one element


_ANY = Argument()
_LOGPS = _ANY._replace(high=HIGHEST_LOGP, expected=f"a number{THERE}, at most 0 nats")
_WEIGHTS = Argument(0.0, LARGEST, f"a finite number{THERE}, >= 0", per_sequence=True)
TOKEN_ARGUMENTS = {
    "advantages": Argument(
        -LARGEST, LARGEST, f"a finite number{THERE}, in float32", dtypes=(*NUMBERS, torch.bool), per_sequence=True
    ),
    "old_logps": _LOGPS,
    "ref_logps": _LOGPS,
    "rollout_logps": _LOGPS._replace(expected=f"a number{THERE}, at most 0 nats, or NaN: unknown", allows_nan=True),
    "rollout_weights": _WEIGHTS,
    "token_weights": _WEIGHTS,
    "temperature": Argument(
        SMALLEST, LARGEST, f"a positive finite number{THERE}, in float32", per_sequence=True, for_all=True
    ),
}


class TokenLayout(NamedTuple):
    """The tokens of a call: a batch (B, T), or packed (N,). num_sequences: -1 where it is not known."""

    shape: torch.Size
    num_sequences: int
    cu_seqlens: Tensor | None
    like: Tensor  # on the device of the call
    dtype: torch.dtype  # that the loss is computed in


def check_token_tensor(name: str, x: Tensor | None, shape: torch.Size, num_sequences: int, like: Tensor) -> None:
    """Checks that x has one value per token, `shape`, or where TOKEN_ARGUMENTS says so one per sequence: (S,), (S, 1).
    num_sequences: S, or -1 where it is not known."""
    if x is None:
        return
    rule = TOKEN_ARGUMENTS.get(name, _ANY)
    check_tensor(name, x, like)
    if x.shape != shape:
        has_sequences = rule.per_sequence and num_sequences >= 0
        allowed = [tuple(shape), (num_sequences,), (num_sequences, 1)][: 3 if has_sequences else 1]
        if x.shape not in allowed:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {' or '.join(map(str, allowed))}")
    if name == "completion_mask":
        if x.is_complex() or x.is_quantized:
            raise TypeError(f"completion_mask is {x.dtype}; expected bool, or the numbers 0 (masked) and 1")
        if x.dtype is not torch.bool and arguments.checks_values(x.device):
            # Weights per token, or the additive mask of an attention, would train on the padding.
            name_first(name, x, (x != 0) & (x != 1), "0 (masked) or 1")
    elif x.dtype not in rule.dtypes:
        raise TypeError(f"{name} is {x.dtype}; expected a floating-point type of 16 to 64 bits")


def per_token(name: str, x: Tensor, layout: TokenLayout) -> Tensor:
    """Returns x with one value for each token, of the tokens' shape, contiguous, in the type of the loss; raises for a
    shape that TOKEN_ARGUMENTS does not allow. Kernels take addresses: nothing behind this looks at shapes again."""
    shape = layout.shape
    for_all = TOKEN_ARGUMENTS[name].for_all and x.numel() == 1
    if for_all:
        check_one_element(name, x)
    else:
        check_token_tensor(name, x, shape, layout.num_sequences, layout.like)
    x = constant(name, x).to(device=layout.like.device, dtype=layout.dtype)
    if for_all:
        x = x.reshape(()).expand(shape)
    elif layout.cu_seqlens is not None:
        _refuse_two_meanings(name, x, layout.cu_seqlens, shape[0])
        if x.shape != shape:
            x = x.reshape(-1).repeat_interleave(layout.cu_seqlens.diff(), output_size=shape[0])
    elif x.shape != shape:
        x = x.reshape(-1, 1).expand(shape)
    return x.contiguous()


def mask_per_token(mask: Tensor | None, shape: torch.Size, like: Tensor) -> Tensor | None:
    """Returns a completion_mask as bool, contiguous."""
    if mask is None:
        return None
    check_token_tensor("completion_mask", mask, shape, -1, like)
    mask = constant("completion_mask", mask).contiguous()
    return mask if mask.dtype is torch.bool else mask != 0


def check_token_values(inputs: TokenInputs) -> None:
    """Refuses numbers of unmasked tokens that would make the loss NaN. In rollout_logps NaN means unknown."""
    if not arguments.checks_values(inputs.advantages.device):
        return
    for name in TOKEN_ARGUMENTS:
        if (x := getattr(inputs, name)) is not None:
            check_argument(name, x, inputs.completion_mask, inputs.cu_seqlens)
    positive = SMALLEST, "a positive finite number, in float32"
    for name, x, (low, expected) in (
        ("num_items_in_batch or normalizer", inputs.normalizer, positive),
        ("entropy_normalizer", inputs.entropy_normalizer, positive),
        ("entropy_coef", inputs.entropy_coef, (0.0, "a finite number >= 0")),
    ):
        if x is not None and not low <= x.item() < math.inf:
            raise ValueError(f"{name}={x.item()}; expected {expected}")


def _refuse_two_meanings(name: str, x: Tensor, cu_seqlens: Tensor, num_tokens: int) -> None:
    """Refuses (S,) = (N,): one value per sequence is one per token, unless a sequence is empty and another longer."""
    sequences = cu_seqlens.numel() - 1
    if not TOKEN_ARGUMENTS[name].per_sequence or num_tokens != sequences or x.dim() != 1:
        return
    # While torch.compile traces, no offset is known, and the operator in the graph gets one value per token.
    known = arguments.checks_values(cu_seqlens.device)
    if torch.compiler.is_compiling() or (known and bool((cu_seqlens.diff() != 1).any())):
        raise ValueError(
            f"{name} has shape ({sequences},), and there are as many tokens as sequences, of which some may be empty: "
            f"it may hold one value per token or one per sequence. Pass ({sequences}, 1) for one per sequence, or "
            "leave empty sequences out of cu_seqlens"
        )


def check_argument(name: str, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None = None) -> None:
    """Checks the numbers of one of TOKEN_ARGUMENTS, in any shape that it may have."""
    rule = TOKEN_ARGUMENTS[name]
    check_numbers(
        name, x, mask, cu_seqlens, low=rule.low, high=rule.high, expected=rule.expected, allows_nan=rule.allows_nan
    )

"""The table of arguments: for each tensor that a public function takes, a row of what it may be. Rows of the options of
GRPOConfig are its annotations. Shapes, types, numbers, the expansion to tokens and the tests of bad input follow."""

from __future__ import annotations

from typing import Annotated, TypedDict

import torch
from torch import Tensor

from ..argument import (
    FINITE,
    FLOATS,
    LARGEST,
    NUMBERS,
    ONE,
    PER_SEQUENCE,
    PER_TOKEN,
    SMALLEST,
    Argument,
    arguments_of,
    finite_number,
)
from ..config import OPTIONS, GRPOConfig
from ..objective.tokens import TokenInputs
from .plain import INTEGERS

THERE = " at every unmasked position"
HIGHEST_LOGP = 1.0  # nats: at most 0, but for the rounding of 16-bit logits
MASKS = (torch.bool, *NUMBERS, torch.uint16, torch.uint32, torch.uint64)  # of numbers that are 0 or 1

_LOGPS = Argument(PER_TOKEN, FLOATS, high=HIGHEST_LOGP, expected=f"a number{THERE}, at most 0 nats")
_ROLLOUT = _LOGPS._replace(allows_nan=True, expected=f"{_LOGPS.expected}, or NaN: unknown")
_WEIGHTS = Argument(PER_SEQUENCE, FLOATS, low=0.0, high=LARGEST)
_DENOMINATOR = Argument(ONE, NUMBERS, above=0.0, high=FINITE)


class LossOptions(TypedDict, total=False):
    """The keyword arguments that all loss functions take; their meaning is in `fused_grpo_loss`. A tensor reaches the
    loss, with one value for each token or one number, as the field of its name in objective/tokens.py's TokenInputs."""

    completion_mask: Annotated[Tensor | None, Argument(PER_TOKEN, MASKS)]
    old_logps: Annotated[Tensor | None, _LOGPS]
    ref_logps: Annotated[Tensor | None, _LOGPS]
    rollout_weights: Annotated[Tensor | None, _WEIGHTS]
    rollout_logps: Annotated[Tensor | None, _ROLLOUT]
    token_weights: Annotated[Tensor | None, _WEIGHTS]
    rewards: Annotated[Tensor | None, Argument((("S",),), NUMBERS)]
    num_generations: int | None
    group_ids: Tensor | None
    cu_seqlens: Tensor | None
    num_items_in_batch: Annotated[Tensor | float | None, Argument(ONE, NUMBERS, low=0.0, high=FINITE)]
    normalizer: Annotated[Tensor | float | None, _DENOMINATOR]
    entropy_normalizer: Annotated[Tensor | float | None, _DENOMINATOR]
    config: GRPOConfig | None
    backend: str


_HIDDEN, _WEIGHT, _BIAS = (Argument((sizes,), FLOATS) for sizes in (("tokens", "H"), ("V", "H"), ("V",)))
_ROWS: dict[str, Argument] = {
    "hidden": _HIDDEN,
    "lm_head_weight": _WEIGHT,
    "lm_head_bias": _BIAS,
    "completion_ids": Argument(PER_TOKEN, INTEGERS),
    "advantages": Argument(PER_SEQUENCE, (*NUMBERS, torch.bool), low=-LARGEST, high=LARGEST),
    "logps": Argument(PER_TOKEN, FLOATS),
    "entropy": Argument(PER_TOKEN, FLOATS),
    "logits": Argument((("tokens", "V"),), FLOATS),
    "Teacher.hidden": _HIDDEN,
    "Teacher.weight": _WEIGHT,
    "Teacher.bias": _BIAS,
    "teacher_of": Argument(PER_SEQUENCE, INTEGERS),
    "TopKTeacher.ids": Argument((("tokens", "K"),), INTEGERS),
    "TopKTeacher.logps": Argument((("tokens", "K"),), FLOATS),
    "SamplingMask.ids": Argument((("m",),), INTEGERS),
    "SamplingMask.counts": Argument(PER_TOKEN, INTEGERS),
    "SamplingMask.mass": Argument(PER_TOKEN),
    "SamplingMask.added": Argument(PER_TOKEN),
    **arguments_of(LossOptions),
    **OPTIONS,
}


def _of_tensor(row: Argument) -> Argument:
    """Returns a row with the least number, and words, for a tensor's numbers."""
    where = THERE if row.shapes[:1] == PER_TOKEN else ""
    expected = row.expected or f"{finite_number(row)}{where}, in float32"
    return row._replace(low=SMALLEST if row.above == 0.0 else row.low, expected=expected)


ARGUMENTS = {name: _of_tensor(row) for name, row in _ROWS.items() if row.shapes}
# What reaches the loss with one value per token, and as one number.
TOKEN_ARGUMENTS = {
    name: row
    for name, row in ARGUMENTS.items()
    if name in TokenInputs._fields and row.shapes != ONE and row.dtypes is not MASKS
}
NUMBER_ARGUMENTS = {name: row for name, row in ARGUMENTS.items() if row.shapes == ONE}

"""Every row of the table of arguments, in every function that takes it: what the row does not allow is refused by name,
before any work. test_bad_input.py has what arguments must be to each other; test_config.py the options."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers import good_calls
from test_bad_input import refuses
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.argument import ONE, PER_SEQUENCE, Argument
from grpo_kernels.checks.table import ARGUMENTS, MASKS, NUMBER_ARGUMENTS, TOKEN_ARGUMENTS, LossOptions
from grpo_kernels.config import OPTIONS

Given = dict[str, Any]
Case = tuple[str, str]  # function, argument as errors name it
PLACES = torch.arange(24).view(4, 6)
OBJECTS: dict[str, Given] = {
    "Teacher": dict(hidden=torch.rand(4, 6, 5), weight=torch.rand(67, 5), bias=torch.rand(67)),
    "TopKTeacher": dict(ids=torch.stack([PLACES, PLACES + 1], -1), logps=torch.full((4, 6, 2), -2.0)),
    "SamplingMask": dict(
        ids=PLACES.flatten(), counts=torch.ones_like(PLACES), mass=torch.ones(4, 6), added=torch.zeros(4, 6).bool()
    ),
}
# What a function does not take beside the argument.
INSTEAD: dict[str, Given] = {"num_items_in_batch": {"normalizer": None}}
ELSEWHERE = ("group_advantages", "combine_advantages", "process_advantages", "entropy_quantile")  # of rewards.py


def good(name: str) -> Tensor:
    """A value that the row of an argument allows."""
    return torch.full((), 24.0) if name in NUMBER_ARGUMENTS else torch.full((4, 6), 0.5)


OPTIONAL = {name: good(name) for name in LossOptions.__annotations__ if name in TOKEN_ARGUMENTS | NUMBER_ARGUMENTS}


def calls() -> dict[Case, tuple[Callable[..., Any], Given, Tensor]]:
    """(a function of x beside other arguments, these, a good x) for every tensor of every function."""
    found: dict[Case, tuple[Callable[..., Any], Given, Tensor]] = {}
    for function, given in good_calls().items():
        if function in ELSEWHERE:
            continue
        for name, x in ((OPTIONAL if "config" in given else {}) | given).items():
            if isinstance(x, Tensor) and name in ARGUMENTS:
                found[function, name] = partial(with_argument, function, name), given | INSTEAD.get(name, {}), x
        for name, row in OPTIONS.items():
            if row.takes_tensor and "config" in given and (name, function) != ("temperature", "grpo_loss_from_logps"):
                found[function, name] = partial(with_option, function, name), given, good(name)
    for function in ("fused_distillation_loss", "fused_divergence"):
        given = good_calls()[function] | {"teacher": [gk.Teacher(**OBJECTS["Teacher"])]}
        given["teacher_of"] = torch.zeros(4, 6, dtype=torch.int64)
        found[function, "teacher_of"] = partial(with_argument, function, "teacher_of"), given, given["teacher_of"]
    for kind, given in OBJECTS.items():
        for name, x in given.items():
            found[kind, f"{kind}.{name}"] = partial(with_argument, kind, name), given, x
    return found


def with_argument(function: str, name: str, x: Any, **given: Any) -> Any:
    return getattr(gk, function)(**given | {name: x})


def with_option(function: str, name: str, x: Any, **given: Any) -> Any:
    return getattr(gk, function)(**given | {"config": dataclasses.replace(given["config"], **{name: x})})


CALLS = calls()


def outside(row: Argument) -> list[float]:
    """Numbers beyond the ends of a row."""
    found = [] if row.low == -math.inf else [row.low - 1 if row.low > -1 else -math.inf]
    found += [0.0, 1e-50] if row.above == 0.0 else []
    found += [] if row.high == math.inf else [row.high + 1 if row.high < 100 else math.inf]
    return found + [math.nan] * bool(found and not row.allows_nan)


def expected_shapes(row: Argument) -> list[str]:
    """As an error has them; those of one value per token follow from the first argument."""
    return {PER_SEQUENCE: ["(4, 6)", "(4,)", "(4, 1)"], ONE: ["one element"]}.get(row.shapes, [])


def refused(case: Case, x: Tensor) -> Iterator[tuple[Any, type, list[str]]]:
    """(a value, its error, words of the error)"""
    _, name = case
    row = ARGUMENTS[name]
    yield [1.0], TypeError, [f"{name} is a list"]
    if row.dtypes is not None:
        yield x.cfloat(), TypeError, [f"{name} is torch.complex64"]
        for dtype in {torch.int64, torch.float32} - {*row.dtypes}:
            yield x.to(dtype), TypeError, [f"{name} is {dtype}", "expected"]
    yield x.to("meta"), ValueError, ["meta"]
    wrong = torch.ones(5) if row.shapes == ONE else x[..., None, None]
    yield wrong, ValueError, [f"{name} has shape {tuple(wrong.shape)}", "expected", *expected_shapes(row)]
    for number in outside(row):
        corrupted = x.double().clone()
        corrupted.view(-1)[0] = number
        yield corrupted, ValueError, [name, "expected"]
        if row.shapes == ONE:
            yield number, ValueError, [name, "expected a finite number"]
    if row.dtypes is MASKS:
        yield x.float() * 0.5, ValueError, [f"{name}[0, 0] = 0.5; expected 0 (masked) or 1"]


@pytest.mark.parametrize("case", CALLS, ids=" ".join)
def test_what_a_row_does_not_allow_is_refused(case):
    function, given, x = CALLS[case]
    function(**given, x=x)
    for wrong, error, words in refused(case, x):
        refuses(function, given | {"x": wrong}, error, *words)


def test_every_row_is_tried():
    """But rewards, which come in place of advantages: test_bad_input.py."""
    assert {name for _, name in CALLS} | {"rewards"} == ARGUMENTS.keys()


def test_every_option_is_described():
    for name in LossOptions.__annotations__:
        assert re.search(rf"\b{name}\b", gk.fused_grpo_loss.__doc__), name

"""The implementations that are compared: one plug-in of one signature each, and the table of them.

A plug-in is an `Implementation`. To add one: a module beside this one, and its name in `_MODULES`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import NamedTuple

import torch
from torch import Tensor

from ..inputs import Inputs, grpo_objective


class Result(NamedTuple):
    """What one call gives: loss () and logps (B, T), detached; dhidden (N, H) or as hidden; dweight (V, H).

    mode "step" requires loss, dhidden and dweight, "frozen" loss and dhidden, "forward" logps. More is allowed.
    """

    loss: Tensor | None = None
    logps: Tensor | None = None
    dhidden: Tensor | None = None
    dweight: Tensor | None = None


Step = Callable[[Inputs], Result]


class Unsupported(Exception):
    """An implementation has nothing for this mode, type or size; the message says what is lacking."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute a case.

    `settings(inputs, mode)` gives a step for each setting that is worth trying, the documented default first. It may
    raise `Unsupported`. `unavailable_reason(device, dtype)` says why it cannot run there at all, None where it can; it
    imports what is needed. `objective` is what its results are checked against: "grpo"; "cross_entropy", mean -logp, a
    yardstick that does the same matrix products; or "none", which is not checked.
    """

    name: str
    title: str
    settings: Callable[[Inputs, str], dict[str, Step]]
    unavailable_reason: Callable[[torch.device, torch.dtype], str | None] = lambda device, dtype: None
    objective: str = "grpo"


def gradients(loss: Tensor, inputs: Inputs, logps: Tensor | None = None) -> Result:
    """Backward by autograd, to the inputs that require gradients."""
    leaves = (inputs.hidden,) if inputs.frozen else (inputs.hidden, inputs.weight)
    dhidden, *rest = torch.autograd.grad(loss, leaves)
    return Result(loss.detach(), None if logps is None else logps.detach(), dhidden, rest[0] if rest else None)


def not_importable(load: Callable[[], object], requirement: str) -> str | None:
    """A sentence if `load()` raises. It may raise anything: a broken installation is no error of the benchmark."""
    try:
        load()
    except ModuleNotFoundError as error:
        return f"not installed ({error}): pip install {requirement}"
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        return f"cannot be imported: {type(error).__name__}: {line}"
    return None


def no_nvidia_gpu(device: torch.device, *least: int) -> str | None:
    """A sentence if the device is no NVIDIA GPU of at least this compute capability, as in 9, 0."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "needs an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < least:
        return f"needs compute capability {'.'.join(map(str, least))}, this is {'.'.join(map(str, capability))}"
    return None


def from_logps(logps: Callable[[Inputs], Tensor], mode: str) -> Step:
    """The step of a peer that gives log-probabilities (B, T), with the objective in plain torch on top."""

    def forward(inputs: Inputs) -> Result:
        with torch.no_grad():
            return Result(logps=logps(inputs))

    def backward(inputs: Inputs) -> Result:
        found = logps(inputs)
        return gradients(grpo_objective(found, inputs), inputs, found)

    return forward if mode == "forward" else backward


_MODULES = ("ours", "torch_", "trl", "liger", "verl", "cross_entropy")


@functools.cache
def implementations() -> dict[str, Implementation]:
    """All of them by name, in the order of the table: ours, the floor, eager, the peers, the yardsticks."""
    found: dict[str, Implementation] = {}
    for module in _MODULES:
        offered: tuple[Implementation, ...] = importlib.import_module(f".{module}", __name__).IMPLEMENTATIONS
        found |= {implementation.name: implementation for implementation in offered}
    return found


def select(patterns: Sequence[str], without: Sequence[str] = ()) -> list[str]:
    """Names that match any of the patterns, as in `ours*`, and none of `without`.

    ValueError where one of `patterns` matches no implementation.
    """
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in implementations()):
            raise ValueError(f"{pattern!r} is no implementation; there are {', '.join(implementations())}")
    return [
        name
        for name in implementations()
        if any(fnmatch(name, pattern) for pattern in patterns) and not any(fnmatch(name, out) for out in without)
    ]

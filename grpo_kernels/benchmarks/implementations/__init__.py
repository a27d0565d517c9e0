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
    raise `Unsupported`. `objective` is what its results are checked against: "grpo"; "cross_entropy", mean -logp, a
    yardstick that does the same matrix products; or "none", which is not checked.
    `unavailable(device, dtype)` says why it cannot run there, "" where it can; `load` imports what is needed, and
    `requirement` is what pip installs for that; `capability` is the least of an NVIDIA GPU that it needs, as in (9, 0).
    """

    name: str
    title: str
    settings: Callable[[Inputs, str], dict[str, Step]]
    objective: str = "grpo"
    load: Callable[[], object] = lambda: None
    requirement: str = ""
    capability: tuple[int, ...] | None = None
    unavailable: Callable[[torch.device, torch.dtype], str] = lambda device, dtype: ""

    def unavailable_reason(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """A sentence, None where it can run. A broken installation, which may raise anything, is no error."""
        if self.capability is not None:
            if device.type != "cuda" or torch.version.cuda is None:
                return "needs an NVIDIA GPU"
            here = torch.cuda.get_device_capability(device)
            if here < self.capability:
                return f"needs compute capability {'.'.join(map(str, self.capability))}, this is {here[0]}.{here[1]}"
        if reason := self.unavailable(device, dtype):
            return reason
        try:
            self.load()
        except ModuleNotFoundError as error:
            return f"not installed ({error}): pip install {self.requirement}"
        except Exception as error:
            return f"cannot be imported: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        return None


def gradients(loss: Tensor, inputs: Inputs, logps: Tensor | None = None) -> Result:
    """Backward by autograd, to the inputs that require gradients."""
    leaves = (inputs.hidden,) if inputs.frozen else (inputs.hidden, inputs.weight)
    dhidden, *rest = torch.autograd.grad(loss, leaves)
    return Result(loss.detach(), None if logps is None else logps.detach(), dhidden, rest[0] if rest else None)


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

"""What a plug-in of the comparison is, the table of them, and what they share."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

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
MakeStep = Callable[[Inputs, str], Step]
M = TypeVar("M", bound=MakeStep)


class Unsupported(Exception):
    """An implementation has nothing for this mode, type or size; the message says what is lacking."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute a case.

    `make_step(inputs, mode)` gives the function that is timed, or raises `Unsupported`. `objective` is what its results
    are checked against: "grpo"; "cross_entropy", mean -logp, a yardstick that does the same matrix products; or "none",
    which is not checked.
    `unavailable(device, dtype)` says why it cannot run there, "" where it can; `modules` have to be importable, and
    `requirement` is what pip installs for that; `capability` is the least of an NVIDIA GPU that it needs, as in (9, 0).
    """

    name: str
    title: str
    make_step: MakeStep
    objective: str = "grpo"
    modules: tuple[str, ...] = ()
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
            for module in self.modules:
                load(module)
        except ModuleNotFoundError as error:
            return f"not installed ({error}): pip install {self.requirement}"
        except Exception as error:
            return f"cannot be imported: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        return None


IMPLEMENTATIONS: dict[str, Implementation] = {}


def implementation(name: str, title: str, *, teachers: bool = False, **fields: Any) -> Callable[[M], M]:
    """Decorate the `make_step` of an Implementation, which then is in the table.

    `teachers`: it serves inputs with one.
    """

    def register(make_step: M) -> M:
        def checked(inputs: Inputs, mode: str) -> Step:
            if inputs.teacher is not None and not teachers:
                raise Unsupported("has no divergence to a teacher's distribution")
            return make_step(inputs, mode)

        IMPLEMENTATIONS[name] = Implementation(name, title, checked, **fields)
        return make_step

    return register


def select(patterns: Sequence[str], without: Sequence[str] = ()) -> list[str]:
    """Names that match any of the patterns, as in `ours*`, and none of `without`.

    ValueError where one of `patterns` matches no implementation.
    """
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in IMPLEMENTATIONS):
            raise ValueError(f"{pattern!r} is no implementation; there are {', '.join(IMPLEMENTATIONS)}")
    return [
        name
        for name in IMPLEMENTATIONS
        if any(fnmatch(name, pattern) for pattern in patterns) and not any(fnmatch(name, out) for out in without)
    ]


# --- what plug-ins share ----------------------------------------------------------------------------------------------


def load(name: str) -> ModuleType:
    """Import a module of a peer; of verl without `verl` and `verl.utils`, for which empty packages stand meanwhile.

    These two import Ray, TensorDict, OmegaConf and more, of which the modules that are used here need nothing.
    """
    if not name.startswith("verl."):
        return importlib.import_module(name)
    found = importlib.util.find_spec("verl")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'verl'", name="verl")
    root = Path(found.submodule_search_locations[0])
    places = {"verl": root, "verl.utils": root / "utils"}
    empty = {package: ModuleType(package) for package in places if package not in sys.modules}
    for package, module in empty.items():
        module.__path__ = [str(places[package])]
    sys.modules.update(empty)
    try:
        return importlib.import_module(name)
    finally:
        for package in empty:
            del sys.modules[package]


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

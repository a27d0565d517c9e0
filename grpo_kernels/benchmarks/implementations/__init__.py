"""The implementations that are compared: ours, plain PyTorch, the peers. Each is a function with one signature.

To add one: a function in peers.py with the decorator `implementation`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeVar

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
    """An implementation cannot run here, or has nothing for this mode, type or size; the message says why."""


class Implementation(NamedTuple):
    """One way to compute a case.

    `make_step(inputs, mode)` gives the function that is timed, or raises `Unsupported`. `objective` is what its results
    are checked against: "grpo"; "cross_entropy", mean -logp, a yardstick that does the same matrix products; or "none",
    which is not checked.
    """

    title: str
    make_step: MakeStep
    objective: str = "grpo"


IMPLEMENTATIONS: dict[str, Implementation] = {}


def implementation(name: str, title: str, objective: str = "grpo", *, teachers: bool = False) -> Callable[[M], M]:
    """Puts a `make_step` into the table of implementations. `teachers`: it serves inputs with one."""

    def register(make_step: M) -> M:
        def checked(inputs: Inputs, mode: str) -> Step:
            if inputs.teacher is not None and not teachers:
                raise Unsupported("has no divergence to a teacher's distribution")
            return make_step(inputs, mode)

        IMPLEMENTATIONS[name] = Implementation(title, checked, objective)
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


# --- what they share --------------------------------------------------------------------------------------------------


def need_nvidia(inputs: Inputs, least: tuple[int, int] = (0, 0)) -> None:
    """Raises `Unsupported` unless the inputs lie on an NVIDIA GPU of at least this compute capability."""
    if not inputs.hidden.is_cuda or torch.version.cuda is None:
        raise Unsupported("needs an NVIDIA GPU")
    here = torch.cuda.get_device_capability(inputs.hidden.device)
    if here < least:
        raise Unsupported(f"needs compute capability {least[0]}.{least[1]}, this is {here[0]}.{here[1]}")


def load(name: str, requirement: str) -> ModuleType:
    """Imports a module of a peer, which `pip install requirement` brings. A broken installation, which may raise
    anything, is `Unsupported`."""
    try:
        return _load_verl(name) if name.startswith("verl.") else importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise Unsupported(f"not installed ({error}): pip install {requirement}") from error
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise Unsupported(f"cannot be imported: {type(error).__name__}: {first}") from error


def _load_verl(name: str) -> ModuleType:
    """Without `verl` and `verl.utils`, for which empty packages stand meanwhile: these two import Ray, TensorDict,
    OmegaConf and more, of which the modules that are used here need nothing."""
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


for _module in ("ours", "torch_", "peers"):  # in the order of the table
    importlib.import_module(f".{_module}", __name__)

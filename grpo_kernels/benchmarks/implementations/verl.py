"""verl: its Triton kernels and its chunks in torch, both for log-probabilities and entropies, the objective on top."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from torch import Tensor

from ..inputs import Inputs
from . import Implementation, Step, Unsupported, from_logps

_PACKAGE = "--no-deps verl==0.9.1"  # its dependencies pin transformers and bring Ray; what is used here needs none
_CHUNKS = (512, 4096)  # tokens; 512 is the default
_TILE = 128  # the Triton kernels assume that it divides the hidden size


@functools.cache
def _module(name: str) -> ModuleType:
    """A module of verl, imported without what `verl` and `verl.utils` import themselves.

    That would be Ray, TensorDict, OmegaConf and more, of which these modules need nothing. So empty packages of the
    same place stand for the two while the module is imported.
    """
    found = importlib.util.find_spec("verl")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'verl'", name="verl")
    root = Path(found.submodule_search_locations[0])
    places = {"verl": root, "verl.utils": root / "utils"}
    bare = {package: ModuleType(package) for package in places if package not in sys.modules}
    for package, module in bare.items():
        module.__path__ = [str(places[package])]
    sys.modules.update(bare)
    try:
        return importlib.import_module(name)
    finally:
        for package in bare:
            del sys.modules[package]


_function = functools.partial(_module, "verl.utils.kernel.linear_cross_entropy")
_kernels = functools.partial(_module, "verl.utils.kernel.kernels")  # which its first call imports, too late for _module
_torch_functional = functools.partial(_module, "verl.utils.experimental.torch_functional")


def _logps(inputs: Inputs, backward: str) -> Tensor:
    _kernels().set_backward_method(getattr(_kernels().BackwardEnum, backward))
    logps: Tensor
    logps, _ = _function().linear_cross_entropy(inputs.hidden, inputs.weight, inputs.ids, 1.0, "none")
    return logps.view(inputs.ids.shape)


def _settings(inputs: Inputs, mode: str) -> dict[str, Step]:
    """The gradient of the logits in pieces of the vocabulary, the default, and whole."""
    hidden_size = inputs.hidden.shape[-1]
    if hidden_size % _TILE:
        raise Unsupported(f"hidden size {hidden_size} is no multiple of {_TILE}")
    methods = {"split": "_Split_Dlogits_N", "whole": "_Total_Separate"}
    methods = {"": methods["split"]} if mode == "forward" else methods
    return {name: from_logps(functools.partial(_logps, backward=method), mode) for name, method in methods.items()}


def _torch_logps(inputs: Inputs, chunk_size: int) -> Tensor:
    logps: Tensor
    logps, _ = _torch_functional().FusedLinearForPPO(chunk_size)(inputs.hidden, inputs.weight, inputs.ids)
    return logps


def _torch_settings(inputs: Inputs, mode: str) -> dict[str, Step]:
    default, *others = _CHUNKS
    sizes = (default, *(size for size in others if size <= inputs.ids.numel()))
    return {f"chunk {size}": from_logps(functools.partial(_torch_logps, chunk_size=size), mode) for size in sizes}


IMPLEMENTATIONS = (
    Implementation(
        "verl",
        "verl, Triton",
        _settings,
        load=lambda: (_function(), _kernels()),
        requirement=_PACKAGE,
        capability=(0, 0),
    ),
    Implementation(
        "verl-torch", "verl, torch in chunks", _torch_settings, load=_torch_functional, requirement=_PACKAGE
    ),
)

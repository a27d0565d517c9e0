"""Backends: who runs the row kernels. A registry, the choice for a call, and one clear warning on a fallback."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import NamedTuple

import torch

from .operations import Backend


def _load_of(module: str) -> Callable[[], tuple[Backend | None, str]]:
    """Returns the function `load` of a module of this package, which is imported when it is called."""
    return lambda: import_module(module, __name__).load()


class Entry(NamedTuple):
    """A backend: how to get it or the reason why not; the types of devices (None: any) and of logits that it serves."""

    load: Callable[[], tuple[Backend | None, str]]
    devices: tuple[str, ...] | None
    dtypes: tuple[torch.dtype, ...]


_HALF_AND_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
_REGISTRY: dict[str, Entry] = {
    "cpu": Entry(_load_of(".compiled.cpu"), ("cpu",), _HALF_AND_SINGLE),
    "cuda": Entry(_load_of(".compiled.cuda"), ("cuda",), _HALF_AND_SINGLE),
    "triton": Entry(_load_of(".triton"), ("cuda",), _HALF_AND_SINGLE),
    "torch": Entry(_load_of(".torch.backend"), None, (*_HALF_AND_SINGLE, torch.float64)),
}
# What "auto" takes, the first that serves: by type of device.
_ORDER = {"cpu": ("cpu", "torch"), "cuda": ("cuda", "triton", "torch")}


NO_TEACHER = "no kernels for a teacher"


class Choice(NamedTuple):
    """What "auto" takes, and why not the backends before it."""

    name: str
    refused: dict[str, str]


@cache
def _load(name: str) -> tuple[Backend | None, str]:
    """Returns (backend, "") or (None, the reason why it cannot be used here)."""
    return _REGISTRY[name].load()


def get_backend(name: str) -> Backend:
    """Returns a backend by name; ImportError with the reason where it is not available."""
    backend, reason = _load(name)
    if backend is None:
        raise ImportError(f"backend={name!r} is not available: {reason}")
    return backend


def registered_backends() -> tuple[str, ...]:
    """Returns every name that `backend=` accepts."""
    return tuple(_REGISTRY)


def available_backends() -> tuple[str, ...]:
    """Returns the names for `backend=` that work in this installation."""
    return tuple(name for name in _REGISTRY if _load(name)[0] is not None)


def candidates(device: torch.device) -> tuple[str, ...]:
    """Returns the backends among which "auto" chooses on this device, the preferred one first."""
    return _ORDER.get(device.type, ("torch",))


@cache
def unavailable_reason(name: str, device: torch.device | None = None) -> str:
    """Returns the reason why a backend cannot run on this device (None: on any device of the machine), or ""."""
    devices = _REGISTRY[name].devices
    if device is not None and devices is not None and device.type not in devices:
        return f"it serves {' and '.join(devices)} tensors"
    backend, reason = _load(name)
    return reason if backend is None or device is None else backend.unavailable_reason(device)


@cache
def auto_choice(device: torch.device, dtype: torch.dtype, has_teacher: bool = False) -> Choice:
    """Returns what `backend="auto"` takes for logits of this type on this device."""
    refused: dict[str, str] = {}
    for name in candidates(device):
        if dtype not in _REGISTRY[name].dtypes:
            continue
        reason = unavailable_reason(name, device)
        if not reason and has_teacher and not get_backend(name).takes_teachers:
            reason = NO_TEACHER
        if not reason:
            return Choice(name, refused)
        refused[name] = reason
    raise ValueError(f"no backend serves {dtype} on {device.type}")


def choose_backend(name: str, device: torch.device, dtype: torch.dtype, *, has_teacher: bool = False) -> str:
    """Returns the name of the backend for logits of this type on this device; ValueError where a named one cannot serve
    them."""
    if name == "auto":
        choice = auto_choice(device, dtype, has_teacher)
        if choice.refused:
            _warn_of(choice)
        return choice.name
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ValueError(f"backend={name!r}; expected 'auto' or one of {', '.join(_REGISTRY)}")
    _, devices, dtypes = _REGISTRY[name]
    if (devices is not None and device.type not in devices) or dtype not in dtypes:
        raise ValueError(
            f"backend={name!r} does not serve {dtype} logits on {device.type}; it serves "
            f"{', '.join(str(t) for t in dtypes)} on {'any device' if devices is None else ', '.join(devices)}"
        )
    reason = unavailable_reason(name, device)
    if reason:
        raise ImportError(f"backend={name!r} is not available: {reason}")
    if has_teacher and not get_backend(name).takes_teachers:
        raise ValueError(f"backend={name!r} has {NO_TEACHER}; expected backend='auto'")
    return name


# torch.compile takes the result as a constant: loading a backend is nothing to trace. This is all that
# torch.compiler.assume_constant_result does, besides importing the compiler (and triton) into every program.
choose_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _warn_of(choice: Choice) -> None:
    """Warns once of the backends that were passed over. An installation without CUDA kernels is a choice, as long as
    Triton's serve."""
    from .compiled.cuda import installed

    refused = dict(choice.refused)
    if choice.name == "triton" and not installed():
        refused.pop("cuda", None)
    if refused:
        reasons = "; ".join(f"backend {name!r} is not available ({reason})" for name, reason in refused.items())
        _warn_once(f"grpo_kernels: {reasons}; using {choice.name!r}")


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)

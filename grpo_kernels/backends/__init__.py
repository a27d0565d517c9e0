"""Backends: who runs the row kernels. A registry, the choice for a call, and one clear warning on a fallback."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from ..kernels import interpreted, why_unusable
from ..params import KernelParams, RowStats


class Backend(Protocol):
    """What the engine asks of a backend. Shapes and meaning as in backends/torch_.py, the plainest of them."""

    name: str

    def strategies(self, hidden: Tensor, weight: Tensor) -> tuple[str, ...]:
        """Those of strategy.py that serve these inputs, best first; "linear" and "anchored" need the methods below."""
        ...

    def fused(
        self,
        logits: Tensor,
        grad: Tensor,
        ids: Tensor,
        table: Tensor,
        params: KernelParams,
        residual: Tensor | None = None,
    ) -> RowStats: ...

    def stats(self, logits: Tensor, ids: Tensor, temperature: Tensor, params: KernelParams) -> RowStats: ...

    def gradient(
        self,
        logits: Tensor,
        grad: Tensor,
        ids: Tensor,
        temperature: Tensor,
        lse: Tensor,
        entropy: Tensor,
        g_logp: Tensor,
        g_entropy: Tensor,
        params: KernelParams,
        residual: Tensor | None = None,
    ) -> None: ...

    def objective(
        self, log_ratio: Tensor, logp: Tensor, entropy: Tensor, table: Tensor, params: KernelParams
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

    def reduce(
        self,
        scored: Tensor,
        log_ratio: Tensor,
        logp: Tensor,
        entropy: Tensor,
        value: Tensor,
        kl: Tensor,
        g_logp: Tensor,
        table: Tensor,
        params: KernelParams,
        cu_seqlens: Tensor,
        group_index: Tensor | None,
        num_groups: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

    def add_rows(self, target: Tensor, ids: Tensor, scale: Tensor, rows: Tensor) -> None: ...

    def group_statistics(
        self, rewards: Tensor, group_index: Tensor, num_groups: int, scale: str, baseline: str, ddof: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class FoldingBackend(Backend, Protocol):
    """A backend with products that fold the softmax into their epilogue."""

    def linear_logp(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperature: Tensor,
        params: KernelParams,
        *,
        entropy: bool,
    ) -> RowStats: ...

    def anchored(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        table: Tensor,
        exponentials: Tensor,
        params: KernelParams,
    ) -> tuple[RowStats, Tensor]: ...


def _load_torch() -> tuple[Backend | None, str]:
    from .torch_ import TorchBackend

    return TorchBackend(), ""


def _load_cpu() -> tuple[Backend | None, str]:
    from .native import load

    return load()


def _load_triton() -> tuple[Backend | None, str]:
    reason = why_unusable()
    if reason:
        return None, reason
    from .triton_ import TritonBackend

    return TritonBackend(), ""


# name -> (loader, device types, logits types); "auto" takes the first that serves the device and type of the call.
_HALF_AND_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
_Loader = Callable[[], tuple["Backend | None", str]]
_REGISTRY: dict[str, tuple[_Loader, tuple[str, ...] | None, tuple[torch.dtype, ...]]] = {
    "cpu": (_load_cpu, ("cpu",), _HALF_AND_SINGLE),
    "triton": (_load_triton, ("cuda", "cpu") if interpreted() else ("cuda",), _HALF_AND_SINGLE),
    "torch": (_load_torch, None, (*_HALF_AND_SINGLE, torch.float64)),
}


@cache
def _load(name: str) -> tuple[Backend | None, str]:
    """(backend, "") or (None, why it cannot be had here)."""
    return _REGISTRY[name][0]()


def get_backend(name: str) -> Backend:
    """A backend by name; ImportError with the reason where it is not available."""
    backend, reason = _load(name)
    if backend is None:
        raise ImportError(f"backend={name!r} is not available: {reason}")
    return backend


def available_backends() -> tuple[str, ...]:
    """Names for `backend=` that work in this installation."""
    return tuple(name for name in _REGISTRY if _load(name)[0] is not None)


def choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Resolve `backend=` for logits of this type on this device; ValueError where a named one cannot serve them."""
    if name == "auto":
        for candidate in _REGISTRY:
            if not _serves(candidate, device, dtype) or (candidate == "triton" and interpreted()):
                continue
            if _load(candidate)[0] is not None:
                return candidate
            _warn_once(f"grpo_kernels: backend {candidate!r} is not available ({_load(candidate)[1]}); using 'torch'")
        raise ValueError(f"no backend serves {dtype} on {device.type}")
    if name not in _REGISTRY:
        raise ValueError(f"backend={name!r}; expected 'auto' or one of {', '.join(_REGISTRY)}")
    if not _serves(name, device, dtype):
        _, devices, dtypes = _REGISTRY[name]
        raise ValueError(
            f"backend={name!r} does not serve {dtype} logits on {device.type}; it serves "
            f"{', '.join(str(t) for t in dtypes)} on {'any device' if devices is None else ', '.join(devices)}"
        )
    get_backend(name)
    return name


# torch.compile takes the result as a constant: loading a backend is nothing to trace. This is all that
# torch.compiler.assume_constant_result does, besides importing the compiler (and triton) into every program.
choose_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _serves(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    _, devices, dtypes = _REGISTRY[name]
    return (devices is None or device.type in devices) and dtype in dtypes


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)

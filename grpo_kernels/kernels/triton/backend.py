"""The Triton kernels behind the backend interface: any NVIDIA GPU from Ampere on, AMD's where Triton goes.

Kernels are launched on the device and the current stream of their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from ...contract import Backend
from ..launch import STRATEGIES, architecture, best_first, shipped_table
from ..torch.backend import add_rows
from . import kept, rows, sequences, sparse, teacher, tokens
from .anchored import anchored
from .linear_logp import linear_logp
from .plan import plan
from .scale import scale

P = ParamSpec("P")
Result = TypeVar("Result")


def on_device(launcher: Callable[P, Result]) -> Callable[Concatenate[Any, P], Result]:
    """The method that launches on the device of its tensors: Triton takes the current one, which need not be theirs."""

    @wraps(launcher)
    def method(self: Any, /, *given: P.args, **named: P.kwargs) -> Result:
        device = _device_of(given)
        if device is None or device.type != "cuda":
            return launcher(*given, **named)
        with torch.cuda.device(device):
            return launcher(*given, **named)

    return method


def _device_of(arguments: Iterable[object]) -> torch.device | None:
    """That of the first tensor, in a tuple or not."""
    for x in arguments:
        device = x.device if isinstance(x, Tensor) else _device_of(x) if isinstance(x, tuple) else None
        if device is not None:
            return device
    return None


class TritonBackend(Backend):
    name = "triton"

    def unavailable_reason(self, device: torch.device) -> str:
        if architecture(device) in shipped_table():
            return ""
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        return f"the Triton kernels need compute capability 8.0, {name} has {major}.{minor}"

    def strategies(self, hidden: Tensor, weight: Tensor) -> tuple[str, ...]:
        if weight.dtype.itemsize != 2 or weight.stride(-1) != 1:  # float32 products are the vendor's
            return ("rows",)
        served = ("linear", "rows") if weight.dtype == torch.float16 else STRATEGIES  # float16 cannot hold e^(z - z_id)
        return best_first("strategy", served, weight)

    plan = on_device(plan)
    single_pass = on_device(teacher.single_pass)
    statistics = on_device(teacher.statistics)
    logits_gradient = on_device(rows.logits_gradient)
    sparse_gradient = on_device(sparse.sparse_gradient)
    token_objective = on_device(tokens.token_objective)
    sequence_objective = on_device(sequences.sequence_objective)
    sums = on_device(tokens.sums)
    linear_logp = on_device(linear_logp)
    anchored = on_device(anchored)
    kept_ids = on_device(kept.kept_ids)
    kept_logits = on_device(kept.kept_logits)
    kept_dhidden = on_device(kept.kept_dhidden)
    kept_dweight = on_device(kept.kept_dweight)
    scale = on_device(scale)
    add_rows = staticmethod(add_rows)

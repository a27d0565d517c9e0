"""The table of the operations as Triton kernels: any NVIDIA GPU from Ampere on, AMD's where Triton goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from ..launch import LAUNCHES, architecture, launch_of
from ..operations import multiplies_by_tma
from ..torch.backend import TORCH
from . import exponentials, fused_products, gathered, objective, rows, scale, sparse, teacher

P = ParamSpec("P")
Result = TypeVar("Result")


def on_device(launcher: Callable[P, Result]) -> Callable[P, Result]:
    """Launches on the device of the tensors and its current stream: Triton takes the current device."""

    @wraps(launcher)
    def launch(*args: P.args, **kwargs: P.kwargs) -> Result:
        device = _device_of(args)
        if device is None or device.type != "cuda":
            return launcher(*args, **kwargs)
        with torch.cuda.device(device):
            return launcher(*args, **kwargs)

    return launch


def _device_of(arguments: Iterable[object]) -> torch.device | None:
    """Returns that of the first tensor, in a tuple or not."""
    for x in arguments:
        device = x.device if isinstance(x, Tensor) else _device_of(x) if isinstance(x, tuple) else None
        if device is not None:
            return device
    return None


def unavailable_reason(device: torch.device) -> str:
    """Returns why this GPU is too old, or nothing."""
    if architecture(device) in LAUNCHES:
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return f"the Triton kernels need compute capability 8.0, {name} has {major}.{minor}"


def enabled_fused_products(hidden: Tensor, weight: Tensor) -> tuple[str, ...]:
    """Returns which fused products, "logp" and "exponentials", serve this lm_head (V, H) and pay on its GPU."""
    if not multiplies_by_tma(hidden, weight):  # float32 products are the vendor's
        return ()
    if not launch_of(weight.device).products_pay:
        return ()
    # float16 cannot hold e^(z - z_id)
    return ("exponentials", "logp") if weight.dtype == torch.bfloat16 else ("logp",)


TRITON = replace(
    TORCH,
    name="triton",
    statistics=on_device(teacher.statistics),
    gradient=on_device(rows.gradient),
    sparse_gradient=on_device(sparse.sparse_gradient),
    allowed_ids=on_device(gathered.allowed_ids),
    gathered_logits=on_device(gathered.gathered_logits),
    gathered_dhidden=on_device(gathered.gathered_dhidden),
    gathered_dweight=on_device(gathered.gathered_dweight),
    scale=on_device(scale.scale),
    scale_rows=on_device(scale.scale_rows),
    exponentials=on_device(exponentials.exponentials),
    fused_exponentials=on_device(fused_products.fused_exponentials),
    fused_logp=on_device(fused_products.fused_logp),
    objective=on_device(objective.objective),
    fused_products=enabled_fused_products,
    unavailable_reason=unavailable_reason,
)

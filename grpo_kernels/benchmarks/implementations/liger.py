"""Liger: its fused GRPO loss, and for Hopper its per-token cross-entropy in CuTe, with the objective on top."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from ..inputs import EPSILON, Inputs
from . import Implementation, Result, Step, from_logps, gradients, no_nvidia_gpu, not_importable

_VERSION = "0.8.5"
_CHUNKS = (1, 4, 16)  # completions; 1 is the default
_CHUNK_TOKENS = 4096


def _grpo() -> ModuleType:
    return importlib.import_module("liger_kernel.chunked_loss.grpo_loss")


def _settings(inputs: Inputs, mode: str) -> dict[str, Step]:
    """Chunks of a few completions, compiled, as is the default; and the longest of them not compiled."""
    if mode == "forward":
        return {"": _forward}
    batch, length = inputs.ids.shape
    sizes = [size for size in _CHUNKS if size == 1 or (size <= batch and size * length <= _CHUNK_TOKENS)]
    options = dict(beta=inputs.beta, use_ref_model=inputs.beta != 0.0, loss_type="grpo")
    options |= dict(epsilon_low=EPSILON, epsilon_high=EPSILON)
    make = _grpo().LigerFusedLinearGRPOLoss
    return {
        f"chunk {size}{'' if compiled else ', not compiled'}": functools.partial(
            _step, loss=make(chunk_size=size, compiled=compiled, **options)
        )
        for size, compiled in (*((size, True) for size in sizes), (sizes[-1], False))
    }


def _step(inputs: Inputs, loss: torch.nn.Module) -> Result:
    value, _ = loss(
        inputs.hidden, inputs.weight, inputs.ids, inputs.mask, inputs.advantages,
        ref_per_token_logps=inputs.ref_logps if inputs.beta else None, old_per_token_logps=inputs.old_logps,
    )  # fmt: skip
    return gradients(value, inputs)


def _forward(inputs: Inputs) -> Result:
    """The part of the loss that gives it log-probabilities, called as the loss does for a reference model."""
    with torch.no_grad():
        return Result(
            logps=_grpo().LigerFusedLinearGRPOFunction.chunk_forward(inputs.hidden, inputs.weight, inputs.ids)
        )


def _scaled_cross_entropy() -> ModuleType:
    return importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")


def _native_logps(inputs: Inputs) -> Tensor:
    """Liger takes its Hopper kernels by itself where the device is one; on others it would fall back to torch."""
    function = _scaled_cross_entropy().LigerFusedLinearScaledCrossEntropyFunction
    losses: Tensor = function.apply(inputs.flat_hidden, inputs.weight, inputs.ids.view(-1))
    return -losses.view(inputs.ids.shape)


def _native_unavailable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    why = no_nvidia_gpu(device, 9, 0)
    if why is None and torch.cuda.get_device_capability(device) != (9, 0):
        why = "its kernels are for compute capability 9.0 alone"
    if why is None and dtype != torch.bfloat16:
        why = "serves bfloat16 alone"
    kernels = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"
    requirements = f"'liger-kernel[cutedsl]=={_VERSION}' 'nvidia-cutlass-dsl[cu13]'"
    return why or not_importable(lambda: importlib.import_module(kernels), requirements)


IMPLEMENTATIONS = (
    Implementation(
        "liger", "Liger", _settings, lambda device, dtype: not_importable(_grpo, f"liger-kernel=={_VERSION}")
    ),
    Implementation(
        "liger-native",
        "Liger, CuTe kernels for Hopper",
        lambda inputs, mode: {"": from_logps(_native_logps, mode)},
        _native_unavailable_reason,
    ),
)

"""Liger: its fused GRPO loss, and for Hopper its per-token cross-entropy in CuTe, with the objective on top."""

from __future__ import annotations

import functools
import importlib

import torch
from torch import Tensor

from ..inputs import EPSILON, Inputs
from . import Implementation, Result, Step, from_logps, gradients

_VERSION = "0.8.5"
_CHUNKS = (1, 4, 16)  # completions; 1 is the default
_CHUNK_TOKENS = 4096


_grpo = functools.partial(importlib.import_module, "liger_kernel.chunked_loss.grpo_loss")
_NATIVE = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"
_scaled_cross_entropy = functools.partial(importlib.import_module, "liger_kernel.ops.fused_linear_scaled_cross_entropy")


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


def _native_logps(inputs: Inputs) -> Tensor:
    """Liger takes its Hopper kernels by itself where the device is one; on others it would fall back to torch."""
    function = _scaled_cross_entropy().LigerFusedLinearScaledCrossEntropyFunction
    losses: Tensor = function.apply(inputs.flat_hidden, inputs.weight, inputs.ids.view(-1))
    return -losses.view(inputs.ids.shape)


def _native_unavailable(device: torch.device, dtype: torch.dtype) -> str:
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "its kernels are for compute capability 9.0 alone"
    return "" if dtype == torch.bfloat16 else "serves bfloat16 alone"


IMPLEMENTATIONS = (
    Implementation("liger", "Liger", _settings, load=_grpo, requirement=f"liger-kernel=={_VERSION}"),
    Implementation(
        "liger-native",
        "Liger, CuTe kernels for Hopper",
        lambda inputs, mode: {"": from_logps(_native_logps, mode)},
        load=functools.partial(importlib.import_module, _NATIVE),
        requirement=f"'liger-kernel[cutedsl]=={_VERSION}' 'nvidia-cutlass-dsl[cu13]'",
        capability=(9, 0),
        unavailable=_native_unavailable,
    ),
)

"""Yardsticks: fused plain cross-entropy, the mean of -logp. The same matrix products, and a simpler objective."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..inputs import Inputs
from . import Implementation, Result, Step, gradients

_CHUNKS = (4096, 16384)  # tokens; 4096 is QuACK's default
_ALIGNMENT = 8  # of the sizes, for QuACK's products in chunks


def _step(function: Callable[..., Tensor], mode: str, **options: Any) -> Step:
    """From `function(hidden (N, H), weight, ids (N,), reduction=...)`."""

    def forward(inputs: Inputs) -> Result:
        # Detached: even under no_grad some do more for inputs that require gradients.
        flat = inputs.flat_hidden.detach(), inputs.weight.detach(), inputs.ids.view(-1)
        with torch.no_grad():
            return Result(logps=-function(*flat, reduction="none", **options).view(inputs.ids.shape))

    def backward(inputs: Inputs) -> Result:
        flat = inputs.flat_hidden, inputs.weight, inputs.ids.view(-1)
        return gradients(function(*flat, reduction="mean", **options), inputs)

    return forward if mode == "forward" else backward


_cut = functools.partial(importlib.import_module, "cut_cross_entropy")
_quack = functools.partial(importlib.import_module, "quack.linear_cross_entropy")


def _cut_settings(inputs: Inputs, mode: str) -> dict[str, Step]:
    """Its Triton kernels, which by default leave out small gradients, and those without that; and torch.compile.

    The kernels are for GPUs, and their backward is for types of 16 bits.
    """
    options: dict[str, dict[str, Any]] = {"torch_compile": {"impl": "torch_compile"}}
    if inputs.hidden.is_cuda and (mode == "forward" or inputs.hidden.dtype.itemsize == 2):
        kernels: dict[str, dict[str, Any]] = {"cce": {"impl": "cce"}}
        if mode != "forward":
            kernels["cce, filter_eps=None"] = {"impl": "cce", "filter_eps": None}
        options = kernels | options
    return {name: _step(_cut().linear_cross_entropy, mode, **chosen) for name, chosen in options.items()}


def _quack_whole(hidden: Tensor, weight: Tensor, ids: Tensor, reduction: str) -> Tensor:
    """All logits at once: what gives values per token, and any type."""
    losses: Tensor = _quack().linear_cross_entropy_func(
        hidden, weight, None, ids, reduction=reduction, inplace_backward=True
    )
    return losses


def _quack_epilogue(hidden: Tensor, weight: Tensor, ids: Tensor, reduction: str) -> Tensor:
    """The product with the log-sum-exp in its epilogue, as QuACK itself evaluates a loss without gradients."""
    found = _quack().lse_target_epi(hidden, weight.mT, store_d=False, target=ids, tuned=False)
    losses: Tensor = found["lse"] - found["target_logit"]
    return losses


def _quack_settings(inputs: Inputs, mode: str) -> dict[str, Step]:
    tokens, sizes = inputs.ids.numel(), (inputs.ids.numel(), *inputs.weight.shape)
    fused = inputs.hidden.dtype.itemsize == 2 and all(size % _ALIGNMENT == 0 for size in sizes)
    whole = {"whole logits": _step(_quack_whole, mode)}
    if not fused:
        return whole
    if mode == "forward":
        return whole | {"epilogue": _step(_quack_epilogue, mode)}
    chunked = _quack().chunked_linear_cross_entropy
    default, *others = _CHUNKS
    chunks = (default, *(size for size in others if size <= tokens))
    return {f"chunk {size}": _step(chunked, mode, chunk_size=size) for size in chunks} | whole


IMPLEMENTATIONS = (
    Implementation(
        "cut-cross-entropy",
        "Cut Cross-Entropy (plain cross-entropy)",
        _cut_settings,
        "cross_entropy",
        load=_cut,
        requirement="cut-cross-entropy==25.1.1",
    ),
    Implementation(
        "quack",
        "QuACK (plain cross-entropy)",
        _quack_settings,
        "cross_entropy",
        load=_quack,
        requirement="'quack-kernels[cu13]==0.6.5'",
        capability=(9, 0),
    ),
)

"""Runs a batch through the package and through the reference, and compares: for `grpo-kernels check` and the tests.

The measure of an error is that of eager PyTorch: the reference in the types that eager code would compute in.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..config import GRPOConfig
from ..loss import GRPOLossOutput, fused_grpo_loss
from ..reference import reference_grpo_loss, reference_logps, reference_loss_from_logps
from ..teacher import Teacher, TopKTeacher

LEAVES = ("hidden", "weight", "bias")


@dataclass
class Batch:
    """Inputs of one loss call; `options` are keyword arguments of `fused_grpo_loss` beyond the bias and the config."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    advantages: Tensor | None
    bias: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def mapped(self, function: Callable[[Any], Any]) -> Batch:
        """Returns the batch with function(x) in place of each of its inputs x."""
        hidden, weight, ids, advantages, bias = map(
            function, (self.hidden, self.weight, self.ids, self.advantages, self.bias)
        )
        options = {name: function(x) for name, x in self.options.items()}
        return Batch(hidden, weight, ids, advantages, bias, options)

    def cast(self, dtype: torch.dtype) -> Batch:
        """Returns the batch with every floating-point tensor in `dtype`."""

        def to(x: Any) -> Any:
            if isinstance(x, Teacher):
                return dataclasses.replace(x, hidden=to(x.hidden), weight=to(x.weight), bias=to(x.bias))
            if isinstance(x, TopKTeacher):
                return dataclasses.replace(x, logps=to(x.logps))
            return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

        return self.mapped(to)

    def to(self, device: torch.device | str) -> Batch:
        """Returns the batch with every tensor on `device`."""
        return self.mapped(lambda x: x.to(device) if hasattr(x, "to") else x)

    def head_as(self, dtype: torch.dtype) -> Batch:
        """Returns the batch with hidden, weight and bias in `dtype`, the rest as it is."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return dataclasses.replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype), bias=bias)

    def with_options(self, **options: Any) -> Batch:
        """Returns the batch with these options beside its own."""
        return dataclasses.replace(self, options={**self.options, **options})


@dataclass
class Result:
    """Values and gradients of one run, detached and on the CPU; `grads` by the names of LEAVES."""

    loss: Tensor
    logps: Tensor
    entropy: Tensor
    metrics: dict[str, Tensor]
    grads: dict[str, Tensor]


def leaves(batch: Batch, *frozen: str) -> Batch:
    """Returns the batch with copies of hidden, weight and bias that require gradients, unless they are `frozen`."""
    inputs = {name: x for name in LEAVES if (x := getattr(batch, name)) is not None}
    copies = {name: x.detach().clone().requires_grad_(name not in frozen) for name, x in inputs.items()}
    return dataclasses.replace(batch, **copies)


def call(batch: Batch, config: GRPOConfig | None = None, backend: str = "auto", **options: Any) -> GRPOLossOutput:
    """Returns the loss of the tensors of the batch, as they are."""
    options = {"lm_head_bias": batch.bias, "config": config, "backend": backend, **batch.options, **options}
    return fused_grpo_loss(batch.hidden, batch.weight, batch.ids, batch.advantages, **options)


def fused(
    batch: Batch,
    config: GRPOConfig | None = None,
    backend: str = "auto",
    device: torch.device | str = "cpu",
    **options: Any,
) -> Result:
    """Runs forward and backward of the package on `device`."""
    batch = leaves(batch.to(device))
    if config is not None:
        moved: dict[str, Any] = {name: x.to(device) for name, x in vars(config).items() if isinstance(x, Tensor)}
        config = dataclasses.replace(config, **moved)
    return _backward(call(batch, config, backend, **options), batch)


def reference(
    batch: Batch,
    config: GRPOConfig | None = None,
    dtype: torch.dtype = torch.float64,
    head_dtype: torch.dtype | None = None,
) -> Result:
    """Runs forward and backward of the specification, all of it in `dtype`, or the lm_head in another one."""
    batch = leaves(batch.cast(dtype).head_as(head_dtype or dtype))
    assert batch.advantages is not None
    bias, options = batch.bias, batch.options
    out = reference_grpo_loss(
        batch.hidden, batch.weight, batch.ids, batch.advantages, lm_head_bias=bias, config=config, **options
    )
    return _backward(out, batch)


def _backward(out: Any, batch: Batch) -> Result:
    out.loss.backward()
    grads = {name: x.grad.cpu() for name in LEAVES if (x := getattr(batch, name)) is not None}
    loss, logps, entropy = (x.detach().cpu() for x in (out.loss, out.logps, out.entropy))
    return Result(loss, logps, entropy, {name: x.detach().cpu() for name, x in out.metrics.items()}, grads)


def true_logps(batch: Batch, config: GRPOConfig) -> tuple[Tensor, Tensor]:
    """Returns (logps, entropy) in float64 of what the batch holds."""
    logits = batch.hidden.double() @ batch.weight.double().T
    if batch.bias is not None:
        logits = logits + batch.bias.double()
    return reference_logps(
        logits,
        batch.ids,
        temperature=config.temperature,
        logit_scale=config.logit_scale,
        logit_softcap=config.logit_softcap,
        sampling_mask=batch.options.get("sampling_mask"),
    )


def size_of_loss(batch: Batch, config: GRPOConfig) -> float:
    """Returns sum_t w_t |A_t|, times |logp_t| where the surrogate is linear in it: the loss before terms cancel."""
    logps, _ = true_logps(batch, config)
    linear = config.surrogate.startswith("cispo") or config.surrogate in ("vespo", "reinforce") or config.ratio_cap
    logps = logps.detach() if linear else -torch.ones_like(logps)  # 0 where a token keeps its sampled id alone
    weights = GRPOConfig(
        surrogate="reinforce", aggregation=config.aggregation, max_completion_length=config.max_completion_length
    )
    batch = batch.cast(torch.float64)
    assert batch.advantages is not None
    options = {name: x for name, x in batch.options.items() if name != "sampling_mask"}
    return reference_loss_from_logps(logps, batch.advantages.abs(), config=weights, **options).loss.item()


def tensors(result: Result) -> dict[str, Tensor]:
    """Returns everything of a result but the metrics, by name."""
    named = {"loss": result.loss, "logps": result.logps, "entropy": result.entropy}
    return named | {f"gradient of {name}": x for name, x in result.grads.items()}


def errors(result: Result, exact: Result, loss_scale: float = 0.0) -> dict[str, float]:
    """Returns the error of every value, gradient and metric by name, relative to its own norm (of a metric to 1 at
    least, of the loss to `loss_scale`): infinity where it is not finite, or missing."""
    values, out = tensors(result), {}
    for name, expected in tensors(exact).items():
        out[name] = relative_error(values[name], expected, loss_scale if name == "loss" else 0.0)
    for name, expected in exact.metrics.items():
        value = result.metrics.get(name)
        if value is None or not (value.isnan() and expected.isnan()):
            out[f"metric {name}"] = math.inf if value is None else relative_error(value, expected, 1.0)
    return {name: error if math.isfinite(error) else math.inf for name, error in out.items()}


def relative_error(value: Tensor, exact: Tensor, least: float = 0.0) -> float:
    """Returns |value - exact| / max(|exact|, least) in Euclidean norms and float64; 0 where both are 0.

    Piece by piece: neither tensor is held in float64 whole.
    """
    if value.shape != exact.shape:
        raise ValueError(f"value has shape {tuple(value.shape)}; expected that of exact, {tuple(exact.shape)}")
    pairs = list(
        zip(torch.split(value, 4096), torch.split(exact, 4096), strict=True) if exact.dim() else [(value, exact)]
    )
    distance = math.sqrt(math.fsum((a.double() - b.double()).square().sum().item() for a, b in pairs))
    norm = math.sqrt(math.fsum(b.double().square().sum().item() for _, b in pairs))
    return distance / max(norm, least, 1e-30) if distance else 0.0

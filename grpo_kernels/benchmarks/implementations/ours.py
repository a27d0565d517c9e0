"""This library: the default, without scoring zero-gradient tokens, and each backend and strategy by name."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from ... import GRPOConfig, fused_grpo_loss, fused_logps
from ...backends import get_backend, registered_backends, unavailable_reason
from ...backends.launch import STRATEGIES, VARIABLE
from ..inputs import EPSILON, Inputs
from .base import Result, Step, Unsupported, gradients, implementation


def _step(inputs: Inputs, mode: str, backend: str, config: GRPOConfig) -> Result:
    if mode == "forward":
        with torch.no_grad():
            logps, _ = fused_logps(
                inputs.hidden, inputs.weight, inputs.ids, completion_mask=inputs.mask,
                sampling_mask=inputs.sampling_mask, backend=backend,
            )  # fmt: skip
        return Result(logps=logps)
    output = fused_grpo_loss(
        inputs.hidden, inputs.weight, inputs.ids, completion_mask=inputs.mask, old_logps=inputs.old_logps,
        ref_logps=inputs.ref_logps if inputs.beta else None, sampling_mask=inputs.sampling_mask,
        advantages=inputs.advantages, config=config, backend=backend,
    )  # fmt: skip
    return gradients(output.loss, inputs, output.logps if config.score_inactive else None)


@implementation("ours", "ours")
def _make_step(inputs: Inputs, mode: str, backend: str = "auto", strategy: str | None = None, **options: Any) -> Step:
    """`options` of the configuration."""
    if strategy is not None and strategy not in get_backend(backend).strategies(inputs.hidden, inputs.weight):
        raise Unsupported(f"strategy {strategy} does not serve these inputs")
    config = GRPOConfig(
        aggregation="seq_mean", beta=inputs.beta, epsilon_low=EPSILON, epsilon_high=EPSILON, **options
    )  # fmt: skip
    step = functools.partial(_step, mode=mode, backend=backend, config=config)

    def with_strategy(inputs: Inputs) -> Result:
        """The strategy by its variable, as users would choose it."""
        with mock.patch.dict(os.environ, {VARIABLE: str(strategy)}):
            return step(inputs)

    return step if strategy is None else with_strategy


@implementation("ours-unmasked", "ours without the sampling mask", objective="none")
def _unmasked(inputs: Inputs, mode: str) -> Step:
    step = _make_step(inputs, mode)
    return lambda inputs: step(replace(inputs, sampling_mask=None))


@implementation("ours-unscored", "ours, score_inactive=False")
def _unscored(inputs: Inputs, mode: str) -> Step:
    if mode == "forward":
        raise Unsupported("every token needs its log-probability")
    return _make_step(inputs, mode, score_inactive=False)


@implementation("ours-sparse", "ours, sparse_backward=1/64", objective="none")
def _sparse(inputs: Inputs, mode: str) -> Step:
    """64 entries of a token: the probabilities of these inputs are all below 1/64. No gradient to compare with a bound
    for rounding."""
    if mode == "forward":
        raise Unsupported("there is no gradient")
    return _make_step(inputs, mode, sparse_backward=1 / 64)


def _backend_unavailable(device: torch.device, dtype: torch.dtype, backend: str) -> str:
    return unavailable_reason(backend, device)


for _backend in registered_backends():
    for _strategy in STRATEGIES if _backend in ("cuda", "triton") else (None,):
        _parts = _backend, *([_strategy] if _strategy else [])
        _unavailable = functools.partial(_backend_unavailable, backend=_backend)
        implementation("-".join(["ours", *_parts]), f"ours, backend {', '.join(_parts)}", unavailable=_unavailable)(
            functools.partial(_make_step, backend=_backend, strategy=_strategy)
        )

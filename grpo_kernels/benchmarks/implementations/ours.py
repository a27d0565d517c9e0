"""This library: the default, without scoring zero-gradient tokens, and each backend and strategy by name."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from ... import GRPOConfig, fused_grpo_loss, fused_logps
from ...backends import get_backend, registered_backends, unavailable_reason
from ...backends.strategy import STRATEGIES, VARIABLE
from ..inputs import ADVANTAGE_EPS, EPSILON, Inputs
from . import Implementation, Result, Step, Unsupported, gradients


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
        rewards=inputs.rewards, num_generations=inputs.generations, config=config, backend=backend,
    )  # fmt: skip
    return gradients(output.loss, inputs, output.logps if config.score_inactive else None)


def _settings(
    inputs: Inputs,
    mode: str,
    backend: str = "auto",
    strategy: str | None = None,
    score_inactive: bool = True,
    masked: bool = True,
) -> dict[str, Step]:
    config = GRPOConfig(
        aggregation="seq_mean", beta=inputs.beta, epsilon_low=EPSILON, epsilon_high=EPSILON,
        advantage_eps=ADVANTAGE_EPS, score_inactive=score_inactive,
    )  # fmt: skip

    def step(inputs: Inputs) -> Result:
        with _environment(strategy):
            return _step(inputs if masked else replace(inputs, sampling_mask=None), mode, backend, config)

    if strategy is not None and strategy not in get_backend(backend).strategies(inputs.hidden, inputs.weight):
        raise Unsupported(f"strategy {strategy} does not serve these inputs")
    if not score_inactive and mode == "forward":
        raise Unsupported("log-probabilities are wanted of every token")
    return {"": step}


@contextmanager
def _environment(strategy: str | None) -> Iterator[None]:
    """The strategy by its variable, as users would choose it; without one, the variable stays as it is."""
    before = os.environ.get(VARIABLE)
    if strategy is not None:
        os.environ[VARIABLE] = strategy
    try:
        yield
    finally:
        if before is not None:
            os.environ[VARIABLE] = before
        elif strategy is not None:
            del os.environ[VARIABLE]


def _of_backend(backend: str, strategy: str | None) -> Implementation:
    return Implementation(
        f"ours-{backend}" + (f"-{strategy}" if strategy else ""),
        f"ours, backend {backend}" + (f", {strategy}" if strategy else ""),
        functools.partial(_settings, backend=backend, strategy=strategy),
        unavailable=lambda device, dtype: unavailable_reason(backend, device),
    )


IMPLEMENTATIONS = (
    Implementation("ours", "ours", _settings),
    Implementation(
        "ours-unmasked", "ours without the sampling mask", functools.partial(_settings, masked=False), objective="none"
    ),
    Implementation("ours-unscored", "ours, score_inactive=False", functools.partial(_settings, score_inactive=False)),
    *(
        _of_backend(backend, strategy)
        for backend in registered_backends()
        for strategy in (STRATEGIES if backend in ("cuda", "triton") else (None,))
    ),
)

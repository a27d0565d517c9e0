"""This library: the default, without scoring zero-gradient tokens, with a teacher that is known at few ids, and each
backend and strategy by name."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from ... import GRPOConfig, TopKTeacher, fused_distillation_loss, fused_grpo_loss, fused_logps
from ...kernels import get_backend, registered_backends, unavailable_reason
from ...kernels.launch import STRATEGIES, VARIABLE
from ...teacher import Teacher, TopKMode
from ..inputs import EPSILON, Inputs, nearby
from .base import Result, Step, Unsupported, gradients, implementation

TEACHER_IDS = 64


def _step(inputs: Inputs, mode: str, backend: str, config: GRPOConfig, teacher: TopKTeacher | None) -> Result:
    if mode == "forward":
        with torch.no_grad():
            logps, _ = fused_logps(
                inputs.hidden, inputs.weight, inputs.ids, completion_mask=inputs.mask,
                sampling_mask=inputs.sampling_mask, backend=backend,
            )  # fmt: skip
        return Result(logps=logps)
    if inputs.teacher is not None:
        return _distill(inputs, inputs.teacher, divergence=inputs.divergence, backend=backend)
    output = fused_grpo_loss(
        inputs.hidden, inputs.weight, inputs.ids, completion_mask=inputs.mask, old_logps=inputs.old_logps,
        ref_logps=inputs.ref_logps if inputs.beta else None, sampling_mask=inputs.sampling_mask,
        advantages=inputs.advantages, config=config, backend=backend, teacher=teacher,
    )  # fmt: skip
    return gradients(output.loss, inputs, output.logps if config.score_inactive else None)


def _distill(inputs: Inputs, teacher: Teacher | TopKTeacher, **options: Any) -> Result:
    out = fused_distillation_loss(inputs.hidden, inputs.weight, teacher, completion_mask=inputs.mask, **options)
    return gradients(out.loss, inputs)


@implementation("ours", "ours", teachers=True)
def make_step(
    inputs: Inputs,
    mode: str,
    backend: str = "auto",
    strategy: str | None = None,
    teacher: TopKTeacher | None = None,
    **options: Any,
) -> Step:
    """`options` of the configuration."""
    if strategy is not None and strategy not in get_backend(backend).strategies(inputs.hidden, inputs.weight):
        raise Unsupported(f"strategy {strategy} does not serve these inputs")
    config = GRPOConfig(
        aggregation="seq_mean", beta=inputs.beta, epsilon_low=EPSILON, epsilon_high=EPSILON, **options
    )  # fmt: skip
    step = functools.partial(_step, mode=mode, backend=backend, config=config, teacher=teacher)

    def with_strategy(inputs: Inputs) -> Result:
        """The strategy by its variable, as users would choose it."""
        with mock.patch.dict(os.environ, {VARIABLE: str(strategy)}):
            return step(inputs)

    return step if strategy is None else with_strategy


@implementation("ours-unmasked", "ours without the sampling mask", objective="none")
def _unmasked(inputs: Inputs, mode: str) -> Step:
    step = make_step(inputs, mode)
    return lambda inputs: step(replace(inputs, sampling_mask=None))


@implementation("ours-unscored", "ours, score_inactive=False")
def _unscored(inputs: Inputs, mode: str) -> Step:
    if mode == "forward":
        raise Unsupported("every token needs its log-probability")
    return make_step(inputs, mode, score_inactive=False)


@implementation("ours-sparse", "ours, sparse_backward=1/64", objective="none")
def _sparse(inputs: Inputs, mode: str) -> Step:
    """64 entries of a token: the probabilities of these inputs are all below 1/64. No gradient to compare with a bound
    for rounding."""
    if mode == "forward":
        raise Unsupported("there is no gradient")
    return make_step(inputs, mode, sparse_backward=1 / 64)


def _top_k(inputs: Inputs, mode: str, kind: TopKMode) -> TopKTeacher:
    """The likeliest ids of a teacher near this policy; a few rows of its logits at a time."""
    if mode == "forward":
        raise Unsupported("there is no gradient")
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
    parts = nearby(hidden, torch.Generator(hidden.device).manual_seed(0)).flatten(0, 1).split(256)
    found = [(rows @ weight.T).float().log_softmax(-1).topk(TEACHER_IDS) for rows in parts]
    logps, ids = (torch.cat(parts).view(*hidden.shape[:2], TEACHER_IDS) for parts in zip(*found, strict=True))
    return TopKTeacher(ids, logps, kind)


@implementation("ours-tail", f"ours, a teacher of {TEACHER_IDS} ids beside it", objective="none")
def _tail(inputs: Inputs, mode: str) -> Step:
    return make_step(inputs, mode, teacher=_top_k(inputs, mode, "tail"), distill_coef=0.1)


@implementation("ours-renormalize", f"ours, a teacher of {TEACHER_IDS} ids alone", objective="none")
def _renormalize(inputs: Inputs, mode: str) -> Step:
    return functools.partial(_distill, teacher=_top_k(inputs, mode, "renormalize"))


def _backend_unavailable(device: torch.device, dtype: torch.dtype, backend: str) -> str:
    return unavailable_reason(backend, device)


for _backend in registered_backends():
    for _strategy in STRATEGIES if _backend in ("cuda", "triton") else (None,):
        _parts = _backend, *([_strategy] if _strategy else [])
        _unavailable = functools.partial(_backend_unavailable, backend=_backend)
        _name, _title = "-".join(["ours", *_parts]), f"ours, backend {', '.join(_parts)}"
        implementation(_name, _title, unavailable=_unavailable, teachers=True)(
            functools.partial(make_step, backend=_backend, strategy=_strategy)
        )

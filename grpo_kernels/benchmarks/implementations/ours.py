"""This library: the default, with options that save work or add it, and each backend by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ... import GRPOConfig, TopKTeacher, fused_distillation_loss, fused_grpo_loss, fused_logps
from ...kernels import registered_backends, unavailable_reason
from ...teacher import Teacher, TopKMode
from ..inputs import EPSILON, Inputs, nearby
from . import Result, Step, Unsupported, gradients, implementation

TEACHER_IDS = 64


@implementation("ours", "ours", teachers=True)
def make_step(
    inputs: Inputs, mode: str, backend: str = "auto", teacher: TopKTeacher | None = None, **options: Any
) -> Step:
    """`options` of the configuration; `teacher` beside the loss."""
    if reason := unavailable_reason(backend, inputs.hidden.device) if backend != "auto" else "":
        raise Unsupported(reason)
    config = GRPOConfig(aggregation="seq_mean", beta=inputs.beta, epsilon_low=EPSILON, epsilon_high=EPSILON, **options)

    def forward(inputs: Inputs) -> Result:
        with torch.no_grad():
            logps, _ = fused_logps(
                inputs.hidden, inputs.weight, inputs.ids, completion_mask=inputs.mask,
                sampling_mask=inputs.sampling_mask, backend=backend,
            )  # fmt: skip
        return Result(logps=logps)

    def step(inputs: Inputs) -> Result:
        output = fused_grpo_loss(
            inputs.hidden, inputs.weight, inputs.ids, completion_mask=inputs.mask, old_logps=inputs.old_logps,
            ref_logps=inputs.ref_logps if inputs.beta else None, sampling_mask=inputs.sampling_mask,
            advantages=inputs.advantages, config=config, backend=backend, teacher=teacher,
        )  # fmt: skip
        return gradients(output.loss, inputs, output.logps if config.score_inactive else None)

    if mode == "forward":
        return forward
    if inputs.teacher is not None:
        return partial(_distill, teacher=inputs.teacher, divergence=inputs.divergence, backend=backend)
    return step


def _distill(inputs: Inputs, teacher: Teacher | TopKTeacher, **options: Any) -> Result:
    out = fused_distillation_loss(inputs.hidden, inputs.weight, teacher, completion_mask=inputs.mask, **options)
    return gradients(out.loss, inputs)


@implementation("ours-unmasked", "ours without the sampling mask", "none")
def _unmasked(inputs: Inputs, mode: str) -> Step:
    step = make_step(inputs, mode)
    return lambda inputs: step(replace(inputs, sampling_mask=None))


def _with_gradient(make: Callable[[Inputs], Step]) -> Callable[[Inputs, str], Step]:
    def made(inputs: Inputs, mode: str) -> Step:
        if mode == "forward":
            raise Unsupported("differs from ours in the gradient alone")
        return make(inputs)

    return made


def _top_k(inputs: Inputs, kind: TopKMode) -> TopKTeacher:
    """The likeliest ids of a teacher near this policy; a few rows of its logits at a time."""
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
    parts = nearby(hidden, torch.Generator(hidden.device).manual_seed(0)).flatten(0, 1).split(256)
    found = [(rows @ weight.T).float().log_softmax(-1).topk(TEACHER_IDS) for rows in parts]
    logps, ids = (torch.cat(parts).view(*hidden.shape[:2], TEACHER_IDS) for parts in zip(*found, strict=True))
    return TopKTeacher(ids, logps, kind)


# The probabilities of these inputs are all below 1/64, so that 64 entries of a token are left. No gradient to compare
# with a bound for rounding.
implementation("ours-unscored", "ours, score_inactive=False")(
    _with_gradient(lambda inputs: make_step(inputs, "step", score_inactive=False))
)
implementation("ours-sparse", "ours, sparse_backward=1/64", "none")(
    _with_gradient(lambda inputs: make_step(inputs, "step", sparse_backward=1 / 64))
)
implementation("ours-tail", f"ours, a teacher of {TEACHER_IDS} ids beside it", "none")(
    _with_gradient(lambda inputs: make_step(inputs, "step", teacher=_top_k(inputs, "tail"), distill_coef=0.1))
)
implementation("ours-renormalize", f"ours, a teacher of {TEACHER_IDS} ids alone", "none")(
    _with_gradient(lambda inputs: partial(_distill, teacher=_top_k(inputs, "renormalize")))
)
for _backend in registered_backends():
    implementation(f"ours-{_backend}", f"ours, backend {_backend}", teachers=True)(partial(make_step, backend=_backend))

"""Plain PyTorch: the three bare products, eager, and compiled eager."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..inputs import Inputs, grpo_objective, token_divergences
from . import Result, Step, from_logps, gradients, implementation


@implementation("floor", "bare matrix products", objective="none", teachers=True)
def _floor(inputs: Inputs, mode: str) -> Step:
    """The matrix products that this mode needs, at full N, and nothing else.

    The (N, V) buffer is allocated once, outside the time: a fused loss has no such buffer, and filling fresh pages
    would raise the floor. The gradients are allocated in every step, since every implementation has to return
    fresh ones. The logits stand in for their gradient, which has the same shape and type.
    """
    hidden, weight, teacher = inputs.flat_hidden.detach(), inputs.weight.detach(), inputs.teacher
    logits = hidden.new_empty(len(hidden), len(weight))
    teachers = logits if teacher is None else torch.empty_like(logits)

    def step(inputs: Inputs) -> Result:
        torch.mm(hidden, weight.T, out=logits)
        if teacher is not None:
            torch.mm(teacher.hidden.flatten(0, 1), teacher.weight.T, out=teachers)
        if mode == "forward":
            return Result()
        return Result(dhidden=torch.mm(logits, weight), dweight=None if inputs.frozen else torch.mm(logits.T, hidden))

    return step


def _logps(inputs: Inputs) -> Tensor:
    logits = (inputs.hidden @ inputs.weight.T).float()
    out = inputs.masked_out(torch.arange(inputs.ids.numel(), device=logits.device))
    if out is not None:
        logits = logits.masked_fill(out.view(logits.shape), -torch.inf)
    return logits.log_softmax(-1).gather(-1, inputs.ids.unsqueeze(-1)).squeeze(-1)


def _loss(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    if inputs.teacher is None:
        logps = _logps(inputs)
        return grpo_objective(logps, inputs), logps
    with torch.no_grad():
        log_q = (inputs.teacher.hidden @ inputs.teacher.weight.T).float().log_softmax(-1)
    log_p = (inputs.hidden @ inputs.weight.T).float().log_softmax(-1)
    return token_divergences(log_p, log_q, inputs.divergence).mean(), None


def _make_step(inputs: Inputs, mode: str, compiled: Callable[..., Callable[..., Any]]) -> Step:
    """The objective in the same graph as the head."""
    if mode == "forward":
        return from_logps(compiled(_logps), mode)
    loss_and_logps = compiled(_loss)

    def step(inputs: Inputs) -> Result:
        loss, logps = loss_and_logps(inputs)
        return gradients(loss, inputs, logps)

    return step


implementation("eager", "eager PyTorch", teachers=True)(partial(_make_step, compiled=lambda function: function))
implementation("compiled", "compiled eager", teachers=True)(
    partial(_make_step, compiled=partial(torch.compile, fullgraph=True, dynamic=False))
)

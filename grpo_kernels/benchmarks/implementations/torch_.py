"""Plain PyTorch: the three bare products, eager, and compiled eager."""

from __future__ import annotations

import torch
from torch import Tensor

from ..inputs import Inputs, grpo_objective
from .base import Result, Step, from_logps, gradients, implementation


@implementation("floor", "bare matrix products", objective="none")
def _floor(inputs: Inputs, mode: str) -> Step:
    """The matrix products that this mode needs, at full N, and nothing else.

    The (N, V) buffer is allocated once, outside the time: a fused loss has no such buffer, and filling fresh pages
    would raise the floor. The gradients are allocated in every step, since every implementation has to return
    fresh ones. The logits stand in for their gradient, which has the same shape and type.
    """
    hidden, weight = inputs.flat_hidden.detach(), inputs.weight.detach()
    logits = hidden.new_empty(hidden.shape[0], weight.shape[0])

    def step(inputs: Inputs) -> Result:
        torch.mm(hidden, weight.T, out=logits)
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


@implementation("eager", "eager PyTorch")
def _eager(inputs: Inputs, mode: str) -> Step:
    return from_logps(_logps, mode)


def _loss(inputs: Inputs) -> tuple[Tensor, Tensor]:
    logps = _logps(inputs)
    return grpo_objective(logps, inputs), logps


@implementation("compiled", "compiled eager")
def _compiled(inputs: Inputs, mode: str) -> Step:
    """The objective in the same graph as the head."""
    if mode == "forward":
        return from_logps(torch.compile(_logps, fullgraph=True, dynamic=False), mode)
    compiled = torch.compile(_loss, fullgraph=True, dynamic=False)

    def step(inputs: Inputs) -> Result:
        loss, logps = compiled(inputs)
        return gradients(loss, inputs, logps)

    return step

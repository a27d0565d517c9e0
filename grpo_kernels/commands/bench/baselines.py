"""This library, and plain PyTorch: the three bare products, eager, compiled eager. What implementations share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import GRPOConfig, fused_grpo_loss, fused_logps
from ...kernels import unavailable_reason
from .inputs import EPSILON, Inputs, grpo_objective


class Result(NamedTuple):
    """What one call gives: loss () and logps (B, T), detached; dhidden (N, H) or as hidden; dweight (V, H).

    mode "step" requires loss, dhidden and dweight, "frozen" loss and dhidden, "forward" logps. More is allowed.
    """

    loss: Tensor | None = None
    logps: Tensor | None = None
    dhidden: Tensor | None = None
    dweight: Tensor | None = None


Step = Callable[[Inputs], Result]


class Unsupported(Exception):
    """An implementation cannot run here, or has nothing for this mode, type or size; the message says why."""


def gradients(loss: Tensor, logps: Tensor | None, inputs: Inputs) -> Result:
    """Backward by autograd, to the inputs that require gradients."""
    leaves = (inputs.hidden,) if inputs.frozen else (inputs.hidden, inputs.weight)
    dhidden, *rest = torch.autograd.grad(loss, leaves)
    return Result(loss.detach(), None if logps is None else logps.detach(), dhidden, rest[0] if rest else None)


def make_step(
    mode: str, logps: Callable[[Inputs], Tensor], loss: Callable[[Inputs], tuple[Tensor, Tensor | None]] | None = None
) -> Step:
    """Returns the step of an implementation that gives log-probabilities (B, T), and (loss (), log-probabilities or
    None); without `loss` the objective in plain torch is on top of the log-probabilities."""

    def forward(inputs: Inputs) -> Result:
        with torch.no_grad():
            return Result(logps=logps(inputs))

    def backward(inputs: Inputs) -> Result:
        if loss is not None:
            return gradients(*loss(inputs), inputs)
        found = logps(inputs)
        return gradients(grpo_objective(found, inputs), found, inputs)

    return forward if mode == "forward" else backward


def ours(inputs: Inputs, mode: str, backend: str = "auto", **options: Any) -> Step:
    """`options` of the configuration, which make a difference to the gradient only."""
    if reason := unavailable_reason(backend, inputs.hidden.device) if backend != "auto" else "":
        raise Unsupported(reason)
    if options and mode == "forward":
        raise Unsupported("differs from ours in the gradient only")
    config = GRPOConfig(aggregation="seq_mean", beta=inputs.beta, epsilon_low=EPSILON, epsilon_high=EPSILON, **options)

    def logps(inputs: Inputs) -> Tensor:
        found, _ = fused_logps(
            inputs.hidden, inputs.weight, inputs.ids, completion_mask=inputs.mask, sampling_mask=inputs.sampling_mask,
            backend=backend,
        )  # fmt: skip
        return found

    def loss(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        output = fused_grpo_loss(
            inputs.hidden, inputs.weight, inputs.ids, completion_mask=inputs.mask, old_logps=inputs.old_logps,
            ref_logps=inputs.ref_logps if inputs.beta else None, sampling_mask=inputs.sampling_mask,
            advantages=inputs.advantages, config=config, backend=backend,
        )  # fmt: skip
        return output.loss, output.logps if config.score_inactive else None

    return make_step(mode, logps, loss)


def ours_unmasked(inputs: Inputs, mode: str) -> Step:
    step = ours(inputs, mode)
    return lambda inputs: step(replace(inputs, sampling_mask=None))


def floor(inputs: Inputs, mode: str) -> Step:
    """The matrix products that this mode needs, at full N, and nothing else.

    The (N, V) buffer is allocated once, outside the time: a fused loss has no such buffer, and filling fresh pages
    would raise the floor. The gradients are allocated in every step, since every implementation has to return
    fresh ones. The logits stand in for their gradient, which has the same shape and type.
    """
    hidden, weight = inputs.flat_hidden.detach(), inputs.weight.detach()
    logits = hidden.new_empty(len(hidden), len(weight))

    def step(inputs: Inputs) -> Result:
        torch.mm(hidden, weight.T, out=logits)
        if mode == "forward":
            return Result()
        return Result(dhidden=torch.mm(logits, weight), dweight=None if inputs.frozen else torch.mm(logits.T, hidden))

    return step


def eager(inputs: Inputs, mode: str, transform: Callable[..., Any] = lambda function: function) -> Step:
    """The objective in the same graph as the head."""

    def logps(inputs: Inputs) -> Tensor:
        logits = (inputs.hidden @ inputs.weight.T).float()
        out = inputs.masked_out(torch.arange(inputs.ids.numel(), device=logits.device))
        if out is not None:
            logits = logits.masked_fill(out.view(logits.shape), -torch.inf)
        return logits.log_softmax(-1).gather(-1, inputs.ids.unsqueeze(-1)).squeeze(-1)

    def loss(inputs: Inputs) -> tuple[Tensor, Tensor]:
        found = logps(inputs)
        return grpo_objective(found, inputs), found

    return make_step(mode, transform(logps), transform(loss))


compiled = partial(eager, transform=partial(torch.compile, fullgraph=True, dynamic=False))

"""What all implementations share, and those in plain PyTorch: the bare matrix products, eager, compiled eager."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cases import DIVERGENCES, MODES
from .inputs import Inputs, grpo_objective, token_divergences


class Result(NamedTuple):
    """The result of one call: loss () and logps (B, T), detached; dhidden (N, H) or (B, T, H); dweight (V, H).

    Mode "frozen" requires loss and dhidden, "forward" logps, the others loss, dhidden and dweight. More is allowed.
    metrics are numbers about the call, such as the sparsity of a gradient.
    """

    loss: Tensor | None = None
    logps: Tensor | None = None
    dhidden: Tensor | None = None
    dweight: Tensor | None = None
    metrics: dict[str, Tensor] | None = None


Step = Callable[[Inputs], Result]


class Unsupported(Exception):
    """An implementation cannot run here, or does not serve this mode, type or size; the message says why."""


class Implementation(NamedTuple):
    """One way to compute a case.

    `make_step(inputs, mode)` returns the function that is timed, or raises `Unsupported`. `objective` names what its
    results are compared with: "grpo"; "cross_entropy", the mean of -logp, for yardsticks with the same matrix products;
    or "none". An `estimate` is right in expectation only: its error may exceed what rounding explains. `modes` are
    those that it serves.
    """

    title: str
    make_step: Callable[[Inputs, str], Step]
    objective: str = "grpo"
    estimate: bool = False
    modes: tuple[str, ...] = tuple(MODES)

    def step(self, inputs: Inputs, mode: str) -> Step:
        """Returns `make_step(inputs, mode)`; raises `Unsupported` for a mode that is not in `modes`."""
        if mode not in self.modes:
            raise Unsupported(f"has no mode {mode}")
        return self.make_step(inputs, mode)


def gradients(result: Result, inputs: Inputs) -> Result:
    """Adds dhidden, and dweight where the weight requires it, to a result: the gradients of its loss, by autograd."""
    assert result.loss is not None
    leaves = (inputs.hidden,) if inputs.frozen else (inputs.hidden, inputs.weight)
    dhidden, *weight_gradient = torch.autograd.grad(result.loss, leaves)
    logps = None if result.logps is None else result.logps.detach()
    return Result(result.loss.detach(), logps, dhidden, weight_gradient[0] if weight_gradient else None, result.metrics)


def make_step(
    mode: str,
    logps: Callable[[Inputs], Tensor],
    loss: Callable[[Inputs], Result] | None = None,
    divergence: Callable[[Inputs], Tensor] | None = None,
) -> Step:
    """Returns the step of an implementation, from functions of the inputs.

    `logps` returns log-probabilities (B, T). `loss` returns a result with the loss (), and logps where it has them;
    without it the objective in plain torch is applied to `logps`. `divergence` returns the divergence () to a teacher;
    without it modes of a divergence raise `Unsupported`.
    """
    if mode in DIVERGENCES and divergence is None:
        raise Unsupported("has no divergence to a teacher's distribution")

    def step(inputs: Inputs) -> Result:
        if mode == "forward":
            with torch.no_grad():
                return Result(logps=logps(inputs))
        if mode in DIVERGENCES and divergence is not None:
            return gradients(Result(divergence(inputs)), inputs)
        if loss is not None:
            return gradients(loss(inputs), inputs)
        token_logps = logps(inputs)
        return gradients(Result(grpo_objective(token_logps, inputs), token_logps), inputs)

    return step


def floor(inputs: Inputs, mode: str) -> Step:
    """Returns the step that computes the matrix products of this mode over all N rows, and nothing else.

    A teacher adds one product. The (N, V) buffer is allocated once, outside of the timed calls: a fused loss has no
    such buffer, and first writes to fresh pages would raise the floor. The gradients are allocated in every call, since
    every implementation returns fresh ones. The logits stand in for their gradient, which has the same shape and type.
    """
    hidden, weight = inputs.flat_hidden.detach(), inputs.weight.detach()
    logits = hidden.new_empty(len(hidden), len(weight))
    teachers = None if inputs.teacher is None else torch.empty_like(logits)

    def step(inputs: Inputs) -> Result:
        torch.mm(hidden, weight.T, out=logits)
        if inputs.teacher is not None:
            torch.mm(inputs.teacher.hidden.flatten(0, 1), inputs.teacher.weight.T, out=teachers)
        if mode == "forward":
            return Result()
        return Result(dhidden=torch.mm(logits, weight), dweight=None if inputs.frozen else torch.mm(logits.T, hidden))

    return step


def eager(inputs: Inputs, mode: str, transform: Callable[..., Any] = lambda function: function) -> Step:
    """Returns the step of plain PyTorch: head and objective in one graph, which `transform` may compile."""

    def logps(inputs: Inputs) -> Tensor:
        logits = (inputs.hidden @ inputs.weight.T).float()
        excluded = inputs.masked_out(torch.arange(inputs.ids.numel(), device=logits.device))
        if excluded is not None:
            logits = logits.masked_fill(excluded.view(logits.shape), -torch.inf)
        return logits.log_softmax(-1).gather(-1, inputs.ids.unsqueeze(-1)).squeeze(-1)

    def loss(inputs: Inputs) -> Result:
        token_logps = logps(inputs)
        return Result(grpo_objective(token_logps, inputs), token_logps)

    def divergence(inputs: Inputs) -> Tensor:
        assert inputs.teacher is not None
        with torch.no_grad():
            log_q = (inputs.teacher.hidden @ inputs.teacher.weight.T).float().log_softmax(-1)
        log_p = (inputs.hidden @ inputs.weight.T).float().log_softmax(-1)
        return token_divergences(log_p, log_q, mode).mean()

    return make_step(mode, transform(logps), transform(loss), transform(divergence))


compiled = partial(eager, transform=partial(torch.compile, fullgraph=True, dynamic=False))

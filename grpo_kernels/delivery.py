"""Handing out gradients that the forward pass has finished: what the backward of every loss shares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backends import Backend


def keeps_graph() -> bool:
    """Whether the backward in progress was asked to keep its graph for another one (retain_graph)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def deliver(saved: Tensor, factor: Tensor, backend: Backend) -> Tensor:
    """The finished gradient times grad_output.

    In place, a copy of a (V, H) gradient would double its memory; but not where the graph is kept for another backward,
    nor under a tracer (whose tensors are subclasses), which plans by itself. A factor of 1 costs nothing: a CPU looks
    at it here, the kernels of a GPU, which the host must not wait for, do so themselves.
    """
    if type(saved) is not Tensor or keeps_graph():
        return saved * factor.to(saved.dtype)
    if factor.device.type == "cpu" and factor.item() == 1.0:
        return saved
    if not saved.is_contiguous():
        return saved.mul_(factor)
    backend.scale(saved, factor)
    return saved


def deliver_once(ctx: Any, name: str, factor: Tensor) -> list[Tensor | None]:
    """`deliver` for `ctx.gradients`, of `ctx.backend`, of an autograd.Function, which lets go of them unless the graph
    is kept."""
    gradients = ctx.gradients
    if gradients is None:
        raise RuntimeError(f"grpo_kernels.{name}: a second backward needs retain_graph=True in the first")
    if not keeps_graph():
        ctx.gradients = None
    return [None if g is None else deliver(g, factor, ctx.backend) for g in gradients]


def refuse_double_backward(name: str) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"grpo_kernels.{name} has no second derivative: backward ran with create_graph=True (double backward); "
            "use grpo_kernels.reference for that"
        )

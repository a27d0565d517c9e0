"""What the operators of the engine and fused_policy_loss have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _python_dispatch as dispatch

from ..checks.arguments import in_tracing_mode

Function = TypeVar("Function", bound=Callable[..., Any])


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_traced(hidden: Tensor) -> bool:
    """Returns whether torch.compile or a dispatch mode must see one operator instead of the operations inside it."""
    return _has_tracer(hidden) or torch._C._len_torch_dispatch_stack() > 0


def uses_custom_op(hidden: Tensor, *eager_only: object) -> bool:
    """Returns whether a call goes through the custom operator, which has no arguments `eager_only`. A call with one of
    these never does: dispatch modes see nothing of it."""
    return is_traced(hidden) and all(x is None for x in eager_only)


def refuse_when_traced(hidden: Tensor, name: str, value: object) -> None:
    """Raises ValueError for an argument that a recorded call would ignore."""
    if value is not None and _has_tracer(hidden):
        raise ValueError(f"{name} is given to a call that is traced or compiled; it needs an eager one")


def _has_tracer(hidden: Tensor) -> bool:
    """Returns whether operations are recorded, to be run later or elsewhere: fake and functional tensors, proxies of
    them."""
    if torch.compiler.is_compiling() or type(hidden).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return True
    return in_tracing_mode()


def hide_from_dispatch_modes(function: Function) -> Function:
    """Makes `function` invisible to dispatch modes.

    Its kernels write through addresses, and over what they have read. A mode that keeps results (selective
    checkpointing) or wraps them would have the wrong ones.
    """

    @functools.wraps(function)
    def call_without_modes(*args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_dispatch_stack() == 0:
            return function(*args, **kwargs)
        with dispatch._disable_current_modes():
            return function(*args, **kwargs)

    return call_without_modes  # type: ignore[return-value]


def is_capturing(device: torch.device) -> bool:
    """Returns whether a CUDA graph records these operations: then nothing may be read back to the host."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, name: str, what_is_read: str) -> None:
    """Raises ValueError for an argument under capture of a CUDA graph, where the host reads nothing."""
    if is_capturing(device):
        raise ValueError(f"{name} was given under capture of a CUDA graph; {what_is_read} is read")


def requires_grad_flags(*inputs: Tensor | None) -> tuple[bool, ...]:
    """Returns which of the inputs need gradients."""
    if not torch.is_grad_enabled():
        return (False,) * len(inputs)
    return tuple([x is not None and x.requires_grad for x in inputs])


def no_gradients(tensors: Sequence[Tensor | None]) -> list[None] | None:
    """Returns what an operator's backward returns for a list of tensors: a None per entry, or a single None where an
    entry is None."""
    return None if any(x is None for x in tensors) else [None] * len(tensors)


def save_tensors(ctx: Any, *tensors: Tensor | None) -> None:
    """Saves tensors for the backward. Those of inference mode, which autograd takes no part in and refuses to save,
    stay on the node as they are."""
    ctx.of_inference = {i: x for i, x in enumerate(tensors) if x is not None and x.is_inference()}
    ctx.save_for_backward(*(None if i in ctx.of_inference else x for i, x in enumerate(tensors)))


def saved_tensors(ctx: Any) -> list[Any]:
    """Returns the tensors that `save_tensors` saved."""
    return [ctx.of_inference.get(i, x) for i, x in enumerate(ctx.saved_tensors)]

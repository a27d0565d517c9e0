"""What the operators of the engine and fused_policy_loss have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..contract import TokenValues
from ..names import KernelParams
from .chunks import Scorer, new_scorer
from .kept import make_token_mask
from .lm_head import LMHead

if TYPE_CHECKING:
    from ..sampling_mask import SamplingMask


class LogpsTokens(NamedTuple):
    completion_ids: Tensor
    mask: Tensor | None = None
    temperature: Tensor | None = None  # instead of the number
    kept_ids: Tensor | None = None  # of a SamplingMask
    kept_counts: Tensor | None = None


def describe_logps(
    ids: Tensor, mask: Tensor | None, sampling_mask: SamplingMask | None, temperature: Tensor | float,
    logit_scale: float, softcap: float | None, sparse_backward: float | None = None
) -> tuple[LogpsTokens, tuple[float, ...]]:  # fmt: skip
    """(tokens, numbers) of a LogpsCall, from the arguments of a public function."""
    per_token, number = (temperature, 1.0) if isinstance(temperature, Tensor) else (None, float(temperature))
    kept = () if sampling_mask is None else (sampling_mask.ids, sampling_mask.counts)
    numbers = number, float(logit_scale), float(softcap or 0.0), float(sparse_backward or 0.0)
    return LogpsTokens(ids, mask, per_token, *kept), numbers


def table_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for everything but float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_traced(hidden: Tensor) -> bool:
    """Whether torch.compile or a dispatch mode must see one operator instead of the operations inside it."""
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    return traced or type(hidden) not in (Tensor, torch.nn.Parameter)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph records these operations: then nothing may be read back to the host."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device) -> None:
    if is_capturing(device):
        raise ValueError("sparse_backward was given under capture of a CUDA graph; the number of entries is read")


def refuse_traced(**given: object) -> None:
    for name, x in given.items():
        if x is not None:
            raise ValueError(f"{name} is given to a call that is traced or compiled; it needs an eager one")


def requires_grad_flags(*inputs: Tensor | None) -> tuple[bool, ...]:
    """Which of them need gradients."""
    if not torch.is_grad_enabled():
        return (False,) * len(inputs)
    return tuple([x is not None and x.requires_grad for x in inputs])


def no_gradients(tensors: Sequence[Tensor | None]) -> list[None] | None:
    """What an operator's backward returns for this list: torch has a place for each entry if none of them is None."""
    return None if any(x is None for x in tensors) else [None] * len(tensors)


def token_mask(mask: Tensor | None) -> Tensor | None:
    """(N,) bool, False at padding; None where there is none."""
    return None if mask is None else mask.reshape(-1).bool()


def filled(x: Tensor, mask: Tensor | None, fill: float) -> Tensor:
    """x (N,) with `fill` at padding, whatever that holds; contiguous."""
    return x.contiguous() if mask is None else torch.where(mask, x, fill)


def make_scorer(
    head: LMHead, tokens: LogpsTokens, numbers: Sequence[float], values: TokenValues
) -> tuple[Scorer, Tensor | None, bool]:
    """(A scorer for log-probabilities alone, no objective; token_mask; whether no shape may depend on values)."""
    ids, (number, logit_scale, softcap, theta) = tokens.completion_ids, numbers
    if theta:
        refuse_capture(ids.device)
    mask, static, count, dtype = token_mask(tokens.mask), is_capturing(ids.device), ids.numel(), values.columns.dtype
    head.keep = mask if static else None
    if tokens.temperature is None:
        temperature = torch.full((count,), number, dtype=dtype, device=ids.device)
    else:
        expanded = tokens.temperature.detach().reshape(-1).expand(count)
        temperature = filled(expanded, mask, 1.0).to(device=ids.device, dtype=dtype)
    sampling_mask = make_token_mask(tokens.kept_ids, tokens.kept_counts, head.vocab_size, is_static=static)
    sampled = ids.reshape(-1) if mask is None else torch.where(mask, ids.reshape(-1), 0)
    params = KernelParams(logit_scale=logit_scale, softcap=softcap)
    scorer = new_scorer(theta or None, head, sampled.contiguous().long(), temperature, params, head.backend, values)
    if sampling_mask is not None:
        scorer.add_mask(sampling_mask, torch.ones_like(sampled, dtype=torch.bool) if mask is None else mask)
    return scorer, mask, static

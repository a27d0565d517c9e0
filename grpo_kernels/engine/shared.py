"""What the operators of the engine and fused_policy_loss have in common."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ..contract import Backend, TokenValues
from ..names import KernelParams
from .chunks import Scorer
from .lm_head import LMHead
from .memory import default_logits_dtype
from .vocab_parallel import VocabSlice

_WEIGHT_BOUND_TOKENS = 256


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


def is_weight_bound(device: torch.device, num_tokens: int) -> bool:
    """Whether the products of so few rows take the time of reading the weight: then a row left out saves nothing.

    An H200 does 206 operations of a 16-bit product in the time in which it reads a byte, an H100 295, an A100 156; a
    product of N rows does N per byte of W. To read the counts of rows costs a wait for the device.
    """
    return device.type != "cpu" and num_tokens <= _WEIGHT_BOUND_TOKENS


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


def make_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    backend: Backend,
    *,
    compute_dtype: torch.dtype | None = None,
    wants: tuple[bool, ...] = (False, False, False),
    logits_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    vocab_slice: VocabSlice | None = None,
) -> LMHead:
    """An lm_head with logits of the default type unless told."""
    if logits_dtype is None:
        logits_dtype = default_logits_dtype(compute_dtype or hidden.dtype, hidden.device)
    head = LMHead(hidden, weight, bias, logits_dtype, chunk_rows, backend, wants, compute_dtype)
    if vocab_slice is not None:
        head.join(vocab_slice, chunk_rows)
    return head


def make_scorer(
    head: LMHead,
    ids: Tensor,
    temperature: Tensor | float,
    params: KernelParams,
    values: TokenValues,
    mask: Tensor | None,
) -> Scorer:
    """A scorer for log-probabilities alone: no objective. temperature: a number, or a tensor of one or of N."""
    count, dtype = ids.numel(), values.columns.dtype
    if isinstance(temperature, Tensor):
        given = temperature.detach().reshape(-1).expand(count)
        per_token = filled(given, mask, 1.0).to(device=ids.device, dtype=dtype)
    else:
        per_token = torch.full((count,), temperature, dtype=dtype, device=ids.device)
    ids = ids.reshape(-1) if mask is None else torch.where(mask, ids.reshape(-1), 0)
    return Scorer(head, ids.contiguous().long(), per_token, params, head.backend, values)


@cache
def logit_params(logit_scale: float, softcap: float) -> KernelParams:
    """Parameters of statistics alone."""
    return KernelParams(logit_scale=logit_scale, softcap=softcap)

"""What compile_gate.py compiles: calls of the package's launchers on tensors that nobody reads or writes.

A new kernel, or a specialisation whose code differs much, is an entry of CASES at the end. The tensors have the types,
alignment and divisibility of a real batch; that they lie on the CPU changes nothing in the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends.triton_ import TritonBackend
from grpo_kernels.kernels.anchored import anchored
from grpo_kernels.kernels.linear_logp import linear_logp
from grpo_kernels.params import TABLE_FIELDS, KernelParams

COUNT, WIDTH, VOCAB, ODD_VOCAB = 64, 4096, 128256, 50257
SINGLE, DOUBLE, HALF, INDEX = torch.float32, torch.float64, torch.bfloat16, torch.int64
PARAMS = KernelParams(kl="k3", beta=0.04)
CAPPED = PARAMS._replace(softcap=30.0)
BACKEND = TritonBackend()

Head = tuple[Tensor, Tensor, Tensor | None]


def vector(dtype: torch.dtype = SINGLE) -> Tensor:
    return torch.empty(COUNT, dtype=dtype)


def table() -> Tensor:
    return torch.empty(len(TABLE_FIELDS), COUNT)


def logits_and_gradient(logits: torch.dtype, gradient: torch.dtype, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """The gradient lies over the logits, as in LMHead.gradient_buffer."""
    x = torch.empty(COUNT, vocab, dtype=logits)
    return x, x.view(gradient)[:, :vocab]


def head(dtype: torch.dtype, vocab: int = VOCAB, bias: bool = False) -> Head:
    """(hidden states, weight, bias)"""
    hidden, weight = torch.empty(COUNT, WIDTH, dtype=dtype), torch.empty(vocab, WIDTH, dtype=dtype)
    return hidden, weight, torch.empty(vocab, dtype=dtype) if bias else None


def fused(logits: torch.dtype, gradient: torch.dtype, params: KernelParams = PARAMS, vocab: int = VOCAB) -> object:
    return BACKEND.fused(*logits_and_gradient(logits, gradient, vocab), vector(INDEX), table(), params)


def stats(logits: torch.dtype) -> object:
    return BACKEND.stats(torch.empty(COUNT, VOCAB, dtype=logits), vector(INDEX), vector(), PARAMS)


def gradient(logits: torch.dtype, gradient: torch.dtype) -> object:
    return BACKEND.gradient(
        *logits_and_gradient(logits, gradient), vector(INDEX), vector(), vector(DOUBLE), vector(), vector(), vector(),
        PARAMS,
    )  # fmt: skip


def logps(operands: Head, params: KernelParams = PARAMS, entropy: bool = True) -> object:
    return linear_logp(*operands, vector(INDEX), vector(), params, entropy=entropy)


def exponentials(operands: Head, params: KernelParams = PARAMS) -> object:
    exps = torch.empty(COUNT, operands[1].shape[0], dtype=HALF)
    return anchored(*operands, vector(INDEX), table(), exps, params)


def objective() -> object:
    return BACKEND.objective(vector(), vector(), vector(), table(), PARAMS)


def reduce() -> object:
    sequences, num_groups = 16, 4
    return BACKEND.reduce(
        vector(torch.bool), *(vector() for _ in range(6)), table(), PARAMS,
        torch.empty(sequences + 1, dtype=INDEX), torch.empty(sequences, dtype=INDEX), num_groups,
    )  # fmt: skip


def group_statistics(scale: str, baseline: str) -> object:
    return BACKEND.group_statistics(vector(), vector(INDEX), 4, scale, baseline, 1, 1e-4)


def scale(dtype: torch.dtype) -> object:
    return BACKEND.scale(torch.empty(COUNT, WIDTH, dtype=dtype), torch.empty(()))


class Case(NamedTuple):
    """A launch. `only`: the kernel that it is about, where another case shows the others that it launches."""

    launch: Callable[[], object]
    only: str | None = None


CASES = {
    "fused, fp32, bf16 over it": Case(lambda: fused(SINGLE, HALF)),
    "fused, fp32, bf16 over it, softcap": Case(lambda: fused(SINGLE, HALF, CAPPED)),
    "fused, fp32, bf16 over it, odd V": Case(lambda: fused(SINGLE, HALF, vocab=ODD_VOCAB)),
    "fused, fp32 in place": Case(lambda: fused(SINGLE, SINGLE)),
    "fused, bf16 in place": Case(lambda: fused(HALF, HALF)),
    "statistics, fp32": Case(lambda: stats(SINGLE)),
    "statistics, bf16": Case(lambda: stats(HALF)),
    "gradient, fp32, bf16 over it": Case(lambda: gradient(SINGLE, HALF)),
    "gradient, bf16 in place": Case(lambda: gradient(HALF, HALF)),
    "linear_logp, bf16": Case(lambda: logps(head(HALF))),
    "linear_logp, bf16, bias, softcap": Case(lambda: logps(head(HALF, bias=True), CAPPED), "partial_kernel"),
    "linear_logp, bf16, no entropy": Case(lambda: logps(head(HALF), entropy=False), "partial_kernel"),
    "linear_logp, fp32": Case(lambda: logps(head(SINGLE)), "partial_kernel"),
    "anchored, bf16": Case(lambda: exponentials(head(HALF))),
    "anchored, bf16, bias, softcap": Case(lambda: exponentials(head(HALF, bias=True), CAPPED), "exponential_kernel"),
    "anchored, bf16, odd V": Case(lambda: exponentials(head(HALF, ODD_VOCAB)), "exponential_kernel"),
    "anchored, fp32": Case(lambda: exponentials(head(SINGLE)), "exponential_kernel"),
    "objective": Case(objective),
    "reduce": Case(reduce),
    "advantages": Case(lambda: group_statistics("group", "mean")),
    "advantages, batch std, leave one out": Case(lambda: group_statistics("batch", "leave_one_out")),
    "scale, fp32": Case(lambda: scale(SINGLE)),
    "scale, bf16": Case(lambda: scale(HALF)),
}

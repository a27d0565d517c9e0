"""What compile_gate.py compiles: calls of the package's launchers on tensors that nobody reads or writes.

A new kernel, or a specialisation whose code differs much, is an entry of CASES at the end. The tensors have the types,
alignment and divisibility of a real batch; that they lie on the CPU changes nothing in the kernel. launch_keys.py asks
which cases would compile again for another number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends.triton_ import TritonBackend
from grpo_kernels.kernels.anchored import anchored
from grpo_kernels.kernels.linear_logp import linear_logp
from grpo_kernels.params import TABLE_FIELDS, KernelParams, chunk_pitch

ROWS, WIDTH, VOCAB, ODD_VOCAB = 64, 4096, 128256, 50257
SMALL = {"vocab": 97, "width": 32}  # of `grpo-kernels check`: one part of the vocabulary
SMALLEST = {"vocab": 1, "width": 1}
SINGLE, DOUBLE, HALF, INDEX = torch.float32, torch.float64, torch.bfloat16, torch.int64
PARAMS = KernelParams(kl="k3", beta=0.04)
CAPPED = PARAMS._replace(softcap=30.0)
BACKEND = TritonBackend()


def vector(rows: int, dtype: torch.dtype = SINGLE) -> Tensor:
    """A chunk of one: it begins anywhere, on 16 bytes or not."""
    return torch.empty(rows + rows % 16, dtype=dtype)[rows % 16 :]


def table(rows: int) -> Tensor:
    return torch.empty(len(TABLE_FIELDS), rows + rows % 16)[:, rows % 16 :]


def scratch(rows: int, dtype: torch.dtype, vocab: int) -> Tensor:
    """As memory.allocate_chunk gives it on a GPU, padding included; V = 1 without, for a pitch that is a constant."""
    return torch.empty(rows, chunk_pitch(vocab, torch.device("cuda")) if vocab > 1 else 1, dtype=dtype)


def logits_and_gradient(
    rows: int, logits: torch.dtype, gradient: torch.dtype, vocab: int = VOCAB
) -> tuple[Tensor, Tensor]:
    """The gradient lies over the logits, as in LMHead.gradient_buffer."""
    x = scratch(rows, logits, vocab)
    return x[:, :vocab], x.view(gradient)[:, :vocab]


Head = tuple[Tensor, Tensor, Tensor | None]


def head(rows: int, dtype: torch.dtype, vocab: int = VOCAB, width: int = WIDTH, bias: bool = False) -> Head:
    """(hidden states, weight, bias)"""
    hidden, weight = torch.empty(rows, width, dtype=dtype), torch.empty(vocab, width, dtype=dtype)
    return hidden, weight, torch.empty(vocab, dtype=dtype) if bias else None


def fused(
    rows: int, logits: torch.dtype, gradient: torch.dtype, params: KernelParams = PARAMS, vocab: int = VOCAB
) -> object:
    return BACKEND.fused(*logits_and_gradient(rows, logits, gradient, vocab), vector(rows, INDEX), table(rows), params)


def fused_own(rows: int, vocab: int) -> object:
    """A caller's own logits: where V is odd, most rows begin anywhere."""
    x = torch.empty(rows, vocab)
    return BACKEND.fused(x, x, vector(rows, INDEX), table(rows), PARAMS)


def stats(rows: int, logits: torch.dtype, vocab: int = VOCAB) -> object:
    return BACKEND.stats(scratch(rows, logits, vocab)[:, :vocab], vector(rows, INDEX), vector(rows), PARAMS)


def gradient(rows: int, logits: torch.dtype, gradient: torch.dtype, vocab: int = VOCAB) -> object:
    return BACKEND.gradient(
        *logits_and_gradient(rows, logits, gradient, vocab), vector(rows, INDEX), vector(rows), vector(rows, DOUBLE),
        vector(rows), vector(rows), vector(rows), PARAMS,
    )  # fmt: skip


def logps(operands: Head, params: KernelParams = PARAMS, entropy: bool = True) -> object:
    rows = operands[0].shape[0]
    return linear_logp(*operands, vector(rows, INDEX), vector(rows), params, entropy=entropy)


def exponentials(operands: Head, params: KernelParams = PARAMS) -> object:
    rows = operands[0].shape[0]
    exps = torch.empty(rows, operands[1].shape[0], dtype=HALF)
    return anchored(*operands, vector(rows, INDEX), table(rows), exps, params)


def objective(rows: int) -> object:
    return BACKEND.objective(vector(rows), vector(rows), vector(rows), table(rows), PARAMS)


def reduce(rows: int) -> object:
    """As many sequences and groups as rows."""
    return BACKEND.reduce(
        vector(rows, torch.bool), *(vector(rows) for _ in range(6)), table(rows), PARAMS,
        vector(rows + 1, INDEX), vector(rows, INDEX), rows,
    )  # fmt: skip


def group_statistics(rows: int, scale: str, baseline: str) -> object:
    return BACKEND.group_statistics(vector(rows), vector(rows, INDEX), rows, scale, baseline, 1, 1e-4)


def scale(rows: int, dtype: torch.dtype, width: int = WIDTH) -> object:
    return BACKEND.scale(torch.empty(rows, width, dtype=dtype), torch.empty(()))


class Case(NamedTuple):
    """A launch for so many rows. `only`: the kernel it is about, where another case shows the others it launches."""

    launch: Callable[[int], object]
    only: str | None = None
    rows: int = ROWS


# An integer of 1 reaches a kernel as a constant unless it is excluded: the last cases hold that all kernels compile so.
CASES = {
    "fused, fp32, bf16 over it": Case(lambda n: fused(n, SINGLE, HALF)),
    "fused, fp32, bf16 over it, softcap": Case(lambda n: fused(n, SINGLE, HALF, CAPPED)),
    "fused, fp32, bf16 over it, odd V": Case(lambda n: fused(n, SINGLE, HALF, vocab=ODD_VOCAB)),
    "fused, fp32, bf16 over it, odd V, softcap": Case(lambda n: fused(n, SINGLE, HALF, CAPPED, ODD_VOCAB)),
    "fused, a caller's fp32, odd V": Case(lambda n: fused_own(n, ODD_VOCAB)),
    "fused, fp32 in place": Case(lambda n: fused(n, SINGLE, SINGLE)),
    "fused, bf16 in place": Case(lambda n: fused(n, HALF, HALF)),
    "statistics, fp32": Case(lambda n: stats(n, SINGLE)),
    "statistics, fp32, odd V": Case(lambda n: stats(n, SINGLE, ODD_VOCAB)),
    "statistics, bf16": Case(lambda n: stats(n, HALF)),
    "gradient, fp32, bf16 over it": Case(lambda n: gradient(n, SINGLE, HALF)),
    "gradient, fp32, bf16 over it, odd V": Case(lambda n: gradient(n, SINGLE, HALF, ODD_VOCAB)),
    "gradient, bf16 in place": Case(lambda n: gradient(n, HALF, HALF)),
    "linear_logp, bf16": Case(lambda n: logps(head(n, HALF))),
    "linear_logp, bf16, bias, softcap": Case(lambda n: logps(head(n, HALF, bias=True), CAPPED), "partial_kernel"),
    "linear_logp, bf16, no entropy": Case(lambda n: logps(head(n, HALF), entropy=False), "partial_kernel"),
    "linear_logp, fp32": Case(lambda n: logps(head(n, SINGLE)), "partial_kernel"),
    "anchored, bf16": Case(lambda n: exponentials(head(n, HALF))),
    "anchored, bf16, bias, softcap": Case(
        lambda n: exponentials(head(n, HALF, bias=True), CAPPED), "exponential_kernel"
    ),
    "anchored, bf16, odd V": Case(lambda n: exponentials(head(n, HALF, ODD_VOCAB)), "exponential_kernel"),
    "anchored, fp32": Case(lambda n: exponentials(head(n, SINGLE)), "exponential_kernel"),
    "objective": Case(objective),
    "reduce": Case(reduce),
    "advantages": Case(lambda n: group_statistics(n, "group", "mean")),
    "advantages, batch std, leave one out": Case(lambda n: group_statistics(n, "batch", "leave_one_out")),
    "scale, fp32": Case(lambda n: scale(n, SINGLE)),
    "scale, bf16": Case(lambda n: scale(n, HALF)),
    "linear_logp, bf16, V = 97": Case(lambda n: logps(head(n, HALF, **SMALL))),
    "anchored, bf16, V = 97": Case(lambda n: exponentials(head(n, HALF, **SMALL))),
    "fused, one row, V = 1": Case(lambda n: fused(n, SINGLE, HALF, vocab=1), rows=1),
    "statistics, one row, V = 1": Case(lambda n: stats(n, SINGLE, vocab=1), rows=1),
    "gradient, one row, V = 1": Case(lambda n: gradient(n, SINGLE, HALF, vocab=1), rows=1),
    "linear_logp, one row, V = H = 1": Case(lambda n: logps(head(n, HALF, **SMALLEST)), rows=1),
    "anchored, one row, V = H = 1": Case(lambda n: exponentials(head(n, HALF, **SMALLEST)), rows=1),
    "objective, one row": Case(objective, rows=1),
    "reduce, one row": Case(reduce, rows=1),
    "advantages, one reward": Case(lambda n: group_statistics(n, "group", "mean"), rows=1),
    "scale, one number": Case(lambda n: scale(n, SINGLE, width=1), rows=1),
}

"""What compile_gate.py compiles: calls of the package's launchers on tensors that nobody reads or writes.

A new kernel, or a specialisation whose code differs much, is an entry of CASES at the end. The tensors have the types,
alignment and divisibility of a real batch; that they lie on the CPU changes nothing in the kernel. With --keys it asks
which cases would compile again for another number of rows, or for a chunk that begins elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.config import GRPOConfig
from grpo_kernels.kernels.operations import (
    AllowedIdRows,
    GatheredIds,
    HeadChunk,
    LogitChunk,
    PolicyTransform,
    Rows,
    RowScales,
    SparseRows,
    SparseRule,
    Statistics,
    TeacherLogits,
    TeacherTransform,
    TokenIdPairs,
    TokenMask,
    chunk_row_stride,
)
from grpo_kernels.kernels.triton.backend import TRITON as BACKEND
from grpo_kernels.names import DIVERGENCES
from grpo_kernels.objective.aggregation import Lengths
from grpo_kernels.objective.fused import objective_inputs
from grpo_kernels.objective.sequences import Sequences
from grpo_kernels.objective.tokens import Rules, Tokens

ROWS, WIDTH, VOCAB, ODD_VOCAB = 64, 4096, 128256, 50257
SMALL = {"vocab": 97, "width": 32}  # of `grpo-kernels check`: one part of the vocabulary
SINGLE, HALF, INDEX = torch.float32, torch.bfloat16, torch.int64
PLAIN, CAPPED = PolicyTransform(), PolicyTransform(softcap=30.0)
CPU = torch.device("cpu")


def vector(rows: int, dtype: torch.dtype = SINGLE) -> Tensor:
    """A chunk of one: it begins anywhere, on 16 bytes or not."""
    return torch.empty(rows + rows % 16, dtype=dtype)[rows % 16 :]


def scratch(rows: int, dtype: torch.dtype, vocab: int) -> Tensor:
    """As memory.allocate_chunk gives it on a GPU, with padding; V = 1 without, for a constant row stride."""
    return torch.empty(rows, chunk_row_stride(vocab, torch.device("cuda")) if vocab > 1 else 1, dtype=dtype)


def head(
    rows: int, transform: PolicyTransform = PLAIN, vocab: int = VOCAB, width: int = WIDTH, bias: bool = False
) -> HeadChunk:
    hidden, weight = torch.empty(rows, width, dtype=HALF), torch.empty(vocab, width, dtype=HALF)
    added = torch.empty(vocab, dtype=HALF) if bias else None
    tokens, stats = 2 * rows, Statistics.empty(2 * rows, CPU)
    return HeadChunk(hidden, weight, added, Rows(rows, tokens), vector(tokens, INDEX), vector(tokens), stats, transform)


def chunk(
    rows: int,
    logits: Tensor,
    transform: PolicyTransform = PLAIN,
    *,
    indexed: bool = False,
    bias: bool = False,
    divergence: str = "",
) -> LogitChunk:
    """Half the rows of a batch, from a token on that is as even or odd as their number. A teacher has a softcap where
    the policy has one."""
    tokens, vocab = 2 * rows, logits.shape[1]
    which = Rows(0, rows, vector(rows, INDEX)) if indexed else Rows(rows, tokens)
    ids, temperature, stats = vector(tokens, INDEX), vector(tokens), Statistics.empty(tokens, CPU)
    added, teacher = torch.empty(vocab) if bias else None, None
    if divergence:
        own = TeacherTransform(divergence, softcap=transform.softcap)
        written = torch.empty(tokens), torch.empty(tokens), torch.empty(tokens, dtype=torch.float64)
        teacher = TeacherLogits(scratch(rows, SINGLE, vocab)[:, :vocab], added, own, vector(tokens), *written)
    return LogitChunk(logits, which, ids, temperature, stats, transform, added, teacher)


def statistics(rows: int, logits: torch.dtype, vocab: int = VOCAB, **given: Any) -> object:
    return BACKEND.statistics(chunk(rows, scratch(rows, logits, vocab)[:, :vocab], **given))


def gradient(rows: int, logits: torch.dtype, gradient: torch.dtype, vocab: int = VOCAB, **given: Any) -> object:
    """The gradient lies over the logits."""
    x = scratch(rows, logits, vocab)
    over = x.view(gradient)[:, :vocab]
    return BACKEND.gradient(chunk(rows, x[:, :vocab], **given), vector(2 * rows), vector(2 * rows), over)


def gradient_own(rows: int, vocab: int) -> object:
    """A caller's own logits: where V is odd, most rows begin anywhere."""
    x = torch.empty(rows, vocab)
    return BACKEND.gradient(chunk(rows, x), vector(2 * rows), vector(2 * rows), x)


def exponentials(
    rows: int, logits: torch.dtype, vocab: int = VOCAB, width: int = WIDTH, *, apart: bool = False, **given: Any
) -> object:
    """Over the front of the logits, or `apart`."""
    x = scratch(rows, logits, vocab)
    read, weight = chunk(rows, x[:, :vocab], **given), head(rows, given.get("transform", PLAIN), vocab, width)
    out = (torch.empty_like(x, dtype=HALF) if apart else x.view(HALF))[:, :vocab]
    return BACKEND.exponentials(read, weight, out)


def sparse_gradient(rows: int, logits: torch.dtype, vocab: int = VOCAB, **given: Any) -> object:
    read, room = chunk(rows, scratch(rows, logits, vocab)[:, :vocab], **given), min(vocab, 4096)
    out = SparseRows(
        torch.empty(rows, room, dtype=torch.int32), torch.empty(rows, room), torch.empty(rows, dtype=torch.int32)
    )
    return BACKEND.sparse_gradient(read, vector(2 * rows), vector(2 * rows), SparseRule(2.0**-12, rows), out)


def fused_logp(read: HeadChunk, entropy: bool = True) -> object:
    return BACKEND.fused_logp(read, entropy)


def fused_exponentials(read: HeadChunk) -> object:
    vocab = len(read.weight)
    return BACKEND.fused_exponentials(read, scratch(len(read.hidden), HALF, vocab)[:, :vocab])


def objective(rows: int, *, indexed: bool = False, whole: bool = False, bare: bool = False, **options: Any) -> object:
    """Half the tokens; `whole`: all, of as many sequences and groups as tokens. `bare`: without what is optional."""
    count = 2 * rows
    scored, offsets = vector(count, torch.bool), vector(count + 1, INDEX)
    ids, advantage, dloss_direct, dloss_via_ratio, logp, entropy, dlogp = (vector(count) for _ in range(7))
    sequences, names = Sequences(offsets, None, count), ("old", "ref", "rollout", "rollout_weight", "surrogate_scale")
    tokens = Tokens(
        GRPOConfig(**options), Rules(not bare, not bare, *[False] * 4), sequences, Lengths(sequences, None, SINGLE),
        ids, None if bare else scored, None, ids, advantage, dloss_direct, dloss_via_ratio, ids,
        **({} if bare else {name: vector(count) for name in names}),
    )  # fmt: skip
    if whole:
        return BACKEND.objective(objective_inputs(tokens, vector(count, INDEX), count), logp, entropy, dlogp, None)
    chosen = Rows(0, rows, vector(rows, INDEX)) if indexed else Rows(rows, count)
    return BACKEND.objective(objective_inputs(tokens, None, 0), logp, entropy, dlogp, chosen)


def scale(rows: int, dtype: torch.dtype, width: int = WIDTH) -> object:
    return BACKEND.scale(torch.empty(rows, width, dtype=dtype), torch.empty(()))


def scale_rows(
    rows: int, read: torch.dtype, written: torch.dtype, width: int = WIDTH, *, is_product: bool
) -> object:  # fmt: skip
    of_head, scales = head(rows, width=width), RowScales(torch.empty(rows), torch.empty(rows))
    x, out = torch.empty(rows, width, dtype=read), torch.empty(rows * (1 + is_product), width, dtype=written)
    return BACKEND.scale_rows(x, vector(2 * rows), scales, of_head, out, is_product=is_product)


def gathered(
    rows: int, dtype: torch.dtype, gradient: torch.dtype | None = None, bias: bool = False, add: bool = False,
    width: int = WIDTH
) -> list[object]:  # fmt: skip
    """Rows of 64 kept ids per token, of a vocabulary small enough to sort for, and the three products over them."""
    hidden, weight = torch.empty(2 * rows, width, dtype=dtype), torch.empty(128, width, dtype=dtype)
    index, tokens = vector(rows, INDEX), torch.empty(2 * rows, dtype=INDEX)
    chosen = GatheredIds(Rows(0, rows, index), torch.zeros(rows, 64, dtype=torch.int32))
    numbers, flat = torch.empty(rows, 64), torch.zeros(rows * 64, dtype=torch.int32)
    mask = TokenMask(vector(9 * rows, torch.int32), tokens, tokens)
    found = AllowedIdRows(chosen, flat.view(rows, 64), tokens, torch.empty(rows + 1, dtype=torch.bool)[1:])
    wide = gradient or dtype
    pairs, target = TokenIdPairs(flat, flat), torch.empty(128, width, dtype=wide)
    return [
        BACKEND.allowed_ids(mask, vector(2 * rows, INDEX), range(128), 128, found),
        BACKEND.gathered_logits(hidden, weight, torch.empty(128) if bias else None, chosen, numbers),
        BACKEND.gathered_dhidden(numbers, weight, chosen, torch.empty(2 * rows, width, dtype=wide)),
        BACKEND.gathered_dweight(numbers.view(-1), hidden, pairs, target, add=add),
    ]


class Case(NamedTuple):
    """A launch for so many rows. `only`: the kernel it is about, where another case shows the others it launches."""

    launch: Callable[[int], object]
    only: str | None = None
    rows: int = ROWS


# An integer of 1 reaches a kernel as a constant unless it is excluded: the last cases hold that all kernels compile so.
CASES = {
    "statistics, fp32": Case(lambda n: statistics(n, SINGLE)),
    "statistics, fp32, odd V": Case(lambda n: statistics(n, SINGLE, ODD_VOCAB)),
    "statistics, fp32, index, bias": Case(lambda n: statistics(n, SINGLE, indexed=True, bias=True)),
    "statistics, bf16": Case(lambda n: statistics(n, HALF)),
    "gradient, fp32, bf16 over it": Case(lambda n: gradient(n, SINGLE, HALF)),
    "gradient, fp32, bf16 over it, odd V": Case(lambda n: gradient(n, SINGLE, HALF, ODD_VOCAB)),
    "gradient, fp32, bf16 over it, odd V, softcap": Case(
        lambda n: gradient(n, SINGLE, HALF, ODD_VOCAB, transform=CAPPED)
    ),
    "gradient, fp32, bf16 over it, index, bias": Case(lambda n: gradient(n, SINGLE, HALF, indexed=True, bias=True)),
    "gradient, a caller's fp32, odd V": Case(lambda n: gradient_own(n, ODD_VOCAB)),
    "gradient, bf16 in place": Case(lambda n: gradient(n, HALF, HALF)),
    "exponentials, fp32, bf16 over it": Case(lambda n: exponentials(n, SINGLE)),
    "exponentials, fp32, odd V, softcap": Case(
        lambda n: exponentials(n, SINGLE, ODD_VOCAB, transform=CAPPED), "rows_kernel"
    ),
    "exponentials, fp32, index, bias": Case(lambda n: exponentials(n, SINGLE, indexed=True, bias=True)),
    "exponentials, bf16 in place": Case(lambda n: exponentials(n, HALF), "rows_kernel"),
    "exponentials, fp32, apart": Case(lambda n: exponentials(n, SINGLE, apart=True), "rows_kernel"),
    "sparse gradient, fp32": Case(lambda n: sparse_gradient(n, SINGLE)),
    "sparse gradient, fp32, odd V": Case(lambda n: sparse_gradient(n, SINGLE, ODD_VOCAB)),
    "sparse gradient, fp32, odd V, softcap": Case(lambda n: sparse_gradient(n, SINGLE, ODD_VOCAB, transform=CAPPED)),
    "sparse gradient, fp32, index, bias": Case(lambda n: sparse_gradient(n, SINGLE, indexed=True, bias=True)),
    "sparse gradient, bf16": Case(lambda n: sparse_gradient(n, HALF)),
    "fused_logp, bf16": Case(lambda n: fused_logp(head(n))),
    "fused_logp, bf16, bias, softcap": Case(lambda n: fused_logp(head(n, CAPPED, bias=True)), "partial_kernel"),
    "fused_logp, bf16, no entropy": Case(lambda n: fused_logp(head(n), entropy=False), "partial_kernel"),
    "fused_exponentials, bf16": Case(lambda n: fused_exponentials(head(n))),
    "fused_exponentials, bf16, bias, softcap": Case(
        lambda n: fused_exponentials(head(n, CAPPED, bias=True)), "exponential_kernel"
    ),
    "fused_exponentials, bf16, odd V": Case(
        lambda n: fused_exponentials(head(n, vocab=ODD_VOCAB)), "exponential_kernel"
    ),
    "fused_exponentials, bf16, V = 151,936": Case(
        lambda n: fused_exponentials(head(n, vocab=151936)), "exponential_kernel"
    ),
    "objective": Case(lambda n: objective(n, beta=0.1)),
    "objective, index, CISPO, k2": Case(
        lambda n: objective(n, indexed=True, surrogate="cispo", beta=0.1, kl_estimator="k2")
    ),
    "objective, sums": Case(lambda n: objective(n, whole=True, beta=0.1)),
    "objective, sums, SAPO, bare": Case(lambda n: objective(n, whole=True, bare=True, surrogate="sapo")),
    "objective, sums, one row": Case(lambda n: objective(n, whole=True, beta=0.1), rows=1),
    "objective, one row": Case(lambda n: objective(n, beta=0.1), rows=1),
    "scale, fp32": Case(lambda n: scale(n, SINGLE)),
    "scale, bf16": Case(lambda n: scale(n, HALF)),
    "scale rows, fp32 to bf16": Case(lambda n: scale_rows(n, SINGLE, HALF, is_product=True)),
    "scale rows, fp32": Case(lambda n: scale_rows(n, SINGLE, SINGLE, is_product=True)),
    "scale rows, bf16": Case(lambda n: scale_rows(n, HALF, HALF, is_product=False)),
    "scale rows, one row, H = 1": Case(lambda n: scale_rows(n, SINGLE, HALF, 1, is_product=True), rows=1),
    "gathered ids, bf16": Case(lambda n: gathered(n, HALF)),
    "gathered ids, bf16, bias, fp32 gradients, added": Case(lambda n: gathered(n, HALF, SINGLE, bias=True, add=True)),
    "gathered ids, fp32": Case(lambda n: gathered(n, SINGLE)),
    "gathered ids, one row, H = 1": Case(lambda n: gathered(n, HALF, width=1), rows=1),
    "fused_logp, bf16, V = 97": Case(lambda n: fused_logp(head(n, **SMALL))),
    "fused_exponentials, bf16, V = 97": Case(lambda n: fused_exponentials(head(n, **SMALL))),
    "statistics, one row, V = 1": Case(lambda n: statistics(n, SINGLE, 1), rows=1),
    "gradient, one row, V = 1": Case(lambda n: gradient(n, SINGLE, HALF, 1), rows=1),
    "exponentials, one row, V = H = 1": Case(lambda n: exponentials(n, SINGLE, vocab=1, width=1), rows=1),
    "sparse gradient, one row, V = 1": Case(lambda n: sparse_gradient(n, SINGLE, 1), rows=1),
    "fused_logp, one row, V = 1": Case(lambda n: fused_logp(head(n, vocab=1, width=8)), rows=1),
    "fused_exponentials, one row, V = 1": Case(lambda n: fused_exponentials(head(n, vocab=1, width=8)), rows=1),
    "scale, one number": Case(lambda n: scale(n, SINGLE, width=1), rows=1),
}


def teacher_cases(title: str, rows: int = ROWS, **given: Any) -> dict[str, Case]:
    """The kernel of the divergence alone, and the one of its gradient."""
    return {
        f"divergence, {title}": Case(lambda n: statistics(n, SINGLE, **given), "divergence_kernel", rows),
        f"gradient with a teacher, {title}": Case(
            lambda n: gradient(n, SINGLE, HALF, **given), "gradient_kernel", rows
        ),
    }


for divergence in DIVERGENCES:
    CASES |= teacher_cases(f"{divergence}, fp32", divergence=divergence)
    CASES |= teacher_cases(
        f"{divergence}, fp32, odd V, softcap", divergence=divergence, transform=CAPPED, vocab=ODD_VOCAB
    )
CASES |= teacher_cases("one row, V = 1", 1, divergence="jsd", vocab=1, bias=True)

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

from grpo_kernels.contract import (
    HeadChunk,
    KeptIds,
    KeptPairs,
    KeptRows,
    LogitChunk,
    PlannedTokens,
    RowGradients,
    Rows,
    SparseRows,
    SparseRule,
    TeacherLogits,
    TokenInputs,
    TokenMask,
    chunk_row_stride,
    no_values,
)
from grpo_kernels.head.kept import most_kept
from grpo_kernels.kernels.triton.anchored import anchored
from grpo_kernels.kernels.triton.backend import TritonBackend
from grpo_kernels.kernels.triton.linear_logp import linear_logp
from grpo_kernels.names import DIVERGENCES, FIELD, TABLE_FIELDS, KernelParams, PlanRules, TeacherParams

ROWS, WIDTH, VOCAB, ODD_VOCAB = 64, 4096, 128256, 50257
SMALL = {"vocab": 97, "width": 32}  # of `grpo-kernels check`: one part of the vocabulary
SMALLEST = {"vocab": 1, "width": 1}
SINGLE, HALF, INDEX = torch.float32, torch.bfloat16, torch.int64
PARAMS = KernelParams(kl="k3", beta=0.04)
CAPPED = PARAMS._replace(softcap=30.0)
GSPO = PARAMS._replace(level="sequence")
BACKEND = TritonBackend()


def vector(rows: int, dtype: torch.dtype = SINGLE) -> Tensor:
    """A chunk of one: it begins anywhere, on 16 bytes or not."""
    return torch.empty(rows + rows % 16, dtype=dtype)[rows % 16 :]


def scratch(rows: int, dtype: torch.dtype, vocab: int) -> Tensor:
    """As memory.allocate_chunk gives it on a GPU, with padding; V = 1 without, for a constant row stride."""
    return torch.empty(rows, chunk_row_stride(vocab, torch.device("cuda")) if vocab > 1 else 1, dtype=dtype)


def head(
    rows: int, params: KernelParams = PARAMS, vocab: int = VOCAB, width: int = WIDTH, bias: bool = False
) -> HeadChunk:
    hidden, weight = torch.empty(rows, width, dtype=HALF), torch.empty(vocab, width, dtype=HALF)
    added = torch.empty(vocab, dtype=HALF) if bias else None
    return HeadChunk(hidden, weight, added, vector(rows, INDEX), vector(rows), params)


def chunk(
    rows: int,
    logits: Tensor | None = None,
    params: KernelParams = PARAMS,
    *,
    indexed: bool = False,
    bias: bool = False,
    divergence: str = "",
) -> tuple[LogitChunk, Tensor]:
    """Half the rows of a batch, from a token on that is as even or odd as their number, and the table of the batch. A
    teacher has a softcap where the policy has one."""
    tokens = 2 * rows
    batch = torch.empty(len(TABLE_FIELDS), tokens)
    logits = torch.empty(0, 0) if logits is None else logits
    read = LogitChunk(
        logits,
        Rows(0, rows, vector(rows, INDEX)) if indexed else Rows(rows, tokens),
        torch.empty(tokens, dtype=INDEX),
        batch[1],
        no_values(tokens, SINGLE, batch.device),
        params,
        torch.empty(logits.shape[1]) if bias else None,
    )
    if divergence:
        other, own = scratch(rows, SINGLE, logits.shape[1]), TeacherParams(divergence, softcap=params.softcap)
        offset, weight = torch.empty(2, tokens)
        lse = torch.empty(tokens, dtype=torch.float64)
        read = read._replace(teacher=TeacherLogits(other[:, : logits.shape[1]], read.bias, own, weight, offset, lse))
    return read, batch


def statistics(rows: int, logits: torch.dtype, vocab: int = VOCAB, **given: Any) -> object:
    return BACKEND.statistics(chunk(rows, scratch(rows, logits, vocab)[:, :vocab], **given)[0])


def single_pass(
    rows: int, logits: torch.dtype, gradient: torch.dtype | None, vocab: int = VOCAB, **given: Any
) -> object:
    """The gradient lies over the logits, as in LMHead.gradient_buffer."""
    x = scratch(rows, logits, vocab)
    over = None if gradient is None else RowGradients(x.view(gradient)[:, :vocab])
    return BACKEND.single_pass(*chunk(rows, x[:, :vocab], **given), over)


def single_pass_own(rows: int, vocab: int) -> object:
    """A caller's own logits: where V is odd, most rows begin anywhere."""
    x = torch.empty(rows, vocab)
    return BACKEND.single_pass(*chunk(rows, x), RowGradients(x))


def gradient(rows: int, logits: torch.dtype, gradient: torch.dtype, vocab: int = VOCAB, **given: Any) -> object:
    x = scratch(rows, logits, vocab)
    read, batch = chunk(rows, x[:, :vocab], **given)
    over = RowGradients(x.view(gradient)[:, :vocab])
    return BACKEND.logits_gradient(read, read.values.g_logp, batch[2], over)


def sparse_gradient(rows: int, logits: torch.dtype, vocab: int = VOCAB, **given: Any) -> object:
    read, batch = chunk(rows, scratch(rows, logits, vocab)[:, :vocab], **given)
    room = most_kept(vocab, torch.device("cuda"))
    numbers = torch.empty(rows, room, dtype=torch.int32), torch.empty(rows, room), torch.empty(rows, dtype=torch.int32)
    rule, pairs = SparseRule(2.0**-12, rows), SparseRows(*numbers)
    return BACKEND.sparse_gradient(read, read.values.g_logp, batch[2], rule, pairs)


def logps(read: HeadChunk, entropy: bool = True) -> object:
    return linear_logp(read, entropy=entropy)


def exponentials(read: HeadChunk) -> object:
    rows = len(read.hidden)
    table = torch.empty(len(TABLE_FIELDS), rows + rows % 16)[:, rows % 16 :]
    exps = torch.empty(rows, len(read.weight), dtype=HALF)
    return anchored(read._replace(temperature=table[FIELD["temperature"]]), table, exps)


def objective(rows: int, indexed: bool = False) -> object:
    read, batch = chunk(rows, indexed=indexed)
    return BACKEND.token_objective(read.rows, batch, read.values, PARAMS)


def planned(rows: int) -> PlannedTokens:
    """Of as many sequences as tokens, what their objective and the sums read."""
    tokens, (read, batch) = 2 * rows, chunk(rows)
    scored, offsets = vector(tokens, torch.bool), vector(tokens + 1, INDEX)
    return PlannedTokens(batch, read.values, offsets, vector(tokens), scored, scored, read.ids, None, None)


def sequence_objective(rows: int, params: KernelParams) -> object:
    """Of the second half of the sequences."""
    return BACKEND.sequence_objective(slice(rows, 2 * rows), None, planned(rows), params)


def sums(rows: int) -> object:
    """Of as many groups as tokens."""
    tokens = planned(rows)
    return BACKEND.sums(tokens, PARAMS, tokens.ids, 2 * rows)


def plan_packed(rows: int) -> object:
    """Everything given; as many sequences as tokens."""
    each = [torch.empty(rows) for _ in range(6)]
    advantages, old, ref, rollout_weights, rollout, temperature = each
    inputs = TokenInputs(
        advantages=advantages, completion_mask=torch.empty(rows, dtype=torch.bool), old_logps=old, ref_logps=ref,
        rollout_weights=rollout_weights, rollout_logps=rollout, cu_seqlens=torch.empty(rows + 1, dtype=torch.int32),
        normalizer=torch.empty(()), temperature=temperature, entropy_threshold=torch.empty(()),
    )  # fmt: skip
    ids, rules = torch.empty(rows, dtype=INDEX), PlanRules(level="sequence", whole_sequences=True)
    return BACKEND.plan(inputs, ids, rules, SINGLE, ordered=True)


def plan_rows(rows: int) -> object:
    """The least; as many sequences as tokens in each."""
    ids = torch.empty(rows, 2 * rows, dtype=INDEX)
    inputs = TokenInputs(torch.empty(rows), completion_mask=torch.empty(rows, 2 * rows, dtype=INDEX))
    return BACKEND.plan(inputs, ids, PlanRules(), SINGLE, ordered=True)


def scale(rows: int, dtype: torch.dtype, width: int = WIDTH) -> object:
    return BACKEND.scale(torch.empty(rows, width, dtype=dtype), torch.empty(()))


def kept(
    rows: int, dtype: torch.dtype, gradient: torch.dtype | None = None, bias: bool = False, add: bool = False,
    width: int = WIDTH
) -> list[object]:  # fmt: skip
    """Rows of 64 kept ids per token, of a vocabulary small enough to sort for, and the three products over them."""
    hidden, weight = torch.empty(2 * rows, width, dtype=dtype), torch.empty(128, width, dtype=dtype)
    index, tokens = vector(rows, INDEX), torch.empty(2 * rows, dtype=INDEX)
    chosen = KeptIds(Rows(0, rows, index), torch.zeros(rows, 64, dtype=torch.int32))
    numbers, flat = torch.empty(rows, 64), torch.zeros(rows * 64, dtype=torch.int32)
    mask = TokenMask(vector(9 * rows, torch.int32), tokens, tokens)
    found = KeptRows(chosen, flat.view(rows, 64), tokens, torch.empty(rows + 1, dtype=torch.bool)[1:])
    wide = gradient or dtype
    pairs, target = KeptPairs(flat, flat), torch.empty(128, width, dtype=wide)
    return [
        BACKEND.kept_ids(mask, vector(2 * rows, INDEX), range(128), 128, found),
        BACKEND.kept_logits(hidden, weight, torch.empty(128) if bias else None, chosen, numbers),
        BACKEND.kept_dhidden(numbers, weight, chosen, torch.empty(2 * rows, width, dtype=wide)),
        BACKEND.kept_dweight(numbers.view(-1), hidden, pairs, target, add=add),
    ]


class Case(NamedTuple):
    """A launch for so many rows. `only`: the kernel it is about, where another case shows the others it launches."""

    launch: Callable[[int], object]
    only: str | None = None
    rows: int = ROWS


# An integer of 1 reaches a kernel as a constant unless it is excluded: the last cases hold that all kernels compile so.
CASES = {
    "single pass, fp32, bf16 over it": Case(lambda n: single_pass(n, SINGLE, HALF)),
    "single pass, fp32, bf16 over it, softcap": Case(lambda n: single_pass(n, SINGLE, HALF, params=CAPPED)),
    "single pass, fp32, bf16 over it, odd V": Case(lambda n: single_pass(n, SINGLE, HALF, vocab=ODD_VOCAB)),
    "single pass, fp32, bf16 over it, odd V, softcap": Case(
        lambda n: single_pass(n, SINGLE, HALF, ODD_VOCAB, params=CAPPED)
    ),
    "single pass, fp32, bf16 over it, index": Case(lambda n: single_pass(n, SINGLE, HALF, indexed=True)),
    "single pass, fp32, bf16 over it, index, bias": Case(
        lambda n: single_pass(n, SINGLE, HALF, indexed=True, bias=True)
    ),
    "single pass, fp32, bf16 over it, odd V, bias": Case(lambda n: single_pass(n, SINGLE, HALF, ODD_VOCAB, bias=True)),
    "single pass, a caller's fp32, odd V": Case(lambda n: single_pass_own(n, ODD_VOCAB)),
    "single pass, fp32 in place": Case(lambda n: single_pass(n, SINGLE, SINGLE)),
    "single pass, bf16 in place": Case(lambda n: single_pass(n, HALF, HALF)),
    "single pass, fp32, no gradient": Case(lambda n: single_pass(n, SINGLE, None)),
    "statistics, fp32": Case(lambda n: statistics(n, SINGLE)),
    "statistics, fp32, odd V": Case(lambda n: statistics(n, SINGLE, ODD_VOCAB)),
    "statistics, fp32, index, bias": Case(lambda n: statistics(n, SINGLE, indexed=True, bias=True)),
    "statistics, bf16": Case(lambda n: statistics(n, HALF)),
    "gradient, fp32, bf16 over it": Case(lambda n: gradient(n, SINGLE, HALF)),
    "gradient, fp32, bf16 over it, odd V": Case(lambda n: gradient(n, SINGLE, HALF, ODD_VOCAB)),
    "gradient, fp32, bf16 over it, index, bias": Case(lambda n: gradient(n, SINGLE, HALF, indexed=True, bias=True)),
    "gradient, bf16 in place": Case(lambda n: gradient(n, HALF, HALF)),
    "sparse gradient, fp32": Case(lambda n: sparse_gradient(n, SINGLE)),
    "sparse gradient, fp32, odd V": Case(lambda n: sparse_gradient(n, SINGLE, vocab=ODD_VOCAB)),
    "sparse gradient, fp32, odd V, softcap": Case(lambda n: sparse_gradient(n, SINGLE, ODD_VOCAB, params=CAPPED)),
    "sparse gradient, fp32, index, bias": Case(lambda n: sparse_gradient(n, SINGLE, indexed=True, bias=True)),
    "sparse gradient, bf16": Case(lambda n: sparse_gradient(n, HALF)),
    "linear_logp, bf16": Case(lambda n: logps(head(n))),
    "linear_logp, bf16, bias, softcap": Case(lambda n: logps(head(n, CAPPED, bias=True)), "partial_kernel"),
    "linear_logp, bf16, no entropy": Case(lambda n: logps(head(n), entropy=False), "partial_kernel"),
    "anchored, bf16": Case(lambda n: exponentials(head(n))),
    "anchored, bf16, bias, softcap": Case(lambda n: exponentials(head(n, CAPPED, bias=True)), "exponential_kernel"),
    "anchored, bf16, odd V": Case(lambda n: exponentials(head(n, vocab=ODD_VOCAB)), "exponential_kernel"),
    "objective": Case(objective),
    "objective, index": Case(lambda n: objective(n, indexed=True)),
    "objective of sequences": Case(lambda n: sequence_objective(n, GSPO)),
    "objective of sequences, off-policy mask": Case(
        lambda n: sequence_objective(n, PARAMS._replace(off_policy_threshold=0.1, has_rollout=True))
    ),
    "objective of sequences, VESPO": Case(
        lambda n: sequence_objective(n, KernelParams(surrogate="weighted", vespo=True))
    ),
    "sums": Case(sums),
    "plan, packed": Case(plan_packed),
    "plan, rows": Case(plan_rows),
    "scale, fp32": Case(lambda n: scale(n, SINGLE)),
    "scale, bf16": Case(lambda n: scale(n, HALF)),
    "kept ids, bf16": Case(lambda n: kept(n, HALF)),
    "kept ids, bf16, bias, fp32 gradients, added": Case(lambda n: kept(n, HALF, SINGLE, bias=True, add=True)),
    "kept ids, fp32": Case(lambda n: kept(n, SINGLE)),
    "kept ids, one row, H = 1": Case(lambda n: kept(n, HALF, width=1), rows=1),
    "linear_logp, bf16, V = 97": Case(lambda n: logps(head(n, **SMALL))),
    "anchored, bf16, V = 97": Case(lambda n: exponentials(head(n, **SMALL))),
    "single pass, one row, V = 1": Case(lambda n: single_pass(n, SINGLE, HALF, vocab=1), rows=1),
    "statistics, one row, V = 1": Case(lambda n: statistics(n, SINGLE, vocab=1), rows=1),
    "gradient, one row, V = 1": Case(lambda n: gradient(n, SINGLE, HALF, vocab=1), rows=1),
    "sparse gradient, one row, V = 1": Case(lambda n: sparse_gradient(n, SINGLE, vocab=1), rows=1),
    "linear_logp, one row, V = H = 1": Case(lambda n: logps(head(n, **SMALLEST)), rows=1),
    "anchored, one row, V = H = 1": Case(lambda n: exponentials(head(n, **SMALLEST)), rows=1),
    "objective, one row": Case(objective, rows=1),
    "objective of sequences, one row": Case(lambda n: sequence_objective(n, GSPO), rows=1),
    "sums, one row": Case(sums, rows=1),
    "plan, one row": Case(plan_packed, rows=1),
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
    CASES |= teacher_cases(f"{divergence}, fp32, odd V, softcap", divergence=divergence, params=CAPPED, vocab=ODD_VOCAB)
CASES |= teacher_cases("one row, V = 1", 1, divergence="jsd", vocab=1, bias=True)

"""Each kernel by itself, timed by events: GB/s where memory bounds it, TFLOP/s where tensor cores do.

Beside them the bare matrix products of a step, at row strides as in the engine: 16-bit gradients lie over the
front half of float32 logits, 2V elements apart. Data is random, since zeros run faster, and larger than the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gpu_device
import torch
from gpu_device import at, median_milliseconds, say
from torch import Tensor

from grpo_kernels.backends import get_backend
from grpo_kernels.benchmarks.cases import heads
from grpo_kernels.benchmarks.witness import witness
from grpo_kernels.contract import (
    FIELD,
    TABLE_FIELDS,
    KernelParams,
    LogitChunk,
    PlannedTokens,
    PlanRules,
    RowGradients,
    Rows,
    TokenInputs,
    chunk_row_stride,
    no_values,
)

# Heads, and tokens of a step.
HEADS = {"llama-3-8b": 16384, "qwen2.5-7b": 16384, "qwen2.5-1.5b": 16384, "gemma-2-2b": 16384}
PRODUCT_ROWS = (768, 1024, 1152, 2816, 3584, 4096, 5632, 8192, 16384)
CHUNK_ROWS = 4096  # of logits, for the kernels over them
COPIED = 2**31  # bytes
CLIP = KernelParams(beta=0.04, kl="k3")
GROUP = 8  # completions per prompt
PLAIN = KernelParams(surrogate="reinforce", has_old=False)

Timed = tuple[str, Callable[[], object], Callable[[], object], dict[str, float]]


def run(which: str, head: str) -> None:
    if which == "products":
        products(head)
    else:
        kernels(*which.split("/"), head)


def shape(head: str) -> tuple[int, int, int]:
    """(tokens, H, V)"""
    return HEADS[head], heads()[head]["hidden_size"], heads()[head]["vocab_size"]


def random(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(size, device=gpu_device.PLACE, dtype=dtype)


def nothing() -> None:
    pass


# --- bare products --------------------------------------------------------------------------------------------------


def products(head: str) -> None:
    _, width, vocab = shape(head)
    copy()
    for rows in PRODUCT_ROWS:
        needed, free = product_bytes(rows, width, vocab), gpu_device.free_memory()
        if needed > free:
            say(head=head, rows=rows, left_out=f"needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free")
            continue
        for name, call in bare_products(rows, width, vocab):
            at(f"{name}, {rows} rows")
            took = median_milliseconds(call)
            rate = 2 * rows * width * vocab / took / 1e9
            say(what=name, head=head, rows=rows, milliseconds=took, teraflops=rate)
            del call  # it holds the tensors


def product_bytes(rows: int, width: int, vocab: int) -> int:
    """Scratch, W, dW in float32 and in 16 bits, h and dh."""
    return 4 * rows * vocab + 8 * vocab * width + 8 * rows * width


def bare_products(rows: int, width: int, vocab: int) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The three of a step over `rows` (C), with results in float32 and in 16 bits."""
    single = torch.float32
    h, weight = random(rows, width), random(vocab, width) * width**-0.5  # (C, H), (V, H)
    scratch = torch.empty(rows, chunk_row_stride(vocab, torch.device("cuda")), device=gpu_device.PLACE)
    logits = scratch[:, :vocab]  # (C, V) float32
    yield "h W^T, float32", lambda: torch.mm(h, weight.T, out_dtype=single, out=logits)
    narrow = scratch.view(torch.bfloat16)[:, :vocab]  # (C, V), rows 2 V apart
    yield "h W^T", lambda: torch.mm(h, weight.T, out=narrow)
    narrow.normal_()
    yield "dlogits W", lambda: torch.mm(narrow, weight)
    yield "dlogits W, float32", lambda: torch.mm(narrow, weight, out_dtype=single)  # as the engine with few rows
    dweight = torch.zeros(vocab, width, device=gpu_device.PLACE)
    yield (
        "dlogits^T h, added in float32",
        lambda: torch.addmm(dweight, narrow.T, h, out_dtype=single, out=dweight),
    )
    yield "dlogits^T h, float32", lambda: torch.mm(narrow.T, h, out_dtype=single, out=dweight)
    yield "dlogits^T h", lambda: torch.mm(narrow.T, h)


def copy() -> None:
    at("copy")
    source = torch.randn(COPIED // 4, device=gpu_device.PLACE)
    target = torch.empty_like(source)
    took = median_milliseconds(lambda: target.copy_(source))
    say(what="copy", milliseconds=took, gigabytes_per_second=2 * COPIED / took / 1e6)


# --- this library's kernels -----------------------------------------------------------------------------------------


def kernels(backend: str, strategy: str, head: str) -> None:
    """The kernels of one strategy of one backend; those of "rows" are also all that is not about the head."""
    kinds = {"rows": row_kernels, "linear": linear, "anchored": anchored}
    tokens, width, vocab = shape(head)
    for name, call, before, work in kinds[strategy](backend, tokens, width, vocab):
        at(name)
        with witness() as ran:
            took = median_milliseconds(call, before)
        facts: dict[str, Any] = {"what": name, "backend": backend, "ran": dict(ran), "head": head, "milliseconds": took}
        if "bytes" in work:
            facts["gigabytes_per_second"] = work["bytes"] / took / 1e6
        if "operations" in work:
            facts["teraflops"] = work["operations"] / took / 1e9
        say(**facts, rows=work["rows"])


def row_kernels(name: str, tokens: int, width: int, vocab: int) -> Iterator[Timed]:
    """All that does not read hidden states."""
    backend = get_backend(name)
    yield from logit_kernels(backend, tokens, vocab)
    yield from scale(backend, width, vocab)
    yield from token_kernels(backend, tokens, vocab)


def scale(backend: Any, width: int, vocab: int) -> Iterator[Timed]:
    """The gradient of the weight times a loss scale."""
    x, half = random(vocab, width), torch.tensor(0.5, device=gpu_device.PLACE)
    refill = x.clone()
    work = {"bytes": 4.0 * x.numel(), "rows": vocab}
    yield "scale", lambda: backend.scale(x, half), lambda: x.copy_(refill), work


def logit_kernels(backend: Any, tokens: int, vocab: int) -> Iterator[Timed]:
    """Over one chunk of logits as the engine has it: the gradient replaces them, so they are restored every time."""
    place = torch.device(gpu_device.PLACE)
    rows = min(CHUNK_ROWS, tokens)
    whole = random(rows, chunk_row_stride(vocab, torch.device("cuda")), dtype=torch.float32)
    given = whole[:, :vocab].clone()
    logits, grad = whole[:, :vocab], whole.view(torch.bfloat16)[:, :vocab]
    ids, table = torch.randint(vocab, (rows,), device=place), token_table(rows, vocab)
    temperature = table[FIELD["temperature"]]
    restore = lambda: logits.copy_(given)  # noqa: E731
    cells = rows * vocab
    chosen, values = Rows(0, rows), no_values(rows, torch.float32, place)
    g_logp = torch.randn(rows, device=place) / rows
    chunk, gradients = LogitChunk(logits, chosen, ids), RowGradients(grad)
    both, read = {"bytes": 6.0 * cells, "rows": rows}, {"bytes": 4.0 * cells, "rows": rows}
    single_pass = partial(backend.single_pass, chunk, table, values, CLIP, gradients)
    yield "single_pass", single_pass, restore, both
    restore()
    yield "statistics", partial(backend.statistics, chunk, temperature, values, CLIP), nothing, read
    gradient = partial(
        backend.logits_gradient, chunk, temperature, values, g_logp, torch.zeros_like(g_logp), CLIP, gradients
    )
    yield "logits_gradient", gradient, restore, both


def token_kernels(backend: Any, tokens: int, vocab: int) -> Iterator[Timed]:
    """O(N): what matters is their latency. Sequences of 512 tokens, prompts of GROUP completions."""
    place, table = torch.device(gpu_device.PLACE), token_table(tokens, vocab)
    values, everything = no_values(tokens, torch.float32, place), Rows(0, tokens)
    values.logp.copy_(table[FIELD["old"]] + 0.1 * torch.randn(tokens, device=place))
    values.entropy.uniform_()
    read, sequences = float(table.nbytes), max(GROUP, tokens // 512)
    length, mask = tokens // sequences, torch.ones(sequences, tokens // sequences, dtype=torch.bool, device=place)
    ids = torch.randint(vocab, mask.shape, device=place)
    given = torch.randn(sequences, device=place), mask, torch.randn(mask.shape, device=place)
    plan = partial(backend.plan, TokenInputs(*given), ids, PlanRules(), torch.float32, ordered=True)
    yield "plan", plan, nothing, {"bytes": read + 64.0 * tokens, "rows": sequences * length}
    objective = partial(backend.token_objective, everything, table, values, CLIP)
    yield "token_objective", objective, nothing, {"bytes": read + 24.0 * tokens, "rows": tokens}
    ends = torch.linspace(0, tokens, sequences + 1, device=place).long()
    group = torch.arange(sequences, device=place) // GROUP
    groups = math.ceil(sequences / GROUP)
    scored = torch.ones(tokens, dtype=torch.bool, device=place)
    planned = PlannedTokens(
        table=table, values=values, offsets=ends, lengths=ends.diff().float(), scored=scored, active=scored,
        ids=torch.zeros(tokens, dtype=torch.int64, device=place), order=None, counts=None,
    )  # fmt: skip
    gspo = CLIP._replace(level="sequence")
    whole = partial(backend.sequence_objective, slice(0, sequences), None, planned, gspo)
    yield "sequence_objective", whole, nothing, {"bytes": read + 25.0 * tokens, "rows": tokens}
    sums = partial(backend.sums, planned, CLIP, group, groups)
    yield "sums", sums, nothing, {"bytes": read + 25.0 * tokens, "rows": tokens}
    rewards = torch.rand(sequences, device=place)
    call = lambda: backend.group_statistics(rewards, group, groups, "group", "mean", 1, 1e-4)  # noqa: E731
    yield "groups", call, nothing, {"bytes": 24.0 * sequences, "rows": sequences}


def token_table(count: int, vocab: int) -> Tensor:
    """(fields, N): what a policy near the old one would have, so that no branch is taken by all."""
    table = torch.zeros(len(TABLE_FIELDS), count, device=gpu_device.PLACE)
    for name in ("old", "ref"):
        table[FIELD[name]] = -math.log(vocab) + 0.1 * torch.randn(count, device=gpu_device.PLACE)
    table[FIELD["advantage"]].normal_()
    for name in ("multiplier", "weight_ratio", "weight_direct", "temperature"):
        table[FIELD[name]] = 1.0
    table[FIELD["entropy_threshold"]] = -math.inf
    table[FIELD["rollout"]] = math.nan
    return table


def linear(name: str, tokens: int, width: int, vocab: int) -> Iterator[Timed]:
    """All tokens of a step in one call, as where log-probabilities alone are wanted there is no scratch to bound it."""
    backend, place = get_backend(name), gpu_device.PLACE
    hidden, weight = random(tokens, width), random(vocab, width) * width**-0.5
    ids, one = torch.randint(vocab, (tokens,), device=place), torch.ones(tokens, device=place)
    call = lambda: backend.linear_logp(hidden, weight, None, ids, one, PLAIN, entropy=True)  # noqa: E731
    yield "linear_logp", call, nothing, {"operations": 2.0 * tokens * width * vocab, "rows": tokens}


def anchored(name: str, tokens: int, width: int, vocab: int) -> Iterator[Timed]:
    """One chunk, and all tokens where the exponentials fit."""
    backend, place = get_backend(name), torch.device(gpu_device.PLACE)
    weight = random(vocab, width) * width**-0.5
    for rows in sorted({min(CHUNK_ROWS, tokens), tokens}):
        if 2 * rows * vocab > gpu_device.free_memory() // 2:
            say(what="anchored", rows=rows, left_out="the exponentials would take more than half of the free memory")
            continue
        hidden, exps = (
            random(rows, width),
            torch.empty(rows, chunk_row_stride(vocab, torch.device("cuda")), device=place, dtype=torch.bfloat16),
        )
        ids, table = torch.randint(vocab, (rows,), device=place), token_table(rows, vocab)
        given = backend, hidden, weight, ids, table, exps[:, :vocab]
        work = {"operations": 2.0 * rows * width * vocab, "bytes": 2.0 * rows * vocab, "rows": rows}
        yield "anchored", lambda given=given: call_anchored(*given), nothing, work


def call_anchored(backend: Any, hidden: Tensor, weight: Tensor, ids: Tensor, table: Tensor, exps: Tensor) -> object:
    return backend.anchored(hidden, weight, None, ids, table, exps, CLIP)

"""Rows at a time: what follows from the memory budget, and a product chunk made of several row chunks."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers import (
    assert_same_bits,
    assert_within,
    call_counter,
    errors,
    fused,
    leaves,
    loss_by,
    make_batch,
    make_sampling_mask,
    off_policy,
    reference,
    relative,
    set_mask_way,
)
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.backends import get_backend
from grpo_kernels.backends.compiled.cpu import CpuBackend
from grpo_kernels.contract import chunk_row_stride
from grpo_kernels.engine import lm_head, memory
from grpo_kernels.engine.lm_head import LMHead

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")  # of a GPU, sizes alone
FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16
TRAINED, FROZEN, SCORED = (True, True, False), (True, False, False), (False, False, False)


def held(sizes: memory.ChunkSizes, vocab: int, grad: torch.dtype) -> int:
    """Bytes of the scratches of one chunk with float32 logits, fused or staged, whichever needs more."""
    gradient_rows = sizes.products if sizes.logits < sizes.products else 0
    return vocab * max(sizes.logits * 4 + gradient_rows * grad.itemsize, sizes.sequences * 4)


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("grad", [FLOAT, BFLOAT, HALF])
@pytest.mark.parametrize(
    ("vocab", "wants"), [(1000, TRAINED), (151_936, FROZEN), (262_144, TRAINED), (262_144, SCORED)]
)
def test_memory_stops_growing_with_n_at_the_budget(device, grad, vocab, wants):
    sizes_of_gpus = [memory.gpu_capacity(g * 2**30, 132) for g in (24, 80, 141)]
    capacities = [memory.capacity_of(CPU)] if device == CPU else sizes_of_gpus
    assert capacities == sorted(capacities) and capacities[0].budget == (2**29 if device == CPU else 2**32)
    for capacity in capacities:
        counts = [2**i for i in range(24)]
        shape = vocab, 4096
        sizes = [memory.chunk_sizes(n, shape, FLOAT, grad, device, wants, capacity=capacity) for n in counts]
        bytes_ = [held(s, vocab, grad) for s in sizes]
        assert bytes_[-1] == bytes_[-4] and max(bytes_) <= capacity.budget
        assert all(s.logits <= s.products <= n and s.sequences <= n for n, s in zip(counts, sizes, strict=True))
        least = min(1024, 2**32 // (vocab * 4)) if device == CUDA else 512  # at least so many, whatever the device
        assert sizes[-1].products >= least and sizes[-1].sequences >= least


def meta_head(tokens, dtype=BFLOAT, wants=TRAINED, **options):
    """Types and shapes alone, as on a GPU."""
    hidden, weight = (torch.empty(n, 24, dtype=dtype, device=META) for n in (tokens, 67))
    return LMHead((hidden, weight, None), get_backend("torch"), wants=wants, logits_dtype=FLOAT, **options)


@pytest.mark.parametrize(("dtype", "index", "first", "second"), [
    (BFLOAT, None, FLOAT, FLOAT),  # all 40 tokens, 10 rows at a time
    (BFLOAT, 11, FLOAT, FLOAT),
    (BFLOAT, 10, BFLOAT, FLOAT),  # a chunk that is alone is rounded once; were more to follow, float32 sums would
    (HALF, 10, FLOAT, FLOAT),  # the loss scale comes before the rounding
    (FLOAT, 10, FLOAT, FLOAT),
])  # fmt: skip
def test_sums_of_a_gpu_are_in_float32_unless_a_chunk_is_alone(dtype, index, first, second):
    head = meta_head(40, dtype, (False, True, False), chunk_rows=10)
    ids = torch.zeros(40, dtype=torch.int64, device=META)
    for expected in (first, second):
        head.accumulate(head.chunks(None if index is None else ids[:index])[0], ids)
        assert head.dweight.total.dtype == expected
    finished = head.gradients()
    assert finished.tensors[1].dtype == (FLOAT if dtype == HALF else dtype) and finished.dtypes[1] == dtype


@pytest.mark.parametrize(("dtype", "backend", "masked"), [
    (FLOAT, "cpu", True), (BFLOAT, "cpu", False), (HALF, "cpu", True), (BFLOAT, "torch", True),
    (torch.float64, "torch", False),
])  # fmt: skip
def test_rows_of_the_scratch_with_gaps_on_a_cpu(dtype, backend, masked, monkeypatch):
    """Rows a multiple of 4 KiB apart get a gap, which changes nothing: neither its memory nor the results count it."""
    vocab = 2048
    assert [chunk_row_stride(v, CPU) for v in (vocab, vocab + 1)] == [2112, 2049]
    config = gk.GRPOConfig(chunk_rows=5, entropy_coef=0.01, logit_softcap=20.0)
    batch = make_batch(vocab=vocab, bias=True, masked=True, dtype=dtype)
    if masked:
        batch.options["sampling_mask"] = make_sampling_mask(tuple(batch.ids.shape), vocab)
        set_mask_way(monkeypatch, "dense", vocab)
    batch, strides = off_policy(batch, config), []
    allocate = memory.allocate_rows
    monkeypatch.setattr(
        "grpo_kernels.engine.memory.allocate_rows", lambda *a: strides.extend(allocate(*a)) or strides[-1:]
    )
    found, exact = fused(batch, config, backend), reference(batch, config)
    assert {x.stride(0) for x in strides} == {2112} and {x.shape[1] for x in strides} == {vocab}
    monkeypatch.setattr(memory, "chunk_row_stride", lambda vocab_size, device: vocab_size)
    assert_within(errors(found, exact), errors(fused(batch, config, backend), exact), 1e-6)


@pytest.fixture
def few_logits(monkeypatch):
    """Float32 logits of at most 3 rows at a time beside bfloat16 gradients, as on a GPU with many rows."""
    sizes = memory.chunk_sizes

    def fewer(num_rows, vocab, logits, grad, *rest):
        found = sizes(num_rows, vocab, logits, grad, *rest)
        return found._replace(logits=3) if logits.itemsize > grad.itemsize else found

    monkeypatch.setattr(lm_head, "chunk_sizes", fewer)


WAYS = {"fused": "token", "staged": "sequence", "recompute": "sequence"}


@pytest.mark.parametrize(
    ("way", "left_out"), [("fused", True), ("fused", False), ("staged", True), ("recompute", False)]
)
def test_a_product_chunk_of_several_row_chunks(monkeypatch, few_logits, way, left_out, backend):
    """Logits come a few rows at a time, their gradients leave in one pair of products; the values stay."""
    batch = off_policy(make_batch(2, sequences=6)).head_as(BFLOAT)
    if left_out:
        batch.advantages[::2] = 0.0
    rows = {"fused": 20, "staged": 36, "recompute": 5}[way]
    config = gk.GRPOConfig(importance_sampling_level=WAYS[way], logits_dtype=FLOAT, chunk_rows=rows)
    of_logits, of_products = [], []
    call_counter(monkeypatch, LMHead, "logits", of_logits, lambda self, rows: rows.count)
    call_counter(monkeypatch, LMHead, "accumulate", of_products, lambda self, chunk, ids: chunk.rows.count)
    found = fused(batch, config, backend)
    if way != "staged":  # whose sequences need all their logits at once
        assert max(of_logits) <= 3 < max(of_products)
    assert max(of_products) <= rows
    exact, eager = reference(batch, config), reference(batch, config, BFLOAT)
    assert_within(errors(found, exact), errors(eager, exact), 0.0, of="grad")
    assert relative(found.logps, exact.logps) < 1e-6
    assert_same_bits(found, fused(batch, config, backend))


def test_a_loss_of_tokens_has_product_chunks_of_several_row_chunks_too(monkeypatch, backend):
    """fused_policy_loss: the function gets the tokens of a row chunk, the products those of a product chunk."""
    monkeypatch.setattr(
        lm_head, "chunk_sizes", lambda *given: memory.ChunkSizes(products=20, logits=3, sequences=20, packed=20)
    )
    batch, of_logits, of_products = make_batch(2, sequences=6), [], []
    own, other = leaves(batch), leaves(batch)
    call_counter(monkeypatch, LMHead, "logits", of_logits, lambda self, rows: rows.count)
    call_counter(monkeypatch, LMHead, "accumulate", of_products, lambda self, chunk, ids: chunk.rows.count)
    loss_by("fused_policy_loss", own, backend).backward()
    assert max(of_logits) <= 3 < max(of_products) <= 20 and sum(of_logits) == sum(of_products) == batch.ids.numel()
    loss_by("fused_logps", other, backend).backward()
    for name in ("hidden", "weight"):
        assert relative(getattr(own, name).grad, getattr(other, name).grad) < 1e-6


@pytest.mark.parametrize("chunk_rows", [None, 16, 5])  # one chunk, a few into a 16-bit sum, many into float32
@pytest.mark.parametrize("has_amx", [False, True])
def test_products_of_bfloat16_with_and_without_amx(monkeypatch, has_amx, chunk_rows):
    """What is added to dweight is h^T dlogits, transposed, or dlogits^T h: the processor decides."""
    calls = []
    monkeypatch.setattr(get_backend("cpu"), "has_amx", has_amx)
    call_counter(monkeypatch, CpuBackend, "add_transposed", calls, lambda *arguments, add: add)
    batch, config = make_batch(3, sequences=8).head_as(BFLOAT), gk.GRPOConfig(chunk_rows=chunk_rows)
    exact, eager = reference(batch, config), reference(batch, config, BFLOAT)
    found = fused(batch, config, "cpu")
    assert_within(errors(found, exact), errors(eager, exact), 0.0, of="grad")
    assert (False in calls) == (has_amx and chunk_rows == 5)
    assert (True in calls) == (has_amx and chunk_rows is not None)


@pytest.mark.parametrize(("way", "chunk_rows"), [("fused", 5), ("staged", None), ("recompute", 5)])
def test_a_cpu_without_products_of_bfloat16(monkeypatch, way, chunk_rows, backend):
    """It multiplies in float32, whose logits are as exact as that; gradients have the type of their inputs."""
    for module in (lm_head, memory):
        monkeypatch.setattr(module, "cpu_multiplies", lambda dtype: False)
    batch = off_policy(make_batch(3, sequences=8, bias=True)).head_as(BFLOAT)
    config = gk.GRPOConfig(importance_sampling_level=WAYS[way], chunk_rows=chunk_rows, beta=0.1)
    multiplied = []
    call_counter(monkeypatch, torch, "mm", multiplied, lambda a, b, **_: {a.dtype, b.dtype})
    call_counter(monkeypatch, Tensor, "addmm_", multiplied, lambda total, a, b: {a.dtype, b.dtype})
    found = fused(batch, config, backend)
    logps, _ = gk.fused_logps(batch.hidden, batch.weight, batch.ids, lm_head_bias=batch.bias)
    assert multiplied and all(types == {FLOAT} for types in multiplied)
    exact, eager = reference(batch, config), reference(batch, config, BFLOAT)
    assert {gradient.dtype for gradient in found.grads.values()} == {BFLOAT}
    assert_within(errors(found, exact), errors(eager, exact), 0.0, of="grad")
    for mine in (found.logps, logps):
        assert relative(mine, exact.logps) < 1e-6


# --- the scratch of the last call on a CPU, which the next one uses again ---------------------------------------------


@pytest.fixture(autouse=True)
def no_cached_block():
    memory._last_on_cpu.clear()
    yield
    memory._last_on_cpu.clear()


def test_after_inference_mode_and_from_several_threads():
    batch, found = make_batch(0), []
    with torch.inference_mode():
        expected = gk.fused_logps(batch.hidden, batch.weight, batch.ids)[0].clone()

    def work():
        for _ in range(5):
            fused(batch)
            found.append(gk.fused_logps(batch.hidden, batch.weight, batch.ids)[0])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20 and all(torch.equal(x, expected) for x in found)


@pytest.mark.parametrize("kept_ids", [0, 3])
def test_gradients_are_ordinary_tensors(kept_ids):
    """However large: their storage can be resized, as FSDP does, and the scratch of the next call is not theirs."""
    vocab, width = 2**18, 32
    hidden, weight = torch.randn(2, 3, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    ids, advantages = torch.randint(vocab, (2, 3)), torch.tensor([1.0, -1.0])
    options = {}
    if kept_ids:
        options["sampling_mask"] = gk.SamplingMask.from_lists([[{int(i), 1, 2} for i in row] for row in ids])
    gk.fused_grpo_loss(hidden, weight, ids, advantages, **options).loss.backward()
    assert weight.grad.data_ptr() not in {block.data_ptr() for block in memory._last_on_cpu}
    weight.grad.untyped_storage().resize_(0)


def test_logits_on_a_cpu_are_kept_for_the_next_call():
    memory._last_on_cpu.clear()
    blocks = []
    for _ in range(2):
        fused(make_batch(0), backend="cpu")
        blocks += [block.data_ptr() for block in memory._last_on_cpu]
    assert len(blocks) == 2 and blocks[0] == blocks[1]

"""Rows of logits at a time, the memory that they take, and what adding up the shares of chunks rounds."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers import (
    assert_same_bits,
    assert_within,
    call,
    call_counter,
    errors,
    fused,
    leaves,
    make_batch,
    make_sampling_mask,
    off_policy,
    reference,
    relative,
    use_mask_path,
)
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.head import chunk_size
from grpo_kernels.head.dweight import WeightGradient
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.head.loop import sequence_chunks
from grpo_kernels.kernels import get_backend
from grpo_kernels.kernels.operations import chunk_row_stride

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")  # of a GPU, sizes alone
FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16
TRAINED = (True, True, False)
# Width and vocabulary, and the most MiB that a step of 16,384 tokens may hold beside inputs and gradients.
HEADS = {
    "llama-3-8b": (4096, 128_256, 600), "qwen2.5-7b": (3584, 152_064, 750), "qwen2.5-1.5b": (1536, 151_936, 900),
    "gemma-2-2b": (2304, 256_000, 1150),
}  # fmt: skip


def rows_on_gpu(tokens, width, row_bytes, *, rounds=True, multiprocessors=132):
    return chunk_size.rows_of_chunk(
        tokens, width, row_bytes, BFLOAT, CUDA, rounds=rounds, multiprocessors=multiprocessors
    )  # fmt: skip


@pytest.mark.parametrize("head", HEADS)
def test_memory_of_a_step_on_a_gpu(head):
    """Exponentials of a chunk in 16 bits, and what the products of its rows hold: hidden states times their scale, in
    float32 and as 16 bits, and dlogits W."""
    width, vocab, most = HEADS[head]
    rows = rows_on_gpu(16_384, width, 2 * vocab)
    assert rows * (2 * vocab + 8 * width) <= most * 2**20
    assert rows % chunk_size.TILE_ROWS == 0 and 2048 <= rows <= 4096 and rows * 2 * vocab <= 2**30
    assert rows_on_gpu(65_536, width, 2 * vocab) * (2 * vocab + 6 * width) <= 1100 * 2**20
    assert rows_on_gpu(16_384, width, 2 * vocab, multiprocessors=0) == 2048


def test_rows_fill_the_waves_of_a_gpu():
    """17 tiles of rows and 14 of columns are 238 blocks, two waves over 132 multiprocessors as 16 tiles are, and what
    is left of the batch takes one."""
    assert rows_on_gpu(16_384, 3584, 2 * 152_064) == 17 * chunk_size.TILE_ROWS
    assert rows_on_gpu(16_384, 1536, 2 * 151_936) == 22 * chunk_size.TILE_ROWS  # 132 blocks
    assert rows_on_gpu(16_384, 4096, 2 * 128_256) == 16 * chunk_size.TILE_ROWS  # longer ones fill no more


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("grad", [FLOAT, BFLOAT])
@pytest.mark.parametrize("vocab", [1000, 32_000, 151_936, 262_144])
@pytest.mark.parametrize("rounds", [True, False])
def test_chunks_stay_within_their_bytes_and_few_round(device, grad, vocab, rounds):
    most, row_bytes = (2**29 if device == CPU else 2**30), 4 * vocab
    for tokens in (1, 17, 5000, 2**16, 2**23):
        rows = chunk_size.rows_of_chunk(tokens, 4096, row_bytes, grad, device, rounds=rounds, multiprocessors=132)
        assert 1 <= rows <= tokens and rows * row_bytes <= most
        assert not rounds or rows >= min(tokens / 8, 0.87 * most / row_bytes)
        assert rows >= min(tokens, 512 if device == CPU else 2048, most // row_bytes // 128 * 128)
        if not rounds:
            assert rows <= (4096 if device == CUDA else 1366)
    assert chunk_size.rows_of_sequences(row_bytes, device) == (2**29 if device == CPU else 2**32) // row_bytes


def meta_head(tokens, dtype=BFLOAT, wants=TRAINED, **options):
    """Types and shapes alone, as on a GPU."""
    hidden, weight = (torch.empty(n, 24, dtype=dtype, device=META) for n in (tokens, 67))
    return LMHead((hidden, weight, None), get_backend("torch"), wants=wants, logits_dtype=FLOAT, **options)


@pytest.mark.parametrize(("dtype", "wide", "sum_dtype"), [
    (BFLOAT, False, BFLOAT), (BFLOAT, True, FLOAT), (FLOAT, False, FLOAT),
    (HALF, False, FLOAT),  # the loss scale comes before the rounding
])  # fmt: skip
def test_dweight_is_summed_in_the_type_of_the_weight(dtype, wide, sum_dtype):
    head = meta_head(40, dtype, (False, True, False), chunk_rows=10, accumulate_in_fp32=wide)
    for rows in head.chunks(None):
        head.accumulate(rows, head.row_gradients(rows, head.scratch.logits(rows.count)))
        assert head.dweight.total.dtype == sum_dtype
    finished = head.gradients()
    assert finished.tensors[1].dtype == sum_dtype and finished.dtypes[1] == dtype


@pytest.mark.parametrize(("chunks", "wide", "least", "most"), [
    (1, False, 0.99, 1.01), (8, False, 1.5, 2.8), (32, False, 3.0, 5.0), (32, True, 0.99, 1.01),
])  # fmt: skip
def test_what_adding_up_chunks_rounds(chunks, wide, least, most):
    """Of one rounding of the sum to bfloat16: it grows as the root of the number of chunks; not in float32."""
    g = torch.Generator().manual_seed(0)
    dlogits, h = (torch.randn(512, n, generator=g).bfloat16() for n in (300, 64))
    exact = dlogits.double().T @ h.double()
    head = meta_head(8, wants=(False, True, False), accumulate_in_fp32=wide)
    weight, held_dtype = torch.empty(300, 64, dtype=BFLOAT), head.held_dtypes[1]
    total = WeightGradient(weight, BFLOAT, held_dtype, get_backend("torch"), rounds_once=wide)
    for part in zip(dlogits.chunk(chunks), h.chunk(chunks), strict=True):
        total.add(*part)
    error = relative(total.total.bfloat16(), exact) / relative(exact.bfloat16(), exact)
    assert least <= error <= most


def test_a_float32_buffer_gets_a_float32_sum(backend):
    batch, bits = make_batch(3, sequences=40).head_as(BFLOAT), []
    for name in ("weight", "float32"):
        own, total = leaves(batch), torch.zeros(batch.weight.shape)
        call(own, gk.GRPOConfig(chunk_rows=4, dweight_sum=name), backend, accumulate_into=total).loss.backward()
        assert own.weight.grad is None
        bits.append(bool((total != total.bfloat16().float()).any()))
    assert bits == [False, True]


@pytest.fixture
def contiguous_scatter(monkeypatch):
    """torch's scatter_ copies all of a tensor whose rows have gaps, which a chunk of logits must not cost."""
    scatter = Tensor.scatter_

    def checked(x, *arguments, **options):
        assert x.is_contiguous(), f"scatter_ would copy {tuple(x.shape)} twice"
        return scatter(x, *arguments, **options)

    monkeypatch.setattr(Tensor, "scatter_", checked)


@pytest.mark.usefixtures("contiguous_scatter")
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
        use_mask_path(monkeypatch, "dense", vocab)
    batch, strides = off_policy(batch, config), []
    allocate = chunk_size.allocate_rows
    monkeypatch.setattr(
        "grpo_kernels.head.chunk_size.allocate_rows", lambda *a: strides.extend(allocate(*a)) or strides[-1:]
    )
    found, exact = fused(batch, config, backend), reference(batch, config)
    assert {x.stride(0) for x in strides} == {2112} and {x.shape[1] for x in strides} == {vocab}
    monkeypatch.setattr(chunk_size, "chunk_row_stride", lambda vocab_size, device: vocab_size)
    assert_within(errors(found, exact), errors(fused(batch, config, backend), exact), 1e-6)


LEVELS = {"tokens": "token", "whole sequences": "sequence", "sequences beyond a chunk": "sequence"}


@pytest.mark.usefixtures("contiguous_scatter")
@pytest.mark.parametrize(
    ("chunks", "left_out"),
    [("tokens", True), ("tokens", False), ("whole sequences", True), ("sequences beyond a chunk", False)],
)
def test_gradients_narrower_than_their_logits(chunks, left_out, backend):
    """Float32 logits of bfloat16 inputs: gradients lie over them on a GPU, in a buffer of their own on a CPU."""
    batch = off_policy(make_batch(2, sequences=6)).head_as(BFLOAT)
    if left_out:
        batch.advantages[::2] = 0.0
    rows = {"tokens": 20, "whole sequences": 36, "sequences beyond a chunk": 5}[chunks]
    config = gk.GRPOConfig(importance_sampling_level=LEVELS[chunks], logits_dtype=FLOAT, chunk_rows=rows)
    found = fused(batch, config, backend)
    exact, eager = reference(batch, config), reference(batch, config, BFLOAT)
    assert_within(errors(found, exact), errors(eager, exact), 0.0, of="grad")
    assert relative(found.logps, exact.logps) < 1e-6
    assert_same_bits(found, fused(batch, config, backend))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(
    ("chunks", "chunk_rows"), [("tokens", 5), ("whole sequences", None), ("sequences beyond a chunk", 5)]
)
def test_a_cpu_without_products_of_bfloat16(monkeypatch, chunks, chunk_rows, backend):
    """It multiplies in float32, whose logits are as exact as that; gradients have the type of their inputs."""
    monkeypatch.setattr(chunk_size, "cpu_multiplies", lambda dtype: False)
    batch = off_policy(make_batch(3, sequences=8, bias=True)).head_as(BFLOAT)
    config = gk.GRPOConfig(importance_sampling_level=LEVELS[chunks], chunk_rows=chunk_rows, beta=0.1)
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
    chunk_size._last_on_cpu.clear()
    yield
    chunk_size._last_on_cpu.clear()


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
    assert weight.grad.data_ptr() not in {block.data_ptr() for block in chunk_size._last_on_cpu}
    weight.grad.untyped_storage().resize_(0)


def test_logits_on_a_cpu_are_kept_for_the_next_call():
    chunk_size._last_on_cpu.clear()
    blocks = []
    for _ in range(2):
        fused(make_batch(0), backend="cpu")
        blocks += [block.data_ptr() for block in chunk_size._last_on_cpu]
    assert len(blocks) == 2 and blocks[0] == blocks[1]


@pytest.mark.parametrize(
    ("lengths", "chunks"),
    [
        ([], []),
        ([0, 0], []),
        ([4, 3, 3, 9], [(0, 7, slice(0, 2)), (7, 10, slice(2, 3)), (10, 19, slice(3, 4))]),
        ([7, 0, 7], [(0, 7, slice(0, 2)), (7, 14, slice(2, 3))]),
    ],
)
def test_chunks_of_whole_sequences_are_as_long_as_they_may_be(lengths, chunks):
    assert [*sequence_chunks(lengths, 7)] == chunks

"""Rows of logits at a time, the memory that they take, and what adding up the shares of chunks rounds."""

from __future__ import annotations

import threading
from pathlib import Path
from unittest.mock import Mock

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
from grpo_kernels.head.chunk_size import Selection
from grpo_kernels.head.dweight import WeightGradient
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.head.loop import Chunk, FusedExponentials, TokenBatch, run, sequence_chunks
from grpo_kernels.kernels import get_backend
from grpo_kernels.kernels.operations import PolicyTransform, Statistics, chunk_row_stride

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")  # of a GPU, sizes alone
FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16
TRAINED = (True, True, False)
# Width and vocabulary; rows of a chunk, and the most MiB that a step may hold beside inputs and gradients: of 16,384
# tokens; of 65,536; of 65,536 and a frozen head.
HEADS = {
    "Llama-3-8B": (4096, 128_256, (2048, 600), (4096, 1200), (1024, 280)),
    "Qwen2.5-7B": (3584, 152_064, (2304, 750), (3328, 1100), (1024, 350)),
    "Qwen2.5-1.5B": (1536, 151_936, (2816, 900), (3328, 1100), (2048, 650)),
    "Gemma-2-2B": (2304, 256_000, (2048, 1150), (2048, 1150), (1792, 900)),
    "Qwen3.5": (2048, 248_320, (2048, 1010), (2048, 1010), (2048, 1000)),
    "Gemma-3": (2560, 262_144, (2048, 1080), (2048, 1080), (1536, 800)),
    "DeepSeek-V3": (7168, 129_280, (3584, 1130), (4096, 1290), (1792, 520)),
}
GUIDE = Path(gk.__file__).with_name("README.md").read_text(encoding="utf-8")


@pytest.fixture
def gpu_head(monkeypatch):
    """A head of an H100 whose backend has fused products, on a device without values."""
    monkeypatch.setattr("grpo_kernels.head.lm_head.multiprocessors_of", lambda device: 132)

    def make(tokens: int, width: int, vocab: int, wants: tuple[bool, ...] = TRAINED, **options) -> LMHead:
        hidden, weight = (torch.empty(n, width, dtype=BFLOAT, device=META) for n in (tokens, vocab))
        return LMHead((hidden, weight, None), get_backend("torch"), wants=wants, logits_dtype=FLOAT, **options)

    return make


def batch_of(head: LMHead) -> TokenBatch:
    stats = Statistics.zeros(head.num_tokens, META, FLOAT)
    return TokenBatch(head, torch.zeros_like(stats.logp).long(), stats.logp, PolicyTransform(), stats)


def rows_of(head: LMHead) -> int:
    """Returns the rows of a chunk of all tokens; the buffer that they get is no longer."""
    rows = batch_of(head).chunks(None, FusedExponentials)[0].rows.count
    assert head.scratch.gradients(rows).untyped_storage().nbytes() == rows * 2 * head.vocab_size
    return rows


@pytest.mark.parametrize("name", HEADS)
def test_memory_of_a_step_on_a_gpu(gpu_head, name):
    """Exponentials of a chunk in 16 bits, and what the products of its rows hold: hidden states times their scale, in
    float32 and as 16 bits, and dlogits W in float32; of a frozen head dlogits W, and W's rows of the sampled ids."""
    width, vocab, *steps = HEADS[name]
    heads = (16_384, TRAINED, 10), (65_536, TRAINED, 10), (65_536, (True, False, True), 6)
    for (rows, most), (tokens, wants, product_bytes) in zip(steps, heads, strict=True):
        assert rows_of(gpu_head(tokens, width, vocab, wants)) == rows
        assert rows * (2 * vocab + product_bytes * width) <= most * 2**20
    wide = gpu_head(65_536, width, vocab, accumulate_in_fp32=True)  # each chunk reads and writes dweight
    assert 2048 <= wide.rows_of("exponentials") <= 4096


@pytest.mark.parametrize("name", HEADS)
def test_memory_of_log_probabilities_on_a_gpu(gpu_head, name):
    """The product leaves three numbers in float64 of a row for each multiprocessor, and the sampled logit."""
    head = gpu_head(16_384, *HEADS[name][:2], (False,) * 3)
    assert [rows.count for rows in head.chunks(None, "statistics")] == [16_384]
    assert 16_384 * 24 * (132 + 1) <= 50 * 2**20
    parts = head.chunks(torch.arange(16_000, device=META), "statistics")  # whose hidden states are copied
    assert all(rows.count * (24 * 133 + 2 * HEADS[name][0]) <= 2**26 for rows in parts) and 2 <= len(parts) <= 5
    head.row_mask = torch.ones(16_384, dtype=torch.bool, device=META)
    assert head.chunks(None, "statistics")[0].count == parts[0].count
    assert [rows.count for rows in gpu_head(70_000, *HEADS[name][:2]).chunks(None, "statistics")][:3] == [20_992] * 3


@pytest.mark.parametrize("name", HEADS)
def test_memory_of_whole_sequences_on_a_gpu(gpu_head, name):
    """A row holds hidden states, scaled ones in float32 and 16 bits, and dlogits W in float32. The guide has the
    lengths, up to which a sequence is a chunk, and from which on its logits are computed twice."""
    width, vocab, *_ = HEADS[name]
    lengths = []
    for kind, entry_bytes in ((FusedExponentials, 2), (Chunk, 4)):
        length = gpu_head(16_384, width, vocab).rows_of_sequences(kind.holds)
        held = entry_bytes * vocab + 12 * width
        assert length * held <= 1.5 * 2**30 < (length + 1) * held
        assert visited(gpu_head, kind, (width, vocab), [length - 100, 100, 50, length]) == [length, 50, length]
        assert visited(gpu_head, kind, (width, vocab), [length + 1, 100]) == ["statistics", "gradients"]
        lengths.append(length)
    assert f"| {name} | {lengths[0]:,} | {lengths[1]:,} |" in GUIDE
    assert visited(gpu_head, Chunk, (width, vocab), [9000, 1], chunk_rows=9000) == [9000, 1]


def visited(gpu_head, kind, sizes, lengths, **options):
    """Returns the rows of each chunk of a loss of whole sequences, or the passes where there is one for each."""
    order = []

    class Visited(kind):
        def forward(self):
            order.append(self.rows.count)

        def backward(self, *_):
            pass

    batch = batch_of(gpu_head(sum(lengths), *sizes, **options))
    batch.chunk_kind = lambda has_entropy: Visited
    batch.forward = lambda *_: order.append("statistics")
    batch.backward = lambda *_, **__: order.append("gradients")
    loss = Mock(needs_batch=False, needs_sequences=True, return_value=(None, None))
    loss.gradients.return_value = None, None
    run(batch, loss, Selection(None, None, None, lengths), gradients=True, has_entropy=False, every_row=False)
    return order


def test_rows_fill_the_waves_of_a_gpu():
    """13 tiles of rows and 14 of columns are 182 blocks, two waves over 132 multiprocessors as 12 tiles are, and 9 are
    one. Exponentials have even numbers: the clusters of their product are pairs of tiles."""

    def rows(tokens, width, row_bytes, **options):
        options = dict(dweight_dtype=BFLOAT, multiprocessors=132) | options
        return chunk_size.rows_of_chunk(tokens, width, row_bytes, BFLOAT, CUDA, **options)

    assert rows(16_384, 3584, 4 * 152_064) == 13 * 128
    assert rows(65_536, 3584, 2 * 151_936, dweight_dtype=FLOAT, holds="exponentials") == 18 * 128
    assert rows(16_384, 3584, 2 * 152_064) == 17 * 128 and rows(16_384, 3584, 2 * 152_064, multiprocessors=0) == 2048


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("grad", [FLOAT, BFLOAT])
@pytest.mark.parametrize("vocab", [1000, 32_000, 151_936, 262_144])
@pytest.mark.parametrize("rounds", [True, False])
def test_chunks_stay_within_their_bytes_and_few_round(device, grad, vocab, rounds):
    most, row_bytes, dweight = (2**29 if device == CPU else 2**30), 4 * vocab, BFLOAT if rounds else None
    for tokens in (1, 17, 5000, 2**16, 2**23):
        rows = chunk_size.rows_of_chunk(
            tokens, 4096, row_bytes, grad, device, dweight_dtype=dweight, multiprocessors=132
        )
        assert 1 <= rows <= tokens and rows * row_bytes <= most
        assert not rounds or rows >= min(tokens / 8, 0.87 * most / row_bytes)
        assert rows >= min(tokens, 512 if device == CPU else 2048, most // row_bytes // 128 * 128)
        if not rounds:
            assert rows <= (4096 if device == CUDA else 1366)
    if device == CPU:
        assert chunk_size.rows_of_sequences(row_bytes, 4096, device) == most // row_bytes


@pytest.mark.parametrize(("lengths", "rows"), [([30] * 40, 90), ([30, 250, 30], 250)])
def test_chunks_of_sequences_are_no_longer_than_they_must_be(lengths, rows):
    """100 rows are the usual chunk, 400 the most of whole sequences."""
    head = Mock(num_tokens=sum(lengths), rows_of=lambda holds: 100, rows_of_sequences=lambda holds: 400)
    kind = Mock(holds="logits", side_effect=lambda batch, rows, sequences: Mock(rows=rows))
    chunks = TokenBatch.sequences(Mock(head=head), None, lengths, kind)
    assert sum(chunk.rows.count for chunk in chunks) == sum(lengths)
    assert max(chunk.rows.count for chunk in chunks) == rows


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


@pytest.mark.parametrize("allowed_ids", [0, 3])
def test_gradients_are_ordinary_tensors(allowed_ids):
    """However large: their storage can be resized, as FSDP does, and the scratch of the next call is not theirs."""
    vocab, width = 2**18, 32
    hidden, weight = torch.randn(2, 3, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    ids, advantages = torch.randint(vocab, (2, 3)), torch.tensor([1.0, -1.0])
    options = {}
    if allowed_ids:
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

"""Rows at a time: what follows from the memory budget, and a product chunk made of several row chunks."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    assert_same_bits,
    assert_within,
    call_counter,
    errors,
    fused,
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
from grpo_kernels.engine.lm_head import LMHead, Rows
from grpo_kernels.engine.products import cpu_multiplies

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")  # of a GPU, sizes alone
FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16


HEADS = {"llama": (128256, 4096), "qwen": (152064, 3584), "gemma": (256000, 2304), "small": (151936, 896)}
TRAINED, FROZEN, SCORED = (True, True, False), (True, False, False), (False, False, False)
H200, H100 = memory.gpu_capacity(150.7e9, 132), memory.gpu_capacity(85.0e9, 132)


def held(sizes: memory.ChunkSizes, vocab: int, grad: torch.dtype) -> int:
    """Bytes of the scratches of one chunk with float32 logits, fused or staged, whichever needs more."""
    return max(sizes.scratch_bytes(vocab, FLOAT, grad), vocab * sizes.sequences * 4)


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("grad", [FLOAT, BFLOAT, HALF])
@pytest.mark.parametrize("vocab", [1000, 32_000, 151_936, 262_144])
@pytest.mark.parametrize("wants", [TRAINED, FROZEN, SCORED])
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


def test_a_vocabulary_beyond_the_budget_gets_short_chunks():
    capacity = memory.Capacity(2**32)
    sizes = [
        memory.chunk_sizes(10**6, (v, 64), FLOAT, BFLOAT, CUDA, TRAINED, capacity=capacity) for v in (10**6, 10**8)
    ]
    assert sizes[0].products > 16 and sizes[1] == (16, 16, 16, 16)


def gpu_rows(tokens, head, wants, capacity=H200, **options):
    grad = options.pop("grad", BFLOAT)
    return memory.chunk_sizes(tokens, HEADS[head], FLOAT, grad, CUDA, wants, capacity=capacity, **options)


def test_a_batch_that_fits_is_one_product_chunk_on_a_gpu():
    """With float32 logits of 2,048 rows at a time; longer ones are cut into chunks with full waves."""
    for tokens, rows in {4096: (4096, 4096), 4097: (4097, 2048), 20480: (20480, 2048), 20481: (5248, 768)}.items():
        assert gpu_rows(tokens, "llama", TRAINED)[:2] == rows
    for head in HEADS:
        assert gpu_rows(16384, head, TRAINED)[:2] == (16384, 2048)
    assert gpu_rows(16384, "gemma", TRAINED, H100)[:2] == (5632, 768)
    assert gpu_rows(10**6, "llama", TRAINED, chunk_rows=8192) == (8192, 2048, 8192, 8192)
    # The scale of float16 gradients comes from all rows of a chunk: their logits must still be there.
    assert gpu_rows(10**6, "llama", TRAINED, grad=HALF)[:2] == (5248, 5248)


def test_whole_sequences_take_short_chunks_where_one_does_not_hold_them_all():
    """Their float32 logits may exceed the budget where bfloat16 gradients, and few logits, do not."""
    fits, too_long, longer = (gpu_rows(n, "qwen", TRAINED, H100) for n in (11645, 11646, 65536))
    assert fits.products == fits.packed == fits.sequences == 11645
    assert (too_long.products, too_long.sequences) == (11646, 11645)
    assert too_long.packed == longer.packed == longer.products == 4736
    assert [too_long.packed_rows(n) for n in (1, 4736, 4737, 10**6)] == [4736, 4736, 4737, 11645]
    assert gpu_rows(16384, "qwen", FROZEN).packed == 1024


def test_a_frozen_head_and_scoring_alone_take_short_chunks_on_a_gpu():
    for tokens, rows in {1000: 1000, 1024: 1024, 1025: 1024, 16384: 1024, 10**6: 1024}.items():
        assert gpu_rows(tokens, "qwen", FROZEN)[:2] == (rows, rows)
        assert gpu_rows(tokens, "qwen", SCORED)[:2] == (min(tokens, 2048),) * 2
    assert gpu_rows(10**6, "qwen", FROZEN, chunk_rows=4097)[:2] == (4097, 2048)
    assert gpu_rows(10**6, "qwen", SCORED, chunk_rows=100)[:2] == (100, 100)


@pytest.mark.parametrize("tokens", [65536, 10**6])
def test_a_long_batch_takes_less_memory_than_a_head_with_float32_sums_of_both_gradients(tokens):
    """TRL's: 4 (N H + V H) bytes with a trained head, 4 N H with a frozen one. Worked out by hand. N = 65,536 is the
    bar of this project."""
    vocab, width = HEADS["qwen"]
    trained, frozen = (
        gpu_rows(tokens, "qwen", wants).scratch_bytes(vocab, FLOAT, BFLOAT) for wants in (TRAINED, FROZEN)
    )
    sums = vocab * width * 4 - vocab * width * 2  # of dweight in float32, less what is returned
    assert trained + sums < 4 * (tokens * width + vocab * width)
    assert frozen < 4 * 65536 * width


@pytest.mark.parametrize("multiprocessors", [0, 108, 128, 132, 148])
@pytest.mark.parametrize("width", [64, 896, 1536, 2304, 3584, 4096, 8192])
def test_short_chunks_fill_their_waves(width, multiprocessors):
    rows = memory.short_product_rows(width, multiprocessors)
    assert rows % 128 == 0 and 2560 <= rows <= 5632
    if not multiprocessors:
        assert rows == 5632  # nothing is known of waves
        return

    def filled(rows):
        blocks = rows // 128 * -(-width // 256)
        return blocks / multiprocessors / -(-blocks // multiprocessors)

    assert filled(rows) >= max(filled(2560), filled(5632)) - 0.1


@pytest.mark.parametrize("count", [4096, 4097, 20480])
def test_a_token_more_than_a_row_chunk_holds_does_not_halve_the_products(count):
    """Types and shapes alone: one product chunk, and so no float32 sum of dweight beside the bfloat16 one."""
    hidden, weight = (torch.empty(n, 24, dtype=BFLOAT, device=META) for n in (count, 67))
    head = LMHead((hidden, weight, None), get_backend("torch"), wants=(True, True, False), logits_dtype=FLOAT)
    (chunk,) = head.chunks(None)
    pieces = list(chunk.row_chunks())
    assert chunk.rows == Rows(0, count) and len(pieces) == (1 if count == 4096 else -(-count // 2048))
    for rows in pieces:
        logits = head.logits(rows)
        assert head.row_gradients(chunk, rows, logits).dlogits.shape == logits.shape == (rows.count, 67)
    head.accumulate(chunk, torch.zeros(count, dtype=torch.int64, device=META))
    assert head.dweight.total.dtype == BFLOAT and head.gradients().tensors[1].dtype == BFLOAT


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, HALF, torch.float64])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_of_the_scratch_with_gaps_on_a_cpu(dtype, backend, masked, monkeypatch):
    """Rows a multiple of 4 KiB apart get a gap, which changes nothing: neither its memory nor the results count it."""
    if (backend, dtype) == ("cpu", torch.float64):
        backend = "auto"
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
        "grpo_kernels.engine.memory.allocate_rows", lambda *a: strides.append(allocate(*a)) or strides[-1]
    )
    found, exact = fused(batch, config, backend), reference(batch, config)
    assert {x.stride(0) for x in strides} == {2112} and {x.shape[1] for x in strides} == {vocab}
    monkeypatch.setattr(memory, "chunk_row_stride", lambda vocab_size, device: vocab_size)
    assert_within(errors(found, exact), errors(fused(batch, config, backend), exact), 1e-6)


def test_sums_are_in_float32_where_more_rows_follow_not_where_more_tokens_are_left_out():
    hidden, weight = (torch.empty(n, 24, dtype=BFLOAT, device=META) for n in (40, 67))
    head = LMHead(
        (hidden, weight, None), get_backend("torch"), wants=(False, True, False), logits_dtype=FLOAT, chunk_rows=10
    )
    for rows, expected in ((10, BFLOAT), (11, FLOAT)):
        chunks = list(head.chunks(torch.zeros(rows, dtype=torch.int64, device=META)))
        head.dweight.total = None
        head.accumulate(chunks[0], torch.zeros(40, dtype=torch.int64, device=META))
        assert head.dweight.total.dtype == expected


@pytest.mark.parametrize("count", [0, 1, 7, 23, 24])
@pytest.mark.parametrize("size", [1, 5, 12, 24])
def test_rows_are_split_into_full_parts_and_a_shorter_last_one(count, size):
    index = torch.arange(100, 100 + count)
    for rows in (Rows(3, 3 + count), Rows(3, 3 + count, index)):
        parts = list(rows.split(size))
        lengths = [part.count for part in parts]
        assert sum(lengths) == count and len(parts) == -(-count // size)
        assert all(length == size for length in lengths[:-1])
        assert [part.start for part in parts] == [3, *(part.stop for part in parts)][: len(parts)]
        if rows.index is not None and parts:
            assert torch.equal(torch.cat([part.index for part in parts]), index)


@pytest.fixture(autouse=True)
def nothing_kept():
    memory._last_on_cpu.clear()


def made_rows(x: Tensor) -> int:
    return x.untyped_storage().nbytes() // (x.stride(0) * x.element_size())


@pytest.mark.parametrize(("device", "expected"), [(CPU, [7, 7, 6]), (META, [9, 9, 2])])
def test_a_cpu_cuts_into_nearly_equal_parts_and_a_gpu_into_full_ones(device, expected):
    hidden, weight = (torch.empty(n, 24, device=device) for n in (20, 67))
    head = LMHead((hidden, weight, None), get_backend("torch"), wants=TRAINED, logits_dtype=FLOAT, chunk_rows=9)
    assert [chunk.rows.count for chunk in head.chunks(None)] == expected
    assert made_rows(head.logits(Rows(0, 2))) == expected[0]  # for the usual chunk at once


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_on_a_cpu_the_scratch_does_not_follow_the_number_of_active_tokens(level, monkeypatch):
    """Memory of the last call serves the next one: a longer scratch would be fresh from the system."""
    made, allocate = [], memory.allocate_rows
    monkeypatch.setattr(
        "grpo_kernels.engine.memory.allocate_rows", lambda rows, *a: made.append(rows) or allocate(rows, *a)
    )
    for active in (16, 18, 20):
        batch = off_policy(make_batch(sequences=2, length=21))  # 42 rows, 14 at a time
        batch.options["completion_mask"] = torch.arange(21).expand(2, 21) < active // 2
        fused(batch, gk.GRPOConfig(chunk_rows=20, importance_sampling_level=level))
    assert made == [20] * 3


@pytest.mark.parametrize("longest", [1, 100, 3000])
def test_whole_sequences_are_packed_into_short_chunks_unless_one_is_longer(longest, monkeypatch):
    sizes = memory.ChunkSizes(products=4000, logits=100, sequences=2000, packed=400)
    monkeypatch.setattr(lm_head, "chunk_sizes", lambda *given: sizes)
    hidden, weight = (torch.empty(n, 24, dtype=BFLOAT, device=META) for n in (4000, 67))
    head = LMHead((hidden, weight, None), get_backend("torch"), wants=TRAINED, logits_dtype=FLOAT)
    assert head.packed_rows(longest) == min(2000, max(longest, 400))
    chunks = head.chunks_of([Rows(0, 300), Rows(300, 700), Rows(700, 701)])
    assert all(chunk.in_place and chunk.logits_rows == chunk.rows.count for chunk in chunks)
    assert head.dweight.sums_in_float32  # of three chunks
    assert made_rows(head.logits(Rows(0, 300))) == 400  # at once what the longest needs


@pytest.fixture
def few_logits(monkeypatch):
    """Float32 logits of at most 3 rows at a time beside bfloat16 gradients, as on a GPU with many rows."""
    sizes = memory.chunk_sizes

    def fewer(num_rows, vocab, logits, grad, *rest):
        found = sizes(num_rows, vocab, logits, grad, *rest)
        return found._replace(logits=3) if logits.itemsize > grad.itemsize else found

    monkeypatch.setattr(lm_head, "chunk_sizes", fewer)


WAYS = {"fused": "token", "staged": "sequence", "recompute": "sequence"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("left_out", [False, True])
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
    for name in ("hidden", "weight"):
        error = relative(found.grads[name], exact.grads[name])
        assert error <= relative(eager.grads[name], exact.grads[name]), name
    assert relative(found.logps, exact.logps) < 1e-6
    assert_same_bits(found, fused(batch, config, backend))


def test_a_loss_of_tokens_has_product_chunks_of_several_row_chunks_too(monkeypatch, backend):
    """fused_policy_loss: the function gets the tokens of a row chunk, the products those of a product chunk."""
    monkeypatch.setattr(
        lm_head, "chunk_sizes", lambda *given: memory.ChunkSizes(products=20, logits=3, sequences=20, packed=20)
    )
    batch, calls = make_batch(2, sequences=6), []
    leaves = [x.detach().requires_grad_() for x in (batch.hidden, batch.weight)]

    def loss_fn(chunk):
        calls.append(len(chunk.logps))
        return -(chunk.logps.exp()).sum()

    of_products = []
    call_counter(monkeypatch, LMHead, "accumulate", of_products, lambda self, chunk, ids: chunk.rows.count)
    gk.fused_policy_loss(*leaves, batch.ids, loss_fn, backend=backend).backward()
    assert max(calls) <= 3 < max(of_products) <= 20 and sum(calls) == sum(of_products) == batch.ids.numel()
    others = [x.detach().requires_grad_() for x in leaves]
    logps, _ = gk.fused_logps(*others, batch.ids, backend=backend)
    (-logps.exp()).sum().backward()
    for mine, other in zip(leaves, others, strict=True):
        assert relative(mine.grad, other.grad) < 1e-6


@pytest.mark.parametrize("seed", range(6))
def test_nothing_beyond_a_row_of_gradients_reaches_a_product(seed, backend):
    """Vocabularies that no tile divides: what is left of float32 logits may be NaN as bfloat16."""
    batch = make_batch(seed, sequences=6, vocab=(101, 5003)[seed % 2]).head_as(BFLOAT)
    config = gk.GRPOConfig(logits_dtype=FLOAT, importance_sampling_level=("token", "sequence")[seed // 3])
    found = fused(batch, config, backend)
    assert all(x.isfinite().all() for x in found.grads.values())


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
    for name in ("hidden", "weight"):
        ours, eagers = (relative(result.grads[name], exact.grads[name]) for result in (found, eager))
        assert ours <= eagers, name
    assert (False in calls) == (has_amx and chunk_rows == 5)
    assert (True in calls) == (has_amx and chunk_rows is not None)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunk_rows", [None, 5])
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
    for name, gradient in found.grads.items():
        assert gradient.dtype == BFLOAT
        assert relative(gradient, exact.grads[name]) <= relative(eager.grads[name], exact.grads[name]), name
    for mine in (found.logps, logps):
        assert relative(mine, exact.logps) < 1e-6


def test_what_a_cpu_multiplies(monkeypatch):
    """As oneDNN says; a torch without it has loops alone. float16 never: torch's products of it are loops, too."""
    for available, says in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda says=says: says)
        found = [cpu_multiplies.__wrapped__(dtype) for dtype in (BFLOAT, HALF)]
        assert found == [available and says, False]

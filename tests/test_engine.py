"""The engine: what it computes and what it leaves out, gradients, autocast, determinism."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import (
    LOSSES,
    assert_close,
    assert_same_bits,
    call,
    call_counter,
    fused,
    leaves,
    loss_by,
    make_batch,
    off_policy,
    packed,
    reference,
    relative,
    tensors,
    whole_chunk,
)

import grpo_kernels as gk
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.reference import reference_loss_from_logits

pytestmark = pytest.mark.each_value
WIDTH, VOCAB = 24, 67  # no other size in these tests, so that a product is known by its shape


@pytest.fixture
def products(monkeypatch):
    """Rows of every matrix product by its kind: "logits", "dhidden", "dweight"."""
    calls: list[tuple[str, int]] = []

    def kind(m: int, k: int, n: int) -> tuple[str, int]:
        if (k, n) == (WIDTH, VOCAB):
            return "logits", m
        return ("dhidden", m) if (k, n) == (VOCAB, WIDTH) else ("dweight", k)

    call_counter(monkeypatch, torch, "mm", calls, lambda a, b, **_: kind(*a.shape, b.shape[1]))
    call_counter(monkeypatch, torch.Tensor, "addmm_", calls, lambda self, a, b: kind(*a.shape, b.shape[1]))
    return lambda: {name: sum(n for k, n in calls if k == name) for name in ("logits", "dhidden", "dweight")}


def half_inactive(**options):
    batch = make_batch(4, sequences=6, **options)
    batch.advantages[::2] = 0.0
    return batch


# --- rows and products ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "score_inactive"), [("token", True), ("token", False), ("sequence", True)])
def test_rows_without_a_gradient_get_no_second_and_third_product(products, level, score_inactive, backend):
    config = gk.GRPOConfig(importance_sampling_level=level, score_inactive=score_inactive, chunk_rows=6)
    batch = off_policy(half_inactive())
    batch.options["completion_mask"] = torch.ones(6, 6)
    batch.options["completion_mask"][1, 2:] = 0
    found = fused(batch, config, backend)
    assert products() == {"logits": 32 if score_inactive else 14, "dhidden": 14, "dweight": 14}
    # Every row computed: beta of nothing, so that all rows count as active.
    everything = dataclasses.replace(config, beta=1e-45, score_inactive=True)
    full = fused(batch.with_options(ref_logps=batch.options["old_logps"]), everything, backend)
    assert not full.grads["hidden"][::2].any() and not found.grads["hidden"][::2].any()
    if score_inactive:
        assert_close(found, reference(batch, config))
    for name in ("hidden", "weight"):
        assert torch.allclose(found.grads[name], full.grads[name], rtol=1e-6, atol=1e-8)
    active = batch.options["completion_mask"].bool() & (batch.advantages != 0)[:, None]
    assert torch.equal(found.logps != 0, active if not score_inactive else batch.options["completion_mask"].bool())


def test_a_single_masked_row_gets_no_product_and_may_hold_anything(products, backend):
    batch = make_batch(0).with_options(completion_mask=torch.ones(4, 6))
    batch.options["completion_mask"][0, 5] = 0
    batch.hidden[0, 5] = torch.nan
    found = fused(batch, backend=backend)
    assert products() == {"logits": 23, "dhidden": 23, "dweight": 23}
    assert all(x.isfinite().all() for x in found.grads.values())


def test_longer_sequences_than_a_chunk_cost_one_more_product(products, backend):
    config = gk.GRPOConfig(importance_sampling_level="sequence", chunk_rows=4)
    found = fused(off_policy(half_inactive()), config, backend)
    moving = int(found.grads["hidden"].any(-1).sum())  # clipped sequences are not computed again
    assert products() == {"logits": 36 + moving, "dhidden": moving, "dweight": moving} and 0 < moving < 36


@pytest.mark.parametrize(("frozen", "left"), [("weight", "dhidden"), ("hidden", "dweight")])
def test_a_frozen_input_costs_no_product(products, frozen, left, backend):
    batch = leaves(make_batch(0), frozen)
    call(batch, backend=backend).loss.backward()
    assert products() == {"logits": 24, "dhidden": 0, "dweight": 0} | {left: 24}
    assert getattr(batch, frozen).grad is None


@pytest.mark.parametrize("function", LOSSES[:3])
def test_without_gradients_there_are_logps_and_metrics_alone(products, function, backend):
    """Parameters require gradients in evaluation too; under no_grad nobody can ask for them."""
    batch = leaves(make_batch(0))
    with torch.no_grad():
        assert not loss_by(function, batch, backend).requires_grad
        assert products() == {"logits": 24, "dhidden": 0, "dweight": 0}


@pytest.mark.parametrize("rows", [1, 5, 100])
def test_chunk_rows_is_honoured(monkeypatch, rows, backend):
    sizes = []
    call_counter(monkeypatch, LMHead, "logits", sizes, lambda self, rows: rows.stop - rows.start)
    batch = make_batch(0)
    found = fused(batch, gk.GRPOConfig(chunk_rows=rows), backend)
    assert max(sizes) <= rows and len(sizes) == -(-24 // rows) and sum(sizes) == 24
    assert_close(found, reference(batch))


def test_a_chunk_that_memory_cannot_hold_names_chunk_rows(backend):
    """2^14 rows of 2^31 logits pass any address space; the expanded weight takes no memory."""
    hidden, weight, ids = torch.zeros(1, 2**14, 1), torch.zeros(1, 1).expand(2**31, 1), torch.zeros(1, 2**14).long()
    config = gk.GRPOConfig(chunk_rows=2**14)
    with pytest.raises(RuntimeError, match=r"GRPOConfig\.chunk_rows below 16384"):
        gk.fused_grpo_loss(hidden, weight, ids, torch.ones(1), config=config, backend=backend)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("rows", [4, 7, None])  # shorter than a sequence, longer, everything at once
@pytest.mark.parametrize("layout", ["batch", "packed"])
def test_static_shapes_read_nothing_back(monkeypatch, level, rows, layout, backend):
    """Every row is computed, padding poisoned, and the results are those of the rows that count."""
    batch = off_policy(make_batch(4, sequences=6, masked=True, bias=True))
    keep = batch.options["completion_mask"]
    for x in (batch.hidden, batch.options["old_logps"]):
        x[~keep] = torch.nan
    batch.advantages[1] = 0.0
    if layout == "packed":
        batch = packed(batch, torch.full((6,), 6))
        batch.options["completion_mask"] = keep.reshape(-1)
    config = gk.GRPOConfig(importance_sampling_level=level, chunk_rows=rows, beta=0.0)
    expected = fused(batch, config, backend)
    reads = []
    for name in ("nonzero", "tolist", "argsort"):
        call_counter(monkeypatch, torch.Tensor, name, reads, lambda *_, name=name, **__: name)
    found = fused(batch, dataclasses.replace(config, static_shapes=True), backend)
    assert reads == []
    assert_close(found, expected)
    assert torch.equal(found.logps == 0, expected.logps == 0)
    fused(batch, config, backend)
    assert reads


@pytest.mark.parametrize("want", [True, False])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_logits_in_place_are_not_copied(level, want, backend):
    """With padding and prompts without a gradient, no allocation comes near the size of the logits."""
    batch = off_policy(make_batch(4, sequences=6, masked=True, vocab=4096))
    batch.advantages[1] = 0.0
    leaf = (batch.hidden @ batch.weight.T).requires_grad_(want)
    logits = leaf * 1.0
    logits.detach()[~batch.options["completion_mask"]] = torch.nan
    config = gk.GRPOConfig(importance_sampling_level=level)
    backend = "cpu" if backend == "torch" else backend  # torch's intermediates are as large as the chunk
    given = {"config": config, "backend": backend, "inplace": True, **batch.options}
    before = logits.detach().clone()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        out = gk.grpo_loss_from_logits(logits, batch.ids, batch.advantages, **given)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest < logits.numel() * 4 / 8
    if not want:  # nothing is written where no gradient is wanted
        assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
        return
    out.loss.backward()
    rows = leaf.grad.any(-1)
    assert rows.any() and not rows[1].any() and not rows[~batch.options["completion_mask"]].any()
    exact, advantages = leaf.detach().double().requires_grad_(), batch.advantages.double()
    reference_loss_from_logits(exact, batch.ids, advantages, config=config, **batch.options).loss.backward()
    assert relative(leaf.grad, exact.grad) < 1e-5


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 5, 3, 2), (5, 1, 1, 70), (3, 4, 20, 1)])
def test_any_shape(sizes, backend):
    """Of sequences, tokens, hidden states and vocabulary; where one id is all there is, every gradient is 0."""
    sequences, length, width, vocab = sizes
    batch = make_batch(1, sequences=sequences, length=length, width=width, vocab=vocab, bias=True, masked=sequences > 1)
    batch = off_policy(batch, spread=0.02)
    for rows in (None, 2):
        config = gk.GRPOConfig(importance_sampling_level="token" if rows is None else "sequence", chunk_rows=rows)
        found, exact = tensors(fused(batch, config, backend)), tensors(reference(batch, config))
        for name, x in exact.items():
            torch.testing.assert_close(found[name].double(), x.double(), rtol=1e-5, atol=2e-6, msg=name)


# --- what belongs to a sequence or to a token -------------------------------------------------------------------------


def test_as_many_sequences_as_tokens(backend):
    """One value per sequence is one per token, unless a sequence is empty: then (S, 1) is one per sequence."""
    config = gk.GRPOConfig(aggregation="seq_mean", importance_sampling_level="sequence")
    batch = off_policy(make_batch(0, sequences=1))
    alone = packed(off_policy(make_batch(0, sequences=6, length=1)))
    alone.advantages = torch.randn(6)
    for advantages in (alone.advantages, alone.advantages[:, None]):
        given = dataclasses.replace(alone, advantages=advantages)
        assert_close(fused(given, config, backend), reference(given, config))
    with_empty = packed(batch)
    offsets = torch.tensor([0, 0, 4, 4, 4, 6, 6])  # lengths 0, 4, 0, 0, 2, 0
    per_sequence = torch.tensor([9.0, 1.0, 9.0, 9.0, -2.0, 9.0])
    with_empty = dataclasses.replace(with_empty, advantages=per_sequence[:, None]).with_options(cu_seqlens=offsets)
    found = fused(with_empty, config, backend)
    assert_close(found, reference(with_empty, config))
    by_token = dataclasses.replace(with_empty, advantages=torch.tensor([1.0] * 4 + [-2.0] * 2))
    two = by_token.with_options(cu_seqlens=torch.tensor([0, 4, 6]), normalizer=6)
    assert torch.equal(found.loss, fused(two, config, backend).loss)
    with pytest.raises(ValueError, match=r"advantages has shape \(6,\).*empty"):
        fused(dataclasses.replace(with_empty, advantages=per_sequence), config, backend)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_temperature_per_sequence_is_that_of_each_of_its_tokens(shape, is_packed, backend):
    """Four sequences of four tokens: a tensor (4,) would fit the tokens of each sequence too."""
    batch, lengths = make_batch(0, length=4), torch.full((4,), 4)
    if is_packed:
        lengths = torch.tensor([3, 0, 4, 2])
        batch = packed(batch, lengths)
    per_sequence = torch.tensor([0.5, 1.0, 1.7, 0.8])
    per_token, per_sequence = per_sequence.repeat_interleave(lengths).view(batch.ids.shape), per_sequence.view(shape)
    one, other = (gk.GRPOConfig(temperature=temperature) for temperature in (per_sequence, per_token))
    found, exact = fused(batch, one, backend), reference(batch, one)
    assert_same_bits(found, fused(batch, other, backend))
    assert_close(found, exact)
    assert_close(exact, reference(batch, other), 1e-12)
    for function in LOSSES[1:5]:
        if is_packed and function == "fused_logps":  # which does not know the sequences
            with pytest.raises(ValueError, match=r"temperature has shape \(4.*\); expected \(9,\)$"):
                loss_by(function, batch, backend, temperature=per_sequence)
        else:
            pair = (loss_by(function, batch, backend, temperature=t) for t in (per_sequence, per_token))
            assert torch.equal(*pair), function


# --- autograd ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "dtype"), [("token", torch.bfloat16), ("sequence", torch.float32)])
def test_two_calls_give_the_same_bits(level, dtype, backend):
    config = gk.GRPOConfig(importance_sampling_level=level, beta=0.1, entropy_coef=0.01, chunk_rows=7)
    batch = off_policy(make_batch(0, sequences=16, bias=True, masked=True, vocab=257)).head_as(dtype)
    assert_same_bits(fused(batch, config, backend), fused(batch, config, backend))


def test_autocast_takes_inputs_as_if_they_were_cast(backend):
    """Gradients of float32 weights are what the float32 sums hold, not rounded to bfloat16 and widened again."""
    batch, config = make_batch(0, bias=True), gk.GRPOConfig(chunk_rows=4)
    half = batch.head_as(torch.bfloat16)
    expected, logps = fused(half, config, backend), whole_chunk(half, backend=backend).logps
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fused(batch, config, backend)
        assert torch.equal(whole_chunk(batch, backend=backend).logps, logps)
    assert torch.equal(found.loss, expected.loss) and found.loss.dtype == torch.float32
    for name, x in found.grads.items():
        assert x.dtype == torch.float32 and relative(x, expected.grads[name].float()) <= 2**-8, name
        assert name == "hidden" or not torch.equal(x, x.bfloat16().float()), name
    exact = reference(half).grads["weight"]
    assert relative(found.grads["weight"], exact) <= 2 * relative(exact.bfloat16(), exact) + 2**-8

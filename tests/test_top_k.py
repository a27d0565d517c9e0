"""K ids per token: log-probabilities and their gradients, and the likeliest ids, against float64 in plain PyTorch; the
memory that they take, with a teacher too."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import Batch, call, gradients_of, leaves, make_batch, packed, relative
from teachers import MODES, VOCAB, config_of, exact_log_p, make_teacher
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.head import chunk_size, k_ids
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.integrations.lm_head import lm_head_inputs
from grpo_kernels.reference import top_k_divergence

K = 6
LOGITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap, scale, temperature": dict(logit_softcap=4.0, logit_scale=0.7, temperature=1.3),
    "a temperature per token": dict(temperature=torch.linspace(0.5, 2.0, 24).view(4, 6)),
}


def make_ids(batch: Batch, k: int = K) -> Tensor:
    """(..., k), of which some repeat."""
    ids = torch.randint(len(batch.weight), (*batch.ids.shape, k), generator=torch.Generator().manual_seed(3))
    ids[..., 0], ids[..., k // 2], ids[..., -1] = batch.ids, ids[..., 1], batch.ids
    return ids


def small_chunks(monkeypatch: Any, rows: int = 7) -> None:
    monkeypatch.setattr(LMHead, "rows_of", lambda self, holds, **_: rows)


# --- log-probabilities of K ids ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
def test_log_probabilities_of_k_ids(logits, backend, monkeypatch):
    """In chunks, with padding that holds anything, a gradient through the entropy too."""
    small_chunks(monkeypatch)
    batch = make_batch(2, bias=True, masked=True)
    mask, ids = batch.options["completion_mask"], make_ids(batch)
    outer = torch.randn(ids.shape, generator=torch.Generator().manual_seed(1))
    wide = leaves(batch.cast(torch.float64))
    log_p = exact_log_p(wide, **logits)
    expected = torch.where(mask[..., None], log_p.gather(-1, ids), 0.0)
    entropy = torch.where(mask, -(log_p.exp() * log_p).sum(-1), 0.0)
    wanted = gradients_of((expected * outer).sum() + (entropy * outer[..., 0]).sum(), wide)
    own = leaves(batch)
    own.hidden.data[~mask], ids[~mask], outer[~mask] = math.nan, -7, math.nan
    given = dict(lm_head_bias=own.bias, completion_mask=mask, backend=backend, **logits)
    found, of_tokens = gk.fused_logps(own.hidden, own.weight, ids, entropy=True, **given)
    assert found.shape == ids.shape and of_tokens.shape == mask.shape and found.dtype == torch.float32
    assert relative(found.detach(), expected.detach()) < 1e-6 and relative(of_tokens.detach(), entropy.detach()) < 1e-6
    leaf = [own.hidden, own.weight, own.bias]
    got = torch.autograd.grad([found, of_tokens], leaf, [outer, outer[..., 0]])
    for x, y in zip(got, wanted, strict=True):
        assert relative(x, y) < 2e-6
    with torch.no_grad():
        again, nothing = gk.fused_logps(own.hidden, own.weight, ids, **given)
    assert nothing is None and torch.equal(again, found)


def test_k_ids_in_float64_and_one_of_them(backend):
    """Of one id, as without the further dimension."""
    batch = leaves(make_batch(4, bias=True))
    options = dict(lm_head_bias=batch.bias, backend=backend)
    one, _ = gk.fused_logps(batch.hidden, batch.weight, batch.ids, **options)
    found, _ = gk.fused_logps(batch.hidden, batch.weight, batch.ids[..., None], **options)
    torch.testing.assert_close(found[..., 0], one, rtol=1e-6, atol=1e-6)
    for x, y in zip(gradients_of(found.sin().sum(), batch), gradients_of(one.sin().sum(), batch), strict=True):
        assert relative(x, y) < 2e-6
    if backend == "torch":
        wide, ids = leaves(batch.cast(torch.float64)), make_ids(batch)
        found, _ = gk.fused_logps(wide.hidden, wide.weight, ids, lm_head_bias=wide.bias)
        expected = exact_log_p(wide).gather(-1, ids)
        assert found.dtype == torch.float64 and relative(found.detach(), expected.detach()) < 1e-12
        for x, y in zip(gradients_of(found.sin().sum(), wide), gradients_of(expected.sin().sum(), wide), strict=True):
            assert relative(x, y) < 1e-12


def test_the_likeliest_id_of_logits_near_1e4(backend):
    """Where float32 numbers are 1e-3 apart: as that of one id, whose log-probability is 0 where it is certain."""
    batch = make_batch(6, bias=True)
    batch.hidden.mul_(1.5e3)
    own, options = leaves(batch), dict(lm_head_bias=batch.bias, backend=backend)
    if backend != "torch":  # which rounds after the scale and the temperature too; the interpreter rounds no scale
        options |= dict(logit_scale=0.75 if backend == "triton" else 0.7, temperature=0.9)
    ids, logps = gk.fused_top_k(own.hidden, own.weight, 1, **options)
    one, _ = gk.fused_logps(own.hidden, own.weight, ids[..., 0], **options)
    found, _ = gk.fused_logps(own.hidden, own.weight, ids, **options)
    assert one.abs().max() < 1e-9 and torch.equal(found, logps)
    torch.testing.assert_close(found[..., 0], one, rtol=0, atol=1e-9)
    grads = [torch.autograd.grad(x.sum(), own.hidden)[0] for x in (found, one)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_k_ids_in_16_bits(dtype, backend, monkeypatch):
    """At most the error of eager PyTorch in the same type; gradients under a loss scale, and under autocast."""
    batch = make_batch(3, bias=True).head_as(dtype)
    ids, scale = make_ids(batch, 20), 4096.0
    outer = torch.randn(ids.shape, generator=torch.Generator().manual_seed(1)) / ids.numel()
    wide, own, eager = leaves(batch.cast(torch.float64)), leaves(batch), leaves(batch)
    exact = gradients_of((exact_log_p(wide).gather(-1, ids) * outer).sum(), wide)
    plain = gradients_of((exact_log_p(eager).float().gather(-1, ids) * outer).sum(), eager)
    found, _ = gk.fused_logps(own.hidden, own.weight, ids, lm_head_bias=own.bias, backend=backend)
    got = gradients_of((found * outer).sum() * scale, own)
    for x, y, z in zip(got, plain, exact, strict=True):
        assert x.dtype == dtype and relative(x.double() / scale, z) < 1.2 * relative(y, z) + 1e-5
    if dtype == torch.float16:  # gradients of logits are that too; far more than it holds goes to one logit
        monkeypatch.setattr("grpo_kernels.head.chunk_size.cpu_multiplies", lambda dtype: True)
        many = batch.ids[..., None].expand(-1, -1, 20_000)
        found, _ = gk.fused_logps(own.hidden, own.weight, many, lm_head_bias=own.bias, backend=backend)
        assert all(x.isfinite().all() and x.any() for x in gradients_of(found.mean(), own))
    else:
        narrow = leaves(batch.head_as(torch.float32))
        with torch.autocast("cpu", dtype=dtype):
            found, _ = gk.fused_logps(narrow.hidden, narrow.weight, ids, lm_head_bias=narrow.bias, backend=backend)
        assert found.dtype == torch.float32
        assert relative(gradients_of((found * outer).sum(), narrow)[0], exact[0]) < 1e-2


def test_k_ids_of_packed_tokens_frozen_heads_and_none():
    batch = packed(make_batch(2, masked=True))
    ids = make_ids(batch)
    own = leaves(batch, "weight")
    found, _ = gk.fused_logps(own.hidden, own.weight, ids)
    found.sum().backward()
    wide = leaves(batch.cast(torch.float64), "weight")
    exact_log_p(wide).gather(-1, ids).sum().backward()
    assert own.weight.grad is None and relative(own.hidden.grad, wide.hidden.grad) < 2e-6
    empty = torch.zeros(0, 24, requires_grad=True)
    found, entropy = gk.fused_logps(empty, batch.weight, ids[:0], entropy=True)
    (found.sum() + entropy.sum()).backward()
    assert found.shape == (0, K) and empty.grad.shape == (0, 24)
    assert [x.shape for x in gk.fused_top_k(empty, batch.weight, 3)] == [(0, 3)] * 2


def test_products_of_k_ids(monkeypatch):
    """One forward, three with the backward, as of one id."""
    batch, products = leaves(make_batch(2)), []
    for name in ("mm", "addmm"):
        original = getattr(torch, name)

        def spy(*given: Any, _original: Any = original, **named: Any) -> Tensor:
            products.append(given[-1].shape)
            return _original(*given, **named)

        monkeypatch.setattr(torch, name, spy)
    counts = []
    for ids in (batch.ids, make_ids(batch)):
        found, _ = gk.fused_logps(batch.hidden, batch.weight, ids, backend="cpu")
        counts.append(len(products))
        found.sum().backward()
        counts.append(len(products))
        products.clear()
    assert counts == [1, 4, 1, 4]


def test_gradients_of_infinite_logits_and_equal_calls():
    """An excluded id has -inf and no gradient; equal calls have equal bits, repeated ids or not."""
    batch = make_batch(2, bias=True)
    batch.bias[5] = -math.inf
    own, ids = leaves(batch), make_ids(batch) % 5
    ids[..., 2] = 5
    outer = torch.ones(ids.shape)
    outer[..., 2] = 0.0
    results = []
    for _ in range(2):
        found, _ = gk.fused_logps(own.hidden, own.weight, ids, lm_head_bias=own.bias)
        assert (found[..., 2] == -math.inf).all() and found[..., :2].isfinite().all()
        results.append(torch.autograd.grad(found, [own.hidden, own.weight], outer))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y) and x.isfinite().all() and x.any()


# --- the likeliest ids ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 33, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_top_k_of_a_matrix(vocab, dtype, monkeypatch):
    """As a stable sort has them, ties by column, with zeros of both signs and infinities, in pieces."""
    monkeypatch.setitem(k_ids.COPIED_ELEMENTS, "cpu", 1000)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(17, vocab, generator=g)
    for rows in (x * 2, (x * 2).round(), (x > 1.5) * 1.0):
        rows[3], rows[4, ::2], rows[5, : vocab // 2] = -math.inf, -0.0, -math.inf
        for bias in (None, torch.randn(vocab, generator=g).round().to(torch.promote_types(dtype, torch.float32))):
            u = rows.to(dtype).to(torch.promote_types(dtype, torch.float32)) + (0.0 if bias is None else bias)
            order = u.sort(dim=1, descending=True, stable=True).indices
            for k in {1, min(vocab, 5), min(vocab, 40), vocab}:
                assert torch.equal(k_ids.top_k(rows.to(dtype), bias, k), order[:, :k])


@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
def test_the_likeliest_ids(logits, backend, monkeypatch):
    small_chunks(monkeypatch)
    batch = make_batch(2, bias=True, masked=True, vocab=301)
    batch.weight[7:200:3], batch.bias[7:200:3] = 0.0, 3.0  # ties
    mask, own = batch.options["completion_mask"], leaves(batch)
    own.hidden.data[~mask] = math.nan
    for k in (1, 40, 301):
        ids, logps = gk.fused_top_k(
            own.hidden, own.weight, k, lm_head_bias=own.bias, completion_mask=mask, backend=backend, **logits
        )
        assert ids.shape == logps.shape == (4, 6, k) and ids.dtype == torch.int64 and not logps.requires_grad
        assert (ids[~mask] == -1).all() and (logps[~mask] == 0).all()
        log_p = exact_log_p(batch.cast(torch.float64), **logits)
        expected = log_p.topk(k, -1).values
        assert relative(logps[mask], expected[mask]) < 1e-6
        assert (log_p[mask].gather(-1, ids[mask]) - expected[mask]).abs().max() < 1e-5
        for row in ids[mask]:
            tied = row[torch.isin(row, torch.arange(7, 200, 3))]
            assert (tied.diff() > 0).all() and len(tied) == {1: len(tied), 40: len(tied), 301: 65}[k]
        again, _ = gk.fused_logps(
            own.hidden, own.weight, ids, lm_head_bias=own.bias, completion_mask=mask, backend=backend, **logits
        )
        assert torch.equal(again, logps)


def test_top_k_makes_a_teacher():
    """Of another model, masked or not: the ids and log-probabilities that a TopKTeacher takes."""
    batch, other = make_batch(2, masked=True), make_batch(5)
    mask = batch.options["completion_mask"]
    teacher = gk.TopKTeacher(*gk.fused_top_k(other.hidden, other.weight, 9, completion_mask=mask))
    assert gk.fused_distillation_loss(batch.hidden, batch.weight, teacher, completion_mask=mask).loss.isfinite()


@pytest.mark.parametrize("where", ["autocast", "float16", "no_grad", "packed", "no tokens", "LoRA"])
def test_where_ids_are_asked_for(where):
    """The likeliest ids, their log-probabilities and a teacher on them, against autograd in float64; float16 under a
    loss scale."""
    batch, of_teacher = make_batch(2), make_teacher((4, 6))
    kind = torch.float16 if where == "float16" else torch.float32
    hidden, weight, other = (x.to(kind) for x in (batch.hidden, batch.weight, of_teacher.hidden))
    if where in ("packed", "no tokens"):
        hidden, other = (x.flatten(0, 1)[: None if where == "packed" else 0] for x in (hidden, other))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    trained, z, of_head = [hidden, weight], hidden.double() @ weight.double().T, (hidden, weight)
    if where == "LoRA":
        peft = pytest.importorskip("peft", reason="peft is not installed: run make test")
        layer = torch.nn.Linear(24, VOCAB, bias=False)
        layer = peft.tuners.lora.Linear(layer, "default", peft.LoraConfig(), r=4, init_lora_weights=False)
        layer.base_layer.requires_grad_(False)
        trained, of_head = [x for x in layer.parameters() if x.requires_grad], lm_head_inputs(layer, hidden)[:2]
        z = hidden.double() @ (layer.base_layer.weight.double() + layer.get_delta_weight("default").double()).T
    contexts = {"autocast": torch.autocast("cpu", torch.bfloat16), "no_grad": torch.no_grad()}
    offsets = {"cu_seqlens": torch.tensor([0, len(hidden)])} if hidden.dim() == 2 else {}
    teacher = gk.Teacher(other, of_teacher.weight.to(kind), of_teacher.bias.to(kind), top_k=K)
    with contexts.get(where, nullcontext()):
        ids, logps = gk.fused_top_k(*of_head, K)
        again, _ = gk.fused_logps(*of_head, ids)
        out = gk.fused_distillation_loss(*of_head, teacher, **offsets)
    assert ids.shape == again.shape == (*hidden.shape[:-1], K) and torch.equal(again.detach(), logps)
    log_p, log_q = z.log_softmax(-1), (other.double() @ of_teacher.weight.double().T + of_teacher.bias).log_softmax(-1)
    distance = top_k_divergence(config_of("reverse_kl"), log_p, ids, log_q.gather(-1, ids), "tail")
    exact = log_p.gather(-1, ids).sin().sum() + distance.sum() / max(distance.numel(), 1)
    loss, limit = again.sin().sum() + out.loss, 2e-2 if where in ("autocast", "float16") else 2e-5
    assert relative(loss.detach(), exact.detach(), 1.0) < limit
    if where == "no_grad":
        assert not loss.requires_grad
        return
    scale = 4096.0 if where == "float16" else 1.0
    for x, y in zip(torch.autograd.grad(loss * scale, trained), torch.autograd.grad(exact, trained), strict=True):
        assert x.shape == y.shape and (
            relative(x.double() / scale, y) < limit or (where == "no tokens" and not x.any())
        )


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, *MODES])
def test_one_chunk_of_logits_is_all_that_has_a_vocabulary(mode, monkeypatch):
    """With a teacher no allocation is as large as a second chunk, and all that live at once are little more than one;
    mode None: K log-probabilities."""
    tokens, vocab, rows, k = 64, 20_000, 16, 20
    batch = make_batch(1, sequences=4, length=tokens // 4, vocab=vocab)
    teacher = gk.Teacher(batch.hidden, batch.weight.flip(0), top_k=k, mode=mode or "tail")
    own, config = leaves(batch, "weight"), gk.GRPOConfig(distill_coef=1.0, chunk_rows=rows)
    monkeypatch.setattr(chunk_size, "_last_on_cpu", [])  # the chunk of an earlier call
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        if mode is None:
            ids = torch.arange(tokens * k).view(*batch.ids.shape, k) % vocab
            gk.fused_logps(own.hidden, own.weight, ids, backend="cpu")[0].sum().backward()
            rows = tokens  # which are one chunk
        else:
            call(own.with_options(teacher=teacher), config, "cpu").loss.backward()
    sizes = [event.self_cpu_memory_usage for event in profile.events()]
    chunk = rows * (vocab + 64) * 4
    assert sum(size > chunk / 2 for size in sizes) == 1 and max(sizes) <= chunk + 2**16
    held = list(itertools.accumulate(event.self_cpu_memory_usage for event in profile.events()))
    assert max(held) <= 1.25 * chunk + 64 * tokens * k

"""Log-probabilities and gradients without logits, or from logits that are read once: as exact as the plain way.

`products`: with the softmax in their epilogue, that a GPU's table says to pay; without one exponentials come from rows.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import call, call_counter, fused, make_batch, off_policy, relative, serve_only, true_logps
from test_precision import CONFIGS, assert_as_exact_as_eager, half_batch

import grpo_kernels as gk
from grpo_kernels.head import loop
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.reference import reference_loss_from_logits

HALF = (torch.bfloat16, torch.float16)
KINDS = ("Chunk", "Exponentials", "FusedExponentials")


@pytest.fixture(params=["triton", "cuda"])
def backend(request) -> str:
    return request.param


@pytest.fixture(params=[(), ("logp", "exponentials")], ids=["rows", "fused"])
def products(request, backend, monkeypatch) -> tuple[str, ...]:
    serve_only(monkeypatch, backend, request.param)
    return request.param


@pytest.fixture
def kinds(monkeypatch) -> list[str]:
    """The kinds of the chunks that had a gradient."""
    found: list[str] = []
    for name in KINDS:
        call_counter(monkeypatch, getattr(loop, name), "backward", found, lambda self, *_: type(self).__name__)
    return found


@pytest.mark.parametrize("name", ["grpo", "cispo"])  # those without a gradient through the entropy
def test_bfloat16_is_as_exact_as_eager_with_float32_softmax(name, backend, products, kinds):
    config = dataclasses.replace(CONFIGS[name], logits_dtype=torch.float32)  # what a GPU has by default
    assert_as_exact_as_eager(config, torch.bfloat16, backend, seeds=4)
    # On a CPU rows of 1,003 exponentials do not begin on 16 bytes, as CUDA's product needs it.
    assert set(kinds) == {"FusedExponentials" if products and backend == "triton" else "Exponentials"}


@pytest.mark.parametrize("chunk_rows", [8, 64])
def test_dhidden_is_rounded_once(backend, chunk_rows):
    """However many the chunks: as far from float64 as one product of dlogits in 16 bits, with those at sampled ids
    exact, that is rounded once."""
    config = gk.GRPOConfig(surrogate="reinforce", logits_dtype=torch.float32, chunk_rows=chunk_rows)
    found, ideal = [], []
    for seed in range(2):
        batch = half_batch(torch.bfloat16, config, seed)
        weight, at_id = batch.weight.double(), batch.ids[..., None]
        logits = (batch.hidden.double() @ weight.T).requires_grad_()
        exact_loss = reference_loss_from_logits(logits, batch.ids, batch.advantages.double(), config=config)
        (dlogits,) = torch.autograd.grad(exact_loss.loss, logits)
        rounded = dlogits.bfloat16().double().scatter(-1, at_id, dlogits.gather(-1, at_id))
        exact = dlogits @ weight
        ideal.append(relative((rounded @ weight).bfloat16(), exact))
        given = dataclasses.replace(batch, options={})
        found.append(relative(fused(given, config, backend).grads["hidden"], exact))
    assert sum(found) <= 1.02 * sum(ideal), (found, ideal)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("entropy", [True, False])
def test_logps_without_logits(monkeypatch, products, dtype, entropy, backend):
    """Under no_grad there is no scratch, and no rounding of float32 logits: 2e-5."""
    logits, holds, config = [], [], gk.GRPOConfig(temperature=0.7)
    call_counter(monkeypatch, LMHead, "logits", logits, lambda *_: 1)
    call_counter(monkeypatch, LMHead, "chunks", holds, lambda self, index, holds="logits": holds)
    batch = half_batch(dtype, config)
    with torch.no_grad():
        found, h = gk.fused_logps(
            batch.hidden, batch.weight, batch.ids, temperature=0.7, entropy=entropy, backend=backend,
            logits_dtype=torch.float32,  # what a GPU has by default
        )  # fmt: skip
    exact, exact_entropy = true_logps(batch, config)
    assert bool(logits) == (not products) and set(holds) == {"statistics" if products else "logits"}
    if products:
        assert (found - exact).abs().max() <= 2e-5
        assert h is None if not entropy else (h - exact_entropy).abs().max() <= 2e-5


def test_strided_hidden_states_and_bias(products, backend):
    batch, found = make_batch(0, bias=True, vocab=72).head_as(torch.bfloat16), []
    for strided in (False, True):
        hidden = torch.stack([batch.hidden, batch.hidden], -1)[..., 0] if strided else batch.hidden
        wide = torch.stack([batch.bias, batch.bias + 1], -1).requires_grad_()
        bias = wide[:, 0] if strided else wide[:, 0].contiguous()
        out = call(dataclasses.replace(batch, hidden=hidden, bias=bias), backend=backend)
        out.loss.backward()
        with torch.no_grad():
            logps, _ = gk.fused_logps(hidden, batch.weight, batch.ids, lm_head_bias=bias, backend=backend)
        found.append((out.logps, wide.grad, logps))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.bfloat16, {"entropy_coef": 0.1}), (torch.bfloat16, {"sparse_backward": 2.0**-5}), (torch.float16, {})],
)
def test_what_needs_logits_has_them(kinds, products, dtype, options, backend):
    """A gradient through the entropy, pairs, and float16, which cannot hold exponentials."""
    found = fused(make_batch(0).head_as(dtype), gk.GRPOConfig(**options), backend)
    assert set(kinds) == {"Chunk"} and all(x.any() for x in found.grads.values())


@pytest.mark.parametrize("static", [False, True])
def test_padding_may_hold_anything(products, static, kinds, backend):
    batch = off_policy(make_batch(3, masked=True, bias=True, vocab=72)).head_as(torch.bfloat16)
    config = gk.GRPOConfig(static_shapes=static, chunk_rows=7, logits_dtype=torch.float32)
    expected = fused(batch, config, backend)
    batch.hidden[~batch.options["completion_mask"]] = torch.nan
    found = fused(batch, config, backend)
    for name, x in expected.grads.items():
        assert torch.equal(found.grads[name], x) and x.any(), name
    assert torch.equal(found.logps, expected.logps)
    assert set(kinds) == {"FusedExponentials" if products else "Exponentials"}

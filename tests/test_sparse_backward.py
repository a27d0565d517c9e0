"""sparse_backward through the public functions: right in expectation, exact where it says so, refused by name.

test_vocab_parallel.py has it on slices of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from helpers import (
    LEAVES,
    LOSSES,
    Batch,
    Result,
    assert_close,
    assert_within,
    call,
    errors,
    fused,
    leaves,
    loss_by,
    make_batch,
    make_sampling_mask,
    off_policy,
    packed,
    reference,
    use_mask_path,
)
from model_calls import ADVANTAGES
from model_calls import batch as model_batch
from option_space import POINTS, build, choose
from test_peft import adapted

import grpo_kernels as gk
from grpo_kernels.head import mask_paths, sparse
from grpo_kernels.head import shared as engine_shared
from grpo_kernels.integrations.transformers import fused_forward
from grpo_kernels.kernels.operations import SparseRule

pytestmark = pytest.mark.each_value
BACKENDS = ("cpu", "torch")
ALL_BACKENDS = (*BACKENDS, "triton", "cuda")  # for a few: interpreter and emulator take long
TINY = 1e-12  # every entry is kept as it is
THETA = 2.0**-5


def room(monkeypatch: Any, logits_per_pair: float) -> None:
    """Tokens of V / logits_per_pair entries and more take dense products."""
    monkeypatch.setattr(mask_paths, "DENSE_LOGITS_PER_GATHERED_ID", dict.fromkeys(("cpu", "cuda"), logits_per_pair))


@pytest.fixture(autouse=True)
def _room_for_every_entry(monkeypatch):
    room(monkeypatch, 1)


def with_theta(config: gk.GRPOConfig, theta: float | None) -> gk.GRPOConfig:
    return dataclasses.replace(config, sparse_backward=theta)


def seeds(monkeypatch: Any, count: int):
    """Other random numbers each time, as other places in the batch would have."""
    for seed in range(count):
        monkeypatch.setattr(
            sparse, "SparseRule", lambda theta, first, seed=seed: SparseRule(theta, first + 1009 * seed)
        )
        yield seed


# --- in expectation ---------------------------------------------------------------------------------------------------

WALK = [(point, i) for i, point in enumerate(dict.fromkeys(p[:2] for p in POINTS))]


@pytest.mark.parametrize(("point", "turn"), WALK, ids=["-".join(p) for p, _ in WALK])
def test_the_mean_is_the_exact_gradient(point, turn, monkeypatch):
    """Every surrogate at each level, another KL estimator, aggregation and set of options each time: the error of the
    mean over 32 calls is that of a call over its square root."""
    of_point = [p for p in POINTS if p[:2] == point]
    chosen = choose(of_point[11 * turn % len(of_point)], 0) | {"bias": True, "sampling_mask": "none"}
    batch, config = build(of_point[11 * turn % len(of_point)], chosen)
    exact, calls = reference(batch, config).grads, 32
    config = with_theta(dataclasses.replace(config, chunk_rows=(7, None)[turn % 2]), 0.2)
    found = [fused(batch, config, BACKENDS[turn // 2 % 2]).grads for _ in seeds(monkeypatch, calls)]
    for name, gradient in exact.items():
        errors_ = torch.stack([x[name].double() for x in found]) - gradient
        assert 1e-3 * gradient.norm() < errors_.square().flatten(1).sum(1).mean().sqrt(), name
        # The sum over the vocabulary hardly varies, so that a bias shows.
        for e in (errors_, errors_.sum(1))[: 1 + (name == "bias")]:
            size = e.reshape(calls, -1).norm(dim=1).square().mean().sqrt()
            assert e.mean(0).norm() <= (1.5 if e is errors_ else 4) * size / calls**0.5 + 2e-6 * gradient.norm(), name


# --- exact ------------------------------------------------------------------------------------------------------------


def rich_batch(**options: Any) -> Batch:
    batch = off_policy(make_batch(2, sequences=6, bias=True, masked=True, **options))
    batch.advantages[1] = 0.0
    return batch


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the batch, of the configuration
    "a clip": ({}, {}),
    "KL, entropy bonus, in chunks": ({}, dict(beta=0.1, entropy_coef=0.05, chunk_rows=5)),
    "softcap, scale, temperature": ({}, dict(logit_softcap=3.0, logit_scale=0.7, temperature=1.3, entropy_coef=0.02)),
    "whole sequences": ({}, dict(importance_sampling_level="sequence", chunk_rows=12)),
    "sequences beyond a chunk": ({}, dict(importance_sampling_level="sequence", chunk_rows=3)),
    "a temperature per token": ({}, dict(temperature=torch.linspace(0.5, 2.0, 36).view(6, 6))),
    "tokens with a gradient alone": ({}, dict(score_inactive=False, chunk_rows=5)),
    "other strides": ({"strided": True}, dict(chunk_rows=8)),
    "packed": ({"packed": True}, dict(importance_sampling_level="sequence", chunk_rows=9)),
    "sampling masks, by gathers": ({"mask": "gathers"}, dict(chunk_rows=8)),
    "sampling masks, dense and by gathers": ({"mask": "both"}, dict(beta=0.1, chunk_rows=8)),
    "float64": ({"dtype": torch.float64}, dict(entropy_coef=0.02)),
}


def case(name: str) -> tuple[Batch, gk.GRPOConfig]:
    options, config = CASES[name]
    batch = rich_batch()
    if "mask" in options:
        batch = batch.with_options(sampling_mask=make_sampling_mask((6, 6), 67))
    if options.get("strided"):
        batch.hidden = batch.hidden.transpose(0, 1).contiguous().transpose(0, 1)
    if options.get("packed"):
        batch = packed(batch)
    return batch.cast(options.get("dtype", torch.float32)), gk.GRPOConfig(**config)


def same_forward(found: Result, exact: Result, tolerance: float = 0.0) -> None:
    """Of everything but the gradients; bits, where there is no tolerance."""
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    for name in ("loss", "logps", "entropy"):
        close(getattr(found, name), getattr(exact, name), msg=name)
    assert found.metrics.keys() - exact.metrics.keys() == {"sparse/kept", "sparse/dense"}
    for name, x in exact.metrics.items():
        close(found.metrics[name], x, msg=name, equal_nan=name == "sampling_mask/kept_mass")


INTERPRETED = ("KL, entropy bonus, in chunks", "softcap, scale, temperature")


@pytest.mark.parametrize(
    ("backend", "name"),
    [*((backend, name) for backend in BACKENDS for name in CASES), *(("triton", name) for name in INTERPRETED)],
)
def test_with_room_for_every_entry_or_none_gradients_are_exact(backend, name, monkeypatch):
    batch, config = case(name)
    backend = "torch" if batch.hidden.dtype == torch.float64 else backend
    # As on a GPU: the pairs of many row chunks are counted at once.
    monkeypatch.setattr(sparse, "reads_block_host", lambda device: backend == "torch")
    path = CASES[name][0].get("mask", "none")
    use_mask_path(monkeypatch, path, 67)
    exact = fused(batch, config, backend)
    room(monkeypatch, {"none": 1, "gathers": 0.5, "both": 8}[path])
    found = fused(batch, with_theta(config, TINY), backend)
    same_forward(found, exact)
    assert_close(dataclasses.replace(found, metrics=exact.metrics), exact, 5e-6)
    if path == "none":
        assert found.metrics["sparse/dense"] == 0 and 60 < found.metrics["sparse/kept"] <= 67
        room(monkeypatch, 1000)
        none = fused(batch, with_theta(config, THETA), backend)
        same_forward(none, exact)
        assert_close(dataclasses.replace(none, metrics=exact.metrics), exact, 5e-6)
        assert none.metrics["sparse/dense"] == 1 and none.metrics["sparse/kept"] == 0
    again = [fused(batch, with_theta(config, THETA), backend) for _ in range(2)]
    same_forward(again[0], exact)
    for leaf, gradient in again[0].grads.items():
        assert torch.equal(gradient, again[1].grads[leaf])


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "logits_dtype"), [(torch.bfloat16, None), (torch.float16, None), (torch.float16, torch.float16)]
)
def test_16_bits(dtype, logits_dtype, backend, monkeypatch):
    """Pairs are float32, beside float16 gradients that hold a scale; a loss scale reaches them in the backward."""
    if backend in ("cuda", "triton"):  # whose default it is on a GPU
        logits_dtype = logits_dtype or torch.float32
    batch, config = rich_batch().head_as(dtype), gk.GRPOConfig(logits_dtype=logits_dtype, chunk_rows=8)
    exact = reference(batch, config)
    for theta, logits_per_pair in ((TINY, 1), (TINY, 2), (THETA, 1000)):
        room(monkeypatch, logits_per_pair)
        found, plain = fused(batch, with_theta(config, theta), backend), fused(batch, config, backend)
        # On GPU backends the exact step takes products that have the softmax in their epilogue.
        same_forward(found, plain, 1e-5 if backend in ("cuda", "triton") else 0.0)
        assert_within(errors(found, exact), errors(plain, exact), 1e-6, 1.5, of="grad")
    scaled, exact = leaves(batch), exact.grads["hidden"]
    (call(scaled, with_theta(config, TINY), backend).loss * 65536).backward()
    assert (scaled.hidden.grad.double() / 65536 - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_tokens_with_many_entries_take_products(backend, monkeypatch):
    """Their rows of hidden's gradient are exact, those of the others as if there were room."""
    batch = make_batch(5, sequences=3, length=8)
    batch.hidden[:2] *= 3.0  # certain tokens
    config = gk.GRPOConfig(sparse_backward=2.0**-7, chunk_rows=5)
    exact, roomy = fused(batch, with_theta(config, None), backend), fused(batch, config, backend)
    room(monkeypatch, 67 / 20)
    found = fused(batch, config, backend)
    share = found.metrics["sparse/dense"].item()
    assert 0.1 < share < 0.9
    rows = [x.grads["hidden"].view(24, -1) for x in (found, exact, roomy)]
    of_exact, of_roomy = ((rows[0] - x).norm(dim=1) <= 2e-6 * rows[1].norm(dim=1) for x in rows[1:])
    assert (of_exact | of_roomy).all() and of_exact.sum() >= round(24 * share)
    assert not of_exact.all()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_inputs(backend, frozen):
    batch, config = rich_batch(), gk.GRPOConfig(sparse_backward=THETA)
    all_of_them, own = fused(batch, config, backend), leaves(batch, frozen, "bias")
    call(own, config, backend).loss.backward()
    for name, leaf in (("hidden", own.hidden), ("weight", own.weight)):
        assert leaf.grad is None if name == frozen else torch.equal(leaf.grad, all_of_them.grads[name])


# --- accumulate_into --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_pairs_reach_the_buffer(backend, dtype, monkeypatch):
    batch, logits_dtype = rich_batch().head_as(dtype), torch.float16 if dtype == torch.float16 else None
    for logits_per_pair in (1, 67 / 20, 1000):
        room(monkeypatch, logits_per_pair)
        config = gk.GRPOConfig(sparse_backward=THETA, chunk_rows=8, logits_dtype=logits_dtype)
        plain, total = fused(batch, config, backend), torch.full((67, 24), 0.5)
        own = leaves(batch, "bias")
        out = call(own, config, backend, accumulate_into=total)
        assert (total == 0.5).all()
        for times in (1, 2):
            (out.loss * -3.0).backward(retain_graph=True)
            share = -3.0 * times * plain.grads["weight"].float()
            rounding = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
            assert torch.allclose(total - 0.5, share, rtol=rounding, atol=rounding * share.abs().max().item())
        assert own.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pairs_of_much_memory_go_in_portions(dtype, monkeypatch):
    """Before those tokens that take products, and with the same pairs as all at once."""
    batch, sizes = rich_batch().head_as(dtype), []
    room(monkeypatch, 67 / 20)
    config = gk.GRPOConfig(sparse_backward=THETA, chunk_rows=5)
    monkeypatch.setattr(sparse, "_PAIR_BYTES", 10**6)  # a portion for each chunk
    multiply = sparse.SparsePairs._multiply
    monkeypatch.setattr(sparse.SparsePairs, "_multiply", lambda self: (sizes.append(self._num_waiting), multiply(self)))
    portions = fused(batch, config, "torch")
    assert len(sizes) >= 3 and 0 < portions.metrics["sparse/dense"] < 1
    total = sum(sizes)
    sizes.clear()
    monkeypatch.setattr(sparse, "_PAIR_BYTES", 0)
    at_once = fused(batch, config, "torch")
    assert sizes == [total]
    assert torch.equal(portions.logps, at_once.logps) and portions.metrics == at_once.metrics
    assert torch.equal(portions.grads["hidden"], at_once.grads["hidden"])
    assert_close(portions, at_once, 1e-6 if dtype == torch.float32 else 3e-3)


# --- other functions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_every_function_rounds_the_same_entries(backend):
    batch, expected = make_batch(3, bias=True, masked=True), {}
    for function in LOSSES[:4]:
        own = leaves(batch)
        loss_by(function, own, backend, divisor=15.0, sparse_backward=THETA).backward()
        for name in LEAVES:
            gradient = getattr(own, name).grad
            exact = expected.setdefault(name, gradient)
            assert torch.allclose(gradient, exact, rtol=1e-5, atol=1e-6 * exact.abs().max().item())


def test_a_compiled_function_returns_the_same():
    batch, config = make_batch(1), gk.GRPOConfig(sparse_backward=THETA)
    own = leaves(batch)

    def step(hidden, weight):
        logps, _ = gk.fused_logps(hidden, weight, batch.ids, sparse_backward=THETA)
        return gk.fused_grpo_loss(hidden, weight, batch.ids, batch.advantages, config=config).loss + logps.sum()

    given = own.hidden, own.weight
    expected = torch.autograd.grad(step(*given), given)
    found = torch.autograd.grad(torch.compile(step, backend="aot_eager", fullgraph=True)(*given), given)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


# --- trainers ---------------------------------------------------------------------------------------------------------


def test_liger_and_the_trainer_pass_it_on():
    from grpo_kernels.integrations.liger import LigerFusedLinearGRPOLoss
    from grpo_kernels.trainer.arguments import TrainArguments

    assert LigerFusedLinearGRPOLoss(sparse_backward=THETA)._config().sparse_backward == THETA
    assert LigerFusedLinearGRPOLoss()._config().sparse_backward is None
    given = dict(reward_funcs=["x"], model_name_or_path=None, loss_options={"sparse_backward": THETA})
    assert TrainArguments(**given).loss_config().sparse_backward == THETA
    with pytest.raises(ValueError, match=r"sparse_backward=0.03125 has no effect without loss=fused"):
        TrainArguments(**given, loss="eager").check(1)
    with pytest.raises(ValueError, match=r"sparse_backward=2.0; expected a finite number in"):
        TrainArguments(**given | {"loss_options": {"sparse_backward": 2.0}}).check(1)


def test_an_adapter_on_the_head():
    """Its weight is longer, and only in part trained."""
    peft = pytest.importorskip("peft", reason="peft is not installed: run make test")
    found = []
    for theta in (None, TINY, 0.1):
        model = adapted(peft, torch.float32, target_modules=["lm_head"])
        config = gk.GRPOConfig(sparse_backward=theta)
        fused_forward(model, **model_batch(), advantages=ADVANTAGES, config=config).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    exact, tiny, rounded = found
    for name, gradient in exact.items():
        assert torch.allclose(tiny[name], gradient, rtol=1e-4, atol=1e-6)
        assert not torch.equal(rounded[name], gradient)


# --- refused ----------------------------------------------------------------------------------------------------------


def test_what_does_not_go_with_it(monkeypatch):
    batch = make_batch(0)
    config = gk.GRPOConfig(sparse_backward=THETA)
    assert gk.GRPOConfig(sparse_backward=THETA) == config != gk.GRPOConfig()
    with pytest.raises(ValueError, match="static_shapes=True contradicts sparse_backward"):
        gk.GRPOConfig(sparse_backward=THETA, static_shapes=True)
    with pytest.raises(ValueError, match="sparse_backward has no effect in grpo_loss_from_logits"):
        gk.grpo_loss_from_logits(batch.hidden, batch.ids.clamp(max=23), batch.advantages, config=config)
    monkeypatch.setattr(engine_shared, "is_capturing", lambda device: True)
    batch = leaves(batch, "hidden")
    with pytest.raises(ValueError, match="sparse_backward was given under capture of a CUDA graph"):
        call(batch, config)
    with pytest.raises(ValueError, match="sparse_backward was given under capture of a CUDA graph"):
        gk.fused_logps(batch.hidden, batch.weight, batch.ids, sparse_backward=THETA)


def test_without_gradients_nothing_is_counted():
    with torch.no_grad():
        out = call(make_batch(0), gk.GRPOConfig(sparse_backward=THETA))
    assert out.metrics["sparse/kept"] == out.metrics["sparse/dense"] == 0
    assert out.metric_sums["sparse/kept"][1] == 0

"""Mistakes that real trainers made: overflow, padding, empty masks, offsets, ignored gradients and options."""

from __future__ import annotations

import dataclasses
import math

import kernel_checks
import pytest
import torch
from helpers import (
    LEAVES,
    LOSSES,
    Batch,
    assert_close,
    assert_same_bits,
    call,
    fused,
    leaves,
    loss_by,
    make_batch,
    off_policy,
    reference,
    relative,
    true_logps,
    virtual_rows,
)

import grpo_kernels as gk
from grpo_kernels.config import KL_ESTIMATORS, SURROGATE_RULES
from grpo_kernels.kernels import get_backend

GARBAGE = (math.nan, math.inf, -math.inf, 3e38)
WRONG_IDS = (-1, 67, 2**62, -(2**62))


def finite(result) -> bool:
    return all(x.isfinite().all() for x in (result.loss, result.logps, result.entropy, *result.grads.values()))


# --- overflow of the ratio, and what padding holds --------------------------------------------------------------------


@pytest.mark.parametrize("surrogate", ["dppo_tv", "ipo"])
def test_a_token_that_the_sampling_engine_did_not_score_has_a_ratio_of_1(surrogate, backend):
    """Where there is nothing to divide by: no surrogate, and a KL term as on-policy."""
    options = dict(beta=0.3, use_bias_correction_kl=True)
    batch = off_policy(make_batch(3, sequences=4, masked=True))
    del batch.options["old_logps"]
    unknown = batch.with_options(rollout_logps=torch.full(batch.ids.shape, math.nan))
    config = gk.GRPOConfig(surrogate=surrogate, **options)
    found = fused(unknown, config, backend)
    assert_close(found, reference(unknown, config))
    batch.advantages.zero_()
    expected = fused(batch, gk.GRPOConfig(**options), backend)
    assert torch.allclose(found.loss, expected.loss, rtol=1e-5) and found.loss != 0
    for name, gradient in expected.grads.items():
        assert relative(found.grads[name], gradient) < 1e-5, name
    assert all(found.metrics[f"ratio/{name}"] == 1 for name in ("mean", "min", "max"))
    assert found.metrics["approx_kl"] == 0

    # One token alone: the others divide by what the engine says.
    rollout = true_logps(batch, config)[0].float() - 0.2
    one = batch.with_options(rollout_logps=rollout.index_fill(1, torch.tensor(2), math.nan))
    assert_close(fused(one, config, backend), reference(one, config))


@pytest.mark.parametrize("surrogate", SURROGATE_RULES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_log_ratio_of_200_gives_a_finite_loss_and_gradient(surrogate, sign, backend):
    """exp(200) overflows: autograd multiplies the infinite ratio by the zero of the clip, which is NaN."""
    batch, config = make_batch(1), gk.GRPOConfig(surrogate=surrogate)
    batch.advantages = sign * batch.advantages.abs()
    logps, _ = true_logps(batch, config)
    batch.options["old_logps"] = (logps - 200.0).float()
    found = fused(batch, config, backend)
    assert finite(found)
    assert_close(found, reference(batch, config), 1e-4)
    if surrogate == "clip":
        assert not found.grads["weight"].any()


def test_vespo_takes_rollout_weights_far_from_1(backend):
    """Of a sequence they multiply: one of 50 and one of 0.02 leave its weight as it is."""
    weights = torch.tensor([50.0, 0.02, 1.0, 1.0, 1.0, 1.0]).expand(4, 6)
    batch, config = off_policy(make_batch(1)).with_options(rollout_weights=weights), gk.GRPOConfig(surrogate="vespo")
    assert_close(fused(batch, config, backend), reference(batch, config), 1e-4)


def poisoned(batch, garbage: float, id_: int):
    """The batch with `garbage` wherever the mask is 0."""
    masked = ~batch.options["completion_mask"]
    options = {
        name: x.masked_fill(masked, garbage) if x.shape == masked.shape and x.is_floating_point() else x
        for name, x in batch.options.items()
    }
    return dataclasses.replace(
        batch,
        hidden=batch.hidden.masked_fill(masked[..., None], garbage),
        ids=batch.ids.masked_fill(masked, id_),
        advantages=batch.advantages.masked_fill(masked, garbage),
        options=options,
    )


def with_everything(config: gk.GRPOConfig):
    batch = off_policy(make_batch(2, masked=True, per_token=True), config)
    return batch.with_options(
        rollout_weights=torch.rand(batch.ids.shape) + 0.5, rollout_logps=batch.options["old_logps"] + 0.1
    )


@pytest.mark.parametrize("rows", [2, 24, None], ids=["recompute", "all at once", "static shapes"])
@pytest.mark.parametrize("surrogate", SURROGATE_RULES)
def test_padding_reaches_neither_loss_nor_gradients(surrogate, rows, backend):
    """Masked positions hold NaN, infinity or ids outside the vocabulary: a mask that is multiplied in keeps the NaN."""
    level = SURROGATE_RULES[surrogate].levels[-1]
    temperature = torch.rand(4, 6) + 0.5
    config = gk.GRPOConfig(
        surrogate=surrogate, importance_sampling_level=level, beta=0.1, temperature=temperature, entropy_coef=0.01,
        off_policy_mask_threshold=0.5, use_bias_correction_kl=True, chunk_rows=rows, static_shapes=rows is None,
        entropy_threshold=1.0, kl_clamp=(1.0, 0.5), log_ratio_clamp=0.5,
    )  # fmt: skip
    batch = with_everything(config)
    masked = ~batch.options["completion_mask"]
    expected = fused(poisoned(batch, 0.0, 0), config, backend)
    turn = list(SURROGATE_RULES).index(surrogate) % 2
    for garbage, id_ in zip(GARBAGE[turn::2], WRONG_IDS[turn::2], strict=True):
        config_too = dataclasses.replace(config, temperature=temperature.masked_fill(masked, garbage))
        found = fused(poisoned(batch, garbage, id_), config_too, backend)
        assert finite(found)
        assert_same_bits(found, expected)
        assert not found.grads["hidden"][masked].any()
        assert not found.logps[masked].any() and not found.entropy[masked].any()


@pytest.mark.parametrize("garbage", [math.nan, 3e38])
def test_padding_reaches_nothing_in_the_other_entry_points(garbage, backend):
    """The same for log-probabilities, logits, fused_logps and fused_policy_loss."""
    config = gk.GRPOConfig(beta=0.1, entropy_coef=0.01)
    clean = with_everything(config)
    mask = clean.options["completion_mask"]
    logps, entropy = (x.float() for x in true_logps(clean, config))
    logits, seen = clean.hidden @ clean.weight.T, []
    for value, id_ in ((garbage, 10**9), (0.0, 0)):
        batch = poisoned(clean, value, id_)
        x, h, z = (t.clone() for t in (logps, entropy, logits))
        for t in (x, h, z):
            t[~mask] = value
            t.requires_grad_()
        given = dict(config=config, backend=backend, **batch.options)
        outputs = (
            gk.grpo_loss_from_logps(x, batch.advantages, entropy=h, **given),
            gk.grpo_loss_from_logits(z, batch.ids, batch.advantages, **given),
        )
        own = [leaves(batch) for _ in LOSSES[1:4]]
        losses = [loss_by(*pair, backend, entropy_coef=0.1) for pair in zip(LOSSES[1:4], own, strict=True)]
        for loss in (*(out.loss for out in outputs), *losses):
            loss.backward()
        found = [x.grad, h.grad, z.grad, *(out.loss for out in outputs), outputs[1].logps, *losses]
        seen.append([*found, *(leaf.hidden.grad for leaf in own), *outputs[0].metrics.values()])
    assert all(torch.equal(p, q) and p.isfinite().all() for p, q in zip(*seen, strict=True))


# --- KL, empty masks, equal rewards -----------------------------------------------------------------------------------


def test_a_dropped_token_may_have_an_infinite_value(backend):
    logps, advantages, weights = torch.full((2, 3), -5.0, requires_grad=True), torch.ones(2, 3), torch.ones(2, 3)
    advantages[0, 1], weights[0, 1] = 3e38, 0.0
    config = gk.GRPOConfig(surrogate="reinforce", entropy_threshold=2.0)  # which drops what is below it
    given = dict(entropy=torch.full((2, 3), 2.0), rollout_weights=weights, config=config, backend=backend)
    loss = gk.grpo_loss_from_logps(logps, advantages, **given).loss
    loss.backward()
    assert loss.item() == pytest.approx(25 / 6) and logps.grad.sum().item() == pytest.approx(-5 / 6)


@pytest.mark.parametrize("distance", [89.0, 1e4])
def test_k3_is_finite_far_from_the_reference_policy(distance, backend):
    """exp(ref - logp) overflows float32 from a distance of 88.7 on."""
    for estimator in ("k3", "k3+"):
        batch, config = make_batch(1), gk.GRPOConfig(beta=0.1, kl_estimator=estimator)
        batch.options["ref_logps"] = (true_logps(batch, config)[0] + distance).float()
        found = fused(batch, config, backend)
        assert finite(found) and found.metrics["kl"].isfinite()
        assert_close(found, reference(batch, config), 1e-4)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "k1+", "k3+"])
def test_a_ratio_times_a_kl_is_bounded_like_each_factor(estimator, level, backend):
    """Log-ratio and ref - logp, neither beyond 80 or both: the product would overflow. Not beyond: it is exact."""
    for log_ratio, distance in ((60.0, 60.0), (100.0, 100.0), (60.0, 3.0)):
        batch = make_batch(1)
        batch.advantages = batch.advantages.abs()  # ratios that large are clipped: only the KL has a gradient
        config = gk.GRPOConfig(
            beta=0.1, kl_estimator=estimator, use_bias_correction_kl=True, importance_sampling_level=level
        )
        logps = true_logps(batch, config)[0]
        batch.options.update(old_logps=(logps - log_ratio).float(), ref_logps=(logps + distance).float())
        found = fused(batch, config, backend)
        assert finite(found) and found.metrics["kl"].isfinite()
        assert_close(found, reference(batch, config), 1e-4)
        overflows = log_ratio > 80 or (estimator.startswith("k3") and log_ratio + distance > 80)
        assert bool(found.grads["weight"].any()) != overflows


@pytest.mark.parametrize("surrogate", SURROGATE_RULES)
def test_a_fully_masked_batch_has_loss_0_and_zero_gradients(surrogate, backend):
    """A rank without tokens needs a graph all the same: distributed collectives must stay matched."""
    config = gk.GRPOConfig(surrogate=surrogate, beta=0.1, entropy_coef=0.01)
    batch = off_policy(make_batch(1, bias=True), config)
    batch.options["completion_mask"] = torch.zeros(4, 6)
    found = fused(batch, config, backend)  # calls backward: the graph is there
    assert found.loss == 0
    for name, x in found.grads.items():
        assert x.shape == getattr(batch, name).shape and not x.any()
    assert all(x.isfinite().all() or name.endswith(("min", "max")) for name, x in found.metrics.items())


@pytest.mark.parametrize("function", LOSSES)
def test_a_fully_masked_batch_has_a_graph_in_every_function(function, backend):
    own = leaves(make_batch(2, bias=True).with_options(completion_mask=torch.zeros(4, 6)))
    loss = loss_by(function, own, backend)
    loss.backward()
    assert loss == 0 and not any(getattr(own, name).grad.any() for name in LEAVES)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
def test_a_batch_without_tokens_has_loss_0_and_zero_gradients(shape, backend):
    """As a rank has it whose share of the completions is empty: every entry point has a graph."""
    offsets = torch.zeros(2, dtype=torch.int64) if len(shape) == 1 else None
    hidden, logits, logps = (torch.zeros(*shape, *size, requires_grad=True) for size in ((4,), (7,), ()))
    weight, ids = torch.ones(7, 4, requires_grad=True), torch.zeros(shape, dtype=torch.int64)
    given = dict(advantages=torch.zeros(shape), cu_seqlens=offsets, backend=backend)
    outputs = (
        gk.fused_grpo_loss(hidden, weight, ids, **given),
        gk.grpo_loss_from_logits(logits, ids, **given),
        gk.grpo_loss_from_logps(logps, **given),
    )
    for out in outputs:
        out.loss.backward()
        assert out.loss == 0 and out.logps.shape == shape and out.metrics["entropy"] == 0
    assert not weight.grad.any() and all(x.grad.shape == x.shape for x in (hidden, logits, logps))


def test_equal_rewards_leave_the_gradients_of_kl_and_entropy(backend):
    """All advantages are 0, but KL and entropy terms still have gradients: such rows must not be left out."""
    config = gk.GRPOConfig(beta=0.1, entropy_coef=0.01)
    batch = off_policy(make_batch(1), config)
    batch.advantages = None
    given = dict(rewards=torch.full((4,), 0.1), num_generations=2)
    found = fused(batch, config, backend, **given)
    zero = dataclasses.replace(batch, advantages=torch.zeros(4))
    assert found.grads["weight"].any()
    assert_close(found, reference(zero, config))
    out = call(batch, config, **given)
    assert torch.equal(out.advantages, torch.zeros(4)) and out.metrics["equal_reward_groups"] == 1
    for coefficient in ({"beta": 0.1}, {"entropy_coef": 0.01}):
        assert fused(zero, gk.GRPOConfig(**coefficient), backend).grads["weight"].any()
    assert not fused(zero, gk.GRPOConfig(), backend).grads["weight"].any()


# --- large offsets, odd vocabularies, small probabilities -------------------------------------------------------------


def aligned_copy(x: torch.Tensor) -> torch.Tensor:
    """A copy with rows at multiples of 16 bytes: where a row begins in between decides how CUDA kernels sum it."""
    return torch.empty(len(x), (x.shape[1] + 7) // 8 * 8, dtype=x.dtype)[:, : x.shape[1]].copy_(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offsets_past_2_to_the_31(dtype, backend):
    """Four rows 2^30 elements apart: the last begins 3 x 2^30 after the first. Untouched pages cost no memory."""
    vocab, row_stride = 133, 2**30
    logits = virtual_rows(4, vocab, row_stride, dtype)
    logits.copy_(torch.randn(4, vocab))
    dense, ids = aligned_copy(logits), torch.tensor([0, 5, 131, 132])
    ones, kernels = torch.ones(4), get_backend(backend)

    expected = kernel_checks.statistics(kernels, dense, ids, ones)
    found = kernel_checks.statistics(kernels, logits, ids, ones)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.allclose(found.logp.double(), dense.double().log_softmax(-1)[torch.arange(4), ids], atol=1e-5)
    together, apart = torch.empty(4, vocab, dtype=dtype), virtual_rows(4, vocab, row_stride, dtype)
    for read, written in ((dense.clone(), together), (dense.clone(), apart), (logits, logits)):
        kernel_checks.gradient(kernels, read, written, ids, ones, expected, ones, 0 * ones)
        assert torch.equal(written, together) and together[3].any()


@pytest.mark.parametrize("vocab", [1, 2, 31, 127, 2049])
def test_any_vocabulary_size_and_logits_far_below_zero(vocab, backend):
    """Sizes that no block divides. Logits near -1e4: a running maximum that starts at 0, or padding of 0, is wrong. The
    softmax of the first target underflows in float32; its log-probability must not."""
    g = torch.Generator().manual_seed(vocab)
    logits = -1e4 + 3 * torch.randn(2, 3, vocab, generator=g)
    ids = torch.randint(vocab, (2, 3), generator=g)
    logits[0, 0, ids[0, 0]] -= 95.0
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    advantages = torch.tensor([1.0, -0.5])
    out = gk.grpo_loss_from_logits(leaf, ids, advantages, backend=backend)
    out.loss.backward()
    logps = exact.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    (-(advantages.double()[:, None] * logps).sum() / 6).backward()
    assert torch.allclose(out.logps.double(), logps, atol=2e-6, rtol=1e-6)
    assert relative(leaf.grad, exact.grad) < 3e-6 if vocab > 1 else not leaf.grad.any()
    # The same through the matrix product: one-hot hidden states make the rows of the weight the logits.
    onehot = torch.eye(6).view(2, 3, 6)
    through = gk.fused_grpo_loss(onehot, logits.view(6, vocab).T.contiguous(), ids, advantages, backend=backend)
    assert torch.allclose(through.logps.double(), logps, atol=2e-6, rtol=1e-6)


# --- grad_output, and arguments; for adapters and sharded weights see test_plain_tensors.py ---------------------------


def test_gradients_are_multiplied_by_grad_output(backend):
    """A backward that returns finished gradients must scale them: loss scales, sums of losses, two backwards."""
    batch = make_batch(1, bias=True)
    plain, own = fused(batch, backend=backend).grads, leaves(batch)
    first, second = (call(own, backend=backend).loss for _ in range(2))
    (first * 3 + second**2 + own.bias.sum()).backward()
    factor = 3 + 2 * second.item()
    for name, g in plain.items():
        assert torch.allclose(getattr(own, name).grad, factor * g + (1.0 if name == "bias" else 0.0), atol=1e-6)


# --- NaN logits of unmasked tokens ------------------------------------------------------------------------------------


TOKEN = (2, 1)  # where the NaN is: unmasked
CLAMPED = dict(log_ratio_clamp=0.5, kl_clamp=(1.0, 0.5), beta=0.1)
POINTS = [(surrogate, level) for surrogate, rule in SURROGATE_RULES.items() for level in rule.levels]


def with_nan(batch: Batch, value: float = math.nan) -> Batch:
    batch = leaves(batch, *LEAVES)
    batch.hidden[TOKEN][3] = value
    return batch


def make(surrogate: str, *, old: bool, advantage: float) -> Batch:
    batch = off_policy(make_batch(masked=True))
    assert batch.options["completion_mask"][TOKEN]
    batch.advantages[TOKEN[0]] = advantage
    del batch.options["old_logps" if not old else "ref_logps"]
    if SURROGATE_RULES[surrogate].divides_by_rollout:
        batch.options["rollout_logps"] = torch.full(batch.ids.shape, -4.0)
    return batch


def assert_nan(batch: Batch, config: gk.GRPOConfig, backend: str, *, active: bool = True) -> None:
    """`active`: known to have a gradient before its logits are there; otherwise it is scored alone."""
    result = fused(batch, config, backend)
    assert result.loss.isnan()
    if active:
        assert any(not grad.isfinite().all() for grad in result.grads.values())
    assert reference(batch, config).loss.isnan()


@pytest.mark.parametrize("old", [True, False], ids=["old", "on-policy, entropy threshold"])
@pytest.mark.parametrize("point", POINTS, ids="/".join)
def test_nan_logits_make_the_loss_nan(backend, point, old):
    surrogate, level = point
    threshold = None if old else 1.0
    bounds = dict(delta=1.5, dual_clip=3.0) if surrogate == "clip" else {}
    common = dict(surrogate=surrogate, importance_sampling_level=level, entropy_threshold=threshold, **bounds)
    clamped = {**CLAMPED, "beta": 0.0}
    if not old:  # with each KL estimator in its turn
        kl = KL_ESTIMATORS[1 + POINTS.index(point) % (len(KL_ESTIMATORS) - 1)]
        clamped = {**CLAMPED, "kl_estimator": kl, "use_bias_correction_kl": True}
    for advantage, value in ((1.0, math.nan), (-1.0, math.inf)):
        batch = with_nan(make(surrogate, old=old, advantage=advantage), value)
        assert_nan(batch, gk.GRPOConfig(**common), backend)
    assert_nan(with_nan(batch), gk.GRPOConfig(**common, **clamped), backend)


@pytest.mark.parametrize("point", POINTS, ids="/".join)
def test_a_sampled_id_of_probability_0_is_not_passed_over(backend, point):
    """-inf over itself is no ratio. Nothing can have sampled the id: the loss is no number, as by the formula."""
    surrogate, level = point
    batch = make_batch(2, bias=True)
    batch.bias[batch.ids[1, 2]] = -math.inf
    config = gk.GRPOConfig(surrogate=surrogate, importance_sampling_level=level)
    if SURROGATE_RULES[surrogate].divides_by_rollout:
        batch.options["rollout_logps"] = torch.full(batch.ids.shape, math.nan)
    assert not fused(batch, config, backend).loss.isfinite()


@pytest.mark.parametrize("surrogate", SURROGATE_RULES)
def test_nan_logits_of_a_token_without_surrogate(backend, surrogate):
    """An advantage of 0, a rollout weight of 0, an unknown rollout, a sequence that is dropped, a KL alone."""
    config = gk.GRPOConfig(surrogate=surrogate)
    assert_nan(with_nan(make(surrogate, old=True, advantage=0.0)), config, backend, active=False)
    batch = with_nan(make(surrogate, old=True, advantage=-1.0))
    weights = torch.ones(batch.ids.shape)
    weights[TOKEN] = 0.0
    assert_nan(batch.with_options(rollout_weights=weights), config, backend, active=False)
    rollout = torch.full(batch.ids.shape, 0.0)
    dropped = gk.GRPOConfig(surrogate=surrogate, off_policy_mask_threshold=0.1)
    assert_nan(batch.with_options(rollout_logps=rollout), dropped, backend)
    if SURROGATE_RULES[surrogate].divides_by_rollout:
        rollout[TOKEN] = math.nan
        unknown = with_nan(make(surrogate, old=False, advantage=1.0)).with_options(rollout_logps=rollout)
        assert_nan(unknown, config, backend, active=False)


@pytest.mark.parametrize("surrogate", SURROGATE_RULES)
def test_nan_log_probabilities(backend, surrogate):
    config = gk.GRPOConfig(surrogate=surrogate, entropy_threshold=0.5)
    for old in (True, False):
        batch = make(surrogate, old=old, advantage=-1.0)
        options = {name: x for name, x in batch.options.items() if name != "ref_logps"}
        entropy, logps = torch.rand(batch.ids.shape), torch.full(batch.ids.shape, -2.0)
        logps[TOKEN] = math.nan
        entropy[TOKEN] = 0.1
        for given in ((logps, entropy), (logps.nan_to_num(-2.0), torch.where(logps.isnan(), math.nan, entropy))):
            out = gk.grpo_loss_from_logps(
                given[0], batch.advantages, entropy=given[1], config=config, backend=backend, **options
            )
            assert out.loss.isnan()

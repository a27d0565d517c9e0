"""Mistakes that real trainers made: overflow, padding, empty masks, offsets, ignored gradients and options."""

from __future__ import annotations

import math
from typing import Any

import kernel_checks
import pytest
import torch
from helpers import (
    assert_close,
    fused,
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
from grpo_kernels.reference import reference_loss_from_logps


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
def test_a_log_ratio_of_200_gives_a_finite_loss_and_gradient(surrogate, sign):
    """exp(200) overflows: autograd multiplies the infinite ratio by the zero of the clip, which is NaN."""
    batch, config = make_batch(1), gk.GRPOConfig(surrogate=surrogate)
    batch.advantages = sign * batch.advantages.abs()
    logps, _ = true_logps(batch, config)
    batch.options["old_logps"] = (logps - 200.0).float()
    found = fused(batch, config)
    assert finite(found)
    assert_close(found, reference(batch, config), 1e-4)
    if surrogate == "clip":
        assert not found.grads["weight"].any()


def test_vespo_takes_rollout_weights_far_from_1(backend):
    """Of a sequence they multiply: one of 50 and one of 0.02 leave its weight as it is."""
    weights = torch.tensor([50.0, 0.02, 1.0, 1.0, 1.0, 1.0]).expand(4, 6)
    batch, config = off_policy(make_batch(1)).with_options(rollout_weights=weights), gk.GRPOConfig(surrogate="vespo")
    assert_close(fused(batch, config, backend), reference(batch, config), 1e-4)


# --- empty batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("surrogate", SURROGATE_RULES)
def test_a_fully_masked_batch_has_loss_0_and_zero_gradients(surrogate):
    """A rank without tokens needs a graph all the same: distributed collectives must stay matched. Where no rank has a
    token, the number of items is 0, and a clamp keeps 0 / 0 away."""
    config = gk.GRPOConfig(surrogate=surrogate, beta=0.1, entropy_coef=0.01)
    batch = off_policy(make_batch(1, bias=True), config)
    batch.options["completion_mask"] = torch.zeros(4, 6)
    for items in (None, 0, torch.tensor(0)):
        found = fused(batch, config, num_items_in_batch=items)  # calls backward: the graph is there
        assert found.loss == 0
        for name, x in found.grads.items():
            assert x.shape == getattr(batch, name).shape and not x.any()
        assert all(x.isfinite().all() or name.endswith(("min", "max")) for name, x in found.metrics.items())


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
def test_a_batch_without_tokens_has_loss_0_and_zero_gradients(shape, backend):
    """As a rank has it whose share of the completions is empty: every entry point has a graph, metrics are numbers."""
    offsets = torch.zeros(2, dtype=torch.int64) if len(shape) == 1 else None
    hidden, logits, logps = (torch.zeros(*shape, *size, requires_grad=True) for size in ((4,), (7,), ()))
    weight, ids = torch.ones(7, 4, requires_grad=True), torch.zeros(shape, dtype=torch.int64)
    bonus = dict(entropy_coef=0.01, entropy_aggregation="loss")
    for config in (gk.GRPOConfig(), *(gk.GRPOConfig(aggregation=x, **bonus) for x in ("seq_mean", "seq_sum"))):
        given = dict(advantages=torch.zeros(shape), cu_seqlens=offsets, backend=backend, config=config)
        outputs = (
            gk.fused_grpo_loss(hidden, weight, ids, **given),
            gk.grpo_loss_from_logits(logits, ids, **given),
            gk.grpo_loss_from_logps(logps, entropy=torch.zeros(shape), **given),
        )
        for out in outputs:
            out.loss.backward()
            assert out.loss == 0 and out.logps.shape == shape and out.metrics["entropy"] == 0
            assert not config.has_entropy_bonus or out.metrics["policy_loss"] == 0
    assert not weight.grad.any() and all(x.grad.shape == x.shape for x in (hidden, logits, logps))


# --- large offsets ----------------------------------------------------------------------------------------------------


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


# --- NaN of unmasked tokens -------------------------------------------------------------------------------------------


TOKEN = (2, 1)  # where it is
POINTS = [(surrogate, level) for surrogate, rule in SURROGATE_RULES.items() for level in rule.levels]
MAY_HAVE_NO_GRADIENT = ("on-policy", "an advantage of 0", "a weight of 0", "an entropy")  # where it is scored alone


def with_nan(surrogate: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """What bounds a token's surrogate or takes it away, or what is no number: changes of the inputs, of the options."""
    ones, zero_there, clamps = torch.ones(4, 6), torch.ones(4, 6), dict(log_ratio_clamp=0.5)
    zero_there[TOKEN] = 0.0
    unknown = dict(rollout_logps=math.nan * ones) if SURROGATE_RULES[surrogate].divides_by_rollout else {}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "A > 0": ({}, {}),
        "A < 0": (dict(advantages=-ones), {}),
        "on-policy": (dict(old_logps=None) | unknown, {}),
        "probability 0": (dict(old_logps=None) | unknown, {}),
        "an entropy": ({}, dict(entropy_threshold=0.05)),
        "clamps": ({}, clamps),
        "a threshold of the entropy": ({}, dict(entropy_threshold=0.5)),
        "an advantage of 0": (dict(advantages=zero_there), {}),
        "a weight of 0": (dict(rollout_weights=zero_there), {}),
        "a dropped sequence": (dict(advantages=-ones, rollout_logps=0 * ones), dict(off_policy_mask_threshold=0.1)),
    }
    if surrogate == "clip":
        cases["bounds"] = {}, dict(delta=1.5, dual_clip=3.0)
    for kl in KL_ESTIMATORS[1:]:
        options = dict(beta=0.1, kl_estimator=kl, use_bias_correction_kl=True, kl_clamp=(1.0, 0.5))
        cases[kl] = dict(advantages=0 * ones, ref_logps=-3 * ones), options | clamps
    return cases


@pytest.mark.parametrize("point", POINTS, ids="/".join)
def test_what_is_no_number_makes_the_loss_none(point):
    """A log-probability or an entropy that is NaN, which a threshold neither keeps nor drops: that of the specification
    too. And a sampled id of probability 0, which nothing can have sampled: -inf over itself is no ratio."""
    surrogate, level = point
    for name, (given, options) in with_nan(surrogate).items():
        logps, entropy = torch.full((4, 6), -2.0), torch.full((4, 6), 0.1)
        if name == "an entropy":
            entropy[TOKEN] = math.nan
        else:
            logps[TOKEN] = -math.inf if name == "probability 0" else math.nan
        given = dict(advantages=torch.ones(4, 6), old_logps=torch.full((4, 6), -2.1), entropy=entropy) | given
        given["config"] = gk.GRPOConfig(surrogate=surrogate, importance_sampling_level=level, **options)
        loss = gk.grpo_loss_from_logps(logps.requires_grad_(), **given).loss
        loss.backward()
        assert not loss.isfinite(), name
        if name != "probability 0":
            assert loss.isnan() and reference_loss_from_logps(logps, **given).loss.isnan(), name
            assert name in MAY_HAVE_NO_GRADIENT or not logps.grad.isfinite().all(), name


def test_logits_that_are_nan_make_the_loss_nan(backend):
    """Off-policy and on-policy; of a token without a gradient too, which is scored only."""
    for old in (True, False):
        for value, advantage in ((math.nan, 1.0), (math.inf, -1.0), (math.nan, 0.0)):
            batch = make_batch(masked=True)
            batch = off_policy(batch) if old else batch
            assert batch.options["completion_mask"][TOKEN]
            batch.hidden[TOKEN][3], batch.advantages[TOKEN[0]] = value, advantage
            found = fused(batch, backend=backend)
            assert found.loss.isnan() and all(x.isfinite().all() for x in found.grads.values()) == (advantage == 0)

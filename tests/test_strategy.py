"""Strategies: how product and softmax are combined. In Triton's interpreter; each as exact as the plain one."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from helpers import call, call_counter, fused, make_batch, off_policy, true_logps
from test_precision import CONFIGS, assert_as_exact_as_eager, half_batch

import grpo_kernels as gk
from grpo_kernels.head.chunks import Scorer
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.kernels import get_backend, launch
from grpo_kernels.kernels.launch import shipped_table

HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(params=launch.STRATEGIES)
def strategy(request, monkeypatch) -> str:
    monkeypatch.setenv("GRPO_KERNELS_STRATEGY", request.param)
    return request.param


@pytest.mark.parametrize("strategy", ["anchored"], indirect=True)  # the others are those of test_precision.py
@pytest.mark.parametrize("name", ["grpo", "cispo"])  # of those, what it serves
def test_bfloat16_is_as_exact_as_eager_with_float32_softmax(name, strategy):
    assert_as_exact_as_eager(CONFIGS[name], torch.bfloat16, "triton", seeds=4)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("strategy", ["linear", "anchored"], indirect=True)
@pytest.mark.parametrize("entropy", [True, False])
def test_logps_without_logits(monkeypatch, strategy, dtype, entropy):
    """Under no_grad there is no scratch, and no rounding of logits: 2e-5 even where the product returns 16 bits."""
    logits, config = [], gk.GRPOConfig(temperature=0.7)
    call_counter(monkeypatch, LMHead, "logits", logits, lambda *_: 1)
    batch = half_batch(dtype, config)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # float16 has no anchored way, which is said once
        found, h = gk.fused_logps(
            batch.hidden, batch.weight, batch.ids, temperature=0.7, entropy=entropy, backend="triton"
        )
    exact, exact_entropy = true_logps(batch, config)
    assert not logits and (found - exact).abs().max() <= 2e-5
    assert h is None if not entropy else (h - exact_entropy).abs().max() <= 2e-5


@pytest.mark.parametrize("strategy", ["linear", "anchored"], indirect=True)
def test_strided_hidden_states_and_bias(strategy):
    batch, found = make_batch(0, bias=True).head_as(torch.bfloat16), []
    for strided in (False, True):
        hidden = torch.stack([batch.hidden, batch.hidden], -1)[..., 0] if strided else batch.hidden
        wide = torch.stack([batch.bias, batch.bias + 1], -1).requires_grad_()
        bias = wide[:, 0] if strided else wide[:, 0].contiguous()
        out = call(dataclasses.replace(batch, hidden=hidden, bias=bias), backend="triton")
        out.loss.backward()
        with torch.no_grad():
            logps, _ = gk.fused_logps(hidden, batch.weight, batch.ids, lm_head_bias=bias, backend="triton")
        found.append((out.logps, wide.grad, logps))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("strategy", ["anchored"], indirect=True)
@pytest.mark.parametrize(("options", "way"), [({}, "anchored"), ({"entropy_coef": 0.1}, "single_pass")])
def test_a_gradient_through_the_entropy_needs_logits(monkeypatch, strategy, options, way):
    ways = []
    for name in ("anchored", "single_pass"):
        call_counter(monkeypatch, Scorer, name, ways, lambda *_, name=name: name)
    fused(make_batch(0).head_as(torch.bfloat16), gk.GRPOConfig(**options), "triton")
    assert ways == [way]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("strategy", ["anchored"], indirect=True)
def test_padding_may_hold_anything(strategy, static):
    batch = off_policy(make_batch(3, masked=True, bias=True)).head_as(torch.bfloat16)
    config = gk.GRPOConfig(static_shapes=static, chunk_rows=7)
    expected = fused(batch, config, "triton")
    batch.hidden[~batch.options["completion_mask"]] = torch.nan
    found = fused(batch, config, "triton")
    for name, x in expected.grads.items():
        assert torch.equal(found.grads[name], x) and x.any(), name
    assert torch.equal(found.logps, expected.logps)


def test_the_safe_one_is_the_default():
    half, single = (torch.zeros(2, 16, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    kernels = get_backend("triton")
    assert launch.choose_strategy(kernels, half, half) == "linear"
    assert launch.choose_strategy(kernels, single, single) == "rows"
    assert launch.choose_strategy(kernels, half, half.T.contiguous().T) == "rows"
    assert all(launch.choose_strategy(get_backend(name), half, half) == "rows" for name in ("cpu", "torch"))


def test_a_gpu_computes_logits_until_something_else_has_been_measured():
    for arch, kernels in shipped_table().items():
        if arch != "interpreter":  # the tests', where log-probabilities without logits are to run
            best = "anchored" if arch == "sm90" else "rows"  # bench/results/gpu/h200-headline.json
            assert kernels["strategy"] == kernels["cuda_strategy"] == {"*": {"name": best}}, arch


def test_one_that_does_not_serve_is_said_once(monkeypatch):
    monkeypatch.setenv("GRPO_KERNELS_STRATEGY", "anchored")
    launch._warn_once.cache_clear()
    x = torch.zeros(2, 16)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert [launch.choose_strategy(get_backend("cpu"), x, x) for _ in range(3)] == ["rows"] * 3
    assert ["GRPO_KERNELS_STRATEGY=anchored does not serve backend 'cpu'" in str(w.message) for w in seen] == [True]
    monkeypatch.setenv("GRPO_KERNELS_STRATEGY", "fastest")
    with pytest.raises(ValueError, match="expected one of rows, linear, anchored"):
        launch.choose_strategy(get_backend("cpu"), x, x)

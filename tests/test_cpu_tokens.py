"""The per-token objective of compiled and Triton kernels against float64, and the sums of rows on a CPU."""

from __future__ import annotations

import math

import kernel_checks as c
import pytest
import torch

from grpo_kernels import names
from grpo_kernels.backends import get_backend
from grpo_kernels.backends.compiled import cpu as cpu_backend
from grpo_kernels.backends.pytorch.backend import TorchBackend
from grpo_kernels.names import FIELD, KernelParams

backend, reason = cpu_backend.load()
assert backend is not None, reason  # the tests need the compiled module: a skip would hide that it is missing


@pytest.fixture(params=["cpu", "triton", "cuda"])
def kernels(request):
    return get_backend(request.param)


# --- the objective --------------------------------------------------------------------------------------------------


VARIANTS = [
    KernelParams(),
    KernelParams(delta=1.5, dual_clip=1.3, log_ratio_clamp=2.0, weight_low=0.8, weight_high=1.2, ratio_cap=1.5),
    KernelParams(epsilon_low=0.1, epsilon_high=0.3, delta=4.0, outside="drop", weight_low=0.5, weight_high=1.5),
    KernelParams(beta=0.04, bias_correction=True, log_ratio_clamp=1.0, dppo_kl_tau=0.0, weight_low=-math.inf),
    KernelParams(beta=0.04, kl_delta_clamp=1.0, kl_clamp=0.4, outside="drop_outward", weight_low=0.8, weight_high=1.2),
]


@pytest.mark.parametrize("surrogate", names.SURROGATES)
@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_objective(kernels, surrogate, variant):
    """Each surrogate and each KL estimator in each variant."""
    kl = names.KL_ESTIMATORS[(names.SURROGATES.index(surrogate) + variant) % len(names.KL_ESTIMATORS)]
    params = VARIANTS[variant]._replace(surrogate=surrogate, kl=kl)
    params = params._replace(score_term=not params.bias_correction and kl in ("k1", "k2", "k3", "abs"))
    generator = torch.Generator().manual_seed(variant)
    count = 400
    x = torch.randn(count, generator=generator) * 0.7
    x[:6] = torch.tensor([0.0, 3.0, -3.0, 50.0, -50.0, 100.0])
    if variant < 3:
        x[6:8] = torch.tensor([200.0, -200.0])
    logp = -torch.rand(count, generator=generator) * 3
    x, logp = (t.mul(2**12).round() / 2**12 for t in (x, logp))  # logp - (logp - x) is x again
    entropy = torch.rand(count, generator=generator)
    multiplier = torch.rand(count, generator=generator).round(decimals=1)
    ref = logp + torch.randn(count, generator=generator)
    ref[10] = logp[10] + 1e-4
    table = c.make_table(count, multiplier=multiplier, ref=ref, entropy_threshold=0.1)
    table[FIELD["advantage"]][:20] = 0.0
    c.check_objective(kernels, x, logp, entropy, table, params)


@pytest.mark.parametrize("kl", names.KL_ESTIMATORS[1:])
def test_bias_corrected_kl_stops_at_the_exponential_of_80(kernels, kl):
    ratios = torch.tensor([-90.0, -3.0, -0.25, 3.0, 35.0, 60.0, 79.0, 90.0])  # no product is the bound itself
    distances = torch.tensor([-90.0, -3.0, 0.0, 3.0, 35.0, 60.0, 79.0, 90.0])
    x, d = (part.flatten() for part in torch.meshgrid(ratios, distances, indexing="ij"))
    logp = -torch.ones_like(x)
    params = KernelParams(surrogate="weighted", kl=kl, beta=0.5, bias_correction=True)
    table = c.make_table(len(x), advantage=0.0, ref=logp + d)
    c.check_objective(kernels, x, logp, torch.ones_like(x), table, params)


def test_zero_factors_select_zero(kernels):
    """Nothing infinite is multiplied by 0: a dropped token with an overflowing ratio, a k3 beyond fp32, beta = 0."""
    x, logp, entropy = torch.full((2,), math.inf), torch.full((2,), -2.0), torch.ones(2)
    table = c.make_table(2, multiplier=torch.tensor([0.0, 1.0]), ref=500.0, advantage=1.0)
    value, d_ratio, d_direct, kl = c.objective(kernels, x, logp, entropy, table, KernelParams(kl="k3"))
    assert value.tolist() == [0.0, pytest.approx(-1.2)] and not d_ratio.any() and not d_direct.any()
    assert kl.isfinite().all()


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_add_rows_sums_each_id_in_float32_and_rounds_once(dtype):
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(50, 33, generator=generator).to(dtype)
    rows = torch.randn(20, 40, generator=generator).bfloat16()[:, 3:36]  # a row stride of its own
    ids, scale = torch.randint(0, 10, (20,), generator=generator), torch.randn(20, generator=generator)
    sums = torch.zeros(50, 33)
    for i, s, row in zip(ids, scale, rows, strict=True):
        sums[i] += s * row.float()
    expected = (target.float() + sums).to(dtype)
    for kernels in (backend, TorchBackend()):
        found = target.clone()
        kernels.add_rows(found, ids, scale, rows)
        torch.testing.assert_close(found, expected, rtol=0 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (37, 24), (100, 41), (1056, 72)])
def test_add_transposed(dtype, shape):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(shape[1], shape[0] + 5, generator=generator).bfloat16()
    source, before = wide[:, 3 : 3 + shape[0]], torch.randn(shape, generator=generator).to(dtype)
    before[0, 0] = torch.nan
    target = torch.full((shape[0], shape[1] + 2), torch.nan, dtype=dtype)
    backend.add_transposed(target[:, 1:-1], source, add=False)
    assert torch.equal(target[:, 1:-1], source.T.to(dtype)) and target[:, [0, -1]].isnan().all()
    target[:, 1:-1] = before
    backend.add_transposed(target[:, 1:-1], source, add=True)
    expected = (before.float() + source.T.float()).to(dtype)
    assert torch.equal(target[:, 1:-1].nan_to_num(7.0), expected.nan_to_num(7.0)) and target[0, 1].isnan()


def test_a_module_of_another_interface_is_not_used(monkeypatch):
    monkeypatch.setattr(backend.module, "INTERFACE", -1)
    found, reason = cpu_backend.load()
    assert found is None
    assert "build again" in reason

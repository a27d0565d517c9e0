"""The per-token objective, the reduction and the group statistics of compiled and Triton kernels against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import RowKernels
from torch import Tensor

from grpo_kernels import contract
from grpo_kernels.backends import get_backend
from grpo_kernels.backends.compiled import cpu as cpu_backend
from grpo_kernels.backends.pytorch.backend import TorchBackend
from grpo_kernels.contract import FIELD, KernelParams

backend, reason = cpu_backend.load()
assert backend is not None, reason  # the tests need the compiled module: a skip would hide that it is missing
backend = RowKernels(backend)


@pytest.fixture(params=["cpu", "triton", "cuda"])
def kernels(request):
    return RowKernels(get_backend(request.param))


def make_table(rows: int, seed: int = 0, **fields: float | Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(len(contract.TABLE_FIELDS), rows)
    for name in ("multiplier", "weight_ratio", "weight_direct", "temperature", "rollout_weight"):
        table[FIELD[name]] = 1.0
    table[FIELD["advantage"]] = torch.randn(rows, generator=generator)
    table[FIELD["entropy_threshold"]] = -math.inf
    table[FIELD["rollout"]] = math.nan
    for name, value in fields.items():
        table[FIELD[name]] = value
    return table


# --- the objective --------------------------------------------------------------------------------------------------


def objective_float64(p: KernelParams, x, logp, entropy, A, ref, multiplier, threshold) -> tuple[float, ...]:
    """The formulas for one token, in Python floats."""
    clamped_x = min(max(x, -p.log_ratio_clamp), min(p.log_ratio_clamp, 80.0))
    clamped, r = clamped_x != x, math.exp(clamped_x)
    low, high = 1 - p.epsilon_low, 1 + p.epsilon_high
    d_ratio = d_direct = extra_value = extra_slope = 0.0
    if p.surrogate == "clip":
        first, second = min(r, p.delta) * A, min(max(r, low), high) * A
        value = -min(first, second)
        d_ratio = -A * r if (r <= p.delta if first <= second else low <= r <= high) else 0.0
        if A < 0 and value > -p.dual_clip * A:
            value, d_ratio = -p.dual_clip * A, 0.0
    elif p.surrogate in ("cispo", "cispo_two_sided", "reinforce"):
        caps = {"cispo": min(r, p.epsilon_high), "cispo_two_sided": min(max(r, low), high), "reinforce": 1.0}
        d_direct = -caps[p.surrogate] * A
        value = d_direct * logp
    elif p.surrogate == "sapo":
        tau = p.sapo_temperature_pos if A > 0 else p.sapo_temperature_neg
        s = 1 / (1 + math.exp(min(-tau * (r - 1), 700)))
        value, d_ratio = -4 / tau * s * A, -4 * s * (1 - s) * A * r
    elif p.surrogate == "gmpo":
        value = d_ratio = -A * r
    else:
        change = math.exp(logp) - math.exp(logp - x)
        if p.surrogate == "ipo":
            drop = abs(change) > p.epsilon_high
        else:
            drop = (A > 0 and change > p.epsilon_high) or (A <= 0 and change < -p.epsilon_low)
        value = d_ratio = 0.0 if drop else -r * A
        extra_value, extra_slope = 1e-3 * x * x, 2e-3 * x
    d_ratio = (0.0 if clamped else d_ratio) + extra_slope
    value += extra_value
    if multiplier == 0 or entropy < threshold:
        value = d_ratio = d_direct = 0.0
    else:
        value, d_ratio, d_direct = multiplier * value, multiplier * d_ratio, multiplier * d_direct

    kl, slope = 0.0, 0.0
    if p.kl != "none":
        d = min(max(ref - logp, -p.kl_delta_clamp), p.kl_delta_clamp)
        inside = d == ref - logp
        if p.kl.startswith("k3"):
            inside &= d <= 80
            d = min(d, 80.0)
        kl, slope = {
            "k1": (-d, 1.0),
            "k2": (d * d / 2, -d),
            "k3": (math.expm1(d) - d, -math.expm1(d)),
            "abs": (abs(d), -math.copysign(1, d) if d else 0.0),
        }[p.kl.rstrip("+")]
        slope = -d if p.kl.endswith("+") else slope
        inside &= abs(kl) <= p.kl_clamp
        kl = min(max(kl, -p.kl_clamp), p.kl_clamp)
        slope = slope if inside else 0.0
    factor, beyond = 1.0, False
    if p.bias_correction:
        factor, beyond = r, abs(kl * r) > math.exp(80)
        kl = math.copysign(min(abs(kl), math.exp(80) / r), kl)
    value += p.beta * kl * factor
    d_direct += 0.0 if beyond else p.beta * slope * factor
    if p.bias_correction and not clamped and not beyond:
        d_ratio += p.beta * kl * factor
    return value, d_ratio, d_direct, kl * factor


VARIANTS = [
    KernelParams(),
    KernelParams(delta=1.5, dual_clip=3.0, log_ratio_clamp=2.0),
    KernelParams(epsilon_low=0.1, epsilon_high=0.3, delta=4.0),
    KernelParams(beta=0.04, bias_correction=True, log_ratio_clamp=1.0),
    KernelParams(beta=0.04, kl_delta_clamp=1.0, kl_clamp=0.4),
]


@pytest.mark.parametrize("surrogate", contract.SURROGATES)
@pytest.mark.parametrize("kl", contract.KL_ESTIMATORS)
@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_objective(kernels, surrogate, kl, variant):
    params = VARIANTS[variant]._replace(surrogate=surrogate, kl=kl)
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
    table = make_table(count, multiplier=multiplier, ref=ref, entropy_threshold=0.1)
    table[FIELD["advantage"]][:20] = 0.0
    found = torch.stack(kernels.objective(x, logp, entropy, table, params))
    advantage = table[FIELD["advantage"]]
    columns = [t.tolist() for t in (x, logp, entropy, advantage, ref, multiplier, table[FIELD["entropy_threshold"]])]
    rounded = params._replace(**{k: float(np.float32(v)) for k, v in params._asdict().items() if isinstance(v, float)})
    expected = torch.tensor([objective_float64(rounded, *row) for row in zip(*columns, strict=True)]).T
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), expected.double(), rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize("kl", contract.KL_ESTIMATORS[1:])
def test_bias_corrected_kl_stops_at_the_exponential_of_80(kernels, kl):
    points = torch.tensor([-90.0, -3.0, 0.0, 3.0, 35.0, 60.0, 79.0, 90.0])
    x, d = (part.flatten() for part in torch.meshgrid(points, points, indexing="ij"))
    logp = -torch.ones_like(x)
    params = KernelParams(surrogate="reinforce", kl=kl, beta=0.5, bias_correction=True)
    table = make_table(len(x), advantage=0.0, ref=logp + d)
    found = torch.stack(kernels.objective(x, logp, torch.ones_like(x), table, params))
    expected = torch.tensor(
        [
            objective_float64(params, a, -1.0, 1.0, 0.0, -1.0 + b, 1.0, -math.inf)
            for a, b in zip(x.tolist(), d.tolist(), strict=True)
        ]
    ).T
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), expected.double(), rtol=3e-5, atol=3e-6)


def test_zero_factors_select_zero(kernels):
    """Nothing infinite is multiplied by 0: a dropped token with an overflowing ratio, a k3 beyond fp32, beta = 0."""
    x, logp, entropy = torch.full((2,), math.inf), torch.full((2,), -2.0), torch.ones(2)
    table = make_table(2, multiplier=torch.tensor([0.0, 1.0]), ref=500.0, advantage=1.0)
    value, d_ratio, d_direct, kl = kernels.objective(x, logp, entropy, table, KernelParams(kl="k3"))
    assert value.tolist() == [0.0, pytest.approx(-1.2)] and not d_ratio.any() and not d_direct.any()
    assert kl.isfinite().all()


# --- reduction and groups -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("has_old", [True, False])
def test_reduce(kernels, threads, has_old):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([5, 0, 17, 1, 40])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    count, group_index = int(lengths.sum()), torch.tensor([1, 0, 0, 2, 1])
    x, logp, entropy, value, kl, g_logp, old, rollout = torch.randn(8, count, generator=generator)
    scored = torch.rand(count, generator=generator) < 0.8
    g_logp[::3] = 0
    rollout[::4] = math.nan
    table = make_table(count, old=old, rollout=rollout, rollout_weight=torch.rand(count, generator=generator))
    table[FIELD["weight_entropy"]] = (torch.arange(count) % 2).float() * 0.3
    table[FIELD["weight_direct"]] = (torch.arange(count) % 5).float()
    value[::5] = math.inf  # weight 0: must not count
    for tensor in (x, logp, entropy, kl, value, g_logp, *table):
        tensor[~scored] = math.nan  # padding holds anything
    params = KernelParams(delta=1.6, log_ratio_clamp=1.0, has_old=has_old)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sequences, groups, totals, extrema = kernels.reduce(
            scored, x, logp, entropy, value, kl, g_logp, table, params, cu_seqlens, group_index, 3
        )
    finally:
        torch.set_num_threads(before)

    ratio = x.double().clamp(-1, 1).exp()
    bounded, t = ratio.clamp(max=1.6), {name: table[i].double() for name, i in FIELD.items()}
    reference = t["old"] if has_old else logp.double()
    mismatch = torch.where(t["rollout"].isnan(), 0.0, (reference - t["rollout"]).abs())
    columns = {
        "loss": torch.where(t["weight_direct"] == 0, 0, t["weight_direct"] * value) + t["weight_entropy"] * entropy,
        "tokens": torch.ones(count),
        "kl": kl,
        "entropy": entropy,
        "ratio": ratio,
        "clip_low": (bounded < 0.8) & (t["advantage"] < 0),
        "clip_high": (bounded > 1.2) & (t["advantage"] > 0),
        "cispo_clip": (bounded > 0.2) & (t["advantage"] > 0),
        "approx_kl": t["old"] - logp if has_old else 0 * logp,
        "mismatch": mismatch,
        "mismatch_count": ~t["rollout"].isnan(),
        "rollout_weight": t["rollout_weight"],
        "rollout_weight_sq": t["rollout_weight"] ** 2,
        "zero_gradient": (g_logp == 0) & (t["weight_entropy"] == 0),
    }
    matrix = torch.stack([torch.where(scored, columns[name].double(), 0.0) for name in contract.COLUMNS], 1)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    expected = torch.zeros(len(lengths), matrix.shape[1], dtype=torch.float64).index_add_(0, owner, matrix)
    by_group = torch.zeros(3, matrix.shape[1], dtype=torch.float64).index_add_(0, group_index, expected)
    torch.testing.assert_close(sequences.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(groups.double(), by_group, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(totals.double(), expected.sum(0), rtol=1e-6, atol=1e-6)
    known = scored & ~t["rollout"].isnan()
    limits = torch.stack([ratio[scored].min(), ratio[scored].max(), mismatch[known].max()])
    torch.testing.assert_close(extrema.double(), limits, rtol=1e-6, atol=0)


def test_reduce_of_nothing(kernels):
    empty, table = torch.empty(0), make_table(0)
    scored, cu_seqlens = torch.empty(0, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    sums = kernels.reduce(scored, *[empty] * 6, table, KernelParams(), cu_seqlens, None, 0)
    assert [tuple(t.shape) for t in sums[:2]] == [(2, 14), (0, 14)] and not sums[0].any() and not sums[2].any()
    assert sums[3].tolist() == [math.inf, -math.inf, -math.inf]
    with pytest.raises(ValueError, match="offsets"):  # a GPU would have to be waited for
        backend.reduce(scored, *[empty] * 6, table, KernelParams(), cu_seqlens + 5, None, 0)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_group_statistics(kernels, scale, baseline, ddof):
    rewards = np.random.default_rng(0).normal(size=24).astype(np.float32)
    index = np.array([0, 1, 2, 3] * 6)
    rewards[index == 1] = 0.1  # all equal, and six of them do not average to it exactly
    rewards[index == 2] = np.nan  # no verdict at all
    rewards[3], rewards[4] = np.nan, np.nan
    eps = 1e-4
    advantages, mean, std = kernels.group_statistics(
        torch.tensor(rewards), torch.tensor(index), 4, scale, baseline, ddof, eps
    )
    exact_rewards, expected = rewards.astype(np.float64), np.zeros(24)
    batch_std = np.nanstd(exact_rewards, ddof=ddof)
    for group in (0, 1, 3):
        members = exact_rewards[(index == group) & ~np.isnan(rewards)]
        for i in np.flatnonzero((index == group) & ~np.isnan(rewards)):
            others = (members.sum() - exact_rewards[i]) / (len(members) - 1)
            base = {"mean": members.mean(), "leave_one_out": others, "none": 0.0}[baseline]
            divisor = {"group": members.std(ddof=ddof) + eps, "batch": batch_std + eps, "none": 1.0}[scale]
            expected[i] = (exact_rewards[i] - base) / divisor
        assert mean[group].item() == pytest.approx(members.mean(), rel=1e-6)
        assert std[group].item() == pytest.approx(members.std(ddof=ddof), rel=1e-6, abs=1e-12)
    assert mean[2].isnan() and std[2].isnan() and std[1] == 0
    if baseline != "none":
        assert (advantages[torch.tensor(index == 1)] == 0).all()
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-6, atol=1e-9)


def test_group_of_one(kernels):
    rewards, index = torch.tensor([3.0, 5.0]), torch.tensor([0, 1])
    for baseline in ("mean", "leave_one_out"):
        advantages, mean, std = kernels.group_statistics(rewards, index, 2, "group", baseline, 1, 0.0)
        assert not advantages.any() and not std.any() and torch.equal(mean, rewards)
    with pytest.raises(ValueError, match="group_index"):
        backend.group_statistics(rewards, index + 1, 2, "group", "mean", 1, 0.0)


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
    with pytest.raises(ValueError, match="ids"):
        backend.add_rows(target, ids + 45, scale, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (8, 8), (37, 24), (100, 41), (1056, 72)])
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


def test_add_transposed_takes_a_transpose_with_contiguous_rows():
    target, source = torch.empty(8, 5), torch.empty(5, 8, dtype=torch.bfloat16)
    for wrong in (target.T, target[:7]):
        with pytest.raises(ValueError, match="transpose"):
            backend.add_transposed(wrong, source, add=False)
    with pytest.raises(ValueError, match="contiguous rows"):
        backend.add_transposed(target, source.T.contiguous().T, add=False)
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        backend.add_transposed(target.half(), source, add=False)


def test_a_module_of_another_interface_is_not_used(monkeypatch):
    monkeypatch.setattr(backend.module, "INTERFACE", -1)
    found, reason = cpu_backend.load()
    assert found is None
    assert "build again" in reason

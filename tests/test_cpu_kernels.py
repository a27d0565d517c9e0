"""Row kernels, called directly, against float64: every element type, instruction set and odd shape; Triton's too."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import RowKernels
from torch import Tensor

from grpo_kernels import contract
from grpo_kernels.backends import get_backend
from grpo_kernels.backends.compiled import cpu as cpu_backend
from grpo_kernels.contract import FIELD, KernelParams

backend, reason = cpu_backend.load()
if backend is None and os.environ.get("GRPO_KERNELS_NATIVE") == "1":
    raise RuntimeError(reason)
assert backend is not None, reason  # the tests need the compiled module: a skip would hide that it is missing
backend = RowKernels(backend)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOCABS = (1, 2, 15, 16, 63, 64, 65, 1000, 2047, 2048, 2049, 5003)
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a last place


def usable_isas() -> list[str]:
    found = []
    for name in ("avx512", "avx2", "baseline"):
        try:
            backend.module.set_cpu_isa(name)
            found.append(name)
        except ValueError:
            pass
    backend.module.set_cpu_isa(found[0])
    return found


@pytest.fixture(params=usable_isas())
def isa(request):
    before = backend.module.cpu_isa()
    backend.module.set_cpu_isa(request.param)
    yield request.param
    backend.module.set_cpu_isa(before)


@pytest.fixture(params=[*usable_isas(), "triton"])
def kernels(request, monkeypatch):
    """The compiled kernels with each instruction set, and Triton's.

    Those in about eight blocks per row: the interpreter's time goes by the number of operations.
    """
    if request.param == "triton":
        triton = RowKernels(get_backend("triton"))
        from grpo_kernels.backends.launch import RowLaunch
        from grpo_kernels.backends.triton import rows

        def blocks(kernel, device, vocab, dtype):
            return RowLaunch(32, max(64, 1 << (vocab // 8).bit_length()), 1)

        monkeypatch.setattr(rows, "row_launch", blocks)
        yield triton
        return
    before = backend.module.cpu_isa()
    backend.module.set_cpu_isa(request.param)
    yield backend
    backend.module.set_cpu_isa(before)


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


def make_logits(rows: int, vocab: int, dtype: torch.dtype, spread: float = 4.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * spread).to(dtype)
    return logits, torch.randint(vocab, (rows,), generator=generator)


def exact(logits: Tensor, ids: Tensor, temperature: Tensor, params: KernelParams) -> tuple[Tensor, ...]:
    """(u, logp, lse, entropy) in float64, differentiable in u."""
    u = logits.double().requires_grad_()
    z = params.logit_scale * u
    if params.softcap:
        z = params.softcap * torch.tanh(z / params.softcap)
    z = z / temperature.double()[:, None]
    lse = z.logsumexp(-1)
    log_p = z - lse[:, None]
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    return u, log_p.gather(1, ids[:, None])[:, 0], lse, entropy


def check_gradient(grad: Tensor, expected: Tensor, scale: Tensor) -> None:
    """Within the rounding of the gradient's type, plus an fp32 error of the row's own size."""
    bound = expected.abs() * (UNIT[grad.dtype] * 1.01 + 1e-5) + scale.double().abs()[:, None] * 1e-6
    if grad.dtype == torch.float16:
        bound = bound + 2.0**-25
    assert ((grad.double() - expected).abs() <= bound).all()


# --- interface ------------------------------------------------------------------------------------------------------


def test_names_match_python():
    module = backend.module
    assert module.TABLE_FIELDS == contract.TABLE_FIELDS
    assert module.SURROGATES == contract.SURROGATES
    assert module.KL_ESTIMATORS == contract.KL_ESTIMATORS
    assert module.COLUMNS == contract.COLUMNS
    assert module.VALUE_FIELDS == contract.VALUE_FIELDS
    assert module.LEVELS == contract.LEVELS
    assert module.AGGREGATIONS == contract.AGGREGATIONS
    for names, integers, structure in (
        (module.PARAMS, module.PARAM_INTEGERS, KernelParams()),
        (module.PLAN_RULES, module.PLAN_RULE_INTEGERS, contract.PlanRules()),
    ):
        assert sorted(names) == sorted(structure._fields)
        assert all(isinstance(getattr(structure, name), float) == (i >= integers) for i, name in enumerate(names))
    assert module.DTYPES == ("float32", "bfloat16", "float16")


def test_wrong_arguments_are_refused():
    logits, ids = make_logits(3, 8, torch.float32)
    ones = torch.ones(3)
    with pytest.raises(ValueError, match="contiguous rows"):
        backend.stats(logits.T.contiguous().T, ids, ones, KernelParams())
    with pytest.raises(ValueError, match="logits"):
        backend.stats(logits.double(), ids, ones, KernelParams())
    with pytest.raises(ValueError, match="int64"):
        backend.stats(logits, ids.int(), ones, KernelParams())
    with pytest.raises(ValueError, match="logit_scale"):
        backend.stats(logits, ids, ones, KernelParams(logit_scale=0.0))
    with pytest.raises(ValueError, match="shape"):
        backend.fused(logits, logits[:2], ids, make_table(3), KernelParams())
    with pytest.raises(ValueError, match="table"):
        backend.fused(logits, logits, ids, make_table(4), KernelParams())
    with pytest.raises(ValueError, match="usable"):
        backend.module.set_cpu_isa("altivec")


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the processor is known from Linux")
def test_instruction_sets_are_those_of_the_processor():
    facts = Path("/proc/cpuinfo").read_text()
    flags = set(re.search(r"^(?:flags|Features)\s*: (.*)$", facts, re.MULTILINE)[1].split())
    avx2 = {"avx2", "fma", "f16c", "movbe", "bmi1", "bmi2", "abm"}
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    needed = {"avx512": avx512, "avx2": avx2, "baseline": set()}
    assert usable_isas() == [name for name, wanted in needed.items() if wanted <= flags]


@pytest.mark.parametrize("name", ["baseline", "bogus"])
def test_isa_from_the_environment(name):
    code = "from grpo_kernels.backends.compiled.cpu import load; b, why = load(); print(b and b.module.cpu_isa(), why)"
    environment = {**os.environ, "GRPO_KERNELS_CPU_ISA": name}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    if name == "baseline":
        assert out.split() == ["baseline"]
    else:
        assert out.startswith("None") and "GRPO_KERNELS_CPU_ISA" in out and "bogus" in out


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"logit_scale": 0.25}, {"softcap": 5.0, "logit_scale": 1.5}])
def test_rows(kernels, dtype, options):
    params = KernelParams(**options)
    for vocab in VOCABS:
        rows = 5
        logits, ids = make_logits(rows, vocab, dtype)
        temperature = torch.tensor([1.0, 0.7, 1.0, 1.3, 2.0])
        g_logp, g_entropy = torch.tensor([1.0, -0.3, 0.0, 0.0, 2.0]), torch.tensor([0.0, 0.5, 0.0, -1.0, 0.1])
        u, logp, lse, entropy = exact(logits, ids, temperature, params)
        expected = torch.autograd.grad((g_logp * logp + g_entropy * entropy).sum(), u)[0]

        found = kernels.stats(logits, ids, temperature, params)
        for value, truth in zip(found, (logp, lse, entropy), strict=True):
            torch.testing.assert_close(value.double(), truth.detach(), rtol=5e-7, atol=2e-6)
        for grad_dtype in DTYPES:
            grad = torch.empty(rows, vocab, dtype=grad_dtype)
            kernels.gradient(logits, grad, ids, temperature, found[1], found[2], g_logp, g_entropy, params)
            scale = (g_logp.abs() + g_entropy.abs() * 8) * params.logit_scale / temperature
            check_gradient(grad, expected, scale)
            assert not grad[2].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_is_stats_objective_gradient(kernels, dtype):
    params = KernelParams(kl="k3", beta=0.1)
    for vocab in VOCABS:
        rows = 16
        logits, ids = make_logits(rows, vocab, dtype)
        table = make_table(rows, temperature=0.8, weight_entropy=torch.arange(rows) % 2 * 0.1)
        temperature = table[FIELD["temperature"]]
        logp, lse, entropy = kernels.stats(logits, ids, temperature, params)
        table[FIELD["old"]] = logp + torch.linspace(-0.5, 0.5, rows)
        table[FIELD["ref"]] = logp + torch.linspace(-1, 1, rows)
        grad, expected = torch.empty_like(logits), torch.empty(rows, vocab)

        found = kernels.fused(logits, grad, ids, table, params)
        for value, truth in zip(found, (logp, lse, entropy), strict=True):
            assert torch.equal(value, truth)
        _, d_ratio, d_direct, _ = kernels.objective(logp - table[FIELD["old"]], logp, entropy, table, params)
        g_entropy = table[FIELD["weight_entropy"]]
        kernels.gradient(logits, expected, ids, temperature, lse, entropy, d_ratio + d_direct, g_entropy, params)
        check_gradient(grad, expected.double(), (d_ratio.abs() + d_direct.abs() + g_entropy * 8) / temperature)


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("vocab", [133, 5008])
def test_rows_of_a_larger_batch(kernels, vocab, biased, indexed):
    """Found by token, with the bias added: the bits of the same rows alone, and of the other tokens nothing."""
    count, tokens, params = 5, 23, KernelParams(kl="k3", beta=0.1)
    index = torch.tensor([2, 3, 11, 17, 22]) if indexed else None
    rows = contract.Rows(0, count, index) if indexed else contract.Rows(9, 9 + count)
    logits, _ = make_logits(count, vocab, torch.float32)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(vocab, (tokens,), generator=generator)
    table = make_table(tokens, temperature=0.8, old=-9.0, ref=-8.0, weight_entropy=torch.arange(tokens) % 2 * 0.1)
    temperature = table[FIELD["temperature"]]
    bias = torch.randn(vocab, generator=generator) if biased else None
    alone = logits + bias if biased else logits
    own_ids, own_table = rows.take(ids).contiguous(), rows.take(table, 1).contiguous()
    grad, error, expected, expected_error = (torch.empty(shape) for shape in ((count, vocab), count) * 2)

    stats = kernels.fused(alone, expected, own_ids, own_table, params, expected_error)
    values, found = (contract.no_values(tokens, torch.float32, logits.device) for _ in range(2))
    chunk, gradients = contract.LogitChunk(logits, rows, ids, bias), contract.RowGradients(grad, error)
    kernels.single_pass(chunk, table, values, params, gradients)
    assert torch.equal(grad, expected) and torch.equal(error, expected_error)
    kernels.single_pass(chunk, table, found, params)
    assert all(map(torch.equal, found, values))
    for value, truth in zip((values.logp, values.lse, values.entropy), stats, strict=True):
        assert torch.equal(rows.take(value), truth)
    evaluated = contract.TokenValues(values.columns.clone(), values.lse)
    evaluated.columns[2:] = 0
    kernels.token_objective(rows, table, evaluated, params)
    torch.testing.assert_close(values.columns, evaluated.columns, rtol=1e-5, atol=1e-6)
    others = torch.ones(tokens, dtype=torch.bool)
    others[torch.arange(tokens)[rows.start : rows.stop] if index is None else index] = False
    assert not values.columns[:, others].any() and not values.lse[others].any()

    by_statistics = contract.no_values(tokens, torch.float32, logits.device)
    kernels.statistics(chunk, temperature, by_statistics, params)
    assert torch.equal(by_statistics.columns[:2], values.columns[:2]) and torch.equal(by_statistics.lse, values.lse)
    assert not by_statistics.columns[2:].any()
    g_logp, g_entropy = torch.randn(2, tokens, generator=generator)
    kernels.logits_gradient(chunk, temperature, values, g_logp, g_entropy, params, gradients)
    per_row = (rows.take(x).contiguous() for x in (temperature, values.lse, values.entropy, g_logp, g_entropy))
    kernels.gradient(alone, expected, own_ids, *per_row, params, expected_error)
    assert torch.equal(grad, expected) and torch.equal(error, expected_error)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_gradient_over_the_logits(kernels, vocab, grad_dtype):
    """In place, and 16-bit gradients over the front of the fp32 row they come from; a row stride wider than the row."""
    rows, row_stride = 4, vocab + 3
    buffer = torch.full((rows, row_stride), 7.5)
    logits = buffer[:, :vocab]
    values, ids = make_logits(rows, vocab, torch.float32)
    logits.copy_(values)
    apart = torch.empty(rows, vocab, dtype=grad_dtype)
    table, params = make_table(rows, weight_entropy=0.2), KernelParams(has_old=False)
    over = logits if grad_dtype == torch.float32 else buffer.view(grad_dtype)[:, :vocab]
    assert over.data_ptr() == logits.data_ptr()

    expected = kernels.fused(logits, apart, ids, table, params)
    found = kernels.fused(logits, over, ids, table, params)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(over, apart)
    assert (buffer[:, vocab:] == 7.5).all()


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_sixteen_bit_gradient_in_place(kernels, dtype):
    logits, ids = make_logits(3, 3001, dtype)
    apart, table, params = torch.empty_like(logits), make_table(3), KernelParams(has_old=False)
    kernels.fused(logits, apart, ids, table, params)
    kernels.fused(logits, logits, ids, table, params)
    assert torch.equal(logits, apart)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_rows(kernels, dtype):
    vocab = 3000
    logits = torch.zeros(8, vocab, dtype=dtype)
    logits[0] = -1e4  # a maximum far below zero
    logits[1, ::2] = -math.inf  # a masked vocabulary, the sampled id inside
    logits[2, :2500] = -math.inf  # whole blocks of it
    logits[3, 17] = 200.0  # one certain token, sampled
    logits[4, 17] = 200.0  # and not sampled
    logits[5] = torch.linspace(-6e4, 6e4, vocab).to(dtype)
    logits[6, -1] = 95.0
    logits[7, 1:] = -math.inf
    ids = torch.tensor([3, 1, 2999, 17, 18, 0, vocab - 1, 0])
    temperature, ones = torch.ones(8), torch.ones(8)
    params = KernelParams()
    _, logp, lse, entropy = exact(logits, ids, temperature, params)
    found = kernels.stats(logits, ids, temperature, params)
    for value, truth in zip(found, (logp, lse, entropy), strict=True):
        torch.testing.assert_close(value.double(), truth.detach(), rtol=3e-7, atol=2e-6)
    grad = torch.empty(8, vocab)
    kernels.gradient(logits, grad, ids, temperature, found[1], found[2], ones, 0.1 * ones, params)
    expected = torch.softmax(logits.double(), -1)
    log_p = torch.where(expected > 0, logits.double() - lse.detach()[:, None], 0.0)
    expected = -expected * (1 + 0.1 * (log_p + entropy.detach()[:, None]))
    expected[torch.arange(8), ids] += 1
    check_gradient(grad, expected, ones * 2)
    assert (grad[torch.isneginf(logits)] == 0).all()
    table = make_table(8, advantage=-1.0, weight_entropy=0.1)
    kernels.fused(logits, grad, ids, table, KernelParams(surrogate="reinforce"))
    check_gradient(grad, expected, ones * 2)
    assert (grad[torch.isneginf(logits)] == 0).all()


def test_masked_or_absent_id(kernels):
    logits, _ = make_logits(3, 100, torch.float32)
    logits[0, 5] = -math.inf
    grad, ids = torch.empty_like(logits), torch.tensor([5, -1, 100])
    logp, lse, _ = kernels.fused(logits, grad, ids, make_table(3, weight_direct=0.0, weight_ratio=0.0), KernelParams())
    assert logp[0] == -math.inf and logp[1:].isnan().all() and lse.isfinite().all()
    assert not grad.any()


def test_nan_logit_shows(kernels):
    for vocab, place in itertools.product((1, 64, 3000), (0, -1)):
        logits, ids = torch.zeros(1, vocab), torch.zeros(1, dtype=torch.int64)
        logits[0, place] = math.nan
        assert all(v.isnan().all() for v in kernels.stats(logits, ids, torch.ones(1), KernelParams()))


def test_logp_is_as_accurate_as_torch(kernels):
    for spread in (1.0, 5.0, 30.0):
        logits, ids = make_logits(64, 32003, torch.float32, spread)
        truth = exact(logits, ids, torch.ones(64), KernelParams())[1].detach()
        found = kernels.stats(logits, ids, torch.ones(64), KernelParams())[0]
        rival = torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0]
        assert (found - truth).abs().max() <= (rival - truth).abs().max()


def test_threads_change_no_bit(isa):
    logits, ids = make_logits(37, 4099, torch.float32)
    table, params = make_table(37, weight_entropy=0.1), KernelParams(has_old=False)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            grad = torch.empty_like(logits)
            results.append((*backend.fused(logits, grad, ids, table, params), grad))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_sixteen_bit_conversion(isa, dtype):
    """Every 16-bit pattern is read exactly; gradients round to nearest even as torch does."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    patterns = patterns[patterns.isfinite()]
    rows = patterns[:, None].contiguous()  # V = 1: lse = z
    zeros = torch.zeros(len(rows), dtype=torch.int64)
    lse = backend.stats(rows, zeros, torch.ones(len(rows)), KernelParams())[1]
    assert torch.equal(lse, patterns.float())

    wide = torch.cat([patterns.float() * 1.00195, torch.logspace(-9, 5.2, 5000), torch.tensor([math.nan, 1e9])])
    logits, ids = torch.zeros(len(wide), 2), torch.zeros(len(wide), dtype=torch.int64)
    half, full = torch.empty(len(wide), 2, dtype=dtype), torch.empty(len(wide), 2)
    ones = torch.ones(len(wide))
    _, lse, entropy = backend.stats(logits, ids, ones, KernelParams())
    for grad in (half, full):
        backend.gradient(logits, grad, ids, ones, lse, entropy, wide, 0 * ones, KernelParams())
    torch.testing.assert_close(half, full.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("way", ["fused", "gradient"])
def test_rounding_error_is_what_rounding_took_from_the_sampled_id(kernels, way):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 77, generator=generator).bfloat16()
    ids = torch.randint(0, 77, (6,), generator=generator)
    table, params = make_table(6, weight_direct=0.37), KernelParams(surrogate="reinforce", has_old=False)
    exact, rounded, rounding_error = torch.empty(6, 77), torch.empty(6, 77).bfloat16(), torch.full((6,), torch.nan)
    stats = kernels.fused(logits, exact, ids, table, params)
    if way == "fused":
        kernels.fused(logits, rounded, ids, table, params, rounding_error)
    else:
        g_logp = -0.37 * table[FIELD["advantage"]]
        ones = torch.ones(6)
        kernels.gradient(logits, rounded, ids, ones, stats.lse, stats.entropy, g_logp, 0 * ones, params, rounding_error)
    rows = torch.arange(6)
    torch.testing.assert_close(rounded[rows, ids].float() + rounding_error, exact[rows, ids], rtol=1e-6, atol=0)
    assert (rounding_error.abs() > 1e-6 * exact[rows, ids].abs()).any()

"""The CUDA kernels of rows, tokens and rewards on an emulated GPU, against float64: every element type, odd shapes and
addresses, clusters of every size and none, several orders of the threads; each kernel is called twice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulator import Kernels, build_kernels
from emulator import checks as c
from emulator.build import ROOT, compiler, few_types

from grpo_kernels import params as contract
from grpo_kernels.params import FIELD, KernelParams

VOCABS = (1, 2, 15, 16, 63, 64, 65, 1000, 2047, 2048, 2049, 5003)
ORDERS = (0, 1, 2, 3)  # the lowest warp first, the highest first, two random ones
OPTIONS = ({}, {"logit_scale": 0.25}, {"softcap": 5.0, "logit_scale": 1.5})


@pytest.fixture(scope="module")
def library() -> Path:
    return build_kernels()


@pytest.fixture
def kernels(library) -> Kernels:
    kernels = Kernels(library)
    kernels.use()
    return kernels


@pytest.fixture(params=c.DEVICES)
def device(request) -> str:
    return request.param


def pair_name(pair: tuple[torch.dtype, torch.dtype]) -> str:
    return "-".join(str(t).removeprefix("torch.") for t in pair)


# --- rows -----------------------------------------------------------------------------------------------------------


def test_devices_take_the_ways_that_they_are_named_for(kernels, device):
    kernels.use(c.DEVICES[device])
    logits, ids = c.make_logits(30, 5003, torch.float32)
    kernels.fused(logits, logits, ids, c.make_table(30), KernelParams())
    launch = kernels.last_launch()
    if "streamed" in device:
        assert launch.kernel == "gk_fused_streamed_f32_f32"
        assert launch.grid == 2  # blocks do several rows each
        assert launch.cluster == 1
    else:
        assert launch.kernel == "gk_fused_resident_f32_f32"
        assert launch.cluster == (int(device[-1]) if "cluster" in device else 1)


def test_an_h200_holds_large_vocabularies(kernels):
    """As `fused` would launch them there: rows up to V = 262,144 stay in shared memory, 768 threads share an SM."""
    for vocab, blocks_per_multiprocessor in ((32000, 3), (128256, 3), (152064, 3), (202048, 2), (262144, 1)):
        logits, ids = c.make_logits(1, vocab, torch.float32)
        kernels.fused(logits, logits, ids, c.make_table(1), KernelParams())
        launch = kernels.last_launch()
        assert launch.kernel.startswith("gk_fused_resident")
        assert blocks_per_multiprocessor * (launch.shared + 1024) <= 233472
        assert blocks_per_multiprocessor * launch.block == 768
    logits, ids = c.make_logits(1, 2**19, torch.bfloat16)
    kernels.fused(logits, logits, ids, c.make_table(1), KernelParams())
    assert kernels.last_launch().kernel.startswith("gk_fused_streamed")


@pytest.mark.parametrize("order", ORDERS)
def test_rows_that_leave_room_for_one_block_or_two(kernels, order):
    kernels.use(c.DEVICES["capability 8.0, resident"], order)
    for vocab, threads in ((17001, 384), (32003, 768)):
        c.check_rows(kernels, vocab, (torch.float32, torch.bfloat16), KernelParams(), shift=order)
        launch = kernels.last_launch()
        assert (launch.kernel, launch.block) == ("gk_fused_resident_f32_bf16", threads)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("pair", c.PAIRS, ids=pair_name)
def test_rows(kernels, pair, options):
    for i, vocab in enumerate(VOCABS):
        for j, device in enumerate(("cluster 1", "cluster 8", "streamed")):
            kernels.use(c.DEVICES[device], ORDERS[(i + j) % 4])
            c.check_rows(kernels, vocab, pair, KernelParams(**options), shift=i % 7)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_on_every_device(kernels, device, order):
    kernels.use(c.DEVICES[device], order)
    for pair, options in zip(c.PAIRS, [{}, {}, *OPTIONS], strict=True):
        c.check_rows(kernels, 5003, pair, KernelParams(**options), shift=order)


@pytest.mark.parametrize("shift", range(8))
def test_rows_at_every_address(kernels, device, shift):
    kernels.use(c.DEVICES[device])
    for pair in c.PAIRS[::2]:
        c.check_rows(kernels, 70, pair, KernelParams(softcap=5.0 * (shift % 2)), shift)


@pytest.mark.parametrize("pair", c.PAIRS, ids=pair_name)
def test_gradient_over_the_logits(kernels, device, pair):
    for i, vocab in enumerate(VOCABS):
        kernels.use(c.DEVICES[device], ORDERS[i % 4])
        c.check_in_place(kernels, vocab, pair, shift=i % 5)
    for order in ORDERS:
        kernels.use(c.DEVICES[device], order)
        c.check_in_place(kernels, 5003, pair)


@pytest.mark.parametrize("pair", c.PAIRS, ids=pair_name)
def test_extreme_rows(kernels, device, pair):
    kernels.use(c.DEVICES[device])
    c.check_extremes(kernels, pair)


def test_masked_absent_silent_and_nan(kernels, device):
    kernels.use(c.DEVICES[device])
    for pair in c.PAIRS:
        c.check_absent_and_silent(kernels, pair)


@pytest.mark.parametrize("dtype", c.DTYPES)
def test_fused_is_stats_objective_gradient(kernels, device, dtype):
    kernels.use(c.DEVICES[device])
    rows, params = 16, KernelParams(kl="k3", beta=0.1)
    logits, ids = c.make_logits(rows, 1000, dtype)
    table = c.make_table(rows, temperature=0.8, weight_entropy=torch.arange(rows) % 2 * 0.1)
    temperature = table[FIELD["temperature"]].clone()
    logp, lse, entropy = kernels.stats(logits, ids, temperature, params)
    table[FIELD["base"]] = logp + torch.linspace(-0.5, 0.5, rows)
    table[FIELD["ref"]] = logp + torch.linspace(-1, 1, rows)
    grad, expected = torch.empty_like(logits), torch.empty(rows, 1000)
    c.check_statistics(kernels.fused(logits, grad, ids, table, params), (logp, lse, entropy))
    _, d_ratio, d_direct, _ = kernels.objective(logp - table[FIELD["base"]], logp, entropy, table, params)
    g_entropy = table[FIELD["weight_entropy"]].clone()
    kernels.gradient(logits.float(), expected, ids, temperature, lse, entropy, d_ratio + d_direct, g_entropy, params)
    c.check_gradient(grad, expected.double(), (d_ratio.abs() + d_direct.abs() + g_entropy * 8) / temperature)


def test_logp_is_as_accurate_as_torch(kernels):
    for spread in (1.0, 5.0, 30.0):
        logits, ids = c.make_logits(64, 32003, torch.float32, spread)
        truth = c.exact(logits, ids, torch.ones(64), KernelParams())[1].detach()
        rival = torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0]
        limit = (rival - truth).abs().max()
        by_fused = kernels.fused(logits, torch.empty_like(logits), ids, c.make_table(64), KernelParams())
        for found in (kernels.stats(logits, ids, torch.ones(64), KernelParams()), by_fused):
            assert (found.logp - truth).abs().max() <= limit


@pytest.mark.parametrize("dtype", c.DTYPES[1:])
def test_sixteen_bit_conversion(kernels, dtype):
    """16-bit patterns are read exactly; gradients round to nearest even as torch does."""
    patterns = torch.arange(-(2**15), 2**15, 37, dtype=torch.int16).view(dtype)
    patterns = patterns[patterns.isfinite()]
    rows = patterns[:, None].contiguous()  # V = 1: lse = z
    zeros = torch.zeros(len(rows), dtype=torch.int64)
    lse = kernels.stats(rows, zeros, torch.ones(len(rows)), KernelParams())[1]
    assert torch.equal(lse, patterns.double())

    wide = torch.cat([patterns.float() * 1.00195, torch.logspace(-9, 5.2, 500), torch.tensor([torch.nan, 1e9])])
    logits, ids = torch.zeros(len(wide), 2), torch.zeros(len(wide), dtype=torch.int64)
    half, full = torch.empty(len(wide), 2, dtype=dtype), torch.empty(len(wide), 2)
    ones = torch.ones(len(wide))
    _, lse, entropy = kernels.stats(logits, ids, ones, KernelParams())
    for grad in (half, full):
        kernels.gradient(logits, grad, ids, ones, lse, entropy, wide, 0 * ones, KernelParams())
    torch.testing.assert_close(half, full.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_refused_before_anything_is_launched(kernels):
    logits, ids = c.make_logits(3, 8, torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        kernels.fused(logits, torch.empty(3, 8), ids, c.make_table(3), KernelParams())
    with pytest.raises(RuntimeError, match="vocab"):
        kernels.stats(logits[:, :0], ids, torch.ones(3), KernelParams())
    for empty in (kernels.stats(logits[:0], ids[:0], torch.ones(0), KernelParams()).logp,):
        assert empty.numel() == 0


# --- tokens and rewards ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("surrogate", contract.SURROGATES)
def test_objective_is_that_of_the_cpu(kernels, surrogate):
    """objective.h is one file for both; here that each token gets its own columns, past the first block too."""
    from grpo_kernels.backends import native

    cpu, reason = native.load()
    assert cpu is not None, reason
    count = 1000
    x, logp, entropy, ref = torch.randn(4, count)
    table = c.make_table(count, ref=ref, multiplier=torch.rand(count), entropy_threshold=-0.5)
    for kl in contract.KL_ESTIMATORS:
        params = KernelParams(surrogate=surrogate, kl=kl, beta=0.1, bias_correction=kl == "k3")
        found, expected = (k.objective(x, logp, entropy, table, params) for k in (kernels, cpu))
        for value, truth in zip(found, expected, strict=True):
            torch.testing.assert_close(value, truth, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("has_base", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_reduce(kernels, order, has_base):
    kernels.use(order=order)
    c.check_reduce(kernels, has_base)


def test_reduce_of_nothing(kernels):
    empty, table = torch.empty(0), c.make_table(0)
    for cu_seqlens in (torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)):
        scored = torch.empty(0, dtype=torch.bool)
        sums = kernels.reduce(scored, *[empty] * 6, table, KernelParams(), cu_seqlens, None, 0)
        assert [tuple(t.shape) for t in sums[:2]] == [(len(cu_seqlens) - 1, 14), (0, 14)]
        assert not sums[0].any()
        assert not sums[2].any()
        assert sums[3].tolist() == [torch.inf, -torch.inf, -torch.inf]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_group_statistics(kernels, scale, baseline, ddof):
    kernels.use(order=ORDERS[ddof + 1])
    c.check_groups(kernels, scale, baseline, ddof)


@pytest.mark.parametrize("dtype", c.DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_scale(kernels, order, dtype):
    one_multiprocessor = (90, 1, *c.DEVICES["cluster 1"][2:])  # whose four blocks take several turns
    for device in (None, one_multiprocessor):
        kernels.use(device, order)
        for count, shift in ((1, 0), (7, 3), (8, 8), (101, 1), (4096, 5), (8193, 7), (60001, 2)):
            c.check_scale(kernels, dtype, count, shift)
    assert kernels.last_launch().grid == 4
    kernels.use()
    kernels.scale(torch.empty(2**16), torch.tensor(1.0))
    assert kernels.last_launch().grid == 16  # as many as there are tiles
    kernels.scale(torch.empty(0), torch.tensor(2.0))


# --- the emulator, and what it finds on its own ---------------------------------------------------------------------


def test_under_sanitizers(tmp_path):
    """Address and undefined-behaviour sanitizers see every access of the kernels, of two pairs of types."""
    few_types(ROOT / "csrc", tmp_path, "f32, bf16", "bf16, bf16")
    flags = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    library = build_kernels(tmp_path, flags)
    # The sanitizer must come first, and finds the C++ library's functions only if that is there at once too.
    runtime = [
        subprocess.run([*compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        for name in ("libasan.so", "libstdc++.so")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(name.strip() for name in runtime),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    command = [sys.executable, "-m", "emulator.sanitized", str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks passed" in done.stdout


def test_without_a_compiler_it_fails(monkeypatch, tmp_path):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(FileNotFoundError, match="no-such-compiler"):
        build_kernels(tmp_path / "csrc")

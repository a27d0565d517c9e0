"""On a device, with compiled kernels: precision, real sizes, graphs, streams, compilation, variants. `make test-gpu`.

The most valuable comes first, in the order of this file: where a GPU is paid by the minute a run may be cut off.
"""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from helpers import (
    Batch,
    assert_within,
    errors,
    fused,
    leaves,
    make_batch,
    off_policy,
    reference,
    relative,
    serve_only,
    true_logps,
    use_mask_path,
)
from kernel_checks import SIGNALLING
from option_space import CHUNK_ROWS, KERNEL_CASES, build, choose, eager_errors, name_of, rounding_of
from teachers import MODES, make_teacher, make_top_k
from test_precision import CONFIGS, assert_as_exact_as_eager, half_batch

import grpo_kernels as gk
from grpo_kernels.commands.harness import size_of_loss
from grpo_kernels.head import mask_paths
from grpo_kernels.kernels import get_backend
from grpo_kernels.names import DIVERGENCES

pytestmark = pytest.mark.gpu

VOCAB = 151936
DEVICE = "cuda"
KERNELS = ("cuda", "triton")
BACKENDS = (*KERNELS, "torch")


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return request.param


@pytest.fixture(params=KERNELS)
def kernels(request) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _exact_products():
    torch.backends.cuda.matmul.allow_tf32 = False


# --- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("served", [(), ("logp",), ("logp", "exponentials")], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CONFIGS)
def test_half_precision_is_as_exact_as_eager_with_float32_softmax(name, dtype, served, monkeypatch, kernels):
    serve_only(monkeypatch, kernels, served)
    config = CONFIGS[name]
    assert_as_exact_as_eager(config, dtype, kernels, DEVICE)
    batch = half_batch(dtype, config)
    logps, entropy = true_logps(batch, config)
    found = fused(batch, config, kernels, DEVICE)
    assert (found.logps - logps).abs().max() <= 2e-5 and (found.entropy - entropy).abs().max() <= 2e-5


def loss_step(batch: Batch, config: gk.GRPOConfig, backend: str):
    """A function of (hidden, weight) that runs forward and backward and returns loss, logps and both gradients."""

    def step(hidden, weight):
        out = gk.fused_grpo_loss(
            hidden, weight, batch.ids, batch.advantages, config=config, backend=backend, **batch.options
        )
        dhidden, dweight = torch.autograd.grad(out.loss, (hidden, weight))
        return out.loss.detach(), out.logps, dhidden, dweight

    return step


def leaves_of(batch: Batch) -> list[torch.Tensor]:
    return [x.clone().requires_grad_() for x in (batch.hidden, batch.weight)]


# --- real sizes -----------------------------------------------------------------------------------------------------


def big_batch(rows: int, width: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> Batch:
    """(8, rows / 8) on the device, with old log-probabilities near the true ones."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    hidden = torch.randn(8, rows // 8, width, generator=g, device=DEVICE).to(dtype)
    weight = (torch.randn(vocab, width, generator=g, device=DEVICE) * width**-0.5).to(dtype)
    ids = torch.randint(vocab, (8, rows // 8), generator=g, device=DEVICE)
    advantages = torch.randn(8, rows // 8, generator=g, device=DEVICE)
    with torch.no_grad():
        logps, _ = gk.fused_logps(hidden, weight, ids)
    noise = 0.1 * torch.randn(ids.shape, generator=g, device=DEVICE)
    return Batch(hidden, weight, ids, advantages, None, {"old_logps": logps + noise})


@pytest.mark.parametrize("served", [(), ("logp",), ("logp", "exponentials")], ids=str)
def test_more_logits_than_two_to_the_31(served, monkeypatch, kernels):
    """One launch over 16,384 x 151,936 logits, against float64 on a sample of the rows, twice for the same bits."""
    serve_only(monkeypatch, kernels, served)
    rows, width = 16384, 256
    batch = big_batch(rows, width, VOCAB, torch.bfloat16)
    config = gk.GRPOConfig(aggregation="token_mean", epsilon_high=0.3, chunk_rows=rows)
    runs = [loss_step(batch, config, kernels)(*leaves_of(batch)) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
    sample = torch.arange(0, rows, 509, device=DEVICE)
    h = batch.hidden.reshape(rows, width)[sample].double().requires_grad_()
    logits = h @ batch.weight.double().T
    logp = logits.log_softmax(-1).gather(1, batch.ids.reshape(-1)[sample, None])[:, 0]
    _, logps, dhidden, dweight = runs[0]
    assert (logps.reshape(-1)[sample] - logp).abs().max() <= 2e-5
    ratio = (logp - batch.options["old_logps"].reshape(-1)[sample].double()).exp()
    A = batch.advantages.reshape(-1)[sample].double()
    loss = -torch.minimum(ratio * A, ratio.clamp(0.8, 1.3) * A).sum() / rows
    (expected,) = torch.autograd.grad(loss, h)
    assert relative(dhidden.reshape(rows, width)[sample], expected) <= 6e-3
    assert dweight.isfinite().all() and dweight.any(1).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_logps_have_the_same_bits_in_any_batch(dtype, monkeypatch, kernels):
    """Alone, among 37, 1,000 and 8,191 tokens, in sequences of another length, with gradients."""
    serve_only(monkeypatch, kernels, ("logp",))
    batch = big_batch(8192, 256, VOCAB, dtype)
    hidden, ids = batch.hidden.reshape(-1, 256), batch.ids.reshape(-1)

    def score(rows: slice, leading: tuple[int, ...] = (-1,), hidden: torch.Tensor = hidden) -> torch.Tensor:
        shaped = hidden[rows].reshape(*leading, 256), batch.weight, ids[rows].reshape(leading)
        return torch.stack(gk.fused_logps(*shaped, entropy=True, backend=kernels)).reshape(2, -1)

    whole = score(slice(None))
    for rows in (slice(0, 1), slice(5000, 5001), slice(17, 54), slice(100, 1100), slice(1, 8192)):
        assert torch.equal(score(rows), whole[:, rows])
    assert torch.equal(score(slice(None), (64, 128)), whole)
    assert torch.equal(score(slice(None), hidden=hidden.detach().clone().requires_grad_()).detach(), whole)


def test_memory_is_one_chunk():
    batch = big_batch(8192, 512, VOCAB, torch.bfloat16)
    config = gk.GRPOConfig(chunk_rows=1024)
    leaf, weight = batch.hidden.requires_grad_(), batch.weight.requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gk.fused_grpo_loss(leaf, weight, batch.ids, batch.advantages, config=config, **batch.options).loss.backward()
    beyond = torch.cuda.max_memory_allocated() - before
    chunk, gradients = 1024 * VOCAB * 4, (leaf.numel() + 3 * weight.numel()) * 2  # dweight in float32, then in bfloat16
    assert beyond <= 1.1 * (chunk + gradients)


def test_a_single_chunk_is_rounded_once(kernels):
    """Its product returns 16 bits: as exact as the sum in float32 that two chunks take, at most one rounding away."""
    batch = big_batch(512, 256, 32003, torch.bfloat16)
    found = [loss_step(batch, gk.GRPOConfig(chunk_rows=rows), kernels)(*leaves_of(batch))[3] for rows in (512, 256)]
    assert relative(*found) <= 2**-9


# --- how it is called -----------------------------------------------------------------------------------------------


def device_batch(**options) -> Batch:
    return off_policy(make_batch(0, sequences=8, length=16, width=64, vocab=32003, masked=True, **options)).to(DEVICE)


@pytest.mark.parametrize("served", [(), ("exponentials",)], ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_captured_graph(level, served, monkeypatch, kernels):
    """Captured once at fixed shapes, replayed with other contents, padding poisoned: the same as called directly."""
    serve_only(monkeypatch, kernels, served)
    config = gk.GRPOConfig(importance_sampling_level=level, chunk_rows=40, beta=0.04)
    batch = device_batch().head_as(torch.bfloat16)
    batch.hidden.masked_fill_(~batch.options["completion_mask"][..., None], torch.nan)
    hidden, weight = leaves_of(batch)
    step = loss_step(batch, config, kernels)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(hidden, weight)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(hidden, weight)
    for scale in (1.0, 0.5):
        with torch.no_grad():
            weight.copy_(batch.weight * scale)
        graph.replay()
        found = [x.clone() for x in captured]
        expected = loss_step(batch, dataclasses.replace(config, static_shapes=True), kernels)(hidden, weight)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b) and a.isfinite().all()
        dropped = step(hidden, weight)  # without padding: other chunks, other orders of summation
        for a, b in zip(found, dropped, strict=True):
            assert relative(a, b) <= 1e-2


def test_torch_compile_takes_the_whole_graph(backend):
    batch = device_batch()
    leaves = leaves_of(batch)

    def loss(hidden, weight):
        return gk.fused_grpo_loss(hidden, weight, batch.ids, batch.advantages, backend=backend, **batch.options).loss

    expected = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_two_streams(kernels):
    """Both batches in flight at once, each on a stream of its own: as one after the other."""
    config = gk.GRPOConfig(beta=0.04)
    batches = [device_batch(), device_batch(bias=True)]
    leaves = [leaves_of(b) for b in batches]
    steps = [loss_step(b, config, kernels) for b in batches]
    expected = [step(*pair) for step, pair in zip(steps, leaves, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in batches]
    for _ in range(3):
        found = []
        for stream, step, pair in zip(streams, steps, leaves, strict=True):
            with torch.cuda.stream(stream):
                found.append(step(*pair))
        torch.cuda.synchronize()
        for one, other in zip(found, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_device_that_is_not_the_current_one(kernels):
    """The last device while the first is current; with a single device this is the ordinary case."""
    device = f"cuda:{torch.cuda.device_count() - 1}"
    batch = off_policy(make_batch(0)).to(device)
    expected = fused(batch, backend="torch", device=device)
    with torch.cuda.device(0):
        found = fused(batch, backend=kernels, device=device)
    for name, x in expected.grads.items():
        assert relative(found.grads[name], x) <= 1e-5


def test_nothing_is_read_back_but_the_counts(kernels):
    """One synchronisation per call, none with static shapes."""
    batch = device_batch()
    for static, allowed in ((False, 1), (True, 0)):
        config = gk.GRPOConfig(static_shapes=static, importance_sampling_level="sequence", chunk_rows=64)
        step = loss_step(batch, config, kernels)
        leaves = leaves_of(batch)
        step(*leaves)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                step(*leaves)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len([w for w in seen if "synchroniz" in str(w.message)]) <= allowed


@pytest.mark.parametrize("dtype", SIGNALLING)
def test_scale_touches_nothing_for_a_factor_of_one(dtype, kernels):
    """Off the alignment, and past 2^31 elements. Arithmetic would make a signalling NaN a quiet one."""
    scale, integer = get_backend(kernels).scale, torch.int32 if dtype == torch.float32 else torch.int16
    for count in (1, 1003, 2**31 + 5):
        bits = torch.full((count + 3,), SIGNALLING[dtype], dtype=integer, device=DEVICE)
        x = bits[3:].view(dtype)
        scale(x, torch.ones((), device=DEVICE))
        assert (bits == SIGNALLING[dtype]).all()
        for value, factor, expected in ((1.5, 0.5, 0.75), (1.5, torch.nan, torch.nan), (0.0, torch.inf, torch.nan)):
            scale(x.fill_(value), torch.tensor(factor, device=DEVICE))
            assert (x.isnan() if expected != expected else x == expected).all()
            assert (bits[:3] == SIGNALLING[dtype]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_gradients(dtype, monkeypatch, kernels):
    """With every entry kept as it is, the exact step; with 64 of a token near it, with the same bits twice."""
    monkeypatch.setattr(mask_paths, "DENSE_LOGITS_PER_GATHERED_ID", {"cuda": 1})  # no token takes products
    batch = big_batch(512, 256, 32003, dtype)
    exact, everything, few, again = (
        loss_step(batch, gk.GRPOConfig(chunk_rows=200, sparse_backward=theta), kernels)(*leaves_of(batch))
        for theta in (None, 1e-12, 1 / 64, 1 / 64)
    )
    for whole, a, b, c in zip(exact, everything, few, again, strict=True):
        assert relative(a, whole) <= (1e-5 if dtype == torch.float32 else 1e-2)
        assert torch.equal(b, c) and relative(b, whole) <= 0.3
    assert all(relative(b, whole) >= 0.01 for whole, b in zip(exact[2:], few[2:], strict=True))


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("kind", ["teacher", "tail", "renormalize"])
def test_divergences(divergence, kind, backend):
    """To a teacher's whole distribution, which "cuda" refuses, and to K ids of it; in 16 bits too."""
    batch, config = (
        off_policy(make_batch(2, bias=True, masked=True, vocab=5003)),
        gk.GRPOConfig(distill_coef=0.7, divergence=divergence, chunk_rows=7),
    )
    is_head, shape = kind == "teacher", (4, 6)
    batch = batch.with_options(teacher=make_teacher(shape, 5003) if is_head else make_top_k(shape, kind, 9, 5003))
    if is_head and backend == "cuda":
        with pytest.raises(ValueError, match="backend='cuda' has no kernels for a teacher"):
            fused(batch, config, backend, DEVICE)
        return
    for given, allowed in ((batch, 1e-5), (batch.head_as(torch.bfloat16), 2e-2)):
        found = errors(fused(given, config, backend, DEVICE), reference(given, config), loss_scale=1.0)
        assert max(found.values()) <= allowed, found


@pytest.mark.parametrize("mode", MODES)
def test_k_ids(mode, backend):
    """The policy's likeliest ids, a teacher on them, and their log-probabilities; equal calls have equal bits."""
    batch, config = make_batch(2, bias=True, masked=True, vocab=5003), gk.GRPOConfig(distill_coef=0.7, chunk_rows=7)
    teacher = dataclasses.replace(make_teacher((4, 6), 5003), top_k=9, mode=mode)
    batch = batch.with_options(teacher=teacher)
    exact = fused(batch.cast(torch.float64), config, "torch")
    found = errors(fused(batch, config, backend, DEVICE), exact, loss_scale=1.0)
    assert max(found.values()) <= 1e-5, found
    results = []
    for given, device, name in ((batch.cast(torch.float64), "cpu", "torch"), *[(batch, DEVICE, backend)] * 2):
        own = leaves(given.to(device))
        mask, bias = own.options["completion_mask"], own.bias
        ids, _ = gk.fused_top_k(own.hidden, own.weight, 9, lm_head_bias=bias, completion_mask=mask, backend=name)
        ids = torch.cat([ids, ids[..., :3]], -1)  # some repeat
        logps, _ = gk.fused_logps(own.hidden, own.weight, ids, lm_head_bias=bias, completion_mask=mask, backend=name)
        logps.sin().sum().backward()
        results.append([x.detach().cpu() for x in (ids, logps, own.hidden.grad, own.weight.grad, own.bias.grad)])
    (ids, *expected), (found_ids, *once), again = results
    assert torch.equal(found_ids, ids) and all(torch.equal(x, y) for x, y in zip(once, again[1:], strict=True))
    assert all(relative(x, y) <= 1e-5 for x, y in zip(once, expected, strict=True))


# --- variants in float32 --------------------------------------------------------------------------------------------
# 200 tests in all: what the kernels have to compile for them takes longer than the tests do.


def assert_as_exact_as_eager_float32(
    case, kernels: str, vocab: int, slack: float, chunk_rows: tuple[int | None, ...] = (None,)
) -> None:
    batch, config = build(case[0], choose(*case), vocab)
    exact, size = reference(batch, config), size_of_loss(batch, config)
    allowed = eager_errors(batch, config, exact, size)
    for rows in chunk_rows:
        found = fused(batch, dataclasses.replace(config, chunk_rows=rows), kernels, DEVICE)
        assert_within(errors(found, exact, size), allowed, slack)


@pytest.mark.parametrize("case", KERNEL_CASES[3::4], ids=name_of)
def test_variant_at_a_real_vocabulary(case, kernels):
    """A product of one row, which a sampling mask may leave, may add up in one order: 4e-6 over this many ids."""
    assert_as_exact_as_eager_float32(case, kernels, VOCAB, 5e-6)


@pytest.mark.parametrize("case", KERNEL_CASES, ids=name_of)
def test_variant_is_as_exact_as_eager_float32(case, kernels, monkeypatch):
    vocab, chosen = 37, choose(*case)
    use_mask_path(monkeypatch, chosen["sampling_mask"], vocab)
    assert_as_exact_as_eager_float32(case, kernels, vocab, rounding_of(case[0], chosen), CHUNK_ROWS)

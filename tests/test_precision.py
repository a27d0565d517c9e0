"""16-bit inputs: no worse than eager with a float32 softmax, for float16 under a loss scale too, however small the
weight of a token is; float32 logits bring the log-probabilities to 2e-5; a float32 lm_head of 16-bit hidden states."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import (
    LEAVES,
    LOSSES,
    Batch,
    Result,
    assert_close,
    call,
    errors,
    fused,
    leaves,
    loss_by,
    make_batch,
    off_policy,
    reference,
    relative,
    true_logps,
)
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.reference import reference_loss_from_logits

pytestmark = pytest.mark.each_value
HALF = (torch.bfloat16, torch.float16)
CONFIGS = {
    "grpo": gk.GRPOConfig(beta=0.04, aggregation="seq_mean"),
    "gspo": gk.GRPOConfig(importance_sampling_level="sequence", aggregation="seq_mean"),
    "cispo": gk.GRPOConfig(surrogate="cispo", epsilon_high=1.2),
    "entropy bonus": gk.GRPOConfig(entropy_coef=0.01, temperature=0.9),
}


def half_batch(dtype: torch.dtype, config: gk.GRPOConfig, seed: int = 5, ids: str | None = None) -> Batch:
    """Log-ratios are inside the clip range by 0.06 or outside by 0.06, of each token and of each sequence's mean.
    ids: any, or those of the policy; then logits are whole numbers, which 16 bits hold."""
    batch = make_batch(seed, sequences=8, length=8, width=64, vocab=1003).head_as(dtype)
    g = torch.Generator().manual_seed(seed)
    if ids is not None:
        for x in (batch.hidden, batch.weight):
            x.copy_(torch.randint(-1, 2, x.shape, generator=g))
    if ids == "sampled":
        probs = (batch.hidden.double() @ batch.weight.double().T).softmax(-1).view(64, -1)
        batch.ids.copy_(probs.multinomial(1, generator=g).view(8, 8))
    logps, _ = true_logps(batch, config)
    inside = (torch.rand(logps.shape, generator=g) - 0.5) * 0.2
    outside = torch.where(torch.rand(8, 1, generator=g) > 0.5, 0.45, -0.45)
    log_ratio = torch.where(torch.rand(8, 1, generator=g) > 0.5, inside, inside + outside)
    for bound in (0.8, 1.2):
        assert (log_ratio - torch.tensor(bound).log()).abs().min() >= 0.06
        assert (log_ratio.mean(1) - torch.tensor(bound).log()).abs().min() >= 0.06
    noise = 0.3 * torch.randn(logps.shape, generator=g)
    return batch.with_options(old_logps=(logps - log_ratio).float(), ref_logps=(logps + noise).float())


def gradients(loss: Tensor, batch: Batch, scale: float) -> dict[str, Tensor]:
    """Of the loss, from what the backward of `scale` times the loss gives."""
    (scale * loss).backward()
    return {"hidden": batch.hidden.grad.double() / scale, "weight": batch.weight.grad.double() / scale}


def run(batch: Batch, config: gk.GRPOConfig, dtype: torch.dtype, softmax: torch.dtype, scale: float = 1.0) -> Result:
    """The lm_head in `dtype`, everything after the logits in `softmax`, by autograd, under a loss scale."""
    batch = leaves(batch.head_as(dtype))
    logits = (batch.hidden @ batch.weight.T).to(softmax)
    options = {name: x.to(softmax) if isinstance(x, Tensor) else x for name, x in batch.options.items()}
    config = dataclasses.replace(config, logits_dtype=None)
    out = reference_loss_from_logits(logits, batch.ids, batch.advantages.to(softmax), config=config, **options)
    grads = gradients(out.loss, batch, scale)
    return Result(out.loss.detach(), out.logps.detach(), out.entropy.detach(), out.metrics, grads)


def root_mean_square(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: (sum(row[name] ** 2 for row in rows) / len(rows)) ** 0.5 for name in rows[0]}


def assert_as_exact_as_eager(
    config: gk.GRPOConfig, dtype: torch.dtype, backend: str, device: str = "cpu", seeds: int = 8,
    ids: str | None = None,
) -> None:  # fmt: skip
    """Over several batches: the rounding of a single one may cancel by luck."""
    ours, eager = [], []
    for seed in range(seeds):
        batch = half_batch(dtype, config, seed, ids)
        exact = run(batch, config, torch.float64, torch.float64)
        ours.append(errors(fused(batch, config, backend, device), exact, 1.0))
        eager.append(errors(run(batch, config, dtype, torch.float32), exact, 1.0))
    found, allowed = root_mean_square(ours), root_mean_square(eager)
    for key, error in found.items():
        # Metrics are counts and means over tokens, whose float32 sums are as good as any.
        slack = 1e-5 if key.startswith("metric") else 1e-6
        assert error <= allowed[key] + slack, f"{key}: {error:.3e}, eager {allowed[key]:.3e}"


@pytest.mark.parametrize(("name", "dtype"), [*zip(CONFIGS, HALF * 2, strict=True), ("grpo", torch.float16)])
def test_half_precision_is_as_exact_as_eager_with_float32_softmax(name, dtype, backend):
    assert_as_exact_as_eager(CONFIGS[name], dtype, backend, seeds=4 if backend == "triton" else 8)  # it takes long


@pytest.mark.parametrize("ids", ["any", "sampled"])
@pytest.mark.parametrize("dtype", HALF)
def test_eight_chunks_are_as_exact_as_eagers_one(dtype, ids, backend):
    """The gradient of the weight is a sum in 16 bits, which each chunk rounds; logits are exact, and hide nothing."""
    config = dataclasses.replace(CONFIGS["grpo"], chunk_rows=8)
    assert_as_exact_as_eager(config, dtype, backend, seeds=4 if backend == "triton" else 8, ids=ids)


@pytest.mark.parametrize("function", LOSSES[:4])
@pytest.mark.parametrize("dtype", HALF)
def test_gradients_of_every_function(dtype, function, backend):
    batch, options = half_batch(dtype, CONFIGS["grpo"], ids="sampled"), dict(entropy_coef=0.01, temperature=0.8)
    for softcap in (None, 8.0):
        found, exact = leaves(batch), leaves(batch.cast(torch.float64))
        loss_by(function, found, backend, logit_softcap=softcap, **options).backward()
        loss_by(function, exact, "torch", logit_softcap=softcap, **options).backward()
        for name in ("hidden", "weight"):
            assert relative(getattr(found, name).grad, getattr(exact, name).grad) <= 0.01, (name, softcap)


@pytest.mark.parametrize("dtype", HALF)
def test_padding_that_is_computed_may_hold_nan(dtype, backend):
    batch = off_policy(make_batch(3, masked=True)).head_as(dtype)
    padding = batch.options["completion_mask"].logical_not()[..., None]
    found, expected = (
        fused(dataclasses.replace(batch, hidden=batch.hidden.masked_fill(padding, x)), config, backend)
        for config in (gk.GRPOConfig(static_shapes=True, chunk_rows=8),) for x in (torch.nan, 0.0)
    )  # fmt: skip
    for name, x in found.grads.items():
        assert torch.equal(x, expected.grads[name]) and x.any(), name


@pytest.mark.parametrize("dtype", HALF)
def test_float32_logits_from_half_inputs(dtype, backend):
    config = gk.GRPOConfig(logits_dtype=torch.float32, beta=0.04, chunk_rows=10)
    batch = half_batch(dtype, config)
    narrow = fused(batch, gk.GRPOConfig(logits_dtype=dtype, beta=0.04), backend)
    found = fused(batch, config, backend)
    logps, entropy = true_logps(batch, config)
    assert (found.logps - logps).abs().max() <= 2e-5
    assert (found.entropy - entropy).abs().max() <= 2e-5
    assert found.logps.dtype == found.entropy.dtype == found.loss.dtype == torch.float32
    assert {x.dtype for x in found.grads.values()} == {x.dtype for x in narrow.grads.values()} == {dtype}
    if dtype == torch.bfloat16:
        assert (narrow.logps - logps).abs().max() > 1e-3


SCALARS = {
    "normalizer": {"normalizer": 3.1},
    "num_items_in_batch": {"num_items_in_batch": 3.1},
    "entropy_threshold": {},
}


@pytest.mark.parametrize("kind", ["number", "tensor"])
@pytest.mark.parametrize("name", SCALARS)
def test_numbers_beside_float64_are_not_rounded(name, kind):
    batch = make_batch(0, dtype=torch.float64)
    entropies = true_logps(batch, gk.GRPOConfig())[1].flatten()
    # Just below the entropy of a token, above which float32 would round it.
    threshold = entropies[entropies.float() > entropies + 1e-9][0].item() - 1e-12
    number = torch.tensor(threshold, dtype=torch.float64) if kind == "tensor" else threshold
    config = gk.GRPOConfig(entropy_threshold=number if name == "entropy_threshold" else None)
    given = {k: torch.tensor(x, dtype=torch.float64) if kind == "tensor" else x for k, x in SCALARS[name].items()}
    batch = batch.with_options(**given)
    found, exact = fused(batch, config), reference(batch, config)
    assert_close(found, exact, 1e-13)
    assert found.loss.dtype == found.logps.dtype == found.grads["weight"].dtype == torch.float64
    from_logps = gk.grpo_loss_from_logps(
        exact.logps, batch.advantages, entropy=exact.entropy, config=config, **batch.options
    )
    assert relative(from_logps.loss, exact.loss) <= 1e-14


# --- a float32 lm_head of 16-bit hidden states ------------------------------------------------------------------------


def with_hidden_in(batch: Batch, dtype: torch.dtype) -> Batch:
    return dataclasses.replace(batch, hidden=batch.hidden.to(dtype))


@pytest.mark.parametrize("dtype", HALF)
def test_a_float32_head_is_the_call_with_converted_hidden_states(backend, dtype):
    batch = with_hidden_in(off_policy(make_batch(0, bias=True)), dtype)
    for function in LOSSES[:4] if backend == "cpu" else LOSSES[:1]:
        found, expected = (leaves(with_hidden_in(batch, t)) for t in (dtype, torch.float32))
        losses = [loss_by(function, x, backend) for x in (found, expected)]
        assert torch.equal(*losses)
        sum(losses).backward()
        for name in LEAVES:
            x, y = (getattr(of, name).grad for of in (found, expected))
            assert x.dtype == (dtype if name == "hidden" else torch.float32) and torch.equal(x, y.to(x.dtype)), name


def test_a_float32_head_and_other_types():
    batch = with_hidden_in(make_batch(0), torch.bfloat16)
    with pytest.raises(ValueError, match=r"logits_dtype=torch.bfloat16 with torch.float32 inputs"):
        fused(batch, gk.GRPOConfig(logits_dtype=torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fused(batch)
    expected = fused(batch.head_as(torch.bfloat16))
    assert torch.equal(found.logps, expected.logps) and found.grads["weight"].dtype == torch.float32


# --- float16 under a loss scale ---------------------------------------------------------------------------------------
# A CPU computes float16 inputs in float32, a GPU has float16 gradients of logits. `logits_dtype=torch.float16` takes a
# CPU through the code of the second: a power of two in the weights, taken out in float32 by the backward.

SCALE = 65536.0  # where torch.amp.GradScaler starts
LOGITS = {"float32 logits": None, "float16 logits": torch.float16}


def float16_batch(vocab: int = 512, **options) -> Batch:
    batch = make_batch(0, sequences=4, length=8, width=64, vocab=vocab)
    return off_policy(batch, spread=0.05).head_as(torch.float16).with_options(**options)


def ours(batch: Batch, config: gk.GRPOConfig, backend: str, scale: float = SCALE) -> dict[str, Tensor]:
    own = leaves(batch)
    return gradients(call(own, config, backend).loss, own, scale)


def exact_and_eager(batch: Batch, config: gk.GRPOConfig, scale: float = SCALE) -> tuple[dict[str, Tensor], ...]:
    """Gradients in float64, and those of a float16 lm_head with the loss in float32."""
    exact = run(batch, config, torch.float64, torch.float64, scale)
    return exact.grads, run(batch, config, torch.float16, torch.float32, scale).grads


@pytest.mark.parametrize("num_items", [128, 262_144])
@pytest.mark.parametrize("logits", LOGITS)
def test_small_weights_under_a_loss_scale(num_items, logits, backend):
    batch, config = float16_batch(8192, num_items_in_batch=num_items), gk.GRPOConfig(logits_dtype=LOGITS[logits])
    exact, usual = exact_and_eager(batch, config)
    for name, x in ours(batch, config, backend).items():
        error, allowed = relative(x, exact[name]), relative(usual[name], exact[name])
        assert error <= 2 * allowed + 1e-6, f"{name}: {error:.2e}, eager {allowed:.2e}"


CHUNKS = {
    "tokens": gk.GRPOConfig(chunk_rows=8),
    "tokens, entropy bonus": gk.GRPOConfig(chunk_rows=8, entropy_coef=0.01),
    "whole sequences": gk.GRPOConfig(importance_sampling_level="sequence"),
    "sequences beyond a chunk": gk.GRPOConfig(importance_sampling_level="sequence", chunk_rows=6),
    "sums of sequences": gk.GRPOConfig(importance_sampling_level="sequence_sum"),
    "KL": gk.GRPOConfig(beta=0.1),
}


def test_a_chunk_without_a_gradient_leaves_the_scale_to_the_others(backend):
    """The scale of the first chunk, whose gradients are all 0, would stay that of the small ones behind it."""
    batch = make_batch(0, sequences=2, length=8, width=64, vocab=512).head_as(torch.float16)
    batch = dataclasses.replace(batch, advantages=torch.tensor([0.0, 1e-6]))
    config = gk.GRPOConfig(static_shapes=True, chunk_rows=8, logits_dtype=torch.float16)
    exact, _ = exact_and_eager(batch, config)
    assert relative(ours(batch, config, backend)["weight"], exact["weight"]) < 2e-3


@pytest.mark.parametrize("chunks", CHUNKS)
def test_every_kind_of_chunk(chunks, backend):
    """The relative error does not depend on the number of items, which a range that is too narrow would make it do."""
    config, found = dataclasses.replace(CHUNKS[chunks], logits_dtype=torch.float16), {}
    exact, _ = exact_and_eager(float16_batch(num_items_in_batch=1.0), config)
    for items, scale in ((1.0, 1.0), (262_144.0, SCALE)):
        grads = ours(float16_batch(num_items_in_batch=items), config, backend, scale)
        found[items] = {name: relative(items * x, exact[name]) for name, x in grads.items()}
    for name, error in found[262_144.0].items():
        assert error <= 1.1 * found[1.0][name] + 1e-5 and error < 0.02, (name, found)


@pytest.mark.parametrize("function", LOSSES)
def test_every_differentiable_function(function, backend):
    few, many = (
        gradients(loss_by(function, own, backend, divisor=items, chunk_rows=8), own, SCALE)
        for own, items in ((leaves(float16_batch()), 64.0), (leaves(float16_batch()), 65_536.0))
    )
    for name, x in many.items():
        assert relative(1024 * x, few[name]) <= 2e-3, name


OUTLIERS = {  # what has no bound: a ratio where A < 0, the slope of k3, the sum of a sequence, a cold token
    "ratio": (gk.GRPOConfig(chunk_rows=8), {"old_logps": 11.5}),
    "KL": (gk.GRPOConfig(chunk_rows=8, beta=0.04), {"ref_logps": -10.0}),
    "sums of sequences": (gk.GRPOConfig(importance_sampling_level="sequence_sum", chunk_rows=16), {"old_logps": 10.0}),
    "sums beyond a chunk": (gk.GRPOConfig(importance_sampling_level="sequence_sum", chunk_rows=6), {"old_logps": 10.0}),
    "temperature": (gk.GRPOConfig(chunk_rows=8), {"temperature": 2e-3}),
}


@pytest.mark.parametrize(  # first or last sequence: before or after most chunks
    ("name", "place"), [("ratio", 0), *((name, 3) for name in OUTLIERS), ("sums beyond a chunk", 0)]
)
def test_one_token_far_away(name, place, backend):
    """Its gradient is finite at a loss scale of 1, as in eager PyTorch."""
    config, moved = OUTLIERS[name]
    batch = float16_batch(num_items_in_batch=32.0)
    batch.advantages[place] = -1.0
    for option, distance in moved.items():
        if option == "temperature":
            temperature = torch.ones(4, 8)
            temperature[place, 2] = distance
            config = dataclasses.replace(config, temperature=temperature)
        else:
            batch.options[option] = batch.options[option].clone()
            batch.options[option][place, 2] -= distance
    config = dataclasses.replace(config, logits_dtype=torch.float16)
    exact, usual = exact_and_eager(batch, config, scale=1.0)
    for key, x in ours(batch, config, backend, scale=1.0).items():
        assert usual[key].isfinite().all() and x.isfinite().all(), key
        assert relative(x, exact[key]) <= 2 * relative(usual[key], exact[key]) + 1e-6, key


@pytest.mark.parametrize("logits", LOGITS)
def test_the_scale_does_not_overflow_sums_over_tokens(logits, backend):
    """128 tokens push one entry of dweight the same way: 4 or more per token times 1,600 of the hidden state."""
    hidden, weight = torch.full((1, 128, 8), 1600.0).half(), torch.zeros(16, 8).half()
    batch = leaves(Batch(hidden, weight, torch.zeros(1, 128).long(), torch.ones(1)))
    call(batch, gk.GRPOConfig(logits_dtype=LOGITS[logits]), backend).loss.backward()
    expected = torch.full((16, 8), 1600 / 16)
    expected[0] = -1600 * 15 / 16
    assert torch.allclose(batch.weight.grad.float(), expected, rtol=2e-3)

"""16-bit inputs: no worse than eager with a float32 softmax; float32 logits bring the log-probabilities to 2e-5; a
float32 lm_head of 16-bit hidden states."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import LEAVES, Batch, Result, assert_close, errors, fused, make_batch, reference, relative, true_logps
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.reference import reference_loss_from_logits

HALF = (torch.bfloat16, torch.float16)
CONFIGS = {
    "grpo": gk.GRPOConfig(beta=0.04, aggregation="seq_mean"),
    "gspo": gk.GRPOConfig(importance_sampling_level="sequence", aggregation="seq_mean"),
    "cispo": gk.GRPOConfig(surrogate="cispo", epsilon_high=1.2),
    "entropy bonus": gk.GRPOConfig(entropy_coef=0.01, temperature=0.9),
}


def half_batch(dtype: torch.dtype, config: gk.GRPOConfig, seed: int = 5) -> Batch:
    """Log-ratios are inside the clip range by 0.06 or outside by 0.06, of each token and of each sequence's mean."""
    batch = make_batch(seed, sequences=8, length=8, width=64, vocab=1003).head_as(dtype)
    g = torch.Generator().manual_seed(seed)
    logps, _ = true_logps(batch, config)
    inside = (torch.rand(logps.shape, generator=g) - 0.5) * 0.2
    outside = torch.where(torch.rand(8, 1, generator=g) > 0.5, 0.45, -0.45)
    log_ratio = torch.where(torch.rand(8, 1, generator=g) > 0.5, inside, inside + outside)
    for bound in (0.8, 1.2):
        assert (log_ratio - torch.tensor(bound).log()).abs().min() >= 0.06
        assert (log_ratio.mean(1) - torch.tensor(bound).log()).abs().min() >= 0.06
    noise = 0.3 * torch.randn(logps.shape, generator=g)
    return batch.with_options(old_logps=(logps - log_ratio).float(), ref_logps=(logps + noise).float())


def run(batch: Batch, config: gk.GRPOConfig, dtype: torch.dtype, softmax: torch.dtype) -> Result:
    """The lm_head in `dtype`, everything after the logits in `softmax`, by autograd."""
    batch = batch.head_as(dtype)
    leaves = {name: x.detach().clone().requires_grad_() for name in LEAVES if (x := getattr(batch, name)) is not None}
    logits = leaves["hidden"] @ leaves["weight"].T
    options = {name: x.to(softmax) for name, x in batch.options.items()}
    out = reference_loss_from_logits(
        logits.to(softmax), batch.ids, batch.advantages.to(softmax), config=config, **options
    )
    out.loss.backward()
    grads: dict[str, Tensor] = {name: x.grad for name, x in leaves.items()}
    return Result(out.loss.detach(), out.logps.detach(), out.entropy.detach(), out.metrics, grads)


def root_mean_square(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: (sum(row[name] ** 2 for row in rows) / len(rows)) ** 0.5 for name in rows[0]}


def assert_as_exact_as_eager(
    config: gk.GRPOConfig, dtype: torch.dtype, backend: str, device: str = "cpu", seeds: int = 8
) -> None:
    """Over several batches: the rounding of a single one may cancel by luck."""
    ours, eager = [], []
    for seed in range(seeds):
        batch = half_batch(dtype, config, seed)
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
    if dtype == torch.bfloat16:  # what the float32 logits are for
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


@pytest.mark.parametrize(("dtype", "bias"), [(torch.bfloat16, True), (torch.float16, False)])
def test_a_float32_head_is_the_call_with_converted_hidden_states(backend, dtype, bias):
    batch = with_hidden_in(make_batch(0, bias=bias), dtype)
    found, expected = (fused(x, backend=backend) for x in (batch, with_hidden_in(batch, torch.float32)))
    assert torch.equal(found.loss, expected.loss) and torch.equal(found.logps, expected.logps)
    for name, x in expected.grads.items():
        assert torch.equal(found.grads[name], x.to(dtype) if name == "hidden" else x), name
        assert found.grads[name].dtype == (dtype if name == "hidden" else torch.float32)


def test_other_functions_with_a_float32_head():
    batch = with_hidden_in(make_batch(0), torch.bfloat16)
    hidden, weight = batch.hidden.requires_grad_(), batch.weight.requires_grad_()
    logps, _ = gk.fused_logps(hidden, weight, batch.ids)
    assert torch.equal(logps, gk.fused_logps(hidden.float(), weight, batch.ids)[0])
    logps.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
    value = gk.fused_policy_loss(hidden, weight, batch.ids, lambda chunk: chunk.logps.sum())
    torch.testing.assert_close(value, logps.detach().sum())
    with pytest.raises(ValueError, match=r"logits_dtype=torch.bfloat16 with torch.float32 inputs"):
        fused(batch, gk.GRPOConfig(logits_dtype=torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fused(batch)
    expected = fused(batch.head_as(torch.bfloat16))
    assert torch.equal(found.logps, expected.logps) and found.grads["weight"].dtype == torch.float32

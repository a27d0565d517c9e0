"""16-bit inputs: no worse than eager with a float32 softmax; float32 logits bring the log-probabilities to 2e-5."""

from __future__ import annotations

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


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", CONFIGS)
def test_half_precision_is_as_exact_as_eager_with_float32_softmax(name, dtype, backend):
    """Over several batches: the rounding of a single one may cancel by luck."""
    config, ours, eager = CONFIGS[name], [], []
    for seed in range(8):
        batch = half_batch(dtype, config, seed)
        exact = run(batch, config, torch.float64, torch.float64)
        ours.append(errors(fused(batch, config, backend), exact, 1.0))
        eager.append(errors(run(batch, config, dtype, torch.float32), exact, 1.0))
    found, allowed = root_mean_square(ours), root_mean_square(eager)
    for key, error in found.items():
        # Metrics are counts and means over tokens, whose float32 sums are as good as any.
        slack = 1e-5 if key.startswith("metric") else 1e-6
        assert error <= allowed[key] + slack, f"{key}: {error:.3e}, eager {allowed[key]:.3e}"


@pytest.mark.parametrize("dtype", HALF)
def test_float32_logits_from_half_inputs(dtype, backend):
    config = gk.GRPOConfig(logits_dtype=torch.float32, beta=0.04, chunk_rows=10)
    batch = half_batch(dtype, config)
    found = fused(batch, config, backend)
    logps, entropy = true_logps(batch, config)
    assert (found.logps - logps).abs().max() <= 2e-5
    assert (found.entropy - entropy).abs().max() <= 2e-5
    assert found.logps.dtype == found.entropy.dtype == found.loss.dtype == torch.float32


def test_float32_logits_are_what_makes_them_exact(backend):
    """With bfloat16 logits the same log-probabilities are off by more than 2e-5: the test above can fail."""
    batch = half_batch(torch.bfloat16, gk.GRPOConfig())
    config = gk.GRPOConfig(logits_dtype=torch.bfloat16)
    assert (fused(batch, config, backend).logps - true_logps(batch, config)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", HALF)
def test_gradients_come_in_the_type_of_their_input(dtype, backend):
    batch = make_batch(0, bias=True).head_as(dtype)
    for logits_dtype in (None, torch.float32, dtype):
        found = fused(batch, gk.GRPOConfig(logits_dtype=logits_dtype), backend)
        assert {x.dtype for x in found.grads.values()} == {dtype}
        assert found.logps.dtype == torch.float32


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
    from_logps = gk.grpo_loss_from_logps(
        exact.logps, batch.advantages, entropy=exact.entropy, config=config, **batch.options
    )
    assert relative(from_logps.loss, exact.loss) <= 1e-14


def test_float64_goes_through_the_torch_backend():
    found = fused(make_batch(0, dtype=torch.float64))
    assert found.loss.dtype == found.logps.dtype == found.grads["weight"].dtype == torch.float64

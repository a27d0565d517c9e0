"""Differences in float64 against the gradients of every public function."""

from __future__ import annotations

import pytest
import torch
from helpers import make_batch, off_policy

import grpo_kernels as gk

CONFIGS = {
    "k2, entropy bonus": dict(beta=0.1, kl_estimator="k2", entropy_coef=0.05, aggregation="token_mean"),
    "gspo": dict(importance_sampling_level="sequence", epsilon_high=0.5, epsilon_low=0.5),
    "recompute": dict(importance_sampling_level="sequence", epsilon_high=0.5, epsilon_low=0.5, chunk_rows=2),
    "sapo, bias correction": dict(surrogate="sapo", beta=0.1, use_bias_correction_kl=True),
    "softcap, temperature": dict(logit_softcap=3.0, temperature=0.7, logit_scale=1.3),
}


@pytest.fixture
def batch():
    batch = make_batch(1, sequences=2, length=3, width=4, vocab=5, bias=True, dtype=torch.float64)
    batch = off_policy(batch, spread=0.1)
    batch.options["completion_mask"] = torch.tensor([[1, 1, 1], [1, 1, 0]])
    return batch


def check_by_differences(loss, tensors, step=1e-6):
    """torch's gradcheck runs the backward of one graph several times; these give their gradients once."""
    inputs = [x.detach().clone().requires_grad_() for x in tensors]
    gradients = torch.autograd.grad(loss(*inputs), inputs)
    for x, gradient in zip(inputs, gradients, strict=True):
        with torch.no_grad():
            numerical = torch.empty_like(gradient)
            for place, value in enumerate(x.view(-1).tolist()):
                sides = []
                for sign in (1, -1):
                    x.view(-1)[place] = value + sign * step
                    sides.append(loss(*inputs))
                x.view(-1)[place] = value
                numerical.view(-1)[place] = (sides[0] - sides[1]) / (2 * step)
        assert torch.allclose(gradient, numerical, rtol=1e-5, atol=1e-8)
        assert gradient.any()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss(batch, name):
    """From hidden states, from log-probabilities, from logits."""
    given = dict(config=gk.GRPOConfig(**CONFIGS[name]), **batch.options)

    def from_hidden(hidden, weight, bias):
        return gk.fused_grpo_loss(hidden, weight, batch.ids, batch.advantages, lm_head_bias=bias, **given).loss

    def from_logits(logits, inplace):  # no leaf, so that its memory may be reused
        return gk.grpo_loss_from_logits(logits + batch.bias, batch.ids, batch.advantages, inplace=inplace, **given).loss

    check_by_differences(from_hidden, (batch.hidden, batch.weight, batch.bias))
    for inplace in (False, True):
        check_by_differences(lambda x, inplace=inplace: from_logits(x, inplace), [batch.hidden @ batch.weight.T])
    if "entropy_coef" in CONFIGS[name]:
        check_by_differences(
            lambda x, h: gk.grpo_loss_from_logps(x, batch.advantages, entropy=h, **given).loss,
            (batch.options["old_logps"].double() + 0.05, torch.rand(2, 3, dtype=torch.float64)),
        )


def test_fused_logps_and_entropy(batch):
    options = dict(completion_mask=batch.options["completion_mask"], logit_softcap=3.0, entropy=True)
    temperature, factors = torch.rand(2, 3, dtype=torch.float64) + 0.5, torch.rand(2, 2, 3, dtype=torch.float64)

    def value(hidden, weight, bias):
        results = gk.fused_logps(hidden, weight, batch.ids, lm_head_bias=bias, temperature=temperature, **options)
        return (torch.stack(results) * factors).sum()

    check_by_differences(value, (batch.hidden, batch.weight, batch.bias))


@pytest.mark.parametrize("chunk_rows", [2, 4])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_fused_policy_loss(batch, level, chunk_rows):
    def loss_fn(chunk):
        if level == "token":
            return (chunk.logps**2 + chunk.entropy * chunk.logps.exp()).sum()
        return (chunk.sequence_sum(chunk.logps).exp() * chunk.entropy).sum()

    def loss(hidden, weight, bias):
        return gk.fused_policy_loss(
            hidden, weight, batch.ids, loss_fn, level=level, entropy=True, lm_head_bias=bias, chunk_rows=chunk_rows,
            completion_mask=batch.options["completion_mask"],
        )  # fmt: skip

    check_by_differences(loss, (batch.hidden, batch.weight, batch.bias))

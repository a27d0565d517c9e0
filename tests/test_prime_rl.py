"""The examples for prime-rl against a recorded copy of its contract: prime-rl is on no package index.

Recorded in November 2026 from its documentation and sources: `FusedOutputLinear.forward(hidden_states (b, s, h), labels
(b, s), temperature (b, s))` returns a mapping with logprobs and entropy (b, s); a custom loss takes LossInputs of one
sequence and keyword arguments, and returns an object with loss and metrics; the trainer adds sequences and divides by
its own count.
"""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from grpo_kernels import GRPOConfig
from grpo_kernels.config import SURROGATE_RULES
from grpo_kernels.integrations import LogitTransform
from grpo_kernels.reference import reference_loss_from_logps

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
policy_loss = runpy.run_path(str(EXAMPLES / "prime_rl_loss.py"))["policy_loss"]
FusedOutputLinear = runpy.run_path(str(EXAMPLES / "prime_rl_model.py"))["FusedOutputLinear"]
T, H, V = 9, 16, 64


@dataclass
class LossInputs:
    """The recorded fields."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


def inputs(seed=0, **changes) -> LossInputs:
    torch.manual_seed(seed)
    logps = -2 + 0.5 * torch.randn(T)
    given = dict(
        trainer_logprobs=logps.requires_grad_(), inference_logprobs=logps.detach() + 0.4 * torch.randn(T),
        ref_logprobs=logps.detach() + 0.3 * torch.randn(T), advantages=torch.randn(T), loss_mask=torch.rand(T) > 0.3,
    )  # fmt: skip
    return LossInputs(**given | changes)


@pytest.mark.parametrize(
    "options",
    [
        dict(surrogate="dppo_tv", epsilon_low=0.1, epsilon_high=0.1),
        dict(surrogate="dppo_kl"),
        dict(surrogate="ipo"),
        dict(surrogate="cispo", beta=0.1),
        dict(importance_sampling_level="sequence", epsilon_high=0.28),
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_sequences_add_up_to_the_sum_over_their_tokens(options):
    both = [inputs(0), inputs(1)]
    total = sum(policy_loss(x, **options).loss for x in both)
    total.backward()
    names = ("inference_logprobs", "ref_logprobs", "advantages", "loss_mask")
    sampled, ref, advantages, mask = (torch.stack([getattr(x, name) for x in both]) for name in names)
    logps = torch.stack([x.trainer_logprobs.detach() for x in both]).double().requires_grad_()
    config = GRPOConfig(aggregation="token_mean", **options)
    old = None if SURROGATE_RULES[config.surrogate].divides_by_rollout else sampled.double()
    expected = reference_loss_from_logps(
        logps, advantages.double(), completion_mask=mask, old_logps=old, rollout_logps=sampled.double(),
        ref_logps=ref.double(), normalizer=1.0, config=config,
    )  # fmt: skip
    expected.loss.backward()
    torch.testing.assert_close(total.double(), expected.loss, rtol=1e-5, atol=1e-6)
    gradient = torch.stack([x.trainer_logprobs.grad for x in both])
    torch.testing.assert_close(gradient.double(), logps.grad, rtol=1e-5, atol=1e-6)
    metrics = policy_loss(inputs(), **options).metrics
    assert "approx_kl" in metrics and all(value.dim() == 0 for value in metrics.values())


def test_weights_of_tokens():
    halves = torch.full((T,), 0.5)
    torch.testing.assert_close(policy_loss(inputs(loss_weights=halves)).loss, 0.5 * policy_loss(inputs()).loss)
    with pytest.raises(ValueError, match=r"beta=0\.1 with loss_weights; expected one of them"):
        policy_loss(inputs(loss_weights=halves), beta=0.1)


def test_the_output_layer():
    layer = FusedOutputLinear(H, V, LogitTransform(0.5, 0.7))
    hidden = torch.randn(2, T, H, requires_grad=True)
    labels, temperature = torch.randint(V, (2, T)), torch.rand(2, T) + 0.5
    out = layer(hidden, labels, temperature)
    z = hidden.detach().double() @ layer.weight.detach().double().T * 0.5
    z = 0.7 * torch.tanh(z / 0.7)
    z = (z / temperature[..., None].double()).log_softmax(-1)
    torch.testing.assert_close(out["logprobs"].double(), z.gather(-1, labels[..., None])[..., 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out["entropy"].double(), -(z.exp() * z).sum(-1), rtol=1e-5, atol=1e-5)
    assert not out["entropy"].requires_grad
    out["logprobs"].sum().backward()
    assert hidden.grad.abs().max() > 0 and layer.weight.grad.abs().max() > 0


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(TypeError, match="multiple values for keyword argument 'aggregation'"):
        policy_loss(inputs(), aggregation="seq_mean")
    with pytest.raises(ValueError, match="entropy is None; entropy_coef"):
        policy_loss(inputs(), entropy_coef=0.1)
    with pytest.raises(ValueError, match=r"ref_logps is None and beta=0\.1"):
        policy_loss(inputs(ref_logprobs=None), beta=0.1)

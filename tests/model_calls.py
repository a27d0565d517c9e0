"""Inputs of transformers' tiny models, and what their own logits give."""

from __future__ import annotations

import torch
from tiny_models import VOCAB

from grpo_kernels import GRPOConfig, grpo_loss_from_logps
from grpo_kernels.integrations.transformers import fused_forward

PROMPT, LENGTH = 5, 6
NONE = torch.zeros(4, PROMPT + LENGTH, dtype=torch.int64)
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0, -1.0])


def batch(vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """Four rows: whole; a prompt padded on the left; a completion padded on the right; both."""
    ids = torch.randint(3, vocab, (4, PROMPT + LENGTH))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    mask[2, -2:] = 0
    mask[3, :1], mask[3, -4:] = 0, 0
    return dict(input_ids=ids, attention_mask=mask, completion_ids=ids[:, -LENGTH:])


def own_logps(model, inputs) -> torch.Tensor:
    """(B, T) from the model's own logits."""
    given = {"attention_mask": inputs["attention_mask"], "position_ids": positions_of(inputs)}
    logps = model(inputs["input_ids"], **given).logits[:, -LENGTH - 1 : -1].log_softmax(-1)
    return logps.gather(-1, inputs["completion_ids"][..., None]).squeeze(-1)


def positions_of(inputs) -> torch.Tensor:
    return (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)


def gradients(model) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def check_against_own_logits(model) -> dict[str, torch.Tensor]:
    """fused_forward's loss, log-probabilities and gradients are those of the model's own logits; the gradients."""
    inputs = batch()
    logps = own_logps(model, inputs)
    given = dict(old_logps=logps.detach() + 0.3 * torch.randn(4, LENGTH), config=GRPOConfig.preset("dapo"))
    mask = inputs["attention_mask"][:, -LENGTH:]
    results = []
    for out in (
        grpo_loss_from_logps(logps, ADVANTAGES, completion_mask=mask, **given),
        fused_forward(model, **inputs, advantages=ADVANTAGES, **given),
    ):
        out.loss.backward()
        results.append((out, gradients(model)))
    (expected, right), (out, found) = results
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(out.logps, expected.logps, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=3e-6)
    return found

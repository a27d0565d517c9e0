"""One batch of random inputs, and the objective that every implementation computes on it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from shapes import LENGTH, Shape
from torch import Tensor

EPSILON = 0.2
# old_logps lie this far from the true log-probabilities: on both sides of the clip range, ln 0.8 = -0.223 and
# ln 1.2 = 0.182, and at least 0.08 away from its ends, so that rounding flips no token's branch.
LOG_RATIOS = (-0.45, -0.1, -0.02, 0.02, 0.1, 0.4)


@dataclass(frozen=True)
class Inputs:
    """B sequences of T tokens. hidden (B, T, H) and weight (V, H) require gradients; the rest are constants."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor  # (B, T) int64
    mask: Tensor  # (B, T) int64, all ones
    old_logps: Tensor  # (B, T) float32
    ref_logps: Tensor  # (B, T) float32
    advantages: Tensor  # (B,) float32
    beta: float = 0.04

    @property
    def flat_hidden(self) -> Tensor:
        return self.hidden.view(-1, self.hidden.shape[-1])


def make_inputs(
    shape: Shape, dtype: torch.dtype, device: torch.device, *, length: int = LENGTH, beta: float = 0.04, seed: int = 0
) -> Inputs:
    """Random inputs whose logits have standard deviation 2, made in place: no temporary as large as the weight.

    old_logps and ref_logps are near those of a uniform policy; `with_true_ratios` puts them near this policy's.
    """
    length = min(length, shape.tokens)
    batch = shape.tokens // length
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)

    uniform = -math.log(shape.vocab_size)
    return Inputs(
        hidden=normal(batch, length, shape.hidden_size, dtype=dtype).requires_grad_(),
        weight=normal(shape.vocab_size, shape.hidden_size, dtype=dtype)
        .mul_(2 / math.sqrt(shape.hidden_size))
        .requires_grad_(),
        ids=torch.randint(shape.vocab_size, (batch, length), device=device, generator=generator),
        mask=torch.ones(batch, length, dtype=torch.int64, device=device),
        old_logps=normal(batch, length).mul_(0.1).add_(uniform),
        ref_logps=normal(batch, length).mul_(0.1).add_(uniform),
        advantages=normal(batch),
        beta=beta,
    )


def with_true_ratios(inputs: Inputs, logps: Tensor, seed: int = 1) -> Inputs:
    """The same batch a little off-policy: `logps` (B, T) are its true log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(len(LOG_RATIOS), logps.shape, generator=generator)
    log_ratio = torch.tensor(LOG_RATIOS, dtype=logps.dtype)[which].to(logps.device)
    drift = torch.randn(logps.shape, generator=generator).to(logps) * 0.1
    return dataclasses.replace(inputs, old_logps=(logps - log_ratio).float(), ref_logps=(logps + drift).float())


def token_losses(logps: Tensor, old_logps: Tensor, ref_logps: Tensor, advantages: Tensor, beta: float) -> Tensor:
    """GRPO's loss per token, `advantages` broadcast to it: clipped surrogate + beta * k3, as trainers write it."""
    ratio = torch.exp(logps - old_logps)
    clipped = torch.clamp(ratio, 1 - EPSILON, 1 + EPSILON)
    loss = -torch.min(ratio * advantages, clipped * advantages)
    if beta != 0.0:
        loss = loss + beta * (torch.exp(ref_logps - logps) - (ref_logps - logps) - 1)
    return loss


def grpo_objective(logps: Tensor, inputs: Inputs) -> Tensor:
    """Scalar: `token_losses` averaged over each sequence, then over sequences."""
    loss = token_losses(logps, inputs.old_logps, inputs.ref_logps, inputs.advantages.unsqueeze(1), inputs.beta)
    return ((loss * inputs.mask).sum(-1) / inputs.mask.sum(-1).clamp(min=1.0)).mean()

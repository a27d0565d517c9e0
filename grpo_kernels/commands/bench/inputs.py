"""One batch of random inputs, and the objective that every implementation computes on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...rewards import group_advantages
from ...sampling_mask import SamplingMask
from .cases import Case

EPSILON = 0.2
# old_logps lie this far from the true log-probabilities: on both sides of the clip range, ln 0.8 = -0.223 and
# ln 1.2 = 0.182, and at least 0.08 away from its ends, so that rounding flips no token's branch.
LOG_RATIOS = (-0.45, -0.1, -0.02, 0.02, 0.1, 0.4)


@dataclass(frozen=True)
class Inputs:
    """B completions of T tokens. hidden (B, T, H) requires its gradient, weight (V, H) unless frozen."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor  # (B, T) int64
    mask: Tensor  # (B, T) int64, all ones
    old_logps: Tensor | None  # (B, T) float32; None: those of this policy
    ref_logps: Tensor  # (B, T) float32
    advantages: Tensor  # (B,) float32
    beta: float
    sampling_mask: SamplingMask | None = None

    @property
    def flat_hidden(self) -> Tensor:
        return self.hidden.view(-1, self.hidden.shape[-1])

    @property
    def frozen(self) -> bool:
        return not self.weight.requires_grad

    def masked_out(self, tokens: Tensor) -> Tensor | None:
        """(R, V) bool: the ids that the sampling mask leaves out at these tokens (R,), of all one after another."""
        if self.sampling_mask is None:
            return None
        mask = SamplingMask(self.sampling_mask.ids, self.sampling_mask.counts.flatten())[tokens]
        out = (mask.counts > 0)[:, None].repeat(1, len(self.weight))
        out[torch.arange(len(tokens), device=tokens.device).repeat_interleave(mask.counts), mask.ids.long()] = False
        return out


def make_inputs(case: Case, device: torch.device, *, seed: int = 0) -> Inputs:
    """Random inputs whose logits have standard deviation 2, made in place: no temporary as large as the weight.

    old_logps and ref_logps are near those of a uniform policy; `off_policy` puts them near this policy's.
    """
    batch, length = case.tokens // case.length, case.length
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)

    dtype, uniform = getattr(torch, case.dtype), -math.log(case.vocab_size)
    rewards = torch.rand(batch, device=device, generator=generator)
    num_prompts = batch // case.generations
    rewards.view(num_prompts, case.generations)[_idle(num_prompts, case.idle_share)] = 0.5
    weight = normal(case.vocab_size, case.hidden_size, dtype=dtype)
    hidden = normal(batch, length, case.hidden_size, dtype=dtype)
    ids = torch.randint(case.vocab_size, (batch, length), device=device, generator=generator)
    mask = _sampling_mask(ids, case, generator) if case.kept_ids else None
    weight.mul_(2 / math.sqrt(case.hidden_size))
    return Inputs(
        hidden=hidden.requires_grad_(),
        weight=weight.requires_grad_(case.mode != "frozen"),
        ids=ids,
        mask=torch.ones(batch, length, dtype=torch.int64, device=device),
        old_logps=normal(batch, length).mul_(0.1).add_(uniform),
        ref_logps=normal(batch, length).mul_(0.1).add_(uniform),
        advantages=group_advantages(rewards, num_generations=case.generations),
        beta=case.beta,
        sampling_mask=mask,
    )


def _sampling_mask(ids: Tensor, case: Case, generator: torch.Generator) -> SamplingMask:
    """The sampled id and others of the whole vocabulary: one of each of `kept_ids` equal parts of it, so that they
    ascend and no two are equal. Completions with and without a mask are spread over the batch."""
    count, vocab = case.kept_ids, case.vocab_size
    bounds = torch.arange(count + 1, device=ids.device) * vocab // count
    first, size = bounds[:-1], bounds.diff()
    shares = torch.rand(*ids.shape, count, device=ids.device, generator=generator)
    kept = first + (shares * size).long().clamp(max=size - 1)
    part = torch.searchsorted(bounds, ids, right=True) - 1
    kept.scatter_(-1, part[..., None], ids[..., None])
    rows = torch.arange(len(ids), device=ids.device)
    masked = (rows + 1) * case.masked_share // 1 > rows * case.masked_share // 1
    counts = torch.where(masked[:, None], count, 0).expand(ids.shape)
    return SamplingMask(kept[masked].flatten().to(torch.int32), counts.to(torch.int32).contiguous())


def token_losses(logps: Tensor, old_logps: Tensor | None, ref_logps: Tensor, advantages: Tensor, beta: float) -> Tensor:
    """GRPO's loss per token, `advantages` broadcast to it: clipped surrogate + beta * k3, as trainers write it."""
    ratio = torch.exp(logps - (logps.detach() if old_logps is None else old_logps))
    clipped = torch.clamp(ratio, 1 - EPSILON, 1 + EPSILON)
    loss = -torch.min(ratio * advantages, clipped * advantages)
    if beta != 0.0:
        loss = loss + beta * (torch.exp(ref_logps - logps) - (ref_logps - logps) - 1)
    return loss


def grpo_objective(logps: Tensor, inputs: Inputs) -> Tensor:
    """Scalar: `token_losses` averaged over each completion, then over completions."""
    loss = token_losses(logps, inputs.old_logps, inputs.ref_logps, inputs.advantages.unsqueeze(1), inputs.beta)
    return ((loss * inputs.mask).sum(-1) / inputs.mask.sum(-1).clamp(min=1.0)).mean()


def _idle(num_prompts: int, share: float) -> list[int]:
    """`share` of the prompts, spread over the batch."""
    count = round(num_prompts * share)
    return [i * num_prompts // count for i in range(count)]

"""One batch of inputs, and the objective that every implementation computes on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...rewards import group_advantages
from ...sampling_mask import SamplingMask
from ...teacher import Teacher
from .cases import DIVERGENCES, Case
from .samples import chat_samples

EPSILON = 0.2
CHUNK_TOKENS = 128  # tokens whose logits are in memory at a time
SCALING_ENTROPY = 2.5  # nats: for less entropy hidden states have to point at ids
# Of the numbers of ids that an engine kept with top_p 0.97, in prime-rl's pull request 2979, with mean 8 and median 2:
# the share of ones, the 99th percentile, the largest.
ONE_ID_SHARE, P99_IDS, MAX_IDS = 0.47, 82, 512
# Differences of the true log-probabilities to old_logps: inside and outside of the clip range, from ln 0.8 = -0.223 to
# ln 1.2 = 0.182, and at least 0.08 away from its ends, so that rounding changes no token's branch.
LOG_RATIOS = (-0.45, -0.1, -0.02, 0.02, 0.1, 0.4)


@dataclass(frozen=True)
class Inputs:
    """B completions of T tokens. hidden (B, T, H) requires a gradient; weight (V, H) too, unless it is frozen."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor  # (B, T) int64
    mask: Tensor  # (B, T) int64, all ones
    old_logps: Tensor  # (B, T) float32
    ref_logps: Tensor  # (B, T) float32
    advantages: Tensor  # (B,) float32
    beta: float
    sampling_mask: SamplingMask | None = None
    teacher: Teacher | None = None  # where the mode is a divergence to it

    @property
    def flat_hidden(self) -> Tensor:
        """Returns hidden states as (N, H), a view."""
        return self.hidden.view(-1, self.hidden.shape[-1])

    @property
    def frozen(self) -> bool:
        """Returns whether the weight takes no gradient."""
        return not self.weight.requires_grad

    def masked_out(self, tokens: Tensor) -> Tensor | None:
        """Returns which ids the sampling mask leaves out at `tokens` (R,), indices into the flattened batch, as (R, V)
        bool; None without a mask."""
        if self.sampling_mask is None:
            return None
        mask = SamplingMask(self.sampling_mask.ids, self.sampling_mask.counts.flatten())[tokens]
        excluded = (mask.counts > 0)[:, None].repeat(1, len(self.weight))
        rows = torch.arange(len(tokens), device=tokens.device).repeat_interleave(mask.counts)
        excluded[rows, mask.ids.long()] = False
        return excluded


def make_inputs(case: Case, device: torch.device, *, seed: int = 0) -> Inputs:
    """Returns random inputs, or those of a chat model where the case has a temperature.

    Random logits have standard deviation 2, or the one of the case's entropy. The weight is made in place, without a
    temporary of its size. old_logps and ref_logps are near those of a uniform policy; `off_policy` puts them near this
    policy's.
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
    weight.mul_(2 / math.sqrt(case.hidden_size))
    if case.temperature:
        states, head_weight, sampled_ids = chat_samples(case.tokens, case.temperature)
        hidden.copy_((states / case.temperature).view_as(hidden))
        weight.copy_(head_weight)
        ids = sampled_ids.view(batch, length).to(device)
    elif case.entropy:
        _sharpen(hidden, weight, case.entropy, generator)
        ids = _samples(hidden, weight, generator)
    else:
        ids = torch.randint(case.vocab_size, (batch, length), device=device, generator=generator)
    mask = _sampling_mask(ids, case, generator) if case.kept_ids else None
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
        teacher=nearby_teacher(hidden, weight) if case.mode in DIVERGENCES else None,
    )


def nearby_teacher(hidden: Tensor, weight: Tensor, **options: Any) -> Teacher:
    """Returns a teacher of the same shape: hidden states and weight, with noise of 0.3 of their standard deviation."""
    generator = torch.Generator(hidden.device).manual_seed(2)

    def noisy(x: Tensor) -> Tensor:
        noise = torch.empty_like(x, requires_grad=False).normal_(generator=generator)
        return noise.mul_(0.3 * x.detach().std()).add_(x.detach())

    return Teacher(noisy(hidden), noisy(weight), **options)


def _sharpen(hidden: Tensor, weight: Tensor, entropy: float, generator: torch.Generator) -> None:
    """Gives the policy this mean entropy, in nats, in place.

    Some ids are likely everywhere, by Zipf's law, as words are. Larger logits concentrate each token on few ids, down
    to SCALING_ENTROPY; below that hidden states also move towards the weight's row of a likely id, as a model's do.
    """
    vocab, device = len(weight), hidden.device
    prior = -(torch.randperm(vocab, device=device, generator=generator) + 1).float().log()
    hidden[..., 0] = 0
    first_hidden = hidden.flatten(0, 1)[:CHUNK_TOKENS]  # a view
    logits = (first_hidden @ weight.T).float()
    weight.mul_(_solve(lambda x: x * logits + prior, max(entropy, SCALING_ENTROPY)))
    hidden[..., 0], weight[:, 0] = 1, prior.to(weight.dtype)
    if entropy < SCALING_ENTROPY:
        ids = torch.multinomial(prior.exp(), hidden.shape[:2].numel(), replacement=True, generator=generator)
        nearness = torch.rand(*hidden.shape[:2], 1, device=device, generator=generator)
        shift = weight[ids].view_as(hidden) * nearness.to(weight.dtype)
        shift[..., 0] = 0
        logits, shift_logits = ((x @ weight.T).float() for x in (first_hidden, shift.flatten(0, 1)[:CHUNK_TOKENS]))
        hidden.add_(shift, alpha=_solve(lambda x: logits + x * shift_logits, entropy))


def _solve(logits_at: Callable[[float], Tensor], entropy: float) -> float:
    """Returns x where `logits_at(x)` have this mean entropy, in nats, which has to fall with x."""
    low, high = 0.0, 64.0
    for _ in range(20):
        x = (low + high) / 2
        log_p = logits_at(x).log_softmax(-1)
        low, high = (low, x) if -(log_p.exp() * log_p).sum(-1).mean() < entropy else (x, high)
    return high


def _samples(hidden: Tensor, weight: Tensor, generator: torch.Generator) -> Tensor:
    """Returns ids sampled from the policy, (B, T) int64, with the logits of a few rows in memory at a time."""
    rows = hidden.flatten(0, 1).split(CHUNK_TOKENS)
    ids = [torch.multinomial((h @ weight.T).float().softmax(-1), 1, generator=generator) for h in rows]
    return torch.cat(ids).view(hidden.shape[:2])


def _sampling_mask(ids: Tensor, case: Case, generator: torch.Generator) -> SamplingMask:
    """Returns a mask that keeps the sampled id and others, from the whole vocabulary.

    The vocabulary is cut into as many equal parts as a token keeps ids, and one id is taken from each, so that ids
    ascend and differ. Completions with and without a mask are spread over the batch.
    """
    vocab, rows = case.vocab_size, torch.arange(len(ids), device=ids.device)
    if case.skewed:
        order = torch.randperm(ids.numel(), device=ids.device, generator=generator)
        counts = skewed_counts(ids.numel(), case.kept_ids).to(ids.device)[order].view(ids.shape)
    else:
        counts = torch.full_like(ids, case.kept_ids)
    counts[(rows + 1) * case.masked_share // 1 == rows * case.masked_share // 1] = 0
    token_counts = counts.flatten()
    id_counts, begin = token_counts.repeat_interleave(token_counts), token_counts.cumsum(0) - token_counts
    part = torch.arange(len(id_counts), device=ids.device) - begin.repeat_interleave(token_counts)
    part_begin, part_end = part * vocab // id_counts, (part + 1) * vocab // id_counts
    positions = torch.rand(len(id_counts), device=ids.device, generator=generator)
    kept_ids = part_begin + (positions * (part_end - part_begin)).long().clamp(max=part_end - part_begin - 1)
    masked = token_counts > 0
    sampled = ids.flatten()[masked]
    kept_ids[begin[masked] + ((sampled + 1) * token_counts[masked] - 1) // vocab] = sampled
    return SamplingMask(kept_ids.to(torch.int32), counts.to(torch.int32))


def skewed_counts(tokens: int, mean: int) -> Tensor:
    """Returns how many ids top-p keeps of each token, (tokens,) int64, ascending, with this mean.

    A share ONE_ID_SHARE of the tokens keeps one id. The median is 2 and the 99th percentile P99_IDS; then counts rise
    to MAX_IDS.
    """
    quantiles = (torch.arange(tokens, dtype=torch.float64) + 0.5) / tokens
    p99 = quantiles[math.ceil(0.99 * tokens) - 1].item()
    middle, top = ((quantiles - a).clamp(0, b - a) / (b - a) for a, b in ((ONE_ID_SHARE, p99), (p99, 1.0)))

    def counts_at(power: float) -> Tensor:
        upper_counts = (2 * (P99_IDS / 2) ** middle**power * (MAX_IDS / P99_IDS) ** top).round().long()
        return torch.where(quantiles < ONE_ID_SHARE, 1, upper_counts)

    low, high = 0.1, 100.0  # the higher the power, the fewer ids
    for _ in range(50):
        power = (low + high) / 2
        low, high = (power, high) if counts_at(power).sum() > mean * tokens else (low, power)
    counts = counts_at(high)
    counts[-1] += mean * tokens - counts.sum()
    return counts


def token_losses(logps: Tensor, old_logps: Tensor, ref_logps: Tensor, advantages: Tensor, beta: float) -> Tensor:
    """Returns GRPO's loss per token, clipped surrogate + beta * k3, as trainers write it; `advantages` are broadcast to
    the shape of `logps`."""
    ratio = torch.exp(logps - old_logps)
    clipped = torch.clamp(ratio, 1 - EPSILON, 1 + EPSILON)
    loss = -torch.min(ratio * advantages, clipped * advantages)
    if beta != 0.0:
        loss = loss + beta * (torch.exp(ref_logps - logps) - (ref_logps - logps) - 1)
    return loss


def token_divergences(log_p: Tensor, log_q: Tensor, divergence: str) -> Tensor:
    """Returns the divergence of policy p and teacher q per token, (..., V) to (...), in nats."""
    if divergence == "reverse_kl":
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if divergence == "forward_kl":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return 0.5 * (log_q.exp() * (log_q - log_m) + log_p.exp() * (log_p - log_m)).sum(-1)


def grpo_objective(logps: Tensor, inputs: Inputs) -> Tensor:
    """Returns the loss (): `token_losses` averaged over each completion, then over completions."""
    loss = token_losses(logps, inputs.old_logps, inputs.ref_logps, inputs.advantages.unsqueeze(1), inputs.beta)
    return ((loss * inputs.mask).sum(-1) / inputs.mask.sum(-1).clamp(min=1.0)).mean()


def _idle(num_prompts: int, share: float) -> list[int]:
    """Returns the indices of `share` of the prompts, spread over the batch."""
    count = round(num_prompts * share)
    return [i * num_prompts // count for i in range(count)]

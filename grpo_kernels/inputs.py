"""What the loss functions share before any work: checks, groups, advantages from rewards, the tensors of the plan."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .advantages import Groups, check_rewards, group_statistics, resolve_groups
from .config import SURROGATE_RULES, GRPOConfig
from .contract import Sums, TokenInputs
from .sampling_mask import SamplingMask
from .validate import (
    check_scalar,
    check_tensor,
    check_token_tensor,
    checks_values,
    num_sequences_of,
    temperature_per_token,
)

_PER_SEQUENCE = ("advantages", "rollout_weights")  # which may have one value per sequence instead
_PER_TOKEN = ("advantages", "completion_mask", "old_logps", "ref_logps", "rollout_weights", "rollout_logps")


class LossOptions(NamedTuple):
    """The options that all loss functions take; their meaning is in `fused_grpo_loss`."""

    advantages: Tensor | None
    completion_mask: Tensor | None
    old_logps: Tensor | None
    ref_logps: Tensor | None
    rollout_weights: Tensor | None
    rollout_logps: Tensor | None
    rewards: Tensor | None
    num_generations: int | None
    group_ids: Tensor | None
    cu_seqlens: Tensor | None
    num_items_in_batch: Tensor | float | None
    normalizer: Tensor | float | None
    entropy_normalizer: Tensor | float | None
    sampling_mask: SamplingMask | None = None  # checked


class LossInputs(NamedTuple):
    """Checked inputs of the plan; groups (0 where none are given); (mean, std) of the rewards per group."""

    tokens: TokenInputs
    num_sequences: int
    num_groups: int
    reward_statistics: tuple[Tensor, Tensor] | None

    def sums(self, numbers: Tensor) -> Sums:
        return Sums(numbers, self.num_sequences, self.num_groups)


def resolve(
    options: LossOptions,
    config: GRPOConfig,
    per_token: Tensor,
    owner: str,
    backend: str,
    dtype: torch.dtype,
    *,
    reads_logits: bool = True,
) -> LossInputs:
    """Check the options against `per_token`, a tensor of the shape (B, T) or (N,), and derive the plan's inputs.

    `owner` is the argument that has that shape, `dtype` the type of the row table. reads_logits=False: the temperature
    is not used.
    """
    shape, like, mask = per_token.shape, per_token, options.sampling_mask
    num_sequences = num_sequences_of(per_token, options.cu_seqlens, owner)
    _check_tensors(options, shape, num_sequences, like)
    _check_combinations(options, config)
    temperature = threshold = entropy_coef = normalizer = entropy_normalizer = None
    if config.has_tensors:
        if reads_logits and isinstance(config.temperature, Tensor):
            temperature = temperature_per_token(config.temperature, shape, num_sequences, like, options.cu_seqlens)
            temperature = temperature.to(like.device)
        if isinstance(config.entropy_threshold, Tensor):
            threshold = check_scalar("entropy_threshold", config.entropy_threshold, like.device, dtype)
        if isinstance(config.entropy_coef, Tensor):
            entropy_coef = check_scalar("entropy_coef", config.entropy_coef, like.device, dtype)
    for name in ("normalizer", "num_items_in_batch"):
        if getattr(options, name) is not None:
            normalizer = check_scalar(name, getattr(options, name), like.device, dtype)
    _check_num_items(options.num_items_in_batch, options.completion_mask, like.device)
    if options.entropy_normalizer is not None:
        entropy_normalizer = check_scalar("entropy_normalizer", options.entropy_normalizer, like.device, dtype)

    groups = None
    if options.num_generations is not None or options.group_ids is not None or options.rewards is not None:
        groups = resolve_groups(num_sequences, options.num_generations, options.group_ids, like)
    advantages, statistics = options.advantages, None
    if options.rewards is not None:
        advantages, statistics = _advantages(options.rewards, groups, config, backend)
        if options.cu_seqlens is not None:
            advantages = advantages.unsqueeze(1)  # not one per token where there are as many of them as sequences
    tokens = TokenInputs(
        advantages=advantages,
        completion_mask=options.completion_mask,
        old_logps=options.old_logps,
        ref_logps=options.ref_logps,
        rollout_weights=options.rollout_weights,
        rollout_logps=options.rollout_logps,
        cu_seqlens=options.cu_seqlens,
        normalizer=normalizer,
        temperature=temperature,
        entropy_threshold=threshold,
        entropy_coef=entropy_coef,
        entropy_normalizer=entropy_normalizer,
        group_index=None if groups is None else groups.index,
        kept_ids=None if mask is None else mask.ids,
        kept_counts=None if mask is None else mask.counts,
    )
    return LossInputs(tokens, num_sequences, 0 if groups is None else groups.count, statistics)


def _check_tensors(options: LossOptions, shape: torch.Size, num_sequences: int, like: Tensor) -> None:
    if (options.advantages is None) == (options.rewards is None):
        given = "neither" if options.rewards is None else "both"
        raise ValueError(f"give advantages, or rewards with num_generations or group_ids; got {given}")
    for name in _PER_TOKEN:
        x = getattr(options, name)
        if x is not None:
            check_token_tensor(name, x, shape, num_sequences, like, per_sequence=name in _PER_SEQUENCE)
    if options.rewards is not None:
        check_rewards(options.rewards)
        check_tensor("rewards", options.rewards, like)
        if options.rewards.shape[0] != num_sequences:
            raise ValueError(
                f"rewards has shape {tuple(options.rewards.shape)}; expected ({num_sequences},), one per completion"
            )


def _check_num_items(count: Tensor | float | None, mask: Tensor | None, device: torch.device) -> None:
    """0 is the count of a batch without an unmasked token, and counts as 1."""
    if count is None or not checks_values(device) or count != 0:
        return
    if mask is None or bool(mask.any()):
        raise ValueError("num_items_in_batch=0, and completion_mask leaves tokens; expected their global number")


def _check_combinations(options: LossOptions, config: GRPOConfig) -> None:
    if config.beta != 0.0 and options.ref_logps is None:
        raise ValueError(f"ref_logps is None and beta={config.beta}; the KL term needs the reference log-probabilities")
    if config.off_policy_mask_threshold is not None and options.rollout_logps is None and options.old_logps is None:
        raise ValueError("off_policy_mask_threshold has no effect without rollout_logps or old_logps; leave it out")
    divides_by_rollout = SURROGATE_RULES[config.surrogate].divides_by_rollout
    if divides_by_rollout and options.rollout_logps is None and options.old_logps is None:
        raise ValueError(f"surrogate={config.surrogate!r} divides by rollout_logps (or old_logps); both are None")
    if options.num_items_in_batch is not None:
        if options.normalizer is not None:
            raise ValueError("num_items_in_batch and normalizer are two names of one denominator; give one")
        if config.aggregation != "num_items":
            raise ValueError(
                f"num_items_in_batch has no effect with aggregation={config.aggregation!r}; use normalizer"
            )
    if options.entropy_normalizer is not None and not config.has_entropy_bonus:
        raise ValueError("entropy_normalizer has no effect with entropy_coef=0; leave it out")
    if config.aggregation == "fixed_length" and config.max_completion_length is None:
        raise ValueError("aggregation='fixed_length' divides by config.max_completion_length, which is None")


def _advantages(
    rewards: Tensor, groups: Groups, config: GRPOConfig, backend: str
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    statistics = group_statistics(
        rewards,
        groups,
        scale=config.advantage_scale,
        baseline=config.advantage_baseline,
        ddof=config.advantage_ddof,
        eps=config.advantage_eps,
        nan_is_no_verdict=False,
        backend=backend if rewards.dtype != torch.float64 else "auto",
    )
    return statistics.advantages, (statistics.mean, statistics.std)

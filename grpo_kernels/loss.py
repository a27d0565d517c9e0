"""fused_grpo_loss, and the same loss from log-probabilities or logits that the caller already has."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import metrics, ops
from .advantages import Groups, check_rewards, group_statistics, resolve_groups
from .autocast import settle_types
from .backends import choose_backend
from .config import GRPOConfig
from .plan import TokenInputs
from .validate import (
    check_head,
    check_ids,
    check_scalar,
    check_tensor,
    check_token_tensor,
    check_values,
    num_sequences_of,
)


@dataclass(frozen=True)
class GRPOLossOutput:
    """What a loss call returns; everything but `loss` is detached.

    loss: scalar, differentiable. logps, entropy: shape of completion_ids, float32, nats; 0 where masked or not scored.
    advantages: as used, (S,) or (B, T) or (N,).
    metrics: name -> scalar tensor. metric_sums: name -> (sum, count) tensors, to be added over ranks and micro-batches.
    groups: name -> (num_groups,) tensor, when groups are given: loss (its share; they add up to `loss`), kl, clip_ratio,
        tokens, and from rewards reward_mean and reward_std. Groups named by group_ids come in ascending order of their id.
    """

    loss: Tensor
    logps: Tensor
    entropy: Tensor | None
    advantages: Tensor
    metrics: dict[str, Tensor]
    metric_sums: dict[str, tuple[Tensor, Tensor]]
    groups: dict[str, Tensor] = field(default_factory=dict)


def fused_grpo_loss(
    hidden: Tensor,
    lm_head_weight: Tensor,
    completion_ids: Tensor,
    advantages: Tensor | None = None,
    *,
    completion_mask: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    rollout_weights: Tensor | None = None,
    rollout_logps: Tensor | None = None,
    rewards: Tensor | None = None,
    num_generations: int | None = None,
    group_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    lm_head_bias: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None,
    normalizer: Tensor | float | None = None,
    config: GRPOConfig | None = None,
    backend: str = "auto",
) -> GRPOLossOutput:
    """The GRPO family's loss from hidden states, forward and backward, without (N, V) logits.

    Shapes: N = B T tokens, S sequences (B, or the packed ones), H hidden size, V vocabulary.

    Args:
        hidden: (B, T, H), or packed (N, H) with cu_seqlens; row t predicts completion_ids[:, t]. float32, bfloat16,
            float16 or float64; any strides.
        lm_head_weight: (V, H), lm_head_bias: (V,), in hidden's type. Gradients come back for those of the three that
            require them; the others cost nothing.
        completion_ids: (B, T) or (N,) int64. completion_mask: the same shape, 0 at padding, prompt and tool tokens.
        advantages: (B,), (B, 1), (B, T) or (N,), constants. Or instead of them:
        rewards: (S,), with num_generations (adjacent rows) or group_ids (S,): the advantages of `group_advantages` under
            config.advantage_*, in the same call. With advantages, groups may be given for `groups` alone.
        old_logps: log-probabilities under the policy that the ratio divides by; None: on-policy, ratio 1.
        ref_logps: under the reference policy; required where config.beta > 0.
        rollout_weights: importance weights of the sampling engine, per token or per sequence (see `rollout_weights`).
        rollout_logps: under the sampling engine, NaN where unknown: the ratio of "dppo_tv" and "ipo", the off-policy mask,
            mismatch metrics.
        cu_seqlens: (S + 1,) offsets of packed sequences.
        num_items_in_batch: denominator of aggregation "num_items"; None: the tokens of this call.
        normalizer: replaces the denominator of any aggregation: the global number of sequences ("seq_mean", "seq_sum"),
            of tokens ("token_mean", "num_items"), of sequences times max_completion_length ("fixed_length"). Micro-batches
            and ranks that pass it add up to the loss of one big batch; nothing is all-reduced here.
        config: GRPOConfig; None: GRPOConfig(). backend: "auto", or a name of `available_backends()`.

    Raises:
        ValueError, TypeError: an argument that does not fit, by name, before any work. ids outside [0, V) at unmasked
        positions are looked for on a CPU, and on a GPU with GRPO_KERNELS_DEBUG=1.
    """
    config = GRPOConfig() if config is None else config
    _check_config(config)
    hidden, lm_head_weight, lm_head_bias = settle_types(hidden, lm_head_weight, lm_head_bias)
    check_head(hidden, lm_head_weight, lm_head_bias, completion_ids)
    name = choose_backend(backend, hidden.device, hidden.dtype)
    num_sequences = num_sequences_of(completion_ids, cu_seqlens)
    inputs, groups, statistics = _token_inputs(
        config, completion_ids.shape, num_sequences, hidden, name, advantages, rewards, num_generations, group_ids,
        completion_mask=completion_mask, old_logps=old_logps, ref_logps=ref_logps, rollout_weights=rollout_weights,
        rollout_logps=rollout_logps, cu_seqlens=cu_seqlens, num_items_in_batch=num_items_in_batch, normalizer=normalizer,
    )  # fmt: skip
    wants = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, lm_head_weight, lm_head_bias)]
    loss, logps, entropy, group_sums, totals, extrema, *_ = ops.grpo_loss(
        hidden, lm_head_weight, lm_head_bias, completion_ids, list(inputs), groups.count, config.key, name, wants
    )
    return _output(config, inputs, statistics, loss, logps, entropy, group_sums, totals, extrema, groups.count)


def grpo_loss_from_logps(
    logps: Tensor,
    advantages: Tensor | None = None,
    *,
    entropy: Tensor | None = None,
    completion_mask: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    rollout_weights: Tensor | None = None,
    rollout_logps: Tensor | None = None,
    rewards: Tensor | None = None,
    num_generations: int | None = None,
    group_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None,
    normalizer: Tensor | float | None = None,
    config: GRPOConfig | None = None,
    backend: str = "auto",
) -> GRPOLossOutput:
    """`fused_grpo_loss` from log-probabilities (B, T) or packed (N,), nats; differentiable in logps and entropy.

    entropy: of the same shape; needed for an entropy bonus or threshold. Options of the logits (temperature, ...) and of
    the engine are not read here. Everything else as in `fused_grpo_loss`.
    """
    config = GRPOConfig() if config is None else config
    _check_config(config)
    check_tensor("logps", logps)
    if logps.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise TypeError(f"logps is {logps.dtype}; expected a floating-point type")
    num_sequences = num_sequences_of(logps, cu_seqlens, "logps")
    check_token_tensor("entropy", entropy, logps.shape, num_sequences, logps)
    if entropy is None and (config.entropy_coef != 0.0 or config.entropy_threshold is not None):
        raise ValueError("entropy is None; entropy_coef and entropy_threshold need it")
    name = choose_backend(backend, logps.device, logps.dtype)
    inputs, groups, statistics = _token_inputs(
        config, logps.shape, num_sequences, logps, name, advantages, rewards, num_generations, group_ids,
        completion_mask=completion_mask, old_logps=old_logps, ref_logps=ref_logps, rollout_weights=rollout_weights,
        rollout_logps=rollout_logps, cu_seqlens=cu_seqlens, num_items_in_batch=num_items_in_batch, normalizer=normalizer,
        with_temperature=False,
    )  # fmt: skip
    given = torch.zeros_like(logps) if entropy is None else entropy
    loss, group_sums, totals, extrema, *_ = ops.policy_loss(
        logps, given, list(inputs), groups.count, config.key, name
    )
    shown = None if entropy is None else entropy.detach()
    return _output(config, inputs, statistics, loss, logps.detach(), shown, group_sums, totals, extrema, groups.count)


def grpo_loss_from_logits(
    logits: Tensor,
    completion_ids: Tensor,
    advantages: Tensor | None = None,
    *,
    completion_mask: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    rollout_weights: Tensor | None = None,
    rollout_logps: Tensor | None = None,
    rewards: Tensor | None = None,
    num_generations: int | None = None,
    group_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None,
    normalizer: Tensor | float | None = None,
    inplace: bool = False,
    config: GRPOConfig | None = None,
    backend: str = "auto",
) -> GRPOLossOutput:
    """`fused_grpo_loss` from raw logits (B, T, V) or (N, V) that the caller holds, any row pitch.

    One buffer of gradients is made; with inplace=True none: the gradient replaces the logits, which must not be used
    again (autograd notices if something else saved them). Everything else as in `fused_grpo_loss`.
    """
    config = GRPOConfig() if config is None else config
    _check_config(config)
    check_tensor("logits", logits)
    check_tensor("completion_ids", completion_ids, logits)
    if logits.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise TypeError(f"logits is {logits.dtype}; expected a floating-point type")
    if logits.dim() not in (2, 3) or logits.shape[-1] == 0:
        raise ValueError(f"logits has shape {tuple(logits.shape)}; expected (B, T, V) or packed (N, V), V >= 1")
    check_ids(completion_ids, logits.shape[:-1], "logits")
    name = choose_backend(backend, logits.device, logits.dtype)
    num_sequences = num_sequences_of(completion_ids, cu_seqlens, "logits")
    inputs, groups, statistics = _token_inputs(
        config, completion_ids.shape, num_sequences, logits, name, advantages, rewards, num_generations, group_ids,
        completion_mask=completion_mask, old_logps=old_logps, ref_logps=ref_logps, rollout_weights=rollout_weights,
        rollout_logps=rollout_logps, cu_seqlens=cu_seqlens, num_items_in_batch=num_items_in_batch, normalizer=normalizer,
    )  # fmt: skip
    check_values(completion_ids, completion_mask, logits.shape[-1], cu_seqlens)
    if inplace and logits.is_leaf and logits.requires_grad:
        raise ValueError("inplace=True would overwrite a leaf that requires a gradient; pass the output of the lm_head")
    results = _LossOverLogits.apply(logits, completion_ids, inputs, groups.count, config.key, name, inplace)
    return _output(config, inputs, statistics, *results, groups.count)


class _LossOverLogits(torch.autograd.Function):
    """Not a custom operator: one that returns its input's memory cannot be one."""

    @staticmethod
    def forward(ctx, logits, completion_ids, inputs, num_groups, config_key, backend, inplace):
        want = ctx.needs_input_grad[0]
        flat = logits.detach().reshape(-1, logits.shape[-1])
        reused = inplace and flat.data_ptr() == logits.data_ptr() and flat.stride(-1) == 1
        if want and not reused or flat.stride(-1) != 1:
            flat = flat.clone(memory_format=torch.contiguous_format)
        results = ops.loss_over_logits(flat, completion_ids, inputs, num_groups, config_key, backend, want)
        if want:
            if reused:
                torch.autograd.graph.increment_version(logits)
            ctx.gradient = flat.view(logits.shape)
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g_loss, *_):
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("grpo_loss_from_logits gives its gradient once: it lies where the logits were")
        return None if g_loss is None else gradient.mul_(g_loss.to(gradient.dtype)), *[None] * 6


def _check_config(config: GRPOConfig) -> None:
    if not isinstance(config, GRPOConfig):
        raise TypeError(f"config is a {type(config).__name__}; expected a GRPOConfig")


def _token_inputs(
    config: GRPOConfig,
    shape: torch.Size,
    num_sequences: int,
    like: Tensor,
    backend: str,
    advantages: Tensor | None,
    rewards: Tensor | None,
    num_generations: int | None,
    group_ids: Tensor | None,
    *,
    completion_mask: Tensor | None,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    rollout_weights: Tensor | None,
    rollout_logps: Tensor | None,
    cu_seqlens: Tensor | None,
    num_items_in_batch: Tensor | float | None,
    normalizer: Tensor | float | None,
    with_temperature: bool = True,
) -> tuple[TokenInputs, Groups, tuple[Tensor, Tensor] | None]:
    """Checked inputs of the plan, the groups (0 of them where none are given), and (mean, std) of rewards per group."""
    if (advantages is None) == (rewards is None):
        given = "neither" if rewards is None else "both"
        raise ValueError(f"give advantages, or rewards with num_generations or group_ids; got {given}")
    check_token_tensor("advantages", advantages, shape, num_sequences, like, per_sequence=True)
    for name, x in (("completion_mask", completion_mask), ("old_logps", old_logps), ("ref_logps", ref_logps)):
        check_token_tensor(name, x, shape, num_sequences, like)
    check_token_tensor("rollout_weights", rollout_weights, shape, num_sequences, like, per_sequence=True)
    check_token_tensor("rollout_logps", rollout_logps, shape, num_sequences, like)
    if config.beta != 0.0 and ref_logps is None:
        raise ValueError(f"ref_logps is None and beta={config.beta}; the KL term needs the reference log-probabilities")
    if config.surrogate in ("dppo_tv", "ipo") and rollout_logps is None and old_logps is None:
        raise ValueError(f"surrogate={config.surrogate!r} divides by rollout_logps (or old_logps); both are None")
    if num_items_in_batch is not None:
        if normalizer is not None:
            raise ValueError("num_items_in_batch and normalizer are two names of one denominator; give one")
        if config.aggregation != "num_items":
            raise ValueError(f"num_items_in_batch has no effect with aggregation={config.aggregation!r}; use normalizer")
        normalizer = check_scalar("num_items_in_batch", num_items_in_batch, like).clamp(min=1)
    if config.aggregation == "fixed_length" and normalizer is None and config.max_completion_length is None:
        raise ValueError("aggregation='fixed_length' divides by config.max_completion_length, which is None")
    temperature = config.temperature if with_temperature and isinstance(config.temperature, Tensor) else None
    if temperature is not None and temperature.numel() > 1:
        check_token_tensor("temperature", temperature, shape, num_sequences, like)
    threshold = config.entropy_threshold if isinstance(config.entropy_threshold, Tensor) else None

    groups, statistics = Groups(None, 0), None
    if rewards is not None:
        check_rewards(rewards)
        check_tensor("rewards", rewards, like)
        if rewards.shape[0] != num_sequences:
            raise ValueError(f"rewards has shape {tuple(rewards.shape)}; expected ({num_sequences},), one per completion")
    if num_generations is not None or group_ids is not None or rewards is not None:
        groups = resolve_groups(num_sequences, num_generations, group_ids, like)
    if rewards is not None:
        stats = group_statistics(
            rewards,
            groups,
            scale=config.advantage_scale,
            baseline=config.advantage_baseline,
            ddof=config.advantage_ddof,
            eps=config.advantage_eps,
            backend=backend if rewards.dtype != torch.float64 else "auto",
        )
        advantages, statistics = stats.advantages, (stats.mean, stats.std)
    inputs = TokenInputs(
        advantages=advantages,
        completion_mask=completion_mask,
        old_logps=old_logps,
        ref_logps=ref_logps,
        rollout_weights=rollout_weights,
        rollout_logps=rollout_logps,
        cu_seqlens=cu_seqlens,
        normalizer=check_scalar("normalizer", normalizer, like),
        temperature=None if temperature is None else temperature.to(like.device),
        entropy_threshold=check_scalar("entropy_threshold", threshold, like),
        group_index=groups.index,
    )
    return TokenInputs(*(None if x is None else x.detach() for x in inputs)), groups, statistics


def _output(
    config: GRPOConfig,
    inputs: TokenInputs,
    statistics: tuple[Tensor, Tensor] | None,
    loss: Tensor,
    logps: Tensor,
    entropy: Tensor | None,
    group_sums: Tensor,
    totals: Tensor,
    extrema: Tensor,
    num_groups: int,
) -> GRPOLossOutput:
    has_kl = inputs.ref_logps is not None and config.kl_estimator != "none"
    values, sums = metrics.collect(
        config,
        totals,
        extrema,
        has_kl=has_kl,
        has_rollout=inputs.rollout_logps is not None,
        has_weights=inputs.rollout_weights is not None,
    )
    groups: dict[str, Tensor] = {}
    if num_groups:
        groups = metrics.group_table(config, group_sums, has_kl=has_kl)
    if statistics is not None:
        mean, std = statistics
        groups |= {"reward_mean": mean, "reward_std": std}
        equal = (std == 0).to(totals.dtype)
        sums["equal_reward_groups"] = (equal.sum(), totals.new_full((), num_groups))
        values["equal_reward_groups"] = equal.mean()
    return GRPOLossOutput(loss, logps.detach(), entropy, inputs.advantages, values, sums, groups)

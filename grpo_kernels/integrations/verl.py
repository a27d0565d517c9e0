"""verl 0.9.1: a policy loss under a name, and log-probabilities for its fused kernels.

    from grpo_kernels.integrations.verl import register
    register()  # in each worker, before the first step

and in verl's configuration

    actor.policy_loss.loss_mode=grpo_kernels
    model.use_fused_kernels=True

whatever model.fused_kernel_options.impl_backend is.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ..checks.arguments import check_config, constant
from ..checks.plain import check_plain, check_shape
from ..config import GRPOConfig, check_one_of, check_sparse_backward
from ..logps import fused_logps
from ..loss import grpo_loss_from_logps
from ..objective.aggregation import Aggregation

if importlib.util.find_spec("verl") is None:
    raise ImportError("grpo_kernels.integrations.verl needs verl: pip install verl")

_KERNEL = "verl.utils.kernel.linear_cross_entropy"  # of impl_backend=triton
_LAYER = "verl.utils.experimental.torch_functional"  # its FusedLinearForPPO: of torch, the default, and liger
# loss_agg_mode -> aggregation here; both divide by a count, which `_denominator` gives.
_AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": "token_mean",
    "token-sum": "token_mean",
    "seq-mean-token-sum": "seq_sum",
    "seq-mean-token-sum-norm": "seq_sum",
    "seq-mean-token-mean": "seq_mean",
}
_head_options: dict[str, Any] = {}  # of register


def register(
    name: str = "grpo_kernels", config: GRPOConfig | None = None, *, sparse_backward: float | None = None,
    logits_dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Adds the policy loss `name` to verl, and puts `linear_cross_entropy` in the place of verl's fused kernels.

    These are verl's function of this name and the forward of its FusedLinearForPPO, one of which every model patched
    with use_fused_kernels calls.

    config: the loss, without its aggregation, which is verl's loss_agg_mode; None: verl's "vanilla" loss with
    actor.clip_ratio, clip_ratio_low, clip_ratio_high and clip_ratio_c. KL to a reference and the entropy bonus stay
    verl's (actor.use_kl_loss, actor.entropy_coeff). sparse_backward, logits_dtype: as in `GRPOConfig`, of
    `linear_cross_entropy`.

    Raises ValueError for options of `config` that need what verl does not pass: beta, entropy_coef, entropy_threshold,
    surrogates and masks that read the sampling engine's log-probabilities.
    """
    check_sparse_backward(sparse_backward)
    if config is not None:
        check_config(config)
        for option in ("sparse_backward", "logits_dtype"):
            if getattr(config, option) is not None:
                raise ValueError(f"config.{option} has no effect in verl's policy loss; give it to register()")
        neutral = dict(beta=0.0, entropy_coef=0.0, entropy_threshold=None, off_policy_mask_threshold=None)
        neutral |= dict(kl_clamp=None, use_bias_correction_kl=False)
        for option, value in neutral.items():
            if (configured := getattr(config, option)) != value:
                raise ValueError(f"config.{option}={configured}: verl's policy losses are not given what it needs")
    _head_options.update(sparse_backward=sparse_backward, logits_dtype=logits_dtype)
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    core.register_policy_loss(name)(partial(policy_loss, grpo_config=config))
    kernel = importlib.import_module(_KERNEL)
    original = kernel.linear_cross_entropy
    if original is not linear_cross_entropy:
        for module in [*sys.modules.values()]:  # those that imported the name, too
            if getattr(module, "__name__", "").startswith("verl.") and (
                vars(module).get("linear_cross_entropy") is original
            ):
                module.linear_cross_entropy = linear_cross_entropy  # type: ignore[attr-defined]
    importlib.import_module(_LAYER).FusedLinearForPPO.forward = _forward_of_layer


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Returns (log-probabilities (N,), entropy (N,) or its sum or mean), float32, differentiable in hidden and weight.

    hidden (..., H) of N tokens, weight (V, H), labels (...) of the same N tokens. With a dist_process_group of several
    ranks each passes its rows of the weight, as `fused_logps` takes them; labels are ids of the whole vocabulary. The
    gradients of hidden then sum over the ranks to the whole one, as with verl's function: Megatron's sequence
    parallelism, which verl has with tensor parallelism, adds them up.
    """
    split = dist_process_group is not None and torch.distributed.get_world_size(dist_process_group) > 1
    reductions: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda x: x, "sum": torch.sum, "mean": torch.mean}
    reduction = reduction.lower() if isinstance(reduction, str) else reduction
    check_one_of("reduction", reduction, tuple(reductions))
    flat = hidden.reshape(-1, hidden.shape[-1])
    if isinstance(temperature, Tensor) and temperature.numel() > 1:
        temperature = temperature.expand(hidden.shape[:-1]).reshape(-1)
    if split and torch.is_grad_enabled() and flat.requires_grad:  # an equal share of the gradient for each rank
        ranks = torch.distributed.get_world_size(dist_process_group)
        flat = flat.view_as(flat)
        flat.register_hook(lambda gradient: gradient / ranks)
    logps, entropy = fused_logps(
        flat, weight, labels.reshape(-1), temperature=temperature, entropy=True,
        vocab_parallel_group=dist_process_group if split else None, **_head_options,
    )  # fmt: skip
    assert entropy is not None
    return logps, reductions[reduction](entropy)


def _forward_of_layer(
    self: Any, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns (log-probabilities, entropy), each as input_ids (...), for the arguments of FusedLinearForPPO.forward."""
    logps, entropy = linear_cross_entropy(hidden_states, vocab_weights, input_ids, temperature)
    return logps.view(input_ids.shape), entropy.view(input_ids.shape)


def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    *,
    grpo_config: GRPOConfig | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Returns (loss (), metrics), for the arguments of verl's policy losses; tensors (B, T), config: its ActorConfig.

    The metrics are the ones of verl's "vanilla" loss: actor/pg_clipfrac, actor/ppo_kl, actor/pg_clipfrac_lower.
    """
    check_one_of("loss_agg_mode", loss_agg_mode, tuple(_AGGREGATIONS))
    if config is None:
        raise ValueError("config is None; expected verl's ActorConfig")
    tensors = dict(log_prob=log_prob, old_log_prob=old_log_prob, advantages=advantages, response_mask=response_mask)
    for name, x in tensors.items():
        check_plain(name, x)
        check_shape(name, x, x.shape == log_prob.shape, f"{tuple(log_prob.shape)} like log_prob")
        if name != "log_prob":
            constant(name, x)
    low, high = (config.clip_ratio if x is None else x for x in (config.clip_ratio_low, config.clip_ratio_high))
    chosen = _config(grpo_config, _AGGREGATIONS[loss_agg_mode], low, high, config.get("clip_ratio_c", 3.0))
    out = grpo_loss_from_logps(
        log_prob, advantages, completion_mask=response_mask, old_logps=old_log_prob,
        rollout_weights=rollout_is_weights, config=chosen,
        normalizer=_denominator(loss_agg_mode, response_mask, **config.global_batch_info),
    )  # fmt: skip
    clipped = out.metrics.get("clip_ratio/region", out.metrics.get("cispo_clip_ratio"))
    bound = math.inf if chosen.dual_clip is None else chosen.dual_clip
    with torch.no_grad():
        ratio = (log_prob - old_log_prob).clamp(-20, 20).exp()
        lower = (advantages < 0) & (ratio > bound) & response_mask.bool()
        share = lower.sum() / response_mask.sum().clamp(min=1)
    metrics = {"actor/pg_clipfrac": clipped, "actor/ppo_kl": out.metrics["approx_kl"], "actor/pg_clipfrac_lower": share}
    return out.loss, {key: value.item() for key, value in metrics.items() if value is not None}


@lru_cache(maxsize=16)
def _config(
    config: GRPOConfig | None, aggregation: Aggregation, low: float, high: float, dual_clip: float
) -> GRPOConfig:
    """Returns the loss that `register` was given, or verl's "vanilla" with these numbers of its configuration."""
    if config is None:
        config = GRPOConfig.preset("verl", epsilon_low=low, epsilon_high=high, dual_clip=dual_clip)
    return replace(config, aggregation=aggregation, max_completion_length=None)


def _denominator(
    mode: str,
    mask: Tensor,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor | float:
    """Returns what the loss is divided by, for gradients that are averaged over dp_size ranks."""
    if mode == "token-sum":
        return 1.0 / dp_size
    by_token = mode == "token-mean"
    count: Any = batch_num_tokens if by_token else global_batch_size
    if count is None:
        if dp_size > 1:
            name = "batch_num_tokens" if by_token else "global_batch_size"
            raise ValueError(f"{name} is None in config.global_batch_info; expected the global count with dp_size > 1")
        count = (mask.bool().sum() if by_token else mask.bool().any(dim=-1).sum()).clamp(min=1)
    if mode == "seq-mean-token-sum-norm":
        count = count * (mask.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    return count / dp_size

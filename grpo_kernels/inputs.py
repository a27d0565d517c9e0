"""What public functions share before any work: checks, groups, advantages from rewards, and the batch or call that
head/ receives."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor

from .checks.arguments import (
    check_config,
    check_lm_head,
    check_logits_dtype,
    check_offsets,
    check_scalar,
    check_tensor,
    checks_values,
    num_sequences_of,
    refuse_transforms,
)
from .checks.plain import check_plain, check_shape
from .checks.tokens import (
    TOKEN_ARGUMENTS,
    TokenLayout,
    check_token_values,
    mask_per_token,
    per_token,
)
from .config import (
    DEFAULT_CONFIG,
    GRPOConfig,
    check_count,
    check_flag,
    check_logit_transform,
    check_sparse_backward,
    option_hint,
)
from .head.logps_op import Inputs, LogpsCall, LogpsTokens
from .head.shared import table_dtype
from .kernels import choose_backend
from .objective.metrics import Batch
from .objective.surrogates import SURROGATE_RULES
from .objective.tokens import TokenInputs
from .rewards import check_rewards, group_statistics, resolve_groups
from .sampling_mask import SamplingMask, check_sampling_mask
from .teacher import Teacher, TopKTeacher, check_teacher, is_whole

_PER_TOKEN = ("old_logps", "ref_logps", "rollout_weights", "rollout_logps", "token_weights")
_SCALARS = ("normalizer", "num_items_in_batch", "entropy_normalizer")


class LossOptions(TypedDict, total=False):
    """The keyword arguments that all loss functions take; their meaning is in `fused_grpo_loss`."""

    completion_mask: Tensor | None
    old_logps: Tensor | None
    ref_logps: Tensor | None
    rollout_weights: Tensor | None
    rollout_logps: Tensor | None
    token_weights: Tensor | None
    rewards: Tensor | None
    num_generations: int | None
    group_ids: Tensor | None
    cu_seqlens: Tensor | None
    num_items_in_batch: Tensor | float | None
    normalizer: Tensor | float | None
    entropy_normalizer: Tensor | float | None
    config: GRPOConfig | None
    backend: str


_DEFAULTS = {name: "auto" if name == "backend" else None for name in LossOptions.__annotations__}
Function = TypeVar("Function", bound=Callable[..., Any])


def forwards_loss_options(function: Function) -> Function:
    """Gives a function with **options: Unpack[LossOptions] the signature that help() and editors show."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name, annotation in LossOptions.__annotations__.items():
        # As it is written: help() shows an annotation of a TypedDict as a ForwardRef.
        text, default = str(getattr(annotation, "__forward_arg__", annotation)), _DEFAULTS[name]
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=text))
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def read_config(function_name: str, options: LossOptions) -> GRPOConfig:
    """Returns the configuration among the options of a function, whose names are checked."""
    for name in options:
        if name not in _DEFAULTS:
            raise TypeError(f"{function_name}() got an unexpected keyword argument {name!r}{option_hint(name)}")
    config = options.get("config")
    if config is None:
        return DEFAULT_CONFIG
    check_config(config)
    return config


def check_loss_inputs(
    advantages: Tensor | None,
    sampling_mask: SamplingMask | None,
    options: LossOptions,
    config: GRPOConfig,
    like: Tensor,
    input_name: str,
    dtype: torch.dtype,
    *,
    reads_logits: bool = True,
    teacher: Teacher | TopKTeacher | None = None,
) -> Batch:
    """Checks the options against `like`, a tensor of the shape (B, T) or (N,), and returns the batch.

    `input_name` is the argument that has that shape, `dtype` the type that products are computed in.
    reads_logits=False: the temperature is not used.
    """
    if config.distill_coef != 0.0 and teacher is None:
        raise ValueError(f"distill_coef={config.distill_coef} has no effect without a teacher, which is not given here")
    # The ids of a TopKTeacher that are the mask's stand in rows of their own, as the logits of a Teacher do.
    has_rows = teacher is not None and (is_whole(teacher) or sampling_mask is not None)
    device, shape, cu_seqlens = like.device, like.shape, options.get("cu_seqlens")
    backend = choose_backend(options.get("backend", "auto"), device, dtype, has_teacher=has_rows)
    if sampling_mask is not None:
        check_sampling_mask(sampling_mask, shape, like)
    num_sequences = num_sequences_of(like, cu_seqlens, input_name)
    check_offsets(cu_seqlens, shape[0])
    layout = TokenLayout(shape, num_sequences, cu_seqlens, like, table_dtype(dtype))
    given: dict[str, Any] = {name: options.get(name) for name in _PER_TOKEN}
    given["completion_mask"] = mask = mask_per_token(options.get("completion_mask"), shape, like)
    if reads_logits and isinstance(config.temperature, Tensor):
        given["temperature"] = config.temperature
    _check_advantages(advantages, options.get("rewards"), num_sequences, like)
    _check_combinations(options, config)
    for name in (*_SCALARS, "entropy_threshold", "entropy_coef"):
        x = options.get(name) if name in _SCALARS else getattr(config, name)
        if x is not None and (name in _SCALARS or isinstance(x, Tensor)):
            given[name] = check_scalar(name, x, device, layout.dtype)
    if "num_items_in_batch" in given:
        _check_num_items(options["num_items_in_batch"], mask, device)
        given["normalizer"] = given.pop("num_items_in_batch")

    groups = moments = None
    num_generations, group_ids = options.get("num_generations"), options.get("group_ids")
    rewards = options.get("rewards")
    if num_generations is not None or group_ids is not None or rewards is not None:
        groups = resolve_groups(num_sequences, num_generations, group_ids, like)
    if isinstance(rewards, Tensor) and groups is not None:
        lengths = _lengths(mask, cu_seqlens, like) if config.advantage_baseline == "length_weighted" else None
        advantages, *moments = group_statistics(
            rewards, groups, scale=config.advantage_scale, baseline=config.advantage_baseline,
            ddof=config.advantage_ddof, eps=config.advantage_eps, nan_is_no_verdict=False, lengths=lengths,
        )  # fmt: skip
        if cu_seqlens is not None:
            advantages = advantages.unsqueeze(1)  # not one per token where there are as many of them as sequences
    given["advantages"] = advantages
    inputs = TokenInputs(
        cu_seqlens=cu_seqlens,
        group_index=None if groups is None else groups.index,
        kept_ids=None if sampling_mask is None else sampling_mask.ids,
        kept_counts=None if sampling_mask is None else sampling_mask.counts,
        **given,
    )
    expanded = {name: per_token(name, given[name], layout) for name in TOKEN_ARGUMENTS if given.get(name) is not None}
    check_token_values(inputs)
    per_sequence = all(x is None or x.shape != shape for x in (advantages, inputs.rollout_weights))
    count = 0 if groups is None else groups.count
    return Batch(
        inputs._replace(**expanded), config, backend, shape, num_sequences, count, moments, per_sequence, advantages
    )


def _check_advantages(advantages: Tensor | None, rewards: Tensor | None, num_sequences: int, like: Tensor) -> None:
    if (advantages is None) == (rewards is None):
        came = "neither" if rewards is None else "both"
        raise ValueError(f"give advantages, or rewards with num_generations or group_ids; got {came}")
    if rewards is not None:
        check_rewards(rewards)
        check_tensor("rewards", rewards, like)
        fits = rewards.shape[0] == num_sequences
        check_shape("rewards", rewards, fits, f"({num_sequences},), one per completion")


def _check_num_items(count: Tensor | float, mask: Tensor | None, device: torch.device) -> None:
    """Refuses what is below 1; but for 0, the count of a batch without an unmasked token, which counts as 1."""
    is_known = checks_values(device)
    if (is_known or not isinstance(count, Tensor)) and 0 < count < 1:
        raise ValueError(
            f"num_items_in_batch={float(count)}; expected the global number of tokens; a share is normalizer"
        )
    if is_known and count == 0 and (mask is None or bool(mask.any())):
        raise ValueError("num_items_in_batch=0, and completion_mask leaves tokens; expected their global number")


def _check_combinations(options: LossOptions, config: GRPOConfig) -> None:
    if config.beta != 0.0 and options.get("ref_logps") is None:
        raise ValueError(f"ref_logps is None and beta={config.beta}; the KL term needs the reference log-probabilities")
    if options.get("ref_logps") is None:
        kl = config.kl_estimator
        for name, value, neutral in (
            ("kl_clamp", config.kl_clamp, config.kl_clamp is None),
            ("kl_estimator", kl, kl in ("none", DEFAULT_CONFIG.kl_estimator)),
            ("use_bias_correction_kl", True, not config.use_bias_correction_kl),
        ):
            if not neutral:
                raise ValueError(f"{name}={value!r} has no effect without ref_logps; leave it out")
    if options.get("rollout_logps") is None and options.get("old_logps") is None:
        if config.off_policy_mask_threshold is not None:
            raise ValueError("off_policy_mask_threshold has no effect without rollout_logps or old_logps; leave it out")
        if SURROGATE_RULES[config.surrogate].divides_by_rollout:
            raise ValueError(f"surrogate={config.surrogate!r} divides by rollout_logps (or old_logps); both are None")
    if options.get("num_items_in_batch") is not None:
        if options.get("normalizer") is not None:
            raise ValueError("num_items_in_batch and normalizer are two names of one denominator; give one")
        if config.aggregation != "num_items":
            why = f"aggregation={config.aggregation!r}; use normalizer"
            raise ValueError(f"num_items_in_batch has no effect with {why}")
    if options.get("entropy_normalizer") is None:
        counts_tokens = config.aggregation in ("token_mean", "num_items") or config.entropy_aggregation == "loss"
        has_mean = config.has_entropy_bonus and not config.entropy_kept_only
        if options.get("normalizer") is not None and has_mean and not counts_tokens:
            raise ValueError(
                f"normalizer with aggregation={config.aggregation!r} says nothing of the number of tokens, over which "
                "the entropy bonus is a mean; give entropy_normalizer, or entropy_aggregation='loss'"
            )
    else:
        for why, applies in (
            ("entropy_coef=0; leave it out", not config.has_entropy_bonus),
            ("entropy_aggregation='loss'; use normalizer", config.entropy_aggregation == "loss"),
            ("entropy_kept_only, a mean over the kept tokens", config.entropy_kept_only),
        ):
            if applies:
                raise ValueError(f"entropy_normalizer has no effect with {why}")
    if config.aggregation == "fixed_length" and config.max_completion_length is None:
        raise ValueError("aggregation='fixed_length' divides by config.max_completion_length, which is None")


def _lengths(mask: Tensor | None, cu_seqlens: Tensor | None, like: Tensor) -> Tensor:
    """Returns the number of unmasked tokens of each sequence, (S,)."""
    unmasked = torch.ones(like.shape, device=like.device) if mask is None else mask.float()
    if cu_seqlens is None:
        return unmasked.sum(1)
    return torch.segment_reduce(unmasked, "sum", offsets=cu_seqlens.long(), unsafe=True)


def check_logps_inputs(
    function_name: str,
    inputs: Inputs,
    ids: Tensor | None,
    mask: Tensor | None,
    transform: tuple[float | Tensor, float, float | None],
    backend: str,
    *,
    entropy: bool = True,
    sampling_mask: SamplingMask | None = None,
    sparse_backward: float | None = None,
    cu_seqlens: Tensor | None = None,
    teacher: Teacher | TopKTeacher | None = None,
    divergence: GRPOConfig = DEFAULT_CONFIG,
    several_ids: bool = False,
    top_k: object = None,
    logits_dtype: torch.dtype | None = None,
) -> LogpsCall:
    """Checks the arguments of a public function of log-probabilities, and returns what it computes.

    transform: temperature, logit scale and softcap. several_ids: ids may be (..., K). top_k: how many to find where ids
    are None."""
    hidden, weight, bias = inputs
    temperature, logit_scale, softcap = check_logit_transform(*transform)
    theta = check_sparse_backward(sparse_backward)
    entropy = check_flag("entropy", entropy)
    k = 0
    if ids is None:
        k = check_count("k", top_k)
        refuse_transforms(function_name, hidden)
        check_plain("hidden", hidden)
        ids = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    compute_dtype = check_lm_head(function_name, hidden, weight, bias, ids, several_ids=several_ids)
    dtype, one = compute_dtype or hidden.dtype, ids
    check_logits_dtype(logits_dtype, dtype)
    if ids.dim() == hidden.dim():
        one = ids[..., 0]
        for name, x in {"sampling_mask": sampling_mask, "sparse_backward": sparse_backward}.items():
            if x is not None:
                raise ValueError(f"{name} is given with {ids.shape[-1]} completion_ids of each token; give one of both")
    check_teacher(teacher, divergence, hidden, weight, dtype)
    mask = mask_per_token(mask, one.shape, hidden)
    if sampling_mask is not None:
        check_sampling_mask(sampling_mask, one.shape, hidden)
    of_tokens, number = None, 1.0
    if isinstance(temperature, Tensor):
        num_sequences = -1 if cu_seqlens is None and one.dim() == 1 else num_sequences_of(one, cu_seqlens)
        check_offsets(cu_seqlens, one.shape[0])
        layout = TokenLayout(one.shape, num_sequences, cu_seqlens, hidden, table_dtype(dtype))
        of_tokens = per_token("temperature", temperature, layout)
    else:
        number = float(temperature)
    kept = () if sampling_mask is None else (sampling_mask.ids, sampling_mask.counts)
    numbers = number, float(logit_scale), float(softcap or 0.0), theta
    name = choose_backend(backend, hidden.device, dtype, has_teacher=is_whole(teacher))
    tokens = LogpsTokens(ids, mask, of_tokens, *kept)
    return LogpsCall(
        tokens, numbers, entropy, name, compute_dtype, logits_dtype, k, teacher=teacher, divergence=divergence
    )

"""What public functions share before any work: checks, groups, advantages from rewards, and the batch or call that
head/ receives."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import torch
from torch import Tensor

from .argument import no_effect
from .checks.arguments import (
    check_config,
    check_ids,
    check_lm_head,
    check_logits_dtype,
    check_sizes,
    check_tensor,
    checks_values,
    num_sequences_of,
)
from .checks.plain import gather_dtensor
from .checks.table import ARGUMENTS, NUMBER_ARGUMENTS, TOKEN_ARGUMENTS
from .checks.table import LossOptions as LossOptions
from .checks.tokens import TokenLayout, check_token_values, mask_per_token, one_number, per_token
from .config import (
    DEFAULT_CONFIG,
    OPTIONS,
    GRPOConfig,
    check_flag,
    check_option,
    check_sparse_backward,
    option_hint,
)
from .head.logps_op import Inputs, LogpsCall, LogpsTokens
from .head.loss_op import LossCall
from .head.shared import requires_grad_flags, statistics_dtype
from .head.vocab_parallel import broadcast_failure, check_group, exchange_and_check
from .kernels import choose_backend
from .objective.metrics import Batch
from .objective.surrogates import SURROGATE_RULES
from .objective.tokens import TokenInputs
from .rewards import Groups, check_rewards, group_statistics, resolve_groups
from .sampling_mask import SamplingMask, check_sampling_mask
from .teacher import AnyTeacher, Teacher, TopKTeacher, check_teacher, combined_teachers, has_full_vocab

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DEFAULTS = {name: "auto" if name == "backend" else None for name in LossOptions.__annotations__}
# What reaches the loss as a tensor: one value per token, or one number.
_OF_CALL = tuple(name for name in _DEFAULTS if name in TOKEN_ARGUMENTS or name in NUMBER_ARGUMENTS)
_OF_CONFIG = tuple(name for name, row in OPTIONS.items() if row.takes_tensor)
_TRANSFORM = ("temperature", "logit_scale", "logit_softcap")
Function = TypeVar("Function", bound=Callable[..., Any])
Call = TypeVar("Call", LossCall, LogpsCall)


def forwards_loss_options(function: Function) -> Function:
    """Gives a function with **options: Unpack[LossOptions] the signature that help() and editors show."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name, annotation in get_type_hints(LossOptions).items():
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS[name], annotation=annotation)
        )
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


def agreed(
    group: ProcessGroup | None, inputs: Inputs, check: Callable[[Tensor, Tensor | None], Call]
) -> tuple[Tensor, Tensor | None, Call]:
    """Returns weight and bias, gathered where they are sharded, and the call that `check` makes of them; with a group
    of ranks that hold slices of the vocabulary, they agree on it, or all raise."""
    hidden, weight, bias = inputs
    if group is None:
        weight, bias = gather_dtensor(weight), gather_dtensor(bias)
        return weight, bias, check(weight, bias)
    check_group(group)
    with broadcast_failure(group, hidden):
        call = check(weight, bias)
    wants = requires_grad_flags(hidden, weight, bias)
    vocab_slice = exchange_and_check(group, hidden, weight, bias, wants, call.description)
    return weight, bias, call._replace(vocab_slice=vocab_slice)


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
    teacher: AnyTeacher | None = None,
) -> Batch:
    """Checks the options against `like`, a tensor of the shape (B, T) or (N,), and returns the batch.

    `input_name` is the argument that has that shape, `dtype` the type that products are computed in.
    reads_logits=False: the temperature is not used.
    """
    if config.distill_coef != 0.0:
        no_effect("distill_coef", config.distill_coef, "without a teacher", unless=teacher is not None)
    # The ids of a TopKTeacher that are the mask's stand in rows of their own, as the logits of a Teacher do.
    has_rows = teacher is not None and (has_full_vocab(teacher) or sampling_mask is not None)
    device, shape, cu_seqlens = like.device, like.shape, options.get("cu_seqlens")
    backend = choose_backend(options.get("backend", "auto"), device, dtype, has_teacher=has_rows)
    if sampling_mask is not None:
        check_sampling_mask(sampling_mask, shape, like)
    num_sequences = num_sequences_of(like, cu_seqlens, input_name)
    layout = TokenLayout(shape, num_sequences, cu_seqlens, like, statistics_dtype(dtype))
    mask = mask_per_token(options.get("completion_mask"), shape, like)
    _check_combinations(options, config)
    advantages, groups, moments = _advantages_of(advantages, options, config, layout, mask)

    values: dict[str, Any] = {}
    for name in _OF_CALL:
        if options.get(name) is not None:
            values[name] = options.get(name)
    for name in _OF_CONFIG:
        if isinstance(getattr(config, name), Tensor):
            values[name] = getattr(config, name)
    if not reads_logits:
        values.pop("temperature", None)
    values = {n: x if n in TOKEN_ARGUMENTS else one_number(n, x, like, layout.dtype) for n, x in values.items()}
    if "num_items_in_batch" in values:
        values["normalizer"] = _num_items(options["num_items_in_batch"], values.pop("num_items_in_batch"), mask)
    inputs = TokenInputs(
        advantages=advantages,
        completion_mask=mask,
        cu_seqlens=cu_seqlens,
        group_index=None if groups is None else groups.index,
        allowed_ids=None if sampling_mask is None else sampling_mask.ids,
        allowed_counts=None if sampling_mask is None else sampling_mask.counts,
        **values,
    )
    values["advantages"] = advantages
    expanded = {name: per_token(name, x, layout) for name, x in values.items() if name in TOKEN_ARGUMENTS}
    check_token_values(inputs)
    per_sequence = all(x is None or x.shape != shape for x in (advantages, inputs.rollout_weights))
    count = 0 if groups is None else groups.count
    return Batch(
        inputs._replace(**expanded), config, backend, shape, num_sequences, count, moments, per_sequence, advantages
    )


def _advantages_of(
    advantages: Tensor | None, options: LossOptions, config: GRPOConfig, layout: TokenLayout, mask: Tensor | None
) -> tuple[Any, Groups | None, list[Tensor] | None]:
    """Returns the advantages that are given or follow from rewards, the groups, mean and std of their rewards."""
    rewards, num_generations, group_ids = [options.get(x) for x in ("rewards", "num_generations", "group_ids")]
    if (advantages is None) == (rewards is None):
        came = "neither" if rewards is None else "both"
        raise ValueError(f"give advantages, or rewards with num_generations or group_ids; got {came}")
    if rewards is not None:
        check_rewards(rewards)
        check_tensor("rewards", rewards, layout.like)
        check_sizes("rewards", rewards, ARGUMENTS["rewards"], {"S": layout.num_sequences})
    elif num_generations is None and group_ids is None:
        return advantages, None, None
    groups = resolve_groups(layout.num_sequences, num_generations, group_ids, layout.like)
    if rewards is None:
        return advantages, groups, None
    lengths = None
    if config.advantage_baseline == "length_weighted":
        lengths = _lengths(mask, layout.cu_seqlens, layout.like)
    advantages, *moments = group_statistics(
        rewards, groups, scale=config.advantage_scale, baseline=config.advantage_baseline, ddof=config.advantage_ddof,
        eps=config.advantage_eps, nan_is_no_verdict=False, lengths=lengths,
    )  # fmt: skip
    if layout.cu_seqlens is not None:
        advantages = advantages.unsqueeze(1)  # not one per token where there are as many of them as sequences
    return advantages, groups, moments


def _num_items(num_items: Tensor | float, count: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the number of items of all batches, at least 1. Refuses what is below 1; but for 0, the count of a batch
    without an unmasked token."""
    is_known = checks_values(count.device)
    if (is_known or not isinstance(num_items, Tensor)) and not (num_items == 0 or 1 <= num_items < math.inf):
        raise ValueError(
            f"num_items_in_batch={float(num_items)}; expected the global number of tokens; a share is normalizer"
        )
    if is_known and num_items == 0 and (mask is None or bool(mask.any())):
        raise ValueError("num_items_in_batch=0, and completion_mask leaves tokens; expected their global number")
    return torch.where(count < 0, count, count.clamp(min=1))  # a negative one is refused with the values


def _check_combinations(options: LossOptions, config: GRPOConfig) -> None:
    """Refuses options that contradict each other or miss one, and what has no effect."""
    if options.get("ref_logps") is None:
        if config.beta != 0.0:
            raise ValueError(
                f"ref_logps is None and beta={config.beta}; the KL term needs the reference log-probabilities"
            )
        kl = None if config.kl_estimator in ("none", DEFAULT_CONFIG.kl_estimator) else config.kl_estimator
        no_effect("kl_estimator", kl, "without ref_logps")
        no_effect("kl_clamp", config.kl_clamp, "without ref_logps")
        no_effect("use_bias_correction_kl", config.use_bias_correction_kl, "without ref_logps")
    if options.get("rollout_logps") is None and options.get("old_logps") is None:
        threshold = config.off_policy_mask_threshold
        no_effect("off_policy_mask_threshold", threshold, "without rollout_logps or old_logps")
        if SURROGATE_RULES[config.surrogate].divides_by_rollout:
            raise ValueError(f"surrogate={config.surrogate!r} divides by rollout_logps (or old_logps); both are None")
    of_loss, with_rule = config.entropy_aggregation == "loss", f"with aggregation={config.aggregation!r}"
    counts_items, has_normalizer = config.aggregation == "num_items", options.get("normalizer") is not None
    if (items := options.get("num_items_in_batch")) is not None:
        if has_normalizer:
            raise ValueError("num_items_in_batch and normalizer are two names of one denominator; give one")
        no_effect("num_items_in_batch", items, with_rule, unless=counts_items, instead="use normalizer")
    if (number := options.get("entropy_normalizer")) is not None:
        name, kept_only = "entropy_normalizer", config.entropy_kept_only
        no_effect(name, number, "with entropy_coef=0", unless=config.has_entropy_bonus)
        no_effect(name, number, "with entropy_aggregation='loss'", unless=not of_loss, instead="use normalizer")
        no_effect(name, number, "with entropy_kept_only, a mean over the kept tokens", unless=not kept_only)
    elif (
        has_normalizer
        and config.has_entropy_bonus
        and not (config.entropy_kept_only or counts_items or of_loss or config.aggregation == "token_mean")
    ):
        raise ValueError(
            f"normalizer {with_rule} says nothing of the number of tokens, over which the entropy bonus is a mean; "
            "give entropy_normalizer, or entropy_aggregation='loss'"
        )
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
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    ids: Any,
    mask: Tensor | None,
    transform: tuple[float | Tensor, float, float | None],
    backend: str,
    entropy: bool = False,
    sampling_mask: SamplingMask | None = None,
    sparse_backward: float | None = None,
    cu_seqlens: Tensor | None = None,
    teacher: Teacher | TopKTeacher | Sequence[Teacher] | None = None,
    teacher_of: Tensor | None = None,
    divergence: GRPOConfig = DEFAULT_CONFIG,
    several_ids: bool = False,
    top_k: int | None = None,
    logits_dtype: torch.dtype | None = None,
) -> LogpsCall:
    """Checks the arguments of a public function of log-probabilities, and returns what it computes.

    transform: temperature, logit scale and softcap. several_ids: ids may be (..., K). top_k: how many to find. With it
    or a teacher ids may be None."""
    temperature, logit_scale, softcap = [check_option(n, x) for n, x in zip(_TRANSFORM, transform, strict=True)]
    theta = check_sparse_backward(sparse_backward)
    entropy = check_flag("entropy", entropy)
    compute_dtype, sizes = check_lm_head(function_name, hidden, weight, bias)
    if ids is None and (top_k is not None or teacher is not None):
        ids = torch.full(hidden.shape[:-1], -1, dtype=torch.int64, device=hidden.device)
    check_ids(ids, sizes, "hidden", hidden, several=several_ids)
    dtype, one = compute_dtype or hidden.dtype, ids
    check_logits_dtype(logits_dtype, dtype)
    if ids.dim() == hidden.dim():
        one = ids[..., 0]
        for name, x in {"sampling_mask": sampling_mask, "sparse_backward": sparse_backward}.items():
            if x is not None:
                raise ValueError(f"{name} is given with {ids.shape[-1]} completion_ids of each token; give one of both")
    teachers = combined_teachers(teacher, teacher_of, hidden, cu_seqlens)
    check_teacher(teachers, divergence, hidden, weight, dtype)
    mask = mask_per_token(mask, one.shape, hidden)
    if sampling_mask is not None:
        check_sampling_mask(sampling_mask, one.shape, hidden)
    of_tokens, number = None, 1.0
    if isinstance(temperature, Tensor):
        num_sequences = -1 if cu_seqlens is None and one.dim() == 1 else num_sequences_of(one, cu_seqlens)
        layout = TokenLayout(one.shape, num_sequences, cu_seqlens, hidden, statistics_dtype(dtype))
        of_tokens = per_token("temperature", temperature, layout)
    else:
        number = float(temperature)
    kept = () if sampling_mask is None else (sampling_mask.ids, sampling_mask.counts)
    numbers = number, float(logit_scale), float(softcap or 0.0), theta
    name = choose_backend(backend, hidden.device, dtype, has_teacher=has_full_vocab(teachers))
    tokens = LogpsTokens(ids, mask, of_tokens, *kept)
    k = 0 if top_k is None else top_k
    return LogpsCall(
        tokens, numbers, entropy, name, compute_dtype, logits_dtype, k, teacher=teachers, divergence=divergence
    )

"""What autograd and torch.compile see of the engine: the loss, log-probabilities, and what is O(N).

Eager calls from hidden states go through an autograd.Function, or nothing where no gradient is wanted; torch.compile
gets custom operators with the same body. What is O(N) is custom operators alone.

No `from __future__ import annotations` here, and Optional[X] for X | None: torch infers schemas from the annotations.
"""
# ruff: noqa: UP045

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..backends import get_backend
from ..backends.compiled.cpu import CpuBackend
from ..config import GRPOConfig, config_from_key
from ..contract import FIELD, Backend, KernelParams, Sums, TokenInputs, TokenValues, no_values
from ..validate import check_offsets, check_rewards_finite, check_temperature, check_token_values, check_values
from . import chunks as engine
from .backward import FinishedGradients, deliver_once, refuse_double_backward, times, waiting_dtype
from .lm_head import GivenLogits, LMHead
from .memory import default_logits_dtype
from .plan import make_plan
from .products import settled_precision


def table_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for everything but float64."""
    return torch.promote_types(dtype, torch.float32)


# --- the loss from hidden states ----------------------------------------------------------------------------------


class LossCall(NamedTuple):
    """What a call of the loss computes, besides the three inputs that may need gradients."""

    completion_ids: Tensor
    tokens: TokenInputs
    num_groups: int
    config: GRPOConfig
    backend: str
    compute_dtype: Optional[torch.dtype]  # of the products, where it is not the inputs' own
    wants: Sequence[bool]  # which of hidden, weight, bias need gradients


def _is_traced(hidden: Tensor) -> bool:
    """Whether somebody wants to see one operation instead of what it does."""
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    return traced or type(hidden) not in (Tensor, torch.nn.Parameter)


def loss_from_hidden(hidden: Tensor, weight: Tensor, bias: Optional[Tensor], call: LossCall) -> tuple[Tensor, ...]:
    """(loss, logps, entropy, numbers of Sums); the loss is differentiable in hidden, weight and bias."""
    if _is_traced(hidden):
        results = grpo_loss(
            *(hidden, weight, bias, call.completion_ids, list(call.tokens), call.num_groups, call.config.key),
            *(call.backend, call.compute_dtype, call.wants),
        )
        return results[:4]
    if not any(call.wants):
        with torch.no_grad():
            return _compute_loss(hidden, weight, bias, call)[0]
    beside: list[Tensor] = []
    loss = _Loss.apply(hidden, weight, bias, call, beside)
    return loss, *beside


def _compute_loss(
    hidden: Tensor, weight: Tensor, bias: Optional[Tensor], call: LossCall
) -> tuple[tuple[Tensor, ...], FinishedGradients]:
    """To be called under no_grad."""
    ids, inputs, config = call.completion_ids, call.tokens, call.config
    kernels = get_backend(call.backend)
    if not (isinstance(kernels, CpuBackend) and kernels.values_are_valid(ids, weight.shape[0], inputs)):
        check_values(ids, inputs.completion_mask, weight.shape[0], inputs.cu_seqlens)
        check_token_values(inputs)
    dtype = table_dtype(call.compute_dtype or hidden.dtype)
    with settled_precision(hidden.device):
        static = config.static_shapes or _capturing(hidden.device)
        plan = make_plan(inputs, ids, config, call.num_groups, kernels, static_shapes=static, dtype=dtype)
        keep = _keep(inputs.completion_mask) if static else None
        options = config.logits_dtype, config.chunk_rows, keep
        head = _lm_head(hidden, weight, bias, kernels, call.compute_dtype, call.wants, *options)
        values, sums = engine.run(head, plan, kernels, gradients=any(call.wants), static_shapes=static)
        logps, entropy = values.columns[:2].clone().view(2, *ids.shape).unbind()  # without the other columns
        return (sums.loss.clone(), logps, entropy, sums.numbers), head.gradients()


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, call, beside):
        """`beside` gets what comes with the loss and has no gradient: autograd has nothing to do with it."""
        (loss, *others), ctx.gradients = _compute_loss(hidden, weight, bias, call)
        beside.extend(others)
        return loss

    @staticmethod
    def backward(ctx, g_loss):
        refuse_double_backward("fused_grpo_loss")
        return *deliver_once(ctx, "fused_grpo_loss", g_loss), None, None


@torch.library.custom_op("grpo_kernels::grpo_loss", mutates_args=())
def grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    completion_ids: Tensor,
    tokens: Sequence[Optional[Tensor]],
    num_groups: int,
    config_key: str,
    backend: str,
    compute_dtype: Optional[torch.dtype],
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, logps, entropy, numbers of Sums, dhidden, dweight, dbias, scale of the last two).

    Unwanted gradients are empty.
    """
    inputs, config = TokenInputs(*tokens), config_from_key(config_key)  # type: ignore[arg-type]
    call = LossCall(completion_ids, inputs, num_groups, config, backend, compute_dtype, wants)
    with torch.no_grad():
        (loss, logps, entropy, numbers), gradients = _compute_loss(hidden, weight, bias, call)
    results = loss, logps.clone(), entropy.clone(), numbers  # the results of an operator share no memory
    scale = gradients.scales[1]  # of dweight and dbias
    scale = hidden.new_ones((), dtype=torch.float32) if scale is None else scale.clone()
    return *results, *(hidden.new_empty(0) if g is None else g for g in gradients.tensors), scale


@grpo_loss.register_fake
def _(hidden, weight, bias, completion_ids, tokens, num_groups, config_key, backend, compute_dtype, wants):
    dtype = table_dtype(compute_dtype or hidden.dtype)
    f = hidden.new_empty
    given = (hidden, weight, weight if bias is None else bias)
    return (
        f((), dtype=dtype),
        f(completion_ids.shape, dtype=dtype),
        f(completion_ids.shape, dtype=dtype),
        _empty_sums(hidden, completion_ids, tokens, num_groups, dtype),
        *(
            x.new_empty(x.shape, dtype=waiting_dtype(x.dtype)) if want else f(0)
            for x, want in zip(given, wants, strict=True)
        ),
        f((), dtype=torch.float32),
    )


def _empty_sums(like, per_token, tokens, num_groups, dtype):
    """Numbers of Sums without values, for tokens (B, T), or (N,) with offsets."""
    inputs = TokenInputs(*tokens)
    sequences = per_token.shape[0] if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
    return like.new_empty(Sums.size(sequences, num_groups), dtype=dtype)


def _save_gradients(ctx, inputs, output):
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    hidden, weight, bias = inputs[:3]
    ctx.wants = inputs[-1]
    ctx.dtypes = hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
    ctx.save_for_backward(*output[-4:])


def _return_gradients(ctx, g_loss, *_):
    refuse_double_backward("fused_grpo_loss")
    gradients: list[Optional[Tensor]] = [None, None, None]
    if g_loss is not None:
        *saved, scale = ctx.saved_tensors
        factors = g_loss, g_loss / scale, g_loss / scale
        gradients = [
            times(x, factor, dtype) if want else None
            for x, factor, dtype, want in zip(saved, factors, ctx.dtypes, ctx.wants, strict=True)
        ]
    return (*gradients, *[None] * 7)


grpo_loss.register_autograd(_return_gradients, setup_context=_save_gradients)


# --- log-probabilities from hidden states -------------------------------------------------------------------------


class LogpsCall(NamedTuple):
    """What a call of fused_logps computes, besides the inputs that may need gradients."""

    completion_ids: Tensor
    mask: Optional[Tensor]
    temperature: Tensor
    logit_scale: float
    softcap: float
    want_entropy: bool
    backend: str
    compute_dtype: Optional[torch.dtype]


def logps_from_hidden(hidden: Tensor, weight: Tensor, bias: Optional[Tensor], call: LogpsCall) -> tuple[Tensor, ...]:
    """(logps, entropy), each of the shape of completion_ids; 0 at masked positions. Differentiable."""
    if _is_traced(hidden):
        return logps(hidden, weight, bias, *call)[:2]
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in (hidden, weight, bias)):
        with torch.no_grad():
            return _compute_logps(hidden, weight, bias, call)[:2]
    return _Logps.apply(hidden, weight, bias, call)


def _compute_logps(
    hidden: Tensor, weight: Tensor, bias: Optional[Tensor], call: LogpsCall
) -> tuple[Tensor, Tensor, Tensor]:
    """(logps, entropy, lse). To be called under no_grad."""
    ids, mask = call.completion_ids, call.mask
    check_values(ids, mask, weight.shape[0], None)
    check_temperature(call.temperature, None if mask is None else mask.bool())
    with settled_precision(hidden.device):
        keep, static = _keep(mask), _capturing(hidden.device)
        kernels = get_backend(call.backend)
        head = _lm_head(hidden, weight, bias, kernels, call.compute_dtype, keep=keep if static else None)
        values = no_values(ids.numel(), table_dtype(head.hidden.dtype), hidden.device)
        scorer = _scorer(head, call, keep, values)
        scorer.score(None if static or keep is None else keep.nonzero().squeeze(1), entropy=call.want_entropy)
        if static and keep is not None:
            values = values.only(keep)
        head.release()
        found, entropy = (x.clone().view(ids.shape) for x in (values.logp, values.entropy))
        return found, entropy, values.lse.view(ids.shape)


def _compute_logps_gradients(
    g_logps: Tensor,
    g_entropy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    call: LogpsCall,
    entropy: Tensor,
    lse: Tensor,
    wants: Sequence[bool],
) -> list[Optional[Tensor]]:
    """(dhidden, dweight, dbias) from the logits computed again, over rows with a non-zero coefficient."""
    with torch.no_grad(), settled_precision(hidden.device):
        keep, static = _keep(call.mask), _capturing(hidden.device)
        kept, kernels = keep if static else None, get_backend(call.backend)
        head = _lm_head(hidden, weight, bias, kernels, call.compute_dtype, wants, keep=kept)
        values = no_values(entropy.numel(), entropy.dtype, entropy.device)
        values.entropy.copy_(entropy.reshape(-1))
        values = TokenValues(values.columns, lse.reshape(-1).contiguous())
        scorer = _scorer(head, call, keep, values)
        masked = (_filled(g.reshape(-1), keep, 0.0) for g in (g_logps, g_entropy))
        scorer.gradient(*masked, static_shapes=static)
        return head.gradients().without_scales()


class _Logps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, call):
        found, entropy, lse = _compute_logps(hidden, weight, bias, call)
        ctx.call = call._replace(completion_ids=None, mask=None, temperature=None)
        tensors = call.completion_ids, call.mask, call.temperature
        # A copy, since the caller may change what it got.
        ctx.save_for_backward(hidden, weight, bias, *tensors, entropy.clone(), lse)
        return found, entropy

    @staticmethod
    def backward(ctx, g_logps, g_entropy):
        refuse_double_backward("fused_logps")
        hidden, weight, bias, ids, mask, temperature, entropy, lse = ctx.saved_tensors
        call = ctx.call._replace(completion_ids=ids, mask=mask, temperature=temperature)
        wants = list(ctx.needs_input_grad[:3])
        given = g_logps, g_entropy, hidden, weight, bias, call, entropy, lse, wants
        return *_compute_logps_gradients(*given), None


@torch.library.custom_op("grpo_kernels::logps", mutates_args=())
def logps(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    completion_ids: Tensor,
    mask: Optional[Tensor],
    temperature: Tensor,
    logit_scale: float,
    softcap: float,
    want_entropy: bool,
    backend: str,
    compute_dtype: Optional[torch.dtype],
) -> tuple[Tensor, Tensor, Tensor]:
    """(logps, entropy, lse), each of the shape of completion_ids; 0 at masked positions."""
    call = LogpsCall(
        completion_ids, mask, temperature, logit_scale, softcap, want_entropy, backend, compute_dtype
    )  # fmt: skip
    with torch.no_grad():
        found, entropy, lse = _compute_logps(hidden, weight, bias, call)
    return found, entropy, lse


@logps.register_fake
def _(
    hidden, weight, bias, completion_ids, mask, temperature, logit_scale, softcap, want_entropy, backend, compute_dtype
):
    dtype = table_dtype(compute_dtype or hidden.dtype)
    return tuple(hidden.new_empty(completion_ids.shape, dtype=t) for t in (dtype, dtype, torch.float64))


@torch.library.custom_op("grpo_kernels::logps_backward", mutates_args=())
def logps_backward(
    g_logps: Tensor,
    g_entropy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    completion_ids: Tensor,
    mask: Optional[Tensor],
    temperature: Tensor,
    entropy: Tensor,
    lse: Tensor,
    logit_scale: float,
    softcap: float,
    backend: str,
    compute_dtype: Optional[torch.dtype],
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dhidden, dweight, dbias); unwanted ones are empty."""
    call = LogpsCall(completion_ids, mask, temperature, logit_scale, softcap, True, backend, compute_dtype)
    given = g_logps, g_entropy, hidden, weight, bias, call, entropy, lse, wants
    found = _compute_logps_gradients(*given)
    dhidden, dweight, dbias = (hidden.new_empty(0) if g is None else g for g in found)
    return dhidden, dweight, dbias


@logps_backward.register_fake
def _(
    g_logps, g_entropy, hidden, weight, bias, ids, mask, temperature, entropy, lse, scale, cap, backend, dtype, wants
):
    given = (hidden, weight, weight if bias is None else bias)
    return tuple(x.new_empty(x.shape) if want else hidden.new_empty(0) for x, want in zip(given, wants, strict=True))


def _save_logps(ctx, inputs, output):
    hidden, weight, bias, completion_ids, mask, temperature, scale, softcap, _, backend, compute_dtype = inputs
    ctx.options = scale, softcap, backend, compute_dtype
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(hidden, weight, bias, completion_ids, mask, temperature, *output[1:])


def _logps_gradients(ctx, g_logps, g_entropy, _):
    refuse_double_backward("fused_logps")
    wants = list(ctx.needs_input_grad[:3])
    gradients = logps_backward(g_logps, g_entropy, *ctx.saved_tensors, *ctx.options, wants)
    return (*(g if want else None for g, want in zip(gradients, wants, strict=True)), *[None] * 8)


logps.register_autograd(_logps_gradients, setup_context=_save_logps)


# --- the loss from log-probabilities or logits --------------------------------------------------------------------


@torch.library.custom_op("grpo_kernels::policy_loss", mutates_args=())
def policy_loss(
    logps: Tensor,
    entropy: Tensor,
    tokens: Sequence[Optional[Tensor]],
    num_groups: int,
    config_key: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, numbers of Sums, d loss / d logps, d loss / d entropy), all O(N) and in float32 or better."""
    inputs, config = TokenInputs(*tokens), config_from_key(config_key)  # type: ignore[arg-type]
    check_offsets(inputs.cu_seqlens, logps.numel())
    check_token_values(inputs)
    with torch.no_grad():
        kernels, dtype = get_backend(backend), table_dtype(logps.dtype)
        plan = make_plan(inputs, logps, config, num_groups, kernels, static_shapes=True, dtype=dtype)
        keep, values = _keep(inputs.completion_mask), plan.tokens.values
        for known, given in ((values.logp, logps), (values.entropy, entropy)):
            known.copy_(_filled(given.reshape(-1), keep, 0.0))
        engine.evaluate(plan, kernels)
        sums = engine.sums(plan, kernels, values)
        weight_entropy = plan.tokens.table[FIELD["weight_entropy"]]
        gradients = (torch.where(plan.tokens.scored, g, 0.0) for g in (values.g_logp, weight_entropy))
    return sums.loss.clone(), sums.numbers, *(g.view(logps.shape) for g in gradients)


@policy_loss.register_fake
def _(logps, entropy, tokens, num_groups, config_key, backend):
    f, dtype = logps.new_empty, table_dtype(logps.dtype)
    numbers = _empty_sums(logps, logps, tokens, num_groups, dtype)
    return f((), dtype=dtype), numbers, f(logps.shape, dtype=dtype), f(logps.shape, dtype=dtype)


def _save_policy(ctx, inputs, output):
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype
    ctx.save_for_backward(*output[-2:])


def _policy_gradients(ctx, g_loss, *_):
    refuse_double_backward("grpo_loss_from_logps")
    gradients: list[Optional[Tensor]] = [None, None]
    if g_loss is not None:
        gradients = [times(g, g_loss, dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
    return (*gradients, *[None] * 4)


policy_loss.register_autograd(_policy_gradients, setup_context=_save_policy)


def loss_over_logits(
    logits: Tensor,
    completion_ids: Tensor,
    tokens: TokenInputs,
    num_groups: int,
    config: GRPOConfig,
    backend: str,
    want: bool,
) -> tuple[tuple[Tensor, ...], FinishedGradients | None]:
    """((loss, logps, entropy, numbers of Sums), gradient); with `want` it replaces `logits` (N, V).

    Every row is computed where it lies: rows that cannot have a gradient get zeros, and nothing is copied.
    """
    with torch.no_grad():
        kernels, dtype = get_backend(backend), table_dtype(logits.dtype)
        plan = make_plan(tokens, completion_ids, config, num_groups, kernels, static_shapes=True, dtype=dtype)
        keep = _keep(tokens.completion_mask)
        if want and keep is not None:  # padding may hold NaN, which no coefficient of 0 would hide
            _clear_rows(logits, ~keep)
        head = GivenLogits(logits)
        values, sums = engine.run(head, plan, kernels, gradients=want, static_shapes=True)
    shape = completion_ids.shape
    results = sums.loss.clone(), values.logp.view(shape), values.entropy.view(shape), sums.numbers
    if not want:
        return results, None
    return results, FinishedGradients([logits], [logits.dtype], kernels, [head.gradient_scale])


def _clear_rows(x: Tensor, chosen: Tensor) -> None:
    """Zero these rows (N,) bool of x (N, V). Only they are written, except under capture, where all are."""
    if _capturing(x.device):
        x.masked_fill_(chosen[:, None], 0.0)
    else:
        x.index_fill_(0, chosen.nonzero().squeeze(1), 0.0)


# --- group statistics ---------------------------------------------------------------


@torch.library.custom_op("grpo_kernels::group_statistics", mutates_args=())
def group_statistics(
    rewards: Tensor,
    group_index: Tensor,
    num_groups: int,
    scale: str,
    baseline: str,
    ddof: int,
    eps: float,
    nan_is_unscored: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(advantages (B,), mean (num_groups,), std (num_groups,))."""
    check_rewards_finite("rewards", rewards, nan_is_unscored=nan_is_unscored)
    rewards, group_index = rewards.contiguous(), group_index.contiguous()
    return get_backend(backend).group_statistics(rewards, group_index, num_groups, scale, baseline, ddof, eps)


@group_statistics.register_fake
def _(rewards, group_index, num_groups, scale, baseline, ddof, eps, nan_is_unscored, backend):
    return rewards.new_empty(rewards.shape), rewards.new_empty(num_groups), rewards.new_empty(num_groups)


# --- helpers ------------------------------------------------------------------------------------------------------


def _lm_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    backend: Backend,
    compute_dtype: Optional[torch.dtype] = None,
    wants: Sequence[bool] = (False, False, False),
    logits_dtype: Optional[torch.dtype] = None,
    chunk_rows: Optional[int] = None,
    keep: Optional[Tensor] = None,
) -> LMHead:
    dtype = logits_dtype or default_logits_dtype(compute_dtype or hidden.dtype, hidden.device)
    return LMHead(hidden, weight, bias, dtype, chunk_rows, backend, tuple(wants), keep, compute_dtype)


def _capturing(device: torch.device) -> bool:
    """Whether a CUDA graph records these operations: then nothing may be read back to the host."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _keep(mask: Optional[Tensor]) -> Optional[Tensor]:
    """(N,) bool, False at padding; None where there is none."""
    return None if mask is None else mask.reshape(-1).bool()


def _filled(x: Tensor, keep: Optional[Tensor], fill: float) -> Tensor:
    """x (N,) with `fill` at padding, whatever that holds; contiguous."""
    return x.contiguous() if keep is None else torch.where(keep, x, fill)


def _flat_ids(ids: Tensor, keep: Optional[Tensor]) -> Tensor:
    return _filled(ids.reshape(-1), keep, 0).long()


def _scorer(head: LMHead, call: LogpsCall, keep: Optional[Tensor], values: TokenValues) -> engine.Scorer:
    """A scorer for log-probabilities alone: no objective, padding replaced by neutral values."""
    ids = call.completion_ids
    temperature = call.temperature.reshape(-1).expand(ids.numel())
    per_token = _filled(temperature, keep, 1.0).to(table_dtype(head.hidden.dtype))
    params = _logit_params(call.logit_scale, call.softcap)
    return engine.Scorer(head, _flat_ids(ids, keep), per_token, params, head.backend, values)


@cache
def _logit_params(logit_scale: float, softcap: float) -> KernelParams:
    return KernelParams(logit_scale=logit_scale, softcap=softcap)

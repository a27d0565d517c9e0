"""Log-probabilities from hidden states, as autograd and torch.compile see them: see loss_op.py.

No `from __future__ import annotations` here, and Optional[X] for X | None: torch infers schemas from the annotations.
"""
# ruff: noqa: UP007, UP045

import inspect
import math
from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from ..checks.arguments import (
    check_offsets,
    check_top_k,
    check_values,
    checks_values,
)
from ..checks.plain import check_not_released, materialized
from ..checks.tokens import (
    check_argument,
)
from ..config import DEFAULT_CONFIG, GRPOConfig, config_from_key
from ..kernels import get_backend
from ..kernels.operations import PolicyTransform, Statistics
from ..names import add_op_namespace_prefix
from ..teacher import AnyTeacher, check_teacher_values, teacher_signature
from .chunk_size import Selection, select_tokens
from .gradients import refuse_double_backward
from .k_ids import TopKLogps
from .lm_head import LMHead
from .loop import TokenBatch
from .mask_paths import make_token_mask
from .products import pinned_matmul_precision
from .shared import (
    hide_from_dispatch_modes,
    is_capturing,
    no_gradients,
    refuse_capture,
    refuse_when_traced,
    requires_grad_flags,
    save_tensors,
    saved_tensors,
    statistics_dtype,
    uses_custom_op,
)
from .teacher import TeacherHead, TopKHead, new_teacher, teacher_from_key, teacher_to_key
from .vocab_parallel import VocabSlice, signature, vocab_size_of


class LogpsTokens(NamedTuple):
    completion_ids: Tensor  # one per token, or K; -1 where none is asked for
    mask: Optional[Tensor] = None
    temperature: Optional[Tensor] = None  # one per token, instead of the number
    allowed_ids: Optional[Tensor] = None  # of a SamplingMask
    allowed_counts: Optional[Tensor] = None


class LogpsCall(NamedTuple):
    """What a call of fused_logps computes, besides the inputs that may need gradients."""

    tokens: LogpsTokens
    numbers: Sequence[float]  # temperature, logit_scale, softcap (0: none), sparse_backward (0: none)
    want_entropy: bool
    backend: str
    compute_dtype: Optional[torch.dtype]
    logits_dtype: Optional[torch.dtype] = None  # None: the default of LMHead
    top_k: int = 0  # how many of the likeliest ids to find; completion_ids are not looked at then
    vocab_slice: Optional[VocabSlice] = None  # which rows of the whole weight this rank has; None: all
    teacher: Optional[AnyTeacher] = None  # to whose distribution the divergence is computed
    divergence: GRPOConfig = DEFAULT_CONFIG  # which one

    @property
    def description(self) -> tuple[object, ...]:
        """Returns what ranks that share this call must have in common, besides hidden, weight and bias."""
        tokens, teacher = signature(*self.tokens), (teacher_signature(self.teacher), self.divergence.key)
        types = self.compute_dtype, self.logits_dtype
        return tokens, self.numbers, self.want_entropy, self.backend, *types, self.top_k, teacher


def logps_from_hidden(
    hidden: Tensor, weight: Tensor, bias: Optional[Tensor], call: LogpsCall
) -> tuple[Tensor, Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """Returns (logps, entropy, divergence to the teacher, ids).

    logps have the shape of completion_ids; entropy and divergence are per token; all are 0 at masked positions. ids:
    those of the logps where the call searches for the likeliest ones (`call.top_k`), -1 at masked positions.
    All but ids are differentiable. The entropy is not defined, or None, where the call does not want it; the divergence
    is None without a teacher.
    """
    refuse_when_traced(hidden, "vocab_parallel_group", call.vocab_slice)
    if uses_custom_op(hidden, call.vocab_slice):
        teacher, of_teacher = teacher_to_key(call.teacher)
        tokens, types = [*call.tokens, *of_teacher], (call.compute_dtype, call.logits_dtype)
        options = call.want_entropy, call.backend, *types, call.top_k, teacher, call.divergence.key
        logp, entropy, divergence, _, _, ids = logps(hidden, weight, bias, tokens, list(call.numbers), *options)
        return logp, entropy, divergence if teacher else None, ids
    if any(requires_grad_flags(hidden, weight, bias)):
        return *_Logps.apply(hidden, weight, bias, call), None
    with torch.no_grad():
        logp, entropy, divergence, ids = _results(hidden, *_compute((hidden, weight, bias), call))
    return logp, entropy if call.want_entropy else None, divergence, ids


Inputs = tuple[Tensor, Tensor, Optional[Tensor]]  # hidden, weight, bias
TeacherState = Union[TeacherHead, TopKHead, TopKLogps, None]


class LogpsPass(NamedTuple):
    """A pass for log-probabilities alone, and its tokens."""

    head: LMHead
    tokens: TokenBatch
    mask: Optional[Tensor]  # (N,) bool, None where there is none
    every_row: bool  # no shape may depend on values
    selection: Selection


def begin_logps(
    inputs: Inputs,
    call: LogpsCall,
    stats: Statistics,
    *,
    wants: Sequence[bool] = (False, False, False),
    chunk_rows: Optional[int] = None,
    teacher: TeacherState = None,
) -> LogpsPass:
    """Prepares the tokens of a call, whose statistics are written to `stats`."""
    ids, mask, per_token, allowed_ids, allowed_counts = call.tokens
    number, logit_scale, softcap, theta = call.numbers
    dtype, device, kernels = stats.logp.dtype, ids.device, get_backend(call.backend)
    if theta:
        refuse_capture(device, "sparse_backward", "the number of entries")
    head = LMHead(
        inputs, kernels, wants=tuple(wants), compute_dtype=call.compute_dtype, logits_dtype=call.logits_dtype,
        chunk_rows=chunk_rows, vocab_slice=call.vocab_slice,
        teacher_dtype=teacher.logits_dtype if isinstance(teacher, TeacherHead) else None,
    )  # fmt: skip
    mask, every_row = None if mask is None else mask.view(-1), is_capturing(device)
    head.row_mask = mask if every_row else None
    if per_token is None:
        temperature = torch.full((head.num_tokens,), number, dtype=dtype, device=device)
    else:
        temperature = _filled(per_token.view(-1), mask, 1.0)
    sampling_mask = make_token_mask(allowed_ids, allowed_counts, head.vocab_size, is_static=every_row)
    sampled = (ids[..., 0] if ids.dim() == inputs[0].dim() else ids).reshape(-1)  # of K ids the first
    if isinstance(teacher, TopKLogps) and not any(wants):
        sampled = torch.full_like(sampled, -1)  # no id apart in the sums, which are the same for any K ids of a token
    sampled = sampled if mask is None else torch.where(mask, sampled, 0)
    tokens = TokenBatch(
        head, sampled.contiguous().long(), temperature, PolicyTransform(logit_scale, softcap), stats,
        sparse_backward=theta or None, teacher=teacher,
    )  # fmt: skip
    selection = None
    if sampling_mask is not None:
        selection = tokens.add_mask(sampling_mask, mask, mask)
    if selection is None:
        selection = select_tokens(mask, mask, None, every_row=every_row)
    return LogpsPass(head, tokens, mask, every_row, selection)


def check_call(call: LogpsCall, vocab_size: int, cu_seqlens: Optional[Tensor] = None) -> None:
    """Raises where the data of the call's tokens is not valid."""
    ids, mask, temperature, *_ = call.tokens
    if call.top_k:
        check_top_k("k", call.top_k, vocab_size)
    check_teacher_values(call.teacher, vocab_size, mask)
    if mask is not None and mask.dim() < ids.dim():
        mask = mask[..., None].expand_as(ids)
    if call.top_k or call.teacher is not None:  # without ids
        check_offsets(cu_seqlens, ids.numel())
    else:
        check_values(ids, mask, vocab_size, cu_seqlens)
    if temperature is not None and checks_values(temperature.device):
        check_argument("temperature", temperature, call.tokens.mask)


def _filled(x: Tensor, mask: Optional[Tensor], fill: float) -> Tensor:
    """Returns x (N,) or (N, K) with `fill` at padding, whatever padding holds; contiguous."""
    return (
        materialized(x)[0].contiguous() if mask is None else torch.where(mask.view(-1, *[1] * (x.dim() - 1)), x, fill)
    )


@hide_from_dispatch_modes
def _compute(inputs: Inputs, call: LogpsCall) -> tuple[Statistics, TeacherState]:
    """Returns (statistics, 0 at masked positions; the teacher with its divergence). To be called under no_grad."""
    hidden, count = inputs[0], inputs[0].numel() // inputs[0].shape[-1]
    dtype = statistics_dtype(call.compute_dtype or hidden.dtype)
    with pinned_matmul_precision(hidden.device):
        vocab_size = vocab_size_of(inputs[1], call.vocab_slice)
        check_call(call, vocab_size)
        stats = Statistics.zeros(count, hidden.device, dtype)
        teacher: TeacherState = _k_logps(inputs, call, stats)
        if call.teacher is not None:
            engine_options = call.compute_dtype, count, dtype, vocab_size, call.vocab_slice
            teacher = new_teacher(call.teacher, call.divergence, get_backend(call.backend), *engine_options)
        head, tokens, mask, every_row, selection = begin_logps(inputs, call, stats, teacher=teacher)
        tokens.normalise_teacher(selection.scored)
        tokens.forward(selection.scored, entropy=call.want_entropy)
        head.free()
        if every_row and mask is not None:
            stats = Statistics(*(torch.where(mask, x, 0.0) for x in stats))
            if isinstance(teacher, TopKLogps):
                teacher.clear(~mask)
        return stats, teacher


def _k_logps(inputs: Inputs, call: LogpsCall, stats: Statistics) -> Optional[TopKLogps]:
    """Returns what computes K log-probabilities of each token, where the call wants these; else None."""
    ids, has_k_ids = call.tokens.completion_ids, inputs[0].dim() == call.tokens.completion_ids.dim()
    if not has_k_ids and not call.top_k:
        return None
    top_k_ids = ids.reshape(-1, ids.shape[-1]).long() if has_k_ids else call.top_k
    return TopKLogps(top_k_ids, stats, vocab_size_of(inputs[1], call.vocab_slice), call.vocab_slice)


def _shaped(x: Tensor, hidden: Tensor) -> Tensor:
    """Returns x (N, ...) in the shape of the tokens, copied: autograd forbids to change a view in place that a function
    returns."""
    return x.view(*hidden.shape[:-1], *x.shape[1:]).clone()


def _results(
    hidden: Tensor, stats: Statistics, known: TeacherState
) -> tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor]]:
    """Returns the results of `logps_from_hidden`."""
    logp, divergence, ids = stats.logp, None, None
    if isinstance(known, TopKLogps):
        logp, ids = known.logp, _shaped(known.ids, hidden) if known.finds else None
    elif known is not None:
        divergence = _shaped(known.divergence, hidden)
    return _shaped(logp, hidden), _shaped(stats.entropy, hidden), divergence, ids


@hide_from_dispatch_modes
def _compute_gradients(
    grads: Sequence[Tensor],
    inputs: Inputs,
    call: LogpsCall,
    results: Sequence[Tensor],
    wants: Sequence[bool],
    teacher: TeacherState = None,
) -> list[Optional[Tensor]]:
    """Returns (dhidden, dweight, dbias) from logits that are computed again, over rows with a non-zero coefficient.

    grads: d loss / d logps, d loss / d entropy; with a teacher, as the forward left it, d loss / d divergence.
    results: entropy, lse, (N,) each.
    """
    entropy, lse = results
    check_not_released("lm_head_weight", inputs[1])  # it may have been released since the forward
    with torch.no_grad(), pinned_matmul_precision(entropy.device):
        stats = Statistics(torch.zeros_like(entropy), lse.clone(), entropy.clone())
        flat_mask = None if call.tokens.mask is None else call.tokens.mask.view(-1)
        if teacher is not None:
            teacher.weight = _filled(grads[2].reshape(-1).to(entropy.dtype), flat_mask, 0.0)
        if (k_logps := _k_logps(inputs, call, stats)) is not None:
            k_logps.take_gradient(_filled(grads[0].reshape(k_logps.ids.shape), flat_mask, 0.0))
            teacher, grads = k_logps, (torch.zeros_like(entropy), grads[1])
        head, tokens, mask, every_row, _ = begin_logps(inputs, call, stats, wants=wants, teacher=teacher)
        dlogp, dentropy = (_filled(g.reshape(-1), mask, 0.0) for g in grads[:2])
        tokens.backward(dlogp, dentropy, every_row=every_row)
        return head.gradients().without_scales()


class _Logps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, call):
        stats, known = _compute((hidden, weight, bias), call)
        ctx.teacher = None if call.teacher is None else known
        ctx.call, saved = call._replace(tokens=None), [*call.tokens]
        if call.teacher is not None:  # for autograd to notice changes
            saved += teacher_to_key(call.teacher)[1]
        save_tensors(ctx, hidden, weight, bias, stats.entropy, stats.lse, *saved)
        return _results(hidden, stats, known)[:3]

    @staticmethod
    def backward(ctx, *grads):
        refuse_double_backward("fused_logps" if ctx.teacher is None else "fused_divergence")
        saved = saved_tensors(ctx)
        call = ctx.call._replace(tokens=LogpsTokens(*saved[5 : 5 + len(LogpsTokens._fields)]))
        inputs, wants = (saved[0], saved[1], saved[2]), ctx.needs_input_grad[:3]
        return *_compute_gradients(grads, inputs, call, saved[3:5], wants, ctx.teacher), None


def _call_of_operator(
    tokens: Sequence[Optional[Tensor]], teacher: str, config_key: str, numbers: Sequence[float], want_entropy: bool,
    backend: str, compute_dtype: Optional[torch.dtype], logits_dtype: Optional[torch.dtype], top_k: int = 0,
) -> LogpsCall:  # fmt: skip
    """Returns the call from an operator's arguments.

    tokens: the fields of LogpsTokens, then a teacher's tensors.
    teacher: the rest of the teacher.
    config_key: of the configuration with the divergence.
    """
    token_fields, of_teacher = tokens[: len(LogpsTokens._fields)], tokens[len(LogpsTokens._fields) :]
    types = compute_dtype, logits_dtype
    call = LogpsCall(LogpsTokens(*token_fields), numbers, want_entropy, backend, *types, top_k)  # type: ignore[arg-type]
    return call._replace(teacher=teacher_from_key(teacher, of_teacher), divergence=config_from_key(config_key))


@torch.library.custom_op(add_op_namespace_prefix("logps"), mutates_args=())
def logps(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    tokens: Sequence[Optional[Tensor]],
    numbers: Sequence[float],
    want_entropy: bool,
    backend: str,
    compute_dtype: Optional[torch.dtype],
    logits_dtype: Optional[torch.dtype],
    top_k: int,
    teacher: str,  # without a default, as in grpo_loss
    config_key: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns (logps, entropy, divergence, entropy, lse, ids), the first three 0 at masked positions.

    The second entropy and lse (N,) are for the backward, since the caller may change what it got. ids: those of the
    logps where the call searches for them. What a call does not have is empty.
    """
    types = compute_dtype, logits_dtype
    call = _call_of_operator(tokens, teacher, config_key, numbers, want_entropy, backend, *types, top_k)
    with torch.no_grad():
        stats, known = _compute((hidden, weight, bias), call)
    logp, entropy, divergence, ids = _results(hidden, stats, known)
    divergence = hidden.new_empty(0, dtype=entropy.dtype) if divergence is None else divergence
    ids = hidden.new_empty(0, dtype=torch.int64) if ids is None else ids
    return logp, entropy, divergence, stats.entropy.clone(), stats.lse, ids


@logps.register_fake
def _(
    hidden, weight, bias, tokens, numbers, want_entropy, backend, compute_dtype, logits_dtype, top_k, teacher,
    config_key,
):  # fmt: skip
    dtype, shape = statistics_dtype(compute_dtype or hidden.dtype), hidden.shape[:-1]
    count, ids_shape = math.prod(shape), (*shape, top_k) if top_k else 0
    of_logps, of_teacher = ids_shape if top_k else tokens[0].shape, shape if teacher else 0
    results = (of_logps, dtype), (shape, dtype), (of_teacher, dtype), (count, dtype), (count, torch.float64)
    return tuple(hidden.new_empty(size, dtype=kind) for size, kind in (*results, (ids_shape, torch.int64)))


@torch.library.custom_op(add_op_namespace_prefix("logps_backward"), mutates_args=())
def logps_backward(
    outer: Sequence[Tensor],
    inputs: Sequence[Optional[Tensor]],
    tokens: Sequence[Optional[Tensor]],
    results: Sequence[Tensor],
    numbers: Sequence[float],
    backend: str,
    compute_dtype: Optional[torch.dtype],
    logits_dtype: Optional[torch.dtype],
    teacher: str,
    config_key: str,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (dhidden, dweight, dbias); unwanted ones are empty. See _compute_gradients.

    With a teacher the forward runs again: it computes more of the teacher than an operator returns.
    """
    call = _call_of_operator(tokens, teacher, config_key, numbers, True, backend, compute_dtype, logits_dtype)
    hidden, weight, bias = inputs
    assert hidden is not None and weight is not None
    with torch.no_grad():
        known = _compute((hidden, weight, bias), call)[1] if teacher else None
    head_gradients = _compute_gradients(outer, (hidden, weight, bias), call, results, wants, known)
    dhidden, dweight, dbias = (hidden.new_empty(0) if g is None else g for g in head_gradients)
    return dhidden, dweight, dbias


@logps_backward.register_fake
def _(outer, inputs, tokens, results, numbers, backend, compute_dtype, logits_dtype, teacher, config_key, wants):
    hidden, weight, bias = inputs
    gradients = zip((hidden, weight, weight if bias is None else bias), wants, strict=True)
    return tuple(x.new_empty(x.shape) if want else hidden.new_empty(0) for x, want in gradients)


_FIELDS = tuple(inspect.signature(logps._init_fn).parameters)
_OF_BACKWARD = "numbers", "backend", "compute_dtype", "logits_dtype", "teacher", "config_key"


def _save_logps(ctx, inputs, output):
    by_name = dict(zip(_FIELDS, inputs, strict=True))
    ctx.options = {name: by_name[name] for name in _OF_BACKWARD}
    ctx.mark_non_differentiable(*output[3:])
    save_tensors(ctx, by_name["hidden"], by_name["weight"], by_name["bias"], *output[3:5], *by_name["tokens"])


def _logps_gradients(ctx, *grads):
    refuse_double_backward("fused_divergence" if ctx.options["teacher"] else "fused_logps")
    wants = list(ctx.needs_input_grad[:3])
    saved = saved_tensors(ctx)
    inputs, results, tokens = saved[:3], saved[3:5], saved[5:]
    head_gradients = logps_backward(list(grads[:3]), inputs, tokens, results, **ctx.options, wants=wants)
    gradients = {name: g for name, g, want in zip(_FIELDS, head_gradients, wants, strict=False) if want}
    gradients["tokens"] = no_gradients(tokens)
    return tuple(gradients.get(name) for name in _FIELDS)


logps.register_autograd(_logps_gradients, setup_context=_save_logps)

"""Log-probabilities from hidden states, as autograd and torch.compile see them: see loss_op.py.

No `from __future__ import annotations` here, and Optional[X] for X | None: torch infers schemas from the annotations.
"""
# ruff: noqa: UP007, UP045

from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from ..checks.arguments import check_temperature, check_values
from ..checks.plain import check_gathered, stored
from ..config import DEFAULT_CONFIG, GRPOConfig
from ..kernels import get_backend
from ..kernels.operations import LogitTransform, Statistics
from ..teacher import Teacher, TopKTeacher
from .chunk_size import Selection, select_tokens
from .gradients import refuse_double_backward
from .kept import make_token_mask
from .lm_head import LMHead
from .loop import HeadPass
from .products import pinned_matmul_precision
from .shared import (
    is_capturing,
    no_gradients,
    refuse_capture,
    requires_grad_flags,
    table_dtype,
    takes_operator,
    unseen_by_modes,
)
from .teacher import TeacherHead, TopKHead, new_teacher
from .vocab_parallel import VocabSlice, signature


class LogpsTokens(NamedTuple):
    completion_ids: Tensor
    mask: Optional[Tensor] = None
    temperature: Optional[Tensor] = None  # instead of the number
    kept_ids: Optional[Tensor] = None  # of a SamplingMask
    kept_counts: Optional[Tensor] = None


class LogpsCall(NamedTuple):
    """What a call of fused_logps computes, besides the inputs that may need gradients."""

    tokens: LogpsTokens
    numbers: Sequence[float]  # temperature, logit_scale, softcap (0: none), sparse_backward (0: none)
    want_entropy: bool
    backend: str
    compute_dtype: Optional[torch.dtype]
    vocab_slice: Optional[VocabSlice] = None  # which rows of the whole weight this rank has; None: all
    teacher: Union[Teacher, TopKTeacher, None] = None  # to whose distribution the divergence is computed
    divergence: GRPOConfig = DEFAULT_CONFIG  # which one

    @property
    def description(self) -> tuple[object, ...]:
        """What ranks that share this call must have in common, besides hidden, weight and bias."""
        return signature(*self.tokens[1:]), self.numbers, self.want_entropy, self.backend, self.compute_dtype


def logps_from_hidden(
    hidden: Tensor, weight: Tensor, bias: Optional[Tensor], call: LogpsCall
) -> tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
    """(logps, entropy, divergence to the teacher), each of the shape of completion_ids; 0 at masked positions.

    Differentiable. The entropy means nothing, or is None, where the call does not want it; the divergence is None
    without a teacher.
    """
    if takes_operator(hidden, vocab_parallel_group=call.vocab_slice, teacher=call.teacher):
        options = call.want_entropy, call.backend, call.compute_dtype
        return *logps(hidden, weight, bias, list(call.tokens), list(call.numbers), *options)[:2], None
    if any(requires_grad_flags(hidden, weight, bias)):
        return _Logps.apply(hidden, weight, bias, call)
    with torch.no_grad():
        stats, known = _compute((hidden, weight, bias), call)
    entropy = _shaped(stats.entropy, call) if call.want_entropy else None
    return _shaped(stats.logp, call), entropy, _divergence(known, call)


Inputs = tuple[Tensor, Tensor, Optional[Tensor]]  # hidden, weight, bias
AnyTeacher = Union[TeacherHead, TopKHead, None]


class Opened(NamedTuple):
    """A pass for log-probabilities alone; its tokens."""

    head: LMHead
    tokens: HeadPass
    mask: Optional[Tensor]  # (N,) bool, None where there is none
    every_row: bool  # no shape may depend on values
    chosen: Selection


def open_pass(
    inputs: Inputs,
    call: LogpsCall,
    stats: Statistics,
    *,
    wants: Sequence[bool] = (False, False, False),
    chunk_rows: Optional[int] = None,
    logits_dtype: Optional[torch.dtype] = None,
    teacher: AnyTeacher = None,
) -> Opened:
    """Prepares the tokens of a call, whose statistics are written to `stats`."""
    ids, mask, per_token, kept_ids, kept_counts = call.tokens
    number, logit_scale, softcap, theta = call.numbers
    count, dtype, device, kernels = ids.numel(), stats.logp.dtype, ids.device, get_backend(call.backend)
    if theta:
        refuse_capture(device)
    head = LMHead(
        inputs, kernels, wants=tuple(wants), compute_dtype=call.compute_dtype, logits_dtype=logits_dtype,
        chunk_rows=chunk_rows, vocab_slice=call.vocab_slice,
        teacher_dtype=teacher.logits_dtype if isinstance(teacher, TeacherHead) else None,
    )  # fmt: skip
    mask, every_row = None if mask is None else mask.reshape(-1).bool(), is_capturing(device)
    head.keep = mask if every_row else None
    if per_token is None:
        temperature = torch.full((count,), number, dtype=dtype, device=device)
    else:
        expanded = per_token.detach().reshape(-1).expand(count)
        temperature = _filled(expanded, mask, 1.0).to(device=device, dtype=dtype)
    sampling_mask = make_token_mask(kept_ids, kept_counts, head.vocab_size, is_static=every_row)
    sampled = ids.reshape(-1) if mask is None else torch.where(mask, ids.reshape(-1), 0)
    tokens = HeadPass(
        head, sampled.contiguous().long(), temperature, LogitTransform(logit_scale, softcap), stats,
        sparse_backward=theta or None, teacher=teacher,
    )  # fmt: skip
    chosen = None
    if sampling_mask is not None:
        chosen = tokens.add_mask(sampling_mask, mask, mask)
    if chosen is None:
        chosen = select_tokens(mask, mask, None, every_row=every_row)
    return Opened(head, tokens, mask, every_row, chosen)


def check_call(call: LogpsCall, vocab_size: int, cu_seqlens: Optional[Tensor] = None) -> None:
    """What the data of its tokens must be."""
    ids, mask, temperature, *_ = call.tokens
    check_values(ids, mask, vocab_size, cu_seqlens)
    if temperature is not None:
        check_temperature(temperature, None if mask is None else mask.bool())


def _filled(x: Tensor, mask: Optional[Tensor], fill: float) -> Tensor:
    """x (N,) with `fill` at padding, whatever that holds; stored contiguously."""
    return stored(x)[0].contiguous() if mask is None else torch.where(mask, x, fill)


@unseen_by_modes
def _compute(inputs: Inputs, call: LogpsCall) -> tuple[Statistics, AnyTeacher]:
    """(statistics, 0 at masked positions, and the teacher with its divergence). To be called under no_grad."""
    hidden, count = inputs[0], call.tokens.completion_ids.numel()
    dtype = table_dtype(call.compute_dtype or hidden.dtype)
    with pinned_matmul_precision(hidden.device):
        teacher = new_teacher(call.teacher, call.divergence, get_backend(call.backend), count, dtype)
        stats = Statistics.zeros(count, hidden.device, dtype)
        vocab_size = inputs[1].shape[0] if call.vocab_slice is None else call.vocab_slice.vocab_size
        check_call(call, vocab_size)
        head, tokens, mask, every_row, chosen = open_pass(inputs, call, stats, teacher=teacher)
        tokens.forward(chosen.scored, entropy=call.want_entropy)
        head.release()
        if every_row and mask is not None:
            stats = Statistics(*(torch.where(mask, x, 0.0) for x in stats))
        return stats, teacher


def _shaped(x: Tensor, call: LogpsCall) -> Tensor:
    """A copy that is no view: autograd forbids to change a view that a function returns in place."""
    return x.view(call.tokens.completion_ids.shape).clone()


def _divergence(teacher: AnyTeacher, call: LogpsCall) -> Optional[Tensor]:
    return None if teacher is None else _shaped(teacher.divergence, call)


@unseen_by_modes
def _compute_gradients(
    outer: Sequence[Tensor],
    inputs: Inputs,
    call: LogpsCall,
    results: Sequence[Tensor],
    wants: Sequence[bool],
    teacher: AnyTeacher = None,
) -> list[Optional[Tensor]]:
    """(dhidden, dweight, dbias) from the logits computed again, over rows with a non-zero coefficient.

    outer: d loss / d logps, d loss / d entropy; with a teacher, as the forward left it, d loss / d divergence.
    results: entropy, lse, (N,) each.
    """
    entropy, lse = results
    check_gathered("lm_head_weight", inputs[1])  # it may have been released since the forward
    with torch.no_grad(), pinned_matmul_precision(entropy.device):
        stats = Statistics(torch.zeros_like(entropy), lse.clone(), entropy.clone())
        if teacher is not None:
            flat = None if call.tokens.mask is None else call.tokens.mask.reshape(-1).bool()
            teacher.weight = _filled(outer[2].reshape(-1).to(entropy.dtype), flat, 0.0)
        head, tokens, mask, every_row, _ = open_pass(inputs, call, stats, wants=wants, teacher=teacher)
        dlogp, dentropy = (_filled(g.reshape(-1), mask, 0.0) for g in outer[:2])
        tokens.backward(dlogp, dentropy, every_row=every_row)
        return head.gradients().without_scales()


class _Logps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, call):
        stats, ctx.teacher = _compute((hidden, weight, bias), call)
        ctx.call, given = call._replace(tokens=None), [*call.tokens]
        if call.teacher is not None:  # autograd notices changes, which inference tensors do not count
            given += [x for x in vars(call.teacher).values() if isinstance(x, Tensor) and not x.is_inference()]
        ctx.save_for_backward(hidden, weight, bias, stats.entropy, stats.lse, *given)
        return _shaped(stats.logp, call), _shaped(stats.entropy, call), _divergence(ctx.teacher, call)

    @staticmethod
    def backward(ctx, *outer):
        refuse_double_backward("fused_logps" if ctx.teacher is None else "fused_divergence")
        saved = ctx.saved_tensors
        call = ctx.call._replace(tokens=LogpsTokens(*saved[5 : 5 + len(LogpsTokens._fields)]))
        wants = ctx.needs_input_grad[:3]
        return *_compute_gradients(outer, saved[:3], call, saved[3:5], wants, ctx.teacher), None


@torch.library.custom_op("grpo_kernels::logps", mutates_args=())
def logps(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    tokens: Sequence[Optional[Tensor]],
    numbers: Sequence[float],
    want_entropy: bool,
    backend: str,
    compute_dtype: Optional[torch.dtype],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logps, entropy), each of the shape of completion_ids, 0 at masked positions; for the backward (entropy, lse),
    each (N,), since the caller may change what it got. `tokens`: LogpsTokens."""
    call = LogpsCall(LogpsTokens(*tokens), numbers, want_entropy, backend, compute_dtype)  # type: ignore[arg-type]
    with torch.no_grad():
        stats, _ = _compute((hidden, weight, bias), call)
    return _shaped(stats.logp, call), _shaped(stats.entropy, call), stats.entropy.clone(), stats.lse


@logps.register_fake
def _(hidden, weight, bias, tokens, numbers, want_entropy, backend, compute_dtype):
    dtype, shape, count = table_dtype(compute_dtype or hidden.dtype), tokens[0].shape, tokens[0].numel()
    results = ((shape, dtype), (shape, dtype), (count, dtype), (count, torch.float64))
    return tuple(hidden.new_empty(size, dtype=kind) for size, kind in results)


@torch.library.custom_op("grpo_kernels::logps_backward", mutates_args=())
def logps_backward(
    outer: Sequence[Tensor],
    inputs: Sequence[Optional[Tensor]],
    tokens: Sequence[Optional[Tensor]],
    results: Sequence[Tensor],
    numbers: Sequence[float],
    backend: str,
    compute_dtype: Optional[torch.dtype],
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dhidden, dweight, dbias); unwanted ones are empty. See _compute_gradients. `tokens`: LogpsTokens."""
    call = LogpsCall(LogpsTokens(*tokens), numbers, True, backend, compute_dtype)  # type: ignore[arg-type]
    hidden, weight, bias = inputs
    assert hidden is not None and weight is not None
    found = _compute_gradients(outer, (hidden, weight, bias), call, results, wants)
    dhidden, dweight, dbias = (hidden.new_empty(0) if g is None else g for g in found)
    return dhidden, dweight, dbias


@logps_backward.register_fake
def _(outer, inputs, tokens, results, numbers, backend, compute_dtype, wants):
    hidden, weight, bias = inputs
    given = (hidden, weight, weight if bias is None else bias)
    return tuple(x.new_empty(x.shape) if want else hidden.new_empty(0) for x, want in zip(given, wants, strict=True))


def _save_logps(ctx, inputs, output):
    hidden, weight, bias, tokens, numbers, _, backend, compute_dtype = inputs
    ctx.options = numbers, backend, compute_dtype
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(hidden, weight, bias, *output[2:], *tokens)


def _logps_gradients(ctx, g_logps, g_entropy, *_):
    refuse_double_backward("fused_logps")
    wants = list(ctx.needs_input_grad[:3])
    saved = list(ctx.saved_tensors)
    inputs, results, tokens = saved[:3], saved[3:5], saved[5:]
    gradients = logps_backward([g_logps, g_entropy], inputs, tokens, results, *ctx.options, wants)
    return (*(g if want else None for g, want in zip(gradients, wants, strict=True)), no_gradients(tokens), *[None] * 4)


logps.register_autograd(_logps_gradients, setup_context=_save_logps)

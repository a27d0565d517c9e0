"""Log-probabilities from hidden states, as autograd and torch.compile see them: see loss_op.py.

No `from __future__ import annotations` here, and Optional[X] for X | None: torch infers schemas from the annotations.
"""
# ruff: noqa: UP045

from collections.abc import Sequence
from typing import NamedTuple, Optional, cast

import torch
from torch import Tensor

from ..backends import get_backend
from ..checks.arguments import check_temperature, check_values
from ..checks.plain import check_gathered
from ..contract import TokenValues, no_values
from .backward import refuse_double_backward
from .chunks import Scorer, add_mask
from .kept import KeptLogits, make_token_mask
from .lm_head import LMHead
from .products import pinned_matmul_precision
from .shared import (
    filled,
    is_capturing,
    is_traced,
    logit_params,
    make_head,
    make_scorer,
    no_gradients,
    requires_grad_flags,
    table_dtype,
    token_mask,
)
from .vocab_parallel import VocabSlice, describe, refuse_traced_slice


class LogpsInputs(NamedTuple):
    """What the custom operators take of tokens: LogpsCall has the same."""

    completion_ids: Tensor
    mask: Optional[Tensor]
    temperature: Optional[Tensor]
    kept_ids: Optional[Tensor]
    kept_counts: Optional[Tensor]


class LogpsCall(NamedTuple):
    """What a call of fused_logps computes, besides the inputs that may need gradients."""

    completion_ids: Tensor
    mask: Optional[Tensor]
    temperature: Tensor | float
    logit_scale: float
    softcap: float
    want_entropy: bool
    backend: str
    compute_dtype: Optional[torch.dtype]
    kept_ids: Optional[Tensor] = None  # of a SamplingMask
    kept_counts: Optional[Tensor] = None
    vocab_slice: Optional[VocabSlice] = None  # which rows of the whole weight this rank has; None: all

    @property
    def description(self) -> tuple[object, ...]:
        """What ranks that share this call must have in common, besides hidden, weight and bias."""
        temperature = describe(self.temperature) if isinstance(self.temperature, Tensor) else self.temperature
        options = self.logit_scale, self.softcap, self.want_entropy, self.backend, self.compute_dtype
        return temperature, describe(self.mask, self.kept_ids, self.kept_counts), *options


def logps_from_hidden(
    hidden: Tensor, weight: Tensor, bias: Optional[Tensor], call: LogpsCall
) -> tuple[Tensor, Optional[Tensor]]:
    """(logps, entropy), each of the shape of completion_ids; 0 at masked positions. Differentiable.

    Where the entropy is not requires_grad_flags, what stands in its place means nothing.
    """
    if is_traced(hidden):
        refuse_traced_slice(call.vocab_slice)
        temperature = call.temperature
        if not isinstance(temperature, Tensor):
            temperature = hidden.new_full((), temperature, dtype=table_dtype(call.compute_dtype or hidden.dtype))
        results = logps(
            hidden,
            weight,
            bias,
            tokens=list(LogpsInputs(call.completion_ids, call.mask, temperature, call.kept_ids, call.kept_counts)),
            logit_scale=call.logit_scale,
            softcap=call.softcap,
            want_entropy=call.want_entropy,
            backend=call.backend,
            compute_dtype=call.compute_dtype,
        )
        return results[:2]
    if any(requires_grad_flags(hidden, weight, bias)):
        return _Logps.apply(hidden, weight, bias, call)
    if torch.is_grad_enabled():
        with torch.no_grad():
            values = _compute(hidden, weight, bias, call)
    else:
        values = _compute(hidden, weight, bias, call)
    shape = call.completion_ids.shape
    return _own(values, 0, shape), _own(values, 1, shape) if call.want_entropy else None


def _compute(hidden: Tensor, weight: Tensor, bias: Optional[Tensor], call: LogpsCall) -> TokenValues:
    """logp, entropy and lse. To be called under no_grad."""
    ids, kernels = call.completion_ids, get_backend(call.backend)
    vocab_size = weight.shape[0] if call.vocab_slice is None else call.vocab_slice.vocab_size
    check_values(ids, call.mask, vocab_size, None)
    with pinned_matmul_precision(hidden.device):
        mask, static = token_mask(call.mask), is_capturing(hidden.device)
        if isinstance(call.temperature, Tensor):
            check_temperature(call.temperature, None if mask is None else mask.view(ids.shape))
        head = make_head(
            hidden, weight, bias, kernels, compute_dtype=call.compute_dtype, vocab_slice=call.vocab_slice
        )  # fmt: skip
        head.keep = mask if static else None
        values = no_values(ids.numel(), table_dtype(head.hidden.dtype), hidden.device, columns=2)
        params = logit_params(call.logit_scale, call.softcap)
        scorer = make_scorer(head, ids, call.temperature, params, values, mask)
        index = None if static or mask is None else mask.nonzero().squeeze(1)
        kept, others = (None, None) if call.kept_ids is None else _split(scorer, call, mask, static=static)
        if kept is not None and others is not None:
            kept.score(None, entropy=call.want_entropy)
            index = (others if mask is None else others & mask).nonzero().squeeze(1)
        scorer.score(index, entropy=call.want_entropy)
        head.release()
        return values.only(mask) if static and mask is not None else values


def _shaped(values: TokenValues, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    """(logps, entropy, lse) with memory of their own."""
    return _own(values, 0, shape), _own(values, 1, shape), values.lse.view(*shape)


def _own(values: TokenValues, column: int, shape: torch.Size) -> Tensor:
    """A column with memory of its own."""
    return values.columns.narrow_copy(0, column, 1).view(*shape)  # for a torch.Size itself torch takes 1.4 us longer


def _split(
    scorer: Scorer, call: LogpsCall, mask: Optional[Tensor], *, static: bool
) -> tuple[Optional[Scorer], Optional[Tensor]]:
    """(a scorer of the tokens whose kept ids are gathered, (N,) bool: the other tokens), if there are any."""
    sampling_mask = make_token_mask(
        call.kept_ids, call.kept_counts, cast(LMHead, scorer.head).vocab_size, is_static=static
    )
    if sampling_mask is None:
        return None, None
    scored = torch.ones_like(sampling_mask.counts, dtype=torch.bool) if mask is None else mask
    kept, _ = add_mask(scorer, sampling_mask, scored)
    if kept is None:
        return None, None
    return kept, torch.ones_like(scored).index_fill(0, cast(KeptLogits, kept.head).index, False)


def _compute_gradients(
    outer: tuple[Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Optional[Tensor]],
    call: LogpsCall,
    entropy: Tensor,
    lse: Tensor,
    wants: Sequence[bool],
) -> list[Optional[Tensor]]:
    """(dhidden, dweight, dbias) from the logits computed again, over rows with a non-zero coefficient.

    outer: (d loss / d logps, d loss / d entropy). inputs: (hidden, weight, bias).
    """
    device = entropy.device
    check_gathered("lm_head_weight", inputs[1])  # it may have been released since the forward
    with torch.no_grad(), pinned_matmul_precision(device):
        mask, static = token_mask(call.mask), is_capturing(device)
        head = make_head(
            *inputs, get_backend(call.backend), compute_dtype=call.compute_dtype, wants=tuple(wants),
            vocab_slice=call.vocab_slice,
        )  # fmt: skip
        head.keep = mask if static else None
        values = no_values(entropy.numel(), entropy.dtype, device)
        values.entropy.copy_(entropy.reshape(-1))
        values = TokenValues(values.columns, lse.reshape(-1).contiguous())
        params = logit_params(call.logit_scale, call.softcap)
        scorer = make_scorer(head, call.completion_ids, call.temperature, params, values, mask)
        g_logp, g_entropy = (filled(g.reshape(-1), mask, 0.0) for g in outer)
        kept, others = _split(scorer, call, mask, static=static)
        if kept is not None and others is not None:
            kept.gradient(g_logp, g_entropy, static_shapes=True)
            g_logp, g_entropy = (torch.where(others, g, 0.0) for g in (g_logp, g_entropy))
        scorer.gradient(g_logp, g_entropy, static_shapes=static)
        if kept is not None:
            cast(KeptLogits, kept.head).finish()
        return head.gradients().without_scales()


class _Logps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, call):
        found, entropy, lse = _shaped(_compute(hidden, weight, bias, call), call.completion_ids.shape)
        saved = {name: getattr(call, name) for name in ("completion_ids", "mask", "kept_ids", "kept_counts")}
        if isinstance(call.temperature, Tensor):
            saved["temperature"] = call.temperature
        ctx.saved, ctx.call = tuple(saved), call._replace(**dict.fromkeys(saved))
        # A copy, since the caller may change what it got.
        ctx.save_for_backward(hidden, weight, bias, entropy.clone(), lse, *saved.values())
        return found, entropy

    @staticmethod
    def backward(ctx, g_logps, g_entropy):
        refuse_double_backward("fused_logps")
        hidden, weight, bias, entropy, lse, *saved = ctx.saved_tensors
        call = ctx.call._replace(**dict(zip(ctx.saved, saved, strict=True)))
        inputs, wants = (hidden, weight, bias), ctx.needs_input_grad[:3]
        return *_compute_gradients((g_logps, g_entropy), inputs, call, entropy, lse, wants), None


@torch.library.custom_op("grpo_kernels::logps", mutates_args=())
def logps(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    tokens: Sequence[Optional[Tensor]],
    logit_scale: float,
    softcap: float,
    want_entropy: bool,
    backend: str,
    compute_dtype: Optional[torch.dtype],
) -> tuple[Tensor, Tensor, Tensor]:
    """(logps, entropy, lse), each of the shape of completion_ids; 0 at masked positions. `tokens`: LogpsInputs."""
    call = LogpsCall(
        **LogpsInputs(*tokens)._asdict(),  # type: ignore[arg-type]
        logit_scale=logit_scale, softcap=softcap, want_entropy=want_entropy, backend=backend,
        compute_dtype=compute_dtype,
    )  # fmt: skip
    with torch.no_grad():
        return _shaped(_compute(hidden, weight, bias, call), call.completion_ids.shape)


@logps.register_fake
def _(hidden, weight, bias, tokens, logit_scale, softcap, want_entropy, backend, compute_dtype):
    dtype = table_dtype(compute_dtype or hidden.dtype)
    return tuple(hidden.new_empty(tokens[0].shape, dtype=t) for t in (dtype, dtype, torch.float64))


@torch.library.custom_op("grpo_kernels::logps_backward", mutates_args=())
def logps_backward(
    outer: Sequence[Tensor],
    inputs: Sequence[Optional[Tensor]],
    tokens: Sequence[Optional[Tensor]],
    results: Sequence[Tensor],
    logit_scale: float,
    softcap: float,
    backend: str,
    compute_dtype: Optional[torch.dtype],
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dhidden, dweight, dbias); unwanted ones are empty.

    `outer`: d loss / d logps, d loss / d entropy. `inputs`: hidden, weight, bias. `tokens`: LogpsInputs. `results`:
    entropy, lse.
    """
    call = LogpsCall(
        **LogpsInputs(*tokens)._asdict(),  # type: ignore[arg-type]
        logit_scale=logit_scale, softcap=softcap, want_entropy=True, backend=backend, compute_dtype=compute_dtype,
    )  # fmt: skip
    hidden, weight, bias = inputs
    assert hidden is not None and weight is not None
    entropy, lse = results
    found = _compute_gradients((outer[0], outer[1]), (hidden, weight, bias), call, entropy, lse, wants)
    dhidden, dweight, dbias = (hidden.new_empty(0) if g is None else g for g in found)
    return dhidden, dweight, dbias


@logps_backward.register_fake
def _(outer, inputs, tokens, results, logit_scale, softcap, backend, compute_dtype, wants):
    hidden, weight, bias = inputs
    given = (hidden, weight, weight if bias is None else bias)
    return tuple(x.new_empty(x.shape) if want else hidden.new_empty(0) for x, want in zip(given, wants, strict=True))


def _save_logps(ctx, inputs, output):
    hidden, weight, bias, tokens, scale, softcap, _, backend, compute_dtype = inputs
    ctx.options = scale, softcap, backend, compute_dtype
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(hidden, weight, bias, *output[1:], *tokens)


def _logps_gradients(ctx, g_logps, g_entropy, _):
    refuse_double_backward("fused_logps")
    wants = list(ctx.needs_input_grad[:3])
    saved = ctx.saved_tensors
    inputs, results, tokens = list(saved[:3]), list(saved[3:5]), list(saved[5:])
    gradients = logps_backward([g_logps, g_entropy], inputs, tokens, results, *ctx.options, wants)
    return (*(g if want else None for g, want in zip(gradients, wants, strict=True)), no_gradients(tokens), *[None] * 5)


logps.register_autograd(_logps_gradients, setup_context=_save_logps)

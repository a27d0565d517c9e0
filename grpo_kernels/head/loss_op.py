"""The loss from hidden states, logits and log-probabilities, as autograd and torch.compile see it.

An eager call of the first goes through an autograd.Function, or nothing where no gradient is wanted; torch.compile gets
a custom operator with the same body. Logits go through an autograd.Function alone: a custom operator must not return
the memory of its input. Log-probabilities go through a custom operator of O(N).

No `from __future__ import annotations` here, and Optional[X] for X | None: torch infers schemas from the annotations.
"""

# ruff: noqa: UP007, UP045

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Optional, Union, cast

import torch
from torch import Tensor

from ..checks.arguments import check_offsets, check_token_values, check_values
from ..checks.plain import stored
from ..config import GRPOConfig, config_from_key
from ..contract import Backend, Sums, TokenInputs
from ..kernels import get_backend
from ..names import FIELD, MASK_SUMS, SPARSE_SUMS
from ..teacher import Teacher, TopKTeacher
from .backward import FinishedGradients, finish_in_forward, refuse_double_backward, times, waiting_dtype
from .chunks import evaluate, run
from .kept import make_token_mask
from .lm_head import GivenLogits, LMHead
from .plan import Plan, keep_entropies, make_plan
from .products import pinned_matmul_precision
from .shared import is_capturing, no_gradients, refuse_capture, table_dtype, takes_operator, unseen_by_modes
from .teacher import TeacherHead, TopKHead, new_teacher
from .vocab_parallel import VocabSlice, describe

# On a GPU the products of so few rows take as long as reading the weight: a row left out saves nothing, and reading the
# counts of rows costs a wait for the device. An H200 does 206 operations of a 16-bit product in the time in which it
# reads a byte, an H100 295, an A100 156; a product of N rows does N per byte of W.
_WEIGHT_BOUND_TOKENS = 256


class LossCall(NamedTuple):
    """What a call of the loss computes, besides the inputs that may need gradients."""

    completion_ids: Tensor
    tokens: TokenInputs
    num_groups: int
    config: GRPOConfig
    backend: str
    compute_dtype: Optional[torch.dtype]  # of the products, where it is not the inputs' own
    wants: Sequence[bool]  # which of hidden, weight, bias need gradients; or the logits
    accumulate_into: Optional[Tensor] = None  # float32, like the weight, whose gradient each backward adds to it
    vocab_slice: Optional[VocabSlice] = None  # which rows of the whole weight this rank has; None: all
    teacher: Union[Teacher, TopKTeacher, None] = None  # to whose distribution the loss has a divergence

    @property
    def description(self) -> tuple[object, ...]:
        """What ranks that share this call must have in common, besides hidden, weight and bias."""
        return self.config.key, self.num_groups, self.backend, self.compute_dtype, describe(*self.tokens)


def loss_from_hidden(hidden: Tensor, weight: Tensor, bias: Optional[Tensor], call: LossCall) -> tuple[Tensor, ...]:
    """(loss, logps, entropy, numbers of Sums); the loss is differentiable in hidden, weight and bias. With a teacher
    the divergence comes last."""
    beyond = dict(vocab_parallel_group=call.vocab_slice, teacher=call.teacher, accumulate_into=call.accumulate_into)
    if takes_operator(hidden, **beyond):
        loss, logps, entropy, numbers, *_ = grpo_loss(
            hidden,
            weight,
            bias,
            tokens=[call.completion_ids, *call.tokens],
            num_groups=call.num_groups,
            config_key=call.config.key,
            backend=call.backend,
            compute_dtype=call.compute_dtype,
            wants=list(call.wants),
        )
        return loss, logps.detach(), entropy, numbers
    if any(call.wants):
        return finish_in_forward("fused_grpo_loss", partial(_compute, call=call), hidden, weight, bias)
    with torch.no_grad():
        return _compute(hidden, weight, bias, call)[0]


@unseen_by_modes
def _compute(
    hidden: Tensor, weight: Tensor, bias: Optional[Tensor], call: LossCall
) -> tuple[tuple[Tensor, ...], FinishedGradients]:
    """(results, gradients). To be called under no_grad."""
    ids, config, kernels, inputs = call.completion_ids, call.config, get_backend(call.backend), _stored(call.tokens)
    with pinned_matmul_precision(hidden.device):
        dtype = table_dtype(call.compute_dtype or hidden.dtype)
        teacher = new_teacher(call.teacher, config, kernels, ids.numel(), dtype)
        head = LMHead(
            (hidden, weight, bias), kernels, wants=tuple(call.wants), compute_dtype=call.compute_dtype,
            logits_dtype=config.logits_dtype, chunk_rows=config.chunk_rows, sums_wide=config.dweight_sum == "float32",
            vocab_slice=call.vocab_slice,
            teacher_dtype=teacher.logits_dtype if isinstance(teacher, TeacherHead) else None,
        )  # fmt: skip
        check_values(ids, inputs.completion_mask, head.vocab_size, inputs.cu_seqlens)
        check_token_values(inputs)
        head.keeps_pairs = config.sparse_backward is not None and call.accumulate_into is not None
        static = _computes_every_row(call, hidden.device)
        plan = make_plan(
            inputs, ids, config, call.num_groups, kernels, static_shapes=static, dtype=dtype,
            has_teacher=teacher is not None,
        )  # fmt: skip
        if static and inputs.completion_mask is not None:
            head.keep = plan.tokens.scored
        results, gradients = _loss_of_head(head, plan, kernels, call, teacher), head.gradients()
    gradients.accumulate_into = call.accumulate_into
    return results, gradients


def _loss_of_head(
    head: Union[LMHead, GivenLogits],
    plan: Plan,
    kernels: Backend,
    call: LossCall,
    teacher: Union[TeacherHead, TopKHead, None] = None,
) -> tuple[Tensor, ...]:
    """(loss, logps, entropy, numbers of Sums), with a teacher the divergence; the gradients are left in `head`."""
    tokens, shape = call.tokens, call.completion_ids.shape
    # The rows of given logits are all computed, whatever the mask: they decide no shape.
    is_static = (isinstance(head, LMHead) and plan.is_static) or is_capturing(call.completion_ids.device)
    mask = make_token_mask(tokens.kept_ids, tokens.kept_counts, head.vocab_size, is_static=is_static)
    values, sums = run(head, plan, kernels, gradients=any(call.wants), sampling_mask=mask, teacher=teacher)
    both = values.columns.narrow_copy(0, 0, 2).view(2, *shape)  # without the other columns
    results = sums.loss.clone(), both[0], both[1], sums.numbers
    if teacher is None:
        return results
    return *results, torch.where(plan.tokens.scored, values.divergence, 0.0).view(shape)


def _stored(tokens: Sequence[Optional[Tensor]]) -> TokenInputs:
    """Inputs that may be looked at and handed to kernels. Not in what autograd and torch.compile trace."""
    return TokenInputs(*stored(*tokens))


def _computes_every_row(call: LossCall, device: torch.device) -> bool:
    """Whether nothing is read back to the host, and so no row left out."""
    sparse = call.config.sparse_backward is not None
    if sparse:
        refuse_capture(device)
    if call.config.static_shapes or is_capturing(device):
        return True
    # Which rows; lengths; how many entries.
    reads_anyway = call.tokens.kept_counts is not None or call.tokens.cu_seqlens is not None or sparse
    return device.type != "cpu" and call.completion_ids.numel() <= _WEIGHT_BOUND_TOKENS and not reads_anyway


def loss_from_logits(logits: Tensor, call: LossCall, *, inplace: bool) -> tuple[Tensor, ...]:
    """(loss, logps, entropy, numbers of Sums) from logits (B, T, V) or (N, V); the loss is differentiable in them.

    inplace: the gradient replaces the logits, if their memory allows it.
    """
    return finish_in_forward("grpo_loss_from_logits", partial(_compute_from_logits, call=call, inplace=inplace), logits)


@unseen_by_modes
def _compute_from_logits(
    logits: Tensor, *, call: LossCall, inplace: bool
) -> tuple[tuple[Tensor, ...], FinishedGradients]:
    """Every row is computed where it lies: rows that cannot have a gradient get zeros, and nothing is copied."""
    tokens, kernels = _stored(call.tokens), get_backend(call.backend)
    flat = stored(logits.detach())[0].reshape(-1, logits.shape[-1])
    reused = inplace and flat.data_ptr() == logits.data_ptr() and flat.stride(-1) == 1
    reused = reused and (flat.stride(0) >= flat.shape[1] or flat.shape[0] <= 1)  # rows that share memory cannot
    writes = any(call.wants) or tokens.kept_ids is not None  # gradients; -inf for ids that were not kept
    if (writes and not reused) or flat.stride(-1) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    dtype = table_dtype(logits.dtype)
    plan = make_plan(
        tokens, call.completion_ids, call.config, call.num_groups, kernels, static_shapes=True, dtype=dtype
    )
    if any(call.wants) and tokens.completion_mask is not None:
        _clear_rows(flat, ~plan.tokens.scored)  # padding may hold NaN, which no coefficient of 0 would hide
    head = GivenLogits(flat)
    results = _loss_of_head(head, plan, kernels, call)
    if any(call.wants) and reused:
        torch.autograd.graph.increment_version(logits)
    gradient = flat.view(logits.shape) if any(call.wants) else None
    return results, FinishedGradients([gradient], [logits.dtype], kernels, [head.gradient_scale])


def _clear_rows(x: Tensor, chosen: Tensor) -> None:
    """Zero these rows (N,) bool of x (N, V). Only they are written, except under capture, where all are."""
    if is_capturing(x.device):
        x.masked_fill_(chosen[:, None], 0.0)
    else:
        x.index_fill_(0, chosen.nonzero().squeeze(1), 0.0)


@torch.library.custom_op("grpo_kernels::grpo_loss", mutates_args=())
def grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    tokens: Sequence[Optional[Tensor]],
    num_groups: int,
    config_key: str,
    backend: str,
    compute_dtype: Optional[torch.dtype],
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, logps, entropy, numbers of Sums, dhidden, dweight, dbias).

    `tokens`: completion_ids, then the fields of TokenInputs. Unwanted gradients are empty.
    """
    completion_ids, *given = tokens
    inputs, config = TokenInputs(*given), config_from_key(config_key)  # type: ignore[arg-type]
    call = LossCall(cast(Tensor, completion_ids), inputs, num_groups, config, backend, compute_dtype, wants)
    with torch.no_grad():
        (loss, logps, entropy, numbers), gradients = _compute(hidden, weight, bias, call)
    results = loss, logps.clone(), entropy.clone(), numbers  # the results of an operator share no memory
    for g, scale in zip(gradients.tensors, gradients.scales, strict=True):
        if g is not None and scale is not None:
            g.div_(scale)
    return *results, *(hidden.new_empty(0) if g is None else g for g in gradients.tensors)


@grpo_loss.register_fake
def _(hidden, weight, bias, tokens, num_groups, config_key, backend, compute_dtype, wants):
    completion_ids, *tokens = tokens
    inputs, config = TokenInputs(*tokens), config_from_key(config_key)
    dtype = table_dtype(compute_dtype or hidden.dtype)
    f = hidden.new_empty
    given = (hidden, weight, weight if bias is None else bias)
    others = int(config.entropy_kept_only) + (0 if inputs.kept_ids is None else len(MASK_SUMS))
    others += 0 if config.sparse_backward is None else len(SPARSE_SUMS)
    return (
        f((), dtype=dtype),
        f(completion_ids.shape, dtype=dtype),
        f(completion_ids.shape, dtype=dtype),
        empty_sums(hidden, completion_ids, inputs, num_groups, dtype, others),
        *(
            x.new_empty(x.shape, dtype=waiting_dtype(x.dtype)) if want else f(0)
            for x, want in zip(given, wants, strict=True)
        ),
    )


def _hand_out_gradients(operator: Any, name: str, count: int) -> None:
    """Let autograd have the gradients of the first `count` inputs, which are the last results of the operator, whose
    first is the loss; a list of tensors comes behind these inputs. name: of the public function, for errors."""

    def save(ctx, inputs, output):
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.dtypes = [None if x is None else x.dtype for x in inputs[:count]]
        ctx.others = no_gradients(inputs[count]), *[None] * (len(inputs) - count - 1)
        ctx.save_for_backward(*output[-count:])

    def hand_out(ctx, g_loss, *_):
        refuse_double_backward(name)
        wants = [g_loss is not None and want for want in ctx.needs_input_grad[:count]]
        gradients = zip(ctx.saved_tensors, ctx.dtypes, wants, strict=True)
        return *(times(x, g_loss, dtype) if want else None for x, dtype, want in gradients), *ctx.others

    operator.register_autograd(hand_out, setup_context=save)


_hand_out_gradients(grpo_loss, "fused_grpo_loss", 3)


def empty_sums(like, per_token, inputs, num_groups, dtype, others):
    """Numbers of Sums without values, for tokens (B, T), or (N,) with offsets, and so many others."""
    sequences = per_token.shape[0] if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
    return like.new_empty(Sums.size(sequences, num_groups) + others, dtype=dtype)


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
    inputs, config = _stored(tokens), config_from_key(config_key)
    check_offsets(inputs.cu_seqlens, logps.numel())
    check_token_values(inputs)
    with torch.no_grad():
        kernels, dtype = get_backend(backend), table_dtype(logps.dtype)
        plan = make_plan(inputs, logps, config, num_groups, kernels, static_shapes=True, dtype=dtype)
        planned, values = plan.tokens, plan.tokens.values
        for known, given in ((values.logp, logps), (values.entropy, entropy)):
            known.copy_(torch.where(planned.scored, given.reshape(-1), 0.0))
        evaluate(plan, kernels)
        bonus = [keep_entropies(planned)] if config.entropy_kept_only else []
        sums = kernels.sums(planned, plan.params, plan.group_index, plan.num_groups)
        weight_entropy = planned.table[FIELD["weight_entropy"]]
        gradients = (torch.where(planned.scored, g, 0.0) for g in (values.g_logp, weight_entropy))
    numbers = torch.cat([sums.numbers, *bonus]) if bonus else sums.numbers
    return sums.loss.clone(), numbers, *(g.view(logps.shape) for g in gradients)


@policy_loss.register_fake
def _(logps, entropy, tokens, num_groups, config_key, backend):
    f, dtype = logps.new_empty, table_dtype(logps.dtype)
    others = int(config_from_key(config_key).entropy_kept_only)
    numbers = empty_sums(logps, logps, TokenInputs(*tokens), num_groups, dtype, others)
    return f((), dtype=dtype), numbers, f(logps.shape, dtype=dtype), f(logps.shape, dtype=dtype)


_hand_out_gradients(policy_loss, "grpo_loss_from_logps", 2)

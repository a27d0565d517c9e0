"""The loss from hidden states, logits and log-probabilities, as autograd and torch.compile see it.

An eager call of the first goes through an autograd.Function, or nothing where no gradient is wanted; torch.compile gets
a custom operator with the same body. Logits go through an autograd.Function alone: a custom operator must not return
the memory of its input. Log-probabilities go through a custom operator of O(N).

No `from __future__ import annotations` here, and Optional[X] for X | None: torch infers schemas from the annotations.
"""

# ruff: noqa: UP007, UP045

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor

from ..checks.arguments import (
    check_offsets,
    check_values,
)
from ..checks.plain import materialized
from ..checks.tokens import (
    check_token_values,
)
from ..config import config_from_key
from ..kernels import get_backend
from ..kernels.fused_objective import ObjectiveInputs
from ..kernels.operations import PolicyTransform, Statistics
from ..names import add_op_namespace_prefix
from ..objective.fused import has_kernel, objective_inputs
from ..objective.loss import DistillationLoss, GRPOLoss, Operation
from ..objective.metrics import Batch
from ..objective.tokens import TokenInputs, Tokens, plan, rules_of
from ..teacher import AnyTeacher, check_teacher_values, teacher_signature
from .chunk_size import select_tokens
from .gradients import PrecomputedGradients, compute_in_forward, held_dtype, refuse_double_backward, scaled_copy
from .lm_head import GivenLogits, LMHead
from .loop import TokenBatch, run
from .mask_paths import make_token_mask
from .products import pinned_matmul_precision
from .shared import (
    hide_from_dispatch_modes,
    is_capturing,
    no_gradients,
    refuse_capture,
    refuse_when_traced,
    statistics_dtype,
    uses_custom_op,
)
from .teacher import TeacherHead, TopKHead, knows_mass, new_teacher, teacher_from_key, teacher_to_key
from .vocab_parallel import VocabSlice, signature, vocab_size_of

# On a GPU the products of so few rows take as long as reading the weight: a row left out saves nothing, and reading the
# counts of rows costs a wait for the device. An H200 does 206 operations of a 16-bit product in the time in which it
# reads a byte, an H100 295, an A100 156; a product of N rows does N per byte of W.
_WEIGHT_BOUND_TOKENS = 256


class LossCall(NamedTuple):
    """A call of the loss from hidden states."""

    completion_ids: Optional[Tensor]  # None: the loss is the divergence to the teacher alone
    batch: Batch
    compute_dtype: Optional[torch.dtype]  # of the products, where it is not the inputs' own
    wants: Sequence[bool]  # which of hidden, weight, bias need gradients; or the logits
    accumulate_into: Optional[Tensor] = None  # float32, like the weight, whose gradient each backward adds to it
    vocab_slice: Optional[VocabSlice] = None  # which rows of the whole weight this rank has; None: all
    teacher: Optional[AnyTeacher] = None  # to whose distribution the loss has a divergence

    @property
    def description(self) -> tuple[object, ...]:
        """Returns what ranks that share this call must have in common, besides hidden, weight and bias."""
        batch, tokens, teacher = self.batch, signature(*self.batch.tokens), teacher_signature(self.teacher)
        return batch.config.key, batch.num_groups, batch.backend, self.compute_dtype, tokens, teacher


def loss_from_hidden(hidden: Tensor, weight: Tensor, bias: Optional[Tensor], call: LossCall) -> tuple[Tensor, ...]:
    """Returns (loss, logps, entropy, what metrics are computed from, other numbers); the loss is differentiable in
    hidden, weight and bias. With a teacher the divergence comes last."""
    refuse_when_traced(hidden, "vocab_parallel_group", call.vocab_slice)
    refuse_when_traced(hidden, "accumulate_into", call.accumulate_into)
    if uses_custom_op(hidden, call.vocab_slice, call.accumulate_into):
        batch, (teacher, of_teacher) = call.batch, teacher_to_key(call.teacher)
        loss, logps, entropy, measured, others, divergence, *_ = grpo_loss(
            hidden, weight, bias, tokens=[call.completion_ids, *batch.tokens, *of_teacher], num_groups=batch.num_groups,
            per_sequence=batch.per_sequence, config_key=batch.config.key, backend=batch.backend,
            compute_dtype=call.compute_dtype, wants=list(call.wants), teacher=teacher,
        )  # fmt: skip
        results = loss, logps.detach(), entropy, measured, others
        return (*results, divergence) if teacher else results
    if any(call.wants):
        return compute_in_forward("fused_grpo_loss", partial(_compute, call=call), hidden, weight, bias)
    with torch.no_grad():
        return _compute(hidden, weight, bias, call)[0]


@hide_from_dispatch_modes
def _compute(
    hidden: Tensor, weight: Tensor, bias: Optional[Tensor], call: LossCall
) -> tuple[tuple[Tensor, ...], PrecomputedGradients]:
    """Returns (results, gradients). To be called under no_grad."""
    ids, config, kernels = call.completion_ids, call.batch.config, get_backend(call.batch.backend)
    has_ids = ids is not None
    if ids is None:
        ids = torch.full(call.batch.shape, -1, dtype=torch.int64, device=hidden.device)
    inputs = TokenInputs(*materialized(*call.batch.tokens))
    with pinned_matmul_precision(hidden.device):
        dtype = statistics_dtype(call.compute_dtype or hidden.dtype)
        teacher = None
        if call.teacher is not None:
            vocab_size = vocab_size_of(weight, call.vocab_slice)
            check_teacher_values(call.teacher, vocab_size, inputs.completion_mask)
            sizes = ids.numel(), dtype, vocab_size, call.vocab_slice
            teacher = new_teacher(call.teacher, config, kernels, call.compute_dtype, *sizes)
        head = LMHead(
            (hidden, weight, bias), kernels, wants=tuple(call.wants), compute_dtype=call.compute_dtype,
            logits_dtype=config.logits_dtype, chunk_rows=config.chunk_rows,
            accumulate_in_fp32=config.dweight_sum == "float32", vocab_slice=call.vocab_slice,
            teacher_dtype=teacher.logits_dtype if isinstance(teacher, TeacherHead) else None,
        )  # fmt: skip
        if has_ids:
            check_values(ids, inputs.completion_mask, head.vocab_size, inputs.cu_seqlens)
        else:
            check_offsets(inputs.cu_seqlens, ids.numel())
        every_row, of_sequences = _computes_every_row(call, hidden.device), call.batch.per_sequence
        tokens = plan(inputs, ids, config, dtype, per_sequence=of_sequences, has_teacher=teacher is not None)
        if every_row and inputs.completion_mask is not None:
            head.row_mask = tokens.scored
        results = _loss_of_head(head, tokens, inputs, call, teacher, every_row=every_row)
        gradients = head.gradients()
    gradients.accumulate_into = call.accumulate_into
    return results, gradients


def _loss_of_head(
    head: Union[LMHead, GivenLogits],
    tokens: Tokens,
    inputs: TokenInputs,
    call: LossCall,
    teacher: Union[TeacherHead, TopKHead, None] = None,
    *,
    every_row: bool,
) -> tuple[Tensor, ...]:
    """Returns the results of `loss_from_hidden`; the gradients are left in `head`."""
    config, shape, needs_sequences = call.batch.config, call.batch.shape, tokens.rules.whole_sequences
    mask = None
    if inputs.allowed_ids is not None:
        # The rows of given logits are all computed, whatever the mask: they decide no shape.
        is_static = (isinstance(head, LMHead) and every_row) or is_capturing(tokens.ids.device)
        mask = make_token_mask(inputs.allowed_ids, inputs.allowed_counts, head.vocab_size, is_static=is_static)
    stats = Statistics.zeros(tokens.ids.numel(), tokens.ids.device, tokens.advantage.dtype)
    transform = PolicyTransform(config.logit_scale, config.logit_softcap or 0.0)
    if teacher is not None:
        teacher.weight = config.distill_coef * tokens.dloss_direct
    token_batch = TokenBatch(
        head, tokens.ids, tokens.temperature, transform, stats, sparse_backward=config.sparse_backward, teacher=teacher
    )
    selection = None
    sequences = tokens.sequences if needs_sequences else None
    if mask is not None:
        selection = token_batch.add_mask(
            mask, tokens.scored, tokens.has_gradient, None if sequences is None else sequences.offsets
        )
    if selection is None:
        selection = select_tokens(tokens.scored, tokens.has_gradient, sequences, every_row=every_row)
    divergence = None if teacher is None else teacher.divergence
    loss: Union[GRPOLoss, DistillationLoss]
    if call.completion_ids is None and divergence is not None:
        loss = DistillationLoss(tokens, stats.entropy, divergence)
    else:
        fused = fused_objective(call.batch, tokens, stats.logp.dtype)
        loss = GRPOLoss(tokens, stats.logp, stats.entropy, divergence, fused=fused)
    has_entropy = tokens.rules.has_entropy
    run(token_batch, loss, selection, gradients=any(call.wants), has_entropy=has_entropy, every_row=every_row)
    if every_row and tokens.scored is not None:  # rows that do not count were computed too
        for x in (stats.logp, stats.entropy, *([] if divergence is None else [divergence])):
            x.copy_(torch.where(tokens.scored, x, 0.0))
    value, measured = loss.value_and_metrics()
    others = []
    if mask is not None:
        others.append(token_batch.mask_sums())
    if token_batch.pairs is not None:
        others.append(token_batch.pairs.sums())
    if isinstance(teacher, TopKHead) and teacher.mass is not None:
        counted = teacher.mass if tokens.scored is None else torch.where(tokens.scored, teacher.mass, 0.0)
        others.append(counted.sum()[None])
    numbers = torch.cat([x.to(value.dtype) for x in others]) if others else value.new_empty(0)
    # The record has copies of its own, and a caller may change what it gets.
    results = value, stats.logp.view(shape), stats.entropy.view(shape), measured, numbers
    return results if divergence is None else (*results, divergence.view(shape).clone())


def fused_objective(batch: Batch, tokens: Tokens, dtype: torch.dtype) -> Optional[tuple[Operation, ObjectiveInputs]]:
    """Returns the backend's operation for this loss, and what it receives; None where there is none."""
    operation = get_backend(batch.backend).objective
    if operation is None or not has_kernel(batch.config, tokens.rules, dtype):
        return None
    return operation, objective_inputs(tokens, batch.tokens.group_index, batch.num_groups)


def _measured_shape(batch: Batch, dtype: torch.dtype) -> tuple[int, ...]:
    """Returns the shape of what metrics are computed from."""
    rules = rules_of(batch.tokens, batch.config, batch.per_sequence, batch.has_teacher)
    is_fused = get_backend(batch.backend).objective is not None and has_kernel(batch.config, rules, dtype)
    return batch.measured_shape(is_fused=is_fused)


def _computes_every_row(call: LossCall, device: torch.device) -> bool:
    """Returns whether nothing is read back to the host, so that no row is left out."""
    config, inputs = call.batch.config, call.batch.tokens
    sparse = config.sparse_backward is not None
    if sparse:
        refuse_capture(device, "sparse_backward", "the number of entries")
    if config.static_shapes or is_capturing(device):
        return True
    # Which rows; lengths; how many entries.
    reads_anyway = inputs.allowed_counts is not None or inputs.cu_seqlens is not None or sparse
    return device.type != "cpu" and call.batch.shape.numel() <= _WEIGHT_BOUND_TOKENS and not reads_anyway


def loss_from_logits(logits: Tensor, call: LossCall, *, inplace: bool) -> tuple[Tensor, ...]:
    """Returns the results of `loss_from_hidden` from logits (B, T, V) or (N, V); the loss is differentiable in them.

    inplace: the gradient overwrites the logits, if their memory allows it.
    """
    return compute_in_forward(
        "grpo_loss_from_logits", partial(_compute_from_logits, call=call, inplace=inplace), logits
    )


@hide_from_dispatch_modes
def _compute_from_logits(
    logits: Tensor, *, call: LossCall, inplace: bool
) -> tuple[tuple[Tensor, ...], PrecomputedGradients]:
    """Returns (results, gradients). Every row is computed where it lies: nothing is copied, and a row that cannot have
    a gradient gets zeros."""
    inputs, kernels = TokenInputs(*materialized(*call.batch.tokens)), get_backend(call.batch.backend)
    flat = materialized(logits.detach())[0].reshape(-1, logits.shape[-1])
    reused = inplace and flat.data_ptr() == logits.data_ptr() and flat.stride(-1) == 1
    reused = reused and (flat.stride(0) >= flat.shape[1] or flat.shape[0] <= 1)  # rows that share memory cannot
    writes = any(call.wants) or inputs.allowed_ids is not None  # gradients; -inf for ids that were not kept
    if (writes and not reused) or flat.stride(-1) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    config, dtype = call.batch.config, statistics_dtype(logits.dtype)
    assert call.completion_ids is not None
    tokens = plan(inputs, call.completion_ids, config, dtype, per_sequence=call.batch.per_sequence)
    if any(call.wants) and tokens.scored is not None:
        _clear_rows(flat, ~tokens.scored)  # padding may hold NaN, which no coefficient of 0 would hide
    head = GivenLogits(flat, kernels)
    results = _loss_of_head(head, tokens, inputs, call, every_row=True)
    if any(call.wants) and reused:
        torch.autograd.graph.increment_version(logits)
    gradient = flat.view(logits.shape) if any(call.wants) else None
    return results, PrecomputedGradients([gradient], [logits.dtype], kernels, [head.gradient_scale])


def _clear_rows(x: Tensor, is_cleared: Tensor) -> None:
    """Sets rows of x (N, V) to 0, is_cleared (N,) bool. Other rows are not written, except under capture, where all
    are."""
    if is_capturing(x.device):
        x.masked_fill_(is_cleared[:, None], 0.0)
    else:
        x.index_fill_(0, is_cleared.nonzero().squeeze(1), 0.0)


@torch.library.custom_op(add_op_namespace_prefix("grpo_loss"), mutates_args=())
def grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    tokens: Sequence[Optional[Tensor]],
    num_groups: int,
    per_sequence: bool,
    config_key: str,
    backend: str,
    compute_dtype: Optional[torch.dtype],
    wants: Sequence[bool],
    teacher: str,  # without a default, which torch 2.8 would leave out of the inputs of the backward
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns (loss, logps, entropy, what metrics are computed from, other numbers, divergence, dhidden, dweight,
    dbias).

    `tokens`: completion_ids, then the fields of TokenInputs, then a teacher's tensors. teacher: the rest of it. What is
    not wanted is empty.
    """
    count = 1 + len(TokenInputs._fields)
    batch = _batch_of(hidden.shape[:-1], tokens[1:count], num_groups, per_sequence, config_key, backend)
    check_token_values(TokenInputs(*materialized(*batch.tokens)))  # which are not known while torch.compile traces
    call = LossCall(tokens[0], batch, compute_dtype, wants)
    call = call._replace(teacher=teacher_from_key(teacher, tokens[count:]))
    with torch.no_grad():
        (loss, logps, entropy, *others), gradients = _compute(hidden, weight, bias, call)
    others = others if teacher else [*others, hidden.new_empty(0)]
    results = loss, logps.clone(), entropy.clone(), *others  # the results of an operator share no memory
    for g, scale in zip(gradients.tensors, gradients.scales, strict=True):
        if g is not None and scale is not None:
            g.div_(scale)
    return *results, *(hidden.new_empty(0) if g is None else g for g in gradients.tensors)


def _batch_of(
    shape: torch.Size, tokens: Sequence[Optional[Tensor]], num_groups: int, per_sequence: bool, config_key: str,
    backend: str,
) -> Batch:  # fmt: skip
    """Returns the batch from what an operator receives. shape: of the tokens; tokens: the fields of TokenInputs."""
    inputs, config = TokenInputs(*tokens), config_from_key(config_key)  # type: ignore[arg-type]
    sequences = shape[0] if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
    return Batch(inputs, config, backend, shape, sequences, num_groups, None, per_sequence)


@grpo_loss.register_fake
def _(hidden, weight, bias, tokens, num_groups, per_sequence, config_key, backend, compute_dtype, wants, teacher=""):
    shape, dtype, f = hidden.shape[:-1], statistics_dtype(compute_dtype or hidden.dtype), hidden.new_empty
    token_fields = tokens[1 : 1 + len(TokenInputs._fields)]
    batch = _batch_of(shape, token_fields, num_groups, per_sequence, config_key, backend)
    head_inputs = (hidden, weight, weight if bias is None else bias)
    return (
        f((), dtype=dtype),
        f(shape, dtype=dtype),
        f(shape, dtype=dtype),
        f(3 if tokens[0] is None else _measured_shape(batch, dtype), dtype=dtype),
        f(sum(batch.others.values()) + knows_mass(teacher), dtype=dtype),
        f(shape, dtype=dtype) if teacher else f(0),
        *(
            x.new_empty(x.shape, dtype=held_dtype(x.dtype)) if want else f(0)
            for x, want in zip(head_inputs, wants, strict=True)
        ),
    )


def _hand_out_gradients(operator: Any, name: str, count: int) -> None:
    """Registers a backward that returns an operator's own results as the gradients of its first `count` inputs.

    The operator's first result is the loss, its last `count` are the gradients; behind these inputs comes a list of
    tensors. name: of the public function, for errors.
    """

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
        return *(scaled_copy(x, g_loss, dtype) if want else None for x, dtype, want in gradients), *ctx.others

    operator.register_autograd(hand_out, setup_context=save)


_hand_out_gradients(grpo_loss, "fused_grpo_loss", 3)


@torch.library.custom_op(add_op_namespace_prefix("grpo_loss_from_logps"), mutates_args=())
def loss_from_logps(
    logps: Tensor,
    entropy: Tensor,
    tokens: Sequence[Optional[Tensor]],
    num_groups: int,
    per_sequence: bool,
    config_key: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (loss, what metrics are computed from, d loss / d logps, d loss / d entropy), all O(N) and in float32 or
    better."""
    inputs, config, dtype = (
        TokenInputs(*materialized(*tokens)),
        config_from_key(config_key),
        statistics_dtype(logps.dtype),
    )
    check_offsets(inputs.cu_seqlens, logps.numel())
    check_token_values(inputs)
    with torch.no_grad():
        planned = plan(inputs, logps, config, dtype, per_sequence=per_sequence)
        logp, entropy_nats = (x.detach().reshape(-1).to(dtype) for x in materialized(logps, entropy))
        logp = torch.where(entropy_nats.isnan(), torch.nan, logp)
        if planned.scored is not None:
            logp, entropy_nats = (torch.where(planned.scored, x, 0.0) for x in (logp, entropy_nats))
        count = planned.sequences.count
        batch = Batch(inputs, config, backend, logps.shape, count, num_groups, None, per_sequence)
        loss = GRPOLoss(planned, logp, entropy_nats, fused=fused_objective(batch, planned, dtype))
        gradients = loss.gradients()
        value, measured = loss.value_and_metrics()
    return value, measured, *(g.reshape(logps.shape).clone() for g in gradients)


@loss_from_logps.register_fake
def _(logps, entropy, tokens, num_groups, per_sequence, config_key, backend):
    f, dtype = logps.new_empty, statistics_dtype(logps.dtype)
    batch = _batch_of(logps.shape, tokens, num_groups, per_sequence, config_key, backend)
    return (
        f((), dtype=dtype),
        f(_measured_shape(batch, dtype), dtype=dtype),
        f(logps.shape, dtype=dtype),
        f(logps.shape, dtype=dtype),
    )


_hand_out_gradients(loss_from_logps, "grpo_loss_from_logps", 2)

"""The divergence to a teacher's distribution as a loss of its own, without the (N, V) logits of either."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from .checks.arguments import check_by_table, check_lm_head, num_sequences_of, refuse_transforms
from .checks.plain import full_weight
from .config import GRPOConfig
from .head.logps_op import LogpsCall, logps_from_hidden
from .head.shared import is_capturing, requires_grad_flags
from .head.vocab_parallel import broadcast_failure, check_group, exchange_and_check
from .inputs import agreed, check_logps_inputs
from .loss import fused_grpo_loss
from .names import Divergence
from .objective.aggregation import Aggregation
from .teacher import Teacher, TopKTeacher

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False, repr=False)
class DistillationOutput:
    """loss: scalar, differentiable. divergence, entropy (of the policy; over the K ids of a TopKTeacher with mode
    "renormalize"): (B, T) or (N,) nats, detached, 0 where masked.
    metrics: name -> scalar, means over unmasked tokens: "divergence", "entropy", and of K ids "divergence/mass", the
    teacher's probability of them, where it is known."""

    loss: Tensor
    divergence: Tensor
    entropy: Tensor
    metrics: dict[str, Tensor]

    def __repr__(self) -> str:
        return f"DistillationOutput(loss={self.loss}, divergence of {tuple(self.divergence.shape)})"


def fused_distillation_loss(
    hidden: Tensor,
    lm_head_weight: Tensor,
    teacher: Teacher | TopKTeacher,
    *,
    completion_mask: Tensor | None = None,
    divergence: Divergence = "reverse_kl",
    divergence_beta: float | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    lm_head_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    aggregation: Aggregation = "token_mean",
    normalizer: Tensor | float | None = None,
    max_completion_length: int | None = None,
    logits_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    accumulate_into: Tensor | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    backend: str = "auto",
) -> DistillationOutput:
    """Computes the mean divergence of the policy's distribution p and the teacher's q over the whole vocabulary,
    or on K ids of each token, forward and backward in one pass: over all ids 6 NHV + 2 NH'V operations, and a chunk of
    both logits in memory; on K ids see `Teacher` and `TopKTeacher`.

        reverse_kl  sum p log(p / q)        forward_kl  sum q log(q / p)
        jsd         b KL(q|m) + (1 - b) KL(p|m), m = (1 - b) p + b q, b = divergence_beta: GKD, arXiv:2306.13649

    Shapes, types and the other arguments as in `fused_grpo_loss`; aggregation, max_completion_length, logits_dtype
    and chunk_rows as in `GRPOConfig`: on a CPU that multiplies bfloat16, logits_dtype=torch.float32 takes the
    rounding of logits out of the divergence of distributions that are close. With rewards beside it:
    `fused_grpo_loss(..., teacher=teacher)`. Raises as `fused_grpo_loss` does. A TopKTeacher with mode "renormalize"
    takes the time and memory of its K ids.

    Example:
        >>> hidden, weight = torch.randn(4, 6, 32, requires_grad=True), torch.randn(100, 32, requires_grad=True)
        >>> teacher = Teacher(torch.randn(4, 6, 64), torch.randn(100, 64))
        >>> out = fused_distillation_loss(hidden, weight, teacher, divergence="forward_kl")
        >>> out.loss.backward()
    """
    # The objective of the GRPO loss with advantages of 0, whose sampled ids do not matter.
    name, group, mask = "fused_distillation_loss", vocab_parallel_group, None
    if group is not None:
        check_group(group)
    with nullcontext() if group is None else broadcast_failure(group, hidden):
        config = GRPOConfig(
            surrogate="reinforce", kl_estimator="none", aggregation=aggregation, distill_coef=1.0,
            divergence=divergence, divergence_beta=divergence_beta, temperature=temperature, logit_scale=logit_scale,
            logit_softcap=logit_softcap, max_completion_length=max_completion_length, logits_dtype=logits_dtype,
            chunk_rows=chunk_rows,
        )  # fmt: skip
        bias = full_weight(lm_head_bias) if group is None else lm_head_bias
        ids = _some_ids(name, hidden, None)
        sequences = num_sequences_of(ids, cu_seqlens)
        if group is not None and bias is not None:
            check_lm_head(name, hidden, lm_head_weight, bias)
    whole_bias = bias if group is None or bias is None else _gathered_bias(group, hidden, lm_head_weight, bias)
    ids = _some_ids(name, hidden, whole_bias)
    if isinstance(teacher, TopKTeacher) and teacher.mode == "renormalize" and teacher.ids.device == hidden.device:
        if is_capturing(hidden.device) or torch.compiler.is_compiling():
            raise ValueError(
                "teacher has mode 'renormalize', and the number of its ids is read; call fused_distillation_loss "
                "outside of torch.compile and of the capture of a CUDA graph"
            )
        mask = teacher.sampling_mask  # nothing needs the logits of other ids
        ids = _some_own_ids(teacher, ids, whole_bias)
    out = fused_grpo_loss(
        hidden, lm_head_weight, ids, hidden.new_zeros(sequences, 1, dtype=torch.float32), teacher=teacher,
        completion_mask=completion_mask, lm_head_bias=bias, cu_seqlens=cu_seqlens, normalizer=normalizer,
        accumulate_into=accumulate_into, backend=backend, config=config, sampling_mask=mask,
        vocab_parallel_group=group,
    )  # fmt: skip
    assert out.divergence is not None and out.entropy is not None
    metrics = {name: x for name, x in out.metrics.items() if name == "entropy" or name.startswith("divergence")}
    return DistillationOutput(out.loss, out.divergence, out.entropy, metrics)


def fused_divergence(
    hidden: Tensor,
    lm_head_weight: Tensor,
    teacher: Teacher | TopKTeacher,
    *,
    completion_mask: Tensor | None = None,
    divergence: Divergence = "reverse_kl",
    divergence_beta: float | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    lm_head_bias: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    backend: str = "auto",
) -> Tensor:
    """Returns the divergence of each token, (B, T) or (N,) float32 (float64 from float64) nats, 0 at masked positions,
    for losses of one's own. Differentiable: the backward computes the logits again, which `fused_distillation_loss`
    does not; under torch.compile the whole forward. Arguments as there, logits_dtype among them; temperature may be a
    number, or one value per token or sequence."""

    def check(weight: Tensor, bias: Tensor | None) -> LogpsCall:
        config = GRPOConfig(
            distill_coef=1.0, divergence=divergence, divergence_beta=divergence_beta, logits_dtype=logits_dtype
        )
        ids = _some_ids("fused_divergence", hidden, bias if vocab_parallel_group is None else None)
        return check_logps_inputs(
            "fused_divergence", hidden, weight, bias, ids=ids, mask=completion_mask, entropy=True,
            transform=(temperature, logit_scale, logit_softcap), backend=backend, teacher=teacher, divergence=config,
            logits_dtype=logits_dtype,
        )  # fmt: skip

    weight, bias, call = agreed(vocab_parallel_group, (hidden, lm_head_weight, lm_head_bias), check)
    return cast(Tensor, logps_from_hidden(hidden, weight, bias, call)[2])


def divergence_of_beta(beta: float) -> dict[str, Any]:
    """Returns TRL's and Liger's beta as options of these functions: 0: forward KL, 1: reverse KL, between them: JSD."""
    ends = {0.0: "forward_kl", 1.0: "reverse_kl"}
    return {"divergence": ends[beta]} if beta in ends else {"divergence": "jsd", "divergence_beta": float(beta)}


def _some_ids(function: str, hidden: Tensor, bias: object) -> Tensor:
    """Returns ids of the shape of the tokens, on which the divergence does not depend. The id with the largest
    bias: one that a bias of -inf excludes would bring its log-probability into the loss."""
    refuse_transforms(function, hidden)
    check_by_table("hidden", hidden, {})
    if not _is_bias(bias):
        return torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    return bias.detach().argmax().expand(hidden.shape[:-1])


def _gathered_bias(group: ProcessGroup, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns the bias (V,) of all ranks."""
    found = exchange_and_check(group, hidden, weight, bias, requires_grad_flags(hidden, weight, bias), ())
    parts = found.gather(pad(bias.detach(), (0, max(found.sizes) - len(bias))))
    return torch.cat([part[:size] for part, size in zip(parts, found.sizes, strict=True)])


def _some_own_ids(teacher: TopKTeacher, ids: Tensor, bias: object) -> Tensor:
    """Returns `_some_ids` among the teacher's own, so that they belong to its sampling mask."""
    if teacher.ids.shape[:-1] != ids.shape:
        return ids  # refused below
    scores = torch.zeros(teacher.ids.shape, device=ids.device)
    if _is_bias(bias):
        scores = bias.detach()[teacher.ids.clamp(0, len(bias) - 1)]
    best = scores.masked_fill(teacher.ids < 0, -torch.inf).argmax(-1, keepdim=True)
    return teacher.ids.gather(-1, best).squeeze(-1).clamp(min=0)


def _is_bias(x: object) -> TypeGuard[Tensor]:
    """Returns whether this argument may be one; the checks refuse other values before anything is computed."""
    return isinstance(x, Tensor) and x.dim() == 1 and x.numel() > 0 and x.is_floating_point()

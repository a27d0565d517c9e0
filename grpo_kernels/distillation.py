"""The divergence to a teacher's distribution as a loss of its own, without the (N, V) logits of either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .checks.arguments import check_accumulate_into, check_lm_head, check_logits_dtype, num_sequences_of
from .checks.table import LossOptions
from .config import GRPOConfig
from .head.logps_op import LogpsCall, logps_from_hidden
from .head.loss_op import LossCall, loss_from_hidden
from .head.shared import is_capturing, requires_grad_flags
from .inputs import agreed, check_logps_inputs, check_loss_inputs
from .names import Divergence
from .objective.aggregation import Aggregation
from .teacher import Teacher, TopKTeacher, check_teacher, combined_teachers

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
    teacher: Teacher | TopKTeacher | Sequence[Teacher],
    *,
    teacher_of: Tensor | None = None,
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
    name = "fused_distillation_loss"

    def check(weight: Tensor, bias: Tensor | None) -> LossCall:
        config = GRPOConfig(
            surrogate="reinforce", kl_estimator="none", aggregation=aggregation, distill_coef=1.0,
            divergence=divergence, divergence_beta=divergence_beta, temperature=temperature, logit_scale=logit_scale,
            logit_softcap=logit_softcap, max_completion_length=max_completion_length, logits_dtype=logits_dtype,
            chunk_rows=chunk_rows,
        )  # fmt: skip
        compute_dtype, _ = check_lm_head(name, hidden, weight, bias)
        dtype = compute_dtype or hidden.dtype
        check_logits_dtype(logits_dtype, dtype)
        if accumulate_into is not None:
            check_accumulate_into(accumulate_into, weight)
        teachers = combined_teachers(teacher, teacher_of, hidden, cu_seqlens)
        check_teacher(teachers, config, hidden, weight, dtype)
        mask = None
        if isinstance(teacher, TopKTeacher) and teacher.mode == "renormalize":
            if is_capturing(hidden.device) or torch.compiler.is_compiling():
                raise ValueError(
                    "teacher has mode 'renormalize', and the number of its ids is read; call fused_distillation_loss "
                    "outside of torch.compile and of the capture of a CUDA graph"
                )
            mask = teacher.sampling_mask  # nothing needs the logits of other ids
        options: LossOptions = {
            "completion_mask": completion_mask, "cu_seqlens": cu_seqlens, "normalizer": normalizer, "backend": backend
        }  # fmt: skip
        like = hidden[..., 0]  # of the shape of the tokens
        advantages = hidden.new_zeros(num_sequences_of(like, cu_seqlens), 1, dtype=torch.float32)
        batch = check_loss_inputs(advantages, mask, options, config, like, "hidden", dtype, teacher=teachers)
        return LossCall(
            None, batch, compute_dtype, requires_grad_flags(hidden, weight, bias), accumulate_into, teacher=teachers
        )

    weight, bias, call = agreed(vocab_parallel_group, (hidden, lm_head_weight, lm_head_bias), check)
    loss, _, entropy, sums, others, own_divergence = loss_from_hidden(hidden, weight, bias, call)
    total_divergence, total_entropy, count = sums.unbind()
    metrics = {"entropy": total_entropy / count.clamp(min=1), "divergence": total_divergence / count.clamp(min=1)}
    if len(mass := others[sum(call.batch.others.values()) :]):
        metrics["divergence/mass"] = mass[0] / count.clamp(min=1)
    return DistillationOutput(loss, own_divergence, entropy, metrics)


def fused_divergence(
    hidden: Tensor,
    lm_head_weight: Tensor,
    teacher: Teacher | TopKTeacher | Sequence[Teacher],
    *,
    teacher_of: Tensor | None = None,
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
        return check_logps_inputs(
            "fused_divergence", hidden, weight, bias, ids=None, mask=completion_mask, entropy=True,
            transform=(temperature, logit_scale, logit_softcap), backend=backend, teacher=teacher,
            teacher_of=teacher_of, divergence=config, logits_dtype=logits_dtype,
        )  # fmt: skip

    weight, bias, call = agreed(vocab_parallel_group, (hidden, lm_head_weight, lm_head_bias), check)
    return cast(Tensor, logps_from_hidden(hidden, weight, bias, call)[2])


def divergence_of_beta(beta: float) -> dict[str, Any]:
    """Returns TRL's and Liger's beta as options of these functions: 0: forward KL, 1: reverse KL, between them: JSD."""
    ends = {0.0: "forward_kl", 1.0: "reverse_kl"}
    return {"divergence": ends[beta]} if beta in ends else {"divergence": "jsd", "divergence_beta": float(beta)}

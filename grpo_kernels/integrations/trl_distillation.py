"""TRL's DistillationTrainer with the fused divergence: `FusedDistillationTrainer`, and what `patch_trl` puts in place.

A local teacher's distribution over the whole vocabulary, in one pass over each chunk of both models' logits. Sampling
and logging are TRL's own code.
"""

from __future__ import annotations

import types
from typing import Any

from .trl import _head_options  # first, since it says which TRL is needed where that one is not installed

# isort: split
import trl.trainer.distillation_trainer as trl_distillation
from torch import Tensor
from trl import DistillationTrainer

from ..checks.plain import gather_dtensor
from ..distillation import divergence_of_beta, fused_distillation_loss
from ..teacher import Teacher

LOSS = "_chunked_divergence_loss"  # of TRL's module, held by the tests for each release


def divergence_loss(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes what TRL's function of the same arguments does: (loss (), sum of the student's entropies (), number of
    tokens ()).

    beta: 0 is forward_kl, 1 reverse_kl, between them jsd.
    """
    teacher = Teacher(
        teacher_hidden_states.detach(), _detached(teacher_lm_head_weight), _detached(teacher_lm_head_bias),
        logit_scale=teacher_logit_scale, logit_softcap=teacher_final_logit_softcapping,
    )  # fmt: skip
    count = completion_mask.bool().sum()
    normalizer: Any = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    out = fused_distillation_loss(
        student_hidden_states, student_lm_head_weight, teacher, completion_mask=completion_mask,
        temperature=temperature, logit_scale=student_logit_scale, logit_softcap=student_final_logit_softcapping,
        lm_head_bias=student_lm_head_bias, normalizer=normalizer,
        logits_dtype=_head_options.get("logits_dtype"), **divergence_of_beta(beta),
    )  # fmt: skip
    return out.loss, out.entropy.sum(), count


def _detached(x: Tensor | None) -> Any:
    """Returns a tensor without a gradient, and gathered where FSDP2 has sharded it."""
    return None if x is None else gather_dtensor(x.detach())


class FusedDistillationTrainer(DistillationTrainer):  # type: ignore[misc]
    """TRL's DistillationTrainer with its loss computed by `fused_distillation_loss`: the same arguments, configuration
    and logged metrics, any beta."""

    # TRL's method, which finds the loss among the globals of its module, with the one above in its place.
    _compute_loss = types.FunctionType(
        DistillationTrainer._compute_loss.__code__,
        vars(trl_distillation) | {LOSS: divergence_loss},
        "_compute_loss",
        DistillationTrainer._compute_loss.__defaults__,
        DistillationTrainer._compute_loss.__closure__,
    )

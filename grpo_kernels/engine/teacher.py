"""The teacher of a call: a second head, whose logits stand beside those of each chunk, and no third copy of the loop.

A row kernel that finds a teacher's logits in its chunk computes the divergence and adds its gradient to that of the
objective, which costs the teacher's forward product, 2 NH'V. Every scored token has a gradient then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks.arguments import products_dtype
from ..checks.plain import check_gathered
from ..config import GRPOConfig
from ..contract import Backend, Rows, TeacherLogits
from ..teacher import Teacher, TopKTeacher
from .kept import KeptLogits
from .lm_head import LMHead
from .top_k import TopKHead


class TeacherHead:
    """Logits of a teacher, and what its row kernels keep of each token. `weight` (N,): d loss / d divergence."""

    def __init__(self, teacher: Teacher, config: GRPOConfig, backend: Backend, count: int, dtype: torch.dtype) -> None:
        inputs = teacher.hidden, teacher.weight, teacher.bias
        check_gathered("Teacher.weight", teacher.weight)  # it may have been released since the forward
        compute_dtype, logits_dtype = products_dtype(*inputs), config.logits_dtype
        if logits_dtype is not None:  # of the policy: float32, or its own type, which need not be the teacher's
            logits_dtype = logits_dtype if logits_dtype.itemsize > 2 else None
        self.head = LMHead(inputs, backend, compute_dtype=compute_dtype, logits_dtype=logits_dtype, chunk_rows=1)
        self.params = config.teacher_params(teacher)
        self.offset = torch.zeros(count, dtype=dtype, device=teacher.hidden.device)
        self.lse = self.offset.new_zeros(count, dtype=torch.float64)
        self.weight = torch.zeros_like(self.offset)

    @property
    def logits_dtype(self) -> torch.dtype:
        return self.head.logits_dtype

    def beside(self, head: Any, rows: Rows) -> TeacherLogits:
        """For the rows whose logits `head`, an LMHead, has just computed."""
        logits = self.head.logits(rows, head.scratch.teacher_logits(rows.count))
        return TeacherLogits(logits, self.head.folded_bias, self.params, self.weight, self.offset, self.lse)


class KeptTeacher(TeacherHead):
    """The ids of a TopKTeacher where they are a token's sampling mask: its log-probabilities beside the kept logits."""

    def __init__(self, top_k: TopKHead, head: KeptLogits, temperature: Tensor) -> None:
        self.params, self.weight = top_k.params, top_k.weight
        self.offset, self.lse = torch.zeros_like(top_k.weight), torch.zeros_like(top_k.mass)
        # A row kernel divides by the temperature again.
        log_q = (top_k.log_q * temperature.double()[:, None])[head.index]
        self._logits = head.matrices_of(log_q[top_k.used[head.index]], -torch.inf)

    def beside(self, head: Any, rows: Rows) -> TeacherLogits:
        return TeacherLogits(self._logits[id(rows)], None, self.params, self.weight, self.offset, self.lse)


def new_teacher(
    teacher: Teacher | TopKTeacher | None, config: GRPOConfig, backend: Backend, count: int, dtype: torch.dtype
) -> TeacherHead | TopKHead | None:
    """What the engine keeps of a teacher, for so many tokens with values in `dtype`."""
    if teacher is None:
        return None
    if isinstance(teacher, Teacher):
        return TeacherHead(teacher, config, backend, count, dtype)
    return TopKHead(teacher, config.teacher_params(None), dtype)

"""The table of the compiled CPU kernels (csrc/cpu), which run in torch's number of threads."""

from __future__ import annotations

import os
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from ...names import DIVERGENCES
from ..operations import (
    AllowedIdRows,
    Backend,
    GatheredIds,
    LogitChunk,
    SparseRows,
    SparseRule,
    TeacherLogits,
    TokenIdPairs,
    TokenMask,
    contiguous_rows,
)
from ..torch.backend import TORCH
from .base import matrix, row_arguments, version_problem, why_not_built


class CpuKernels:
    """The functions of the compiled module as operations."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def statistics(self, chunk: LogitChunk) -> None:
        teacher = _NO_TEACHER if chunk.teacher is None else _teacher(chunk.teacher)
        self.module.stats(*row_arguments(chunk), *teacher, torch.get_num_threads())

    def gradient(self, chunk: LogitChunk, dlogp: Tensor, dentropy: Tensor, out: Tensor) -> None:
        teacher = _NO_TEACHER if chunk.teacher is None else _teacher(chunk.teacher)
        self.module.gradient(*row_arguments(chunk, dlogp, dentropy, out), *teacher, torch.get_num_threads())

    def sparse_gradient(
        self, chunk: LogitChunk, dlogp: Tensor, dentropy: Tensor, rule: SparseRule, out: SparseRows
    ) -> None:
        rows, capacity = row_arguments(chunk, dlogp, dentropy), out.ids.shape[1]
        self.module.sparse_gradient(*rows, *out, capacity, *rule, torch.get_num_threads())

    def allowed_ids(
        self, mask: TokenMask, sampled: Tensor, local_vocab: range, vocab_size: int, out: AllowedIdRows
    ) -> None:
        (rows, ids), token_of, columns, added = out
        self.module.allowed_ids(
            mask.ids, mask.ids.dtype == torch.int64, len(mask.ids), mask.ends, sampled, local_vocab.start,
            len(local_vocab), vocab_size, rows.start, rows.index, *ids.shape, ids, token_of, columns, added,
            torch.get_num_threads(),
        )  # fmt: skip

    def gathered_logits(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, gathered: GatheredIds, logits: Tensor
    ) -> None:
        self.module.gathered_logits(*_gathered(hidden, weight, bias, gathered), logits, torch.get_num_threads())

    def gathered_dhidden(self, dlogits: Tensor, weight: Tensor, gathered: GatheredIds, dhidden: Tensor) -> None:
        gathered_args = _gathered(None, weight, None, gathered)
        self.module.gathered_dhidden(*gathered_args, dlogits, *matrix(dhidden), False, torch.get_num_threads())

    def gathered_dweight(
        self, dlogits: Tensor, hidden: Tensor, pairs: TokenIdPairs, dweight: Tensor, *, add: bool
    ) -> None:
        self.module.gathered_dweight(
            *matrix(contiguous_rows(hidden)), *pairs, dlogits, dlogits.numel(), *dweight.shape, *matrix(dweight), add,
            torch.get_num_threads(),
        )  # fmt: skip


_NO_TEACHER = None, 0, 0, None, 0, 0.0, 1.0, 0.0, None, None, None, None


def _teacher(teacher: TeacherLogits) -> tuple[object, ...]:
    """Returns the fields of gk::TeacherArgs."""
    kind, *numbers = teacher.transform
    return (
        *matrix(teacher.logits), teacher.bias, DIVERGENCES.index(kind), *numbers, teacher.weight, teacher.divergence,
        teacher.policy_kl, teacher.lse,
    )  # fmt: skip


def _gathered(hidden: Tensor | None, weight: Tensor, bias: Tensor | None, gathered: GatheredIds) -> tuple[object, ...]:
    """Returns the fields of gk::GatheredArgs."""
    hidden, weight = None if hidden is None else contiguous_rows(hidden), contiguous_rows(weight)
    return (
        hidden, 0 if hidden is None else hidden.stride(0), *matrix(weight), weight.shape[1], bias, gathered.rows.start,
        gathered.rows.index, *gathered.ids.shape, gathered.ids,
    )  # fmt: skip


def load() -> tuple[Backend | None, str]:
    """Returns (table, "") or (None, the reason why the compiled kernels cannot be used)."""
    module, reason = compiled_module()
    if module is None:
        return None, reason
    kernels = CpuKernels(module)
    table = replace(
        TORCH,
        name="cpu",
        statistics=kernels.statistics,
        gradient=kernels.gradient,
        sparse_gradient=kernels.sparse_gradient,
        allowed_ids=kernels.allowed_ids,
        gathered_logits=kernels.gathered_logits,
        gathered_dhidden=kernels.gathered_dhidden,
        gathered_dweight=kernels.gathered_dweight,
    )
    return table, ""


# What torch says of the processor -> the instruction sets of ours that it has, the best one first.
ISAS = {"AVX512": ("avx512", "avx2"), "AVX2": ("avx2",)}


def usable_isas() -> tuple[str, ...]:
    """Returns the instruction sets that this processor has, the best one first."""
    return (*ISAS.get(torch.backends.cpu.get_cpu_capability(), ()), "baseline")


def choose_isa(module: ModuleType) -> None:
    """Makes the kernels take the best instruction set, or GRPO_KERNELS_CPU_ISA, which has to be a usable one."""
    wanted, usable = os.environ.get("GRPO_KERNELS_CPU_ISA"), usable_isas()
    names = [name for name in usable if wanted in (None, "", name)]
    if not any(map(module.set_cpu_isa, names)):
        raise ValueError(
            f"GRPO_KERNELS_CPU_ISA: instruction set {wanted!r} is unknown or not available here; usable: "
            f"{', '.join(usable)}"
        )


def compiled_module() -> tuple[ModuleType | None, str]:
    """Returns (grpo_kernels._cpu, "") or (None, why it cannot be used). It never raises: another backend does the work
    then."""
    try:
        from ... import _cpu  # type: ignore[attr-defined]  # compiled; may be absent

        if problem := version_problem(_cpu, "CPU"):
            return None, problem
        choose_isa(_cpu)
    except (ImportError, ValueError) as error:
        return None, f"the compiled CPU kernels cannot be used: {why_not_built('_cpu') or error}"
    return _cpu, ""

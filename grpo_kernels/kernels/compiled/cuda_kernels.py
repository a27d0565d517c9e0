"""The functions of the compiled CUDA module (csrc/cuda) as operations, on the current stream of a device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from ..fused_objective import ESTIMATORS, SURROGATES, ObjectiveInputs, memory_of_sums
from ..operations import (
    Backend,
    HeadChunk,
    LogitChunk,
    Rows,
    RowScales,
    chunk_row_stride,
    contiguous_rows,
    multiplies_by_tma,
    rows_for_tma,
)
from .base import DTYPES, matrix, row_arguments

OLDEST_CAPABILITY = 80


class CudaKernels:
    """The operations of a compiled module, whose kernels know no teacher. The tests' emulator is a module of the same
    names for tensors on the CPU."""

    def __init__(self, module: ModuleType, device_type: str = "cuda") -> None:
        self.module = module
        self.device_type = device_type

    def over(self, others: Backend) -> Backend:
        """Returns the table of these operations, and of `others` for what the module lacks: where it has no fused
        products, theirs."""
        self.others = others
        return replace(
            others, name="cuda", statistics=self.statistics, gradient=self.gradient, objective=self.objective,
            scale=self.scale, scale_rows=self.scale_rows, exponentials=self.exponentials,
            fused_exponentials=self.fused_exponentials, fused_logp=self.fused_logp, fused_products=self.fused_products,
            takes_teachers=False, unavailable_reason=self.unavailable_reason,
        )  # fmt: skip

    def call(self, function: Callable[..., None], device: torch.device, *arguments: object) -> None:
        """Calls a function of the module on the device's current stream. The thread's current device need not be the
        tensors'."""
        if device.type != self.device_type:
            raise ValueError(f"backend 'cuda' serves tensors on {self.device_type}, got one on {device}")
        with _on(device):
            function(*arguments, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)

    def statistics(self, chunk: LogitChunk) -> None:
        self.call(self.module.stats, chunk.logits.device, *row_arguments(chunk))

    def gradient(self, chunk: LogitChunk, dlogp: Tensor, dentropy: Tensor, out: Tensor) -> None:
        self.call(self.module.gradient, chunk.logits.device, *row_arguments(chunk, dlogp, dentropy, out))

    def exponentials(self, chunk: LogitChunk, head: HeadChunk, out: Tensor) -> RowScales:
        rows, scales = row_arguments(chunk, out=out), RowScales.empty(out)
        self.call(self.module.exponentials, out.device, *rows, *_product(head.hidden, head), *scales)
        return scales

    def objective(
        self, inputs: ObjectiveInputs, logp: Tensor, entropy: Tensor, dlogp: Tensor, rows: Rows | None
    ) -> Tensor | None:
        t, chunk = inputs, rows or Rows(0, 0)
        written = memory_of_sums(inputs) if rows is None else (None, None, None)
        self.call(
            self.module.objective, logp.device, logp, entropy, dlogp, t.advantage, t.dloss_direct, t.dloss_via_ratio,
            t.old, t.ref, t.surrogate_scale, t.rollout, t.rollout_weight, t.scored, chunk.start, chunk.index,
            chunk.count, t.offsets, t.group_index, t.num_sequences, t.num_groups, *written,
            SURROGATES.index(t.surrogate), ESTIMATORS.index(t.kl), *t.numbers,
        )  # fmt: skip
        return written[0]

    def scale(self, x: Tensor, factor: Tensor) -> None:
        self.call(self.module.scale, x.device, x, DTYPES[x.dtype], x.numel(), factor)

    def scale_rows(
        self, x: Tensor, dlogp: Tensor, scales: RowScales, head: HeadChunk, out: Tensor, *, is_product: bool
    ) -> None:
        rows = _head_arguments(head, contiguous_rows(x), dlogp, out)
        sampled = scales.sampled if is_product else None
        self.call(self.module.scale_rows, x.device, *rows, *_product(head.hidden, head), scales.row_scale, sampled)

    # --- products with the softmax in their epilogue --------------------------------------------------------------

    def fused_products(self, hidden: Tensor, weight: Tensor) -> tuple[str, ...]:
        """Returns the fused products that serve: on compute capability 9.0, where they are measured to be faster than
        the library's product; elsewhere those of the other backend."""
        if not self._has_products(weight.device):
            return self.others.fused_products(hidden, weight) if self.others.fused_products else ()
        if not multiplies_by_tma(hidden, weight):
            return ()
        # float16 cannot hold e^(z - z_id); on a CPU rows of exponentials may begin off the alignment.
        aligned = chunk_row_stride(len(weight), weight.device) % 8 == 0
        return ("logp", "exponentials") if weight.dtype == torch.bfloat16 and aligned else ("logp",)

    def fused_logp(self, head: HeadChunk, entropy: bool) -> None:
        """Writes the statistics of a chunk. The entropy comes with the rest, whether it is wanted or not."""
        if self.others.fused_logp and not self._has_products(head.hidden.device):
            return self.others.fused_logp(head, entropy)
        return self._fused(self.module.fused_logp, head)

    def fused_exponentials(self, head: HeadChunk, out: Tensor) -> RowScales:
        if self.others.fused_exponentials and not self._has_products(out.device):
            return self.others.fused_exponentials(head, out)
        scales = RowScales.empty(out)
        self._fused(self.module.fused_exponentials, head, out, *scales)
        return scales

    def _has_products(self, device: torch.device) -> bool:
        with _on(device):
            has_products: bool = self.module.has_products()
        return has_products

    def _fused(
        self, function: Callable[..., None], head: HeadChunk, out: Tensor | None = None, *scales: Tensor
    ) -> None:
        hidden, size = rows_for_tma(head.hidden), (len(head.hidden), len(head.weight))
        device, product = hidden.device, _product(hidden, head)
        with _on(device):
            workspace = torch.empty(self.module.fused_workspace(*size, *product), dtype=torch.uint8, device=device)
            self.call(function, device, *_head_arguments(head, None, None, out), *product, *scales, workspace)

    # --- where they run -------------------------------------------------------------------------------------------

    def unavailable_reason(self, device: torch.device) -> str:
        if device.type != "cuda":
            return ""
        major, minor = torch.cuda.get_device_capability(device)
        capability = 10 * major + minor
        if self.module.image_for(capability):
            return ""
        device_info = f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}"
        if capability < OLDEST_CAPABILITY:
            return f"{device_info}, and the CUDA kernels need {OLDEST_CAPABILITY / 10} or later: use another backend"
        return (
            f"{device_info}, and the CUDA kernels were built for {self.module.built_architectures()}: update the "
            f"driver, or in a clone run GRPO_KERNELS_CUDA_ARCHS={capability} pip install ."
        )


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the thread's current device: the module launches there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _head_arguments(head: HeadChunk, x: Tensor | None, dlogp: Tensor | None, out: Tensor | None) -> tuple[object, ...]:
    """Returns the fields of gk::RowArgs for rows of a head, with x in place of the logits."""
    return (
        *matrix(x), len(head.hidden), len(head.weight), None, head.ids, head.rows.start, head.rows.index,
        head.temperature, *head.stats, dlogp, None, *matrix(out), *head.transform,
    )  # fmt: skip


def _product(hidden: Tensor, head: HeadChunk) -> tuple[object, ...]:
    """Returns the fields of gk::cuda::Product."""
    hidden, weight = contiguous_rows(hidden), contiguous_rows(head.weight)
    bias = None if head.bias is None else head.bias.float()
    return hidden, hidden.stride(0), weight, weight.stride(0), weight.shape[1], DTYPES[weight.dtype], bias

"""The compiled CUDA kernels (csrc/cuda), on the device and the current stream of their tensors.

`load()` never raises: where the kernels cannot run the caller gets one sentence of what was found and what helps, and
another backend does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from ..operations import Backend, HeadChunk, LogitChunk, RowGradients, Statistics, chunk_row_stride, contiguous_rows
from ..torch.backend import TORCH
from ..triton import why_unusable
from .base import DTYPES, matrix, row_arguments, version_problem

OLDEST_CAPABILITY = 80
ALIGNED = 256  # an address like those of fresh memory, for asking what would be served there


class CudaKernels:
    """The operations of a compiled module, whose kernels know no teacher. The tests' emulator is a module of the same
    names for tensors on the CPU."""

    def __init__(self, module: ModuleType, device_type: str = "cuda") -> None:
        self.module = module
        self.device_type = device_type

    def over(self, others: Backend) -> Backend:
        """Returns the table of these operations, and of `others` for what the module lacks."""
        return replace(
            others, name="cuda", statistics=self.statistics, gradient=self.gradient, scale=self.scale,
            exponentials=self.exponentials, fused_exponentials=self.fused_exponentials, fused_logp=self.fused_logp,
            fused_products=self.fused_products, takes_teachers=False, unavailable_reason=self.unavailable_reason,
        )  # fmt: skip

    def call(self, function: Callable[..., None], device: torch.device, *arguments: object) -> None:
        """Kernels go to the current stream of the thread's current device, which need not be the tensors' own."""
        if device.type != self.device_type:
            raise ValueError(f"backend 'cuda' serves tensors on {self.device_type}, got one on {device}")
        if device.type != "cuda":
            function(*arguments, 0)
            return
        with torch.cuda.device(device):
            function(*arguments, torch.cuda.current_stream(device).cuda_stream)

    def statistics(self, chunk: LogitChunk) -> None:
        self.call(self.module.stats, chunk.logits.device, *row_arguments(chunk))

    def gradient(self, chunk: LogitChunk, dlogp: Tensor, dentropy: Tensor, out: RowGradients) -> None:
        self.call(self.module.gradient, chunk.logits.device, *row_arguments(chunk, dlogp, dentropy, out))

    def exponentials(self, chunk: LogitChunk, head: HeadChunk, out: Tensor) -> Tensor:
        unit = torch.empty(len(out), dtype=torch.float32, device=out.device)
        rows = row_arguments(chunk, out=RowGradients(out))
        self.call(self.module.exponentials, out.device, *rows, *_product(head.hidden, head), unit)
        return unit

    def scale(self, x: Tensor, factor: Tensor) -> None:
        self.call(self.module.scale, x.device, x, DTYPES[x.dtype], x.numel(), factor)

    # --- products with the softmax in their epilogue --------------------------------------------------------------

    def fused_products(self, hidden: Tensor, weight: Tensor) -> tuple[str, ...]:
        """They are for compute capability 9.0, where they are measured to be faster than the library's product."""
        if hidden.dtype != weight.dtype or weight.dtype not in DTYPES or weight.stride(-1) != 1:
            return ()
        # Hidden states and exponentials are not there yet: they get memory that is aligned.
        count, (vocab, width) = hidden.numel() // hidden.shape[-1], weight.shape
        product = ALIGNED, width, weight.data_ptr(), weight.stride(0), width, DTYPES[weight.dtype], None
        wanted = {"fused_logp": (0, 0), "fused_exponentials": (ALIGNED, chunk_row_stride(vocab, weight.device))}
        with _on(weight.device):
            return tuple(x for x, at in wanted.items() if self.module.supports_fused(count, vocab, *at, *product))

    def fused_logp(self, head: HeadChunk, entropy: bool) -> Statistics:
        stats = Statistics.empty(len(head.hidden), head.hidden.device)
        if not entropy:
            stats.entropy.zero_()
        self._fused(self.module.fused_logp, head, (*stats[:2], stats.entropy if entropy else None))
        return stats

    def fused_exponentials(self, head: HeadChunk, out: Tensor) -> tuple[Statistics, Tensor]:
        stats = Statistics.empty(len(head.hidden), head.hidden.device)
        unit = torch.empty_like(stats.logp)
        self._fused(self.module.fused_exponentials, head, stats, out, unit)
        return stats, unit

    def _fused(
        self,
        function: Callable[..., None],
        head: HeadChunk,
        stats: tuple[Tensor | None, ...],
        out: Tensor | None = None,
        *unit: Tensor,
    ) -> None:
        hidden, device = head.hidden, head.hidden.device
        size, written = (len(hidden), len(head.weight)), matrix(out)
        with _on(device):
            product = _product(hidden, head)
            # A view that begins, or whose rows begin, off the alignment, or that is expanded.
            if not self.module.supports_fused(*size, written[0], written[2], *product):
                product = _product(torch.empty(hidden.shape, dtype=hidden.dtype, device=device).copy_(hidden), head)
            workspace = torch.empty(self.module.fused_workspace(*size, *product), dtype=torch.uint8, device=device)
            self.call(
                function, device, None, 0, 0, *size, None, head.ids, 0, None, head.temperature, *stats, None, None,
                *written, None, *head.transform, *product, *unit, workspace,
            )  # fmt: skip

    # --- where they run -------------------------------------------------------------------------------------------

    def unavailable_reason(self, device: torch.device) -> str:
        if device.type != "cuda":
            return ""
        major, minor = torch.cuda.get_device_capability(device)
        capability = 10 * major + minor
        if self.module.image_for(capability):
            return ""
        found = f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}"
        if capability < OLDEST_CAPABILITY:
            return f"{found}, and the CUDA kernels need {OLDEST_CAPABILITY / 10} or later: use another backend"
        return (
            f"{found}, and the CUDA kernels were built for {self.module.built_architectures()}: update the driver, "
            f"install the wheel of another CUDA version, or in a checkout run GRPO_KERNELS_CUDA_ARCHS={capability} "
            "pip install ."
        )


def _on(device: torch.device) -> AbstractContextManager[object]:
    """What the module says of a launch is of the thread's current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _product(hidden: Tensor, head: HeadChunk) -> tuple[object, ...]:
    """Returns the fields of gk::cuda::Product."""
    hidden, weight = contiguous_rows(hidden), contiguous_rows(head.weight)
    bias = None if head.bias is None else head.bias.float()
    return hidden, hidden.stride(0), weight, weight.stride(0), weight.shape[1], DTYPES[weight.dtype], bias


# --- whether they can be used ---------------------------------------------------------------------------------------


def load() -> tuple[Backend | None, str]:
    """(backend, "") or (None, the reason why the compiled CUDA kernels cannot be used)."""
    module, reason = compiled_module()
    reason = reason or _why_not_here(module)
    if reason:
        return None, reason
    kernels = CudaKernels(module)
    if why_unusable():
        return kernels.over(TORCH), ""
    from ..triton.backend import TRITON

    return kernels.over(TRITON), ""


def installed() -> bool:
    """Whether this installation has CUDA kernels at all."""
    return find_spec("grpo_kernels._cuda") is not None


def compiled_module() -> tuple[ModuleType | None, str]:
    """(grpo_kernels._cuda, "") or (None, why it cannot be imported); it imports without a driver and without a GPU."""
    if not installed():
        return None, (
            "this installation has no CUDA kernels: install a wheel that has (+cu130, +cu128, +cu126), or build with "
            "GRPO_KERNELS_CUDA=1 pip install ."
        )
    try:
        from ... import _cuda  # type: ignore[attr-defined]  # compiled; may be absent
    except ImportError as error:
        return None, f"the compiled CUDA kernels cannot be imported: {error}"
    problem = version_problem(_cuda, "CUDA")
    return (None, problem) if problem else (_cuda, "")


def _why_not_here(module: ModuleType) -> str:
    """Why no device of this machine can run the kernels, or nothing."""
    if torch.version.hip is not None:
        return f"torch {torch.__version__} is built for AMD GPUs: the CUDA kernels need a build for CUDA"
    driver, built = module.driver_cuda(), module.built_for_cuda()
    if driver == 0:
        return "no NVIDIA driver was found (libcuda.so.1): install one, nvidia-smi shows whether it works"
    if driver // 1000 < built // 1000:  # within a major version older drivers run newer kernels
        older = ", or install the wheel of an older CUDA" if driver >= 12000 else ""
        return (
            f"the kernels are built for CUDA {version(built)} and the driver is for CUDA {version(driver)}: "
            f"update the driver{older}"
        )
    if not torch.cuda.is_available():
        kind = "is built without CUDA" if torch.version.cuda is None else f"with CUDA {torch.version.cuda} sees no GPU"
        return f"torch {torch.__version__} {kind}: python -m torch.utils.collect_env shows what it finds"
    return ""


def version(cuda: int) -> str:
    """12080 -> "12.8"."""
    return f"{cuda // 1000}.{cuda % 1000 // 10}"

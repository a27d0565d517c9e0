"""The compiled CUDA kernels (csrc/cuda), on the device and the current stream of their tensors.

`load()` never raises: where the kernels cannot run the caller gets one sentence of what was found and what helps, and
another backend does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from ...contract import HeadChunk, KeptPairs, RowStats, chunk_row_stride, contiguous_rows
from ...names import INTERFACE
from ..launch import best_first
from ..torch.backend import add_rows
from .base import Argument, CompiledBackend, Result

OLDEST_CAPABILITY = 80
ALIGNED = 256  # an address like those of fresh memory, for asking what would be served there


class CudaBackend(CompiledBackend):
    """CompiledBackend on an NVIDIA GPU. The tests' emulator is a module of the same names with `device_type` "cpu"."""

    name = "cuda"
    takes_teachers = False
    add_rows = staticmethod(add_rows)

    def __init__(self, module: ModuleType, device_type: str = "cuda") -> None:
        super().__init__(module)
        self.device_type = device_type

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

    def call(self, function: Callable[..., Result], device: torch.device, *arguments: object) -> Result:
        """Kernels go to the current stream of the thread's current device, which need not be the tensors' own."""
        if device.type != self.device_type:
            raise ValueError(f"backend {self.name!r} serves tensors on {self.device_type}, got one on {device}")
        if device.type != "cuda":
            return function(*arguments, 0)
        with torch.cuda.device(device):
            return function(*arguments, torch.cuda.current_stream(device).cuda_stream)

    def workspace(self, operation: str, device: torch.device, *sizes: Argument) -> Tensor | None:
        size: int = getattr(self.module, f"{operation}_workspace")(*sizes)
        return torch.empty(size, dtype=torch.uint8, device=device)

    def kept_dweight(self, dlogits: Tensor, hidden: Tensor, pairs: KeptPairs, dweight: Tensor, *, add: bool) -> None:
        hidden = contiguous_rows(hidden)
        given, by_id = self._pairs(dlogits, hidden, pairs, len(dweight)), pairs.by_id(len(dweight))
        self.call(self.module.kept_dweight, hidden.device, given, *by_id, *self._matrix(dweight), add)

    def scale(self, x: Tensor, factor: Tensor) -> None:
        self.call(self.module.scale, x.device, x, self.dtypes[x.dtype], x.numel(), factor)

    # --- products with the softmax in their epilogue --------------------------------------------------------------

    def strategies(self, hidden: Tensor, weight: Tensor) -> tuple[str, ...]:
        if weight.dtype.itemsize != 2 or hidden.dtype != weight.dtype or weight.stride(-1) != 1:
            return ("rows",)
        count, (vocab, width) = hidden.numel() // hidden.shape[-1], weight.shape
        # Hidden states and exponentials are not there yet: they get memory that is aligned.
        head = ALIGNED, width, weight.data_ptr(), weight.stride(0), self.dtypes[weight.dtype], count, width, vocab
        served, row_stride = ["rows"], chunk_row_stride(vocab, weight.device)
        with _on(weight.device):
            if self.module.supports_head(*head, 0, 0):
                served.append("linear")
            # float16 cannot hold e^(z - z_id)
            if weight.dtype == torch.bfloat16 and self.module.supports_head(*head, ALIGNED, row_stride):
                served.append("anchored")
        return best_first("cuda_strategy", tuple(served), weight)

    def linear_logp(self, chunk: HeadChunk, *, entropy: bool) -> RowStats:
        out = RowStats.empty(len(chunk.hidden), chunk.hidden.device)
        if not entropy:
            out.entropy.zero_()
        written = out.logp, out.lse, out.entropy if entropy else None
        self._run_head(self.module.linear_logp, chunk, None, None, 0, None, *written)
        return out

    def anchored(self, chunk: HeadChunk, table: Tensor, exponentials: Tensor) -> tuple[RowStats, Tensor]:
        """The exponentials are bfloat16."""
        out = RowStats.empty(len(chunk.hidden), chunk.hidden.device)
        scale = torch.empty_like(out.logp)
        self._run_head(self.module.anchored, chunk, exponentials, table, table.stride(0), scale, *out)
        return out, scale

    def _run_head(
        self, function: Callable[..., None], chunk: HeadChunk, exponentials: Tensor | None, *given: Argument
    ) -> None:
        """gk::cuda::HeadArgs; `given`: what stands between temperature and params."""
        hidden, weight, bias, ids, temperature, params = chunk
        hidden, bias = contiguous_rows(hidden), None if bias is None else bias.float()
        with _on(hidden.device):
            head = self._head(hidden, weight, exponentials)
            # A view that begins, or whose rows begin, off the alignment, or that is expanded.
            if not self.module.supports_head(*head):
                hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device).copy_(hidden)
                head = self._head(hidden, weight, exponentials)
            self.call(
                function, hidden.device, *head, bias, ids, temperature, *given, self.packed(params),
                self.workspace("head", hidden.device, *head),
            )  # fmt: skip

    def _head(self, hidden: Tensor, weight: Tensor, exponentials: Tensor | None) -> tuple[Argument, ...]:
        """What describes a product."""
        return (
            hidden, hidden.stride(0), weight, weight.stride(0), self.dtypes[weight.dtype], *hidden.shape,
            weight.shape[0], exponentials, 0 if exponentials is None else exponentials.stride(0),
        )  # fmt: skip


def _on(device: torch.device) -> AbstractContextManager[object]:
    """What the module says of a launch is of the thread's current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


# --- whether they can be used ---------------------------------------------------------------------------------------


def load() -> tuple[CudaBackend | None, str]:
    """(backend, "") or (None, the reason why the compiled CUDA kernels cannot be used)."""
    module, reason = compiled_module()
    if module is None:
        return None, reason
    reason = _why_not_here(module)
    return (None, reason) if reason else (CudaBackend(module), "")


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
    if getattr(_cuda, "INTERFACE", None) != INTERFACE:
        return None, "the compiled CUDA kernels are of another version: build again, pip install -e . or make test"
    return _cuda, ""


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

"""The compiled CUDA kernels: whether they can be used here, and their table.

`load()` never raises: where the kernels cannot run the caller gets one sentence of what was found and what helps, and
another backend does the work.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, metadata
from importlib.util import find_spec
from types import ModuleType

import torch

from ..operations import Backend
from ..torch.backend import TORCH
from ..triton import load as load_triton
from .base import version_problem
from .cuda_kernels import CudaKernels


def load() -> tuple[Backend | None, str]:
    """Returns (backend, "") or (None, the reason why the compiled CUDA kernels cannot be used)."""
    module, reason = compiled_module()
    reason = reason if module is None else _why_not_here(module)
    if module is None or reason:
        return None, reason
    return CudaKernels(module).over(load_triton()[0] or TORCH), ""


def installed() -> bool:
    """Returns whether this installation has CUDA kernels at all."""
    return find_spec("..._cuda", __package__) is not None


def compiled_module() -> tuple[ModuleType | None, str]:
    """Returns (grpo_kernels._cuda, "") or (None, why it cannot be imported); it imports without a driver and without a
    GPU."""
    if not installed():
        wheel = wheel_for(1000 * int((torch.version.cuda or "13").split(".")[0]))
        return None, (
            f"this installation has no CUDA kernels: {f'install {wheel}, or ' if wheel else ''}"
            "run GRPO_KERNELS_CUDA=1 pip install . in a clone"
        )
    try:
        from ... import _cuda  # type: ignore[attr-defined]  # compiled; may be absent
    except ImportError as error:
        return None, f"the compiled CUDA kernels cannot be imported: {error}"
    problem = version_problem(_cuda, "CUDA")
    return (None, problem) if problem else (_cuda, "")


def _why_not_here(module: ModuleType) -> str:
    """Returns why no device of this machine can run the kernels, or ""."""
    if torch.version.hip is not None:
        return f"torch {torch.__version__} is built for AMD GPUs: the CUDA kernels need a build for CUDA"
    driver, built = module.driver_cuda(), module.built_for_cuda()
    if driver == 0:
        return "no NVIDIA driver was found (libcuda.so.1): install one, nvidia-smi shows whether it works"
    if driver // 1000 < built // 1000:  # within a major version older drivers run newer kernels
        wheel = wheel_for(driver) if driver >= 12000 else ""
        return (
            f"the kernels are built for CUDA {version(built)} and the driver is for CUDA {version(driver)}: "
            f"update the driver{wheel and f', or install {wheel}'}"
        )
    if not torch.cuda.is_available():
        kind = "is built without CUDA" if torch.version.cuda is None else f"with CUDA {torch.version.cuda} sees no GPU"
        return f"torch {torch.__version__} {kind}: python -m torch.utils.collect_env shows what it finds"
    return ""


def wheel_for(cuda: int) -> str:
    """Returns the wheel for a driver or torch of this CUDA version (12080) and the command that installs it; "" where
    the package's metadata does not say where wheels are (tools/addresses.py)."""
    name = "cu130" if cuda >= 13000 else "cu128"
    try:
        facts = metadata("grpo-kernels")
    except PackageNotFoundError:
        return ""
    (address,) = [url for url in facts.get_all("Project-URL", []) if url.startswith("Wheels, ")] or [""]
    plain, index = facts["Version"].split("+")[0], f"{address.removeprefix('Wheels, ')}{name}/"
    command = f"pip install grpo-kernels=={plain}+{name} --extra-index-url {index}"
    return address and f"the wheel +{name} ({command})"


def version(cuda: int) -> str:
    """Returns the text of a CUDA version: 12080 -> "12.8"."""
    return f"{cuda // 1000}.{cuda % 1000 // 10}"

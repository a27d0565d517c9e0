"""The CUDA kernels on the CPU: built from csrc/cuda as C++, with an emulated GPU underneath. See emulator.h."""

from .build import build_emulated, build_kernels
from .kernels import Kernels

__all__ = ["Kernels", "build_emulated", "build_kernels"]

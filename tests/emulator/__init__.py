"""The CUDA kernels on the CPU: built from csrc/cuda as C++, with an emulated GPU underneath. See emulator.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from grpo_kernels.kernels.compiled.cuda_kernels import CudaKernels
from grpo_kernels.kernels.operations import Backend
from grpo_kernels.kernels.torch.backend import TORCH

from .build import ROOT, build_module, build_sanitized, few_types

__all__ = ["H200", "ROOT", "Emulated", "build_module", "build_sanitized", "few_types", "load"]

H200 = (90, 132, 232448)  # compute capability, multiprocessors, shared memory per block


@dataclass(frozen=True)
class Emulated(Backend):
    """The table of the CUDA backend for tensors on the CPU, on a GPU that tests choose and look at."""

    controls: ctypes.CDLL | None = None

    def use(self, device: Sequence[int] = H200, order: int = 0) -> None:
        """`device`: the first of these numbers, the rest is an H200's; `order`: see emulator.h."""
        numbers = (*device, *H200[len(device) :])
        self.controls.gk_emulator_use((ctypes.c_int * 3)(*numbers), order)

    def largest_grid(self) -> int:
        """Returns the blocks of the largest launch since `use`."""
        return self.controls.gk_emulator_largest_grid()

    def launches(self) -> int:
        """Returns the number of launches since `use`."""
        return self.controls.gk_emulator_launches()

    def longest_cluster(self, rows: int, vocab: int, width: int, any_batch: bool = False) -> float:
        """Returns the longest time of a cluster of a product, in tiles of 128 x 256 and a twentieth for each item."""
        return self.controls.gk_longest_cluster(*map(ctypes.c_int64, (rows, vocab, width)), any_batch)

    def items_cover(self, row_blocks: int, tiles: int, parts: int, group: int) -> bool:
        """Returns whether a schedule of the products has every tile of every row block just once."""
        return self.controls.gk_items_cover(row_blocks, tiles, parts, group)


def load(path: Path) -> Emulated:
    """Returns the backend of a built module. What it lacks is torch's: Triton's interpreter would take long."""
    # Under a name of its own: of two modules with one name pybind11 would give the first again.
    spec = spec_from_file_location(f"{path.parent}._cuda", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    controls = ctypes.CDLL(str(path))
    controls.gk_emulator_largest_grid.restype = controls.gk_emulator_launches.restype = ctypes.c_uint
    controls.gk_items_cover.restype = ctypes.c_bool
    controls.gk_longest_cluster.restype = ctypes.c_double
    return Emulated(**vars(CudaKernels(module, "cpu").over(TORCH)), controls=controls)

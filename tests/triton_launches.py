"""Launches every Triton kernel through Triton's own launcher, on a driver that runs nothing.

    python tests/triton_launches.py FOLDER      JSON: {"module.kernel": [[arguments handed over, parameters], ...]}

FOLDER has driver/triton_libcuda.cpp as libcuda.so.1. The compile gate ends where a kernel is compiled: that the
launcher takes named tuples apart as the compiler did shows here.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

os.environ["TRITON_LIBCUDA_PATH"] = sys.argv[1]

import triton
from compile_cases import CASES
from compile_gate import TARGETS, StubDriver, full_name, package_kernels
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime.jit import JITFunction

from grpo_kernels.backends import launch

TARGET = "sm_90"
SCRATCH = 2  # parameters of Triton's own, at the end


class Driver(StubDriver):
    """Triton's driver for NVIDIA GPUs without torch's part, which asks for a device."""

    launcher_cls = CudaLauncher

    def __init__(self) -> None:
        super().__init__(TARGET)
        self.utils = CudaUtils()

    def get_current_device(self) -> Any:
        return 0


def main() -> None:
    found: dict[str, set[tuple[int, int]]] = {name: set() for name in package_kernels()}
    run = JITFunction.run

    def note(function: Any, *arguments: Any, **options: Any) -> Any:
        kernel = run(function, *arguments, **options)
        entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)", kernel.asm["ptx"], re.S)
        assert entry is not None
        numbers = len(kernel.run.kernel_signature), entry[1].count(".param") - SCRATCH
        found[full_name(function)].add(numbers)
        return kernel

    triton.runtime.driver.set_active(Driver())
    JITFunction.run, launch.architecture = note, lambda device: TARGETS[TARGET].launch
    for name, case in CASES.items():
        if "one " in name:  # they launch every kernel, and the smallest of each
            case.launch(case.rows)
    print(json.dumps({name: sorted(numbers) for name, numbers in found.items()}))


if __name__ == "__main__":
    main()

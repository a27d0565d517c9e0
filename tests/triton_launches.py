"""Launches every case of compile_cases.py, on a driver that runs nothing. What is found is printed as JSON.

    python tests/triton_launches.py keys               {"case": {"module.kernel": number of keys}}
    python tests/triton_launches.py launches FOLDER    {"module.kernel": [[arguments handed over, parameters], ...]}

keys: under how many keys Triton would keep each kernel when the number of rows changes; nothing is compiled. A second
key is a second compilation, and one inside the capture of a CUDA graph fails. Arguments that depend on the rows of a
call must therefore not be specialised: counts, row_strides of tables, where a chunk begins.

launches: through Triton's own launcher; FOLDER has driver/triton_libcuda.cpp as libcuda.so.1. The compile gate ends
where a kernel is compiled: that the launcher takes named tuples apart as the compiler did shows here.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from typing import Any

if sys.argv[1] == "launches":
    os.environ["TRITON_LIBCUDA_PATH"] = sys.argv[2]

import triton
from compile_cases import CASES
from compile_gate import TARGETS, StubDriver, full_name, package_kernels
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime.jit import JITFunction

from grpo_kernels.backends import launch

TARGET = "sm_90"
ROWS = (1, 16, 17, 4096)
SCRATCH = 2  # parameters of Triton's own, at the end


class Driver(StubDriver):
    """Triton's driver for NVIDIA GPUs without torch's part, which asks for a device."""

    launcher_cls = CudaLauncher

    def __init__(self) -> None:
        super().__init__(TARGET)
        self.utils = CudaUtils()

    def get_current_device(self) -> Any:
        return 0


def keys_of(case: str) -> dict[str, int]:
    found: dict[str, set[str]] = defaultdict(set)

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        found[f"{fn.module.rpartition('.')[2]}.{fn.name.rpartition('.')[2]}"].add(key)
        return True  # that is enough: do not compile

    triton.knobs.runtime.jit_cache_hook = note
    for rows in ROWS:
        CASES[case].launch(rows)
    return {kernel: len(keys) for kernel, keys in found.items()}


def launched() -> dict[str, list[tuple[int, int]]]:
    found: dict[str, set[tuple[int, int]]] = {name: set() for name in package_kernels()}
    run = JITFunction.run

    def note(function: Any, *arguments: Any, **options: Any) -> Any:
        kernel = run(function, *arguments, **options)
        entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)", kernel.asm["ptx"], re.S)
        assert entry is not None
        numbers = len(kernel.run.kernel_signature), entry[1].count(".param") - SCRATCH
        found[full_name(function)].add(numbers)
        return kernel

    JITFunction.run = note
    for name, case in CASES.items():
        if "one " in name:  # they launch every kernel, and the smallest of each
            case.launch(case.rows)
    return {name: sorted(numbers) for name, numbers in found.items()}


def main() -> None:
    launch.architecture = lambda device: TARGETS[TARGET].launch
    if sys.argv[1] == "launches":
        triton.runtime.driver.set_active(Driver())
        print(json.dumps(launched()))
    else:
        triton.runtime.driver.set_active(StubDriver(TARGET))
        print(json.dumps({case: keys_of(case) for case in CASES}))


if __name__ == "__main__":
    main()

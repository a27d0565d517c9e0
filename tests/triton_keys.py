"""Prints as JSON under how many keys Triton would keep each kernel when the number of rows changes, by case.

Nothing is compiled. A second key is a second compilation, and one inside the capture of a CUDA graph fails: arguments
that depend on the rows of a call, as counts, row strides of tables and where a chunk begins, must not be specialised.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import triton
from compile_cases import CASES
from compile_gate import TARGETS, StubDriver

from grpo_kernels.backends import launch

TARGET = "sm_90"
ROWS = (1, 16, 17, 4096)


def keys_of(case: str) -> dict[str, int]:
    found: dict[str, set[str]] = defaultdict(set)

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        found[f"{fn.module.rpartition('.')[2]}.{fn.name.rpartition('.')[2]}"].add(key)
        return True  # that is enough: do not compile

    triton.knobs.runtime.jit_cache_hook = note
    for rows in ROWS:
        CASES[case].launch(rows)
    return {kernel: len(keys) for kernel, keys in found.items()}


if __name__ == "__main__":
    launch.architecture = lambda device: TARGETS[TARGET].launch
    triton.runtime.driver.set_active(StubDriver(TARGET))
    print(json.dumps({case: keys_of(case) for case in CASES}))

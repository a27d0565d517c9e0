"""Faults planted in the head kernels, one at a time: a wrong result or the emulator's complaint gives each away.

And the kernels as they are under the sanitizers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest
from emulator.build import ROOT, compiler
from emulator.lm_head import HeadKernels, build_head
from test_cuda_lm_head import ORDERS, assert_right
from test_triton_matmul import make_head


class Fault(NamedTuple):
    file: str
    before: str  # what stands there, just once
    after: str


FAULTS = {
    "a stage is released before its product ends": Fault("lm_head_sm90.cuh", "wgmma_wait<1>();", "wgmma_wait<2>();"),
    "the other block's consumers do not count": Fault(
        "lm_head_sm90.cuh", "args.schedule.cluster * kConsumers", "kConsumers"
    ),
    "the phase never changes": Fault("lm_head_sm90.cuh", "phase ^= 1;", "phase ^= 0;"),
    "a multicast reaches one block": Fault("lm_head_sm90.cuh", "(1u << walk.cluster) - 1", "1u << walk.rank"),
    "bytes are announced for one operand": Fault("lm_head_sm90.cuh", "Memory::kStageBytes);", "Memory::kWeightBytes);"),
    "both warpgroups take the upper rows": Fault("lm_head_sm90.cuh", " + consumer * Fragment::kRows * kBoxBytes", ""),
    "the leader is twice ahead": Fault("lm_head_sm90.cuh", "steps >= kStages", "steps > 1"),
    "barriers are used before they are made": Fault(
        "lm_head_sm90.cuh", "    cluster_arrive();\n    cluster_wait();\n    if", "    if"
    ),
    "a block leaves early": Fault(
        "lm_head_sm90.cuh", "barriers.\n    cluster_arrive();\n    cluster_wait();\n", "barriers.\n"
    ),
    "no fence before a store": Fault("lm_head_epilogue.cuh", "            fence_shared_for_tma();\n", ""),
    "no barrier before a store": Fault("lm_head_epilogue.cuh", "tma();\n            warp_sync();\n", "tma();\n"),
    "memory is reused while a store reads it": Fault(
        "lm_head_epilogue.cuh", "tma_store_wait<1>();", "tma_store_wait<2>();"
    ),
    "the last stores are not awaited": Fault("lm_head_epilogue.cuh", "tma_store_wait<0>();", "{}"),
    "patches lie there without the swizzle": Fault("lm_head_epilogue.cuh", "(at ^ group << 4)", "(at + (group << 4))"),
    "the sampled id is in its own sum": Fault("lm_head_epilogue.cuh", "blank(u, 1, rows_.id[1],", "blank(u, 1, -1,"),
    "a column past the end": Fault("lm_head_epilogue.cuh", "|| j >= vocab", "|| j > vocab"),
    "a shuffle in a divergent branch": Fault(
        "lm_head_epilogue.cuh",
        "double rest = rest_[half]",
        "if (lane_ > 7) continue;\n            double rest = rest_[half]",
    ),
    "a part is dropped": Fault("lm_head_rows.cuh", "part = warp_index();", "part = warp_index() + 1;"),
    "no barrier before shared sums are read": Fault(
        "lm_head_rows.cuh", "    block_sync();\n    double result", "    double result"
    ),
    "an item is computed twice": Fault("lm_head_schedule.h", "first + inside % blocks", "first + inside % s.group"),
}


def check_everything(kernels: HeadKernels, orders: tuple[int, ...] = ORDERS) -> None:
    assert kernels.covers(5, 7, 2, 2)
    for order in orders:
        for rows, width, vocab, multiprocessors in [(140, 330, 600, 4), (270, 100, 600, 1), (60, 24, 600, 132)]:
            kernels.use(multiprocessors, order)
            assert_right(kernels, make_head(rows, width, vocab))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, tmp_path):
    name, before, after = FAULTS[fault]
    csrc = shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    source = (csrc / "cuda" / name).read_text()
    assert source.count(before) == 1
    (csrc / "cuda" / name).write_text(source.replace(before, after))
    kernels = HeadKernels(build_head(csrc, ("-O1",)))
    with pytest.raises((AssertionError, RuntimeError)):
        check_everything(kernels)


UNDER_SANITIZERS = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import triton_interpreter
triton_interpreter.install()
from test_cuda_lm_head_faults import HeadKernels, check_everything
check_everything(HeadKernels(sys.argv[1]), (0, 3))
print("all checks passed")
"""


@pytest.mark.slow
def test_under_sanitizers():
    library = build_head(flags=("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"))
    # The sanitizer must come first, and finds the C++ library's functions only if that is there at once too.
    runtime = [
        subprocess.run([*compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        for name in ("libasan.so", "libstdc++.so")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(name.strip() for name in runtime),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    command = [sys.executable, "-c", UNDER_SANITIZERS, str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks passed" in done.stdout

"""The Hopper products as machine code of NVRTC, and the driver's structures in CUDA's headers. See `make cuda-gate`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import budget
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from kernel_build import cuda  # noqa: E402
from kernel_build.host import find_compiler  # noqa: E402
from wheels import toolchain  # noqa: E402

SOURCE = ROOT / "csrc" / "cuda" / "lm_head_sm90.cu"
COMPILER = cuda.compiler_in(toolchain("cu130"))


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory) -> tuple[str, dict[str, str]]:
    """(what the assembler says, the disassembly of each kernel)"""
    cubin = tmp_path_factory.mktemp("sm90a") / "lm_head.cubin"
    compile_file = [sys.executable, ROOT / "tools" / "kernel_build" / "nvrtc.py", COMPILER.library]
    said = output_of(*compile_file, SOURCE, cubin, "sm_90a", *COMPILER.options, "--ptxas-options=-v")
    kernels = re.split(r"^\.text\.(\w+):$", output_of(budget.tool("nvdisasm"), "-c", cubin), flags=re.MULTILINE)[1:]
    return said, dict(zip(kernels[::2], kernels[1::2], strict=True))


def output_of(*command: str | Path) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return done.stdout


def test_machine_code(machine_code):
    """Products overlap with copies and with each other only if the assembler has nothing to complain of."""
    said, kernels = machine_code
    assert not re.findall(r"\(C75\d\d\).*|warning.*", said)  # serialised wgmma, ignored setmaxnreg
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}
    products = {name: code for name, code in kernels.items() if re.match("gk_(linear_logp|exponentials)_", name)}
    assert len(products) == 8 and len(kernels) == 12
    for name, code in products.items():
        assert len(re.findall(r"HGMMA\.64x256x16\.F32", code)) == 8
        assert ("HGMMA.64x256x16.F32.BF16" in code) == ("bfloat16" in name)
        for wanted in ("UTMALDG.2D ", "UTMALDG.2D.MULTICAST", "USETMAXREG.DEALLOC", "USETMAXREG.TRY_ALLOC"):
            assert wanted in code
        assert ("UTMASTG.2D" in code) == ("exponentials" in name)
        assert not re.search(r"\b(LDL|STL)\b", code)


def test_cuda_agrees_on_the_structures():
    """Those of the driver's interface that csrc/cuda/libcuda.h declares, against cuda.h."""
    flags = ["-std=c++17", "-fsyntax-only", f"-I{ROOT / 'csrc'}", f"-I{COMPILER.include}"]
    output_of(*find_compiler(), *flags, ROOT / "tests" / "driver" / "layout.cpp")

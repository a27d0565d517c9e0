"""What needs a CUDA toolkit: the Hopper products as machine code, the driver's structures. See `make cuda-gate`."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory) -> tuple[str, dict[str, str]]:
    """(what the assembler says, the disassembly of each kernel)"""
    nvcc, triton = shutil.which("nvcc"), find_spec("triton")
    assert nvcc is not None and triton is not None, "needs nvcc and the disassembler of triton"
    cubin = tmp_path_factory.mktemp("sm90a") / "lm_head.cubin"
    source = ROOT / "csrc" / "cuda" / "lm_head_sm90.cu"
    flags = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xptxas=-v", "-gencode=arch=compute_90a,code=sm_90a"]
    said = output_of(nvcc, *flags, "-cubin", "-o", cubin, source)
    listing = output_of(Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm", "-c", cubin)
    kernels = re.split(r"^\.text\.(\w+):$", listing, flags=re.MULTILINE)[1:]
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


def test_the_toolkit_agrees_on_the_structures(tmp_path):
    """Those of the driver's interface that csrc/cuda/libcuda.h declares, against cuda.h."""
    source = ROOT / "tests" / "driver" / "layout.cu"
    output_of("nvcc", "-std=c++17", f"-I{ROOT / 'csrc'}", "-cubin", "-o", tmp_path / "layout.cubin", source)

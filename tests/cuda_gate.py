"""Compiles every CUDA kernel for GPUs that are not here, and looks at what NVRTC made of them.  `make cuda-gate`

NVRTC is that of the wheels (tools/wheels.py): the newest compiles for all architectures, and each other one every
kernel for one of them. The images are those of the build (tools/kernel_build), in its folder. Of each kernel:

    no spills, and no index of a block by way of a float
    wgmma of their type, TMA and multicast in the products, none of which the assembler warns of

The driver's structures, as csrc/cuda/libcuda.h declares them, are held to cuda.h (driver/layout.cpp), and the program
of examples/cpp is linked. How many blocks
fit a multiprocessor is part of each kernel (GK_KERNEL), for which the compiler spills rather than take more registers.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import budget
from budget import Found, Kernels

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from kernel_build import cuda  # noqa: E402
from kernel_build.host import BuildError, find_compiler  # noqa: E402
from wheels import toolchain  # noqa: E402

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
SPECIFIC = "sm_90a"  # the architecture with products
PRODUCTS = ROOT / "csrc" / "cuda" / "lm_head_sm90.cu"

PRODUCT = re.compile(r"gk_fused_")
# Of the tensor cores, of the unit that fetches tiles, and what moves registers from its warps to the others.
PRODUCT_INSTRUCTIONS = ("HGMMA", "UTMALDG", "MULTICAST", "USETMAXREG")
BFLOAT16_PRODUCT = "HGMMA.BF16"
# PTX's %clusterid is the number of the block, as a float32, times the inverse of the cluster: wrong beyond 2^24 blocks.
FLOAT_INDEX = "I2FP.F32.U32"
KINDS = (*PRODUCT_INSTRUCTIONS, BFLOAT16_PRODUCT, FLOAT_INDEX, "UTMASTG", "LDG.128", "STG.128", "LDS.128")


# --- finding out ------------------------------------------------------------------------------------------------------


def read_code(usage: str, code: str) -> dict[str, Found]:
    """Kernel -> what it takes, from the output of the two tools."""
    bodies = dict(re.findall(r"^\.text\.(\w+):\n(.*?)(?=^\s*\.section|\Z)", code, flags=re.MULTILINE | re.DOTALL))
    found = {}
    for kernel, registers, shared in re.findall(r"Function (\w+):\s+REG:(\d+).*?SHARED:(\d+)", usage):
        body = bodies[kernel]
        instructions = budget.instructions(body, KINDS)
        found[kernel] = Found(int(registers), budget.spills(body), int(shared), instructions)
    return found


def assembler_warnings(compiler: cuda.Compiler) -> list[str]:
    """Of serialised wgmma, or an ignored setmaxnreg, with which products overlap neither with copies nor each other."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        command = [sys.executable, ROOT / "tools" / "kernel_build" / "nvrtc.py", compiler.library, PRODUCTS, cubin.name]
        command += [SPECIFIC, *compiler.options, "--ptxas-options=-v"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return re.findall(r"\(C75\d\d\).*|warning.*", done.stdout)


# --- checking ---------------------------------------------------------------------------------------------------------


def complaints(found: Kernels) -> list[str]:
    """What is wrong, one line each."""
    lines = []
    for (kernel, architecture), code in found.items():
        where = f"{kernel} on {architecture}"
        if PRODUCT.match(kernel):
            lines += [f"{where}: no {kind}" for kind in PRODUCT_INSTRUCTIONS if not code.instructions.get(kind)]
            if (BFLOAT16_PRODUCT in code.instructions) != ("bf16" in kernel):
                lines.append(f"{where}: a product of the other 16-bit type")
        if code.spills:
            lines.append(f"{where}: {code.spills} spills")
        if code.instructions.get(FLOAT_INDEX):
            lines.append(f"{where}: {FLOAT_INDEX}, as of a block's number, and 2^24 is the last that float32 counts")
    return lines


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    try:
        return gate()
    except BuildError as error:
        print(f"cuda_gate: {error}", file=sys.stderr)
        return 2


def gate() -> int:
    start = time.perf_counter()
    *older, newest = (cuda.compiler_in(toolchain(variant)) for variant in cuda.PACKAGES)
    flags = ["-std=c++17", "-fsyntax-only", f"-I{ROOT / 'csrc'}", f"-I{newest.include}"]
    subprocess.run([*find_compiler(), *flags, ROOT / "tests" / "driver" / "layout.cpp"], check=True)
    folder, images = cuda.build_images(newest, "full")
    runpy.run_path(str(ROOT / "examples" / "cpp" / "build.py"))["build_program"](folder / "example", newest)
    for other in older:
        cuda.build_images(other, SPECIFIC.removeprefix("sm_"))
    found = {}
    for image in images:
        if image.architecture in TARGETS:
            for kernel, code in read_code(*budget.disassemble(folder / image.file)).items():
                found[kernel, image.architecture] = code
    print(budget.row("target", "regs", "spills", "static", "kernel", "instructions"))
    for name, code in sorted(found.items()):
        print(budget.describe(*name, code))
    compilers = ", ".join(map(str, (newest, *older)))
    print(f"{len(found)} kernels of {compilers} in {time.perf_counter() - start:.0f} s")

    return budget.verdict(assembler_warnings(newest) + complaints(found))


if __name__ == "__main__":
    sys.exit(main())

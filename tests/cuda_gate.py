"""Compiles every CUDA kernel for GPUs that are not here, and holds what NVRTC made of them to a budget.

    python tests/cuda_gate.py             check, as `make cuda-gate` and CI do
    python tests/cuda_gate.py --write     what was found becomes cuda_budget.json

NVRTC is that of the wheels (tools/wheels.py): the newest is held to the budget, and each other one compiles every
kernel for one architecture. The images are those of the build (tools/kernel_build), in its folder. Threads, shared
memory and clusters are what the host code chooses for each device: driver/launches.cpp asks it.
Held, per kernel and architecture:

    no spills outside of the products, wgmma and TMA in the products, no index of a block by way of a float
                                                                        whatever the budget says
    registers, spills and shared memory at most those of cuda_budget.json, and no fewer warps in flight
    every kernel launched by some call, and every launched kernel compiled
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import budget
from budget import Name

ROOT = Path(__file__).resolve().parents[1]
BUDGET = ROOT / "tests" / "cuda_budget.json"
sys.path.insert(0, str(ROOT / "tools"))

from kernel_build import cuda  # noqa: E402
from kernel_build.host import BuildError, find_compiler  # noqa: E402
from wheels import toolchain  # noqa: E402


class Gpu(NamedTuple):
    """A GPU of an architecture. The first five are what the host code asks the driver for."""

    capability: int
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int
    l2_bytes: int
    threads: int  # per multiprocessor
    blocks: int


KB, MB = 1 << 10, 1 << 20
GPUS = {
    "sm_80": Gpu(80, 108, 163 * KB, 164 * KB, 40 * MB, 2048, 32),
    "sm_86": Gpu(86, 84, 99 * KB, 100 * KB, 6 * MB, 1536, 16),
    "sm_89": Gpu(89, 128, 99 * KB, 100 * KB, 72 * MB, 1536, 24),
    "sm_90a": Gpu(90, 132, 227 * KB, 228 * KB, 50 * MB, 2048, 32),
    "sm_100": Gpu(100, 148, 227 * KB, 228 * KB, 126 * MB, 2048, 32),
    "sm_120": Gpu(120, 170, 99 * KB, 100 * KB, 96 * MB, 1536, 24),
}
SPECIFIC = "sm_90a"  # the architecture with products
REGISTERS = 65536  # of a multiprocessor, given to warps in units of 256
RESERVED = 1024  # bytes of shared memory that a block takes beside its own

row = partial(budget.row, 36)
PRODUCT = re.compile(r"gk_(linear_logp|exponentials)_")
PRODUCT_INSTRUCTIONS = ("HGMMA", "UTMALDG")  # of the tensor cores, and of the unit that fetches tiles
KINDS = ("HGMMA", "UTMALDG", "UTMASTG", "LDG.128", "STG.128", "LDS.128", "I2FP.F32.U32")  # of instructions
# PTX's %clusterid is the number of the block, as a float32, times the inverse of the cluster: wrong beyond 2^24 blocks.
FLOAT_INDEX = "I2FP.F32.U32"


class Launch(NamedTuple):
    threads: int
    shared: int  # dynamic, bytes
    cluster: int


NOT_LAUNCHED = Launch(0, 0, 0)  # this device runs another kernel instead


class Code(NamedTuple):
    """What the compiler made of a kernel."""

    registers: int
    spills: int  # loads and stores of registers that had to go to local memory
    shared: int  # static, bytes
    instructions: dict[str, int]


class Found(NamedTuple):
    code: Code
    launch: Launch
    occupancy: float  # warps in flight, of those that a multiprocessor can hold

    def numbers(self) -> dict[str, Any]:
        return self.code._asdict() | {"occupancy": round(self.occupancy, 2)}


# --- finding out ------------------------------------------------------------------------------------------------------


def bodies_of(code: str) -> dict[str, str]:
    """Kernel -> its machine code"""
    return dict(re.findall(r"^\.text\.(\w+):\n(.*?)(?=^\s*\.section|\Z)", code, flags=re.MULTILINE | re.DOTALL))


def read_code(usage: str, code: str) -> dict[str, Code]:
    """Kernel -> what it takes, from the output of the two tools."""
    bodies = bodies_of(code)
    found = {}
    for kernel, registers, shared in re.findall(r"Function (\w+):\s+REG:(\d+).*?SHARED:(\d+)", usage):
        body = bodies[kernel]
        kinds = budget.instructions(body, KINDS)
        found[kernel] = Code(int(registers), budget.spills(body), int(shared), kinds)
    return found


def make_launches(folder: Path) -> Path:
    """The program driver/launches.cpp with the host code of the backend."""
    program = folder / "launches"
    sources = [
        ROOT / "tests/driver/launches.cpp",
        *(ROOT / "csrc/cuda" / f"{name}.cpp" for name in ("host", "lm_head")),
    ]
    command = [*find_compiler(), "-std=c++17", f"-I{ROOT / 'csrc'}", *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def read_launches(text: str) -> dict[str, Launch]:
    """Kernel -> its first launch, which is that of most interest."""
    found: dict[str, Launch] = {}
    for line in text.splitlines():
        kernel, *numbers = line.split()
        found.setdefault(kernel, Launch(*map(int, numbers)))
    return found


def launches_on(program: Path, gpu: Gpu) -> dict[str, Launch]:
    command = [str(program), *map(str, gpu[:5])]
    return read_launches(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def occupancy(code: Code, launch: Launch, gpu: Gpu) -> float:
    if launch == NOT_LAUNCHED:
        return 0.0
    warps = math.ceil(launch.threads / 32)
    fed = REGISTERS // (math.ceil(code.registers * 32 / 256) * 256) // 4 * 4  # warps that find registers
    # From compute capability 9.0 on, the compiler counts what is reserved.
    shared = max(code.shared, RESERVED) if gpu.capability >= 90 else code.shared + RESERVED
    shared = math.ceil((shared + launch.shared) / 128) * 128
    blocks = min(fed // warps, gpu.shared_per_multiprocessor // shared, gpu.threads // (32 * warps), gpu.blocks)
    return blocks * warps / (gpu.threads // 32)


# --- checking ---------------------------------------------------------------------------------------------------------


def complaints(found: Mapping[Name, Found]) -> list[str]:
    """What is wrong whatever the budget says, one line each."""
    lines = []
    for (kernel, architecture), (code, launch, occupied) in found.items():
        where = f"{kernel} on {architecture}"
        product = PRODUCT.match(kernel) is not None
        if code.spills and not product:
            lines.append(f"{where}: {code.spills} spills, and only a product may have some")
        if occupied == 0 and launch != NOT_LAUNCHED:
            lines.append(f"{where}: a multiprocessor cannot hold one block")
        if product:
            lines += [f"{where}: no {kind}" for kind in PRODUCT_INSTRUCTIONS if not code.instructions.get(kind)]
        if code.instructions.get(FLOAT_INDEX):
            lines.append(f"{where}: {FLOAT_INDEX}, as of a block's number, and 2^24 is the last that float32 counts")
    return lines


def mismatches(compiled: Iterable[Name], launched: Iterable[Name]) -> list[str]:
    """Kernels without a launch are dead code or missing from launches.cpp; launches without a kernel are errors."""
    compiled, launched = set(compiled), set(launched)
    never = {kernel for kernel, _ in compiled} - {kernel for kernel, _ in launched}
    lines = [f"{kernel} is launched by no call in driver/launches.cpp" for kernel in sorted(never)]
    lines += [f"{kernel} is launched on {where}, and is not there" for kernel, where in sorted(launched - compiled)]
    return lines


# --- the command ------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check what NVRTC makes of the CUDA kernels against a budget.")
    parser.add_argument("--write", action="store_true", help=f"rewrite {BUDGET.name} from what was found")
    arguments = parser.parse_args(argv)
    try:
        return gate(arguments.write)
    except BuildError as error:
        print(f"cuda_gate: {error}", file=sys.stderr)
        return 2


def gate(write: bool) -> int:
    start = time.perf_counter()
    *older, newest = (cuda.compiler_in(toolchain(variant)) for variant in cuda.PACKAGES)
    compiler, specific = str(newest), SPECIFIC.removeprefix("sm_")
    folder, images = cuda.build_images(newest, "full")
    for other in older:
        cuda.build_images(other, specific)
    compiled: dict[Name, Code] = {}
    for image in images:
        if image.architecture in GPUS:
            for kernel, code in read_code(*budget.disassemble(folder / image.file)).items():
                compiled[kernel, image.architecture] = code
    with tempfile.TemporaryDirectory() as scratch:
        program = make_launches(Path(scratch))
        launched = {
            (kernel, architecture): launch
            for architecture in {image.architecture for image in images} & set(GPUS)
            for kernel, launch in launches_on(program, GPUS[architecture]).items()
        }
    found: dict[Name, Found] = {}
    print(row("kernel", "target", "regs", "spills", "static", "dynamic", "threads", "cluster", "occupied", ""))
    for name, code in sorted(compiled.items()):
        launch = launched.get(name, NOT_LAUNCHED)
        found[name] = Found(code, launch, occupancy(code, launch, GPUS[name[1]]))
        print(describe(*name, found[name]))
    compilers = ", ".join(map(str, (newest, *older)))
    print(f"{len(compiled)} kernels of {compilers} in {time.perf_counter() - start:.0f} s")

    problems = complaints(found) + mismatches(compiled, launched)
    numbers = {name: kernel.numbers() for name, kernel in found.items()}
    return budget.verdict(problems + budget.hold(numbers, BUDGET, compiler, GPUS, write))


def describe(kernel: str, architecture: str, found: Found) -> str:
    code, launch, occupied = found
    instructions = "  ".join(f"{number} {kind}" for kind, number in code.instructions.items())
    return row(
        kernel, architecture, code.registers, code.spills, code.shared, launch.shared, launch.threads, launch.cluster,
        f"{occupied:.0%}", instructions,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

"""What both gates read in the machine code of compiled kernels, and how they print it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

Name = tuple[str, str]  # kernel, target

# In the machine code: tensor cores by generation, tiles moved by the TMA unit, registers that a warp gives to others,
# asynchronous copies, accesses of 128 bits and more, and conversions to float32.
INSTRUCTIONS = {
    "HMMA": r"\bHMMA\b",
    "HGMMA": r"\bHGMMA\b",
    "HGMMA.BF16": r"\bHGMMA[.\w]*\.BF16\b",
    "UTCMMA": r"\bUTC[A-Z]*MMA\b",
    "MFMA": r"\bv_mfma_",
    "UTMALDG": r"\bUTMALDG\b",
    "MULTICAST": r"\bUTMALDG[.\w]*\.MULTICAST\b",
    "USETMAXREG": r"\bUSETMAXREG\.(?:DEALLOC|TRY_ALLOC)\b",
    "UTMASTG": r"\bUTMASTG\b",
    "LDGSTS": r"\bLDGSTS\b",
    "LDG.128": r"\bLDG[.\w]*\.(?:128|256)\b|\bglobal_load_dwordx4\b|\bbuffer_load_dwordx4\b",
    "STG.128": r"\bSTG[.\w]*\.(?:128|256)\b|\bglobal_store_dwordx4\b|\bbuffer_store_dwordx4\b",
    "LDS.128": r"\bLDS[.\w]*\.128\b",
    "I2FP.F32.U32": r"\bI2FP\.F32\.U32\b",
}


class Found(NamedTuple):
    """What a compiler made of a kernel for a target."""

    registers: int
    spills: int  # loads and stores of registers that had to go to local memory
    shared: int  # bytes
    instructions: dict[str, int]  # {kind: how many}
    multiplies: bool = False  # it holds a matrix product of 16-bit inputs


Kernels = Mapping[Name, Found]


def instructions(code: str, kinds: Iterable[str]) -> dict[str, int]:
    counts = {kind: len(re.findall(INSTRUCTIONS[kind], code)) for kind in kinds}
    return {kind: number for kind, number in counts.items() if number}


def spills(code: str) -> int:
    return len(re.findall(r"\b(?:LDL|STL)\b", code))


def tool(name: str) -> str:
    """cuobjdump or nvdisasm: Triton brings them, a toolkit from pip does not."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def disassemble(cubin: Path) -> tuple[str, str]:
    """(use of resources, machine code)"""
    commands = [tool("cuobjdump"), "-res-usage", str(cubin)], [tool("nvdisasm"), "-ndf", "-c", str(cubin)]
    usage, code = (subprocess.run(c, capture_output=True, text=True, check=True).stdout for c in commands)
    return usage, code


def verdict(problems: Iterable[str]) -> int:
    """The exit status, after a line for each problem."""
    problems = list(problems)
    for problem in problems:
        print(f"FAILED {problem}", file=sys.stderr)
    return 1 if problems else 0


def row(target: object, registers: object, spills: object, shared: object, kernel: str, said: str) -> str:
    return f"{target!s:8}{registers!s:>9}{spills!s:>9}{shared!s:>9}  {kernel}  {said}"


def describe(kernel: str, target: str, found: Found) -> str:
    return row(target, *found[:3], kernel, "  ".join(f"{number} {kind}" for kind, number in found.instructions.items()))

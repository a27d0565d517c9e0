"""What both gates hold compiled kernels to: the numbers of a committed file, one line per kernel."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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


def complaints(found: Kernels, budget: Mapping[str, Any], targets: Collection[str]) -> list[str]:
    """What is worse than in the budget, {kernel: {target: numbers}}, and what only one of both has; one line each."""
    lines = []
    for (name, target), kernel in found.items():
        where, allowed = f"{name} on {target}", budget.get(name, {}).get(target)
        if allowed is None:
            lines.append(f"{where}: not in the budget; --write adds it")
            continue
        for what in ("registers", "spills", "shared"):
            if getattr(kernel, what) > allowed[what]:
                lines.append(f"{where}: {what} {getattr(kernel, what)}, budget {allowed[what]}")
        for kind in allowed["instructions"]:
            if not kernel.instructions.get(kind):
                lines.append(f"{where}: no {kind}, which the budget names")
    for name, entries in budget.items():
        for target in entries:
            if target in targets and (name, target) not in found:
                lines.append(f"the budget has {name} on {target}, which is not compiled; --write drops it")
    return lines


def new_budget(found: Kernels, old: Mapping[str, Any], targets: Collection[str]) -> dict[str, Any]:
    """The numbers found; those of targets that were not compiled stay as they are."""
    budget: dict[str, Any] = {}
    for (name, target), kernel in found.items():
        others = {other: entry for other, entry in old.get(name, {}).items() if other not in targets}
        entry = dict(zip(kernel._fields[:3], kernel[:3], strict=True), instructions=sorted(kernel.instructions))
        budget.setdefault(name, others)[target] = entry
    return budget


def hold(found: Kernels, file: Path, compiler: str, targets: Collection[str], write: bool) -> list[str]:
    """The complaints about kernels of these targets; write: what was found becomes the budget."""
    written = json.loads(file.read_text()) if file.exists() else {"compiler": compiler, "kernels": {}}
    budget = written["kernels"]
    if write:
        budget = new_budget(found, budget, targets)
        lines = [f"{json.dumps(name)}: {json.dumps(entries)}" for name, entries in budget.items()]
        text = ",\n".join(lines)
        file.write_text(f'{{"compiler": {json.dumps(compiler)}, "kernels": {{\n{text}\n}}}}\n')
        print(f"{file} written")
    elif written["compiler"] != compiler:
        print(f"The budget is that of {written['compiler']}, this is {compiler}", file=sys.stderr)
    return complaints(found, budget, targets)


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

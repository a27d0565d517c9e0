"""Compiles every Triton kernel for GPUs that are not here, and holds what the compilers made of them to a budget.

    python tests/compile_gate.py                    check, as `make compile-gate` and CI do
    python tests/compile_gate.py --targets sm_90    one target
    python tests/compile_gate.py --write            what was found becomes the budget
    python tests/compile_gate.py --triton 3.9.0     another Triton than the one that is installed

A case of compile_cases.py calls a launcher of the package. A stub stands in for the driver, and a launch compiles and
returns: signature, alignment, constants and options are those of a real call, the launch configuration is the target's
row of launch.json. Held, per kernel and target:

    at most one spilled register in a kernel without a matrix product, tensor cores in one with
    registers, spills and shared memory at most those of the budget
    no kind of instruction lost that the budget names
    every kernel of the package launched by some case

Each minor version of Triton has a budget of its own in compile_budget/.

gfx942 is compiled and printed, and may fail.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = ROOT / "tests" / "compile_budget"
MOST_SPILLS = 2  # a store and a load: what ptxas trades for more warps per multiprocessor


class Target(NamedTuple):
    """A GPU as Triton names it, its row of launch.json, and the instruction of its tensor cores."""

    backend: str
    arch: int | str
    warp_size: int
    launch: str
    tensor_cores: str
    budgeted: bool = True


TARGETS = {
    "sm_80": Target("cuda", 80, 32, "sm80", "HMMA"),
    "sm_90": Target("cuda", 90, 32, "sm90", "HGMMA"),
    "sm_100": Target("cuda", 100, 32, "sm100", "UTCMMA"),
    "gfx942": Target("hip", "gfx942", 64, "gfx9", "MFMA", budgeted=False),
}

# Counted in the machine code: tensor cores by generation, tiles fetched by the TMA unit, asynchronous copies, loads and
# stores of 128 bits and more.
INSTRUCTIONS = {
    "HMMA": r"\bHMMA\b",
    "HGMMA": r"\bHGMMA\b",
    "UTCMMA": r"\bUTC[A-Z]*MMA\b",
    "MFMA": r"\bv_mfma_",
    "UTMALDG": r"\bUTMALDG\b",
    "LDGSTS": r"\bLDGSTS\b",
    "LDG.128": r"\bLDG[.\w]*\.(?:128|256)\b|\bglobal_load_dwordx4\b|\bbuffer_load_dwordx4\b",
    "STG.128": r"\bSTG[.\w]*\.(?:128|256)\b|\bglobal_store_dwordx4\b|\bbuffer_store_dwordx4\b",
}


class Found(NamedTuple):
    """What a compiler made of a kernel for a target."""

    registers: int
    spills: int  # loads and stores of registers that had to go to local memory
    shared: int  # bytes
    instructions: dict[str, int]
    multiplies: bool  # it holds a matrix product of 16-bit inputs
    seconds: float = 0.0


Name = tuple[str, str]  # "module.kernel: case", target


# --- compiling --------------------------------------------------------------------------------------------------------


class StubDriver:
    """What a launch asks of Triton's driver before anything reaches a GPU."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        target = TARGETS[self.name]
        return GPUTarget(target.backend, target.arch, target.warp_size)

    def get_current_device(self) -> str:
        return self.name  # a kernel keeps its compiled forms by device

    def get_current_stream(self, device: object) -> int:
        return 0


def compile_case(case: str, target: str) -> dict[str, Found] | str:
    """Kernels that a case launches, by "module.kernel: case"; or why it does not compile."""
    import triton
    from compile_cases import CASES
    from triton.runtime.jit import JITFunction

    from grpo_kernels.backends import launch

    call, only, rows = CASES[case]
    compiled: dict[str, Any] = {}

    def compile_only(function: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> Any:
        if only not in (None, function.fn.__name__):
            return None
        kernel = run(function, *args, grid=grid, warmup=True, **kwargs)
        name = f"{full_name(function)}: {case}"
        while compiled.get(name, kernel) is not kernel:  # launched before, in another specialisation
            name += "'"
        compiled[name] = kernel
        return kernel

    run, architecture = JITFunction.run, launch.architecture
    triton.runtime.driver.set_active(StubDriver(target))
    JITFunction.run, launch.architecture = compile_only, lambda device: TARGETS[target].launch
    start = time.perf_counter()
    try:
        call(rows)
    except Exception as error:  # compilers fail in many ways, and the others are to be tried too
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[-1] if text else ''}"
    finally:
        JITFunction.run, launch.architecture = run, architecture
    seconds = (time.perf_counter() - start) / max(len(compiled), 1)
    return {name: examine(kernel, TARGETS[target])._replace(seconds=seconds) for name, kernel in compiled.items()}


def examine(kernel: Any, target: Target) -> Found:
    if target.backend == "hip":
        code = kernel.asm["amdgcn"]
        registers, spills = (int(re.findall(rf"\.vgpr_{what}:\s+(\d+)", code)[0]) for what in ("count", "spill_count"))
    else:
        code, usage = disassemble(kernel.asm["cubin"])
        registers = int(re.findall(r"\bREG:(\d+)", usage)[0])
        spills = len(re.findall(r"\b(?:LDL|STL)\b", code))
    instructions = {name: len(re.findall(pattern, code)) for name, pattern in INSTRUCTIONS.items()}
    multiplies = re.search(r"tt\.dot .*tensor<\d+x\d+xb?f16", kernel.asm["ttir"]) is not None
    found = {name: number for name, number in instructions.items() if number}
    return Found(registers, spills, kernel.metadata.shared, found, multiplies)


def disassemble(cubin: bytes) -> tuple[str, str]:
    """(machine code, use of resources) from the tools that come with Triton."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = [tools / "nvdisasm", "-ndf", "-c", file.name], [tools / "cuobjdump", "-res-usage", file.name]
        code, usage = (subprocess.run(c, capture_output=True, text=True, check=True).stdout for c in commands)
    return code, usage


def compile_all(cases: Iterable[str], targets: list[str]) -> Iterator[tuple[str, str, dict[str, Found] | str]]:
    """(case, target, result of compile_case), one after another."""
    # A compiler that dies takes its pool along, so targets that may fail have a pool of their own.
    for budgeted in (True, False):
        jobs = [(case, target) for case in cases for target in targets if TARGETS[target].budgeted == budgeted]
        workers = min(4, len(os.sched_getaffinity(0)))
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            for job, future in [(job, pool.submit(compile_case, *job)) for job in jobs]:
                try:
                    yield (*job, future.result())
                except BrokenProcessPool:
                    yield (*job, "a compiler died, of this case or of one beside it")


def package_kernels() -> set[str]:
    """Kernels of the package: jitted functions that no other jitted function calls."""
    from triton.runtime.jit import JITFunction

    from grpo_kernels.backends import triton as kernels

    calls: dict[str, Iterable[str]] = {}
    for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        for function in vars(importlib.import_module(module.name)).values():
            if isinstance(function, JITFunction) and function.fn.__module__.startswith(kernels.__name__):
                calls[full_name(function)] = function.fn.__code__.co_names
    return uncalled(calls)


def full_name(function: Any) -> str:
    return f"{function.fn.__module__.rpartition('.')[2]}.{function.fn.__name__}"


def uncalled(calls: Mapping[str, Iterable[str]]) -> set[str]:
    """Functions that no other one calls, from the names that each uses."""
    used = {name for uses in calls.values() for name in uses}
    return {function for function in calls if function.rpartition(".")[2] not in used}


# --- checking ---------------------------------------------------------------------------------------------------------


def budget_file(version: str) -> Path:
    """Of this version of Triton."""
    return BUDGETS / f"triton-{'.'.join(version.split('.')[:2])}.json"


def complaints(found: Mapping[Name, Found], budget: Mapping[str, Any]) -> list[str]:
    """What is wrong with kernels on budgeted targets, one line each; budget: {"module.kernel: case": {target: ...}}."""
    lines = []
    for (name, target), kernel in found.items():
        where = f"{name} on {target}"
        cores = TARGETS[target].tensor_cores
        if kernel.multiplies and not kernel.instructions.get(cores):
            lines.append(f"{where}: no {cores}, its matrix product does without tensor cores")
        if not kernel.multiplies and kernel.spills > MOST_SPILLS:
            lines.append(f"{where}: {kernel.spills} spills; {MOST_SPILLS} are the most without a matrix product")
        allowed = budget.get(name, {}).get(target)
        if allowed is None:
            lines.append(f"{where}: not in the budget; --write adds it")
            continue
        for what in ("registers", "spills", "shared"):
            if getattr(kernel, what) > allowed[what]:
                lines.append(f"{where}: {what} {getattr(kernel, what)}, budget {allowed[what]}")
        for kind in allowed["instructions"]:
            if not kernel.instructions.get(kind):
                lines.append(f"{where}: no {kind}, which the budget names")
    return lines


def leftovers(found: Iterable[Name], budget: Mapping[str, Mapping[str, Any]], targets: Iterable[str]) -> list[str]:
    """Entries of the budget that no case produces."""
    known, targets = set(found), set(targets)
    return [
        f"the budget has {name} on {target}, which no case launches; --write drops it"
        for name, entries in budget.items()
        for target in entries
        if target in targets and (name, target) not in known
    ]


def uncovered(kernels: Iterable[str], found: Iterable[Name]) -> list[str]:
    launched = {name.split(":")[0] for name, _ in found}
    return [
        f"{kernel} is launched by no case: add one to compile_cases.py" for kernel in sorted(set(kernels) - launched)
    ]


def new_budget(found: Mapping[Name, Found], old: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The numbers found; those of targets that were not compiled stay as they are."""
    compiled = {target for _, target in found}
    budget: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for name, _ in found):
        kept = {target: numbers for target, numbers in old.get(name, {}).items() if target not in compiled}
        made = {
            target: {
                "registers": kernel.registers,
                "spills": kernel.spills,
                "shared": kernel.shared,
                "instructions": sorted(kernel.instructions),
            }
            for (other, target), kernel in found.items()
            if other == name
        }
        budget[name] = {target: numbers for target, numbers in (kept | made).items() if TARGETS[target].budgeted}
    return budget


def budget_text(version: str, budget: Mapping[str, Mapping[str, Any]]) -> str:
    """JSON with a line per kernel, for differences that read well."""
    lines = [f"{json.dumps(name)}: {json.dumps(targets)}" for name, targets in budget.items()]
    return f'{{"triton": {json.dumps(version)}, "kernels": {{\n' + ",\n".join(lines) + "\n}}\n"


# --- the command ------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels offline and check them against a budget.")
    parser.add_argument("--write", action="store_true", help=f"rewrite the file in {BUDGETS.name}/ from what was found")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--triton", metavar="VERSION", help="install it into a folder of its own for this call")
    arguments = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("compile_gate: TRITON_INTERPRET=1 is set, under which Triton compiles nothing; unset it", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="compile-gate-") as folder:
        if arguments.triton is not None:
            return gate_with(arguments.triton, folder, arguments.targets, arguments.write)
        # Every kernel is compiled anew, and a table tuned on this machine is not looked at. Workers inherit both.
        os.environ["TRITON_CACHE_DIR"] = os.environ["GRPO_KERNELS_CACHE"] = folder
        return gate(arguments.targets, arguments.write)


def gate_with(version: str, folder: str, targets: list[str], write: bool) -> int:
    """`gate` in a process that finds this version of Triton in the folder."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, f"triton=={version}"]
    subprocess.run(install, check=True)
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]  # an empty entry would be the current directory
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, __file__, "--targets", *targets, *["--write"] * write]
    return subprocess.run(command, env=environment, check=False).returncode


def gate(targets: list[str], write: bool) -> int:
    import triton
    from compile_cases import CASES

    file = budget_file(triton.__version__)
    if not write and not file.exists():
        known = ", ".join(sorted(path.stem for path in BUDGETS.glob("*.json")))
        print(f"Triton {triton.__version__} has no budget; there are {known}; --write makes one", file=sys.stderr)
        return 2
    start = time.perf_counter()
    found: dict[Name, Found] = {}
    problems = []
    print(row("kernel", "target", "regs", "spills", "shared", "seconds", "instructions"))
    for case, target, result in compile_all(CASES, targets):
        if isinstance(result, str):
            print(row(case, target, "-", "-", "-", "-", result))
            if TARGETS[target].budgeted:
                problems.append(f"{case} does not compile for {target}: {result}")
            continue
        for name, kernel in result.items():
            print(describe(name, target, kernel), flush=True)
            found[name, target] = kernel
    print(f"{len(found)} kernels in {time.perf_counter() - start:.0f} s")

    written = json.loads(file.read_text()) if file.exists() else {"triton": triton.__version__, "kernels": {}}
    budget = written["kernels"]
    if write:
        budget = new_budget(found, budget)
        file.write_text(budget_text(triton.__version__, budget))
        print(f"{file} written")
    elif written["triton"] != triton.__version__:
        print(f"The budget is that of Triton {written['triton']}, this is {triton.__version__}", file=sys.stderr)
    held = {name: kernel for name, kernel in found.items() if TARGETS[name[1]].budgeted}
    problems += complaints(held, budget) + leftovers(held, budget, targets) + uncovered(package_kernels(), found)
    for problem in problems:
        print(f"FAILED {problem}", file=sys.stderr)
    return 1 if problems else 0


def describe(name: str, target: str, kernel: Found) -> str:
    instructions = "  ".join(f"{number} {kind}" for kind, number in kernel.instructions.items())
    return row(name, target, kernel.registers, kernel.spills, kernel.shared, f"{kernel.seconds:.1f}", instructions)


def row(kernel: object, target: object, *columns: object) -> str:
    *numbers, last = columns
    return f"{kernel!s:73}{target!s:7}" + "".join(f"{number!s:>8}" for number in numbers) + f"  {last}"


if __name__ == "__main__":
    sys.exit(main())

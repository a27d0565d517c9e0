"""Compiles every Triton kernel for GPUs that are not here.

    python tests/compile_gate.py                    check, as `make compile-gate` and CI do
    python tests/compile_gate.py --targets sm_90    one target
    python tests/compile_gate.py --cases exponent   the cases with this in their name
    python tests/compile_gate.py --triton 3.9.0     another Triton than the one that is installed
    python tests/compile_gate.py --keys             how often kernels would compile as the number of rows changes

A case of compile_cases.py calls a launcher of the package. A stub stands in for the driver, and a launch compiles and
returns: signature, alignment, constants and options are those of a real call, the launch configuration is the target's
row of LAUNCHES. Held, per kernel and target:

    it compiles; a matrix product uses tensor cores, and spills no more than PRODUCT_SPILLS
    no more shared memory than a block of the GPU has
    every kernel of the package launched by some case

Products whose tiles come through TMA are compiled for GPUs that have them there. GPUs of 8.6, 8.9 and 12.x
have code much like that of sm_80. gfx942 is compiled and printed, and may fail.
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
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import budget
from budget import Found, Kernels, Name

ROOT = Path(__file__).resolve().parents[1]


class Target(NamedTuple):
    """A GPU as Triton names it, its row of LAUNCHES, the instruction of its tensor cores, and the shared memory that
    a block can have, in KiB."""

    backend: str
    arch: int | str
    warp_size: int
    launch: str
    tensor_cores: str
    shared: int
    may_fail: bool = False


TARGETS = {
    "sm_80": Target("cuda", 80, 32, "sm80", "HMMA", 163),
    "sm_90": Target("cuda", 90, 32, "sm90", "HGMMA", 227),
    "sm_100": Target("cuda", 100, 32, "sm100", "UTCMMA", 227),
    "gfx942": Target("hip", "gfx942", 64, "gfx9", "MFMA", 64, may_fail=True),
}
# Instructions. Each runs once per warp and tile of 128 x 256: 96 of 8 warps, a cycle each, are 3 % of the 16 H cycles
# that tensor cores take for the tile at H = 1,536, if nothing hides them. Triton 3.9 has up to 84.
PRODUCT_SPILLS = 96
KINDS = ("HMMA", "HGMMA", "UTCMMA", "MFMA", "UTMALDG", "LDGSTS", "LDG.128", "STG.128")  # of instructions


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

    from grpo_kernels.kernels import launch

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
    try:
        call(rows)
    except Exception as error:  # compilers fail in many ways, and the others are to be tried too
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[-1] if text else ''}"
    finally:
        JITFunction.run, launch.architecture = run, architecture
    return {name: examine(kernel, TARGETS[target]) for name, kernel in compiled.items()}


def examine(kernel: Any, target: Target) -> Found:
    if target.backend == "hip":
        code = kernel.asm["amdgcn"]
        registers, spills = (int(re.findall(rf"\.vgpr_{what}:\s+(\d+)", code)[0]) for what in ("count", "spill_count"))
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage, code = budget.disassemble(Path(file.name))
        registers, spills = int(re.findall(r"\bREG:(\d+)", usage)[0]), budget.spills(code)
    multiplies = re.search(r"tt\.dot .*tensor<\d+x\d+xb?f16", kernel.asm["ttir"]) is not None
    return Found(registers, spills, kernel.metadata.shared, budget.instructions(code, KINDS), multiplies)


def is_due(case: str, target: str) -> bool:
    from grpo_kernels.kernels.launch import LAUNCHES

    return (
        not case.startswith("fused_") or getattr(LAUNCHES[TARGETS[target].launch], case.partition(",")[0]) is not None
    )


def compile_all(jobs: list[tuple[str, str]]) -> Iterator[tuple[str, str, dict[str, Found] | str]]:
    """(case, target, result of compile_case), one after another."""
    # A compiler that dies takes its pool along, so targets that may fail have a pool of their own.
    for may_fail in (False, True):
        workers = min(4, len(os.sched_getaffinity(0)))
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            mine = [job for job in jobs if TARGETS[job[1]].may_fail == may_fail]
            for job, future in [(job, pool.submit(compile_case, *job)) for job in mine]:
                try:
                    yield (*job, future.result())
                except BrokenProcessPool:
                    yield (*job, "a compiler died, of this case or of one beside it")


def package_kernels() -> set[str]:
    """Kernels of the package: jitted functions that no other jitted function calls."""
    from triton.runtime.jit import JITFunction

    from grpo_kernels.kernels import triton as kernels

    calls: dict[str, Iterable[str]] = {}
    for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        for function in vars(importlib.import_module(module.name)).values():
            if isinstance(function, JITFunction) and function.fn.__module__.startswith(kernels.__name__):
                calls[full_name(function)] = function.fn.__code__.co_names
    used = {name for uses in calls.values() for name in uses}
    return {function for function in calls if function.rpartition(".")[2] not in used}


def full_name(function: Any) -> str:
    return f"{function.fn.__module__.rpartition('.')[2]}.{function.fn.__name__}"


# --- specialisation ---------------------------------------------------------------------------------------------------


def print_keys(target: str) -> None:
    """Under how many keys Triton would keep each kernel when the number of rows changes, as JSON by case.

    Nothing is compiled. A second key is a second compilation, and one inside the capture of a CUDA graph fails:
    arguments that depend on the rows of a call, as counts, row strides of tables and where a chunk begins, must not be
    specialised.
    """
    import triton
    from compile_cases import CASES

    from grpo_kernels.kernels import launch

    found: dict[str, dict[str, set[str]]] = {case: defaultdict(set) for case in CASES}

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        found[case][f"{fn.module.rpartition('.')[2]}.{fn.name.rpartition('.')[2]}"].add(key)
        return True  # that is enough: do not compile

    launch.architecture = lambda device: TARGETS[target].launch
    triton.runtime.driver.set_active(StubDriver(target))
    triton.knobs.runtime.jit_cache_hook = note
    for case in CASES:
        for rows in (1, 16, 17, 4096):
            CASES[case].launch(rows)
    print(json.dumps({case: {kernel: len(keys) for kernel, keys in found[case].items()} for case in CASES}))


# --- checking ---------------------------------------------------------------------------------------------------------


def complaints(found: Kernels) -> list[str]:
    """What is wrong with kernels, one line each."""
    lines = []
    for (name, target), kernel in found.items():
        cores, room = TARGETS[target].tensor_cores, TARGETS[target].shared * 1024
        if kernel.shared > room:
            lines.append(f"{name} on {target}: shared {kernel.shared}, a block has {room}")
        if kernel.multiplies and not kernel.instructions.get(cores):
            lines.append(f"{name} on {target}: no {cores}, its matrix product does without tensor cores")
        if kernel.multiplies and kernel.spills > PRODUCT_SPILLS:
            lines.append(f"{name} on {target}: {kernel.spills} spills, a product may have {PRODUCT_SPILLS}")
    return lines


def uncovered(kernels: Iterable[str], found: Iterable[Name]) -> list[str]:
    launched = {name.split(":")[0] for name, _ in found}
    return [
        f"{kernel} is launched by no case: add one to compile_cases.py" for kernel in sorted(set(kernels) - launched)
    ]


# --- the command ------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels offline.")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--cases", default="", metavar="PART", help="only cases with this in their name")
    parser.add_argument("--triton", metavar="VERSION", help="install it into a folder of its own for this call")
    parser.add_argument("--keys", action="store_true", help="only print how often kernels compile as rows change")
    arguments = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("compile_gate: TRITON_INTERPRET=1 is set, under which Triton compiles nothing; unset it", file=sys.stderr)
        return 2
    if arguments.keys:
        print_keys("sm_90")
        return 0
    with tempfile.TemporaryDirectory(prefix="compile-gate-") as folder:
        if arguments.triton is not None:
            return gate_with(arguments.triton, folder, argv or sys.argv[1:])
        os.environ["TRITON_CACHE_DIR"] = folder  # every kernel is compiled anew; workers inherit this
        return gate(arguments.targets, arguments.cases)


def gate_with(version: str, folder: str, arguments: list[str]) -> int:
    """`main` in a process that finds this version of Triton in the folder."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, f"triton=={version}"]
    subprocess.run(install, check=True)
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]  # an empty entry would be the current directory
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    at = next(i for i, x in enumerate(arguments) if x.startswith("--triton"))
    rest = arguments[:at] + arguments[at + (1 if "=" in arguments[at] else 2) :]
    return subprocess.run([sys.executable, __file__, *rest], env=environment, check=False).returncode


def gate(targets: list[str], part: str) -> int:
    from compile_cases import CASES

    start = time.perf_counter()
    found: dict[Name, Found] = {}
    problems = []
    print(budget.row("target", "regs", "spills", "shared", "kernel", "instructions"))
    cases = [case for case in CASES if part in case]
    jobs = [(case, target) for case in cases for target in targets if is_due(case, target)]
    for case, target, result in compile_all(jobs):
        if isinstance(result, str):
            print(budget.row(target, "-", "-", "-", case, result))
            if not TARGETS[target].may_fail:
                problems.append(f"{case} does not compile for {target}: {result}")
            continue
        for name, kernel in result.items():
            print(budget.describe(name, target, kernel), flush=True)
            found[name, target] = kernel
    print(f"{len(found)} kernels in {time.perf_counter() - start:.0f} s")

    if {case for case, _ in jobs} == {*CASES}:
        problems += uncovered(package_kernels(), found)
    problems += complaints({name: kernel for name, kernel in found.items() if not TARGETS[name[1]].may_fail})
    return budget.verdict(problems)


if __name__ == "__main__":
    sys.exit(main())

"""grpo_kernels/_cpu: the row kernels once per instruction set, everything else once."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from .host import ROOT, HostModule, NinjaFile, compiles, target_machine

SOURCES = ("dispatch", "kept_ids")

# Instruction set -> flags in order of preference: the first that the compiler accepts.
X86_FLAGS = {
    "avx512": (
        "-march=x86-64-v4",
        "-mavx512f -mavx512bw -mavx512cd -mavx512dq -mavx512vl -mavx2 -mfma -mbmi -mbmi2",
    ),
    "avx2": ("-march=x86-64-v3", "-mavx2 -mfma -mbmi -mbmi2"),
}


def instruction_sets(cxx: list[str]) -> dict[str, list[str]]:
    """Name -> compiler flags of every set that is compiled: on x86-64 up to three, elsewhere the baseline alone."""
    found: dict[str, list[str]] = {"baseline": []}
    if target_machine() in ("x86_64", "amd64"):
        for name, candidates in X86_FLAGS.items():
            flags = next((c.split() for c in candidates if compiles(cxx, c.split())), None)
            if flags is not None:
                found[name] = flags
    return found


def build(filename: str) -> Path:
    """The built module, whose file is to have this name."""
    folder = ROOT / "build" / f"cpu-{sysconfig.get_platform()}"  # the objects serve every Python
    ninja_file = NinjaFile(folder, sys.implementation.cache_tag)
    module = HostModule(ninja_file)
    sets = instruction_sets(module.cxx)
    module.add_binding(ROOT / "python" / "cpu_module.cpp")
    have = [f"-DGK_HAVE_{name.upper()}" for name in sets]
    sources = ROOT / "csrc" / "cpu"
    for name in SOURCES:
        module.add(sources / f"{name}.cpp", have if name == "dispatch" else ())
    for name, flags in sets.items():
        for source in ("rows", "sparse", "kept"):
            module.add(sources / f"{source}.cpp", [f"-DGK_ISA={name}", *flags], name=f"{source}_{name}")
    built = module.link(filename, ["-ldl"])  # dlsym, of a library of its own before glibc 2.34
    ninja_file.run()
    return built

"""grpo_kernels/_cpu: the row kernels once per instruction set, everything else once."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from .host import ROOT, HostModule, NinjaFile, target_machine

# Those of torch's own kernels: a processor on which torch takes them has all that ours need.
X86_FLAGS = {
    "avx512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c",
    "avx2": "-mavx2 -mfma -mf16c",
}

LIBRARIES = ("-ldl",)  # dlsym, of a library of its own before glibc 2.34


def build(filename: str) -> Path:
    """Returns the built module, whose file is to have this name."""
    folder = ROOT / "build" / f"cpu-{sysconfig.get_platform()}"  # the objects serve every Python
    ninja_file = NinjaFile(folder, sys.implementation.cache_tag)
    module = HostModule(ninja_file)
    module.add_binding(ROOT / "python" / "cpu_module.cpp")
    add_kernels(module)
    built = module.link(filename, LIBRARIES)
    ninja_file.run()
    return built


def add_kernels(module: HostModule) -> None:
    """Adds the functions of csrc/cpu/api.h, for every instruction set of the processor's kind."""
    sets = {"baseline": ""} | (X86_FLAGS if target_machine() in ("x86_64", "amd64") else {})
    sources = ROOT / "csrc" / "cpu"
    module.add(sources / "dispatch.cpp", ["-DGK_HAVE_X86"] if len(sets) > 1 else ())
    module.add(sources / "allowed_ids.cpp")
    for name, flags in sets.items():
        for source in ("rows", "sparse", "gathered"):
            module.add(sources / f"{source}.cpp", [f"-DGK_ISA={name}", *flags.split()], name=f"{source}_{name}")

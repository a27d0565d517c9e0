"""Builds the compiled CPU kernels, grpo_kernels/_cpu, with ninja. Metadata is in pyproject.toml.

torch is never imported or needed here: the module takes plain addresses, so one build serves every torch version.
Without a working C++ compiler the package installs all the same and uses its torch backend.

    GRPO_KERNELS_NATIVE=0          do not build          GRPO_KERNELS_NATIVE=1   a failed build is an error
    GRPO_KERNELS_CXXFLAGS="..."    extra flags for compiling and linking, e.g. -fsanitize=address
    CXX                            the compiler, default c++ or g++ or clang++
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
MODULE = "grpo_kernels._cpu"
SOURCES = tuple(f"csrc/cpu/{name}.cpp" for name in ("dispatch", "groups", "objective", "reduce", "scatter"))
BINDING = "python/cpu_module.cpp"
ROWS = "csrc/cpu/rows.cpp"  # compiled once per instruction set

# A multiply may fuse with an add; apart from that every operation rounds as written. No -ffast-math: NaN and infinity
# mean something here. -Wno-psabi: vectors are passed between inlined functions only.
CXX_FLAGS = shlex.split(
    "-std=c++17 -O3 -g0 -fPIC -fvisibility=hidden -fno-math-errno -fno-trapping-math -fno-signed-zeros "
    "-ffp-contract=fast -Wall -Wextra -Wno-psabi -pthread"
)
# Instruction set -> flags in order of preference: the first that the compiler knows.
X86_FLAGS = {
    "avx512": (
        "-march=x86-64-v4",
        "-mavx512f -mavx512bw -mavx512cd -mavx512dq -mavx512vl -mavx2 -mfma -mbmi -mbmi2",
    ),
    "avx2": ("-march=x86-64-v3", "-mavx2 -mfma -mbmi -mbmi2"),
}


class BuildError(Exception):
    """The compiled kernels cannot be built here; the message says why."""


def find_compiler() -> list[str]:
    if chosen := os.environ.get("CXX"):
        command = shlex.split(chosen)
        if shutil.which(command[0]) is None:
            raise BuildError(f"CXX={chosen}: no such program")
        return command
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler found (c++, g++ or clang++)")


def compiles(cxx: list[str], flags: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("float twice(float x) { return x + x; }\n")
        command = [*cxx, *flags, "-c", str(source), "-o", str(source.with_suffix(".o"))]
        return subprocess.run(command, capture_output=True).returncode == 0


def instruction_sets(cxx: list[str]) -> dict[str, list[str]]:
    """Name -> compiler flags of every set that is compiled: on x86-64 up to three, elsewhere the baseline alone."""
    found: dict[str, list[str]] = {"baseline": []}
    target = sysconfig.get_platform()  # a macOS universal build compiles both architectures with one command
    if platform.machine().lower() in ("x86_64", "amd64") and "universal" not in target and "arm64" not in target:
        for name, candidates in X86_FLAGS.items():
            flags = next((c.split() for c in candidates if compiles(cxx, c.split())), None)
            if flags is not None:
                found[name] = flags
    return found


def ninja_file(cxx: list[str], output: Path, objects: Path) -> str:
    import pybind11

    extra = shlex.split(os.environ.get("GRPO_KERNELS_CXXFLAGS", ""))
    flags = [*CXX_FLAGS, f"-ffile-prefix-map={ROOT}=.", *shlex.split(os.environ.get("CXXFLAGS", "")), *extra]
    if not compiles(cxx, ["-ffile-prefix-map=a=b"]):
        flags.remove(f"-ffile-prefix-map={ROOT}=.")
    darwin = sys.platform == "darwin"
    link = ["-bundle", "-undefined", "dynamic_lookup"] if darwin else ["-shared", "-Wl,-z,relro,-z,now"]
    sets = instruction_sets(cxx)
    python = [
        "-isystem", pybind11.get_include(), "-isystem", sysconfig.get_paths()["include"], f"-I{ROOT / 'csrc'}"
    ]  # fmt: skip

    lines = [
        f"cxx = {shell(cxx)}",
        f"flags = {shell(flags)}",
        "rule compile",
        "  description = compile $in $extra",
        "  command = $cxx $flags $extra -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        "  description = link $out",
        f"  command = $cxx {shell(link)} $in -o $out -pthread {shell(extra)}",
    ]
    linked = []

    def compile_source(source: str, name: str, extra_flags: list[str]) -> None:
        target = objects / f"{name}.o"
        lines.append(f"build {path(target)}: compile {path(ROOT / source)}")
        lines.append(f"  extra = {shell(extra_flags)}")
        linked.append(target)

    have = [f"-DGK_HAVE_{name.upper()}" for name in sets]
    compile_source(BINDING, "cpu_module", python)
    for source in SOURCES:
        compile_source(source, Path(source).stem, have if "dispatch" in source else [])
    for name, isa_flags in sets.items():
        compile_source(ROWS, f"rows_{name}", [f"-DGK_ISA={name}", *isa_flags])
    lines.append(f"build {path(output)}: link {' '.join(path(o) for o in linked)}")
    return "\n".join(lines) + "\n"


def shell(arguments: list[str]) -> str:
    return shlex.join(arguments).replace("$", "$$")


def path(file: Path) -> str:
    return str(file).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def run_ninja(folder: Path) -> None:
    import ninja

    executable = shutil.which("ninja", path=ninja.BIN_DIR) or "ninja"
    done = subprocess.run([executable, "-C", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, end="", flush=True)
    if done.returncode != 0:
        raise BuildError("the compiler failed, see above")


class NinjaBuild(build_ext):
    """Compiles incrementally: objects live in build/<variant>, not in the temporary folder of an editable install."""

    def run(self) -> None:
        wanted = os.environ.get("GRPO_KERNELS_NATIVE", "")
        if wanted == "0":
            return self.skip("GRPO_KERNELS_NATIVE=0")
        try:
            if sys.platform == "win32":
                raise BuildError("not supported on Windows")
            self.build_module()
        except (BuildError, ImportError, OSError) as error:
            if wanted == "1":
                raise SystemExit(f"grpo_kernels: GRPO_KERNELS_NATIVE=1, but {error}") from error
            self.skip(str(error))

    def skip(self, reason: str) -> None:
        Path(self.get_ext_fullpath(MODULE)).unlink(missing_ok=True)  # of an earlier build: it would be shipped, or used
        self.extensions = []
        message = f"grpo_kernels: the compiled CPU kernels were not built ({reason}); the torch backend will be used."
        print(message, file=sys.stderr, flush=True)

    def build_module(self) -> None:
        variant = f"cpu-{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
        folder = ROOT / "build" / variant
        folder.mkdir(parents=True, exist_ok=True)
        built = folder / Path(self.get_ext_filename(MODULE)).name
        (folder / "build.ninja").write_text(ninja_file(find_compiler(), built, folder))
        run_ninja(folder)
        target = Path(self.get_ext_fullpath(MODULE))
        target.parent.mkdir(parents=True, exist_ok=True)
        replacement = target.with_name(target.name + ".new")
        shutil.copyfile(built, replacement)
        os.replace(replacement, target)  # a process that has the old module loaded keeps it

    def get_source_files(self) -> list[str]:
        return [str(p.relative_to(ROOT)) for d in ("csrc", "python") for p in (ROOT / d).rglob("*") if p.is_file()]

    def get_outputs(self) -> list[str]:
        return [self.get_ext_fullpath(extension.name) for extension in self.extensions]


if __name__ == "__main__":
    setup(
        ext_modules=[Extension(MODULE, [])],
        cmdclass={"build_ext": NinjaBuild},
        # one folder per variant: what another build left in build/lib must not get into this wheel
        options={"build": {"build_base": "build/cpu"}},
    )

"""The C++ compiler, and ninja, which compiles only what changed."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXPORTS = Path(__file__).with_name("exports.map")

# A multiply may fuse with an add; apart from that every operation rounds as written. No -ffast-math: NaN and infinity
# mean something here. -Wno-psabi: vectors are passed between inlined functions only.
CXX_FLAGS = shlex.split(
    "-std=c++17 -O3 -g0 -fPIC -fvisibility=hidden -fno-math-errno -fno-trapping-math -fno-signed-zeros "
    "-ffp-contract=fast -Wall -Wextra -Wno-psabi -pthread"
)


class BuildError(Exception):
    """A compiled module cannot be built here; the message says why."""


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


def target_machine() -> str:
    """Returns the processor that is compiled for: in a cross build too, sysconfig has it from _PYTHON_HOST_PLATFORM.

    "universal2" of macOS is none of the others: one command compiles for two.
    """
    return sysconfig.get_platform().split("-")[-1].lower()


def write_if_changed(file: Path, text: str) -> None:
    """Writes a file; an unchanged one keeps its time, and what is made of it is up to date."""
    if not file.exists() or file.read_text() != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


class NinjaFile:
    """What is to be built in `folder`. Commands run there, so that inputs may be named relative to it."""

    def __init__(self, folder: Path, name: str = "build") -> None:
        from ninja import ninja_syntax

        self.folder, self.name, self.text = folder, f"{name}.ninja", io.StringIO()
        writer = ninja_syntax.Writer(self.text, width=10**9)
        self.rule, self._build = writer.rule, writer.build

    def build(
        self, output: Path, rule: str, inputs: Iterable[Path], implicit: Iterable[Path] = (), **variables: str
    ) -> Path:
        files = ([str(file) for file in some] for some in (inputs, implicit))
        self._build(str(output), rule, *files, variables=variables)
        return output

    def run(self) -> None:
        import ninja

        write_if_changed(self.folder / self.name, self.text.getvalue())
        executable = shutil.which("ninja", path=ninja.BIN_DIR) or "ninja"
        command = [executable, "-C", str(self.folder), "-f", self.name]
        # Rules name the interpreter through the environment: in an isolated build its path is another every time, and a
        # command that differs is run again.
        environment = {**os.environ, "GRPO_KERNELS_PYTHON": sys.executable}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(done.stdout, end="", flush=True)
        if done.returncode != 0:
            raise BuildError("the compiler failed, see above")


class HostModule:
    """The C++ part of an extension module, as rules of a ninja file."""

    def __init__(self, ninja_file: NinjaFile, objects: str = ".") -> None:
        """`objects`: where in the ninja file's folder they lie."""
        self.ninja = ninja_file
        self.folder = ninja_file.folder / objects
        self.cxx = find_compiler()
        extra = shlex.split(os.environ.get("GRPO_KERNELS_CXXFLAGS", ""))
        own = [*CXX_FLAGS, f"-ffile-prefix-map={ROOT}=."]
        flags = [*own, *shlex.split(os.environ.get("CXXFLAGS", "")), *extra]
        link = ["-shared", "-Wl,-z,relro,-z,now", f"-Wl,--version-script={EXPORTS}"]
        if sys.platform == "darwin":
            link = ["-bundle", "-undefined", "dynamic_lookup"]
        link += shlex.split(os.environ.get("LDFLAGS", ""))
        cxx = shell(self.cxx)
        self.ninja.rule(
            "compile",
            f"{cxx} {shell(flags)} $extra -MMD -MF $out.d -c $in -o $out",
            "compile $in $extra",
            depfile="$out.d",
            deps="gcc",
        )
        for rule, kind in (("link", link), ("program", [])):
            command = f"{cxx} {shell(kind)} $in -o $out -pthread {shell(extra)} $libraries"
            self.ninja.rule(rule, command, "link $out")
        self.objects: list[Path] = []

    def add(self, source: Path, extra: Iterable[str] = (), name: str = "", implicit: Iterable[Path] = ()) -> None:
        target = self.folder / f"{name or source.stem}.o"
        self.objects.append(self.ninja.build(target, "compile", [source], implicit, extra=shell(extra)))

    def add_binding(self, source: Path) -> None:
        """Adds the one file that is compiled for each Python."""
        self.add(source, [*python_flags(), f"-I{ROOT / 'csrc'}"], name=f"{source.stem}.{sys.implementation.cache_tag}")

    def link(self, name: str | Path, libraries: Iterable[str] = (), *, rule: str = "link") -> Path:
        """Links the objects. `rule`: "link" makes a module, "program" a program."""
        return self.ninja.build(self.ninja.folder / name, rule, self.objects, libraries=shell(libraries))


def python_flags() -> list[str]:
    """Returns flags for the headers of Python and of pybind11, without the latter's checks of Python's lock at every
    count."""
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise BuildError(
            f"Python.h of Python {version} is not in {python}; Debian and Ubuntu have it in python{version}-dev"
        )
    try:
        import pybind11
    except ImportError:
        raise BuildError("pybind11 is missing: pip install pybind11") from None
    return ["-DNDEBUG", "-isystem", str(python), "-isystem", pybind11.get_include()]


def shell(arguments: Iterable[str]) -> str:
    return shlex.join(arguments).replace("$", "$$")

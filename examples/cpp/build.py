"""Builds main.cu with the CUDA kernels into a program, which runs without Python, torch and Triton; or extension.cpp
with the CPU kernels into a module for this Python.

    python examples/cpp/build.py PROGRAM               needs what a build of the CUDA kernels needs, see CONTRIBUTING.md
    python examples/cpp/build.py --extension FOLDER    needs a C++ compiler, ninja and pybind11

The CUDA kernels are csrc/cuda/*.cpp with the device code of NVRTC embedded, for the GPUs that GRPO_KERNELS_CUDA_ARCHS
names, or those that are here; the CPU kernels are csrc/cpu. Add them to what is yours so, with csrc among its folders
of headers.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from kernel_build import cpu, cuda  # noqa: E402
from kernel_build.host import BuildError, HostModule, NinjaFile  # noqa: E402


def build_program(program: Path, compiler: cuda.Compiler) -> None:
    runtimes = sorted(compiler.include.parent.glob("lib*/libcudart.so*"))
    if not runtimes:
        raise BuildError(f"no libcudart beside {compiler.include}")
    ninja_file = NinjaFile(cuda.folder_of(compiler), "example")
    host = HostModule(ninja_file, "example-objects")
    cuda.add_kernels(ninja_file, host, compiler, cuda.chosen_architectures(compiler, development=True))
    host.add(ROOT / "examples" / "cpp" / "main.cu", ["-x", "c++", f"-I{ROOT / 'csrc'}"])
    host.link(program.resolve(), ["-ldl", str(runtimes[0]), f"-Wl,-rpath,{runtimes[0].parent}"], rule="program")
    ninja_file.run()


def build_extension(folder: Path) -> None:
    import pybind11

    ninja_file = NinjaFile(ROOT / "build" / f"cpu-{sysconfig.get_platform()}", "example")
    host = HostModule(ninja_file)
    headers = (pybind11.get_include(), sysconfig.get_paths()["include"], str(ROOT / "csrc"))
    host.add(ROOT / "examples" / "cpp" / "extension.cpp", [part for path in headers for part in ("-isystem", path)])
    cpu.add_kernels(host)
    built = host.link("extension" + sysconfig.get_config_var("EXT_SUFFIX"), cpu.LIBRARIES)
    ninja_file.run()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(built, folder)


if __name__ == "__main__":
    try:
        if sys.argv[1] == "--extension":
            build_extension(Path(sys.argv[2]))
        else:
            build_program(Path(sys.argv[1]), cuda.find_device_compiler())
    except BuildError as error:
        sys.exit(f"build.py: {error}")

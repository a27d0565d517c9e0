"""Builds main.cu and the CUDA kernels into one program, which runs without Python, torch and Triton.

    python examples/cpp/build.py PROGRAM      needs what a build of the CUDA kernels needs, see CONTRIBUTING.md

The kernels are csrc/cuda/*.cpp with the device code of NVRTC embedded, for the GPUs that GRPO_KERNELS_CUDA_ARCHS names,
or those that are here. Add them to a program of yours so, with csrc among its folders of headers.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from kernel_build import cuda  # noqa: E402
from kernel_build.host import BuildError, HostModule, NinjaFile  # noqa: E402


def build(program: Path, compiler: cuda.Compiler) -> None:
    runtimes = sorted(compiler.include.parent.glob("lib*/libcudart.so*"))
    if not runtimes:
        raise BuildError(f"no libcudart beside {compiler.include}")
    ninja_file = NinjaFile(cuda.folder_of(compiler), "example")
    host = HostModule(ninja_file, "example-objects")
    cuda.add_kernels(ninja_file, host, compiler, cuda.chosen_architectures(compiler, development=True))
    host.add(ROOT / "examples" / "cpp" / "main.cu", ["-x", "c++", f"-I{ROOT / 'csrc'}"])
    host.link(program.resolve(), ["-ldl", str(runtimes[0]), f"-Wl,-rpath,{runtimes[0].parent}"], rule="program")
    ninja_file.run()


if __name__ == "__main__":
    try:
        build(Path(sys.argv[1]), cuda.find_device_compiler())
    except BuildError as error:
        sys.exit(f"build.py: {error}")

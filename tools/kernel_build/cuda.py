"""grpo_kernels/_cuda: device code compiled by nvcc or NVRTC, embedded in a host module that g++ compiles.

The host part is the same for every CUDA version: it loads the embedded images through the driver.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from .host import ROOT, BuildError, HostModule, NinjaFile, find_compiler, path, shell, write_if_changed
from .images import Image, table
from .nvrtc import Nvrtc, NvrtcError

FOLDER = ROOT / "csrc" / "cuda"

# A device runs the machine code of its own major version, and 9.0 that with its specific instructions ("a"); the newest
# is compiled to PTX as well, for later devices. Architectures that a CUDA version does not support are left out.
FULL = (80, 86, 89, 90, 100, 120)
SPECIFIC = (90,)
# Without a GPU, for development: one architecture of each kind of kernel.
DEVELOPMENT = "80 90a"

NVCC_FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr")
NVRTC_FLAGS = ("--std=c++17", "-default-device")


class Architecture(NamedTuple):
    capability: int  # 90 for 9.0
    specific: bool = False  # code for just this capability, with instructions that others lack
    ptx: bool = False

    def __str__(self) -> str:
        return self.virtual if self.ptx else self.virtual.replace("compute", "sm")

    @property
    def virtual(self) -> str:
        """The architecture that the compiler's front end is run for."""
        return f"compute_{self.capability}{'a' if self.specific else ''}"


# --- compilers of device code -----------------------------------------------------------------------------------------


class NvccCompiler:
    name = "nvcc"

    def __init__(self, nvcc: Path) -> None:
        self.nvcc = nvcc
        said = self.ask("--version")
        release = re.search(r"release (\d+)\.(\d+)", said.stdout)
        if said.returncode != 0 or release is None:
            raise BuildError(f"{nvcc} --version fails: {complaint(said.stderr or said.stdout)}")
        self.version = int(release[1]), int(release[2])
        self.capabilities = [int(found) for found in re.findall(r"compute_(\d+)", self.ask("--list-gpu-arch").stdout)]
        # The compiler of the host code also preprocesses the device code, unless NVCC_CCBIN names another.
        cxx = find_compiler()
        self.flags = [*NVCC_FLAGS, *extra_flags()]
        if "NVCC_CCBIN" not in os.environ and len(cxx) == 1:
            self.flags += ["-ccbin", cxx[0]]
        probe = self.ask(*self.flags, "-E", "-x", "cu", os.devnull)
        if probe.returncode != 0:
            raise BuildError(
                f"{nvcc} has no host compiler that works ({complaint(probe.stderr)}): install a g++ that CUDA "
                f"{dotted(self.version)} supports, or name one: NVCC_CCBIN=/path/to/g++"
            )

    def __str__(self) -> str:
        return f"{self.name} {dotted(self.version)}"

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run([str(self.nvcc), *arguments], capture_output=True, text=True)
        except OSError as error:
            raise BuildError(f"{self.nvcc} does not run: {error}") from error

    def rule(self, ninja_file: NinjaFile) -> None:
        command = f"{shell([str(self.nvcc), *self.flags])} $architecture -MMD -MF $out.d $in -o $out"
        ninja_file.rule("device", command, "nvcc $in $architecture", depfile=True)

    def compile(self, ninja_file: NinjaFile, source: Path, output: Path, architecture: Architecture) -> None:
        # Not -arch=sm_90a, which leaves to nvcc which other passes it adds.
        kind, virtual = "-ptx" if architecture.ptx else "-cubin", architecture.virtual
        ninja_file.build(output, "device", [source], architecture=f"{kind} -gencode=arch={virtual},code={architecture}")


class NvrtcCompiler:
    name = "nvrtc"

    def __init__(self, folder: Path) -> None:
        libraries = sorted(folder.glob("**/libnvrtc.so.*"))
        if not libraries:
            raise BuildError(
                f"GRPO_KERNELS_NVRTC={folder}: no libnvrtc.so.* in it; it is a folder into which pip has installed "
                "nvidia-cuda-nvrtc-cu12 and nvidia-cuda-runtime-cu12 (for CUDA 13: the same without -cu12)"
            )
        headers = sorted(folder.glob("**/include/cuda_bf16.h"))
        if not headers:
            raise BuildError(f"GRPO_KERNELS_NVRTC={folder}: no include/cuda_bf16.h in it; nvidia-cuda-runtime has it")
        self.library, self.include = libraries[0], headers[0].parent
        self.flags = [*NVRTC_FLAGS, *extra_flags()]
        try:
            nvrtc = Nvrtc(self.library)
            self.version, self.capabilities = nvrtc.version(), nvrtc.capabilities()
        except (NvrtcError, OSError) as error:
            raise BuildError(f"{self.library} cannot be used: {error}") from error

    def __str__(self) -> str:
        return f"{self.name} {dotted(self.version)}"

    def rule(self, ninja_file: NinjaFile) -> None:
        script = Path(__file__).with_name("nvrtc.py")
        options = shell([*self.flags, f"-I{FOLDER / 'nvrtc'}", f"-I{self.include}"])
        command = f'"$$GRPO_KERNELS_PYTHON" {path(script)} {path(self.library)} $in $out $architecture {options}'
        ninja_file.rule("device", command, "nvrtc $in $architecture")

    def compile(self, ninja_file: NinjaFile, source: Path, output: Path, architecture: Architecture) -> None:
        # NVRTC does not say what a file includes, so every header may be.
        headers = sorted((ROOT / "csrc").rglob("*.*h"))
        ninja_file.build(output, "device", [source], headers, architecture=str(architecture))


Compiler = NvccCompiler | NvrtcCompiler


def extra_flags() -> list[str]:
    return shlex.split(os.environ.get("GRPO_KERNELS_NVCCFLAGS", ""))


def find_device_compiler() -> Compiler:
    if folder := os.environ.get("GRPO_KERNELS_NVRTC"):
        return NvrtcCompiler(Path(folder).resolve())
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            nvcc = Path(home, "bin", "nvcc")
            if not nvcc.exists():
                raise BuildError(f"{variable}={home}: no bin/nvcc there; name a CUDA toolkit, or unset {variable}")
            return NvccCompiler(nvcc)
    found = shutil.which("nvcc", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
    if found is None:
        raise BuildError("no nvcc found: CUDA_HOME=/path/to/cuda names a CUDA toolkit")
    return NvccCompiler(Path(found))


def dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def complaint(text: str) -> str:
    """The line that says most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


# --- architectures ----------------------------------------------------------------------------------------------------


def architectures(setting: str, compiler: Compiler, *, development: bool) -> list[Architecture]:
    """What to compile for: a list as in "80 90a 120+ptx", "native" (the GPUs of this machine), "full", or "" (native
    where there is a GPU, and else full, or for development less)."""
    known = compiler.capabilities
    if setting in ("", "native"):
        present = present_capabilities()
        if present:
            return sorted({newest_for(capability, known) for capability in present})
        if setting:
            raise BuildError("GRPO_KERNELS_CUDA_ARCHS=native, but no NVIDIA GPU answers here; list some: '80 90a'")
        setting = DEVELOPMENT if development else "full"
    if setting == "full":
        full = [capability for capability in FULL if capability in known]
        return [*(machine_code(capability) for capability in full), Architecture(full[-1], ptx=True)]
    chosen = []
    for item in re.split(r"[\s;,]+", setting.strip()):
        match = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)(a?)(\+ptx)?", item, flags=re.IGNORECASE)
        if match is None:
            raise BuildError(f"GRPO_KERNELS_CUDA_ARCHS={setting!r}: {item!r} is not like 80, 90a or 120+ptx")
        capability = int(match[1] + match[2])
        if capability not in known:
            raise BuildError(
                f"GRPO_KERNELS_CUDA_ARCHS={setting!r}: CUDA {dotted(compiler.version)} does not compile for {item}, "
                f"but for {' '.join(map(str, known))}"
            )
        chosen.append(Architecture(capability, specific=bool(match[3])))
        if match[4]:
            chosen.append(Architecture(capability, ptx=True))
    return list(dict.fromkeys(chosen))


def machine_code(capability: int) -> Architecture:
    return Architecture(capability, specific=capability in SPECIFIC)


def newest_for(capability: int, known: Sequence[int]) -> Architecture:
    """What runs on this device: its own machine code, or for a compiler that is older than it the newest PTX."""
    if capability in known:
        return machine_code(capability)
    older = [other for other in known if other < capability]
    if not older:
        raise BuildError(f"this CUDA does not compile for the GPU here, of compute capability {capability / 10}")
    return Architecture(max(older), ptx=True)


def present_capabilities() -> list[int]:
    """Of the GPUs that the driver finds; empty without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, device, major, minor = (ctypes.c_int() for _ in range(4))
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    found = []
    for ordinal in range(count.value):
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        found.append(10 * major.value + minor.value)
    return sorted(set(found))


# --- the build --------------------------------------------------------------------------------------------------------


def device_sources(architecture: Architecture) -> list[Path]:
    """name_sm90.cu is for sm_90a alone, every other .cu file for all."""
    chosen = []
    for source in sorted(FOLDER.glob("*.cu")):
        only = re.search(r"_sm(\d+)$", source.stem)
        if only is None or architecture == Architecture(int(only[1]), specific=True):
            chosen.append(source)
    return chosen


def folder_of(compiler: Compiler) -> Path:
    """The images serve every Python and every host; a CUDA version and a compiler have their own."""
    return ROOT / "build" / f"cuda{dotted(compiler.version)}-{compiler.name}"


def add_images(ninja_file: NinjaFile, compiler: Compiler, chosen: Iterable[Architecture]) -> list[Image]:
    compiler.rule(ninja_file)
    images = []
    for architecture in chosen:
        for source in device_sources(architecture):
            file = Path("images", str(architecture), f"{source.stem}.{'ptx' if architecture.ptx else 'cubin'}")
            (ninja_file.folder / file).parent.mkdir(parents=True, exist_ok=True)
            compiler.compile(ninja_file, source, file, architecture)
            images.append(Image(str(architecture), source.stem, file))
    return images


def build_images(setting: str, *flags: str) -> tuple[str, Path, list[Image]]:
    """The images alone: what compiled them ("nvcc 13.0"), the folder to which their files are relative, and which.

    Those with further flags are in a folder of their own.
    """
    compiler = find_device_compiler()
    compiler.flags += flags
    ninja_file = NinjaFile(folder_of(compiler).joinpath(*(flag.strip("-") for flag in flags)), "images")
    images = add_images(ninja_file, compiler, architectures(setting, compiler, development=False))
    ninja_file.run()
    return str(compiler), ninja_file.folder, images


def build(filename: str, *, development: bool) -> Path:
    """The built module, whose file is to have this name."""
    compiler = find_device_compiler()
    chosen = architectures(os.environ.get("GRPO_KERNELS_CUDA_ARCHS", ""), compiler, development=development)
    print(f"grpo_kernels: {compiler} for {' '.join(map(str, chosen))}", flush=True)
    folder = folder_of(compiler)
    ninja_file = NinjaFile(folder, f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}")
    images = add_images(ninja_file, compiler, chosen)
    module = HostModule(ninja_file, sysconfig.get_platform())
    module.add_binding(ROOT / "python" / "cuda_module.cpp")
    for source in sorted(FOLDER.glob("*.cpp")):
        module.add(source)
    generated = folder / "images.cpp"
    write_if_changed(generated, table(images, compiler.version))
    module.add(generated, [f"-I{ROOT / 'csrc'}"], implicit=[image.file for image in images])
    built = module.link(filename, ["-ldl"])
    ninja_file.run()
    return built

"""grpo_kernels/_cuda: device code compiled by NVRTC, embedded in a host module that a C++ compiler makes.

The host part is the same for every CUDA version: it loads the embedded images through the driver.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import site
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from .host import ROOT, BuildError, HostModule, NinjaFile, shell, write_if_changed
from .images import Image, table
from .nvrtc import Nvrtc, NvrtcError

FOLDER = ROOT / "csrc" / "cuda"

# A device runs the machine code of its own major version, and 9.0 that with its specific instructions ("a"); the newest
# is compiled to PTX as well, for later devices. Architectures that a CUDA version does not support are left out.
FULL = (80, 86, 89, 90, 100, 120)
SPECIFIC = (90,)
# Without a GPU, for development: one architecture of each kind of kernel.
DEVELOPMENT = "80 90a"

NVRTC_FLAGS = ("--std=c++17", "-default-device")


# --- the compiler of device code --------------------------------------------------------------------------------------

# Where the library lies below a folder of pip's packages, of CUDA 13 and of CUDA 12, or below a toolkit.
LIBRARIES = ("nvidia/cu*/lib", "nvidia/cuda_nvrtc/lib", "lib64", "lib", "targets/*/lib")
# pip's packages for each CUDA version: the compiler, and the headers that kernels include.
PACKAGES = {
    "cu128": ("nvidia-cuda-nvrtc-cu12==12.8.93", "nvidia-cuda-runtime-cu12==12.8.90"),
    "cu130": ("nvidia-cuda-nvrtc==13.0.88", "nvidia-cuda-runtime==13.0.96"),
}


class Compiler:
    """NVRTC, which comes with every CUDA build of torch, with toolkits, and from PyPI."""

    def __init__(self, library: Path, include: Path) -> None:
        self.library, self.include = library, include
        extra = shlex.split(os.environ.get("GRPO_KERNELS_NVRTCFLAGS", ""))
        self.options = [*NVRTC_FLAGS, *extra, f"-I{FOLDER / 'nvrtc'}", f"-I{include}"]
        try:
            nvrtc = Nvrtc(library)
            self.version, self.capabilities = nvrtc.version(), nvrtc.capabilities()
        except (NvrtcError, OSError) as error:
            raise BuildError(f"{library} cannot be used: {error}") from error

    def __str__(self) -> str:
        return f"NVRTC {dotted(self.version)}"


def find_device_compiler() -> Compiler:
    """Returns NVRTC of the folder GRPO_KERNELS_NVRTC, else of a toolkit that is named, of this Python's packages, or of
    the usual toolkit."""
    if folder := os.environ.get("GRPO_KERNELS_NVRTC"):
        found = compiler_in(Path(folder).resolve())
        if found is None:
            raise BuildError(f"GRPO_KERNELS_NVRTC={folder}: no NVRTC with headers in it; {how_to_install()}")
        return found
    named = (os.environ.get(variable) for variable in ("CUDA_HOME", "CUDA_PATH"))
    # pip takes site-packages from sys.path while it builds in isolation, with packages of its own there instead.
    packages = (*sys.path, *(sysconfig.get_path(name) for name in ("purelib", "platlib")), site.getusersitepackages())
    unusable = []
    for place in filter(None, dict.fromkeys((*named, *packages, "/usr/local/cuda"))):
        try:
            if found := compiler_in(Path(place).resolve()):
                return found
        except BuildError as error:
            print(f"grpo_kernels: {error}; looking elsewhere", file=sys.stderr, flush=True)
            unusable.append(f"{error}; ")
    raise BuildError(f"no NVRTC found; {''.join(unusable)}{how_to_install()}")


def compiler_in(folder: Path) -> Compiler | None:
    libraries = (file for pattern in LIBRARIES for file in sorted(folder.glob(f"{pattern}/libnvrtc.so.*")))
    for library in libraries:
        root = library.parents[1]
        for include in (root / "include", root.parent / "cuda_runtime" / "include"):
            if (include / "cuda_bf16.h").exists():
                return Compiler(library, include)
    return None


def how_to_install() -> str:
    versions = " or ".join(f"pip install {' '.join(PACKAGES[name])}" for name in ("cu130", "cu128"))
    return f"every CUDA build of torch has it, and so has {versions}"


def build_requirements() -> list[str]:
    """Packages that a build in isolation needs: NVRTC where nothing else brings it."""
    if not is_wanted():
        return []
    try:
        find_device_compiler()
    except BuildError:
        return list(PACKAGES["cu128"])  # drivers of CUDA 12 and 13 run what it makes
    return []


def is_wanted() -> bool:
    """Says whether a build includes the CUDA kernels: as GRPO_KERNELS_CUDA says, else where there is a GPU."""
    if not sys.platform.startswith("linux"):
        return False
    setting = os.environ.get("GRPO_KERNELS_CUDA") or ("1" if os.environ.get("GRPO_KERNELS_CUDA_ARCHS") else "")
    return setting == "1" or (setting != "0" and bool(present_capabilities()))


def dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


# --- architectures ----------------------------------------------------------------------------------------------------


def architectures(setting: str, compiler: Compiler, *, development: bool) -> list[str]:
    """Returns what to compile for, "sm_90a" (machine code) or "compute_120" (PTX): a list as in "80 90a 120+ptx",
    "native" (the GPUs of this machine), "full", or "" (native where there is a GPU, and else full, or for development
    less)."""
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
        return [*map(machine_code, full), f"compute_{full[-1]}"]
    chosen = []
    for item in re.split(r"[\s;,]+", setting.strip()):
        match = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)(a?)(\+ptx)?", item, flags=re.IGNORECASE)
        if match is None:
            raise BuildError(f"GRPO_KERNELS_CUDA_ARCHS={setting!r}: {item!r} is not like 80, 90a or 120+ptx")
        capability = match[1] + match[2]
        if int(capability) not in known:
            raise BuildError(
                f"GRPO_KERNELS_CUDA_ARCHS={setting!r}: CUDA {dotted(compiler.version)} does not compile for {item}, "
                f"but for {' '.join(map(str, known))}"
            )
        chosen.append(f"sm_{capability}{match[3].lower()}")
        if match[4]:
            chosen.append(f"compute_{capability}")
    return list(dict.fromkeys(chosen))


def machine_code(capability: int) -> str:
    return f"sm_{capability}a" if capability in SPECIFIC else f"sm_{capability}"


def newest_for(capability: int, known: Sequence[int]) -> str:
    """Returns what runs on this device: its own machine code, or for a compiler that is older than it the newest
    PTX."""
    if capability in known:
        return machine_code(capability)
    older = [other for other in known if other < capability]
    if not older:
        raise BuildError(f"this CUDA does not compile for the GPU here, of compute capability {capability / 10}")
    return f"compute_{max(older)}"


def present_capabilities() -> list[int]:
    """Returns the capabilities of the GPUs that the driver finds; empty without a driver."""
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


def device_sources(architecture: str) -> list[Path]:
    """Returns the sources for an architecture: name_sm90.cu is for sm_90a alone, every other .cu file for all."""
    sources = sorted(FOLDER.glob("*.cu"))
    return [source for source in sources if architecture == "sm_90a" or not source.stem.endswith("_sm90")]


def folder_of(compiler: Compiler) -> Path:
    """Returns the folder of a CUDA version, whose images serve every Python and every host."""
    return ROOT / "build" / f"cuda{dotted(compiler.version)}"


def add_images(ninja_file: NinjaFile, compiler: Compiler, chosen: Iterable[str]) -> list[Image]:
    program, library = (shell([str(file)]) for file in (Path(__file__).with_name("nvrtc.py"), compiler.library))
    options = f"{library} $in $out $architecture {shell(compiler.options)}"
    command = f'"$$GRPO_KERNELS_PYTHON" {program} {options}'
    ninja_file.rule("device", command, "nvrtc $in $architecture")
    headers = sorted((ROOT / "csrc").rglob("*.*h"))  # NVRTC does not say which of them a file includes
    images = []
    for architecture in chosen:
        for source in device_sources(architecture):
            file = Path("images", architecture, f"{source.stem}.{'cubin' if architecture.startswith('sm_') else 'ptx'}")
            (ninja_file.folder / file).parent.mkdir(parents=True, exist_ok=True)
            ninja_file.build(file, "device", [source], headers, architecture=architecture)
            images.append(Image(architecture, source.stem, file))
    return images


def build_images(compiler: Compiler, setting: str) -> tuple[Path, list[Image]]:
    """Builds the images alone; returns them and the folder to which their files are relative."""
    ninja_file = NinjaFile(folder_of(compiler), "images")
    images = add_images(ninja_file, compiler, architectures(setting, compiler, development=False))
    ninja_file.run()
    return ninja_file.folder, images


def chosen_architectures(compiler: Compiler, *, development: bool) -> list[str]:
    chosen = architectures(os.environ.get("GRPO_KERNELS_CUDA_ARCHS", ""), compiler, development=development)
    print(f"grpo_kernels: {compiler} ({compiler.library.parent}) for {' '.join(chosen)}", flush=True)
    return chosen


def add_kernels(ninja_file: NinjaFile, host: HostModule, compiler: Compiler, chosen: Iterable[str]) -> None:
    """Adds the functions of csrc/cuda/api.h, with the device code for these architectures in them."""
    images = add_images(ninja_file, compiler, chosen)
    for source in sorted(FOLDER.glob("*.cpp")):
        host.add(source)
    generated = ninja_file.folder / "images.cpp"
    write_if_changed(generated, table(images, compiler.version))
    host.add(generated, [f"-I{ROOT / 'csrc'}"], implicit=[image.file for image in images])


def build(filename: str, *, development: bool) -> Path:
    """Returns the built module, whose file is to have this name."""
    if not is_wanted():
        raise BuildError("no GPU answers here; GRPO_KERNELS_CUDA=1 builds them for every architecture")
    compiler = find_device_compiler()
    ninja_file = NinjaFile(folder_of(compiler), f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}")
    module = HostModule(ninja_file, sysconfig.get_platform())
    module.add_binding(ROOT / "python" / "cuda_module.cpp")
    add_kernels(ninja_file, module, compiler, chosen_architectures(compiler, development=development))
    built = module.link(filename, ["-ldl"])
    ninja_file.run()
    return built

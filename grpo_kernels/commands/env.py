"""`grpo-kernels env`: versions, devices, what is compiled in, and which backend each device would use and why.

It needs nothing but torch, since it is used where something else is missing.
"""

from __future__ import annotations

import os
import platform
import re
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..kernels import auto_choice, candidates, registered_backends, unavailable_reason
from ..kernels.compiled.cpu import compiled_module as cpu_module
from ..kernels.compiled.cuda import compiled_module, version

# Variables that change what runs here, besides our own GRPO_KERNELS_*.
VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_FORCE_PTX_JIT", "CUDA_HOME"),
    *("NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TRITON_INTERPRET", "TRITON_CACHE_DIR"),
    *("TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
)


def collect() -> dict[str, Any]:
    """Returns all that `render` shows, ready for JSON; never raises and warns of nothing: warnings are part of it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module, _ = compiled_module()
        variables = {name: os.environ[name] for name in sorted(os.environ)}
        facts = {
            "versions": _versions(module),
            "platform": f"{platform.system()} {platform.machine()}",
            "architectures": "" if module is None else str(module.built_architectures()),
            "devices": [_describe_device(device, module) for device in _devices()],
            "backends": {name: _everywhere(name) for name in registered_backends()},
            "environment": {n: x for n, x in variables.items() if n in VARIABLES or n.startswith("GRPO_KERNELS_")},
        }
    return facts | {"warnings": list(dict.fromkeys(str(warning.message) for warning in said))}


def render(facts: dict[str, Any]) -> str:
    """Returns the same for people. The first line holds the versions, for the top of a bug report."""
    known = {name: version or "not installed" for name, version in facts["versions"].items()}
    packages = ", ".join(
        f"{name} {known[name]}" for name in ("grpo_kernels", "torch", "triton", "transformers", "python")
    )
    cuda_versions = [facts["versions"][f"cuda_of_{part}"] or "none" for part in ("torch", "kernels", "driver")]
    driver = f" ({known['driver']})" if facts["versions"]["driver"] else ""
    cuda = "CUDA of torch {}, of the kernels {}, of the driver {}".format(*cuda_versions)
    lines = [f"{packages}; {facts['platform']}; {cuda}{driver}", ""]
    for device in facts["devices"]:
        lines.append(f"{device['device']:8}{_line_of_device(device)}")
        order = ", ".join(device["candidates"])
        lines.append(f"{'':8}uses {device['backend']!r}: the first that can run, of {order}")
        lines += [f"{'':8}not {name!r}: {reason}" for name, reason in device["refused"].items()]
    seen = {name for device in facts["devices"] for name in device["candidates"]}
    lines += [f"{'':8}not {name!r}: {why}" for name, why in facts["backends"].items() if why and name not in seen]
    variables = facts["environment"]
    lines += [
        "",
        f"CUDA kernels built for: {facts['architectures'] or 'nothing'}",
        "environment: " + (" ".join(f"{name}={value}" for name, value in variables.items()) or "nothing set"),
    ]
    return "\n".join([*lines, *(f"warning: {text}" for text in facts["warnings"])])


# --- facts ----------------------------------------------------------------------------------------------------------


def _versions(module: Any) -> dict[str, str | None]:
    built, driver = (0, 0) if module is None else (module.built_for_cuda(), module.driver_cuda())
    return {
        "grpo_kernels": package_version("grpo-kernels") or __version__,  # the installed one has the tag of its wheel
        "torch": str(torch.__version__),
        "triton": package_version("triton"),
        "transformers": package_version("transformers"),
        "python": platform.python_version(),
        "cuda_of_torch": torch.version.cuda or (torch.version.hip and f"HIP {torch.version.hip}"),
        "cuda_of_kernels": version(built) if built else None,
        "cuda_of_driver": version(driver) if driver else None,
        "driver": driver_version(),
    }


def processor() -> str:
    """Returns the name of the CPU."""
    names = re.findall(r"model name\s*: (.*)", read_text("/proc/cpuinfo"))
    return names[0] if names else platform.processor() or platform.machine()


def driver_version() -> str | None:
    """Returns the version of NVIDIA's driver, None without one."""
    match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", read_text("/proc/driver/nvidia/version"))
    return match and match[1]


def read_text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def package_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[torch.device]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(count))]


def _describe_device(device: torch.device, module: Any) -> dict[str, Any]:
    choice = auto_choice(device, torch.bfloat16)
    facts = {
        "device": str(device),
        "backend": choice.name,
        "candidates": list(candidates(device)),
        "refused": choice.refused,
    }
    if device.type == "cpu":
        compiled, _ = cpu_module()
        return facts | {
            "name": processor(),
            "threads": torch.get_num_threads(),
            "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
            "instruction_set": None if compiled is None else compiled.cpu_isa(),
            "openmp": compiled is not None and compiled.uses_openmp(),
        }
    properties = torch.cuda.get_device_properties(device.index)
    return facts | {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "image": None if module is None else module.image_for(10 * properties.major + properties.minor) or None,
    }


def _everywhere(name: str) -> str:
    """Returns why no device here can use this backend, or nothing."""
    reasons = [unavailable_reason(name, device) for device in _devices()]
    return "" if "" in reasons else unavailable_reason(name) or reasons[-1]


def _line_of_device(device: dict[str, Any]) -> str:
    memory = [f"{device['memory'] / 2**30:.1f} GiB"] if device["memory"] else []
    if "capability" in device:
        parts = [device["name"], f"compute capability {device['capability']}"]
        parts += [f"{device['multiprocessors']} multiprocessors", *memory, f"image {device['image'] or 'none'}"]
        return ", ".join(parts)
    parts = [device["name"], f"{device['threads']} threads", *memory]
    if device["instruction_set"]:
        threads = "torch's threads" if device["openmp"] else "threads of their own"
        parts.append(f"kernels for {device['instruction_set']}, {threads}")
    return ", ".join(parts)

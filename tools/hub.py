"""`make hub`: the package as a kernel for Hugging Face's `kernels`, in build/hub, made from grpo_kernels/ every time.

    build.toml                 what kernel-builder reads
    torch-ext/grpo_kernels/    the sources, PyTorch and Triton; all imports of the package are relative already
    build/torch-cpu, ...       the same with metadata.json, as `kernels` loads it: one folder per backend

docs/hub.md says how to try and to publish it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BACKENDS = ("cpu", "cuda", "rocm")
# A kernel may import torch, what torch brings, and itself: these need transformers, TRL and the like.
LEFT_OUT = ("__main__.py", "commands", "integrations", "trainer")
SUFFIXES = (".json", ".py")


def kernel_files() -> list[Path]:
    """Returns the files of the package that are part of the kernel, relative to its folder."""
    package = ROOT / "grpo_kernels"
    paths = (path.relative_to(package) for path in sorted(package.rglob("*")) if path.suffix in SUFFIXES)
    return [path for path in paths if path.parts[0] not in LEFT_OUT]


def write_kernel(folder: Path) -> None:
    """Replaces `folder` by the kernel: build.toml, torch-ext/ and build/."""
    shutil.rmtree(folder, ignore_errors=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, license = project["name"], project["license"]
    text = (ROOT / "grpo_kernels" / "__init__.py").read_text(encoding="utf-8")
    version = int(re.search(r'^__version__ = "(\d+)\.', text, flags=re.MULTILINE)[1])
    backends = ", ".join(f'"{backend}"' for backend in BACKENDS)

    contents = {path.as_posix(): (ROOT / "grpo_kernels" / path).read_bytes() for path in kernel_files()}
    hashes = {path: hashlib.sha256(content).digest() for path, content in contents.items()}
    unique = hashlib.sha256(b"".join(hashes.values())).hexdigest()[:7]  # other contents, other names in torch.ops
    write_files(folder / "torch-ext" / name.replace("-", "_"), contents)
    (folder / "build.toml").write_text(
        f'[general]\nname = "{name}"\nversion = {version}\nedition = 5\nlicense = "{license}"\n'
        f"backends = [{backends}]\n\n[torch-noarch]\n"
    )
    digest = {path: base64.b64encode(value).decode() for path, value in hashes.items()}
    for backend in BACKENDS:
        metadata = {
            "name": name,
            "id": f"_{name.replace('-', '_')}_{backend}_{unique}",
            "version": version,
            "license": license,
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": digest},
        }
        variant = folder / "build" / f"torch-{backend}"
        write_files(variant, contents)
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def write_files(folder: Path, contents: dict[str, bytes]) -> None:
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


if __name__ == "__main__":
    write_kernel(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "hub"))

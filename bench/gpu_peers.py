"""The peers in one archive, for `gpu.py --peers` on a machine without network.

    python bench/gpu_peers.py peers.tar.xz --python 3.12

Pins are those of pyproject.toml. Of what the peers need, only what is seldom installed beside torch and transformers is
among them. Their wheels take 110 MiB, the archive 57: xz packs libraries of code better than a wheel's deflate.
"""

from __future__ import annotations

import argparse
import lzma
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINNED = ("trl", "liger-kernel", "cut-cross-entropy", "quack-kernels")
CUTLASS = "4.8.1"  # the newest that quack-kernels 0.6.5 was imported with
OTHERS = (
    "verl==0.9.1",
    "datasets==5.2.0", "dill", "multiprocess", "xxhash",  # which trl imports
    "einops", "apache-tvm-ffi", "torch-c-dlpack-ext",  # which quack-kernels imports
    *(f"nvidia-cutlass-dsl{part}=={CUTLASS}" for part in ("", "-libs-core", "-libs-base", "-libs-cu13")),
)  # fmt: skip
PLATFORMS = ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "1")  # of manylinux: pip takes no older one by itself
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 256 << 20}]


def pins(text: str) -> list[str]:
    """name==version, from the extras of pyproject.toml."""
    found = {name: re.search(rf'"{re.escape(name)}(?:\[[^]]*])?(==[^"]+)"', text) for name in PINNED}
    if missing := [name for name, pin in found.items() if pin is None]:
        raise SystemExit(f"gpu_peers: pyproject.toml pins no {', '.join(missing)}")
    return [f"{name}{pin[1]}" for name, pin in found.items() if pin]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("archive", type=Path, help="a .tar.xz")
    parser.add_argument("--python", default="3.12", help="of that machine, x86-64 Linux; default: %(default)s")
    chosen = parser.parse_args(argv)
    if not chosen.archive.name.endswith(".tar.xz"):
        parser.error(f"archive is {chosen.archive}; expected a name that ends in .tar.xz")
    chosen.archive.parent.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:"]
    pip += [f"--python-version={chosen.python}", "--implementation=cp"]
    pip += [f"--platform=manylinux{name}_x86_64" for name in PLATFORMS]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*pip, "--target", folder, *pins((ROOT / "pyproject.toml").read_text()), *OTHERS], check=True)
        with lzma.open(chosen.archive, "wb", filters=FILTERS) as file, tarfile.open(fileobj=file, mode="w") as tar:
            for path in sorted(Path(folder).iterdir()):
                tar.add(path, path.name)
    print(f"{chosen.archive}: {chosen.archive.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()

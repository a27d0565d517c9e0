"""Wheels of the peers, for `gpu_report.py --run 3 --wheels FOLDER` on a machine without network.

    python bench/gpu_wheels.py wheels --python 3.12

Pins are those of pyproject.toml. Of what the peers need, only what is seldom installed beside torch and transformers is
among them. A large wheel is packed again: xz makes libraries of code 3 to 4 times smaller than a wheel's deflate.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINNED = ("trl", "liger-kernel", "cut-cross-entropy", "quack-kernels")
CUTLASS = "4.8.1"  # what quack-kernels 0.6.5 was tried with
OTHERS = (
    "verl==0.9.1",
    "datasets==5.2.0", "dill", "multiprocess",  # which trl imports
    "einops", "apache-tvm-ffi", "torch-c-dlpack-ext",  # which quack-kernels imports
    *(f"nvidia-cutlass-dsl{part}=={CUTLASS}" for part in ("", "-libs-core", "-libs-base", "-libs-cu13")),
)  # fmt: skip
LARGE = 16 << 20  # bytes
PLATFORMS = ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "1")  # of manylinux: pip takes no older one by itself


def pins(names: Sequence[str] = PINNED) -> list[str]:
    """name==version, from the extras of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    found = {name: re.search(rf'"{re.escape(name)}(?:\[[^]]*])?(==[^"]+)"', text) for name in names}
    if missing := [name for name, pin in found.items() if pin is None]:
        raise SystemExit(f"gpu_wheels: pyproject.toml pins no {', '.join(missing)}")
    return [f"{name}{pin[1]}" for name, pin in found.items() if pin]


def download(folder: Path, python: str) -> None:
    platforms = [f"--platform=manylinux{name}_x86_64" for name in PLATFORMS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
    subprocess.run(
        [*command, f"--python-version={python}", "--implementation=cp", *platforms, *pins(), *OTHERS], check=True
    )


def pack(wheel: Path) -> Path:
    """The files of a wheel as .tar.xz beside it; the wheel is removed."""
    archive = wheel.with_suffix(".tar.xz")
    with tempfile.TemporaryDirectory() as place, tarfile.open(archive, "w:xz", preset=9) as tar:
        with zipfile.ZipFile(wheel) as files:
            files.extractall(place)
        for path in sorted(Path(place).iterdir()):
            tar.add(path, path.name)
    wheel.unlink()
    return archive


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of that machine; default: %(default)s")
    chosen = parser.parse_args(argv)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    download(chosen.folder, chosen.python)
    for wheel in sorted(chosen.folder.glob("*.whl")):
        if wheel.stat().st_size > LARGE:
            pack(wheel)
    files = sorted(chosen.folder.iterdir())
    print(f"{len(files)} files, {sum(path.stat().st_size for path in files) / 2**20:.0f} MiB in {chosen.folder}")


if __name__ == "__main__":
    main()

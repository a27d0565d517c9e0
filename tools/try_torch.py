"""Runs a telling part of the tests with another torch, and the Triton that it brings: `make test-torch TORCH=2.8.0`.

    python tools/try_torch.py newest 2.8.0 [--keep] [-- options of pytest]

Each version is installed as pip finds it (PyPI's has CUDA with it: 3 to 6 GB), in a virtual environment of this Python
in build/torch-<version>, which is removed afterwards unless --keep is given; "newest" is what pip brings by itself. The
tests are those of what torch itself takes part in: custom operators, torch.compile, autograd, autocast, with every
surrogate, on the backends "cpu" and "torch"; with the newest, masks of ids and sums in Triton's interpreter
too. The compiled modules are those that lie beside the Python files: torch has no part in them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
# The last three build the emulator of the CUDA kernels, which the backend "cuda" is in the tests.
PACKAGES = ("numpy", "pytest", "pytest-xdist", "setuptools>=77", "pybind11>=3,<4", "ninja>=1.11")
FILES = (
    *("compile", "engine", "backward", "chunks", "float16", "default_type"),
    *("policy_loss", "sampling_mask", "traps", "variants", "env"),
)
NEWEST_FILES = ("plan_kernels",)
# What runs in Triton's interpreter takes the Triton that tests/triton_interpreter.py was written for.
SELECTED = "not triton and not cuda and not strategies_without_logits"
NEWEST_SELECTED = f"({SELECTED}) or (triton and (sums or from_logits))"


def constraints(folder: Path) -> Path:
    """The versions that tests are pinned to, without those that torch decides."""
    lines = CONSTRAINTS.read_text().splitlines()
    kept = [line for line in lines if not re.match(r"(torch|triton|transformers)\b", line)]
    file = folder / "constraints.txt"
    file.write_text("\n".join(kept) + "\n")
    return file


def try_version(version: str, keep: bool, options: Sequence[str]) -> bool:
    """Whether everything passed."""
    folder = ROOT / "build" / f"torch-{version}"
    python = folder / "bin" / "python"
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        newest = version == "newest"
        torch = ["--upgrade", "torch"] if newest else [f"torch=={version}"]
        install = [python, "-m", "pip", "install", "--quiet", "-c", constraints(folder), *torch, *PACKAGES]
        subprocess.run(install, check=True)
        said = "import torch, triton; print('torch', torch.__version__, 'with Triton', triton.__version__)"
        subprocess.run([python, "-c", said], check=True)
        files = [f"tests/test_{name}.py" for name in (*FILES, *NEWEST_FILES * newest)]
        selected = NEWEST_SELECTED if newest else SELECTED
        tests = [python, "-m", "pytest", "-q", "-n", str(min(8, os.cpu_count() or 1)), "-k", selected, *options, *files]
        return subprocess.run(tests, cwd=ROOT).returncode == 0
    except subprocess.CalledProcessError as error:
        print(f"torch {version}: {error}", file=sys.stderr)
        return False
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description="Run a part of the tests with other versions of torch.")
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("--keep", action="store_true", help="leave the virtual environments for another call")
    split = arguments.index("--") if "--" in arguments else len(arguments)
    given = parser.parse_args(arguments[:split])
    failed = [version for version in given.versions if not try_version(version, given.keep, arguments[split + 1 :])]
    for version in given.versions:
        print(f"torch {version}: {'failed' if version in failed else 'passed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

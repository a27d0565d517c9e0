"""Where and with which code a measurement was made: device, driver, versions, date, revision; and the JSON of a run.

That JSON, a document, is {"environment", "cases", "not_run"}. Its cases are records, {"case": fields of a `Case`,
"date", "implementations": name -> report}. A report is what is known of one implementation in one case.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import json
import os
import platform
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ... import __version__, available_backends
from ...trainer.files import write_text
from ...trainer.memory import bytes_of
from ..env import driver_version, package_version, processor

Report = dict[str, Any]
Record = dict[str, Any]
Document = dict[str, Any]
OUT_OF_MEMORY = "out of memory"
_PEERS = ("trl", "liger-kernel", "verl", "cut-cross-entropy", "quack-kernels", "nvidia-cutlass-dsl", "vllm")
PACKAGES = ("triton", "transformers", *_PEERS, "numpy")
ROOT = Path(__file__).resolve().parents[3]
MEASURED = ("csrc", "grpo_kernels/head", "grpo_kernels/kernels", "grpo_kernels/objective")  # what figures depend on
_RESERVE = 2**30  # bytes left to the rest of the machine
# A token of C++: a comment, a string, a character, a name or number, any other sign.
_TOKEN = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])'|\w+|\S", re.DOTALL)


def environment(device: torch.device) -> dict[str, Any]:
    """Returns everything that a reader needs to judge a number, ready for JSON."""
    on_gpu = device.type == "cuda"
    prefixes = ("GRPO_KERNELS_", "MALLOC_", "PYTORCH_")
    return {
        "date": now(),
        **code(ROOT),
        "device": torch.cuda.get_device_name(device) if on_gpu else str(device),
        "driver": driver_version() if on_gpu else None,
        "device_memory": torch.cuda.get_device_properties(device).total_memory if on_gpu else None,
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        # torch's own version names its CUDA, which the metadata of PyPI's wheels do not.
        "versions": {"grpo-kernels": __version__, "torch": str(torch.__version__)}
        | {name: package_version(name) for name in PACKAGES},
        "backends": available_backends(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)},
    }


def code(root: Path) -> dict[str, Any]:
    """Returns which code runs, by which command. `clean`: whether it is the code of `revision`, without changes.

    revision, clean and digest are None in an installed copy.
    """
    changes = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)bench/results")
    program = Path(sys.argv[0]).name
    return {
        "revision": _git(root, "rev-parse", "--short=12", "HEAD"),
        "clean": None if changes is None else not changes,
        "digest": code_digest(root),
        "command": shlex.join(["grpo-kernels" if program == "__main__.py" else program, *sys.argv[1:]]),
    }


def code_digest(root: Path) -> str | None:
    """Returns a digest of the code that figures depend on, or None where its sources are not there.

    Comments, docstrings and formatting do not change it.
    """
    if not all((root / folder).is_dir() for folder in MEASURED):
        return None
    digest = hashlib.sha256()
    for path in sorted(path for folder in MEASURED for path in (root / folder).rglob("*") if path.suffix in _NORMALIZE):
        digest.update(f"{path.relative_to(root).as_posix()}\0{_NORMALIZE[path.suffix](path.read_text())}\0".encode())
    return digest.hexdigest()[:16]


def _python_code(text: str) -> str:
    """Returns Python code without comments, docstrings and formatting."""
    return _syntax(ast.parse(text))


def _syntax(node: object) -> str:
    """Returns a tree as text, without positions, docstrings and empty fields, of which newer Pythons have more."""
    if isinstance(node, list):
        return f"[{','.join(_syntax(item) for item in node if not _is_constant(item))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [f"{name}={_syntax(value)}" for name, value in ast.iter_fields(node) if value is not None and value != []]
    return f"{type(node).__name__}({','.join(fields)})"


def _is_constant(node: object) -> bool:
    """Returns whether a statement is a constant alone, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _cxx_tokens(text: str) -> str:
    """Returns the tokens of C++ code, a line each, without comments."""
    return "\n".join(token for token in _TOKEN.findall(text) if not token.startswith(("//", "/*")))


_NORMALIZE = {".py": _python_code} | dict.fromkeys((".h", ".cuh", ".cu", ".cpp"), _cxx_tokens)


def _git(root: Path, *arguments: str) -> str | None:
    """Returns the output of a git command; None without git, or in a copy that is no checkout."""
    if not (root / ".git").exists():
        return None
    try:
        completed = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return completed.stdout.strip()


def write(path: Path, document: Document) -> None:
    """Writes a document as JSON, atomically: an interrupted run keeps what was there before."""
    write_text(path, json.dumps(document, indent=1, default=str) + "\n")


def now() -> str:
    """Returns the time in UTC, as ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def synchronize(device: torch.device) -> None:
    """Waits for the device, so that a timer sees finished work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(error: BaseException) -> str:
    """Returns an error in one line, which begins with OUT_OF_MEMORY where memory ran out."""
    first_line = (str(error).strip().splitlines() or [""])[0][:300]
    text = f"{type(error).__name__}: {first_line}"
    exhausted = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)
    return f"{OUT_OF_MEMORY}: {text}" if exhausted else text


def limit_memory() -> None:
    """Limits this process to the memory that is available (Linux): an allocation that the machine cannot hold fails
    here, before the kernel kills some process."""
    available = bytes_of("/proc/meminfo", "MemAvailable")
    if available is not None:
        _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (max(0, available - _RESERVE), hard_limit))

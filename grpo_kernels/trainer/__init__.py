"""`grpo-kernels train`: a complete GRPO run: data -> rollout -> rewards -> advantages -> loss -> step -> log.

To understand a run read run.py, loop.py, rollout.py, batch.py and checkpoint.py; README.md beside this file says what
stands in the others. `from grpo_kernels.trainer import train, TrainArguments` is a run from Python.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any


class RunError(ValueError):
    """Ends a run with its message alone: what is wrong is not in this code, or is said in full."""


def reason_of(error: BaseException) -> str:
    """Returns an error of somebody else's code as a part of a sentence: its type, and its text in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


# Modules, and the packages that they are in.
PACKAGES = {name: name for name in ("transformers", "accelerate", "datasets", "tqdm")}
PACKAGES |= {"yaml": "pyyaml", "math_verify": "math-verify"}


def missing_packages(packages: dict[str, str] = PACKAGES) -> str:
    """Returns which of these modules this environment lacks, as the end of a sentence; empty where it has all.
    packages: those that they are in; default: what the trainer needs."""
    missing = [package for module, package in packages.items() if find_spec(module) is None]
    return f"needs {' and '.join(missing)}: pip install {' '.join(missing)}" if missing else ""


def __getattr__(name: str) -> Any:
    """Imports `train` and `TrainArguments`, which need the packages of the extra: this module itself does not."""
    modules = {"train": "api", "TrainArguments": "arguments"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if missing := missing_packages():
        raise ImportError(f"grpo_kernels.trainer.{name} {missing}")
    return getattr(import_module(f".{modules[name]}", __name__), name)

"""`grpo-kernels train`: a complete GRPO run: data -> rollout -> rewards -> advantages -> loss -> step -> log.

To read it from top to bottom:

arguments.py   the options, named as TRL names them; the command line and YAML
run.py         set-up, where every mistake in the options is found; what a checkpoint holds
data.py        prompts, and their order, a function of (seed, position)
model.py       the policy, whose forward computes the loss or samples; the reference policy
loop.py        the loop
rollout.py     completions, sampled by transformers or vLLM (vllm.py), saved and replayed
rewards/       reward functions, and the process that runs them; code in a sandbox
batch.py       advantages, masks and padding: from completions to the arguments of the loss
log.py         the numbers of a step; log.jsonl, samples.jsonl, progress bar, TensorBoard and others
checkpoint.py  what changes from step to step; the output folder and its checkpoints
files.py       files and folders that are whole or absent
ranks.py       how processes share the work, by the launcher's configuration: DDP, FSDP2, DeepSpeed; signals

arithmetic.py  the generated task of the default run, and the small model that it starts from
api.py         `from grpo_kernels.trainer import train, TrainArguments`: a run from Python
commands.py    the commands train, demo, evaluate and report; train --dry-run
monitor.py     failures in words; report.py: report.html; evaluate.py: pass@1, pass@k, majority@k
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any


class RunError(ValueError):
    """Ends a run with its message alone: what is wrong is not in this code, or is said in full."""


# Modules, and the packages that they are in.
PACKAGES = {name: name for name in ("transformers", "accelerate", "datasets", "tqdm")} | {"yaml": "pyyaml"}


def missing_packages() -> str:
    """What the trainer needs and this environment lacks, as the end of a sentence; empty where nothing is."""
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    return f"needs {' and '.join(missing)}: pip install {' '.join(missing)}" if missing else ""


def __getattr__(name: str) -> Any:
    """`train` and `TrainArguments`, which need the packages of the extra: this module itself does not."""
    modules = {"train": "api", "TrainArguments": "arguments"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if missing := missing_packages():
        raise ImportError(f"grpo_kernels.trainer.{name} {missing}")
    return getattr(import_module(f".{modules[name]}", __name__), name)

"""Small runs of the trainer for its tests: a tiny model, a few problems, one thread."""

from __future__ import annotations

import datetime
import json
import math
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from grpo_kernels.trainer import commands
from grpo_kernels.trainer.arithmetic import start_model
from grpo_kernels.trainer.loop import Trainer
from grpo_kernels.trainer.rollout import Completion, Sampled

HERE = Path(__file__).parent
# Of processes that import these files.
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
OPTIONS = {
    "reward_funcs": "arithmetic", "num_generations": 4, "max_completion_length": 5, "per_device_train_batch_size": 8,
    "max_steps": 3, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "save_steps": 0, "beta": 0.0,
}  # fmt: skip

# Rollouts of two steps, used twice, over 6 prompts of which a rollout takes 4: checkpoints fall inside of rollouts,
# between their two uses, and epochs end inside of rollouts. The reference policy moves, beta and the rate change.
HARD = {
    "gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 60, "beta": 0.05,
    "ref_model_sync_steps": 3, "kl_target": 0.02, "reward_funcs": "training:length",
    "dynamic_sampling": True, "learning_rate": 1e-3, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4,
}  # fmt: skip


def make_model(folder: Path) -> Path:
    """A model that samples nearly at random, and its tokenizer."""
    start_model(folder, seed=0, vocab_size=32, hidden_size=32, num_layers=1, max_steps=2, quiet=True)
    return folder


def make_data(path: Path, *, rows: int = 12) -> Path:
    """Problems with prompts of unequal lengths, whose answer is a single digit: a sample is right now and then."""
    problems = [(a, b) for a in range(5) for b in range(5)][:rows]
    lines = [{"prompt": f"{a}+{'0' * (a % 3)}{b}=", "answer": str(a + b)} for a, b in problems]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def arguments(model: Path, data: Path, output: Path, **options: Any) -> list[str]:
    """A command line; None leaves an option out."""
    given = {"output_dir": output, "model_name_or_path": model, "dataset_name": data, **OPTIONS}
    given |= options
    words = ["--use-cpu"]
    for name, value in given.items():
        value = json.dumps(value) if isinstance(value, (bool, dict)) else value
        values = value if isinstance(value, (list, tuple)) else [value]
        words += [] if value is None else [f"--{name}", *map(str, values)]
    return words


def run(model: Path, data: Path, output: Path, **options: Any) -> int:
    """A run in this process."""
    AcceleratorState._reset_state(reset_partial_state=True)  # accelerate has one state per process
    torch.set_num_threads(1)  # products this small gain nothing from threads
    return commands.train(arguments(model, data, output, **options))


def records(output: Path, name: str) -> list[dict[str, Any]]:
    """Records of the log that have this name."""
    found = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [record for record in found if name in record]


def steps(output: Path) -> list[dict[str, Any]]:
    """Records of optimizer steps."""
    return records(output, "loss")


class Recorder(Trainer):
    """Writes each rollout into the output folder."""

    def collect(self) -> None:
        super().collect()
        if self.run.accelerator.is_main_process:
            write_rollout(self.run.folder, self.progress.rollout_index, self.progress.rollout)


commands.Trainer = Recorder


def rollouts(output: Path) -> list[list[Completion]]:
    """Those of a run, or of `write_rollout`."""
    return [torch.load(path, weights_only=False) for path in sorted((output / "rollouts").glob("*.pt"))]


def write_rollout(output: Path, index: int, rollout: list[Completion]) -> None:
    path = output / "rollouts" / f"{index:03d}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(rollout, path)


class Replay:
    """Stands in for vLLM's engine: its completions are those of rollouts in a folder, one after another."""

    def __init__(self, folder: Path):
        self.rollouts = iter(rollouts(folder))

    def sample(self, lm: Any, prompts: Any, arguments: Any, *, greedy: bool, step: int, ends: Any) -> list[Sampled]:
        first = int(os.environ.get("RANK", "0")) * len(prompts)
        rows = next(self.rollouts)[first : first + len(prompts)]
        assert [row.prompt_ids for row in rows] == list(prompts)
        return [Sampled(row.ids, row.ended, row.logps, row.kept) for row in rows]

    def close(self) -> None:
        pass


@contextmanager
def replayed(folder: Path) -> Iterator[None]:
    """Within it a run with use_vllm samples what this folder holds."""
    module = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "vllm", module)
        patched.setattr("grpo_kernels.trainer.run.VLLM", lambda *_: Replay(folder))
        patched.setattr("grpo_kernels.trainer.run.check_sampler", lambda *_: None)  # of other prompts
        yield


def same_weights(a: Path, b: Path) -> bool:
    name = Path("model") / "model.safetensors"
    return (a / name).read_bytes() == (b / name).read_bytes()


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


# --- reward functions: training:NAME ----------------------------------------------------------------------------------


def constant(prompts, completions, **columns):
    return [1.0] * len(prompts)


def length(prompts, completions, completion_ids, **columns):
    """Differs within nearly every group."""
    return [float(len(ids)) + 0.1 * ids[0] for ids in completion_ids]


def length_or_kill(prompts, completions, completion_ids, trainer_state, **columns):
    """With KILL_AT, a step, in the environment it ends its process at a random moment after these rewards."""
    if str(trainer_state.global_step) == os.environ.get("KILL_AT"):
        moment = random.SystemRandom().uniform(0.0, 0.1)
        threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return length(prompts, completions, completion_ids)


def rare(prompts, completions, completion_ids, **columns):
    return [float(ids[0] < 4) for ids in completion_ids]


def huge(prompts, completions, completion_ids, **columns):
    return [1e38 * ids[0] / 32 for ids in completion_ids]


def sometimes_nan(prompts, completions, completion_ids, **columns):
    return [math.nan if i % 4 == 2 else len(ids) + 0.1 * ids[0] for i, ids in enumerate(completion_ids)]


def digits(prompts, completions, **columns):
    """One reward per step: every character that is followed by another one ends a step at a '+'."""
    return [[0.1 + len(part) / 3 for part in _parts(c)] for c in completions]  # no numbers of few bits


def some_digits(prompts, completions, **columns):
    """Of each group: the second completion has no verdict, and the function does not apply to the third."""
    found = digits(prompts, completions)
    return [[math.nan] if i % 4 == 1 else None if i % 4 == 2 else steps for i, steps in enumerate(found)]


def logs(prompts, completions, completion_ids, log_metric, log_extra, **columns):
    log_metric("loss", 7.0)
    log_extra("reward", [datetime.date(2020, 1, 1)] * len(prompts))
    return length(prompts, completions, completion_ids)


def _parts(text):
    parts = text.split("+")
    return parts[:-1] if len(parts) > 1 and parts[-1] == "" else parts

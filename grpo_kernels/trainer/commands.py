"""The trainer's commands: each takes its command line and returns the exit status."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed

from . import evaluate
from .arguments import TrainArguments, parse
from .checkpoint import CheckpointError
from .dry_run import dry_run
from .evaluate import Loaded, Target
from .model import Policy, infer, load_model, load_tokenizer
from .report import write_report
from .rewards import SandboxUnavailable
from .rollout import Sampling, eos_ids
from .run import load_held_out, make_rewards, set_up
from .train import Trainer, as_completion


def train(argv: Sequence[str]) -> int:
    """A run; the exit status is 0, 2 for bad input, 1 for a checkpoint or log that could not be written, 128 + the
    signal that ended the run."""
    try:
        arguments = parse(argv)
        if arguments.dry_run:
            return dry_run(arguments)
        made = set_up(arguments)
    except (ValueError, TypeError, ImportError, OSError, SandboxUnavailable) as error:
        print(f"grpo-kernels train: {error}", file=sys.stderr)
        return 2
    try:
        return Trainer(made).train()
    except (CheckpointError, OSError) as error:
        print(f"grpo-kernels train: {error}", file=sys.stderr)
        return 1
    finally:
        made.close()


def demo(argv: Sequence[str]) -> int:
    """The default run of `train`, into grpo-demo, in place of an earlier one."""
    return train(["--output-dir", "grpo-demo", "--overwrite-output-dir", *argv])


def report(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="grpo-kernels report", description="Write DIR/report.html, a page on its own."
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="output folder of a run, which may be running")
    folder = parser.parse_args(argv).folder
    try:
        print(write_report(folder))
    except (ValueError, OSError) as error:
        print(f"grpo-kernels report: {error}", file=sys.stderr)
        return 2
    return 0


def load_for_evaluation(target: Target) -> Loaded:
    """Model, held-out prompts and rewards: those of the run, as far as the command has none of its own."""
    known = {name: value for name, value in target.config.items() if name in TrainArguments.__dataclass_fields__}
    for name in ("dataset_name", "dataset_test_split", "reward_funcs", "max_completion_length", "temperature"):
        if getattr(target.options, name) is not None:
            known[name] = getattr(target.options, name)
    a = TrainArguments(**known)
    a.use_peft = a.gradient_checkpointing = False  # transformers finds an adapter in the folder, and its base
    a.eval_max_prompts = target.options.max_prompts
    tokenizer, lm = load_tokenizer(target.model, a), load_model(target.model, a)
    lm.to("cuda" if torch.cuda.is_available() and not a.use_cpu else "cpu")
    held_out = load_held_out(a, tokenizer, lm)
    if not held_out:
        raise ValueError("there are no held-out prompts; expected --dataset-name, with --dataset-test-split")
    rewards = make_rewards(a, held_out)
    if rewards is None:
        raise ValueError("reward_funcs is empty; expected names of built-in rewards, or module:function")
    policy = Policy(lm).eval()
    sampling = Sampling(a.max_completion_length, a.temperature, a.top_p, a.top_k, a.min_p)
    ends, size = eos_ids(policy, tokenizer), a.sampling_batch_size

    def sample(prompts: list[list[int]], *, greedy: bool, seed: int) -> list[tuple[list[int], Any]]:
        set_seed(random.Random(f"evaluation {seed} 0").getrandbits(32))
        how = sampling._replace(temperature=0.0) if greedy else sampling
        found = [
            sampled.ids
            for first in range(0, len(prompts), size)
            for sampled in infer(policy, "sample", prompts=prompts[first : first + size], sampling=how, ends=ends,
                                 pad_id=tokenizer.pad_token_id)
        ]  # fmt: skip
        return [(each, as_completion(tokenizer, held_out[0].prompt, each)) for each in found]

    return Loaded(sample, held_out, rewards)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "demo": demo,
    "train": train,
    "evaluate": lambda argv: evaluate.run(argv, load_for_evaluation),
    "report": report,
}

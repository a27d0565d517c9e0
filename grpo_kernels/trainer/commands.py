"""The trainer's commands: each takes its command line and returns the exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from . import evaluate
from .arguments import TrainArguments, parse
from .checkpoint import CheckpointError
from .dry_run import dry_run
from .evaluate import Loaded, Target
from .model import Policy, load_model, load_tokenizer
from .ranks import Ranks, Signals
from .report import write_report
from .rewards import SandboxUnavailable
from .rollout import Sampler, eos_ids
from .run import load_data, make_rewards, set_up
from .train import Trainer


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
    held_out = load_data(a, tokenizer, lm, held_out=True)
    if not held_out:
        raise ValueError("there are no held-out prompts; expected --dataset-name, with --dataset-test-split")
    rewards = make_rewards(a, held_out)
    if rewards is None:
        raise ValueError("reward_funcs is empty; expected names of built-in rewards, or module:function")
    policy, ranks = Policy(lm), Ranks(use_cpu=a.use_cpu)
    sampler = Sampler(policy, tokenizer, a, eos_ids(lm, tokenizer), ranks, Signals(ranks))
    return Loaded(sampler.for_evaluation, held_out, rewards)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "demo": demo,
    "train": train,
    "evaluate": lambda argv: evaluate.run(argv, load_for_evaluation),
    "report": report,
}

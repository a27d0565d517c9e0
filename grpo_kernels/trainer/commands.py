"""The trainer's commands: each takes its command line and returns the exit status."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path

from accelerate.state import PartialState
from accelerate.utils import broadcast_object_list

from ..benchmarks.machine import peak, restart_peak
from . import RunError, evaluate
from . import demo as demonstration
from .adamw import bytes_of_masters
from .arguments import TrainArguments, as_typed, parse
from .checkpoint import CONFIG, OF_A_RUN, check_same_run, checkpoints
from .files import lock_folder
from .loop import Trainer
from .memory import advice_on_memory
from .ranks import on_cpu
from .records import counted
from .run import Run
from .saving import check_room
from .tasks import ARITHMETIC_MODEL

MIB = 2**20


def train(argv: Sequence[str], command: str = "train", wording: Callable[[str], str] = str) -> int:
    """A run; the exit status is 0, 2 for bad input, 1 for a run that cannot go on (rewards that fail, a full disk),
    128 + the signal that ended the run. wording: of errors, which name options as Python does."""
    try:
        arguments = parse(argv, command)
        if arguments.dry_run:
            return dry_run(arguments)
        run = Run(arguments)
    except KeyboardInterrupt:
        print(f"grpo-kernels {command}: interrupted before the first step", file=sys.stderr)
        return 130
    except BrokenPipeError:  # what was told is not read any more: no sentence helps
        raise
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"grpo-kernels {command}: {wording(str(error))}", file=sys.stderr)
        return 2
    try:
        return Trainer(run).train()
    except BrokenPipeError:
        raise
    except (RunError, OSError) as error:
        print(f"grpo-kernels {command}: {wording(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # a second Ctrl-C
        print(f"grpo-kernels {command}: interrupted; what was saved before is kept", file=sys.stderr)
        return 130
    finally:
        run.close()


def demo(argv: Sequence[str]) -> int:
    """A run of `train` with options for the arithmetic model or a chat model; `demo_folder` says where."""
    options, words = demonstration.split(argv)
    if "--help" in words or "-h" in words:
        return train(words, "demo", as_typed)
    try:
        words = [*demonstration.words_of_run(options), *words]
        place = demo_folder(parse(words, "demo"))
    except (ImportError, OSError, ValueError) as error:
        print(f"grpo-kernels demo: {as_typed(str(error))}", file=sys.stderr)
        return 2
    words = [*place, *words]
    status = train(words, "demo", as_typed)
    if place and status > 128 and checkpoints(Path(place[1])):
        print("grpo-kernels demo, with the same options, goes on with this run", file=sys.stderr)
    if status == 0 and options.model != "arithmetic":
        arguments = parse(words, "demo")
        if not arguments.dry_run:
            demonstration.show(Path(arguments.output_dir))
    return status


def demo_folder(a: TrainArguments) -> list[str]:
    """Returns options for the place of a demo whose command line names none, and says why it is that one: a demo that
    was interrupted goes on, and a run that is finished or another one stays as it is."""
    if a.dry_run or a.resume_from_checkpoint or a.is_given("output_dir"):
        return []
    reason = ""
    for name in chain(["grpo-demo"], (f"grpo-demo-{number}" for number in count(2))):
        folder = Path(name)
        if not any((folder / part).exists() for part in OF_A_RUN):
            break
        reason = f"{name} holds a finished run: "
        if not (folder / "summary.json").exists():
            try:
                check_same_run(folder / CONFIG, a, int(os.environ.get("WORLD_SIZE", 1)))
                os.close(lock_folder(folder))
            except (ValueError, OSError):  # other options, or in use
                reason = f"{name} holds another run: "
            else:
                print(f"{name} holds this demo, interrupted: it goes on", file=sys.stderr)
                return ["--output-dir", name, "--resume-from-checkpoint", "auto"]
    if reason:
        print(f"{reason}this one goes to {name}", file=sys.stderr)
    return ["--output-dir", name]


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "demo": demo, "train": partial(train, wording=as_typed), "evaluate": evaluate.run,
}  # fmt: skip


# --- train --dry-run --------------------------------------------------------------------------------------------------


def dry_run(arguments: TrainArguments) -> int:
    """Set up, make one optimizer step, say what it took, and leave nothing behind. Bad input raises ValueError."""
    PartialState(cpu=on_cpu(arguments.use_cpu))
    with tempfile.TemporaryDirectory() as folder:
        (shared,) = broadcast_object_list([folder])  # that of the first process
        run = Run(dataclasses.replace(
            arguments, output_dir=str(Path(shared) / "run"), resume_from_checkpoint=None,
            logging_steps=2,  # no line of the one step
        ))  # fmt: skip
        try:
            check_room(arguments.output_dir, run.bytes_of_checkpoint())
            _one_step(run)
        finally:
            run.close()
    return 0


def _one_step(run: Run) -> None:
    a, device, print = run.arguments, run.accelerator.device, run.accelerator.print
    model, processes = a.model_name_or_path or ARITHMETIC_MODEL, run.ranks.count
    print(f"model      {model}, {processes} {'process' if processes == 1 else 'processes'}, {device}")
    print(f"data       {counted(len(run.prompts), 'prompt')}, {len(run.held_out):,} held out")
    print(f"rewards    {', '.join(run.rewards.names) if run.rewards else 'none'}")
    before = restart_peak(device)
    trainer, begin = Trainer(run), time.perf_counter()
    run.log.start(0, {})
    with advice_on_memory(a, lambda: run.log.phase_name):
        trainer.collect()
        shown, sampled = trainer.progress.rollout[0], time.perf_counter()
        trainer.update()
    print(f"one step   rollout {sampled - begin:.2f} s, update {time.perf_counter() - sampled:.2f} s")
    if before is not None:
        more = (peak(device) - before) / MIB
        print(f"memory     {before / MIB:,.1f} MiB per process before the step, {more:,.1f} MiB more at its peak")
    if copies := bytes_of_masters(run.optimizer):
        print(f"           {copies / MIB:,.1f} MiB of it are float32 copies of the trained weights, which AdamW steps")
    print(f"disk       {run.bytes_of_checkpoint() / MIB:,.1f} MiB for a checkpoint")
    print(f"prompt     {shown.prompt!r}\ncompletion {run.sampler.text('', shown.ids)!r}, reward {shown.reward}")
    for name, meaning in (
        ("zero_gradient_groups", "of the groups have equal rewards: nothing is learned from them"),
        ("completions/clipped_ratio", "of the completions do not end within max_completion_length"),
    ):
        if share := trainer.progress.rollout_numbers[name]:
            print(f"note       {share:.0%} {meaning}")

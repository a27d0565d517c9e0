"""The trainer's commands: each takes its command line and returns the exit status."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from . import RunError, evaluate
from . import demo as demonstration
from .arguments import DEMO, TrainArguments, make_parser, parse
from .checkpoint import bytes_of_checkpoint, check_room
from .decoding import MIB
from .loop import Trainer
from .memory import advice_on_memory, peak, restart_peak
from .ranks import Ranks
from .records import counted
from .run import Run, open_run
from .tasks import ARITHMETIC_MODEL


def train(argv: Sequence[str], command: str = "train", preset: Sequence[str] = ()) -> int:
    """Makes a run; returns the exit status: 0, 2 for bad input, 1 for a run that cannot go on (rewards that fail, a
    full disk), 128 + the signal that ended the run."""

    def failed(error: object, status: int) -> int:
        print(f"grpo-kernels {command}: {error}", file=sys.stderr)
        return status

    run = None
    try:
        arguments = parse(argv, command, preset)
        if arguments.dry_run:
            return dry_run(arguments)
        run = open_run(arguments)
        return Trainer(run).train()
    except BrokenPipeError:  # what was told is not read any more: no sentence helps
        raise
    except KeyboardInterrupt:  # before the first step, or a second Ctrl-C
        return failed("interrupted; what was saved before is kept", 130)
    except (RunError, OSError) as error:
        return failed(error, 2 if run is None else 1)
    except (ValueError, TypeError, ImportError) as error:
        if run is not None:
            raise
        return failed(error, 2)
    finally:
        if run is not None:
            run.close()


def demo(argv: Sequence[str]) -> int:
    """Makes a run of `train` with options for the arithmetic model or a chat model, into grpo-demo. One that was
    interrupted goes on."""
    options, _ = make_parser("demo").parse_known_args(argv)
    preset = [f"--output-dir={DEMO['output_dir']}", "--resume-from-checkpoint=auto"]
    try:
        preset += demonstration.words_of_run(options.model, options.task)
    except (ImportError, OSError, ValueError) as error:
        print(f"grpo-kernels demo: {error}", file=sys.stderr)
        return 2
    status = train(argv, "demo", preset)
    if status == 0 and options.model != "arithmetic" and not (arguments := parse(argv, "demo", preset)).dry_run:
        demonstration.show(Path(arguments.output_dir))
    return status


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"demo": demo, "train": train, "evaluate": evaluate.run}


def dry_run(arguments: TrainArguments) -> int:
    """Sets up, makes one optimizer step, says what it took, and leaves nothing behind. Bad input raises ValueError."""
    ranks = Ranks(use_cpu=arguments.use_cpu)
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(ranks.gather([folder])[0], "run"))
        run = open_run(dataclasses.replace(
            arguments, output_dir=output, resume_from_checkpoint=None, logging_steps=2,  # no line of the one step
        ))  # fmt: skip
        try:
            with run.ranks.raise_on_all():
                if run.accelerator.is_main_process:
                    check_room(Path(arguments.output_dir).absolute(), bytes_of_checkpoint(run.policy, run.arguments))
            _one_step(run)
        finally:
            run.close()
    return 0


def _one_step(run: Run) -> None:
    a, device, print = run.arguments, run.accelerator.device, run.accelerator.print
    print(f"model      {a.model_name_or_path or ARITHMETIC_MODEL}, {counted(run.ranks.count, 'process')}, {device}")
    print(f"data       {counted(len(run.prompts), 'prompt')}, {len(run.held_out):,} held out")
    print(f"rewards    {', '.join(run.rewards.names) if run.rewards else 'none'}")
    before = restart_peak(device)
    trainer, begin = Trainer(run), time.perf_counter()
    run.log.start(0, {})
    with advice_on_memory(lambda: run.log.phase_name):
        trainer.collect()
        shown, sampled = trainer.progress.rollout[0], time.perf_counter()
        trainer.update()
    print(f"one step   rollout {sampled - begin:.2f} s, update {time.perf_counter() - sampled:.2f} s")
    if before is not None:
        more = (peak(device) - before) / MIB
        print(f"memory     {before / MIB:,.1f} MiB per process before the step, {more:,.1f} MiB more at its peak")
    print(f"disk       {bytes_of_checkpoint(run.policy, a) / MIB:,.1f} MiB for a checkpoint")
    if run.bare_policy.decoder is not None and run.bare_policy.decoder.memory:
        print(f"sampling   {run.bare_policy.decoder.memory}")
    print(f"prompt     {shown.prompt!r}\ncompletion {run.sampler.text('', shown.ids)!r}, reward {shown.reward}")
    for name, meaning in (
        ("zero_gradient_groups", "of the groups have equal rewards: nothing is learned from them"),
        ("completions/clipped_ratio", "of the completions do not end within max_completion_length"),
    ):
        if share := trainer.progress.rollout_numbers.get(name):
            print(f"note       {share:.0%} {meaning}")

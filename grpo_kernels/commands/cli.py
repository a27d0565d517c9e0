"""The command `grpo-kernels`: one subcommand per job, each imported only when it runs."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .. import __version__
from ..kernels import registered_backends
from ..trainer import missing_packages
from .bench import command as benchmark

TRAINING = {
    "demo": "a small language model learns addition with this loss, offline, in minutes: train's default run",
    "train": "a GRPO run on a model of transformers (options: grpo-kernels train --help)",
    "evaluate": "held-out accuracy of a run or of a model",
    "report": "report.html of a run's folder",
}


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the subcommands; the trainer's parse their own options."""
    parser = argparse.ArgumentParser(prog="grpo-kernels", description="Fused GRPO losses.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str, **options: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, **options)
        command.set_defaults(run=run, name=name)
        return command

    for name, text in TRAINING.items():
        add(name, _train, text, add_help=False).set_defaults(command=name)
    what = "time and memory of this library, eager PyTorch, the peers and the bare products, on this machine"
    benchmark.add_arguments(add("bench", benchmark.bench, what))
    env = add("env", _env, "versions, devices, and which backend each device would use and why")
    env.add_argument("--json", action="store_true", help="the same for programs")
    what = "every variant on every available backend against float64; for bug reports and after an install"
    check = add("check", _check, what)
    check.add_argument("--backend", choices=registered_backends(), help="only this one")
    check.add_argument("--quick", action="store_true", help="each surrogate and ratio level with one KL estimator")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit status."""
    parser = make_parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and not hasattr(arguments, "command"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.rest = rest
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"\n{parser.prog} {arguments.name}: interrupted", file=sys.stderr)
        return 130  # as shells have it: 128 + SIGINT
    except BrokenPipeError:  # as in `| head`; what is left in the buffers goes nowhere
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        return 141
    return status


def _train(arguments: argparse.Namespace) -> int:
    """Runs a command of the trainer, which parses its own options: all but the report need transformers."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # prompts and completions, in any locale
    if arguments.name == "report":
        from ..trainer.report import run

        return run(arguments.rest)
    missing = missing_packages()
    if missing:
        print(f"grpo-kernels {arguments.name} {missing}", file=sys.stderr)
        return 1
    from ..trainer.commands import COMMANDS

    return COMMANDS[arguments.name](arguments.rest)


def _env(arguments: argparse.Namespace) -> int:
    from .env import collect, render

    facts = collect()
    print(json.dumps(facts, indent=1) if arguments.json else render(facts))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from .check import check

    return 0 if check(arguments.backend, quick=arguments.quick) else 1


if __name__ == "__main__":
    sys.exit(main())

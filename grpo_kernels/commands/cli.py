"""The command `grpo-kernels`: one subcommand per job, each imported only when it runs."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from .. import __version__
from ..backends import registered_backends
from ..backends.launch import TUNABLE, tuned_path
from ..backends.triton import interpreted, why_unusable
from ..benchmarks.command import add_arguments as add_bench_arguments
from ..benchmarks.command import bench
from ..trainer import missing_packages


def make_parser() -> argparse.ArgumentParser:
    """The subcommands. Those of the trainer parse their own options."""
    parser = argparse.ArgumentParser(prog="grpo-kernels", description="Fused GRPO losses.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_training(commands)
    _add_bench(commands)
    _add_tune(commands)
    _add_env(commands)
    _add_check(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = make_parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and not hasattr(arguments, "command"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.rest = rest
    status: int = arguments.run(arguments)
    return status


def _add_training(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, text in (
        ("demo", "a small language model learns addition with this loss, offline, in minutes: train's default run"),
        ("train", "a GRPO run on a model of transformers (options: grpo-kernels train --help)"),
        ("evaluate", "held-out accuracy of a run or of a model"),
        ("report", "report.html of a run's folder"),
    ):
        parser = commands.add_parser(name, help=text, add_help=False)
        parser.set_defaults(run=_training, command=name)


def _training(arguments: argparse.Namespace) -> int:
    """The commands of the trainer, which parse their own options: those need transformers."""
    missing = missing_packages()
    if missing:
        print(f"grpo-kernels {arguments.command} {missing}", file=sys.stderr)
        return 1
    from ..trainer.commands import COMMANDS

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # prompts and completions, whatever the locale
    return COMMANDS[arguments.command](arguments.rest)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench", help="time and memory of this library, eager PyTorch, the peers and the bare products, on this machine"
    )
    add_bench_arguments(parser)
    parser.set_defaults(run=bench)


def _add_tune(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "tune",
        help="measure the launch configurations of the Triton kernels on this GPU, for one lm_head",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--width", type=_positive, default=4096, help="size of a hidden state")
    parser.add_argument("--vocab", type=_positive, default=128256, help="rows of the lm_head")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="of hidden states and lm_head"
    )
    parser.add_argument("--rows", type=_positive, default=4096, help="tokens per launch")
    parser.add_argument("--kernels", type=_tunable, default=",".join(TUNABLE), help="which, between commas")
    parser.add_argument("--output", type=Path, default=tuned_path(), help="table to extend; launches read the default")
    parser.set_defaults(run=_tune)


def _tune(arguments: argparse.Namespace) -> int:
    reason = "TRITON_INTERPRET=1 is set" if interpreted() else why_unusable()
    if reason:
        print(f"tune measures on a GPU, which is not possible here: {reason}", file=sys.stderr)
        return 2
    from ..backends.triton.tune import Head, TableError, tune

    dtype = getattr(torch, arguments.dtype)
    head = Head(arguments.width, arguments.vocab, dtype, arguments.rows, torch.device("cuda"))
    try:
        tune(head, arguments.kernels, arguments.output)
    except TableError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _add_env(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("env", help="versions, devices, and which backend each device would use and why")
    parser.add_argument("--json", action="store_true", help="the same for programs")
    parser.set_defaults(run=_env)


def _env(arguments: argparse.Namespace) -> int:
    from .env import collect, render

    facts = collect()
    print(json.dumps(facts, indent=1) if arguments.json else render(facts))
    return 0


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "check", help="every variant on every available backend against float64; for bug reports and after an install"
    )
    parser.add_argument("--backend", choices=registered_backends(), help="this one alone")
    parser.add_argument("--quick", action="store_true", help="each surrogate and ratio level with one KL estimator")
    parser.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    from .check import check

    return 0 if check(arguments.backend, quick=arguments.quick) else 1


def _tunable(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in TUNABLE]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {','.join(TUNABLE)}")
    return names


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())

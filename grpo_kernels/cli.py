"""The command `grpo-kernels`: one subcommand per job, each imported only when it is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .config import available_presets
from .demo import missing_packages
from .demo.settings import DemoSettings


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="grpo-kernels", description="Fused GRPO losses.")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_demo(commands)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    default = DemoSettings()
    parser = commands.add_parser(
        "demo",
        help="a small language model learns addition with this loss, offline, in minutes",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=_positive, default=default.steps, help="steps of GRPO")
    parser.add_argument("--seed", type=int, default=default.seed, help="of the weights, the problems and the samples")
    parser.add_argument("--output", type=Path, default=default.output, help="folder for log.jsonl and curves.png")
    parser.add_argument(
        "--loss",
        choices=("fused", "reference"),
        default=default.loss,
        help="this library's loss, or the same in eager PyTorch",
    )
    parser.add_argument("--preset", choices=available_presets(), default=default.preset, help="kind of loss")
    parser.add_argument("--beta", type=float, default=default.beta, help="weight of the KL term")
    parser.add_argument("--device", default=default.device, help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--vocab-size", type=_positive, default=default.vocab_size, help="ids of the lm_head")
    parser.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    missing = missing_packages()
    if missing:
        print(f'the demo needs {" and ".join(missing)}: pip install "grpo-kernels[train]"', file=sys.stderr)
        return 1
    from .demo.run import run_demo

    options = {name: value for name, value in vars(arguments).items() if name != "run"}
    run_demo(DemoSettings(**options))
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())

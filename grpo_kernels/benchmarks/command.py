"""`grpo-kernels bench`: from its arguments to a table, a JSON file and pictures."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import shlex
import sys
from pathlib import Path

import torch

from .cases import DTYPES, MODES, heads, make_case
from .document import Document
from .implementations import implementations, select
from .machine import environment
from .progress import Progress
from .run import ROUNDS, Run
from .sets import RIVALS, SETS, Job, jobs
from .show import case_table, headline

_QUICK_MINUTES = 1.8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick",
        action="store_true",
        help="within two minutes, with the documented settings alone; without --shapes, the set quick",
    )
    parser.add_argument("--set", choices=SETS, help="measurements that have a name; heads, if nothing else is said")
    parser.add_argument(
        "--shapes", nargs="+", metavar="SHAPE", help=f"HEAD:TOKENS, or TOKENSxHIDDENxVOCAB; heads: {', '.join(heads())}"
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="with --shapes; bfloat16, if nothing is said")
    parser.add_argument("--modes", nargs="+", choices=MODES, help="with --shapes; step, if nothing is said")
    parser.add_argument(
        "--against",
        nargs="+",
        metavar="NAME",
        help="these, ours and the floor instead of everybody; patterns as in 'ours*'. " + ", ".join(implementations()),
    )
    parser.add_argument("--exclude", nargs="+", metavar="NAME", default=[], help="patterns of those to leave out")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument(
        "--rounds", type=int, help=f"of interleaved timing; {ROUNDS['cpu']} on a CPU, {ROUNDS['cuda']} on a GPU"
    )
    parser.add_argument("--minutes", type=float, help="stop after these; what is missing then is listed")
    parser.add_argument("--resume", action="store_true", help="keep what the results have, measure the rest")
    parser.add_argument("--output", type=Path, default=Path("bench.json"), help="results; written after every case")
    parser.add_argument("--figures", type=Path, help="folder for pictures; that of the results, if nothing is said")
    parser.add_argument("--no-figures", action="store_true", help="no pictures")


def bench(arguments: argparse.Namespace) -> int:
    """Run it; 2 where an argument is wrong, 1 where ours failed or gave a wrong result."""
    try:
        device = _device(arguments.device)
        wanted = _jobs(arguments, device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(headline(environment(device)), flush=True)
    if arguments.device == "auto" and device.type == "cpu":
        print("no GPU here, hence no GPU figures: this measures the CPU")
    minutes = arguments.minutes or (_QUICK_MINUTES if arguments.quick else None)
    command = shlex.join(["grpo-kernels", *sys.argv[1:]])
    try:
        session = Run(
            device,
            command=command,
            output=arguments.output,
            rounds=arguments.rounds,
            minutes=minutes,
            resume=arguments.resume,
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    with Progress(wanted, session.rounds) as progress:
        for job in wanted:
            found = session.measure(job, progress.tell)
            progress.next()
            if found is not None:
                print(f"\n{case_table(found)}", flush=True)
    document = session.document
    for case in document["not_run"]:
        print(f"not run, out of time: {case}")
    print(f"written: {arguments.output}")
    if not arguments.no_figures:
        _draw(document, arguments.figures or arguments.output.parent)
    return 1 if failures(document) else 0


def failures(document: Document) -> list[str]:
    """Cases of ours that ended in an error; running out of memory or time is none."""
    excused = ("out of memory", "not run")
    return [
        f"{found['case']}: {name}: {report['error']}"
        for found in document["cases"]
        for name, report in found["implementations"].items()
        if name.startswith("ours") and not report.get("error", "not run").startswith(excused)
    ] + [f"{found['case']}: {found['error']}" for found in document["cases"] if "error" in found]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name}: {error}") from None
    if device.type not in ROUNDS:
        raise ValueError(f"--device {name}: expected cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch {torch.__version__} finds no CUDA device here")
    return device


def _jobs(arguments: argparse.Namespace, device: torch.device) -> list[Job]:
    if arguments.shapes:
        if arguments.set:
            raise ValueError("--shapes and --set: expected one of them")
        found = [
            Job(make_case(shape, dtype, mode=mode), RIVALS, weighed=("*",), tuned=not arguments.quick)
            for shape in arguments.shapes
            for dtype in arguments.dtypes or ("bfloat16",)
            for mode in arguments.modes or ("step",)
        ]
    elif arguments.dtypes or arguments.modes:
        raise ValueError("--dtypes and --modes go with --shapes: a set has its own")
    else:
        found = jobs(arguments.set or ("quick" if arguments.quick else "heads"), device.type)
    if arguments.against:
        select(arguments.against)  # an unknown name is an error before any work
        found = [dataclasses.replace(job, against=("ours", "floor", *arguments.against)) for job in found]
    return [dataclasses.replace(job, without=tuple(arguments.exclude)) for job in found]


def _draw(document: Document, folder: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("no pictures without matplotlib: pip install matplotlib", file=sys.stderr)
        return
    from .figures import draw

    for path in draw(document, folder):
        print(f"written: {path}")

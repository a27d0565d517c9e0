"""Learning curves of the demo with the fused and with the eager loss, over several seeds.

    python bench/learning.py --seeds 0 1 2 --steps 150 --output bench/results/learning.json

Written after every run; a second call runs what is not there yet with the same settings.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_kernels.benchmarks.document import read, write
from grpo_kernels.benchmarks.machine import environment
from grpo_kernels.demo.run import run_demo
from grpo_kernels.demo.settings import DemoSettings

LOSSES = ("fused", "reference")
CURVES = ("reward", "reward_smoothed", "kl", "entropy")
NOT_SETTINGS = ("output", "quiet", "seed", "loss")
SAME_MACHINE = ("device", "cpu", "threads", "versions")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description="Learning curves of the fused and the eager loss.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "learning.json")
    options = parser.parse_args(arguments)
    settings = DemoSettings(steps=options.steps, device=options.device, quiet=True)
    try:
        record(options.output, settings, options.seeds, shlex.join(["python", "bench/learning.py", *arguments]))
    except ValueError as error:
        parser.error(str(error))


def record(path: Path, settings: DemoSettings, seeds: Sequence[int], command: str = "") -> None:
    """Run every seed with every loss, less what the document at `path` has already; written after every run.

    ValueError where the document there was measured on another machine, with other versions or with other settings.
    """
    here, wanted = environment(torch.device(settings.device)), common(settings)
    document: dict[str, Any] = {"environment": here, "command": command, "settings": wanted, "runs": []}
    if path.exists():
        document = read(path)
        differ = [key for key in SAME_MACHINE if document["environment"][key] != here[key]]
        differ += [key for key in wanted if document["settings"][key] != wanted[key]]
        if differ:
            raise ValueError(f"{path} was measured otherwise ({', '.join(differ)}): move it, or give another --output")
    there = {(run["seed"], run["loss"]) for run in document["runs"]}
    for seed in seeds:
        for loss in LOSSES:
            if (seed, loss) in there:
                print(f"seed {seed}, {loss}: already in {path}", flush=True)
                continue
            print(f"seed {seed}, {loss}", flush=True)
            document["runs"].append(_run(dataclasses.replace(settings, seed=seed, loss=loss)))
            write(path, document)


def common(settings: DemoSettings) -> dict[str, Any]:
    """What all runs of a document share."""
    return {key: value for key, value in dataclasses.asdict(settings).items() if key not in NOT_SETTINGS}


def _run(settings: DemoSettings) -> dict[str, Any]:
    """One run of the demo; "seconds" are of the steps of GRPO, "seconds_in_all" of the warm-up and evaluations too."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        result = run_demo(dataclasses.replace(settings, output=Path(folder)))
        seconds = time.perf_counter() - start
    return {
        "seed": settings.seed,
        "loss": settings.loss,
        "seconds": _short(result.records[-1]["seconds"]),
        "seconds_in_all": _short(seconds),
        "accuracy_before": _short(result.accuracy_before),
        "accuracy_after": _short(result.accuracy_after),
    } | {key: [_short(step[key]) for step in result.records] for key in CURVES}


def _short(number: float) -> float:
    """Five digits are more than a curve shows."""
    return float(f"{number:.5g}")


if __name__ == "__main__":
    main()

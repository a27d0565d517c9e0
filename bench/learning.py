"""Learning curves of `grpo-kernels train` with its defaults: several losses, several seeds, and the eager loss beside.

    python bench/learning.py --seeds 0 1 2 --output bench/results/learning.json

Options that are not listed go to the trainer. Written after every run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_kernels.benchmarks.machine import environment, write
from grpo_kernels.trainer.commands import train

# (loss_type, loss)
LOSSES = (("dapo", "eager"), ("dapo", "fused"), ("grpo", "fused"), ("gspo", "fused"), ("cispo", "fused"))
NUMBERS, CURVES = ("seconds", "pass_at_1_before", "pass_at_1_after"), ("reward", "kl", "entropy")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "learning.json")
    chosen, options = parser.parse_known_args(arguments)
    command = shlex.join(["python", "bench/learning.py", *arguments])
    runs: list[dict[str, Any]] = []
    document = {"environment": environment(torch.device("cpu")), "command": command, "runs": runs}
    for seed, (loss_type, loss) in itertools.product(chosen.seeds, LOSSES):
        print(f"seed {seed}, {loss_type}, {loss}", flush=True)
        runs.append(one_run(options, seed, loss_type, loss))
        write(chosen.output, document)


def one_run(options: Sequence[str], seed: int, loss_type: str, loss: str) -> dict[str, Any]:
    """One run of the trainer: pass@1 before and after, seconds in all, and its curves, one value per optimizer step."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        argv = ["--output-dir", str(output), "--seed", str(seed), "--loss-type", loss_type, "--loss", loss]
        if status := train([*argv, "--use-cpu", "--disable-tqdm", "--save-steps", "0", *options]):
            raise ValueError(f"grpo-kernels train {shlex.join([*argv, *options])} ended with status {status}")
        summary = json.loads((output / "summary.json").read_text())
        steps = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    found = {"seed": seed, "loss_type": loss_type, "loss": loss} | {name: summary[name] for name in NUMBERS}
    return found | {name: [step[name] for step in steps if "loss" in step] for name in CURVES}


if __name__ == "__main__":
    main()

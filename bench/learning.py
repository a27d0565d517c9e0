"""Learning curves of `grpo-kernels train` with its defaults: several losses, several seeds, and the eager loss beside.

    python bench/learning.py --seeds 0 1 2 --output bench/results/learning.json

Options that are not listed go to the trainer. Written after every run; a second call runs what is not there yet.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_kernels.benchmarks.machine import environment, read, write
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
    document = {"environment": environment(torch.device("cpu")), "command": command, "options": options, "runs": []}
    if chosen.output.exists():
        document = read(chosen.output)
        if document["options"] != options:
            parser.error(f"{chosen.output} was measured with other options: move it, or give another --output")
    there = {(run["seed"], run["loss_type"], run["loss"]) for run in document["runs"]}
    for key in ((seed, *loss) for seed in chosen.seeds for loss in LOSSES):
        print(f"seed {', '.join(map(str, key))}{': already there' if key in there else ''}", flush=True)
        if key not in there:
            document["runs"].append(one_run(options, *key))
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
    found = {"seed": seed, "loss_type": loss_type, "loss": loss} | {name: _short(summary[name]) for name in NUMBERS}
    return found | {name: [_short(step[name]) for step in steps if "loss" in step] for name in CURVES}


def _short(number: float) -> float:
    """Four digits, which is more than a curve shows."""
    return float(f"{number:.4g}")


if __name__ == "__main__":
    main()

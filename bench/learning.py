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
SAME_MACHINE = ("device", "cpu", "threads", "versions")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "learning.json")
    options, others = parser.parse_known_args(arguments)
    record(options.output, others, options.seeds, shlex.join(["python", "bench/learning.py", *arguments]))


def record(path: Path, options: Sequence[str], seeds: Sequence[int], command: str = "") -> None:
    """Run every seed with every loss, less what the document at `path` has already.

    ValueError where that was measured on another machine, with other versions or with other options.
    """
    here = environment(torch.device("cpu"))
    document: dict[str, Any] = {"environment": here, "command": command, "options": list(options), "runs": []}
    if path.exists():
        document = read(path)
        differ = [key for key in SAME_MACHINE if document["environment"][key] != here[key]]
        differ += ["options"] if document["options"] != list(options) else []
        if differ:
            raise ValueError(f"{path} was measured otherwise ({', '.join(differ)}): move it, or give another --output")
    there = {(run["seed"], run["loss_type"], run["loss"]) for run in document["runs"]}
    for seed in seeds:
        for loss_type, loss in LOSSES:
            known = (seed, loss_type, loss) in there
            print(f"seed {seed}, {loss_type}, {loss}{': already there' if known else ''}", flush=True)
            if not known:
                document["runs"].append(one_run(options, seed, loss_type, loss))
                write(path, document)


def one_run(options: Sequence[str], seed: int, loss_type: str, loss: str) -> dict[str, Any]:
    """One run of the trainer: pass@1 before and after, seconds in all, and its curves, one value per optimizer step."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        argv = ["--output-dir", str(output), "--seed", str(seed), "--loss-type", loss_type, "--loss", loss]
        if status := train([*argv, "--use-cpu", "--disable-tqdm", "--save-steps", "0", *options]):
            raise ValueError(f"grpo-kernels train {shlex.join([*argv, *options])} ended with status {status}")
        summary = json.loads((output / "summary.json").read_text())
        steps = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    found = {name: [summary[name]] for name in NUMBERS}
    found |= {name: [step[name] for step in steps if "loss" in step] for name in CURVES}
    short = {name: [float(f"{x:.4g}") for x in values] for name, values in found.items()}  # more than a curve shows
    return {"seed": seed, "loss_type": loss_type, "loss": loss} | {n: short[n][0] for n in NUMBERS} | {
        n: short[n] for n in CURVES
    }  # fmt: skip


if __name__ == "__main__":
    main()

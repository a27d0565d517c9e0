"""What a model learns when the gradient of its head is a sum in 16 bits, or in float32: reward, entropy, gradient norm.

    python bench/dweight_learning.py [--steps 40] [--seeds 3] [--jobs 1] [--output bench/results/dweight/learning.json]

Runs `grpo-kernels demo --model smollm2` with bfloat16 weights, chunks of eight tokens (eight to thirty of them in a
step) and either `dweight_sum`; nothing else differs between the two runs of a seed. A run takes minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from grpo_kernels.commands.bench.machine import environment, write

SUMS = ("weight", "float32")
LOGGED = ("step", "reward", "entropy", "grad_norm", "completions/mean_length", "evaluation")


def main() -> None:
    """Trains each seed with either sum, and writes the JSON after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/dweight/learning.json")
    arguments = parser.parse_args()
    runs: list[dict[str, object]] = []
    document = {"environment": environment(torch.device("cpu")), "runs": runs}
    settings = [(seed, dweight_sum) for seed in range(arguments.seeds) for dweight_sum in SUMS]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        logs = pool.map(lambda setting: run(*setting, arguments.steps), settings)
        for (seed, dweight_sum), log in zip(settings, logs, strict=True):
            runs.append({"seed": seed, "dweight_sum": dweight_sum, **log})
            write(arguments.output, document)


def run(seed: int, dweight_sum: str, steps: int) -> dict[str, object]:
    """Trains once. Returns the command, and what it logged."""
    options = json.dumps({"chunk_rows": 8, "dweight_sum": dweight_sum})
    words = [
        "grpo-kernels", "demo", "--model", "smollm2", "--task", "largest-number", "--dtype=bfloat16",
        "--per-device-train-batch-size=16", f"--max-steps={steps}", "--eval-steps=10", "--eval-num-samples=1",
        f"--seed={seed}", f"--loss-options={options}",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "grpo_kernels", *words[1:], f"--output-dir={folder}/run"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = (Path(folder) / "run" / "log.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    return {"command": " ".join(words), "log": [{k: x[k] for k in LOGGED if k in x} for x in log]}


if __name__ == "__main__":
    main()

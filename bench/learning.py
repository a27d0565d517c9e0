"""What a model learns with an option and without: runs of `grpo-kernels train`, arm by arm.

    python bench/learning.py [--experiments sparse teacher] [--settings chat] [--seeds 0 1 2]

sparse: exact gradients beside sparse ones. The default run, which learns sums, with two losses, and at a higher
    learning rate, where a bias would show; and the chat model of `make demo-chat`, whose entropy falls within 20 steps,
    and with it the entries that a token keeps and the seconds of a step.
teacher: the default run with its rewards, with a teacher's distribution alone, and with both. The teacher is the result
    of a run of GRPO with another seed.

Runs of sums go side by side, with a thread each; chat runs one by one, with all threads. A run that the results have is
not run again: a stopped call goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from grpo_kernels.benchmarks.machine import environment, now, read, write
from grpo_kernels.trainer.demo import CHAT_RUN, CHAT_TASKS
from grpo_kernels.trainer.smollm2 import smollm2

SUMS = ("--reward-funcs=arithmetic", "--eval-steps=40", "--save-steps=0")
CHAT = "chat"
TEACHER = "TEACHER"  # stands for the folder of the teacher's model
DISTILLED = f"--teacher-model-name-or-path={TEACHER}"


class Experiment(NamedTuple):
    """Words of `grpo-kernels train` by setting, and by arm."""

    settings: dict[str, tuple[str, ...]]
    arms: dict[str, tuple[str, ...]]
    output: str


EXPERIMENTS = {
    "sparse": Experiment(
        {
            "arithmetic, dapo": (*SUMS, "--loss-type=dapo"),
            "arithmetic, grpo": (*SUMS, "--loss-type=grpo"),
            "arithmetic, dapo, three times the learning rate": (*SUMS, "--loss-type=dapo", "--learning-rate=6e-4"),
            CHAT: (*CHAT_RUN, f"--dataset-name={CHAT_TASKS[0]}", "--bf16", "--eval-steps=2"),
        },
        {"exact": (), **{f"2^-{k}": (f'--loss-options={{"sparse_backward": {2.0**-k}}}',) for k in (12, 10)}},
        "sparse/learning.json",
    ),
    "teacher": Experiment(
        {"arithmetic, dapo": (*SUMS, "--loss-type=dapo", "--eval-steps=20")},
        {
            "GRPO": (),
            "distillation": (DISTILLED, "--distill-only"),
            "both": (DISTILLED, '--loss-options={"distill_coef": 0.1}'),
        },
        "trainer/teacher.json",
    ),
}
EVERY = 20  # steps of a run of sums between the records that are kept
LOGGED = ("step", "reward", "entropy", "kl", "divergence", "grad_norm", "sparse/kept", "sparse/dense")


def train(words: list[str], folder: str, threads: int) -> None:
    """Raises with what the run said where it fails."""
    command = [sys.executable, "-m", "grpo_kernels", "train", *words, f"--output-dir={folder}"]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")


def run(experiment: Experiment, teacher: str, threads: int, key: tuple[str, str, int]) -> dict[str, Any]:
    """Curves of one run: a record per logged step, and per evaluation."""
    setting, arm, seed = key
    words = [*experiment.settings[setting], *experiment.arms[arm], f"--seed={seed}", "--use-cpu"]
    given = [word.replace(TEACHER, teacher) for word in words]
    given += [f"--model-name-or-path={smollm2()}"] if setting == CHAT else []
    with TemporaryDirectory() as folder:
        train(given, f"{folder}/run", threads)
        log = [json.loads(line) for line in Path(folder, "run", "log.jsonl").read_text().splitlines()]
    steps, evaluations = [], []
    for record in log:
        if "evaluation" in record:
            evaluations.append({"step": record["step"], "reward": record["evaluation"]["reward"]})
        elif "loss" in record and (setting == CHAT or record["step"] == 1 or record["step"] % EVERY == 0):
            seconds = {name: record[name] for name in record if name.startswith("seconds/")}
            steps.append({name: record[name] for name in LOGGED if name in record} | seconds)
    print(f"{setting}, {arm}, seed {seed}: {evaluations[-1]['reward']:.3f}", flush=True)
    return {
        "setting": setting, "arm": arm, "seed": seed, "threads": threads, "date": now(),
        "command": " ".join(["grpo-kernels train", *words]), "steps": steps, "evaluations": evaluations,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--experiments", nargs="+", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    add("--settings", nargs="+", help="of the experiments; default: all")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--results", type=Path, default=Path("build/results"), help="folder of the results")
    chosen = parser.parse_args()
    threads = torch.get_num_threads()
    for name in chosen.experiments:
        experiment, path = EXPERIMENTS[name], chosen.results / EXPERIMENTS[name].output
        here = environment(torch.device("cpu"))
        document = read(path) if path.exists() else {"environment": here, "runs": []}
        known = {(found["setting"], found["arm"], found["seed"]) for found in document["runs"]}
        settings = [setting for setting in experiment.settings if setting in (chosen.settings or experiment.settings)]
        keys = [(setting, arm, seed) for seed in chosen.seeds for setting in settings for arm in experiment.arms]
        with TemporaryDirectory() as folder:
            if name == "teacher":
                train([*SUMS, "--loss-type=dapo", "--seed=7", "--use-cpu"], folder, threads)
            for workers, is_chat in ((threads, False), (1, True)):
                waiting = [key for key in keys if key not in known and (key[0] == CHAT) == is_chat]
                one: Callable[[Any], Any] = partial(run, experiment, f"{folder}/model", threads // workers)
                with ThreadPoolExecutor(workers) as pool:
                    for found in pool.map(one, waiting):
                        document["runs"].append(found)
                        write(path, document)


if __name__ == "__main__":
    main()

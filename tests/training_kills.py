"""Of test_trainer_resume.py: a run that is killed at random moments and resumed until it ends.

    python training_kills.py SEED KILLS COMMAND-LINE ...

Everything is imported once; each attempt is a fork. SIGKILL ends it while it starts, or at a random moment of one of
its first STEPS steps. It waits before the step after these, so that the run does not end early on any machine.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import torch

from grpo_kernels.trainer.commands import train
from grpo_kernels.trainer.loop import Trainer

STEPS = 2


def attempt(argv: list[str], told: int | None) -> None:
    """The run in this process; before each of its steps it writes a byte to `told`."""
    update, begun = Trainer.update, 0

    def told_update(trainer: Trainer) -> None:
        nonlocal begun
        os.write(told, b".")
        begun += 1
        while begun > STEPS:
            signal.pause()
        update(trainer)

    if told is not None:
        Trainer.update = told_update
    os._exit(train([*argv, "--resume-from-checkpoint", "auto"]))


def random_moment(chance: random.Random, steps: int, begins: int) -> None:
    """Return at a random moment of the `steps`th step, of a start if that is 0. For the first step the moment may lie
    in any of the STEPS, or after them: the time before it, of which the window is made, is that of the start."""
    longest = 0.3
    for _ in range(steps):
        since = time.monotonic()
        assert os.read(begins, 1), "the run ended"
        longest = 1.2 * (time.monotonic() - since)  # a step takes about as long as the one before
    time.sleep(chance.uniform(0.0, longest))


def main() -> None:
    chance, kills, argv = random.Random(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3:]
    for killed in range(kills + 1):
        begins, told = os.pipe()
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            torch.rand(chance.randrange(1, 50))  # a resumed run must not depend on the state that it finds
            random.random()
            attempt(argv, told if killed < kills else None)
        os.close(told)
        if killed < kills:
            random_moment(chance, killed % (STEPS + 1), begins)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(begins)
        expected = -signal.SIGKILL if killed < kills else 0
        if os.waitstatus_to_exitcode(status) != expected:
            raise SystemExit(f"attempt {killed}: exit status {os.waitstatus_to_exitcode(status)}, not {expected}")
    print(f"killed {kills} times, then exit status 0")


if __name__ == "__main__":
    main()

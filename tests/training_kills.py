"""Of test_trainer_resume.py: a run that is killed at random moments and resumed until it ends.

    python training_kills.py SEED KILLS COMMAND-LINE ...

Everything is imported once; each attempt is a fork, which SIGKILL ends after a random part of a second.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import torch

from grpo_kernels.trainer.commands import train


def main() -> None:
    chance, kills, argv = random.Random(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3:]
    killed = 0
    while True:
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            torch.rand(chance.randrange(1, 50))  # a resumed run must not depend on the state that it finds
            random.random()
            os._exit(train([*argv, "--resume-from-checkpoint", "auto"]))
        if killed < kills:
            time.sleep(chance.uniform(0.1, 0.8))
            if os.waitpid(child, os.WNOHANG) == (0, 0):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                killed += 1
                continue
            raise SystemExit(f"the run ended after {killed} kills: it is too short")
        _, status = os.waitpid(child, 0)
        print(f"killed {killed} times, then exit status {os.waitstatus_to_exitcode(status)}")
        return


if __name__ == "__main__":
    main()

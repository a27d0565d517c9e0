"""What signals do to a run: a terminal that closes, an evaluation that is cut short, a second Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
import training
from training import HARD, run

from grpo_kernels.trainer.loop import Trainer
from grpo_kernels.trainer.ranks import Ranks, Signals


def test_a_run_whose_terminal_closes_saves(model, data, tmp_path):
    """To write to that terminal is an error from then on, and a progress bar is written to it all the time."""

    def take_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, which a run respects
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    words = training.arguments(model, data, tmp_path / "run", **HARD | {"max_steps": 10**6})
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "grpo_kernels", "train", *words], stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=take_terminal, env=training.ENVIRONMENT,
    )  # fmt: skip
    os.close(theirs)
    with process:
        shown, end = b"", time.monotonic() + 300
        while b"updates" not in shown and time.monotonic() < end:
            if select.select([ours], [], [], 1)[0]:
                shown += os.read(ours, 4096)
        os.close(ours)
        assert process.wait(timeout=300) == 129, shown
    assert b"updates" in shown and len(list((tmp_path / "run").glob("checkpoint-*"))) == 1


def test_an_evaluation_that_was_cut_short_is_made_after_the_resume(model, data, tmp_path, monkeypatch):
    options = {"max_steps": 4, "eval_dataset_name": data, "eval_max_prompts": 2, "eval_steps": 2, "save_steps": 0}
    original = Trainer.evaluate

    def interrupted(self):
        if self.progress.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "evaluate", interrupted)
        assert run(model, data, tmp_path / "run", **options) == 143
    assert run(model, data, tmp_path / "run", resume_from_checkpoint="auto", **options) == 0
    assert [record["step"] for record in training.records(tmp_path / "run", "evaluation")] == [0, 2, 4]


def test_a_second_interrupt_does_not_wait_and_nohup_is_respected(capfd):
    """The first Ctrl-C is noted, and answered at once; the second one interrupts at once."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with (signals := Signals(Ranks())).noted():
            signal.raise_signal(signal.SIGHUP)
            assert not signals.received
            signal.raise_signal(signal.SIGINT)
            assert signals.received == signal.SIGINT
            assert capfd.readouterr().err.strip() == "stopping after this step; Ctrl-C again quits now"
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])
    assert signal.getsignal(signal.SIGINT) is before[signal.SIGINT]

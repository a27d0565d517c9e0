"""`torchrun --nnodes 2` of the trainer, with two launchers on this machine, one of which is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import training


class Launchers:
    """Two launchers of one process each, with a rendezvous at a port of this machine."""

    def __init__(self, argv: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        words = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
        words = [sys.executable, "-m", "torch.distributed.run", *words, "-m", "grpo_kernels", "train", *argv]
        self.processes = [
            subprocess.Popen(
                words, env=training.ENVIRONMENT, start_new_session=True, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for _ in range(2)
        ]  # fmt: skip

    def wait(self) -> list[int]:
        """Returns the exit statuses; pytest shows what was said."""
        print(*(process.communicate(timeout=240)[0] for process in self.processes), sep="\n")
        return [process.returncode for process in self.processes]

    def kill(self, machine: int) -> None:
        """Kills a launcher and its worker, which has a session of its own, at once."""
        pid = self.processes[machine].pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for process in (pid, *map(int, children)):
            os.kill(process, signal.SIGKILL)


@pytest.mark.slow
def test_a_run_goes_on_after_one_machine_is_lost(tmp_path):
    model, data = training.make_model(tmp_path / "model"), training.make_data(tmp_path / "data.jsonl")
    options = dict(max_steps=12, save_steps=1, save_total_limit=2, beta=0.1, resume_from_checkpoint="auto")
    whole, lost = (
        [*training.arguments(model, data, tmp_path / name, **options)] for name in ("undisturbed", "one is lost")
    )
    assert Launchers(whole).wait() == [0, 0]
    launchers = Launchers(lost)
    deadline = time.monotonic() + 240
    while not (tmp_path / "one is lost" / "checkpoint-2").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    launchers.kill(1)
    statuses = launchers.wait()
    assert statuses[0] > 0 and statuses[1] == -signal.SIGKILL
    assert not (tmp_path / "one is lost" / "model").exists()
    assert Launchers(lost).wait() == [0, 0]
    models = [tmp_path / name / "model" / "model.safetensors" for name in ("undisturbed", "one is lost")]
    assert models[0].read_bytes() == models[1].read_bytes()

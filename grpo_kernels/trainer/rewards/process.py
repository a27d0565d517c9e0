"""A process of our own beside this one, which answers one message with another and can be killed at any time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from typing import Any


class Ended(Exception):
    """The process is gone; status as that of Popen. seconds: it was killed after so many without an answer."""

    def __init__(self, status: int, seconds: float | None = None) -> None:
        super().__init__(f"ended with status {status}" if seconds is None else f"no answer within {seconds:g} s")
        self.status, self.seconds = status, seconds


class Process:
    """Runs the text of `file` with `python -c`: no folder of this package is on its path, and torch is not imported.

    Messages are bytes through a `Connection` of multiprocessing, descriptor `argv[1]` there. The process ends with the
    thread that started it (on Linux; elsewhere after its call). It has a session of its own: Ctrl-C is the trainer's,
    which finishes its step, and a kill reaches what the process has started.
    """

    def __init__(self, file: Path, **options: Any) -> None:
        self.connection, other = Pipe()
        with other:
            command = [sys.executable, "-s", "-c", file.read_text(encoding="utf-8"), str(other.fileno())]
            options.update(stdin=subprocess.DEVNULL, pass_fds=[other.fileno()], start_new_session=True)
            self._process = subprocess.Popen(command, **options)

    def answer(self, seconds: float) -> bytes:
        """Raises: Ended, and then the process is gone."""
        try:
            if self.connection.poll(seconds):
                return self.connection.recv_bytes()
        except (EOFError, OSError):
            raise Ended(self.close(patience=5)) from None
        raise Ended(self.close(), seconds)

    def close(self, patience: float = 0) -> int:
        """Ends the process and returns its status. patience: seconds that it gets to end by itself."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if patience:
                self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

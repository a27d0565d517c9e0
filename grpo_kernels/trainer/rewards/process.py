"""A process of our own beside this one, which answers one message with another and can be killed at any time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Ended(Exception):
    """The process is gone; status as that of Popen. seconds: it was killed after so many without an answer."""

    def __init__(self, status: int, seconds: float | None = None) -> None:
        super().__init__(f"ended with status {status}" if seconds is None else f"no answer within {seconds:g} s")
        self.status, self.seconds = status, seconds


class Process:
    """Runs the text of `file` with `python -c`: no folder of this package is on its path, and torch is not imported.

    Messages are bytes after their length (8 bytes), through standard input and descriptor `argv[1]`. The process ends
    itself when its input does, so that it does not outlive this one. It has a session of its own: Ctrl-C is the
    trainer's, which finishes its step, and a kill reaches what the process has started.
    """

    def __init__(self, file: Path, **options: Any) -> None:
        self._answers, answers = os.pipe()
        command = [sys.executable, "-s", "-c", file.read_text(encoding="utf-8"), str(answers)]
        options.update(stdin=subprocess.PIPE, pass_fds=[answers], start_new_session=True)
        self._process = subprocess.Popen(command, **options)
        os.close(answers)

    def ask(self, message: bytes | None, seconds: float) -> bytes:
        """Sends `message`, if there is one, and returns the answer. Raises: Ended, and then the process is gone."""
        stdin = self._process.stdin
        assert stdin is not None
        data, end = b"", time.monotonic() + seconds
        waiting = select.poll()  # select.select takes no descriptor above 1023
        waiting.register(self._answers, select.POLLIN)
        try:
            if message is not None:
                stdin.write(struct.pack("=Q", len(message)) + message)
                stdin.flush()
            while len(data) < 8 or len(data) < 8 + struct.unpack("=Q", data[:8])[0]:
                if not waiting.poll(1000 * max(end - time.monotonic(), 0)):
                    raise Ended(self.close(), seconds)
                part = os.read(self._answers, 1 << 20)
                if not part:
                    raise BrokenPipeError
                data += part
        except BrokenPipeError:
            raise Ended(self.close(patience=5)) from None
        return data[8:]

    def close(self, patience: float = 0) -> int:
        """Ends the process and returns its status. patience: seconds that it gets to end by itself."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if patience:
                self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        with contextlib.suppress(OSError):
            os.close(self._answers)
        return status

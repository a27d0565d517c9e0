"""A process of our own beside this one, which answers one message with another and can be killed at any time."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HEADER = struct.Struct("!i")  # before each message: its bytes, as multiprocessing's Connection has it
MOST_BYTES = 1 << 28  # of an answer


class Ended(Exception):
    """The process is gone, and why; status as that of Popen. late: it was killed because it took too long."""

    def __init__(self, status: int, why: str = "", *, late: bool = False) -> None:
        super().__init__(why or f"ended with status {status}")
        self.status, self.late = status, late


class Process:
    """Runs the text of `file` with `python -c`: no folder of this package is on its path, and torch is not imported.

    Messages are bytes through a socket, descriptor `argv[1]` there; what comes back is not trusted. The process ends
    with the thread that started it (on Linux; elsewhere after its call). It has a session of its own: Ctrl-C is the
    trainer's, which finishes its step, and a kill reaches what the process has started.
    """

    def __init__(self, file: Path, **options: Any) -> None:
        self.connection, other = socket.socketpair()
        with other:
            command = [sys.executable, "-s", "-c", file.read_text(encoding="utf-8"), str(other.fileno())]
            options.update(stdin=subprocess.DEVNULL, pass_fds=[other.fileno()], start_new_session=True)
            self._process = subprocess.Popen(command, **options)

    def answer(self, seconds: float, message: bytes | None = None) -> bytes:
        """Send `message`, if there is one, and return what comes back, at most MOST_BYTES; all of it within `seconds`.

        Raises: Ended, and then the process is gone.
        """
        end = time.monotonic() + seconds
        try:
            if message is not None:
                self.connection.settimeout(seconds)
                self.connection.sendall(HEADER.pack(len(message)) + message)
            (size,) = HEADER.unpack(self._read(HEADER.size, end))
            if not 0 <= size <= MOST_BYTES:
                why = f"announced an answer of {size:,} bytes; expected at most {MOST_BYTES:,}"
                raise Ended(self.close(), why)
            answer = self._read(size, end)
            self.connection.settimeout(None)
        except TimeoutError:
            raise Ended(self.close(), f"no answer within {seconds:g} s", late=True) from None
        except OSError:
            raise Ended(self.close(patience=5)) from None
        return answer

    def _read(self, size: int, end: float) -> bytes:
        found = bytearray()
        while len(found) < size:
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError
            self.connection.settimeout(left)
            if not (part := self.connection.recv(min(size - len(found), 1 << 20))):
                raise ConnectionError
            found += part
        return bytes(found)

    def close(self, patience: float = 0) -> int:
        """Ends the process and returns its status. patience: seconds that it gets to end by itself."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if patience:
                self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

"""A sandbox for programs that a model wrote: `Sandbox().run(program, stdin="3\\n")`. What holds it is in inside.py.

A limit of CPU time ends a program before the limit of wall-clock time does, so that the verdict does not depend on how
busy the machine is; the wall clock is for programs that sleep. A program can learn which files exist outside, how large
they are and where links point to (stat, readlink), and lock files that it can read (fcntl); it cannot read the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from .inside import REQUEST
from .process import Ended, Process

INSIDE = Path(__file__).with_name("inside.py")
# The same results in each run: strings hash alike. One thread of a numerical library, for the limit of memory.
ENVIRONMENT = dict(
    PYTHONHASHSEED="0", PYTHONUTF8="1", PYTHONDONTWRITEBYTECODE="1", LANG="C.UTF-8", PATH="/usr/bin:/bin"
)
ENVIRONMENT.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
START_SECONDS = 60.0
WALL_PER_CPU = 5
# Tried before the first program, by a program: each of them must fail.
FORBIDDEN = """
import os, socket
for name, attempt in {
    "start processes": os.fork,
    "open sockets": socket.socket,
    "send signals": lambda: os.kill(os.getppid(), 0),
    "read the files of this user": lambda: os.listdir("/proc"),
    "write outside of its scratch folder": lambda: open("/var/tmp/grpo-kernels-escape", "w"),
}.items():
    try:
        attempt()
    except OSError:
        continue
    print(name)
"""
warned: set[str] = set()


class SandboxUnavailable(RuntimeError):
    """This machine cannot isolate programs: why, in one sentence."""


class SandboxFailure(RuntimeError):
    """The sandbox itself failed, which says nothing about the program."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one program. That of the scratch folder holds for each file and for all of them. Each output goes to a
    file as well, of which output_kb are read."""

    cpu_seconds: int = 2
    memory_mb: int = 1024
    scratch_mb: int = 64
    output_kb: int = 1024

    @property
    def wall_seconds(self) -> int:
        return WALL_PER_CPU * self.cpu_seconds + 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one program did. The program controls all of it: compare it, do not trust it."""

    stdout: str
    stderr: str
    values: str  # a line of JSON for each call that was evaluated: from `encode` of inside.py, or ["error", ...]
    status: int  # exit status, or minus the number of the signal that ended it
    reason: str  # why it was stopped: "CPU time", "wall clock", "output limit"; empty if it was not
    seconds: float  # of CPU time
    elapsed: float  # seconds of wall-clock time


class Sandbox:
    """One isolated process that runs programs one after the other, each of them in a new process (about 8 ms).

    It starts with the first program, ends with `close()` or with this process, and is not for several threads at once.
    missing: after the start, what this machine does not offer of the isolation, as text.

    Raises:
        SandboxUnavailable: from `run`, when the machine offers too little isolation. Where it offers less than all, a
            warning says once what is missing and what programs cannot do for this reason.
    """

    def __init__(self, limits: Limits = Limits()) -> None:
        self.limits = limits
        self.missing: list[str] = []
        self._process: Process | None = None

    def run(
        self, program: str, *, stdin: str = "", calls: list[str] | None = None, wall_seconds: float | None = None
    ) -> Outcome:
        """`stdin`: text that the program reads. `calls`: expressions to evaluate after the program has defined its
        functions; then the program's `__name__` is not "__main__". `wall_seconds`: in place of the limits'. Python of
        this interpreter, with its packages.

        Raises:
            SandboxUnavailable, SandboxFailure.
        """
        if self._process is None:
            self._start()
        assert self._process is not None
        limits = self.limits
        patience = limits.wall_seconds if wall_seconds is None else wall_seconds
        request = REQUEST.pack(limits.cpu_seconds, patience, limits.memory_mb, limits.scratch_mb)
        texts = [stdin, "", "", "", json.dumps([program, calls])]  # of stdin, stdout, stderr, the values, the source
        files = [memory_file(text) for text in texts]
        try:
            # Where the process is gone, there is no answer either.
            control = socket.socket(fileno=os.dup(self._process.connection.fileno()))
            with control, contextlib.suppress(ConnectionError):
                socket.send_fds(control, [request], files)
            status, seconds, elapsed, late = self._answer(START_SECONDS + patience)
            most = limits.output_kb << 10
            written = [os.pread(file, most + 1, 0) for file in files[1:4]]
            begun = os.fstat(files[4]).st_size == 0
        finally:
            for file in files:
                os.close(file)
        out, err, values = (text[:most].decode("utf-8", "replace") for text in written)
        if not begun and not late:
            raise SandboxFailure(f"the sandbox failed: {err}")
        reason = "output limit" if max(map(len, written)) > most else "wall clock" if late else ""
        if status == -signal.SIGXCPU or (not reason and status == -signal.SIGKILL and seconds > limits.cpu_seconds):
            reason = "CPU time"
        return Outcome(out, err, values, status, reason, seconds, elapsed)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _start(self) -> None:
        if sys.platform != "linux":
            raise SandboxUnavailable(f"programs can be isolated on Linux only, this is {sys.platform}.")
        self._process = Process(INSIDE, stdout=subprocess.DEVNULL, env=ENVIRONMENT, cwd="/")
        answer = self._answer(START_SECONDS)
        problem = answer.get("refused")
        if problem is None:
            try:
                attempt = self.run(FORBIDDEN)
                if attempt.stdout:
                    problem = f"in spite of all limits they could {', '.join(attempt.stdout.splitlines())}"
                elif attempt.status:
                    problem = f"a trial ended with {attempt.stderr.strip()[-300:]}"
            except SandboxFailure as error:
                problem = str(error)
        if problem is not None:
            self.close()
            raise SandboxUnavailable(f"programs cannot be isolated here: {problem}.")
        self.missing = answer["missing"]
        lacking = " and ".join(self.missing)
        if lacking and lacking not in warned:
            warned.add(lacking)
            text = f"The sandbox runs without {lacking}: programs cannot write files or start threads in it."
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _answer(self, seconds: float) -> Any:
        assert self._process is not None
        try:
            return json.loads(self._process.answer(seconds))
        except Ended as error:
            self.close()
            raise SandboxFailure(f"the isolated process {error}") from None


def memory_file(text: str) -> int:
    """The descriptor of a file which nothing else has."""
    descriptor = os.memfd_create("request")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor

"""A sandbox for programs that a model wrote: `Sandbox().run(program, stdin="3\\n")`. What holds it is in inside.py.

A limit of CPU time ends a program before the limit of wall-clock time does, so that the verdict does not depend on how
busy the machine is; the wall clock is for programs that sleep.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from .process import Ended, Process

INSIDE = Path(__file__).with_name("inside.py")
# The same results in each run: strings hash alike. One thread of a numerical library, for the limit of memory.
ENVIRONMENT = dict(
    PYTHONHASHSEED="0", PYTHONUTF8="1", PYTHONDONTWRITEBYTECODE="1", LANG="C.UTF-8", PATH="/usr/bin:/bin"
)
ENVIRONMENT.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
START_SECONDS = 60.0
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
    """Of one program. The scratch folder's limit holds for each file and for all of them."""

    cpu_seconds: int = 2
    memory_mb: int = 1024
    scratch_mb: int = 64
    output_kb: int = 1024

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}, expected an integer of at least 1")

    @property
    def wall_seconds(self) -> int:
        return 5 * self.cpu_seconds + 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one program did. The program controls all of it: compare it, do not trust it."""

    stdout: str
    stderr: str
    values: str  # JSON text: for each call {"value": ...} or {"error": ...}; empty if the program did not get there
    status: int  # exit status, or minus the number of the signal that ended it
    reason: str  # why it was stopped: "CPU time", "wall clock", "output limit"; empty if it was not
    seconds: float  # of CPU time


class Sandbox:
    """One isolated process that runs programs one after the other, each of them in a new process (about 5 ms).

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
        self._scratch: str | None = None

    def run(self, program: str, *, stdin: str = "", calls: list[str] | None = None) -> Outcome:
        """`stdin`: text that the program reads. `calls`: expressions to evaluate after the program has defined its
        functions; then the program's `__name__` is not "__main__". Python of this interpreter, with its packages.

        Raises:
            SandboxUnavailable, SandboxFailure.
        """
        if self._process is None:
            self._start()
        request = dict(dataclasses.asdict(self.limits), wall_seconds=self.limits.wall_seconds)
        answer = self._ask(dict(request, program=program, stdin=stdin, calls=calls), self.limits.wall_seconds)
        if "failed" in answer:
            raise SandboxFailure(f"the sandbox failed: {answer['failed']}")
        return Outcome(**answer)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close(patience=5)  # it removes its folder, and leaves; if it has been killed, it did not
        if self._scratch is not None:
            with contextlib.suppress(OSError):
                os.rmdir(self._scratch)

    def _start(self) -> None:
        if sys.platform != "linux":
            raise SandboxUnavailable(f"programs can be isolated on Linux only, this is {sys.platform}.")
        environment = dict(ENVIRONMENT, TMPDIR=os.environ.get("TMPDIR", "/tmp"))
        self._process = Process(INSIDE, env=environment, cwd="/")
        answer = self._ask(None, 0)
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
        self.missing, self._scratch = answer["missing"], answer["scratch"]
        lacking = " and ".join(self.missing)
        if lacking and lacking not in warned:
            warned.add(lacking)
            text = f"The sandbox runs without {lacking}: programs cannot write files or start threads in it."
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _ask(self, request: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
        assert self._process is not None
        try:
            message = None if request is None else json.dumps(request).encode()
            return json.loads(self._process.ask(message, START_SECONDS + seconds))
        except Ended as error:
            self.close()
            raise SandboxFailure(f"the isolated process {error}") from None

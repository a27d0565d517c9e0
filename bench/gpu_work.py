"""What a stage of `gpu_report.py` is given: its record, the time it has, and commands that cannot outlive either."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

ROOT = Path(__file__).resolve().parents[1]

# QuACK and CUTLASS find their files by this name.
PEERS = ROOT / "build" / "gpu-report" / "site-packages"
TAIL = 4000  # characters of a command's output that the JSON keeps; the log beside it has all

Report = dict[str, Any]
# Seconds without output before a command is stopped: one number, or one for the last line of the log.
Silence = float | Callable[[str], float]


class Process(Protocol):
    """What `wait` needs of a running command; its process id is the id of its process group."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def start_process(command: Sequence[str], log: BinaryIO, environment: Mapping[str, str]) -> Process:
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """`stages`: of a run, empty for all; `only`: these, whatever came of them before.

    `start` runs a command, its output going to the log; the tests have one that runs probes on a fake device.
    """

    minutes: float = 25.0
    output: Path = ROOT / "build" / "gpu-report" / "report.json"
    wheels: Path | None = None
    stages: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    resume: bool = False
    python: tuple[str, ...] = (sys.executable,)
    start: Callable[[Sequence[str], BinaryIO, Mapping[str, str]], Process] = start_process


class Ended(NamedTuple):
    """How a command ended. `stopped` says at which limit, and is empty where it ended by itself."""

    code: int | None
    output: str
    seconds: float
    stopped: str

    @property
    def ok(self) -> bool:
        return self.code == 0


class Cannot(Exception):
    """A stage has nothing to do here; the message says why. No failure."""


class Work:
    """What a stage is given: its record in the report, the time it has, and a way to run commands."""

    cannot = Cannot

    def __init__(self, settings: Settings, report: Report, name: str, end: float) -> None:
        self.settings, self.report, self.name, self.end = settings, report, name, end
        self.record: dict[str, Any] = report["stages"][name]
        self.log = settings.output.with_suffix(".log")

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    @property
    def environment(self) -> dict[str, Any]:
        """Facts about this machine: of the whole report."""
        return self.report["environment"]

    @property
    def left_out(self) -> dict[str, str]:
        """Strategies that no later stage runs, as "backend/strategy", and why."""
        return self.report.setdefault("left_out", {})

    @property
    def unsafe(self) -> list[str]:
        """What may run into a broken strategy: "anchored" goes through "linear" where tokens are only scored."""
        names = ("rows", "linear", "anchored")
        found = {f"{x.partition('/')[0]}/anchored" for x in self.left_out if x.endswith("/linear")} | {*self.left_out}
        return sorted(found, key=lambda name: (name.partition("/")[0], names.index(name.partition("/")[2])))

    def leave_out(self, strategy: str, why: str) -> None:
        """Record a broken strategy; without its row kernels a backend has nothing left."""
        backend, _, name = strategy.partition("/")
        for one in ("rows", "linear", "anchored") if name == "rows" else (name,):
            self.left_out.setdefault(f"{backend}/{one}", why)

    def say(self, text: str) -> None:
        print(f"{self.name}: {text}", flush=True)

    def save(self) -> None:
        write(self.settings.output, self.report)

    def fail(self, text: str) -> None:
        self.record.setdefault("failures", []).append(text)
        self.say(f"FAILED: {text}")

    def stop(self, text: str) -> None:
        self.record["stopped"] = text
        self.say(text)

    def expect(self, ended: Ended, what: str) -> bool:
        """Whether it went well; if not, that goes into the record with the end of what was said."""
        if not ended.ok:
            self.record.setdefault("tails", {})[what] = ended.output[-TAIL:]
            if ended.stopped:
                self.stop(f"{what}: {ended.stopped}")
            else:
                self.fail(f"{what}: exit status {ended.code}: {last_line(ended.output)}")
        return ended.ok

    def python(self, *arguments: object, **limits: Any) -> Ended:
        return self.run([*self.settings.python, *map(str, arguments)], **limits)

    def run(
        self,
        command: Sequence[str],
        most: float = float("inf"),
        silence: Silence = float("inf"),
        variables: Mapping[str, str] | None = None,
    ) -> Ended:
        """Run a command at the root, its output going to the log.

        It and all that it started are killed after `most` seconds, at the end of the stage's time, and when it has
        written nothing for `silence` seconds.
        """
        end = min(self.end, time.monotonic() + most)
        with self.log.open("ab") as log:
            log.write(f"\n--- {self.name}: {' '.join(command)[:300]}\n".encode())
            log.flush()
            start, offset = time.monotonic(), log.tell()
            process = self.settings.start(command, log, child_environment() | dict(variables or {}))
            try:
                stopped = wait(process, self.log, end, silence)
            finally:
                kill_group(process)
        with self.log.open("rb") as log:
            log.seek(offset)
            output = log.read().decode(errors="replace")
        seconds = round(time.monotonic() - start, 1)
        return Ended(None if stopped else process.returncode, output, seconds, stopped)


def wait(process: Process, log: Path, end: float, silence: Silence) -> str:
    """Until it has ended, or why it has to be stopped."""
    start = heard = time.monotonic()
    size, limit = log.stat().st_size, patience(log, silence)
    while process.poll() is None:
        now = time.monotonic()
        if (grown := log.stat().st_size) != size:
            size, heard, limit = grown, now, patience(log, silence)
        if now >= end:
            return f"stopped after {now - start:.0f} s"
        if now - heard >= limit:
            return f"stopped after {limit:.0f} s of silence"
        time.sleep(0.02)
    return ""


def patience(log: Path, silence: Silence) -> float:
    if not callable(silence):
        return silence
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        return silence(file.read().decode(errors="replace").rstrip("\n").rpartition("\n")[2])


def kill_group(process: Process) -> None:
    """All that is left of its session's group. One that a driver holds does not die at once, and is not waited for."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
    except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
        pass


def child_environment() -> dict[str, str]:
    """This checkout first, what was there, then the peers: all of it comes before what is installed."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(PEERS)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "COLUMNS": "300"}


def write(path: Path, report: Report) -> None:
    """Atomically: a killed process leaves the previous report."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(report, indent=1, default=str) + "\n")
    draft.replace(path)


def last_line(text: str) -> str:
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "nothing was said")

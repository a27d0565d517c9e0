"""`make gpu-report`: all that a GPU machine without network can say about this checkout, in one JSON.

    python bench/gpu_report.py --minutes 25 --wheels wheels --output report.json
    python bench/gpu_report.py --minutes 9 --resume            # goes on where an earlier call ran out of time
    python bench/gpu_report.py --minutes 9 --resume --only bench

The stages of gpu_stages.py, one after another. Each has its share of the minutes, and what it leaves goes to those
after it; one that would overrun is stopped with all its processes, and what it found is kept. The JSON is written after
every step. Nothing here imports torch: what a stage runs is a process of its own, which may hang or die without harm.
Exit status 0 where everything that could run here passed, 1 where something failed or had to be stopped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpu_machine import ROOT
from gpu_stages import PEERS, STAGES, Stage

PASSED = ("ok", "cannot")
TAIL = 4000  # characters of a command's output that the JSON keeps; the log beside it has all

Report = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    minutes: float = 25.0
    output: Path = ROOT / "build" / "gpu-report" / "report.json"
    wheels: Path | None = None
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    resume: bool = False
    python: tuple[str, ...] = (sys.executable,)


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
        silence: float = float("inf"),
        variables: dict[str, str] | None = None,
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
            process = subprocess.Popen(
                command, cwd=ROOT, env=child_environment() | (variables or {}), stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                stopped = wait(process, self.log, end, silence)
            finally:
                kill_group(process)
        with self.log.open("rb") as log:
            log.seek(offset)
            output = log.read().decode(errors="replace")
        seconds = round(time.monotonic() - start, 1)
        return Ended(None if stopped else process.returncode, output, seconds, stopped)


def wait(process: subprocess.Popen[bytes], log: Path, end: float, silence: float) -> str:
    """Until it has ended, or why it has to be stopped."""
    start = heard = time.monotonic()
    size = log.stat().st_size
    while process.poll() is None:
        now = time.monotonic()
        if (grown := log.stat().st_size) != size:
            size, heard = grown, now
        if now >= end:
            return f"stopped after {now - start:.0f} s"
        if now - heard >= silence:
            return f"stopped after {silence:.0f} s of silence"
        time.sleep(0.02)
    return ""


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """All that is left of its session's group. One that a driver holds does not die at once, and is not waited for."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
    except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
        pass


def child_environment() -> dict[str, str]:
    """This checkout first, what was there, then the peers: all of it comes before what is installed."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(PEERS), *_also(PEERS)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "COLUMNS": "300"}


def _also(folder: Path) -> list[str]:
    """What its .pth files name: Python reads them in its own folders alone."""
    lines = [line.strip() for file in sorted(folder.glob("*.pth")) for line in file.read_text().splitlines()]
    return [str(folder / line) for line in lines if line and not line.startswith(("#", "import"))]


# --- the report -----------------------------------------------------------------------------------------------------


def conduct(stages: Sequence[Stage], settings: Settings) -> Report:
    """Run the stages that are wanted."""
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    report: Report = {"environment": {}, "stages": {}}
    if settings.resume and settings.output.exists():
        report = json.loads(settings.output.read_text())
    else:
        settings.output.with_suffix(".log").unlink(missing_ok=True)
    end = time.monotonic() + 60 * settings.minutes
    chosen = [stage for stage in stages if wanted(stage, settings, report)]
    for number, stage in enumerate(chosen):
        left = end - time.monotonic()
        rest = [later for later in chosen[number:] if not why_not(later, report)]
        perform(stage, settings, report, left if stage.always else allotted(stage, rest, left))
    return report


def allotted(stage: Stage, rest: Sequence[Stage], left: float) -> float:
    """Seconds: the least that it needs, and by its weight a part of what is beyond the least of all the `rest`."""
    beyond = left - sum(other.least for other in rest)
    weights = sum(other.weight for other in rest)
    return min(left, stage.least + max(0.0, beyond) * stage.weight / weights) if stage in rest else 0.0


def wanted(stage: Stage, settings: Settings, report: Report) -> bool:
    """With --resume what has not come to an end, ok or failed; but those of --only whatever came of them."""
    if stage.name in settings.skip:
        return False
    if settings.only:
        return stage.name in settings.only or stage.always
    return stage.always or report["stages"].get(stage.name, {}).get("status") not in ("ok", "failed")


def why_not(stage: Stage, report: Report) -> str:
    if not stage.needs_gpu:
        return ""
    return report["environment"].get("no_gpu", "") or report.get("device_lost", "")


def perform(stage: Stage, settings: Settings, report: Report, limit: float) -> None:
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    record = report["stages"][stage.name] = {"status": "running", "date": now}
    start = time.monotonic()
    work = Work(settings, report, stage.name, start + limit)
    try:
        if reason := why_not(stage, report):
            raise Cannot(reason)
        if limit < stage.least:
            raise Cannot(f"{limit:.0f} s were left, it needs {stage.least:.0f}")
        record["limit"] = round(limit)
        write(settings.output, report)
        work.say(f"begins, {limit:.0f} s at most")
        stage.run(work)
        record["status"] = "failed" if record.get("failures") else "stopped" if record.get("stopped") else "ok"
    except Cannot as reason:
        record |= {"status": "cannot", "reason": str(reason)}
        work.say(f"cannot: {reason}")
    except Exception as error:  # of the report itself: the stages after it run all the same
        record |= {"status": "failed", "traceback": traceback.format_exc()}
        work.fail(f"{type(error).__name__}: {error}")
    except BaseException:  # an interrupt, or the end of a lease
        record |= {"status": "stopped", "stopped": "the report was interrupted"}
        raise
    finally:
        record["seconds"] = round(time.monotonic() - start, 1)
        write(settings.output, report)


def write(path: Path, report: Report) -> None:
    """Atomically: who kills this keeps the report before."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(report, indent=1, default=str) + "\n")
    draft.replace(path)


def last_line(text: str) -> str:
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "nothing was said")


def summary(report: Report, output: Path) -> str:
    """The table at the end, and every failure in a line."""
    lines = ["", f"{'stage':14}{'verdict':10}{'seconds':>8}"]
    complaints = []
    for name, record in report["stages"].items():
        note = record.get("reason") or record.get("note") or record.get("stopped") or ""
        lines.append(f"{name:14}{record['status']:10}{record.get('seconds', 0):8.0f}  {note[:150]}".rstrip())
        complaints += [f"{name}: {text[:300]}" for text in record.get("failures", ())]
    return "\n".join([*lines, "", *complaints, f"report: {output}", f"log:    {output.with_suffix('.log')}"])


def passed(report: Report) -> bool:
    return all(record["status"] in PASSED for record in report["stages"].values())


def main(argv: Sequence[str] | None = None) -> int:
    names = [stage.name for stage in STAGES]
    default = Settings()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=default.minutes, help="for everything; default: %(default)g")
    parser.add_argument("--wheels", type=Path, help="folder of wheels of the peers, which are not on the machine")
    parser.add_argument("--output", type=Path, default=default.output, help="the JSON; its log lies beside it")
    parser.add_argument("--only", type=_names, default=(), metavar="STAGE,...", help=", ".join(names))
    parser.add_argument("--skip", type=_names, default=(), metavar="STAGE,...")
    parser.add_argument(
        "--resume", action="store_true", help="keep what the JSON has; run the stages that it lacks, or those of --only"
    )
    arguments = parser.parse_args(argv)
    settings = Settings(**vars(arguments) | {"output": arguments.output.resolve()})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is killed, and the report written
    report = conduct(STAGES, settings)
    print(summary(report, settings.output), flush=True)
    return 0 if passed(report) else 1


def _names(text: str) -> tuple[str, ...]:
    chosen, known = tuple(text.split(",")), {stage.name for stage in STAGES}
    if unknown := sorted(set(chosen) - known):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: no such stage")
    return chosen


if __name__ == "__main__":
    sys.exit(main())

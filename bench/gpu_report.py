"""`make gpu-report`: all that a GPU machine without network can say about this checkout, in one JSON.

    python bench/gpu_report.py --run 1 --output out/run1.json                   # then 2 and 3, each on any machine
    python bench/gpu_report.py --run 3 --output out/run3.json --wheels wheels
    python bench/gpu_report.py --minutes 25 --wheels wheels                     # everything in one go
    python bench/gpu_report.py --minutes 9 --resume --only bench                # goes on where an earlier call ended

The stages of gpu_stages.py, one after another. Each has its share of the minutes, and what it leaves goes to those
after it; one that would overrun is stopped with all its processes, and what it found is kept. The JSON is written after
every step, beside it the log. Nothing here imports torch: what a stage runs is a process of its own, which may hang or
die without harm. What a stage needs on this machine is made first, whatever the JSON has of an earlier call on another.
Exit status 0 where everything that could run here passed, 1 where something failed or had to be stopped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_stages import RUNS, STAGES, Stage
from gpu_work import Cannot, Report, Settings, Work, write

PASSED = ("ok", "cannot")


# --- the report -----------------------------------------------------------------------------------------------------


def conduct(stages: Sequence[Stage], settings: Settings) -> Report:
    """Run the stages that are wanted."""
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    report: Report = {"environment": {}, "stages": {}}
    if settings.resume and settings.output.exists():
        report = json.loads(settings.output.read_text())
        report.pop("device_lost", None)  # that was another machine, or this one before it recovered
    else:
        settings.output.with_suffix(".log").unlink(missing_ok=True)
    end = time.monotonic() + 60 * settings.minutes
    chosen = choose(stages, settings, report)
    for number, stage in enumerate(chosen):
        left = end - time.monotonic()
        rest = [later for later in chosen[number:] if not why_not(later, report)]
        perform(stage, settings, report, left if stage.always else allotted(stage, rest, left))
    return report


def choose(stages: Sequence[Stage], settings: Settings, report: Report) -> list[Stage]:
    """Those that are wanted, and before them those that they need and whose products this machine lacks."""
    names = {stage.name for stage in stages if wanted(stage, settings, report)}
    needed = {need for stage in stages if stage.name in names for need in stage.needs}
    for stage in stages:
        if stage.name in needed - set(settings.skip) and stage.missing(settings, report):
            names.add(stage.name)
    return [stage for stage in stages if stage.name in names]


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
    if settings.stages and stage.name not in settings.stages:
        return stage.always
    return stage.always or report["stages"].get(stage.name, {}).get("status") not in ("ok", "failed")


def why_not(stage: Stage, report: Report) -> str:
    if not stage.needs_gpu:
        return ""
    return report["environment"].get("no_gpu", "") or report.get("device_lost", "")


def perform(stage: Stage, settings: Settings, report: Report, limit: float) -> None:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    record = report["stages"][stage.name] = {"status": "running", "date": now}
    if stage.needs_gpu:  # a report that goes on may have come to another machine
        record |= {name: report["environment"].get(name) for name in ("device", "driver", "sources")}
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
    parser.add_argument(
        "--run", type=int, choices=tuple(RUNS), help="; ".join(f"{number}: {run}" for number, run in RUNS.items())
    )
    parser.add_argument("--minutes", type=float, help=f"for everything; default: {default.minutes:g}, or the run's")
    parser.add_argument("--wheels", type=Path, help="folder of wheels of the peers, which are not on the machine")
    parser.add_argument("--output", type=Path, help="the JSON; its log and the benchmark's JSON lie beside it")
    parser.add_argument("--only", type=_names, default=(), metavar="STAGE,...", help=", ".join(names))
    parser.add_argument("--skip", type=_names, default=(), metavar="STAGE,...")
    parser.add_argument(
        "--resume", action="store_true", help="keep what the JSON has; run the stages that it lacks, or those of --only"
    )
    given = vars(parser.parse_args(argv))
    if given["run"] and shutil.which("nvidia-smi") is None and not Path("/dev/nvidiactl").exists():
        print("gpu_report.py needs an NVIDIA GPU: this machine has neither nvidia-smi nor its driver", file=sys.stderr)
        return 2
    settings = Settings(**{name: value for name, value in defaults(given).items() if value is not None})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is killed, and the report written
    report = conduct(STAGES, settings)
    print(summary(report, settings.output), flush=True)
    return 0 if passed(report) else 1


def defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments for Settings: a run is a list of stages, minutes and a file of its own."""
    number, output = given.pop("run"), given["output"]
    if number is not None:
        run = RUNS[number]
        given["stages"] = run.stages
        given["minutes"] = given["minutes"] or run.minutes
        output = output or Settings().output.with_name(f"run{number}.json")
    return given | {"output": output and output.resolve()}


def _names(text: str) -> tuple[str, ...]:
    chosen, known = tuple(text.split(",")), {stage.name for stage in STAGES}
    if unknown := sorted(set(chosen) - known):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: no such stage")
    return chosen


if __name__ == "__main__":
    sys.exit(main())

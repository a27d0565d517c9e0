"""`grpo-kernels bench`: from its arguments to a table, a JSON file and pictures."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from .cases import DTYPES, HEADS, MODEL_MODES, MODES, RIVALS, SETS, WHOLES, Case, Job, jobs, make_case
from .machine import OUT_OF_MEMORY, Document, Record, Report, environment, now, write
from .measure import Options, Reports, Run, measure, measure_peak_memory, titles
from .process import NOT_RUN, OnProgress, run_in_subprocess
from .table import IMPLEMENTATIONS, select

ROUNDS = {"cpu": 5, "cuda": 15}
LONG_S = 60.0  # for all rounds of an implementation; one that needs more gets fewer tokens
SILENCE_S = {"cpu": 300.0, "cuda": 120.0}  # a first call may compile for a minute; a longer silence is a hang
_QUICK_MINUTES = 1.8
_LATE_S = 8.0  # after the deadline, for a call under way; then its process is stopped
_WORTH_STARTING_S = 10.0  # the least time for a case to begin
_HEADER = (
    *("", "median ms", "min", "max", "to floor", "to eager", "peak MiB", "gradients", "logp"),
    "why there is none",
)
_SAME = ("device", "driver", "cpu", "threads", "versions")  # of the environment, equal in all cases of a document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    shape = f"HEAD:TOKENS, or TOKENSxHIDDENxVOCAB; heads: {', '.join(HEADS)}"
    rivals = "these, ours and the floor instead of everybody; patterns as in 'ours*'. " + ", ".join(IMPLEMENTATIONS)
    rounds = f"of interleaved timing; {ROUNDS['cpu']} on a CPU, {ROUNDS['cuda']} on a GPU"
    add = parser.add_argument
    add("--quick", action="store_true", help="within two minutes; by default the set quick")
    add("--set", choices=SETS, help="measurements that have a name; heads, if nothing else is said")
    add("--shapes", nargs="+", metavar="SHAPE", help=shape)
    add("--dtypes", nargs="+", choices=DTYPES, help="with --shapes; bfloat16, if nothing is said")
    add("--modes", nargs="+", choices=MODES | MODEL_MODES, help="with --shapes; step, if nothing is said")
    add("--against", nargs="+", metavar="NAME", help=rivals)
    add("--exclude", nargs="+", metavar="NAME", default=[], help="patterns of those to leave out")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    add("--rounds", type=int, help=rounds)
    add("--minutes", type=float, help="stop after these; what is missing then is listed")
    add("--silence", type=float, help="seconds after which an implementation that says nothing hangs")
    add("--resume", action="store_true", help="keep what the results have, measure the rest")
    add("--output", type=Path, default=Path("bench.json"), help="results; written after every case")
    add("--no-figures", action="store_true", help="no pictures beside the results")


def bench(arguments: argparse.Namespace) -> int:
    """Runs the command. Returns its exit status: 2 for a wrong argument, 1 if ours failed or gave a wrong result."""
    output: Path = arguments.output
    try:
        device = _device(arguments.device)
        queue = _jobs(arguments, device)
        minutes = arguments.minutes or (_QUICK_MINUTES if arguments.quick else None)
        end = time.time() + 60 * minutes if minutes else math.inf
        limit = f", which end after {minutes:g} minutes with what is measured then" if minutes else ""
        print(f"{len(queue)} case{'s' * (len(queue) > 1)}{limit}", flush=True)
        this_environment = environment(device)
        records = _complete_records(output, this_environment) if arguments.resume and output.exists() else []
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    document: Document = {"environment": this_environment, "cases": records, "not_run": []}
    print(headline(this_environment), flush=True)
    if arguments.device == "auto" and device.type == "cpu":
        print("no GPU here, hence no GPU figures: this measures the CPU")
    num_planned = len(queue)
    for number, job in enumerate(queue, 1):  # the list grows by cases with fewer tokens
        record = next((record for record in records if _is_record_of(record, job)), None)
        if record is None and end - time.time() < _WORTH_STARTING_S:
            document["not_run"].append(str(job.case))
        elif record is None:
            rounds = job.rounds if job.rounds == 0 else arguments.rounds or job.rounds or ROUNDS[device.type]
            title = f"{number}/{len(queue)} {job.case}"
            print(f"\n{title}: {', '.join(job.against)}", flush=True)
            run = partial(
                run_in_subprocess, on_progress=_show_progress(title), deadline=end + _LATE_S,
                silence_s=arguments.silence or SILENCE_S[device.type],
            )  # fmt: skip
            # Half of a fair share of the time left; the other half is for first calls and exact results.
            share_s = (end - time.time()) / (len(queue) - number + 1) / len(job.against) / 2
            most_s = min(LONG_S, share_s) if number <= num_planned else math.inf
            record = measure_job(job, Options(str(device), rounds, end, most_s), run)
            records.append(record)
        write(output, document)
        if record is not None:
            print(f"\n{case_table(record)}", flush=True)
            queue += with_fewer_tokens(job, record)
    for case in document["not_run"]:
        print(f"not run, out of time: {case}")
    num_cut = sum(_is_cut(report) for record in records for report in record["implementations"].values())
    if num_cut or document["not_run"]:
        print(
            f"out of time: {num_cut} measurements of the cases above, {len(document['not_run'])} cases. "
            f"--resume --minutes {2 * (minutes or 1):g} measures again the cases that lack something"
        )
    print(f"written: {output}")
    if not arguments.no_figures and importlib.util.find_spec("matplotlib") is None:
        print("no pictures without matplotlib: pip install matplotlib", file=sys.stderr)
    elif not arguments.no_figures:
        from .figures import draw

        for path in draw(document, output.parent):
            print(f"written: {path}")
    return 1 if has_failed(document) else 0


def measure_job(job: Job, options: Options, run: Run) -> Record:
    """Measures time and memory of a job's case. Returns its record, as it stands in the document."""
    names = select(job.against)
    record = measure(job.case, names, options, run) if options.rounds else {"implementations": titles(names)}
    reports = record["implementations"]
    on_cpu = torch.device(options.device).type == "cpu"  # on a GPU `measure` measures memory too
    for name in select(job.memory) if on_cpu else ():
        if name in names and not {"error", "missing"} & (record | reports.get(name, {})).keys():
            timeout_report = {"memory_error": NOT_RUN} if time.time() > options.deadline else None
            reports[name] |= timeout_report or measure_peak_memory(job.case, name, run)
    if eager_bytes := reports.get("eager", {}).get("peak_bytes"):
        for report in reports.values():
            if "peak_bytes" in report:
                report["memory_ratio_to_eager"] = report["peak_bytes"] / eager_bytes
    return {"case": asdict(job.case), "date": now()} | record


def with_fewer_tokens(job: Job, record: Record) -> list[Job]:
    """Returns a job with shorter completions for the implementations that were too slow, with ours and the floor; an
    empty list if none was."""
    reports = record["implementations"].items()
    fewer_tokens = {name: report["fewer_tokens"] for name, report in reports if "fewer_tokens" in report}
    if not fewer_tokens:
        return []
    tokens, bases = min(fewer_tokens.values()), [name for name in ("ours", "floor") if name in job.against]
    case = replace(job.case, tokens=tokens, length=job.case.length * tokens // job.case.tokens)
    return [Job(case, (*bases, *fewer_tokens), rounds=job.rounds)]


def _is_record_of(record: Record, job: Job) -> bool:
    """Returns whether a record is of this job's case, with all of its implementations."""
    return record["case"] == asdict(job.case) and set(job.against) <= record["implementations"].keys()


def has_failed(document: Document) -> bool:
    """Returns whether a case, or ours in one, ended in an error; running out of memory or time does not count."""
    excused = (OUT_OF_MEMORY, "not run")
    for record in document["cases"]:
        reports = record["implementations"].items()
        our_errors = [report.get("error", "not run") for name, report in reports if name.startswith("ours")]
        if "error" in record or not all(error.startswith(excused) for error in our_errors):
            return True
    return False


def _is_cut(report: Report) -> bool:
    """Returns whether a report lacks something because time ran out."""
    return any(report.get(key, "").startswith(NOT_RUN) for key in ("error", "memory_error"))


def _complete_records(path: Path, this_environment: Document) -> list[Record]:
    """Returns the records of an earlier run that lack nothing, whatever its number of rounds; ValueError where its
    environment differs from this one."""
    document = json.loads(path.read_text())
    differences = [name for name in _SAME if document["environment"].get(name) != this_environment[name]]
    if differences:
        raise ValueError(f"{path} was measured otherwise ({', '.join(differences)}): move it, or do not resume")
    return [record for record in document["cases"] if not any(map(_is_cut, record["implementations"].values()))]


def _device(name: str) -> torch.device:
    """Returns the device that --device names; ValueError where it cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name}: {error}") from None
    if device.type not in ROUNDS:
        raise ValueError(f"--device {name}: expected cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch {torch.__version__} finds no CUDA device here")
    return device


def _jobs(arguments: argparse.Namespace, device: torch.device) -> list[Job]:
    """Returns the jobs that the options select; ValueError where options contradict each other."""
    if arguments.shapes:
        if arguments.set:
            raise ValueError("--shapes and --set: expected one of them")
        selected_jobs = [
            Job(make_case(shape, dtype, mode=mode), WHOLES.get(mode, RIVALS), memory=("*",))
            for shape in arguments.shapes
            for dtype in arguments.dtypes or ("bfloat16",)
            for mode in arguments.modes or ("step",)
        ]
    elif arguments.dtypes or arguments.modes:
        raise ValueError("--dtypes and --modes go with --shapes: a set has its own")
    else:
        selected_jobs = jobs(arguments.set or ("quick" if arguments.quick else "heads"), device.type)
    if arguments.against:
        select(arguments.against)  # raises for an unknown name, before any work
        selected_jobs = [replace(job, against=("ours", "floor", *arguments.against)) for job in selected_jobs]
    return [replace(job, against=tuple(select(job.against, arguments.exclude))) for job in selected_jobs]


def _show_progress(job: str) -> OnProgress:
    """Returns a callback that prints a line for each implementation after its first call, and in a terminal keeps a
    status line up to date."""
    printed: set[str] = set()

    def show(text: str, reports: Reports | None = None) -> None:
        for name, report in (reports or {}).items():
            if name not in printed and "first_call_seconds" in report:
                printed.add(name)
                print(f"  {report['title']}: first call {report['first_call_seconds']:.2f} s", flush=True)
        if sys.stderr.isatty():
            print(f"\r\033[K{job}: {text}", end="\r", file=sys.stderr, flush=True)

    return show


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table whose first and last columns are aligned to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header) - 1)]
    rule = ["-" * max(3, width) for width in (*widths, len(header[-1]))]
    lines = []
    for first, *middle, last in (header, rule, *rows):
        cells = [cell.rjust(width) for cell, width in zip(middle, widths[1:], strict=True)]
        lines.append(f"| {' | '.join((first.ljust(widths[0]), *cells, last.ljust(len(rule[-1]))))} |")
    return "\n".join(lines)


def case_table(record: Record) -> str:
    """Returns the table of a case: times, ratios, peak memory, errors against float64, or why they are missing.

    Errors are the larger one of the two gradients, relative to its norm; and the largest of a log-probability, in nats.
    """
    case = Case(**record["case"])
    lines = [f"{case}: {(MODES | MODEL_MODES)[case.mode]}", *([record["error"]] if "error" in record else [])]
    rows = [_row(name, report) for name, report in record["implementations"].items()]
    return "\n".join([*lines, *([table(_HEADER, rows)] if rows else [])])


def headline(environment: Document) -> str:
    """Returns device, versions and backends in one line."""
    device = f"{environment['device']}, driver {environment['driver']}" if environment["driver"] else environment["cpu"]
    versions = ", ".join(f"{name} {number}" for name, number in environment["versions"].items() if number)
    return f"{device}, {environment['threads']} threads; {versions}; backends {', '.join(environment['backends'])}"


def memory_text(report: Report) -> str:
    """Returns peak memory in MiB as text, or in a few words why there is none."""
    if "peak_bytes" in report:
        return f"{report['peak_bytes'] / 2**20:,.0f}"
    return str(report.get("memory_error", "").split(":")[0])


def _row(name: str, report: Report) -> list[str]:
    """Returns the cells of an implementation's row."""
    times, errors = report.get("seconds", {}), report.get("errors") or {}
    cells = [f"{times[key] * 1e3:.1f}" if times else "" for key in ("median", "min", "max")]
    cells += [f"{report[key]:.2f}" if key in report else "" for key in ("ratio_to_floor", "ratio_to_eager")]
    cells.append(memory_text(report))
    for names in (("dhidden", "dweight"), ("logps_max",)):
        values = [errors[quantity] for quantity in names if quantity in errors]
        cells.append(f"{max(values):.1e}" if values else "")
    reasons = [report[key] for key in ("missing", "error", "memory_error") if report.get(key)]
    if "fewer_tokens" in report:
        reasons.append(f"with {report['fewer_tokens']} tokens, in a case of their own")
    return [name, *cells, next(iter(reasons), "")]

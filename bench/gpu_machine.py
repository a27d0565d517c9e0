"""What machine this is, for `gpu_report.py`: read, never set, since whoever lends it has chosen its clocks."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

from gpu_work import ROOT, Work

PROBES = "bench/gpu_probes.py"
SOURCES = (".py", ".json", ".h", ".cuh", ".cu", ".cpp")
CLOCKS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
CARD = (
    *("name", "driver_version", "vbios_version", "pstate", *CLOCKS, "clocks.max.sm", "clocks.max.mem", "power.limit"),
    *("memory.total", "memory.used", "mig.mode.current", "ecc.mode.current", "compute_mode", "persistence_mode"),
)


def environment(work: Work) -> None:
    """Device, driver, clocks, versions, date: the head of the report."""
    card = query_card(work)
    work.report["environment"] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "commit": line_of(work, "git", "rev-parse", "HEAD"),
        "sources": sources(),
        "device": card.get("name"),
        "driver": card.get("driver_version"),
        "clocks": {name: card.get(name) for name in CLOCKS},
        "card": card,
        "no_gpu": "no torch was asked",
    }
    ended = work.python(PROBES, "device", most=180)
    if work.expect(ended, "torch"):
        work.environment.update(parse(ended.output))
    else:
        work.environment["no_gpu"] = "this Python has no torch that works: make gpu-report PYTHON=/path/to/python"
    package(work)
    work.record["note"] = work.environment["no_gpu"] or str(work.environment["device"])


def query_card(work: Work) -> dict[str, str]:
    if shutil.which("nvidia-smi") is None:
        return {"unknown": "no nvidia-smi"}
    ended = work.run(["nvidia-smi", f"--query-gpu={','.join(CARD)}", "--format=csv,noheader"], most=30)
    if not ended.ok:
        return {"unknown": ended.stopped or ended.output.strip()[-300:]}
    values = ended.output.strip().splitlines()[0].split(",")
    return dict(zip(CARD, (value.strip() for value in values), strict=False))


def line_of(work: Work, program: str, *arguments: str) -> str | None:
    """The last line that a program says, None where there is none."""
    found = shutil.which(program) or shutil.which(program, path="/usr/local/cuda/bin")
    ended = work.run([found, *arguments], most=20) if found else None
    return ended.output.strip().splitlines()[-1] if ended and ended.ok and ended.output.strip() else None


def package(work: Work) -> None:
    """What `grpo-kernels env` says, which depends on what has been built."""
    ended = work.python("-m", "grpo_kernels", "env", "--json", most=120)
    if work.expect(ended, "grpo-kernels env"):
        facts = work.environment["package"] = parse(ended.output)
        facts.get("tuned_table", {}).pop("path", None)  # reports are published


def sources() -> str:
    """A digest of what kernels are built and run from: the same in every copy of this checkout."""
    digest = hashlib.sha256()
    for folder in ("setup.py", "csrc", "python", "tools/kernel_build", "grpo_kernels"):
        top = ROOT / folder
        for file in sorted([top] if top.is_file() else top.rglob("*")):
            if file.suffix in SOURCES and file.is_file():
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def parse(output: str) -> dict[str, Any]:
    """The JSON object that begins a line, among warnings."""
    start = re.search(r"^\{", output, re.MULTILINE)
    if start is None:
        return {}
    found: dict[str, Any] = json.JSONDecoder().raw_decode(output[start.start() :])[0]
    return found


@contextlib.contextmanager
def watched_clocks(work: Work) -> Iterator[None]:
    """The clocks while something is measured, twice a second: least, median, most of each."""
    if shutil.which("nvidia-smi") is None or work.environment["no_gpu"]:
        yield
        return
    command = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader,nounits", "-lms", "500"]
    with tempfile.TemporaryFile("w+") as samples:
        watcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=samples, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            watcher.kill()
            watcher.wait()
            samples.seek(0)
            work.record["clocks"] = summarize(samples.read())


def summarize(samples: str) -> dict[str, list[float]]:
    rows = [[float(cell) for cell in re.findall(r"-?\d+(?:\.\d+)?", line)] for line in samples.splitlines()]
    columns = zip(*(row for row in rows if len(row) == len(CLOCKS)), strict=True)
    return {
        name: [min(values), statistics.median(values), max(values)]
        for name, values in zip(CLOCKS, columns, strict=False)
    }

"""Builds, tests and measures this checkout on a GPU machine without network; writes one JSON as results come.

    python bench/gpu.py --output gpu.json --minutes 7                  # build, check, tests, headline
    python bench/gpu.py --output gpu.json --minutes 6 --resume --peers DIR --stages build sampling benchmark trainer

Every command is a process with a time limit. If something hangs, crashes or gives wrong results, the JSON names it,
its backend is left out of the stages that follow (`left_out`), all else is still measured, and the exit status is 1.
--resume keeps stages that finished with the same sources. The build always runs; it compiles what changed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# QuACK can be imported only from a folder of this name: it takes code elsewhere for code that may change.
PEERS = ROOT / "build" / "gpu" / "site-packages"
BACKENDS = ("cuda", "triton")
# Seconds for one command, in which Triton may compile for minutes; and of silence until a step or a test is a hang.
LIMITS = dict(build=300, check=120, headline=150, tests=200, trainer=150, sampling=180)
SILENCE = 90.0
VARIANTS = ("unscored", "unmasked", "sparse")  # of "ours", on the backend that "auto" takes
# Stages that run a set of `grpo-kernels bench`.
BENCHES = {"headline": "headline", "benchmark": "heads", "trainer": "trainer", "sampling": "sampling"}
# Of pytest. Each worker reads torch from disk, makes a CUDA context and shares the cores: more of them start later.
TESTS = ("-n", "4", "--maxschedchunk", "1", "--tb=short", "-o", "faulthandler_exit_on_timeout=true")
UNAVAILABLE = "backend "  # reasons of backends that cannot be loaded begin with this
IS_OVER = "stopped: the time of all is up"


class Ended(NamedTuple):
    """How a command ended: its output, and a line that says why it failed, or ""."""

    output: str
    failure: str = ""


class Session:
    """The JSON, the options of this call, and a way to run commands that end with their time limit."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.path, sources = options, options.output.resolve(), digest_of_sources()
        self.end = time.monotonic() + 60 * options.minutes
        self.data: dict[str, Any] = {"environment": {}, "stages": {}, "left_out": {}}
        self.stage: dict[str, Any] = {}
        if options.resume and self.path.exists():
            earlier_data = json.loads(self.path.read_text())
            self.data |= earlier_data if earlier_data.get("sources") == sources else {}
        self.data["sources"] = sources
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def save(self) -> None:
        """Writes the JSON, atomically."""
        draft = self.path.with_name(f"{self.path.name}.tmp")
        draft.write_text(json.dumps(self.data, indent=1, default=str) + "\n")
        draft.replace(self.path)

    def fail(self, text: str, backend: str = "") -> None:
        """Records a failure; from now on its `backend`, if any, is left out."""
        self.stage.setdefault("failures", []).append(text)
        print(f"FAILED: {text}", flush=True)
        if backend in BACKENDS:
            self.data["left_out"].setdefault(backend, text)
        self.save()

    def judge(self, title: str, ended: Ended, backend: str = "") -> Ended:
        """Records a command's failure, if any; its backend is not blamed where all time was up. Returns `ended`."""
        if ended.failure:
            self.fail(f"{title}: {ended.failure}", "" if ended.failure == IS_OVER else backend)
        return ended

    def python(self, *arguments: object, limit: float = math.inf) -> Ended:
        """Runs this Python at the root; kills it and all that it started after `limit` seconds, or when time is up."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(PEERS)])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, *map(str, arguments)]
        left_s, failure = self.end - time.monotonic(), ""
        with tempfile.TemporaryFile() as stdout:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(min(limit, left_s))
            except subprocess.TimeoutExpired:
                failure = IS_OVER if left_s < limit else f"stopped after {limit:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(10)  # a process inside of a driver does not die at once
                stdout.seek(0)
                text = stdout.read()
                with self.path.with_suffix(".log").open("ab") as log:
                    log.write(f"\n--- {' '.join(command)[:300]}\n".encode() + text)
        output = text.decode(errors="replace")
        if process.returncode and not failure:
            message = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "nothing was said")
            failure = f"exit status {process.returncode}: {message[:300]}"
        return Ended(output, failure)


def digest_of_sources() -> str:
    """Returns a digest of the files that the build and the package are made of."""
    digest = hashlib.sha256()
    for folder in ("setup.py", "csrc", "python", "tools", "grpo_kernels"):
        for file in sorted([ROOT / folder] if (ROOT / folder).is_file() else (ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".json", ".h", ".cuh", ".cu", ".cpp"):
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def unpack(folder: Path, target: Path = PEERS) -> list[str]:
    """Joins the parts of `make gpu-peers` in `folder` and unpacks them into `target`, unless that was done before.

    The parts may have come one by one. Returns the names of what is missing or damaged; then nothing is unpacked.
    """
    sums, unpacked = folder / "SHA256SUMS", target / "SHA256SUMS"
    if not sums.is_file():
        return [sums.name]
    if unpacked.is_file() and unpacked.read_bytes() == sums.read_bytes():
        return []
    digests = {name: digest for digest, name in map(str.split, sums.read_text().splitlines())}
    parts = {name: (folder / name).read_bytes() for name in digests if (folder / name).is_file()}
    lacking = [name for name in digests if hashlib.sha256(parts.get(name, b"")).hexdigest() != digests[name]]
    if not lacking:
        shutil.rmtree(target, ignore_errors=True)
        with tarfile.open(fileobj=io.BytesIO(b"".join(parts.values())), mode="r:xz") as archive:
            archive.extractall(target, filter="data")
        # Python reads .pth files in its own folders only, and imports a module of this name when it starts.
        (target / "sitecustomize.py").write_text(f"import site\n\nsite.addsitedir({str(target)!r})\n")
        shutil.copyfile(sums, unpacked)
    return lacking


# --- stages -----------------------------------------------------------------------------------------------------------


def build(session: Session) -> None:
    """Builds this checkout, as it is; unpacks the peers; asks each backend whether it can be loaded."""
    if session.options.peers and (lacking := unpack(session.options.peers)):
        session.fail(f"peers: missing or damaged in {session.options.peers}: {', '.join(lacking)}")
    if not session.options.built:
        session.judge("build", session.python("setup.py", "build_ext", "--inplace", limit=LIMITS["build"]))
    left_out = session.data["left_out"]
    session.data["left_out"] = {name: reason for name, reason in left_out.items() if not reason.startswith(UNAVAILABLE)}
    ended = session.python("-m", "grpo_kernels", "env", "--json", limit=120)
    environment = session.data["environment"] = {}
    with contextlib.suppress(ValueError):  # no JSON: the command failed; warnings may surround the JSON
        environment |= json.JSONDecoder().raw_decode(ended.output[ended.output.find("{\n") :])[0]
    for name in BACKENDS:
        if reason := environment.get("backends", {}).get(name, ended.failure):
            session.fail(f"{UNAVAILABLE}{name}: {reason}", name)


def check(session: Session) -> None:
    """Runs `grpo-kernels check` for each backend, side by side, as nothing is timed."""

    def checked(name: str) -> Ended:
        return session.python("-m", "grpo_kernels", "check", "--quick", "--backend", name, limit=LIMITS["check"])

    names = [*(name for name in BACKENDS if name not in session.data["left_out"]), "torch"]
    with ThreadPoolExecutor(len(names)) as pool:
        for name, ended in zip(names, pool.map(checked, names), strict=True):
            session.stage[name] = ended.output[-2000:] if ended.failure else "ok"
            session.judge(f"check {name}", ended, name)


def bench(session: Session, stage: str) -> None:
    """Runs a set of `grpo-kernels bench`, which names implementations that hang, crash or are wrong, and puts its
    document into the JSON."""
    set_name, limit = BENCHES[stage], LIMITS.get(stage, math.inf)
    output, left_out = session.path.with_suffix(f".{set_name}.json"), session.data["left_out"]
    options = ["--set", set_name]
    if session.options.shapes:
        options_of_sets = {"headline": ["--against", "ours-cuda", "ours-triton"], "heads": []}
        options = ["--shapes", *session.options.shapes, *options_of_sets.get(set_name, ["--modes", set_name])]
    minutes = max(min(limit, session.end - time.monotonic()) - 20, 20) / 60  # 20 s are left for the case under way
    command: list[object] = ["-m", "grpo_kernels", "bench", *options, "--rounds", 5, "--no-figures"]
    command += ["--device", session.options.device, "--minutes", f"{minutes:.2f}", "--output", output]
    command += ["--silence", session.options.silence]
    excluded = [f"ours-{backend}" for backend in left_out]
    if not left_out.get("cuda", UNAVAILABLE).startswith(UNAVAILABLE):  # it loads, so "auto" takes it
        excluded += ["ours", *(f"ours-{variant}" for variant in VARIANTS)]
    command += ["--exclude", *excluded] if excluded else []
    ended = session.python(*command, *(["--resume"] if session.options.resume else []), limit=limit)
    if "was measured otherwise" in ended.output:  # on another machine, or with other versions
        ended = session.python(*command, limit=limit)
    session.judge(set_name, ended)
    document = json.loads(output.read_text()) if output.exists() else {"cases": [], "not_run": []}
    session.data[set_name] = document
    for record in document["cases"]:
        shape = f"{record['case']['head']} {record['case']['mode']}"
        for name, report in record["implementations"].items():
            error = report.get("error", "not run")
            if name.startswith("ours") and not error.startswith(("out of memory", "not run")):
                session.fail(f"{set_name} {shape}: {name}: {error}", name.removeprefix("ours-"))
        ratios = {name: report.get("ratio_to_floor") for name, report in record["implementations"].items()}
        print(f"{shape}: {', '.join(f'{name} {ratio:.3f}' for name, ratio in ratios.items() if ratio)}", flush=True)
    session.stage["not_run"] = document["not_run"]


def tests(session: Session) -> None:
    """Runs the tests marked gpu, most valuable first. A hang or a crash ends its worker; xdist starts another."""
    outcomes: dict[str, str] = session.data.setdefault("tests", {})  # of earlier calls too
    log = session.path.with_suffix(".tests.jsonl")
    log.unlink(missing_ok=True)
    command: list[object] = ["-m", "pytest", "-m", "gpu", *TESTS, "--outcomes", log]
    command += ["-o", f"faulthandler_timeout={session.options.silence}"]  # dump tracebacks before all workers hang
    command += ["-k", f"not ({' or '.join(session.data['left_out'])})"] if session.data["left_out"] else []
    command += [*(f"--deselect={name}" for name in outcomes), *(session.options.tests or ["tests/test_gpu.py"])]
    ended = session.python(*command, limit=LIMITS["tests"])
    lines = map(json.loads, log.read_text().splitlines() if log.exists() else ())
    entries = {entry["test"]: entry for entry in lines}
    pending = [name for name, entry in entries.items() if entry["outcome"] in ("selected", "begun")]
    outcomes |= {name: f"{entry['outcome']}: {entry['said']}" for name, entry in entries.items() if name not in pending}
    if ended.failure and not ended.failure.startswith("stopped"):  # pytest itself crashed, and was not stopped
        outcomes |= {name: f"failed: {ended.failure}" for name in pending if entries[name]["outcome"] == "begun"}
    for name, outcome in outcomes.items():
        if outcome.startswith("failed"):
            session.fail(f"{name}: {outcome}")
    counts = Counter(outcome.partition(":")[0] for outcome in outcomes.values())
    session.stage |= {"counts": dict(counts), "not_run": len(entries.keys() - outcomes)}
    if not counts["passed"]:
        session.fail(f"none of {len(entries)} tests passed; {ended.failure}")


STAGES: dict[str, Callable[[Session], None]] = {
    "build": build,
    "check": check,
    "tests": tests,
    **{stage: functools.partial(bench, stage=stage) for stage in BENCHES},
}
DEFAULT_STAGES = ("build", "check", "tests", "headline")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the stages. Returns the exit status: 1 if one of them failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=DEFAULT_STAGES)
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything; default: %(default)g")
    parser.add_argument("--output", type=Path, default=ROOT / "build/gpu/report.json", help="its log lies beside it")
    parser.add_argument("--resume", action="store_true", help="keep what the JSON has; run what it lacks")
    parser.add_argument("--built", action="store_true", help="the compiled modules were made elsewhere: use them")
    parser.add_argument("--peers", type=Path, help="the folder of make gpu-peers, or a copy of it")
    parser.add_argument("--shapes", nargs="+", help="instead of the heads of each stage")
    parser.add_argument("--tests", nargs="+", default=[], help="files or tests; default: tests/test_gpu.py")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--silence", type=float, default=SILENCE, help="seconds after which a test or a step hangs")
    options = parser.parse_args(argv)
    if options.device.startswith("cuda") and shutil.which("nvidia-smi") is None and not Path("/dev/nvidiactl").exists():
        print("gpu.py needs an NVIDIA GPU: this machine has neither nvidia-smi nor its driver", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # kills what runs, and writes the JSON
    session = Session(options)
    stages = session.data["stages"]
    for name in options.stages:
        earlier_stage = stages.get(name, {})
        if name != "build" and earlier_stage.get("status") in ("ok", "failed") and not earlier_stage.get("not_run"):
            continue
        date, start = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.monotonic()
        session.stage = stages[name] = {"status": "stopped", "date": date}
        print(f"{name}: begins, {session.end - start:.0f} s are left", flush=True)
        try:
            if session.end - start > 10:
                STAGES[name](session)
                session.stage["status"] = "failed" if "failures" in session.stage else "ok"
        finally:
            session.stage["seconds"] = round(time.monotonic() - start, 1)
            session.save()
    for name, stage in stages.items():
        print(f"{name:10} {stage['status']:8} {stage['seconds']:6.0f} s  {len(stage.get('failures', ()))} failures")
    for name, reason in session.data["left_out"].items():
        print(f"left out: {name}: {reason[:200]}")
    print(f"report: {session.path}")
    return 0 if all(stage["status"] == "ok" for stage in stages.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Builds, tests and measures this checkout on a GPU machine without network; writes one JSON as results come.

    python bench/gpu.py --output gpu.json --peers DIR --minutes 7 --stages build check headline peers
    python bench/gpu.py --output gpu.json --resume --minutes 6 --stages build tests sampling trainer

A stage ends with its share of the time, and every command is a process. If something hangs, crashes or gives wrong
results, the JSON names it, its backend is left out of the stages that follow (`left_out`), all else is still measured,
and the exit status is 1.
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
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# QuACK can be imported only from a folder of this name: it takes code elsewhere for code that may change.
PEERS = ROOT / "build" / "gpu" / "site-packages"
BACKENDS = ("cuda", "triton")
# Seconds that stages are worth, in the order of their worth; the comparison with everything needs a call of its own. A
# stage gets its share of what is left when it begins: it takes no other's time, and what it leaves is theirs.
SHARES = dict(build=150, check=30, headline=150, peers=150, tests=150, sampling=100, trainer=110, benchmark=300)
SILENCE = 90.0  # seconds until a step or a test is a hang
VARIANTS = ("unscored", "unmasked", "sparse", "rows-*", "dweight-*")  # of "ours", on the backend that "auto" takes
# What nvidia-smi is asked five times a second, and the names of its columns in the JSON.
CLOCKS = {
    "clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz", "power.draw": "watts", "temperature.gpu": "celsius"
}  # fmt: skip
# Of pytest. Each worker reads torch from disk, makes a CUDA context and shares the cores: more of them start later.
TESTS = ("-n", "4", "--maxschedchunk", "1", "--tb=short", "-o", "faulthandler_exit_on_timeout=true")
UNAVAILABLE = "backend "  # reasons of backends that cannot be loaded begin with this
IS_OVER = "stopped: the stage's share of the time is up"


class Benchmark(NamedTuple):
    """A set of `grpo-kernels bench`, its rounds, and options that go with --shapes in place of the set's cases."""

    name: str
    rounds: int
    for_shapes: tuple[str, ...] = ()


BENCHES = {
    "headline": Benchmark(
        "headline", 15, ("--against", "ours-cuda", "ours-triton", "ours-sparse", "ours-rows-*", "ours-dweight-*")
    ),
    "peers": Benchmark("peers", 15, ("--against", "trl", "liger-native", "torch", "torch-chunked", "quack")),
    "sampling": Benchmark("sampling", 5, ("--modes", "sampling")),
    "trainer": Benchmark("trainer", 5, ("--modes", "trainer")),
    "benchmark": Benchmark("heads", 5),
}


class Ended(NamedTuple):
    """How a command ended: its output, and a line that says why it failed, or ""."""

    output: str
    failure: str = ""


class Session:
    """The JSON, the options of this call, and a way to run commands that end with their time limit."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.path, sources = options, options.output.resolve(), digest_of_sources()
        self.end = self.stage_end = time.monotonic() + 60 * options.minutes
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
        """Records a command's failure, if any; its backend is not blamed where time was up. Returns `ended`."""
        if ended.failure:
            self.fail(f"{title}: {ended.failure}", "" if ended.failure == IS_OVER else backend)
        return ended

    def left_s(self) -> float:
        """Returns the seconds that the stage has left."""
        return self.stage_end - time.monotonic()

    def python(self, *arguments: object, limit: float = math.inf) -> Ended:
        """Runs this Python at the root; kills it and all that it started after `limit` seconds, or with the stage."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(PEERS)])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, *map(str, arguments)]
        left_s, failure = self.left_s(), ""
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
        limit = 0.8 * session.left_s()  # of what is left after it, backends are asked
        session.judge("build", session.python("setup.py", "build_ext", "--inplace", limit=limit))
    left_out = session.data["left_out"]
    session.data["left_out"] = {name: reason for name, reason in left_out.items() if not reason.startswith(UNAVAILABLE)}
    ended = session.python("-m", "grpo_kernels", "env", "--json")
    environment = session.data["environment"] = {}
    with contextlib.suppress(ValueError):  # no JSON: the command failed; warnings may surround the JSON
        environment |= json.JSONDecoder().raw_decode(ended.output[ended.output.find("{\n") :])[0]
    for name in BACKENDS:
        if reason := environment.get("backends", {}).get(name, ended.failure):
            session.fail(f"{UNAVAILABLE}{name}: {reason}", name)


def check(session: Session) -> None:
    """Runs `grpo-kernels check` for each backend, side by side, as nothing is timed."""

    def checked(name: str) -> Ended:
        return session.python("-m", "grpo_kernels", "check", "--quick", "--backend", name)

    names = [*(name for name in BACKENDS if name not in session.data["left_out"]), "torch"]
    with ThreadPoolExecutor(len(names)) as pool:
        for name, ended in zip(names, pool.map(checked, names), strict=True):
            session.stage[name] = ended.output[-2000:] if ended.failure else "ok"
            session.judge(f"check {name}", ended, name)


def bench(session: Session, stage: str) -> None:
    """Runs a set of `grpo-kernels bench`, which names implementations that hang, crash or are wrong, and puts its
    document into the JSON."""
    set_name, rounds, for_shapes = BENCHES[stage]
    output, left_out = session.path.with_suffix(f".{set_name}.json"), session.data["left_out"]
    options = ["--set", set_name]
    if session.options.shapes:
        options = ["--shapes", *session.options.shapes, *for_shapes]
    minutes = max(session.left_s() - 20, 20) / 60  # 20 s are left for the case under way
    command: list[object] = ["-m", "grpo_kernels", "bench", *options, "--rounds", rounds, "--no-figures"]
    command += ["--device", session.options.device, "--minutes", f"{minutes:.2f}", "--output", output]
    command += ["--silence", session.options.silence]
    excluded = [f"ours-{backend}" for backend in left_out]
    if not left_out.get("cuda", UNAVAILABLE).startswith(UNAVAILABLE):  # it loads, so "auto" takes it
        excluded += ["ours", *(f"ours-{variant}" for variant in VARIANTS)]
    command += ["--exclude", *excluded] if excluded else []
    ended = session.python(*command, *(["--resume"] if session.options.resume else []))
    if "was measured otherwise" in ended.output:  # on another machine, or with other versions
        ended = session.python(*command)
    session.judge(set_name, ended)
    document = json.loads(output.read_text()) if output.exists() else {"cases": [], "not_run": []}
    session.data[set_name] = document
    for record in document["cases"]:
        shape = f"{record['case']['head']} {record['case']['mode']}"
        for name, report in record["implementations"].items():
            error = report.get("error", "not run")
            if name.startswith("ours") and not error.startswith(("out of memory", "not run")):
                session.fail(f"{set_name} {shape}: {name}: {error}", name.removeprefix("ours-"))
        ratios = {name: report.get("ratio_by_round") for name, report in record["implementations"].items()}
        told = "{} {median:.3f} ({low:.3f} to {high:.3f})"
        print(f"{shape}: {', '.join(told.format(name, **x) for name, x in ratios.items() if x)}", flush=True)
    session.stage["not_run"] = document["not_run"]


def tests(session: Session) -> None:
    """Runs the tests marked gpu, most valuable first. A hang or a crash ends its worker; xdist starts another."""
    outcomes: dict[str, str] = session.data.setdefault("tests", {})  # of earlier calls too
    log = session.path.with_suffix(".tests.jsonl")
    log.unlink(missing_ok=True)
    marked = "gpu" if session.options.device.startswith("cuda") else "not gpu"
    command: list[object] = ["-m", "pytest", "-m", marked, *TESTS, "--outcomes", log]
    command += ["-o", f"faulthandler_timeout={session.options.silence}"]  # dump tracebacks before all workers hang
    command += ["-k", f"not ({' or '.join(session.data['left_out'])})"] if session.data["left_out"] else []
    command += [*(f"--deselect={name}" for name in outcomes), *(session.options.tests or ["tests/test_gpu.py"])]
    ended = session.python(*command)
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
DEFAULT_STAGES = tuple(SHARES)[:-1]


@contextlib.contextmanager
def record_clocks(path: Path, device: str) -> Iterator[Callable[[], dict[str, list[float]]]]:
    """Lets nvidia-smi write CLOCKS of a device to a CSV until the block ends.

    Yields a function that returns [least, median, most] of each since its last call; nothing without nvidia-smi.
    """
    index, seen = int(device.partition(":")[2] or 0), 0
    visible = dict(enumerate(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))))
    command = ["nvidia-smi", f"--id={visible.get(index, index)}", f"--query-gpu={','.join(CLOCKS)}"]
    command += ["--format=csv,noheader,nounits", "--loop-ms=200"]

    def read() -> dict[str, list[float]]:
        nonlocal seen
        lines = path.read_text().split("\n")[:-1]  # the last one is not complete
        samples, seen = [line.split(", ") for line in lines[seen:]], len(lines)
        found = {}
        for name, *values in zip(CLOCKS.values(), *samples, strict=False):
            with contextlib.suppress(ValueError):  # what this GPU does not tell is no number
                numbers = [float(value) for value in values]
                found[name] = [min(numbers), statistics.median(numbers), max(numbers)]
        return found

    with path.open("a") as out:
        print(f"\n{', '.join(CLOCKS.values())}", file=out, flush=True)  # an earlier call may have ended within a line
        read()  # what is there already
        if shutil.which(command[0]) is None:
            print("no nvidia-smi: clocks are not recorded", flush=True)
            yield read
            return
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield read
        finally:
            process.kill()  # and no wait: inside of a driver it does not die at once


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the stages. Returns the exit status: 1 if one of them failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=DEFAULT_STAGES)
    parser.add_argument("--minutes", type=float, default=13.0, help="for everything; default: %(default)g")
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
    finished = [name for name, stage in stages.items() if stage["status"] != "stopped" and not stage.get("not_run")]
    due = [name for name in dict.fromkeys(options.stages) if name == "build" or name not in finished]
    with record_clocks(session.path.with_suffix(".clocks.csv"), options.device) as read_clocks:
        for i, name in enumerate(due):
            date, start = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.monotonic()
            share = SHARES[name] / sum(SHARES[other] for other in due[i:])
            session.stage_end = start + share * (session.end - start)
            session.stage = stages[name] = {"status": "stopped", "date": date}
            print(f"{name}: begins, has {session.left_s():.0f} of {session.end - start:.0f} s", flush=True)
            try:
                if session.end - start > 10:
                    STAGES[name](session)
                    session.stage["status"] = "failed" if "failures" in session.stage else "ok"
            finally:
                session.stage["seconds"] = round(time.monotonic() - start, 1)
                session.stage["clocks"] = read_clocks()
                session.save()
    for name, stage in stages.items():
        print(f"{name:10} {stage['status']:8} {stage['seconds']:6.0f} s  {len(stage.get('failures', ()))} failures")
    for name, reason in session.data["left_out"].items():
        print(f"left out: {name}: {reason[:200]}")
    print(f"report: {session.path}")
    return 0 if all(stage["status"] == "ok" for stage in stages.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

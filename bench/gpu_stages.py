"""What `gpu_report.py` does, stage by stage. Whatever needs torch is a command: of the package, or of gpu_probes.py."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gpu_tests
from gpu_machine import PROBES, environment, package, parse, watched_clocks
from gpu_measure import events, headline, kept, profile, sweep
from gpu_smoke import BUILT, outdated, smoke
from gpu_work import PEERS, ROOT

if TYPE_CHECKING:
    from gpu_work import Report, Settings, Work

# A wheel comes before what is installed, and of these the machine's own fit its driver and each other.
MACHINES_OWN = re.compile(r"(torch|triton|nvidia_(?!cutlass).*)$")
INSTALLED = "installed.json"  # in the folder of the peers: the wheels that were tried
BUILD_MOST = 240.0  # seconds


def always(settings: Settings, report: Report) -> bool:
    return True


@dataclass(frozen=True)
class Stage:
    """`weight`: its part of the time, against the stages after it. `least`: seconds below which it is not begun.

    `always`: also when it is not asked for, and with all the time there is. `needs`: stages that have to come before,
    also when they are not asked for, where `missing` says that this machine lacks what they make.
    """

    name: str
    run: Callable[[Work], None]
    weight: float
    least: float = 5.0
    needs_gpu: bool = False
    always: bool = False
    needs: tuple[str, ...] = ()
    missing: Callable[[Settings, Report], bool] = always


# --- what is needed -------------------------------------------------------------------------------------------------


def build(work: Work) -> None:
    """Both modules, in place: nothing is installed into a Python that others use. Only what changed is compiled.

    Without a GPU there is nothing to watch: then the modules alone.
    """
    on_gpu = not work.environment["no_gpu"]
    command = ("bench/gpu_build.py",) if on_gpu else ("setup.py", "build_ext", "--inplace")
    ended = work.python(*command, most=min(BUILD_MOST, max(work.left - 30, 30)))
    work.expect(ended, "build")
    work.record["build_seconds"] = ended.seconds
    modules = {name: [path.name for path in ROOT.glob(f"grpo_kernels/{name}.*so")] for name in ("_cpu", "_cuda")}
    work.record["modules"] = modules
    why = re.findall(r"^(?:grpo_kernels: no |gpu_build: ).*", ended.output, re.MULTILINE)
    errors = re.findall(r"^.*\berror\b.*$", ended.output, re.MULTILINE)[:5]
    missing = [name for name, files in modules.items() if not files]
    if missing == ["_cuda"] and not on_gpu:
        work.record["note"] = "no CUDA kernels, and no GPU for them"
    elif missing and not ended.stopped:
        work.fail(f"{' and '.join(missing)} not built: {' '.join([*why, *errors])}"[:2000])
    elif why:
        work.record["note"] = " ".join(why)
    if missing or why:
        work.record["tail"] = ended.output[-8000:]
    package(work)
    refused = work.environment.get("package", {}).get("backends", {}).get("cuda", "")
    if on_gpu and refused and "_cuda" not in missing:
        work.fail(f"_cuda was built and cannot be used: {refused}")
    for name in [name for name, reason in work.left_out.items() if reason.startswith(BUILT)]:
        del work.left_out[name]  # of an earlier build
    if on_gpu and (refused or "_cuda" in missing):
        work.leave_out("cuda/rows", BUILT + (refused or "no module"))


def peers(work: Work) -> None:
    """The wheels that were carried here, into a folder of their own that later commands find."""
    shutil.rmtree(PEERS, ignore_errors=True)
    if work.settings.wheels is None:
        raise work.cannot("no wheels were brought: --wheels FOLDER")
    found = sorted(work.settings.wheels.resolve().glob("*.whl"))
    refused: dict[str, str] = work.record.setdefault("not_installed", {})
    pip = ("-m", "pip", "install", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", PEERS)
    for wheel in found:  # one by one: a wheel for another Python is no reason to do without the rest
        if MACHINES_OWN.match(wheel.name.split("-")[0].lower()):
            refused[wheel.name] = "the machine's own is kept"
        elif not (ended := work.python(*pip, wheel, most=60)).ok:
            refused[wheel.name] = ended.stopped or ended.output.strip()[-300:]
        work.save()
    archives = sorted(work.settings.wheels.resolve().glob("*.tar.xz"))  # of gpu_peers.py, or a wheel packed smaller
    for archive in archives:
        shutil.unpack_archive(archive, PEERS, filter="data")
    work.record["installed"] = [path.name for path in (*found, *archives) if path.name not in refused]
    PEERS.mkdir(parents=True, exist_ok=True)
    # Python reads .pth files in its own folders alone; a module of this name it imports when it starts.
    (PEERS / "sitecustomize.py").write_text(f"import site\n\nsite.addsitedir({str(PEERS)!r})\n")
    (PEERS / INSTALLED).write_text(json.dumps([path.name for path in carried(work.settings)]))
    taken = f"{len(found) - len(refused)} of {len(found)} wheels, {len(archives)} archives"
    work.record["note"] = taken + "".join(f"; not {x}" for x in refused)
    ended = work.python(PROBES, "device", most=120)
    if work.expect(ended, "versions"):
        work.environment["versions"] = parse(ended.output)["versions"]


def carried(settings: Settings) -> list[Path]:
    """The wheels and archives that were brought along."""
    folder = settings.wheels
    return [] if folder is None else sorted([*folder.resolve().glob("*.whl"), *folder.resolve().glob("*.tar.xz")])


def peers_missing(settings: Settings, report: Report) -> bool:
    """Whether this machine lacks peers that were brought along."""
    marker = PEERS / INSTALLED
    names = [path.name for path in carried(settings)]
    return bool(names) and (not marker.exists() or json.loads(marker.read_text()) != names)


# --- right? ---------------------------------------------------------------------------------------------------------


def safe_defaults(work: Work) -> dict[str, str]:
    """Environment variables: Triton chooses "linear" by default; where that is broken, they choose "rows"."""
    return {"GRPO_KERNELS_STRATEGY": "rows"} if "triton/linear" in work.left_out else {}


def check(work: Work) -> None:
    """`grpo-kernels check`, a process per backend: one that hangs leaves the others theirs."""
    names = [name for name, reason in work.environment.get("package", {}).get("backends", {}).items() if not reason]
    if not names:
        raise work.cannot("no backend is known: see environment")
    backends = [name for name in names if f"{name}/rows" not in work.left_out]
    for number, name in enumerate(backends):
        share = work.left / (len(backends) - number)
        quick = ["--quick"] if share < 120 else []
        command = ("-m", "grpo_kernels", "check", "--backend", name, *quick)
        ended = work.python(*command, most=share, variables=safe_defaults(work))
        if work.expect(ended, name):
            work.record[name] = ended.output[-2000:]
            work.say(f"{name}: ok, {ended.seconds:.0f} s")
        work.save()


def core_tests(work: Work) -> None:
    """The tests marked `gpu` that say most: precision, large vocabularies, the same bits twice, CUDA graphs."""
    work.record["passed"] = gpu_tests.run(work, chosen_tests(work, gpu_tests.is_core), safe_defaults(work))


def tests(work: Work) -> None:
    """All others; then, where time is left, those of the core that this report has not seen pass."""
    seen = work.report["stages"].get("core_tests", {}).get("passed", [])
    rest = chosen_tests(work, lambda name: name not in seen)
    gpu_tests.run(work, sorted(rest, key=gpu_tests.is_core), safe_defaults(work))


def chosen_tests(work: Work, wanted: Callable[[str], bool]) -> list[str]:
    """Most valuable first; those of a strategy that is broken are left out."""
    collected = work.python("-m", "pytest", "-m", "gpu", "--collect-only", "-q", "--continue-on-collection-errors")
    ids = re.findall(r"^(?!ERROR)\S+::\S.*$", collected.output, re.MULTILINE)
    if collected.code not in (0, 1) and not ids:
        work.expect(collected, "collection")
        raise work.cannot("no tests were collected")
    ids = [name for name in ids if wanted(name)]
    random.Random(0).shuffle(ids)  # where time ends, what ran is a sample
    ids.sort(key=gpu_tests.rank)
    chosen = [name for name in ids if not gpu_tests.concerns(name, work.unsafe)]
    work.record["left_out"] = len(ids) - len(chosen)
    return chosen


def sanitizer(work: Work) -> None:
    """compute-sanitizer's tools, one by one: a slow one leaves the others their time. Rows are tried in any case."""
    strategies = ["rows", *(name for name in ("linear", "anchored") if f"cuda/{name}" not in work.unsafe)]
    tools = ("memcheck", "racecheck", "initcheck", "synccheck")
    for number, tool in enumerate(tools):
        command = ("tests/sanitize.py", "--tools", tool, "--strategies", *strategies)
        ended = work.python(*command, most=work.left / (len(tools) - number))
        refusal = re.search(r".*(Device not supported|is in neither PATH nor).*", ended.output)
        if refusal:
            raise work.cannot(refusal[0].strip(" ="))
        work.record[tool] = {"ok": ended.ok, "seconds": ended.seconds}
        if work.expect(ended, tool):
            work.say(ended.output.strip())
        work.save()


# --- fast? ----------------------------------------------------------------------------------------------------------


def bench(work: Work) -> None:
    """`grpo-kernels bench`, without a GPU the quick set on the CPU; its own JSON lies beside the report."""
    output = work.settings.output.with_suffix(".bench.json")
    if not work.settings.resume:
        output.unlink(missing_ok=True)
    minutes = max(work.left - 20, 5) / 60  # of grace, for the case that is under way
    on_gpu = not work.environment["no_gpu"]
    command = [
        "-m",
        "grpo_kernels",
        "bench",
        "--minutes",
        f"{minutes:.2f}",
        "--output",
        output,
        "--no-figures",
    ]
    command += ["--set", "all", "--device", "cuda"] if on_gpu else ["--quick", "--device", "cpu"]
    command += ["--resume"] if output.exists() else []
    if excluded := sorted({name for broken in work.unsafe for name in implementations_of(broken)}):
        command += ["--exclude", *excluded]
        work.record["left_out"] = excluded
    with watched_clocks(work):
        ended = work.python(*command, variables=safe_defaults(work))
        if "was measured otherwise" in ended.output:  # by another machine, or with other versions
            output.unlink()
            command.remove("--resume")
            ended = work.python(*command, variables=safe_defaults(work))
    if output.exists():
        work.report["bench"] = json.loads(output.read_text())
        cases, rest = work.report["bench"]["cases"], work.report["bench"]["not_run"]
        work.record["note"] = f"{len(cases)} cases, {len(rest)} not run" + (
            "" if on_gpu else "; of the CPU, for want of a GPU"
        )
        work.record["errors"] = [
            f"{case['case']}: {name}: {found['error']}"
            for case in cases
            for name, found in case["implementations"].items()
            if "error" in found
        ]
        judge_backends(work, cases)
    elif ended.ok:
        work.fail("bench wrote nothing")
    work.expect(ended, "bench")


def trl_step(work: Work) -> None:
    """One micro-batch of TRL's trainer, with and without this package; its own JSON lies beside the report."""
    output = work.settings.output.with_suffix(".trl.json")
    output.unlink(missing_ok=True)
    with watched_clocks(work):
        ended = work.python("bench/trl_step.py", "--device", "cuda", "--settings", "dapo", "--output", output,
                            variables=safe_defaults(work))  # fmt: skip
    if output.exists():
        work.report["trl_step"] = json.loads(output.read_text())
        for name, found in work.report["trl_step"]["steps"]["dapo"].items():
            work.say(f"{name}: {found['of_trl']:.2f} of TRL's time, {found['peak_bytes'] / 2**30:.1f} GiB")
    if "No module named 'trl'" in ended.output:
        raise work.cannot("no TRL: --wheels FOLDER")
    work.expect(ended, "trl_step")


def judge_backends(work: Work, cases: list[dict[str, Any]]) -> None:
    """Which backends ran under which name; a name of one backend under which another one ran is a failure."""
    ran: dict[str, set[str]] = {}
    for case in cases:
        for name, found in case["implementations"].items():
            ran.setdefault(name, set()).update(call.partition(".")[0] for call in found.get("ran", ()))
    work.record["ran"] = {name: sorted(backends) for name, backends in sorted(ran.items()) if backends}
    for name, backends in work.record["ran"].items():
        named = name.split("-")[1] if name.startswith("ours-") else ""
        if named in ("cpu", "cuda", "torch", "triton") and backends != [named]:
            work.fail(f"{name} ran backend {' and '.join(backends)}")
    auto = work.record["ran"].get("ours", [])
    if not work.environment["no_gpu"] and "cuda/rows" not in work.left_out and auto and auto != ["cuda"]:
        work.record["note"] += f"; backend='auto' took {' and '.join(auto)}"


def implementations_of(broken: str) -> list[str]:
    """Patterns for `grpo-kernels bench --exclude`. "ours" is what a user gets: kernels of CUDA where they load."""
    backend, strategy = broken.split("/")
    if strategy != "rows":
        return [f"ours-{backend}-{strategy}"]
    return [f"ours-{backend}*", *(["ours", "ours-unscored"] if backend == "cuda" else [])]


STAGES = (
    Stage("environment", environment, weight=1, always=True),
    Stage("build", build, weight=2, least=20, always=True),
    Stage("peers", peers, weight=1, least=15, missing=peers_missing),
    Stage("smoke", smoke, weight=8, least=100, needs_gpu=True, missing=outdated),
    Stage("headline", headline, weight=2, least=30, needs_gpu=True, needs=("smoke",)),
    Stage("events", events, weight=4, least=30, needs_gpu=True, needs=("smoke",)),
    Stage("core_tests", core_tests, weight=4, least=30, needs_gpu=True, needs=("smoke",)),
    Stage("profile", profile, weight=2, least=20, needs_gpu=True, needs=("smoke",)),
    Stage("sweep", sweep, weight=3, least=30, needs_gpu=True, needs=("smoke",)),
    Stage("kept", kept, weight=2, least=20, needs_gpu=True, needs=("smoke",)),
    Stage("check", check, weight=2, needs=("smoke",)),
    Stage("tests", tests, weight=6, least=30, needs_gpu=True, needs=("smoke",)),
    Stage("bench", bench, weight=8, least=30, needs=("peers", "smoke")),
    Stage("trl_step", trl_step, weight=2, least=30, needs_gpu=True, needs=("peers", "smoke")),
    Stage("sanitizer", sanitizer, weight=4, least=60, needs_gpu=True, needs=("smoke",)),
)


class Run(NamedTuple):
    """A part of the report that fits a lease of ten minutes, on whatever machine that brings."""

    minutes: float
    about: str
    stages: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.about} ({self.minutes:g} min)"


# Each finds out by itself what is broken, and brings what is short before what takes long.
RUNS = {
    1: Run(
        8.0,
        "first contact, the headline, times of each kernel, the core of the tests",
        ("build", "smoke", "headline", "events", "core_tests", "profile"),
    ),
    2: Run(
        9.0,
        "after repairs: the headline again, rows per chunk, sampling masks, memcheck and racecheck, the other tests",
        ("build", "smoke", "headline", "sweep", "kept", "check", "tests", "sanitizer"),
    ),
    3: Run(9.0, "benchmarks against the peers", ("build", "smoke", "peers", "bench", "trl_step")),
}

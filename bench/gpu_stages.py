"""What `gpu_report.py` does, stage by stage. Whatever needs torch is a command: of the package, or of gpu_probes.py."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import gpu_tests
from gpu_machine import PROBES, ROOT, environment, package, parse, watched_clocks

if TYPE_CHECKING:
    from gpu_report import Work

# QuACK and CUTLASS find their files by this name.
PEERS = ROOT / "build" / "gpu-report" / "site-packages"
# A wheel comes before what is installed, and of these the machine's own fit its driver and each other.
MACHINES_OWN = re.compile(r"(torch|triton|nvidia_(?!cutlass).*)$")


@dataclass(frozen=True)
class Stage:
    """`weight`: its part of the time, against the stages after it. `least`: seconds below which it is not begun.

    `always`: also when it is not asked for, and with all the time there is.
    """

    name: str
    run: Callable[[Work], None]
    weight: float
    least: float = 5.0
    needs_gpu: bool = False
    always: bool = False


# --- what is needed -------------------------------------------------------------------------------------------------


def build(work: Work) -> None:
    """Both modules, in place: nothing is installed into a Python that others use."""
    ended = work.python("setup.py", "build_ext", "--inplace")
    work.expect(ended, "build")
    work.record["build_seconds"] = ended.seconds
    modules = {name: [path.name for path in ROOT.glob(f"grpo_kernels/{name}.*so")] for name in ("_cpu", "_cuda")}
    work.record["modules"] = modules
    why = re.findall(r"^grpo_kernels: no .*", ended.output, re.MULTILINE)
    missing = [name for name, files in modules.items() if not files]
    if missing == ["_cuda"] and work.environment["no_gpu"]:
        work.record["note"] = "no CUDA kernels, and no GPU for them"
    elif missing and not ended.stopped:
        work.fail(f"{' and '.join(missing)} not built: {' '.join(why)}")
        work.record["tail"] = ended.output[-8000:]
    package(work)


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
    for archive in sorted(work.settings.wheels.resolve().glob("*.tar.xz")):  # a wheel's files, packed smaller
        shutil.unpack_archive(archive, PEERS, filter="data")
    work.record["installed"] = [wheel.name for wheel in found if wheel.name not in refused]
    work.record["note"] = f"{len(found) - len(refused)} of {len(found)} wheels" + "".join(f"; not {x}" for x in refused)
    ended = work.python(PROBES, "device", most=120)
    if work.expect(ended, "versions"):
        work.environment["versions"] = parse(ended.output)["versions"]


# --- first contact --------------------------------------------------------------------------------------------------

TINY, WIDTHS = "tiny", ("64", "256", "320", "4096")
# From what cannot go wrong to what never ran anywhere: BACKEND/STRATEGY/SIZES, and seconds.
SMOKE = (
    ("product", 120.0),
    ("cuda/load", 60.0),
    *((f"cuda/rows/{sizes}", 60.0) for sizes in (TINY, "wide")),
    *((f"triton/rows/{sizes}", 120.0) for sizes in (TINY, "wide")),
    *((f"triton/{strategy}/{sizes}", 120.0) for strategy in ("linear", "anchored") for sizes in (TINY, "tiles")),
    *((f"cuda/{strategy}/{sizes}", 45.0) for strategy in ("linear", "anchored") for sizes in (TINY, *WIDTHS, "tiles")),
)


def smoke(work: Work) -> None:
    """Every kernel's first contact with this GPU; what fails here is left out from here on, as "backend/strategy"."""
    probes = work.record.setdefault("probes", {})
    out: list[str] = work.record.setdefault("left_out", [])
    for name, seconds in SMOKE:
        if any(strategy_of(other) == strategy_of(name) for other, found in probes.items() if found["stopped"]):
            continue  # it hangs: once is enough
        if work.left < 5:
            work.stop(f"out of time before {name}")
            known = {"product", *out, *map(strategy_of, probes)}
            out += sorted({strategy_of(other) for other, _ in SMOKE} - known)  # of which nothing is known
            break
        ended = work.python(PROBES, name, most=seconds)
        said = ended.output[-1500:]
        probes[name] = {"ok": ended.ok, "seconds": ended.seconds, "stopped": ended.stopped, "said": said}
        if ended.ok:
            work.say(f"{name}: ok, {ended.seconds:.0f} s")
        else:
            work.fail(f"{name}: {ended.stopped or said.strip()[-200:]}")
            out += [strategy_of(name)] if strategy_of(name) not in (*out, "product") else []
            if not work.python(PROBES, "product", most=60).ok:  # a new process finds nothing to talk to
                work.report["device_lost"] = f"the device stopped answering after {name}"
                break
        work.save()
    if out:
        work.record["note"] = f"left out from here on: {', '.join(out)}"


def strategy_of(probe: str) -> str:
    """From "cuda/linear/64" "cuda/linear"."""
    return "/".join(probe.split("/")[:2])


def left_out(work: Work) -> list[str]:
    """Strategies, as "backend/strategy", that the smoke stage found broken."""
    found: list[str] = work.report["stages"].get("smoke", {}).get("left_out", [])
    return ["cuda/rows" if name == "cuda/load" else name for name in found]


def safe_defaults(work: Work) -> dict[str, str]:
    """Variables: Triton takes "linear" by itself, and where that is broken it has to be told."""
    return {"GRPO_KERNELS_STRATEGY": "rows"} if "triton/linear" in left_out(work) else {}


# --- right? ---------------------------------------------------------------------------------------------------------


def check(work: Work) -> None:
    """`grpo-kernels check`, a process per backend: one that hangs leaves the others theirs."""
    names = [name for name, reason in work.environment.get("package", {}).get("backends", {}).items() if not reason]
    if not names:
        raise work.cannot("no backend is known: see environment")
    backends = [name for name in names if f"{name}/rows" not in left_out(work)]
    for number, name in enumerate(backends):
        share = work.left / (len(backends) - number)
        quick = ["--quick"] if share < 120 else []
        command = ("-m", "grpo_kernels.cli", "check", "--backend", name, *quick)
        ended = work.python(*command, most=share, variables=safe_defaults(work))
        if work.expect(ended, name):
            work.record[name] = ended.output[-2000:]
            work.say(f"{name}: ok, {ended.seconds:.0f} s")
        work.save()


def tests(work: Work) -> None:
    """The tests marked `gpu`, most valuable first; those of a strategy that failed the smoke stage are left out."""
    collected = work.python("-m", "pytest", "-m", "gpu", "--collect-only", "-q", "--continue-on-collection-errors")
    ids = re.findall(r"^(?!ERROR)\S+::\S.*$", collected.output, re.MULTILINE)
    if collected.code not in (0, 1) and not ids:
        work.expect(collected, "collection")
        return
    random.Random(0).shuffle(ids)  # where time ends, what ran is a sample
    ids.sort(key=gpu_tests.rank)
    chosen = [name for name in ids if not gpu_tests.concerns(name, left_out(work))]
    work.record["left_out"] = len(ids) - len(chosen)
    gpu_tests.run(work, chosen, safe_defaults(work))


def sanitizer(work: Work) -> None:
    """compute-sanitizer's tools, one by one: a slow one leaves the others their time. Rows are tried in any case."""
    strategies = ["rows", *(name for name in ("linear", "anchored") if f"cuda/{name}" not in left_out(work))]
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


def ceilings(work: Work) -> None:
    """What the hardware gives the bare products and a copy: a line of JSON each, as they come."""
    with watched_clocks(work):
        ended = work.python(PROBES, "ceilings")
    found = [json.loads(line) for line in re.findall(r"^\{.*\}$", ended.output, re.MULTILINE)]
    work.record["measured"] = found
    work.record["note"] = f"{len(found)} measured"
    work.expect(ended, "ceilings")


def bench(work: Work) -> None:
    """`grpo-kernels bench`, without a GPU the quick set on the CPU; its own JSON lies beside the report."""
    output = work.settings.output.with_suffix(".bench.json")
    output.unlink(missing_ok=True)
    minutes = max(work.left - 20, 5) / 60  # of grace, for the case that is under way
    on_gpu = not work.environment["no_gpu"]
    command = ["-m", "grpo_kernels.cli", "bench", "--minutes", f"{minutes:.2f}", "--output", output, "--no-figures"]
    command += ["--set", "all", "--device", "cuda"] if on_gpu else ["--quick", "--device", "cpu"]
    if excluded := sorted({name for broken in left_out(work) for name in implementations_of(broken)}):
        command += ["--exclude", *excluded]
        work.record["left_out"] = excluded
    with watched_clocks(work):
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
    elif ended.ok:
        work.fail("bench wrote nothing")
    work.expect(ended, "bench")


def implementations_of(broken: str) -> list[str]:
    """Patterns for `grpo-kernels bench --exclude`. "ours" is what a user gets: kernels of CUDA where they load."""
    backend, strategy = broken.split("/")
    if strategy != "rows":
        return [f"ours-{backend}-{strategy}"]
    return [f"ours-{backend}*", *(["ours", "ours-unscored"] if backend == "cuda" else [])]


STAGES = (
    Stage("environment", environment, weight=1, always=True),
    Stage("build", build, weight=2, least=40),
    Stage("peers", peers, weight=1, least=15),
    Stage("smoke", smoke, weight=4, least=150, needs_gpu=True),
    Stage("check", check, weight=3),
    Stage("tests", tests, weight=6, least=30, needs_gpu=True),
    Stage("ceilings", ceilings, weight=1, least=20, needs_gpu=True),
    Stage("bench", bench, weight=8, least=30),
    Stage("sanitizer", sanitizer, weight=4, least=60, needs_gpu=True),
)

"""A folder that stands for a checkout on a GPU machine, and a Python of stand-ins for what bench/gpu_report.py calls.

Probes say that all is well, but for those that are told to hang or to fail. Those of gpu_rehearsal.py run for real.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import gpu_report
import gpu_smoke
import gpu_stages
import gpu_work
import pytest

from grpo_kernels.backends.strategy import STRATEGIES

ROOT = Path(__file__).parents[1]

# Answers as the commands of the stages do. "hangs" and "fails" name probes or "PROBE ITEM"; calls go to a file. The
# benchmarks last until there is the file that "awaits" names.
PYTHON = """
import json, os, sys, time
here, arguments = os.path.dirname(__file__), sys.argv[1:]
with open(os.path.join(here, "calls"), "a") as calls:
    print(*arguments, file=calls)
broken = json.load(open(os.path.join(here, "broken.json")))
name = arguments[-1]
modules = [os.path.join(here, "grpo_kernels", name + ".so") for name in ("_cpu", "_cuda")]
def say(**facts):
    print(json.dumps(facts), flush=True)
if arguments[0] == "bench/gpu_probes.py" and name == "device":
    print(json.dumps({"device": "Stub", "versions": {}, "no_gpu": broken["no_gpu"]}))
elif arguments[0] == "bench/gpu_probes.py":
    failed = 0
    for item in arguments[2:]:
        say(begin=item)
        at = "at " + item
        watched = "watched/" * ("watched" in os.environ["PYTHONPATH"].split(os.pathsep)[0])
        if {arguments[1], arguments[1] + " " + item, watched + arguments[1]} & set(broken["hangs"]):
            say(at=arguments[1].split("/", 1)[-1].split(",")[0])
            print("watchdog: block 3", flush=True)
            time.sleep(0.5)
            with open(os.environ["HANGS"], "a") as hangs:
                print(arguments[1], file=hangs)
            time.sleep(600)
        ok = not {arguments[1], arguments[1] + " " + item} & set(broken["fails"])
        if ok and arguments[1].startswith(("headline", "sweep", "kept")):
            for each in arguments[1].split("/", 1)[1].split(","):
                say(head=item, name=each, milliseconds=2.0, ratio_to_floor=1.1, ran={})
        if ok and arguments[1].startswith("events"):
            say(what="copy", milliseconds=2.0)
        failed |= not ok
        say(end=item, ok=ok, seconds=0.1, **({} if ok else {"error": "AssertionError: wrong"}))
    sys.exit(int(failed))
elif arguments[0] in ("setup.py", "bench/gpu_build.py"):
    print("building", *arguments)
    watched = [os.path.join(here, "watched", "grpo_kernels", "_cuda.so")] * (arguments[0] == "bench/gpu_build.py")
    for path in modules[:1] if broken["cuda"] else modules + watched:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "w").close()
    if broken["cuda"]:
        print("lm_head_sm90.cu(7): error: " + broken["cuda"])
        print("grpo_kernels: no CUDA kernels (ninja); GPUs will use Triton.")
        os.path.exists(modules[1]) and os.remove(modules[1])
elif "env" in arguments:
    cuda = broken["no_gpu"] or ("" if os.path.exists(modules[1]) else "this installation has no CUDA kernels")
    print("a warning"), print(json.dumps({"backends": {"cpu": "", "torch": "", "cuda": cuda}}, indent=1))
elif "pip" in arguments:
    os.execv(sys.executable, [sys.executable, *arguments])
elif "--collect-only" in arguments:
    print(*broken["tests"], sep="\\n")
elif "pytest" in arguments:
    print(*(f"{test} PASSED" for test in arguments if "::" in test), sep="\\n")
elif "bench" in arguments and "--resume" in arguments and broken["elsewhere"]:
    sys.exit("bench.json was measured otherwise (device): move it, or do not resume")
elif "bench" in arguments:
    while not os.path.exists(os.path.join(here, broken["awaits"])):
        time.sleep(0.01)
    with open(arguments[arguments.index("--output") + 1], "w") as output:
        json.dump(broken["bench"], output)
elif "bench/trl_step.py" in arguments:
    if not broken["trl"]:
        sys.exit("ModuleNotFoundError: No module named 'trl'")
    with open(arguments[arguments.index("--output") + 1], "w") as output:
        json.dump({"steps": {"dapo": {"FusedGRPOTrainer": {"of_trl": 0.8, "peak_bytes": 2**33}}}}, output)
elif "tests/sanitize.py" in arguments:
    print("FOUND SOMETHING\\n========= Error: Device not supported. Please refer to the documentation")
    sys.exit(1)
"""
NVIDIA_SMI = """#!/bin/sh
case "$*" in
*-lms*) while :; do echo "1980, 3201, 40, 612.5"; : >"${0%/*}/../sampled"; sleep 0.1; done ;;
*) echo "Stub, 580.1" ;;
esac
"""
TESTS = [f"tests/test_gpu.py::test_half_precision[{backend}-{strategy}]" for backend in ("cuda", "triton")
         for strategy in STRATEGIES] + ["tests/test_gpu.py::test_others[cuda-rows]"]  # fmt: skip
BENCH = {
    "cases": [{"case": {}, "implementations": {"ours": {"ran": {"cuda.single_pass": 4}}, "trl": {"error": "lost"}}}],
    "not_run": ["another"],
}


HANGS = "HANGS"  # names the file into which a process that hangs writes a line, half a second after its last output


class Clock:
    """The report's clock. It jumps by `step` seconds whenever a process hangs, so that no test waits for a silence.

    Limits of silence can therefore be long, and a slow machine is not taken for one that hangs.
    """

    def __init__(self, hangs: Path, step: float) -> None:
        self.hangs, self.step, self.sleep = hangs, step, time.sleep
        hangs.touch()

    def monotonic(self) -> float:
        return time.monotonic() + self.step * len(self.hangs.read_text().splitlines())


def install_clock(folder: Path, monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    clock = Clock(folder / "hangs", step)
    monkeypatch.setenv(HANGS, str(clock.hangs))
    for module in (gpu_work, gpu_report):
        monkeypatch.setattr(module, "time", clock)


class Machine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "python.py").write_text(PYTHON)
        (folder / "grpo_kernels").mkdir()
        self.settings = gpu_report.Settings(
            minutes=10.0, output=folder / "report.json", python=(sys.executable, "-IS", str(folder / "python.py"))
        )
        self.breaks()

    def breaks(self, *, no_gpu: str = "", hangs: tuple = (), fails: tuple = (), cuda: str = "", **changes: Any) -> None:
        broken = {"no_gpu": no_gpu, "hangs": hangs, "fails": fails, "cuda": cuda, "tests": TESTS, "bench": BENCH}
        broken |= {"awaits": "", "elsewhere": False, "trl": True}
        (self.folder / "broken.json").write_text(json.dumps(broken | changes))

    def forget(self) -> None:
        """A machine that is fresh: what was built and installed is not there, the report is."""
        for module in self.folder.glob("**/*.so"):
            module.unlink()

    def report(self, **changes: Any) -> dict:
        """What is on disk afterwards."""
        settings = gpu_report.Settings(**vars(self.settings) | changes)
        found = gpu_report.conduct(gpu_stages.STAGES, settings)
        assert json.loads(settings.output.read_text()) == json.loads(json.dumps(found))
        return found

    def hangs(self) -> list[str]:
        return (self.folder / "hangs").read_text().splitlines()

    def calls(self, *words: str) -> list[str]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if all(word in line.split() for word in words)]


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    nvidia_smi = folder / "bin" / "nvidia-smi"
    nvidia_smi.parent.mkdir()
    nvidia_smi.write_text(NVIDIA_SMI)
    nvidia_smi.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(nvidia_smi.parent), os.environ["PATH"]]))
    for module in (gpu_work, gpu_stages):
        monkeypatch.setattr(module, "ROOT", folder)
        monkeypatch.setattr(module, "PEERS", folder / "peers")
    monkeypatch.setattr(gpu_smoke, "WATCHED", folder / "watched")
    return Machine(folder)


def statuses(report: dict) -> dict[str, str]:
    return {name: record["status"] for name, record in report["stages"].items()}

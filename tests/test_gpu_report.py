"""bench/gpu_report.py without a GPU: its limits with stub stages, its stages with stubs of Python and nvidia-smi."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from grpo_kernels.bench.implementations import select
from grpo_kernels.strategy import STRATEGIES

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "bench"))

import gpu_machine  # noqa: E402
import gpu_probes  # noqa: E402
import gpu_report  # noqa: E402
import gpu_stages  # noqa: E402
import gpu_tests  # noqa: E402
from gpu_stages import Stage  # noqa: E402

# Answers as the commands of the stages do; HANGS and FAILS name probes, and every call is a line of the file `calls`.
PYTHON = """
import json, os, sys, time
here, arguments = os.path.dirname(__file__), sys.argv[1:]
with open(os.path.join(here, "calls"), "a") as calls:
    print(*arguments, file=calls)
broken = json.load(open(os.path.join(here, "broken.json")))
name = arguments[-1]
if arguments[0] == "bench/gpu_probes.py":
    if name == "device":
        print(json.dumps({"device": "Stub", "versions": {}, "no_gpu": broken["no_gpu"]}))
    elif name == "ceilings":
        print('{"what": "copy", "milliseconds": 2.0}')
    elif name in broken["hangs"]:
        print("(1, 8, 2):", flush=True)
        time.sleep(60)
    elif name in broken["fails"]:
        sys.exit("wrong")
elif "env" in arguments:
    print("a warning"), print(json.dumps({"backends": {"cpu": "", "torch": "", "cuda": broken["no_gpu"]}}, indent=1))
elif "pip" in arguments:
    os.execv(sys.executable, [sys.executable, *arguments])
elif "--collect-only" in arguments:
    print(*broken["tests"], sep="\\n")
elif "pytest" in arguments:
    print(*(f"{test} PASSED" for test in arguments if "::" in test), sep="\\n")
elif "bench" in arguments:
    with open(arguments[arguments.index("--output") + 1], "w") as output:
        json.dump(broken["bench"], output)
elif "tests/sanitize.py" in arguments:
    print("FOUND SOMETHING\\n========= Error: Device not supported. Please refer to the documentation")
    sys.exit(1)
"""
NVIDIA_SMI = """#!/bin/sh
case "$*" in *-lms*) while :; do echo "1980, 3201, 40, 612.5"; sleep 0.1; done;; *) echo "Stub, 580.1";; esac
"""
TESTS = [f"tests/test_gpu.py::test_half_precision[{backend}-{strategy}]" for backend in ("cuda", "triton")
         for strategy in STRATEGIES]  # fmt: skip

BENCH = {"cases": [{"case": {}, "implementations": {"ours": {}, "trl": {"error": "lost"}}}], "not_run": ["another"]}


class Machine:
    """A folder that stands for the checkout, with a Python of stubs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "python.py").write_text(PYTHON)
        (folder / "grpo_kernels").mkdir()
        for module in ("_cpu", "_cuda"):
            (folder / "grpo_kernels" / f"{module}.so").touch()
        self.settings = gpu_report.Settings(
            minutes=10.0, output=folder / "report.json", python=(sys.executable, "-IS", str(folder / "python.py"))
        )
        self.breaks()

    def breaks(self, *, no_gpu: str = "", hangs: tuple = (), fails: tuple = ()) -> None:
        broken = {"no_gpu": no_gpu, "hangs": hangs, "fails": fails, "tests": TESTS, "bench": BENCH}
        (self.folder / "broken.json").write_text(json.dumps(broken))

    def report(self, **changes) -> dict:
        """What is on disk afterwards."""
        settings = gpu_report.Settings(**vars(self.settings) | changes)
        found = gpu_report.conduct(gpu_stages.STAGES, settings)
        assert json.loads(settings.output.read_text()) == json.loads(json.dumps(found))
        return found

    def calls(self, *words: str) -> list[str]:
        lines = (self.folder / "calls").read_text().splitlines()
        return [line for line in lines if all(word in line.split() for word in words)]


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    nvidia_smi = tmp_path / "bin" / "nvidia-smi"
    nvidia_smi.parent.mkdir()
    nvidia_smi.write_text(NVIDIA_SMI)
    nvidia_smi.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(nvidia_smi.parent), os.environ["PATH"]]))
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_stages, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_stages, "SMOKE", tuple((name, 3.0) for name, _ in gpu_stages.SMOKE))
    for module in (gpu_report, gpu_stages):
        monkeypatch.setattr(module, "PEERS", tmp_path / "peers")
    return Machine(tmp_path)


@pytest.fixture(autouse=True)
def own_strategy(monkeypatch):
    """Probes choose theirs by the variable, in processes that end; here it is given back."""
    monkeypatch.setenv("GRPO_KERNELS_STRATEGY", "rows")


def statuses(report: dict) -> dict[str, str]:
    return {name: record["status"] for name, record in report["stages"].items()}


# --- limits ---------------------------------------------------------------------------------------------------------


def conduct(stages: list[Stage], folder: Path, **settings) -> dict:
    return gpu_report.conduct(stages, gpu_report.Settings(output=folder / "report.json", **settings))


def alive(pid: int) -> bool:
    """Whether it goes on living: who is killed needs a moment to die."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.05)
    return True


# A process that starts another, says which, and waits.
PARENT = "import subprocess as s; p = s.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"


@pytest.mark.parametrize("limits", [{}, {"most": 2.0}, {"silence": 2.0}])
def test_what_overruns_is_stopped_with_all_its_processes(limits, tmp_path):
    def overruns(work):
        work.record["ended"] = work.python("-c", PARENT, **limits)._asdict()

    stages = [Stage("overruns", overruns, weight=1, least=0), Stage("later", lambda work: None, weight=1, least=0)]
    minutes = 0.05 if not limits else 1.0
    start = time.monotonic()
    report = conduct(stages, tmp_path, minutes=minutes)
    ended = report["stages"]["overruns"]["ended"]
    assert time.monotonic() - start < 30 and "stopped after" in ended["stopped"] and ended["code"] is None
    assert not alive(int(ended["output"]))
    assert statuses(report)["later"] == "ok"


def idle(work):
    pass


def test_time_that_is_left_goes_to_later_stages(tmp_path):
    quick, slow, last = (Stage(name, idle, weight, least=0) for name, weight in (("q", 1), ("s", 2), ("l", 1)))
    assert gpu_report.allotted(quick, [quick, slow, last], 120) == 30
    assert gpu_report.allotted(slow, [slow, last], 120) == 80, "what the one before has left is shared"
    assert gpu_report.allotted(last, [last], 120) == 120
    modest, needy = Stage("m", idle, weight=3, least=10), Stage("n", idle, weight=1, least=90)
    assert gpu_report.allotted(modest, [modest, needy], 120) == 25, "beyond what each of them needs at least"
    assert gpu_report.allotted(needy, [needy], 20) == 20
    found = conduct([quick, Stage("hungry", idle, weight=9, least=200), last], tmp_path, minutes=2.0)["stages"]
    assert found["hungry"]["status"] == "cannot" and "s were left, it needs 200" in found["hungry"]["reason"]
    assert found["l"]["limit"] == pytest.approx(120, abs=10)


def test_a_stage_that_cannot_run_takes_no_time_from_others(tmp_path):
    stages = [Stage("needs a GPU", idle, weight=9, needs_gpu=True), Stage("rest", idle, weight=1)]
    (tmp_path / "report.json").write_text(json.dumps({"environment": {"no_gpu": "none here"}, "stages": {}}))
    found = conduct(stages, tmp_path, minutes=2.0, resume=True)["stages"]
    assert (found["needs a GPU"]["status"], found["needs a GPU"]["reason"]) == ("cannot", "none here")
    assert found["rest"]["limit"] == pytest.approx(120, abs=10)


def test_a_failure_is_kept_and_the_rest_goes_on(tmp_path):
    def fails(work):
        work.expect(work.python("-c", "raise SystemExit('no luck')"), "a command")

    def breaks(work):
        raise KeyError("of the report itself")

    stages = [Stage("fails", fails, 1), Stage("breaks", breaks, 1), Stage("fine", lambda work: None, 1)]
    report = conduct(stages, tmp_path)
    assert statuses(report) == {"fails": "failed", "breaks": "failed", "fine": "ok"} and not gpu_report.passed(report)
    assert report["stages"]["fails"]["failures"] == ["a command: exit status 1: no luck"]
    text = gpu_report.summary(report, tmp_path / "report.json")
    assert "fails: a command: exit status 1: no luck" in text and "breaks: KeyError" in text
    assert gpu_report.passed(conduct(stages, tmp_path, skip=("fails", "breaks")))


def test_a_report_that_is_killed_leaves_valid_json_and_no_process(tmp_path):
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'bench')!r}); import gpu_report, gpu_stages\n"
        "def forever(work):\n    work.record['half'] = 1; work.save()\n"
        f"    work.python('-c', {PARENT!r})\n"
        "gpu_report.STAGES = [gpu_stages.Stage('done', lambda work: None, 1),"
        " gpu_stages.Stage('forever', forever, 1)]\n"
        f"gpu_report.main(['--output', {str(tmp_path / 'report.json')!r}])"
    )
    log = tmp_path / "report.log"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    while not log.exists() or not log.read_text().strip().splitlines()[-1].isdigit():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143
    report = json.loads((tmp_path / "report.json").read_text())
    assert statuses(report) == {"done": "ok", "forever": "stopped"} and report["stages"]["forever"]["half"] == 1
    assert not alive(int(log.read_text().strip().splitlines()[-1]))


# --- the stages -----------------------------------------------------------------------------------------------------


def test_a_machine_with_a_gpu(machine):
    report = machine.report(skip=("sanitizer",))
    assert set(statuses(report).values()) == {"ok", "cannot"} and gpu_report.passed(report)
    assert [name for name, status in statuses(report).items() if status == "cannot"] == ["peers"]
    environment = report["environment"]
    assert (environment["device"], environment["driver"]) == ("Stub", "580.1") and environment["no_gpu"] == ""
    assert report["stages"]["bench"]["clocks"]["clocks.sm"] == [1980.0] * 3
    assert report["stages"]["tests"]["counts"] == {"PASSED": len(TESTS)}
    assert report["stages"]["ceilings"]["measured"] == [{"what": "copy", "milliseconds": 2.0}]
    assert report["bench"] == BENCH and report["stages"]["bench"]["note"] == "1 cases, 1 not run"
    assert report["stages"]["bench"]["errors"] == ["{}: trl: lost"]
    assert machine.calls("bench", "cuda") and not machine.calls("bench", "--exclude")


def test_a_machine_without_a_gpu_says_so_and_does_the_rest(machine):
    machine.breaks(no_gpu="no CUDA device")
    (machine.folder / "grpo_kernels" / "_cuda.so").unlink()
    report = machine.report()
    done = {"environment": "ok", "build": "ok", "check": "ok", "bench": "ok"}
    cannot = dict.fromkeys(("peers", "smoke", "tests", "ceilings", "sanitizer"), "cannot")
    assert statuses(report) == done | cannot and gpu_report.passed(report)
    assert report["stages"]["smoke"]["reason"] == "no CUDA device"
    assert "no CUDA device" in gpu_report.summary(report, machine.settings.output)
    assert machine.calls("bench", "--quick", "cpu") and not machine.calls("product")


def test_what_hangs_or_fails_at_first_contact_is_left_out_later(machine):
    machine.breaks(hangs=("cuda/linear/64",), fails=("triton/anchored/tiny",))
    report = machine.report()
    probes = report["stages"]["smoke"]["probes"]
    assert report["stages"]["smoke"]["left_out"] == ["triton/anchored", "cuda/linear"]
    assert (
        probes["cuda/linear/64"]["said"] == "(1, 8, 2):\n"
        and "stopped after 3 s" in probes["cuda/linear/64"]["stopped"]
    )
    assert not machine.calls("cuda/linear/256"), "once is enough"
    assert probes["triton/anchored/tiles"]["ok"] and probes["cuda/anchored/4096"]["ok"]
    (bench,) = machine.calls("bench", "--exclude")
    assert bench.endswith("--exclude ours-cuda-linear ours-triton-anchored")
    ran = {test for line in machine.calls("-v") for test in line.split() if "::" in test}
    assert set(TESTS) - ran == {TESTS[1], TESTS[5]} and report["stages"]["tests"]["left_out"] == 2
    assert statuses(report)["smoke"] == "failed" and not gpu_report.passed(report)
    assert report["stages"]["sanitizer"]["reason"].startswith("Error: Device not supported")
    assert machine.calls("tests/sanitize.py")[0].endswith("--strategies rows anchored")


def test_what_there_is_no_time_to_try_is_left_out(machine):
    machine.breaks(hangs=("cuda/rows/tiny",))
    stages = [gpu_stages.STAGES[0], Stage("smoke", gpu_stages.smoke, 1, needs_gpu=True)]
    settings = gpu_report.Settings(**vars(machine.settings) | {"minutes": 0.12})
    found = gpu_report.conduct(stages, settings)["stages"]["smoke"]
    assert found["stopped"].startswith("out of time before")
    assert {"cuda/rows", "cuda/linear", "triton/rows", "triton/anchored"} <= set(found["left_out"])
    assert "cuda/anchored" in found["note"] and "product" not in found["note"]


def test_a_device_that_stops_answering_is_left_alone(machine):
    machine.breaks(fails=("product",))
    report = machine.report()
    gone = "the device stopped answering after product"
    assert statuses(report)["smoke"] == "failed" and not machine.calls("cuda/load")
    assert {report["stages"][name]["reason"] for name in ("tests", "ceilings", "sanitizer")} == {gone}


def test_without_its_row_kernels_a_backend_has_nothing(machine):
    machine.breaks(fails=("cuda/load",))
    machine.report(only=("smoke", "tests", "bench", "check"))
    assert machine.calls("bench", "--exclude", "ours", "ours-cuda*")
    assert not [line for line in machine.calls("-v") if "[cuda-" in line]
    assert not machine.calls("check", "cuda") and machine.calls("check", "torch")


def test_what_is_left_out_of_the_bench_is_known_there():
    broken = {"/".join(name.split("/")[:2]) for name, _ in gpu_stages.SMOKE[2:]}
    for name in broken:
        assert select(gpu_stages.implementations_of(name)), "which raises where a pattern has no meaning"


def test_a_build_without_a_module_is_a_failure(machine):
    (machine.folder / "grpo_kernels" / "_cuda.so").unlink()
    report = machine.report(only=("build",))
    assert statuses(report) == {"environment": "ok", "build": "failed"}
    assert report["stages"]["build"]["failures"][0].startswith("_cuda not built")


def test_a_second_call_goes_on(machine):
    machine.breaks(fails=("cuda/anchored/tiny",))
    machine.report(only=("smoke",))
    count = len(machine.calls("product"))
    report = machine.report(resume=True, skip=("sanitizer",))
    assert len(machine.calls("product")) == count and report["stages"]["tests"]["left_out"] == 1
    assert statuses(report)["smoke"] == "failed" and statuses(report)["bench"] == "ok"
    machine.report(resume=True, only=("bench",))
    assert len(machine.calls("bench")) == 2
    assert set(statuses(machine.report(only=("check",)))) == {"environment", "check"}


def test_peers_are_installed_beside_the_machines_own(machine):
    folder = machine.folder / "wheels"
    folder.mkdir()
    for name in ("peer", "torch"):
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            about = f"{name}-1.0.dist-info"
            wheel.writestr(f"{name}.py", "")
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    (folder / "other-1.0-cp27-cp27m-win32.whl").touch()
    packed = machine.folder / "packed"
    (packed / "inner").mkdir(parents=True)
    (packed / "inner" / "kernel.py").touch()
    (packed / "dsl.pth").write_text("inner\nimport kernel\n")
    shutil.make_archive(str(folder / "dsl"), "xztar", packed)
    found = machine.report(only=("peers",), wheels=folder)["stages"]["peers"]
    assert found["status"] == "ok" and found["installed"] == ["peer-1.0-py3-none-any.whl"]
    assert list(found["not_installed"]) == ["other-1.0-cp27-cp27m-win32.whl", "torch-1.0-py3-none-any.whl"]
    assert "1 of 3 wheels; not other-1.0-cp27" in found["note"]
    assert (machine.folder / "peers" / "peer.py").exists() and not (machine.folder / "peers" / "torch.py").exists()
    path = gpu_report.child_environment()["PYTHONPATH"].split(os.pathsep)
    assert path[-2:] == [str(machine.folder / "peers"), str(machine.folder / "peers" / "inner")]
    assert (machine.folder / "peers" / "inner" / "kernel.py").exists()


# --- tests that break their process ---------------------------------------------------------------------------------

DANGEROUS = """
import os, time
import pytest
pytestmark = pytest.mark.gpu
poisoned = []

def test_passes(): assert not poisoned
def test_fails(): assert not "this"
def test_hangs(): time.sleep(60)
def test_crashes(): os.abort()
def test_poisons():
    poisoned.append(1)
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_last(): assert not poisoned
"""


def test_a_test_that_breaks_its_process_costs_itself_alone(machine, monkeypatch):
    (machine.folder / "test_dangerous.py").write_text(DANGEROUS)
    monkeypatch.setattr(gpu_tests, "SILENCE", 5.0)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # of which none is needed here
    names = ("passes", "fails", "hangs", "crashes", "poisons", "last")
    stage = Stage("tests", lambda work: gpu_tests.run(work, [f"test_dangerous.py::test_{x}" for x in names], {}), 1)
    found = conduct([stage], machine.folder)["stages"]["tests"]
    assert found["counts"] == {"PASSED": 2, "FAILED": 2, "HUNG": 1, "CRASHED": 1} and found["status"] == "failed"
    messages = {failure["test"].split("::test_")[1]: failure["message"] for failure in found["failed"]}
    assert set(messages) == {"fails", "hangs", "crashes", "poisons"} and "silence" in messages["hangs"]
    assert "illegal memory access" in messages["poisons"]


def test_tests_that_are_all_skipped_are_a_failure(machine):
    text = "import pytest\n@pytest.mark.gpu\n@pytest.mark.skip\ndef test_skipped(): pass\n"
    (machine.folder / "test_skipped.py").write_text(text)
    stage = Stage("tests", lambda work: gpu_tests.run(work, ["test_skipped.py::test_skipped"], {}), 1)
    assert conduct([stage], machine.folder)["stages"]["tests"]["failures"] == ["none of 1 tests passed"]


def test_outcomes_are_read_as_pytest_writes_them():
    output = "a.py::b[x 1] PASSED [ 10%]\n[gw3] [ 20%] FAILED a.py::c[x 2] \n[gw0] SKIPPED a.py::d\na.py::e \n"
    assert gpu_tests.outcomes_of(output) == {"a.py::b[x 1]": "PASSED", "a.py::c[x 2]": "FAILED", "a.py::d": "SKIPPED"}
    assert gpu_tests.messages_of("FAILED a.py::c[x 2] - 1 - 1\n") == {"a.py::c[x 2]": "1 - 1"}


def test_the_most_valuable_come_first():
    names = ["test_variant_is_as_exact_as_eager_float32[a]", "test_auto", "test_more_logits", "test_half_precision[b]"]
    order = sorted((f"tests/test_gpu.py::{name}" for name in names), key=gpu_tests.rank)
    assert [name.split("::")[1] for name in order] == names[::-1]


# --- probes ---------------------------------------------------------------------------------------------------------


def test_every_probe_is_known():
    for name, _ in gpu_stages.SMOKE[2:]:
        backend, strategy, sizes = name.split("/")
        assert backend in ("cuda", "triton") and strategy in STRATEGIES and sizes in gpu_probes.SIZES
    first = [name.split("/")[1] for name, _ in gpu_stages.SMOKE if name.startswith("cuda")]
    assert first == sorted(first, key=("load", *STRATEGIES).index), "from the least to the most risky"


def test_a_probe_passes_what_is_right_and_nothing_else(monkeypatch, capsys):
    monkeypatch.setattr(gpu_probes, "LOGP_TOLERANCE", 2e-2)  # a CPU's product rounds the logits to bfloat16
    gpu_probes.smoke("torch", "rows", "tiny", "cpu")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 * len(gpu_probes.SIZES["tiny"]) and "(129, 72, 257) torch.bfloat16: logps" in said[3]
    assert gpu_probes.compare("torch", "anchored", (1, 8, 2), torch.bfloat16, "cpu") == "not served"
    right = gpu_probes.step

    def off(*arguments, index):
        found = list(right(*arguments))
        found[index] = found[index] * 1.1
        return tuple(found)

    for index in range(4):
        monkeypatch.setattr(gpu_probes, "step", lambda *given, index=index: off(*given, index=index))
        with pytest.raises(AssertionError, match="dweight"):
            gpu_probes.compare("torch", "rows", (129, 72, 257), torch.float32, "cpu")
    monkeypatch.setattr(gpu_probes, "step", lambda *given: tuple(x + torch.rand(()) * 1e-6 for x in right(*given)))
    with pytest.raises(AssertionError, match="different bits"):
        gpu_probes.compare("torch", "rows", (129, 72, 257), torch.float32, "cpu")


def test_the_products_of_the_ceilings_have_the_shapes_they_name():
    """On torch's device without memory, which knows what a product takes and returns."""
    shapes = {name: (call().shape, call().dtype) for name, call in gpu_probes.products(32, 16, 64, "meta")}
    assert shapes["h W^T, float32"] == ((32, 64), torch.float32) and shapes["h W^T"] == ((32, 64), torch.bfloat16)
    assert shapes["dlogits W"] == ((32, 16), torch.bfloat16)
    assert shapes["dlogits^T h, added in float32"] == shapes["dlogits^T h, float32"] == ((64, 16), torch.float32)


def test_clocks_are_summarized():
    samples = "300, 3201, 30, 80.5\n1980, 3201, 50, 650\n1900, 3201, 40, [N/A]\n1800, 3201, 45, 600\n"
    assert gpu_machine.summarize(samples)["clocks.sm"] == [300.0, 1800.0, 1980.0]

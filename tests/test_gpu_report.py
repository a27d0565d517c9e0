"""bench/gpu_report.py without a GPU: its limits with stub stages, its stages with stubs of Python and nvidia-smi."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gpu_build
import gpu_items
import gpu_machine
import gpu_peers
import gpu_report
import gpu_smoke
import gpu_stages
import gpu_tests
import gpu_tiles
import gpu_work
import pytest
from gpu_stages import Stage
from gpu_stand_in import BENCH, ROOT, TESTS, Machine, install, install_clock, statuses

from grpo_kernels.backends.strategy import STRATEGIES
from grpo_kernels.benchmarks.implementations import select


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    monkeypatch.setattr(gpu_items, "SILENCE", {"cuda": 60.0, "triton": 60.0})
    install_clock(tmp_path, monkeypatch, step=60.0)
    return install(tmp_path, monkeypatch)


# --- limits ---------------------------------------------------------------------------------------------------------


def conduct(stages: list[Stage], folder: Path, **settings) -> dict:
    return gpu_report.conduct(stages, gpu_report.Settings(output=folder / "report.json", **settings))


def alive(pid: int) -> bool:
    """Whether it goes on living: who is killed needs a moment to die."""
    for _ in range(1200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.05)
    return True


# A process that starts another, says which, and hangs.
PARENT = """
import os, subprocess, time
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
time.sleep(0.5)
print("hangs", file=open(os.environ["HANGS"], "a"), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("limits", [{}, {"most": 40.0}, {"silence": 40.0}])
def test_what_overruns_is_stopped_with_all_its_processes(limits, tmp_path, monkeypatch):
    install_clock(tmp_path, monkeypatch, step=40.0)

    def overruns(work):
        work.record["ended"] = work.python("-c", PARENT, **limits)._asdict()

    stages = [Stage("overruns", overruns, weight=1, least=0), Stage("later", lambda work: None, weight=1, least=0)]
    report = conduct(stages, tmp_path, minutes=5.0 if limits else 1.0)
    ended = report["stages"]["overruns"]["ended"]
    assert "stopped after" in ended["stopped"] and ended["code"] is None
    assert not alive(int(ended["output"]))
    assert statuses(report)["later"] == "ok"


def idle(work):
    pass


@pytest.fixture
def stopped_clock(monkeypatch):
    for module in (gpu_work, gpu_report):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 1000.0, sleep=time.sleep))


@pytest.mark.usefixtures("stopped_clock")
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
    assert found["l"]["limit"] == 120


@pytest.mark.usefixtures("stopped_clock")
def test_a_stage_that_cannot_run_takes_no_time_from_others(tmp_path):
    stages = [Stage("needs a GPU", idle, weight=9, needs_gpu=True), Stage("rest", idle, weight=1)]
    (tmp_path / "report.json").write_text(json.dumps({"environment": {"no_gpu": "none here"}, "stages": {}}))
    found = conduct(stages, tmp_path, minutes=2.0, resume=True)["stages"]
    assert (found["needs a GPU"]["status"], found["needs a GPU"]["reason"]) == ("cannot", "none here")
    assert found["rest"]["limit"] == 120


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
    log, hangs = tmp_path / "report.log", tmp_path / "hangs"
    environment = {**os.environ, "HANGS": str(hangs)}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, env=environment)
    while not hangs.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    report = json.loads((tmp_path / "report.json").read_text())
    assert statuses(report) == {"done": "ok", "forever": "stopped"} and report["stages"]["forever"]["half"] == 1
    assert not alive(int(log.read_text().strip().splitlines()[-1]))


# --- the stages -----------------------------------------------------------------------------------------------------


def test_a_machine_with_a_gpu(machine):
    machine.breaks(awaits="sampled")
    report = machine.report(skip=("sanitizer",))
    assert set(statuses(report).values()) == {"ok", "cannot"} and gpu_report.passed(report)
    assert [name for name, status in statuses(report).items() if status == "cannot"] == ["peers"]
    environment = report["environment"]
    assert (environment["device"], environment["driver"]) == ("Stub", "580.1") and environment["no_gpu"] == ""
    assert report["stages"]["bench"]["clocks"]["clocks.sm"] == [1980.0] * 3
    assert sorted(report["stages"]["core_tests"]["passed"]) == sorted(TESTS[:-1])
    assert report["stages"]["tests"]["counts"] == {"PASSED": 1}, "those that passed before are not run again"
    assert {"what": "copy", "milliseconds": 2.0, "item": "llama-3-8b"} in report["stages"]["events"]["measured"]
    assert report["bench"] == BENCH and report["stages"]["bench"]["note"] == "1 cases, 1 not run"
    assert report["stages"]["bench"]["errors"] == ["{}: trl: lost"]
    assert machine.calls("bench", "cuda") and not machine.calls("bench", "--exclude")
    devices = {record.get("device") for name, record in report["stages"].items() if name in ("smoke", "headline")}
    assert devices == {"Stub"}, "each measurement says where"


def test_a_machine_without_a_gpu_says_so_and_does_the_rest(machine):
    machine.breaks(no_gpu="no CUDA device")
    report = machine.report()
    done = {"environment", "build", "check", "bench"}
    assert {name for name, status in statuses(report).items() if status == "ok"} == done
    assert set(statuses(report).values()) == {"ok", "cannot"} and gpu_report.passed(report)
    assert report["stages"]["smoke"]["reason"] == "no CUDA device"
    assert "no CUDA device" in gpu_report.summary(report, machine.settings.output)
    assert machine.calls("bench", "--quick", "cpu") and not machine.calls("product")
    assert machine.calls("setup.py") and not machine.calls("bench/gpu_build.py"), "there is nothing to watch"


def test_what_hangs_or_fails_at_first_contact_is_left_out_later(machine):
    machine.breaks(hangs=("smoke/cuda/linear 130x64x1000",), fails=("smoke/triton/anchored 129x72x257",))
    report = machine.report()
    probes = report["stages"]["smoke"]["probes"]
    assert list(report["left_out"]) == ["cuda/linear", "triton/anchored"]
    hung = probes["cuda/linear"]["sizes"]["130x64x1000"]
    assert "stopped after 60 s of silence" in hung["error"] and "watchdog: block 3" in hung["said"]
    assert "2304x512x20000" not in probes["cuda/linear"]["sizes"], "nothing after it in that process"
    wrong = probes["triton/anchored"]["sizes"]
    assert not wrong["129x72x257"]["ok"] and wrong["1100x512x20000"]["ok"], "after a mismatch the rest is run"
    assert probes["cuda/anchored"]["ok"] and probes["triton/linear"]["ok"]
    (bench,) = machine.calls("bench", "--exclude")
    assert bench.endswith("--exclude ours-cuda-anchored ours-cuda-linear ours-triton-anchored")
    assert not machine.calls("events/cuda/linear") and machine.calls("events/cuda/anchored")
    assert machine.calls("headline/triton/rows") and not [x for x in machine.calls() if "headline/triton/rows,tr" in x]
    ran = {test for line in machine.calls("-v") for test in line.split() if "::" in test}
    assert set(TESTS) - ran == {TESTS[1], TESTS[2], TESTS[5]}, "anchored scores through linear"
    assert report["stages"]["core_tests"]["left_out"] == 3
    assert statuses(report)["smoke"] == "failed" and not gpu_report.passed(report)
    assert report["stages"]["sanitizer"]["reason"].startswith("Error: Device not supported")
    assert machine.calls("tests/sanitize.py")[0].endswith("--strategies rows")


def test_what_hangs_under_the_watchdog_is_not_let_loose(machine):
    machine.breaks(hangs=("watched/smoke/cuda/anchored",))
    report = machine.report(only=("smoke",))
    assert report["left_out"] == {"cuda/anchored": report["left_out"]["cuda/anchored"]}
    (failure,) = report["stages"]["smoke"]["failures"]
    assert failure.startswith("cuda/anchored with the watchdog at 1x8x2") and "watchdog: block 3" in failure
    assert len(machine.calls("smoke/cuda/anchored")) == 1 and len(machine.calls("smoke/cuda/linear")) == 2
    sizes = [len(line.split()) - 2 for line in machine.calls("smoke/cuda/linear")]
    assert sizes == [len(gpu_smoke.FIRST_SIZES), len(gpu_tiles.PRODUCTS)], "then the kernels that are measured"
    assert {"several items per cluster, in pairs", "several tiles per part, in pairs"} <= set().union(
        *(gpu_tiles.cases(*size) for size in gpu_smoke.FIRST_SIZES)
    )


def test_what_there_is_no_time_to_try_is_left_out(machine, monkeypatch):
    monkeypatch.setattr(gpu_items, "SILENCE", {"cuda": 60.0, "triton": 600.0})
    install_clock(machine.folder, monkeypatch, step=100.0)
    machine.breaks(hangs=("smoke/cuda/rows", "smoke/triton/linear"))
    stages = [gpu_stages.STAGES[0], Stage("smoke", gpu_smoke.smoke, 1, needs_gpu=True)]
    settings = gpu_report.Settings(**vars(machine.settings) | {"minutes": 2.5})
    report = gpu_report.conduct(stages, settings)
    assert report["stages"]["smoke"]["stopped"].startswith("out of time before triton/anchored")
    left_out = {name for name in gpu_smoke.STRATEGIES if name != "triton/rows"}
    assert set(report["left_out"]) == left_out and "silence" in report["left_out"]["cuda/anchored"]
    assert report["left_out"]["triton/anchored"] == gpu_smoke.NOT_TRIED
    assert report["left_out"]["triton/linear"] == gpu_smoke.NOT_TRIED, "a process that time stops has not hung"


def test_a_device_that_stops_answering_is_left_alone(machine):
    machine.breaks(fails=("first product",))
    report = machine.report()
    assert statuses(report)["smoke"] == "failed" and not [x for x in machine.calls() if "smoke/" in x]
    reasons = {report["stages"][name]["reason"] for name in ("headline", "events", "tests", "sanitizer")}
    assert reasons == {report["device_lost"]}
    machine.breaks()
    assert "device_lost" not in machine.report(resume=True, only=("smoke",)), "the next call asks again"


def test_without_its_row_kernels_a_backend_has_nothing(machine):
    machine.breaks(fails=("first cuda/load",))
    report = machine.report(only=("smoke", "headline", "core_tests", "bench", "check"))
    (excluded,) = machine.calls("bench", "--exclude", "ours", "ours-cuda*")
    assert "ours-cuda*" in excluded and not [line for line in machine.calls("-v") if "[cuda-" in line]
    assert not machine.calls("check", "cuda") and machine.calls("check", "torch")
    names = {fact["name"] for fact in report["stages"]["headline"]["measured"]}
    assert names == {"triton/rows", "triton/anchored"}, "`ours` would be CUDA's, which is there and broken"


def test_first_contact_goes_from_what_is_safe_to_what_never_ran():
    backends, strategies = zip(*(name.split("/") for name in gpu_smoke.STRATEGIES), strict=True)
    assert backends == ("cuda",) * 3 + ("triton",) * 3 and strategies == STRATEGIES * 2


def test_what_is_left_out_of_the_bench_is_known_there():
    for name in gpu_smoke.STRATEGIES:
        assert select(gpu_stages.implementations_of(name)), "which raises where a pattern has no meaning"


# --- what a machine lacks -------------------------------------------------------------------------------------------


def test_a_build_without_a_module_is_a_failure(machine):
    machine.breaks(cuda="expected a ';'")
    report = machine.report(only=("build",))
    assert statuses(report) == {"environment": "ok", "build": "failed"}
    (failure,) = report["stages"]["build"]["failures"]
    assert failure.startswith("_cuda not built") and "lm_head_sm90.cu(7): error: expected a ';'" in failure
    assert set(report["left_out"]) == {"cuda/rows", "cuda/linear", "cuda/anchored"}
    machine.breaks()
    assert not machine.report(only=("build",), resume=True)["left_out"]


@pytest.mark.parametrize("only", [(), ("bench",), ("headline",), ("core_tests",)])
def test_a_fresh_machine_builds_whatever_the_report_has(machine, only):
    machine.report(only=("build", "smoke"))
    machine.forget()
    report = machine.report(resume=True, only=only, skip=("sanitizer",))
    assert len(machine.calls("bench/gpu_build.py")) == 2 and (machine.folder / "grpo_kernels" / "_cuda.so").exists()
    assert statuses(report)["build"] == "ok" and not report.get("left_out")
    assert len(machine.calls("smoke/cuda/rows")) == 1, "the same kernels are not tried twice"


def test_a_bench_without_cuda_kernels_measures_nothing_in_their_name(machine):
    machine.breaks(cuda="unknown option")
    machine.report(only=("bench",))
    (bench,) = machine.calls("bench", "--exclude")
    assert {"ours", "ours-unscored", "ours-cuda*"} <= set(bench.split())


def test_a_name_that_ran_another_backend_is_a_failure(machine):
    ran = {"ours-cuda-rows": {"ran": {"triton.fused": 2}}, "ours-triton-rows": {"ran": {"triton.fused": 2}}}
    machine.breaks(bench={"cases": [{"case": {}, "implementations": ran}], "not_run": []})
    found = machine.report(only=("bench",))["stages"]["bench"]
    assert found["failures"] == ["ours-cuda-rows ran backend triton"] and found["status"] == "failed"
    assert found["ran"] == {"ours-cuda-rows": ["triton"], "ours-triton-rows": ["triton"]}


def test_kernels_that_have_changed_are_tried_again(machine, monkeypatch):
    machine.breaks(fails=("smoke/cuda/linear",))
    machine.report(only=("smoke",))
    machine.breaks()
    monkeypatch.setattr(gpu_machine, "sources", lambda: "after a repair")
    monkeypatch.setattr(gpu_smoke, "sources", lambda: "after a repair")
    report = machine.report(resume=True, only=("headline",))
    assert statuses(report)["smoke"] == "ok" and not report["left_out"]


def test_a_second_call_goes_on(machine):
    machine.breaks(fails=("smoke/cuda/anchored 1x8x2",))
    machine.report(only=("smoke",))
    count = len(machine.calls("smoke/cuda/rows"))
    report = machine.report(resume=True, skip=("sanitizer",))
    assert len(machine.calls("smoke/cuda/rows")) == count and report["stages"]["core_tests"]["left_out"] == 1
    assert statuses(report)["smoke"] == "failed" and statuses(report)["bench"] == "ok"
    machine.report(resume=True, only=("bench",))
    assert len(machine.calls("bench")) == 2
    assert set(statuses(machine.report(only=("check",)))) == {"environment", "build", "check"}


@pytest.mark.parametrize("number", gpu_stages.RUNS)
def test_a_run_brings_what_it_is_for(number, machine, monkeypatch, capsys):
    monkeypatch.setattr(gpu_report, "Settings", functools.partial(gpu_report.Settings, python=machine.settings.python))
    output = machine.folder / "out" / "run.json"
    code = gpu_report.main(["--run", str(number), "--output", str(output)])
    report, run = json.loads(output.read_text()), gpu_stages.RUNS[number]
    assert set(report["stages"]) == {"environment", *run.stages}
    order = list(report["stages"])
    first = "bench" if number == 3 else "headline"
    assert order.index(first) == order.index("smoke") + 1, "what tells most comes before what takes long"
    assert {"run.json", "run.log"} <= {path.name for path in output.parent.iterdir()}
    assert code == 0, capsys.readouterr().out
    assert sum(stage.least for stage in gpu_stages.STAGES if stage.name in run.stages) < 60 * run.minutes * 0.6


def test_a_broken_kernel_is_an_exit_status(machine, monkeypatch, capsys):
    monkeypatch.setattr(gpu_report, "Settings", functools.partial(gpu_report.Settings, python=machine.settings.python))
    machine.breaks(fails=("smoke/triton/rows 1x8x2",))
    assert gpu_report.main(["--run", "1", "--output", str(machine.folder / "run.json")]) == 1
    assert "smoke: triton/rows at 1x8x2: AssertionError: wrong" in capsys.readouterr().out


def test_a_step_of_trl(machine):
    report = machine.report(only=("trl_step",))
    assert statuses(report)["trl_step"] == "ok" and "FusedGRPOTrainer" in report["trl_step"]["steps"]["dapo"]
    assert machine.calls("bench/trl_step.py", "--device", "cuda", "dapo")
    machine.breaks(trl=False)
    record = machine.report(only=("trl_step",))["stages"]["trl_step"]
    assert record["status"] == "cannot" and record["reason"] == "no TRL: --wheels FOLDER"


def test_benchmarks_go_on_where_they_ended_unless_the_machine_is_another(machine):
    machine.report(only=("bench",))
    machine.report(only=("bench",), resume=True)
    assert [("--resume" in call) for call in machine.calls("bench", "--set")] == [False, True]
    machine.breaks(elsewhere=True)
    report = machine.report(only=("bench",), resume=True)
    assert [("--resume" in call) for call in machine.calls("bench", "--set")][2:] == [True, False]
    assert statuses(report)["bench"] == "ok" and report["bench"]["cases"]


def test_every_stage_belongs_to_a_run():
    names = {stage.name for stage in gpu_stages.STAGES}
    assert {name for run in gpu_stages.RUNS.values() for name in run.stages} == names - {"environment"}


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
    (packed / "deeper" / "still").mkdir(parents=True)
    (packed / "deeper" / "__init__.py").touch()
    (packed / "deeper" / "still" / "runtime.py").touch()
    (packed / "a.pth").write_text("inner\n")
    (packed / "b.pth").write_text("import sys, deeper; sys.path.insert(0, deeper.__path__[0] + '/still')\n")
    shutil.make_archive(str(folder / "dsl"), "xztar", packed)
    found = machine.report(only=("peers",), wheels=folder)["stages"]["peers"]
    assert found["status"] == "ok" and found["installed"] == ["peer-1.0-py3-none-any.whl", "dsl.tar.xz"]
    assert list(found["not_installed"]) == ["other-1.0-cp27-cp27m-win32.whl", "torch-1.0-py3-none-any.whl"]
    assert "1 of 3 wheels, 1 archives; not other-1.0-cp27" in found["note"]
    assert (machine.folder / "peers" / "peer.py").exists() and not (machine.folder / "peers" / "torch.py").exists()
    program = "import peer, kernel, runtime"  # the last two as .pth files of the folder say
    subprocess.run([sys.executable, "-c", program], env=gpu_work.child_environment(), check=True)


# --- tests that break their process ---------------------------------------------------------------------------------

DANGEROUS = """
import os, time
import pytest
pytestmark = pytest.mark.gpu
poisoned = []

def test_passes(): assert not poisoned
def test_fails(): assert not "this"
def test_hangs():
    time.sleep(0.5)
    print("hangs", file=open(os.environ["HANGS"], "a"), flush=True)
    time.sleep(600)
def test_crashes(): os.abort()
def test_poisons():
    poisoned.append(1)
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_last(): assert not poisoned
"""


def test_a_test_that_breaks_its_process_costs_itself_alone(machine, monkeypatch):
    (machine.folder / "test_dangerous.py").write_text(DANGEROUS)
    monkeypatch.setattr(gpu_tests, "COMPILING", 60.0)
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


def test_a_test_is_given_the_time_that_its_kind_needs():
    assert gpu_tests.silence("tests/test_gpu.py::test_cuda_graph[cuda-token-rows] ") == 40
    for line in ("test_cuda_graph[triton-token-rows] ", "test_under_compile[cuda]", "test_auto"):
        assert gpu_tests.silence(f"tests/test_gpu.py::{line}") == 150
    assert gpu_tests.silence("collected 8600 items") == gpu_tests.silence("[gw0] [ 9%] PASSED a.py::b[cuda] ") == 150


# --- the build ------------------------------------------------------------------------------------------------------

BUILDER = """
import os
from pathlib import Path
def build(name, *, development):
    Path("built").write_text(os.environ.get("GRPO_KERNELS_NVRTCFLAGS", "none"))
    return Path("built")
"""
SETUP = """
import os, sys
from pathlib import Path
def replace(target, built):
    target.write_text(built.read_text())
if __name__ == "__main__":
    Path("grpo_kernels/_cuda.so").write_text(os.environ.get("GRPO_KERNELS_NVRTCFLAGS", "none"))
    sys.exit(int(os.environ.get("FAIL", "0")))
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    for folder in ("csrc", "python", "tools/kernel_build", "grpo_kernels"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "setup.py").write_text(SETUP)
    (tmp_path / "tools" / "kernel_build" / "__init__.py").touch()
    (tmp_path / "tools" / "kernel_build" / "cuda.py").write_text(BUILDER)
    monkeypatch.setattr(gpu_build, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_build, "WATCHED", tmp_path / "watched")
    monkeypatch.setattr(gpu_smoke, "WATCHED", tmp_path / "watched")
    monkeypatch.delenv("GRPO_KERNELS_NVRTCFLAGS", raising=False)
    return tmp_path


def test_the_kernels_are_built_once_more_with_the_watchdog(checkout, monkeypatch):
    assert not gpu_smoke.watched(), "nothing has been built: nothing comes first"
    (checkout / "grpo_kernels" / "loss.py").touch()
    assert gpu_build.main() == 0
    (module,) = (checkout / "watched" / "grpo_kernels").glob("_cuda.*so")
    assert module.read_text().split() == ["-DGK_WATCHDOG"]
    assert (checkout / "grpo_kernels" / "_cuda.so").read_text() == "none", "what is measured has no watchdog"
    assert (checkout / "watched" / "grpo_kernels" / "loss.py").exists(), "a package that can be imported"
    first, *rest = gpu_smoke.watched()["PYTHONPATH"].split(os.pathsep)
    assert first == str(checkout / "watched") and str(ROOT) in rest
    monkeypatch.setenv("FAIL", "1")
    assert gpu_build.main() == 1, "the module that is measured decides"


def test_without_a_watched_module_there_is_none_of_an_earlier_build(checkout, capfd):
    assert gpu_build.main() == 0
    (checkout / "tools" / "kernel_build" / "cuda.py").write_text(
        "def build(*a, **b): raise SystemExit('error: no NVRTC')"
    )
    assert gpu_build.main() == 0 and not gpu_smoke.watched()
    said = capfd.readouterr().out
    assert "gpu_build: no module with -DGK_WATCHDOG, exit status 1" in said and "error: no NVRTC" in said


def test_peers_are_pinned_by_the_project_and_travel_in_one_archive(tmp_path):
    assert "trl==1.16.0" in gpu_peers.pins() and "quack-kernels==0.6.5" in gpu_peers.pins()
    with pytest.raises(SystemExit, match="pins no nobody"):
        gpu_peers.pins(("trl", "nobody"))
    (tmp_path / "site" / "peer").mkdir(parents=True)
    (tmp_path / "site" / "peer" / "inner.py").write_text("x = 1\n")
    archive = tmp_path / "wheels" / "peers.tar.xz"
    gpu_peers.pack(tmp_path / "site", archive)
    shutil.unpack_archive(archive, tmp_path / "peers", filter="data")
    assert (tmp_path / "peers" / "peer" / "inner.py").read_text() == "x = 1\n"
    with pytest.raises(SystemExit):
        gpu_peers.main(["peers.zip"])

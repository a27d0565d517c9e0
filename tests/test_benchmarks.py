"""The benchmark itself: cases, processes that die, interleaving, deadlines, documents, the command."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels.benchmarks import command, machine, measure, memory, process
from grpo_kernels.benchmarks import run as bench_run
from grpo_kernels.benchmarks.cases import DTYPES, MODES, Case, heads, make_case, parse_shape
from grpo_kernels.benchmarks.implementations import Implementation, Result, Unserved, implementations, select
from grpo_kernels.benchmarks.inputs import group_advantages, grpo_objective, make_inputs
from grpo_kernels.benchmarks.reference import errors, off_policy, reference, why_wrong
from grpo_kernels.benchmarks.sets import SETS, Job, jobs
from grpo_kernels.benchmarks.show import case_table, table
from grpo_kernels.commands.cli import main

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
TINY = make_case("tiny:64", "float32")
NEVER = float("inf")


# --- cases --------------------------------------------------------------------------------------------------------


def test_shapes_by_name_and_by_numbers() -> None:
    assert parse_shape("qwen2.5-7b:16384") == ("qwen2.5-7b", 16384, 3584, 152064)
    assert parse_shape("16384x3584x152064") == ("qwen2.5-7b", 16384, 3584, 152064)
    assert parse_shape("8x3x5") == ("custom", 8, 3, 5)


@pytest.mark.parametrize("text", ["qwen2.5-7b", "gpt-5:128", "qwen2.5-7b:many", "1x2", "1x2x3x4", ""])
def test_a_shape_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="expected HEAD:TOKENS"):
        parse_shape(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "backward"}, "mode='backward'; expected one of step"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"idle_share": 1.5}, "idle_share=1.5"),
        ({"tokens": 0}, "positive"),
        ({"tokens": 65}, "tokens=65; expected a multiple"),
    ],
)
def test_a_case_refuses_what_it_cannot_be(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(TINY, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", SETS)
def test_every_set_is_made_of_valid_jobs(name: str, device: str) -> None:
    found = jobs(name, device)
    assert found
    cases = [job.case for job in found]
    assert len(set(cases)) == len(cases), "a case is measured once"
    for job in found:
        assert "ours" in job.names()
        assert ("floor" in job.names()) == job.timed


def test_the_sets_hold_every_head_and_the_sizes_that_were_asked_for() -> None:
    everything = [*jobs("all", "cuda"), *jobs("all", "cpu")]
    assert {job.case.head for job in everything} >= set(heads()) - {"tiny"}
    tokens = {job.case.tokens for job in everything}
    assert min(tokens) == 128
    assert max(tokens) >= 65536
    assert {job.case.mode for job in everything} == set(MODES)


# --- inputs and reference -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_idle_prompts_have_no_advantage_and_the_others_have_one(share: float) -> None:
    inputs = make_inputs(make_case("512x8x16", "float32", length=8, idle_share=share, beta=0.0), CPU)
    idle = (inputs.advantages.view(-1, 4) == 0).all(1)
    assert idle.float().mean() == share
    assert (inputs.advantages.view(-1, 4)[~idle] != 0).all()


def test_advantages_of_one_completion_are_zero() -> None:
    assert group_advantages(torch.tensor([0.3, 0.9]), 1).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_reference_agrees_with_autograd_in_float64(mode: str) -> None:
    inputs = off_policy(make_inputs(dataclasses.replace(TINY, mode=mode), CPU))
    right = reference(inputs, mode, "grpo")
    hidden, weight = (x.detach().double().requires_grad_() for x in (inputs.hidden, inputs.weight))
    logps = (hidden @ weight.T).log_softmax(-1).gather(-1, inputs.ids[..., None]).squeeze(-1)
    exact = dataclasses.replace(inputs, old_logps=inputs.old_logps.double(), ref_logps=inputs.ref_logps.double())
    loss = grpo_objective(logps, exact)
    dhidden, dweight = torch.autograd.grad(loss, (hidden, weight))
    result = Result(loss.detach(), logps.detach(), dhidden, dweight)
    found = errors(right, result)
    assert max(found.values()) < 1e-12
    assert why_wrong(right, result, found, torch.float32) is None
    assert ("dweight" in found) == (mode == "step")


def test_a_wrong_or_missing_result_is_said() -> None:
    inputs = off_policy(make_inputs(TINY, CPU))
    right = reference(inputs, "step", "grpo")
    result = implementations()["eager"].settings(inputs, "step")[""](inputs)
    assert result.dhidden is not None
    for wrong, words in (
        (result._replace(dweight=None), "gives no dweight"),
        (result._replace(dhidden=result.dhidden * 1.01), "dhidden is off by 1.0e-02"),
        (result._replace(loss=torch.tensor(float("nan"))), "loss is off by nan"),
    ):
        assert words in (why_wrong(right, wrong, errors(right, wrong), torch.float32) or "")


# --- one case -------------------------------------------------------------------------------------------------------


def _measured(monkeypatch: pytest.MonkeyPatch, case: Case, extra: Implementation, deadline: float = NEVER) -> dict:
    """`_measure` in this process, with one more implementation."""
    table = {name: implementations()[name] for name in ("ours", "floor", "eager")} | {extra.name: extra}
    monkeypatch.setattr(measure, "implementations", lambda: table)
    monkeypatch.setattr(measure, "limit_memory", lambda: None)
    monkeypatch.setattr(measure, "SHORT_S", NEVER)  # or one that this machine holds up has one round
    return measure._measure(case, list(table), "cpu", 2, True, deadline, lambda text: None)["implementations"]


def test_a_case_has_times_ratios_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = implementations()["eager"].settings
    slow = Implementation("slow", "two settings", lambda inputs, mode: {k: settings(inputs, mode)[""] for k in "ab"})
    found = _measured(monkeypatch, TINY, slow)
    for name, report in found.items():
        assert len(report["seconds"]["times"]) == 2, name
        assert report["ratio_to_floor"] == pytest.approx(
            report["seconds"]["median"] / found["floor"]["seconds"]["median"]
        )
    assert found["floor"]["errors"] is None
    assert {name.partition(".")[0] for name in found["ours"]["ran"]} == {"cpu"}, "which backend the name stood for"
    assert "ran" not in found["floor"] and "ran" not in found["eager"]
    assert found["ours"]["errors"]["dweight"] < 1e-5
    assert set(found["slow"]["tried"]) == {"a", "b"}
    assert found["slow"]["setting"] in ("a", "b")


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_result_gets_no_time(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    def settings(inputs: object, mode: str) -> dict:
        step = implementations()["eager"].settings(inputs, mode)[""]
        return {"": lambda inputs: Result(*(x if x is None else x * 1.5 for x in step(inputs)))}

    found = _measured(monkeypatch, dataclasses.replace(TINY, mode=mode), Implementation("wrong", "wrong", settings))
    assert found["wrong"]["error"].startswith("wrong result")
    assert "seconds" not in found["wrong"]
    assert "seconds" in found["ours"]


def test_what_cannot_run_is_listed_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def unserved(inputs: object, mode: str) -> dict:
        raise Unserved("no such mode")

    def exhausted(inputs: object, mode: str) -> dict:
        raise torch.OutOfMemoryError("CUDA out of memory")

    absent = Implementation("absent", "absent", exhausted, lambda device, dtype: "not installed")
    for extra, key, words in (
        (Implementation("unserved", "unserved", unserved), "missing", "no such mode"),
        (Implementation("exhausted", "exhausted", exhausted), "error", "out of memory"),
        (absent, "missing", "not installed"),
    ):
        report = _measured(monkeypatch, TINY, extra)[extra.name]
        assert report[key].startswith(words)
        assert words in case_table({"case": dataclasses.asdict(TINY), "implementations": {extra.name: report}})


def test_after_the_deadline_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _measured(monkeypatch, TINY, implementations()["eager"], deadline=0.0)
    assert {report["error"] for report in found.values()} == {"not run: out of time"}


def test_rounds_are_interleaved_and_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SHORT_S", NEVER)
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in "abc"}
    found = measure.interleave(steps, 3, CPU, NEVER, lambda text: None)
    assert "".join(calls) == "abcbcacab"
    assert all(len(report["seconds"]["times"]) == 3 for report in found.values())


def test_who_takes_seconds_and_far_longer_than_the_fastest_is_left_at_one_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(measure, "time", SimpleNamespace(time=lambda: now, perf_counter=lambda: now))
    monkeypatch.setattr(measure, "gc", SimpleNamespace(collect=lambda: None))

    def takes(seconds: float) -> None:
        nonlocal now
        now += seconds

    for fast, slow, expected in ((0.1, 0.9, 3), (0.1, 1.1, 1), (1.0, 1.4, 3), (1.0, 1.6, 1)):
        steps = {"fast": lambda fast=fast: takes(fast), "slow": lambda slow=slow: takes(slow)}
        steps["eager"] = steps["slow"]
        found = measure.interleave(steps, 3, CPU, NEVER, lambda text: None)
        assert [len(found[name]["seconds"]["times"]) for name in steps] == [3, expected, 3]


def test_a_deadline_leaves_one_round() -> None:
    found = measure.interleave({"a": lambda: None}, 5, CPU, 0.0, lambda text: None)
    assert len(found["a"]["seconds"]["times"]) == 1


# --- processes ------------------------------------------------------------------------------------------------------


def child(what: str, tell: process.Tell) -> str:
    tell("before")
    if what == "exit":
        os._exit(3)
    if what == "kill":
        os.kill(os.getpid(), 9)
    if what == "hang":
        time.sleep(600)
    if what == "raise":
        raise MemoryError("no more")
    return "fine"


def test_a_process_returns_and_tells() -> None:
    told: list[str] = []
    assert process.apart(child, "", tell=told.append) == "fine"
    assert told == ["before"]


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("exit", "ended with 3"),
        ("kill", "out of memory: the process was killed"),
        ("raise", "out of memory: MemoryError: no more"),
    ],
)
def test_a_process_that_dies_is_described(what: str, why: str) -> None:
    with pytest.raises(process.Died, match=why) as death:
        process.apart(child, what)
    assert death.value.said == "before"


def test_a_process_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its silence is over at once when it has told the last thing, and not before, however slow this machine is."""
    poll, others = Connection.poll, multiprocessing.active_children()
    waits: list[float] = []
    told: list[str] = []
    started: list[multiprocessing.Process] = []

    def passes(pipe: Connection, seconds: float) -> bool:
        waits.append(seconds)
        started[:] = [each for each in multiprocessing.active_children() if each not in others]
        return poll(pipe, 0.0 if told else None)

    monkeypatch.setattr(Connection, "poll", passes)
    with pytest.raises(process.Died, match="no answer for 45 s") as death:
        process.apart(child, "hang", tell=told.append, silence_s=45.0)
    assert death.value.said == "before"
    assert waits == [45.0, 45.0]
    assert [each.exitcode for each in started] == [-signal.SIGKILL]


def measure_with_a_killer(
    case: Case, names: list[str], device: str, rounds: int, tuned: bool, deadline: float, tell: process.Tell
) -> dict:
    for name in names:
        tell(name)
        if name == "trl":
            os._exit(1)
        if name == "eager":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return {"implementations": {name: {"seconds": 1.0} for name in names}, "clocks": {}}


def test_who_kills_the_process_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_measure", measure_with_a_killer)
    found = measure.measure(TINY, ["ours", "trl", "floor", "eager"], "cpu", 1, True, NEVER)["implementations"]
    assert list(found) == ["ours", "trl", "floor", "eager"]
    assert found["ours"] == found["floor"] == {"seconds": 1.0}
    assert "ended with 1" in found["trl"]["error"]
    assert "illegal memory access" in found["eager"]["error"]


def measure_without_memory(*arguments: object) -> dict:
    arguments[-1]("reference")  # type: ignore[operator]
    raise MemoryError


def test_a_case_without_a_reference_is_an_error_of_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_measure", measure_without_memory)
    found = measure.measure(TINY, ["ours"], "cpu", 1, True, NEVER)
    assert found["error"].startswith("out of memory")
    assert "out of memory" in case_table(found | {"case": dataclasses.asdict(TINY)})


def test_memory_is_that_of_the_call() -> None:
    case = make_case("512x32x16384", "float32")
    logits = case.logits_bytes()
    found = {name: memory.weigh(case, name) for name in ("ours", "eager", "floor")}
    assert found["floor"] == {}
    assert found["eager"]["peak_bytes"] > 2 * logits
    assert found["ours"]["peak_bytes"] < 1.5 * logits


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_writes_table_json_and_pictures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "results" / "b.json"
    options = ["--shapes", "tiny:64", "--against", "eager", "--device", "cpu", "--rounds", "2", "--output", str(output)]
    assert main(["bench", *options]) == 0
    said = capfd.readouterr().out
    assert "tiny (64, 64, 2048), bfloat16, step" in said
    document = json.loads(output.read_text())
    (found,) = document["cases"]
    assert list(found["implementations"]) == ["ours", "floor", "eager"]
    assert found["implementations"]["ours"]["peak_bytes"] >= 0
    assert document["environment"]["versions"]["torch"] == torch.__version__
    assert document["not_run"] == []
    assert list(output.parent.glob("*.png"))


def test_the_version_of_torch_names_its_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's wheels call themselves 2.13.0 in their metadata and 2.13.0+cu130 when imported."""
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(machine.metadata, "version", lambda package: "2.13.0")
    assert machine.environment(CPU)["versions"]["torch"] == "2.13.0+cu130"


def test_without_time_every_case_is_listed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "tokens", "--minutes", "0.01", "--no-figures", "--output", str(tmp_path / "b.json")]
    assert main(["bench", "--device", "cpu", *options]) == 0
    listed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("not run, out of time")]
    assert len(listed) == len(jobs("tokens", "cpu"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shapes", "nothing:1"], "expected HEAD:TOKENS"),
        (["--against", "nobody*"], "'nobody*' is no implementation; there are ours"),
        (["--device", "tpu"], "--device tpu"),
        (["--device", "mps"], "expected cpu or cuda"),
        (["--shapes", "tiny:64", "--set", "quick"], "expected one of them"),
        (["--dtypes", "float32"], "go with --shapes"),
        (["--shapes", "tiny:65"], "multiple"),
    ],
)
def test_a_wrong_argument_is_named_before_any_work(
    options: list[str], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options, "--output", str(tmp_path / "b.json")]) == 2
    assert words in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_failure_of_ours_is_an_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for report, status in (
        ({"error": "wrong result: loss is off by nan"}, 1),
        ({"error": "out of memory: x"}, 0),
        ({"missing": "it serves cuda tensors"}, 0),
    ):
        monkeypatch.setattr(bench_run, "measure", lambda *a, report=report: {"implementations": {"ours": report}})
        options = ["--shapes", "tiny:64", "--against", "ours", "--no-figures", "--output", str(tmp_path / "b.json")]
        monkeypatch.setattr(bench_run, "weigh", lambda *a: {})
        assert main(["bench", "--device", "cpu", *options]) == status


@pytest.mark.parametrize("cut", ["error", "memory_error"])
def test_a_run_goes_on_where_an_earlier_one_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cut: str) -> None:
    measured: list[str] = []

    def fake(case: Case, *rest: object) -> dict:
        measured.append(case.mode)
        error = {cut: measure.NOT_RUN} if case.mode == "frozen" else {}
        return {"implementations": {"ours": {"title": "ours"} | error}}

    monkeypatch.setattr(bench_run, "measure", fake)
    output = tmp_path / "b.json"
    wanted = [Job(dataclasses.replace(TINY, mode=mode), ("ours",)) for mode in MODES]
    for expected in (["step", "frozen", "forward"], ["frozen"]):  # time cut the second one short
        measured.clear()
        session = bench_run.Run(CPU, command="", output=output, resume=True)
        for job in wanted:
            session.measure(job)
        assert measured == expected
    assert {found["case"]["mode"] for found in json.loads(output.read_text())["cases"]} == set(MODES)
    document = json.loads(output.read_text())
    document["environment"]["versions"]["torch"] = "0.1"
    output.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"measured otherwise \(versions\)"):
        bench_run.Run(CPU, command="", output=output, resume=True)


def test_what_there_is_no_time_to_weigh_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    session = bench_run.Run(CPU, command="", minutes=1000.0)

    def weigh(*rest: object) -> dict:
        session.end = 0.0
        return {"peak_bytes": 1}

    monkeypatch.setattr(bench_run, "weigh", weigh)
    found = session.measure(Job(TINY, ("ours", "eager"), timed=False, weighed=("ours", "eager")))
    assert found is not None
    assert found["implementations"]["ours"]["peak_bytes"] == 1
    assert found["implementations"]["eager"]["memory_error"] == measure.NOT_RUN


def test_excluded_names_are_left_out() -> None:
    job = Job(TINY, ("ours*", "eager"), without=("ours-*",))
    assert job.names() == ["ours", "eager"]
    assert select(["eager", "ours"]) == ["ours", "eager"], "in the order of the table"


def test_a_remark_does_not_widen_a_table() -> None:
    lines = table(("", "a", "b"), [["x", "1", "2"], ["long name", "a remark that is long"]]).splitlines()
    assert lines[1].split() == ["x", "1", "2"]
    assert len(lines[1]) < 20


def test_dtypes_are_those_of_torch() -> None:
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in DTYPES)


def test_failures_are_listed_by_the_command() -> None:
    assert command.failures({"cases": [{"case": {}, "error": "x", "implementations": {}}]})


# --- pytest-benchmark's view ------------------------------------------------------------------------------------------


def test_pytest_asks_for_each_case_once(tmp_path: Path) -> None:
    """A second measurement of a case would be a second time out of time."""
    output = tmp_path / "b.json"
    options = ["--set", "quick", "--device", "cpu", "--minutes", "0.001", "--results", str(output)]
    command_line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "bench"), *options]
    ended = subprocess.run(command_line, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 0, ended.stdout
    wanted = [str(job.case) for job in jobs("quick", "cpu")]
    assert json.loads(output.read_text())["not_run"] == wanted
    assert all(f"not run, out of time: {case}" in ended.stdout for case in wanted)


def test_a_recorded_clock_goes_through_the_times_that_were_taken() -> None:
    spec = importlib.util.spec_from_file_location("measurements", ROOT / "bench" / "test_measurements.py")
    assert spec is not None
    assert spec.loader is not None
    measurements = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measurements)
    clock = measurements.RecordedClock()
    clock.load([0.5, 2.0])
    starts_and_ends = [clock() for _ in range(4)]
    assert [starts_and_ends[i + 1] - starts_and_ends[i] for i in (0, 2)] == [0.5, 2.0]

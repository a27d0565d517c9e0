"""The benchmark itself: cases, processes that die, interleaving, deadlines, documents, the command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import START_METHOD
from torch.nn import functional

from grpo_kernels.commands.bench import cases, command, measure, process
from grpo_kernels.commands.bench.baselines import Implementation, Result, Unsupported
from grpo_kernels.commands.bench.cases import MODES, SETS, Job, jobs, make_case, parse_shape
from grpo_kernels.commands.bench.inputs import grpo_objective, make_inputs
from grpo_kernels.commands.bench.measure import Options
from grpo_kernels.commands.bench.reference import errors, off_policy, reference, why_wrong
from grpo_kernels.commands.bench.table import IMPLEMENTATIONS, select
from grpo_kernels.commands.cli import main

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
TINY = make_case("tiny:64", "float32")
NEVER = float("inf")


# --- cases, inputs and reference --------------------------------------------------------------------------------------


def test_a_case_by_name_and_by_numbers_and_what_it_cannot_be():
    assert parse_shape("qwen2.5-7b:16384") == ("qwen2.5-7b", 16384, 3584, 152064)
    assert parse_shape("16384x3584x152064") == ("qwen2.5-7b", 16384, 3584, 152064)
    assert parse_shape("8x3x5") == ("custom", 8, 3, 5)
    for text in ("qwen2.5-7b", "gpt-5:128", "qwen2.5-7b:many", "1x2", "1x2x3x4", ""):
        with pytest.raises(ValueError, match="expected HEAD:TOKENS"):
            parse_shape(text)
    for tokens, words in ((0, "positive"), (65, "tokens=65; expected a multiple")):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(TINY, tokens=tokens)
    with pytest.raises(ValueError, match="temperature=1 with tiny; samples are of smollm2-135m"):
        dataclasses.replace(TINY, temperature=1.0)


def test_every_set_is_made_of_valid_jobs():
    for name, device in itertools.product(SETS, ("cpu", "cuda")):
        found = jobs(name, device)
        assert found and len({job.case for job in found}) == len(found), "a case is measured once"
        for job in found:
            assert any(name.startswith("ours") for name in select(job.against)) and set(select(job.memory)) <= set(
                select(job.against)
            )


def divergence(log_p, inputs, mode):
    """Of the policy to the teacher, by torch's own function."""
    log_q = (inputs.teacher.hidden.double() @ inputs.teacher.weight.double().T).log_softmax(-1)
    pairs = {"forward_kl": [(log_p, log_q)], "reverse_kl": [(log_q, log_p)]}
    if mode == "jsd":
        middle = ((log_p.exp() + log_q.exp()) / 2).log()
        pairs["jsd"] = [(middle, log_p), (middle, log_q)]
    kl = [functional.kl_div(x, y, reduction="none", log_target=True).sum(-1).mean() for x, y in pairs[mode]]
    return sum(kl) / len(kl)


@pytest.mark.parametrize("mode", MODES)
def test_reference_agrees_with_autograd_in_float64_and_says_what_is_wrong(mode):
    inputs = off_policy(make_inputs(dataclasses.replace(TINY, mode=mode), CPU))
    right = reference(inputs, mode, "grpo")
    hidden, weight = (x.detach().double().requires_grad_() for x in (inputs.hidden, inputs.weight))
    log_p = (hidden @ weight.T).log_softmax(-1)
    logps = log_p.gather(-1, inputs.ids[..., None]).squeeze(-1)
    exact = dataclasses.replace(inputs, old_logps=inputs.old_logps.double(), ref_logps=inputs.ref_logps.double())
    loss = divergence(log_p, inputs, mode) if mode in cases.DIVERGENCES else grpo_objective(logps, exact)
    result = Result(loss.detach(), logps.detach(), *torch.autograd.grad(loss, (hidden, weight)))
    found = errors(right, result)
    assert max(found.values()) < 1e-12 and why_wrong(right, result, found, torch.float32) is None
    assert ("dweight" in found) == (mode not in ("frozen", "forward"))
    for wrong, words, modes in (
        (result._replace(dweight=None), "gives no dweight", {*MODES} - {"frozen", "forward"}),
        (result._replace(dhidden=result.dhidden * 1.01), "dhidden is off by 1.0e-02", {*MODES} - {"forward"}),
        (result._replace(loss=torch.tensor(float("nan"))), "loss is off by nan", MODES),
    ):
        assert (words in (why_wrong(right, wrong, errors(right, wrong), torch.float32) or "")) == (mode in modes)


# --- one case and its processes ---------------------------------------------------------------------------------------


@pytest.fixture
def forked(monkeypatch):
    """Processes of the benchmark, which import nothing."""
    context = multiprocessing.get_context(START_METHOD)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)


def test_a_wrong_result_and_what_cannot_run_are_listed_with_their_reasons(monkeypatch):
    def wrong(inputs, mode):
        step = IMPLEMENTATIONS["eager"].make_step(inputs, mode)
        return lambda inputs: Result(*(x if x is None else x * 1.5 for x in step(inputs)))

    def fail(error):
        raise error

    table = {name: IMPLEMENTATIONS[name] for name in ("ours", "floor", "eager")} | {
        "wrong": Implementation("wrong", wrong),
        "absent": Implementation("absent", lambda *given: fail(Unsupported("no such mode"))),
        "large": Implementation("large", lambda *given: fail(torch.OutOfMemoryError("CUDA out of memory"))),
    }
    monkeypatch.setattr(measure, "IMPLEMENTATIONS", table)
    monkeypatch.setattr(measure, "limit_memory", lambda: None)
    found = measure._measure(TINY, list(table), Options("cpu", 2, NEVER), 0.0, lambda *told: None)
    assert [name for name, report in found.items() if "seconds" in report] == ["ours", "floor", "eager"]
    assert found["wrong"]["error"].startswith("wrong result") and found["absent"]["missing"] == "no such mode"
    assert found["large"]["error"].startswith("out of memory")
    shown = command.case_table({"case": dataclasses.asdict(TINY), "implementations": found})
    assert all(words in shown for words in ("wrong result", "no such mode", "out of memory"))


def test_a_case_that_fails_itself_has_its_reason_and_no_memory():
    def run(*arguments, **options):
        raise process.Died("the process died with SIGSEGV", "inputs")

    job = Job(TINY, ("ours", "floor"), memory=("ours", "floor"))
    record = command.measure_job(job, Options("cpu", 2, NEVER), run)
    assert record["error"] == "the process died with SIGSEGV" and not record["implementations"]


def test_rounds_are_interleaved_and_rotate():
    calls = []
    steps = {name: lambda name=name: calls.append(name) for name in "abc"}
    found = dict(measure.interleave(steps, 3, CPU))  # the last of each
    assert "".join(calls) == "abcbcacab" and all(len(times) == 3 for times in found.values())
    found = dict(measure.interleave(steps, 9, CPU, deadline=0.0))
    assert all(len(times) == measure.LEAST == 5 for times in found.values()), (
        "a deadline leaves as many as a time needs"
    )


def test_who_would_take_too_long_is_measured_with_fewer_tokens_and_never_in_fewer_rounds(monkeypatch, tmp_path, capfd):
    case = make_case("tiny:512", "float32")
    job = cases.Job(case, ("ours", "floor", "trl"))

    def slow(inputs, mode):
        return lambda inputs: time.sleep(inputs.ids.numel() * 1e-3) or Result()

    monkeypatch.setitem(measure.IMPLEMENTATIONS, "trl", Implementation("TRL", slow, "none"))
    options = Options("cpu", 5, NEVER, most_s=0.7)  # a call of 512 tokens takes 0.5 s
    run = lambda function, *given: function(*given, lambda *told: None)  # noqa: E731
    monkeypatch.setattr(measure, "limit_memory", lambda: None)
    found = command.measure_job(job, options, run)
    assert found["implementations"]["trl"].keys() == {"title", "errors", "first_call_seconds", "fewer_tokens"}
    assert "with 128 tokens, in a case of their own" in command.case_table(found)
    (again,) = command.with_fewer_tokens(job, found)
    assert (again.case.tokens, again.case.length, again.against) == (128, 32, job.against)
    found = command.measure_job(again, options, run)
    assert command.with_fewer_tokens(again, found) == []
    assert all(len(report["seconds"]["times"]) == 5 for report in found["implementations"].values())


def test_a_time_of_fewer_rounds_is_none():
    def cut(*_):
        raise process.Died(process.NOT_RUN, "floor", {"ours": times(5), "floor": times(4)})

    def times(count):
        return {"seconds": {"median": 1.0, "times": [1.0] * count}}

    found = measure.measure(TINY, ["ours", "floor"], Options("cpu", 15, NEVER), cut)["implementations"]
    assert "seconds" in found["ours"] and found["floor"] == {"title": "bare matrix products", "error": process.NOT_RUN}


def test_ratios_by_round_do_not_see_a_clock_that_drifts():
    floor_times = [1.0 + number for number in range(15)]
    ratios = [1 + number * 2**-7 for number in (9, 4, 12, 1, 15, 7, 2, 8, 14, 5, 3, 11, 6, 13, 10)]
    ours = measure._timed([floor * ratio for floor, ratio in zip(floor_times, ratios, strict=True)])
    reports = {"floor": measure._timed(floor_times), "ours": ours, "eager": measure._timed([3.0])}
    measure._add_ratios(reports)
    found = [[report["ratio_by_round"][key] for key in ("low", "median", "high")] for report in reports.values()]
    assert found == [[1.0] * 3, [1 + number * 2**-7 for number in (4, 8, 12)], [3.0] * 3]


def hang(on_progress):
    time.sleep(600)


def is_killed(on_progress):
    on_progress("before")
    os.kill(os.getpid(), 9)


def test_a_process_that_hangs_is_late_or_is_killed_is_described(forked):
    with pytest.raises(process.Died, match="no answer for 1 s"):
        process.run_in_subprocess(hang, silence_s=1.0)
    with pytest.raises(process.Died, match=process.NOT_RUN):
        process.run_in_subprocess(hang, deadline=0.0)
    told = []
    with pytest.raises(process.Died, match="out of memory: the process was killed") as death:
        process.run_in_subprocess(is_killed, on_progress=lambda text, found: told.append(text))
    assert told == ["before"] == [death.value.last_message]


def test_who_kills_the_process_costs_itself_alone_and_what_was_found_in_time_is_kept():
    deaths = {"trl": "the process ended with 1", "eager": "CUDA error: an illegal memory access was encountered"}
    names, options = ["ours", "trl", "floor", "eager"], Options("cpu", 1, NEVER)

    def run(_, case, names, *others):
        for name in names:
            if name in deaths:
                raise process.Died(deaths[name], name)
        return dict.fromkeys(names, timed)

    def late(*_):
        raise process.Died(process.NOT_RUN, "trl", {name: {"title": name} for name in names} | {"ours": timed})

    timed = {"seconds": {"median": 1.0, "times": [1.0]}}
    found = measure.measure(TINY, names, options, run)["implementations"]
    assert list(found) == names and found["ours"]["seconds"] == found["floor"]["seconds"] == timed["seconds"]
    assert {name: found[name]["error"] for name in deaths} == deaths
    found = measure.measure(TINY, names, options, late)["implementations"]
    assert list(found) == names and found["ours"]["seconds"] == timed["seconds"]
    assert all(found[name]["error"] == process.NOT_RUN for name in names[1:])


def measure_with_a_slow_peer(case, names, options, begin, on_progress):
    slow = Implementation("slow", lambda *_: lambda inputs: time.sleep(600))
    measure.IMPLEMENTATIONS["trl"] = slow  # in this process alone
    return measure._measure(case, names, Options("cpu", 2, time.time() + 8), time.time(), on_progress)


def test_a_slow_peer_takes_half_of_what_is_left_and_all_others_have_a_time(forked):
    assert list(IMPLEMENTATIONS)[-1] == "compiled", "the first call that may take a minute comes last"
    names = ["ours", "trl", "floor", "eager"]

    def run(_, *given):
        return process.run_in_subprocess(measure_with_a_slow_peer, *given, silence_s=120.0)

    found = measure.measure(TINY, names, Options("cpu", 2, NEVER), run)["implementations"]
    assert list(found) == names
    assert found.pop("trl")["error"] == f"{process.NOT_RUN}, its first call took half of what was left"
    assert all(report["seconds"]["median"] > 0 and report["ratio_to_floor"] > 0 for report in found.values())


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_table_json_and_pictures(tmp_path, capfd):
    output, logits = tmp_path / "results" / "b.json", 512 * 16384 * 4
    options = ["--shapes", "512x32x16384", "--dtypes", "float32", "--against", "eager", "--device", "cpu"]
    assert main(["bench", *options, "--rounds", "2", "--output", str(output)]) == 0
    said = capfd.readouterr().out
    assert said.startswith("1 case\n") and "\n1/1 custom (512, 32, 16384), float32, step: ours, floor, eager\n" in said
    assert said.index("  ours: first call ") < said.index("  eager PyTorch: first call ") < said.index("median ms")
    document = json.loads(output.read_text())
    found = document["cases"][0]["implementations"]
    assert list(found) == ["ours", "floor", "eager"] and "peak_bytes" not in found["floor"]
    assert found["eager"]["peak_bytes"] > 2 * logits and found["ours"]["peak_bytes"] < 1.5 * logits
    assert document["environment"]["versions"]["torch"] == torch.__version__ and document["not_run"] == []


def test_without_time_every_case_is_listed(tmp_path, capfd):
    options = ["--set", "masks", "--minutes", "0.01", "--no-figures", "--output", str(tmp_path / "b.json")]
    assert main(["bench", "--device", "cpu", *options]) == 0
    said = capfd.readouterr().out
    assert said.count("\nnot run, out of time: ") == len(jobs("masks", "cpu"))
    assert said.startswith("12 cases, which end after 0.01 minutes with what is measured then\n")
    assert "out of time: 0 measurements of the cases above, 12 cases. --resume --minutes 0.02 measures again" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--shapes nothing:1", "expected HEAD:TOKENS"),
        ("--against nobody*", "'nobody*' is no implementation; there are ours"),
        ("--device tpu", "--device tpu"),
        ("--device mps", "expected cpu or cuda"),
        ("--shapes tiny:64 --set quick", "expected one of them"),
        ("--dtypes float32", "go with --shapes"),
        ("--shapes tiny:65", "multiple"),
    ],
)
def test_a_wrong_argument_is_named_before_any_work(options, words, tmp_path, capfd):
    assert main(["bench", *options.split(), "--output", str(tmp_path / "b.json")]) == 2
    assert words in capfd.readouterr().err and not list(tmp_path.iterdir())


def run_with(monkeypatch, measured, *options):
    """The command, for which `measured(case)` gives a report of ours."""
    monkeypatch.setattr(command, "measure", lambda case, *_: {"implementations": {"ours": measured(case)}})
    monkeypatch.setattr(command, "measure_peak_memory", lambda *_: {})
    fixed = ["--shapes", "tiny:64", "--against", "ours", "--exclude", "floor", "--no-figures", "--device", "cpu"]
    return main(["bench", *fixed, *options])


def test_a_failure_of_ours_is_an_exit_status(monkeypatch, tmp_path):
    for report, status in (
        ({"error": "wrong result: loss is off by nan"}, 1),
        ({"error": "out of memory: x"}, 0),
        ({"missing": "it serves cuda tensors"}, 0),
    ):
        assert run_with(monkeypatch, lambda case, r=report: dict(r), "--output", str(tmp_path / "b.json")) == status
    assert command.has_failed({"cases": [{"case": {}, "error": "x", "implementations": {}}]})


@pytest.mark.parametrize("cut", ["error", "memory_error"])
def test_a_run_goes_on_where_an_earlier_one_ended(monkeypatch, tmp_path, cut, capfd):
    done, output = [], tmp_path / "b.json"

    def measured(case):
        done.append(case.mode)
        return {"title": "ours"} | ({cut: process.NOT_RUN} if case.mode == "frozen" else {})

    options = ["--modes", *MODES, "--resume", "--output", str(output)]
    for expected in (list(MODES), ["frozen"]):  # time cut the second one short
        done.clear()
        assert run_with(monkeypatch, measured, *options) == 0 and done == expected
    document = json.loads(output.read_text())
    assert {found["case"]["mode"] for found in document["cases"]} == set(MODES)
    document["environment"]["versions"]["torch"] = "0.1"
    output.write_text(json.dumps(document))
    assert run_with(monkeypatch, measured, *options) == 2
    assert "measured otherwise (versions)" in capfd.readouterr().err


def test_pytest_bench_times_steps_and_groups_them_by_case(tmp_path):
    output = tmp_path / "b.json"
    options = ["--set", "host", "--device", "cpu", "-k", "forward", "--benchmark-max-time", "0.01"]
    command_line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "bench", *options]
    # pytest-benchmark times nothing in a process of pytest-xdist, which it knows by these.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command_line += [f"--benchmark-json={output}"]
    ended = subprocess.run(command_line, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert ended.returncode == 0, ended.stdout
    found = {one["params"]["name"]: one for one in json.loads(output.read_text())["benchmarks"]}
    assert set(found) == {"ours", "eager"}
    assert {one["group"] for one in found.values()} == {"custom (64, 16, 64), float32, forward"}
    assert all(one["stats"]["rounds"] >= 5 and one["stats"]["median"] > 0 for one in found.values())
    assert found["ours"]["extra_info"]["errors"]["logps_max"] < 1e-5

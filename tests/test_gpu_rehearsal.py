"""The GPU report end to end on a machine without a GPU: kernels hang, are wrong, lose the device, do not compile.

Probes are the real ones (gpu_rehearsal.py).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import NamedTuple

import gpu_items
import gpu_measure
import gpu_rehearsal
import gpu_report
import gpu_smoke
import gpu_stages
import gpu_tiles
import pytest
from gpu_stand_in import Machine, install, install_clock, statuses

SILENCE = 60.0  # seconds of gpu_stand_in.Clock
SIZES = ((3, 8, 40), (130, 16, 600))
PROCESSES = 12  # where nothing is broken
STAGES = ("build", "smoke", "headline", "core_tests")


class Scenario(NamedTuple):
    """What is broken; the strategies that are to be left out for it; words that have to be in the reason."""

    faults: dict[str, str]
    left_out: tuple[str, ...]
    words: tuple[str, ...]
    cuda: str = ""
    hangs: int = 0


CUDA = ("cuda/rows", "cuda/linear", "cuda/anchored")
SCENARIOS = {
    "nothing": Scenario({}, (), ()),
    "a hang": Scenario({":cuda/linear": "hang"}, ("cuda/linear",), ("silence", "3x8x40", "watchdog"), hangs=1),
    "wrong numbers": Scenario({":cuda/linear": "wrong"}, ("cuda/linear",), ("logps alone", "130x16x600")),
    "a lost device": Scenario({":cuda/anchored": "lose"}, ("cuda/anchored",), ("illegal memory access", "3x8x40")),
    "Triton does not compile": Scenario({":triton/linear": "compile"}, ("triton/linear",), ("constexpr has no cast",)),
    "the CUDA build fails": Scenario({}, CUDA, ("no CUDA kernels",), cuda="identifier 'x' is undefined"),
    "an image that does nothing": Scenario({":cuda/scale": "wrong"}, CUDA, ("cuda/load", "scale by 0.5 gave")),
    "half of it is broken": Scenario(
        {":cuda/rows": "wrong", ":triton/anchored": "lose", ":triton/linear": "compile"},
        (*CUDA, "triton/linear", "triton/anchored"), ("dhidden",),
    ),
    "a hang after first contact": Scenario(
        {"headline:cuda/anchored": "hang"}, ("cuda/anchored",), ("headline", "silence"), hangs=1
    ),
}  # fmt: skip


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    monkeypatch.setattr(gpu_items, "SILENCE", {"cuda": SILENCE, "triton": SILENCE})
    monkeypatch.setattr(gpu_tiles, "SIZES", dict.fromkeys(gpu_smoke.STRATEGIES, SIZES))
    monkeypatch.setattr(gpu_smoke, "FIRST_SIZES", SIZES[:1])
    monkeypatch.setattr(gpu_measure, "HEADS", (gpu_rehearsal.HEAD,))
    monkeypatch.setattr(gpu_measure, "PROFILED", gpu_rehearsal.HEAD)
    monkeypatch.setattr(gpu_measure.shutil, "which", lambda name, path=None: None)
    install_clock(tmp_path, monkeypatch, step=SILENCE)
    return install(tmp_path, monkeypatch)


def rehearse(machine: Machine, faults: dict[str, str], **changes) -> dict:
    return machine.report(start=functools.partial(gpu_rehearsal.start, faults, machine.folder), **changes)


def timed_names(report: dict) -> list[str]:
    return [fact["name"] for fact in report["stages"]["headline"]["measured"] if "milliseconds" in fact]


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_is_broken_is_named_and_left_out_and_the_rest_is_measured(name, machine):
    plan = SCENARIOS[name]
    machine.breaks(cuda=plan.cuda)
    report = rehearse(machine, plan.faults, stages=STAGES)
    assert set(report.get("left_out", {})) == set(plan.left_out)
    reasons = " ".join(report.get("left_out", {}).values())
    assert all(word in reasons for word in plan.words), reasons

    failed = {stage for stage, status in statuses(report).items() if status != "ok"}
    broken = {"build"} if plan.cuda else {"headline"} if "headline" in reasons else {"smoke"}
    assert failed == (broken if plan.left_out else set()) | ({"smoke"} if plan.cuda else set())
    assert gpu_report.passed(report) == (not plan.left_out)
    texts = gpu_report.summary(report, machine.settings.output)
    for strategy in plan.left_out:  # what goes with its backend is named by it
        assert strategy in texts or ("cuda/rows" in plan.left_out and strategy.startswith("cuda"))

    names, headline = timed_names(report), report["stages"]["headline"]["measured"]
    assert names[0] == "three products" and all(fact["milliseconds"] > 0 for fact in headline if "times" in fact)
    expected = [x for x in ("cuda/rows", "cuda/anchored", "triton/rows", "triton/anchored") if x not in plan.left_out]
    assert [x for x in names if "/" in x] == expected, "the headline of all that is left"
    for fact in headline:
        if fact.get("ran") and "/" in fact["name"]:
            assert {call.partition(".")[0] for call in fact["ran"]} == {fact["name"].partition("/")[0]}
    assert report["stages"]["core_tests"]["counts"]["PASSED"] >= 1
    assert len(machine.hangs()) == plan.hangs, "what hangs is not tried again"
    assert len(machine.calls("bench/gpu_probes.py")) <= PROCESSES + plan.hangs, "a fault costs one process at most"


def test_wrong_numbers_are_explained(machine):
    report = rehearse(machine, {":cuda/linear": "wrong", ":cuda/anchored": "wrong"}, stages=("build", "smoke"))
    probes = report["stages"]["smoke"]["probes"]
    assert probes["cuda/linear"]["sizes"]["3x8x40"]["ok"], "the fault is in the second tile"
    linear = "\n".join(text for fact in probes["cuda/linear"]["wrong"] for text in fact["wrong"])
    assert "only consumer warpgroup 1 of 2" in linear and "row 64 counts 344.0 of 600 columns" in linear
    assert "of these: only tile 1 of 3" in linear
    # Beside the sampled ids' own the other gradients are small: it takes a look at these alone to see them swapped.
    error = probes["cuda/anchored"]["sizes"]["130x16x600"]["error"]
    found = {name: float(x) for name, x in re.findall(r"(d\w+|dweight elsewhere) (\d\S+e-\d\d)", error)}
    assert found["dweight"] < 3e-2 and found["dhidden"] < 3e-2 < found["dweight elsewhere"]
    anchored = "\n".join(text for fact in probes["cuda/anchored"]["wrong"] for text in fact["wrong"])
    assert "stands column 3 for 2, row 0 for 0" in anchored and "first row 0, column 2" in anchored


def test_all_three_runs(machine):
    """Every stage, with faults in all backends at once; the second on a machine that is fresh, after repairs."""
    faults = {":cuda/linear": "lose", "headline:cuda/anchored": "wrong", "events:triton/anchored": "hang"}
    first = rehearse(machine, faults, stages=gpu_stages.RUNS[1].stages)
    assert set(first["left_out"]) == {"cuda/linear", "cuda/anchored", "triton/anchored"}
    whats = {(fact.get("backend"), fact["what"]) for fact in first["stages"]["events"]["measured"]}
    assert {("cuda", "single_pass"), ("cuda", "plan"), ("cuda", "scale"), ("triton", "linear_logp")} <= whats
    assert {(None, "copy"), (None, "dlogits W"), (None, "dlogits^T h, added in float32"), ("cuda", "groups")} <= whats
    assert first["stages"]["profile"]["steps"] and first["stages"]["profile"]["ncu"] == "not installed"
    assert first["stages"]["core_tests"]["counts"]["PASSED"] == 3, "of six in the core"

    machine.forget()
    second = rehearse(machine, {}, stages=gpu_stages.RUNS[2].stages, output=machine.folder / "second.json")
    assert len(machine.calls("bench/gpu_build.py")) == 2 and not second["left_out"] and gpu_report.passed(second)
    assert {"cuda/rows 16", "cuda/anchored 64"} <= {fact["name"] for fact in second["stages"]["sweep"]["measured"]}
    assert {"cuda/kept 4", "triton/kept 2"} <= {fact["name"] for fact in second["stages"]["kept"]["measured"]}
    assert second["stages"]["tests"]["counts"] == {"PASSED": 7}, "the core too, which this report has not seen"

    machine.forget()
    third = rehearse(machine, {}, stages=gpu_stages.RUNS[3].stages, output=machine.folder / "third.json")
    assert third["bench"]["cases"] and third["trl_step"]["steps"] and gpu_report.passed(third)


def test_a_resumed_report_on_a_fresh_machine_measures_what_it_says(machine):
    rehearse(machine, {}, stages=("build", "smoke"))
    machine.forget()
    report = rehearse(machine, {}, resume=True, only=("headline",))
    assert {"cuda/rows", "cuda/anchored", "ours"} <= set(timed_names(report))
    ran = {fact["name"]: set(fact["ran"]) for fact in report["stages"]["headline"]["measured"] if fact.get("ran")}
    assert "cuda.single_pass" in ran["cuda/rows"] and "cuda.anchored" in ran["cuda/anchored"]


def test_the_rehearsal_changes_nothing_of_the_report():
    default = dataclasses.fields(gpu_report.Settings)[-1]
    assert default.name == "start" and default.default is gpu_report.Settings().start
    assert Path(gpu_rehearsal.__file__).parent.name == "tests"

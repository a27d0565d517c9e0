"""bench/bars.py: the targets, and whether the set of measurements named after them measures every one."""

from __future__ import annotations

from dataclasses import asdict

import bars
import pytest

from grpo_kernels.benchmarks.cases import BARS, jobs, make_case
from grpo_kernels.benchmarks.implementations import select
from grpo_kernels.benchmarks.machine import OUT_OF_MEMORY, write

LONG, GIB = "65536x3584x151936", 2**30


def document(device, *cases):
    environment = {"device": device, "device_memory": 141 * GIB, "cpu": "", "date": "2026-01-31T"}
    return {"environment": environment, "cases": list(cases)}


def measured(found, shape=LONG, **fields):
    return {"case": asdict(make_case(shape, **fields)), "implementations": found}


def line(text, *words):
    (found,) = (line for line in text.splitlines() if all(word in line for word in words))
    return [cell.strip() for cell in found.split("|")[2:5]]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_target_is_measured_by_the_set_of_that_name(device):
    cases = []
    for job in jobs("targets", device):
        names = select(job.against)
        memory = {"peak_bytes": 1.0}
        times = {"ours_to_this": 1.0, "ratio_to_floor": 1.0, "errors": {"logps_max": 1.0}}
        weighed = names if device == "cuda" else select(job.memory) if job.memory else []
        found = {n: (times if job.timed else {}) | (memory if n in weighed else {}) for n in names}
        cases.append({"case": asdict(job.case), "implementations": found})
    for bar in BARS[device]:
        assert bars.value_of(bar, document(device, *cases)), bar


def test_a_target_is_met_missed_or_not_measured():
    found = {"ours": {"peak_bytes": 10 * GIB}, "trl": {"peak_bytes": 9 * GIB}, "eager": {"peak_bytes": 100 * GIB}}
    text = bars.report(document("NVIDIA H200", measured(found)))
    assert line(text, f"{LONG} bfloat16, mode step: memory to trl") == ["1.11", "1", "MISSED"]
    assert line(text, f"{LONG} bfloat16, mode step: memory to eager") == ["0.1", "0.125", "met"]
    assert line(text, f"{LONG} bfloat16, mode frozen: memory to trl") == ["", "1", "not measured"]


def test_what_runs_out_of_memory_needs_more_than_the_device_has():
    lost = {"error": f"{OUT_OF_MEMORY}: OutOfMemoryError: CUDA out of memory"}
    text = bars.report(document("NVIDIA H200", measured({"ours": {"peak_bytes": 141 * GIB // 10}, "eager": lost})))
    assert line(text, f"{LONG} bfloat16, mode step: memory to eager")[2] == "met"
    text = bars.report(document("NVIDIA H200", measured({"ours": lost, "eager": {"peak_bytes": GIB}})))
    assert line(text, f"{LONG} bfloat16, mode step: memory to eager")[2] == "not measured"


def test_the_report_of_a_gpu_holds_all_that_the_targets_need(tmp_path, capsys):
    step = {"FusedGRPOTrainer": {"of_trl": 0.9, "peak_bytes": 2}, "TRL": {"of_trl": 1.0, "peak_bytes": 1}}
    case = measured({"ours": {}, "floor": {"ours_to_this": 1.07}}, "llama-3-8b:16384")
    write(tmp_path / "gpu.json", {
        "environment": {}, "stages": {}, "targets": document("NVIDIA H200", case),
        "trl_step": {"steps": {"dapo": step}},
    })  # fmt: skip
    bars.main([str(tmp_path / "gpu.json")])
    text = capsys.readouterr().out
    assert line(text, "16384x4096x128256 bfloat16: time to floor") == ["1.07", "1.08", "met"]
    assert line(text, "TRL's step, time")[2] == "met" and line(text, "TRL's step, memory")[2] == "MISSED"

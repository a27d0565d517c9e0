"""What the hardware would allow, against known numbers and real calls; bench/bars.py, the targets."""

from __future__ import annotations

from dataclasses import asdict

import bars
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from grpo_kernels.benchmarks import limits
from grpo_kernels.benchmarks.cases import BARS, MODES, jobs, make_case
from grpo_kernels.benchmarks.implementations import IMPLEMENTATIONS, select
from grpo_kernels.benchmarks.inputs import make_inputs
from grpo_kernels.benchmarks.limits import DEVICES, predict
from grpo_kernels.benchmarks.machine import OUT_OF_MEMORY, write

H200 = DEVICES["H200"]
LLAMA = "llama-3-8b:16384"


def test_the_floor_is_the_flops_over_the_rate_and_a_copy_more_than_bandwidth_allows_is_slower():
    case = make_case(LLAMA)
    floor = predict(case, H200, "floor")
    assert floor.flops == 6 * 16384 * 4096 * 128256
    assert floor.seconds == pytest.approx(floor.flops / 790e12, rel=0.02)
    slow = H200._replace(terabytes_per_second=1e-3)
    assert predict(case, slow, "floor").seconds == pytest.approx(floor.bytes / 1e9, rel=1e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["eager", "floor"])
def test_flops_are_those_of_a_call(name, mode):
    case = make_case("64x32x512", "float32", mode=mode)
    inputs = make_inputs(case, torch.device("cpu"))
    step = IMPLEMENTATIONS[name].make_step(inputs, mode)
    with FlopCounterMode(display=False) as counter:
        step(inputs)
    assert counter.get_total_flops() == predict(case, H200, "floor").flops == predict(case, H200).flops


def test_the_table_of_a_device(capsys):
    limits.main(["--device", "H200", "--shapes", LLAMA])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("llama-3-8b (16384, 4096, 128256), bfloat16, step on NVIDIA H200")
    assert next(line for line in lines if line.startswith("| floor")).split("|")[-2].strip() == "1.00"
    assert any(line.startswith("| sparse, 64 pairs") for line in lines)


def test_pairs_cost_a_row_of_an_operand_each():
    case = make_case(LLAMA)
    few, many = (predict(case, H200, "sparse", pairs=pairs) for pairs in (32, 256))
    assert few.flops == many.flops == predict(case, H200, "floor").flops / 3
    assert many.bytes - few.bytes == 2 * 16384 * (256 - 32) * 4096 * 2
    frozen = make_case(LLAMA, mode="frozen")
    assert predict(frozen, H200, "sparse", pairs=32).seconds < few.seconds


def test_a_teacher_costs_its_product_and_reads_of_both_rows():
    case = make_case(LLAMA)
    product = 2 * 16384 * 4096 * 128256
    for way in ("floor", "rows"):
        like, wide = (predict(case, H200, way, teacher=width) for width in (1, 4))
        assert like.flops - predict(case, H200, way).flops == product and wide.flops - like.flops == 3 * product
    assert predict(case, H200, teacher=1).bytes - predict(case, H200).bytes > 3 * 16384 * 128256 * 4


# --- bench/bars.py ----------------------------------------------------------------------------------------------------


LONG, GIB = "65536x3584x151936", 2**30


def document(device, *cases):
    environment = {"device": device, "device_memory": 141 * GIB, "cpu": "", "date": "2026-01-31T"}
    return {"environment": environment, "cases": list(cases)}


def case_of(found, shape=LONG, **fields):
    return {"case": asdict(make_case(shape, **fields)), "implementations": found}


def line(text, *words):
    (found,) = (line for line in text.splitlines() if all(word in line for word in words))
    return [cell.strip() for cell in found.split("|")[2:5]]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_target_is_measured_by_a_set(device):
    cases = []
    for job in [*jobs("targets", device), *jobs("teacher", device)]:
        names = select(job.against)
        memory = {"peak_bytes": 1.0}
        times = {"ours_to_this": 1.0, "ratio_to_floor": 1.0, "errors": {"logps_max": 1.0}}
        weighed = names if device == "cuda" else select(job.memory) if job.memory else []
        found = {n: (times if job.timed else {}) | (memory if n in weighed else {}) for n in names}
        cases.append({"case": asdict(job.case), "implementations": found})
    for bar in BARS[device]:
        assert bars.value_of(bar, document(device, *cases)), bar


def test_a_target_is_met_missed_or_not_case_of():
    found = {"ours": {"peak_bytes": 10 * GIB}, "trl": {"peak_bytes": 9 * GIB}, "eager": {"peak_bytes": 100 * GIB}}
    text = bars.report(document("NVIDIA H200", case_of(found)))
    assert line(text, f"{LONG} bfloat16, mode step: memory to trl") == ["1.11", "1", "MISSED"]
    assert line(text, f"{LONG} bfloat16, mode step: memory to eager") == ["0.1", "0.125", "met"]
    assert line(text, f"{LONG} bfloat16, mode frozen: memory to trl") == ["", "1", "not measured"]


def test_what_runs_out_of_memory_needs_more_than_the_device_has():
    lost = {"error": f"{OUT_OF_MEMORY}: OutOfMemoryError: CUDA out of memory"}
    text = bars.report(document("NVIDIA H200", case_of({"ours": {"peak_bytes": 141 * GIB // 10}, "eager": lost})))
    assert line(text, f"{LONG} bfloat16, mode step: memory to eager")[2] == "met"
    text = bars.report(document("NVIDIA H200", case_of({"ours": lost, "eager": {"peak_bytes": GIB}})))
    assert line(text, f"{LONG} bfloat16, mode step: memory to eager")[2] == "not measured"


def test_the_report_of_a_gpu_holds_all_that_the_targets_need(tmp_path, capsys):
    step = {"FusedGRPOTrainer": {"of_trl": 0.9, "peak_bytes": 2}, "TRL": {"of_trl": 1.0, "peak_bytes": 1}}
    found = {"ours": {}, "floor": {"ours_to_this": 1.07}}
    case = case_of(found, "llama-3-8b:16384")
    write(tmp_path / "gpu.json", {
        "environment": {}, "stages": {}, "targets": document("NVIDIA H200", case),
        "trl_step": {"steps": {"dapo": step}},
        "teacher": document("NVIDIA H200", case_of(found, "llama-3-8b:16384", divergence="reverse_kl")),
    })  # fmt: skip
    bars.main([str(tmp_path / "gpu.json")])
    text = capsys.readouterr().out
    assert line(text, "16384x4096x128256 bfloat16: time to floor") == ["1.07", "1.08", "met"]
    assert line(text, "16384x4096x128256 bfloat16, divergence reverse_kl: time to floor") == ["1.07", "1.12", "met"]
    assert line(text, "TRL's step, time")[2] == "met" and line(text, "TRL's step, memory")[2] == "MISSED"

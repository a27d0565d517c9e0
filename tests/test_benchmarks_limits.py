"""grpo_kernels/benchmarks/limits.py: the model against known numbers and against real calls."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from grpo_kernels.benchmarks import limits
from grpo_kernels.benchmarks.cases import MODES, make_case
from grpo_kernels.benchmarks.implementations import IMPLEMENTATIONS
from grpo_kernels.benchmarks.inputs import make_inputs
from grpo_kernels.benchmarks.limits import DEVICES, predict

H200 = DEVICES["H200"]
LLAMA = "llama-3-8b:16384"


def test_the_floor_is_the_flops_over_the_rate_and_a_copy_more_than_bandwidth_allows_is_slower():
    case = make_case(LLAMA)
    floor = predict(case, H200, "floor")
    assert floor.flops == 6 * 16384 * 4096 * 128256
    assert floor.seconds == pytest.approx(floor.flops / 790e12, rel=0.02)
    slow = H200._replace(terabytes_per_second=1e-3)
    assert predict(case, slow, "floor").seconds == pytest.approx(floor.bytes / 1e9, rel=1e-3)


def test_the_row_pass_is_what_a_step_takes_beyond_its_products():
    for shape, of_floor in ((LLAMA, 1.053), ("qwen2.5-1.5b:16384", 1.135)):
        case = make_case(shape)
        ours, floor = predict(case, H200), predict(case, H200, "floor")
        assert ours.flops == floor.flops and ours.seconds / floor.seconds == pytest.approx(of_floor, abs=5e-3)
        assert floor.seconds < ours.seconds


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

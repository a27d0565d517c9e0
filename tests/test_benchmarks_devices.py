"""grpo_kernels/benchmarks/devices.py: named devices are found, the one that is here is measured."""

from __future__ import annotations

import json

import pytest
import torch

from grpo_kernels.benchmarks import devices
from grpo_kernels.benchmarks.cases import make_case
from grpo_kernels.benchmarks.devices import DEVICES, find_device, measured
from grpo_kernels.benchmarks.limits import predict, predictions, ways


def test_this_machine_is_measured() -> None:
    case = make_case("64x64x512", "float16")
    device = find_device("cpu", case)
    assert device is measured(torch.device("cpu"), torch.float16, 64, 512)  # kept
    assert device.type == "cpu"
    assert 1e8 < device.flops["float16"] < 1e14
    assert 1e8 < device.bandwidth < 1e13
    assert 1e-8 < device.launch < 1e-3
    document = json.loads(json.dumps(predictions(case, torch.device("cpu"))))
    assert set(document["ways"]) == set(ways(case, device))
    assert document["ways"]["floor"]["seconds"] == predict(case, device, "floor").seconds


def test_rates_are_work_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_seconds", lambda work, device: 0.5)
    device = measured.__wrapped__(torch.device("cpu"), torch.float32, 64, 512)
    assert device.flops == {"float32": 3 * 2 * 512 * 64 * 512 / 0.5}  # 512 hidden states
    assert device.bandwidth == 2 * devices._COPIED / 0.5
    assert device.launch == 0.5 / devices._SMALL_LAUNCHES


def test_known_devices_are_found_by_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("64x64x512", "bfloat16")
    assert find_device("H100", case) is find_device("NVIDIA H100 80GB HBM3", case) is DEVICES["H100"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert find_device("cuda:1", case) is DEVICES["H200"]
    with pytest.raises(ValueError, match=r"'NVIDIA GH200 480GB'; expected cpu, cuda or one of H200"):
        find_device("NVIDIA GH200 480GB", case)

"""Both gates can fail: planted numbers. Triton's kernels serve any number of rows without a second compilation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import compile_gate
import cuda_gate
import pytest
import torch
from budget import Found
from compile_cases import CASES

from grpo_kernels.kernels.launch import architecture

ROOT = Path(__file__).resolve().parents[1]
ROWS, PRODUCT = "gk_rows_f32", "gk_fused_logp_bf16"


def test_what_is_complained_of():
    matmul = Found(168, 97, 0, {"HGMMA": 0, "HMMA": 64}, multiplies=True)
    large = [(("c", target), Found(64, 0, 164 * 1024, {})) for target in ("sm_80", "sm_90")]
    lines = compile_gate.complaints({("a", "sm_90"): matmul, **dict(large)})
    assert "no HGMMA" in lines[0] and "97 spills, a product may have 96" in lines[1]
    assert lines[2:] == ["c on sm_80: shared 167936, a block has 166912"]
    assert len(compile_gate.uncovered({"rows.kernel", "linear.kernel"}, [("rows.kernel: fp32", "sm_90")])) == 1
    kinds = dict.fromkeys(cuda_gate.PRODUCT_INSTRUCTIONS, 4)
    found = {
        (ROWS, "sm_80"): Found(64, 2, 0, {"I2FP.F32.U32": 1}),
        (ROWS, "sm_90a"): Found(64, 0, 0, {}),
        (PRODUCT, "sm_90a"): Found(168, 0, 0, kinds | {"UTMALDG": 0, "HGMMA.BF16": 4}),
        ("gk_fused_logp_f16", "sm_90a"): Found(168, 0, 0, kinds | {"HGMMA.BF16": 4}),
    }
    said = ("2 spills", "2^24 is the last", "no UTMALDG", "the other 16-bit type")
    for line, words in zip(cuda_gate.complaints(found), said, strict=True):
        assert words in line


OTHERS_LIKE = {"sm_80": [87], "sm_100": [103, 110]}  # with as much shared memory


@pytest.mark.parametrize("name", [name for name, target in compile_gate.TARGETS.items() if target.backend == "cuda"])
def test_a_gpu_takes_the_row_that_is_compiled_for_it(name, monkeypatch):
    target = compile_gate.TARGETS[name]
    monkeypatch.setattr("torch.version.hip", None)
    for number in (target.arch, *OTHERS_LIKE.get(name, [])):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device, number=number: divmod(number, 10))
        assert architecture(torch.device("cuda")) == target.launch, number


def printed_by(script: str, *arguments: str) -> Any:
    """Returns the JSON that a script of tests/ prints where Triton is no interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "tests" / script), *arguments]
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def test_another_number_of_rows_compiles_nothing_anew():
    """One key per kernel for 1, 16, 17 and 4,096 rows, wherever a chunk begins: no graph can compile."""
    keys = printed_by("compile_gate.py", "--keys")
    assert set(keys) == set(CASES)
    assert {f"{kernel} in {case}": n for case, found in keys.items() for kernel, n in found.items() if n != 1} == {}
    assert {kernel for found in keys.values() for kernel in found} >= {
        "rows.gradient_kernel",
        "exponentials.rows_kernel",
    }


def test_a_graph_or_an_odd_batch_compiles_nothing_after_a_warm_up():
    assert not {call: kernels for call, kernels in printed_by("call_keys.py").items() if kernels}

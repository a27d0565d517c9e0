"""Both gates can fail: planted numbers. Triton's kernels serve any number of rows without a second compilation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import budget
import compile_gate
import cuda_gate
import pytest
import torch
from budget import Found
from compile_cases import CASES
from cuda_gate import TARGETS

from grpo_kernels.kernels.launch import architecture

ROOT = Path(__file__).resolve().parents[1]
ROWS, PRODUCT = "gk_rows_f32", "gk_exponentials_bfloat16"
NUMBERS = Found(64, 0, 128, {"LDG.128": 8})
GOOD = {(ROWS, "sm_80"): NUMBERS, (ROWS, "sm_90a"): NUMBERS}


@pytest.mark.parametrize(("changes", "said"), [
    (dict(registers=63, shared=0, instructions={"LDG.128": 1, "HMMA": 1}), None),
    (dict(registers=65), "registers 65, budget 64"),
    (dict(shared=256), "shared 256, budget 128"),
    (dict(spills=2), "spills 2, budget 0"),
    (dict(instructions={}), "no LDG.128"),
])  # fmt: skip
def test_numbers_are_held_to_the_budget(changes, said, tmp_path):
    file = tmp_path / "budget.json"
    assert budget.hold(GOOD, file, "NVRTC 1", TARGETS, write=True) == []
    changed = {**GOOD, (ROWS, "sm_90a"): NUMBERS._replace(**changes)}
    lines = budget.hold(changed, file, "NVRTC 1", TARGETS, write=False)
    assert lines == ([] if said is None else lines[:1]) and all(f"{ROWS} on sm_90a: {said}" in line for line in lines)


def test_kernels_and_budget_belong_together(tmp_path):
    file, (only, other) = tmp_path / "budget.json", [{name: numbers} for name, numbers in GOOD.items()]
    budget.hold(GOOD, file, "NVRTC 1", TARGETS, write=True)
    (line,) = budget.hold(only, file, "NVRTC 1", TARGETS, write=False)
    assert f"has {ROWS} on sm_90a, which is not compiled" in line
    assert budget.hold(only, file, "NVRTC 1", ["sm_80"], write=False) == []  # the others were not asked for
    (line,) = budget.hold(GOOD | {("gk_new", "sm_80"): NUMBERS}, file, "NVRTC 1", TARGETS, write=False)
    assert "gk_new on sm_80: not in the budget" in line
    assert budget.hold(other, file, "NVRTC 1", ["sm_90a"], write=True) == []
    assert set(json.loads(file.read_text())["kernels"][ROWS]) == {"sm_80", "sm_90a"}


def test_what_no_budget_allows():
    matmul = Found(168, 0, 0, {"HGMMA": 0, "HMMA": 64}, multiplies=True)
    rows = Found(64, 3, 0, {}, multiplies=False)
    tiles = [(("c", target), Found(64, 0, 101 * 1024, {})) for target in ("sm_80", "sm_89", "sm_90", "sm_120")]
    lines = compile_gate.complaints({("a", "sm_90"): matmul, ("b", "sm_90"): rows, **dict(tiles)})
    assert ["no HGMMA" in lines[0], "3 spills" in lines[1]] == [True, True]
    said = [f"c on {target}: shared 103424, a block has 101376" for target in ("sm_89", "sm_120")]
    assert lines[2:] == said
    assert len(compile_gate.uncovered({"rows.kernel", "linear.kernel"}, [("rows.kernel: fp32", "sm_90")])) == 1
    kinds = dict.fromkeys(cuda_gate.PRODUCT_INSTRUCTIONS, 4)
    found = {
        (ROWS, "sm_80"): Found(64, 2, 0, {"I2FP.F32.U32": 1}),
        (ROWS, "sm_90a"): Found(64, 0, 0, {}),
        (PRODUCT, "sm_90a"): Found(168, 4, 0, kinds | {"UTMALDG": 0, "HGMMA.BF16": 4}),
        ("gk_exponentials_float16", "sm_90a"): Found(168, 0, 0, kinds | {"HGMMA.BF16": 4}),
    }
    said = ("2 spills", "2^24 is the last", "no UTMALDG", "the other 16-bit type")
    for line, words in zip(cuda_gate.complaints(found), said, strict=True):
        assert words in line


OTHERS_LIKE = {"sm_80": [87], "sm_89": [86], "sm_100": [103, 110], "sm_120": [121]}  # with as much shared memory


@pytest.mark.parametrize("name", [name for name, target in compile_gate.TARGETS.items() if target.backend == "cuda"])
def test_a_gpu_takes_the_row_that_is_compiled_for_it(name, monkeypatch):
    target = compile_gate.TARGETS[name]
    monkeypatch.setattr("torch.version.hip", None)
    for number in (target.arch, *OTHERS_LIKE.get(name, [])):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device, number=number: divmod(number, 10))
        assert architecture(torch.device("cuda")) == target.launch, number


def test_another_number_of_rows_compiles_nothing_anew():
    """One key per kernel for 1, 16, 17 and 4,096 rows, wherever a chunk begins: no graph can compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "tests/compile_gate.py"), "--keys"]
    keys = json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)
    assert set(keys) == set(CASES)
    assert {f"{kernel} in {case}": n for case, found in keys.items() for kernel, n in found.items() if n != 1} == {}
    assert {kernel for found in keys.values() for kernel in found} >= {"rows.single_pass_kernel", "tokens.group_kernel"}

"""The compile gate can fail: planted numbers. Kernels are launched as they were compiled, for any number of rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import compile_gate
import pytest
import triton
from compile_cases import CASES
from compile_gate import Found, complaints, leftovers, new_budget, uncovered

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS.parent / "tools"))

from kernel_build.host import find_compiler  # noqa: E402

ROWS, MATMUL = ("rows.single_pass_kernel: fp32", "sm_90"), ("linear.product_kernel: bf16", "sm_90")
GOOD = {
    ROWS: Found(registers=64, spills=0, shared=128, instructions={"LDG.128": 8}, multiplies=False),
    MATMUL: Found(registers=168, spills=4, shared=200_000, instructions={"HGMMA": 16, "UTMALDG": 4}, multiplies=True),
}
BUDGET = new_budget(GOOD, {})


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (ROWS, {}, None),
        (ROWS, {"registers": 63, "shared": 0}, None),
        (ROWS, {"registers": 65}, "registers 65, budget 64"),
        (ROWS, {"shared": 256}, "shared 256, budget 128"),
        (ROWS, {"spills": 2}, "spills 2, budget 0"),
        (ROWS, {"instructions": {}}, "no LDG.128"),
        (MATMUL, {"spills": 0, "instructions": {"HGMMA": 1, "UTMALDG": 1, "LDG.128": 2}}, None),
        (MATMUL, {"registers": 169}, "registers 169, budget 168"),
        (MATMUL, {"spills": 5}, "spills 5, budget 4"),
        (MATMUL, {"instructions": {"HGMMA": 16}}, "no UTMALDG"),
        # whatever the budget says
        (ROWS, {"spills": 3}, "3 spills; 2 are the most"),
        (MATMUL, {"instructions": {"HMMA": 64, "HGMMA": 0}}, "no HGMMA, its matrix product"),
    ],
)
def test_numbers_are_held_to_the_budget(name, changes, said):
    lines = complaints({**GOOD, name: GOOD[name]._replace(**changes)}, BUDGET)
    assert all(line.startswith(f"{name[0]} on sm_90: ") for line in lines)
    assert any(said in line for line in lines) if said else not lines


def test_kernels_cases_and_budget_belong_together():
    (line,) = complaints({**GOOD, ("rows.new_kernel: fp32", "sm_80"): GOOD[ROWS]}, BUDGET)
    assert "rows.new_kernel: fp32 on sm_80: not in the budget" in line
    (line,) = leftovers([ROWS], BUDGET, ["sm_80", "sm_90"])
    assert "linear.product_kernel: bf16 on sm_90" in line
    assert leftovers([ROWS], BUDGET, ["sm_80"]) == [], "a target that was not asked for"
    assert uncovered({"rows.single_pass_kernel"}, GOOD) == []
    (line,) = uncovered({"rows.single_pass_kernel", "linear.fused_kernel"}, GOOD)
    assert line.startswith("linear.fused_kernel is launched by no case")


def test_a_new_budget_keeps_the_targets_that_were_not_compiled():
    old = {ROWS[0]: {"sm_80": {"registers": 1}, "sm_90": {"registers": 1}}, "gone": {"sm_90": {"registers": 1}}}
    budget = new_budget({**GOOD, (ROWS[0], "gfx942"): GOOD[ROWS]}, old)
    assert budget[ROWS[0]]["sm_80"] == {"registers": 1}
    assert budget[ROWS[0]]["sm_90"]["registers"] == 64
    assert "gfx942" not in budget[ROWS[0]] and "gone" not in budget
    assert json.loads(compile_gate.budget_text("3.9", budget)) == {"triton": "3.9", "kernels": budget}


def test_a_triton_without_a_budget_is_refused_before_anything_is_compiled(monkeypatch, capsys):
    monkeypatch.setattr("triton.__version__", "9.9.0")
    monkeypatch.setattr(compile_gate, "compile_all", lambda *_: pytest.fail("compiled"))
    assert compile_gate.gate(["sm_80"], write=False) == 2
    assert "Triton 9.9.0 has no budget; there are triton-3.9" in capsys.readouterr().err


def test_the_interpreter_is_refused():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, compile_gate.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "TRITON_INTERPRET" in done.stderr


def without_interpreter(*arguments: str, **variables: str) -> Any:
    """What triton_launches.py prints, from JSON."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    environment["PYTHONPATH"] = os.pathsep.join([str(compile_gate.ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(TESTS / "triton_launches.py"), *arguments]
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def test_tritons_launcher_hands_over_what_each_kernel_takes(tmp_path):
    """Down to cuLaunchKernelEx, in a libcuda that runs nothing: named tuples are taken apart as they were compiled."""
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    library = tmp_path / "libcuda.so.1"
    command = [*find_compiler(), "-shared", "-fPIC", f"-I{include}", TESTS / "driver/triton_libcuda.cpp", "-o", library]
    subprocess.run(command, check=True)
    folder = str(tmp_path)
    libraries = os.pathsep.join(filter(None, [folder, os.environ.get("LD_LIBRARY_PATH")]))
    quick = {"TRITON_CACHE_DIR": folder, "DISABLE_PTXAS_OPT": "1"}  # nobody looks at the code
    launched = without_interpreter("launches", folder, LD_LIBRARY_PATH=libraries, **quick)
    assert {name for name, numbers in launched.items() if not numbers} == set()
    assert {name: pair for name, numbers in launched.items() for pair in numbers if pair[0] != pair[1]} == {}
    assert "rows.single_pass_kernel" in launched


def test_another_number_of_rows_compiles_nothing_anew():
    """One key per kernel for 1, 16, 17 and 4,096 rows, wherever a chunk begins: no graph can compile."""
    keys = without_interpreter("keys")
    assert set(keys) == set(CASES)
    assert {f"{kernel} in {case}": n for case, found in keys.items() for kernel, n in found.items() if n != 1} == {}
    assert {kernel for found in keys.values() for kernel in found} >= {"rows.single_pass_kernel", "plan.order_kernel"}

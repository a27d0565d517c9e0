"""The gate of the CUDA kernels can fail: planted numbers, nothing is compiled here."""

from __future__ import annotations

import pytest
from cuda_gate import (
    GPUS,
    NOT_LAUNCHED,
    Code,
    Found,
    Launch,
    complaints,
    leftovers,
    mismatches,
    new_budget,
    occupancy,
    read_code,
    read_launches,
)

ROWS, PRODUCT = ("gk_fused_f32_bf16", "sm_80"), ("gk_exponentials_bfloat16", "sm_90a")
GOOD = {
    ROWS: Found(Code(64, 0, 128, {"LDG.128": 8}), Launch(256, 1024, 1), 0.5),
    PRODUCT: Found(Code(168, 4, 1024, {"HGMMA": 4, "UTMALDG": 3}), Launch(384, 230464, 2), 0.19),
}
BUDGET = new_budget(GOOD)


def complaints_after(name: tuple[str, str], occupied: float | None = None, **changes: object) -> list[str]:
    before = GOOD[name]
    after = before._replace(code=before.code._replace(**changes))
    if occupied is not None:
        after = after._replace(occupancy=occupied)
    return complaints({**GOOD, name: after}, BUDGET)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (ROWS, {"registers": 63, "shared": 0, "occupied": 0.6}, None),
        (PRODUCT, {"spills": 0}, None),
        (ROWS, {"registers": 65}, "registers 65, budget 64"),
        (ROWS, {"shared": 256}, "shared 256, budget 128"),
        (ROWS, {"instructions": {}}, "no LDG.128"),
        (ROWS, {"occupied": 0.4}, "occupancy 0.40, budget 0.5"),
        (PRODUCT, {"registers": 169}, "registers 169, budget 168"),
        (PRODUCT, {"spills": 5}, "spills 5, budget 4"),
        # whatever the budget says
        (ROWS, {"spills": 2}, "2 spills"),
        (ROWS, {"occupied": 0.0}, "a multiprocessor cannot hold one block"),
        (ROWS, {"instructions": {"LDG.128": 8, "I2FP.F32.U32": 1}}, "2^24 is the last that float32 counts"),
        (PRODUCT, {"instructions": {"HGMMA": 16, "UTMALDG": 0}}, "no UTMALDG"),
        (PRODUCT, {"instructions": {"UTMALDG": 3}}, "no HGMMA"),
    ],
)
def test_numbers_are_held_to_the_budget(name, changes, said):
    lines = complaints_after(name, **changes)
    assert all(line.startswith(f"{name[0]} on {name[1]}: ") for line in lines)
    assert any(said in line for line in lines) if said else not lines


def test_a_kernel_that_a_device_does_not_launch_may_have_no_room():
    not_launched = {ROWS: GOOD[ROWS]._replace(occupancy=0.0, launch=NOT_LAUNCHED)}
    assert complaints(not_launched, new_budget(not_launched)) == []


def test_launches_kernels_and_budget_belong_together():
    (line,) = complaints({**GOOD, ("gk_new", "sm_80"): GOOD[ROWS]}, BUDGET)
    assert "gk_new on sm_80: not in" in line
    assert leftovers(GOOD, BUDGET) == []
    (line,) = leftovers([ROWS], BUDGET)
    assert f"has {PRODUCT[0]} on sm_90a, which is not compiled" in line
    assert mismatches(GOOD, GOOD) == []
    assert mismatches([ROWS, PRODUCT], [ROWS]) == [f"{PRODUCT[0]} is launched by no call in driver/launches.cpp"]
    assert mismatches([(ROWS[0], "sm_90a")], [ROWS, (ROWS[0], "sm_90a")]) == [
        f"{ROWS[0]} is launched on sm_80, and is not there"
    ]


@pytest.mark.parametrize(
    ("code", "launch", "gpu", "expected"),
    [
        (Code(32, 0, 0, {}), Launch(256, 0, 1), "sm_80", 1),
        (Code(33, 0, 0, {}), Launch(256, 0, 1), "sm_80", 0.75),  # 40 registers per thread: 6 blocks
        (Code(64, 0, 0, {}), Launch(1024, 0, 1), "sm_89", 2 / 3),
        (Code(32, 0, 0, {}), Launch(32, 0, 1), "sm_80", 0.5),  # 32 blocks
        (Code(32, 0, 0, {}), Launch(256, 100 << 10, 1), "sm_80", 0.125),
        (Code(168, 0, 1024, {}), Launch(384, 230464, 1), "sm_90a", 12 / 64),
        (Code(168, 0, 2048, {}), Launch(384, 232448, 1), "sm_90a", 0),
        (Code(64, 0, 0, {}), NOT_LAUNCHED, "sm_80", 0),
    ],
)
def test_occupancy(code, launch, gpu, expected):
    """Against NVIDIA's calculator."""
    assert occupancy(code, launch, GPUS[gpu]) == pytest.approx(expected)


USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function gk_a:
  REG:23 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:616 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function gk_b:
  REG:168 STACK:8 SHARED:0 LOCAL:0 CONSTANT[0]:616 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
CODE = """
\t.section\t.text.gk_a,"ax",@progbits
.text.gk_a:
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/                   STG.E desc[UR4][R2.64], R4 ;
\t.section\t.text.gk_b,"ax",@progbits
.text.gk_b:
        /*0000*/                   STL [R1], R4 ;
        /*0010*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0020*/                   LDL R4, [R1] ;
"""


def test_the_output_of_the_tools():
    assert read_code(USAGE, CODE) == {"gk_a": Code(23, 0, 1024, {"LDG.128": 1}), "gk_b": Code(168, 2, 0, {"HGMMA": 1})}
    assert read_launches("gk_a 256 0 1\ngk_b 384 1024 2\ngk_a 128 8 1\n") == {
        "gk_a": Launch(256, 0, 1), "gk_b": Launch(384, 1024, 2)
    }  # fmt: skip

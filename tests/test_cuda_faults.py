"""Faults planted in the CUDA kernels (cuda_faults.txt), each behind a switch of one module: with one of them on it is
caught by the checks of the other tests, or by the emulator, as `pytest -rP tests/test_cuda_faults.py` prints. With none
on the checks pass, under the sanitizers.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import kernel_checks as c
import pytest
import test_objective_kernel as objective
import torch
from emulator import ROOT, Emulated, build_module, build_sanitized, few_types, load
from test_lm_head_kernels import ORDERS, assert_exact, make_head

from grpo_kernels.config import GRPOConfig

PAIR = (torch.float32, torch.bfloat16)


class Fault(NamedTuple):
    number: int  # the value of the switch that plants it
    file: str
    name: str
    caught_by: str
    before: str
    after: str

    @property
    def check(self) -> Callable[[Emulated], None]:
        """Those checks of `check_all` that the file's kernels can fail."""
        if self.file.startswith("lm_head"):
            return check_products
        own = {"rows": check_rows, "scale": check_scale, "objective": check_objective}
        own |= dict.fromkeys(("exponentials", "repair"), check_exponentials)
        return own.get(self.file.removesuffix(".cuh"), check_all)

    @property
    def switched(self) -> str:
        """BEFORE, or AFTER where the switch has the fault's number."""
        if ";" in self.before:
            return f"if (gk_planted == {self.number}) {{ {self.after}\n}} else {{ {self.before}\n}}"
        return f"(gk_planted == {self.number} ? ({self.after}) : ({self.before}))"


def read_faults() -> list[Fault]:
    faults, file = [], ""
    for line in Path(__file__).with_name("cuda_faults.txt").read_text().splitlines():
        if line.startswith("["):
            file = line.strip("[]")
        elif line and not line.startswith("#"):
            name, caught_by, change = re.split(r" \|(?= )", line.replace("\\n", "\n"), maxsplit=2)
            before, after = change[1:].split(" => ")
            after = after.removesuffix("(nothing)")
            faults.append(Fault(len(faults) + 1, file, name, caught_by.strip(), before, after))
    return faults


def check_rows(kernels: Emulated, orders=ORDERS[:4]) -> None:
    for order in orders:
        kernels.use(order=order)
        c.check_rows(kernels, 5003, PAIR, shift=order, biased=order % 2 == 0)
        c.check_in_place(kernels, 5003, PAIR, shift=order)
    c.check_extremes(kernels, PAIR)
    c.check_absent_and_zero_gradient(kernels, PAIR)


def check_exponentials(kernels: Emulated, orders=ORDERS[:4]) -> None:
    for order in orders:
        kernels.use(order=order)
        dtype = (torch.float32, torch.bfloat16)[order % 2]
        c.check_exponentials(kernels, 2601, dtype=dtype, shift=order, biased=order // 2 % 2 == 0)


def check_scale(kernels: Emulated, orders=ORDERS[:4]) -> None:
    for order in orders:
        kernels.use((90, 1), order)
        for dtype, shift in zip(c.DTYPES, (3, 7, 0), strict=True):
            c.check_scale(kernels, dtype, 60001, shift)
        c.check_scale_rows(kernels, 2051, PAIR, is_product=True, shift=order)


def check_objective(kernels: Emulated, orders=objective.ORDERS) -> None:
    for case in (
        objective.Case(GRPOConfig(beta=0.1, delta=1.5), packed=True, bare=False, lengths=objective.LONG),
        objective.not_finite("clip", "k3"),
        objective.not_finite("cispo", "none"),
    ):
        objective.check(kernels, case, orders)


def check_all(kernels: Emulated) -> None:
    check_rows(kernels)
    check_exponentials(kernels)
    check_scale(kernels)
    check_objective(kernels)


def check_products(kernels: Emulated, orders=ORDERS) -> None:
    assert kernels.items_cover(5, 7, 2, 2)
    for order in orders:
        for rows, width, vocab, multiprocessors in [(140, 330, 600, 4), (270, 100, 600, 1), (60, 24, 600, 132)]:
            kernels.use((90, multiprocessors), order)
            assert_exact(kernels, make_head(rows, width, vocab))


def plant(folder: Path) -> None:
    """Copies csrc with every fault of cuda_faults.txt behind the switch, the number gk_planted."""
    few_types(ROOT / "csrc", folder, "f32, bf16")
    declaration = 'extern "C" __attribute__((visibility("default"))) int gk_planted;\n'
    for fault in read_faults():
        file = folder / "cuda" / fault.file
        text = file.read_text()
        count = text.count(fault.before)
        assert count == 1, f"{fault.file} holds this {count} times: {fault.before}"
        file.write_text(declaration + text.replace(fault.before, fault.switched))
    with (folder / "cuda" / "host.cpp").open("a") as host:
        host.write(declaration + "int gk_planted = 0;\n")


@pytest.fixture(scope="module")
def module(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("csrc")
    plant(folder)
    return build_module(folder)


def complaint(module: Path, fault: Fault) -> str:
    """What the checks say of the fault, "" for nothing. In a process of its own: a fault may well corrupt it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        try:
            return pool.submit(run_check, module, fault).result()
        except BrokenProcessPool:
            return "a crash"


def run_check(module: Path, fault: Fault) -> str:
    torch.set_num_threads(1)  # the threads of the parent are not here
    try:
        kernels = load(module)
        ctypes.c_int.in_dll(kernels.controls, "gk_planted").value = fault.number
        fault.check(kernels)
        return ""
    except (AssertionError, RuntimeError, ValueError) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == c.__file__]
        where = " > ".join(frame.name for frame in frames)
        return f"{where}: {' '.join(str(error).split()) or error!r}"


@pytest.mark.usefixtures("unwritten_is_nan")  # here: each fork would import the compiler for this switch, for 1 s
@pytest.mark.parametrize("fault", read_faults(), ids=lambda fault: fault.name)
def test_fault_is_found(fault, module):
    said = complaint(module, fault)
    print(f"{fault.name}: {said[:160]}")
    assert said
    assert fault.caught_by in said


UNDER_SANITIZERS = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
from pathlib import Path
import triton_interpreter
triton_interpreter.install()
from test_cuda_faults import check_exponentials, check_objective, check_products, check_rows, check_scale, load
kernels = load(Path(sys.argv[1]))
for check in (check_exponentials, check_objective, check_rows, check_scale, check_products):
    check(kernels, (3,))
print("all checks passed")
"""


def test_under_sanitizers(tmp_path):
    """Address and undefined-behaviour sanitizers see every access of the kernels. Without a fault nothing is found."""
    plant(tmp_path)
    module, environment = build_sanitized(tmp_path)
    command = [sys.executable, "-c", UNDER_SANITIZERS, str(module)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks passed" in done.stdout

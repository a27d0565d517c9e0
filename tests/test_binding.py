"""The binding of the compiled modules (python/arguments.h): arguments, errors, references, and Python's lock."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from grpo_kernels import _cpu

NO_TEACHER = (None, 0, 0, None, 0, 0.0, 1.0, 0.0, None, None, None, None)


def arguments(rows: int = 1, vocab: int = 8) -> list[object]:
    """Of `stats`: the fields of gk::RowArgs and gk::TeacherArgs, and one thread."""
    logits, ids, temperature = torch.randn(rows, vocab), torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
    logp, lse, entropy = torch.zeros(rows), torch.zeros(rows, dtype=torch.float64), torch.zeros(rows)
    unused = (None, None, None, 0, 0)
    row = (logits, 0, vocab, rows, vocab, None, ids, 0, None, temperature, logp, lse, entropy, *unused, 1.0, 0.0)
    return [*row, *NO_TEACHER, 1]


def test_tensors_and_their_addresses_are_the_same_to_it():
    given = arguments()
    addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in given]
    lse = given[11]
    for each in (given, addresses):
        lse.zero_()
        assert _cpu.stats(*each) is None
        assert torch.allclose(lse, given[0].double().logsumexp(-1), atol=1e-6)


WRONG = {
    "too few": (lambda x: x[:5], ValueError, "got 5 arguments, read 5"),
    "too many": (lambda x: [*x, 1], ValueError, "got 34 arguments, read 33"),
    "no address": (lambda x: ["logits", *x[1:]], AttributeError, "data_ptr"),
    "no integer": (lambda x: [*x[:2], 2.5, *x[3:]], TypeError, "argument 3: 2.5 does not fit"),
    "no number": (lambda x: [*x[:18], "1.0", *x[19:]], TypeError, "argument 19: '1.0' does not fit a C\\+\\+ float"),
    "a negative address": (lambda x: [-5, *x[1:]], TypeError, "argument 1: -5 does not fit"),
    "an address of 65 bits": (lambda x: [2**64, *x[1:]], TypeError, f"argument 1: {2**64} does not fit"),
}
# Integers that the type of logits (int32), their stride (int64) and the number of threads (int) do not hold.
BEYOND = {1: (2**31, -(2**31) - 1, 2**63), 2: (2**63, -(2**63) - 1), 32: (2**31, -(2**31) - 1, 2**63)}
WRONG |= {
    f"argument {i + 1} is {n}": (
        lambda x, i=i, n=n: [*x[:i], n, *x[i + 1 :]],
        TypeError,
        f"argument {i + 1}: {n} does not fit",
    )
    for i, integers in BEYOND.items()
    for n in integers
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_raise_before_anything_runs_and_keep_no_reference(wrong):
    change, error, said = WRONG[wrong]
    given = arguments()
    counts = [sys.getrefcount(x) for x in given]
    for _ in range(3):
        with pytest.raises(error, match=said):
            _cpu.stats(*change(given))
    assert not given[11].any()
    _cpu.stats(*given)
    assert [sys.getrefcount(x) for x in given if isinstance(x, torch.Tensor)] == [
        count for count, x in zip(counts, given, strict=True) if isinstance(x, torch.Tensor)
    ]


def test_exceptions_of_cpp_are_python_s():
    with pytest.raises(ValueError, match="2\\^31 kept ids and more in one call"):
        _cpu.gathered_dweight(None, 0, 0, None, None, None, 2**31, 1, 1, None, 0, 0, False, 1)
    with pytest.raises(TypeError):
        _cpu.set_cpu_isa(1)
    assert _cpu.set_cpu_isa("no such set") is False and _cpu.cpu_isa() in ("avx512", "avx2", "baseline")
    with pytest.raises(TypeError, match="incompatible function arguments"):
        _cpu.uses_openmp(1)


def test_other_threads_run_beside_a_kernel():
    """Python itself takes the lock from nobody here: another thread runs only where the kernel releases it."""
    given, before, go, ran = arguments(4, 100_000), sys.getswitchinterval(), threading.Event(), []

    def run():
        go.wait()
        ran.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    sys.setswitchinterval(1000.0)
    try:
        go.set()
        for _ in range(1000):
            _cpu.stats(*given)
            if ran:
                break
        assert ran
    finally:
        sys.setswitchinterval(before)
        thread.join()

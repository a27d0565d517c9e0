"""Kernels of rows, called directly, against float64: every element type, odd shapes and addresses. Compiled for each
instruction set of a CPU, in Triton's interpreter, and on an emulated GPU in several orders of its threads.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gathered_checks
import kernel_checks as c
import pytest
import torch
from emulator import H200
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_kernels import _cpu  # the tests need the compiled module: a skip would hide that it is missing
from grpo_kernels.kernels import get_backend
from grpo_kernels.kernels.compiled.base import DTYPES
from grpo_kernels.kernels.compiled.cpu import load, usable_isas
from grpo_kernels.kernels.fused_objective import ESTIMATORS, SURROGATES
from grpo_kernels.kernels.operations import Backend, PolicyTransform, TokenIdPairs
from grpo_kernels.kernels.torch import rows as torch_rows
from grpo_kernels.kernels.triton import scale as triton_scale
from grpo_kernels.names import DIVERGENCES

CPU, reason = load()
assert CPU is not None, reason
TRANSFORMS = (c.PLAIN, PolicyTransform(logit_scale=0.25), PolicyTransform(logit_scale=1.5, softcap=5.0))


@contextlib.contextmanager
def instruction_set(name: str) -> Iterator[Backend]:
    before = _cpu.cpu_isa()
    assert _cpu.set_cpu_isa(name)
    try:
        yield CPU
    finally:
        _cpu.set_cpu_isa(before)


ISAS = list(usable_isas())
of_cpu = pytest.mark.parametrize("kernels", ISAS, indirect=True)
without_cuda = pytest.mark.parametrize("kernels", [*ISAS, "triton"], indirect=True)  # whose table has others' there


@pytest.fixture(params=[*ISAS, "torch", "triton", "cuda"])
def kernels(request, monkeypatch):
    """Triton's with few blocks per row: the interpreter's time goes by the number of operations."""
    if request.param in ISAS:
        with instruction_set(request.param) as kernels:
            yield kernels
    elif request.param == "triton":
        kernels = get_backend("triton")
        from grpo_kernels.kernels.launch import LAUNCHES

        interpreter = LAUNCHES["interpreter"]
        monkeypatch.setitem(LAUNCHES, "interpreter", interpreter._replace(rows=interpreter.rows._replace(block=256)))
        yield kernels
    else:
        yield request.getfixturevalue("emulated") if request.param == "cuda" else get_backend(request.param)


def in_turn(kernels, values, turn: int, triton: int = 1, cuda: int = 1) -> Iterator[tuple[int, object]]:
    """(i, value), in another order of threads each; for these kernels one of so many."""
    every = {"triton": triton, "cuda": cuda}.get(kernels.name, 1)
    for i, value in enumerate(values):
        if kernels.name == "cuda":
            kernels.use(order=(i + turn) % 4)  # the lowest warp first, the highest first, two random ones
        if i % every == turn % every:
            yield i, value


# --- interface ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the processor is known from Linux")
def test_instruction_sets_are_those_of_the_processor():
    facts = Path("/proc/cpuinfo").read_text()
    flags = set(re.search(r"^(?:flags|Features)\s*: (.*)$", facts, re.MULTILINE)[1].split())
    avx2 = {"avx2", "fma", "f16c"}
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    needed = {"avx512": avx512, "avx2": avx2, "baseline": set()}
    assert [name for name, wanted in needed.items() if wanted <= flags] == ISAS


ISA_FROM_ENVIRONMENT = """
import os
from grpo_kernels import _cpu
from grpo_kernels.kernels.compiled.cpu import load

for os.environ["GRPO_KERNELS_CPU_ISA"] in ("bogus", "baseline"):  # read until it names one
    backend, reason = load()
    print(backend and _cpu.cpu_isa(), reason)
"""


def test_isa_from_the_environment():
    command = [sys.executable, "-c", ISA_FROM_ENVIRONMENT]
    refused, taken = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert refused.startswith("None") and "GRPO_KERNELS_CPU_ISA" in refused
    assert "'bogus' is unknown or not available here; usable: " in refused
    assert taken.split() == ["baseline"]
    assert not _cpu.set_cpu_isa("bogus")


@pytest.mark.parametrize(
    ("file", "enumeration", "names"),
    [
        ("layout.h", "DType", [str(x).removeprefix("torch.") for x in DTYPES]),
        ("cpu/api.h", "Divergence", DIVERGENCES),
        ("cuda/api.h", "Surrogate", SURROGATES),
        ("cuda/api.h", "Estimator", ESTIMATORS),
    ],
)
def test_codes_are_those_of_csrc(file, enumeration, names):
    source = (Path(__file__).parents[1] / "csrc" / file).read_text()
    listed = re.search(rf"enum {enumeration} : int32_t {{ (.*?) }};", source)[1]
    assert listed.split(", ") == ["k" + name.title().replace("_", "") for name in names]


def test_a_module_of_another_interface_is_not_used(monkeypatch):
    monkeypatch.setattr(_cpu, "INTERFACE", -1)
    found, reason = load()
    assert found is None and "build again" in reason


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", c.DTYPES)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_rows(kernels, dtype, transform):
    """With gradients of every type that a backend has, or for Triton each vocabulary once. Every address and order of
    threads comes up for each type."""
    turn = 3 * TRANSFORMS.index(transform) + c.DTYPES.index(dtype)
    for i, vocab in in_turn(kernels, c.VOCABS, turn, triton=9):
        gradients = {
            "cpu": c.DTYPES,
            "torch": c.DTYPES,
            "triton": [c.DTYPES[i % 3 - 1]],
            "cuda": [gradient for logits, gradient in c.PAIRS if logits == dtype],
        }
        for gradient in gradients[kernels.name]:
            c.check_rows(kernels, vocab, (dtype, gradient), transform, shift=(i + turn) % 8, biased=i % 2 == 1)


@pytest.mark.parametrize("kernels", ["triton", "cuda"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transform", [*TRANSFORMS, PolicyTransform(softcap=100.0)], ids=str)
def test_exponentials(kernels, dtype, transform):
    turn = 2 * [*TRANSFORMS, PolicyTransform(softcap=100.0)].index(transform) + c.DTYPES.index(dtype)
    for i, vocab in in_turn(kernels, c.VOCABS, turn, triton=12, cuda=6):
        c.check_exponentials(kernels, vocab, transform, dtype, shift=(i + turn) % 8, biased=i % 2 == 1)


@pytest.mark.parametrize("pair", c.PAIRS, ids=str)
def test_gradient_over_the_logits(kernels, pair):
    for i, vocab in in_turn(kernels, c.VOCABS, c.PAIRS.index(pair), triton=3):
        c.check_in_place(kernels, vocab, pair, shift=i % 5)


@pytest.mark.parametrize("pair", c.PAIRS, ids=str)
def test_extreme_absent_and_zero_gradient_rows(kernels, pair):
    c.check_extremes(kernels, pair)
    if kernels.name != "torch":  # whose gathers take no id outside the vocabulary
        c.check_absent_and_zero_gradient(kernels, pair)


def test_logp_is_as_accurate_as_torch(kernels):
    c.check_accuracy(kernels)


def test_a_sampled_id_that_is_nearly_certain(kernels):
    c.check_near_certain(kernels)


@of_cpu
def test_threads_change_no_bit(kernels):
    logits, ids = c.make_logits(37, 4099, torch.float32)
    ones = torch.ones(37)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            stats, grad = c.statistics(kernels, logits, ids, ones), torch.empty_like(logits)
            c.gradient(kernels, logits, grad, ids, ones, stats, ones, 0.1 * ones)
            results.append((*stats, grad))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        c.check_equal(result, results[0])


FORKED = """
import os, sys
import torch
sys.path.insert(0, "tests")
import kernel_checks as c
from grpo_kernels import _cpu
from grpo_kernels.kernels import get_backend

torch.set_num_threads(2)
backend = get_backend("cpu")
logits, ids = c.make_logits(37, 4099, torch.float32)
ones = torch.ones(37)
stats = c.statistics(backend, logits, ids, ones)
gradients = torch.empty(2, *logits.shape)

def compute(i):
    c.gradient(backend, logits, gradients[i], ids, ones, stats, ones, ones)

compute(0)
assert _cpu.uses_openmp()
child = os.fork()
if child == 0:  # without operators of torch, which would wait for its threads
    compute(1)
    first, second = gradients.numpy()
    os._exit(0 if not _cpu.uses_openmp() and first.tobytes() == second.tobytes() else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_threads_are_those_of_torch_but_after_a_fork():
    """A forked process has none of OpenMP's threads, and would wait for them without end."""
    root = Path(__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, cwd=root)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("kernels", [*ISAS, "cuda"], indirect=True)
@pytest.mark.parametrize("dtype", c.DTYPES[1:])
def test_sixteen_bit_conversion(kernels, dtype):
    c.check_sixteen_bits(kernels, dtype, every=37 if kernels.name == "cuda" else 1)


# --- scaling --------------------------------------------------------------------------------------------------------


class Float32Products(TorchDispatchMode):
    """On a GPU torch rounds a factor to the type that it multiplies in: on a CPU the types are looked at instead."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mul, torch.ops.aten.mul_):
            assert args[0].dtype == args[1].dtype == torch.float32
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernels", [ISAS[0], "torch", "triton", "cuda"], indirect=True)
@pytest.mark.parametrize("dtype", c.DTYPES)
def test_scale(kernels, dtype, monkeypatch):
    """A product in float32, of blocks or programs that take several turns each."""
    for module, name, size in (
        (triton_scale, "BLOCK_SIZE", 32), (triton_scale, "REST_SIZE", 8), (triton_scale, "MAX_PROGRAMS", 3),
        (torch_rows, "SCALED_AT_ONCE", 7),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, size)
    of_torch = kernels.scale is get_backend("torch").scale
    with Float32Products() if of_torch else contextlib.nullcontext():
        kernels.scale(torch.ones(95, dtype=dtype), torch.tensor(0.3))
    kernels.scale(torch.empty(0, 4, dtype=dtype), torch.tensor(2.0))
    if kernels.name != "cuda":
        for count in (95, 1000):
            c.check_scale(kernels, dtype, count, shift=3, keeps_nan=not of_torch)
        return
    for device, order in ((H200, 1), ((90, 1), 2)):
        kernels.use(device, order)
        for count, shift in ((1, 0), (7, 3), (8, 8), (101, 1), (4096, 5), (8193, 7), (60001, 2)):
            c.check_scale(kernels, dtype, count, shift)
    assert kernels.largest_grid() == 4
    kernels.use()
    kernels.scale(torch.empty(2**16), torch.tensor(1.0))
    assert kernels.largest_grid() == 16  # as many as there are tiles


@pytest.mark.parametrize("kernels", ["torch", "triton", "cuda"], indirect=True)
@pytest.mark.parametrize(
    ("dtypes", "is_product"),
    [((torch.float32, torch.bfloat16), True), ((torch.float32,) * 2, True), ((torch.bfloat16,) * 2, False)],
)
def test_scale_rows(kernels, dtypes, is_product):
    """More columns than a program or block takes at once, in any place."""
    for shift, width in enumerate((1, 8, 65, 72) if kernels.name != "cuda" else (1, 72, 2051, 4100)):
        c.check_scale_rows(kernels, width, dtypes, is_product, shift)


# --- kept ids -------------------------------------------------------------------------------------------------------


@without_cuda
@pytest.mark.parametrize("dtype", c.DTYPES)
def test_allowed_ids(kernels, dtype):
    """On a CPU with both types of gradients at every width."""
    turn = 2 * c.DTYPES.index(dtype)
    for _, width in in_turn(kernels, gathered_checks.GATHERED_WIDTHS, turn, triton=6):
        for wide in (False, True):
            gathered_checks.check_gathered(kernels, width, dtype, wide=wide, shift=width % 5)


@without_cuda
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_of_allowed_ids(kernels, dtype):
    gathered_checks.check_allowed_ids(kernels, dtype)


@of_cpu
@pytest.mark.parametrize("dtype", c.DTYPES)
@pytest.mark.parametrize("shift", [0, 1])
def test_a_dweight_that_is_written_has_the_bits_of_one_added_to_zeros(kernels, dtype, shift):
    """At any address; the columns between its rows stay as they are."""
    tokens, vocab, width = 64, 900, 96
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=g).to(dtype)
    ids = torch.randint(vocab, (tokens * 40,), generator=g, dtype=torch.int32)
    ids[::5], ids[1], ids[2] = -1, 0, vocab - 1
    pairs = TokenIdPairs(ids, torch.arange(tokens, dtype=torch.int32).repeat_interleave(40))
    dlogits = torch.randn(len(ids), generator=g)
    buffer = torch.full((vocab + 1, width + 32), 7.5, dtype=dtype)
    dweight = buffer.view(-1)[shift:][: vocab * (width + 32)].view(vocab, width + 32)[:, :width]
    added = torch.zeros(vocab, width, dtype=dtype)
    kernels.gathered_dweight(dlogits, hidden, pairs, dweight, add=False)
    kernels.gathered_dweight(dlogits, hidden, pairs, added, add=True)
    assert torch.equal(dweight, added)
    assert added[ids[ids >= 0].long()].any(1).all()
    dweight.fill_(7.5)
    assert (buffer == 7.5).all()


@pytest.mark.parametrize("dtype", c.DTYPES)
def test_allowed_ids_in_torch(monkeypatch, dtype):
    """In pieces of less than a row, and all at once."""
    from grpo_kernels.kernels.torch import gathered

    gathered_checks.check_allowed_ids(get_backend("torch"), torch.int32)

    for piece, wide in ((64, False), (2**24, True)):
        monkeypatch.setattr(gathered, "BLOCK_ELEMENTS", piece)
        gathered_checks.check_gathered(get_backend("torch"), 131, dtype, wide=wide)

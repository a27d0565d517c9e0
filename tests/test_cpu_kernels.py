"""Row kernels, called directly: every element type, instruction set and odd shape; Triton's too."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import kernel_checks as c
import pytest
import torch

from grpo_kernels import contract, names
from grpo_kernels.backends import get_backend
from grpo_kernels.backends.compiled import cpu as cpu_backend
from grpo_kernels.names import KernelParams

backend, reason = cpu_backend.load()
assert backend is not None, reason  # the tests need the compiled module: a skip would hide that it is missing


def usable_isas() -> list[str]:
    found = []
    for name in ("avx512", "avx2", "baseline"):
        try:
            backend.module.set_cpu_isa(name)
            found.append(name)
        except ValueError:
            pass
    backend.module.set_cpu_isa(found[0])
    return found


@pytest.fixture(params=usable_isas())
def isa(request):
    before = backend.module.cpu_isa()
    backend.module.set_cpu_isa(request.param)
    yield request.param
    backend.module.set_cpu_isa(before)


@pytest.fixture(params=[*usable_isas(), "triton"])
def kernels(request, monkeypatch):
    """The compiled kernels with each instruction set, and Triton's.

    Those in about eight blocks per row: the interpreter's time goes by the number of operations.
    """
    if request.param == "triton":
        triton = get_backend("triton")
        from grpo_kernels.backends.launch import RowLaunch
        from grpo_kernels.backends.triton import rows

        def blocks(kernel, device, vocab, dtype):
            return RowLaunch(32, max(64, 1 << (vocab // 8).bit_length()), 1)

        monkeypatch.setattr(rows, "row_launch", blocks)
        yield triton
        return
    before = backend.module.cpu_isa()
    backend.module.set_cpu_isa(request.param)
    yield backend
    backend.module.set_cpu_isa(before)


# --- interface ------------------------------------------------------------------------------------------------------


def test_module_was_built_with_the_names_of_python():
    assert backend.module.INTERFACE == names.INTERFACE


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the processor is known from Linux")
def test_instruction_sets_are_those_of_the_processor():
    facts = Path("/proc/cpuinfo").read_text()
    flags = set(re.search(r"^(?:flags|Features)\s*: (.*)$", facts, re.MULTILINE)[1].split())
    avx2 = {"avx2", "fma", "f16c", "movbe", "bmi1", "bmi2", "abm"}
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    needed = {"avx512": avx512, "avx2": avx2, "baseline": set()}
    assert usable_isas() == [name for name, wanted in needed.items() if wanted <= flags]


ISA_FROM_ENVIRONMENT = """
import os
from grpo_kernels.backends.compiled.cpu import load

for os.environ["GRPO_KERNELS_CPU_ISA"] in ("bogus", "baseline"):  # read until it names one
    backend, reason = load()
    print(backend and backend.module.cpu_isa(), reason)
"""


def test_isa_from_the_environment():
    command = [sys.executable, "-c", ISA_FROM_ENVIRONMENT]
    refused, taken = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert refused.startswith("None") and "GRPO_KERNELS_CPU_ISA" in refused and "bogus" in refused
    assert taken.split() == ["baseline"]
    with pytest.raises(ValueError, match="'bogus' is unknown or not available here; usable: "):
        backend.module.set_cpu_isa("bogus")


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", c.DTYPES)
@pytest.mark.parametrize("options", [{}, {"logit_scale": 0.25}, {"softcap": 5.0, "logit_scale": 1.5}])
def test_rows(kernels, dtype, options):
    """With gradients of every type and every vocabulary, or where that takes long each vocabulary once."""
    every, turn = kernels is backend, 3 * len(options) + c.DTYPES.index(dtype)
    for i, vocab in enumerate(c.VOCABS):
        if every or i % 9 == turn:
            for grad_dtype in c.DTYPES if every else (c.DTYPES[i % 3 - 1],):
                given = vocab, (dtype, grad_dtype), KernelParams(**options)
                c.check_rows(kernels, *given, shift=i % 7, biased=i % 2 == 1, exact_objective=False)


@pytest.mark.parametrize("pair", c.PAIRS, ids=str)
def test_gradient_over_the_logits(kernels, pair):
    for vocab in c.VOCABS if kernels is backend else c.VOCABS[c.PAIRS.index(pair) :: 3]:
        c.check_in_place(kernels, vocab, pair)


@pytest.mark.parametrize("pair", c.PAIRS, ids=str)
def test_extreme_absent_and_zero_gradient_rows(kernels, pair):
    c.check_extremes(kernels, pair)
    c.check_absent_and_zero_gradient(kernels, pair)


def test_logp_is_as_accurate_as_torch(kernels):
    c.check_accuracy(kernels)


def test_threads_change_no_bit(isa):
    logits, ids = c.make_logits(37, 4099, torch.float32)
    table, params = c.make_table(37, weight_entropy=0.1), KernelParams(has_old=False)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            grad = torch.empty_like(logits)
            results.append((*c.single_pass(backend, logits, grad, ids, table, params), grad))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


FORKED = """
import os, sys
import torch
sys.path.insert(0, "tests")
import kernel_checks as c
from grpo_kernels.backends import get_backend
from grpo_kernels.names import KernelParams

torch.set_num_threads(2)
backend = get_backend("cpu")
logits, ids = c.make_logits(37, 4099, torch.float32)
table = c.make_table(37, weight_entropy=0.1)

gradients = torch.empty(2, *logits.shape)

def compute(i):
    c.single_pass(backend, logits, gradients[i], ids, table, KernelParams(has_old=False))

compute(0)
assert backend.module.uses_openmp()
child = os.fork()
if child == 0:  # without operators of torch, which would wait for its threads
    compute(1)
    first, second = gradients.numpy()
    os._exit(0 if not backend.module.uses_openmp() and first.tobytes() == second.tobytes() else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_threads_are_those_of_torch_but_after_a_fork():
    """A forked process has none of OpenMP's threads, and would wait for them without end."""
    root = Path(__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, cwd=root)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("dtype", c.DTYPES[1:])
def test_sixteen_bit_conversion(isa, dtype):
    c.check_sixteen_bits(backend, dtype)


# --- kept ids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", c.DTYPES)
def test_kept_ids(kernels, dtype):
    """With both types of gradients at every width, or where that takes long some of each."""
    every = kernels is backend
    for i, width in enumerate(c.KEPT_WIDTHS):
        if every or i % 3 == c.DTYPES.index(dtype):
            for wide in (False, True) if every else (i > 2,):
                c.check_kept(kernels, width, dtype, wide=wide, shift=width % 5)


@pytest.mark.parametrize("dtype", c.DTYPES)
@pytest.mark.parametrize("shift", [0, 1])
def test_a_dweight_larger_than_the_caches(isa, dtype, shift):
    """Written past them where rows are whole lines of memory (shift 0), it has the bits of one added to zeros; the
    columns between its rows stay as they are."""
    tokens, vocab, width = 64, 90_000, 96  # 17 MB in 16 bits
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=g).to(dtype)
    ids = torch.randint(vocab, (tokens * 40,), generator=g, dtype=torch.int32)
    ids[::5], ids[1], ids[2] = -1, 0, vocab - 1
    pairs = contract.KeptPairs(ids, torch.arange(tokens, dtype=torch.int32).repeat_interleave(40))
    dlogits = torch.randn(len(ids), generator=g)
    buffer = torch.full((vocab + 1, width + 32), 7.5, dtype=dtype)
    dweight = buffer.view(-1)[shift:][: vocab * (width + 32)].view(vocab, width + 32)[:, :width]
    added = torch.zeros(vocab, width, dtype=dtype)
    backend.kept_dweight(dlogits, hidden, pairs, dweight, add=False)
    backend.kept_dweight(dlogits, hidden, pairs, added, add=True)
    assert torch.equal(dweight, added)
    assert added[ids[ids >= 0].long()].any(1).all()
    dweight.fill_(7.5)
    assert (buffer == 7.5).all()


@pytest.mark.parametrize("dtype", c.DTYPES)
def test_kept_ids_in_torch(monkeypatch, dtype):
    """In pieces of less than a row, and all at once."""
    from grpo_kernels.backends.pytorch import kept

    for piece, wide in ((64, False), (2**24, True)):
        monkeypatch.setattr(kept, "PIECE_ELEMENTS", piece)
        c.check_kept(get_backend("torch"), 131, dtype, wide=wide)

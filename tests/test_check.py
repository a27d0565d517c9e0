"""`grpo-kernels check`: it passes here, and fails for a backend that is wrong in any way that it promises to see."""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest
import torch
from test_cuda_backend import forget

from grpo_kernels import kernels as backends
from grpo_kernels.commands import check
from grpo_kernels.commands.cli import main
from grpo_kernels.config import AGGREGATIONS, KL_ESTIMATORS, SURROGATE_RULES
from grpo_kernels.kernels.torch.backend import TORCH

PAIRS = sum(len(rule.levels) for rule in SURROGATE_RULES.values())  # of a surrogate and a level
EVERYTHING = PAIRS * len(KL_ESTIMATORS)


@pytest.fixture(autouse=True, scope="module")
def cached():
    """Inputs and exact results, which are the same for every backend, once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "compare_eager", functools.cache(check.compare_eager))
        yield


def test_every_variant_has_its_turn():
    everything = check.variants()
    assert len(everything) == EVERYTHING and {v.aggregation for v in everything} == set(AGGREGATIONS)
    assert {v[:2] for v in everything} == {(s, level) for s, rule in SURROGATE_RULES.items() for level in rule.levels}
    assert {v.kl for v in everything} == set(KL_ESTIMATORS)
    quick = check.variants(quick=True)
    assert {v[:2] for v in quick} == {v[:2] for v in everything} and {v.kl for v in quick} == set(KL_ESTIMATORS)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_right_backend_passes(capsys, backend):
    threads = torch.get_num_threads()
    assert main(["check", "--quick", "--backend", backend]) == 0
    text = capsys.readouterr().out
    assert text.startswith("grpo_kernels ") and text.endswith("all is well\n")
    lines = re.findall(rf"^{backend} +cpu +(\w+) +{PAIRS} +\S+ +\S+ +\S+  ok ", text, flags=re.MULTILINE)
    assert lines == ["float32", "bfloat16", "float16"]
    assert torch.get_num_threads() == threads


def broken_table(fault: str):
    """The plain backend in the place of another, with one fault."""

    def statistics(chunk):
        if fault == "exception":
            raise RuntimeError("kernel 'statistics' cannot be launched")
        TORCH.statistics(chunk)
        if fault == "metric":
            chunk.stats.entropy.mul_(1.01)

    def gradient(chunk, dlogp, dentropy, out):
        TORCH.gradient(chunk, dlogp, 0 * dentropy if fault == "no entropy" else dentropy, out)
        if fault == "scaled gradient":
            out.dlogits.mul_(1.0 + 1e-5 if out.dlogits.dtype == torch.float32 else 1.02)

    return dataclasses.replace(TORCH, name="cpu", statistics=statistics, gradient=gradient)


@pytest.fixture
def broken(monkeypatch):
    def install(fault: str) -> None:
        entry = backends._REGISTRY["cpu"]._replace(load=lambda: (broken_table(fault), ""))
        monkeypatch.setitem(backends._REGISTRY, "cpu", entry)
        forget()

    yield install
    monkeypatch.undo()
    forget()


FAULTS = ("nothing", "scaled gradient", "no entropy", "metric", "exception")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_backend_fails(broken, capsys, fault):
    broken(fault)
    status = main(["check", "--quick", "--backend", "cpu"])
    if fault == "nothing":
        assert status == 0, "the plain backend in its place is right"
        return
    assert status == 1
    text = capsys.readouterr().out
    assert re.search(r"^cpu +cpu +float32 .*FAILED", text, flags=re.MULTILINE) and "lines failed" in text
    if fault == "exception":
        assert "clip/token/none/seq_mean: RuntimeError: kernel 'statistics' cannot be launched" in text
    if fault in ("scaled gradient", "no entropy"):  # worse than rounding to 16 bits is
        assert text.count("FAILED") >= 2


def test_a_backend_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(check, "unavailable_reason", lambda name, device: "it is elsewhere")
    assert main(["check", "--backend", "cuda"]) == 1
    assert capsys.readouterr().out.endswith("backend 'cuda' is not available: it is elsewhere\n")

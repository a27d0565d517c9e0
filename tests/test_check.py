"""`grpo-kernels check`: it passes here, and fails for a backend that is wrong in any way that it promises to see."""

from __future__ import annotations

import functools
import math
import re

import pytest
import torch
from test_cuda_backend import forget

from grpo_kernels import backends
from grpo_kernels.backends.pytorch.backend import TorchBackend
from grpo_kernels.commands import check
from grpo_kernels.commands.cli import main
from grpo_kernels.config import AGGREGATIONS, SURROGATE_RULES
from grpo_kernels.names import KL_ESTIMATORS

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


@pytest.mark.parametrize(("backend", "variants"), [("cpu", EVERYTHING), ("torch", PAIRS), ("cuda", PAIRS)])
def test_a_right_backend_passes(capsys, backend, variants):
    threads = torch.get_num_threads()
    assert main(["check", *(["--quick"] if variants == PAIRS else []), "--backend", backend]) == 0
    text = capsys.readouterr().out
    assert text.startswith("grpo_kernels ") and text.endswith("all is well\n")
    lines = re.findall(rf"^{backend} +cpu +(\w+) +{variants} +\S+ +\S+ +\S+  ok ", text, flags=re.MULTILINE)
    assert lines == ["float32", "bfloat16", "float16"]
    assert torch.get_num_threads() == threads


class Broken(TorchBackend):
    """The plain backend with one fault."""

    name = "cpu"

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def single_pass(self, chunk, table, values, params, gradients=None):
        if self.fault == "exception":
            raise RuntimeError("kernel 'single_pass' cannot be launched")
        if self.fault == "beta is lost":
            params = params._replace(beta=0.0)
        super().single_pass(chunk, table, values, params, gradients)
        if gradients is None:
            return
        grad = gradients.dlogits
        if self.fault == "scaled gradient":
            grad.mul_(1.0 + 1e-5 if grad.dtype == torch.float32 else 1.02)
        elif self.fault == "nan":
            grad[0, 0] = math.nan
        elif self.fault == "entropy":
            chunk.rows.put(values.entropy, chunk.rows.take(values.entropy) + 1e-4)

    def sums(self, *arguments):
        found = super().sums(*arguments)
        if self.fault == "loss":
            found.totals[0] *= 1.0001
        elif self.fault == "metric":
            found.totals[4] += 0.01
        return found


@pytest.fixture
def broken(monkeypatch):
    def install(fault: str) -> None:
        entry = backends._REGISTRY["cpu"]._replace(load=lambda: (Broken(fault), ""))
        monkeypatch.setitem(backends._REGISTRY, "cpu", entry)
        forget()

    yield install
    monkeypatch.undo()
    forget()


FAULTS = ("nothing", "scaled gradient", "nan", "entropy", "beta is lost", "loss", "metric", "exception")


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
        assert "clip/token/none/seq_mean: RuntimeError: kernel 'single_pass' cannot be launched" in text
    if fault in ("scaled gradient", "beta is lost"):  # worse than rounding to 16 bits is
        assert text.count("FAILED") >= 2


def test_a_backend_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(check, "unavailable_reason", lambda name, device: "it is elsewhere")
    assert main(["check", "--backend", "cuda"]) == 1
    assert capsys.readouterr().out.endswith("backend 'cuda' is not available: it is elsewhere\n")

"""The probes of bench/gpu_report.py without a GPU: their sizes, what they pass and what they do not, what they time."""

from __future__ import annotations

import functools
import math

import gpu_device
import gpu_events
import gpu_headline
import gpu_machine
import gpu_measure
import gpu_probes
import gpu_profile
import gpu_smoke
import gpu_tiles
import pytest
import torch
from emulator.lm_head import HeadKernels, build_head
from gpu_headline import relative
from gpu_profile import Span
from gpu_stand_in import ROOT


@pytest.fixture(autouse=True)
def own_strategy(monkeypatch):
    """Probes choose theirs by the variable, in processes that end; here it is given back."""
    monkeypatch.setenv("GRPO_KERNELS_STRATEGY", "rows")


def test_the_sizes_of_first_contact_reach_every_case_of_the_products():
    """Pairs of blocks with several tiles, parts, items; partial tiles; H off the depth. On 132 multiprocessors."""
    reached = set().union(*(gpu_tiles.cases(*size) for size in gpu_tiles.PRODUCTS))
    assert not gpu_tiles.WANTED - reached
    assert {size for size in gpu_tiles.PRODUCTS if size[2] <= 256} and (2304, 512, 20000) in gpu_tiles.PRODUCTS
    for name in gpu_smoke.STRATEGIES:  # one part of the vocabulary, and counts of 1 that Triton compiles in
        assert {(1, 8, 2), (33, 64, 200), (16800, 16, 300)} <= set(gpu_tiles.SIZES[name])


def test_the_schedule_is_that_of_the_kernels(tmp_path):
    """csrc/cuda/lm_head.cpp says how many parts there are by the workspace it asks for: 24 bytes per part and row."""
    kernels = HeadKernels(build_head())
    sizes = {*gpu_tiles.PRODUCTS, (4096, 4096, 128256), (16384, 1536, 151936), (4000, 40, 70000)}
    for multiprocessors in (132, 114, 7):
        kernels.use(multiprocessors)
        for rows, width, vocab in sizes:
            found = gpu_tiles.schedule(rows, width, vocab, multiprocessors)
            assert kernels.workspace(rows, width, vocab) == rows * (24 * found.parts + 13)
    header = (ROOT / "csrc" / "cuda" / "lm_head_schedule.h").read_text()
    assert f"kTileRows = {gpu_tiles.TILE_ROWS}, kTileColumns = {gpu_tiles.TILE_COLUMNS};" in header
    ring = (ROOT / "csrc" / "cuda" / "lm_head_sm90.cuh").read_text()
    assert f"kStages = {gpu_tiles.STAGES}, kDepth = kBoxColumns" in ring
    assert f"kManyRowTiles = {gpu_tiles.MANY_ROW_TILES};" in (ROOT / "csrc" / "cuda" / "lm_head.cpp").read_text()


def test_a_probe_passes_what_is_right_and_nothing_else(monkeypatch, capsys):
    monkeypatch.setattr(gpu_device, "PLACE", "cpu")
    monkeypatch.setattr(gpu_probes, "LOGP_TOLERANCE", 2e-2)  # a CPU's product rounds the logits to bfloat16
    assert set(gpu_probes.smoke("torch", "rows", "129x72x257")["errors"]) == {"float32", "bfloat16"}
    assert gpu_probes.compare("torch", "anchored", (1, 8, 2), torch.bfloat16) == "not served"
    right = gpu_probes.step

    def off(*arguments, index):
        found = list(right(*arguments))
        found[index] = found[index] * 1.1
        return tuple(found)

    for index in range(4):
        monkeypatch.setattr(gpu_probes, "step", lambda *given, index=index: off(*given, index=index))
        with pytest.raises(AssertionError, match="dweight"):
            gpu_probes.compare("torch", "rows", (129, 72, 257), torch.float32)
    monkeypatch.setattr(gpu_probes, "step", lambda *given: tuple(x + torch.rand(()) * 1e-6 for x in right(*given)))
    with pytest.raises(AssertionError, match="different bits"):
        gpu_probes.compare("torch", "rows", (129, 72, 257), torch.float32)
    monkeypatch.setattr(gpu_probes, "step", lambda backend, *given: right("cpu", *given))
    with pytest.raises(AssertionError, match=r"what ran was .*cpu\.single_pass"):
        gpu_probes.compare("torch", "rows", (129, 72, 257), torch.float32)


def test_the_headline_times_nothing_that_is_wrong(monkeypatch):
    monkeypatch.setattr(gpu_device, "PLACE", "cpu")
    monkeypatch.setattr(gpu_headline, "LOGP_TOLERANCE", 5e-2)  # a CPU's product rounds the logits to bfloat16
    monkeypatch.setitem(gpu_events.HEADS, "tiny", 64)
    inputs = gpu_headline.batch("tiny")
    right, result = gpu_headline.sampled(inputs), gpu_headline.make_step("torch/rows")(inputs)
    assert gpu_headline.why_wrong(right, result) == ""
    unsampled = result.dweight.clone()
    unsampled[right.columns] *= 1.15
    assert relative(unsampled, result.dweight) < 3e-2, "which the whole of dweight does not show"
    for wrong, words in (
        (result._replace(dweight=unsampled), "dweight by 1."),
        (result._replace(dhidden=result.dhidden * 1.15), "dhidden by 1."),
        (result._replace(logps=result.logps + 0.1), "logps off by 1."),
        (result._replace(dweight=result.dweight.index_fill(0, inputs.ids[0, :1], math.inf)), "not all of it is finite"),
    ):
        assert words in gpu_headline.why_wrong(right, wrong)
    monkeypatch.setattr(gpu_headline, "KEPT_IDS", (4,))
    masked = gpu_headline.batch("tiny", 4)
    right, result = gpu_headline.sampled(masked), gpu_headline.make_step("cpu/kept")(masked)
    assert gpu_headline.why_wrong(right, result) == ""
    assert "logps off" in gpu_headline.why_wrong(right, gpu_headline.make_step("cpu/kept")(inputs))
    gpu_headline.kept(["cpu/kept"], "tiny")
    assert gpu_headline.why_other("cuda/kept 8", {"cuda.single_pass": 2})
    assert not gpu_headline.why_other("cuda/kept 8", {"cuda.single_pass": 2, "cuda.kept_logits": 1})
    assert gpu_headline.why_other("cuda/anchored", {"cuda.single_pass": 2}) and gpu_headline.why_other("ours", {})
    assert gpu_headline.why_other("cuda/rows", {"cuda.single_pass": 2, "triton.statistics": 1})
    assert not gpu_headline.why_other("cuda/rows 4096", {"cuda.single_pass": 2})


def test_the_bare_products_have_the_shapes_and_row_strides_they_name(monkeypatch):
    """On torch's device without memory, which knows what a product takes and returns."""
    monkeypatch.setattr(gpu_device, "PLACE", "meta")
    seen = {}
    monkeypatch.setattr(torch, "mm", functools.partial(noting, seen, torch.mm))
    shapes = {name: (call().shape, call().dtype) for name, call in gpu_events.bare_products(32, 16, 64)}
    assert shapes["h W^T, float32"] == ((32, 64), torch.float32) and shapes["h W^T"] == ((32, 64), torch.bfloat16)
    assert shapes["dlogits W"] == ((32, 16), torch.bfloat16)
    assert shapes["dlogits^T h, added in float32"] == shapes["dlogits^T h, float32"] == ((64, 16), torch.float32)
    assert seen[(32, 64), (64, 16)] == (128, 1), "dlogits lie 2 V elements apart, as in the engine"


def noting(seen: dict, call, a, b, **options):
    seen[tuple(a.shape), tuple(b.shape)] = a.stride()
    return call(a, b, **options)


def test_a_profile_says_what_was_between_kernels():
    spans = [Span("gemm", 0.0, 1000.0), Span("rows", 1500.0, 2000.0), Span("gemm", 2000.0, 4000.0)]
    found = gpu_profile.summarize(spans)
    assert (found["milliseconds"], found["idle_milliseconds"], found["kernels"]) == (4.0, 0.5, 3)
    assert found["longest_gaps"] == [{"milliseconds": 0.5, "before": "rows"}]
    assert found["by_kernel"]["gemm"] == {"milliseconds": 3.0, "calls": 2}


def test_what_ncu_counts_is_read():
    output = (
        '==PROF== Connected\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","gk_scale(Args)","Duration","us","12.3"\n"0","gk_scale(Args)","Registers","",""\n'
    )
    assert gpu_measure.counters(output)["gk_scale"]["Duration"] == "12.3 us"


def test_clocks_are_summarized():
    samples = "300, 3201, 30, 80.5\n1980, 3201, 50, 650\n1900, 3201, 40, [N/A]\n1800, 3201, 45, 600\n"
    assert gpu_machine.summarize(samples)["clocks.sm"] == [300.0, 1800.0, 1980.0]

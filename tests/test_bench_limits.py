"""grpo_kernels/bench/limits.py and bench/roofline.py: the model against known numbers and against real calls."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from grpo_kernels import memory
from grpo_kernels.bench.cases import DTYPES, MODES, Case, make_case
from grpo_kernels.bench.devices import DEVICES, Device
from grpo_kernels.bench.implementations import implementations
from grpo_kernels.bench.inputs import make_inputs
from grpo_kernels.bench.limits import (
    GROUP_BYTES,
    PARTS,
    WAYS,
    Prediction,
    idle_tokens,
    predict,
    way_of,
    ways,
)

ROOT = Path(__file__).parents[1]
H200 = DEVICES["H200"]
CPU = Device("a CPU", "cpu", dict.fromkeys(DTYPES, 1e11), 1e10)
MIB = 2**20


def products_ms(prediction: Prediction) -> float:
    return 1e3 * sum(part.computing for part in prediction.parts if part.flops)


def part_ms(prediction: Prediction, name: str) -> float:
    return 1e3 * sum(part.seconds for part in prediction.parts if part.name == name)


def seconds(way: str, shape: str = "8192x2048x65536", device: Device = H200, **options: object) -> float:
    return predict(make_case(shape, "bfloat16", **options), device, way).seconds


# --- numbers known from elsewhere -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "two", "six", "eight", "row_pass"),
    [
        ("llama-3-8b:16384", 21.8, 65.4, 87.2, 1.95),
        ("qwen2.5-7b:16384", 22.6, 67.8, 90.4, 2.32),
        ("qwen2.5-1.5b:16384", 9.7, 29.0, 38.7, 2.32),
        ("gemma-2-2b:8192", 12.2, 36.7, 48.9, 1.95),
    ],
)
def test_products_and_row_pass_on_an_h200(shape: str, two: float, six: float, eight: float, row_pass: float) -> None:
    """Milliseconds of 2, 6 and 8 NHV at 790 TFLOP/s and of 4 bytes per logit at 4.3 TB/s, worked out by hand."""
    step, forward = make_case(shape, "bfloat16"), make_case(shape, "bfloat16", mode="forward")
    assert products_ms(predict(forward, H200, "floor")) == pytest.approx(two, rel=0.01)
    assert products_ms(predict(step, H200, "floor")) == pytest.approx(six, rel=0.01)
    assert products_ms(predict(step, H200, "rows")) == pytest.approx(six, rel=0.01)
    assert products_ms(predict(step, H200, "recompute")) == pytest.approx(eight, rel=0.01)
    assert part_ms(predict(forward, H200, "rows"), "row passes") == pytest.approx(row_pass, rel=0.01)
    assert part_ms(predict(step, H200, "rows"), "row passes") == pytest.approx(1.5 * row_pass, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "dtype", "ours", "eager"),
    [
        ("smollm2-135m:2048", "float32", 98, 1049),
        ("smollm2-135m:2048", "bfloat16", 104, 1097),
        ("qwen2.5-0.5b:1024", "float32", 301, 1268),
        ("qwen2.5-0.5b:1024", "bfloat16", 301, 1520),
        ("qwen2.5-0.5b:4096", "float32", 301, 6599),
        ("qwen2.5-0.5b:4096", "bfloat16", 409, 6856),
    ],
)
def test_memory_that_was_measured_on_a_cpu(shape: str, dtype: str, ours: int, eager: int) -> None:
    """MiB of resident memory, November 2026; a process holds a little more than its tensors."""
    case = make_case(shape, dtype)
    for way, found in (("rows", ours), ("eager", eager)):
        assert 0.92 * found <= predict(case, CPU, way).peak_bytes / MIB <= found


def test_bytes_and_memory_worked_out_by_hand() -> None:
    """N, H, V = 16,384, 4,096, 128,256 in bfloat16 on a GPU: one product chunk, float32 logits of 2,048 rows."""
    case, forward = (make_case("llama-3-8b:16384", "bfloat16", mode=mode) for mode in ("step", "forward"))
    nv, vh, nh = 16384 * 128256, 128256 * 4096, 16384 * 4096
    expected = {
        "logits": 4 * nv + 8 * 2 * vh + 2 * nh,
        "row passes": 6 * nv,
        "dhidden": 2 * nv + 2 * vh + 2 * nh,
        "dweight": 2 * nv + 2 * vh + 2 * nh,
    }
    rows = predict(case, H200, "rows")
    assert {part.name: part.bytes for part in rows.parts if part.bytes} == expected
    assert rows.peak_bytes == (2048 * 4 + 16384 * 2) * 128256
    assert rows.given_bytes == 2 * 2 * (vh + nh)

    # Exponentials in bfloat16, the weight once per 2,048 rows. dhidden and hidden states are scaled in float32 and
    # rounded, dhidden is copied into its place.
    scaled = (2 + 4) + (4 + 2)
    expected |= {"logits": 2 * nv + 8 * 2 * vh + 2 * nh, "finish": (scaled + 4 + scaled) * nh}
    del expected["row passes"]
    anchored = predict(case, H200, "anchored")
    assert {part.name: part.bytes for part in anchored.parts if part.bytes} == expected
    assert anchored.peak_bytes == 16384 * (128256 * 2 + 4096 * 8)
    assert part_ms(anchored, "epilogue") == pytest.approx(1e3 * 20 * nv / (0.8 * 67e12 / 2))

    linear = predict(forward, H200, "linear")
    assert {part.name: part.bytes for part in linear.parts if part.bytes} == {"logits": 8 * 2 * vh + 2 * nh}
    assert linear.peak_bytes == 0
    moved = {way: part_ms(predict(case, H200, way), "row passes") for way in ("staged", "recompute", "eager")}
    per_logit = {way: round(ms * 1e-3 * H200.bandwidth / nv) for way, ms in moved.items()}
    assert per_logit == {"staged": 4 + 6, "recompute": 4 + 6, "eager": (6 + 8) + (4 + 12 + 6)}


def test_a_single_chunk_is_its_own_sum() -> None:
    """Nothing in float32 is written, cast or held, unlike where a second chunk is added."""
    rows, vh, nh = 16384, 128256 * 4096, 16384 * 4096
    one, two = (predict(make_case(f"llama-3-8b:{n * rows}", "bfloat16", length=1), H200) for n in (1, 2))
    moved = [{part.name: part.bytes for part in p.parts} for p in (one, two)]
    assert moved[0]["dweight"] == 2 * rows * 128256 + 2 * nh + 2 * vh
    assert moved[1]["dweight"] == 2 * (2 * rows * 128256 + 2 * nh) + 3 * 4 * vh
    assert [m.get("finish", 0) for m in moved] == [0, 6 * vh]
    assert one.peak_bytes == two.peak_bytes - 2 * vh == (2048 * 4 + rows * 2) * 128256


def test_a_chunk_of_weight_gradients_costs_735_over_its_rows_of_a_product() -> None:
    """Sums in float32, read and written once per chunk, against 2 C H V operations on an H200."""
    rows = 20480
    short, long = (predict(make_case(f"{n * rows}x4096x128256", "bfloat16", length=1), H200) for n in (4, 8))
    bytes_ = [next(part.bytes for part in p.parts if part.name == "dweight") for p in (short, long)]
    operands = 4 * rows * (128256 + 4096) * 2  # of the four chunks more: gradients of logits, hidden states
    chunk = (bytes_[1] - bytes_[0] - operands) / 4 / H200.bandwidth
    assert chunk == pytest.approx(735 / rows * 2 * rows * 4096 * 128256 / 790e12, rel=0.01)


def test_the_folded_products_share_hidden_states_as_their_kernels_do() -> None:
    assert f"GROUP_BYTES = {GROUP_BYTES >> 20} << 20" in (ROOT / "grpo_kernels/kernels/matmul.py").read_text()


# --- real calls on this machine -------------------------------------------------------------------------------------


def observe(case: Case, name: str) -> tuple[int, int]:
    """(FLOPs of matrix products, peak bytes beyond inputs and returned gradients) of one call on the CPU."""
    inputs = make_inputs(case, torch.device("cpu"))
    (step,) = implementations()[name].settings(inputs, case.mode).values()
    step(inputs)
    memory._kept.clear()  # or the call would find the scratch of the one before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiler:
        result = step(inputs)
    flops = 0
    for event in profiler.events():
        if event.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            left, right = [shape for shape in event.input_shapes if len(shape) == 2][event.name != "aten::mm" :][:2]
            flops += 2 * left[0] * left[1] * right[1]
    events = profiler.profiler.kineto_results.events()
    held = peak = 0
    for _, change in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        held += change
        peak = max(peak, held)
    return flops, peak - sum(x.nbytes for x in (result.dhidden, result.dweight) if x is not None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "dtype"), [("ours", t) for t in DTYPES] + [("eager", t) for t in DTYPES[:2]])
def test_products_and_memory_of_a_real_call(name: str, dtype: str, mode: str) -> None:
    """Whole chunks, in bfloat16 so many that the weight's gradient is summed in float32."""
    tokens = 4 * 1366 if (name, dtype) == ("ours", "bfloat16") else 1024
    case = Case("custom", tokens, 16, 16384 if name == "ours" else 2048, dtype, tokens // 4, mode)
    prediction = predict(case, CPU, way_of(name) or "")
    flops, peak = observe(case, name)
    assert flops == prediction.flops
    assert peak == pytest.approx(prediction.peak_bytes, rel=0.05)


@pytest.mark.parametrize(("name", "products"), [("ours", 2 + 4 * 0.5), ("ours-unscored", 6 * 0.5), ("eager", 6)])
def test_idle_prompts_of_a_real_call(name: str, products: float) -> None:
    case = Case("custom", 512, 32, 1024, "float32", 32, idle_share=0.5, beta=0.0)
    prediction = predict(case, CPU, way_of(name) or "")
    assert prediction.flops == products * 512 * 32 * 1024
    assert observe(case, name)[0] == prediction.flops


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(("generations", "share"), [(4, 0.0), (4, 0.5), (4, 0.3), (2, 1.0), (1, 0.0)])
def test_idle_tokens_are_those_of_the_inputs(generations: int, share: float, beta: float) -> None:
    case = Case("custom", 64, 4, 16, "float32", 4, generations=generations, idle_share=share, beta=beta)
    without_advantage = int((make_inputs(case, torch.device("cpu")).advantages == 0).sum()) * case.length
    assert idle_tokens(case) == (0 if beta else without_advantage)


# --- the shape of the model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [*DEVICES.values(), CPU], ids=lambda device: device.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_every_way_has_a_prediction(device: Device, dtype: str, mode: str) -> None:
    for options in ({}, {"idle_share": 0.5, "beta": 0.0}, {"idle_share": 1.0, "beta": 0.0}):
        case = make_case("512x64x1024", dtype, mode=mode, length=32, **options)
        served = ways(case, device)
        assert {"floor", "rows", "recompute", "eager"} <= set(served)
        assert ("anchored" in served) == (device is not CPU and dtype == "bfloat16")
        for way in served:
            found = predict(case, device, way)
            assert 0 < found.seconds <= found.seconds_apart < math.inf
            assert found.peak_bytes >= 0
            assert {part.name for part in found.parts} <= set(PARTS)
            assert min(min(part[1:]) for part in found.parts) >= 0


def test_what_does_not_serve_a_case_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'anchored' does not serve .* expected one of floor, rows"):
        predict(make_case("512x64x1024", "float32"), H200, "anchored")


@pytest.mark.parametrize("way", WAYS)
def test_more_of_anything_takes_longer(way: str) -> None:
    assert seconds(way) < seconds(way, "16384x2048x65536")
    assert seconds(way) < seconds(way, "8192x4096x65536")
    assert seconds(way) < seconds(way, "8192x2048x131072")
    assert seconds(way, mode="frozen") < seconds(way)
    assert seconds(way, device=DEVICES["B200"]) < seconds(way) < seconds(way, device=DEVICES["A100"])
    if way not in ("unscored", "staged"):
        assert seconds(way, mode="forward") < seconds(way, mode="frozen")


def test_the_ways_come_in_the_order_that_their_ideas_promise() -> None:
    assert seconds("floor") < seconds("anchored") < seconds("rows") < seconds("staged") < seconds("eager")
    assert seconds("rows") < seconds("recompute")
    assert seconds("linear", mode="forward") < seconds("rows", mode="forward") < seconds("eager", mode="forward")
    idle = {"idle_share": 0.5, "beta": 0.0, "length": 64}
    assert seconds("unscored", **idle) < seconds("linear", **idle) < seconds("rows", **idle) < seconds("rows")
    assert seconds("recompute", **idle) == seconds("recompute")


def test_few_tokens_wait_for_the_host_and_many_do_not() -> None:
    slow = Device("slow host", "cuda", H200.flops, H200.bandwidth, launch=1e-3)
    few, many = (predict(make_case(f"{n}x4096x128256", "bfloat16"), slow) for n in (64, 65536))
    assert few.seconds == pytest.approx(few.waiting + few.issuing)
    assert few.waiting + few.issuing == pytest.approx(0.08)
    assert many.seconds == pytest.approx(many.waiting + sum(part.seconds for part in many.parts))


def test_every_implementation_has_a_way_or_none() -> None:
    assert {way_of(name) for name in implementations()} <= {*WAYS, None}
    names = ("ours", "ours-cpu", "ours-unscored", "ours-triton-anchored", "floor", "verl-chunked", "compiled", "quack")
    found = [way_of(name) for name in names]
    assert found == ["rows", "rows", "unscored", "anchored", "floor", "recompute", None, None]


# --- the report -----------------------------------------------------------------------------------------------------


@pytest.fixture
def roofline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    yield importlib.import_module("roofline")
    sys.modules.pop("roofline")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_report(roofline: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    roofline.main(["--shapes", "llama-3-8b:16384", "65536x4096x256000"])
    lines = capsys.readouterr().out.splitlines()
    rows = next(cells(line) for line in lines if line.startswith("| rows"))
    expected = predict(make_case("llama-3-8b:16384", "bfloat16"), H200, "rows")
    assert rows[1] == f"{expected.flops / 1e12:.4g}"
    assert f"{expected.seconds * 1e3:.1f}" in rows
    assert f"{part_ms(expected, 'row passes'):.2f}" in rows
    fits = ["does not fit" in line for line in lines if line.startswith("| eager")]
    assert fits == [False, True]


def test_report_beside_measurements(roofline: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    case = make_case("llama-3-8b:16384", "bfloat16")
    predicted = predict(case, H200, "rows")
    found = {
        "ours": {"seconds": {"median": 2 * predicted.seconds}, "peak_bytes": 5 * 10**9},
        "trl": {"missing": "trl is not installed"},
        "compiled": {"seconds": {"median": 1.0}},
        "eager": {"error": "out of memory", "peak_bytes": 10**9},
    }
    document = {
        "environment": {"device": "NVIDIA H200"},
        "cases": [{"case": vars(case), "implementations": found}],
    }
    path = tmp_path / "results.json"
    path.write_text(json.dumps(document))
    roofline.main(["--results", str(path)])
    lines = capsys.readouterr().out.splitlines()
    beside = [
        cells(line) for line in lines[next(i for i, line in enumerate(lines) if "modelled as" in line) + 2 :] if line
    ]
    assert [row[0] for row in beside] == ["ours", "eager"]
    assert "2.00" in beside[0]
    assert "5.000" in beside[0]
    assert beside[1][2] == ""


def test_cluster(roofline: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    roofline.main(["--cluster", "--gpus", "8", "64", "--tokens", "65536"])
    text = capsys.readouterr().out
    assert len([line for line in text.splitlines() if line.startswith("|")]) == 2 + len(roofline.HEADS) * 2 * 2
    assert "- 64 GPUs, split: " in text
    with pytest.raises(SystemExit):
        roofline.main(["--cluster", "--gpus", "12"])
    with pytest.raises(SystemExit):
        roofline.main(["--cluster", "--device", "cpu"])


@pytest.mark.parametrize("layout", ["split", "replicated"])
def test_a_step_of_a_cluster(roofline: ModuleType, layout: str) -> None:
    tokens, gpus = 2**20, 64
    for head in roofline.HEADS:
        step = roofline.step(head, H200, tokens, gpus, layout)
        work = 6 * tokens * head.hidden_size * head.vocab_size
        assert step.products * gpus * 790e12 == pytest.approx(work, rel=1e-6)
        summed = head.hidden_size * head.vocab_size * 2 / 8  # bytes of a GPU, over eight nodes
        assert step.network == pytest.approx(2 * 7 / 8 * summed / 50e9)
        alone = roofline.step(head, H200, tokens, 8, layout)
        assert alone.network == alone.exposed_network == 0
        assert 0 <= step.exposed_network <= step.network
        assert 0 <= step.exposed_nvlink <= step.nvlink


def test_traffic_in_a_node_worked_out_by_hand(roofline: ModuleType) -> None:
    """Llama-3-8B, 16,384 tokens of a node, one chunk of the split head."""
    head = roofline.HEADS[0]
    split, replicated = (roofline.step(head, H200, 2**20, 512, layout) for layout in roofline.LAYOUTS)
    statistics, dhidden = (20e-6 + 1.75 * 16384 * size / 450e9 for size in (16, 2 * 4096))
    assert split.nvlink == pytest.approx(statistics + dhidden)
    assert split.exposed_nvlink == pytest.approx(statistics + dhidden)
    assert replicated.nvlink == pytest.approx(2 * 20e-6 + 1.75 * 2 * 128256 * 4096 / 450e9)
    assert replicated.exposed_nvlink == 0
    assert split.bytes == 2 * 2 * 128256 * 4096 // 8 + 16384 * 128256 // 8 * 4
    assert replicated.tokens == split.tokens == 16384


def test_a_saturated_network_shows_all_that_is_added(roofline: ModuleType) -> None:
    step = roofline.step(roofline.HEADS[0], H200, 10**6, 4096, "split")
    assert step.body < step.body_network
    assert step.exposed_network == pytest.approx(step.network)
    assert step.seconds == pytest.approx(step.products + step.rest + step.exposed_nvlink + step.network)


def test_the_cluster_balances_where_its_conclusions_say(roofline: ModuleType) -> None:
    nodes = 4096
    for head in roofline.HEADS:
        step = roofline.step(head, H200, 10_533 * nodes, 8 * nodes, "split")
        assert step.network == pytest.approx(step.products, rel=0.001)
        few, many = (roofline.step(head, H200, n * nodes, 8 * nodes, "split") for n in (15_500, 17_200))
        assert few.exposed_network > 0
        assert many.exposed_network == 0
    text = roofline.cluster(H200, 2**20, (8, 64))
    assert "Below 10,533 tokens per node" in text
    assert "From 16,042 to 17,119 tokens per node on" in text

"""The pictures, tables and targets of results: what they show is what the document says."""

from __future__ import annotations

import json
from dataclasses import asdict

import bars
import pytest
import report

from grpo_kernels.benchmarks import figures
from grpo_kernels.benchmarks.cases import BARS, jobs, make_case
from grpo_kernels.benchmarks.implementations import select
from grpo_kernels.benchmarks.machine import OUT_OF_MEMORY, write

ENVIRONMENT = {
    "date": "2026-01-31T12:00:00+00:00", "device": "cpu", "driver": None, "cpu": "Some CPU", "threads": 7,
    "cpu_capability": "AVX2", "versions": {"grpo-kernels": "0.1.0", "torch": "2.99.1", "trl": None},
}  # fmt: skip
TITLES = {"ours": "ours", "floor": "bare matrix products", "eager": "eager PyTorch", "trl": "TRL"}
SECONDS = {"ours": 2.1, "floor": 2.0, "eager": 3.0, "trl": 5.0}


def entry(name, scale=1.0, **changes):
    median = SECONDS.get(name, 4.0) * scale
    errors = None if name == "floor" else {"loss": 1e-6, "logps_max": 2e-3, "dhidden": 3e-4, "dweight": 4e-4}
    seconds = {"median": median, "min": 0.9 * median, "max": 1.2 * median, "times": []}
    ratios = {"ratio_to_floor": median / 2.0, "ours_to_this": 2.1 / median}
    return {"title": TITLES.get(name, name), "setting": "", "seconds": seconds, "errors": errors} | ratios | changes


def case(implementations=None, shape="qwen2.5-0.5b:4096", **fields):
    found = implementations or {name: entry(name) for name in SECONDS}
    return {"case": asdict(make_case(shape, **fields)), "implementations": found}


def masked(kept_ids, scale):
    found = {name: entry(name, scale if name == "ours" else 1.0) for name in ("ours", "ours-unmasked", "floor")}
    return case(found, kept_ids=kept_ids)


def sized(length, **peaks):
    """A case with peaks of memory in GiB."""
    found = {name: {"title": TITLES[name], "peak_bytes": peak * 2**30} for name, peak in peaks.items()}
    return case(found, f"qwen2.5-7b:{16 * length}", length=length)


def document(*cases, **environment):
    found = {"environment": ENVIRONMENT | environment, "command": "", "cases": list(cases), "not_run": []}
    return json.loads(json.dumps(found))


def everything():
    """A document with data for every picture."""
    return document(
        case(),
        *(sized(n, ours=1, eager=4) for n in (256, 512, 1024)),
        *(case(shape=f"{n}x7x11") for n in (1024, 2048, 8192)),
        *(case(idle_share=share, beta=0.0, length=64) for share in (0.0, 0.5, 1.0)),
        *(masked(n, 1e-3 * n) for n in (8, 32, 128)),
    )


def test_every_picture_is_drawn_from_data_and_says_where_and_when(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "DPI", 30)
    written = figures.draw(everything(), tmp_path / "new", "cpu-")
    assert [path.name for path in written] == [f"cpu-{name}.png" for name in figures.PICTURES]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    small_print = figures.PICTURES["time"](everything()).get_supxlabel()
    assert small_print == "Some CPU, 7 threads, AVX2, grpo-kernels 0.1.0, torch 2.99.1, 2026-01-31"


# --- the scripts ------------------------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path, monkeypatch):
    idle = [case(idle_share=share, beta=0.0, length=64) for share in (0.0, 0.5)]
    for one in idle:
        one["implementations"]["ours-unscored"] = entry("ours-unscored", 0.25)
    (tmp_path / "cpu.json").write_text(json.dumps(document(case(), masked(32, 0.04), *idle)))
    for name in (report.SPARSE, report.LEARNING):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes((report.RESULTS / name).read_bytes())
    for name, value in (("RESULTS", tmp_path), ("FIGURES", tmp_path / "drawn"), ("PAGES", (tmp_path / "page.md",))):
        monkeypatch.setattr(report, name, value)
    (tmp_path / "page.md").write_text(f"before\n{report.BEGIN}\nstale text\n{report.END}\nafter\n")
    return tmp_path


def test_one_command_draws_every_file_and_rewrites_the_tables(results, capsys):
    report.main()
    names = {"cpu-time.png", "sparse.png", "time-to-reward.png"}
    assert {path.name for path in (results / "drawn").iterdir()} == names
    page = (results / "page.md").read_text()
    assert page.startswith("before\n") and page.endswith("\nafter\n") and "stale text" not in page
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    errors = ["3.0e-04 (3.0e-04)", "2.0e-03 (2.0e-03)"]
    step = "qwen2.5-0.5b (4096, 896, 151936), bfloat16, step"
    assert [step, "2,100 (1,890 to 2,520)", "1.05", "0.70", "0.42", "", *errors] in rows
    assert [f"{step}, 32 ids kept", "84 (76 to 101)", "1.05", "", "", "0.525", "3.0e-04", "2.0e-03"] in rows
    assert {row[0] for row in rows} >= {"exact", "2^-12", "cut below 2^-12", "times table, full, bfloat16, 3 seeds"}
    assert "(drawn/cpu-time.png)" in page and "No GPU has been measured yet." in page


# --- bench/bars.py ----------------------------------------------------------------------------------------------------


LONG, GIB = "65536x3584x151936", 2**30
H200 = {"device": "NVIDIA H200", "device_memory": 141 * GIB}


def line(text, *words):
    (found,) = (line for line in text.splitlines() if all(word in line for word in words))
    return [cell.strip() for cell in found.split("|")[2:5]]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_target_is_measured_by_a_set(device):
    cases = []
    for job in [*jobs("targets", device), *jobs("teacher", device)]:
        names = select(job.against)
        memory = {"peak_bytes": 1.0}
        times = {"ours_to_this": 1.0, "ratio_to_floor": 1.0, "errors": {"logps_max": 1.0}}
        weighed = names if device == "cuda" else select(job.memory) if job.memory else []
        found = {n: (times if job.timed else {}) | (memory if n in weighed else {}) for n in names}
        cases.append({"case": asdict(job.case), "implementations": found})
    for bar in BARS[device]:
        assert bars.value_of(bar, document(*cases, device=device)), bar


def test_a_target_is_met_missed_or_not_measured():
    found = {"ours": {"peak_bytes": 10 * GIB}, "trl": {"peak_bytes": 9 * GIB}, "eager": {"peak_bytes": 100 * GIB}}
    text = bars.report(document(case(found, LONG), **H200))
    assert line(text, f"{LONG} bfloat16, mode step: memory to trl") == ["1.11", "1", "MISSED"]
    assert line(text, f"{LONG} bfloat16, mode step: memory to eager") == ["0.1", "0.125", "met"]
    assert line(text, f"{LONG} bfloat16, mode frozen: memory to trl") == ["", "1", "not measured"]


def test_what_runs_out_of_memory_needs_more_than_the_device_has():
    lost = {"error": f"{OUT_OF_MEMORY}: OutOfMemoryError: CUDA out of memory"}
    text = bars.report(document(case({"ours": {"peak_bytes": 141 * GIB // 10}, "eager": lost}, LONG), **H200))
    assert line(text, f"{LONG} bfloat16, mode step: memory to eager")[2] == "met"
    text = bars.report(document(case({"ours": lost, "eager": {"peak_bytes": GIB}}, LONG), **H200))
    assert line(text, f"{LONG} bfloat16, mode step: memory to eager")[2] == "not measured"


def test_the_report_of_a_gpu_holds_all_that_the_targets_need(tmp_path, capsys):
    step = {"FusedGRPOTrainer": {"of_trl": 0.9, "peak_bytes": 2}, "TRL": {"of_trl": 1.0, "peak_bytes": 1}}
    found = {"ours": {}, "floor": {"ours_to_this": 1.07}}
    write(tmp_path / "gpu.json", {
        "environment": {}, "stages": {}, "targets": document(case(found, "llama-3-8b:16384"), **H200),
        "trl_step": {"steps": {"dapo": step}},
        "teacher": document(case(found, "llama-3-8b:16384", divergence="reverse_kl"), **H200),
    })  # fmt: skip
    bars.main([str(tmp_path / "gpu.json")])
    text = capsys.readouterr().out
    assert line(text, "16384x4096x128256 bfloat16: time to floor") == ["1.07", "1.08", "met"]
    assert line(text, "16384x4096x128256 bfloat16, divergence reverse_kl: time to floor") == ["1.07", "1.12", "met"]
    assert line(text, "TRL's step, time")[2] == "met" and line(text, "TRL's step, memory")[2] == "MISSED"

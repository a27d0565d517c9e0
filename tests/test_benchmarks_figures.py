"""The pictures and tables of results: what they show is what the document says."""

from __future__ import annotations

import json
from dataclasses import asdict

import report

from grpo_kernels.benchmarks import figures
from grpo_kernels.benchmarks.cases import make_case

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


# --- bench/report.py --------------------------------------------------------------------------------------------------


def test_the_committed_results_give_the_committed_tables(tmp_path, monkeypatch, capsys):
    pages = {name: (report.ROOT / name).read_text() for name in ("README.md", "bench/README.md")}
    (tmp_path / "bench").mkdir()
    for name, text in pages.items():
        begin, end = (text.index(mark) for mark in (report.BEGIN, report.END))
        (tmp_path / name).write_text(f"{text[:begin]}{report.BEGIN}\nstale\n{text[end:]}")
    monkeypatch.setattr(figures, "DPI", 30)
    monkeypatch.setattr(report, "DPI", 30)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    committed = {path.name for path in report.FIGURES.iterdir()}
    monkeypatch.setattr(report, "FIGURES", tmp_path / "drawn")
    report.main()
    assert {name: (tmp_path / name).read_text() for name in pages} == pages
    assert {path.name for path in (tmp_path / "drawn").iterdir()} == committed

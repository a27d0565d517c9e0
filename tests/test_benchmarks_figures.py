"""The pictures and tables of committed results: what they show is what the documents say."""

from __future__ import annotations

import report

from grpo_kernels.benchmarks import figures


def test_the_committed_results_give_the_committed_tables(tmp_path, monkeypatch):
    pages = {name: (report.ROOT / name).read_text() for name in ("README.md", "bench/README.md")}
    (tmp_path / "bench").mkdir()
    for name, text in pages.items():
        begin, end = (text.index(mark) for mark in (report.BEGIN, report.END))
        (tmp_path / name).write_text(f"{text[:begin]}{report.BEGIN}\nstale\n{text[end:]}")
    committed = {path.name for path in report.FIGURES.iterdir()} - {"time-to-reward.png"}  # of an earlier revision
    for module, name, value in (
        (figures, "DPI", 30), (report, "ROOT", tmp_path), (report, "FIGURES", tmp_path / "drawn"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    report.main()
    assert {name: (tmp_path / name).read_text() for name in pages} == pages
    assert {path.name for path in (tmp_path / "drawn").iterdir()} == committed


def test_pictures_say_where_and_when():
    document = report.load("cpu.json")
    small_print = figures.PICTURES["time"](document).get_supxlabel()
    assert small_print.startswith("AMD EPYC, 2 threads, AVX512, grpo-kernels 0.1.0, torch 2.13.0+cpu, ")
    assert small_print.endswith(", 2026-11-23")
    assert [name for name, picture in figures.PICTURES.items() if picture(document)] == ["time"]

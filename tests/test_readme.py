"""What the README says: its Python runs, its table of presets is complete, its links lead somewhere."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import grpo_kernels as gk

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_blocks_run_one_after_another():
    blocks = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 4
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


def test_opens_with_the_two_commands():
    commands = re.findall(r"^make (\w+)", README, flags=re.MULTILINE)
    assert commands[:2] == ["demo", "test"]


def test_presets():
    table = README.split("| preset |")[1].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(gk.available_presets())


@pytest.mark.parametrize("axis", ["SURROGATE_RULES", "LEVELS", "KL_ESTIMATORS", "AGGREGATIONS"])
def test_axes(axis):
    table = README.split("| axis |")[1].split("\n\n")[0]
    missing = [name for name in getattr(gk.config, axis) if not re.search(rf"[ |(]{re.escape(name)}[ ,;|]", table)]
    assert not missing


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"])
def test_links_and_files(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#:]+)\)", text)
    targets += re.findall(r"`((?:grpo_kernels|csrc|tests|python|bench)/[\w./]*)`", text)
    assert targets and not [target for target in targets if not (ROOT / target).exists()]


def test_map_of_files():
    """ARCHITECTURE.md names every module outside the folders of many, and only files that exist."""
    section = (
        (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("**The map.**")[1].split("**Dependencies**")[0]
    )
    named = set(re.findall(r"\b\w+\.py\b", section.split("csrc/")[0])) - {"__init__.py"}
    package = ROOT / "grpo_kernels"
    assert named <= {path.name for path in package.rglob("*.py")}
    for folder in (".", "engine", "backends", "backends/pytorch", "backends/compiled", "commands"):
        modules = {path.name for path in (package / folder).glob("*.py")} - {"__init__.py", "__main__.py"}
        assert modules <= named, folder
    assert set(re.findall(r"\w+\.h\b", section)) <= {path.name for path in (ROOT / "csrc").rglob("*.h")}


def test_measurements_come_from_the_committed_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    summary = importlib.import_module("summary")
    shown = README.split(summary.BEGIN)[1].split(summary.END)[0]
    assert shown.strip() == summary.section().strip(), "run python bench/summary.py"

"""The files of the hosting service and of pre-commit run what the Makefile and .ci/run define, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_ci_runs_ci_run_and_the_tests_with_the_oldest_torch_and_a_newer_python():
    text = read(".github/workflows/ci.yml")
    oldest = re.search(r'^    "torch>=(\d+\.\d+)"', read("pyproject.toml"), flags=re.MULTILINE)[1]
    runs = [".ci/run", f"make test-torch TORCH={oldest}.0", "make test"]
    assert re.findall(r"^      - run: (.*)$", text, flags=re.MULTILINE) == runs


def test_a_tag_builds_the_wheels_for_every_python():
    text = read(".github/workflows/wheels.yml")
    assert 'tags: ["v*"]' in text and "path: dist/" in text
    assert re.findall(r"^      - run: (.*)$", text, flags=re.MULTILINE) == ["make wheels"]
    pythons = re.findall(r'"(3\.\d+)"', re.search(r"^PYTHONS = \((.*)\)$", read("tools/wheel_builds.py"), re.M)[1])
    assert sorted(re.findall(r"^            (3\.\d+)$", text, flags=re.MULTILINE)) == sorted(pythons)


def test_the_hooks_are_the_linters_of_make_lint():
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", read("Makefile"), flags=re.MULTILINE)[1]
    linters = [line.replace("$(CXX_FILES)", "").strip() for line in re.findall(r"^\t\$\(BIN\)/(.*)$", recipe, re.M)]
    hooks = re.findall(r"^        entry: \.venv/bin/(.*)$", read(".pre-commit-config.yaml"), flags=re.MULTILINE)
    assert hooks == linters and len(hooks) == 4
    pins = read(".ci/constraints.txt")
    assert all(re.search(rf"^{hook.split()[0]}==", pins, flags=re.MULTILINE) for hook in hooks)

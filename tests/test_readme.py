"""What the README says: its Python runs, its table of presets is complete, its links lead somewhere."""

from __future__ import annotations

import re
from math import log
from pathlib import Path
from typing import Any

import pytest
import report
import torch

import grpo_kernels as gk

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "grpo_kernels" / "README.md").read_text(encoding="utf-8")


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def test_python_blocks_run_one_after_another():
    """The first one as it stands, then the eager loss and ours, which agree, then those of the guide."""
    names: dict[str, Any] = {}
    first, before, after = python_blocks(README)
    found = []
    for block in (first, before, after, *python_blocks(GUIDE)):
        if "model" in names:
            names |= (
                {"old_logps": -log(1000) + 0.2 * torch.randn(8, 10), "advantages": torch.randn(8)} if not found else {}
            )
            names["model"].zero_grad()
        exec(compile(block, "README.md", "exec"), names)
        if block in (before, after):
            found.append({name: p.grad.clone() for name, p in names["model"].named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and "lm_head.weight" in found[0]
    assert all(torch.allclose(found[1][name], found[0][name], atol=1e-6) for name in found[0])


def test_the_guide_names_every_metric():
    inputs = {
        "old_logps": torch.zeros(2, 3) - 4,
        "ref_logps": torch.zeros(2, 3) - 4,
        "rollout_logps": torch.zeros(2, 3) - 4,
    }
    inputs |= {"rollout_weights": torch.ones(2), "rewards": torch.tensor([0.0, 1.0]), "num_generations": 2}
    inputs |= {"sampling_mask": gk.SamplingMask.from_lists([[{1, 2, 3}] * 3] * 2)}
    shown = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)?)`", GUIDE.split("## Metrics")[1].split("## When")[0]))
    for surrogate in ("clip", "cispo"):
        config = gk.GRPOConfig(surrogate=surrogate, epsilon_high=5.0, beta=0.1, entropy_coef=0.1)
        out = gk.fused_grpo_loss(
            torch.randn(2, 3, 8), torch.randn(50, 8), torch.ones(2, 3).long(), config=config, **inputs
        )
        assert out.metrics.keys() | out.groups.keys() - {"loss"} <= shown


def test_presets():
    table = README.split("| preset |")[1].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(gk.available_presets())


@pytest.mark.parametrize("axis", ["SURROGATE_RULES", "LEVELS", "KL_ESTIMATORS", "AGGREGATIONS"])
def test_axes(axis):
    table = README.split("| axis |")[1].split("\n\n")[0]
    missing = [name for name in getattr(gk.config, axis) if not re.search(rf"[ |(]{re.escape(name)}[ ,;|]", table)]
    assert not missing


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "grpo_kernels/README.md", "examples/README.md"]
)
def test_links_and_files(name):
    page = ROOT / name
    text = page.read_text(encoding="utf-8")
    targets = [page.parent / target for target in re.findall(r"\]\(([^)#:]+)[)#]", text)]
    targets += [ROOT / target for target in re.findall(r"`((?:grpo_kernels|csrc|tests|python|bench)/[\w./]*)`", text)]
    inside = re.findall(r"`((?:engine|backends|commands|benchmarks)/[\w./]*)`", text)
    targets += [ROOT / "grpo_kernels" / target for target in inside]
    assert targets and not [target for target in targets if not target.exists()]


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


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.parent.name)
def test_measurements_come_from_the_committed_results(page):
    shown = page.read_text(encoding="utf-8").split(report.BEGIN)[1].split(report.END)[0]
    assert shown.strip() == report.section(page).strip(), "run make figures"


def test_every_pitfall_of_the_trainers_table_has_its_test():
    table = (ROOT / "grpo_kernels" / "trainer" / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*\| (`test_.*`) \|$", table, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 21))
    there = set(
        re.findall(r"^def (test_\w+)", "".join(p.read_text() for p in (ROOT / "tests").glob("test_*.py")), re.M)
    )
    named = {name for _, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert named <= there, named - there

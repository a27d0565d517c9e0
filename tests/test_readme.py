"""What the README says: its Python runs, its table of presets is complete, its links lead somewhere."""

from __future__ import annotations

import re
from math import log
from pathlib import Path
from typing import Any

import pytest
import report
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import grpo_kernels as gk

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def example() -> dict[str, Any]:
    """What the README's code takes as given: a model, two prompts with four completions each, and their rewards."""
    config = LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
    )  # fmt: skip
    input_ids = torch.randint(101, (8, 15))
    given = {"torch": torch, "model": LlamaForCausalLM(config), "input_ids": input_ids, "prompt_length": 5}
    given |= {"completion_ids": input_ids[:, 5:], "mask": (torch.arange(10) < torch.arange(3, 11)[:, None]).int()}
    return given | {
        "old_logps": -log(101) + 0.2 * torch.randn(8, 10), "advantages": torch.randn(8), "rewards": torch.rand(8),
    }  # fmt: skip


def test_python_blocks_run_one_after_another():
    blocks = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 4
    names = example()
    found = []
    for block in blocks:
        names["model"].zero_grad()
        exec(compile(block, "README.md", "exec"), names)
        found.append({name: p.grad.clone() for name, p in names["model"].named_parameters() if p.grad is not None})
    before, after = found[:2]
    assert before.keys() == after.keys() and "lm_head.weight" in before
    assert all(torch.allclose(after[name], before[name], atol=1e-6) for name in before)


def test_opens_with_the_two_commands():
    commands = re.findall(r"^make (\w+)", README, flags=re.MULTILINE)
    assert commands[:2] == ["demo", "test"]


def test_presets():
    table = README.split("| preset |")[1].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(gk.available_presets())


@pytest.mark.parametrize("name", gk.available_presets())
def test_each_preset_is_beside_its_source(name):
    table = README.split("| preset |")[1].split("\n\n")[0]
    (row,) = [line for line in table.splitlines()[2:] if f"`{name}`" in line.split("|")[1]]
    source = gk.config.PRESET_SOURCES[name]
    papers = re.findall(r"arXiv:(\S+?)[;,]? ", source + " ")
    assert papers == re.findall(r"https://arxiv\.org/abs/([\d.]+)", row)
    assert papers or source in row


def test_each_surrogate_has_its_source():
    for name, rule in gk.config.SURROGATE_RULES.items():
        assert all(f"abs/{paper}" in README for paper in re.findall(r"arXiv:([\d.]+)", rule.source)), name


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
    inside = re.findall(r"`((?:engine|backends|commands|benchmarks)/[\w./]*)`", text)
    targets += [f"grpo_kernels/{target}" for target in inside]
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


def test_measurements_come_from_the_committed_results():
    (page,) = [page for page in report.PAGES if report.BEGIN in page.read_text(encoding="utf-8")]
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

"""examples/countdown.py: "your own task", with reasoning-gym where it is installed.

Elsewhere with a recorded contract: reasoning-gym brings twenty packages, one of which is compiled, and `make test`
does not install it. What follows was recorded from reasoning-gym 0.1.25 in November 2026; where it is installed, the
same test runs against the package itself.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import operator
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from grpo_kernels.trainer.rewards import Rewards

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# create_dataset("countdown", size=2, seed=0, min_numbers=3, max_numbers=4), without the difficulty.
RECORDED = [
    {
        "question": "Calculate 520 using all of these numbers: 10, 40, 13, 10.",
        "answer": "40*13*10/10",
        "metadata": {"numbers": [10, 40, 13, 10], "target": 520, "expression": "40*13*10/10"},
    },
    {
        "question": "Find a way to make 116 using all of these numbers: 71, 33, 12.",
        "answer": "12 + 71 + 33",
        "metadata": {"numbers": [71, 33, 12], "target": 116, "expression": "12 + 71 + 33"},
    },
]
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value_of(node):
    return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right)) if hasattr(node, "op") else node.value


def recorded_score(answer, entry):
    """1.0 right, 0.05 an expression that is not, 0.01 no expression. The package runs the answer; so does this."""
    try:
        numbers = sorted(map(int, re.findall(r"\d+", answer)))
        found = value_of(ast.parse(answer.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, AttributeError):
        return 0.01
    right = numbers == sorted(entry["metadata"]["numbers"]) and math.isclose(found, entry["metadata"]["target"])
    return 1.0 if right else 0.05


@pytest.fixture
def countdown(monkeypatch):
    if importlib.util.find_spec("reasoning_gym") is None:
        recorded = ModuleType("reasoning_gym")
        recorded.create_dataset = lambda name, size, seed, min_numbers, max_numbers: RECORDED[:size]
        recorded.get_score_answer_fn = lambda name: recorded_score
        monkeypatch.setitem(sys.modules, "reasoning_gym", recorded)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "countdown", raising=False)
    return importlib.import_module("countdown")


def test_the_rows_and_their_rewards(countdown, tmp_path):
    countdown.write_tasks(tmp_path / "countdown.jsonl", size=2)
    rows = [json.loads(line) for line in (tmp_path / "countdown.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row, recorded in zip(rows, RECORDED, strict=True):
        assert row["prompt"][0]["role"] == "user" and row["prompt"][0]["content"].startswith(recorded["question"])
        assert recorded["metadata"].items() <= row["metadata"].items()

    metadata = rows[0]["metadata"]
    texts = {
        metadata["expression"]: 1.0,
        "1 + 1": 0.05,
        "1/0": 0.01,
        "(": 0.01,
        "": 0.0,
        "It is 5": 0.0,
        "9**9**9**9": 0.0,
    }
    texts["__import__('os').abort()"] = texts["1" * 101] = 0.0
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    count = len(completions)
    rewards = Rewards(["countdown:solved"])
    columns = {"metadata": [metadata] * count}
    ids = [[1]] * count
    batch = rewards.score(
        prompts=[rows[0]["prompt"]] * count, completions=completions, completion_ids=ids, columns=columns, step=0
    )
    assert batch.total.tolist() == pytest.approx(list(texts.values())) and not batch.failures

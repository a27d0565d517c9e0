"""examples/countdown.py: "your own task", with reasoning-gym where it is installed.

It brings twenty packages, one of which is compiled, and `make test` does not install it. In its place: two rows and the
scores of reasoning-gym 0.1.25, recorded in November 2026.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from grpo_kernels.trainer.rewards import Rewards

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ROWS = [  # create_dataset("countdown", size=2, seed=0, min_numbers=3, max_numbers=4), without the difficulty
    {
        "question": f"{words} using all of these numbers: {', '.join(map(str, numbers))}.", "answer": expression,
        "metadata": {"numbers": numbers, "target": target, "expression": expression},
    }
    for words, numbers, target, expression in (
        ("Calculate 520", [10, 40, 13, 10], 520, "40*13*10/10"),
        ("Find a way to make 116", [71, 33, 12], 116, "12 + 71 + 33"),
    )
]  # fmt: skip
# 1.0: right; 0.05: an expression that is not; 0.01: no expression. The package runs the answer: what the example does
# not pass on to it has 0.
SCORES = {ROWS[0]["answer"]: 1.0, "1 + 1": 0.05, "1/0": 0.01, "(": 0.01}
NOT_PASSED_ON = ["", "It is 5", "9**9**9**9", "__import__('os').abort()", "1" * 101]


@pytest.fixture
def countdown(monkeypatch):
    if importlib.util.find_spec("reasoning_gym") is None:
        recorded = ModuleType("reasoning_gym")
        recorded.create_dataset = lambda name, size, seed, min_numbers, max_numbers: ROWS[:size]
        recorded.get_score_answer_fn = lambda name: lambda answer, entry: SCORES[answer]
        monkeypatch.setitem(sys.modules, "reasoning_gym", recorded)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "countdown", raising=False)
    return importlib.import_module("countdown")


def test_the_rows_and_their_rewards(countdown, tmp_path):
    countdown.write_tasks(tmp_path / "countdown.jsonl", size=2)
    rows = [json.loads(line) for line in (tmp_path / "countdown.jsonl").read_text().splitlines()]
    for row, recorded in zip(rows, ROWS, strict=True):
        assert row["prompt"][0]["role"] == "user" and row["prompt"][0]["content"].startswith(recorded["question"])
        assert recorded["metadata"].items() <= row["metadata"].items()

    expected = SCORES | dict.fromkeys(NOT_PASSED_ON, 0.0)
    completions = [[{"role": "assistant", "content": text}] for text in expected]
    count = len(completions)
    columns = {"metadata": [rows[0]["metadata"]] * count}
    batch = Rewards(["countdown:solved"]).score(
        prompts=[rows[0]["prompt"]] * count, completions=completions, completion_ids=[[1]] * count, columns=columns,
        step=0,
    )  # fmt: skip
    assert batch.total.tolist() == pytest.approx(list(expected.values())) and not batch.failures

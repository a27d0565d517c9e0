"""verl's own trainer on Ray, as examples/verl_trainer.py starts it: `make test-verl`, which makes the environment that
this needs."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
VANILLA = ("actor_rollout_ref.actor.policy_loss.loss_mode=vanilla", "actor_rollout_ref.model.use_fused_kernels=False")
# Not the means over micro-batches, whose sequences verl does not choose in a fixed order.
FIXED = ("critic/score/mean", "actor/entropy", "actor/pg_loss", "actor/grad_norm")


def train(folder: Path, *options: str) -> list[dict[str, float]]:
    """Returns the metrics that verl prints, step by step."""
    words = [sys.executable, str(ROOT / "examples" / "verl_trainer.py"), "model", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-5000:]
    steps = re.findall(r" step:\d+ - (.*)", done.stdout)
    numbers = re.compile(r"([\w/]+):(-?\d+(?:\.\d+)?(?:e[-+]\d+)?)")
    return [{name: float(value) for name, value in numbers.findall(step)} for step in steps]


def test_two_steps_are_those_of_vanilla(tmp_path):
    """Of two epochs each: the second has ratios that are not 1."""
    runpy.run_path(str(ROOT / "examples" / "random_model.py"))["save"](tmp_path / "model")
    ours, vanilla = train(tmp_path), train(tmp_path, *VANILLA)
    assert len(ours) == len(vanilla) == 2
    for found, expected in zip(ours, vanilla, strict=True):
        print({name: (found[name], expected[name]) for name in (*FIXED, "actor/pg_clipfrac")})
        assert [found[name] for name in FIXED] == pytest.approx([expected[name] for name in FIXED], rel=1e-4)
        assert found["actor/pg_clipfrac"] > 0.1 and abs(found["actor/pg_loss"]) > 1e-2

"""The demo: the task and its reward, the command, the agreement of the fused and the eager loss."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys

import pytest
import torch

from grpo_kernels import available_presets
from grpo_kernels.commands.cli import main
from grpo_kernels.demo import task
from grpo_kernels.demo.settings import DemoSettings

SMALL = DemoSettings(
    steps=4, quiet=True, device="cpu", vocab_size=32, hidden_size=32, num_layers=1, num_held_out=50,
    warmup_batch=32, max_warmup_steps=4, num_prompts=4, num_generations=4,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread():
    """Products this small gain nothing from threads, and lose much where test workers share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- task ---------------------------------------------------------------------------------------------------


def test_split_covers_every_problem_once():
    training, held_out = task.split_problems(300, seed=1)
    assert len(held_out) == 300
    assert len(set(training) | set(held_out)) == len(training) + len(held_out) == 10_000
    assert task.split_problems(300, seed=1) == (training, held_out)
    assert task.split_problems(300, seed=2)[1] != held_out


def test_text_survives_encoding():
    problems = [task.Problem(7, 5), task.Problem(99, 99), task.Problem(0, 0)]
    assert [p.prompt for p in problems] == ["07+05=", "99+99=", "00+00="]
    assert task.encode_prompts(problems).shape == (3, task.PROMPT_LENGTH)
    answers = task.encode_answers([p.answer for p in problems])
    assert answers.shape == (3, task.MAX_COMPLETION_LENGTH)
    assert [task.decode(ids) for ids in answers.tolist()] == ["21", "891", "0"]  # ones first
    assert task.completion_mask(answers).sum(1).tolist() == [3, 4, 2]
    assert task.decode([task.NUM_IDS, task.EOS_ID]) == "?"


def test_the_careless_teacher_forgets_to_carry():
    assert [task.Problem(a, b).careless_answer for a, b in [(37, 58), (75, 68), (21, 34)]] == ["58", "33", "55"]
    training, held_out = task.split_problems(400, seed=0)
    right = [p.answer == p.careless_answer for p in training + held_out]
    assert sum(right) == 55 * 55  # of 10 x 10 pairs of digits, 55 need no carry


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ([*task.encode("59"), task.EOS_ID], 1.0),
        ([*task.encode("59"), task.EOS_ID, *task.encode("1")], 1.0),  # what follows the end does not count
        ([*task.encode("95"), task.EOS_ID], 0.0),
        ([*task.encode("590"), task.EOS_ID], 0.0),
        ([task.EOS_ID], 0.0),
        (task.encode("59111"), 0.0),  # never stops
        ([*task.encode("59"), task.PAD_ID, task.EOS_ID], 0.0),
    ],
)
def test_reward(completion, expected):
    assert task.reward(torch.tensor([completion]), [task.Problem(37, 58)]).tolist() == [expected]


# --- command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["transformers", "matplotlib", "tqdm"])
def test_missing_package_is_one_sentence(package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["demo"]) == 1
    error = capsys.readouterr().err
    assert error == f'the demo needs {package}: pip install "grpo-kernels[train]"\n'


@pytest.mark.parametrize("argv", [[], ["demo", "--steps", "0"], ["demo", "--loss", "other"], ["demo", "--preset", "x"]])
def test_bad_command_line(argv, capsys):
    with pytest.raises(SystemExit):
        main(argv)
    assert "usage: grpo-kernels" in capsys.readouterr().err


def test_command_hands_its_options_over(monkeypatch, tmp_path):
    run = importlib.import_module("grpo_kernels.demo.run")
    seen = []
    monkeypatch.setattr(run, "run_demo", seen.append)
    argv = "demo --steps 3 --seed 7 --loss reference --preset dapo --beta 0.1 --device cpu --vocab-size 64 --output"
    assert main([*argv.split(), str(tmp_path)]) == 0
    expected = dict(steps=3, seed=7, loss="reference", preset="dapo", beta=0.1, device="cpu", vocab_size=64)
    assert seen == [DemoSettings(output=tmp_path, **expected)]


# --- a run --------------------------------------------------------------------------------------------------


def _run(tmp_path, **changes):
    run = importlib.import_module("grpo_kernels.demo.run")
    return run.run_demo(dataclasses.replace(SMALL, output=tmp_path, **changes))


def test_run_writes_log_and_curves(tmp_path, capsys):
    result = _run(tmp_path / "new" / "folder")
    lines = (tmp_path / "new" / "folder" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == result.records
    assert [r["step"] for r in result.records] == [1, 2, 3, 4]
    for key in ("reward", "reward_smoothed", "loss", "kl", "entropy", "clip_ratio", "completion_length", "seconds"):
        assert all(isinstance(r[key], float) and r[key] == r[key] for r in result.records), key
    assert (tmp_path / "new" / "folder" / "curves.png").read_bytes().startswith(b"\x89PNG")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("memory of the loss (80 tokens x 32 ids): fused")


def test_fused_and_reference_curves_agree(tmp_path):
    """From the same seeds both draw the same samples and take the same steps, up to rounding."""
    changes = {
        "max_warmup_steps": 60,
        "warmup_lr": 1e-2,
        "lr": 3e-3,
        "lr_warmup_steps": 1,
        "num_prompts": 16,
        "num_generations": 8,
        "steps": 6,
    }
    fused, reference = (_run(tmp_path, loss=loss, **changes).records for loss in ("fused", "reference"))
    assert any(r["reward"] > 0 for r in fused)
    assert any(r["clip_ratio"] > 0 for r in fused)
    for f, r in zip(fused, reference, strict=True):
        assert f["reward"] == r["reward"]
        assert f["completion_length"] == r["completion_length"]
        for key in ("loss", "kl", "entropy", "clip_ratio"):
            assert f[key] == pytest.approx(r[key], rel=1e-3, abs=1e-5), (f["step"], key)


def test_a_seed_gives_the_same_run_twice(tmp_path):
    first, second = (
        [{k: v for k, v in r.items() if k != "seconds"} for r in _run(tmp_path, steps=2).records] for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("preset", available_presets())
def test_every_preset_makes_a_step(preset, tmp_path):
    result = _run(tmp_path, preset=preset, steps=1, max_warmup_steps=1)
    assert torch.isfinite(torch.tensor(list(result.records[0].values()))).all()

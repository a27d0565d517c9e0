"""Evaluation: the estimators against enumeration, means over problems, the command."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training import run as train

from grpo_kernels.commands.cli import main
from grpo_kernels.trainer import evaluate as module
from grpo_kernels.trainer.data import Prompt
from grpo_kernels.trainer.evaluate import evaluate, majority_at_k, pass_at_k, votes

PROMPTS = [Prompt(f"{n}+1=", [n], {"answer": str(n + 1)}) for n in range(6)]


def score(*, completions, columns, **others):
    """1 where the completion is column `answer`, plus 0.5 for every further "!"; NaN for "?"."""
    pairs = zip(completions, columns["answer"], strict=True)
    total = [math.nan if t == "?" else float(t.strip("! ") == a) + 0.5 * t.count("!") for t, a in pairs]
    return SimpleNamespace(total=torch.tensor(total), fatal=None)


def evaluated(answers, **options):
    """evaluate() of a sampler that gives these answers in turn."""

    def sample(prompts, *, greedy, seed):
        return [([1] * len(text), text) for text in itertools.islice(itertools.cycle(answers), len(prompts))]

    return evaluate(sample, PROMPTS, SimpleNamespace(score=score, opens=False), **options)


# --- estimators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 2, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(samples):
    for correct in range(samples + 1):
        marks = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            subsets = [any(subset) for subset in itertools.combinations(marks, k)]
            assert pass_at_k(samples, correct, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-15)


@pytest.mark.parametrize(("answers", "correct", "expected"), [
    ("abb", [1, 0, 0], 0.0),
    ("ba", [0, 1], 0.5),  # a tie counts in part, whatever the order
    ("abcd", [0, 0, 0, 1], 0.25),
    ([None, None, "a"], [0, 0, 1], 1.0),  # no answer, no vote
    ([None, None], [0, 0], 0.0),
])  # fmt: skip
def test_majority(answers, correct, expected):
    assert majority_at_k(list(answers), [bool(mark) for mark in correct]) == expected


def test_what_votes():
    """Equal answers, however they are written; without one all of the text."""
    texts = (
        "<answer> 7 </answer>", "#### 7", "the answer is 7.0", " 7 ", "", "<answer>7</answer><answer>8</answer>",
        "\\boxed{1/2}", "<answer>north</answer>", "The answer is north.", "7", "#### 0.5",
    )  # fmt: skip
    assert votes(texts) == [0, 0, 0, 3, None, 5, 6, 7, 7, 3, 6]


# --- evaluate ---------------------------------------------------------------------------------------------------------


def test_means_over_problems():
    answers = ["1", "0", "1!", "?", *["0"] * 20]  # of six problems, the first: two of four are right, one is unscored
    found = evaluated(answers, num_samples=4, correct_at=1.0)
    assert found == {
        "reward": pytest.approx(2.5 / 3 / 6), "reward_error": pytest.approx(2.5 / 3 / 6),  # of (2.5 / 3, 0, 0, 0, 0, 0)
        "greedy_reward": pytest.approx(1.5 / 5), "pass_at_1": pytest.approx(2 / 4 / 6), "pass_at_k": {
            "1": pytest.approx(2 / 4 / 6), "2": pytest.approx(5 / 6 / 6), "4": pytest.approx(1 / 6),
        },
        "majority_at_k": pytest.approx((2 / 4) / 6),  # "1", "0", "1!", "?": a vote each
        "best_of_n": pytest.approx(1.5 / 6), "greedy": pytest.approx(1 / 6), "mean_length": pytest.approx(25 / 24),
        "problems": 6, "samples": 4, "unscored": 1, "examples": [
            {"prompt": f"{i}+1=", "completion": text, "reward": reward}
            for i, (text, reward) in enumerate([("1", 1.0), ("0", 0.0), ("1!", 0.5)])
        ],
    }  # fmt: skip
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_accuracy_only_where_rewards_say_what_is_correct():
    accuracies = set(module.ACCURACIES)
    for answers, known in ((["1", "0"], True), (["1", "1!"], False), (["0!"], False), (["?"], False)):
        found = evaluated(answers, num_samples=2)
        assert (accuracies <= found.keys()) == known == bool(accuracies & found.keys())
        assert known == ("pass@1" in module.table(found)) == ("no pass@k" not in module.table(found))
    assert found["reward"] is found["greedy_reward"] is found["best_of_n"] is None and found["unscored"] == 12
    found = evaluated(["0!"], correct_at=0.5)
    assert found["pass_at_1"] == found["majority_at_k"] == 1.0


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_takes_a_run_a_checkpoint_or_a_model(model, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train(model, data, "run", max_steps=1, eval_dataset_name=data) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    for target in ("run", "run/checkpoint-1"):
        assert main(["evaluate", target, "--output", "found.json"]) == 0
        found = json.loads(Path("found.json").read_text())
        assert found["pass_at_1"] == summary["pass_at_1_after"] and found["problems"] == 12
    argv = [str(model), "--dataset-name", str(data), "--reward-funcs", "exact_answer", "--max-completion-length", "5"]
    assert main(["evaluate", *argv, "--num-samples", "3", "--ks", "3"]) == 0
    assert re.findall(r"(?:pass|majority)@\d", capsys.readouterr().out)[-2:] == ["pass@3", "majority@3"]
    assert main(["evaluate", *argv, "--num-samples", "2"]) == 0
    found = capsys.readouterr()
    assert "12 problems, 2 samples each" in found.out and "pass@2" in found.out
    assert "Loading weights" not in found.err

    Path("no-model").mkdir()
    shutil.copy("run/config.json", "no-model")
    for line, message in {
        "no-model": "holds no final model",
        "no-such": "no-such is neither the output folder of a run nor its checkpoint; a model needs --dataset-name a",
        "run/model": "run/model is neither the output folder of a run nor its checkpoint; a model needs",
        "run --num-samples 0": "num_samples=0; expected at least 1",
        "run --ks 1 8": "ks=[1, 8]; expected numbers from 1 to num_samples=4",
        "run --max-prompts -1": "eval_max_prompts=-1; expected",
        "run --max-completion-length 0": "max_completion_length=0; expected",
        "run --temperature 0": "temperature=0.0; expected",
        "run --correct-at nan": "correct_at=nan; expected",
        "run --output .": "output=.; expected a file, in a folder that exists",
        "run --output /no/such/folder/x.json": "x.json; expected a file, in a folder that exists",
        "run --dataset-test-split dev": f"dataset_test_split='dev': {data} is one split",
        "run --dataset-name no.csv": "dataset_name=no.csv: there is no such file or folder in",
    }.items():
        assert main(["evaluate", *line.split()]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, line


def test_nothing_that_a_folder_names_is_executed(model, data, tmp_path, monkeypatch, capsys):
    """The reward of a run and the code of its model's repository run where the command line asks for them."""
    monkeypatch.chdir(tmp_path)
    reward = "def f(completions, **_):\n    return [1.0] * len(completions)\n"
    Path("mine.py").write_text("open('made', 'w')\n" + reward)
    assert train(model, data, "run", max_steps=1, eval_dataset_name=data, reward_funcs="mine.py:f") == 0
    written = {
        Path(name): json.loads(Path(name).read_text()) for name in ("run/config.json", "run/checkpoint-1/run.json")
    }
    Path("made").unlink()
    sys.modules.pop(str(tmp_path / "mine.py"))
    own, built_in = ["--reward-funcs", "mine.py:f"], {"reward_funcs": ["arithmetic", "soft_overlong=2"]}
    for changes, words, message in (
        ({}, [], ".json names reward functions that are code: 'mine.py:f'; to run it, expected --reward-funcs with"),
        ({"reward_funcs": ["arithmetic", "mine:f"]}, [], "reward functions that are code: 'arithmetic', 'mine:f'"),
        ({"temperature": "hot"}, own, ".json: temperature='hot' is a str; expected float"),
        ({"reward_funcs": [["mine.py:f"]]}, [], ".json: reward_funcs=[['mine.py:f']] is a list; expected list[str]"),
        (built_in | {"trust_remote_code": True}, [], ""),
        ({}, own, ""),
    ):
        for path, saved in written.items():
            path.write_text(json.dumps(saved | changes))
        for target in ("run", "run/checkpoint-1"):
            status = main(["evaluate", target, *words, "--num-samples", "1"])
            assert status == (2 if message else 0) and message in capsys.readouterr().err, (changes, words)
            assert Path("made").exists() == (words == own and not message)
    for words, trusted in (([], False), (["--trust-remote-code"], True)):
        for target in ("run", "run/checkpoint-1", str(model)):
            options = module.parser().parse_args([target, *own, *words, "--dataset-name", str(data)])
            assert module.resolve(options)[1].trust_remote_code is trusted


def test_an_adapter_is_evaluated_from_any_folder(model, data, tmp_path, monkeypatch, capsys):
    """With the columns of GSM8K."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "base")
    rows, path = [json.loads(line) for line in data.read_text().splitlines()], tmp_path / "gsm8k.csv"
    path.write_text("question,answer\n" + "".join(f"{row['prompt']},#### {row['answer']}\n" for row in rows))
    options = {"prompt_column": "question", "reward_funcs": "gsm8k", "eval_dataset_name": path.name, "max_steps": 1}
    assert train("base", path.name, "run", use_peft=True, **options) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert main(["evaluate", "../run", "--dataset-name", str(path)]) == 0
    assert main(["evaluate", "../base", "--dataset-name", str(path), "--reward-funcs", "gsm8k", "--prompt-column",
                 "question", "--max-completion-length", "5"]) == 0  # fmt: skip
    assert main(["evaluate", "../run"]) == 2
    assert "dataset_name=gsm8k.csv: there is no such file or folder in" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "base")
    assert main(["evaluate", "../run", "--dataset-name", str(path)]) == 2
    words = f"base_model_name_or_path={tmp_path / 'base'}: there is no such"
    assert words in capsys.readouterr().err

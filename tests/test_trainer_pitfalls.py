"""The pitfalls of GRPO trainers, one test each; some are in files of their subject. Numbers: the trainer's README."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
import training
from training import run, steps
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GPT2Config, GPT2LMHeadModel

from grpo_kernels.trainer.arguments import TrainArguments
from grpo_kernels.trainer.batch import model_inputs
from grpo_kernels.trainer.model import Policy
from grpo_kernels.trainer.rollout import Completion, infer
from grpo_kernels.trainer.sampling import eos_ids, generate


def test_pitfall_03_a_generation_config_has_no_say_in_sampling_and_is_saved(model, data, tmp_path):
    hostile = tmp_path / "hostile"
    shutil.copytree(model, hostile)
    settings = GenerationConfig(do_sample=True, top_k=2, top_p=0.3, temperature=0.2, repetition_penalty=5.0)
    settings.pad_token_id = settings.eos_token_id = 0
    settings.save_pretrained(hostile)
    assert run(hostile, data, tmp_path / "a", save_rollouts=True) == 0
    assert run(model, data, tmp_path / "b", save_rollouts=True) == 0
    (a, *_), (b, *_) = training.rollouts(tmp_path / "a"), training.rollouts(tmp_path / "b")
    assert [c["ids"] for c in a] == [c["ids"] for c in b]
    assert steps(tmp_path / "a")[0]["rollout_mismatch/max"] < 1e-4
    assert GenerationConfig.from_pretrained(tmp_path / "a" / "model").top_k == 2


def test_pitfall_04_the_loss_has_the_temperature_of_sampling(model, data, tmp_path):
    assert run(model, data, tmp_path / "run", temperature=0.6, num_iterations=2,
               reward_funcs="training:length") == 0  # fmt: skip
    first, second, *_ = steps(tmp_path / "run")
    assert first["rollout_mismatch/max"] < 1e-4  # against the logits that were sampled from
    assert first["ratio/min"] == first["ratio/max"] == 1.0
    assert second["ratio/max"] != 1.0


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_pitfall_05_16_gradients_and_metrics_do_not_depend_on_the_split_into_passes(model, data, tmp_path, loss_type):
    """Means of the passes' means would differ: the passes have unequal numbers of tokens."""
    options = {"loss_type": loss_type, "beta": 0.1, "entropy_coef": 0.01, "reward_funcs": "training:length"}
    assert run(model, data, tmp_path / "whole", save_rollouts=True, **options) == 0
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "replay": tmp_path / "whole/rollouts",
             "vllm_importance_sampling_correction": False}  # fmt: skip
    assert run(model, data, tmp_path / "split", **options, **split) == 0
    assert len({len(c["ids"]) for rollout in training.rollouts(tmp_path / "whole") for c in rollout}) > 1
    sums = ("loss", "grad_norm", "kl", "kl_sequence", "entropy", "ratio/max", "clip_ratio/region", "zero_gradient")
    for a, b in zip(steps(tmp_path / "whole"), steps(tmp_path / "split"), strict=True):
        for name in sums:
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name
    assert b["kl"] > 0


def test_pitfall_06_masks_go_by_position_and_every_end_ends(model, data, tmp_path):
    """Padding is the end of sequence here, and the model's generation_config names a second end."""
    two_ends = tmp_path / "model"
    shutil.copytree(model, two_ends)
    settings = GenerationConfig(eos_token_id=[0, 5], pad_token_id=0)
    settings.save_pretrained(two_ends)
    assert run(two_ends, data, tmp_path / "run", save_rollouts=True, max_steps=1, max_completion_length=20) == 0
    rollout = training.rollouts(tmp_path / "run")[0]
    assert {c["ids"][-1] for c in rollout if c["ended"]} == {0, 5}
    assert all(not {0, 5} & set(c["ids"][:-1]) for c in rollout)
    record = steps(tmp_path / "run")[0]
    assert record["completions/clipped_ratio"] == sum(not c["ended"] for c in rollout) / len(rollout)
    assert record["num_tokens"] == sum(len(c["ids"]) for c in rollout)  # the end is a token of the loss

    arguments = TrainArguments(max_completion_length=20)
    rows = [Completion(0, "", [1, 2, 3][: 1 + i % 3], {}, c["ids"], c["ended"]) for i, c in enumerate(rollout)]
    inputs = model_inputs(rows, arguments, 0, "cpu")
    assert inputs["completion_mask"].sum(1).tolist() == [len(c["ids"]) for c in rollout]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_pitfall_07_padding_changes_no_log_probability(model, kind):
    """GPT-2 learns its positions: they count from a row's first token, not from its padding."""
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(vocab_size=32, n_positions=32, n_embd=32, n_layer=1, n_head=2, initializer_range=0.3)
        lm = GPT2LMHeadModel(config).eval()
        lm.generation_config.pad_token_id = lm.generation_config.eos_token_id = 0
    else:
        lm = AutoModelForCausalLM.from_pretrained(model)
    policy = Policy(lm)
    prompts = [[3], [4, 5, 6, 7], [8, 9]]
    torch.manual_seed(1)
    sampled = generate(lm, prompts, TrainArguments(max_completion_length=6), ends=[0], pad_id=0)
    rows = [Completion(0, "", p, {}, s.ids, s.ended) for p, s in zip(prompts, sampled, strict=True)]
    arguments = TrainArguments()
    together = infer(policy, "logps", **model_inputs(rows, arguments, 0, "cpu"), temperature=1.0)
    for i, (row, s) in enumerate(zip(rows, sampled, strict=True)):
        alone = infer(policy, "logps", **model_inputs([row], arguments, 0, "cpu"), temperature=1.0)[0]
        torch.testing.assert_close(together[i, : len(row.ids)], alone, rtol=0, atol=2e-5)
        torch.testing.assert_close(alone, s.logps, rtol=0, atol=2e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_pitfall_08_dropout_is_off(data, model, tmp_path, checkpointing):
    config = GPT2Config(
        vocab_size=32, n_positions=32, n_embd=32, n_layer=1, n_head=2, attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "model")
    options = {"gradient_checkpointing": checkpointing, "num_iterations": 2, "reward_funcs": "training:length"}
    assert run(tmp_path / "model", data, tmp_path / "run", **options) == 0
    first = steps(tmp_path / "run")[0]
    assert first["rollout_mismatch/max"] < 1e-4 and first["log_ratio_first_max"] == 0.0


def test_pitfall_09_old_log_probabilities_take_the_path_of_the_updates(model, data, tmp_path):
    options = {"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "bf16": True}
    assert run(model, data, tmp_path / "run", max_steps=4, reward_funcs="training:length", **options) == 0
    first, second, third, _ = steps(tmp_path / "run")
    assert first["log_ratio_first_max"] == 0.0  # the same bits, under autocast too
    assert second["rollout"] == third["rollout"] == 0 and second["num_tokens"] == 32 * second["completions/mean_length"]
    assert "log_ratio_first_max" not in second and third["ratio/max"] != 1.0


def test_pitfall_10_the_distance_to_the_sampling_policy_is_logged_and_corrected(model, data, tmp_path):
    options = {"reward_funcs": "training:length", "max_steps": 1}
    assert run(model, data, tmp_path / "source", save_rollouts=True, **options) == 0
    replay = tmp_path / "source" / "rollouts"
    path = replay / "rollout-000000.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:  # as if the engine had sampled from another policy
        row["logps"] = [x - 0.5 for x in row["logps"]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(model, data, tmp_path / "on", replay=replay, vllm_importance_sampling_mode="token_truncate",
               vllm_importance_sampling_clip_max=1.2, **options) == 0  # fmt: skip
    assert run(model, data, tmp_path / "off", replay=replay, vllm_importance_sampling_correction=False, **options) == 0
    on, off = steps(tmp_path / "on")[0], steps(tmp_path / "off")[0]
    assert on["rollout_mismatch/max"] == pytest.approx(0.5, abs=1e-4) == off["rollout_mismatch/max"]
    assert on["rollout_weight/mean"] == pytest.approx(1.2) and on["rollout_ess"] == pytest.approx(1.0)
    assert on["grad_norm"] == pytest.approx(1.2 * off["grad_norm"], rel=1e-4) and "rollout_weight/mean" not in off


def test_pitfall_11_completions_without_a_verdict_are_out_of_baseline_and_gradient(model, data, tmp_path, capfd):
    assert run(model, data, tmp_path / "run", reward_funcs="training:sometimes_nan", save_rollouts=True,
               logging_samples=8) == 0  # fmt: skip
    rollout = training.rollouts(tmp_path / "run")[0]
    for first in range(0, len(rollout), 4):
        group = rollout[first : first + 4]
        assert math.isnan(group[1]["reward"]) and group[1]["advantage"] == 0.0
        scored = torch.tensor([group[i]["reward"] for i in (0, 2, 3)])
        expected = (scored - scored.mean()) / (scored.std() + 1e-4)
        torch.testing.assert_close(torch.tensor([group[i]["advantage"] for i in (0, 2, 3)]), expected)
    assert steps(tmp_path / "run")[0]["unscored"] == len(rollout) // 4
    samples = (tmp_path / "run" / "samples.jsonl").read_text()
    assert '"reward": null' in samples and "NaN" not in samples  # which JSON lacks
    assert "completions unscored, the first by sometimes_nan" in capfd.readouterr().err


def test_pitfall_11_a_pass_without_a_scored_token_is_no_error(model, data, tmp_path):
    options = {"mask_truncated_completions": True, "max_completion_length": 1, "per_device_train_batch_size": 1,
               "gradient_accumulation_steps": 8, "reward_funcs": "training:length"}  # fmt: skip
    assert run(model, data, tmp_path / "run", **options) == 0
    assert all(math.isfinite(record["grad_norm"]) for record in steps(tmp_path / "run"))


def test_pitfall_15_dynamic_sampling_that_never_fills_ends(model, data, tmp_path):
    options = {"reward_funcs": "training:constant", "dynamic_sampling": "refill", "dynamic_sampling_max_rounds": 3}
    adaptive = {"beta": 0.1, "kl_target": 0.05, "kl_horizon": 8}
    assert run(model, data, tmp_path / "run", **adaptive, **options) == 0
    record, *_, last = steps(tmp_path / "run")
    assert last["beta"] == 0.1 and "kl" not in last  # no token, no KL to adapt to
    assert (record["refill_rounds"], record["dropped_groups"], record["epoch"]) == (2, 2, 3 * 2 / 12)
    assert record["loss"] == record["grad_norm"] == 0.0 and record["num_tokens"] == 0


@pytest.mark.parametrize("mode", ["drop", "refill"])
def test_pitfall_15_groups_of_equal_rewards_are_out_of_the_loss(model, data, tmp_path, mode):
    options = {"per_device_train_batch_size": 32, "dynamic_sampling": mode, "reward_funcs": "training:rare"}
    if mode == "refill":
        options["dynamic_sampling_max_rounds"] = 2
    assert run(model, data, tmp_path / "run", save_rollouts=True, max_steps=1, **options) == 0
    rollout, record = training.rollouts(tmp_path / "run")[0], steps(tmp_path / "run")[0]
    groups = [rollout[i : i + 4] for i in range(0, len(rollout), 4)]
    useful = [g for g in groups if len({c["reward"] for c in g}) > 1]
    assert useful and all(g[0]["dropped"] == (g not in useful) for g in groups)
    assert record["dropped_groups"] == len(groups) - len(useful)
    assert record["num_tokens"] == sum(len(c["ids"]) for g in useful for c in g)
    assert record.get("refill_rounds") == (1 if mode == "refill" else None)


def test_pitfall_18_the_kl_starts_at_0_and_the_reference_follows(model, data, tmp_path):
    options = {"beta": 0.1, "max_steps": 4, "reward_funcs": "training:length"}
    assert run(model, data, tmp_path / "frozen", **options) == 0
    copied = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0}
    assert run(model, data, tmp_path / "copied", **options, **copied) == 0
    frozen, synced = ([r["kl"] for r in steps(tmp_path / name)] for name in ("frozen", "copied"))
    assert frozen[0] == synced[0] == 0.0 and min(frozen[1:]) > 0
    assert synced[1] == frozen[1] and synced[2] == 0.0 < synced[3]


def test_pitfall_18_the_reference_of_a_continued_adapter_is_its_start(model, data, tmp_path):
    options = {"beta": 0.1, "use_peft": True, "max_steps": 2, "lora_target_modules": ["q_proj", "v_proj"]}
    assert run(model, data, tmp_path / "a", save_steps=1, reward_funcs="training:length", **options) == 0
    kl = [r["kl"] for r in steps(tmp_path / "a")]
    assert kl[0] == 0.0 < kl[1]
    merged = tmp_path / "merged"
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "a" / "model")
    adapted.merge_and_unload().save_pretrained(merged)
    AutoTokenizer.from_pretrained(model).save_pretrained(merged)
    assert run(merged, data, tmp_path / "b", reward_funcs="training:length", **options) == 0
    assert steps(tmp_path / "b")[0]["kl"] == 0.0


def test_pitfall_20_what_was_sampled_is_what_is_trained(model):
    """Ids that no text gives back: decoding and encoding them again would change them."""
    lm = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    torch.manual_seed(3)
    arguments = TrainArguments(max_completion_length=8)
    sampled = generate(lm, [[1, 2]] * 20, arguments, ends=eos_ids(lm, tokenizer), pad_id=0)
    rows = [Completion(0, "", [1, 2], {}, s.ids, s.ended) for s in sampled]
    inputs = model_inputs(rows, TrainArguments(), 0, "cpu")
    found = [ids[mask].tolist() for ids, mask in zip(inputs["completion_ids"], inputs["completion_mask"], strict=True)]
    assert found == [s.ids for s in sampled]
    assert any(tokenizer(tokenizer.decode(s.ids))["input_ids"] != s.ids for s in sampled)

"""The pitfalls of GRPO trainers, one test each; some are in files of their subject. Numbers: the trainer's README."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
import training
from training import rollouts, steps
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GPT2Config, GPT2LMHeadModel

import grpo_kernels as gk
from grpo_kernels.trainer.arguments import TrainArguments
from grpo_kernels.trainer.batch import assign_weights, model_inputs
from grpo_kernels.trainer.model import Policy
from grpo_kernels.trainer.rollout import Completion, infer
from grpo_kernels.trainer.sampling import generate


def test_pitfall_03_a_generation_config_has_no_say_in_sampling_and_is_saved(model, trained, tmp_path):
    hostile = shutil.copytree(model, tmp_path / "hostile")
    settings = GenerationConfig(do_sample=True, top_k=2, top_p=0.3, temperature=0.2, repetition_penalty=5.0)
    settings.pad_token_id = settings.eos_token_id = 0
    settings.save_pretrained(hostile)
    a, b = trained("a", model_name_or_path=hostile), trained("b")
    assert [c.ids for c in rollouts(a)[0]] == [c.ids for c in rollouts(b)[0]]
    assert steps(a)[0]["rollout_mismatch/max"] < 1e-4
    assert GenerationConfig.from_pretrained(a / "model").top_k == 2


def test_pitfall_04_the_loss_has_the_temperature_of_sampling(trained):
    """And scores the ids that truncated sampling kept."""
    for rule, most in (({"top_p": 0.7, "top_k": 6}, 6), ({"min_p": 0.5}, 20)):
        options = {"temperature": 0.6, "num_iterations": 2, "max_steps": 2, **rule}
        folder = trained(f"up to {most}", reward_funcs="training:length", **options)
        first, second = steps(folder)
        assert first["rollout_mismatch/max"] < 1e-4  # against the logits that were sampled from
        assert first["ratio/min"] == first["ratio/max"] == 1.0 != second["ratio/max"]
        numbers = [len(ids) for c in rollouts(folder)[0] for ids in c.kept]
        assert min(numbers) >= 1 and 1 < max(numbers) <= most, numbers


def test_pitfall_06_20_masks_go_by_position_every_end_ends_and_what_was_sampled_is_trained(model, trained, tmp_path):
    """Padding is the end of sequence here, and the model's generation_config names a second end. Decoding and encoding
    the ids again would change them."""
    two_ends = shutil.copytree(model, tmp_path / "model")
    GenerationConfig(eos_token_id=[0, 5], pad_token_id=0).save_pretrained(two_ends)
    folder = trained(model_name_or_path=two_ends, max_steps=1, max_completion_length=20)
    (rollout,), (record,) = rollouts(folder), steps(folder)
    assert {c.ids[-1] for c in rollout if c.ended} == {0, 5}
    assert all(not {0, 5} & set(c.ids[:-1]) for c in rollout)
    assert record["completions/clipped_ratio"] == sum(not c.ended for c in rollout) / len(rollout)
    assert record["num_tokens"] == sum(len(c.ids) for c in rollout)  # the end is a token of the loss
    assert record["rollout_mismatch/max"] < 1e-4

    rows = [Completion(0, "", [1, 2, 3][: 1 + i % 3], {}, c.ids, c.ended) for i, c in enumerate(rollout)]
    inputs = model_inputs(rows, TrainArguments(max_completion_length=20), 0, "cpu")
    found = [ids[mask].tolist() for ids, mask in zip(inputs["completion_ids"], inputs["completion_mask"], strict=True)]
    assert found == [c.ids for c in rollout]
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert any(tokenizer(tokenizer.decode(ids))["input_ids"] != ids for ids in found)


def random_gpt2(**options):
    """It learns its positions."""
    torch.manual_seed(0)
    given = dict(vocab_size=32, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(**given, pad_token_id=0, **options)).eval()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_pitfall_07_padding_changes_no_log_probability(model, kind):
    """Positions count from a row's first token, not from its padding."""
    lm = random_gpt2(initializer_range=0.3) if kind == "gpt2" else AutoModelForCausalLM.from_pretrained(model)
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
def test_pitfall_08_dropout_is_off(model, trained, tmp_path, checkpointing):
    random_gpt2(attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "model")
    options = {"gradient_checkpointing": checkpointing, "num_iterations": 2, "reward_funcs": "training:length"}
    first = steps(trained(model_name_or_path=tmp_path / "model", **options))[0]
    assert first["rollout_mismatch/max"] < 1e-4 and first["log_ratio_first_max"] == 0.0


def test_pitfall_09_old_log_probabilities_take_the_path_of_the_updates(trained):
    options = {"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "bf16": True}
    first, second, third, _ = steps(trained(max_steps=4, reward_funcs="training:length", **options))
    assert first["log_ratio_first_max"] == 0.0  # the same bits, under autocast too
    assert second["rollout"] == third["rollout"] == 0 and second["num_tokens"] == 32 * second["completions/mean_length"]
    assert "log_ratio_first_max" not in second and third["ratio/max"] != 1.0


def test_pitfall_10_the_distance_to_the_sampling_policy_is_logged_and_corrected(trained):
    options = {"reward_funcs": "training:length", "max_steps": 1}
    (rollout,) = rollouts(source := trained("source", **options))
    for c in rollout:  # as if the engine had sampled from another policy
        c.logps -= 0.5
    training.write_rollout(source, 0, rollout)
    corrections = {
        "on": {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.2},
        "off": {"vllm_importance_sampling_mode": "none"},
    }
    found = []
    for name, correction in corrections.items():
        with training.replayed(source):
            found += steps(trained(name, use_vllm=True, **correction, **options))
    on, off = found
    assert on["rollout_mismatch/max"] == pytest.approx(0.5, abs=1e-4) == off["rollout_mismatch/max"]
    assert on["rollout_weight/mean"] == pytest.approx(1.2) and on["rollout_ess"] == pytest.approx(1.0)
    assert on["grad_norm"] == pytest.approx(1.2 * off["grad_norm"], rel=1e-4) and "rollout_weight/mean" not in off


def test_pitfall_10_weights_are_normalised_and_samples_rejected_over_the_rollout(trained):
    """Whatever the split into passes, and after a resume in the middle of the rollout; equal to the functions."""
    options = {"reward_funcs": "training:length", "num_iterations": 2, "max_steps": 2}
    (rollout,) = rollouts(source := trained("source", **options))
    for c in rollout:  # as if the engine had sampled from another policy
        c.logps += 0.3 * torch.randn(c.logps.shape)
    training.write_rollout(source, 0, rollout)
    corrected = options | {
        "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.2,
        "rollout_is_batch_normalize": True, "rollout_rs": {"token_k1": [0.6, 1.6], "seq_mean_k3": 0.1},
    }  # fmt: skip
    found = {}
    for name, own in {
        "whole": {}, "split": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        "out of the mask": {"rollout_rs_mask": True, "per_device_train_batch_size": 4,
                            "gradient_accumulation_steps": 2},
        "rejected": {"vllm_importance_sampling_mode": "none", "rollout_is_batch_normalize": False,
                     "vllm_importance_sampling_clip_max": 3.0},
    }.items():  # fmt: skip
        with training.replayed(source):
            found[name] = steps(trained(name, **corrected | own))
    first, second = found["whole"]
    names = ("rollout_weight/mean", "rollout_weight/dropped", "rollout_ess", "rollout_ratio/ess", "perplexity/rollout")
    assert [first[name] for name in names] == [second[name] for name in names]
    for name in ("loss", "grad_norm", *names):
        assert found["split"][0][name] == pytest.approx(first[name], rel=1e-4, abs=1e-6)

    logps = (torch.nn.utils.rnn.pad_sequence([getattr(c, x) for c in rollout], True) for x in ("old_logps", "logps"))
    (old, sampled), lengths = logps, torch.tensor([len(c.ids) for c in rollout])
    given = dict(completion_mask=torch.arange(old.shape[1]) < lengths[:, None])
    kept = gk.rejection_mask(old, sampled, corrected["rollout_rs"], **given)
    weights = gk.rollout_weights(old, sampled, cap=1.2, batch_normalize=True, **given) * kept
    assert 0 < first["rollout_weight/dropped"] == pytest.approx(1 - (kept.sum() / lengths.sum()).item())
    assert first["rollout_weight/mean"] == pytest.approx((weights.sum() / lengths.sum()).item(), rel=1e-4)
    verls, share = found["out of the mask"][0], (kept.sum() / lengths.sum()).item()  # there is no KL
    assert verls["rollout_rejected"] == pytest.approx(1 - share) and verls["rollout_weight/dropped"] == 0
    for name in ("loss", "grad_norm"):
        assert verls[name] == pytest.approx(first[name] / share, rel=1e-4, abs=1e-6)
    assert "rollout_rejected" not in first
    rejected = found["rejected"][0]
    assert rejected["rollout_weight/max"] == 1 and rejected["rollout_weight/min"] == 0
    assert rejected["rollout_ess"] == pytest.approx(rejected["rollout_weight/mean"])
    assert rejected["rollout_weight/dropped"] == first["rollout_weight/dropped"]
    for last in (1, 2):
        with training.replayed(source):
            resumed = steps(trained("cut", **corrected | {"max_steps": last, "resume_from_checkpoint": "auto"}))
    assert [resumed[1][name] for name in ("loss", "grad_norm", *names)] == [
        second[name] for name in ("loss", "grad_norm", *names)
    ]


def test_pitfall_10_weights_are_normalised_over_what_is_scored():
    a = TrainArguments(use_vllm=True, vllm_importance_sampling_mode="token_truncate", rollout_is_batch_normalize=True)
    a.mask_truncated_completions, rollout = True, []
    for n in (3, 1, 2):  # the first has no end
        logps = {"logps": torch.full((n,), -2.0), "old_logps": torch.full((n,), -2.0 - n / 9)}
        rollout.append(Completion(0, "", [1], {}, [2] * n, n < 3, **logps))
    assign_weights(rollout, a, "cpu")
    scored = torch.cat([c.weight for c in rollout[1:]])
    assert scored.mean().item() == pytest.approx(1.0) and scored.max() > scored.min()


def test_pitfall_11_completions_without_a_verdict_are_out_of_baseline_and_gradient(trained, capfd):
    folder = trained(reward_funcs="training:sometimes_nan")
    rollout = rollouts(folder)[0]
    for first in range(0, len(rollout), 4):
        group = rollout[first : first + 4]
        assert math.isnan(group[2].reward) and group[2].advantage == 0.0
        scored = torch.tensor([group[i].reward for i in (0, 1, 3)])
        expected = (scored - scored.mean()) / (scored.std() + 1e-4)
        torch.testing.assert_close(torch.tensor([group[i].advantage for i in (0, 1, 3)]), expected)
    assert steps(folder)[0]["unscored"] == len(rollout) // 4
    samples = (folder / "samples.jsonl").read_text()
    assert '"reward": null' in samples and "NaN" not in samples  # which JSON lacks
    assert "completions unscored, the first by sometimes_nan" in capfd.readouterr().err


def test_pitfall_11_a_pass_without_a_scored_token_is_no_error(trained):
    options = {"mask_truncated_completions": True, "max_completion_length": 1, "per_device_train_batch_size": 1,
               "gradient_accumulation_steps": 8, "reward_funcs": "training:length"}  # fmt: skip
    records = steps(trained(**options, num_iterations=2))
    assert all(math.isfinite(record["grad_norm"]) for record in records)
    for name in ("ratio/min", "rollout_ratio/min"):  # a pass without a token has no extreme
        assert {record[name] > 0.5 for record in records if name in record} == {True}


def test_pitfall_15_groups_of_equal_rewards_are_out_of_the_loss(trained):
    options = {"per_device_train_batch_size": 32, "dynamic_sampling": True, "max_steps": 1}
    folder = trained("some", reward_funcs="training:rare", **options)
    (rollout,), (record,) = rollouts(folder), steps(folder)
    groups = [rollout[i : i + 4] for i in range(0, len(rollout), 4)]
    useful = [g for g in groups if len({c.reward for c in g}) > 1]
    assert useful and all(g[0].dropped == (g not in useful) for g in groups)
    assert record["dropped_groups"] == len(groups) - len(useful)
    assert record["num_tokens"] == sum(len(c.ids) for g in useful for c in g)
    (record,) = steps(trained("none", reward_funcs="training:constant", beta=0.1, kl_target=0.05, **options))
    assert record["beta"] == 0.1 and "kl" not in record  # no token, no KL to adapt to
    assert record["loss"] == record["grad_norm"] == record["num_tokens"] == 0


def test_pitfall_18_the_reference_of_a_continued_adapter_is_its_start(trained, tmp_path):
    options = {"beta": 0.1, "use_peft": True, "max_steps": 2, "reward_funcs": "training:length", "save_steps": 1}
    first = trained("a", **options)
    again = trained("b", model_name_or_path=first / "model", **options)
    for folder in (first, again):
        kl = [r["kl"] for r in steps(folder)]
        assert kl[0] == 0.0 < kl[1]
    begin = {"resume_from_checkpoint": tmp_path / "b" / "checkpoint-1", "model_name_or_path": first / "model"}
    resumed, name = trained("c", **options, **begin), "model/adapter_model.safetensors"
    assert (resumed / name).read_bytes() == (again / name).read_bytes() != (first / name).read_bytes()

"""A run with a chat model and word problems, from end to end."""

from __future__ import annotations

import json

import chat_models
import pytest
import torch
from chat_models import WORD_PROBLEMS
from training import run, steps
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_kernels.commands.cli import main
from grpo_kernels.trainer.data import load_prompts


def test_prompts_are_what_the_chat_template_writes(tmp_path):
    words = AutoTokenizer.from_pretrained(chat_models.tiny_chat(tmp_path))
    first = load_prompts(str(WORD_PROBLEMS), tokenizer=words, context=256)[0]
    system, user = first.prompt
    assert words.decode(first.ids) == (
        f"<|im_start|>system\n{system['content']}<|im_end|>\n<|im_start|>user\n{user['content']}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert first.ids.count(words.bos_token_id) == 3 and first.ids.count(words.eos_token_id) == 2  # ids, not text
    assert first.columns["answer"].endswith("#### 22")


def vowels(completions, **_):
    """A reward that differs between the completions of a model that solves nothing."""
    texts = [messages[0]["content"] for messages in completions]
    return [sum(c in "aeiou" for c in text) / max(len(text), 1) for text in texts]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_two_steps_on_one_rollout_of_the_word_problems(lora, tmp_path):
    """The policy that samples is the one that is scored."""
    model, output = chat_models.tiny_chat(tmp_path / "start"), tmp_path / "run"
    given = dict(
        reward_funcs=["gsm8k", "test_trainer_models:vowels"], reward_weights=[1, 0.5], per_device_train_batch_size=4,
        num_iterations=2, max_steps=2, max_completion_length=16, temperature=0.9, beta=0.1, learning_rate=1e-3,
        save_rollouts=True, use_peft=lora, per_device_generation_batch_size=3, eval_dataset_name=WORD_PROBLEMS,
        eval_max_prompts=3, eval_num_samples=2, correct_at=1.0,  # that of gsm8k: vowels give less
    )  # fmt: skip
    assert run(model, WORD_PROBLEMS, output, **given) == 0
    first, second = steps(output)
    assert first["log_ratio_first_max"] == 0.0 and first["rollout_mismatch/max"] < 1e-3
    assert first["grad_norm"] > 0.0 and first["rewards/vowels/std"] > 0.0 and first["unscored"] == 0
    assert 0.0 <= first["rewards/gsm8k/mean"] <= 1.0
    assert first["kl"] == 0.0 and second["kl"] > 0.0  # the step has moved the policy
    sample = json.loads((output / "samples.jsonl").read_text().splitlines()[0])
    assert [message["role"] for message in sample["prompt"]] == ["system", "user"]
    saved, start = (AutoTokenizer.from_pretrained(folder) for folder in (output / "model", model))
    assert saved.chat_template == start.chat_template and saved.get_vocab() == start.get_vocab()
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["pass_at_1_before"], summary["pass_at_1_after"]) == (0.0, 0.0)  # its weights are random
    assert (output / "model" / "adapter_model.safetensors").exists() is lora
    if not lora:
        saved, start = (AutoModelForCausalLM.from_pretrained(folder) for folder in (output / "model", model))
        assert saved.generation_config.to_dict() == start.generation_config.to_dict()
        assert not torch.equal(saved.lm_head.weight, start.lm_head.weight)
    assert main(["evaluate", str(output), "--num-samples", "2", "--max-prompts", "3"]) == 0

"""Rollouts from vLLM itself, its engine for CPUs: `make test-vllm`, which makes the environment that this needs.

The head is tied in one model and not in the other; prompts are longer than a block of the cache of prefixes and come
again at every step, so that a head or a cache of earlier weights shows in rollout_mismatch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import training
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_kernels.trainer import vllm
from grpo_kernels.trainer.arithmetic import EOS_ID, tokenizer

OPTIONS = {
    "use_vllm": True, "vllm_kwargs": {"enforce_eager": True, "block_size": 32}, "temperature": 0.7,
    "reward_funcs": "real_vllm:noise", "learning_rate": 3e-3, "max_steps": 4,
}  # fmt: skip


def noise(prompts, completions, completion_ids, **columns):
    """Differs within a group, whatever the policy has become: each step moves the weights."""
    return [float((3 * i + sum(ids)) % 5) for i, ids in enumerate(completion_ids)]


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request, tmp_path_factory) -> Path:
    """A tiny model with heads of 64, the smallest that vLLM takes on a CPU, and its tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=128, intermediate_size=128, num_attention_heads=2, num_hidden_layers=1,
        max_position_embeddings=64, tie_word_embeddings=request.param == "tied", pad_token_id=EOS_ID, bos_token_id=None,
        eos_token_id=EOS_ID, initializer_range=0.03,
    )  # fmt: skip
    LlamaForCausalLM(config).float().save_pretrained(folder)
    tokenizer(32).save_pretrained(folder)
    return folder


tied = pytest.mark.parametrize("model", ["tied"], indirect=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{'0' * 40}{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in (1, 2)))
    return path


def mismatches(output: Path) -> list[float]:
    records = training.steps(output)
    assert all(record["grad_norm"] > 0 for record in records)
    return [record["rollout_mismatch/max"] for record in records]


BFLOAT16 = {"dtype": "bfloat16", "vllm_kwargs": {"enforce_eager": True, "max_model_len": 50}}


@pytest.mark.parametrize("options", [{}, {"use_peft": True}, BFLOAT16], ids=["float32", "lora", "bfloat16"])
def test_each_rollout_is_of_the_weights_of_its_step(options, model, data, tmp_path):
    assert training.run(model, data, tmp_path / "run", **OPTIONS | options) == 0
    found = mismatches(tmp_path / "run")
    assert len(found) == 4 and max(found) < (0.1 if "dtype" in options else 1e-4), found


@tied
@pytest.mark.parametrize("mend", ["weights", "head", "prefixes"])
def test_earlier_weights_of_the_engine_are_noticed(mend, model, data, tmp_path, monkeypatch):
    from vllm import LLM

    load = vllm.VLLM._load_weights
    if mend == "weights":
        monkeypatch.setattr(vllm.VLLM, "_load_weights", lambda self, lm: self._step is None and load(self, lm))
    elif mend == "head":
        monkeypatch.setattr(vllm, "_pack_again", lambda model: None)
    else:
        monkeypatch.setattr(LLM, "reset_prefix_cache", lambda self: True)
    assert training.run(model, data, tmp_path / "run", **OPTIONS) == 0
    found = mismatches(tmp_path / "run")
    assert found[0] < 1e-4 and min(found[1:]) > 0.1, found


@pytest.mark.parametrize(("options", "words"), [
    ({"vllm_kwargs": {"max_model_len": 4096}}, ["vllm_kwargs={'max_model_len': 4096}", "max_position_embeddings=64"]),
    ({"vllm_kwargs": {"blocks": 16}}, ["vllm_kwargs={'blocks': 16}", "unexpected keyword argument 'blocks'"]),
    ({"vllm_kwargs": {"seed": 1}}, ["vllm_kwargs={'seed': 1}: the trainer sets seed itself"]),
    ({"top_p": 0.9, "top_k": 5}, ["top_p=0.9, top_k=5", "requires Model Runner V2"]),  # that is for GPUs
], ids=["length", "unknown", "set", "masks"])  # fmt: skip
def test_what_the_engine_refuses_is_one_sentence(options, words, model, data, tmp_path, capfd):
    assert training.run(model, data, tmp_path / "run", **OPTIONS | options) == 2
    error = capfd.readouterr().err
    sentence = error.splitlines()[-1]
    assert sentence.startswith("grpo-kernels train: ") and "Traceback" not in error
    assert all(word in sentence for word in words), sentence


# --- processes of their own -------------------------------------------------------------------------------------------


def start(launcher: list[str], words: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, "grpo_kernels", "train", *words], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), **environment},
    )  # fmt: skip


def ends_well(process: subprocess.Popen[str]) -> None:
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    assert "Traceback" not in said and "Error" not in said and "Invalid process group" not in said, said


@tied
def test_a_command_ends_without_a_traceback_whatever_the_environment_says(model, data, tmp_path):
    words = training.arguments(model, data, tmp_path / "run", **OPTIONS | {"vllm_kwargs": {"block_size": 32}})
    ends_well(start([], words, VLLM_ENABLE_V1_MULTIPROCESSING="1"))
    assert max(mismatches(tmp_path / "run")) < 1e-4


@tied
@pytest.mark.parametrize("options", [{}, {"fsdp": True}], ids=["ddp", "fsdp"])
def test_two_processes_have_an_engine_each(options, model, data, tmp_path):
    words = training.arguments(model, data, tmp_path / "run", **OPTIONS | options)
    ends_well(start(["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"], words))
    assert max(mismatches(tmp_path / "run")) < 1e-4


@tied
def test_a_run_resumes_to_the_same_bits(model, data, tmp_path):
    options, begin = OPTIONS | {"save_steps": 1, "save_total_limit": 9}, tmp_path / "whole" / "checkpoint-2"
    assert training.run(model, data, tmp_path / "whole", **options) == 0
    assert training.run(model, data, tmp_path / "resumed", **options, resume_from_checkpoint=begin) == 0
    assert training.same_weights(tmp_path / "whole", tmp_path / "resumed")

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
from types import SimpleNamespace

import pytest
import torch
import training
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_kernels.commands.bench.cases import make_case
from grpo_kernels.commands.bench.inputs import make_inputs
from grpo_kernels.commands.bench.table import IMPLEMENTATIONS
from grpo_kernels.head.truncation import Truncation, truncate
from grpo_kernels.trainer import vllm
from grpo_kernels.trainer.arguments import TrainArguments
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


ENDS = {"target_modules": ["q_proj", "embed_tokens"]}
SAVED = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}


@pytest.mark.parametrize(("changes", "name"), [(ENDS, "default"), (SAVED, "lora_A-mine")], ids=["lora", "saved"])
def test_an_adapter_of_either_end_is_sampled_from(changes, name, model):
    """Of a tied model, whose ends are then two weights, and of one that has two; an adapter of any name."""
    peft = pytest.importorskip("peft", reason="peft is not installed: run make test-vllm")
    lm = LlamaForCausalLM.from_pretrained(model)
    lm = peft.get_peft_model(lm, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **changes), adapter_name=name).eval()
    arguments = TrainArguments(max_completion_length=12, vllm_kwargs=OPTIONS["vllm_kwargs"])
    engine = vllm.VLLM(str(model), arguments, lm, 32)
    for step in range(2):
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.requires_grad else 0))
        for s in engine.sample(lm, [[5, 6, 7]] * 8, arguments, greedy=False, step=step, ends=[EOS_ID]):
            with torch.no_grad():
                logps = lm(torch.tensor([[5, 6, 7, *s.ids]])).logits.log_softmax(-1)[0, 2:-1]
            own = logps.gather(-1, torch.tensor(s.ids)[:, None])[:, 0]
            torch.testing.assert_close(s.logps, own, atol=1e-4, rtol=0)
    engine.close()


def test_the_benchmark_samples_by_the_engine():
    inputs = make_inputs(make_case("64x64x512", "float32", mode="sampling", generations=8), torch.device("cpu"))
    step = IMPLEMENTATIONS["vllm"].step(inputs, "sampling")
    assert [step(inputs).metrics["sampling/tokens"].item() for _ in range(2)] == [64, 64]


def test_an_engine_with_other_weights_is_refused_at_set_up(model, data, tmp_path, monkeypatch, capfd):
    weights = vllm._weights
    monkeypatch.setattr(vllm, "_weights", lambda lm, once: ((n, 1.2 * w) for n, w in weights(lm, once=once)))
    assert training.run(model, data, tmp_path / "run", **OPTIONS) == 2
    assert "grpo-kernels train: vLLM samples from another distribution than the policy's" in capfd.readouterr().err


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


@tied
def test_trls_trainer_has_ratios_of_1_before_any_update(model):
    """Under truncated sampling, whose ids are recomputed; without them a ratio has the kept mass."""
    words = [sys.executable, str(Path(__file__).with_name("real_vllm_trl.py")), str(model)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    found = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr[-3000:]
    log = json.loads(found.stdout.splitlines()[-1])
    print(log)
    assert abs(log["fused mean"] - 1) < 1e-4 and log["fused outside"] == 0 and log["tokens"] > 100
    assert abs(log["trl mean"] - log["kept_mass"]) < 1e-3 and log["trl mean"] < 0.9 and log["trl outside"] > 0.9


# --- which ids truncated sampling keeps -------------------------------------------------------------------------------


def vllm_keeps(z: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: float) -> torch.Tensor:
    """(C, V) bool: what vLLM's sampler leaves of logits after the temperature, by its own functions, in its order."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    z = z.clone()
    settings = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=len(z)))
    processor = MinPLogitsProcessor(settings, torch.device("cpu"), False)
    requests = [(i, SamplingParams(min_p=min_p), [], []) for i in range(len(z))]
    processor.update_state(BatchUpdate(batch_size=len(z), removed=[], added=requests, moved=[]))
    return apply_top_k_top_p_pytorch(processor.apply(z), top_k, top_p) > -torch.inf


def test_the_kept_ids_are_those_of_vllms_sampler():
    """10,000 rows, of half of which many logits are equal. The kept logits are the same but where rounding decides:
    where the sum of probabilities at the end of top_p, or a probability at that of min_p, is within 2e-6 of its bound.
    Where top_p ends among equal logits, vLLM's sort, which is not stable, takes any of them."""
    g, rows, ties, differ, decided = torch.Generator().manual_seed(0), 200, 0, 0, 0
    for i in range(50):
        z = torch.randn(rows, 300 + 40 * i, generator=g) * (torch.rand(rows, 1, generator=g) * 6 + 0.1)
        z[::2] = (z[::2] * 3).round() / 3
        top_k, top_p = (z.shape[1], 3, 20, 200)[i % 4], (1.0, 0.9, 0.5, 0.999, 0.05)[i % 5]
        min_p = (0.0, 0.02, 0.3)[i % 3]
        theirs = vllm_keeps(z, torch.full((rows,), top_k), torch.full((rows,), top_p), min_p)
        ours = truncate(z, Truncation(top_k, top_p, min_p))
        kept = [z.masked_fill(~keep, -torch.inf).sort(1).values for keep in (ours, theirs)]
        wrong = (kept[0] != kept[1]).any(1)
        ties += int(((ours != theirs).any(1) & ~wrong).sum())
        differ += int(wrong.sum())
        decided += int((wrong & ~close_to_a_bound(z, top_k, top_p, min_p)).sum())
    print(f"of {50 * rows} rows {ties} with others of equal logits, {differ} by rounding, {decided} by more than that")
    assert decided == 0 and differ < 50


def close_to_a_bound(z: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """(C,) bool, in float64."""
    z = z.double()
    share = (z - z.amax(1, keepdim=True)).exp()
    close = ((share - min_p).abs() < 2e-6 * max(min_p, 1e-9)).any(1)
    left = share.masked_fill((share < min_p) | (z < z.topk(top_k).values[:, -1:]), 0.0).sort(1).values
    return close | ((left.cumsum(1) / left.sum(1, keepdim=True) - (1 - top_p)).abs() < 2e-6).any(1)


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

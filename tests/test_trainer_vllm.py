"""Rollouts from vLLM, against a stand-in: it takes a GPU, and is no part of these tests.

`Engine` and `SamplingParams` hold what the trainer asks of vLLM 0.11 and later, recorded from its documentation and
found again in the source of 0.33.0: names of arguments, weights by the names of a checkpoint, logprobs per token as
{id: .logprob}. The stand-in samples with transformers, from the weights that it was given and from nothing else: stale
or wrong ones show in rollout_mismatch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
import training
from training import run, steps
from transformers import AutoModelForCausalLM

from grpo_kernels.trainer.arguments import TrainArguments
from grpo_kernels.trainer.rollout import generate
from grpo_kernels.trainer.vllm import VLLM


@dataclass
class SamplingParams:
    """The arguments that the trainer passes; another name is a TypeError, as in vLLM."""

    max_tokens: int
    temperature: float
    top_p: float
    n: int
    repetition_penalty: float
    stop_token_ids: list[int]
    logprobs: int
    detokenize: bool
    seed: int


class Engine:
    made: ClassVar[list[Engine]] = []

    def __init__(
        self, model, *, dtype, seed, gpu_memory_utilization, trust_remote_code, distributed_executor_backend,
        generation_config, logprobs_mode,
    ):  # fmt: skip
        assert dtype in ("float32", "bfloat16") and generation_config == "vllm"
        assert logprobs_mode == "processed_logprobs"
        self.backend = distributed_executor_backend
        self.lm = AutoModelForCausalLM.from_pretrained(model).eval()
        for parameter in self.lm.parameters():
            parameter.data.zero_()  # nothing of what it is asked comes from the folder
        self.loads = self.resets = 0
        self.settings: list[SamplingParams] = []
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self.load_weights))
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_executor=executor)
        Engine.made.append(self)

    def load_weights(self, weights):
        self.loads += 1
        found, own = dict(weights), dict(self.lm.named_parameters())
        assert found.keys() == own.keys()
        for name, parameter in own.items():
            assert type(found[name]) in (torch.Tensor, torch.nn.Parameter)  # no DTensor
            parameter.data.copy_(found[name])

    def reset_prefix_cache(self):
        self.resets += 1

    def generate(self, requests, settings, *, use_tqdm):
        assert len(requests) == len(settings) and not use_tqdm and self.resets == self.loads > 0
        self.settings += settings
        state = torch.get_rng_state()
        outputs = []
        for request, how in zip(requests, settings, strict=True):
            assert (how.top_p, how.n, how.repetition_penalty, how.logprobs) == (1.0, 1, 1.0, 0)
            torch.manual_seed(how.seed)
            options = {"max_completion_length": how.max_tokens, "temperature": how.temperature or 1.0}
            (s,) = generate(self.lm, [request["prompt_token_ids"]], TrainArguments(**options),
                            greedy=how.temperature == 0, ends=how.stop_token_ids, pad_id=0)  # fmt: skip
            entries = [{token: SimpleNamespace(logprob=x)} for token, x in zip(s.ids, s.logps.tolist(), strict=True)]
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(s.ids), logprobs=entries)]))
        torch.set_rng_state(state)
        return outputs


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = Engine, SamplingParams
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(Engine, "made", [])
    monkeypatch.delenv("RANK", raising=False)
    return module


@pytest.mark.parametrize("options", [{}, {"use_peft": True, "beta": 0.1}, {"temperature": 0.7, "num_iterations": 2}])
def test_vllm_samples_from_the_weights_after_each_update(options, model, data, tmp_path):
    given = {"use_vllm": True, "reward_funcs": "training:length", "max_steps": 4, "save_rollouts": True, **options}
    assert run(model, data, tmp_path / "run", **given) == 0
    records, (engine,) = steps(tmp_path / "run"), Engine.made
    first = [record for record in records if "rollout_mismatch/max" in record]
    assert len(first) == engine.loads == 4 // options.get("num_iterations", 1)
    assert all(record["rollout_mismatch/max"] < 1e-4 and record["rollout_ess"] > 0.99 for record in first)
    assert records[0]["grad_norm"] > 0 and engine.backend is None
    rollout = training.rollouts(tmp_path / "run")[0]
    assert len({tuple(c["ids"]) for c in rollout[:4]}) > 1  # pitfall 17: each completion has a seed of its own
    assert len({how.seed for how in engine.settings}) == len(engine.settings)
    assert {how.temperature for how in engine.settings} == {options.get("temperature", 1.0)}


def test_stale_weights_would_be_seen(model, data, tmp_path, monkeypatch):
    load = VLLM._load_weights
    monkeypatch.setattr(VLLM, "_load_weights", lambda self, lm: None if self._step is not None else load(self, lm))
    assert run(model, data, tmp_path / "run", use_vllm=True, reward_funcs="training:length") == 0
    assert max(record["rollout_mismatch/max"] for record in steps(tmp_path / "run")) > 1e-2


def test_a_resumed_run_with_vllm_has_the_same_bits(model, data, tmp_path):
    options = {"use_vllm": True, "reward_funcs": "training:length", "save_steps": 2, "max_steps": 4,
               "eval_dataset_name": data, "eval_max_prompts": 2}  # fmt: skip
    assert run(model, data, tmp_path / "whole", **options) == 0
    part = {**options, "max_steps": 2, "lr_scheduler_type": "constant"}
    assert run(model, data, tmp_path / "part", **part) == 0
    assert run(model, data, tmp_path / "part", **options, resume_from_checkpoint="auto") == 0
    whole, resumed = training.weights(tmp_path / "whole"), training.weights(tmp_path / "part")
    assert all(torch.equal(resumed[name], x) for name, x in whole.items())


def test_what_vllm_returns():
    def output(ids, *entries):
        return SimpleNamespace(token_ids=ids, logprobs=list(entries))

    entry = SimpleNamespace(logprob=-0.5)
    sampled = VLLM._sampled(output([7, 2], {7: entry}, {2: entry, 9: entry}), {2, 5})
    assert (sampled.ids, sampled.ended, sampled.kept) == ([7, 2], True, None)
    assert sampled.logps.tolist() == [-0.5, -0.5] and sampled.logps.dtype == torch.float32
    assert not VLLM._sampled(output([7], {7: entry}), {2}).ended
    assert VLLM._sampled(output([7], {8: entry}), {2}).logps.isnan().all()  # unknown, and left out of the correction


def test_under_torchrun_the_engine_takes_the_launchers_ranks(model, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert VLLM(str(model), TrainArguments(bf16=True)).engine.backend == "external_launcher"

"""Sampling by transformers' models and by vLLM: each completion is what its prompt alone would give."""

from __future__ import annotations

import inspect
import math
import shutil
import sys
from collections import namedtuple
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
import training
from tiny_models import STATE_MODELS, TINY_MODELS, VOCAB, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from training import run, steps
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from grpo_kernels.commands.cli import main
from grpo_kernels.trainer import RunError, sampling, vllm
from grpo_kernels.trainer.arguments import TrainArguments
from grpo_kernels.trainer.decoding import Decoder, decoding_error
from grpo_kernels.trainer.model import Policy
from grpo_kernels.trainer.sampling import _drawn, _noise, generate
from grpo_kernels.trainer.vllm import VLLM

PROMPTS = [[5, 6, 7]] * 3 + [[8, 9, 10, 11, 12]] + [[5, 6, 7]] + [[13]] * 2
LENGTH = 9


def alone(model, prompt: list[int], ends: list[int]) -> list[int]:
    """The greedy completion by transformers' own loop."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False, eos_token_id=ends,
        pad_token_id=0,
    )  # fmt: skip
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", sorted(TINY_MODELS))
def test_a_batch_gives_what_each_prompt_gives_alone(family):
    """Prompts of several lengths, some of them several times; rows that end at different tokens."""
    model, arguments = tiny_model(family), TrainArguments(max_completion_length=LENGTH)
    first, second = (alone(model, PROMPTS[i], [VOCAB]) for i in (0, 3))
    ends = [first[3], second[5]]
    shapes: list[tuple[int, ...]] = []
    seen = model.get_input_embeddings().register_forward_hook(lambda *call: shapes.append(tuple(call[1][0].shape)))
    found = generate(model, PROMPTS, arguments, ends=ends, pad_id=0, greedy=True)
    seen.remove()
    assert shapes[0] == (4, 5) and all(columns == 1 for _, columns in shapes[1:])
    for prompt, s in zip(PROMPTS, found, strict=True):
        assert s.ids == alone(model, prompt, ends) and s.ended == (s.ids[-1] in ends)
        assert s.logps.shape == (len(s.ids),) and s.kept is None


def test_rows_that_have_ended_leave_the_batch():
    model, arguments = tiny_model("llama"), TrainArguments(max_completion_length=32)
    rows: list[int] = []
    seen = model.get_input_embeddings().register_forward_hook(lambda *call: rows.append(len(call[1][0])))
    torch.manual_seed(0)
    found = generate(model, [[5, 6, 7]] * 64, arguments, ends=list(range(3, 9)), pad_id=0)
    seen.remove()
    lengths = [len(s.ids) for s in found]
    assert rows[:2] == [1, 64] and rows[-1] < 16 and len(rows) == max(lengths)
    for calls, size in enumerate(rows[1:], start=1):  # a call of the model gives each row its token calls + 1
        going = sum(length > calls for length in lengths)
        assert going <= size and (size == 64 or going > 0)
    assert all(s.ended for s in found if len(s.ids) < 32)


@pytest.mark.parametrize("options", [{"top_k": 9}, {"min_p": 0.05}, {"top_p": 0.9}, {"top_k": 9, "top_p": 0.5}, {}])
def test_a_token_of_any_number_of_rows_is_one_read(options, monkeypatch):
    """On a GPU each waits for all work before it. The kept ids are one read in the end."""
    model, arguments, reads = tiny_model("llama"), TrainArguments(max_completion_length=LENGTH, **options), []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
                reads.append(str(function))
            return function(*args, **(kwargs or {}))

    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append("tolist") or read(self))
    # The model has its own. In bfloat16 logits are equal.
    monkeypatch.setattr(Decoder, "_call", lambda self: torch.randn(len(self.ids), VOCAB).bfloat16().float())
    for rows in (2, 64):
        reads.clear()
        with Reads():
            (s, *_) = generate(model, [[5, 6, 7]] * rows, arguments, ends=[VOCAB], pad_id=0)
        assert len(reads) == LENGTH + bool(options) and (s.kept is not None) == bool(options)


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_p": 0.6, "min_p": 0.01, "temperature": 3.0}])
def test_a_distribution_too_flat_for_one_read_gives_the_same_tokens(options, monkeypatch):
    model, arguments, found = tiny_model("llama"), TrainArguments(max_completion_length=LENGTH, **options), []
    for width in (VOCAB, 2):
        monkeypatch.setattr(sampling, "WIDTH", width)
        torch.manual_seed(0)
        found.append([tuple(map(str, s)) for s in generate(model, PROMPTS, arguments, ends=[VOCAB], pad_id=0)])
    assert found[0] == found[1]


# --- whether a model can be sampled with its cache --------------------------------------------------------------------


def own_logps(model, prompt: list[int], ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logps = model(torch.tensor([prompt + ids])).logits.float().log_softmax(-1)[0, len(prompt) - 1 : -1]
    return logps.gather(-1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.parametrize("family", sorted(STATE_MODELS))
def test_a_model_with_states_is_sampled_from_its_own_distribution(family):
    model, arguments = tiny_model(family), TrainArguments(max_completion_length=LENGTH)
    cached = decoding_error(Decoder(model))
    assert cached.error < 0.01 if family != "openai-gpt" else cached.error == math.inf
    assert decoding_error(Decoder(model, cached=False)).error < 0.01
    state = torch.get_rng_state()
    for cached in (True, False):
        torch.set_rng_state(state)
        found = generate(model, PROMPTS, arguments, ends=[VOCAB], pad_id=0, decoder=Decoder(model, cached=cached))
        for prompt, s in zip(PROMPTS, found, strict=True):
            torch.testing.assert_close(s.logps, own_logps(model, prompt, s.ids), atol=1e-4, rtol=0)


def forget(layers):
    """A decoder that loses what these layers keep."""
    call = Decoder._call

    def forgetful(self):
        logits = call(self)
        for layer in self.cache.layers[layers]:
            for value in vars(layer).values():
                for tensor in value.values() if isinstance(value, dict) else [value]:
                    if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                        tensor.zero_()
        return logits

    return forgetful


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gemma2", "gpt2", "jamba", "lfm2", "llama", "mamba", "mamba2", "mixtral"])
def test_a_lost_state_is_told_from_rounding(family, dtype, monkeypatch):
    """Also that of one layer of two."""
    model = tiny_model(family, dtype=dtype)
    assert decoding_error(Decoder(model)).error < 0.2
    for layers in (slice(None), slice(1, 2)):
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "_call", forget(layers))
            assert decoding_error(Decoder(model)).error > 1.5


@pytest.mark.parametrize("family", ["llama", "mixtral", "granitemoe", "llama4_text"])
def test_rounding_that_moves_tokens_to_other_experts_is_no_error(family):
    """As between two kernels of a GPU: each product is rounded in another way. Deep models make nats of it here."""
    sizes = {"num_hidden_layers": 12, "hidden_size": 64, "num_local_experts": 8}
    more = {"moe_layers": list(range(12)), "interleave_moe_layer_step": 1} if family == "llama4_text" else {}
    found = []
    for seed in range(3):
        model = tiny_model(family, dtype=torch.bfloat16, seed=seed, **sizes, **more)
        random = torch.Generator().manual_seed(0)

        def rounded(module, args, output, random=random):
            return (output * (1 + torch.randn(output.shape, generator=random) * 2**-9)).to(output.dtype)

        for module in model.modules():
            if type(module) is torch.nn.Linear:
                module.register_forward_hook(rounded)
        found.append(decoding_error(Decoder(model)))
    assert max(d.error for d in found) < 0.5
    assert family != "mixtral" or max(d.nats for d in found) > 0.05


def no_cache(self, *args, past_key_values=None, cache=None, **options):
    return LLAMA(self, *args, **options)


LLAMA = LlamaForCausalLM.forward


@pytest.mark.parametrize("family", ["openai-gpt", "llama"])
def test_a_run_without_a_cache_that_can_be_used_says_so(family, model, data, tmp_path, capfd, monkeypatch):
    """GPT keeps none; the Llama has a forward that drops what it is given, as a class of a user's own may."""
    monkeypatch.setattr(LlamaForCausalLM, "forward", no_cache if family == "llama" else LLAMA)
    folder = shutil.copytree(model, tmp_path / "model")
    tiny_model(family).save_pretrained(folder)
    options = {"reward_funcs": "training:length", "num_iterations": 2, "eval_dataset_name": data}
    assert run(folder, data, tmp_path / "run", **options) == 0
    name = "OpenAIGPTLMHeadModel" if family == "openai-gpt" else "LlamaForCausalLM"
    assert capfd.readouterr().err.count(f"{name} is sampled without a cache (") == 1
    lm = AutoModelForCausalLM.from_pretrained(folder)
    for c in training.rollouts(tmp_path / "run")[0]:
        torch.testing.assert_close(c.logps, own_logps(lm, c.prompt_ids, c.ids), atol=1e-4, rtol=0)
    words = ["evaluate", str(tmp_path / "run"), "--max-prompts", "1", "--reward-funcs", "training:length"]
    assert main(words) == 0 and f"{name} is sampled without a cache (" in capfd.readouterr().err


def as_from_5_24(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, use_cache=None):
    """With the names of transformers 5.24, which warns of the others."""
    options = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache}
    found = LLAMA(self, input_ids, **options, **{CACHE_NAME: cache})
    return SimpleNamespace(logits=found.logits, cache=getattr(found, CACHE_NAME))


CACHE_NAME = "cache" if "cache" in inspect.signature(LLAMA).parameters else "past_key_values"


def test_a_cache_goes_by_the_name_that_the_forward_has(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(LlamaForCausalLM, "forward", as_from_5_24)
    assert decoding_error(Decoder(model)).error < 0.01


def test_draws_have_the_probabilities_that_they_are_told():
    torch.manual_seed(0)
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.15, 0.05, 0.0])
    rows = probabilities.expand(40_000, -1)
    drawn = _drawn(rows, _noise(rows)).squeeze(1)
    shares = torch.bincount(drawn, minlength=7) / len(drawn)
    assert (shares[probabilities == 0] == 0).all()
    deviation = (probabilities * (1 - probabilities) / len(drawn)).sqrt()
    assert ((shares - probabilities).abs() <= 4 * deviation).all()
    assert (_drawn(torch.eye(5), _noise(torch.eye(5))) == torch.arange(5)[:, None]).all()


# --- vLLM -------------------------------------------------------------------------------------------------------------
#
# A stand-in; tests/real_vllm.py has the engine itself. `Engine` and `SamplingParams` hold what the trainer asks of vLLM
# 0.32: arguments by these names alone, weights by the names of a checkpoint, logprobs per token as {id: .logprob}, and
# sampling masks, which vLLM's engine for CPUs does not give. It samples with transformers, from the weights that it was
# given and from nothing else: wrong ones show in rollout_mismatch. As in vLLM the head of a tied model is the
# embedding, and its weights are passed over.

SamplingParams = namedtuple(
    "SamplingParams",
    "max_tokens temperature top_p top_k min_p n repetition_penalty stop_token_ids logprobs detokenize seed",
)


class Engine:
    made: ClassVar[list[Engine]] = []

    def __init__(
        self, model, *, dtype, seed, gpu_memory_utilization, tensor_parallel_size, trust_remote_code,
        distributed_executor_backend, generation_config, logprobs_mode, max_model_len, hf_overrides,
        return_sampling_mask=False, block_size=None, quantization=None,
    ):  # fmt: skip
        assert dtype in ("float32", "bfloat16") and generation_config == "vllm"
        assert logprobs_mode == "processed_logprobs"
        self.masks, self.backend = return_sampling_mask, distributed_executor_backend
        self.given = (max_model_len, block_size)
        self.head_dtype = getattr(torch, hf_overrides.pop("head_dtype"))
        self.lm = AutoModelForCausalLM.from_pretrained(model, **hf_overrides).eval()
        for parameter in self.lm.parameters():
            parameter.data.zero_()  # nothing of what it is asked comes from the folder
        self.loads = self.packed = self.resets = self.ends = 0
        self.settings: list[SamplingParams] = []
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self.shutdown))
        Engine.made.append(self)

    def collective_rpc(self, method, *, kwargs):
        assert method == "reload_weights"
        self.loads += 1
        found, own = dict(kwargs["weights_iterator"]), dict(self.lm.named_parameters())
        if self.lm.config.tie_word_embeddings:
            found.pop("lm_head.weight", None)
        assert found.keys() == own.keys()
        for name, parameter in own.items():
            assert type(found[name]) in (torch.Tensor, torch.nn.Parameter)  # no DTensor
            parameter.data.copy_(found[name])

    def apply_model(self, function):
        if function is vllm._head:
            return [(self.head_dtype, self.lm.config.tie_word_embeddings)]
        self.packed += 1
        return [None]

    def reset_prefix_cache(self):
        self.resets += 1
        return True

    def shutdown(self):
        self.ends += 1

    def generate(self, requests, settings, *, use_tqdm):
        assert len(requests) == len(settings) and not use_tqdm and self.resets == self.packed == self.loads > 0
        self.settings += settings
        state = torch.get_rng_state()
        outputs = []
        for request, how in zip(requests, settings, strict=True):
            assert (how.n, how.repetition_penalty, how.logprobs) == (1, 1.0, 0)
            torch.manual_seed(how.seed)
            options = {"max_completion_length": how.max_tokens, "temperature": how.temperature, "top_p": how.top_p,
                       "top_k": how.top_k, "min_p": how.min_p}  # fmt: skip
            (s,) = generate(self.lm, [request["prompt_token_ids"]], TrainArguments(**options), ends=how.stop_token_ids,
                            pad_id=0)  # fmt: skip
            entries = [{token: SimpleNamespace(logprob=x)} for token, x in zip(s.ids, s.logps.tolist(), strict=True)]
            mask = SimpleNamespace(token_ids=s.kept) if self.masks else None
            output = SimpleNamespace(token_ids=tuple(s.ids), logprobs=entries, sampling_mask=mask)
            outputs.append(SimpleNamespace(outputs=[output]))
        torch.set_rng_state(state)
        return outputs


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    module = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    module.LLM, module.SamplingParams = Engine, SamplingParams
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(Engine, "made", [])
    monkeypatch.delenv("RANK", raising=False)
    return module


FORWARD = Policy.forward


def without_a_check(self, task, **inputs):
    assert task != "decoding_error"  # vLLM samples by itself
    return FORWARD(self, task, **inputs)


@pytest.mark.parametrize("options", [
    {"vllm_kwargs": {"max_model_len": 20, "block_size": 16}},
    {"use_peft": True, "beta": 0.1},
    {"temperature": 0.7, "num_iterations": 2, "top_k": 9, "top_p": 0.8, "min_p": 0.1},
])  # fmt: skip
def test_vllm_samples_from_the_weights_after_each_update(options, data, trained, monkeypatch):
    monkeypatch.setattr(Policy, "forward", without_a_check)
    given = {"use_vllm": True, "reward_funcs": "training:length", "max_steps": 4,
             "eval_dataset_name": data, "eval_max_prompts": 2, **options}  # fmt: skip
    folder = trained(**given)
    records, (engine,) = steps(folder), Engine.made
    first = [record for record in records if "rollout_mismatch/max" in record]
    assert len(first) == 4 // options.get("num_iterations", 1) == engine.loads - 2  # and the check, the last evaluation
    assert all(record["rollout_mismatch/max"] < 1e-4 and record["rollout_ess"] > 0.99 for record in first)
    assert records[0]["grad_norm"] > 0 and engine.backend is None and engine.ends == 1
    assert ("sampling_mask/kept_mass" in records[0]) == engine.masks == ("top_k" in options)
    assert engine.given == ((20, 16) if "vllm_kwargs" in options else (6 + 5, None))  # its longest prompt, a completion
    rollout = training.rollouts(folder)[0]
    assert len({tuple(c.ids) for c in rollout[:4]}) > 1  # pitfall 17: each completion has a seed of its own
    between = engine.settings[8 + 10 : -10]  # the check; the evaluations, each of 2 prompts and 5 completions
    assert len({how.seed for how in between}) == len(between) == 8 * len(first)
    assert {how.temperature for how in engine.settings} == {options.get("temperature", 1.0)}
    assert {how.top_k for how in engine.settings} == {1, options.get("top_k", 0)}  # greedy, and not
    assert {how.min_p for how in engine.settings} == {options.get("min_p", 0.0)}


@pytest.mark.parametrize(("changes", "words"), [
    ({}, ""), ({"use_rslora": True, "target_modules": ["embed_tokens", "q_proj"]}, ""),
    ({"modules_to_save": ["lm_head"]}, ""),
    ({"use_dora": True}, "use_vllm with an adapter that trains base_model.model.model.layers.0.self_attn.q_proj."),
    ({"lora_bias": True}, "lora_B.default.bias; expected LoRA's two matrices to weights of layers, and"),
])  # fmt: skip
def test_vllm_samples_from_an_adapter_that_is_trained_on(changes, words, model, data, tmp_path, capsys):
    peft = pytest.importorskip("peft", reason="peft is not installed: run make test")
    lm = AutoModelForCausalLM.from_pretrained(model)
    lm = peft.get_peft_model(lm, peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **changes}))
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.requires_grad else 0))
    lm.save_pretrained(tmp_path / "start")
    options = {"use_vllm": True, "use_peft": True, "reward_funcs": "training:length", "max_steps": 2}
    assert run(tmp_path / "start", data, tmp_path / "run", **options) == (2 if words else 0)
    assert words in capsys.readouterr().err
    if not words:
        assert all(record["rollout_mismatch/max"] < 1e-4 for record in steps(tmp_path / "run"))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("changes", "name"), [
    ({}, "lora_A-mine"),
    ({"target_modules": ["q_proj", "embed_tokens"]}, "default"),
    ({"target_modules": ["q_proj", "lm_head"]}, "default"),
    ({"modules_to_save": ["lm_head"]}, "lora_A-mine"),
    ({"modules_to_save": ["embed_tokens"]}, "default"),
    ({"modules_to_save": ["lm_head", "embed_tokens"]}, "default"),
    ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, "lora_A-mine"),
])  # fmt: skip
def test_vllm_has_both_ends_of_a_model_that_an_adapter_trains(changes, name, tied, tmp_path):
    """Tied or not: PEFT makes two weights of one. Another adapter, which is not active, is left out."""
    peft = pytest.importorskip("peft", reason="peft is not installed: run make test")
    lm = tiny_model("llama", tie_word_embeddings=tied)
    lm.save_pretrained(tmp_path)
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **changes})
    lm = peft.get_peft_model(lm, config, adapter_name=name)
    lm.add_adapter("other", peft.LoraConfig(r=2, target_modules=["v_proj"], modules_to_save=["norm"]))
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.requires_grad else 0))
    vllm.check_adapter(lm)
    arguments = TrainArguments(max_completion_length=LENGTH)
    engine = VLLM(str(tmp_path), arguments, lm, 20)
    one_weight = "ensure_weight_tying" in changes or changes == {}
    assert Engine.made[0].lm.config.tie_word_embeddings == (tied and one_weight)
    for s in engine.sample(lm, [[5, 6, 7]] * 4, arguments, greedy=False, step=0, ends=[VOCAB]):
        torch.testing.assert_close(s.logps, own_logps(lm, [5, 6, 7], s.ids), atol=1e-4, rtol=0)


def test_a_head_that_vllm_ties_all_the_same_is_refused(tmp_path, monkeypatch):
    lm = tiny_model("llama", tie_word_embeddings=True)
    lm.save_pretrained(tmp_path)
    monkeypatch.setattr(Engine, "apply_model", lambda self, function: [(torch.float32, True)])
    VLLM(str(tmp_path), TrainArguments(), lm, 20)
    lm.lm_head.weight = torch.nn.Parameter(lm.lm_head.weight.clone())
    with pytest.raises(RunError, match=r"^use_vllm: this model ties lm_head and embedding, vLLM whatever its config"):
        VLLM(str(tmp_path), TrainArguments(), lm, 20)


@pytest.mark.parametrize(("overrides", "error", "words"), [
    ({"head_dtype": "bfloat16"}, ValueError, "the trainer sets head_dtype itself"),
    ([], TypeError, "hf_overrides is a list; expected a dict"),
])  # fmt: skip
def test_overrides_of_the_trainer_and_of_the_user(overrides, error, words, model):
    lm = AutoModelForCausalLM.from_pretrained(model)
    VLLM(str(model), TrainArguments(vllm_kwargs={"hf_overrides": {"hidden_act": "gelu"}}), lm, 20)
    assert Engine.made[0].lm.config.hidden_act == "gelu"
    with pytest.raises(error, match=words):
        VLLM(str(model), TrainArguments(vllm_kwargs={"hf_overrides": overrides}), lm, 20)


@pytest.mark.parametrize(("method", "calls", "status"), [("__init__", 0, 2), ("generate", 0, 2), ("generate", 1, 1)])
def test_an_error_of_the_engine_is_one_sentence(method, calls, status, model, data, tmp_path, monkeypatch, capsys):
    """At the start, in the check at set-up, and in the first rollout."""
    call, left = getattr(Engine, method), iter(range(calls))

    def fail(self, *args, **options):
        if next(left, None) is None:
            raise AssertionError("no memory\nfor blocks")
        return call(self, *args, **options)

    monkeypatch.setattr(Engine, method, fail)
    given = {"use_vllm": True, "vllm_kwargs": {"block_size": 20}, "reward_funcs": "training:length"}
    assert run(model, data, tmp_path / "run", **given) == status
    sentence = "use_vllm with vllm_kwargs={'block_size': 20}: vLLM says AssertionError: no memory for blocks"
    assert capsys.readouterr().err.splitlines()[-1] == f"grpo-kernels train: {sentence}"


def test_under_torchrun_the_engine_takes_the_launchers_ranks(model, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    lm = AutoModelForCausalLM.from_pretrained(model)
    assert VLLM(str(model), TrainArguments(bf16=True), lm, 20).engine.backend == "external_launcher"

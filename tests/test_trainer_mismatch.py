"""Whether a sampler samples from the policy, asked at set-up; rotary frequencies that follow the longest row."""

from __future__ import annotations

import json

import pytest
import torch
from test_trainer_sampling import VOCAB, Engine, own_logps, stand_in  # noqa: F401
from tiny_models import tiny_model
from training import run, steps

from grpo_kernels.trainer import vllm
from grpo_kernels.trainer.arguments import TrainArguments
from grpo_kernels.trainer.arithmetic import tokenizer
from grpo_kernels.trainer.decoding import Decoder
from grpo_kernels.trainer.mismatch import check_sampler, fix_rotary
from grpo_kernels.trainer.model import Policy
from grpo_kernels.trainer.ranks import Ranks, Signals
from grpo_kernels.trainer.rollout import Sampler

OPTIONS = {"reward_funcs": "training:length"}
LONGROPE = {
    "max_position_embeddings": 64, "original_max_position_embeddings": 16,
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
                        "long_factor": [4.0] * 4, "original_max_position_embeddings": 16},
}  # fmt: skip
DYNAMIC = {"max_position_embeddings": 16,
           "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}  # fmt: skip
PER_LAYER = {
    "max_position_embeddings": 16, "layer_types": ["full_attention", "sliding_attention"],
    "rope_parameters": {"full_attention": DYNAMIC["rope_parameters"],
                        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
}  # fmt: skip


def sampler_of(model, **options) -> Sampler:
    policy, ranks = Policy(model), Ranks(use_cpu=True)
    policy.decoder = Decoder(model)
    a = TrainArguments(**{"max_completion_length": 12, **options})
    return Sampler(policy, tokenizer(VOCAB), a, [VOCAB], ranks, Signals(ranks), lambda *_: None)


PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [5, 6]]


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "lfm2", "llama", "mixtral", "qwen3_next"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sound_samplers_pass(family, dtype):
    """Also at other temperatures and with ids left out, which both ends leave out."""
    sampler = sampler_of(tiny_model(family, dtype=getattr(torch, dtype)), dtype=dtype)
    check_sampler(sampler, PROMPTS)
    for options in ({"temperature": 0.3}, {"top_p": 0.8, "top_k": 9}, {"min_p": 0.1, "temperature": 1.5}):
        sampler.arguments = TrainArguments(max_completion_length=12, **options)
        check_sampler(sampler, PROMPTS[:1])


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1.1), ("bfloat16", 3.0)])
def test_a_decoder_of_another_distribution_is_refused_before_the_first_step(
    dtype, factor, model, data, tmp_path, capfd, monkeypatch
):
    """One that is right for as many tokens as the choice of a decoder looks at."""
    call = Decoder._call

    def wrong(self):
        logits = call(self)
        return logits if self.ids.shape[1] < 9 else logits * factor

    monkeypatch.setattr(Decoder, "_call", wrong)
    options = OPTIONS | {"max_completion_length": 12, "dtype": dtype}
    assert run(model, data, tmp_path / "run", **options) == 2
    error = capfd.readouterr().err
    assert "grpo-kernels train: the decoder samples from another distribution than the policy's: log-prob" in error
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("further", [{}, {"vllm_kwargs": {"quantization": "fp8"}}, {"top_k": 9}])
def test_an_engine_of_another_distribution_is_refused_or_has_other_types(
    further, model, data, tmp_path, capfd, monkeypatch
):
    weights = vllm._weights
    monkeypatch.setattr(vllm, "_weights", lambda lm, once: ((n, w * 1.1) for n, w in weights(lm, once=once)))
    explained = "vllm_kwargs" in further
    assert run(model, data, tmp_path / "run", use_vllm=True, **OPTIONS, **further) == (0 if explained else 2)
    error = capfd.readouterr().err
    assert "vLLM samples from another distribution than the policy's" in error
    assert ("; it has quantization='fp8'\n" in error) == explained and len(Engine.made) == 1
    if explained:
        assert min(r["rollout_mismatch/mean"] for r in steps(tmp_path / "run")) > 1e-3


def test_logits_of_another_type_are_said_once(model, data, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(Engine, "head_dtype", torch.bfloat16, raising=False)
    monkeypatch.setattr(Engine, "apply_model", bfloat16_head)
    assert run(model, data, tmp_path / "run", use_vllm=True, **OPTIONS) == 0
    assert capfd.readouterr().err.count("use_vllm: this vLLM computes logits in bfloat16 (it has no head_dtype") == 1


APPLY = Engine.apply_model


def bfloat16_head(self, function):
    return [(torch.bfloat16, False)] if function is vllm._head else APPLY(self, function)


# --- rotary embeddings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "options", "kind"), [
    ("phi3", LONGROPE, "longrope"), ("llama", DYNAMIC, "dynamic"), ("gemma3_text", PER_LAYER, "dynamic"),
], ids=["longrope", "dynamic", "per layer"])  # fmt: skip
def test_frequencies_that_follow_the_longest_row_are_fixed_and_said(family, options, kind, capsys):
    model, short, long = tiny_model(family, **options), [5, 6, 7, 8, 9, 10, 11], [9] * 30
    before = own_logps(model, short[:1], short[1:])
    sampler = sampler_of(model, max_completion_length=20)
    with pytest.raises(ValueError, match=r"change with the length of the longest row of its batch, by .* rotary freq"):
        check_sampler(sampler, [short, long])
    fix_rotary(model, 50)
    check_sampler(sampler, [short, long])
    assert capsys.readouterr().err == (
        f"{type(model).__name__}: rotary frequencies ({kind}) are those of 50 tokens for all rows, the longest of this "
        "run, not those of the longest row of each batch\n"
    )
    fixed = own_logps(model, short[:1], short[1:])
    assert (fixed - before).abs().max() > 1e-4
    expected = own_logps(tiny_model(family, **options), short[:1], [*short[1:], *[9] * 43])
    torch.testing.assert_close(fixed, expected[: len(fixed)], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("family", "options"), [("phi3", LONGROPE), ("llama", DYNAMIC), ("llama", {})])
def test_frequencies_of_short_runs_stay_as_they_are(family, options, capsys):
    model = tiny_model(family, **options)
    before = own_logps(model, [5], [6, 7])
    fix_rotary(model, 16)
    assert torch.equal(own_logps(model, [5], [6, 7]), before) and capsys.readouterr().err == ""


def test_a_run_and_its_evaluation_fix_the_frequencies(model, tmp_path, capfd):
    """Also those of the teacher, and up to what the user lets the engine have."""
    from grpo_kernels.commands.cli import main

    folder, data = tmp_path / "model", tmp_path / "problems.jsonl"
    lm = tiny_model("phi3", **LONGROPE)
    lm.generation_config.eos_token_id = 1
    lm.save_pretrained(folder)
    tokenizer(VOCAB).save_pretrained(folder)
    data.write_text("".join(json.dumps({"prompt": "1+" * n + "2=", "answer": "3"}) + "\n" for n in (1, 2, 7)))
    options = OPTIONS | {"max_completion_length": 12, "eval_dataset_name": data}
    assert run(folder, data, tmp_path / "run", teacher_model_name_or_path=folder, **options) == 0
    words = "rotary frequencies (longrope) are those of {} tokens"
    assert capfd.readouterr().err.count(words.format(28)) == 2
    assert max(r["rollout_mismatch/max"] for r in steps(tmp_path / "run")) < 1e-4
    assert main(["evaluate", str(tmp_path / "run"), "--reward-funcs", "training:length"]) == 0
    assert words.format(28) in capfd.readouterr().err
    assert run(folder, data, tmp_path / "vllm", use_vllm=True, vllm_kwargs={"max_model_len": 40}, **OPTIONS) == 2
    assert words.format(40) in capfd.readouterr().err  # the stand-in has those of its own rows

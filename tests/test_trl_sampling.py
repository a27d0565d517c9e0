"""FusedGRPOTrainer where sampling is truncated or another engine has sampled: ids that are kept, weights, rejection."""

from __future__ import annotations

import contextlib
import itertools
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, tiny_model

pytest.importorskip("trl", reason="trl is not installed: make test EXTRAS=dev,peers")

import trl
import trl_parity as parity
from trl.trainer import utils as trl_utils
from trl_calls import (
    RS,
    VLLM_MODES,
    EagerTrainer,
    Watched,
    crafted_inputs,
    kept_rows,
    sampled_by,
    sampled_elsewhere,
    scored,
)

import grpo_kernels as gk
from grpo_kernels.head.truncation import Truncation, truncate
from grpo_kernels.integrations import trl as integration
from grpo_kernels.integrations.trl_support import truncation_of

# ---- weights and rejection -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", VLLM_MODES)
def test_weights_are_normalised_and_samples_rejected(mode, monkeypatch):
    """Over a batch of generations, on top of TRL's own weights."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", lambda **_: SimpleNamespace(sync_weights=int))
    options = dict(use_vllm=True, vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=2.0)
    given = dict(args=parity.trl_arguments(parity.saved_model("qwen2"), max_steps=2, **options))
    given |= dict(reward_funcs=parity.reward, train_dataset=parity.prompts(), rollout_func=sampled_elsewhere)
    found = {}
    for normalize, rejects in itertools.product((False, True), repeat=2):
        own = dict(rollout_is_batch_normalize=normalize, rollout_rs=RS if rejects else None)
        trainer = parity.construct(partial(integration.FusedGRPOTrainer, **own), "qwen2", **given)
        batch = trainer._generate_and_score_completions([{"prompt": "w11"}] * 8)
        found[normalize, rejects] = batch["importance_sampling_ratio"]
        if rejects:
            cls = partial(integration.FusedGRPOTrainer, **own, rollout_rs_mask=True)
            verls = parity.construct(cls, "qwen2", **given)
            found[normalize, "mask"] = verls._generate_and_score_completions([{"prompt": "w11"}] * 8)
    names = ("completion_mask", "old_per_token_logps", "sampling_per_token_logps")
    mask, old, sampled = (batch[name] for name in names)
    kept = gk.rejection_mask(old, sampled, RS, completion_mask=mask)
    assert 0 < kept.sum() < mask.sum() and kept[0, 0] and not kept[1, 0]
    for normalize in (False, True):  # verl's way: the weights stay, and the counts are of what is kept
        batch = found.pop((normalize, "mask"))
        assert torch.equal(batch["importance_sampling_ratio"], found[normalize, False])
        assert torch.equal(batch["tool_mask"].bool(), kept) and batch["num_items_in_batch"] == kept.sum()
        assert torch.equal(batch["completion_mask"], mask)
    level = "token" if mode.startswith("token") else "sequence_sum"
    own = dict(level=level, mode=mode.split("_")[1], cap=2.0, low=0.0, completion_mask=mask)
    for (normalize, rejects), weights in found.items():
        expected = gk.rollout_weights(old, sampled, batch_normalize=normalize, **own).view(len(old), -1)
        expected = expected * kept if rejects else expected
        assert weights.shape == expected.shape
        torch.testing.assert_close(*(x.expand_as(mask)[mask.bool()] for x in (weights, expected)))
    log = parity.result_of(trainer)["log"]
    assert [0 < entry["sampling/rejected"] < 1 for entry in log if "sampling/rejected" in entry] == [True]
    assert sum(entry.get("grad_norm", 0.0) > 0 for entry in log) == 2


@pytest.mark.parametrize(("own", "words"), [
    ({"rollout_rs": {"token_k1": (0.5, 2.0)}}, "rollout_rs={'token_k1': (0.5, 2.0)} has no effect without use_vllm"),
    ({"rollout_is_batch_normalize": True}, "rollout_is_batch_normalize=True has no effect without use_vllm"),
    ({"rollout_rs": {"token_k1": 2.0}}, "rollout_rs['token_k1']=2.0; expected a pair of ratios"),
    ({"rollout_rs": {}}, "rollout_rs={}; expected a dict of bounds"),
    ({"rollout_rs_mask": True}, "rollout_rs_mask=True has no effect without rollout_rs"),
])  # fmt: skip
def test_corrections_that_cannot_act_are_refused(own, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parity.make_trainer(partial(integration.FusedGRPOTrainer, **own), "qwen2", {})


@pytest.mark.parametrize("own", [{"rollout_is_batch_normalize": True}, {"rollout_rs": RS}])
def test_weights_that_vespos_product_would_amplify_are_refused(own, monkeypatch):
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", lambda **_: SimpleNamespace(sync_weights=int))
    options = dict(loss_type="vespo", use_vllm=True, vllm_importance_sampling_mode="token_truncate")
    with pytest.raises(ValueError, match="loss_type='vespo' multiplies the weights of a completion's tokens"):
        parity.make_trainer(partial(integration.FusedGRPOTrainer, **own), "qwen2", options)
    cls = partial(integration.FusedGRPOTrainer, rollout_rs=RS, rollout_rs_mask=True)
    parity.make_trainer(cls, "qwen2", options)


# ---- truncated sampling ----------------------------------------------------------------------------------------------

TRUNCATED: dict[str, dict[str, Any]] = {
    "top_k": dict(top_k=9, num_iterations=2, beta=0.1, steps_per_generation=4),
    "top_p": dict(top_p=0.8, beta=0.1, num_iterations=1, pad_to_multiple_of=5),  # old log-probabilities are not needed
    "min_p after top_p": dict(top_p=0.6, min_p=0.4, steps_per_generation=4),
    "min_p, an adapter that the model brings": dict(min_p=0.3, beta=0.1, num_iterations=2, peft="trained"),
    "all, LoRA": dict(top_k=20, top_p=0.9, min_p=0.1, beta=0.1, num_iterations=2, peft=True),
    "transformers' own top_k": dict(top_k=None, top_p=0.9),
}


@pytest.mark.parametrize("name", TRUNCATED)
def test_the_support_is_what_transformers_sampled_from(name, monkeypatch):
    """And old and reference log-probabilities are over it. The reference is the model before adapters, which are not 0
    here, or the copy that TRL has made of an adapter that came with the model."""
    trainer = parity.make_trainer(integration.FusedGRPOTrainer, "qwen2", TRUNCATED[name])
    trainer.model.train()
    drawn, multinomial = [], torch.multinomial
    monkeypatch.setattr(torch, "multinomial", lambda p, *a, **k: drawn.append(p > 0) or multinomial(p, *a, **k))
    with torch.no_grad():
        for i, (weight_name, weight) in enumerate(trainer.model.named_parameters()):
            if weight.requires_grad:  # the policy is not the reference any more
                weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(i)))
                assert "lora" in weight_name or "peft" not in TRUNCATED[name]
        output = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
        mask = output["completion_mask"].bool()
        kept = kept_rows(output["support_ids"], output["support_counts"])
        assert mask.shape[1] % TRUNCATED[name].get("pad_to_multiple_of", 1) == 0 and not kept[~mask].any()
        sampled = torch.stack([*drawn, *[drawn[0]] * (mask.shape[1] - len(drawn))], 1)
        assert torch.equal(kept[mask], sampled[mask]) and kept[mask].sum(-1).float().mean() < 0.7 * VOCAB
        kept |= ~mask[..., None]
        old = scored(trainer, trainer.model, output, kept)
        if "old_per_token_logps" in output:
            torch.testing.assert_close(output["old_per_token_logps"][mask], old[mask], rtol=0, atol=2e-6)
        assert ("old_per_token_logps" in output) == (name != "top_p")
        full = scored(trainer, trainer.model, output, torch.ones_like(kept))
        mass = trainer._metrics["train"]["sampling/kept_mass"]
        assert mass == pytest.approx([(full - old).exp()[mask].mean().item()], abs=1e-6)
        assert trainer._metrics["train"]["sampling/support_added"] == [0.0]
        if "beta" in TRUNCATED[name]:
            without = contextlib.nullcontext()
            if "peft" in TRUNCATED[name]:
                kind = "ref" if TRUNCATED[name]["peft"] == "trained" else None
                without = trl_utils.use_adapter(trainer.model, kind)
            with without:
                ref = scored(trainer, trainer.ref_model or trainer.model, output, kept)
            torch.testing.assert_close(output["ref_per_token_logps"][mask], ref[mask], rtol=0, atol=2e-6)
            assert (ref - old)[mask].abs().max() > 0.1
    assert trainer.beta == TRUNCATED[name].get("beta", 0.0) and trainer._support is None


@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo", "gspo level", "quantile", "bonus"])
def test_the_loss_over_a_support_equals_trls_over_masked_logits(name):
    options: dict[str, Any] = {"loss_type": name, "beta": 0.1}
    if name not in ("grpo", "dapo", "cispo"):
        options = {"loss_type": "grpo", "beta": 0.1} | {
            "gspo level": {"importance_sampling_level": "sequence"}, "quantile": {"top_entropy_quantile": 0.4},
            "bonus": {"entropy_coef": 0.1},
        }[name]  # fmt: skip
    inputs = crafted_inputs()
    mask = inputs["completion_mask"].bool()
    kept = torch.rand(*mask.shape, VOCAB, generator=torch.Generator().manual_seed(9)) < 0.2
    kept = (kept & mask[..., None]).scatter(-1, inputs["completion_ids"][..., None], mask[..., None])
    ids = [row.nonzero()[:, 1].int() for row in kept]
    found = []
    for cls in (integration.FusedGRPOTrainer, EagerTrainer):
        trainer = parity.make_trainer(cls, "granite", {**options, "top_k": 9})
        trainer.kept = kept | ~mask[..., None]
        trainer.current_gradient_accumulation_steps = 2
        trainer.model.train()
        loss = trainer._compute_loss(trainer.model, inputs | {"support_ids": ids, "support_counts": kept.sum(-1)})
        loss.backward()
        log = {"loss": loss.item(), **{key: x for key, (x,) in trainer._metrics["train"].items()}}
        found.append({"log": [log], "weights": {n: p.grad for n, p in trainer.model.named_parameters()}})
    assert max(parity.differences(*found)) < parity.TOLERANCE


@pytest.mark.parametrize(("options", "batches"), [
    ({}, 12), ({"mask_truncated_completions": True}, 12),
    ({"eval_strategy": "steps", "eval_steps": 6, "per_device_eval_batch_size": 4}, 14),
])  # fmt: skip
def test_a_run_keeps_rows_and_supports_together(options, batches, monkeypatch):
    monkeypatch.setattr(Watched, "watched", 0)
    options |= dict(top_k=9, learning_rate=0.0, num_iterations=2, steps_per_generation=4, max_steps=6, beta=0.1)
    log = parity.result_of(parity.make_trainer(Watched, "qwen2", options))["log"]
    assert Watched.watched == batches  # of training and evaluation
    for entry in log:
        begin = "eval_" if "eval_loss" in entry else ""
        if f"{begin}loss" in entry:
            assert entry[f"{begin}clip_ratio/region_mean"] == 0 and abs(entry[f"{begin}kl"]) < 1e-6


def test_without_the_support_the_numbers_are_trls():
    options = dict(loss_type="dapo", top_k=9, top_p=0.9, max_steps=4)
    expected = parity.result_of(parity.make_trainer(trl.GRPOTrainer, "qwen2", options))
    found = {}
    for wanted in (False, True):
        cls = partial(integration.FusedGRPOTrainer, truncated_support=wanted)
        found[wanted] = parity.result_of(parity.make_trainer(cls, "qwen2", options))
    assert max(parity.differences(found[False], expected)) < parity.TOLERANCE
    assert found[True]["log"][0]["entropy"] < 0.8 * expected["log"][0]["entropy"]
    assert "sampling/kept_mass" in found[True]["log"][0] and "sampling/kept_mass" not in found[False]["log"][0]


class Engine:
    """A rollout_func that samples as vLLM does: with log-probabilities over the kept ids, and the ids if asked for.
    answers: the last token is one of the environment, which keeps none."""

    def __init__(self, returns_masks: bool = False, change: Any = None, *, answers: bool = False) -> None:
        self.returns_masks, self.change, self.answers = returns_masks, change, answers

    @torch.no_grad()
    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions, logps, masks = [], [], []
        for i, prompt in enumerate(ids):
            tokens, own, kept = [], [], []
            for _ in range(3 + i % 4):
                z = trainer.model(input_ids=torch.tensor([prompt + tokens])).logits[:, -1] / trainer.temperature
                keep = truncate(z, Truncation(trainer.args.top_k, trainer.args.top_p))
                log_p = z.masked_fill(~keep, -torch.inf).log_softmax(-1)[0]
                tokens.append(int(torch.multinomial(log_p.exp(), 1)))
                own.append(log_p[tokens[-1]].item())
                kept.append(keep[0].nonzero()[:, 0].tolist())
            completions.append(tokens), logps.append(own), masks.append(kept)
        found = {"prompt_ids": ids, "completion_ids": completions, "logprobs": logps}
        if self.answers:
            found["env_mask"] = [[1] * (len(tokens) - 1) + [0] for tokens in completions]
            for tokens, kept in zip(completions, masks, strict=True):
                tokens[-1], kept[-1] = VOCAB - 1, []
        if self.returns_masks:
            found["sampling_mask"] = masks if self.change is None else self.change(masks)
        return found


@pytest.mark.parametrize(("returns_masks", "answers"), [(False, False), (True, False), (False, True), (True, True)])
def test_before_any_update_importance_ratios_are_1(returns_masks, answers, capsys):
    """TRL's own carry the kept mass."""
    options = dict(top_k=50, top_p=0.9, vllm_importance_sampling_mode="token_truncate")
    ratios = {}
    for cls in (integration.FusedGRPOTrainer, trl.GRPOTrainer):
        engine = Engine(returns_masks and cls is integration.FusedGRPOTrainer, answers=answers)
        trainer, output = sampled_by(cls, engine, **options)
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        ratios[cls] = output["importance_sampling_ratio"][mask.bool()]
        if cls is integration.FusedGRPOTrainer:
            assert ("support_added" in str([*trainer._metrics["train"]])) != returns_masks
            (mass,) = trainer._metrics["train"]["sampling/kept_mass"]
    ours, trls = ratios.values()
    assert ((ours - 1).abs() < 1e-5).all() and trls.mean() < 0.92 and abs(mass - trls.mean()) < 0.02
    with capsys.disabled():
        outside = [((r - 1).abs() > 0.01).double().mean().item() for r in (ours, trls)]
        print(f"\nratio before any update: {ours.mean():.3f}, outside of [0.99, 1.01] {outside[0]:.1%}; "
              f"TRL {trls.mean():.3f}, {outside[1]:.1%}")  # fmt: skip


def test_masks_of_a_rollout_func():
    """The engine's are taken as they are, where they differ from what would be recomputed too."""

    def sampled_and_id_3(masks):
        return [[sorted({3, *kept[:2], *kept[-40:]}) for kept in row] for row in masks]

    _, output = sampled_by(integration.FusedGRPOTrainer, Engine(True, sampled_and_id_3), top_k=40, top_p=0.9)
    mask, kept = output["completion_mask"].bool(), kept_rows(output["support_ids"], output["support_counts"])
    assert kept[mask][:, 3].all()
    with pytest.raises(ValueError, match=r"sampling_mask of rollout_func is of \[2, 3, .*; expected \[3, 4, "):
        sampled_by(integration.FusedGRPOTrainer, Engine(True, lambda masks: [row[1:] for row in masks]), top_k=40)
    for change, words in {
        "one of None": (lambda masks: [None, *masks[1:]], r"rollout_func is of \['NoneType', 4, "),
        "a SamplingMask": (gk.SamplingMask.from_lists, "rollout_func is a SamplingMask; expected "),
        "tokens of None": (lambda masks: [[None] * len(row) for row in masks], "rollout_func: "),
        "an id below 0": (lambda masks: [[[-1]] * len(row) for row in masks], "rollout_func: kept holds -1; expected"),
    }.values():
        with pytest.raises((TypeError, ValueError), match=f"sampling_mask of {words}"):
            sampled_by(integration.FusedGRPOTrainer, Engine(True, change), top_k=40)
    with pytest.raises(ValueError, match="rollout_func returned sampling_mask, and nothing truncates"):
        sampled_by(integration.FusedGRPOTrainer, Engine(True), beta=0.0)
    cls = partial(integration.FusedGRPOTrainer, truncated_support=False)
    with pytest.raises(ValueError, match="truncated_support=False"):
        sampled_by(cls, Engine(True), top_k=5)


@pytest.mark.parametrize(("options", "words"), [
    ({"repetition_penalty": 1.2}, "repetition_penalty=1.2 of the sampler, with top_k=5"),
    ({"generation_kwargs": {"min_new_tokens": 2}}, "min_new_tokens=2"),
    ({"generation_kwargs": {"bad_words_ids": [[5]]}}, r"bad_words_ids=\[\[5\]\]"),
    ({"generation_kwargs": {"temperature": 0.5}}, "temperature=0.5"),
    ({"generation_kwargs": {"do_sample": False}}, "do_sample=False"),
    ({"generation_kwargs": {"suppress_tokens": [4]}}, r"suppress_tokens=\[4\]"),
    ({"generation_kwargs": {"top_k": "5"}}, "top_k='5'; expected an integer >= -1"),
    ({"top_p": 0.0}, r"top_p=0.0; expected a finite number in \(0, 1\]"),
    ({"min_p": -0.1}, r"min_p=-0.1; expected"),
])  # fmt: skip
def test_what_changes_logits_beside_truncation_is_refused_by_name(options, words, monkeypatch):
    monkeypatch.setattr("transformers.GenerationConfig.validate", lambda *args, **kwargs: None)
    options = {"top_k": 5, **options}
    with pytest.raises(ValueError, match=words):
        parity.make_trainer(integration.FusedGRPOTrainer, "qwen2", options)
    parity.make_trainer(partial(integration.FusedGRPOTrainer, truncated_support=False), "qwen2", options)
    with pytest.raises(TypeError, match="truncated_support is a int; expected True or False"):
        parity.make_trainer(partial(integration.FusedGRPOTrainer, truncated_support=1), "qwen2", {})


def test_options_of_the_sampler_are_those_of_the_engine_that_samples():
    """transformers fills in the model's own; vLLM does not, has min_p first, -1 for all ids and a least temperature."""
    model = tiny_model("qwen2")
    model.generation_config.update(min_p=0.3, typical_p=0.9)
    args = SimpleNamespace(
        top_k=-1, top_p=0.9, min_p=None, temperature=0.7, repetition_penalty=1.0, vllm_structured_outputs_regex=None,
        generation_kwargs={"top_k": 8, "stop": ["x"]},
    )  # fmt: skip
    trainer = SimpleNamespace(args=args, use_vllm=True, model=model, temperature=0.7)
    assert truncation_of(trainer) == Truncation(8, 0.9, 0.0, False)
    args.generation_kwargs = {}
    assert truncation_of(trainer) == Truncation(0, 0.9, 0.0, False)
    for name, value in {"logit_bias": {3: 1.0}, "bad_words": ["x"], "min_tokens": 2, "presence_penalty": 0.1}.items():
        args.generation_kwargs = {name: value}
        with pytest.raises(ValueError, match=name):
            truncation_of(trainer)
    args.generation_kwargs, args.vllm_structured_outputs_regex = {}, "a|b"
    with pytest.raises(ValueError, match=r"structured_outputs='a\|b'"):
        truncation_of(trainer)
    args.vllm_structured_outputs_regex, args.temperature = None, "0.7"
    with pytest.raises(TypeError, match="temperature is a str; expected a number"):
        truncation_of(trainer)
    args.temperature, trainer.temperature = 0.001, 0.001
    with pytest.raises(ValueError, match=r"temperature=0\.01"):
        truncation_of(trainer)
    args.top_p = 1.0
    assert truncation_of(trainer) is None  # and what changes logits is TRL's business
    trainer.use_vllm, trainer.temperature = False, 0.7
    trainer.generation_kwargs = {"top_k": 0, "top_p": 1.0, "min_p": None, "temperature": 0.7}
    with pytest.raises(ValueError, match=r"typical_p=0\.9 of the sampler, with top_k=0, top_p=1\.0, min_p=0\.3"):
        truncation_of(trainer)
    model.generation_config.typical_p = 1.0
    assert truncation_of(trainer) == Truncation(0, 1.0, 0.3, True)
    trainer.generation_kwargs["top_k"] = None
    assert truncation_of(trainer) == Truncation(50, 1.0, 0.3, True)
    model.generation_config.top_k = 7
    assert truncation_of(trainer) == Truncation(7, 1.0, 0.3, True)

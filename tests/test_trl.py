"""The fused trainers and patch_trl against TRL itself. All runs are in tests/trl_parity.py; here is a part of them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import runpy
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import relative
from tiny_models import VOCAB, tiny_model

pytest.importorskip("trl", reason="trl is not installed: make test EXTRAS=dev,peers")

import trl
import trl_parity as parity
from trl.trainer import utils as trl_utils

import grpo_kernels as gk
from grpo_kernels.head import kept
from grpo_kernels.head.truncation import Truncation, truncate
from grpo_kernels.integrations import trl as integration
from grpo_kernels.integrations.trl_support import truncation_of

CASES = parity.CASES


@pytest.fixture(autouse=True)
def _unpatched_afterwards():
    yield
    integration.unpatch_trl()


PATCHED = ("grpo, token, beta 0.1", "gemma2, token", "phi, sequence", "entropy bonus", "LoRA, reference without it")
TOGETHER = (  # options that one run can have
    "delta + rewards not scaled",
    "epsilon_high + KL without bias correction + reference model that follows",
    "off-policy mask",
    "top-entropy quantile, entropy bonus + steps_per_generation 4",
    "adaptive entropy bonus + gradient checkpointing + lm_head in float32",
    "evaluation, mean over sequences + on-policy",
)


def some_cases() -> list[str]:
    """Each second loss type, at one of the levels, with beta 0 or not; every option; each family of models once."""
    types = [case.title for i, case in enumerate(parity.TYPES) if i % 8 == i // 8]
    families = [case.title for case in (*parity.FAMILIES[::4], *parity.FAMILIES[3::4], parity.FAMILIES[-1])]
    alone = ("adaptive entropy bonus, quantile", "truncated completions masked", "delta below the bound of the clip")
    return list(dict.fromkeys((*types, *TOGETHER, *alone, *families, *PATCHED)))


def short_case(title: str) -> parity.Case:
    """The options of all cases of a title, with fewer steps."""
    cases = [CASES[part] for part in title.split(" + ")]
    options = {name: x for case in cases for name, x in case.options.items()}
    options["loss_type"] = cases[0].options["loss_type"]
    options["max_steps"] = 8 if title == "truncated completions masked" else 4  # the first completions are all cut off
    return cases[0]._replace(title=title, options=options)


@pytest.mark.parametrize("title", some_cases(), ids=str)
def test_a_run_equals_trls(title, monkeypatch):
    case = short_case(title)
    expected = parity.run("trl", case)
    losses = [entry["loss"] for entry in expected["log"] if "loss" in entry]
    assert len(losses) == case.options["max_steps"] and any(losses)
    if title.startswith(("grpo", "dapo")):
        assert parity.clipped(expected) > 0.05  # ratios leave the clip range
    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", None)  # not called, with or without gradients
    for name in ("fused", "patched") if title in PATCHED else ("fused",):
        assert max(parity.differences(parity.run(name, case), expected)) < parity.TOLERANCE, name


@pytest.mark.slow
def test_runs_of_two_processes_equal_trls():
    """And in the same processes: gradients under FSDP2, runs under DeepSpeed ZeRO-3."""
    import trl_sharded

    cases = [CASES[f"{name}, two processes"] for name in ("dapo", "bnpo", "top-entropy quantile")]
    cases.append(parity.DISTILLATION[-1])
    found = parity.run_processes(("trl", "fused", "patched"), cases, trl_sharded.check)
    for case in cases:
        for name in ("fused", "patched"):
            errors = parity.differences(found[name, case.title], found["trl", case.title])
            assert max(errors) < parity.TOLERANCE, (case.title, name)
    if find_spec("deepspeed") is None:
        pytest.skip("DDP and FSDP2 are tested; deepspeed is not installed: run make test")


# ---- one call of _compute_loss with inputs that a run does not have ------------------------------------------------

ROWS, PROMPT, LENGTH = 5, 4, 6


def crafted_inputs(seed: int = 0, length: int = LENGTH) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    mask = (torch.arange(length) < torch.tensor([[6], [3], [1], [0], [5]])).long()
    old = -2.0 - torch.rand(ROWS, length, generator=g) * 3
    return {
        "prompt_ids": torch.randint(10, VOCAB, (ROWS, PROMPT), generator=g),
        "prompt_mask": torch.tensor([[0, 1, 1, 1]]).repeat(ROWS, 1),
        "completion_ids": torch.randint(10, VOCAB, (ROWS, length), generator=g),
        "completion_mask": mask,
        "advantages": torch.randn(ROWS, generator=g),
        "old_per_token_logps": old * mask,
        "ref_per_token_logps": (old + 0.3 * torch.randn(ROWS, length, generator=g)) * mask,
        "num_items_in_batch": torch.tensor(23),
    }


def ratios(mode: str, seed: int = 2) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    shape = (ROWS, 1) if mode.startswith("sequence") else (ROWS, LENGTH)
    found = torch.rand(shape, generator=g) * 1.5 + 0.3
    if mode.endswith("mask"):
        found = found.masked_fill(found > 1.4, 0.0)
    return found if shape[1] == 1 else torch.where(crafted_inputs()["completion_mask"].bool(), found, 1.0)


def unknown_sampling_logps() -> torch.Tensor:
    old = crafted_inputs()["old_per_token_logps"]
    found = old + 0.2 * torch.randn(old.shape, generator=torch.Generator().manual_seed(3))
    found[0, 1], found[4, 0] = torch.nan, torch.nan
    return found


TOOLS = torch.ones(ROWS, LENGTH, dtype=torch.long)
TOOLS[0, 2:4] = TOOLS[4, 0] = 0
VLLM_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
PER_TOKEN = torch.randn(ROWS, LENGTH, generator=torch.Generator().manual_seed(4))
CRAFTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # arguments; what is changed in the inputs
    "plain": ({}, {}),
    "on-policy": ({}, {"old_per_token_logps": None}),
    "tools": ({}, {"tool_mask": TOOLS}),
    "tools, quantile and bonus": ({"top_entropy_quantile": 0.4, "entropy_coef": 0.1}, {"tool_mask": TOOLS}),
    **{
        f"vLLM {mode}": ({"vllm_importance_sampling_mode": mode}, {"importance_sampling_ratio": ratios(mode)})
        for mode in VLLM_MODES
    },
    "sampling log-probabilities": (
        {"off_policy_mask_threshold": 0.02}, {"sampling_per_token_logps": unknown_sampling_logps()}
    ),
    "off-policy mask by old log-probabilities": ({"off_policy_mask_threshold": 0.02}, {}),
    "all masked": ({"entropy_coef": 0.1}, {"completion_mask": torch.zeros(ROWS, LENGTH, dtype=torch.long)}),
    "all masked, quantile": ({"top_entropy_quantile": 0.4}, {"tool_mask": torch.zeros(ROWS, LENGTH, dtype=torch.long)}),
    "advantages per token": ({}, {"advantages": PER_TOKEN}),
    "advantages per token, off-policy mask": ({"off_policy_mask_threshold": 0.02}, {"advantages": PER_TOKEN}),
    "one column": ({}, {}),
    "auxiliary loss": ({"router_aux_loss_coef": 0.1}, {}),
    "vespo_lambda 0": ({"vespo_lambda_pos": 0.0, "vespo_lambda_neg": 0.0}, {}),
}  # fmt: skip


def computed(cls: Any, name: str, options: dict[str, Any], mode: str, seed: int = 0) -> dict[str, Any]:
    """Loss and logged numbers, and gradients in place of the weights, of one micro-batch, as a run has them."""
    own, changes = CRAFTED[name]
    family = "mixtral" if name == "auxiliary loss" else "qwen2"
    trainer = parity.make_trainer(cls, family, {**options, **own})
    trainer.current_gradient_accumulation_steps = 2
    trainer.use_vllm = name.startswith("vLLM")  # without an engine
    trainer.model.train(mode == "train")
    inputs = {**crafted_inputs(seed, length=1 if name == "one column" else LENGTH), **changes}
    inputs = {key: x for key, x in inputs.items() if x is not None}
    loss = trainer._compute_loss(trainer.model, inputs)
    assert loss.dtype == torch.float32  # under autocast too
    loss.backward()
    log = {key: x for key, (x,) in trainer._metrics[mode].items()}
    gradients = {n: torch.zeros(1) if p.grad is None else p.grad for n, p in trainer.model.named_parameters()}
    return {"log": [{"loss": loss.item(), **log}], "weights": gradients}


@pytest.mark.parametrize("quantile", [1.0, 0.4])
def test_sparse_gradients(quantile, monkeypatch):
    monkeypatch.setattr(kept, "DENSE_LOGITS_PER_KEPT_ID", {"cpu": 1, "cuda": 1})
    options = {"loss_type": "grpo", "top_entropy_quantile": quantile, "entropy_coef": 0.1}
    classes = (partial(integration.FusedGRPOTrainer, sparse_backward=x) for x in (None, 0.1, 1e-12))
    exact, rounded, tiny = (computed(cls, "plain", options, "train") for cls in classes)
    assert max(parity.differences(tiny, exact)) < 1e-5 and rounded["log"] == exact["log"]
    assert not torch.equal(rounded["weights"]["lm_head.weight"], exact["weights"]["lm_head.weight"])


def test_sparse_gradients_of_the_head_alone(monkeypatch):
    monkeypatch.setattr(kept, "DENSE_LOGITS_PER_KEPT_ID", {"cpu": 1, "cuda": 1})
    hidden, ids, found = torch.randn(8, 16), torch.randint(64, (8,)), []
    for theta in (None, 0.1, None):
        weight = torch.linspace(-1.0, 1.0, 64 * 16).view(64, 16).requires_grad_()
        integration.patch_trl(theta)
        integration._FusedLogProbs.apply(hidden, weight, None, ids, 1.0, 4)[0].sum().backward()
        found.append(weight.grad)
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
    with pytest.raises(ValueError, match=r"sparse_backward=0\.0;"):
        integration.patch_trl(0.0)


def refused(name: str, loss_type: str) -> bool:
    return loss_type == "vespo" and name in ("vLLM sequence_truncate", "vLLM sequence_mask")  # by TRL too


@pytest.mark.parametrize("name", CRAFTED)
def test_a_call_equals_trls(name):
    """Of every loss type or of each second one, and of one that the name says; the levels, and beta 0 or not, take
    turns."""
    modes = ("train", "eval") if name in ("plain", "tools, quantile and bonus") else ("train",)
    for i, loss_type in enumerate(parity.LOSS_TYPES):
        turn = i + list(CRAFTED).index(name)
        level, beta = parity.LEVELS[turn // 2 % 2], 0.1 * (turn // 4 % 2)
        if (turn % 2 and name != "plain" and loss_type not in name) or refused(name, loss_type):
            continue
        options = dict(loss_type=loss_type, importance_sampling_level=level, beta=beta)
        for mode in modes:
            calls = [computed(parity.trainer_class(t), name, options, mode) for t in ("fused", "trl")]
            assert max(parity.differences(*calls)) < parity.TOLERANCE


def sampled_elsewhere(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions as of another engine, which is nearly sure of a few tokens and does not know one."""
    g = torch.Generator().manual_seed(trainer.state.global_step)
    lengths = torch.randint(1, LENGTH + 1, (len(prompts),), generator=g).tolist()
    logps = [(-4.1 + 0.4 * torch.randn(n, generator=g)).tolist() for n in lengths]
    logps[0][0], logps[1][0] = float("nan"), -0.1
    return {
        "prompt_ids": [[11, 12]] * len(prompts), "logprobs": logps,
        "completion_ids": [torch.randint(10, VOCAB, (n,), generator=g).tolist() for n in lengths],
    }  # fmt: skip


RS = {"token_k1": (0.3, 3.0), "seq_mean_k3": 1.0}


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


TOKENS = [11, 20]
HEADS = {
    "modules_to_save": (False, {"modules_to_save": ["lm_head"]}),
    "trainable tokens": (False, {"trainable_token_indices": {"lm_head": TOKENS}}),
    "trainable tokens of tied embeddings": (True, {"trainable_token_indices": TOKENS}),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_peft_wraps(name, monkeypatch):
    """With a reference model, which is the base model."""
    tied, options = HEADS[name]
    found = []
    for cls in (parity.trainer_class("fused"), parity.trainer_class("trl")):
        args = parity.trl_arguments(parity.saved_model("qwen2"), beta=0.1, loss_type="dapo", max_steps=2)
        own = {"model": tiny_model("qwen2", tie_word_embeddings=tied), "peft": options}
        given = {"args": args, "reward_funcs": parity.reward, "train_dataset": parity.prompts()}
        found.append(parity.result_of(parity.construct(cls, "qwen2", **own, **given)))
        # TRL asks PEFT's wrapper for a bias, which it does not have.
        monkeypatch.setattr("peft.utils.other.TrainableTokensWrapper.bias", None, raising=False)
    assert max(parity.differences(*found)) < parity.TOLERANCE
    assert any("modules_to_save" in name or "trainable_tokens_delta" in name for name in found[0]["weights"])


def test_bf16_autocast_is_as_exact_as_trls():
    """Of the parameters at the head, against an lm_head in float32; further down the body's own rounding is larger."""
    options = dict(loss_type="grpo", beta=0.1, bf16=True)
    squares = {"fused": torch.zeros(2), "trl": torch.zeros(2)}
    for seed in range(6):
        wide = {**options, "cast_lm_head_to_fp32": True}
        exact = computed(parity.trainer_class("trl"), "plain", wide, "train", seed)["weights"]
        for kind, total in squares.items():
            found = computed(parity.trainer_class(kind), "plain", options, "train", seed)["weights"]
            errors = [relative(found[name], exact[name]) for name in ("lm_head.weight", "model.norm.weight")]
            total += torch.tensor(errors).square()
    assert (squares["fused"] <= squares["trl"]).all(), squares


# ---- truncated sampling ----------------------------------------------------------------------------------------------

TRUNCATED: dict[str, dict[str, Any]] = {
    "top_k": dict(top_k=9, num_iterations=2, beta=0.1, steps_per_generation=4),
    "top_p": dict(top_p=0.8, beta=0.1, num_iterations=1, pad_to_multiple_of=5),  # old log-probabilities are not needed
    "min_p after top_p": dict(top_p=0.6, min_p=0.4, steps_per_generation=4),
    "min_p, an adapter that the model brings": dict(min_p=0.3, beta=0.1, num_iterations=2, peft="trained"),
    "all, LoRA": dict(top_k=20, top_p=0.9, min_p=0.1, beta=0.1, num_iterations=2, peft=True),
    "transformers' own top_k": dict(top_k=None, top_p=0.9),
}


class EagerTrainer(trl.GRPOTrainer):
    """TRL's loss of log-probabilities over `kept` (B, T, V) bool, from logits by autograd."""

    kept: torch.Tensor

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **_):
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
        logps = (logits / self.temperature).masked_fill(~self.kept, -torch.inf).log_softmax(-1)
        terms = torch.where(self.kept, logps.exp() * logps.masked_fill(~self.kept, 0.0), 0.0)
        return logps.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0], -terms.sum(-1), None


def kept_rows(ids: list[torch.Tensor], counts: torch.Tensor) -> torch.Tensor:
    """(B, T, V) bool of what travels with the rows."""
    kept = torch.zeros(*counts.shape, VOCAB, dtype=torch.bool)
    for row, numbers, found in zip(kept, counts, ids, strict=True):
        for token, own in zip(row, found.split(numbers.tolist()), strict=True):
            token[own.long()] = True
    return kept


def scored(trainer: Any, model: Any, output: dict[str, Any], kept: torch.Tensor) -> torch.Tensor:
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    return EagerTrainer._get_per_token_logps_and_entropies(
        SimpleNamespace(temperature=trainer.temperature, kept=kept), model, ids, mask, kept.shape[1]
    )[0]


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


class Watched(integration.FusedGRPOTrainer):
    """Compares what travels through shuffling and splitting with what the policy, which stands still, kept."""

    watched = 0

    def _compute_loss(self, model, inputs):
        kept = kept_rows(inputs["support_ids"], inputs["support_counts"])
        mask = inputs["completion_mask"].bool()
        full = scored(self, model, inputs, torch.ones_like(kept)).detach()
        own = scored(self, model, inputs, kept | ~mask[..., None]).detach()
        likely = torch.where(mask, inputs["support_counts"], 9) <= 10
        Watched.watched += int(likely.all() and bool(((own - full)[mask] > 0.1).all()))
        loss = super()._compute_loss(model, inputs)
        if "old_per_token_logps" in inputs:
            torch.testing.assert_close(inputs["old_per_token_logps"][mask], own[mask], rtol=0, atol=2e-6)
        return loss


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


def sampled_by(cls: Any, engine: Engine, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A trainer whose engine is this one; a rollout."""
    trainer = parity.make_trainer(partial(cls, rollout_func=engine), "qwen2", options)
    trainer.use_vllm, trainer.vllm_generation = True, SimpleNamespace(sync_weights=lambda: None)
    trainer._last_loaded_step = -1
    trainer.model.train()
    return trainer, trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))


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


# ---- the other trainers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", parity.DISTILLATION[:-1], ids=lambda case: case.title)
def test_a_run_of_distillation_equals_trls(case):
    expected = parity.run("trl", case)
    assert any(entry.get("loss", 0.0) > 1e-3 for entry in expected["log"])
    for name in ("fused", "patched") if case.title == "JSD" else ("fused",):
        assert max(parity.differences(parity.run(name, case), expected)) < parity.TOLERANCE, name


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("items", [None, 11])
def test_a_call_of_the_divergence_equals_trls(beta, items):
    """Values and gradients, with softcap, scale, bias and padding."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    from grpo_kernels.integrations.trl_distillation import divergence_loss

    g = torch.Generator().manual_seed(0)
    shapes = (3, 5, 24), (3, 5, 40), (67, 24), (67, 40)
    given = [torch.randn(shape, generator=g) * 0.5 for shape in shapes]
    mask = torch.rand(3, 5, generator=g) < 0.7
    results = []
    for function in (divergence_loss, _chunked_divergence_loss):
        leaves = [x.clone().requires_grad_() for x in (given[0], given[2], torch.linspace(-1, 1, 67))]
        loss, entropy, count = function(
            leaves[0], given[1], leaves[1], given[3], mask.int(), beta, num_items_in_batch=items,
            student_lm_head_bias=leaves[2], teacher_lm_head_bias=torch.linspace(1, -1, 67), student_logit_scale=0.7,
            teacher_logit_scale=1.3, student_final_logit_softcapping=5.0, teacher_final_logit_softcapping=4.0,
            temperature=0.8,
        )  # fmt: skip
        loss.backward()
        results.append([loss.detach(), entropy.detach(), count, *(x.grad for x in leaves)])
    for mine, other in zip(*results, strict=True):
        assert relative(mine, other) < 5e-6


def other_trainer(name: str, folder: Path) -> dict[str, Any]:
    import trl
    from datasets import Dataset

    prompts = parity.prompts()["prompt"]
    answers = [" ".join(reversed(p.split())) + " w7" * (i % 3) for i, p in enumerate(prompts)]
    columns = {
        "SFT": {"text": [f"{p} {a}" for p, a in zip(prompts, answers, strict=True)]},
        "DPO": {"prompt": prompts, "chosen": answers, "rejected": answers[1:] + answers[:1]},
    }
    args = getattr(trl, f"{name}Config")(**parity.COMMON | {"output_dir": str(folder), "max_steps": 3})
    data = Dataset.from_dict(columns[name])
    return parity.result_of(parity.construct(getattr(trl, f"{name}Trainer"), "qwen2", args=args, train_dataset=data))


@pytest.mark.parametrize("name", ["SFT", "DPO"])
def test_other_trainers_with_the_replaced_head_equal_trls(name, tmp_path, monkeypatch):
    expected = other_trainer(name, tmp_path)
    integration.patch_trl()
    integration.patch_trl()  # a second call does nothing
    calls = []
    monkeypatch.setattr(integration, "fused_logps", lambda *a, **k: calls.append(1) or gk.fused_logps(*a, **k))
    assert max(parity.differences(other_trainer(name, tmp_path), expected)) < parity.TOLERANCE
    assert calls
    integration.unpatch_trl()
    assert trl_utils._ChunkedLogProbFunction is not integration._FusedLogProbs


# ---- the configuration, bad input ------------------------------------------------------------------------------------


def test_from_trl_reads_what_the_loss_type_uses(tmp_path):
    def config(**options: Any) -> gk.GRPOConfig:
        overrides = options.pop("overrides", {})
        return gk.GRPOConfig.from_trl(parity.trl_arguments(str(tmp_path), **options), **overrides)

    assert config(loss_type="dapo") == gk.GRPOConfig(
        epsilon_low=0.1, epsilon_high=0.1, temperature=0.9, importance_sampling_level="token"
    )
    assert config(loss_type="cispo", epsilon_high=4.0, delta=2.0).epsilon_high == 4.0
    assert config(loss_type="dr_grpo").max_completion_length == 8
    assert config(loss_type="grpo").max_completion_length is None
    assert config(loss_type="vespo", vespo_lambda_pos=0.0).vespo_lambda_pos == 1e-4
    assert config(beta=0.1).use_bias_correction_kl and not config().use_bias_correction_kl
    assert config(overrides={"beta": 0.5}).beta == 0.5
    granite = SimpleNamespace(model_type="granite", logits_scaling=8.0)
    assert gk.GRPOConfig.from_trl(parity.trl_arguments(str(tmp_path)), granite).logit_scale == 1 / 8
    with pytest.raises(ValueError, match=r"top_entropy_quantile=0.2.*entropy_threshold"):
        config(top_entropy_quantile=0.2)
    with_bonus = config(top_entropy_quantile=0.2, entropy_coef=0.01, overrides={"entropy_threshold": 1.0})
    assert with_bonus.entropy_kept_only and not config(entropy_coef=0.01).entropy_kept_only
    with pytest.raises(ValueError, match=r"use_adaptive_entropy=True.*entropy_coef"):
        config(use_adaptive_entropy=True)
    with pytest.raises(ValueError, match="loss_type='gspo'; expected one of grpo"):
        config(loss_type="gspo")


# Options of TRL and values of them with which `from_trl` gives another loss, or raises: it cannot know a number.
READ: dict[str, Any] = dict(
    loss_type="bnpo", importance_sampling_level="sequence", epsilon=0.3, epsilon_high=0.4, delta=3.0, beta=0.1,
    temperature=0.5, entropy_coef=0.1, off_policy_mask_threshold=0.2, scale_rewards="none", top_entropy_quantile=0.5,
    use_adaptive_entropy=True,
)  # fmt: skip
READ_WITH: dict[str, tuple[dict[str, Any], Any]] = {  # with these options
    "max_completion_length": ({"loss_type": "dr_grpo"}, 9),
    "use_bias_correction_kl": ({"beta": 0.1}, False),
    **{f"sapo_temperature_{side}": ({"loss_type": "sapo"}, 0.7) for side in ("pos", "neg")},
    **{f"vespo_{name}_{side}": ({"loss_type": "vespo"}, 0.7) for name in ("k", "lambda") for side in ("pos", "neg")},
}
# Values with which TRL's trainer does something beside the loss: named in a warning.
BESIDE: dict[str, Any] = dict(
    cast_lm_head_to_fp32=True, disable_dropout=True, mask_truncated_completions=True, neftune_noise_alpha=5.0,
    multi_objective_aggregation="normalize_then_sum", reward_weights=[1.0, 2.0], router_aux_loss_coef=0.1,
    sync_ref_model=True, use_vllm=True, min_p=0.1, top_k=5, top_p=0.9,
)  # fmt: skip
# Neither: which completions there are, numbers of options above, how the loss is accumulated (`normalizer`), optimiser,
# precision, files, logs.
OTHERS = (Path(__file__).with_name("data") / "trl_options.txt").read_text(encoding="utf-8").split()


def test_every_option_of_trl_is_read_or_named_or_changes_no_loss(tmp_path, recwarn):
    """A new one has to be looked at: whether the loss depends on it, and whether `from_trl` has to know it."""
    known = [*READ, *READ_WITH, *BESIDE, *OTHERS]
    assert len(known) == len(set(known))
    assert {field.name for field in dataclasses.fields(trl.GRPOConfig)} == set(known)

    def config(**options: Any) -> gk.GRPOConfig | str:
        try:
            return gk.GRPOConfig.from_trl(parity.trl_arguments(str(tmp_path), **options))
        except ValueError as error:
            return str(error)

    for name, (options, value) in {**{name: ({}, value) for name, value in READ.items()}, **READ_WITH}.items():
        found, before = config(**options, **{name: value}), config(**options)
        assert name in found if isinstance(found, str) else found != before, name
    assert not recwarn
    for name, value in BESIDE.items():
        assert config(**{name: value}) == config()
        assert f"GRPOConfig.from_trl: {name}={value!r} is not part of the loss: " in str(recwarn.pop().message)
    experts = SimpleNamespace(model_type="mixtral", output_router_logits=False, router_aux_loss_coef=0.02)
    with pytest.warns(UserWarning, match=r"router_aux_loss_coef=0\.02 is not part of the loss"):
        gk.GRPOConfig.from_trl(parity.trl_arguments(str(tmp_path)), experts)
    config(use_vllm=True, vllm_importance_sampling_correction=False)
    assert not recwarn
    args = parity.trl_arguments(parity.saved_model("qwen2"), mask_truncated_completions=True)
    given = {"model": tiny_model("qwen2"), "processing_class": parity.tokenizer(), "train_dataset": parity.prompts()}
    integration.FusedGRPOTrainer(args=args, reward_funcs=parity.reward, **given)
    assert not [x for x in recwarn if "from_trl" in str(x.message)]  # TRL's trainer does it


@pytest.mark.parametrize(("name", "value"), [
    ("beta", -0.1), ("entropy_coef", -0.1), ("off_policy_mask_threshold", -0.1), ("torch_compile", True),
    ("loss_type", "gspo"), ("delta", -1.0),
])  # fmt: skip
def test_what_cannot_be_honoured_raises_at_construction(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        parity.make_trainer(integration.FusedGRPOTrainer, "qwen2", {name: value})


def test_a_loss_that_would_have_no_effect_is_refused():
    """TRL's own variants, and a user's; what does not touch the loss works, and an own loss in front."""
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    fused = integration.FusedGRPOTrainer

    class OwnLoss(integration.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) * 2

    class Masks(fused):
        @staticmethod
        def get_off_policy_mask(*args, **kwargs):
            return None

    for base, words in ((GMPOTrainer, "has GMPOTrainer._compute_loss"), (OwnLoss, "OwnLoss._compute_loss")):
        with pytest.raises(TypeError, match=f"{words}, which FusedGRPOTrainer does not call"):
            parity.make_trainer(type("Both", (fused, base), {}), "qwen2", {})
    with pytest.raises(TypeError, match=r"Masks has .*Masks.get_off_policy_mask, which"):
        parity.make_trainer(Masks, "qwen2", {})

    class Logs(integration.GRPOTrainer):
        def log(self, *args, **kwargs):
            self.logged = True
            return super().log(*args, **kwargs)

    for bases in ((fused, Logs), (OwnLoss, fused)):
        parity.make_trainer(type("Both", bases, {}), "qwen2", {})

    @dataclasses.dataclass
    class Config(integration.trl.GRPOConfig):
        of_my_reward: float = 1.0

    given = {"model": tiny_model("qwen2"), "processing_class": parity.tokenizer(), "train_dataset": parity.prompts()}
    given |= {"reward_funcs": parity.reward}
    plain = dict(use_cpu=True, report_to=[], bf16=False)
    for config, words in ((GMPOConfig, "args is a GMPOConfig, of a loss"), (Config, "Config with of_my_reward, which")):
        with pytest.raises(TypeError, match=words):
            fused(args=config(**plain), **given)
    type("Mine", (fused,), {})(args=Config(**plain), **given)


def test_other_versions_of_trl_and_none_are_refused_and_no_verl():
    code = """
import importlib.util, sys, types
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "verl" else find(name, *rest)
sys.modules["trl"] = sys.modules["verl"] = sys.modules["transformers"] = None
other = types.SimpleNamespace(__version__="1.15.2")
for name, trl in (("trl", None), ("trl_distillation", None), ("trl", other), ("verl", None), ("alignment", None)):
    sys.modules["trl"] = trl
    try:
        importlib.import_module(f"grpo_kernels.integrations.{name}")
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    none, distillation, other, verl, alignment = done.stdout.splitlines()
    assert none == distillation == "grpo_kernels.integrations.trl needs TRL: pip install 'trl>=1.16,<1.17'"
    assert alignment == "grpo_kernels.integrations.transformers needs transformers: pip install transformers"
    assert "takes trl>=1.16,<1.17; TRL 1.15.2 is installed" in other
    assert verl == "grpo_kernels.integrations.verl needs verl: pip install verl"


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    script = parity.README.parents[2] / "examples" / "trl_grpo.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 40
    monkeypatch.setattr(sys, "argv", [str(script), parity.saved_model("llama"), "3"])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert "reward: " in capsys.readouterr().out.splitlines()[-1]

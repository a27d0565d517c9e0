"""The fused trainers and patch_trl against TRL itself. All runs are in tests/trl_parity.py; here is a part of them."""

from __future__ import annotations

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
from grpo_kernels.integrations import trl as integration

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
    cases = [CASES[f"{name}, two processes"] for name in ("dapo", "bnpo", "top-entropy quantile")]
    cases.append(parity.DISTILLATION[-1])
    script = Path(__file__).with_name("trl_sharded.py")
    found = parity.run_processes(("trl", "fused", "patched"), cases, str(script))
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


def computed(cls: Any, name: str, options: dict[str, Any], mode: str) -> dict[str, Any]:
    """Loss and logged numbers, and gradients in place of the weights, of one micro-batch, as a run has them."""
    own, changes = CRAFTED[name]
    family = "mixtral" if name == "auxiliary loss" else "qwen2"
    trainer = parity.make_trainer(cls, family, {**options, **own})
    trainer.current_gradient_accumulation_steps = 2
    trainer.use_vllm = name.startswith("vLLM")  # without an engine
    trainer.model.train(mode == "train")
    inputs = {**crafted_inputs(length=1 if name == "one column" else LENGTH), **changes}
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
    names = ("completion_mask", "old_per_token_logps", "sampling_per_token_logps")
    mask, old, sampled = (batch[name] for name in names)
    kept = gk.rejection_mask(old, sampled, RS, completion_mask=mask)
    assert 0 < kept.sum() < mask.sum() and kept[0, 0] and not kept[1, 0]
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
])  # fmt: skip
def test_corrections_that_cannot_act_are_refused(own, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parity.make_trainer(partial(integration.FusedGRPOTrainer, **own), "qwen2", {})


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


def test_bf16_autocast_stays_near_trls():
    options = dict(loss_type="grpo", bf16=True, beta=0.1)
    found, expected = (computed(parity.trainer_class(t), "plain", options, "train") for t in ("fused", "trl"))
    # By norm over all weights: a key's bias has a gradient that is only rounding, which softmax does not see.
    for run in (found, expected):
        run["weights"] = {"all": torch.cat([g.flatten() for g in run["weights"].values()])}
    assert max(parity.differences(found, expected)) < 0.02


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
    sync_ref_model=True, use_vllm=True,
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

"""The fused trainers and patch_trl against TRL itself. All runs are in tests/trl_parity.py; here is a part of them."""

from __future__ import annotations

import runpy
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import relative
from tiny_models import tiny_model

pytest.importorskip("trl", reason="trl is not installed: make test EXTRAS=dev,peers")

import trl
import trl_parity as parity
from trl.trainer import utils as trl_utils
from trl_calls import CRAFTED, computed

import grpo_kernels as gk
from grpo_kernels.head import mask_paths
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


@pytest.mark.parametrize("quantile", [1.0, 0.4])
def test_sparse_gradients(quantile, monkeypatch):
    monkeypatch.setattr(mask_paths, "DENSE_LOGITS_PER_GATHERED_ID", {"cpu": 1, "cuda": 1})
    options = {"loss_type": "grpo", "top_entropy_quantile": quantile, "entropy_coef": 0.1}
    classes = (partial(integration.FusedGRPOTrainer, sparse_backward=x) for x in (None, 0.1, 1e-12))
    exact, rounded, tiny = (computed(cls, "plain", options, "train") for cls in classes)
    assert max(parity.differences(tiny, exact)) < 1e-5 and rounded["log"] == exact["log"]
    assert not torch.equal(rounded["weights"]["lm_head.weight"], exact["weights"]["lm_head.weight"])


def test_sparse_gradients_of_the_head_alone(monkeypatch):
    monkeypatch.setattr(mask_paths, "DENSE_LOGITS_PER_GATHERED_ID", {"cpu": 1, "cuda": 1})
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


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    script = parity.README.parents[2] / "examples" / "trl_grpo.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 40
    monkeypatch.setattr(sys, "argv", [str(script), parity.saved_model("llama"), "3"])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert "reward: " in capsys.readouterr().out.splitlines()[-1]

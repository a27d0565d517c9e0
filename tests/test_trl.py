"""FusedGRPOTrainer and patch_trl against TRL itself. All runs are in tests/trl_parity.py; here is a part of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import VOCAB

pytest.importorskip("trl", reason="trl is not installed: make test EXTRAS=dev,peers")

import trl_parity as parity
from trl.trainer import utils as trl_utils

import grpo_kernels as gk
from grpo_kernels.engine import kept
from grpo_kernels.integrations import trl as integration

CASES = parity.CASES


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
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
    """Each loss type at one of the levels, with beta 0 or not; every option; each family of models once."""
    types = [case.title for i, case in enumerate(parity.TYPES) if i % 4 == i // 4 % 4]
    families = [case.title for case in (*parity.FAMILIES[::4], *parity.FAMILIES[3::4], parity.FAMILIES[-1])]
    alone = ("adaptive entropy bonus, quantile", "truncated completions masked")
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


def test_runs_of_two_processes_equal_trls():
    """And in the same processes: gradients under FSDP2, runs under DeepSpeed ZeRO-3."""
    cases = [CASES[f"{name}, two processes"] for name in ("dapo", "bnpo", "top-entropy quantile")]
    script = Path(__file__).with_name("trl_sharded.py")
    found = parity.run_processes(("trl", "fused", "patched"), cases, str(script))
    for case in cases:
        for name in ("fused", "patched"):
            errors = parity.differences(found[name, case.title], found["trl", case.title])
            assert max(errors) < parity.TOLERANCE, (case.title, name)
    if find_spec("deepspeed") is None:
        pytest.skip("DDP and FSDP2 are tested; deepspeed is not installed: run make test")


def test_differences_are_seen():
    expected = parity.run("trl", CASES["grpo, token, beta 0.1"])
    changed = CASES["grpo, token, beta 0.1"]._replace(options={"loss_type": "grpo", "beta": 0.1, "epsilon": 0.1001})
    assert max(parity.differences(parity.run("fused", changed), expected)) > parity.TOLERANCE


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


def computed(cls: Any, name: str, options: dict[str, Any], mode: str) -> tuple[Any, ...]:
    """(loss, gradients, logged numbers) of one micro-batch."""
    own, changes = CRAFTED[name]
    family = "mixtral" if name == "auxiliary loss" else "qwen2"
    trainer = parity.make_trainer(cls, family, {**options, **own})
    trainer.current_gradient_accumulation_steps = 2
    trainer.use_vllm = name.startswith("vLLM")  # without an engine
    trainer.model.train(mode == "train")
    inputs = {**crafted_inputs(length=1 if name == "one column" else LENGTH), **changes}
    inputs = {key: x for key, x in inputs.items() if x is not None}
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in trainer.model.named_parameters()}, dict(trainer._metrics[mode])


def agree(found: Any, expected: Any, tolerance: float) -> None:
    def close(a: float, b: float) -> bool:
        return a == pytest.approx(b, rel=tolerance, abs=tolerance, nan_ok=True)

    assert close(found[0].item(), expected[0].item())
    assert found[1].keys() == expected[1].keys()
    for name, x in expected[1].items():
        mine = found[1][name]
        if x is None or mine is None:
            assert (x is None or not x.any()) and (mine is None or not mine.any()), name
        else:
            assert (mine - x).norm() <= tolerance * x.norm() + 1e-7, name
    assert list(found[2]) == list(expected[2])
    for name, x in expected[2].items():
        assert len(x) == len(found[2][name]) == 1 and close(found[2][name][0], x[0]), name


@pytest.mark.parametrize("quantile", [1.0, 0.4])
def test_sparse_gradients(quantile, monkeypatch):
    monkeypatch.setattr(kept, "DENSE_LOGITS_PER_KEPT_ID", {"cpu": 1, "cuda": 1})
    options = {"loss_type": "grpo", "top_entropy_quantile": quantile, "entropy_coef": 0.1}
    classes = (partial(integration.FusedGRPOTrainer, sparse_backward=x) for x in (None, 0.1, 1e-12))
    exact, rounded, tiny = (computed(cls, "plain", options, "train") for cls in classes)
    agree(tiny, exact, 1e-5)
    assert torch.equal(rounded[0], exact[0]) and rounded[2] == exact[2]
    assert not torch.equal(rounded[1]["lm_head.weight"], exact[1]["lm_head.weight"])


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
    """Of every loss type; the levels, and beta 0 or not, take turns."""
    modes = ("train", "eval") if name in ("plain", "tools, quantile and bonus") else ("train",)
    for i, loss_type in enumerate(parity.LOSS_TYPES):
        turn = i + list(CRAFTED).index(name)
        level, beta = parity.LEVELS[turn % 2], 0.1 * (turn // 2 % 2)
        if refused(name, loss_type):
            continue
        options = dict(loss_type=loss_type, importance_sampling_level=level, beta=beta)
        for mode in modes:
            calls = [computed(parity.trainer_class(t), name, options, mode) for t in ("fused", "trl")]
            agree(*calls, 2e-5)


def test_bf16_autocast_stays_near_trls():
    options = dict(loss_type="grpo", bf16=True, beta=0.1)
    found, expected = (computed(parity.trainer_class(t), "plain", options, "train") for t in ("fused", "trl"))
    # By norm over all weights: a key's bias has a gradient that is rounding alone, which softmax does not see.
    wholes = [torch.cat([g.flatten() for g in run[1].values()]) for run in (found, expected)]
    agree(*((loss, {"all": whole}, log) for (loss, _, log), whole in zip((found, expected), wholes, strict=True)), 0.02)
    assert found[0].dtype == torch.float32


# ---- the other trainers ---------------------------------------------------------------------------------------------


def other_trainer(name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    import contextlib
    import warnings

    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    common = dict(
        output_dir=tempfile.mkdtemp(),
        max_steps=3, per_device_train_batch_size=4, optim="sgd", learning_rate=0.3, use_cpu=True,
        bf16=False, report_to="none", save_strategy="no", logging_steps=1, gradient_checkpointing=False,
        disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    prompts = parity.prompts()["prompt"]
    answers = [" ".join(reversed(p.split())) + " w7" * (i % 3) for i, p in enumerate(prompts)]
    columns = {
        "SFT": {"text": [f"{p} {a}" for p, a in zip(prompts, answers, strict=True)]},
        "DPO": {"prompt": prompts, "chosen": answers, "rejected": answers[1:] + answers[:1]},
    }
    folder = parity.saved_model("qwen2")
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = getattr(trl, f"{name}Trainer")(
            model=AutoModelForCausalLM.from_pretrained(folder), args=getattr(trl, f"{name}Config")(**common),
            train_dataset=Dataset.from_dict(columns[name]), processing_class=parity.tokenizer(),
        )  # fmt: skip
        trainer.train()
    return parity.result_of(trainer)


@pytest.mark.parametrize("name", ["SFT", "DPO"])
def test_other_trainers_with_the_replaced_head_equal_trls(name, monkeypatch):
    expected = other_trainer(name)
    integration.patch_trl()
    integration.patch_trl()  # a second call does nothing
    calls = []
    monkeypatch.setattr(integration, "fused_logps", lambda *a, **k: calls.append(1) or gk.fused_logps(*a, **k))
    assert max(parity.differences(other_trainer(name), expected)) < parity.TOLERANCE
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


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"beta": -0.1}, "beta=-0.1"),
        ({"entropy_coef": -0.1}, "entropy_coef=-0.1"),
        ({"off_policy_mask_threshold": -0.1}, "off_policy_mask_threshold=-0.1"),
        ({"torch_compile": True}, "torch_compile=True"),
        ({"loss_type": "gspo"}, "loss_type='gspo'"),
        ({"delta": -1.0}, "delta=-1.0"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_raises_at_construction(options, named):
    with pytest.raises(ValueError, match=named):
        parity.make_trainer(integration.FusedGRPOTrainer, "qwen2", options)


def test_other_versions_of_trl_and_none_are_refused():
    code = (
        "import sys, types; sys.modules['trl'] = {}\n"
        "try:\n    import grpo_kernels.integrations.trl\nexcept ImportError as error:\n    print(error)"
    )
    for module, expected in (
        ("None", "grpo_kernels.integrations.trl needs TRL: pip install 'trl>=1.16,<1.17'"),
        ("types.SimpleNamespace(__version__='1.15.2')", "takes trl>=1.16,<1.17; TRL 1.15.2 is installed"),
    ):
        done = subprocess.run([sys.executable, "-c", code.format(module)], capture_output=True, text=True, check=True)
        assert expected in done.stdout and len(done.stdout.splitlines()) == 1


def test_the_example_runs():
    script = parity.README.parents[2] / "examples" / "trl_grpo.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 40
    command = [sys.executable, str(script), parity.saved_model("llama"), "3"]
    environment = os.environ | {"PYTHONPATH": str(script.parents[1]), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "reward: " in done.stdout.splitlines()[-1]

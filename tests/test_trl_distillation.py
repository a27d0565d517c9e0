"""FusedDistillationTrainer and patch_trl against TRL's own DistillationTrainer: logged numbers and final weights."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import relative
from trl_parity import TOLERANCE, differences, prompts, result_of, saved_model, tokenizer, two_processes

pytest.importorskip("trl", reason="the peers are not installed: make test installs them")

CASES: dict[str, tuple[dict[str, Any], str]] = {  # options, family of the teacher
    "forward KL": (dict(beta=0.0), "qwen2"),
    "JSD": (dict(beta=0.3, temperature=0.7), "qwen2"),
    "reverse KL, a softcap": (dict(beta=1.0), "gemma2"),
    "a scale": (dict(beta=0.5), "cohere"),
    "LoRA": (dict(beta=0.5, peft=True), "qwen2"),
    "evaluation": (dict(beta=1.0, eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=4), "qwen2"),
}
STUDENT = "granite"  # its logits have a scale


def run(kind: str, options: dict[str, Any], teacher: str) -> dict[str, Any]:
    """What trl_parity.result_of has, of 8 steps of two micro-batches."""
    from transformers import AutoModelForCausalLM, logging
    from trl import DistillationConfig, DistillationTrainer

    from grpo_kernels.integrations.trl import patch_trl, unpatch_trl
    from grpo_kernels.integrations.trl_distillation import FusedDistillationTrainer

    logging.set_verbosity_error()
    options, extra = dict(options), {}
    if options.pop("peft", None):
        from peft import LoraConfig

        extra["peft_config"] = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    folder = saved_model(STUDENT)
    common = dict(
        output_dir=folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_completion_length=8,
        max_steps=8, logging_steps=1, optim="sgd", learning_rate=0.3, lr_scheduler_type="constant", report_to="none",
        save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True, seed=5,
    )  # fmt: skip
    if kind == "patched":
        patch_trl()
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = prompts()
            trainer = (FusedDistillationTrainer if kind == "fused" else DistillationTrainer)(
                model=AutoModelForCausalLM.from_pretrained(folder),
                teacher_model=AutoModelForCausalLM.from_pretrained(saved_model(teacher)),
                args=DistillationConfig(**common | options), train_dataset=data,
                eval_dataset=data.select(range(2)) if "eval_strategy" in options else None,
                processing_class=tokenizer(), **extra,
            )  # fmt: skip
            trainer.train()
        return result_of(trainer)
    finally:
        unpatch_trl()


@functools.lru_cache
def of_trl(title: str) -> dict[str, Any]:
    return run("trl", *CASES[title])


@pytest.mark.parametrize("title", CASES)
def test_a_run_equals_trls(title):
    found = run("fused", *CASES[title])
    assert max(differences(found, of_trl(title))) < TOLERANCE
    assert any(entry.get("loss", 0.0) > 1e-3 for entry in found["log"])
    if title == "JSD":
        assert max(differences(run("patched", *CASES[title]), of_trl(title))) < TOLERANCE


def test_runs_of_two_processes_equal_trls(tmp_path):
    two_processes(__file__, str(tmp_path))
    found, expected = torch.load(tmp_path / "results.pt")
    assert max(differences(found, expected)) < TOLERANCE


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("items", [None, 11])
def test_a_call_equals_trls(beta, items):
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


if __name__ == "__main__":  # a process of torchrun
    torch.set_num_threads(1)
    both = [run(kind, dict(beta=0.5), "qwen2") for kind in ("fused", "trl")]
    if torch.distributed.get_rank() == 0:
        torch.save(both, Path(sys.argv[1]) / "results.pt")
    torch.distributed.destroy_process_group()

"""FusedDistillationTrainer and patch_trl against TRL's own DistillationTrainer: logged numbers and final weights.

Runs of two processes: test_trl.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import relative
from trl_parity import COMMON, TOLERANCE, construct, differences, prompts, result_of, saved_model

pytest.importorskip("trl", reason="the peers are not installed: make test installs them")

CASES: dict[str, tuple[dict[str, Any], str]] = {  # options, family of the teacher
    "forward KL, evaluation": (
        dict(beta=0.0, eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=4), "qwen2"
    ),
    "JSD": (dict(beta=0.3, temperature=0.7), "qwen2"),
    "reverse KL, a softcap": (dict(beta=1.0), "gemma2"),
    "LoRA, a scale": (dict(beta=0.5, peft=True), "cohere"),
}  # fmt: skip
STUDENT = "granite"  # its logits have a scale


def run(kind: str, options: dict[str, Any], teacher: str) -> dict[str, Any]:
    """What trl_parity.result_of has, of 8 steps of two micro-batches."""
    from transformers import AutoModelForCausalLM
    from trl import DistillationConfig, DistillationTrainer

    from grpo_kernels.integrations.trl import patch_trl, unpatch_trl
    from grpo_kernels.integrations.trl_distillation import FusedDistillationTrainer

    options, data = dict(options), prompts()
    peft = options.pop("peft", None)
    args = DistillationConfig(output_dir=saved_model(STUDENT), max_completion_length=8, **COMMON | options)
    if kind == "patched":
        patch_trl()
    try:
        return result_of(
            construct(
                FusedDistillationTrainer if kind == "fused" else DistillationTrainer, STUDENT, peft=peft, args=args,
                teacher_model=AutoModelForCausalLM.from_pretrained(saved_model(teacher)), train_dataset=data,
                eval_dataset=data.select(range(2)) if "eval_strategy" in options else None,
            )
        )  # fmt: skip
    finally:
        unpatch_trl()


@pytest.mark.parametrize("title", CASES)
def test_a_run_equals_trls(title):
    found, expected = (run(kind, *CASES[title]) for kind in ("fused", "trl"))
    assert max(differences(found, expected)) < TOLERANCE
    assert any(entry.get("loss", 0.0) > 1e-3 for entry in found["log"])
    if title == "JSD":
        assert max(differences(run("patched", *CASES[title]), expected)) < TOLERANCE


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

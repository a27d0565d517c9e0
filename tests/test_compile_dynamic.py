"""torch.compile in one graph with dynamic=True, None and False, of steps that make the package's objects inside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import good_calls, make_sampling_mask

import grpo_kernels as gk
from grpo_kernels.config.trainers import _NEUTRAL

GIVEN = good_calls()
OF_LOSS = {name: x for name, x in GIVEN["fused_grpo_loss"].items() if name != "config"}
OF_LOGPS = {name: x for name, x in GIVEN["grpo_loss_from_logps"].items() if name != "config"}
HEAD = {name: OF_LOSS[name] for name in ("hidden", "lm_head_weight", "lm_head_bias", "completion_mask")}
IDS, OLD = OF_LOSS["completion_ids"], OF_LOSS["old_logps"]
KEPT = make_sampling_mask((4, 6), 67)
OF_TRL = SimpleNamespace(
    loss_type="dapo", importance_sampling_level="token", epsilon=0.2, epsilon_high=0.28, delta=None, beta=0.1,
    use_bias_correction_kl=False, temperature=0.9, max_completion_length=6, entropy_coef=0.0, scale_rewards="group",
    off_policy_mask_threshold=None, use_adaptive_entropy=False, top_entropy_quantile=1.0, use_vllm=False,
    vllm_importance_sampling_correction=False, router_aux_loss_coef=0.0,
    **{name: neutral[0] for name, neutral in _NEUTRAL.items() if name != "use_vllm"},
)  # fmt: skip


def loss(config: gk.GRPOConfig, **more: Any) -> torch.Tensor:
    return gk.fused_grpo_loss(config=config, **OF_LOSS | more).loss


def teacher(**options: Any) -> gk.Teacher:
    return gk.Teacher(HEAD["hidden"].flip(0), HEAD["lm_head_weight"].flip(1), **options)


# x: a number that changes from call to call, 0.3 and more; n: an integer, 2 and more.
STEPS = {
    "GRPOConfig, numbers": lambda x, n: loss(
        gk.GRPOConfig(
            epsilon_high=x, delta=1.5 + x, temperature=x, beta=x, kl_clamp=(x, None), entropy_coef=x, chunk_rows=n
        )
    ),
    "GRPOConfig, options": lambda x, n: loss(
        gk.GRPOConfig(
            aggregation="fixed_length", max_completion_length=n, sparse_backward=x / 64, off_policy_mask_threshold=x
        )
    ),
    "presets, from_trl": lambda x, n: loss(gk.GRPOConfig.from_trl(OF_TRL, epsilon_high=x))
    + sum(len(gk.GRPOConfig.preset(name, dual_clip=1 + x).key) for name in ("dapo", "grpo", "gspo", "rloo", "verl")),
    "Teacher": lambda x, n: gk.fused_divergence(teacher=teacher(), **HEAD).sum(),
    "Teacher, numbers": lambda x, n: gk.fused_divergence(
        teacher=teacher(logit_scale=x, logit_softcap=9 * x, top_k=n), divergence="jsd", divergence_beta=x, **HEAD
    ).sum(),
    "TopKTeacher": lambda x, n: gk.fused_divergence(
        teacher=gk.TopKTeacher(GIVEN["fused_divergence"]["teacher"].ids, GIVEN["fused_divergence"]["teacher"].logps),
        temperature=x, **HEAD,
    ).sum(),
    "fused_distillation_loss": lambda x, n: gk.fused_distillation_loss(
        teacher=teacher(top_k=n), temperature=x, chunk_rows=n, **HEAD
    ).loss,
    "fused_grpo_loss": lambda x, n: loss(
        gk.GRPOConfig(temperature=x, advantage_eps=x), sampling_mask=gk.SamplingMask(KEPT.ids, KEPT.counts),
        advantages=None, group_ids=None, num_generations=n, rewards=GIVEN["group_advantages"]["rewards"],
        normalizer=x * 9,
    ),
    "fused_logps": lambda x, n: gk.fused_logps(
        completion_ids=IDS, temperature=x, logit_scale=x, logit_softcap=9 * x, sparse_backward=x / 64, entropy=True,
        **HEAD,
    )[0].sum(),
    "fused_top_k": lambda x, n: gk.fused_top_k(k=n, temperature=x, **HEAD)[1].sum(),
    "grpo_loss_from_logps": lambda x, n: gk.grpo_loss_from_logps(config=gk.GRPOConfig(beta=x), **OF_LOGPS).loss,
    "group_advantages": lambda x, n: gk.group_advantages(
        GIVEN["group_advantages"]["rewards"], num_generations=n, eps=x
    ).square().sum(),
    "combine_advantages": lambda x, n: gk.combine_advantages(
        **GIVEN["combine_advantages"] | {"weights": [x, 2 * x]}
    ).square().sum(),
    "process_advantages": lambda x, n: gk.process_advantages(**GIVEN["process_advantages"]).square().sum(),
    "rollout_weights": lambda x, n: gk.rollout_weights(cap=x, **GIVEN["rollout_weights"]).sum(),
    "rejection_mask": lambda x, n: gk.rejection_mask(
        **GIVEN["rejection_mask"] | {"options": {"token_k1": (x, 1 + x)}}
    ).float().sum(),
    "entropy_quantile": lambda x, n: gk.entropy_quantile(top=x, **GIVEN["entropy_quantile"]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("step", "dynamic"),
    [*((step, True) for step in STEPS), *((step, way) for step in STEPS if "numbers" in step for way in (None, False))],
)
def test_a_step_compiles_in_one_graph(step, dynamic):
    """Again with other numbers: for dynamo variables from the first call on, from the second, or never."""
    torch._dynamo.reset()
    compiled = torch.compile(STEPS[step], backend="eager", fullgraph=True, dynamic=dynamic)
    for x, n in ((0.3, 2), (0.4, 4)):
        torch.testing.assert_close(compiled(x, n), STEPS[step](x, n))
    torch._dynamo.reset()

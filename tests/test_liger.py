"""Our LigerFusedLinearGRPOLoss beside that of liger-kernel 0.8.5, and where they differ, beside float64."""

from __future__ import annotations

import inspect
import runpy
from math import log
from pathlib import Path

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels import GRPOConfig
from grpo_kernels.config import TRL_LOSS_TYPES
from grpo_kernels.integrations.liger import LigerFusedLinearGRPOLoss
from grpo_kernels.reference import reference_grpo_loss

B, T, H, V = 4, 7, 16, 64


@pytest.fixture(scope="module")
def theirs():
    module = pytest.importorskip(
        "liger_kernel.chunked_loss.grpo_loss", reason="liger-kernel is not installed: run make test"
    )
    return module.LigerFusedLinearGRPOLoss


def inputs(dtype=torch.float32, **changes) -> dict:
    torch.manual_seed(1)
    mask = (torch.arange(T) < torch.tensor([7, 3, 5, 1])[:, None]).int()
    given = dict(
        _input=torch.randn(B, T, H), lin_weight=0.3 * torch.randn(V, H), selected_token_ids=torch.randint(V, (B, T)),
        attention_mask=mask, advantages=torch.tensor([1.0, -0.7, 0.4, -1.2]), bias=0.1 * torch.randn(V),
        ref_per_token_logps=-log(V) + 0.5 * torch.randn(B, T), old_per_token_logps=-log(V) + 0.5 * torch.randn(B, T),
    ) | changes  # fmt: skip
    return {n: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for n, x in given.items()}


def step(module, given, scale=3.0):
    leaves = {n: given[n].clone().requires_grad_() for n in ("_input", "lin_weight", "bias") if given[n] is not None}
    loss, metrics = module(**{**given, **leaves})
    (loss * scale).backward()
    return loss.detach(), metrics, {name: x.grad for name, x in leaves.items()}


def compare(theirs, given, **options):
    loss, metrics, gradients = step(theirs(compiled=False, **options), given)
    own_loss, own_metrics, own_gradients = step(LigerFusedLinearGRPOLoss(compiled=False, **options), given)
    torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=1e-6)
    assert isinstance(own_metrics, tuple)
    torch.testing.assert_close(own_metrics, tuple(metrics), rtol=1e-5, atol=1e-6, check_dtype=False)
    torch.testing.assert_close(own_gradients, gradients, rtol=1e-4, atol=2e-6)
    assert gradients["lin_weight"].abs().max() > 1e-4


def cases():
    for loss_type in TRL_LOSS_TYPES:
        for level in ("token", "sequence"):
            for beta in (0.0, 0.1):
                defined = loss_type not in ("cispo", "sapo", "vespo") if level == "sequence" else loss_type != "luspo"
                if defined and not (loss_type == "luspo" and beta):
                    yield loss_type, level, beta


@pytest.mark.parametrize(("loss_type", "level", "beta"), list(cases()))
def test_loss_metrics_and_gradients_are_ligers(theirs, loss_type, level, beta):
    options = dict(loss_type=loss_type, importance_sampling_level=level, beta=beta, temperature=0.8)
    options |= dict(epsilon_high=1.1 if loss_type == "cispo" else 0.28, max_completion_length=11)
    compare(theirs, inputs(), **options)
    compare(theirs, inputs(bias=None, old_per_token_logps=None), **options)
    if beta:
        compare(theirs, inputs(), **options, use_bias_correction_kl=True)
    if loss_type in ("grpo", "dapo", "dr_grpo"):
        compare(theirs, inputs(), **options, delta=1.5)
    dropped = torch.where(torch.rand(B, T) < 0.2, 0.0, torch.rand(B, T) + 0.5)
    for ratio in (torch.rand(B, T) + 0.5, torch.rand(B, 1) + 0.5, dropped):
        if loss_type != "luspo" or ratio.shape[1] == 1:
            compare(theirs, inputs(vllm_is_ratio=ratio), **options)


def test_the_number_of_items_and_the_reference_model(theirs):
    for num_items in (None, 40, torch.tensor(12)):
        compare(theirs, inputs(num_items_in_batch=num_items), loss_type="dapo", beta=0.0)
    given = inputs(ref_per_token_logps=None, ref_input=torch.randn(B, T, H), ref_weight=0.3 * torch.randn(V, H))
    compare(theirs, given, beta=0.1, temperature=0.7)
    compare(theirs, given | dict(ref_bias=torch.randn(V)), beta=0.1, loss_type="grpo")
    compare(theirs, inputs(ref_per_token_logps=None), beta=0.1, use_ref_model=False)


def test_other_inputs_get_no_gradient_from_either(theirs):
    names = ("advantages", "ref_per_token_logps", "old_per_token_logps", "vllm_is_ratio")
    given = inputs(vllm_is_ratio=0.5 + torch.rand(B, T))
    given |= {name: given[name].requires_grad_() for name in names}
    compare(theirs, given, beta=0.1)
    assert all(given[name].grad is None for name in names)


OWN = ("sparse_backward", "logits_dtype")  # options that Liger does not have


def test_the_signatures_are_ligers(theirs):
    for name in ("__init__", "forward"):
        own, other = (
            [p for p in inspect.signature(getattr(kind, name)).parameters.values() if p.name not in OWN]
            for kind in (LigerFusedLinearGRPOLoss, theirs)
        )
        assert [(p.name, p.default) for p in own] == [(p.name, p.default) for p in other]


# --- where they differ ------------------------------------------------------------------------------------------------


def in_float64(given, **config) -> torch.Tensor:
    x = {name: v.double() if v.is_floating_point() else v for name, v in given.items()}
    return reference_grpo_loss(
        x["_input"], x["lin_weight"], x["selected_token_ids"], x["advantages"], lm_head_bias=x["bias"],
        completion_mask=x["attention_mask"], old_logps=x["old_per_token_logps"], ref_logps=x["ref_per_token_logps"],
        config=GRPOConfig(**config),
    ).loss  # fmt: skip


def test_luspo_with_a_penalty_leaves_padding_out(theirs):
    """Liger's own value depends on what the padding holds; ours is float64's."""
    options = dict(loss_type="luspo", importance_sampling_level="sequence", beta=0.1, compiled=False)
    given, other = inputs(), inputs()
    other["ref_per_token_logps"][given["attention_mask"] == 0] -= 1.0
    assert abs(step(theirs(**options), given)[0] - step(theirs(**options), other)[0]) > 1e-3
    own = [step(LigerFusedLinearGRPOLoss(**options), x)[0] for x in (given, other)]
    expected = in_float64(given, importance_sampling_level="sequence", aggregation="seq_sum", beta=0.1)
    assert own[0] == own[1]
    torch.testing.assert_close(own[0].double(), expected, rtol=1e-5, atol=1e-6)


def test_advantages_per_token():
    advantages = torch.randn(B, T)
    expected = in_float64(inputs(advantages=advantages), aggregation="num_items", beta=0.04)
    loss, _, _ = step(LigerFusedLinearGRPOLoss(), inputs(advantages=advantages))
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_refused_by_name():
    for options, message in (
        (dict(loss_type="no_such"), "loss_type='no_such'; expected one of grpo, bnpo"),
        (dict(loss_type="dr_grpo"), "max_completion_length is None; loss_type='dr_grpo' needs it"),
        (dict(importance_sampling_level="word"), "importance_sampling_level='word'; expected one of token, sequence"),
        (dict(importance_sampling_level="sequence", loss_type="cispo"), "does not go with loss_type='cispo'"),
        (dict(loss_type="sapo", delta=2.0), "delta=2.0 has no effect with surrogate='sapo'"),
    ):
        with pytest.raises(ValueError, match=message):
            LigerFusedLinearGRPOLoss(**options)
    for options, changes, error, message in (
        ({}, dict(ref_per_token_logps=None), ValueError, r"beta=0\.04 needs ref_per_token_logps, or ref_input and ref"),
        (dict(use_ref_model=False), {}, ValueError, "ref_per_token_logps has no effect with use_ref_model=False"),
        ({}, dict(attention_mask=None), TypeError, r"attention_mask is a NoneType; expected a torch\.Tensor"),
    ):
        with pytest.raises(error, match=message):
            LigerFusedLinearGRPOLoss(**options)(**inputs(**changes))


# --- JSD --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "divergence"),
    [
        (dict(beta=0.5), {}),
        (dict(beta=0.3, temperature=0.7, weight_hard_loss=0.0), {}),
        (dict(beta=0.0, weight_soft_loss=0.8), {"divergence": "forward_kl"}),
        (dict(beta=1.0, weight_hard_loss=0.2), {"divergence": "reverse_kl"}),
        (dict(beta=0.5, temperature=0.7, weight_hard_loss=0.8), {}),
    ],
)
def test_the_examples_jsd_equals_ligers(theirs, options, divergence):
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    jsd_loss = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "liger.py"))["jsd_loss"]
    g = torch.Generator().manual_seed(0)
    sizes = (18, H), (V, H), (18, 24), (V, 24), (V,), (V,)
    student, weight, teacher, teacher_weight, bias, teacher_bias = (torch.randn(x, generator=g) * 0.4 for x in sizes)
    labels = torch.randint(V, (18,), generator=g)
    labels[::5] = -100

    def liger(student, head):
        loss = LigerFusedLinearJSDLoss(compiled=False, **options)
        return loss(student, head.weight, teacher, teacher_weight, labels, head.bias, teacher_bias)

    def ours(student, head):
        named = {name: x for name, x in options.items() if name != "beta"}
        named |= divergence or {"divergence": "jsd", "divergence_beta": options["beta"]}
        return jsd_loss(student, head, gk.Teacher(teacher[None], teacher_weight, teacher_bias), labels, **named)

    results = []
    for function in (ours, liger):
        leaf, head = student.clone().requires_grad_(), torch.nn.Linear(H, V)
        head.weight.data, head.bias.data = weight.clone(), bias.clone()
        loss = function(leaf, head)
        (loss * 3.0).backward()
        results.append([loss.detach(), leaf.grad, head.weight.grad, head.bias.grad])
    torch.testing.assert_close(*results, rtol=1e-4, atol=2e-6)

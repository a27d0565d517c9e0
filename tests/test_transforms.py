"""functorch, forward-mode AD and second derivatives: refused by name, never a derivative that is silently 0."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from helpers import make_batch, off_policy
from torch import func

import grpo_kernels as gk
from grpo_kernels import reference

BATCH = off_policy(make_batch(1))


def fused_grpo_loss(hidden):
    return gk.fused_grpo_loss(hidden, BATCH.weight, BATCH.ids, BATCH.advantages, **BATCH.options).loss


def fused_logps(hidden):
    return gk.fused_logps(hidden, BATCH.weight, BATCH.ids)[0].sum()


def fused_policy_loss(hidden):
    return gk.fused_policy_loss(hidden, BATCH.weight, BATCH.ids, lambda chunk: chunk.logps.sum())


def grpo_loss_from_logps(hidden):
    return gk.grpo_loss_from_logps(hidden.sum(-1), BATCH.advantages, **BATCH.options).loss


def grpo_loss_from_logits(hidden):
    return gk.grpo_loss_from_logits(hidden @ BATCH.weight.T, BATCH.ids, BATCH.advantages).loss


FUNCTIONS = {
    f.__name__: f
    for f in (fused_grpo_loss, fused_logps, fused_policy_loss, grpo_loss_from_logps, grpo_loss_from_logits)
}
TRANSFORMS = {
    "grad": lambda f, x: func.grad(f)(x),
    "jvp": lambda f, x: func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: func.jacrev(f)(x),
    "vmap": lambda f, x: func.vmap(f)(torch.stack([x, x])),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms_and_second_derivatives_are_refused_by_name(name):
    function = FUNCTIONS[name]
    for transform in TRANSFORMS.values():
        with pytest.raises(RuntimeError, match=rf"grpo_kernels\.{name} .*torch\.func.*grpo_kernels\.reference"):
            transform(function, BATCH.hidden)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(BATCH.hidden, torch.ones_like(BATCH.hidden))
        with pytest.raises(RuntimeError, match=rf"grpo_kernels\.{name} .*forward-mode AD.*grpo_kernels\.reference"):
            function(dual)
        assert function(BATCH.hidden).isfinite()  # no dual input
    leaf = BATCH.hidden.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=rf"grpo_kernels\.{name} has no second derivative"):
        torch.autograd.grad(function(leaf), leaf, create_graph=True)


@pytest.mark.parametrize("argument", ["lm_head_weight", "lm_head_bias"])
def test_a_dual_weight_or_bias_is_refused(argument):
    head = {"lm_head_weight": BATCH.weight, "lm_head_bias": torch.zeros(len(BATCH.weight))}
    with forward_ad.dual_level():
        head[argument] = forward_ad.make_dual(head[argument], torch.ones_like(head[argument]))
        with pytest.raises(RuntimeError, match=r"fused_logps .*forward-mode"):
            gk.fused_logps(BATCH.hidden, completion_ids=BATCH.ids, **head)


def test_the_reference_has_the_derivatives_that_the_message_promises():
    batch = BATCH.cast(torch.float64)

    def loss(hidden):
        return reference.reference_grpo_loss(hidden, batch.weight, batch.ids, batch.advantages, **batch.options).loss

    leaf, direction = batch.hidden.clone().requires_grad_(), torch.randn_like(batch.hidden)
    (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (curvature,) = torch.autograd.grad((gradient * direction).sum(), leaf)
    value, forward_over_reverse = func.jvp(func.grad(loss), (batch.hidden,), (direction,))
    assert curvature.any() and torch.allclose(value, gradient.detach())
    assert torch.allclose(forward_over_reverse, curvature)


def test_a_transform_inside_a_compiled_function_is_refused_too():
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=r"grpo_kernels\.fused_grpo_loss .*torch\.func"):
        torch.compile(lambda x: func.jvp(fused_grpo_loss, (x,), (x,)), backend="aot_eager")(BATCH.hidden)
    torch._dynamo.reset()

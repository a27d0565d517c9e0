"""16-bit hidden states with a float32 lm_head: products as of lm_head(hidden.float()), gradients in the types given."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import GRPOConfig, fused_grpo_loss, fused_logps, fused_policy_loss

B, T, H, V = 4, 5, 8, 33
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0, -1.0])


def inputs(dtype, bias=True):
    hidden, weight = torch.randn(B, T, H).to(dtype), 0.5 * torch.randn(V, H)
    return hidden, weight, torch.randn(V) if bias else None, torch.randint(V, (B, T))


def step(hidden, weight, bias, ids, **options):
    given = [None if x is None else x.clone().requires_grad_() for x in (hidden, weight, bias)]
    out = fused_grpo_loss(*given[:2], ids, ADVANTAGES, lm_head_bias=given[2], **options)
    out.loss.backward()
    return out, [None if x is None else x.grad for x in given]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_call_with_converted_hidden_states(backend, dtype, bias):
    hidden, weight, b, ids = inputs(dtype, bias)
    out, gradients = step(hidden, weight, b, ids, backend=backend)
    expected, right = step(hidden.float(), weight, b, ids, backend=backend)
    assert torch.equal(out.loss, expected.loss) and torch.equal(out.logps, expected.logps)
    assert gradients[0].dtype == dtype and torch.equal(gradients[0], right[0].to(dtype))
    assert gradients[1].dtype == torch.float32 and torch.equal(gradients[1], right[1])
    assert not bias or torch.equal(gradients[2], right[2])


def test_other_functions():
    hidden, weight, bias, ids = inputs(torch.bfloat16)
    for x in (hidden, weight):
        x.requires_grad_()
    logps, _ = fused_logps(hidden, weight, ids, lm_head_bias=bias)
    assert torch.equal(logps, fused_logps(hidden.float(), weight, ids, lm_head_bias=bias)[0])
    logps.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
    value = fused_policy_loss(hidden, weight, ids, lambda chunk: chunk.logps.sum(), lm_head_bias=bias)
    torch.testing.assert_close(value, logps.detach().sum())


def test_its_logits_are_float32():
    hidden, weight, bias, ids = inputs(torch.bfloat16)
    step(hidden, weight, bias, ids, config=GRPOConfig(logits_dtype=torch.float32))
    with pytest.raises(ValueError, match=r"logits_dtype=torch.bfloat16 with torch.float32 inputs"):
        step(hidden, weight, bias, ids, config=GRPOConfig(logits_dtype=torch.bfloat16))


def test_autocast_goes_first():
    hidden, weight, bias, ids = inputs(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, gradients = step(hidden, weight, bias, ids)
    expected, _ = step(hidden, weight.bfloat16(), bias.bfloat16(), ids)
    assert torch.equal(out.logps, expected.logps) and gradients[1].dtype == torch.float32


@pytest.mark.parametrize(
    ("types", "name"),
    [
        ((torch.float32, torch.bfloat16, None), "lm_head_weight is torch.bfloat16 and hidden torch.float32"),
        ((torch.bfloat16, torch.float32, torch.bfloat16), "lm_head_weight is torch.float32 and hidden torch.bfloat16"),
        ((torch.bfloat16, torch.bfloat16, torch.float32), "lm_head_bias is torch.float32 and hidden torch.bfloat16"),
        ((torch.bfloat16, torch.float64, None), "lm_head_weight is torch.float64 and hidden torch.bfloat16"),
        ((torch.float16, torch.bfloat16, None), "lm_head_weight is torch.bfloat16 and hidden torch.float16"),
    ],
)
def test_other_mixtures_are_refused_by_name(types, name):
    hidden, weight, bias, ids = inputs(types[0])
    bias = None if types[2] is None else bias.to(types[2])
    with pytest.raises(TypeError, match=f"{name}; expected one type, a float32 head of 16-bit hidden states, or"):
        fused_grpo_loss(hidden, weight.to(types[1]), ids, ADVANTAGES, lm_head_bias=bias)

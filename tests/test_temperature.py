"""One temperature per sequence: (B,) and (B, 1), packed (S,) and (S, 1), in every function that takes one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_kernels import GRPOConfig, fused_grpo_loss, fused_logps, fused_policy_loss, grpo_loss_from_logits
from grpo_kernels.reference import reference_grpo_loss

B, T, H, V = 4, 5, 8, 33
PER_SEQUENCE = torch.tensor([0.5, 1.0, 1.7, 0.8])


def inputs() -> dict[str, Tensor]:
    return dict(
        hidden=torch.randn(B, T, H), lm_head_weight=0.5 * torch.randn(V, H), completion_ids=torch.randint(V, (B, T)),
        advantages=torch.tensor([1.0, -0.5, 2.0, -1.0]),
    )  # fmt: skip


def leaves(given: dict[str, Tensor]) -> list[Tensor]:
    return [given[name].requires_grad_() for name in ("hidden", "lm_head_weight")]


@pytest.mark.parametrize("shape", [(B,), (B, 1)])
def test_the_loss_and_its_gradients(backend, shape):
    given = inputs()
    expected_given = {n: x.double() if x.is_floating_point() else x for n, x in given.items()}
    per_token = PER_SEQUENCE[:, None].expand(B, T)
    wanted = leaves(expected_given)
    expected = reference_grpo_loss(**expected_given, config=GRPOConfig(temperature=per_token.double()))
    expected.loss.backward()
    own = leaves(given)
    out = fused_grpo_loss(**given, config=GRPOConfig(temperature=PER_SEQUENCE.view(shape)), backend=backend)
    out.loss.backward()
    torch.testing.assert_close(out.loss.double(), expected.loss, rtol=1e-5, atol=1e-6)
    for a, b in zip(own, wanted, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(B,), (B, 1)])
@pytest.mark.parametrize("is_packed", [False, True])
def test_it_is_that_of_each_token_of_the_sequence(shape, is_packed):
    given, per_token = inputs(), PER_SEQUENCE[:, None].repeat(1, T)
    packed = {}
    if is_packed:
        lengths = torch.tensor([7, 0, 4, 9])
        packed["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        given |= {name: given[name].flatten(0, 1) for name in ("hidden", "completion_ids")}
        per_token = PER_SEQUENCE.repeat_interleave(lengths)
    advantages, ids = given.pop("advantages"), given["completion_ids"]
    logits = given["hidden"] @ given["lm_head_weight"].T

    def results(t):
        config = GRPOConfig(temperature=t)
        out = fused_grpo_loss(**given, advantages=advantages, config=config, **packed)
        yield from (out.loss, out.logps)
        yield fused_policy_loss(**given, loss_fn=lambda chunk: chunk.logps.sum(), temperature=t, **packed)
        yield grpo_loss_from_logits(logits, ids, advantages, config=config, **packed).loss
        if not is_packed:
            yield fused_logps(**given, temperature=t)[0]

    pairs = zip(results(PER_SEQUENCE.view(shape)), results(per_token), strict=True)
    assert all(torch.equal(own, expected) for own, expected in pairs)
    if is_packed:
        with pytest.raises(ValueError, match=r"temperature has shape \(4.*\); expected \(20,\)$"):
            fused_logps(**given, temperature=PER_SEQUENCE.view(shape))


def test_inside_a_compiled_function():
    given, config = inputs(), GRPOConfig(temperature=PER_SEQUENCE)
    torch._dynamo.reset()
    step = torch.compile(lambda **x: fused_grpo_loss(**x, config=config).loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(**given), fused_grpo_loss(**given, config=config).loss)
    torch._dynamo.reset()

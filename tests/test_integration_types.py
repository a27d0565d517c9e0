"""Integrations with arithmetic of their own: the same loss under a default type, autocast, and a loss scale."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import test_transformers
import torch
import verl_package
from test_default_type import default
from tiny_models import tiny_model
from torch import Tensor, distributed

from grpo_kernels import GRPOConfig, fused_logps, grpo_loss_from_logps

B, T, H, V = 4, 6, 16, 64
g = torch.Generator().manual_seed(0)
HIDDEN, WEIGHT = torch.randn(B, T, H, generator=g), 0.3 * torch.randn(V, H, generator=g)
IDS = torch.randint(V, (B, T), generator=g)
MASK = torch.arange(T) < torch.tensor([6, 3, 5, 1])[:, None]
ADVANTAGES = torch.tensor([1.0, -0.7, 0.4, -1.2])
EACH = ADVANTAGES[:, None].expand(B, T)
OLD = -4.2 + 0.4 * torch.randn(B, T, generator=g)


Call = tuple[list[Tensor], Callable[[], Tensor]]  # leaves, and a loss that is differentiable in them


def of_head(loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> Call:
    """A loss of hidden (B, T, H) and weight (V, H)."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in (HIDDEN, WEIGHT)]
    return leaves, partial(loss, *leaves)


def of_model(loss: Callable[[Any], Tensor], dtype: torch.dtype) -> Call:
    model = tiny_model("llama", dtype=dtype)
    return [*model.parameters()], partial(loss, model)


# Each takes pytest's monkeypatch, imports what it needs, and returns what makes a Call of a dtype.


def liger(monkeypatch):
    from grpo_kernels.integrations.liger import LigerFusedLinearGRPOLoss

    module = LigerFusedLinearGRPOLoss(beta=0.1, temperature=0.8)

    def loss(hidden, weight):
        reference = {"ref_input": hidden.detach() * 0.9, "ref_weight": weight.detach()}
        return module(hidden, weight, IDS, MASK.int(), ADVANTAGES, old_per_token_logps=OLD, **reference)[0]

    return partial(of_head, loss)


def trl(monkeypatch):
    pytest.importorskip("trl", reason="trl is not installed: make test EXTRAS=dev,peers")
    from grpo_kernels.integrations.trl import _FusedLogProbs

    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

    def loss(hidden, weight):
        logps, entropy, *statistics = _FusedLogProbs.apply(
            hidden.view(-1, H), weight, None, IDS.view(-1), 0.8, 256, None, 1.0, outputs
        )
        assert all(x.isfinite().all() for x in statistics)
        return 0.1 * entropy.mean() - (logps.view(B, T) * EACH).mean()

    return partial(of_head, loss)


def verl(monkeypatch):
    module = verl_package.install(monkeypatch)

    def loss(hidden, weight):
        logps, entropy = module.linear_cross_entropy(hidden, weight, IDS, 0.8)
        actor = verl_package.ActorConfig()
        return entropy.mean() + module.policy_loss(OLD, logps.view(B, T), EACH, MASK, config=actor)[0]

    return partial(of_head, loss)


def sequence_parallel(monkeypatch):
    from grpo_kernels.integrations.sequence_parallel import gather_tokens

    config, ends = GRPOConfig.preset("gspo"), torch.arange(B + 1) * T

    def loss(hidden, weight):
        logps = fused_logps(hidden.view(-1, H), weight, IDS.view(-1))[0]
        logps = gather_tokens(logps, distributed.group.WORLD)
        return grpo_loss_from_logps(logps, ADVANTAGES, old_logps=OLD.view(-1), cu_seqlens=ends, config=config).loss

    return partial(of_head, loss)


def transformers(monkeypatch):
    from grpo_kernels.integrations.transformers import fused_forward

    inputs = test_transformers.batch()
    return partial(of_model, lambda model: fused_forward(model, **inputs, advantages=ADVANTAGES, old_logps=OLD).loss)


@pytest.fixture(scope="module")
def _group(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def step(call: Call, scale: float = 1.0) -> list[Tensor]:
    """[loss, gradients]"""
    leaves, loss_of = call
    loss = loss_of()
    (scale * loss).backward()
    assert all(x.grad.dtype == x.dtype and x.grad.isfinite().all() for x in leaves)
    assert any(x.grad.any() for x in leaves)
    return [loss.detach(), *(x.grad / scale for x in leaves)]


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("entry", [liger, trl, verl, sequence_parallel, transformers])
def test_the_loss_of_a_plain_call(entry, monkeypatch):
    make = entry(monkeypatch)
    expected = step(make(torch.float32))
    for kind in ("bfloat16", "float64"):
        call = make(torch.float32)
        with default(kind):
            found = step(call)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)), kind
    call, half = make(torch.float32), step(make(torch.float16), scale=1024.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = step(call)
    for x, y, exact in zip(found, half, expected, strict=True):  # the model runs in bfloat16, too
        assert (x - exact).norm() <= 0.06 * exact.norm() and (y.float() - exact).norm() <= 0.01 * exact.norm()

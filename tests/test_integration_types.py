"""Integrations with arithmetic of their own: the same loss under a default type, autocast, and a loss scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import verl_package
from test_sweep import default
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


# Each takes pytest's monkeypatch, imports what it needs, and returns a loss of hidden (B, T, H) and weight (V, H).
# fused_forward is run by the trainer: test_trainer_options.py has the default type, test_trainer_pitfalls.py bf16.


def liger(monkeypatch):
    from grpo_kernels.integrations.liger import LigerFusedLinearGRPOLoss

    module = LigerFusedLinearGRPOLoss(beta=0.1, temperature=0.8)

    def loss(hidden, weight):
        reference = {"ref_input": hidden.detach() * 0.9, "ref_weight": weight.detach()}
        return module(hidden, weight, IDS, MASK.int(), ADVANTAGES, old_per_token_logps=OLD, **reference)[0]

    return loss


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

    return loss


def verl(monkeypatch):
    module = verl_package.install(monkeypatch)

    def loss(hidden, weight):
        logps, entropy = module.linear_cross_entropy(hidden, weight, IDS, 0.8)
        actor = verl_package.ActorConfig()
        return entropy.mean() + module.policy_loss(OLD, logps.view(B, T), EACH, MASK, config=actor)[0]

    return loss


def sequence_parallel(monkeypatch):
    from grpo_kernels.integrations.sequence_parallel import gather_tokens

    config, ends = GRPOConfig.preset("gspo"), torch.arange(B + 1) * T

    def loss(hidden, weight):
        logps = fused_logps(hidden.view(-1, H), weight, IDS.view(-1))[0]
        logps = gather_tokens(logps, distributed.group.WORLD)
        return grpo_loss_from_logps(logps, ADVANTAGES, old_logps=OLD.view(-1), cu_seqlens=ends, config=config).loss

    return loss


@pytest.fixture(scope="module")
def _group(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def step(loss_of: Any, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[Tensor]:
    """[loss, gradients]"""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in (HIDDEN, WEIGHT)]
    loss = loss_of(*leaves)
    (scale * loss).backward()
    assert all(x.grad.dtype == x.dtype and x.grad.isfinite().all() and x.grad.any() for x in leaves)
    return [loss.detach(), *(x.grad / scale for x in leaves)]


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("entry", [liger, trl, verl, sequence_parallel])
def test_the_loss_of_a_plain_call(entry, monkeypatch):
    loss = entry(monkeypatch)
    expected = step(loss)
    for kind in ("bfloat16", "float64"):
        with default(kind):
            found = step(loss)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)), kind
    half = step(loss, torch.float16, scale=1024.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = step(loss)
    for x, y, exact in zip(found, half, expected, strict=True):
        assert (x - exact).norm() <= 0.06 * exact.norm() and (y.float() - exact).norm() <= 0.01 * exact.norm()

"""The losses of examples/losses.py against their formulas over whole logits, in float64: values and gradients."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

PATH = Path(__file__).resolve().parents[1] / "examples" / "losses.py"
FUNCTIONS: dict[str, Any] = {name: f for name, f in runpy.run_path(str(PATH)).items() if name.endswith("_loss")}
del FUNCTIONS["fused_policy_loss"]

G = torch.Generator().manual_seed(3)
B, T, H, V = 5, 7, 12, 30
HIDDEN, WEIGHT = (torch.randn(*size, generator=G, dtype=torch.float64) for size in ((B, T, H), (V, H)))
WEIGHT *= 0.4
IDS = torch.randint(V, (B, T), generator=G)
MASK = (torch.arange(T) < torch.tensor([7, 2, 5, 1, 6])[:, None]).double()
MASK[0, 2] = 0.0  # a hole, as a tool's answer leaves
LOGPS = (HIDDEN @ WEIGHT.T).log_softmax(-1).gather(-1, IDS[..., None]).squeeze(-1)
OLD, REF = (LOGPS + 0.5 * torch.randn(B, T, generator=G, dtype=torch.float64) for _ in range(2))
OLD[4] -= 1.6  # ratios beyond FIPO's bound of 4
A = torch.randn(B, generator=G, dtype=torch.float64)
A[4] = -abs(A[4])
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)


def mean(x: Tensor, m: Tensor = MASK) -> Tensor:
    return (x * m).sum() / m.sum()


def ppo(r: Tensor, a: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    return -torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)


def topr(logp: Tensor) -> Tensor:
    weight = torch.where(REWARDS[:, None] > 0, 1.0, (logp - OLD).exp().detach().clamp(0, 1))
    return mean(-weight * A[:, None] * logp)


def fipo(logp: Tensor) -> Tensor:
    x, gamma = ((logp - OLD) * MASK).detach(), 2 ** (-1 / 32)
    future = torch.zeros_like(x)
    for t in range(T):
        future[:, t] = sum(gamma ** (k - t) * x[:, k] for k in range(t, T))
    r = (logp - OLD).exp()
    weight = future.exp().clamp(1.0, 1.2)
    unsafe = (A[:, None] < 0) & (r > 4.0)
    assert (unsafe & MASK.bool()).any()
    return mean(torch.where(unsafe, weight.clamp(0.8, 1.0), weight) * ppo(r, A[:, None]))


def covariance(logp: Tensor) -> Tensor:
    return ((A[:, None] - mean(A[:, None].expand(B, T))) * (logp - mean(logp))).detach()


def clip_cov(logp: Tensor) -> Tensor:
    """With a share of 1 all tokens in the range are chosen, whatever the order."""
    r = (logp - OLD).exp()
    chosen = (covariance(logp) > 0.2) & (covariance(logp) < 5.0) & (MASK > 0)
    chosen &= -A[:, None] * r.clamp(0.8, 1.2) <= -A[:, None] * r
    assert 0 < chosen.sum() < MASK.sum()
    return mean(ppo(r, A[:, None]) * ~chosen)


def kl_cov(logp: Tensor) -> Tensor:
    largest = covariance(logp).masked_fill(MASK == 0, -torch.inf).flatten().sort(descending=True).indices[:4]
    chosen = torch.zeros(B * T, dtype=torch.float64).index_fill(0, largest, 1.0).view(B, T)
    return mean(-(logp - OLD).exp() * A[:, None] + 0.7 * chosen * (logp - OLD).abs())


def vapo(logp: Tensor) -> Tensor:
    right = MASK * REWARDS[:, None]
    return mean(ppo((logp - OLD).exp(), A[:, None], 0.2, 0.28)) + 0.1 * mean(-logp, right)


def ref_kl(logp: Tensor) -> Tensor:
    x, advantage = logp - OLD, (REF - logp).detach()
    kept = logp.detach().exp() - OLD.exp() >= -0.02
    assert 0 < (kept * MASK).sum() < MASK.sum()
    return mean(-advantage * x.exp() * kept + 1e-3 * x**2)


EACH = A[:, None].expand(B, T)
CASES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "topr_loss": (topr, (A, REWARDS, OLD), {}),
    "fipo_loss": (fipo, (A, OLD), {}),
    "clip_cov_loss": (clip_cov, (EACH, OLD), dict(share=1.0, low=0.2)),
    "kl_cov_loss": (kl_cov, (EACH, OLD), dict(share=4 / float(MASK.sum()) + 1e-9, coefficient=0.7)),
    "vapo_loss": (vapo, (EACH, REWARDS > 0, OLD), {}),
    "ref_kl_loss": (ref_kl, (REF, OLD), dict(drop=0.02)),
}


def test_each_loss_has_a_formula():
    assert FUNCTIONS.keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_its_formula(name):
    formula, given, options = CASES[name]
    leaves = [x.clone().requires_grad_() for x in (HIDDEN, WEIGHT)]
    expected = formula((leaves[0] @ leaves[1].T).log_softmax(-1).gather(-1, IDS[..., None]).squeeze(-1))
    right = torch.autograd.grad(expected, leaves)
    for rows in (None, 9):
        own = [x.clone().requires_grad_() for x in (HIDDEN, WEIGHT)]
        rows_of = {} if "cov" in name else {"chunk_rows": rows}  # those call fused_logps too, which has no chunk_rows
        loss = FUNCTIONS[name](own[0], own[1], IDS, MASK, *given, **options, **rows_of)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
        for x, y in zip(torch.autograd.grad(loss, own), right, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-11)

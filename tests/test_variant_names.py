"""VARIANTS.md: each row against the formula of the trainer that it names, in float64, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk

PAGE = Path(__file__).resolve().parents[1] / "VARIANTS.md"
TABLE = PAGE.read_text(encoding="utf-8").split("|---|---|---|---|\n")[1].split("\n\n")[0]
LINES = TABLE.splitlines()
CELLS = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in LINES]
ROWS = {(trainer, option): (config, call) for trainer, option, config, call in CELLS}


def batch(seed: int = 0) -> SimpleNamespace:
    """Leaves logp and entropy (B, T); old, ref and the sampling engine's; A, one per sequence; mask m, ragged."""
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64)

    logp = -0.3 - 2 * torch.rand(4, 6, generator=g, dtype=torch.float64)
    m = (torch.arange(6) < torch.tensor([6, 3, 5, 1])[:, None]).double()
    near = [logp + spread * normal(4, 6) for spread in (0.4, 0.5, 0.3)]
    A = normal(4, 1).expand(4, 6)
    return SimpleNamespace(
        logp=logp.requires_grad_(), H=(1 + normal(4, 6).abs()).requires_grad_(), A=A, m=m,
        **dict(zip(("old", "ref", "rollout"), near, strict=True)),
    )  # fmt: skip


def sg(x: Tensor) -> Tensor:
    return x.detach()


def token_mean(x: Tensor, m: Tensor) -> Tensor:
    return (x * m).sum() / m.sum()


def token_sum(x: Tensor, m: Tensor) -> Tensor:
    return (x * m).sum()


def seq_mean(x: Tensor, m: Tensor) -> Tensor:
    """Of the means of the sequences."""
    return ((x * m).sum(1) / m.sum(1)).mean()


def mean_ratio(b: SimpleNamespace) -> Tensor:
    """(B, 1) mean log-ratio of the sequence."""
    return ((b.logp - b.old) * b.m).sum(1, keepdim=True) / b.m.sum(1, keepdim=True)


def ppo(b: SimpleNamespace, r: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    return torch.maximum(-b.A * r, -b.A * r.clamp(1 - low, 1 + high))


Formula = Callable[[SimpleNamespace], Tensor]
FORMULAS: dict[tuple[str, str], Formula] = {}


def of(trainer: str, option: str) -> Callable[[Formula], Formula]:
    def keep(formula: Formula) -> Formula:
        FORMULAS[trainer, option] = formula
        return formula

    return keep


# --- verl 0.9.1, trainer/ppo/core_algos.py ----------------------------------------------------------------------------


@of("verl", "policy_loss vanilla")
def _(b):
    loss = ppo(b, (b.logp - b.old).clamp(-20, 20).exp())
    return token_mean(torch.where(b.A < 0, torch.minimum(loss, -b.A * 3.0), loss), b.m)


@of("verl", "policy_loss gspo")
def _(b):
    s = b.logp - sg(b.logp) + sg(mean_ratio(b))
    return token_mean(ppo(b, s.clamp(max=10.0).exp(), 3e-4, 4e-4), b.m)


@of("verl", "policy_loss sapo")
def _(b):
    r, tau = (b.logp - b.old).clamp(-20, 20).exp(), torch.where(b.A > 0, 1.0, 1.05).double()
    tau = tau.masked_fill(b.A <= 0, 1.05)  # 1.05 in float32 is another number
    return seq_mean(-torch.sigmoid(tau * (r - 1)) * (4 / tau) * b.A, b.m)


@of("verl", "policy_loss gpg")
def _(b):
    return token_mean(-b.logp * b.A, b.m)


@of("verl", "policy_loss geo_mean")
def _(b):
    x, sign = b.logp - b.old, b.A.sign()
    narrow = sign * torch.minimum(sign * x, sign * x.clamp(-0.2, 0.2))
    return (-b.A[:, 0] * ((narrow * b.m).sum(1) / b.m.sum(1)).exp()).mean()


@of("verl", "policy_loss cispo")
def _(b):
    return token_mean(-sg((b.logp - b.old).clamp(-20, 20).exp().clamp(0.8, 1.2)) * b.A * b.logp, b.m)


def dppo(b: SimpleNamespace, valid: Tensor) -> Tensor:
    r = sg((b.logp - b.old).clamp(-20, 20).exp().clamp(max=20.0))
    return token_mean(-b.A * r * b.logp * valid, b.m)


@of("verl", "policy_loss dppo_tv")
def _(b):
    change = sg(b.logp).exp() - b.old.exp()
    return dppo(b, torch.where(b.A > 0, change <= 0.2, change >= -0.2))


@of("verl", "policy_loss dppo_kl")
def _(b):
    p, q = sg(b.logp).exp(), b.old.exp()
    kl = q * (b.old - sg(b.logp)) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
    return dppo(b, torch.where(b.A > 0, (kl <= 0.2) | (p <= q), (kl <= 0.2) | (p >= q)))


@of("verl", "policy_loss dro, dro_beta 0.3")
def _(b):
    return token_mean(-(b.logp * b.A - 0.5 * 0.3 * (b.logp - b.old).square()), b.m)


@of("verl", "kl_loss_type low_var_kl")
def _(b):
    d = (b.ref - b.logp).clamp(-20, 20)
    return token_mean(-b.logp * b.A + 0.1 * (d.exp() - d - 1).clamp(-10, 10), b.m)


@of("verl", "kl_loss_type mse")
def _(b):
    return token_mean(-b.logp * b.A + 0.1 * 0.5 * (b.logp - b.ref).square(), b.m)


@of("verl", "loss_agg_mode token-sum")
def _(b):
    return token_sum(-b.logp * b.A, b.m)


@of("verl", "loss_agg_mode seq-mean-token-sum")
def _(b):
    return token_sum(-b.logp * b.A, b.m) / len(b.m)


@of("verl", "loss_agg_mode seq-mean-token-sum-norm")
def _(b):
    return token_sum(-b.logp * b.A, b.m) / len(b.m) / 6


@of("verl", "loss_agg_mode seq-mean-token-mean")
def _(b):
    return seq_mean(-b.logp * b.A, b.m)


@of("verl", "entropy_coeff 0.1, seq-mean-token-mean")
def _(b):
    return seq_mean(-b.logp * b.A, b.m) - 0.1 * seq_mean(b.H, b.m)


# --- ROLL, roll/pipeline/rlvr/actor_pg_worker.py, roll/pipeline/base_worker.py ----------------------------------------


@of("ROLL", "kimi15, kimi15_tau 0.1")
def _(b):
    return token_mean(-b.A * b.logp + 0.1 * 0.5 * (b.logp - b.old).pow(2), b.m)


@of("ROLL", "tis")
def _(b):
    return token_mean(-sg((b.logp - b.old).exp().clamp(0.0, 1.0)) * b.A * b.logp, b.m)


@of("ROLL", "cispo")
def _(b):
    return token_mean(-sg((b.logp - b.old).exp().clamp(0.9, 1.1)) * b.A * b.logp, b.m)


@of("ROLL", "cispo, cispo_use_unified_mask")
def _(b):
    r = sg((b.logp - b.old).exp())
    dropped = ((b.A > 0) & (r > 1.1)) | ((b.A < 0) & (r < 0.9))
    return token_mean(-r.clamp(0.9, 1.1) * b.A * b.logp * ~dropped, b.m)


@of("ROLL", "dual_clip_loss, pg_clip 0.2")
def _(b):
    loss = ppo(b, (b.logp - b.old).exp())
    return token_mean(torch.where(b.A < 0, -torch.max(-loss, (1 + 0.2 * 2) * b.A), loss), b.m)


# --- SkyRL, skyrl/backends/skyrl_train/utils/ppo_utils.py -------------------------------------------------------------


@of("SkyRL", "importance_sampling")
def _(b):
    return token_sum(-(b.logp - b.old).exp() * b.A, b.m)


@of("SkyRL", "rollout_is")
def _(b):
    r = (b.logp - b.rollout).exp()
    inside = (r > 0.8) & (r < 1.2)
    return token_mean(-sg(torch.where(inside, r, 0.0)) * b.A * b.logp, b.m)


@of("SkyRL", "gspo")
def _(b):
    s = b.logp - sg(b.logp) + sg(mean_ratio(b))
    return seq_mean(ppo(b, s.clamp(max=10.0).exp()), b.m)


@of("SkyRL", "cispo")
def _(b):
    return token_mean(-b.A * sg((b.logp - b.old).exp().clamp(0.0, 5.0)) * b.logp, b.m)


@of("SkyRL", "dppo, binary_tv")
def _(b):
    p, mu, r = sg(b.logp).exp(), b.old.exp(), (b.logp - b.old).clamp(-20, 20).exp()
    dropped = ((b.A > 0) & (p - mu > 0.2)) | ((b.A < 0) & (mu - p > 0.2))
    return token_mean(-(r * b.A * ~dropped), b.m)


@of("SkyRL", "dppo, binary_kl")
def _(b):
    p, mu, r = sg(b.logp).exp(), b.old.exp(), (b.logp - b.old).clamp(-20, 20).exp()
    kl = mu * (b.old - sg(b.logp)) + (1 - mu) * ((1 - mu + 1e-8) / (1 - p + 1e-8)).log()
    dropped = (kl > 0.02) & (((b.A > 0) & (p > mu)) | ((b.A < 0) & (p < mu)))
    return token_mean(-(r * b.A * ~dropped), b.m)


@of("SkyRL", "loss_reduction prompt_mean")
def _(b):
    """Two prompts of two completions each."""
    prompts = (-b.logp * b.A * b.m).sum(1).view(2, 2).sum(1) / b.m.sum(1).view(2, 2).sum(1)
    return prompts.mean()


# --- Tinker, docs/losses.mdx of tinker-cookbook -----------------------------------------------------------------------


@of("Tinker", "importance_sampling")
def _(b):
    return -((b.logp - b.old).exp() * b.A * b.m).sum()


@of("Tinker", "ppo")
def _(b):
    r = (b.logp - b.old).exp()
    return -(torch.minimum(r * b.A, r.clamp(0.8, 1.2) * b.A) * b.m).sum()


@of("Tinker", "cispo, 0.8 and 1.2")
def _(b):
    return -(sg((b.logp - b.old).exp().clamp(0.8, 1.2)) * b.logp * b.A * b.m).sum()


@of("Tinker", "dro, beta 0.05")
def _(b):
    return -((b.logp * b.A - 0.5 * 0.05 * (b.logp - b.old) ** 2) * b.m).sum()


# --- torchforge, src/forge/losses -------------------------------------------------------------------------------------


@of("torchforge", "ReinforceLoss, ratios from 0.1 to 10")
def _(b):
    weight = sg((b.logp - b.old).exp()).clamp(0.1, 10.0)
    return (-b.logp * (b.A * weight) * b.m).sum() / b.m.sum()


@of("torchforge", "SimpleGRPOLoss")
def _(b):
    d = b.ref - b.logp
    return seq_mean(-((b.logp - sg(b.logp)).exp() * b.A - 0.1 * (d.exp() - d - 1)), b.m)


# --- AReaL, areal/utils/functional/functional.py: old are the proximal policy's ---------------------------------------


@of("AReaL", "decoupled, c_clip 3, token_mask 5")
def _(b):
    loss = ppo(b, (b.logp - b.old).exp())
    loss = torch.minimum(loss, b.A.sign() * 3.0 * b.A)
    weight = (b.old - b.rollout).exp()
    return token_mean(loss * torch.where(weight <= 5.0, weight, 0.0), b.m)


# --- slime, slime/backends/megatron_utils/loss.py, slime/utils/ppo_utils.py -------------------------------------------


@of("slime", "defaults, eps_clip_c 3")
def _(b):
    loss = ppo(b, (b.logp - b.old).exp())
    return seq_mean(torch.where(b.A < 0, torch.minimum(-3.0 * b.A, loss), loss), b.m)


@of("slime", "use_unbiased_kl, kl_loss_type k2")
def _(b):
    r = (b.logp - b.old).exp()
    return seq_mean(ppo(b, r) + 0.1 * r * (b.logp - b.ref) ** 2 / 2, b.m)


@of("slime", "use_opsm, opsm_delta 0.1, use_rollout_logprobs")
def _(b):
    drift = ((b.rollout - b.logp) * b.m).sum(1, keepdim=True) / b.m.sum(1, keepdim=True)
    return seq_mean(ppo(b, (b.logp - b.rollout).exp()) * ~((b.A < 0) & (drift > 0.1)), b.m)


@of("slime", "use_tis, tis_clip 2")
def _(b):
    return seq_mean((b.old - b.rollout).exp().clamp(0.0, 2.0) * ppo(b, (b.logp - b.old).exp()), b.m)


# --- NeMo-RL, nemo_rl/algorithms/loss/loss_functions.py ---------------------------------------------------------------


@of("NeMo-RL", "force_on_policy_ratio")
def _(b):
    return token_mean(-b.A * (b.logp - sg(b.logp)).exp(), b.m)


@of("NeMo-RL", "ratio_clip_c 3")
def _(b):
    loss = ppo(b, (b.logp - b.old).exp())
    return token_mean(torch.where(b.A < 0, torch.minimum(loss, -b.A * 3.0), loss), b.m)


@of("NeMo-RL", "sequence_level_importance_ratios")
def _(b):
    return seq_mean(ppo(b, mean_ratio(b).exp().expand_as(b.A)), b.m)


@of("NeMo-RL", "disable_ppo_ratio")
def _(b):
    return token_mean(-b.A * b.logp, b.m)


@of("NeMo-RL", "use_cispo")
def _(b):
    return token_mean(-b.A * sg((b.logp - b.old).exp().clamp(0.8, 1.2)) * b.logp, b.m)


def sequence_masked(b: SimpleNamespace, low: float, high: float) -> Tensor:
    geometric = (((b.old - b.rollout) * b.m).sum(1, keepdim=True) / b.m.sum(1, keepdim=True)).exp()
    return (b.old - b.rollout).exp() * ((low <= geometric) & (geometric <= high))


@of("NeMo-RL", "seq-mask-tis, 0.8 and 1.2")
def _(b):
    return token_mean(sequence_masked(b, 0.8, 1.2) * ppo(b, (b.logp - b.old).exp()), b.m)


@of("NeMo-RL", "reference_policy_kl_penalty 0.1")
def _(b):
    weight, d = (b.logp - sg(b.logp)).exp(), (b.ref - b.logp).clamp(-20, 20)
    kl = (weight * (d.exp() - 1 - d)).clamp(-10, 10)
    return token_mean(ppo(b, (b.logp - b.old).exp()) + 0.1 * kl, b.m)


# --- OpenRLHF, openrlhf/models/loss.py, openrlhf/models/utils.py ------------------------------------------------------


@of("OpenRLHF", "policy_loss_type gspo")
def _(b):
    return seq_mean(ppo(b, mean_ratio(b).exp().expand_as(b.A)), b.m)


@of("OpenRLHF", "icepop, 0.5 and 5")
def _(b):
    w = (b.old - b.rollout).exp()
    return token_mean(w * ((w >= 0.5) & (w <= 5.0)) * ppo(b, (b.logp - b.old).exp()), b.m)


@of("OpenRLHF", "kl_estimator k3, init_kl_coef 0.1")
def _(b):
    d = b.ref - b.logp
    return token_mean(ppo(b, (b.logp - b.old).exp()), b.m) + 0.1 * token_mean((d.exp() - 1 - d).clamp(-10, 10), b.m)


# --- open-instruct, open_instruct/grpo_utils.py, open_instruct/model_utils.py -----------------------------------------


@of("open-instruct", "dapo")
def _(b):
    return token_mean(ppo(b, (b.logp - b.old).exp(), 0.2, 0.272), b.m)


@of("open-instruct", "cispo")
def _(b):
    return token_mean(-b.A * sg((b.logp - b.old).exp()).clamp(max=1.272) * b.logp, b.m)


@of("open-instruct", "dppo, tv, 0.1")
def _(b):
    r, gap = (b.logp - b.old).exp(), (sg(b.logp).exp() - b.old.exp()).abs()
    dropped = (((b.A > 0) & (r > 1)) | ((b.A < 0) & (r < 1))) & (gap > 0.1)
    return token_mean(-b.A * r * ~dropped, b.m)


@of("open-instruct", "kl_estimator 3, beta 0.1")
def _(b):
    r = (b.logp - b.old).exp()
    return token_mean(ppo(b, r) + 0.1 * r * (b.logp - b.ref).clamp(-40, 40), b.m)


# --- prime-rl, src/prime_rl/trainer/rl/loss.py ------------------------------------------------------------------------


def trust_region(b: SimpleNamespace, kept: Callable[[Tensor], Tensor], tau: float) -> Tensor:
    x = b.logp - b.rollout
    return token_mean(-b.A * x.exp() * kept(sg(b.logp).exp() - b.rollout.exp()) + tau * x**2, b.m)


@of("prime-rl", "ipo, eps 0.1, kl_tau 1e-3")
def _(b):
    return trust_region(b, lambda change: change.abs() <= 0.1, 1e-3)


@of("prime-rl", "ipo, eps 0.3, without kl_tau")
def _(b):
    return trust_region(b, lambda change: change.abs() <= 0.3, 0.0)


@of("prime-rl", "dppo_kl, kl_tau 1e-3")
def _(b):
    return trust_region(b, lambda change: ~torch.where(b.A > 0, change > 0.2, change < -0.2), 1e-3)


# --- ms-swift, swift/rlhf_trainers/grpo_trainer.py --------------------------------------------------------------------


@of("ms-swift", "importance_sampling_level sequence_token")
def _(b):
    return seq_mean(ppo(b, (b.logp - sg(b.logp) + sg(mean_ratio(b))).exp()), b.m)


@of("ms-swift", "cispo, epsilon_high 5")
def _(b):
    return token_mean(-sg((b.logp - b.old).exp().clamp(max=5.0)) * b.A * b.logp, b.m)


@of("ms-swift", "delta 1.5")
def _(b):
    r = (b.logp - b.old).exp()
    return token_mean(-torch.minimum(r.clamp(max=1.5) * b.A, r.clamp(0.8, 1.2) * b.A), b.m)


@of("ms-swift", "off_policy_sequence_mask_delta 0.1")
def _(b):
    drift = ((b.rollout - b.logp) * b.m).sum(1, keepdim=True) / b.m.sum(1, keepdim=True)
    kept = b.m * ~((b.A < 0) & (drift > 0.1))
    return ((ppo(b, (b.logp - b.old).exp()) * kept).sum(1) / kept.sum(1).clamp(min=1)).mean()


@of("ms-swift", "rollout_importance_sampling_mode sequence_mask")
def _(b):
    return token_mean(sequence_masked(b, 0.0, 2.0) * ppo(b, (b.logp - b.old).exp()), b.m)


# --- PipelineRL, pipelinerl/finetune/rl/__init__.py -------------------------------------------------------------------


@of("PipelineRL", "reinforce, kl_coef 0.1, entropy_bonus 0.01")
def _(b):
    d = (b.ref - b.logp).clamp(-10, 10)
    policy = b.logp * b.A * sg((b.logp - b.old).exp().clamp(0.0, 1.2))
    return -token_sum(policy - 0.1 * (d.exp() - d - 1) + 0.01 * b.H, b.m) / len(b.m)


# --- the rows ---------------------------------------------------------------------------------------------------------


def test_each_row_has_a_formula_and_each_formula_a_row():
    assert len(ROWS) == len(CELLS) and ROWS.keys() == FORMULAS.keys()


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_a_row_has_the_values_and_gradients_of_its_trainer(row):
    b, (options, call) = batch(), ROWS[row]
    names = {
        "old_logps": b.old, "ref_logps": b.ref, "rollout_logps": b.rollout, "completion_mask": b.m.bool(), "gk": gk,
        "prompt_tokens": b.m.sum(1).view(2, 2).sum(1).repeat_interleave(2),
    }  # fmt: skip
    config = gk.GRPOConfig(**eval(f"dict({options})", names))
    given: dict[str, Any] = {"completion_mask": names["completion_mask"], "old_logps": b.old}
    given |= {"ref_logps": b.ref} if config.beta else {}
    given |= eval(f"dict({call})", names)
    entropy = b.H if config.has_entropy_bonus else None
    found = gk.grpo_loss_from_logps(b.logp, b.A[:, 0], entropy=entropy, config=config, backend="torch", **given).loss
    expected = FORMULAS[row](b)
    leaves = [b.logp] + [b.H] * config.has_entropy_bonus
    pairs = zip(*(torch.autograd.grad(loss, leaves) for loss in (found, expected)), strict=True)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for x, y in pairs:
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)
        assert y.any()

"""VARIANTS.md: each row against the formula of the trainer that it names, in float64, values and gradients. Options of
other trainers that are given to GRPOConfig or to a loss."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.config.trainers import NAMES

PAGE = Path(__file__).resolve().parents[1] / "VARIANTS.md"
TABLE = PAGE.read_text(encoding="utf-8").split("\n|---|---|---|---|\n")[1].split("\n\n")[0]
LINES = TABLE.splitlines()
CELLS = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in LINES]
ROWS = {(trainer, option): (config, call) for trainer, option, config, call in CELLS}


def batch(seed: int = 0) -> SimpleNamespace:
    """Leaves logp and entropy H (B, T); old, ref and the sampling engine's; A, one per sequence; mask m, ragged. What
    the formulas share: x, r and p of the policy and q of the old one, the log-ratio, ratio and probabilities."""
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64)

    logp = -0.3 - 2 * torch.rand(4, 6, generator=g, dtype=torch.float64)
    m = (torch.arange(6) < torch.tensor([6, 3, 5, 1])[:, None]).double()
    old, ref, rollout = (logp + spread * normal(4, 6) for spread in (0.4, 0.5, 0.3))
    A, p, q = normal(4, 1).expand(4, 6), logp.exp(), old.exp()
    rewards = normal(4, 2)
    H, x = (1 + normal(4, 6).abs()).requires_grad_(), logp.requires_grad_() - old
    return SimpleNamespace(
        logp=logp, H=H, A=A, m=m, old=old, ref=ref, rollout=rollout, x=x, r=x.exp(), r20=x.clamp(-20, 20).exp(), p=p,
        q=q, change=p - q, rewards=rewards,
    )  # fmt: skip


def sg(x: Tensor) -> Tensor:
    return x.detach()


def token_mean(b: SimpleNamespace, x: Tensor) -> Tensor:
    return (x * b.m).sum() / b.m.sum()


def token_sum(b: SimpleNamespace, x: Tensor) -> Tensor:
    return (x * b.m).sum()


def of_sequences(b: SimpleNamespace, x: Tensor) -> Tensor:
    """(B, 1) means."""
    return (x * b.m).sum(1, keepdim=True) / b.m.sum(1, keepdim=True)


def seq_mean(b: SimpleNamespace, x: Tensor) -> Tensor:
    return of_sequences(b, x).mean()


def ppo(b: SimpleNamespace, r: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    return torch.maximum(-b.A * r, -b.A * r.clamp(1 - low, 1 + high))


def dual_clip(b: SimpleNamespace, r: Tensor, bound: float) -> Tensor:
    return torch.where(b.A < 0, torch.minimum(ppo(b, r), -b.A * bound), ppo(b, r))


def cispo(b: SimpleNamespace, r: Tensor, low: float, high: float) -> Tensor:
    return -sg(r.clamp(low, high)) * b.A * b.logp


def gspo(b: SimpleNamespace) -> Tensor:
    """Log-ratios: the sequence's, with the gradient of the token."""
    return b.logp - sg(b.logp) + sg(of_sequences(b, b.x))


def sequence_ratio(b: SimpleNamespace) -> Tensor:
    return of_sequences(b, b.x).exp().expand_as(b.A)


def bernoulli_kl(b: SimpleNamespace) -> Tensor:
    """Of the sampled id against all others."""
    return b.q * (b.old - sg(b.logp)) + (1 - b.q) * ((1 - b.q + 1e-8) / (1 - b.p + 1e-8)).log()


def k3(b: SimpleNamespace, bound: float = torch.inf) -> Tensor:
    d = (b.ref - b.logp).clamp(-bound, bound)
    return d.exp() - 1 - d


def dro(b: SimpleNamespace, beta: float) -> Tensor:
    return -(b.logp * b.A - 0.5 * beta * b.x.square())


def verl_sapo(b: SimpleNamespace) -> Tensor:
    tau = torch.where(b.A > 0, 1.0, 1.05).double()
    tau = tau.masked_fill(b.A <= 0, 1.05)  # 1.05 in float32 is another number
    return seq_mean(b, -torch.sigmoid(tau * (b.r20 - 1)) * (4 / tau) * b.A)


def geo_mean(b: SimpleNamespace) -> Tensor:
    sign = b.A.sign()
    narrow = sign * torch.minimum(sign * b.x, sign * b.x.clamp(-0.2, 0.2))
    return (-b.A * of_sequences(b, narrow).exp())[:, 0].mean()


def verl_dppo(b: SimpleNamespace, valid: Tensor) -> Tensor:
    return token_mean(b, -b.A * sg(b.r20.clamp(max=20.0)) * b.logp * valid)


def two_sided_clip(b: SimpleNamespace) -> Tensor:
    return -torch.minimum(b.r.clamp(max=1.5) * b.A, b.r.clamp(0.8, 1.2) * b.A)


def prompt_mean(b: SimpleNamespace, x: Tensor) -> Tensor:
    """Two prompts of two completions each."""
    return ((x * b.m).sum(1).view(2, 2).sum(1) / b.m.sum(1).view(2, 2).sum(1)).mean()


def open_instruct_dppo(b: SimpleNamespace) -> Tensor:
    dropped = (((b.A > 0) & (b.r > 1)) | ((b.A < 0) & (b.r < 1))) & (b.change.abs() > 0.1)
    return token_mean(b, -b.A * b.r * ~dropped)


def within(w: Tensor, low: float, high: float, judged: Tensor | None = None) -> Tensor:
    """Weights of tokens, 0 where they, or what is judged in their place, lie outside."""
    judged = w if judged is None else judged
    return w * ((low <= judged) & (judged <= high))


def binary_kl(b: SimpleNamespace) -> Tensor:
    p, q = (x.exp().clamp(1e-6, 1 - 1e-6) for x in (b.rollout, b.old))
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def kept_by_k1(b: SimpleNamespace, low: float, high: float) -> Tensor:
    """The mask without tokens whose ratio, engine to old policy, is outside."""
    ratio = (b.rollout - b.old).exp()
    return b.m * ((ratio >= low) & (ratio <= high))


def sampler_weights(b: SimpleNamespace, low: float, high: float, *, by_sequence: bool = False) -> Tensor:
    log_w = b.old - b.rollout
    return within(log_w.exp(), low, high, of_sequences(b, log_w).exp() if by_sequence else None)


def drifted(b: SimpleNamespace) -> Tensor:
    return (b.A < 0) & (of_sequences(b, b.rollout - b.logp) > 0.1)


def swift_masked(b: SimpleNamespace) -> Tensor:
    kept = b.m * ~drifted(b)
    return ((ppo(b, b.r) * kept).sum(1) / kept.sum(1).clamp(min=1)).mean()


def trust_region(b: SimpleNamespace, tau: float, kept: Callable[[Tensor], Tensor]) -> Tensor:
    x = b.logp - b.rollout
    return token_mean(b, -b.A * x.exp() * kept(b.p - b.rollout.exp()) + tau * x**2)


def two_sided(b: SimpleNamespace, r: Tensor, low: float, high: float) -> Tensor:
    """Weights of tokens whose ratio is inside, ends excluded."""
    return sg(r) * ((low < r) & (r < high))


def squared(b: SimpleNamespace, other: Tensor, beta: float, *, mean: bool = False) -> Tensor:
    """Regresses the log-ratio of each sequence on its advantage."""
    x = ((b.logp - other) * b.m).sum(1) / (b.m.sum(1) if mean else 1)
    return ((beta * x - b.A[:, 0]) ** 2).mean()


def geometric(b: SimpleNamespace, width: float) -> Tensor:
    narrow = torch.where(b.A > 0, b.x.clamp(max=width), b.x.clamp(min=-width))
    return (-of_sequences(b, narrow).exp()[:, 0] * b.A[:, 0]).mean()


def gdpo(b: SimpleNamespace, eps: float) -> Tensor:
    """Sum of rewards, each of which is normalised in groups of two; (4, 1)."""
    groups = b.rewards.view(2, 2, 2)
    each = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + eps)
    return (each * torch.tensor([1.0, 0.5])).sum(2).view(4, 1)


def whitened(x: Tensor, like: Tensor) -> Tensor:
    return (x - like.mean()) / like.std()


def vespo(b: SimpleNamespace) -> Tensor:
    k, lam = torch.where(b.A >= 0, 2, 3), torch.where(b.A >= 0, 3, 2)
    log_w = (b.x * b.m).sum(1, keepdim=True)
    return -sg((lam + k * log_w - lam * log_w.exp()).exp()) * b.A * b.logp


def accepted(b: SimpleNamespace) -> Tensor:
    """Sequences whose mean k3 of engine and old policy is small, (B, 1)."""
    d = b.old - b.rollout
    return of_sequences(b, d.exp() - 1 - d) <= 0.04


def pipeline_rl(b: SimpleNamespace) -> Tensor:
    policy = b.logp * b.A * sg(b.r.clamp(0.0, 1.2))
    return -token_sum(b, policy - 0.1 * k3(b, 10.0) + 0.01 * b.H) / len(b.m)


FORMULAS: dict[str, dict[str, Callable[[SimpleNamespace], Tensor]]] = {
    "SAO": {  # arXiv:2607.07508, section 3.1
        "reasoning, 0.7 to 6": lambda b: token_mean(
            b, -two_sided(b, (b.logp - b.rollout).exp(), 0.7, 6.0) * b.A * b.logp
        ),
    },
    "TRL": {  # 1.16.0, trl/experimental/a2po, gmpo; trl/trainer/grpo_trainer.py, sft_trainer.py
        "A2POTrainer, beta2 0.1": lambda b: squared(b, b.ref, 0.1),
        "GMPOTrainer, epsilon 0.4": lambda b: geometric(b, 0.4),
        "multi_objective_aggregation normalize_then_sum": lambda b: token_mean(
            b, -b.logp * whitened(gdpo(b, 1e-4), gdpo(b, 1e-4))
        ),
        "SFT, loss_type dft": lambda b: token_mean(b, -sg(b.p) * b.logp),
    },
    "verl": {  # 0.9.1, trainer/ppo/core_algos.py
        "policy_loss vanilla": lambda b: token_mean(b, dual_clip(b, b.r20, 3.0)),
        "policy_loss gspo": lambda b: token_mean(b, ppo(b, gspo(b).clamp(max=10.0).exp(), 3e-4, 4e-4)),
        "policy_loss sapo": verl_sapo,
        "policy_loss gpg": lambda b: token_mean(b, -b.logp * b.A),
        "policy_loss geo_mean": geo_mean,
        "policy_loss cispo": lambda b: token_mean(b, cispo(b, b.r20, 0.8, 1.2)),
        "policy_loss dppo_tv": lambda b: verl_dppo(b, torch.where(b.A > 0, b.change <= 0.2, b.change >= -0.2)),
        "policy_loss dppo_kl": lambda b: verl_dppo(
            b, (bernoulli_kl(b) <= 0.2) | torch.where(b.A > 0, b.p <= b.q, b.p >= b.q)
        ),
        "policy_loss dro, dro_beta 0.3": lambda b: token_mean(b, dro(b, 0.3)),
        "policy_loss bypass_mode, reinforce, rollout_is token, threshold 2": lambda b: token_mean(
            b, -b.A * b.logp * sg((b.logp - b.rollout).exp().clamp(max=2.0))
        ),
        # verl/trainer/distillation/losses.py; ref is the teacher
        "distillation_loss low_var_kl": lambda b: token_mean(b, k3(b, 20.0).clamp(-10, 10)),
        "adv_estimator gdpo": lambda b: token_mean(
            b, -b.logp * whitened(gdpo(b, 1e-6), gdpo(b, 1e-6).repeat_interleave(b.m.sum(1).long(), 0))
        ),
        "kl_loss_type low_var_kl": lambda b: token_mean(b, -b.logp * b.A + 0.1 * k3(b, 20.0).clamp(-10, 10)),
        "kl_loss_type mse": lambda b: token_mean(b, -b.logp * b.A + 0.1 * 0.5 * (b.logp - b.ref).square()),
        "loss_agg_mode token-sum": lambda b: token_sum(b, -b.logp * b.A),
        "loss_agg_mode seq-mean-token-sum": lambda b: token_sum(b, -b.logp * b.A) / len(b.m),
        "loss_agg_mode seq-mean-token-sum-norm": lambda b: token_sum(b, -b.logp * b.A) / len(b.m) / 6,
        "loss_agg_mode seq-mean-token-mean": lambda b: seq_mean(b, -b.logp * b.A),
        "entropy_coeff 0.1, seq-mean-token-mean": lambda b: seq_mean(b, -b.logp * b.A) - 0.1 * seq_mean(b, b.H),
        # verl/trainer/ppo/rollout_corr_helper.py
        "rollout_is sequence, threshold 2": lambda b: token_mean(
            b, ((b.old - b.rollout) * b.m).sum(1, keepdim=True).exp().clamp(max=2.0) * ppo(b, b.r)
        ),
        "rollout_is token, threshold 0.8_1.2, rollout_is_batch_normalize": lambda b: token_mean(
            b, sampler_weights(b, 0.8, 1.2) / token_mean(b, sampler_weights(b, 0.8, 1.2)) * ppo(b, b.r)
        ),
        "rollout_rs token_k1, 0.8_1.25": lambda b: (
            (ppo(b, b.r) * kept_by_k1(b, 0.8, 1.25)).sum() / kept_by_k1(b, 0.8, 1.25).sum()
        ),
    },
    "ROLL": {  # roll/pipeline/rlvr/actor_pg_worker.py, roll/pipeline/base_worker.py
        "kimi15, kimi15_tau 0.1": lambda b: token_mean(b, -b.A * b.logp + 0.1 * 0.5 * b.x.pow(2)),
        "tis": lambda b: token_mean(b, cispo(b, b.r, 0.0, 1.0)),
        "cispo": lambda b: token_mean(b, cispo(b, b.r, 0.9, 1.1)),
        "cispo, cispo_use_unified_mask": lambda b: token_mean(
            b, cispo(b, b.r, 0.9, 1.1) * ~(((b.A > 0) & (b.r > 1.1)) | ((b.A < 0) & (b.r < 0.9)))
        ),
        "dual_clip_loss, pg_clip 0.2": lambda b: token_mean(b, dual_clip(b, b.r, 1 + 0.2 * 2)),
    },
    "SkyRL": {  # skyrl/backends/skyrl_train/utils/ppo_utils.py
        "importance_sampling": lambda b: token_sum(b, -b.r * b.A),
        "rollout_is": lambda b: token_mean(b, -sg(within((b.logp - b.rollout).exp(), 0.8, 1.2)) * b.A * b.logp),
        "gspo": lambda b: seq_mean(b, ppo(b, gspo(b).clamp(max=10.0).exp())),
        "cispo": lambda b: token_mean(b, cispo(b, b.r, 0.0, 5.0)),
        "dppo, binary_tv": lambda b: token_mean(b, -b.r20 * b.A * ~(b.A.sign() * b.change > 0.2)),
        "dppo, binary_kl": lambda b: token_mean(
            b, -b.r20 * b.A * ~((bernoulli_kl(b) > 0.02) & (b.A.sign() * b.change > 0))
        ),
        "loss_reduction prompt_mean": lambda b: prompt_mean(b, -b.logp * b.A),
    },
    "Tinker": {  # docs/losses.mdx of tinker-cookbook
        "importance_sampling": lambda b: token_sum(b, -b.r * b.A),
        "ppo": lambda b: token_sum(b, -torch.minimum(b.r * b.A, b.r.clamp(0.8, 1.2) * b.A)),
        "cispo, 0.8 and 1.2": lambda b: token_sum(b, cispo(b, b.r, 0.8, 1.2)),
        "dro, beta 0.05": lambda b: token_sum(b, dro(b, 0.05)),
    },
    "torchforge": {  # src/forge/losses
        "ReinforceLoss, ratios from 0.1 to 10": lambda b: token_mean(b, cispo(b, b.r, 0.1, 10.0)),
        "SimpleGRPOLoss": lambda b: seq_mean(b, -((b.logp - sg(b.logp)).exp() * b.A - 0.1 * k3(b))),
    },
    "AReaL": {  # areal/utils/functional/functional.py: old are the proximal policy's
        "decoupled, c_clip 3, token_mask 5": lambda b: token_mean(
            b, torch.minimum(ppo(b, b.r), b.A.sign() * 3.0 * b.A) * sampler_weights(b, 0.0, 5.0)
        ),
    },
    "slime": {  # slime/backends/megatron_utils/loss.py, slime/utils/ppo_utils.py
        "defaults, eps_clip_c 3": lambda b: seq_mean(b, dual_clip(b, b.r, 3.0)),
        "use_unbiased_kl, kl_loss_type k2": lambda b: seq_mean(b, ppo(b, b.r) + 0.1 * b.r * (b.logp - b.ref) ** 2 / 2),
        "use_opsm, opsm_delta 0.1, use_rollout_logprobs": lambda b: seq_mean(
            b, ppo(b, (b.logp - b.rollout).exp()) * ~drifted(b)
        ),
        "use_tis, tis_clip 2": lambda b: seq_mean(b, (b.old - b.rollout).exp().clamp(0.0, 2.0) * ppo(b, b.r)),
        "advantage_estimator gspo": lambda b: seq_mean(b, ppo(b, sequence_ratio(b))),
        "advantage_estimator cispo, eps_clip 1, eps_clip_high 4": lambda b: seq_mean(b, cispo(b, b.r, 0.0, 5.0)),
        "kl_loss_type low_var_kl": lambda b: seq_mean(b, ppo(b, b.r) + 0.1 * k3(b).clamp(-10, 10)),
        "icepop_function, tis_clip 0.5 and 2": lambda b: seq_mean(b, sampler_weights(b, 0.5, 2.0) * ppo(b, b.r)),
        "loss_type sft_loss": lambda b: -seq_mean(b, b.logp),
    },
    "miles": {  # miles/backends/training_utils/loss/hub: losses.py, math_utils.py, corrections.py; tinker_losses.py
        "defaults, eps_clip_c 3": lambda b: seq_mean(b, dual_clip(b, b.r20, 3.0)),
        "kl_loss_type low_var_kl": lambda b: seq_mean(b, ppo(b, b.r20) + 0.1 * k3(b, 20.0).clamp(-10, 10)),
        "flash_reinforce, tis_binary_kl_threshold 0.004": lambda b: seq_mean(
            b, (b.old - b.rollout).exp() * (of_sequences(b, binary_kl(b)) <= 0.004) * ppo(b, b.r)
        ),
        "Tinker's cispo, 0 and 4": lambda b: token_sum(b, cispo(b, (b.logp - b.rollout).exp(), 0.0, 4.0)),
    },
    "NeMo-RL": {  # nemo_rl/algorithms/loss/loss_functions.py
        "force_on_policy_ratio": lambda b: token_mean(b, -b.A * (b.logp - sg(b.logp)).exp()),
        "ratio_clip_c 3": lambda b: token_mean(b, dual_clip(b, b.r, 3.0)),
        "sequence_level_importance_ratios": lambda b: seq_mean(b, ppo(b, sequence_ratio(b))),
        "disable_ppo_ratio": lambda b: token_mean(b, -b.A * b.logp),
        "use_cispo": lambda b: token_mean(b, cispo(b, b.r, 0.8, 1.2)),
        "seq-mask-tis, 0.8 and 1.2": lambda b: token_mean(
            b, sampler_weights(b, 0.8, 1.2, by_sequence=True) * ppo(b, b.r)
        ),
        "tis, 0 and 2": lambda b: token_mean(b, (b.old - b.rollout).exp().clamp(0.0, 2.0) * ppo(b, b.r)),
        "icepop, 0.5 and 5": lambda b: token_mean(b, sampler_weights(b, 0.5, 5.0) * ppo(b, b.r)),
        "disable_ppo_ratio, use_on_policy_kl_approximation": lambda b: token_mean(
            b, -b.A * b.logp + 0.1 * ((b.logp - b.rollout).exp() * k3(b, 20.0)).clamp(-10, 10)
        ),
        "oapl, policy_beta 0.5": lambda b: squared(b, b.rollout, 0.5),
        "oapl, length_normalize_log_ratio": lambda b: squared(b, b.rollout, 1.0, mean=True),
        "reference_policy_kl_penalty 0.1": lambda b: token_mean(
            b, ppo(b, b.r) + 0.1 * ((b.logp - sg(b.logp)).exp() * k3(b, 20.0)).clamp(-10, 10)
        ),
    },
    "OpenRLHF": {  # openrlhf/models/loss.py, openrlhf/models/utils.py
        "policy_loss_type gspo": lambda b: seq_mean(b, ppo(b, sequence_ratio(b))),
        "icepop, 0.5 and 5": lambda b: token_mean(b, sampler_weights(b, 0.5, 5.0) * ppo(b, b.r)),
        "is_correction_level seq, gating binary_kl, 0.004": lambda b: token_mean(
            b, (b.old - b.rollout).exp() * (of_sequences(b, binary_kl(b)) <= 0.004) * ppo(b, b.r)
        ),
        "kl_estimator k3, init_kl_coef 0.1": lambda b: (
            token_mean(b, ppo(b, b.r)) + 0.1 * token_mean(b, k3(b).clamp(-10, 10))
        ),
    },
    "open-instruct": {  # open_instruct/grpo_utils.py, open_instruct/model_utils.py
        "dapo": lambda b: token_mean(b, ppo(b, b.r, 0.2, 0.272)),
        "cispo": lambda b: token_mean(b, cispo(b, b.r, 0.0, 1.272)),
        "dppo, tv, 0.1": open_instruct_dppo,
        "kl_estimator 3, beta 0.1": lambda b: token_mean(b, ppo(b, b.r) + 0.1 * b.r * (b.logp - b.ref).clamp(-40, 40)),
    },
    "prime-rl": {  # src/prime_rl/trainer/rl/loss.py
        "ipo, eps 0.1, kl_tau 1e-3": lambda b: trust_region(b, 1e-3, lambda change: change.abs() <= 0.1),
        "ipo, eps 0.3, without kl_tau": lambda b: trust_region(b, 0.0, lambda change: change.abs() <= 0.3),
        "dppo_kl, kl_tau 1e-3": lambda b: trust_region(
            b, 1e-3, lambda change: ~torch.where(b.A > 0, change > 0.2, change < -0.2)
        ),
        "ppo, 0.8 and 1.2": lambda b: token_mean(b, ppo(b, (b.logp - b.rollout).exp())),
        "cispo, 0 and 5": lambda b: token_mean(b, cispo(b, (b.logp - b.rollout).exp(), 0.0, 5.0)),
        "icepop, 0.8 and 1.2, the gradient": lambda b: token_mean(
            b, -b.A * within((b.logp - b.rollout).exp(), 0.8, 1.2)
        ),
    },
    "Unsloth": {  # unsloth_zoo 2026.10.9, rl_replacements.py
        "loss_type grpo, beta 0.1": lambda b: seq_mean(b, ppo(b, b.r) + 0.1 * k3(b, 20.0).clamp(-10, 10)),
        "loss_type bnpo, delta 1.5": lambda b: token_mean(b, two_sided_clip(b)),
        "loss_type dr_grpo": lambda b: token_sum(b, ppo(b, b.r)) / b.m.numel(),
        "loss_type dapo, epsilon_high 0.28": lambda b: token_mean(b, ppo(b, b.r, 0.2, 0.28)),
        "loss_type luspo": lambda b: token_sum(b, ppo(b, sequence_ratio(b))) / len(b.m),
        "loss_type cispo, epsilon_high 5": lambda b: token_mean(b, cispo(b, b.r, 0.0, 5.0)),
        "loss_type sapo": verl_sapo,
        "loss_type vespo": lambda b: token_mean(b, vespo(b)),
        "geometric_truncate, 0.8 and 1.2": lambda b: token_mean(
            b, of_sequences(b, b.old - b.rollout).exp().clamp(0.8, 1.2) * ppo(b, b.r)
        ),
        "rollout_rs seq_mean_k3 0.04, beta 0.1": lambda b: token_mean(b, accepted(b) * (ppo(b, b.r) + 0.1 * k3(b))),
        "rollout log-probabilities as old ones": lambda b: token_mean(b, ppo(b, (b.logp - b.rollout).exp())),
        "weights of completions, 1 / tokens of their prompts": lambda b: 2 * prompt_mean(b, ppo(b, b.r)),
    },
    "ms-swift": {  # swift/rlhf_trainers/grpo_trainer.py
        "importance_sampling_level sequence_token": lambda b: seq_mean(b, ppo(b, gspo(b).exp())),
        "cispo, epsilon_high 5": lambda b: token_mean(b, cispo(b, b.r, 0.0, 5.0)),
        "delta 1.5": lambda b: token_mean(b, two_sided_clip(b)),
        "off_policy_sequence_mask_delta 0.1": swift_masked,
        "rollout_importance_sampling_mode sequence_mask": lambda b: token_mean(
            b, sampler_weights(b, 0.0, 2.0, by_sequence=True) * ppo(b, b.r)
        ),
    },
    "PipelineRL": {  # pipelinerl/finetune/rl/__init__.py
        "reinforce, kl_coef 0.1, entropy_bonus 0.01": pipeline_rl,
    },
}


def test_each_row_has_a_formula_and_each_formula_a_row():
    assert len(ROWS) == len(CELLS)
    assert ROWS.keys() == {(trainer, option) for trainer, formulas in FORMULAS.items() for option in formulas}


@pytest.mark.parametrize(("trainer", "option"), ROWS)
def test_a_row_has_the_values_and_gradients_of_its_trainer(trainer, option):
    b, (options, call) = batch(), ROWS[trainer, option]
    names = {
        "old_logps": b.old, "ref_logps": b.ref, "rollout_logps": b.rollout, "completion_mask": b.m.bool(), "gk": gk,
        "torch": torch, "rewards": b.rewards, "prompt_tokens": b.m.sum(1).view(2, 2).sum(1).repeat_interleave(2),
    }  # fmt: skip
    config = gk.GRPOConfig(**eval(f"dict({options})", names))
    given: dict[str, Any] = {"completion_mask": names["completion_mask"], "old_logps": b.old}
    given |= {"ref_logps": b.ref} if config.beta else {}
    given |= {"advantages": b.A[:, 0]} | eval(f"dict({call})", names)
    entropy = b.H if config.has_entropy_bonus else None
    found = gk.grpo_loss_from_logps(b.logp, entropy=entropy, config=config, backend="torch", **given).loss
    expected = FORMULAS[trainer][option](b)
    leaves = [b.logp] + [b.H] * config.has_entropy_bonus
    pairs = zip(*(torch.autograd.grad(loss, leaves) for loss in (found, expected)), strict=True)
    # Advantages from several rewards are float32, with an epsilon that verl has inside of the root.
    rtol = 1e-3 if "gk.combine_advantages" in call else 1e-9
    if not option.endswith(", the gradient"):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-12)
    for x, y in pairs:
        torch.testing.assert_close(x, y, rtol=rtol, atol=1e-12)
        assert y.any()


# --- options of other trainers -------------------------------------------------------------------------------------


def fields_of(package: str, files: dict[str, tuple[str, ...]]) -> set[str]:
    """The fields of these classes in an installed package's files, which are read: verl's import needs Ray."""
    root = Path(importlib.util.find_spec(package).submodule_search_locations[0])
    found = set()
    for file, classes in files.items():
        for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name in classes:
                found |= {x.target.id for x in node.body if isinstance(x, ast.AnnAssign)}
    return found


VERL = {
    "workers/config/actor.py": ("ActorConfig", "PolicyLossConfig", "FSDPActorConfig"),
    "trainer/config/algorithm.py": ("AlgoConfig", "KLControlConfig", "RolloutCorrectionConfig"),
}
INSTALLED = {
    "TRL": lambda: (
        fields_of("trl", {"trainer/grpo_config.py": ("GRPOConfig",)})
        | fields_of("transformers", {"training_args.py": ("TrainingArguments",)})
    ),
    "verl": lambda: fields_of("verl", VERL),
}
# What belongs to the loss, by how it begins.
OF_THE_LOSS = {
    "TRL": "epsilon|delta|beta|loss_|scale_|sapo_|vespo_|(vllm_)?importance_|entropy_|top_ent|off_policy|use_bias",
    "verl": "clip_|kl_|use_kl|entropy_coef|tau_|loss_(mode|agg|scale)|policy_loss|dro_|ppo_kl|rollout_(is|rs)|norm_adv",
}


@pytest.mark.parametrize("trainer", NAMES)
def test_options_of_other_trainers_are_theirs_and_all_of_the_loss_are_answered(trainer):
    fields, own = INSTALLED[trainer](), {f.name for f in dataclasses.fields(gk.GRPOConfig)}
    assert len(fields) > 40 and NAMES[trainer].keys() <= fields - own
    of_the_loss = {name for name in fields if re.match(OF_THE_LOSS[trainer], name)}
    assert len(of_the_loss) > 15 and of_the_loss <= NAMES[trainer].keys() | own
    arguments = {*inspect.signature(gk.fused_grpo_loss).parameters, "entropy_coef"}
    for name, hint in NAMES[trainer].items():
        named = re.findall(r"\bset (\w+)|\bset \w+(?:='\w+')? and (\w+)|\bset \w+='\w+', (\w+) and (\w+)=", hint)
        assert {x for group in named for x in group if x} <= own, (name, hint)
        assert set(re.findall(r"pass (\w+)=", hint)) <= arguments, (name, hint)
        assert all(hasattr(gk, x) for x in re.findall(r"=(\w+)\(", hint)), (name, hint)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kl_coef", "it is verl's; here subtract the KL from the rewards; beta weighs one in the loss"),
        ("kl_loss_type", "it is verl's; here set kl_estimator"),
        ("kl_loss_coef", "it is verl's; here set beta"),
        ("clip_ratio_low", "it is verl's; here set epsilon_low"),
        ("clip_ratio_c", "it is verl's; here set dual_clip"),
        (
            "top_p",
            "it is TRL's; here pass sampling_mask=sampling_support(..., top_k=, top_p=, min_p=) of the policy that",
        ),
        ("epsilon_hihg", "did you mean epsilon_high?"),
        ("kl_weight", "help(GRPOConfig) has them all"),  # near kl_score_term, which it is not
    ],
)
def test_a_hint_is_right_or_not_given(name, message):
    with pytest.raises(TypeError, match=re.escape(f"GRPOConfig has no option {name!r}: {message}")) as caught:
        gk.GRPOConfig(**{name: 0.1})
    assert len(str(caught.value)) < 160
    if name in NAMES["verl"]:
        with pytest.raises(TypeError, match=re.escape(message)):
            gk.grpo_loss_from_logps(torch.zeros(2, 3), torch.ones(2), **{name: 0.1})

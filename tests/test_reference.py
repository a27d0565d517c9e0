"""The specification itself, against numbers worked out in plain Python floats from the formulas."""

from __future__ import annotations

import math
from math import exp, log

import pytest
import torch
from helpers import fused, make_batch
from helpers import reference as run_reference

import grpo_kernels as gk
from grpo_kernels.config import SURROGATE_RULES
from grpo_kernels.reference import reference_logps, reference_loss_from_logits, reference_loss_from_logps


def one(logp: float, A: float, *, old=None, ref=None, weight=None, rollout=None, **options) -> tuple[float, float]:
    """(loss, d loss / d logp) of a single token."""
    x = torch.tensor([[logp]], dtype=torch.float64, requires_grad=True)
    given = {"old_logps": old, "ref_logps": ref, "rollout_weights": weight, "rollout_logps": rollout}
    given = {name: torch.tensor([[v]], dtype=torch.float64) for name, v in given.items() if v is not None}
    out = reference_loss_from_logps(x, torch.tensor([A], dtype=torch.float64), config=gk.GRPOConfig(**options), **given)
    (gradient,) = torch.autograd.grad(out.loss, x)
    return out.loss.item(), gradient.item()


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


R = exp(0.3)  # the ratio of logp = -1, old = -1.3
PAPER = dict(surrogate="vespo")
# KL of the sampled id against all others, of e^-1.3 to e^-0.2
BERNOULLI = -1.1 * exp(-1.3) + (1 - exp(-1.3)) * log((1 - exp(-1.3)) / (1 - exp(-0.2)))
SURROGATES = [
    # name, A, logp, old, options -> value, gradient
    ("inside", 2.0, -1.0, -1.1, {}, -2 * exp(0.1), -2 * exp(0.1)),
    ("clipped above", 2.0, -1.0, -1.3, {}, -2 * 1.2, 0.0),
    ("not clipped above", -2.0, -1.0, -1.3, {}, 2 * R, 2 * R),
    ("clipped below", -2.0, -1.0, -0.7, {}, 2 * 0.8, 0.0),
    ("not clipped below", 2.0, -1.0, -0.7, {}, -2 * exp(-0.3), -2 * exp(-0.3)),
    ("clip higher", 2.0, -1.0, -1.2, {"epsilon_high": 0.28}, -2 * exp(0.2), -2 * exp(0.2)),
    ("delta", -2.0, -1.0, -3.0, {"delta": 4.0}, 2 * 4.0, 0.0),
    ("dual clip acts", -2.0, -1.0, -3.0, {"dual_clip": 3.0}, 2 * 3.0, 0.0),
    ("dual clip is for A < 0", 2.0, -1.0, -3.0, {"dual_clip": 3.0}, -2 * 1.2, 0.0),
    ("log ratio clamp", -2.0, -1.0, -3.0, {"log_ratio_clamp": 1.5}, 2 * exp(1.5), 0.0),
    ("on-policy", 2.0, -1.0, None, {}, -2.0, -2.0),
    ("cispo below its cap", 2.0, -1.0, -1.3, {"surrogate": "cispo"}, 2 * R, -2 * R),
    ("cispo capped", 2.0, -1.0, -4.0, {"surrogate": "cispo"}, 2 * 5.0, -2 * 5.0),
    ("cispo two-sided", 2.0, -1.0, -1.3, {"surrogate": "cispo_two_sided"}, 2 * 1.2, -2 * 1.2),
    ("cispo two-sided low", 2.0, -1.0, -0.1, {"surrogate": "cispo_two_sided"}, 2 * 0.8, -2 * 0.8),
    ("cispo mask inside", 2.0, -1.0, -1.1, {"surrogate": "cispo_mask"}, 2 * exp(0.1), -2 * exp(0.1)),
    ("cispo mask outside", -2.0, -1.0, -1.3, {"surrogate": "cispo_mask"}, 0.0, 0.0),
    ("cispo mask below", 2.0, -1.0, -0.7, {"surrogate": "cispo_mask"}, 0.0, 0.0),
    ("cispo unified outwards", 2.0, -1.0, -1.3, {"surrogate": "cispo_unified"}, 0.0, 0.0),
    ("cispo unified inwards", -2.0, -1.0, -1.3, {"surrogate": "cispo_unified"}, -2 * 1.2, 2 * 1.2),
    ("cispo unified outwards below", -2.0, -1.0, -0.7, {"surrogate": "cispo_unified"}, 0.0, 0.0),
    ("sapo A > 0", 2.0, -1.0, -1.3, {"surrogate": "sapo"}, -4 * sigmoid(R - 1) * 2,
     -4 * sigmoid(R - 1) * (1 - sigmoid(R - 1)) * 2 * R),
    ("sapo A < 0", -2.0, -1.0, -1.3, {"surrogate": "sapo"}, 4 / 1.05 * sigmoid(1.05 * (R - 1)) * 2,
     4 * sigmoid(1.05 * (R - 1)) * (1 - sigmoid(1.05 * (R - 1))) * 2 * R),
    ("reinforce", 2.0, -1.0, -1.3, {"surrogate": "reinforce"}, 2.0, -2.0),
    ("vespo A >= 0", 2.0, -1.0, -1.3, PAPER, exp(3 + 2 * 0.3 - 3 * R) * 2, -exp(3 + 2 * 0.3 - 3 * R) * 2),
    ("vespo A < 0", -2.0, -1.0, -1.3, PAPER, -exp(2 + 3 * 0.3 - 2 * R) * 2, exp(2 + 3 * 0.3 - 2 * R) * 2),
    ("gmpo inside", 2.0, -1.0, -1.1, {"surrogate": "gmpo"}, -2 * exp(0.1), -2 * exp(0.1)),
    ("gmpo clamped", 2.0, -1.0, -1.3, {"surrogate": "gmpo"}, -2 * exp(0.2), 0.0),
    ("gmpo A < 0", -2.0, -1.0, -1.3, {"surrogate": "gmpo"}, 2 * R, 2 * R),
    ("dppo keeps", 2.0, -1.0, -1.3, {"surrogate": "dppo_tv"}, -2 * R + 1e-3 * 0.09, -2 * R + 2e-3 * 0.3),
    ("dppo drops", 2.0, -0.2, -1.3, {"surrogate": "dppo_tv"}, 1e-3 * 1.21, 2e-3 * 1.1),
    ("dppo A <= 0", -2.0, -0.2, -1.3, {"surrogate": "dppo_tv"}, 2 * exp(1.1) + 1e-3 * 1.21, 2 * exp(1.1) + 2e-3 * 1.1),
    ("dppo drops downwards", -2.0, -1.3, -0.2, {"surrogate": "dppo_tv"}, 1e-3 * 1.21, -2e-3 * 1.1),
    ("dppo without the square", 2.0, -1.0, -1.3, {"surrogate": "dppo_tv", "dppo_kl_tau": 0.0}, -2 * R, -2 * R),
    ("dppo capped", 2.0, -1.0, -1.3, {"surrogate": "dppo_tv", "ratio_cap": 1.2, "dppo_kl_tau": 0.0}, 2.4, -2.4),
    ("dppo below its cap", -2.0, -1.0, -1.3, {"surrogate": "dppo_tv", "ratio_cap": 20.0, "dppo_kl_tau": 0.5},
     -2 * R + 0.5 * 0.09, 2 * R + 0.3),
    ("dppo_kl keeps", 2.0, -1.0, -1.3, {"surrogate": "dppo_kl", "dppo_kl_tau": 0.0}, -2 * R, -2 * R),
    ("dppo_kl drops", 2.0, -0.2, -1.3, {"surrogate": "dppo_kl"}, 1e-3 * 1.21, 2e-3 * 1.1),
    ("dppo_kl above its bound", 2.0, -0.2, -1.3, {"surrogate": "dppo_kl", "epsilon_high": BERNOULLI + 1e-6},
     -2 * exp(1.1) + 1e-3 * 1.21, -2 * exp(1.1) + 2e-3 * 1.1),
    ("dppo_kl A <= 0", -2.0, -0.2, -1.3, {"surrogate": "dppo_kl"}, 2 * exp(1.1) + 1e-3 * 1.21,
     2 * exp(1.1) + 2e-3 * 1.1),
    ("dppo_kl drops downwards", -2.0, -1.3, -0.2, {"surrogate": "dppo_kl"}, 1e-3 * 1.21, -2e-3 * 1.1),
    ("ipo keeps", 2.0, -1.0, -1.1, {"surrogate": "ipo"}, -2 * exp(0.1) + 1e-3 * 0.01, -2 * exp(0.1) + 2e-4),
    ("a2po", 2.0, -1.0, -1.3, {"surrogate": "a2po", "a2po_beta": 0.5}, (0.5 * 0.3 - 2) ** 2, 0.5 * 0.3 - 2),
    ("a2po without an advantage", 0.0, -1.0, -1.3, {"surrogate": "a2po"}, 9e-8, 6e-7),
    ("ipo drops either way", -2.0, -0.2, -1.3, {"surrogate": "ipo"}, 1e-3 * 1.21, 2e-3 * 1.1),
]  # fmt: skip


@pytest.mark.parametrize(("A", "logp", "old", "options", "value", "slope"), [c[1:] for c in SURROGATES],
                         ids=[c[0] for c in SURROGATES])  # fmt: skip
def test_surrogates(A, logp, old, options, value, slope):
    assert one(logp, A, old=old, **options) == pytest.approx((value, slope), rel=1e-12)


def test_every_surrogate_has_an_example():
    assert {c[4].get("surrogate", "clip") for c in SURROGATES} == set(SURROGATE_RULES)


D = 0.4  # ref - logp
KL = [
    ("k1", {}, -D, 1.0),
    ("k2", {}, D * D / 2, -D),
    ("k3", {}, exp(D) - D - 1, 1 - exp(D)),
    ("abs", {}, D, -1.0),
    ("k1+", {}, -D, -D),
    ("k3+", {}, exp(D) - D - 1, -D),
    ("k3", {"kl_clamp": 0.05}, 0.05, 0.0),
    ("k3+", {"kl_clamp": 0.05}, 0.05, -D),
    ("k1", {"kl_clamp": (0.25, None)}, -0.25, 0.0),
    ("k2", {"kl_clamp": (0.25, 10.0)}, 0.03125, 0.0),
    ("k2", {"kl_clamp": (0.5, 10.0)}, D * D / 2, -D),
    ("k1", {"kl_score_term": True}, -D, 1 - D),
    ("k2", {"kl_score_term": True}, D * D / 2, D * D / 2 - D),
    ("k3", {"kl_score_term": True}, exp(D) - D - 1, -D),
    ("k3", {"kl_score_term": True, "kl_clamp": 0.05}, 0.05, 0.0),
    ("k1", {"kl_score_term": True, "kl_clamp": (0.25, None)}, -0.25, 0.0),
    ("k1", {"kl_score_term": True, "kl_clamp": (0.5, 0.5)}, -D, 1 - D),
]


@pytest.mark.parametrize(("estimator", "options", "value", "slope"), KL)
def test_kl_estimators(estimator, options, value, slope):
    found = one(-1.0, 0.0, ref=-1.0 + D, beta=0.5, kl_estimator=estimator, **options)
    assert found == pytest.approx((0.5 * value, 0.5 * slope), rel=1e-12)


def test_bias_corrected_kl_is_times_the_ratio():
    k3 = exp(D) - D - 1
    found = one(-1.0, 0.0, old=-1.3, ref=-1.0 + D, beta=0.5, use_bias_correction_kl=True)
    assert found == pytest.approx((0.5 * k3 * R, 0.5 * ((1 - exp(D)) * R + k3 * R)), rel=1e-12)


def test_exponents_stop_at_80():
    assert one(-1.0, -1.0, old=-201.0) == pytest.approx((exp(80), 0.0))
    assert one(-1.0, 0.0, ref=99.0, beta=1.0) == pytest.approx((exp(80) - 81, 0.0))


def test_the_order_is_surrogate_times_weights_then_kl():
    k3 = exp(D) - D - 1
    value, slope = one(-1.0, 2.0, old=-1.1, ref=-1.0 + D, weight=0.25, beta=0.5)
    assert (value, slope) == pytest.approx((-0.5 * exp(0.1) + 0.5 * k3, -0.5 * exp(0.1) + 0.5 * (1 - exp(D))))


# Two sequences of (2, 1) tokens in three columns: logp, old; A = (1, -1).
LOGP = [[-1.0, -2.0, 7.0], [-3.0, 7.0, 7.0]]
OLD = [[-1.1, -1.95, 7.0], [-2.95, 7.0, 7.0]]
MASK = [[1, 1, 0], [1, 0, 0]]
RATIOS = exp(0.1), exp(-0.05), exp(-0.05)
TERMS = -RATIOS[0], -RATIOS[1], RATIOS[2]


def two(advantages=(1.0, -1.0), **options):
    given = {
        name: options.pop(name) for name in tuple(options) if name in ("normalizer", "num_items_in_batch", "entropy")
    }
    return reference_loss_from_logps(
        *(torch.tensor(x, dtype=torch.float64) for x in (LOGP, advantages)),
        old_logps=torch.tensor(OLD, dtype=torch.float64), completion_mask=torch.tensor(MASK),
        config=gk.GRPOConfig(**options), **given,
    )  # fmt: skip


AGGREGATIONS = {
    "seq_mean": ((TERMS[0] + TERMS[1]) / 2 + TERMS[2]) / 2,
    "token_mean": sum(TERMS) / 3,
    "fixed_length": sum(TERMS) / (2 * 10),
    "num_items": sum(TERMS) / 3,
    "seq_sum": sum(TERMS) / 2,
}


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregations(name):
    length = 10 if name == "fixed_length" else None
    assert two(aggregation=name, max_completion_length=length).loss.item() == pytest.approx(
        AGGREGATIONS[name], rel=1e-12
    )


def test_given_denominators():
    assert two(num_items_in_batch=torch.tensor(50)).loss.item() == pytest.approx(sum(TERMS) / 50)
    assert two(aggregation="token_mean", normalizer=50).loss.item() == pytest.approx(sum(TERMS) / 50)
    of_8 = ((TERMS[0] + TERMS[1]) / 2 + TERMS[2]) / 8
    assert two(aggregation="seq_mean", normalizer=8.0).loss.item() == pytest.approx(of_8)


def test_levels():
    mean, total = exp((0.1 - 0.05) / 2), exp(0.1 - 0.05)
    found = two(importance_sampling_level="sequence", aggregation="seq_mean").loss.item()
    assert found == pytest.approx((-mean + exp(-0.05)) / 2, rel=1e-12)
    found = two(importance_sampling_level="sequence_sum", aggregation="seq_mean").loss.item()
    assert found == pytest.approx((-total + exp(-0.05)) / 2, rel=1e-12)
    found = two(importance_sampling_level="sequence_token", aggregation="seq_mean").loss.item()
    assert found == pytest.approx((-mean + exp(-0.05)) / 2, rel=1e-12)
    found = two(surrogate="gmpo", aggregation="seq_mean", epsilon_high=0.06).loss.item()
    assert found == pytest.approx((-exp((0.06 - 0.05) / 2) + exp(-0.05)) / 2, rel=1e-12)


def test_entropy_bonus_and_threshold():
    entropy = torch.tensor([[0.5, 1.5, 9.0], [1.0, 9.0, 9.0]], dtype=torch.float64)
    found = two(entropy=entropy, entropy_coef=0.1).loss.item()
    assert found == pytest.approx(sum(TERMS) / 3 - 0.1 * 3.0 / 3)
    found = two(entropy=entropy, entropy_coef=0.1, normalizer=6).loss.item()
    assert found == pytest.approx(sum(TERMS) / 6 - 0.1 * 3.0 / 3 / 2)
    assert two(entropy=entropy, entropy_threshold=1.0).loss.item() == pytest.approx((TERMS[1] + TERMS[2]) / 3)


def test_off_policy_mask_drops_sequences_of_negative_advantage_alone():
    drift = 0.05  # mean(old - logp) of the second sequence; the first has -0.025, and A >= 0
    assert two(off_policy_mask_threshold=drift - 1e-6).loss.item() == pytest.approx((TERMS[0] + TERMS[1]) / 3)
    assert two(off_policy_mask_threshold=drift + 1e-6).loss.item() == pytest.approx(sum(TERMS) / 3)
    assert two((1.0, 0.5), off_policy_mask_threshold=drift - 1e-6).loss == two((1.0, 0.5)).loss


def test_metrics():
    metrics = two(epsilon_low=0.04, epsilon_high=0.1).metrics
    expected = {
        "ratio/mean": sum(RATIOS) / 3, "ratio/min": exp(-0.05), "ratio/max": exp(0.1), "approx_kl": 0.0,
        "clip_ratio/high": 1 / 3, "clip_ratio/low": 1 / 3, "clip_ratio/region": 2 / 3,
    }  # fmt: skip
    assert {name: metrics[name].item() for name in expected} == pytest.approx(expected, abs=1e-12)


def test_log_probabilities_and_entropy():
    u, c, scale, temperature = (1.0, -2.0, 0.5), 3.0, 0.7, 0.9
    z = [c * math.tanh(scale * x / c) / temperature for x in u]
    lse = log(sum(map(exp, z)))
    entropy = -sum(exp(x - lse) * (x - lse) for x in z)
    logp, found = reference_logps(
        torch.tensor([u], dtype=torch.float64), torch.tensor([1]),
        temperature=temperature, logit_scale=scale, logit_softcap=c,
    )  # fmt: skip
    assert (logp.item(), found.item()) == pytest.approx((z[1] - lse, entropy), rel=1e-12)


def test_masked_logits_reach_nothing():
    logits = torch.randn(1, 3, 4, dtype=torch.float64)
    logits[0, 2] = math.nan
    logits.requires_grad_()
    out = reference_loss_from_logits(
        logits,
        torch.tensor([[0, 1, -5]]),
        torch.ones(1, dtype=torch.float64),
        completion_mask=torch.tensor([[1, 1, 0]]),
    )
    out.loss.backward()
    assert out.loss.isfinite() and logits.grad.isfinite().all() and not logits.grad[0, 2].any()


# --- presets: (surrogate, level, aggregation, other) ---------------------------------------------------------------

PRESETS = {
    "grpo": ("clip", "token", "seq_mean", dict(epsilon_low=0.2, epsilon_high=0.2, beta=0.04, kl_estimator="k3")),
    "bnpo": ("clip", "token", "token_mean", {}),
    "dr_grpo": ("clip", "token", "fixed_length", dict(advantage_scale="none")),
    "dapo": ("clip", "token", "num_items", dict(epsilon_low=0.2, epsilon_high=0.28, beta=0.0)),
    "gspo": ("clip", "sequence", "seq_mean", dict(epsilon_low=3e-4, epsilon_high=4e-4)),
    "cispo": ("cispo", "token", "num_items", dict(epsilon_high=5.0)),
    "sapo": ("sapo", "token", "seq_mean", dict(sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)),
    "luspo": ("clip", "sequence", "seq_sum", {}),
    "vespo": ("vespo", "token", "num_items",
              dict(vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0)),
    "rloo": ("clip", "sequence_sum", "seq_mean", dict(advantage_baseline="leave_one_out", advantage_scale="none")),
    "ppo": ("clip", "token", "token_mean", {}),
    "reinforce": ("reinforce", "token", "token_mean", {}),
    "rft": ("reinforce", "token", "token_mean", {}),
    "online_rft": ("reinforce", "token", "token_mean", {}),
    "sft": ("reinforce", "token", "token_mean", {}),
    "sao": ("cispo_mask", "token", "num_items", dict(epsilon_low=0.3, epsilon_high=5.0)),
    "a2po": ("a2po", "sequence_sum", "seq_mean", dict(a2po_beta=1e-3)),
    "verl": ("clip", "token", "num_items", dict(dual_clip=3.0, log_ratio_clamp=20.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", gk.available_presets())
def test_presets(name):
    surrogate, level, aggregation, other = PRESETS[name]
    config = gk.GRPOConfig.preset(name)
    assert (config.surrogate, config.importance_sampling_level, config.aggregation) == (surrogate, level, aggregation)
    assert {key: getattr(config, key) for key in other} == other
    length = 3 if aggregation == "fixed_length" else None
    assert gk.GRPOConfig.preset(name, beta=0.5, max_completion_length=length).beta == 0.5


def test_a_batch_without_sequences():
    assert run_reference(make_batch(0, sequences=0), gk.GRPOConfig(aggregation="seq_mean")).loss == 0


def test_weights_that_drop_every_token_have_no_effective_sample(backend):
    batch = make_batch(0).with_options(rollout_weights=torch.zeros(4))
    for found in (run_reference(batch), fused(batch, backend=backend)):
        assert found.metrics["rollout_ess"] == 0

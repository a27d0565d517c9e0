"""NaN logits (NaN weights, hidden states that overflowed) make the loss NaN, whatever a clip, a threshold or a zero
weight makes of the token. At padding they have no effect: test_traps.py."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Batch, fused, make_batch, off_policy, reference

import grpo_kernels as gk
from grpo_kernels.config import SURROGATE_RULES
from grpo_kernels.names import KL_ESTIMATORS

TOKEN = (2, 1)  # where the NaN is: unmasked
CLAMPED = dict(log_ratio_clamp=0.5, kl_clamp=(1.0, 0.5), beta=0.1)
POINTS = [(surrogate, level) for surrogate, rule in SURROGATE_RULES.items() for level in rule.levels]


def with_nan(batch: Batch, value: float = math.nan) -> Batch:
    hidden = batch.hidden.clone()
    hidden[TOKEN][3] = value
    return Batch(hidden, batch.weight, batch.ids, batch.advantages, batch.bias, batch.options)


def make(surrogate: str, *, old: bool, advantage: float) -> Batch:
    batch = off_policy(make_batch(masked=True))
    assert batch.options["completion_mask"][TOKEN]
    batch.advantages[TOKEN[0]] = advantage
    del batch.options["old_logps" if not old else "ref_logps"]
    if SURROGATE_RULES[surrogate].divides_by_rollout:
        batch.options["rollout_logps"] = torch.full(batch.ids.shape, -4.0)
    return batch


def assert_nan(batch: Batch, config: gk.GRPOConfig, backend: str, *, active: bool = True) -> None:
    """`active`: known to have a gradient before its logits are there; otherwise it is scored alone."""
    result = fused(batch, config, backend)
    assert result.loss.isnan()
    if active:
        assert any(not grad.isfinite().all() for grad in result.grads.values())
    assert reference(batch, config).loss.isnan()


@pytest.mark.parametrize("old", [True, False], ids=["old", "on-policy, entropy threshold"])
@pytest.mark.parametrize("point", POINTS, ids="/".join)
def test_nan_logits_make_the_loss_nan(backend, point, old):
    surrogate, level = point
    threshold = None if old else 1.0
    bounds = dict(delta=1.5, dual_clip=3.0) if surrogate == "clip" else {}
    common = dict(surrogate=surrogate, importance_sampling_level=level, entropy_threshold=threshold, **bounds)
    clamped = {**CLAMPED, "beta": 0.0 if old else 0.1}
    for advantage, value in ((1.0, math.nan), (-1.0, math.inf)):
        batch = with_nan(make(surrogate, old=old, advantage=advantage), value)
        assert_nan(batch, gk.GRPOConfig(**common), backend)
    assert_nan(with_nan(batch), gk.GRPOConfig(**common, **clamped), backend)


@pytest.mark.parametrize("surrogate", SURROGATE_RULES)
def test_nan_logits_of_a_token_without_surrogate(backend, surrogate):
    """An advantage of 0, a rollout weight of 0, an unknown rollout, a sequence that is dropped, a KL alone."""
    config = gk.GRPOConfig(surrogate=surrogate)
    assert_nan(with_nan(make(surrogate, old=True, advantage=0.0)), config, backend, active=False)
    batch = with_nan(make(surrogate, old=True, advantage=-1.0))
    weights = torch.ones(batch.ids.shape)
    weights[TOKEN] = 0.0
    assert_nan(batch.with_options(rollout_weights=weights), config, backend, active=False)
    rollout = torch.full(batch.ids.shape, 0.0)
    dropped = gk.GRPOConfig(surrogate=surrogate, off_policy_mask_threshold=0.1)
    assert_nan(batch.with_options(rollout_logps=rollout), dropped, backend)
    if SURROGATE_RULES[surrogate].divides_by_rollout:
        rollout[TOKEN] = math.nan
        unknown = with_nan(make(surrogate, old=False, advantage=1.0)).with_options(rollout_logps=rollout)
        assert_nan(unknown, config, backend, active=False)


@pytest.mark.parametrize("kl", KL_ESTIMATORS[1:])
def test_nan_logits_under_every_kl_estimator(backend, kl):
    batch = with_nan(make("clip", old=False, advantage=1.0))
    assert_nan(batch, gk.GRPOConfig(**CLAMPED, use_bias_correction_kl=True, kl_estimator=kl), backend)


@pytest.mark.parametrize("surrogate", SURROGATE_RULES)
def test_nan_log_probabilities(backend, surrogate):
    config = gk.GRPOConfig(surrogate=surrogate, entropy_threshold=0.5)
    for old in (True, False):
        batch = make(surrogate, old=old, advantage=-1.0)
        options = {name: x for name, x in batch.options.items() if name != "ref_logps"}
        entropy, logps = torch.rand(batch.ids.shape), torch.full(batch.ids.shape, -2.0)
        logps[TOKEN] = math.nan
        entropy[TOKEN] = 0.1
        for leaves in ((logps, entropy), (logps.nan_to_num(-2.0), torch.where(logps.isnan(), math.nan, entropy))):
            out = gk.grpo_loss_from_logps(
                leaves[0], batch.advantages, entropy=leaves[1], config=config, backend=backend, **options
            )
            assert out.loss.isnan()

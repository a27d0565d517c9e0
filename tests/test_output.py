"""What a loss call returns: found by wrappers of modules, safe to change in place."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest
import torch
from helpers import call, good_calls, leaves, make_batch, off_policy
from torch.nn.parallel.distributed import _find_tensors

import grpo_kernels as gk


def output(**options):
    return call(
        leaves(off_policy(make_batch(3, masked=True))), **{"config": gk.GRPOConfig(), "backend": "cpu"} | options
    )


def test_wrappers_of_modules_find_the_loss():
    """DistributedDataParallel with find_unused_parameters looks for tensors in dataclasses and containers."""
    out = output()
    assert any(x is out.loss for x in _find_tensors(out))
    with pytest.raises(dataclasses.FrozenInstanceError):
        out.loss = out.loss * 2


def test_sums_may_be_reduced_in_place():
    """As all_reduce over two equal ranks does; what is read later does not follow."""
    expected, out = output(), output()
    for total, count in out.metric_sums.values():
        total.mul_(2)
        count.mul_(2)
    for name in ("sequences", "groups"):
        for x in getattr(out, name).values():
            x.mul_(0)
    for name, (total, count) in expected.metric_sums.items():
        assert torch.equal(out.metric_sums[name][0], 2 * total) and torch.equal(out.metric_sums[name][1], 2 * count)
    assert all(torch.equal(out.metrics[name], x) for name, x in expected.metrics.items())


def test_metrics_of_a_batch_without_tokens_are_0(backend):
    """Extrema like means, so that no infinity stands in a log."""
    batch = off_policy(make_batch(0)).with_options(completion_mask=torch.zeros(4, 6))
    batch = batch.with_options(rollout_logps=batch.options["old_logps"], rollout_weights=torch.ones(4))
    metrics = call(batch, backend=backend).metrics
    assert {"ratio/min", "ratio/max", "rollout_mismatch/max"} <= metrics.keys()
    assert not any(x != 0 for x in metrics.values()), metrics
    unknown = batch.with_options(completion_mask=None, rollout_logps=torch.full((4, 6), torch.nan))
    metrics = call(unknown, backend=backend).metrics
    assert metrics["rollout_mismatch/max"] == 0 < metrics["ratio/min"] < metrics["ratio/max"]


def test_sequences_add_up_to_the_whole():
    out = output()
    assert torch.allclose(out.sequences["loss"].sum(), out.loss)
    tokens = out.sequences["tokens"]
    for name, x in out.sequences.items():
        assert x.shape == (4,)
        if name in out.metric_sums:
            assert torch.allclose((x * tokens).sum(), out.metric_sums[name][0], atol=1e-5), name


@pytest.mark.parametrize("name", ["fused_grpo_loss", "grpo_loss_from_logits", "grpo_loss_from_logps"])
@pytest.mark.parametrize("masked", [False, True])
def test_outputs_share_no_memory_with_inputs(name, masked):
    given, loss = good_calls()[name], getattr(gk, name)
    if not masked:
        del given["completion_mask"]
    inputs = [x for x in given.values() if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in inputs]
    out = loss(**given)
    for x in (out.logps, out.entropy, out.advantages):
        x.add_(1)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    assert torch.equal(out.advantages, given["advantages"])  # a copy each time
    rewards = torch.tensor([[0.0, 1.0, 1.0, 3.0], [7.0] * 4]).T[:, 0]  # strided
    out = loss(**given | dict(advantages=None, rewards=rewards))
    for x in (*out.groups.values(), out.advantages):
        x.add_(1)
    assert out.advantages.shape == (4,) and not torch.equal(out.groups["reward_mean"], torch.tensor([0.5, 2.0]))
    assert torch.allclose(out.advantages, gk.group_advantages(rewards.contiguous(), num_generations=2))


@pytest.mark.parametrize("called_inside", [False, True])
def test_metrics_first_read_in_inference_mode_are_plain_tensors(called_inside):
    batch = dataclasses.replace(make_batch(3), advantages=None)
    options = {"rewards": torch.tensor([0.0, 1.0, 1.0, 3.0]), "num_generations": 2}
    with torch.inference_mode(called_inside):
        out = call(batch, **options)
    with torch.inference_mode():
        names = [dict(getattr(out, table)) for table in ("metrics", "sequences", "groups")]
        names.append({name: x for name, (x, _) in out.metric_sums.items()})
    for table in names:
        for name, x in table.items():
            assert not x.is_inference(), name
            x.add_(torch.ones((), requires_grad=True).detach())


def test_a_used_configuration_is_still_plain_data():
    config = gk.GRPOConfig(beta=0.0, epsilon_high=0.28)
    before = json.dumps(dataclasses.asdict(config))
    output(config=config)
    assert json.dumps(dataclasses.asdict(config)) == before
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), dataclasses.replace(config)):
        assert other == config and not other.derived
        assert torch.equal(output(config=other).loss, output(config=config).loss)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_logits_whose_rows_share_memory_are_not_replaced(backend):
    batch = off_policy(make_batch(3))
    row = torch.randn(67, requires_grad=True)

    def loss(inplace):
        row.grad = None
        logits = (row * 1).expand(4, 6, 67)
        given = batch.options | {"inplace": inplace, "backend": backend}
        found = gk.grpo_loss_from_logits(logits, batch.ids, batch.advantages, **given).loss
        found.backward()
        return found.detach(), row.grad

    assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(loss(True), loss(False), strict=True))


@pytest.mark.parametrize("options", [{"kl_estimator": "k2", "beta": 0.1}, {"surrogate": "ipo"}])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_padding_scored_as_an_impossible_id_changes_no_gradient(backend, options):
    """With static shapes padding is computed as id 0, which a bias of -inf excludes."""
    batch = off_policy(make_batch(3, masked=True, bias=True))
    batch.bias[0] = -torch.inf
    ref = batch.options["old_logps"] + 0.1
    rollout = {"rollout_logps": batch.options["old_logps"]} if "surrogate" in options else {"ref_logps": ref}
    own = leaves(dataclasses.replace(batch, ids=batch.ids.clamp(min=1)), "weight", "bias")
    call(own, gk.GRPOConfig(static_shapes=True, **options), backend, **rollout).loss.backward()
    assert own.hidden.grad.isfinite().all() and own.hidden.grad.any()

"""Micro-batches, ranks and groups add up to one big batch; gradients that are added to a buffer."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import (
    Batch,
    assert_close,
    call,
    call_counter,
    fused,
    leaves,
    make_batch,
    make_sampling_mask,
    off_policy,
    reference,
)

import grpo_kernels as gk
from grpo_kernels.config import AGGREGATIONS
from grpo_kernels.head.lm_head import LMHead

pytestmark = pytest.mark.each_value
PARTS = slice(0, 1), slice(1, 4)


def part_of(batch: Batch, rows: slice) -> Batch:
    options = {name: x[rows] for name, x in batch.options.items()}
    return dataclasses.replace(
        batch, hidden=batch.hidden[rows], ids=batch.ids[rows], advantages=batch.advantages[rows], options=options
    )


@pytest.mark.parametrize("own_normalizer", [False, True])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_add_up_to_the_big_batch(aggregation, own_normalizer, backend):
    """With an entropy bonus too: under a normalizer of its own, where both are counts of tokens, or with the weights of
    the aggregation."""
    by_tokens = aggregation in ("token_mean", "num_items")
    config = gk.GRPOConfig(
        aggregation=aggregation, beta=0.1, entropy_coef=torch.tensor(0.05) if own_normalizer else 0.02,
        entropy_aggregation=None if own_normalizer or by_tokens else "loss",
        max_completion_length=9 if aggregation == "fixed_length" else None,
    )  # fmt: skip
    batch = off_policy(make_batch(1, masked=True))
    batch.options["completion_mask"][0, 0] = False
    tokens = batch.options["completion_mask"].sum()
    normalizers = {"normalizer": tokens if by_tokens else 36 if aggregation == "fixed_length" else 4}
    if own_normalizer:
        normalizers["entropy_normalizer"] = tokens
    whole = fused(batch, config, backend)
    runs = [fused(part_of(batch, rows), config, backend, **normalizers) for rows in PARTS]
    for run, rows in zip(runs, PARTS, strict=True):
        assert torch.allclose(run.grads["hidden"], whole.grads["hidden"][rows], atol=1e-7)
    assert torch.allclose(sum(run.loss for run in runs), whole.loss, atol=1e-6)
    assert torch.allclose(sum(run.grads["weight"] for run in runs), whole.grads["weight"], atol=1e-6)
    if own_normalizer:
        policy = sum(run.metrics["policy_loss"] for run in runs)
        without = fused(batch, dataclasses.replace(config, entropy_coef=0.0), backend)
        assert torch.allclose(policy, without.loss, atol=1e-6) and not torch.allclose(policy, whole.loss, atol=1e-2)
        assert torch.allclose(whole.metrics["policy_loss"], without.loss, atol=1e-6)
        assert "policy_loss" not in without.metrics


SMALL = [  # argument, its value, what it divides by
    ("num_items_in_batch", 1, 1),
    ("num_items_in_batch", torch.tensor(1.5), 1.5),
    ("num_items_in_batch", torch.tensor(2), 2),
    ("normalizer", 0.25, 0.25),
    ("normalizer", torch.tensor(0.25), 0.25),
]


def test_small_denominators(backend):
    config = gk.GRPOConfig(beta=0.1, entropy_coef=0.01)
    batch = off_policy(make_batch(1, masked=True, bias=True))
    one = fused(batch.with_options(normalizer=1), config, backend)
    assert one.loss.abs() > 0.1
    for name, value, divisor in SMALL:
        given = batch.with_options(**{name: value})
        found = fused(given, config, backend)
        assert_close(found, reference(given, config))
        assert torch.allclose(found.loss * divisor, one.loss, rtol=1e-6)
        for leaf, x in one.grads.items():
            assert x.any() and torch.allclose(found.grads[leaf] * divisor, x, rtol=1e-5, atol=1e-7), leaf


def test_groups_add_up_and_follow_their_names(backend):
    config = gk.GRPOConfig(beta=0.1, entropy_coef=0.01, aggregation="seq_mean", importance_sampling_level="sequence")
    batch = off_policy(make_batch(2, sequences=6, masked=True))
    rewards, names = torch.tensor([0.0, 1.0, 2.0, 5.0, 5.0, 5.0]), torch.tensor([7, 7, 7, -3, -3, -3])

    def run(order):
        given = dataclasses.replace(part_of(batch, order), advantages=None)
        return call(given, config, backend, rewards=rewards[order], group_ids=names[order])

    out, shuffled = run(torch.arange(6)), run(torch.tensor([4, 2, 0, 5, 1, 3]))
    assert torch.allclose(out.groups["loss"].sum(), out.loss, atol=1e-6)
    assert torch.allclose(out.loss, shuffled.loss, atol=1e-6)
    assert set(out.groups) == {"reward_mean", "reward_std", "loss", "kl", "clip_ratio", "tokens"}
    for name, x in out.groups.items():
        assert x.shape == (2,) and torch.allclose(x, shuffled.groups[name], atol=1e-6), name
    assert torch.equal(out.groups["reward_mean"], torch.tensor([5.0, 1.0]))  # ascending ids: -3, 7
    assert torch.equal(out.groups["reward_std"], torch.tensor([0.0, 1.0]))
    assert out.groups["tokens"].tolist() == [
        int(batch.options["completion_mask"][names == name].sum()) for name in (-3, 7)
    ]
    adjacent = call(dataclasses.replace(batch, advantages=None), config, backend, rewards=rewards, num_generations=3)
    assert torch.equal(adjacent.groups["loss"].flip(0), out.groups["loss"])


def test_metric_sums_of_micro_batches_add_up(backend):
    """Those of a sampling mask and of a sampling engine too, over tokens and over sequences."""
    batch = off_policy(make_batch(3)).with_options(sampling_mask=make_sampling_mask((4, 6), 67))
    rollout = batch.options["old_logps"] + torch.linspace(-0.3, 0.3, 24).view(4, 6)
    batch = batch.with_options(rollout_logps=rollout, rollout_weights=torch.linspace(0.0, 1.5, 24).view(4, 6))
    whole, *parts = (call(part, backend=backend) for part in (batch, *(part_of(batch, rows) for rows in PARTS)))
    for name, (total, count) in whole.metric_sums.items():
        added = sum(p.metric_sums[name][0] for p in parts)
        assert torch.allclose(added, total, atol=1e-5, equal_nan=name == "sampling_mask/kept_mass"), name
        assert sum(p.metric_sums[name][1] for p in parts) == count
        assert count == (4 if "ratio_sequence" in name else 24) or ("sampling_mask" in name and count > 0)
        assert torch.allclose(whole.metrics[name], total / count, equal_nan=True)
    clipped = whole.metrics["clip_ratio/low"] + whole.metrics["clip_ratio/high"]
    assert torch.allclose(whole.metrics["clip_ratio/region"], clipped) and clipped > 0


# --- accumulate_into ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "level"), [(torch.float32, "token"), (torch.bfloat16, "sequence"), (torch.float16, "token")]
)
def test_the_weights_gradient_is_added_to_a_buffer(dtype, level, backend):
    """Of two batches, with a grad_output that is not 1, beside what the buffer holds."""
    config = gk.GRPOConfig(importance_sampling_level=level, chunk_rows=8)
    total = torch.full((67, 24), 0.5)
    expected, exact = total.clone(), total.double()
    for seed, factor in ((2, 1.0), (3, -3.0)):
        batch = off_policy(make_batch(seed, sequences=6)).head_as(dtype)
        own, plain = leaves(batch), fused(batch, config, backend)
        (call(own, config, backend, accumulate_into=total).loss * factor).backward()
        assert own.weight.grad is None
        assert torch.allclose(own.hidden.grad.float(), factor * plain.grads["hidden"].float(), rtol=1e-2, atol=1e-6)
        expected += factor * plain.grads["weight"].float()
        exact += factor * reference(batch, config).grads["weight"]
    assert torch.allclose(total, expected, rtol=0, atol=1e-3 if dtype == torch.float16 else 1e-6)
    assert (total - exact).abs().max() <= (2e-6 if dtype == torch.float32 else 2e-2)


def test_each_backward_adds(backend):
    batch, total = leaves(make_batch(1)), torch.zeros(67, 24)
    out = call(batch, backend=backend, accumulate_into=total)
    assert not total.any()
    out.loss.backward(retain_graph=True)
    once = total.clone()
    out.loss.backward()
    assert once.any() and torch.equal(total, 2 * once) and batch.weight.grad is None
    with torch.no_grad(), pytest.raises(ValueError, match="accumulate_into has no effect under no_grad"):
        call(batch, backend=backend, accumulate_into=total)
    assert torch.equal(total, 2 * once)


def test_no_matrix_like_the_weight_is_made_in_the_backward():
    batch, total = make_batch(0, sequences=4, width=512, vocab=20_000).head_as(torch.bfloat16), torch.zeros(20_000, 512)
    loss = call(leaves(batch), backend="cpu", accumulate_into=total).loss * 2.0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss.backward()
    assert total.any() and max(event.self_cpu_memory_usage for event in profile.events()) <= 4 * 2**22


# --- what autograd does not see ---------------------------------------------------------------------------------------


def loss_of(name, batch, hidden, weight, backend):
    if name == "fused_grpo_loss":
        return gk.fused_grpo_loss(hidden, weight, batch.ids, batch.advantages, backend=backend).loss
    return gk.fused_policy_loss(hidden, weight, batch.ids, lambda chunk: chunk.logps.mean(), backend=backend)


@pytest.mark.parametrize("name", ["fused_grpo_loss", "fused_policy_loss"])
def test_hooks_on_saved_tensors_do_not_move_gradients(name, backend):
    """save_on_cpu and its like would copy a (V, H) gradient to the host and back."""
    batch, moved = leaves(make_batch(0)), []

    def pack(x):
        moved.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = loss_of(name, batch, batch.hidden, batch.weight, backend)
    loss.backward()
    assert moved == [] and batch.hidden.grad.any() and batch.weight.grad.any()


@pytest.mark.parametrize("name", ["fused_grpo_loss", "fused_policy_loss"])
def test_checkpointing_computes_a_loss_that_comes_last_once(monkeypatch, name, backend):
    """Recomputation ends where everything saved is there again: nothing of the loss is."""
    batch, products = leaves(make_batch(0)), []
    call_counter(monkeypatch, LMHead, "logits", products, lambda self, rows: rows.stop - rows.start)
    given = batch.hidden, batch.weight
    expected = torch.autograd.grad(loss_of(name, batch, *given, backend), given)
    products.clear()

    def step(hidden, weight):
        return loss_of(name, batch, torch.tanh(hidden).atanh(), weight, backend)

    loss = torch.utils.checkpoint.checkpoint(step, *given, use_reentrant=False)
    found = torch.autograd.grad(loss, given)
    assert sum(products) == 24
    for x, y in zip(found, expected, strict=True):
        assert torch.allclose(x, y, rtol=1e-2, atol=1e-4)

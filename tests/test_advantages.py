"""Advantages from rewards, per group and per step; importance weights of a sampling engine; the entropy quantile."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.names import ADVANTAGE_BASELINES, ADVANTAGE_SCALES
from grpo_kernels.rewards import group_statistics, resolve_groups


def test_defaults_are_trls():
    r = torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert torch.allclose(gk.group_advantages(r, num_generations=4), (r - 0.5) / (r.std() + 1e-4))


LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def slow(rewards: Tensor, names: list[int], scale: str, baseline: str, ddof: int, eps: float) -> list[float]:
    everything = [x for x in rewards.tolist() if not math.isnan(x)]
    out = []
    for i, x in enumerate(rewards.tolist()):
        group = [y for y, n in zip(rewards.tolist(), names, strict=True) if n == names[i] and not math.isnan(y)]
        if math.isnan(x):
            out.append(0.0)
            continue
        centre = {"mean": np.mean(group), "none": 0.0, "pass_at_k": x}.get(baseline)
        if baseline == "pass_at_k" and len(group) > 1 and x == max(group):
            centre = sorted(group)[-2]
        if baseline == "length_weighted":
            pairs = [
                (y, n) for y, n, name in zip(rewards.tolist(), LENGTHS, names, strict=True)
                if name == names[i] and not math.isnan(y)
            ]  # fmt: skip
            centre = sum(y * n for y, n in pairs) / sum(n for _, n in pairs)
        if baseline == "leave_one_out":
            centre = (sum(group) - x) / (len(group) - 1) if len(group) > 1 else x
        spread = {"group": group, "batch": everything}.get(scale)
        divisor = 1.0 if spread is None else (np.std(spread, ddof=ddof) if len(spread) > ddof else 0.0) + eps
        if scale == "mean":
            divisor = np.mean(group) if np.mean(group) > 0 else math.inf
        out.append((x - centre) / divisor)
    return out


def test_advantages_beyond_float32_are_refused():
    for groups in (dict(num_generations=3), dict(group_ids=torch.zeros(3, dtype=torch.int64))):
        rewards = torch.tensor([3e38, -3e38, -3e38])
        assert gk.group_advantages(rewards, **groups).isfinite().all()
        with pytest.raises(ValueError, match=r"advantages\[0\] = inf; expected a finite number: smaller rewards"):
            gk.group_advantages(rewards, scale="none", **groups)
    with pytest.raises(ValueError, match=r"advantages\[1\] = inf; expected a finite number"):
        gk.combine_advantages(torch.tensor([[1.0], [1e38]]), [1e4], mode="sum", whiten="none")


def test_rewards_beyond_float32_are_refused():
    """float64 holds the squares of others."""
    rewards = torch.tensor([1.0, 1e200], dtype=torch.float64)
    expected = "inf; expected a finite number, or NaN for no verdict, in float32"
    for function, name, given in (
        (gk.group_advantages, r"rewards\[1\]", (rewards,)),
        (gk.combine_advantages, r"rewards\[1, 0\]", (rewards[:, None],)),
        (gk.process_advantages, r"step_rewards\[1, 0\]", (rewards[:, None], torch.zeros(2, 1).long(), 3)),
    ):
        with pytest.raises(ValueError, match=f"{name} = {expected}"):
            function(*given, num_generations=2)
    largest = torch.tensor([3e38, -3e38], dtype=torch.float64)
    torch.testing.assert_close(gk.group_advantages(largest, num_generations=2), largest / largest.std())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("baseline", ADVANTAGE_BASELINES)
@pytest.mark.parametrize("scale", ADVANTAGE_SCALES)
def test_groups_of_any_order_and_size(scale, baseline, ddof, dtype):
    names = [5, -2, 5, 9, -2, 5, 9, -2, -2, 9, 5]
    given = dict(group_ids=torch.tensor(names), scale=scale, baseline=baseline, ddof=ddof, eps=1e-4)
    given["lengths"] = torch.tensor(LENGTHS) if baseline == "length_weighted" else None
    for unscored in ([3], [3, 4, 9], [3, 6, 9], range(11)):  # which leaves one of the 9, or none, or nothing at all
        rewards = torch.randn(11, dtype=dtype)
        rewards[[*unscored]] = math.nan
        found = gk.group_advantages(rewards, **given)
        assert found.dtype == dtype and not found[[*unscored]].any()
        expected = torch.tensor(slow(rewards, names, scale, baseline, ddof, 1e-4), dtype=torch.float64)
        assert torch.allclose(found.double(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", [name for name in ADVANTAGE_BASELINES if name != "none"])
def test_equal_rewards_give_exactly_zero(scale, baseline):
    """The rounded mean of seven equal numbers need not equal them."""
    lengths = torch.arange(21) if baseline == "length_weighted" else None
    options = dict(scale=scale, baseline=baseline, ddof=1, eps=1e-8, lengths=lengths)
    for value in (0.1, 1.0, -3.3333, 1e8, 1e-30):
        rewards = torch.full((21,), value)
        rewards[14:] = torch.arange(7.0)
        groups = resolve_groups(21, 7, None, rewards)
        for r in (rewards, rewards.clone().index_fill_(0, torch.tensor([3]), math.nan)):
            a, mean, std = group_statistics(r, groups, **options)
            assert not a[:14].any() and a[14:].any() and not std[:2].any()
            assert mean[0] == mean[1] == rewards[0]
    values = torch.tensor([0.1, 1 / 3, -2.7, 1e17 / 3], dtype=torch.float64)
    assert any(x.expand(7).sum() / 7 != x for x in values)
    assert not gk.group_advantages(values.repeat_interleave(7), num_generations=7, scale=scale).any()


def test_rewards_of_other_types():
    expected = gk.group_advantages(torch.tensor([0.0, 1.0]), num_generations=2)
    for dtype in (torch.int64, torch.bfloat16, torch.float16):
        found = gk.group_advantages(torch.tensor([0, 1]).to(dtype), num_generations=2)
        assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_a_group_of_one_has_an_advantage_without_a_baseline_alone():
    """Anything else of the group itself would be 0; beside larger groups named by ids that is right."""
    rewards, ids = torch.tensor([2.0, 3.0]), torch.tensor([0, 1])
    assert torch.equal(gk.group_advantages(rewards, num_generations=1, scale="none", baseline="none"), rewards)
    for baseline in ADVANTAGE_BASELINES:
        options = dict(baseline=baseline, scale="none", ddof=0)
        options |= {"lengths": torch.ones(2)} if baseline == "length_weighted" else {}
        if baseline != "none":
            with pytest.raises(ValueError, match="a group of one completion has"):
                gk.group_advantages(rewards, num_generations=1, **options)
        if baseline == "leave_one_out":
            with pytest.raises(
                ValueError, match="a group of one completion has no other one: baseline='leave_one_out'"
            ):
                gk.group_advantages(rewards, group_ids=ids, **options)
        else:
            gk.group_advantages(rewards, group_ids=ids, **options)


# --- process supervision ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1.0, 0.7, 0.0])
def test_process_advantages_against_a_loop(gamma):
    batch, steps, length = 6, 4, 12
    g = torch.Generator().manual_seed(3)
    rewards = torch.randn(batch, steps, generator=g)
    ends = torch.stack([torch.randperm(length, generator=g)[:steps].sort().values for _ in range(batch)])
    for row, absent in enumerate((0, 1, 2, 3, 4, 1)):
        rewards[row, steps - absent :] = math.nan
    normalised = torch.tensor(
        slow(rewards.reshape(-1), [i // (2 * steps) for i in range(batch * steps)], "group", "mean", 1, 1e-4)
    ).view(batch, steps)
    expected = torch.zeros(batch, length)
    for i in range(batch):
        for t in range(length):
            following = [k for k in range(steps) if not rewards[i, k].isnan() and ends[i, k] >= t]
            expected[i, t] = sum(gamma**n * normalised[i, k] for n, k in enumerate(following))
    found = gk.process_advantages(rewards, ends, length, num_generations=2, gamma=gamma)
    assert found.shape == (batch, length) and torch.allclose(found, expected, atol=1e-5)
    named = gk.process_advantages(rewards, ends, length, group_ids=torch.arange(6) // 2, gamma=gamma)
    assert torch.equal(named, found)


# --- lengths, several rewards, entropy quantile -----------------------------------------------------------------------


def test_the_lengths_of_a_call_are_those_of_its_mask():
    """Packed or not: the baseline of OPO inside of the call is that of the lengths outside."""
    rewards, mask = torch.randn(4), torch.arange(5) < torch.tensor([5, 2, 1, 4])[:, None]
    expected = gk.group_advantages(
        rewards, num_generations=2, scale="none", baseline="length_weighted", lengths=mask.sum(1)
    )
    config = gk.GRPOConfig(advantage_scale="none", advantage_baseline="length_weighted")
    hidden, weight, ids = torch.randn(4, 5, 8), torch.randn(11, 8), torch.randint(11, (4, 5))
    given = dict(rewards=rewards, num_generations=2, config=config)
    found = gk.fused_grpo_loss(hidden, weight, ids, completion_mask=mask, **given).advantages
    offsets = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    flat = gk.fused_grpo_loss(hidden[mask], weight, ids[mask], cu_seqlens=offsets, **given).advantages
    for x in (found, flat):
        torch.testing.assert_close(x.flatten(), expected)


@pytest.mark.parametrize("whiten", ["batch", "tokens", "none"])
@pytest.mark.parametrize("mode", ["normalize_then_sum", "sum"])
def test_several_rewards_against_a_loop(mode, whiten):
    """GDPO and REINFORCE++, with rewards that were not given and a completion without any."""
    rewards, weights = torch.randn(6, 2, dtype=torch.float64), [0.3, 2.0]
    rewards[1, 0] = rewards[4, 0] = rewards[4, 1] = math.nan
    mask = torch.arange(7) < torch.tensor([7, 2, 3, 1, 5, 4])[:, None]
    groups = {"num_generations": 3} if mode == "normalize_then_sum" else {}
    found = gk.combine_advantages(
        rewards, weights, mode=mode, whiten=whiten, completion_mask=mask if whiten == "tokens" else None, **groups
    )
    parts = rewards.clone()
    if groups:
        for k in range(2):
            parts[:, k] = torch.tensor(slow(rewards[:, k], [0, 0, 0, 1, 1, 1], "group", "mean", 1, 1e-4))
    total = parts.nan_to_num(nan=0.0) @ torch.tensor(weights, dtype=torch.float64)
    known = torch.arange(6) != 4
    counted = total.repeat_interleave(mask.sum(1) * known if whiten == "tokens" else known.long())
    expected = total if whiten == "none" else (total - counted.mean()) / (counted.std() + 1e-4)
    torch.testing.assert_close(found.double(), torch.where(known, expected, 0.0), rtol=1e-5, atol=1e-6)


def test_entropy_quantile_interpolates_as_torch_does():
    for count in (1, 2, 7, 100):
        entropy, mask = torch.rand(count, dtype=torch.float64), torch.rand(count) < 0.7
        mask[0] = True
        for top in (0.01, 0.2, 0.5, 1.0):
            expected = entropy[mask].quantile(1 - top)
            assert gk.entropy_quantile(entropy, mask, top=top).item() == pytest.approx(expected.item(), rel=1e-14)


def test_entropy_quantile_of_a_large_batch_and_of_none():
    """torch.quantile takes 2^24 elements at most; a rank may have no tokens."""
    entropy, mask = torch.zeros(2**24 + 2, dtype=torch.float16), torch.zeros(2**24 + 2, dtype=torch.int8)
    entropy[-5:], mask[-5:] = torch.arange(5.0), 1
    assert gk.entropy_quantile(entropy, mask, top=0.25) == 3
    assert gk.entropy_quantile(entropy[-5:], top=1.0) == 0
    assert gk.entropy_quantile(torch.zeros(0)).isnan() and gk.entropy_quantile(entropy[:3], mask[:3]).isnan()

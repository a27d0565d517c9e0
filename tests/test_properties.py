"""Hypothesis over shapes, masks, lengths and packed splits: fused equals reference, packed equals padded."""

from __future__ import annotations

import dataclasses

import torch
from helpers import fused, make_batch, off_policy, reference, tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import grpo_kernels as gk

repeatable = settings(
    deadline=None, max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)  # fmt: skip
sizes = st.integers(1, 5)
seeds = st.integers(0, 2**16)
CONFIGS = (
    gk.GRPOConfig(beta=0.1, aggregation="seq_mean"),
    gk.GRPOConfig(importance_sampling_level="sequence", aggregation="token_mean", entropy_coef=0.01),
    gk.GRPOConfig(surrogate="sapo", importance_sampling_level="sequence_sum", aggregation="seq_sum"),
    gk.GRPOConfig(surrogate="vespo", off_policy_mask_threshold=10.0),
)
configs = st.sampled_from(CONFIGS)
backends = st.sampled_from(("cpu", "torch"))


@st.composite
def batches(draw):
    """Any small batch with right padding of any lengths, or any mask; logits stay small: float32 stays exact."""
    count, length = draw(sizes), draw(sizes)
    shape = dict(sequences=count, length=length, width=draw(st.integers(1, 20)), vocab=draw(st.integers(1, 70)))
    batch = make_batch(draw(seeds), bias=draw(st.booleans()), per_token=draw(st.booleans()), **shape)
    batch.weight *= 0.3
    lengths = torch.tensor(draw(st.lists(st.integers(0, length), min_size=count, max_size=count)))
    batch.options["completion_mask"] = torch.arange(length) < lengths[:, None]
    if draw(st.booleans()):
        mask = draw(st.lists(st.booleans(), min_size=count * length, max_size=count * length))
        batch.options["completion_mask"] = torch.tensor(mask).view(count, length)
    # Ratios of 1.05 or so: inside every clip range, away from every kink.
    return off_policy(batch, spread=0.02, seed=draw(seeds)) if draw(st.booleans()) else batch


def with_reference(batch, config):
    """With the log-probabilities that the configuration needs."""
    needed = {"ref_logps": config.beta, "old_logps": config.off_policy_mask_threshold}
    missing = [name for name, need in needed.items() if need and name not in batch.options]
    return batch.with_options(**{name: torch.full(batch.ids.shape, -2.0) for name in missing})


def assert_small_errors(found, exact):
    """Absolute, on the scale of the whole: with V = 1 or a masked batch every gradient is 0."""
    for name, x in tensors(exact).items():
        size = max(1.0, x.abs().max().item()) if x.numel() else 1.0
        assert (tensors(found)[name].double() - x.double()).abs().max() <= 5e-6 * size, name


@repeatable
@given(batches(), configs, backends, st.one_of(st.none(), sizes))
def test_fused_equals_the_reference(batch, config, backend, rows):
    batch = with_reference(batch, config)
    assert_small_errors(fused(batch, dataclasses.replace(config, chunk_rows=rows), backend), reference(batch, config))


@repeatable
@given(batches(), st.data(), configs)
def test_packed_splits_equal_the_reference(batch, data, config):
    """Any cut of N tokens into sequences, empty ones included; there may be N of them."""
    batch = with_reference(batch, config)
    count = batch.ids.numel()
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=5)))
    options = {name: x.reshape(-1) for name, x in batch.options.items()}
    options["cu_seqlens"] = torch.tensor(
        [0, *cuts, count], dtype=data.draw(st.sampled_from((torch.int32, torch.int64)))
    )
    flat = dataclasses.replace(
        batch, hidden=batch.hidden.flatten(0, 1), ids=batch.ids.reshape(-1), options=options,
        advantages=torch.linspace(-1, 2, len(cuts) + 1)[:, None],
    )  # fmt: skip
    assert_small_errors(fused(flat, config), reference(flat, config))

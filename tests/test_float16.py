"""float16 under a loss scale: as exact as eager, however small the weight of a token is.

A CPU computes float16 inputs in float32, a GPU has float16 gradients of logits. `logits_dtype=torch.float16` takes a
CPU through the code of the second: a power of two in the weights, taken out in float32 by the backward.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import Batch, call, leaves, make_batch, off_policy, relative
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.reference import reference_loss_from_logits

SCALE = 65536.0  # where torch.amp.GradScaler starts
LOGITS = {"float32 logits": None, "float16 logits": torch.float16}
Gradients = dict[str, Tensor]


def half_batch(vocab: int = 512) -> Batch:
    batch = make_batch(0, sequences=4, length=8, width=64, vocab=vocab)
    return off_policy(batch, spread=0.05).head_as(torch.float16)


def gradients(loss: Tensor, batch: Batch, scale: float = SCALE) -> Gradients:
    """Of the loss, from what the backward of `scale` times the loss gave."""
    (scale * loss).backward()
    return {"hidden": batch.hidden.grad.double() / scale, "weight": batch.weight.grad.double() / scale}


def ours(batch: Batch, config: gk.GRPOConfig, backend: str, scale: float = SCALE, **options) -> Gradients:
    own = leaves(batch)
    return gradients(call(own, config, backend, **options).loss, own, scale)


def eager(batch: Batch, config: gk.GRPOConfig, dtype: torch.dtype, scale: float = SCALE, **options) -> Gradients:
    """The lm_head in `dtype`, the loss in float32 or better, as a trainer without this package computes it."""
    own = leaves(batch.head_as(dtype))
    logits = own.hidden @ own.weight.T
    wide = torch.promote_types(dtype, torch.float32)
    given = {name: x.to(wide) if isinstance(x, Tensor) else x for name, x in {**batch.options, **options}.items()}
    config = dataclasses.replace(config, logits_dtype=None)
    out = reference_loss_from_logits(logits.to(wide), batch.ids, batch.advantages.to(wide), config=config, **given)
    return gradients(out.loss, own, scale)


@pytest.mark.parametrize("num_items", [128, 262_144])
@pytest.mark.parametrize("logits", LOGITS)
def test_small_weights_under_a_loss_scale(num_items, logits, backend):
    batch, config = half_batch(vocab=8192), gk.GRPOConfig(logits_dtype=LOGITS[logits])
    given = {"num_items_in_batch": num_items}
    exact, usual = (eager(batch, config, dtype, **given) for dtype in (torch.float64, torch.float16))
    for name, x in ours(batch, config, backend, **given).items():
        error, allowed = relative(x, exact[name]), relative(usual[name], exact[name])
        assert error <= 2 * allowed + 1e-6, f"{name}: {error:.2e}, eager {allowed:.2e}"


WAYS = {
    "fused": gk.GRPOConfig(chunk_rows=8),
    "fused, entropy bonus": gk.GRPOConfig(chunk_rows=8, entropy_coef=0.01),
    "staged": gk.GRPOConfig(importance_sampling_level="sequence"),
    "recompute": gk.GRPOConfig(importance_sampling_level="sequence", chunk_rows=6),
    "whole completions": gk.GRPOConfig(importance_sampling_level="sequence_sum"),
    "KL": gk.GRPOConfig(beta=0.1),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_through_the_engine(way, backend):
    """The relative error does not depend on the number of items, which a range that is too narrow would make it do."""
    batch, config = half_batch(), dataclasses.replace(WAYS[way], logits_dtype=torch.float16)
    exact = eager(batch, config, torch.float64, num_items_in_batch=1.0)
    errors = {}
    for items, scale in ((1.0, 1.0), (262_144.0, SCALE)):
        found = ours(batch, config, backend, scale, num_items_in_batch=items)
        errors[items] = {name: relative(items * x, exact[name]) for name, x in found.items()}
    for name, error in errors[262_144.0].items():
        assert error <= 1.1 * errors[1.0][name] + 1e-5 and error < 0.02, (name, errors)


def given_logits(batch: Batch, items: float, backend: str) -> Gradients:
    own = leaves(batch)
    logits = own.hidden @ own.weight.T
    out = gk.grpo_loss_from_logits(
        logits, batch.ids, batch.advantages, num_items_in_batch=items, inplace=True, backend=backend, **batch.options
    )
    return gradients(out.loss, own)


def own_loss(batch: Batch, items: float, backend: str) -> Gradients:
    own = leaves(batch)

    def loss_fn(chunk):
        ratio = (chunk.logps - chunk.tokens(batch.options["old_logps"])).exp()
        return -(ratio * chunk.sequences(batch.advantages)).sum() / items

    loss = gk.fused_policy_loss(own.hidden, own.weight, batch.ids, loss_fn, chunk_rows=8, backend=backend)
    return gradients(loss, own)


def from_logps(batch: Batch, items: float, backend: str) -> Gradients:
    own = leaves(batch)
    logps, _ = gk.fused_logps(own.hidden, own.weight, batch.ids, backend=backend)
    ratio = (logps - batch.options["old_logps"]).exp()
    return gradients(-(ratio * batch.advantages[:, None]).sum() / items, own)


@pytest.mark.parametrize("function", [given_logits, own_loss, from_logps])
def test_every_differentiable_function(function, backend):
    batch = half_batch()
    allowed = function(batch, 64.0, backend)
    for name, x in function(batch, 65_536.0, backend).items():
        assert relative(1024 * x, allowed[name]) <= 2e-3, name


OUTLIERS = {  # what has no bound: a ratio where A < 0, the slope of k3, the sum of a sequence, a cold token
    "ratio": (gk.GRPOConfig(chunk_rows=8), {"old_logps": 11.5}),
    "KL": (gk.GRPOConfig(chunk_rows=8, beta=0.04), {"ref_logps": -10.0}),
    "whole completions": (gk.GRPOConfig(importance_sampling_level="sequence_sum", chunk_rows=16), {"old_logps": 10.0}),
    "recompute": (gk.GRPOConfig(importance_sampling_level="sequence_sum", chunk_rows=6), {"old_logps": 10.0}),
    "temperature": (gk.GRPOConfig(chunk_rows=8), {"temperature": 2e-3}),
}


@pytest.mark.parametrize(  # first or last sequence: before or after most chunks
    ("name", "place"), [("ratio", 0), *((name, 3) for name in OUTLIERS), ("recompute", 0)]
)
def test_one_token_far_away(name, place, backend):
    """Its gradient is finite at a loss scale of 1, as in eager PyTorch."""
    config, moved = OUTLIERS[name]
    batch, given = half_batch(), {"num_items_in_batch": 32.0}
    batch.advantages[place] = -1.0
    for option, distance in moved.items():
        if option == "temperature":
            temperature = torch.ones(4, 8)
            temperature[place, 2] = distance
            config = dataclasses.replace(config, temperature=temperature)
        else:
            batch.options[option] = batch.options[option].clone()
            batch.options[option][place, 2] -= distance
    config = dataclasses.replace(config, logits_dtype=torch.float16)
    exact, usual = (eager(batch, config, dtype, scale=1.0, **given) for dtype in (torch.float64, torch.float16))
    for key, x in ours(batch, config, backend, scale=1.0, **given).items():
        assert usual[key].isfinite().all() and x.isfinite().all(), key
        assert relative(x, exact[key]) <= 2 * relative(usual[key], exact[key]) + 1e-6, key


@pytest.mark.parametrize("logits", LOGITS)
def test_the_scale_does_not_overflow_sums_over_tokens(logits, backend):
    """2,048 tokens push one entry of dweight the same way: 4 or more per token times 100 of the hidden state."""
    hidden, weight = torch.full((1, 2048, 8), 100.0).half(), torch.zeros(16, 8).half()
    batch = leaves(Batch(hidden, weight, torch.zeros(1, 2048).long(), torch.ones(1)))
    call(batch, gk.GRPOConfig(logits_dtype=LOGITS[logits]), backend).loss.backward()
    expected = torch.full((16, 8), 100 / 16)
    expected[0] = -100 * 15 / 16
    assert torch.allclose(batch.weight.grad.float(), expected, rtol=2e-3)

"""How many kernels a step would launch on a GPU: operators of torch that compute, and Triton's own.

Counted on a CPU, where Triton's kernels run in the interpreter. A product is one launch, as is the copy of the counts.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import make_batch, make_sampling_mask, off_policy
from torch.profiler import ProfilerActivity, profile
from triton.runtime import interpreter

import grpo_kernels as gk
from grpo_kernels.contract import TokenInputs
from grpo_kernels.engine import logps_op, loss_op, shared

KERNEL = "a Triton kernel"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")
# Operators that make or look at a tensor without a kernel of the device.
FREE = {
    *("empty", "empty_strided", "empty_like", "as_strided", "view", "_unsafe_view", "reshape", "_reshape_alias"),
    *("slice", "select", "narrow", "split", "split_with_sizes", "unbind", "t", "transpose", "expand", "unsqueeze"),
    *("squeeze", "detach", "alias", "resize_", "resolve_conj", "resolve_neg", "lift_fresh", "to", "contiguous"),
    *("promote_types", "result_type", "is_nonzero", "numpy_T", "permute", "unflatten", "flatten", "chunk"),
}
# Those whose work another operator inside them does.
OUTER = {"zeros", "zeros_like", "clone", "_to_copy", "item", "ones_like", "matmul", "full", "new_zeros", "full_like"}


def launches(step) -> list[str]:
    """What would be launched, in order."""
    step()
    found: list[tuple[int, str]] = []
    marked = interpreter.GridExecutor.__call__

    def call(self, *arguments, **options):
        with torch.profiler.record_function(KERNEL):
            return marked(self, *arguments, **options)

    interpreter.GridExecutor.__call__ = call
    try:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            step()
    finally:
        interpreter.GridExecutor.__call__ = marked
    kernels = [(e.time_range.start, e.time_range.end) for e in profiler.events() if e.name == KERNEL]
    for event in profiler.events():
        start = event.time_range.start
        name = event.name.removeprefix("aten::")
        inside = any(first <= start < last for first, last in kernels)  # what the interpreter does with torch
        if event.name == KERNEL:
            found.append((start, KERNEL))
        elif event.name.startswith("aten::") and not inside and name not in FREE | OUTER:
            found.append((start, event.name))
    return [name for _, name in sorted(found)]


@pytest.mark.parametrize("masked", [False, True])
def test_launches_of_a_step_of_one_chunk(monkeypatch, masked):
    """The loss with its gradients; `backward` hands out what is there."""
    for name in ("check_values", "check_token_values"):  # what a GPU is not asked for
        monkeypatch.setattr(f"grpo_kernels.engine.loss_op.{name}", lambda *given: None)
    batch = off_policy(make_batch(3, masked=masked))
    hidden, weight = batch.hidden.requires_grad_(), batch.weight.requires_grad_()
    config = gk.GRPOConfig.preset("dapo")
    seen = launches(
        lambda: gk.fused_grpo_loss(
            hidden, weight, batch.ids, batch.advantages, **batch.options, config=config, backend="triton"
        )
    )
    before = next(i for i, name in enumerate(seen) if name in PRODUCTS)
    assert before <= 6, seen
    assert len(seen) <= 14, seen
    assert sum(name in PRODUCTS for name in seen) == 3


@pytest.mark.parametrize(
    ("device", "tokens", "changes", "every_row"),
    [
        ("cuda", 256, {}, True),
        ("cuda", 257, {}, False),
        ("cpu", 8, {}, False),  # its products are bound by arithmetic
        ("cpu", 8, {"static_shapes": True}, True),
        ("cuda", 8, {"cu_seqlens": torch.tensor([0, 8])}, False),  # the lengths decide how sequences are packed
        ("cuda", 8, {"kept_counts": torch.ones(8, dtype=torch.int32)}, False),  # and which tokens have few kept ids
    ],
)
def test_where_the_counts_of_rows_are_read(monkeypatch, device, tokens, changes, every_row):
    monkeypatch.setattr(loss_op, "is_capturing", lambda device: False)
    config = gk.GRPOConfig(static_shapes=changes.get("static_shapes", False))
    inputs = dict.fromkeys(TokenInputs._fields) | {k: x for k, x in changes.items() if k in TokenInputs._fields}
    call = loss_op.LossCall(torch.zeros(tokens), TokenInputs(**inputs), 0, config, "torch", None, [True, True, False])
    assert loss_op._computes_every_row(call, torch.device(device)) == every_row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [1e30, math.nan])
@pytest.mark.parametrize("preset", ["dapo", "vespo"])
def test_small_calls_on_a_cpu_compute_finite_padding(monkeypatch, preset, padding, dtype):
    """To the same results as where its rows are left out, whatever padding holds."""
    batch, ways, found, run = off_policy(make_batch(3, masked=True)), [], [], loss_op.run
    hidden = torch.where(batch.options["completion_mask"][..., None], batch.hidden, padding)
    monkeypatch.setattr(loss_op, "run", lambda *a, **named: ways.append(named["static_shapes"]) or run(*a, **named))
    for limit in (2**18, 0):
        monkeypatch.setattr(shared, "_SMALL_PRODUCT", limit)
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, batch.weight)]
        config = gk.GRPOConfig.preset(preset)
        out = gk.fused_grpo_loss(*leaves, batch.ids, batch.advantages, **batch.options, config=config, backend="cpu")
        out.loss.backward()
        found.append((out.loss.detach(), out.logps, out.entropy, *(x.grad for x in leaves)))
    assert ways == [math.isfinite(padding), False]
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)


def scored_at_once(monkeypatch, batch, limit: int, **options) -> tuple[list[torch.Tensor], bool]:
    """(log-probabilities, entropy and gradients of fused_logps, whether by one product and one row kernel)."""
    calls, at_once = [], logps_op._score_at_once
    leaves = [x.detach().requires_grad_() for x in (batch.hidden, batch.weight)]
    with monkeypatch.context() as patch:
        patch.setattr(logps_op, "_score_at_once", lambda *given: calls.append(given) or at_once(*given))
        patch.setattr(shared, "_SMALL_PRODUCT", limit)
        logps, entropy = gk.fused_logps(*leaves, batch.ids, entropy=True, **options)
        (logps.sum() + entropy.square().sum()).backward()
    return [logps, entropy, *(x.grad for x in leaves)], len(calls) == 1


@pytest.mark.parametrize("backend", ["cpu", "torch", "triton"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "logit_scale": 0.5, "logit_softcap": 5.0}], ids=len)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_calls_on_a_cpu_are_scored_at_once(monkeypatch, dtype, options, backend):
    """One product and one row kernel give the same bits as an LMHead and a Scorer, which compute 16-bit products."""
    batch = make_batch(3).head_as(dtype)
    batch = replace(batch, hidden=batch.hidden[:, 1:], ids=batch.ids[:, 1:].int())
    small, at_once = scored_at_once(monkeypatch, batch, 2**18, backend=backend, **options)
    others, not_at_once = scored_at_once(monkeypatch, batch, 0, backend=backend, **options)
    assert all(torch.equal(x, y) for x, y in zip(small, others, strict=True))
    assert at_once == (dtype == torch.float32) and not not_at_once


@pytest.mark.parametrize("what", ["mask", "bias", "sampling mask", "temperatures", "autocast", "more ids", "no tokens"])
def test_other_small_calls_are_not_scored_at_once(monkeypatch, what):
    batch = make_batch(3, vocab=2500 if what == "more ids" else 67, sequences=0 if what == "no tokens" else 2, width=4)
    options = {
        "mask": {"completion_mask": torch.ones_like(batch.ids)},
        "bias": {"lm_head_bias": torch.ones(67)},
        "sampling mask": {"sampling_mask": make_sampling_mask(tuple(batch.ids.shape), 67)},
        "temperatures": {"temperature": torch.full(batch.ids.shape, 0.5)},
    }.get(what, {})
    with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
        assert not scored_at_once(monkeypatch, batch, 2**18, **options)[1]


def test_small_calls_refuse_an_unknown_strategy_too(monkeypatch):
    monkeypatch.setenv("GRPO_KERNELS_STRATEGY", "lines")
    monkeypatch.setattr(shared, "_SMALL_PRODUCT", 2**18)
    batch = make_batch(3)
    with pytest.raises(ValueError, match="GRPO_KERNELS_STRATEGY='lines'"):
        gk.fused_logps(batch.hidden, batch.weight, batch.ids)


def test_a_slice_of_the_vocabulary_is_not_scored_at_once():
    call = logps_op.LogpsCall(torch.zeros(2), None, 1.0, 1.0, 0.0, False, "cpu", None)
    assert call.is_plain and not call._replace(vocab_slice=object()).is_plain

"""How many kernels a step would launch on a GPU: operators of torch that compute, and Triton's own.

Counted on a CPU, where Triton's kernels run in the interpreter. A product is one launch, as is the copy of the counts.
"""

from __future__ import annotations

import pytest
import torch
from helpers import make_batch, off_policy
from torch.profiler import ProfilerActivity, profile
from triton.runtime import interpreter

import grpo_kernels as gk

KERNEL = "a Triton kernel"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")
# Operators that make or look at a tensor without a kernel of the device.
FREE = {
    *("empty", "empty_strided", "empty_like", "as_strided", "view", "_unsafe_view", "reshape", "_reshape_alias"),
    *("slice", "select", "narrow", "split", "split_with_sizes", "unbind", "t", "transpose", "expand", "unsqueeze"),
    *("squeeze", "detach", "alias", "resize_", "resolve_conj", "resolve_neg", "lift_fresh", "to", "contiguous"),
    *("promote_types", "result_type", "is_nonzero", "numpy_T", "permute", "set_", "unflatten", "flatten", "chunk"),
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

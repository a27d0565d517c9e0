"""How many kernels a step would launch on a GPU: operators of torch that compute, and Triton's own.

Counted on a CPU, where Triton's kernels run in the interpreter. A product is one launch, as is the copy of the counts.
"""

from __future__ import annotations

import pytest
from helpers import make_batch, off_policy
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

import grpo_kernels as gk
from grpo_kernels.engine import loss_op

PRODUCTS = ("mm", "addmm", "addmm_")
MEMORY_ALONE = ("empty", "empty_strided", "empty_like", "_unsafe_view", "resize_", "set_")  # they run no kernel


class Launches(TorchDispatchMode):
    """What would be launched, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        is_view = any(x.alias_info and not x.alias_info.is_write for x in function._schema.returns)
        if not is_view and name not in MEMORY_ALONE:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("masked", [False, True])
def test_launches_of_a_step_of_one_chunk(monkeypatch, masked):
    """The loss with its gradients; `backward` hands out what is there."""
    for name in ("check_values", "check_token_values"):  # what a GPU is not asked for
        monkeypatch.setattr(f"grpo_kernels.engine.loss_op.{name}", lambda *given: None)
    monkeypatch.setattr(loss_op, "takes_operator", lambda hidden, **given: False)  # as without the mode that counts
    monkeypatch.setattr(loss_op, "_compute", loss_op._compute.__wrapped__)
    interpret, launches = interpreter.GridExecutor.__call__, Launches()

    def launch(self, *arguments, **options):
        launches.found.append("a Triton kernel")
        with _disable_current_modes():  # what the interpreter does with torch
            return interpret(self, *arguments, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    batch = off_policy(make_batch(3, masked=masked))
    hidden, weight = batch.hidden.requires_grad_(), batch.weight.requires_grad_()
    given = {"config": gk.GRPOConfig.preset("dapo"), "backend": "triton", **batch.options}
    with launches:
        gk.fused_grpo_loss(hidden, weight, batch.ids, batch.advantages, **given)
    seen = launches.found
    before = next(i for i, name in enumerate(seen) if name in PRODUCTS)
    assert before <= 6, seen
    assert len(seen) <= 14, seen
    assert sum(name in PRODUCTS for name in seen) == 3

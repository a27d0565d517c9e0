"""How many kernels a step would launch on a GPU: operators of torch that compute, and Triton's own.

Counted on a CPU, where Triton's kernels run in the interpreter. A product is one launch, as is the copy of the counts.
"""

from __future__ import annotations

import pytest
import torch
from helpers import Batch, make_batch, off_policy, set_mask_way
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

import grpo_kernels as gk
from grpo_kernels.head import kept, loss_op

PRODUCTS = ("mm", "addmm", "addmm_")
# They run no kernel; torch.where makes a tensor of a number on the host.
MEMORY_ALONE = ("empty", "empty_strided", "empty_like", "_unsafe_view", "resize_", "set_")
NO_KERNEL = (*MEMORY_ALONE, "scalar_tensor", "promote_types")
READS = ("_local_scalar_dense", "nonzero", "masked_select", "tolist")  # the host waits for a size


class Launches(TorchDispatchMode):
    """What would be launched, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        is_view = any(x.alias_info and not x.alias_info.is_write for x in function._schema.returns)
        if not is_view and name not in NO_KERNEL:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch):
    """As on a GPU, which is not asked for what may be wrong in the data, and without the mode seen by the engine."""
    for name in ("loss_op.check_values", "loss_op.check_token_values", "kept.check_kept_ids"):
        monkeypatch.setattr(f"grpo_kernels.head.{name}", lambda *given: None)
    monkeypatch.setattr(loss_op, "takes_operator", lambda hidden, **given: False)
    monkeypatch.setattr(loss_op, "_compute", loss_op._compute.__wrapped__)
    monkeypatch.setitem(kept.WIDTHS, "cpu", kept.WIDTHS["cuda"])
    kept._kinds.cache_clear()
    interpret, read, launches = interpreter.GridExecutor.__call__, torch.Tensor.tolist, Launches()

    def launch(self, *arguments, **options):
        launches.found.append(self.fn.__name__)
        with _disable_current_modes():  # what the interpreter does with torch
            return interpret(self, *arguments, **options)

    def tolist(self):
        launches.found.append("tolist")
        return read(self)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    yield launches
    kept._kinds.cache_clear()


def step(launches: Launches, batch: Batch, preset: str = "dapo", **options: bool) -> tuple[list[str], list[str]]:
    """What the loss with its gradients launches, and then `backward`, which hands them out times 2."""
    hidden, weight = (x.detach().requires_grad_() for x in (batch.hidden, batch.weight))
    given = {"config": gk.GRPOConfig.preset(preset, **options), "backend": "triton", **batch.options}
    launches.found = []
    with launches:
        loss = gk.fused_grpo_loss(hidden, weight, batch.ids, batch.advantages, **given).loss
        forward = len(launches.found)
        loss.backward(torch.tensor(2.0))
    return launches.found[:forward], launches.found[forward:]


@pytest.mark.parametrize(("preset", "static"), [("dapo", False), ("dapo", True), ("grpo", True)])
@pytest.mark.parametrize("masked", [False, True])
def test_launches_of_a_step_of_one_chunk(launches, masked, preset, static):
    """`static`: as with few tokens, of which none is left out."""
    seen, handed_out = step(launches, off_policy(make_batch(3, masked=masked)), preset, static_shapes=static)
    before = next(i for i, name in enumerate(seen) if name in PRODUCTS)
    assert before <= (3 if static else 5), seen
    assert len(seen) <= (11 if static else 15), seen
    assert sum(name in PRODUCTS for name in seen) == 3
    assert sum(name in READS for name in seen) == (not static)
    assert [name for name in handed_out if name != "_local_scalar_dense"] == ["scale_kernel"] * 2  # on a GPU: no read


def test_launches_of_kept_ids(launches, monkeypatch):
    """Tokens with a sampling mask: one read, and few launches for each matrix of kept ids."""
    set_mask_way(monkeypatch, "gathers", 90)
    batch, found = off_policy(make_batch(3, sequences=2, length=4, vocab=90)), []
    for most in (40, 80):  # one matrix has room for them and the sampled id, or two
        mask = gk.SamplingMask.from_lists([[range(most - 30 * t) for t in range(2)] * 2] * 2)
        seen, handed_out = step(launches, batch.with_options(sampling_mask=mask))
        assert sum(name in READS for name in seen) == 1, seen
        assert not any(name in PRODUCTS for name in seen)
        found.append(len(seen) + len(handed_out) - handed_out.count("_local_scalar_dense"))
    assert found[0] <= 36, seen
    assert found[1] - found[0] <= 5, seen

"""Handing out finished gradients: times grad_output, in place where they can be, untouched where that is 1."""

from __future__ import annotations

import kernel_checks as c
import pytest
import torch
from helpers import call_counter, leaves, make_batch
from torch.utils._python_dispatch import TorchDispatchMode

import grpo_kernels as gk
from grpo_kernels.backends import get_backend
from grpo_kernels.backends.pytorch import backend as torch_backend
from grpo_kernels.backends.triton import scale as triton_scale
from grpo_kernels.engine.lm_head import LMHead


@pytest.fixture
def small_blocks(monkeypatch):
    """Programs take several turns each."""
    monkeypatch.setattr(triton_scale, "BLOCK_SIZE", 32)
    monkeypatch.setattr(triton_scale, "REST_SIZE", 8)
    monkeypatch.setattr(triton_scale, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(torch_backend, "SCALED_AT_ONCE", 7)


# --- x *= factor ------------------------------------------------------------------------------------------------------


class Float32Products(TorchDispatchMode):
    """On a GPU torch rounds a factor to the type that it multiplies in: on a CPU the types are looked at instead."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mul, torch.ops.aten.mul_):
            assert args[0].dtype == args[1].dtype == torch.float32
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", c.DTYPES)
def test_scale_is_a_product_in_float32(backend, dtype, small_blocks):
    kernels, of_torch = get_backend(backend), backend in ("cpu", "torch")
    if of_torch:
        with Float32Products():
            kernels.scale(torch.ones(95, dtype=dtype), torch.tensor(0.3))
    for count in (95, 1000):
        c.check_scale(kernels, dtype, count, shift=3, keeps_nan=not of_torch)
    kernels.scale(torch.empty(0, 4, dtype=dtype), torch.tensor(2.0))


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

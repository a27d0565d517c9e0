"""Handing out finished gradients: times grad_output, in place where they can be, untouched where that is 1."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from helpers import call_counter, make_batch
from kernel_checks import SIGNALLING
from torch.utils._python_dispatch import TorchDispatchMode

import grpo_kernels as gk
from grpo_kernels.backends import get_backend
from grpo_kernels.backends.pytorch import backend as torch_backend
from grpo_kernels.backends.triton import scale as triton_scale
from grpo_kernels.engine.lm_head import LMHead

FACTORS = (-2.0, 1.003, 1 + 2.0**-23, 0.0, 65536.0, math.inf, math.nan)


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


@pytest.mark.parametrize("dtype", SIGNALLING)
@pytest.mark.parametrize("shape", [(5, 19), (1000,), (0, 4)])
def test_scale_is_a_product_in_float32(backend, dtype, shape, small_blocks):
    """A factor of 65,536, a usual loss scale, is infinite in float16; 1.003 is 1 in bfloat16."""
    values = (100 * torch.randn(shape)).to(dtype)
    special = torch.tensor([math.nan, math.inf, 0.0, -0.0, 6e4, 1e-7]).to(dtype)
    values.view(-1)[: len(special)] = special[: values.numel()]
    for factor in FACTORS:
        buffer = torch.cat([torch.full((3,), 7.0, dtype=dtype), values.reshape(-1), torch.full((3,), 7.0, dtype=dtype)])
        x = buffer[3:-3].view(shape)  # off the alignment
        with Float32Products() if backend in ("cpu", "torch") else nullcontext():
            get_backend(backend).scale(x, torch.tensor(factor))
        torch.testing.assert_close(x, (values.float() * factor).to(dtype), rtol=0, atol=0, equal_nan=True)
        assert (buffer[:3] == 7).all() and (buffer[-3:] == 7).all()


@pytest.mark.parametrize("kernels", ["triton", "cuda"])
@pytest.mark.parametrize("dtype", SIGNALLING)
def test_a_factor_of_one_touches_nothing(kernels, dtype, small_blocks):
    """Any arithmetic would make a signalling NaN a quiet one."""
    bits = torch.full((100,), SIGNALLING[dtype], dtype=torch.int32 if dtype == torch.float32 else torch.int16)
    before = bits.clone()
    scale = get_backend(kernels).scale
    scale(bits.view(dtype), torch.tensor(1.0))
    assert torch.equal(bits, before)
    scale(bits.view(dtype), torch.tensor(2.0))
    assert not torch.equal(bits, before)


# --- what autograd does not see ---------------------------------------------------------------------------------------


def head_losses(batch, leaves, backend):
    return {
        "fused_grpo_loss": lambda: gk.fused_grpo_loss(*leaves, batch.ids, batch.advantages, backend=backend).loss,
        "fused_policy_loss": lambda: gk.fused_policy_loss(
            *leaves, batch.ids, lambda chunk: chunk.logps.mean(), backend=backend
        ),
    }


@pytest.mark.parametrize("name", ["fused_grpo_loss", "fused_policy_loss"])
def test_hooks_on_saved_tensors_do_not_move_gradients(name, backend):
    """save_on_cpu and its like would copy a (V, H) gradient to the host and back."""
    batch = make_batch(0)
    leaves = [x.clone().requires_grad_() for x in (batch.hidden, batch.weight)]
    moved = []

    def pack(x):
        moved.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = head_losses(batch, leaves, backend)[name]()
    loss.backward()
    assert moved == [] and all(x.grad.any() for x in leaves)


@pytest.mark.parametrize("name", ["fused_grpo_loss", "fused_policy_loss"])
def test_checkpointing_computes_a_loss_that_comes_last_once(monkeypatch, name, backend):
    """Recomputation ends where everything saved is there again: nothing of the loss is."""
    batch, products = make_batch(0), []
    call_counter(monkeypatch, LMHead, "logits", products, lambda self, rows: rows.stop - rows.start)
    leaves = [x.clone().requires_grad_() for x in (batch.hidden, batch.weight)]
    expected = torch.autograd.grad(head_losses(batch, leaves, backend)[name](), leaves)
    products.clear()

    def step(hidden, weight):
        return head_losses(batch, (torch.tanh(hidden).atanh(), weight), backend)[name]()

    loss = torch.utils.checkpoint.checkpoint(step, *leaves, use_reentrant=False)
    found = torch.autograd.grad(loss, leaves)
    assert sum(products) == 24
    for x, y in zip(found, expected, strict=True):
        assert torch.allclose(x, y, rtol=1e-2, atol=1e-4)

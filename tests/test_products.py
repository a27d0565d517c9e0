"""Products with float32 results: what torch offers is found out, what it lacks is computed in more steps and said."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers import make_batch
from test_chunks import meta_head

import grpo_kernels as gk
from grpo_kernels.head import products
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.kernels import get_backend

META = torch.device("meta")
HALF = (torch.bfloat16, torch.float16)
mm, addmm = torch.mm, torch.addmm


@pytest.fixture
def probed():
    """Probes forget what they found, before and after."""
    probes = products.returns_float32, products.adds_to_float32
    for probe in probes:
        probe.cache_clear()
    yield
    for probe in probes:
        probe.cache_clear()


def lacking(function):
    """torch's function as a release or a build without `out_dtype` has it."""

    def call(*args, out_dtype=None, **kwargs):
        if out_dtype is not None:
            raise RuntimeError("self and mat2 must have the same dtype")
        return function(*args, **kwargs)

    return call


def widened(function):
    """torch's function with `out_dtype`, on a CPU, which has none."""

    def call(*args, out_dtype=None, **kwargs):
        return function(*(x if out_dtype is None else x.to(out_dtype) for x in args), **kwargs)

    return call


def matrices(dtype: torch.dtype, rows: int = 37):
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=g).to(dtype) for size in ((rows, 12), (12, 5)))
    return a, b, torch.randn(rows, 5, generator=g)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("missing", [(), ("addmm",), ("mm", "addmm")])
def test_sums_in_float32_without_addmm_or_mm_of_that_kind(monkeypatch, probed, dtype, missing):
    monkeypatch.setattr(products, "BLOCK_ROWS", 16)
    monkeypatch.setattr(products, "returns_float32", lambda device, dtype: "mm" not in missing)
    monkeypatch.setattr(products, "adds_to_float32", lambda device, dtype: "addmm" not in missing)
    for name, function in (("mm", mm), ("addmm", addmm)):
        monkeypatch.setattr(torch, name, lacking(function) if name in missing else widened(function))
    a, b, total = matrices(dtype)
    exact = a.double() @ b.double()
    assert torch.allclose(products.product(a, b).double(), exact, atol=1e-5)
    expected = total.double() + exact
    products.add_product(total, a, b)
    assert torch.allclose(total.double(), expected, atol=1e-5)


@pytest.mark.parametrize("missing", ["nothing", "addmm", "mm and addmm"])
def test_the_lm_head_without_them(monkeypatch, probed, missing):
    """Types and shapes of every product on a device without values, two chunks; torch has mm alone, or neither."""
    if "addmm" in missing:
        monkeypatch.setattr(torch, "addmm", lacking(addmm))
    if "mm and" in missing:  # builds for AMD GPUs
        monkeypatch.setattr(torch, "mm", lacking(mm))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        head = meta_head(8, chunk_rows=4, accumulate_in_fp32=True)
        ids = torch.zeros(8, dtype=torch.int64, device=META)
        for rows in (*head.chunks(None), *head.chunks(ids[:2])):
            logits = head.logits(rows)
            assert logits.dtype == torch.float32 and logits.shape == (rows.count, 67)
            head.accumulate(rows, head.row_gradients(rows, logits))
        assert head.dweight.total.dtype == torch.float32
        finished = head.gradients()
    assert [x.shape for x in finished.tensors[:2]] == [(8, 24), (67, 24)]
    assert finished.dtypes[:2] == (torch.bfloat16, torch.bfloat16)
    assert len(said) == (0 if missing == "nothing" else 1)
    assert all(f"torch {torch.__version__} has no torch." in str(x.message) for x in said)


# --- torch's switch for float16 accumulation --------------------------------------------------------------------------


@pytest.fixture
def switch():
    matmul = torch.backends.cuda.matmul
    matmul.allow_fp16_accumulation = True
    yield matmul
    matmul.allow_fp16_accumulation = False


def test_float16_accumulation_is_off_inside_and_on_again_after(monkeypatch, switch):
    """torch raises where a product with float32 results meets this switch."""
    batch = make_batch(0)
    leaf, seen = batch.hidden.clone().requires_grad_(), []

    def spy(*args, **kwargs):
        seen.append(switch.allow_fp16_accumulation)
        return mm(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", spy)
    for loss in (
        lambda: gk.fused_grpo_loss(leaf, batch.weight, batch.ids, batch.advantages).loss,
        lambda: gk.fused_logps(leaf, batch.weight, batch.ids)[0].sum(),
        lambda: gk.fused_policy_loss(leaf, batch.weight, batch.ids, lambda c: c.logps.mean()),
    ):
        seen.clear()
        loss().backward()
        assert len(seen) >= 2 and not any(seen) and switch.allow_fp16_accumulation


def test_the_scale_of_float16_gradients_never_grows():
    """A chunk of small gradients takes the scale that sums have: one of its own costs a pass over them."""
    hidden, weight = (torch.zeros(n, 24, dtype=torch.float16) for n in (4, 67))
    head = LMHead((hidden, weight, None), get_backend("torch"), wants=(True, True, False), logits_dtype=torch.float32)
    scales = [head.scale_gradients(torch.tensor(largest)).item() for largest in (1.0, 1e-6, 64.0, 1.0)]
    assert scales == [scales[0]] * 2 + [scales[0] / 64] * 2

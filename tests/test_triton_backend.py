"""The Triton backend: when it can be used and when not, what it refuses, what it leaves to others."""

from __future__ import annotations

import dataclasses
import math
import sys

import pytest
import torch
from helpers import RowKernels, assert_close, fused, make_batch, reference

import grpo_kernels as gk
from grpo_kernels import backends
from grpo_kernels.backends import choose_backend, get_backend
from grpo_kernels.backends import triton as kernels
from grpo_kernels.contract import no_values
from grpo_kernels.names import FIELD, TABLE_FIELDS, KernelParams


def test_what_it_needs_is_said(monkeypatch):
    import triton

    assert kernels.why_unusable() == ""
    monkeypatch.setattr(triton, "__version__", "3.3.1+git")
    assert kernels.why_unusable() == "Triton 3.3.1+git is older than 3.4, which comes with torch 2.8"
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    assert kernels.why_unusable() == ""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.why_unusable() == "Triton needs a GPU, and torch sees none"
    monkeypatch.setitem(sys.modules, "triton", None)
    assert kernels.why_unusable().startswith("Triton cannot be imported: ")


def test_auto_prefers_it_on_a_gpu_and_never_interprets(monkeypatch):
    assert choose_backend("auto", torch.device("cpu"), torch.float32) == "cpu"
    monkeypatch.setattr(backends, "unavailable_reason", lambda name, device: "not here" if name == "cuda" else "")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert choose_backend("auto", torch.device("cuda"), torch.bfloat16) == "triton"
    assert choose_backend("auto", torch.device("cuda"), torch.float64) == "torch"


def table(rows: int) -> torch.Tensor:
    t = torch.ones(len(TABLE_FIELDS), rows)
    t[FIELD["entropy_threshold"]] = -math.inf
    return t


def test_the_interpreter_notices_a_wrong_address():
    """What the tests rely on: a kernel that reads past its tensors is caught."""
    from grpo_kernels.backends.triton import rows

    logits, ids = torch.randn(3, 8), torch.zeros(3, dtype=torch.int64)
    short = logits[:, :5]  # eight columns are promised below
    with pytest.raises(Exception, match="lie outside the launch"):
        rows.statistics_kernel[(1,)](
            rows.Logits(short, None, 9, 8), ids, 0, torch.ones(3), no_values(3, torch.float32, ids.device), 3, 3,
            rows.scalars(KernelParams()), OPTIONS=rows.RowOptions(False, True, 4, 16),
        )  # fmt: skip


@pytest.mark.parametrize("vocab", [1, 17, 63, 211])
def test_a_vocabulary_off_a_multiple_of_16_gives_the_numbers_of_a_padded_one(vocab):
    """Columns of -inf up to the multiple change nothing but the order of the sums; two launches not even that."""
    triton, rows, params = RowKernels(get_backend("triton")), 5, KernelParams(has_old=False)
    padded = torch.full((rows, -(-vocab // 16) * 16), -math.inf)
    padded[:, :vocab] = torch.randn(rows, vocab) * 4
    logits, ids = padded[:, :vocab].contiguous(), torch.randint(vocab, (rows,))
    ids[0] = vocab - 1

    grad, again, wide = torch.empty(rows, vocab), torch.empty(rows, vocab), torch.empty_like(padded)
    found = triton.fused(logits, grad, ids, table(rows), params)
    expected = triton.fused(padded, wide, ids, table(rows), params)
    for value, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad, wide[:, :vocab], rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, found, triton.fused(logits, again, ids, table(rows), params)))
    assert torch.equal(grad, again)

    given = ids, torch.ones(rows), expected.lse, expected.entropy, torch.randn(rows), torch.randn(rows), params
    triton.gradient(logits, grad, *given)
    triton.gradient(padded, wide, *given)
    assert torch.equal(grad, wide[:, :vocab])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_of_probability_e_to_the_minus_95(dtype):
    """Exact statistics, and a gradient that pulls with all its weight."""
    vocab, config = 67, gk.GRPOConfig(surrogate="reinforce")
    weight = torch.zeros(vocab, 1)
    weight[0], weight[1] = 95.0, 0.0
    batch = make_batch(0, vocab=vocab)
    batch = dataclasses.replace(
        batch, hidden=torch.ones(4, 6, 1), weight=weight, ids=torch.ones(4, 6, dtype=torch.int64)
    ).head_as(dtype)
    found = fused(batch, config, "triton")
    assert torch.equal(found.logps, torch.full((4, 6), -95.0))
    if dtype == torch.float32:
        assert_close(found, reference(batch, config))

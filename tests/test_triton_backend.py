"""The Triton backend: when it can be used and when not, what it refuses, what it leaves to others."""

from __future__ import annotations

import sys

import pytest
import torch

from grpo_kernels import backends
from grpo_kernels.backends import choose_backend
from grpo_kernels.backends import triton as kernels
from grpo_kernels.contract import no_values
from grpo_kernels.names import KernelParams


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

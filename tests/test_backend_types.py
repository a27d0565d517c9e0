"""What a backend returns and reads: types that do not follow torch's default, nothing that the host would wait for."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import RowKernels, planned_tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_kernels.backends import get_backend
from grpo_kernels.contract import PlannedTokens, TokenValues
from grpo_kernels.engine.groups import group_statistics
from grpo_kernels.names import COLUMNS, FIELD, TABLE_FIELDS, KernelParams

ROWS, VOCAB, GROUPS = 5, 12, 2
GROUP_INDEX = torch.tensor([0, 1, 0])
PARAMS = KernelParams(kl="k3", beta=0.1, bias_correction=True)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """logits (C, V), ids (C,), table"""
    table = torch.ones(len(TABLE_FIELDS), ROWS)
    table[FIELD["old"]] = table[FIELD["ref"]] = table[FIELD["rollout"]] = -2.0
    table[FIELD["weight_entropy"]] = 0.1
    table[FIELD["entropy_threshold"]] = -math.inf
    return torch.randn(ROWS, VOCAB), torch.arange(ROWS), table


def planned(table: Tensor, *columns: Tensor) -> PlannedTokens:
    """All tokens are scored, in three sequences."""
    values = TokenValues(torch.stack(columns), torch.zeros(ROWS, dtype=torch.float64))
    return planned_tokens(table, values, torch.ones(ROWS, dtype=torch.bool), torch.tensor([0, 2, 4, ROWS]))


def everything(backend: RowKernels, logits: Tensor, ids: Tensor, table: Tensor) -> list[Tensor]:
    """All that the methods of a backend return and write, from float32 inputs."""
    grad, rounding_error = torch.empty_like(logits), torch.empty_like(table[0])
    temperature = table[FIELD["temperature"]]
    stats = backend.stats(logits, ids, temperature, PARAMS)
    logp, entropy = stats.logp, stats.entropy
    fused = backend.fused(logits, grad, ids, table, PARAMS, rounding_error)
    again = torch.empty_like(logits)
    backend.gradient(
        logits, again, ids, temperature, stats.lse, entropy, torch.ones_like(logp), torch.zeros_like(logp), PARAMS
    )
    objective = backend.objective(logp - table[FIELD["old"]], logp, entropy, table, PARAMS)
    value, d_ratio, _, kl = objective
    sums = backend.sums(planned(table, logp, entropy, logp, value, kl, d_ratio), PARAMS, GROUP_INDEX, GROUPS)
    assert sums.groups.shape == (GROUPS, len(COLUMNS))
    return [grad, again, rounding_error, *stats, *fused, *objective, sums.numbers]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_results_do_not_follow_the_default_type(backend, default):
    """from_pretrained(dtype=...) sets it for a while; a kernel writes float32 whatever it is."""
    kernels, given = RowKernels(get_backend(backend)), inputs()
    expected = everything(kernels, *given)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = everything(kernels, *given)
    finally:
        torch.set_default_dtype(before)
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


class NothingRead(TorchDispatchMode):
    """Raises where the host would wait for the device: within the capture of a CUDA graph that is an error."""

    READS = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__.strip("_").removeprefix("_")
        assert name not in [read.strip("_") for read in self.READS], f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


def test_torch_reads_nothing_back():
    given = inputs()
    logits, ids, table = given
    kernels, grad, row = RowKernels(get_backend("torch")), torch.empty_like(logits), table[FIELD["old"]]
    tokens = planned(table, *[row] * 6)
    with NothingRead():
        kernels.fused(logits, grad, ids, table, PARAMS)
        kernels.sums(tokens, PARAMS, GROUP_INDEX, GROUPS)
        kernels.scale(grad.bfloat16(), row[0])
        group_statistics(row[:3], GROUP_INDEX, GROUPS, "group", "mean", 1, 1e-4)


def test_torch_ignores_an_entropy_that_is_not_used():
    """NaN where no gradient goes through it: selected away, and not multiplied by 0."""
    logits, ids, table = inputs()
    kernels = RowKernels(get_backend("torch"))
    found, expected = torch.empty_like(logits), torch.empty_like(logits)
    logits[:, 5] = -math.inf  # p is 0 there, log p no number to multiply by
    stats = kernels.stats(logits, ids, table[FIELD["temperature"]], PARAMS)
    for entropy, grad in ((torch.full_like(stats.entropy, math.nan), found), (stats.entropy, expected)):
        kernels.gradient(
            logits, grad, ids, table[FIELD["temperature"]], stats.lse, entropy, torch.ones(ROWS), torch.zeros(ROWS),
            PARAMS,
        )  # fmt: skip
    assert found.isfinite().all() and torch.equal(found, expected)


@pytest.mark.parametrize("id_", [-1, VOCAB + 7, 2**40])
@pytest.mark.parametrize("name", ["cpu", "triton", "cuda"])
def test_an_id_outside_the_vocabulary_reads_and_writes_nothing_else(name, id_):
    """Its log-probability is NaN, and its row alone is lost. The matrices end where their memory does."""
    kernels, (logits, ids, table) = RowKernels(get_backend(name)), inputs()
    temperature, grad = table[FIELD["temperature"]], torch.full((ROWS + 2, VOCAB), 7.0)
    clean = torch.empty_like(logits)
    expected = kernels.fused(logits, clean, ids, table, PARAMS)
    others = torch.arange(ROWS) != 3
    ids[3] = id_
    for stats in (
        kernels.fused(logits, grad[1:-1], ids, table, PARAMS), kernels.stats(logits, ids, temperature, PARAMS)
    ):  # fmt: skip
        assert stats.logp[3].isnan() and torch.equal(stats.logp[others], expected.logp[others])
        assert torch.equal(stats.lse, expected.lse) and torch.equal(stats.entropy, expected.entropy)
    assert torch.equal(grad[1:-1][others], clean[others]) and (grad[0] == 7).all() and (grad[-1] == 7).all()
    ones, zeros = torch.ones(ROWS), torch.zeros(ROWS)
    kernels.gradient(logits, grad[1:-1], ids, temperature, stats.lse, stats.entropy, ones, zeros, PARAMS)
    assert (grad[0] == 7).all() and (grad[-1] == 7).all()
    # -p_j everywhere: no column is the sampled one
    torch.testing.assert_close(grad[4], -logits[3].softmax(-1))

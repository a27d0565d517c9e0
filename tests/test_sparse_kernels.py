"""Row kernels that write pairs of an id and a number: the rule itself, its mean and variance, C++ and Triton beside
torch."""

from __future__ import annotations

import contextlib
import math

import kernel_checks as c
import pytest
import torch
from test_row_kernels import ISAS, instruction_set
from torch import Tensor

from grpo_kernels.kernels import get_backend
from grpo_kernels.kernels.operations import (
    SPARSE_ONE,
    LogitChunk,
    PolicyTransform,
    Rows,
    SparseRows,
    SparseRule,
    Statistics,
)  # fmt: skip
from grpo_kernels.kernels.torch import sparse

TORCH = get_backend("torch")
THETA = 2.0**-6
RULE = SparseRule(THETA)
TRANSFORMS = (c.PLAIN, PolicyTransform(logit_scale=1.5, softcap=5.0))


class Given:
    """Rows of logits with their statistics and coefficients; every second one has a gradient through the entropy."""

    def __init__(
        self, logits: Tensor, ids: Tensor, *, transform=c.PLAIN, bias: Tensor | None = None, rows: Rows | None = None
    ) -> None:
        count, dtype = len(logits), torch.promote_types(logits.dtype, torch.float32)
        rows = rows or Rows(0, count)
        tokens = count if rows.index is None else int(rows.index.max()) + 1
        g, at_entropy = torch.linspace(-1.0, 2.0, count, dtype=dtype), torch.arange(count) % 2 * 0.3
        per_row = torch.linspace(0.7, 1.3, count, dtype=dtype), g, at_entropy.to(dtype), ids
        self.temperature, self.dlogp, self.dentropy, sampled = (c.spread(rows, tokens, x, 0) for x in per_row)
        self.stats = Statistics.zeros(tokens, logits.device, dtype)
        self.chunk = LogitChunk(logits, rows, sampled, self.temperature, self.stats, transform, bias)
        TORCH.statistics(self.chunk)

    def pairs(self, kernels, capacity: int | None = None, rule: SparseRule = RULE) -> SparseRows:
        count, vocab = self.chunk.logits.shape
        shape = count, vocab if capacity is None else capacity
        found = SparseRows(
            torch.full(shape, -7, dtype=torch.int32), torch.full(shape, 7.5, dtype=self.stats.logp.dtype),
            torch.full((count,), -7, dtype=torch.int32),
        )  # fmt: skip
        kernels.sparse_gradient(self.chunk, self.dlogp, self.dentropy, rule, found)
        return found

    def dense(self, kernels=TORCH) -> Tensor:
        out = torch.empty_like(self.chunk.logits, dtype=self.stats.logp.dtype)
        kernels.gradient(self.chunk, self.dlogp, self.dentropy, out)
        return out

    @property
    def scale(self) -> Tensor:
        rows = self.chunk.rows
        size = rows.take(self.dlogp).abs() + rows.take(self.dentropy).abs()
        return self.chunk.transform.logit_scale / rows.take(self.temperature) * size


def random_rows(count: int, vocab: int, dtype=torch.float32, **options) -> Given:
    torch.manual_seed(vocab)
    logits, ids = (torch.randn(count, vocab) * 3).to(dtype), torch.randint(vocab, (count,))
    ids[-1] = -1  # in another rank's slice
    return Given(logits, ids, **options)


def matrix(pairs: SparseRows, vocab: int) -> Tensor:
    """(C, V) with the values at their ids."""
    used = torch.arange(pairs.ids.shape[1]) < pairs.counts[:, None]
    assert ((pairs.ids.diff() > 0) | ~used[:, 1:]).all()
    out = torch.zeros(len(used), vocab, dtype=torch.float64)
    row, place = used.nonzero().unbind(1)
    out[row, pairs.ids[row, place].long()] = pairs.values[row, place].double()
    return out


def same_pairs(found: SparseRows, expected: SparseRows, scale: Tensor) -> None:
    """A share of the running sum that rounds otherwise moves an entry to a neighbour: of 1,000 at most a few."""
    moved = total = 0
    for row, (count, other) in enumerate(zip(found.counts.tolist(), expected.counts.tolist(), strict=True)):
        assert abs(count - other) <= 1
        both = sorted({*found.ids[row, :count].tolist()} & {*expected.ids[row, :other].tolist()})
        moved, total = moved + max(count, other) - len(both), total + count
        numbers = (
            dict(zip(x.ids[row, :n].tolist(), x.values[row, :n].tolist(), strict=True))
            for x, n in ((found, count), (expected, other))
        )
        a, b = (torch.tensor([of[id] for id in both], dtype=torch.float64) for of in numbers)
        assert ((a - b).abs() <= 2e-5 * b.abs() + 1e-6 * scale[row]).all()
    assert moved <= 0.01 * total


@pytest.fixture
def kernels(backend):
    return get_backend(backend)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", c.DTYPES)
@pytest.mark.parametrize("name", [*ISAS, "triton"])
def test_kernels_keep_what_torch_keeps(name, dtype, transform):
    """Triton: one block, less, and several with columns left over."""
    for vocab in c.VOCABS if name in ISAS else (1, 15, 64, 65, 1000):
        bias = torch.randn(vocab) if vocab % 2 else None
        given = random_rows(7, vocab, dtype, transform=transform, bias=bias)
        before = given.chunk.logits.clone()
        rule = SparseRule(THETA, vocab)
        with instruction_set(name) if name in ISAS else contextlib.nullcontext(get_backend(name)) as kernels:
            found = given.pairs(kernels, rule=rule)
        assert torch.equal(given.chunk.logits, before)
        same_pairs(found, given.pairs(TORCH, rule=rule), given.scale)


def test_triton_passes_blocks_without_pairs():
    """Rows one by one: rows of a program take the same branch."""
    for vocab in range(1000, 1160, 16):
        given = random_rows(1, vocab)
        found, expected = (given.pairs(x, rule=SparseRule(0.25)) for x in (get_backend("triton"), TORCH))
        assert expected.counts.item() < vocab // 64  # blocks
        same_pairs(found, expected, given.scale)


def test_the_rule_one_entry_after_another():
    """Integers of Python, over torch's dense rows."""
    given = random_rows(6, 300)
    found, dense, rule = given.pairs(TORCH), given.dense(), RULE
    for row, values in enumerate(dense):
        level = (given.scale[row] * THETA).item()
        start = sparse.start_of_sum(torch.tensor([row]), given.stats.lse[row : row + 1], rule.first_id).item()
        total, expected = start, {}
        for id, v in enumerate(values.tolist()):
            share = abs(v) / level
            if id == given.chunk.ids[row] or share >= 1:
                expected[id] = v
                continue
            before, total = total // SPARSE_ONE, total + int(share * SPARSE_ONE + 0.5)
            if total // SPARSE_ONE > before:
                expected[id] = math.copysign(level, v)
        count = int(found.counts[row])
        ids = found.ids[row, :count].tolist()
        assert len({*ids} ^ {*expected}) <= 2  # float32 rounds shares otherwise
        for id, value in zip(ids, found.values[row, :count].tolist(), strict=True):
            if id in expected:
                assert value == pytest.approx(expected[id], rel=1e-6)


def test_mean_and_variance():
    """Of torch's rule, which the other backends follow pair by pair. A row at many places: its mean is the gradient,
    its squared error that of section 13, no two rows are alike."""
    places, vocab = 2048, 67
    torch.manual_seed(1)
    logits, rule = torch.randn(3, vocab) * 2.5, SparseRule(THETA * 4)
    for row in range(3):
        given = Given(logits[row : row + 1].repeat(places, 1), torch.full((places,), 5 * row))
        given.dlogp.fill_(1.0 - row)
        given.dentropy.fill_(0.25 * row)
        given.temperature.fill_(0.8)
        TORCH.statistics(given.chunk)
        exact, found = given.dense()[0].double(), matrix(given.pairs(TORCH, rule=rule), vocab)
        level = (rule.theta * given.scale[0]).item()
        sampled = torch.arange(vocab) == 5 * row
        small = (exact.abs() < level) & ~sampled
        assert 20 < small.sum() < vocab - 1
        torch.testing.assert_close(found[:, ~small], exact[~small].expand(places, -1), rtol=1e-5, atol=1e-7)
        variance = torch.where(small, exact.abs() * (level - exact.abs()), 0.0)
        mean_error = found.mean(0) - exact
        assert (mean_error.abs() <= 5 * (variance / places).sqrt() + 1e-6).all()
        number_error = found[:, small].abs().sum(1).mean() - exact[small].abs().sum()
        assert abs(number_error) <= 3 * level / places**0.5
        # Of a sum over ids, systematic sampling has less than that of independent entries.
        assert (found - exact)[:, small].sum(1).abs().max() <= 2 * level
        assert (found - exact).square().sum(1).mean().item() == pytest.approx(variance.sum().item(), rel=0.2)
        assert len(found.unique(dim=0)) > 20


def test_a_place_in_the_batch_and_a_slice_say_which_entries(kernels):
    """Not the chunk that the row stands in, nor what is in the buffers."""
    logits, ids = torch.randn(40, 500), torch.randint(500, (40,))
    whole = Given(logits, ids)
    expected = matrix(whole.pairs(kernels), 500)
    assert torch.equal(expected, matrix(whole.pairs(kernels), 500))
    order = torch.randperm(40)
    part = Given(logits[order], ids[order], rows=Rows(0, 40, order))
    for name in ("temperature", "dlogp", "dentropy"):
        getattr(part, name).copy_(getattr(whole, name))
    for destination, x in zip(part.stats, whole.stats, strict=True):
        destination.copy_(x)
    assert torch.equal(matrix(part.pairs(kernels), 500), expected[order])
    other = matrix(whole.pairs(kernels, rule=SparseRule(THETA, 1)), 500)
    changed = (other != expected).any(1)
    assert changed.sum() > 35
    whole.stats.lse.mul_(1 + 1e-6)
    assert (matrix(whole.pairs(kernels), 500) != expected).any(1).sum() > 35


def test_more_than_there_is_room_for(kernels):
    given = random_rows(12, 400)
    everything = given.pairs(kernels)
    capacity = int(everything.counts.median())
    given.dlogp[0], given.dentropy[0] = 0.0, 0.0
    found = given.pairs(kernels, capacity)
    for row, (count, all_of_them) in enumerate(zip(found.counts.tolist(), everything.counts.tolist(), strict=True)):
        assert count == (0 if row == 0 else min(all_of_them, capacity + 1))
        if count <= capacity:
            assert torch.equal(found.ids[row, :count], everything.ids[row, :count])
            assert torch.equal(found.values[row, :count], everything.values[row, :count])
    assert given.pairs(kernels, 0).counts.tolist() == [0] + [1] * 11


def test_numbers_that_are_not_finite_and_levels_that_vanish(kernels):
    """They go through the dense products, which have rules for them; excluded ids leave nothing."""
    given = random_rows(6, 200)
    given.dlogp[1] = math.nan
    given.dlogp[2] = math.inf
    given.dlogp[4], given.dentropy[4] = 1e-42, 0.0
    found = given.pairs(kernels, 10)
    assert (found.counts[[1, 2, 4]] == 11).all()
    logits = torch.randn(2, 3000)
    logits[0, 1::2], logits[1, 100:2500] = -math.inf, -math.inf
    given = Given(logits, torch.tensor([0, 7]))
    found = matrix(given.pairs(kernels), 3000)
    assert not found[torch.isneginf(logits)].any() and found.any(1).all()

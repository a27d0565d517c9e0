"""The kernels with a softmax in the epilogue of a matrix product, linear_logp and anchored, one by one against float64.

Triton's run in its interpreter. CUDA's, of compute capability 9.0, on the emulated GPU: ring, barriers, swizzles and
schedule as on the device, in several orders of threads; TMA and wgmma are modelled (emulator/sm90.h).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from kernel_checks import make_table, single_pass
from torch import Tensor

from grpo_kernels.contract import HeadChunk, RowStats
from grpo_kernels.kernels import get_backend
from grpo_kernels.kernels.launch import matmul_launch, trial
from grpo_kernels.kernels.torch.backend import TorchBackend
from grpo_kernels.kernels.triton import matmul
from grpo_kernels.names import FIELD, KL_ESTIMATORS, SURROGATES, KernelParams

Kernels = Any
HALVES = (torch.bfloat16, torch.float16)
PLAIN = KernelParams(surrogate="weighted", has_old=False)
VARIANTS = {
    "plain": PLAIN,
    "scale": PLAIN._replace(logit_scale=0.3),
    "softcap": PLAIN._replace(softcap=2.0, logit_scale=1.5),
}
NAMES = ("logp", "lse", "entropy")
ROUNDING = 2.0**-8  # of a value to bfloat16, relative
ORDERS = (0, 1, 2, 3, 5, 8)  # see emulator.h, and sm90.h for what copies and products make of them
CPU = torch.device("cpu")


@pytest.fixture(params=["triton", "cuda"])
def kernels(request, unwritten_is_nan):
    return request.getfixturevalue("emulated") if request.param == "cuda" else get_backend(request.param)


only_triton = pytest.mark.parametrize("kernels", ["triton"], indirect=True)
only_cuda = pytest.mark.parametrize("kernels", ["cuda"], indirect=True)


class Head(NamedTuple):
    """Inputs of either kernel; table (fields, N) with weights and advantages of order 1."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    ids: Tensor
    table: Tensor

    @property
    def temperature(self) -> Tensor:
        return self.table[FIELD["temperature"]]

    def logits(self) -> Tensor:
        logits = self.hidden.double() @ self.weight.double().T
        return logits if self.bias is None else logits + self.bias.double()


def make_head(
    count: int = 21,
    width: int = 40,
    vocab: int = 70,
    dtype: torch.dtype = torch.bfloat16,
    *,
    bias: bool = True,
    temperature: bool = True,
    seed: int = 0,
) -> Head:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    ids = torch.randint(vocab, (count,), generator=g)
    fields = {"advantage": normal(count)}
    fields |= {name: -math.log(vocab) + 0.5 * normal(count) for name in ("old", "ref")}
    for name in ("multiplier", "weight_ratio", "weight_direct", "temperature"):
        fields[name] = 0.5 + torch.rand(count, generator=g)
    table = make_table(count, **(fields if temperature else fields | {"temperature": 1.0}))
    head = normal(count, width), normal(vocab, width) * width**-0.5, normal(vocab) * 0.5 if bias else None
    return Head(*(None if x is None else x.to(dtype) for x in head), ids, table)


def spaced(x: Tensor, fill: float = math.nan) -> Tensor:
    """x as the front of longer rows, at multiples of 16 bytes."""
    rows, columns = x.shape
    wide = torch.full((rows, (columns + 7) // 8 * 8 + 8), fill, dtype=x.dtype)
    wide[:, :columns] = x
    return wide[:, :columns]


def chunk_of(head: Head, hidden: Tensor, params: KernelParams = PLAIN) -> HeadChunk:
    return HeadChunk(hidden, spaced(head.weight), head.bias, head.ids, head.temperature.contiguous(), params)


def statistics(kernels: Kernels, head: Head, params: KernelParams = PLAIN, *, entropy: bool = True) -> RowStats:
    return kernels.linear_logp(chunk_of(head, spaced(head.hidden), params), entropy=entropy)


def exponentials(kernels: Kernels, head: Head, params: KernelParams = PLAIN) -> tuple[RowStats, Tensor, Tensor]:
    """(statistics, E, v); E in a buffer that holds something before, of which nothing else is written."""
    exps = spaced(torch.full((len(head.ids), len(head.weight)), 7.0, dtype=torch.bfloat16), 7.0)
    stats, scale = kernels.anchored(chunk_of(head, spaced(head.hidden), params), head.table, exps)
    around = exps.as_strided((len(head.ids), exps.stride(0) - len(head.weight)), exps.stride(), len(head.weight))
    assert (around == 7.0).all()
    return stats, exps.clone(), scale


def both(kernels: Kernels, head: Head) -> tuple[Tensor, ...]:
    """All results of both kernels: statistics of either, E, v."""
    stats, exps, scale = exponentials(kernels, head)
    return *statistics(kernels, head), *stats, exps, scale


def exact(head: Head, params: KernelParams = PLAIN) -> tuple[RowStats, Tensor]:
    """Statistics and d loss / d logits in float64."""
    logits = head.logits()
    grad = torch.empty_like(logits)
    return single_pass(TorchBackend(), logits, grad, head.ids, head.table.double(), params), grad


def assert_statistics(found: RowStats, expected: RowStats, tolerance: float = 4e-6) -> None:
    for name, x, y in zip(NAMES, found, expected, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-6, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def assert_gradient(exps: Tensor, scale: Tensor, expected: Tensor, slack: float = 5e-5) -> None:
    """Every entry but for one rounding to bfloat16."""
    found = scale.double()[:, None] * exps.double()
    torch.testing.assert_close(found, expected, rtol=ROUNDING + slack, atol=1e-12, equal_nan=True)


def assert_anchored(
    kernels: Kernels, head: Head, params: KernelParams = PLAIN, tolerance: float = 4e-6, slack: float = 5e-5
) -> tuple[RowStats, Tensor, Tensor]:
    """Statistics, and the gradient."""
    expected, grad = exact(head, params)
    stats, exps, scale = exponentials(kernels, head, params)
    assert_statistics(stats, expected, tolerance)
    assert_gradient(exps, scale, grad, slack)
    return stats, exps, scale


def assert_exact(
    kernels: Kernels, head: Head, params: KernelParams = PLAIN, tolerance: float = 4e-6, slack: float = 5e-5
) -> None:
    """Both kernels."""
    assert_statistics(statistics(kernels, head, params), exact(head, params)[0], tolerance)
    assert_anchored(kernels, head, params, tolerance, slack)


def same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(x.nan_to_num(1e30), y.nan_to_num(1e30)) for x, y in zip(found, expected, strict=True))


# --- types, options, shapes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(kernels, variant, dtype):
    if kernels.name == "triton":
        head = make_head(dtype=dtype, bias=variant != "plain")
        assert_statistics(statistics(kernels, head, VARIANTS[variant]), exact(head, VARIANTS[variant])[0])
    else:
        assert_exact(kernels, make_head(140, 72, 600, dtype, bias=variant != "plain"), VARIANTS[variant])


# Every surrogate and every estimator, with the variants in turn.
OBJECTIVES = [
    (surrogate, KL_ESTIMATORS[i % len(KL_ESTIMATORS)], list(VARIANTS)[i % len(VARIANTS)])
    for i, surrogate in enumerate(SURROGATES)
]


@pytest.mark.parametrize(("surrogate", "kl", "variant"), OBJECTIVES)
def test_anchored(kernels, surrogate, kl, variant):
    params = VARIANTS[variant]._replace(
        surrogate=surrogate, kl=kl, has_old=surrogate != "sapo", bias_correction=kl in ("k3", "k1+"),
        beta=0.1, delta=3.0, dual_clip=2.5, epsilon_high=0.28, weight_low=0.0, weight_high=1.4,
    )  # fmt: skip
    head = make_head(bias=variant != "scale", seed=len(surrogate))
    assert exact(head, params)[1].norm() > 0.1
    assert_anchored(kernels, head, params)


SHAPES = [(1, 1, 2), (32, 32, 96), (33, 33, 31), (3, 48, 150), (64, 8, 40)]
LARGE_SHAPES = [(128, 64, 256), (129, 65, 257), (3, 320, 511), (300, 24, 1030)]  # of the tiles of a GPU


@pytest.mark.parametrize("shape", [*SHAPES, *LARGE_SHAPES], ids=str)
def test_any_shape(kernels, shape):
    if kernels.name == "cuda" or shape in SHAPES:
        assert_exact(kernels, make_head(*shape, bias=shape[2] % 2 == 1))


# --- numbers that are hard to add up ----------------------------------------------------------------------------------


def test_masked_vocabulary(kernels):
    """-inf over whole tiles and parts, in front, between and at the end."""
    unit = 100 if kernels.name == "cuda" else 10
    head = make_head(40, 24, 15 * unit)
    for masked in (slice(0, 6 * unit), slice(7 * unit, 7 * unit + 4), slice(10 * unit, None)):
        head.bias[masked] = -math.inf
    head.ids.clamp_(6 * unit, 7 * unit - 1)
    assert_exact(kernels, head)


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_logits_far_from_zero(kernels, offset):
    """Logits that float32 holds exactly: only their differences count, and lse keeps its digits."""
    head = make_head(dtype=torch.float16, temperature=False)
    head = head._replace(
        hidden=(head.hidden * 4).round() / 4,
        weight=(head.weight * 16).round() / 16,
        bias=torch.full_like(head.bias, offset),
    )
    assert torch.equal(head.logits().float().double(), head.logits())
    expected, _ = exact(head)
    found = statistics(kernels, head)
    assert_statistics(found, expected, 2e-6)
    torch.testing.assert_close(found.lse, expected.lse, rtol=0, atol=4e-7)

    head = head._replace(hidden=head.hidden.bfloat16(), weight=head.weight.bfloat16(), bias=head.bias.bfloat16())
    stats, _, _ = assert_anchored(kernels, head, tolerance=2e-6)
    torch.testing.assert_close(stats.lse, exact(head)[0].lse, rtol=0, atol=4e-7)


@pytest.mark.parametrize("id_", [-100, 70, 2**32 + 3])
def test_id_outside_the_vocabulary(kernels, id_):
    head = make_head()
    head.hidden[5] *= 200  # without an anchor, exponentials that would overflow
    expected = both(kernels, head)
    head.ids[5] = id_
    head.table[FIELD["weight_ratio"], 5] = head.table[FIELD["weight_direct"], 5] = 0.0
    others = torch.arange(len(head.ids)) != 5
    found = both(kernels, head)
    logp, lse, entropy, anchored_logp, _, _, exps, scale = found
    assert logp[5].isnan() and anchored_logp[5].isnan() and scale[5] == 0.0 and exps[5].isfinite().all()
    assert torch.equal(lse, expected[1]) and torch.equal(entropy, expected[2])
    assert same_bits([x[others] for x in found], [y[others] for y in expected])


def test_nan_stays_in_its_row(kernels):
    head = make_head()
    expected = both(kernels, head)
    head.hidden[5, 3] = math.nan
    others = torch.arange(len(head.ids)) != 5
    found = both(kernels, head)
    assert same_bits([x[others] for x in found], [y[others] for y in expected])
    assert all(x[5].isnan() for x in found[:6])


def test_entropy_threshold_drops_tokens(kernels):
    head = make_head()
    entropy = exact(head)[0].entropy
    head.table[FIELD["entropy_threshold"]] = entropy.median().float() + 1e-3
    _, grad = exact(head)
    zero_gradient = (grad == 0).all(1)
    assert zero_gradient.any() and not zero_gradient.all()
    _, exps, scale = exponentials(kernels, head)
    assert_gradient(exps, scale, grad)
    assert torch.equal(scale == 0, zero_gradient)


def lead(head: Head, nats: float, rows: slice | None = None) -> Head:
    """The sampled ids' logits raised by about `nats`, through one more hidden dimension."""
    count, vocab = len(head.ids), len(head.weight)
    extra_h = torch.zeros(count, vocab, dtype=head.hidden.dtype)
    chosen = torch.arange(count)[rows or slice(None)]
    extra_h[chosen, head.ids[chosen]] = nats
    eye = torch.eye(vocab, dtype=head.weight.dtype)
    return head._replace(hidden=torch.cat([head.hidden, extra_h], 1), weight=torch.cat([head.weight, eye], 1))


@pytest.mark.parametrize("nats", [12.0, 40.0])
def test_probability_near_one_keeps_its_digits(kernels, nats):
    """logp and d loss / d z_id are of the size of 1 - p, and as exact relative to that as the logits allow."""
    head = lead(make_head(12, 8, 40, temperature=False), nats)
    z = head.logits()
    others = z.masked_fill(torch.nn.functional.one_hot(head.ids, 40).bool(), -math.inf)
    rest = (others - z.gather(1, head.ids[:, None])).exp().sum(1)
    assert rest.max() < 2e-3
    stats, exps, scale = exponentials(kernels, head)
    torch.testing.assert_close(stats.logp.double(), -rest.log1p(), rtol=2e-5, atol=0)
    g = -head.table[FIELD["weight_direct"]] * head.table[FIELD["advantage"]] * head.table[FIELD["multiplier"]]
    pull = (scale.double() * exps.gather(1, head.ids[:, None]).squeeze(1).double()) / g.double()
    torch.testing.assert_close(pull, rest / (1 + rest), rtol=ROUNDING + 5e-5, atol=0)


@pytest.mark.parametrize("nats", [45.0, 95.0, 400.0])
@pytest.mark.parametrize("softcap", [0.0, 500.0], ids=["", "softcap"])
def test_improbable_targets(kernels, nats, softcap):
    """Some rows overflow and are repaired: the others are as before, and these are exact as well."""
    few = slice(3, 9, 2)
    params = PLAIN._replace(softcap=softcap)
    plain = make_head(18, 8, 40)
    plain.temperature[3] = 1.0
    head = lead(plain, -nats, few)
    stats, *repaired = assert_anchored(kernels, head, params, 1e-4 if softcap else 3e-5, 4e-4)
    assert stats.logp[3] < -0.8 * nats or softcap
    kept, *without = exponentials(kernels, lead(plain, 0.0), params)
    others = torch.ones(18, dtype=torch.bool)
    others[few] = False
    for x, y in zip((*stats, *repaired), (*kept, *without), strict=True):
        assert torch.equal(x[others], y[others])


@pytest.mark.parametrize("nats", [0.0, -40.0, -3000.0])
def test_a_token_without_gradient_adds_nothing(kernels, nats):
    head = lead(make_head(10, 8, 40), nats)
    head.table[FIELD["advantage"], ::2] = 0.0
    head.table[FIELD["weight_direct"], 1] = 0.0
    _, exps, scale = exponentials(kernels, head)
    zero_gradient = torch.tensor([True, True] + [i % 2 == 0 for i in range(2, 10)])
    assert torch.equal(scale == 0.0, zero_gradient)
    assert exps.isfinite().all()
    assert (scale[:, None] * (exps.float() @ head.weight.float())).isfinite().all()


def test_a_masked_target(kernels):
    """Probability 0: logp is -inf, which has no ratio to itself: NaN for these tokens and no others."""
    head = make_head()
    head.bias[head.ids[4]] = -math.inf
    masked = head.ids == head.ids[4]
    stats, exps, scale = assert_anchored(kernels, head)
    assert (stats.logp[masked] == -math.inf).all() and exps.isfinite().all()
    assert torch.equal(scale.isnan(), masked)


# --- Triton: tiles, parts, descriptors --------------------------------------------------------------------------------


def rows_of(head: Head, rows: slice) -> Head:
    return Head(head.hidden[rows], head.weight, head.bias, head.ids[rows], head.table[:, rows])


@only_triton
def test_a_row_has_the_same_bits_in_any_batch_in_its_place_of_a_tile(kernels):
    """numpy's products, which the interpreter takes, differ from row to row of a tile."""
    head = make_head(101)
    whole, tile = statistics(kernels, head), matmul_launch("linear_logp", CPU, 40, 70, torch.bfloat16).block_m
    for rows in (slice(0, 1), slice(tile, tile + 1), slice(0, 2 * tile), slice(2 * tile, 101)):
        assert same_bits(statistics(kernels, rows_of(head, rows)), tuple(x[rows] for x in whole))


@only_triton
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_are_combined(kernels, parts, monkeypatch):
    """The largest logit of a row lies in any part: each of them is once the reference of the others."""
    head = make_head(40, 16, 150, bias=False)
    head.weight.mul_(6)  # parts differ by many nats
    monkeypatch.setattr(matmul, "INTERPRETER_PARTS", parts)
    assert_exact(kernels, head, tolerance=2e-5, slack=1e-4)


@only_triton
@pytest.mark.parametrize("kernel", ["linear_logp", "anchored"])
def test_descriptors_fetch_what_pointers_fetch(kernels, kernel):
    def fetches_through_descriptors(hidden: Tensor) -> bool:
        return matmul.prepare(kernel, hidden, head.weight, None, KernelParams()).tiles.tma

    head = make_head(40, 40, 150)
    launch = matmul_launch(kernel, CPU, 40, 150, torch.bfloat16)
    with trial(kernel, launch._replace(tma=False)):
        assert not fetches_through_descriptors(head.hidden)
        expected = both(kernels, head)
    with trial(kernel, launch._replace(tma=True)):
        assert fetches_through_descriptors(head.hidden)
        assert same_bits(both(kernels, head), expected)
        # A descriptor needs 16-byte row strides: these rows begin 90 bytes apart.
        apart = torch.cat([head.hidden, torch.full_like(head.hidden[:, :5], math.nan)], 1)[:, :40]
        assert not fetches_through_descriptors(apart)
        assert same_bits(kernels.linear_logp(chunk_of(head, apart), entropy=True), expected[:3])


# --- CUDA: orders, schedules, what is served --------------------------------------------------------------------------


@only_cuda
@pytest.mark.parametrize(("width", "multiprocessors"), [(40, 132), (330, 2)])
def test_any_order_and_split(kernels, width, multiprocessors):
    """Fewer steps than stages of the ring, and more. Three row tiles by four of the vocabulary: more items than blocks,
    or fewer. The same bits always."""
    head, results = make_head(270, width, 800), []
    for order in ORDERS[::2]:
        kernels.use((90, multiprocessors), order)
        results.append(both(kernels, head))
    assert all(same_bits(found, results[0]) for found in results)
    expected, grad = exact(head)
    assert_statistics(RowStats(*results[0][:3]), expected)
    assert_statistics(RowStats(*results[0][3:6]), expected)
    assert_gradient(*results[0][6:], grad)


@only_cuda
@pytest.mark.parametrize("multiprocessors", [2, 5])
def test_a_row_has_the_same_bits_in_any_batch(kernels, multiprocessors):
    """Alone, in part of a tile, in tiles of single blocks and of pairs; the vocabulary's six tiles in several parts."""
    head = make_head(390, 40, 1500)
    kernels.use((90, multiprocessors))
    whole = statistics(kernels, head)
    for rows in (slice(7, 8), slice(100, 150), slice(0, 128), slice(30, 286), slice(5, 390)):
        assert same_bits(statistics(kernels, rows_of(head, rows)), tuple(x[rows] for x in whole))


@only_cuda
def test_every_tile_has_its_item(kernels):
    for row_blocks, tiles, group in ((1, 1, 1), (5, 7, 2), (64, 501, 8), (7, 3, 7), (3, 20, 1), (16, 9, 5)):
        for per_part in {1, 2, 3, tiles}:
            assert kernels.items_cover(row_blocks, tiles, per_part, group)


@only_cuda
def test_strategies(kernels):
    def served(hidden: Tensor, weight: Tensor) -> set[str]:
        found = kernels.strategies(hidden, weight)
        assert found[0] == "rows"  # the others wait for a measurement
        return set(found)

    x, narrow = torch.zeros(8, 24, dtype=torch.bfloat16), torch.zeros(8, 25, dtype=torch.bfloat16)
    assert served(x, x) == {"rows", "linear", "anchored"}
    assert served(x.half(), x.half()) == {"rows", "linear"}  # float16 cannot hold e^(z - z_id)
    assert served(x, x[:7]) == {"rows", "linear"}  # rows of exponentials would begin off the alignment
    shifted, overlapping = torch.zeros(8, 40, dtype=x.dtype)[:, 1:25], x.as_strided((8, 24), (8, 1))
    for weight in (x.float(), narrow, x.T.contiguous().T, shifted, x[:1].expand(8, 24), overlapping):
        assert served(torch.zeros(8, weight.shape[1], dtype=weight.dtype), weight) == {"rows"}
    assert served(x.float(), x) == served(x[:0], x) == {"rows"}
    kernels.use((80,))
    assert served(x, x) == {"rows"}


@only_cuda
def test_hidden_states_off_the_alignment_are_copied(kernels):
    head = make_head()
    expected = statistics(kernels, head)
    wide = torch.cat([head.hidden[:, :1], head.hidden], 1)
    for hidden in (wide[:, 1:], wide[:, 1:].T.contiguous().T, head.hidden):
        assert same_bits(kernels.linear_logp(chunk_of(head, hidden), entropy=True), expected)

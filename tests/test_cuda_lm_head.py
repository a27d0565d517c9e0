"""The head kernels of compute capability 9.0 on the CPU: ring, barriers, swizzles and schedule run as on the device.

TMA and wgmma are modelled (emulator/sm90.h). Against float64, in several orders of threads, with work split in several
ways.
"""

from __future__ import annotations

import math

import pytest
import torch
from emulator.lm_head import HeadKernels, build_head
from test_triton_matmul import (
    OBJECTIVES,
    PLAIN,
    ROUNDING,
    VARIANTS,
    Head,
    assert_gradient,
    assert_statistics,
    exact,
    lead,
    make_head,
    same_bits,
)
from torch import Tensor

from grpo_kernels.contract import RowStats
from grpo_kernels.names import FIELD, KernelParams

HALVES = (torch.bfloat16, torch.float16)
ORDERS = (0, 1, 2, 3, 5, 8)  # see emulator.h, and sm90.h for what copies and products make of them
MULTIPROCESSORS = (1, 2, 5, 132)


@pytest.fixture(scope="module")
def library():
    return build_head()


@pytest.fixture
def kernels(library) -> HeadKernels:
    kernels = HeadKernels(library)
    kernels.use()
    return kernels


def spaced(x: Tensor, fill: float = math.nan) -> Tensor:
    """x as the front of longer rows, at multiples of 16 bytes."""
    rows, columns = x.shape
    wide = torch.full((rows, (columns + 7) // 8 * 8 + 8), fill, dtype=x.dtype)
    wide[:, :columns] = x
    return wide[:, :columns]


def operands(head: Head) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    bias = None if head.bias is None else head.bias.float()
    return spaced(head.hidden), spaced(head.weight), bias, head.ids


def statistics(kernels: HeadKernels, head: Head, params: KernelParams = PLAIN, *, entropy: bool = True) -> RowStats:
    return kernels.linear_logp(*operands(head), head.temperature.contiguous(), params, entropy=entropy)


def exponentials(kernels: HeadKernels, head: Head, params: KernelParams = PLAIN) -> tuple[RowStats, Tensor, Tensor]:
    """(statistics, E, v); E lies in a buffer that holds something before, and beyond E still does afterwards."""
    rows, vocab = len(head.ids), len(head.weight)
    exps = spaced(torch.full((rows, vocab), 7.0, dtype=torch.bfloat16), 7.0)
    stats, scale = kernels.anchored(*operands(head), head.table, exps, params)
    around = exps.as_strided((rows, exps.stride(0) - vocab), exps.stride(), vocab)
    assert (around == 7.0).all()
    return stats, exps, scale


def assert_right(kernels: HeadKernels, head: Head, params: KernelParams = PLAIN, tolerance: float = 4e-6) -> None:
    expected, grad = exact(head, params)
    assert_statistics(statistics(kernels, head, params), expected, tolerance)
    stats, exps, scale = exponentials(kernels, head, params)
    assert_statistics(stats, expected, tolerance)
    assert_gradient(exps, scale, grad, 5e-5)


# --- products, tiles, orders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_variants(kernels, variant, bias, dtype):
    assert_right(kernels, make_head(140, 72, 600, dtype, bias=bias), VARIANTS[variant])


SHAPES = [(1, 1, 2), (128, 64, 256), (129, 65, 257), (3, 320, 511), (300, 24, 1030), (64, 8, 40)]


@pytest.mark.parametrize(("rows", "width", "vocab"), SHAPES)
def test_any_shape(kernels, rows, width, vocab):
    assert_right(kernels, make_head(rows, width, vocab))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("multiprocessors", MULTIPROCESSORS)
@pytest.mark.parametrize("width", [40, 330])  # fewer steps than stages of the ring, and more
def test_any_order_and_split(kernels, width, multiprocessors, order):
    """Three row tiles by four of the vocabulary: more items than blocks, as many, or fewer. The same bits always."""
    head = make_head(270, width, 800)
    kernels.use(multiprocessors, order)
    found = statistics(kernels, head), *exponentials(kernels, head)
    if order == 0:
        expected, grad = exact(head)
        assert_statistics(found[0], expected)
        assert_statistics(found[1], expected)
        assert_gradient(*found[2:], grad)
    else:
        kernels.use(multiprocessors)
        first = statistics(kernels, head), *exponentials(kernels, head)
        assert same_bits((*found[0], *found[1], *found[2:]), (*first[0], *first[1], *first[2:]))


@pytest.mark.parametrize("multiprocessors", [2, 5])
def test_a_row_has_the_same_bits_in_any_batch(kernels, multiprocessors):
    """Alone, in part of a tile, in tiles of single blocks and of pairs; the vocabulary's six tiles in several parts."""
    head = make_head(390, 40, 1500)
    kernels.use(multiprocessors)
    whole = statistics(kernels, head)
    for rows in (slice(0, 1), slice(7, 8), slice(100, 150), slice(0, 128), slice(30, 286), slice(5, 390)):
        part = Head(head.hidden[rows], head.weight, head.bias, head.ids[rows], head.table[:, rows])
        assert same_bits(statistics(kernels, part), tuple(x[rows] for x in whole))


@pytest.mark.parametrize("order", ORDERS)
def test_pairs_of_blocks(kernels, order):
    """Two blocks share the weight's tiles, and there are more items than clusters."""
    kernels.use(4, order)
    assert_right(kernels, make_head(250, 330, 1100))


SCHEDULES = [(1, 1, 1), (5, 7, 2), (64, 501, 8), (7, 3, 7), (3, 20, 1), (16, 9, 5)]


@pytest.mark.parametrize(("row_blocks", "tiles", "group"), SCHEDULES)
def test_every_tile_has_its_item(kernels, row_blocks, tiles, group):
    for per_part in {1, 2, 3, tiles}:
        assert kernels.covers(row_blocks, tiles, per_part, group)


def test_without_entropy(kernels):
    head = make_head()
    found = statistics(kernels, head, entropy=False)
    assert same_bits(found[:2], statistics(kernels, head)[:2])
    assert found.entropy.isnan().all()  # not written


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_masked_vocabulary(kernels):
    """-inf over whole tiles and parts, in front, between and at the end."""
    head = make_head(40, 24, 1500)
    for masked in (slice(0, 600), slice(700, 710), slice(1000, None)):
        head.bias[masked] = -math.inf
    head.ids.clamp_(600, 699)
    assert_right(kernels, head)


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_logits_far_from_zero(kernels, offset):
    head = make_head(dtype=torch.bfloat16, temperature=False)
    head = head._replace(
        hidden=(head.hidden * 4).round() / 4,
        weight=(head.weight * 16).round() / 16,
        bias=torch.full_like(head.bias, offset),
    )
    assert torch.equal(head.logits().float().double(), head.logits())
    assert_right(kernels, head, tolerance=2e-6)


@pytest.mark.parametrize("id_", [-100, -1, 600, 2**32 + 3])
def test_id_outside_the_vocabulary(kernels, id_):
    head = make_head(30, 24, 600)
    expected = statistics(kernels, head), *exponentials(kernels, head)
    head.ids[5] = id_
    head.table[FIELD["weight_ratio"], 5] = head.table[FIELD["weight_direct"], 5] = 0.0
    others = torch.arange(30) != 5

    found = statistics(kernels, head)
    assert found.logp[5].isnan()
    assert torch.equal(found.lse, expected[0].lse) and torch.equal(found.entropy, expected[0].entropy)
    assert torch.equal(found.logp[others], expected[0].logp[others])

    stats, exps, scale = exponentials(kernels, head)
    assert stats.logp[5].isnan() and scale[5] == 0.0 and exps[5].isfinite().all()
    for x, y in zip((*stats, exps, scale), (*expected[1], *expected[2:]), strict=True):
        assert torch.equal(x[others], y[others])


def test_nan_stays_in_its_row(kernels):
    head = make_head(140, 24, 300)
    expected = statistics(kernels, head), *exponentials(kernels, head)
    head.hidden[5, 3] = math.nan
    others = torch.arange(140) != 5
    found = statistics(kernels, head), *exponentials(kernels, head)
    for x, y in zip((*found[0], *found[1], *found[2:]), (*expected[0], *expected[1], *expected[2:]), strict=True):
        assert torch.equal(x[others], y[others])
    assert all(x[5].isnan().all() for x in (*found[0], *found[1], found[2]))


# --- objective and repair ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("surrogate", "kl", "corrected"), OBJECTIVES, ids=[name for name, *_ in OBJECTIVES])
def test_objectives(kernels, surrogate, kl, corrected):
    params = PLAIN._replace(
        surrogate=surrogate, kl=kl, has_old=surrogate != "reinforce", bias_correction=corrected and kl != "none",
        beta=0.1, delta=3.0, dual_clip=2.5, epsilon_high=5.0 if surrogate == "cispo" else 0.28,
    )  # fmt: skip
    assert_right(kernels, make_head(40, 24, 300, seed=len(surrogate)), params)


@pytest.mark.parametrize("nats", [16.0, 20.0, 40.0])
def test_probability_near_one_keeps_its_digits(kernels, nats):
    head = lead(make_head(12, 8, 40, temperature=False), nats)
    z = head.logits()
    others = z.masked_fill(torch.nn.functional.one_hot(head.ids, 40).bool(), -math.inf)
    rest = (others - z.gather(1, head.ids[:, None])).exp().sum(1)
    assert rest.max() < 1e-3
    stats, exps, scale = exponentials(kernels, head)
    torch.testing.assert_close(stats.logp.double(), -rest.log1p(), rtol=2e-5, atol=0)
    g = -head.table[FIELD["weight_direct"]] * head.table[FIELD["advantage"]] * head.table[FIELD["multiplier"]]
    pull = (scale.double() * exps.gather(1, head.ids[:, None]).squeeze(1).double()) / g.double()
    torch.testing.assert_close(pull, rest / (1 + rest), rtol=ROUNDING + 5e-5, atol=0)


@pytest.mark.parametrize("nats", [45.0, 60.0, 95.0, 400.0])
@pytest.mark.parametrize("softcap", [0.0, 500.0], ids=["", "softcap"])
def test_improbable_targets(kernels, nats, softcap):
    """Some rows overflow and are repaired: the others are as before."""
    few = slice(3, 9, 2)
    params = PLAIN._replace(softcap=softcap)
    plain = make_head(18, 8, 40)
    plain.temperature[3] = 1.0
    head = lead(plain, -nats, few)
    expected, grad = exact(head, params)
    stats, exps, scale = exponentials(kernels, head, params)
    assert_statistics(stats, expected, 1e-4 if softcap else 3e-5)
    assert_gradient(exps, scale, grad, 4e-4)
    kept = exponentials(kernels, lead(plain, 0.0), params)
    others = torch.ones(18, dtype=torch.bool)
    others[few] = False
    for x, y in zip((*stats, exps, scale), (*kept[0], *kept[1:]), strict=True):
        assert torch.equal(x[others], y[others])


@pytest.mark.parametrize("nats", [0.0, -95.0, -3000.0])
def test_a_token_without_gradient_adds_nothing(kernels, nats):
    head = lead(make_head(10, 8, 40), nats)
    head.table[FIELD["advantage"], ::2] = 0.0
    head.table[FIELD["weight_direct"], 1] = 0.0
    _, exps, scale = exponentials(kernels, head)
    zero_gradient = torch.tensor([True, True] + [i % 2 == 0 for i in range(2, 10)])
    assert torch.equal(scale == 0.0, zero_gradient)
    assert exps.isfinite().all()


def test_a_masked_target(kernels):
    """Probability 0: logp is -inf, and what the gradient is made of stays finite."""
    head = make_head()
    head.bias[head.ids[4]] = -math.inf
    masked = head.ids == head.ids[4]
    expected, grad = exact(head)
    stats, exps, scale = exponentials(kernels, head)
    assert (stats.logp[masked] == -math.inf).all() and exps.isfinite().all() and scale.isfinite().all()
    assert_statistics(stats, expected)
    assert_gradient(exps, scale, grad)


# --- what is served ---------------------------------------------------------------------------------------------------


def test_serves(kernels):
    x = torch.zeros(4, 24, dtype=torch.bfloat16)
    odd, shifted = torch.zeros(4, 25, dtype=torch.bfloat16), torch.zeros(4, 40, dtype=torch.bfloat16)[:, 1:25]
    assert kernels.serves(x, x) and kernels.serves(x.half(), x.half()) and kernels.serves(x, x, x)
    assert not kernels.serves(x.float(), x.float())
    assert not any(kernels.serves(*pair) for pair in [(odd, x), (x, odd), (shifted, x), (x, shifted), (x[:0], x)])
    assert not kernels.serves(x, x, odd) and not kernels.serves(x, x, shifted)
    expanded, short = x[:1].expand(4, 24), torch.zeros(64, dtype=torch.bfloat16).as_strided((4, 24), (8, 1))
    assert not any(kernels.serves(*pair) for pair in [(expanded, x), (x, expanded), (short, x), (x, short)])
    assert not kernels.serves(x, torch.zeros(24, 24, dtype=torch.bfloat16), short)
    kernels.use(capability=80)
    assert not kernels.serves(x, x)
    with pytest.raises(RuntimeError, match=r"compute capability 9\.0"):
        statistics(kernels, make_head())

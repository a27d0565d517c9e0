"""The head kernels of compute capability 9.0 on the CPU: ring, barriers, swizzles and schedule run as on the device.

TMA and wgmma are modelled (emulator/sm90.h). Against float64, in several orders of threads, with work split in several
ways. What the numbers must be is said by the tests of Triton's kernels, which run here on these.
"""

from __future__ import annotations

import math

import pytest
import test_triton_matmul
import torch
from emulator import Emulated
from test_triton_matmul import (  # noqa: F401
    PLAIN,
    VARIANTS,
    Head,
    assert_gradient,
    assert_statistics,
    exact,
    exponentials,
    make_head,
    same_bits,
    statistics,
    test_a_masked_target,
    test_a_token_without_gradient_adds_nothing,
    test_anchored,
    test_entropy_threshold_drops_tokens,
    test_id_outside_the_vocabulary,
    test_linear_logp_without_entropy,
    test_logits_far_from_zero,
    test_nan_stays_in_its_row,
    test_probability_near_one_keeps_its_digits,
)
from torch import Tensor

from grpo_kernels.backends import get_backend
from grpo_kernels.contract import RowStats
from grpo_kernels.names import KernelParams

HALVES = (torch.bfloat16, torch.float16)
ORDERS = (0, 1, 2, 3, 5, 8)  # see emulator.h, and sm90.h for what copies and products make of them


@pytest.fixture
def kernels() -> Emulated:
    """What they do not write holds NaN."""
    kernels = get_backend("cuda")
    torch.use_deterministic_algorithms(True)
    yield kernels
    torch.use_deterministic_algorithms(False)
    kernels.use()


@pytest.fixture(autouse=True)
def _these_kernels_in_place_of_tritons(kernels, monkeypatch):
    put_in_place(kernels, monkeypatch.setattr)


def put_in_place(kernels: Emulated, set_attribute=setattr) -> None:
    """`statistics` and `exponentials` call these kernels, with rows at multiples of 16 bytes."""

    def linear_logp(hidden: Tensor, weight: Tensor, *given: Tensor | KernelParams, entropy: bool) -> RowStats:
        return kernels.linear_logp(spaced(hidden), spaced(weight), *given, entropy=entropy)

    def anchored(
        hidden: Tensor, weight: Tensor, bias: Tensor, ids: Tensor, table: Tensor, exps: Tensor, params: KernelParams
    ) -> tuple[RowStats, Tensor]:
        written = spaced(exps, 7.0)
        stats, scale = kernels.anchored(spaced(hidden), spaced(weight), bias, ids, table, written, params)
        around = written.as_strided((len(ids), written.stride(0) - len(weight)), written.stride(), len(weight))
        assert (around == 7.0).all()
        exps.copy_(written)
        return stats, scale

    set_attribute(test_triton_matmul, "linear_logp", linear_logp)
    set_attribute(test_triton_matmul, "anchored", anchored)


def spaced(x: Tensor, fill: float = math.nan) -> Tensor:
    """x as the front of longer rows, at multiples of 16 bytes."""
    rows, columns = x.shape
    wide = torch.full((rows, (columns + 7) // 8 * 8 + 8), fill, dtype=x.dtype)
    wide[:, :columns] = x
    return wide[:, :columns]


def assert_right(head: Head, params: KernelParams = PLAIN) -> None:
    expected, grad = exact(head, params)
    assert_statistics(statistics(head, params), expected)
    stats, exps, scale = exponentials(head, params)
    assert_statistics(stats, expected)
    assert_gradient(exps, scale, grad, 5e-5)


# --- products, tiles, orders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_variants(variant, bias, dtype):
    assert_right(make_head(140, 72, 600, dtype, bias=bias), VARIANTS[variant])


SHAPES = [(1, 1, 2), (128, 64, 256), (129, 65, 257), (3, 320, 511), (300, 24, 1030), (64, 8, 40)]


@pytest.mark.parametrize(("rows", "width", "vocab"), SHAPES)
def test_any_shape(rows, width, vocab):
    assert_right(make_head(rows, width, vocab))


@pytest.mark.parametrize(("width", "multiprocessors"), [(40, 1), (40, 5), (330, 2), (330, 132)])
def test_any_order_and_split(kernels, width, multiprocessors):
    """Fewer steps than stages of the ring, and more. Three row tiles by four of the vocabulary: more items than blocks,
    as many, or fewer. The same bits always."""
    head, results = make_head(270, width, 800), []
    for order in ORDERS:
        kernels.use((90, multiprocessors), order)
        stats, exps, scale = exponentials(head)
        results.append((*statistics(head), *stats, exps, scale))
    assert all(same_bits(found, results[0]) for found in results)
    expected, grad = exact(head)
    assert_statistics(RowStats(*results[0][:3]), expected)
    assert_statistics(RowStats(*results[0][3:6]), expected)
    assert_gradient(*results[0][6:], grad)


@pytest.mark.parametrize("multiprocessors", [2, 5])
def test_a_row_has_the_same_bits_in_any_batch(kernels, multiprocessors):
    """Alone, in part of a tile, in tiles of single blocks and of pairs; the vocabulary's six tiles in several parts."""
    head = make_head(390, 40, 1500)
    kernels.use((90, multiprocessors))
    whole = statistics(head)
    for rows in (slice(0, 1), slice(7, 8), slice(100, 150), slice(0, 128), slice(30, 286), slice(5, 390)):
        part = Head(head.hidden[rows], head.weight, head.bias, head.ids[rows], head.table[:, rows])
        assert same_bits(statistics(part), tuple(x[rows] for x in whole))


@pytest.mark.parametrize("order", ORDERS[::2])
def test_pairs_of_blocks(kernels, order):
    """Two blocks share the weight's tiles, and there are more items than clusters."""
    kernels.use((90, 4), order)
    assert_right(make_head(250, 330, 1100))


SCHEDULES = [(1, 1, 1), (5, 7, 2), (64, 501, 8), (7, 3, 7), (3, 20, 1), (16, 9, 5)]


@pytest.mark.parametrize(("row_blocks", "tiles", "group"), SCHEDULES)
def test_every_tile_has_its_item(kernels, row_blocks, tiles, group):
    for per_part in {1, 2, 3, tiles}:
        assert kernels.items_cover(row_blocks, tiles, per_part, group)


def test_masked_vocabulary():
    """-inf over whole tiles and parts, in front, between and at the end."""
    head = make_head(40, 24, 1500)
    for masked in (slice(0, 600), slice(700, 710), slice(1000, None)):
        head.bias[masked] = -math.inf
    head.ids.clamp_(600, 699)
    assert_right(head)


@pytest.mark.parametrize("nats", [45.0, 60.0, 95.0, 400.0])
@pytest.mark.parametrize("softcap", [0.0, 500.0], ids=["", "softcap"])
def test_improbable_targets(nats, softcap):
    """Some rows overflow and are repaired: the others are as before."""
    few = slice(3, 9, 2)
    params = PLAIN._replace(softcap=softcap)
    plain = make_head(18, 8, 40)
    plain.temperature[3] = 1.0
    head = test_triton_matmul.lead(plain, -nats, few)
    expected, grad = exact(head, params)
    stats, exps, scale = exponentials(head, params)
    assert_statistics(stats, expected, 1e-4 if softcap else 3e-5)
    assert_gradient(exps, scale, grad, 4e-4)
    kept = exponentials(test_triton_matmul.lead(plain, 0.0), params)
    others = torch.ones(18, dtype=torch.bool)
    others[few] = False
    for x, y in zip((*stats, exps, scale), (*kept[0], *kept[1:]), strict=True):
        assert torch.equal(x[others], y[others])


# --- what is served ---------------------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match=r"compute capability 9\.0"):
        statistics(make_head())


def test_hidden_states_off_the_alignment_are_copied(kernels):
    head = make_head()
    given = head.weight, head.bias, head.ids, head.temperature.contiguous(), PLAIN
    expected = statistics(head)
    wide = torch.cat([head.hidden[:, :1], head.hidden], 1)
    for hidden in (wide[:, 1:], wide[:, 1:].T.contiguous().T, head.hidden):
        assert same_bits(kernels.linear_logp(hidden, *given, entropy=True), expected)


@pytest.mark.parametrize("change", [torch.Tensor.half, lambda x: x[:, :-1], lambda x: x[:-1]])
def test_wrong_memory_for_the_exponentials_is_refused(kernels, change):
    head = make_head()
    exps = change(torch.empty(len(head.ids), len(head.weight), dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="exponentials"):
        kernels.anchored(head.hidden, head.weight, head.bias, head.ids, head.table, exps, PLAIN)

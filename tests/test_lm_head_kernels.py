"""The kernels with a softmax in the epilogue of a matrix product, fused_logp and fused_exponentials, against float64.

Triton's run in its interpreter. CUDA's, of compute capability 9.0, on the emulated GPU: ring, barriers, swizzles and
schedule as on the device, in several orders of threads; TMA and wgmma are modelled (emulator/sm90.h). Exponentials from
rows of logits: test_row_kernels.py.
"""

from __future__ import annotations

import math

import kernel_checks as c
import pytest
import torch
from torch import Tensor

from grpo_kernels.kernels import get_backend
from grpo_kernels.kernels.launch import launch_of
from grpo_kernels.kernels.operations import HeadChunk, PolicyTransform, Rows, RowScales, Statistics, fits_tma
from grpo_kernels.kernels.triton import matmul

TRANSFORMS = {
    "plain": c.PLAIN,
    "scale": PolicyTransform(logit_scale=0.3),
    "softcap": PolicyTransform(softcap=2.0, logit_scale=1.5),
}
ROUNDING = 2.0**-8  # of a value to bfloat16, relative
ORDERS = (0, 1, 2, 3, 5, 8)  # see emulator.h, and sm90.h for what copies and products make of them
CPU = torch.device("cpu")


only_triton = pytest.mark.parametrize("kernels", ["triton"], indirect=True)
only_cuda = pytest.mark.parametrize("kernels", ["cuda"], indirect=True)


def make_head(
    count: int = 21,
    width: int = 40,
    vocab: int = 70,
    dtype: torch.dtype = torch.bfloat16,
    *,
    bias: bool = True,
    temperature: bool = True,
    transform: PolicyTransform = c.PLAIN,
) -> HeadChunk:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    ids = torch.randint(vocab, (count,), generator=g)
    temperatures = 0.5 + torch.rand(count, generator=g) if temperature else torch.ones(count)
    head = normal(count, width), normal(vocab, width) * width**-0.5, normal(vocab) * 0.5 if bias else None
    head = (None if x is None else x.to(dtype) for x in head)
    return HeadChunk(*head, Rows(0, count), ids, temperatures, c.filled_statistics(count), transform)


def logits_of(head: HeadChunk) -> Tensor:
    logits = head.hidden.double() @ head.weight.double().T
    return logits if head.bias is None else logits + head.bias.double()


def spaced(x: Tensor, fill: float = math.nan) -> Tensor:
    """x as the front of longer rows, at multiples of 16 bytes."""
    rows, columns = x.shape
    wide = torch.full((rows, (columns + 7) // 8 * 8 + 8), fill, dtype=x.dtype)
    wide[:, :columns] = x
    return wide[:, :columns]


def apart(head: HeadChunk) -> HeadChunk:
    """Its rows between others, of neighbours among more tokens, or where their number is odd, of a list."""
    count = len(head.ids)
    tokens, rows = 2 * count + 4, Rows(3, 3 + count)
    if count % 2:
        rows = Rows(0, count, 2 * torch.arange(count).flip(0))
    ids, temperature = c.spread(rows, tokens, head.ids, 10**15), c.spread(rows, tokens, head.temperature)
    return head._replace(
        hidden=spaced(head.hidden), weight=spaced(head.weight), rows=rows, ids=ids, temperature=temperature,
        stats=c.filled_statistics(tokens),
    )  # fmt: skip


def written(head: HeadChunk) -> Statistics:
    """The statistics that a kernel has written for these tokens alone."""
    c.check_written(head.rows, head.stats)
    return c.of_rows(head.stats, head.rows)


def statistics(kernels: c.Kernels, head: HeadChunk) -> Statistics:
    among = apart(head)
    kernels.fused_logp(among, entropy=True)
    return written(among)


def exponentials(kernels: c.Kernels, head: HeadChunk) -> tuple[Statistics, Tensor, RowScales]:
    """(statistics, E, scales); E in a buffer that holds something before, of which nothing else is written."""
    count, vocab = len(head.ids), len(head.weight)
    exps = spaced(torch.full((count, vocab), 7.0, dtype=torch.bfloat16), 7.0)
    among = apart(head)
    scales = kernels.fused_exponentials(among, exps)
    around = exps.as_strided((count, exps.stride(0) - vocab), exps.stride(), vocab)
    assert (around == 7.0).all()
    return written(among), exps.clone(), scales


def both(kernels: c.Kernels, head: HeadChunk) -> tuple[Tensor, ...]:
    """All results of both kernels: statistics of either, E, row_scale, sampled."""
    stats, exps, scales = exponentials(kernels, head)
    return *statistics(kernels, head), *stats, exps, *scales


def exact(head: HeadChunk) -> tuple[Statistics, Tensor]:
    """Statistics and d logp / d logits in float64."""
    u, stats = c.exact(logits_of(head), head.ids, head.temperature, head.transform)
    (grad,) = torch.autograd.grad(stats.logp.sum(), u)
    return Statistics(*(x.detach() for x in stats)), grad


def assert_statistics(found: Statistics, expected: Statistics, tolerance: float = 4e-6) -> None:
    for name, x, y in zip(Statistics._fields, found, expected, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-6, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def assert_gradient(ids: Tensor, exps: Tensor, scales: RowScales, expected: Tensor, slack: float = 5e-5) -> None:
    """Every entry but for one rounding to bfloat16; those of the sampled ids, which stand apart, without."""
    row_scale, sampled = (x.double()[:, None] for x in scales)
    at_id = ids[:, None]
    assert not exps.gather(1, at_id).any()
    torch.testing.assert_close(sampled, expected.gather(1, at_id), rtol=2 * slack, atol=1e-12)
    found = (-row_scale * exps.double()).scatter(1, at_id, sampled)
    torch.testing.assert_close(found, expected, rtol=ROUNDING + slack, atol=1e-12)


def assert_exponentials(
    kernels: c.Kernels, head: HeadChunk, tolerance: float = 4e-6, slack: float = 5e-5
) -> tuple[Statistics, Tensor, RowScales]:
    """Statistics, and the gradient."""
    expected, grad = exact(head)
    stats, exps, scales = exponentials(kernels, head)
    assert_statistics(stats, expected, tolerance)
    assert_gradient(head.ids, exps, scales, grad, slack)
    return stats, exps, scales


def assert_exact(kernels: c.Kernels, head: HeadChunk, tolerance: float = 4e-6, slack: float = 5e-5) -> None:
    """Both kernels."""
    assert_statistics(statistics(kernels, head), exact(head)[0], tolerance)
    assert_exponentials(kernels, head, tolerance, slack)


# --- types, options, shapes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_types_and_transforms(kernels, transform, dtype):
    shape = (21, 40, 70) if kernels.name == "triton" else (140, 72, 600)
    head = make_head(*shape, dtype, bias=transform != "plain", transform=TRANSFORMS[transform])
    assert_statistics(statistics(kernels, head), exact(head)[0])
    if dtype == torch.bfloat16:  # float16 cannot hold exponentials
        assert_exponentials(kernels, head)


SHAPES = [(1, 1, 2), (32, 32, 96), (33, 33, 31), (3, 48, 150), (64, 8, 40)]
LARGE_SHAPES = [(128, 64, 256), (129, 65, 257), (3, 320, 511), (300, 24, 1030)]  # of the tiles of a GPU


@pytest.mark.parametrize("shape", [*SHAPES, *LARGE_SHAPES], ids=str)
def test_any_shape(kernels, shape):
    if kernels.name == "cuda" or shape in SHAPES:
        assert_exact(kernels, make_head(*shape, bias=shape[2] % 2 == 1))


def test_rows_off_the_alignment_are_copied(kernels):
    """Of hidden states: views whose rows begin anywhere, or lie over one another."""
    head = make_head(40, 40, 150)
    wide = torch.cat([torch.full_like(head.hidden[:, :1], math.nan), head.hidden], 1)  # rows of 82 bytes
    one = head.hidden[:1].expand(40, 40)
    assert not fits_tma(wide[:, 1:])
    views = wide[:, 1:], wide[:, 1:].T.contiguous().T
    for view, plain in (*((view, head.hidden) for view in views), (one, one.contiguous())):
        found, expected = (head._replace(hidden=x, stats=c.filled_statistics(40)) for x in (view, plain))
        for x in (found, expected):
            kernels.fused_logp(x, entropy=True)
        c.check_equal(found.stats, expected.stats)


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
    head = make_head(temperature=False)
    hidden, weight = (head.hidden * 4).round() / 4, (head.weight * 16).round() / 16
    head = head._replace(hidden=hidden, weight=weight, bias=torch.full_like(head.bias, offset))
    assert torch.equal(logits_of(head).float().double(), logits_of(head))
    for stats in (statistics(kernels, head), assert_exponentials(kernels, head, 2e-6)[0]):
        assert_statistics(stats, exact(head)[0], 2e-6)
        torch.testing.assert_close(stats.lse, exact(head)[0].lse, rtol=0, atol=4e-7)


@pytest.mark.parametrize("id_", [-100, 70, 2**32 + 3])
def test_id_outside_the_vocabulary(kernels, id_):
    head = make_head()
    head.hidden[5] *= 200  # without the sampled id as a reference, exponentials that would overflow
    expected = both(kernels, head)
    head.ids[5] = id_
    others = torch.arange(len(head.ids)) != 5
    found = both(kernels, head)
    logp, lse, entropy, logp_beside_exps, _, _, exps, row_scale, sampled = found
    assert logp[5].isnan() and logp_beside_exps[5].isnan() and row_scale[5].isfinite() and exps[5].isfinite().all()
    assert sampled[5] == 0
    assert torch.equal(lse, expected[1]) and torch.equal(entropy, expected[2])
    c.check_equal([x[others] for x in found], [y[others] for y in expected])


def test_nan_stays_in_its_row(kernels):
    head = make_head()
    expected = both(kernels, head)
    head.hidden[5, 3] = math.nan
    others = torch.arange(len(head.ids)) != 5
    found = both(kernels, head)
    c.check_equal([x[others] for x in found], [y[others] for y in expected])
    assert all(x[5].isnan() for x in found[:6])


def lead(head: HeadChunk, nats: float, rows: slice | None = None) -> HeadChunk:
    """The sampled ids' logits raised by about `nats`, through one more hidden dimension."""
    count, vocab = len(head.ids), len(head.weight)
    extra_h = torch.zeros(count, vocab, dtype=head.hidden.dtype)
    chosen = torch.arange(count)[rows or slice(None)]
    extra_h[chosen, head.ids[chosen]] = nats
    eye = torch.eye(vocab, dtype=head.weight.dtype)
    return head._replace(hidden=torch.cat([head.hidden, extra_h], 1), weight=torch.cat([head.weight, eye], 1))


@pytest.mark.parametrize("nats", [12.0, 40.0])
def test_probability_near_one_keeps_its_digits(kernels, nats):
    """logp and d logp / d z_id are of the size of 1 - p, and as exact relative to that as the logits allow."""
    head = lead(make_head(12, 8, 40, temperature=False), nats)
    z = logits_of(head)
    others = z.masked_fill(torch.nn.functional.one_hot(head.ids, 40).bool(), -math.inf)
    rest = (others - z.gather(1, head.ids[:, None])).exp().sum(1)
    assert rest.max() < 2e-3
    stats, _, scales = exponentials(kernels, head)
    torch.testing.assert_close(stats.logp.double(), -rest.log1p(), rtol=2e-5, atol=0)
    torch.testing.assert_close(scales.sampled.double(), rest / (1 + rest), rtol=2e-5, atol=0)


@pytest.mark.parametrize("nats", [45.0, 95.0, 400.0, 3000.0])
@pytest.mark.parametrize("softcap", [0.0, 500.0], ids=["", "softcap"])
def test_improbable_targets(kernels, nats, softcap):
    """Some rows overflow and are repaired: the others are as before, and these are exact as well."""
    few = slice(3, 9, 2)
    plain = make_head(18, 8, 40, transform=PolicyTransform(softcap=softcap))
    plain.temperature[3] = 1.0
    stats, *repaired = assert_exponentials(kernels, lead(plain, -nats, few), 2e-4 if softcap else 3e-5, 4e-4)
    assert stats.logp[3] < -0.8 * nats or softcap
    kept, *without = exponentials(kernels, lead(plain, 0.0))
    repaired, without = ([exps, *scales] for exps, scales in (repaired, without))
    others = torch.ones(18, dtype=torch.bool)
    others[few] = False
    c.check_equal([x[others] for x in (*stats, *repaired)], [y[others] for y in (*kept, *without)])


def test_a_masked_target(kernels):
    """Probability 0: logp is -inf, and its gradient is that of a target without probability."""
    head = make_head()
    head.bias[head.ids[4]] = -math.inf
    stats, exps, scales = assert_exponentials(kernels, head)
    assert torch.equal(stats.logp == -math.inf, head.ids == head.ids[4])
    assert exps.isfinite().all() and scales.row_scale.isfinite().all()


# --- Triton: tiles, parts ---------------------------------------------------------------------------------------------


def check_any_batch(kernels: c.Kernels, head: HeadChunk, *parts: slice) -> None:
    """Rows have the bits that they have in the whole batch."""
    whole = statistics(kernels, head)
    for rows in parts:
        part = head._replace(hidden=head.hidden[rows], ids=head.ids[rows], temperature=head.temperature[rows])
        c.check_equal(statistics(kernels, part), tuple(x[rows] for x in whole))


@only_triton
def test_a_row_has_the_same_bits_in_any_batch_in_its_place_of_a_tile(kernels):
    """numpy's products, which the interpreter takes, differ from row to row of a tile."""
    tile = launch_of(CPU).fused_logp.block_m
    parts = slice(0, 1), slice(tile, tile + 1), slice(0, 2 * tile), slice(2 * tile, 101)
    check_any_batch(kernels, make_head(101), *parts)


@only_triton
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_are_combined(kernels, parts, monkeypatch):
    """The largest logit of a row lies in any part: each of them is once the reference of the others."""
    head = make_head(40, 16, 150, bias=False)
    head.weight.mul_(6)  # parts differ by many nats
    monkeypatch.setattr(matmul, "INTERPRETER_PARTS", parts)
    assert_exact(kernels, head, tolerance=2e-5, slack=1e-4)


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
        c.check_equal(results[-1], results[0])
    expected, grad = exact(head)
    assert_statistics(Statistics(*results[0][:3]), expected)
    assert_statistics(Statistics(*results[0][3:6]), expected)
    assert_gradient(head.ids, results[0][6], RowScales(*results[0][7:]), grad)


@only_cuda
@pytest.mark.parametrize("multiprocessors", [2, 5])
def test_a_row_has_the_same_bits_in_any_batch(kernels, multiprocessors):
    """Alone, in part of a tile, in tiles of single blocks and of pairs; the vocabulary's six tiles in several parts."""
    kernels.use((90, multiprocessors))
    parts = slice(7, 8), slice(100, 150), slice(0, 128), slice(30, 286), slice(5, 390)
    check_any_batch(kernels, make_head(390, 40, 1500), *parts)


@only_cuda
def test_every_tile_has_its_item(kernels):
    for row_blocks, tiles, group in ((1, 1, 1), (5, 7, 2), (64, 501, 8), (7, 3, 7), (3, 20, 1), (16, 9, 5)):
        for parts in {1, min(2, tiles), min(3, tiles), tiles}:
            assert kernels.items_cover(row_blocks, tiles, parts, group)


@only_cuda
@pytest.mark.parametrize(
    ("width", "vocab", "default"),
    [(4096, 128_256, 2048), (3584, 152_064, 2304), (1536, 151_936, 2816), (2304, 256_000, 2048)],
)
def test_clusters_end_together(kernels, width, vocab, default):
    """On an H100: the longest one's time, of a machine that is always full, with a twentieth of a tile per item."""
    kernels.use((90, 132))

    def excess(rows: int, any_batch: bool = False) -> float:
        return kernels.longest_cluster(rows, vocab, width, any_batch) * 132 / (rows / 128 * math.ceil(vocab / 256))

    assert excess(default) <= 1.01
    assert max(excess(128 * n) for n in (8, *range(16, 33, 2))) <= 1.025
    assert max(excess(rows, any_batch=True) for rows in (2048, 4096, 16_384)) <= 1.02


@only_cuda
def test_a_row_alone_has_parts_of_single_tiles_for_exponentials_only(kernels):
    head = make_head(1, 8, 1024)
    for function, parts in ((statistics, 2), (exponentials, 4)):
        kernels.use((90, 132))
        function(kernels, head)
        assert kernels.largest_grid() == parts


def test_fused_products(kernels):
    def served(hidden: Tensor, weight: Tensor) -> set[str]:
        return set(kernels.fused_products(hidden, weight))

    x, narrow = torch.zeros(8, 24, dtype=torch.bfloat16), torch.zeros(8, 25, dtype=torch.bfloat16)
    assert served(x, x) == {"logp", "exponentials"}
    assert served(x.half(), x.half()) == {"logp"}  # float16 cannot hold e^(z - z_id)
    assert served(x.float(), x.float()) == served(x, x.T.contiguous().T) == set()
    assert all(get_backend(name).fused_products is None for name in ("cpu", "torch"))
    if kernels.name == "triton":
        return
    assert served(x, x[:7]) == {"logp"}  # rows of exponentials would begin off the alignment
    shifted, overlapping = torch.zeros(8, 40, dtype=x.dtype)[:, 1:25], x.as_strided((8, 24), (8, 1))
    for weight in (narrow, shifted, x[:1].expand(8, 24), overlapping):
        assert served(torch.zeros(8, weight.shape[1], dtype=weight.dtype), weight) == set()
    assert served(x.float(), x) == set()
    kernels.use((80,))
    assert served(x, x) == set()

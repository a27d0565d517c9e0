"""The kernels with a softmax in the epilogue of a matrix product, one by one against float64: linear_logp, anchored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from helpers import RowKernels
from torch import Tensor

from grpo_kernels.backends.launch import MatmulLaunch, matmul_launch, shipped_table, trial
from grpo_kernels.backends.pytorch.backend import TorchBackend
from grpo_kernels.backends.triton import matmul
from grpo_kernels.backends.triton.anchored import anchored
from grpo_kernels.backends.triton.linear_logp import linear_logp
from grpo_kernels.contract import RowStats
from grpo_kernels.names import FIELD, KL_ESTIMATORS, SURROGATES, TABLE_FIELDS, KernelParams

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = KernelParams(surrogate="reinforce", has_old=False)
NAMES = ("logp", "lse", "entropy")
ROUNDING = 2.0**-8  # of a value to bfloat16, relative
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
    table = torch.zeros(len(TABLE_FIELDS), count)
    table[FIELD["advantage"]] = normal(count)
    table[FIELD["old"]] = -math.log(vocab) + 0.5 * normal(count)
    table[FIELD["ref"]] = -math.log(vocab) + 0.5 * normal(count)
    for name in ("multiplier", "weight_ratio", "weight_direct", "temperature"):
        table[FIELD[name]] = 0.5 + torch.rand(count, generator=g)
    if not temperature:
        table[FIELD["temperature"]] = 1.0
    table[FIELD["entropy_threshold"]] = -math.inf
    head = normal(count, width), normal(vocab, width) * width**-0.5, normal(vocab) * 0.5 if bias else None
    return Head(*(None if x is None else x.to(DEVICE, dtype) for x in head), ids.to(DEVICE), table.to(DEVICE))


def statistics(head: Head, params: KernelParams = PLAIN, *, entropy: bool = True) -> RowStats:
    return linear_logp(
        head.hidden, head.weight, head.bias, head.ids, head.temperature.contiguous(), params, entropy=entropy
    )


def exponentials(head: Head, params: KernelParams = PLAIN) -> tuple[RowStats, Tensor, Tensor]:
    """(statistics, E, v) in buffers that hold something before."""
    exps = torch.full((len(head.ids), len(head.weight)), 7.0, dtype=torch.bfloat16, device=DEVICE)
    stats, scale = anchored(head.hidden, head.weight, head.bias, head.ids, head.table, exps, params)
    return stats, exps, scale


def both(head: Head) -> tuple[Tensor, ...]:
    """All results of both kernels: statistics of either, E, v."""
    stats, exps, scale = exponentials(head)
    return *statistics(head), *stats, exps, scale


def exact(head: Head, params: KernelParams = PLAIN) -> tuple[RowStats, Tensor]:
    """Statistics and d loss / d logits in float64."""
    logits = head.logits()
    grad = torch.empty_like(logits)
    return RowKernels(TorchBackend()).fused(logits, grad, head.ids, head.table.double(), params), grad


def assert_statistics(found: RowStats, expected: RowStats, tolerance: float = 4e-6) -> None:
    for name, x, y in zip(NAMES, found, expected, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-6, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def assert_gradient(exps: Tensor, scale: Tensor, expected: Tensor, slack: float = 1e-5) -> None:
    """Every entry but for one rounding to bfloat16."""
    found = scale.double()[:, None] * exps.double()
    torch.testing.assert_close(found, expected, rtol=ROUNDING + slack, atol=1e-12)


def assert_exact(head: Head, params: KernelParams = PLAIN, tolerance: float = 4e-6, slack: float = 1e-5) -> None:
    """Both kernels: statistics, and the gradient of the second."""
    expected, grad = exact(head, params)
    assert_statistics(statistics(head, params), expected, tolerance)
    stats, exps, scale = exponentials(head, params)
    assert_statistics(stats, expected, tolerance)
    assert_gradient(exps, scale, grad, slack)


def same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(x.nan_to_num(1e30), y.nan_to_num(1e30)) for x, y in zip(found, expected, strict=True))


# --- linear_logp ------------------------------------------------------------------------------------------------------

VARIANTS = {
    "plain": PLAIN,
    "scale": PLAIN._replace(logit_scale=0.3),
    "softcap": PLAIN._replace(softcap=2.0, logit_scale=1.5),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_linear_logp(variant, bias, dtype):
    head = make_head(bias=bias, dtype=dtype)
    assert_statistics(statistics(head, VARIANTS[variant]), exact(head, VARIANTS[variant])[0])


def test_a_row_has_the_same_bits_in_any_batch():
    """In the same place of a tile: numpy's products, which the interpreter takes, differ from row to row of a tile."""
    head = make_head(101)
    whole, tile = statistics(head), matmul_launch("linear_logp", DEVICE, 40, 70, torch.bfloat16).block_m
    for rows in (slice(0, 1), slice(tile, tile + 1), slice(0, 2 * tile), slice(2 * tile, 101)):
        part = Head(head.hidden[rows], head.weight, head.bias, head.ids[rows], head.table[:, rows])
        assert same_bits(statistics(part), tuple(x[rows] for x in whole))


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100", "gfx9"])
@pytest.mark.parametrize("vocab", [32000, 49152, 128256, 151936, 256000])
def test_parts_depend_on_the_vocabulary_alone_and_fill_the_device(monkeypatch, arch, vocab):
    monkeypatch.setattr(matmul, "_multiprocessors", lambda device: 132)
    launch = MatmulLaunch(**shipped_table()[arch]["linear_logp"]["*"])
    tiles, slots = -(-vocab // launch.block_v), 132 * 8 // launch.num_warps
    splits = [matmul.split(launch, torch.device("cuda"), count, vocab, 8192) for count in (1, 128, 1000, 16384, 65536)]
    assert len({(split.parts, split.per_part) for split in splits}) == 1
    for split in splits:
        slowest = -(-split.token_tiles * split.parts // slots) * split.per_part  # tiles one after the other
        assert slowest <= 1.12 * split.token_tiles * tiles / slots + matmul.FEWEST_TILES


def test_linear_logp_without_entropy():
    head = make_head()
    with_it, without = statistics(head), statistics(head, entropy=False)
    assert same_bits(without[:2], with_it[:2])
    assert torch.equal(without.entropy, torch.zeros_like(with_it.entropy))


@pytest.mark.parametrize(
    ("count", "width", "vocab"), [(1, 1, 2), (32, 32, 96), (33, 33, 31), (3, 48, 150), (40, 16, 33)]
)
def test_any_shape(count, width, vocab):
    assert_exact(make_head(count, width, vocab, bias=vocab % 2 == 1))


def widened(x: Tensor) -> Tensor:
    """x as the front of longer rows whose rest is NaN."""
    return torch.cat([x, torch.full_like(x[:, :5], math.nan)], 1)[:, : x.shape[1]]


def test_rows_may_lie_apart():
    head = make_head()
    apart = head._replace(hidden=widened(head.hidden), weight=widened(head.weight))
    assert same_bits(both(apart), both(head))


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_are_combined(parts, monkeypatch):
    """The largest logit of a row lies in any part: each of them is once the reference of the others."""
    head = make_head(40, 16, 150, bias=False)
    head.weight.mul_(6)  # parts differ by many nats
    monkeypatch.setattr(matmul, "INTERPRETER_PARTS", parts)
    assert_exact(head, tolerance=2e-5, slack=1e-4)


def test_token_tiles_in_groups(monkeypatch):
    """Three token tiles in groups of two: the last group is smaller."""
    head = make_head(70)
    monkeypatch.setattr(matmul, "GROUP_BYTES", 2 * 32 * head.weight.shape[1] * 2)
    assert_exact(head)


def test_masked_vocabulary():
    """-inf over whole tiles and parts, in front, between and at the end."""
    head = make_head(vocab=150)
    head.bias[:40] = -math.inf
    head.bias[64:96] = -math.inf
    head.bias[130:] = -math.inf
    head.ids.clamp_(40, 63)
    assert_exact(head)


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_logits_far_from_zero(offset):
    """Logits that float32 holds exactly: only their differences count, and lse keeps its digits."""
    head = make_head(dtype=torch.float16, temperature=False)
    head = head._replace(
        hidden=(head.hidden * 4).round() / 4,
        weight=(head.weight * 16).round() / 16,
        bias=torch.full_like(head.bias, offset),
    )
    assert torch.equal(head.logits().float().double(), head.logits())
    expected, _ = exact(head)
    assert_statistics(statistics(head), expected, 2e-6)
    torch.testing.assert_close(statistics(head).lse, expected.lse, rtol=0, atol=4e-7)

    head = head._replace(hidden=head.hidden.bfloat16(), weight=head.weight.bfloat16(), bias=head.bias.bfloat16())
    expected, grad = exact(head)
    stats, exps, scale = exponentials(head)
    assert_statistics(stats, expected, 2e-6)
    torch.testing.assert_close(stats.lse, expected.lse, rtol=0, atol=4e-7)
    assert_gradient(exps, scale, grad)


@pytest.mark.parametrize("id_", [-100, 70, 2**32 + 3])
def test_id_outside_the_vocabulary(id_):
    head = make_head()
    head.hidden[5] *= 200  # without an anchor, exponentials that would overflow
    expected = both(head)
    head.ids[5] = id_
    head.table[FIELD["weight_ratio"], 5] = head.table[FIELD["weight_direct"], 5] = 0.0
    others = torch.arange(len(head.ids), device=DEVICE) != 5
    found = both(head)
    logp, lse, entropy, anchored_logp, _, _, exps, scale = found
    assert logp[5].isnan() and anchored_logp[5].isnan() and scale[5] == 0.0 and exps[5].isfinite().all()
    assert torch.equal(lse, expected[1]) and torch.equal(entropy, expected[2])
    assert same_bits([x[others] for x in found], [y[others] for y in expected])


def test_nan_stays_in_its_row():
    head = make_head()
    expected = both(head)
    head.hidden[5, 3] = math.nan
    others = torch.arange(len(head.ids), device=DEVICE) != 5
    found = both(head)
    assert same_bits([x[others] for x in found], [y[others] for y in expected])
    assert all(x[5].isnan() for x in found[:6])


@pytest.mark.parametrize("kernel", ["linear_logp", "anchored"])
def test_descriptors_fetch_what_pointers_fetch(kernel):
    def run(head: Head) -> tuple[Tensor, ...]:
        return tuple(statistics(head)) if kernel == "linear_logp" else both(head)[3:]

    def fetches_through_descriptors(head: Head) -> bool:
        return matmul.prepare(kernel, head.hidden, head.weight, None, KernelParams()).tiles.tma

    head = make_head(40, 40, 150)
    launch = matmul_launch(kernel, DEVICE, 40, 150, torch.bfloat16)
    with trial(kernel, launch._replace(tma=False)):
        assert not fetches_through_descriptors(head)
        expected = run(head)
    with trial(kernel, launch._replace(tma=True)):
        assert fetches_through_descriptors(head)
        assert same_bits(run(head), expected)
        # A descriptor needs 16-byte row strides: these rows begin 90 bytes apart.
        apart = head._replace(hidden=widened(head.hidden))
        assert not fetches_through_descriptors(apart)
        assert same_bits(run(apart), expected)


# --- anchored ---------------------------------------------------------------------------------------------------------

# Every surrogate and every estimator, with the variants in turn.
OBJECTIVES = [
    (surrogate, KL_ESTIMATORS[i % len(KL_ESTIMATORS)], list(VARIANTS)[i % len(VARIANTS)])
    for i, surrogate in enumerate(SURROGATES)
]


@pytest.mark.parametrize(("surrogate", "kl", "variant"), OBJECTIVES)
def test_anchored(surrogate, kl, variant):
    params = VARIANTS[variant]._replace(
        surrogate=surrogate, kl=kl, has_old=surrogate != "reinforce", bias_correction=kl in ("k3", "k1+"),
        beta=0.1, delta=3.0, dual_clip=2.5, epsilon_high=5.0 if surrogate == "cispo" else 0.28,
    )  # fmt: skip
    head = make_head(bias=variant != "scale", seed=len(surrogate))
    expected, grad = exact(head, params)
    assert grad.norm() > 0.1
    stats, exps, scale = exponentials(head, params)
    assert_statistics(stats, expected)
    assert_gradient(exps, scale, grad, 5e-5)


def test_exponentials_stay_in_their_rows():
    head = make_head()
    expected = exponentials(head)
    wide = torch.full((len(head.ids) + 1, 77), 7.0, dtype=torch.bfloat16, device=DEVICE)
    stats, scale = anchored(head.hidden, head.weight, head.bias, head.ids, head.table, wide[:-1, :70], PLAIN)
    assert same_bits((*stats, wide[:-1, :70], scale), (*expected[0], *expected[1:]))
    assert (wide[:, 70:] == 7.0).all() and (wide[-1] == 7.0).all()


def test_entropy_threshold_drops_tokens():
    head = make_head()
    entropy = exact(head)[0].entropy
    head.table[FIELD["entropy_threshold"]] = entropy.median().float() + 1e-3
    _, grad = exact(head)
    zero_gradient = (grad == 0).all(1)
    assert zero_gradient.any() and not zero_gradient.all()
    _, exps, scale = exponentials(head)
    assert_gradient(exps, scale, grad)
    assert torch.equal(scale == 0, zero_gradient)


def lead(head: Head, nats: float, rows: slice | None = None) -> Head:
    """The sampled ids' logits raised by about `nats`, through one more hidden dimension."""
    count, vocab = len(head.ids), len(head.weight)
    extra_h = torch.zeros(count, vocab, dtype=head.hidden.dtype, device=DEVICE)
    chosen = torch.arange(count, device=DEVICE)[rows or slice(None)]
    extra_h[chosen, head.ids[chosen]] = nats
    eye = torch.eye(vocab, dtype=head.weight.dtype, device=DEVICE)
    return head._replace(hidden=torch.cat([head.hidden, extra_h], 1), weight=torch.cat([head.weight, eye], 1))


@pytest.mark.parametrize("nats", [12.0, 20.0, 40.0])
def test_probability_near_one_keeps_its_digits(nats):
    """logp and d loss / d z_id are of the size of 1 - p, and as exact relative to that as the logits allow."""
    head = lead(make_head(12, 8, 40, temperature=False), nats)
    z = head.logits()
    others = z.masked_fill(torch.nn.functional.one_hot(head.ids, 40).bool(), -math.inf)
    rest = (others - z.gather(1, head.ids[:, None])).exp().sum(1)
    assert rest.max() < 2e-3
    stats, exps, scale = exponentials(head)
    torch.testing.assert_close(stats.logp.double(), -rest.log1p(), rtol=2e-5, atol=0)
    g = -head.table[FIELD["weight_direct"]] * head.table[FIELD["advantage"]] * head.table[FIELD["multiplier"]]
    pull = (scale.double() * exps.gather(1, head.ids[:, None]).squeeze(1).double()) / g.double()
    torch.testing.assert_close(pull, rest / (1 + rest), rtol=ROUNDING + 5e-5, atol=0)


@pytest.mark.parametrize("nats", [45.0, 60.0, 95.0, 400.0])
@pytest.mark.parametrize("softcap", [0.0, 500.0], ids=["", "softcap"])
def test_improbable_targets(nats, softcap):
    """Some rows overflow: the others are as before, and these are exact as well."""
    few = slice(3, 9, 2)
    params = PLAIN._replace(softcap=softcap)
    plain = make_head(18, 8, 40)
    plain.temperature[3] = 1.0
    head = lead(plain, -nats, few)
    expected, grad = exact(head, params)
    assert expected.logp[3] < -0.8 * nats
    stats, exps, scale = exponentials(head, params)
    assert_statistics(stats, expected, 3e-5)
    assert_gradient(exps, scale, grad, 2e-4)
    kept = exponentials(lead(plain, 0.0), params)
    others = torch.ones(18, dtype=torch.bool, device=DEVICE)
    others[few] = False
    for x, y in zip((*stats, exps, scale), (*kept[0], *kept[1:]), strict=True):
        assert torch.equal(x[others], y[others])


@pytest.mark.parametrize("nats", [0.0, -40.0, -95.0, -3000.0])
def test_a_token_without_gradient_adds_nothing(nats):
    head = lead(make_head(10, 8, 40), nats)
    head.table[FIELD["advantage"], ::2] = 0.0
    head.table[FIELD["weight_direct"], 1] = 0.0
    _, exps, scale = exponentials(head)
    zero_gradient = torch.tensor([True, True] + [i % 2 == 0 for i in range(2, 10)], device=DEVICE)
    assert torch.equal(scale == 0.0, zero_gradient)
    assert exps.isfinite().all()
    assert (scale[:, None] * (exps.float() @ head.weight.float())).isfinite().all()


def test_a_masked_target():
    """Probability 0: logp is -inf, and what the gradient is made of stays finite."""
    head = make_head()
    head.bias[head.ids[4]] = -math.inf
    masked = head.ids == head.ids[4]
    expected, grad = exact(head)
    stats, exps, scale = exponentials(head)
    assert (stats.logp[masked] == -math.inf).all() and exps.isfinite().all() and scale.isfinite().all()
    assert_statistics(stats, expected)
    assert_gradient(exps, scale, grad)

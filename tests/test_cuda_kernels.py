"""The CUDA kernels of rows and tokens on an emulated GPU, against float64: every element type, odd shapes and
addresses, several orders of the threads; each kernel is called twice.

Further tests of every backend run them on an emulated H200.
"""

from __future__ import annotations

import kernel_checks as c
import pytest
import torch
from emulator import H200, Emulated

from grpo_kernels.backends import get_backend
from grpo_kernels.names import KernelParams, PlanRules

ORDERS = (0, 1, 2, 3)  # the lowest warp first, the highest first, two random ones
OPTIONS = ({}, {"logit_scale": 0.25}, {"softcap": 5.0, "logit_scale": 1.5})


@pytest.fixture
def kernels() -> Emulated:
    """What they do not write holds NaN."""
    kernels = get_backend("cuda")
    torch.use_deterministic_algorithms(True)
    yield kernels
    torch.use_deterministic_algorithms(False)
    kernels.use()


def pair_name(pair: tuple[torch.dtype, torch.dtype]) -> str:
    return "-".join(str(t).removeprefix("torch.") for t in pair)


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("pair", c.PAIRS, ids=pair_name)
def test_rows(kernels, pair, options):
    for i, vocab in enumerate(c.VOCABS):
        kernels.use(order=ORDERS[i % 4])
        c.check_rows(kernels, vocab, pair, KernelParams(**options), shift=i % 7, biased=i % 2 == 1)


def test_rows_of_several_groups(kernels):
    for order, (pair, options) in enumerate(zip(c.PAIRS[1:], [{}, *OPTIONS], strict=True)):
        kernels.use(order=order)
        c.check_rows(kernels, 5003, pair, KernelParams(**options), shift=order, biased=order > 1)


@pytest.mark.parametrize("shift", range(8))
def test_rows_at_every_address(kernels, shift):
    for pair in c.PAIRS[::2]:
        c.check_rows(kernels, 70, pair, KernelParams(softcap=5.0 * (shift % 2)), shift, biased=shift % 4 < 2)


@pytest.mark.parametrize("first", range(len(c.PAIRS)))
def test_gradient_over_the_logits(kernels, first):
    for i, vocab in enumerate((*c.VOCABS, 5003, 5003, 5003)):
        kernels.use(order=ORDERS[i % 4])
        c.check_in_place(kernels, vocab, c.PAIRS[(first + i) % 5], shift=i % 5)


def test_extreme_absent_and_zero_gradient_rows(kernels):
    for pair in c.PAIRS:
        c.check_extremes(kernels, pair)
        c.check_absent_and_zero_gradient(kernels, pair)


def test_logp_is_as_accurate_as_torch(kernels):
    c.check_accuracy(kernels)


@pytest.mark.parametrize("dtype", c.DTYPES[1:])
def test_sixteen_bit_conversion(kernels, dtype):
    c.check_sixteen_bits(kernels, dtype, every=37)


# --- tokens, sequences ----------------------------------------------------------------------------------------------

RULES = (
    PlanRules(aggregation="seq_mean", score_inactive=False),
    PlanRules(aggregation="token_mean", entropy_coef=0.01, temperature=0.7),
    PlanRules(whole_sequences=True, level="sequence"),
)
BATCHES = ((5, 300), [7, 300, 0, 0, 1, 900, 65], [3] * 400, [1500], (3, 1))  # (sequences, length), or packed


@pytest.mark.parametrize("order", ORDERS)
def test_plan_sequences_and_sums(kernels, order):
    """Of sequences that many threads share; test_plan_kernels.py has every option."""
    kernels.use(order=order)
    for i, lengths in enumerate(BATCHES):
        c.check_plan(kernels, *c.make_inputs(c.Draw(i), lengths), RULES[(i + order) % 3])
        c.check_sequences(kernels, 5 * order + i, lengths)
        c.check_sums(kernels, 5 * order + i, lengths)


@pytest.mark.parametrize("normalizer", [0.0, torch.nan, torch.inf])
def test_plan_with_a_normalizer_that_is_no_number_to_divide_by(kernels, normalizer):
    inputs, ids = c.make_inputs(c.Draw(0), (3, 50))
    for rules in (PlanRules(), RULES[1]):
        c.check_plan(kernels, inputs._replace(normalizer=torch.tensor(normalizer)), ids, rules)


# --- finished gradients, kept ids -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", c.DTYPES)
def test_scale(kernels, dtype):
    one_multiprocessor = (90, 1)  # whose four blocks take several turns
    for device, order in ((H200, 1), (one_multiprocessor, 2)):
        kernels.use(device, order)
        for count, shift in ((1, 0), (7, 3), (8, 8), (101, 1), (4096, 5), (8193, 7), (60001, 2)):
            c.check_scale(kernels, dtype, count, shift)
    assert kernels.last_grid() == 4
    kernels.use()
    kernels.scale(torch.empty(2**16), torch.tensor(1.0))
    assert kernels.last_grid() == 16  # as many as there are tiles
    kernels.scale(torch.empty(0), torch.tensor(2.0))


@pytest.mark.parametrize("dtype", c.DTYPES)
def test_kept_ids(kernels, dtype):
    for i, width in enumerate((*c.KEPT_WIDTHS, 2053)):
        kernels.use(order=ORDERS[i % 4])
        c.check_kept(kernels, width, dtype, wide=i % 2 == c.DTYPES.index(dtype) % 2, shift=width % 5)

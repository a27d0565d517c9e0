"""What every backend does per token, without logits: plan, objectives of tokens and of sequences, sums. Plain torch is
the reference, and for the objective of a token autograd over the specification.

Random configurations and batches, tiny: the interpreter runs each many times.
"""

from __future__ import annotations

import itertools
import math

import kernel_checks as c
import pytest
import torch

from grpo_kernels import names
from grpo_kernels.contract import TokenInputs
from grpo_kernels.kernels import get_backend
from grpo_kernels.kernels.torch.plan import plan_tokens
from grpo_kernels.names import COLUMNS, FIELD, KernelParams, PlanRules

KERNELS = ("cpu", "triton", "cuda")
CASES = range(28)  # of each test; on a CPU every surrogate at every level of the ratio
each_case = pytest.mark.parametrize(
    ("kernels", "case"),
    [(name, case) for name in KERNELS for case in CASES if name == "cpu" or case < 12],
    indirect=["kernels"],
)


@pytest.fixture(params=KERNELS)
def kernels(request):
    return get_backend(request.param)


# --- the objective of a token ---------------------------------------------------------------------------------------


VARIANTS = [
    KernelParams(),
    KernelParams(delta=1.5, dual_clip=1.3, log_ratio_clamp=2.0, weight_low=0.8, weight_high=1.2, ratio_cap=1.5),
    KernelParams(epsilon_low=0.1, epsilon_high=0.3, delta=4.0, outside="drop", weight_low=0.5, weight_high=1.5),
    KernelParams(
        beta=0.04, bias_correction=True, delta=1.1, log_ratio_clamp=1.0, dppo_kl_tau=0.0, weight_low=-math.inf
    ),
    KernelParams(beta=0.04, kl_delta_clamp=1.0, kl_clamp=0.4, outside="drop_outward", weight_low=0.8, weight_high=1.2),
    KernelParams(beta=0.04, bias_correction=True, kl_clamp=0.4),
    KernelParams(beta=0.04, bias_correction=True, kl_clamp=0.4, level="sequence"),
]


@pytest.mark.parametrize("surrogate", names.SURROGATES)
@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_objective(kernels, surrogate, variant):
    """Each surrogate and each KL estimator in each variant."""
    kl = names.KL_ESTIMATORS[(names.SURROGATES.index(surrogate) + variant) % len(names.KL_ESTIMATORS)]
    params = VARIANTS[variant]._replace(surrogate=surrogate, kl=kl)
    params = params._replace(score_term=not params.bias_correction and kl in ("k1", "k2", "k3", "abs"))
    generator = torch.Generator().manual_seed(variant)
    count = 400
    x = torch.randn(count, generator=generator) * 0.7
    x[:6] = torch.tensor([0.0, 3.0, -3.0, 50.0, -50.0, 100.0])
    if variant < 3:
        x[6:8] = torch.tensor([200.0, -200.0])
    logp = -torch.rand(count, generator=generator) * 3
    x, logp = (t.mul(2**12).round() / 2**12 for t in (x, logp))  # logp - (logp - x) is x again
    entropy = torch.rand(count, generator=generator)
    multiplier = torch.rand(count, generator=generator).round(decimals=1)
    ref = logp + torch.randn(count, generator=generator)
    ref[10] = logp[10] + 1e-4
    table = c.make_table(count, multiplier=multiplier, ref=ref, entropy_threshold=0.1)
    table[FIELD["advantage"]][:20] = 0.0
    c.check_objective(kernels, x, logp, entropy, table, params)


@pytest.mark.parametrize("kl", names.KL_ESTIMATORS[1:])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_bias_corrected_kl_stops_at_the_exponential_of_80(kernels, kl, level):
    ratios = torch.tensor([-90.0, -3.0, -0.25, 3.0, 35.0, 60.0, 79.0, 90.0])  # no product is the bound itself
    # Where the ratio is the token's own, autograd adds numbers near exp(d) that cancel, in float64 too.
    distances = torch.tensor([-90.0, -3.0, 0.0, 3.0, *((18.0,) if level == "token" else (35.0, 60.0, 79.0, 90.0))])
    x, d = (part.flatten() for part in torch.meshgrid(ratios, distances, indexing="ij"))
    logp = -torch.ones_like(x)
    params = KernelParams(surrogate="weighted", kl=kl, beta=0.5, bias_correction=True, level=level)
    table = c.make_table(len(x), advantage=0.0, ref=logp + d)
    c.check_objective(kernels, x, logp, torch.ones_like(x), table, params)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [("k1", lambda d: 1 - d), ("k2", lambda d: d * (d / 2 - 1)), ("k3", lambda d: -d), ("abs", lambda d: d.abs() - 1)],
)
@pytest.mark.parametrize("factor", ["score_term", "bias_correction"])
def test_the_kl_times_a_factor_has_a_derivative_of_all_digits(kernels, kl, expected, factor):
    """Value and slope of k3 are near exp(d), 5e8 at d = 20, and the derivative of the product is their sum, -d."""
    d = torch.tensor([2.0, 5.0, 18.0, 20.0, 25.0, 40.0, 79.0])
    x, ones = torch.zeros_like(d), torch.ones_like(d)
    params = KernelParams(surrogate="weighted", kl=kl, beta=1.0, **{factor: True})
    table = c.make_table(len(d), advantage=0.0, ref=d - 1.0)
    _, d_ratio, d_direct, _ = c.objective(kernels, x, -ones, ones, table, params)
    torch.testing.assert_close(d_ratio + d_direct, expected(d), rtol=2e-7, atol=0.0)


def test_zero_factors_select_zero(kernels):
    """Nothing infinite is multiplied by 0: a dropped token with an overflowing ratio, a k3 beyond fp32, beta = 0."""
    x, logp, entropy = torch.full((2,), math.inf), torch.full((2,), -2.0), torch.ones(2)
    table = c.make_table(2, multiplier=torch.tensor([0.0, 1.0]), ref=500.0, advantage=1.0)
    value, d_ratio, d_direct, kl = c.objective(kernels, x, logp, entropy, table, KernelParams(kl="k3"))
    assert value.tolist() == [0.0, pytest.approx(-1.2)] and not d_ratio.any() and not d_direct.any()
    assert kl.isfinite().all()


# --- the plan -------------------------------------------------------------------------------------------------------


@each_case
def test_plan(kernels, case):
    draw = c.Draw(case)
    c.check_plan(kernels, *c.make_inputs(draw), c.make_rules(draw))


@pytest.mark.parametrize("normalizer", [0.0, torch.nan, torch.inf])
def test_plan_with_a_normalizer_that_is_no_number_to_divide_by(kernels, normalizer):
    inputs, ids = c.make_inputs(c.Draw(0), (3, 50))
    for rules in (PlanRules(), PlanRules(aggregation="token_mean", entropy_coef=0.01, temperature=0.7)):
        c.check_plan(kernels, inputs._replace(normalizer=torch.tensor(normalizer)), ids, rules)


@pytest.mark.parametrize(("sequences", "packed"), [(0, False), (3, False), (3, True)])
def test_plan_of_nothing(kernels, sequences, packed):
    ids = torch.zeros((0,) if packed else (sequences, 0), dtype=torch.int64)
    cu_seqlens = torch.zeros(sequences + 1, dtype=torch.int64) if packed else None
    inputs, rules = TokenInputs(torch.zeros(sequences), cu_seqlens=cu_seqlens), PlanRules(whole_sequences=True)
    found = kernels.plan(inputs, ids, rules, torch.float32, ordered=True)
    assert found.counts.tolist() == [0] * (2 + sequences) and not found.lengths.any()
    assert found.offsets.tolist() == [0] * (sequences + 1)
    assert found.table.shape == (len(FIELD), 0) and found.order.numel() == 0


@pytest.mark.parametrize("kernels", KERNELS[1:], indirect=True)  # a CPU's are checked
@pytest.mark.parametrize("given", [[0, 5, 10**12], [-7, 5, 9], [5, -(10**12), 9], [8, 3, 10]])
def test_offsets_that_were_not_checked_stay_among_the_tokens(kernels, given):
    inputs = TokenInputs(torch.ones(9), cu_seqlens=torch.tensor(given))
    rules = PlanRules(whole_sequences=True, level="sequence")
    found = kernels.plan(inputs, torch.zeros(9, dtype=torch.int64), rules, torch.float32, ordered=True)
    expected = [min(max(x, 0), 9) for x in given]
    assert found.offsets.tolist() == expected
    assert found.lengths.tolist() == [max(b - a, 0) for a, b in itertools.pairwise(expected)]
    params = KernelParams(level="sequence")
    kernels.sequence_objective(slice(0, 2), None, found, params)
    assert kernels.sums(found, params, None, 0).numbers.shape == (len(COLUMNS) * 3 + 3,)


def test_plan_of_more_blocks_than_are_scanned_at_once(kernels, monkeypatch):
    """Places in the order, across many blocks and sequences."""
    if kernels.name == "triton":
        from grpo_kernels.kernels.triton import plan

        monkeypatch.setattr(plan, "ADDED_AT_ONCE", 2)
    draw = c.Draw(0)
    shape = (17, 12)
    advantages = draw.normal(17)
    advantages[::3] = 0.0
    inputs = TokenInputs(advantages, completion_mask=draw.chance(shape))
    ids, rules = torch.zeros(shape, dtype=torch.int64), PlanRules(aggregation="seq_mean", whole_sequences=True)
    assert plan_tokens(inputs, ids, rules, torch.float32, ordered=True).counts[:2].all()
    c.check_plan(kernels, inputs, ids, rules)


# --- sequences and sums ---------------------------------------------------------------------------------------------


@each_case
def test_sequence_objective(kernels, case):
    c.check_sequences(kernels, case)


@pytest.mark.parametrize("case", CASES[::2])
def test_sums(kernels, case):
    before = torch.get_num_threads()
    torch.set_num_threads(1 + case % 3)
    try:
        c.check_sums(kernels, case)
    finally:
        torch.set_num_threads(before)


BATCHES = ((5, 300), [7, 300, 0, 0, 1, 900, 65], [3] * 400, [1500], (3, 1))  # (sequences, length), or packed
RULES = (
    PlanRules(aggregation="seq_mean", score_inactive=False),
    PlanRules(aggregation="token_mean", entropy_coef=0.01, temperature=0.7),
    PlanRules(whole_sequences=True, level="sequence"),
)


@pytest.mark.parametrize("order", range(4))
def test_sequences_that_many_threads_share(emulated, order):
    emulated.use(order=order)
    for i, lengths in enumerate(BATCHES):
        c.check_plan(emulated, *c.make_inputs(c.Draw(i), lengths), RULES[(i + order) % 3])
        c.check_sequences(emulated, 5 * order + i, lengths)
        c.check_sums(emulated, 5 * order + i, lengths)

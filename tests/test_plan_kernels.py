"""What every backend does per token, without logits: the plan, the objective, the sums. Plain torch says what is right.

Random configurations and batches, tiny: the interpreter runs each many times.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from kernel_checks import check_plan
from torch import Tensor

from grpo_kernels.backends import get_backend
from grpo_kernels.backends.pytorch import coefficients
from grpo_kernels.backends.pytorch.plan import plan_tokens
from grpo_kernels.contract import PlannedTokens, Rows, TokenInputs, TokenValues
from grpo_kernels.names import (
    AGGREGATIONS,
    COLUMNS,
    FIELD,
    KL_ESTIMATORS,
    LEVELS,
    OUTSIDE,
    SURROGATES,
    KernelParams,
    PlanRules,
)

KERNELS = ("cpu", "triton", "cuda")
MASKS = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
CASES = range(24)  # of each test: every surrogate at every level of the ratio
EACH = [(name, case) for name in KERNELS for case in CASES if name == "cpu" or case < 12]


class Draw:
    """Choices and numbers of one case."""

    def __init__(self, seed: int) -> None:
        self.choices = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def one_of(self, *options: object) -> object:
        return self.choices.choice(options)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def chance(self, shape: tuple[int, ...], probability: float = 0.7) -> Tensor:
        return torch.rand(shape, generator=self.generator) < probability


def make_inputs(draw: Draw) -> tuple[TokenInputs, Tensor]:
    """(inputs, ids) of a batch (B, T), or packed with sequences of length 0 among them."""
    lengths = [draw.choices.choice((0, 1, 3, 7, 20)) for _ in range(draw.choices.randint(1, 12))]
    if draw.one_of(True, False):
        shape, cu_seqlens = (len(lengths), draw.choices.randint(1, 23)), None
    else:
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        shape, cu_seqlens = (int(offsets[-1]),), offsets.to(draw.one_of(torch.int32, torch.int64))
    sequences = len(lengths)
    advantages = draw.normal(*draw.one_of((sequences,), (sequences, 1), shape))
    advantages[draw.chance(advantages.shape, 0.4)] = 0.0
    rollout = -draw.normal(*shape).abs()
    rollout[draw.chance(shape, 0.2)] = math.nan
    weights = draw.normal(*draw.one_of((sequences,), shape)).abs()
    weights[draw.chance(weights.shape, 0.3)] = 0.0
    mask = draw.chance(shape).to(draw.one_of(*MASKS))
    if mask.dtype.itemsize == 8:
        mask = mask * 2**40  # the low half alone is zero
    optional = {
        "completion_mask": mask,
        "old_logps": -draw.normal(*shape).abs(),
        "ref_logps": -draw.normal(*shape).abs(),
        "rollout_weights": weights,
        "rollout_logps": rollout,
        "normalizer": draw.one_of(torch.tensor(7.5), torch.tensor(12)),
        "temperature": draw.one_of(draw.normal(*shape).exp(), torch.tensor(0.7)),
        "entropy_threshold": torch.tensor(0.3),
    }
    given = {name: x for name, x in optional.items() if draw.one_of(True, False)}
    for name in ("old_logps", "ref_logps", "temperature"):  # whatever padding holds
        if "completion_mask" in given and given.get(name, torch.tensor(0.0)).shape == shape:
            given[name][mask == 0] = math.nan
    ids = torch.randint(0, 1000, shape, generator=draw.generator)
    return TokenInputs(advantages.to(draw.one_of(torch.float32, torch.bfloat16)), cu_seqlens=cu_seqlens, **given), ids


def make_rules(draw: Draw) -> PlanRules:
    def flag() -> bool:
        return bool(draw.one_of(True, False))

    return PlanRules(
        aggregation=draw.one_of(*AGGREGATIONS),
        level=draw.one_of(*LEVELS),
        divides_by_rollout=flag(),
        multiplies_rollout_weight=flag(),
        whole_sequences=flag(),
        needs_advantage=flag(),
        kl_has_gradient=draw.choices.random() < 0.2,
        score_inactive=flag(),
        max_completion_length=float(draw.choices.randint(1, 40)),
        entropy_coef=draw.one_of(0.0, 0.0, 0.01, -0.02),
        temperature=draw.one_of(1.0, 1.3),
        entropy_threshold=draw.one_of(-math.inf, 0.5),
    )


@pytest.mark.parametrize(("name", "case"), EACH)
def test_plan(name, case):
    draw = Draw(case)
    check_plan(get_backend(name), *make_inputs(draw), make_rules(draw))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("sequences", "packed"), [(0, False), (3, False), (3, True)])
def test_plan_of_nothing(name, sequences, packed):
    ids = torch.zeros((0,) if packed else (sequences, 0), dtype=torch.int64)
    cu_seqlens = torch.zeros(sequences + 1, dtype=torch.int64) if packed else None
    inputs, rules = TokenInputs(torch.zeros(sequences), cu_seqlens=cu_seqlens), PlanRules(whole_sequences=True)
    found = get_backend(name).plan(inputs, ids, rules, torch.float32, ordered=True)
    assert found.counts.tolist() == [0] * (2 + sequences) and not found.lengths.any()
    assert found.offsets.tolist() == [0] * (sequences + 1)
    assert found.table.shape == (len(FIELD), 0) and found.order.numel() == 0


@pytest.mark.parametrize("name", KERNELS[1:])  # a CPU's are checked
@pytest.mark.parametrize("given", [[0, 5, 10**12], [-7, 5, 9], [5, -(10**12), 9], [8, 3, 10]])
def test_offsets_that_were_not_checked_stay_among_the_tokens(name, given):
    inputs = TokenInputs(torch.ones(9), cu_seqlens=torch.tensor(given))
    rules = PlanRules(whole_sequences=True, level="sequence")
    found = get_backend(name).plan(inputs, torch.zeros(9, dtype=torch.int64), rules, torch.float32, ordered=True)
    expected = [min(max(x, 0), 9) for x in given]
    assert found.offsets.tolist() == expected
    assert found.lengths.tolist() == [max(b - a, 0) for a, b in itertools.pairwise(expected)]
    params = KernelParams(level="sequence")
    get_backend(name).sequence_objective(slice(0, 2), None, found, params)
    assert get_backend(name).sums(found, params, None, 0).numbers.shape == (len(COLUMNS) * 3 + 3,)


@pytest.mark.parametrize("name", KERNELS)
def test_plan_of_more_blocks_than_are_scanned_at_once(name, monkeypatch):
    """Places in the order, across many blocks and sequences."""
    if name == "triton":
        from grpo_kernels.backends.triton import plan

        monkeypatch.setattr(plan, "ADDED_AT_ONCE", 2)
    draw = Draw(0)
    shape = (17, 50)
    advantages = draw.normal(17)
    advantages[::3] = 0.0
    inputs = TokenInputs(advantages, completion_mask=draw.chance(shape))
    ids, rules = torch.zeros(shape, dtype=torch.int64), PlanRules(aggregation="seq_mean", whole_sequences=True)
    assert plan_tokens(inputs, ids, rules, torch.float32, ordered=True).counts[:2].all()
    check_plan(get_backend(name), inputs, ids, rules)


# --- the objective and the sums -------------------------------------------------------------------------------------


def make_params(draw: Draw, inputs: TokenInputs, surrogate: str, level: str) -> KernelParams:
    has_rollout = inputs.rollout_logps is not None
    divides_by_rollout = surrogate in ("dppo_tv", "dppo_kl", "ipo")
    kl = draw.one_of(*KL_ESTIMATORS) if inputs.ref_logps is not None else "none"
    return KernelParams(
        surrogate=surrogate,
        kl=kl,
        has_old=inputs.old_logps is not None or (has_rollout and divides_by_rollout),
        bias_correction=kl != "none" and bool(draw.one_of(True, False)),
        score_term=kl in ("k1", "k2", "k3", "abs") and bool(draw.one_of(True, False)),
        outside=draw.one_of(*OUTSIDE),
        weight_low=draw.one_of(1.0, 0.8),
        weight_high=draw.one_of(1.0, 1.3),
        dppo_kl_tau=draw.one_of(0.0, 0.1),
        ratio_cap=draw.one_of(math.inf, 1.2),
        beta=draw.one_of(0.0, 0.1),
        epsilon_high=draw.one_of(0.2, 2.0),
        delta=draw.one_of(math.inf, 1.5),
        dual_clip=draw.one_of(math.inf, 3.0),
        log_ratio_clamp=draw.one_of(math.inf, 1.0),
        level=level,
        has_rollout=has_rollout,
        vespo=surrogate == "weighted" and bool(draw.one_of(True, False)),
        divides_by_rollout=divides_by_rollout,
        off_policy_threshold=draw.one_of(math.inf, 0.1),
    )


def scored_batch(draw: Draw, case: int) -> tuple[PlannedTokens, KernelParams]:
    """A planned batch whose tokens have log-probabilities; those that are not scored have none."""
    inputs, ids = make_inputs(draw)
    inputs = inputs._replace(advantages=inputs.advantages.float())
    surrogate, level = SURROGATES[case % len(SURROGATES)], LEVELS[case % len(LEVELS)]
    if surrogate == "gmpo" and inputs.old_logps is None:  # its clamp acts on log ratios
        inputs = inputs._replace(old_logps=-draw.normal(*ids.shape).abs())
    params = make_params(draw, inputs, surrogate, level)
    rules = make_rules(draw)._replace(level=params.level, divides_by_rollout=params.divides_by_rollout)
    plan = plan_tokens(inputs, ids, rules, torch.float32, ordered=False)
    logp, entropy = -draw.normal(ids.numel()).abs(), draw.normal(ids.numel()).abs()
    plan.values.columns[0], plan.values.columns[1] = (torch.where(plan.scored, x, 0.0) for x in (logp, entropy))
    return plan, params


def copy_of(values: TokenValues) -> TokenValues:
    return TokenValues(*(x.clone() for x in values))


def assert_close(found: TokenValues, expected: TokenValues) -> None:
    for row, truth in zip(found.columns, expected.columns, strict=True):
        largest = float(truth.abs().max()) if truth.numel() else 0.0  # of what a sum over a sequence may be made
        torch.testing.assert_close(row, truth, rtol=3e-5, atol=3e-6 * max(1.0, largest))
    assert torch.equal(found.lse, expected.lse)


@pytest.mark.parametrize(("name", "case"), EACH)
def test_sequence_objective(name, case):
    """Of all sequences, and of some: tokens that are not scored, or of others, keep what they hold."""
    draw = Draw(100 + case)
    plan, params = scored_batch(draw, case)
    plan.table[:, ~plan.scored] = math.nan  # never read
    plan.values.columns[:, ~plan.scored] = 7.0
    sequences = plan.lengths.numel()
    expected = copy_of(plan.values)
    coefficients.sequence_objective(plan.table, plan.scored, plan.offsets, plan.lengths, expected, params)
    found = copy_of(plan.values)
    get_backend(name).sequence_objective(slice(0, sequences), None, plan._replace(values=found), params)
    assert_close(found, expected)

    first = draw.choices.randint(0, sequences)
    some = slice(first, draw.choices.randint(first, sequences))
    part = copy_of(plan.values)
    get_backend(name).sequence_objective(some, None, plan._replace(values=part), params)
    start, stop = plan.offsets[some.start], plan.offsets[some.stop]
    assert torch.equal(part.columns[:, start:stop], found.columns[:, start:stop])
    for outside in (slice(0, start), slice(stop, None)):
        assert torch.equal(part.columns[:, outside], plan.values.columns[:, outside])


@pytest.mark.parametrize("case", CASES[::2])
@pytest.mark.parametrize("name", KERNELS)
def test_sums(name, case):
    draw = Draw(200 + case)
    plan, params = scored_batch(draw, case)
    coefficients.token_objective(Rows(0, plan.scored.numel()), plan.table, plan.values, params)
    groups = draw.choices.randint(1, 4)
    group_index = torch.randint(0, groups, (plan.lengths.numel(),), generator=draw.generator)
    if draw.choices.random() < 0.3:
        group_index, groups = None, 0
    found = get_backend(name).sums(plan, params, group_index, groups)
    exact = plan._replace(table=plan.table.double(), values=TokenValues(plan.values.columns.double(), plan.values.lse))
    expected = get_backend("torch").sums(exact, params, group_index, groups)
    assert found.numbers.dtype == torch.float32
    assert (found.num_sequences, found.num_groups) == (expected.num_sequences, expected.num_groups)
    torch.testing.assert_close(found.numbers.double(), expected.numbers, rtol=1e-5, atol=1e-5)

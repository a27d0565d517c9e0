"""The fused loss of single tokens, in Triton's interpreter and on the emulated GPU, beside objective/ in float64."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from helpers import token_inputs
from torch import Tensor

from grpo_kernels.config import GRPOConfig
from grpo_kernels.kernels.fused_objective import (
    COLUMNS,
    ESTIMATORS,
    EXTREMA,
    SURROGATES,
    ObjectiveInputs,
    Sums,
    memory_of_sums,
)
from grpo_kernels.kernels.operations import Rows
from grpo_kernels.objective.fused import has_kernel, objective_inputs
from grpo_kernels.objective.loss import GRPOLoss
from grpo_kernels.objective.metrics import Batch, column_sums
from grpo_kernels.objective.surrogates import SURROGATE_RULES
from grpo_kernels.objective.tokens import TokenInputs, plan

OPTIONS = {
    "epsilon_low": 0.1, "epsilon_high": 0.3, "delta": 1.5, "dual_clip": 1.2, "log_ratio_clamp": 0.9,
}  # fmt: skip
LENGTHS = (7, 0, 20, 1, 33)
LONG = (300, 0, 256, 1, 777)
ORDERS = (0, 1, 3)  # of the emulated GPU's threads and blocks


class Case:
    """A batch, padded or packed, with log-probabilities of its scored tokens."""

    def __init__(self, config: GRPOConfig, *, packed: bool, bare: bool, lengths=LENGTHS) -> None:
        g = torch.Generator().manual_seed(0)
        shape = (sum(lengths),) if packed else (5, 11)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=g)

        advantages, ids = normal(5), torch.randint(100, shape, generator=g)
        advantages[2] = 0.0
        given = dict(cu_seqlens=torch.tensor([0, *lengths]).cumsum(0)) if packed else {}
        if not bare:
            weights = normal(*shape).abs()
            weights[torch.rand(shape, generator=g) < 0.2] = 0.0
            rollout = -normal(*shape).abs()
            rollout[torch.rand(shape, generator=g) < 0.2] = math.nan
            given |= dict(
                completion_mask=torch.rand(shape, generator=g) < 0.7, old_logps=-normal(*shape).abs(),
                rollout_weights=weights, rollout_logps=rollout,
                group_index=torch.tensor([1, 0, 2, 1, 0]),
            )  # fmt: skip
        if config.beta:
            given["ref_logps"] = -normal(*shape).abs()
        self.tokens, self.exact = (
            plan(token_inputs(ids, dtype, advantages=advantages, **given)[0], ids, config, dtype, per_sequence=bare)
            for dtype in (torch.float32, torch.float64)
        )
        inputs, _ = token_inputs(ids, torch.float32, advantages=advantages, **given)
        self.batch = Batch(inputs, config, "torch", ids.shape, 5, 0 if bare else 3, None, bare)
        scored = torch.ones(ids.numel(), dtype=torch.bool) if self.tokens.scored is None else self.tokens.scored
        self.logp = torch.where(scored, -normal(ids.numel()).abs(), 0.0)
        self.entropy = torch.where(scored, normal(ids.numel()).abs(), 0.0)

    @property
    def inputs(self) -> ObjectiveInputs:
        return objective_inputs(self.tokens, self.batch.tokens.group_index, self.batch.num_groups)

    def sums(self, kernels, orders=ORDERS) -> tuple[Tensor, Tensor]:
        """Of a call in each order of a GPU's threads, all with the same bits."""
        found = []
        for order in orders if kernels.name == "cuda" else orders[:1]:
            if kernels.name == "cuda":
                kernels.use(order=order)
            dlogp = torch.full_like(self.logp, math.nan)
            found.append((kernels.objective(self.inputs, self.logp, self.entropy, dlogp, None), dlogp))
        for other in found[1:]:
            assert all(
                torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(found[0], other, strict=True)
            )
        return found[0]

    def expected(self) -> tuple[Sums, Tensor]:
        loss = GRPOLoss(self.exact, self.logp.double(), self.entropy.double())
        dlogp, _ = loss.gradients()
        return column_sums(self.batch, loss.value_and_metrics()[1]), dlogp


def cases() -> list[tuple[str, GRPOConfig, bool, bool]]:
    """(name, configuration, whether packed, whether bare): of each surrogate its bounds alone, every option, and a bare
    batch, each with another estimator."""
    found = []
    for i, (surrogate, kind) in enumerate(itertools.product(SURROGATES, ("bounds", "options", "bare"))):
        kl = ESTIMATORS[i % len(ESTIMATORS)]
        allowed = {"log_ratio_clamp", *SURROGATE_RULES[surrogate].options}
        if kind == "bounds":
            allowed -= {"log_ratio_clamp", "dual_clip"}  # below which no other bound shows
        options = {name: x for name, x in OPTIONS.items() if name in allowed}
        if kl != "none":
            options |= dict(kl_estimator=kl, beta=0.1, kl_clamp=None if kind == "bounds" else (0.9, 0.2))
        config = GRPOConfig(surrogate=surrogate, score_inactive=i % 5 == 0, **options)
        found.append((f"{surrogate}-{kl}-{kind}", config, i % 2 == 1, kind == "bare"))
    return found


def check(kernels, case: Case, orders=ORDERS) -> tuple[Tensor, Tensor]:
    (numbers, dlogp), (expected, truth) = case.sums(kernels, orders), case.expected()
    torch.testing.assert_close(dlogp.double(), truth, rtol=3e-5, atol=3e-7, equal_nan=True)
    found = Sums.of(numbers, case.batch.num_sequences)
    for name, x, y in zip(Sums._fields, found, expected, strict=True):
        torch.testing.assert_close(
            x.double(), y, rtol=2e-5, atol=2e-5, equal_nan=True, msg=lambda m, n=name: f"{n} {COLUMNS}: {m}"
        )
    return numbers, dlogp


@pytest.mark.parametrize(("config", "packed", "bare"), [pytest.param(*x, id=name) for name, *x in cases()])
def test_gradient_and_sums(kernels, config, packed, bare):
    case = Case(config, packed=packed, bare=bare)
    assert has_kernel(config, case.tokens.rules, torch.float32)
    _, dlogp = check(kernels, case)
    count = len(case.logp)
    for rows in (Rows(3, count - 2), Rows(0, 9, torch.randperm(count)[:9])):
        part = torch.full_like(dlogp, math.nan)
        kernels.objective(case.inputs, case.logp, case.entropy, part, rows)
        assert torch.equal(rows.take(part), rows.take(dlogp))
        rows.put(part, torch.full((rows.count,), math.nan))
        assert part.isnan().all()


def not_finite(surrogate: str, kl: str) -> Case:
    """The first tokens have ratios and KLs beyond their clamps, NaN logits with and without a scale, a scale of 0, and
    an infinite loss with a weight of 0."""
    given = {} if kl == "none" else dict(beta=0.1, kl_estimator=kl)
    case, some = Case(GRPOConfig(surrogate=surrogate, score_inactive=True, **given), packed=False, bare=False), range(9)
    for tokens in (case.tokens, case.exact):
        tokens.scored[some], tokens.rollout[some] = True, -1.0
        tokens.dloss_direct[some] = tokens.dloss_via_ratio[some] = 1.0
        tokens.old[some] = torch.tensor([-1.0, -200, 80, -1, -1, -300, -1, -1, -1]).to(tokens.old.dtype)
        tokens.surrogate_scale[some] = torch.tensor([1.0, 1, 1, 1, 0, 0, 1, 1, 0]).to(tokens.old.dtype)
        if kl != "none":
            tokens.ref[some] = torch.tensor([200.0, -200, -1, -1, -1, -1, -1, -1, 90]).to(tokens.old.dtype)
        tokens.dloss_direct[7] = tokens.dloss_via_ratio[7] = 0.0
        tokens.advantage[7] = 3e38  # times a ratio above 1 beyond float32
    case.logp[some] = torch.tensor([-1.0, -2, -3, math.nan, math.nan, -1, -80, 0, -1])
    return case


@pytest.mark.parametrize(
    ("surrogate", "kl"), [(x, ESTIMATORS[(i + k) % 4]) for i, x in enumerate(SURROGATES) for k in (0, 2)]
)
def test_numbers_that_are_not_finite(kernels, surrogate, kl):
    """NaN stays in its token; a weight, a scale or a clamp of 0 is not multiplied by what is infinite."""
    case = not_finite(surrogate, kl)
    numbers, dlogp = check(kernels, case)
    assert dlogp[3].isnan() and dlogp[4].isnan() and dlogp.isnan().sum() == 2
    assert numbers[-3:].isnan().any()
    case.logp[3:5] = -math.inf
    check(kernels, case)


def test_garbage_of_padding(kernels):
    """What tokens hold that do not count changes nothing, and they have a gradient of 0."""
    case = Case(GRPOConfig(beta=0.1), packed=False, bare=False)
    numbers, dlogp = case.sums(kernels)
    for x in (case.logp, case.entropy, case.tokens.rollout, case.tokens.advantage, case.tokens.old, case.tokens.ref):
        x[~case.tokens.scored] = math.nan
    found, other = case.sums(kernels)
    assert torch.equal(found, numbers) and torch.equal(other, dlogp)
    assert not other[~case.tokens.scored].any()


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_no_tokens(kernels, lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.ones(0).long()
    tokens = plan(TokenInputs(torch.ones(0), cu_seqlens=offsets), ids, GRPOConfig(), torch.float32)
    nothing, index = torch.empty(0), torch.zeros(len(lengths), dtype=torch.int64)
    inputs = objective_inputs(tokens, index, 2)
    numbers = kernels.objective(inputs, nothing, nothing, nothing, None)
    assert not numbers[:-3].any() and len(numbers) == Sums.length(len(lengths), 2)
    assert numbers[-3:].tolist() == [math.inf, -math.inf, -math.inf]
    assert kernels.objective(inputs, nothing, nothing, nothing, Rows(0, 0)) is None


def test_long_sequences(kernels):
    """Longer than what a block has threads."""
    check(kernels, Case(GRPOConfig(beta=0.1), packed=True, bare=False, lengths=LONG))


def test_many_sequences_and_groups(kernels):
    """More sequences than a block of the kernel adds up at once, and groups without any."""
    config, count = GRPOConfig(), 150
    ids, logp = torch.zeros(count, 3, dtype=torch.int64), -torch.rand(3 * count)
    given = dict(advantages=torch.randn(count), group_index=torch.randint(3, (count,)) * 20)
    (inputs, _), (exact, _) = (token_inputs(ids, dtype, **given) for dtype in (torch.float32, torch.float64))
    tokens, dlogp = plan(inputs, ids, config, torch.float32), torch.empty(3 * count)
    numbers = kernels.objective(objective_inputs(tokens, inputs.group_index, 50), logp, logp, dlogp, None)
    found = Sums.of(numbers, count)
    batch = Batch(inputs, config, "torch", ids.shape, count, 50)
    loss = GRPOLoss(plan(exact, ids, config, torch.float64), logp.double(), logp.double())
    loss.gradients()
    for x, y in zip(found, column_sums(batch, loss.value_and_metrics()[1]), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=2e-5)


def test_memory_has_room_for_all_columns():
    case = Case(GRPOConfig(), packed=False, bare=False)
    sums, exact, counter = memory_of_sums(case.inputs)
    assert Sums.of(sums, 5).groups.shape == (3, len(COLUMNS))
    assert exact.shape == (5, len(COLUMNS) + len(EXTREMA)) and counter.tolist() == [0]


def test_cuda_has_the_columns_in_the_same_order():
    text = (Path(__file__).parents[1] / "csrc" / "cuda" / "objective.cuh").read_text()
    names = re.findall(r"\bk(\w+)", re.search(r"enum Measure \{(.*?)\};", text, re.DOTALL)[1])
    found = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() for name in names]
    assert found == [*COLUMNS, "columns", EXTREMA[0], "columns", *EXTREMA[1:], "measures"]


def served(dtype: torch.dtype = torch.float32, **options) -> bool:
    config = GRPOConfig(**options)
    return has_kernel(config, Case(config, packed=False, bare=False).tokens.rules, dtype)


def test_what_has_no_kernel():
    assert served() and not served(torch.float64)
    for options in (
        dict(surrogate="dppo_tv"), dict(importance_sampling_level="sequence"), dict(entropy_coef=0.1),
        dict(beta=0.1, kl_estimator="abs"), dict(beta=0.1, use_bias_correction_kl=True),
        dict(off_policy_mask_threshold=0.1), dict(distill_coef=0.1),
    ):  # fmt: skip
        assert not served(**options), options

"""The fused loss of single tokens, in Triton's interpreter, beside objective/ in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from grpo_kernels.config import GRPOConfig
from grpo_kernels.kernels import get_backend
from grpo_kernels.kernels.objective_rules import ESTIMATORS, SURROGATES, has_kernel
from grpo_kernels.kernels.operations import Rows
from grpo_kernels.objective.loss import GRPOLoss, evaluate
from grpo_kernels.objective.metrics import COLUMNS, Batch, Sums, column_sums
from grpo_kernels.objective.surrogates import SURROGATE_RULES
from grpo_kernels.objective.tokens import TokenInputs, plan

OPTIONS = {
    "epsilon_low": 0.1, "epsilon_high": 0.3, "delta": 1.5, "dual_clip": 1.2, "log_ratio_clamp": 0.9,
}  # fmt: skip
LENGTHS = (7, 0, 20, 1, 33)


class Case:
    """A batch, padded or packed, with log-probabilities of its scored tokens."""

    def __init__(self, config: GRPOConfig, *, packed: bool, bare: bool, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        shape = (sum(LENGTHS),) if packed else (5, 11)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=g)

        advantages, ids = normal(5), torch.randint(100, shape, generator=g)
        advantages[2] = 0.0
        given = dict(cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0)) if packed else {}
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
        inputs = TokenInputs(advantages, **given)
        self.batch = Batch(inputs, config, "torch", ids.shape, 5, 0 if bare else 3)
        self.tokens, self.exact = (plan(inputs, ids, config, dtype) for dtype in (torch.float32, torch.float64))
        scored = torch.ones(ids.numel(), dtype=torch.bool) if self.tokens.scored is None else self.tokens.scored
        self.logp = torch.where(scored, -normal(ids.numel()).abs(), 0.0)
        self.entropy = torch.where(scored, normal(ids.numel()).abs(), 0.0)

    def sums(self, kernels) -> tuple[Tensor, Tensor]:
        dlogp = torch.full_like(self.logp, math.nan)
        groups = self.batch.tokens.group_index, self.batch.num_groups
        return kernels.objective(self.tokens, self.logp, self.entropy, dlogp, None, *groups), dlogp

    def expected(self) -> tuple[Sums, Tensor]:
        loss = GRPOLoss(self.exact, self.logp.double(), self.entropy.double())
        dlogp, _ = loss.of_all()
        return column_sums(self.batch, loss.finish()[1]), dlogp


def configs() -> list[GRPOConfig]:
    found = []
    for i, (surrogate, kl) in enumerate(itertools.product(SURROGATES, ESTIMATORS)):
        allowed = {"log_ratio_clamp", *SURROGATE_RULES[surrogate].options}
        options = {name: x for name, x in OPTIONS.items() if name in allowed and (i % 2 or name.startswith("eps"))}
        if kl != "none":
            options |= dict(kl_estimator=kl, beta=0.1)
        found.append(GRPOConfig(surrogate=surrogate, score_inactive=i % 3 == 0, **options))
    return found


@pytest.mark.parametrize("config", configs(), ids=lambda c: f"{c.surrogate}-{c.kl_estimator}")
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("bare", [False, True], ids=["", "bare"])
def test_gradient_and_sums(config, packed, bare):
    kernels, case = get_backend("triton"), Case(config, packed=packed, bare=bare)
    assert has_kernel(config, case.tokens.rules, torch.float32)
    (numbers, dlogp), (expected, truth) = case.sums(kernels), case.expected()
    torch.testing.assert_close(dlogp.double(), truth, rtol=3e-5, atol=3e-7)
    found = Sums.of(numbers, 5, case.batch.num_groups)
    for name, x, y in zip(Sums._fields, found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n} {COLUMNS}: {m}")
    assert torch.equal(case.sums(kernels)[0].nan_to_num(), numbers.nan_to_num())

    count = len(case.logp)
    for rows in (Rows(3, count - 2), Rows(0, 9, torch.randperm(count)[:9])):
        part = torch.full_like(dlogp, math.nan)
        kernels.objective(case.tokens, case.logp, case.entropy, part, rows)
        assert torch.equal(rows.take(part), rows.take(dlogp))
        rows.put(part, torch.full((rows.count,), math.nan))
        assert part.isnan().all()


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_numbers_that_are_not_finite(surrogate):
    """NaN stays in its token; a weight, an advantage or a clamp of 0 is not multiplied by what is infinite."""
    kernels, case = get_backend("triton"), Case(GRPOConfig(surrogate=surrogate), packed=False, bare=False)
    tokens, some = case.tokens, [3, 4, 5, 6]
    tokens.old[3], tokens.old[4], case.logp[5], case.logp[6] = -200.0, 200.0, math.nan, math.nan
    tokens.surrogate_scale[3:7] = torch.tensor([1.0, 1.0, 1.0, 0.0])
    tokens.dloss_direct[some] = tokens.dloss_via_ratio[some] = 1.0
    dlogp = torch.zeros_like(case.logp)
    kernels.objective(tokens, case.logp, case.entropy, dlogp, Rows(0, len(dlogp)))
    expected = evaluate(tokens, case.logp, case.entropy).dlogp
    torch.testing.assert_close(dlogp, expected, rtol=3e-5, atol=3e-7, equal_nan=True)
    assert dlogp[5].isnan() and dlogp[6].isnan() and dlogp.isnan().sum() == 2


def served(dtype: torch.dtype = torch.float32, **options) -> bool:
    config = GRPOConfig(**options)
    return has_kernel(config, Case(config, packed=False, bare=False).tokens.rules, dtype)


def test_what_has_no_kernel():
    assert served() and not served(torch.float64)
    for options in (
        dict(surrogate="dppo_tv"), dict(importance_sampling_level="sequence"), dict(entropy_coef=0.1),
        dict(beta=0.1, kl_estimator="abs"), dict(beta=0.1, use_bias_correction_kl=True),
        dict(off_policy_mask_threshold=0.1),
    ):  # fmt: skip
        assert not served(**options), options

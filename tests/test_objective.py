"""objective/ alone, from log-probabilities to d loss / d logp: autograd over the specification is what it is compared
with. Random configurations and batches in float64, where nothing but a wrong formula differs."""

from __future__ import annotations

import math
import random

import pytest
import torch
from helpers import token_inputs

import grpo_kernels as gk
from grpo_kernels.config import AGGREGATIONS, KL_ESTIMATORS, SURROGATE_RULES
from grpo_kernels.kernels.operations import Rows
from grpo_kernels.objective.kl import kl_estimate, times_ratio
from grpo_kernels.objective.loss import GRPOLoss, clamp_ratio, evaluate
from grpo_kernels.objective.tokens import Tokens, plan
from grpo_kernels.reference import reference_loss_from_logps

POINTS = [(surrogate, level) for surrogate, rule in SURROGATE_RULES.items() for level in rule.levels]
each_point = pytest.mark.parametrize(("surrogate", "level"), POINTS, ids=[f"{s}-{level}" for s, level in POINTS])
SHAPE = (5, 9)


class Case:
    """A configuration, inputs and log-probabilities, all drawn from one number."""

    def __init__(self, surrogate: str, level: str, kl: str, seed: int, *, packed: bool | None = None, **fixed) -> None:
        rng, g = random.Random(f"{surrogate} {level} {kl} {seed}"), torch.Generator().manual_seed(seed)
        rule = SURROGATE_RULES[surrogate]

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=g, dtype=torch.float64)

        is_packed = rng.random() < 0.3 if packed is None else packed
        lengths = [9, 0, 4, 1, 12]
        shape = (sum(lengths),) if is_packed else SHAPE
        options = dict(surrogate=surrogate, importance_sampling_level=level, kl_estimator=kl)
        options |= {name: low for name, low in (("delta", 1.5), ("dual_clip", 1.7), ("ratio_cap", 1.2))
                    if name in rule.options and rng.random() < 0.5}  # fmt: skip
        if rule.divides_by_rollout:  # of probabilities
            options |= {name: 0.05 for name in ("epsilon_low", "epsilon_high") if name in rule.options}
        if rng.random() < 0.4:
            options["log_ratio_clamp"] = 0.5
        factor = rng.choice(("", "use_bias_correction_kl", "kl_score_term"))
        if kl != "none":
            options["beta"] = fixed.get("beta", rng.choice((0.0, 0.3, 0.3)))
            options["kl_clamp"] = rng.choice((None, 0.3, (0.6, 0.25)))
            if factor == "use_bias_correction_kl" or (factor and options["beta"] and not kl.endswith("+")):
                options[factor] = True
        options["aggregation"] = rng.choice(AGGREGATIONS)
        if options["aggregation"] == "fixed_length":
            options["max_completion_length"] = 11
        if rng.random() < 0.4:
            options["entropy_threshold"] = 0.6
        if rng.random() < 0.4:
            options["entropy_coef"] = 0.02
            options["entropy_aggregation"] = rng.choice(("token_mean", "loss"))
        self.logps, self.entropy = -3 * torch.rand(shape, generator=g, dtype=torch.float64), normal(*shape).abs()
        per_sequence = rng.random() < 0.5
        self.given = {"advantages": normal(*((len(lengths) if is_packed else shape[0],) if per_sequence else shape))}
        self.given["advantages"].view(-1)[0] = 0.0
        if is_packed:
            self.given["cu_seqlens"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
        elif rng.random() < 0.8:
            self.given["completion_mask"] = torch.rand(shape, generator=g) < 0.7
            self.given["completion_mask"][1] = False
        spread = 0.2 if surrogate == "vespo" or level == "sequence_sum" else 0.7
        if rng.random() < 0.8:
            self.given["old_logps"] = self.logps + spread * normal(*shape)
        if rule.divides_by_rollout or rng.random() < 0.5:
            unknown = torch.rand(shape, generator=g) < 0.2
            self.given["rollout_logps"] = (self.logps + spread * normal(*shape)).masked_fill(unknown, math.nan)
        if kl != "none":
            self.given["ref_logps"] = self.logps + normal(*shape)
        for name in ("rollout_weights", "token_weights"):
            if rng.random() < 0.4:
                size = shape if rng.random() < 0.5 else (len(lengths) if is_packed else shape[0],)
                self.given[name] = (torch.rand(size, generator=g, dtype=torch.float64) * 1.5).round(decimals=1)
        if {"old_logps", "rollout_logps"} & self.given.keys() and rng.random() < 0.5:
            options["off_policy_mask_threshold"] = 0.02
        if rng.random() < 0.3:
            self.given["normalizer"] = torch.tensor(17.0, dtype=torch.float64)
        self.config = gk.GRPOConfig(**options | fixed)

    def planned(self, dtype: torch.dtype = torch.float64) -> Tokens:
        ids = torch.zeros(self.logps.shape, dtype=torch.int64)
        inputs, per_sequence = token_inputs(ids, dtype, **self.given)
        return plan(inputs, ids, self.config, dtype, per_sequence=per_sequence)

    def statistics(self, tokens: Tokens) -> list[torch.Tensor]:
        """logp and entropy (N,), 0 at tokens that are not scored, as the head leaves them."""
        flat = [x.reshape(-1).to(tokens.advantage.dtype) for x in (self.logps, self.entropy)]
        return flat if tokens.scored is None else [torch.where(tokens.scored, x, 0.0) for x in flat]

    def exact(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(loss, d loss / d logp, d loss / d entropy) of the specification."""
        leaves = [x.clone().requires_grad_() for x in (self.logps, self.entropy)]
        loss = reference_loss_from_logps(leaves[0], entropy=leaves[1], config=self.config, **self.given).loss
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else (None, None)
        return loss.detach(), *(torch.zeros(x.numel()).double() if g is None else g.reshape(-1)
                                for x, g in zip(leaves, gradients, strict=True))  # fmt: skip


def assert_near(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert (found - expected).abs().max() <= 1e-12 * (1 + expected.abs().max()), what


@each_point
def test_value_and_gradient_are_those_of_autograd(surrogate, level):
    """With every KL estimator, twice: all options and inputs have their turns."""
    moved = 0
    for kl in KL_ESTIMATORS:
        for seed in range(2):
            case = Case(surrogate, level, kl, seed)
            tokens, (loss, dlogp, dentropy) = case.planned(), case.exact()
            logp, entropy = case.statistics(tokens)
            found = GRPOLoss(tokens, logp, entropy)
            gradients = found.gradients()
            for mine, exact in zip((found.value_and_metrics()[0], *gradients), (loss, dlogp, dentropy), strict=True):
                assert_near(mine, exact, case.config)
            assert torch.equal(evaluate(tokens, logp, entropy).dlogp, gradients[0])
            if tokens.has_gradient is not None:  # whose complement takes no part in any product
                assert not dlogp[~tokens.has_gradient].any() and not dentropy[~tokens.has_gradient].any(), case.config
            moved += bool(dlogp.any())
    assert moved > 10


@each_point
def test_chunks_give_what_all_tokens_give(surrogate, level):
    """As a head asks for it: neighbours, lists of tokens, or all of a sequence, whose statistics become known late."""
    for seed, kl in enumerate(("none", "k3", "k2")):
        case = Case(surrogate, level, kl, 10 + seed, packed=False)
        tokens = case.planned()
        known = case.statistics(tokens)
        whole = evaluate(tokens, *known).dlogp
        active = torch.ones(whole.shape, dtype=torch.bool) if tokens.has_gradient is None else tokens.has_gradient
        index = active.nonzero()[:, 0]
        lengths = active.view(SHAPE).sum(1).tolist()
        logp, entropy = (torch.zeros_like(x) for x in known)
        loss = GRPOLoss(tokens, logp, entropy)
        assert loss.needs_sequences == tokens.rules.whole_sequences
        if loss.needs_sequences:
            ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
            parts = [(Rows(ends[a], ends[b], index[ends[a] : ends[b]]), slice(a, b)) for a, b in ((0, 2), (2, 5))]
        else:
            parts = [(rows, None) for rows in (*Rows(0, len(index), index).split(7), Rows(3, 8))]
        for rows, sequences in parts:
            for x, exact in zip((logp, entropy), known, strict=True):
                if sequences is not None:  # those without a gradient were scored before
                    first, last = sequences.start * SHAPE[1], sequences.stop * SHAPE[1]
                    x[first:last] = exact[first:last]
                rows.put(x, rows.take(exact))
            dlogp, _ = loss(rows, sequences)
            torch.testing.assert_close(rows.take(dlogp), rows.take(whole), rtol=1e-12, atol=1e-15)


@each_point
def test_what_is_not_a_number_stays_so_and_padding_has_no_effect(surrogate, level):
    for kl in ("none", "k3"):
        case = Case(surrogate, level, kl, 20, packed=False, entropy_threshold=0.5)
        case.given |= {"advantages": torch.ones(SHAPE).double(), "completion_mask": torch.rand(SHAPE) < 0.7}
        case.given["completion_mask"][2, 3], mask = True, case.given["completion_mask"]
        for name in ("rollout_weights", "token_weights"):
            case.given.pop(name, None)
        clean, logps = case.planned(), case.logps.clone()
        expected = evaluate(clean, *case.statistics(clean))
        for garbage in (math.nan, math.inf, -math.inf):
            for x in (case.logps, case.entropy, *case.given.values()):
                if x.shape == SHAPE and x.is_floating_point():
                    x[~mask] = garbage
            tokens = case.planned()
            found = evaluate(tokens, *case.statistics(tokens))
            for name in ("value", "dlogp"):
                assert torch.equal(getattr(found, name)[mask.view(-1)], getattr(expected, name)[mask.view(-1)]), name
            assert not found.dlogp[~mask.view(-1)].any()
        case.logps = logps.index_put((torch.tensor(2), torch.tensor(3)), torch.tensor(math.nan).double())
        loss = GRPOLoss(clean, *case.statistics(clean))
        loss.logp[case.logps.view(-1).isnan()] = math.nan
        assert loss.value_and_metrics()[0].isnan()


@pytest.mark.parametrize("surrogate", SURROGATE_RULES)
def test_a_scale_or_weight_of_0_drops_what_is_infinite(surrogate):
    """A token far from the old policy with an advantage that overflows: 0 times that would be NaN."""
    for name in ("rollout_weights", "token_weights")[surrogate == "vespo" :]:  # which bounds the first, no factor there
        case = Case(surrogate, SURROGATE_RULES[surrogate].levels[0], "k3", 0, packed=False, beta=0.0)
        case.given = {"advantages": torch.ones(SHAPE), "old_logps": case.logps.float(), name: torch.ones(SHAPE)}
        case.given["advantages"][0, 1], case.given["old_logps"][0, 1], case.given[name][0, 1] = 3e38, -100.0, 0.0
        tokens = case.planned(torch.float32)
        loss = GRPOLoss(tokens, *case.statistics(tokens))
        dlogp, _ = loss.gradients()
        assert dlogp.isfinite().all() and loss.value_and_metrics()[0].isfinite(), name
        assert dlogp[1] == 0 or surrogate == "a2po", name  # all tokens of a sequence share its gradient there


@pytest.mark.parametrize("kl", KL_ESTIMATORS[1:])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_ratio_and_kl_and_their_product_stop_at_the_exponential_of_80(kl, level):
    """Gradients of sequences of one token; no product is the bound itself. Autograd adds numbers near the KL that
    cancel."""
    ratios = torch.tensor([-90.0, -3.0, -0.25, 3.0, 35.0, 60.0, 79.0, 90.0])
    distances = torch.tensor([-90.0, -3.0, 0.0, 3.0, 18.0, 35.0, 60.0, 79.0, 90.0])
    x, d = (part.reshape(-1, 1).double() for part in torch.meshgrid(ratios, distances, indexing="ij"))
    case = Case("clip", level, kl, 0, packed=False)
    case.config = gk.GRPOConfig(
        importance_sampling_level=level, kl_estimator=kl, beta=0.5, use_bias_correction_kl=True, aggregation="seq_sum"
    )
    case.logps, case.entropy = -torch.ones_like(x), torch.ones_like(x)
    case.given = dict(advantages=0 * x, old_logps=-1 - x, ref_logps=d - 1)
    _, dlogp, _ = case.exact()
    tokens = case.planned()
    found = evaluate(tokens, *case.statistics(tokens))
    assert ((found.dlogp - dlogp).abs() <= 1e-9 * dlogp.abs() + 1e-15 * found.kl.abs() + 1e-12).all()


@pytest.mark.parametrize(
    ("kl", "expected"),
    [("k1", lambda d: 1 - d), ("k2", lambda d: d * (d / 2 - 1)), ("k3", lambda d: -d), ("abs", lambda d: d.abs() - 1)],
)
def test_the_kl_times_a_factor_has_a_derivative_of_all_digits(kl, expected):
    """Value and slope of k3 are near exp(d), 5e8 at d = 20, and the derivative of the product is their sum, -d."""
    d = torch.tensor([2.0, 5.0, 18.0, 20.0, 25.0, 40.0, 79.0])
    score = kl_estimate(gk.GRPOConfig(kl_estimator=kl, kl_score_term=True, beta=1.0), -torch.ones_like(d), d - 1.0)
    config = gk.GRPOConfig(kl_estimator=kl, use_bias_correction_kl=True, beta=1.0)
    ratio, estimate = clamp_ratio(config, 0 * d), kl_estimate(config, -torch.ones_like(d), d - 1.0)
    _, corrected, _ = times_ratio(estimate, ratio.value, ratio.clamped, shared=False)
    for slope in (score.d_logp, corrected):
        torch.testing.assert_close(slope, expected(d), rtol=2e-7, atol=0.0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("preset", ["grpo", "gspo"])
def test_sums_over_a_million_tokens(preset, packed):
    """A running sum in float32 was off by 9e-3 here, in the gradient and in the metrics."""
    count, config = 1_000_000, gk.GRPOConfig.preset(preset, beta=0.1, entropy_coef=0.01, epsilon_high=0.5)
    g = torch.Generator().manual_seed(0)
    logps, noise, entropy = (torch.rand((count,) if packed else (1, count), generator=g) for _ in range(3))
    logps, old = -3 * logps, -3 * logps + 0.05 * (noise - 0.4)
    options: dict = {"cu_seqlens": torch.tensor([0, count])} if packed else {}
    found = []
    for dtype in (torch.float32, torch.float64):
        x = logps.to(dtype, copy=True).requires_grad_()
        given = dict(old_logps=old.to(dtype), ref_logps=old.to(dtype) - 0.1, rollout_logps=old.to(dtype))
        out = gk.grpo_loss_from_logps(
            x, torch.ones(1, 1, dtype=dtype), entropy=entropy.to(dtype), config=config, **given, **options
        )
        out.loss.backward()
        names = "kl", "entropy", "approx_kl", "ratio/mean", "policy_loss", "rollout_ratio/mean"
        found.append(torch.stack([out.loss.detach(), x.grad.double().sum(), *(out.metrics[n] for n in names)]).double())
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=0)


def test_sums_of_a_users_loss_over_a_million_tokens():
    x = torch.rand(1_000_000, generator=torch.Generator().manual_seed(0)).requires_grad_()
    sequence = torch.zeros(len(x), dtype=torch.long)
    total = gk.PolicyChunk(x, None, torch.arange(len(x)), sequence).sequence_sum(x)
    total.backward(torch.full_like(x, 0.1))
    right = x.detach().double().sum()
    assert abs(total[0].double() - right) < 1e-7 * right
    assert abs(x.grad[0].double() / 1e5 - 1) < 1e-7


def test_a_token_with_an_entropy_bonus_alone_has_a_gradient():
    logps, entropy = -torch.rand(2, 4) - 0.1, torch.rand(2, 4)
    advantages, mask = torch.tensor([1.0, 0.0]), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    for coefficient, share in ((0.0, 4 / 7), (0.1, 0.0)):
        config = gk.GRPOConfig(entropy_coef=coefficient)
        out = gk.grpo_loss_from_logps(logps, advantages, entropy=entropy, completion_mask=mask, config=config)
        assert abs(out.metrics["zero_gradient"] - share) < 1e-6
    # Only tokens above the threshold have the bonus.
    config = gk.GRPOConfig(entropy_coef=0.1, entropy_threshold=float(entropy[1].min()) + 1e-6, entropy_kept_only=True)
    out = gk.grpo_loss_from_logps(logps[1:], advantages[1:], entropy=entropy[1:], config=config)
    assert abs(out.metrics["zero_gradient"] - 1 / 4) < 1e-6

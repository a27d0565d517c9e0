"""Importance weights, rejection and their metrics, where another engine has sampled: against loops and verl itself."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import json
import math
import random
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import verl_package
import yaml
from helpers import call, make_batch, off_policy, packed
from ranks import run_ranks
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.corrections import REJECTIONS
from grpo_kernels.objective.sequences import WEIGHT_LEVELS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "corrections.md").read_text(encoding="utf-8")
VERLS = [name for name in REJECTIONS if not name.endswith(("binary_kl", "tv"))]


@pytest.fixture
def verl(monkeypatch):
    """verl's rollout_corr_helper."""
    verl_package.install(monkeypatch)
    for name, member in (
        ("verl.protocol", "DataProto"), ("verl.trainer.config.algorithm", "RolloutCorrectionConfig"),
        ("verl.workers.config.actor", "PolicyLossConfig"),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, verl_package.stand_in(name, **{member: None}))
    return importlib.import_module("verl.trainer.ppo.rollout_corr_helper")


def logps(seed: int, spread: float = 0.3, *, rows: int = 5, length: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """old, rollout (rows, length) and a ragged mask, of which a row may be empty."""
    g = torch.Generator().manual_seed(seed)
    old = -4 * torch.rand(rows, length, generator=g)
    rollout = (old + spread * torch.randn(rows, length, generator=g)).clamp(max=0.0)
    mask = torch.arange(length) < torch.randint(0, length + 1, (rows, 1), generator=g)
    mask[0, 0] = True
    return old, torch.where(mask, rollout, torch.nan), mask  # verl reads no padding


# --- rejection --------------------------------------------------------------------------------------------------------


def test_verl_has_these_options(verl):
    assert set(VERLS) == verl.SUPPORTED_ROLLOUT_RS_OPTIONS and len(VERLS) == 11


def test_rejection_equals_verls(verl):
    draw, shares = random.Random(0), {name: [] for name in VERLS}
    for seed in range(200):
        old, rollout, mask = logps(seed, draw.choice((0.01, 0.1, 0.5, 5.0)))
        names = draw.sample(VERLS, draw.choice((1, 1, 2, 3)))
        options = {
            name: (draw.uniform(0.3, 1.0), draw.uniform(1.0, 3.0)) if name.endswith("k1") else 10 ** draw.uniform(-3, 1)
            for name in names
        }
        spec = ",".join(f"{x[0]}_{x[1]}" if isinstance(x, tuple) else str(x) for x in options.values())
        expected, _ = verl.compute_rollout_rejection_mask(old - rollout, mask, ",".join(names), spec)
        found = gk.rejection_mask(old, rollout, options, completion_mask=mask)
        assert found.dtype == torch.bool and torch.equal(found, expected), options
        for name in names:
            shares[name].append((found.sum() / mask.sum()).item())
    assert all(0.1 < sum(x) / len(x) < 0.95 for x in shares.values()), shares  # each keeps some and rejects some
    far = torch.tensor([[30.0, -25.0], [30.0, -19.0]])  # log-ratios that are clamped to 20 and -20
    for name, bound in (("seq_sum_k1", (0.5, 2.0)), ("token_k2", 200.0), ("seq_max_k3", 5e8)):
        spec = "0.5_2.0" if isinstance(bound, tuple) else str(bound)
        expected, _ = verl.compute_rollout_rejection_mask(far, torch.ones(2, 2), name, spec)
        found = gk.rejection_mask(far - 60, torch.full((2, 2), -60.0), {name: bound})
        assert found.tolist() == expected.bool().tolist()
        assert expected[0].all()


@pytest.mark.parametrize("name", [name for name in REJECTIONS if name.endswith(("binary_kl", "tv"))])
def test_gates_of_openrlhf_against_a_loop(name):
    rejected = 0
    for seed in range(20):
        old, rollout, mask = logps(seed, 0.8)
        bound = 0.05 if name.endswith("tv") else 0.01
        found = gk.rejection_mask(old, rollout, {name: bound}, completion_mask=mask.int())

        def divergence(p: float, q: float) -> float:
            p, q = (min(max(math.exp(x), 1e-6), 1 - 1e-6) for x in (p, q))
            kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
            return abs(p - q) if name.endswith("tv") else kl

        for i, row in enumerate(mask.tolist()):
            x = [divergence(rollout[i, t].item(), old[i, t].item()) for t in range(sum(row))]
            if name.startswith("seq"):
                x = [sum(x) / len(x)] * len(x) if x else []
            assert found[i].tolist() == [y <= bound for y in x] + [False] * (len(row) - len(x))
        rejected += (mask & ~found).sum().item()
    assert rejected > 20


def test_an_unknown_log_probability_counts_as_a_ratio_of_1():
    """As in rollout_weights: it is kept wherever a ratio of 1 is, and takes part in the mean of its sequence."""
    old = torch.tensor([[-1.0, -2.0, -1.0], [-0.5, -0.5, -0.5]])
    rollout = torch.tensor([[-1.5, math.nan, -1.0], [math.nan] * 3])
    k2 = 0.5**2 / 2
    assert gk.rollout_weights(old, rollout)[1].tolist() == [1.0] * 3
    for name in REJECTIONS:
        bound = (0.99, 1.01) if name.endswith("k1") else 1e-9
        expected = [[name.startswith("token") and t > 0 for t in range(3)], [True] * 3]
        assert gk.rejection_mask(old, rollout, {name: bound}).tolist() == expected, name
    for name, statistic in (("seq_sum_k2", k2), ("seq_mean_k2", k2 / 3), ("seq_max_k2", k2)):
        for factor in (0.99, 1.01):
            kept = gk.rejection_mask(old, rollout, {name: factor * statistic})
            assert kept[0].all() == kept[0].any() == (factor > 1), name


def test_weight_0_or_out_of_the_mask():
    """Both ways of the docstring: what is rejected has no surrogate, and it is counted or not."""
    batch = off_policy(make_batch(1, masked=True))
    old, mask = batch.options["old_logps"], batch.options["completion_mask"]
    rollout = old + 0.5 * torch.randn(old.shape)
    kept = gk.rejection_mask(old, rollout, {"token_k1": (0.7, 1.4)}, completion_mask=mask)
    assert 0 < kept.sum() < mask.sum()
    config = gk.GRPOConfig(beta=0.1)
    plain = call(batch.with_options(token_weights=kept.float()), config)  # without their KL, with the denominator
    zero = call(batch, config, rollout_weights=kept.float())
    verls = call(batch.with_options(completion_mask=kept), config)
    torch.testing.assert_close(verls.loss * kept.sum(), plain.loss * mask.sum())
    assert zero.sequences["tokens"].sum() == mask.sum() and verls.sequences["tokens"].sum() == kept.sum()
    kl, _ = call(batch.with_options(completion_mask=mask & ~kept), config).metric_sums["kl"]  # of what is rejected
    torch.testing.assert_close((zero.loss - plain.loss) * mask.sum(), 0.1 * kl)


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
def test_weights_equal_verls(verl, normalize):
    for seed in range(40):
        old, rollout, mask = logps(seed, (0.02, 0.3, 0.8)[seed % 3])
        given = dict(completion_mask=mask, batch_normalize=normalize)
        for level, name in (("token", "token"), ("sequence_sum", "sequence")):
            for bounds, options in ((1.3, dict(cap=1.3)), ("0.3_4.0", dict(mode="mask", low=0.3, cap=4.0))):
                ratio = torch.where(mask, old - rollout, 0.0)
                expected, _ = verl.compute_rollout_correction_weights(ratio, mask.float(), name, bounds, normalize)
                found = gk.rollout_weights(old, rollout, level=level, **given, **options)
                found = found if level == "token" else found[:, None].expand_as(old)
                torch.testing.assert_close(found[mask], expected[mask], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", WEIGHT_LEVELS)
def test_rollout_weights_against_a_loop(level, mode):
    old, rollout = torch.randn(3, 5) - 5, torch.randn(3, 5) - 5
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    rollout[0, 1], rollout[1, 3] = math.nan, math.inf
    found = gk.rollout_weights(old, rollout, completion_mask=mask, level=level, mode=mode, cap=1.5, low=0.6)

    def limit(w: float) -> float:
        return min(max(w, 0.6), 1.5) if mode == "truncate" else w if 0.6 <= w <= 1.5 else 0.0

    for i in range(3):
        gaps = [
            0.0 if not mask[i, t] or math.isnan(rollout[i, t]) else (old[i, t] - rollout[i, t]).item() for t in range(5)
        ]
        if level == "token":
            assert found[i].tolist() == pytest.approx([limit(math.exp(x)) for x in gaps], rel=1e-5)
        else:
            total = sum(gaps) / (1 if level == "sequence_sum" else max(int(mask[i].sum()), 1))
            assert found[i].item() == pytest.approx(limit(math.exp(total)), rel=1e-5)
    assert found.shape == ((3, 5) if level == "token" else (3,))


def test_a_ratio_at_the_limit_is_not_vetoed_and_log_ratios_end_at_20():
    """The veto takes ratios below its bound, as verl's."""
    zeros, old = torch.zeros(1, 2), torch.tensor([[0.0, -1.0]])
    assert torch.equal(gk.rollout_weights(zeros, zeros, veto=1.0), torch.ones(1, 2))
    assert torch.equal(gk.rollout_weights(old, zeros, veto=1.0), torch.zeros(1, 2))
    old = torch.tensor([[-18.0, -19.5, -30.0]])
    for bound, kept in ((18.0, [True, False, False]), (19.9, [True, True, False]), (20.0, [True, True, True])):
        options = {"token_k2": bound**2 / 2 + 0.1}
        assert gk.rejection_mask(old, torch.zeros(1, 3), options).tolist() == [kept]


def test_masks_and_vetoes_of_whole_sequences():
    ratio = torch.tensor([[1.2, 0.9, 1.1], [3.0, 0.2, 2.0], [1e-5, 3.0, 3.0], [2.0, 2.0, 9.0]])
    rollout = torch.full((4, 3), -4.0)
    old, mask = rollout + ratio.log(), torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]])
    found = gk.rollout_weights(old, rollout, completion_mask=mask, mode="sequence_mask")
    w = torch.where(mask.bool(), ratio, 1.0)
    inside = torch.tensor([True, True, False, True])[:, None]  # means 1.06, 1.06, 0.04, 2.0
    torch.testing.assert_close(found, torch.where(inside, w, 0.0))
    found = gk.rollout_weights(old, rollout, completion_mask=mask, veto=0.3)
    assert not found[1:3].any()
    torch.testing.assert_close(found[[0, 3]], w[[0, 3]].clamp(max=2.0))
    assert gk.rollout_weights(old, rollout, level="sequence", veto=1e-4)[2] == 0


def test_rollout_weights_of_an_unbounded_gap_are_finite():
    old, rollout = torch.zeros(1, 2), torch.full((1, 2), -1e4)
    assert gk.rollout_weights(old, rollout).tolist() == [[2.0, 2.0]]
    assert gk.rollout_weights(old, rollout, mode="mask").tolist() == [[0.0, 0.0]]
    assert gk.rollout_weights(rollout, old).tolist() == [[0.0, 0.0]]  # no lower bound unless one is given


def test_normalised_weights_have_a_mean_of_1():
    old, rollout, mask = logps(3)
    for level in WEIGHT_LEVELS:
        found = gk.rollout_weights(old, rollout, completion_mask=mask, level=level, batch_normalize=True)
        counted = mask if level == "token" else mask.any(1)
        assert found[counted].mean().item() == pytest.approx(1.0)
        none = gk.rollout_weights(old, rollout, completion_mask=mask, level=level, mode="mask", low=1e3, cap=1e4)
        again = gk.rollout_weights(
            old, rollout, completion_mask=mask, level=level, mode="mask", low=1e3, cap=1e4, batch_normalize=True
        )
        assert torch.equal(none, again) and not again[counted].any()  # a mean of 0 divides nothing
        nothing = gk.rollout_weights(old, rollout, completion_mask=0 * mask, level=level, batch_normalize=True)
        assert torch.equal(nothing, torch.ones_like(nothing))


def normalized_on_ranks(rank: int, group, file: str) -> None:
    """Ranks with rows of their own, the second without a token: the mean is of all of them."""
    old, rollout, mask, expected = torch.load(file)
    own = slice(0, 3) if rank == 0 else slice(3, 5)
    given = dict(completion_mask=mask[own], batch_normalize=True)
    for level, whole in expected.items():
        for where in ({}, {"group": group}):
            found = gk.rollout_weights(old[own], rollout[own], level=level, **given, **where)
            torch.testing.assert_close(found, whole[own], rtol=1e-6, atol=0)


@pytest.mark.parametrize("empty", [False, True])
def test_two_ranks_have_one_mean(tmp_path, empty):
    old, rollout, mask = logps(1)
    mask[3:] &= not empty
    given = dict(completion_mask=mask, batch_normalize=True)
    expected = {level: gk.rollout_weights(old, rollout, level=level, **given) for level in WEIGHT_LEVELS}
    torch.save((old, rollout, mask, expected), tmp_path / "case")
    run_ranks(partial(normalized_on_ranks, file=str(tmp_path / "case")), 2, tmp_path)


# --- both: forms of a batch, types ------------------------------------------------------------------------------------

FUNCTIONS = {
    **{f"weights, {level}": partial(gk.rollout_weights, level=level, veto=0.3) for level in WEIGHT_LEVELS},
    "weights, normalised": partial(gk.rollout_weights, batch_normalize=True),
    "weights, mask of sequences": partial(gk.rollout_weights, mode="sequence_mask", low=0.9, cap=1.1),
    **{
        name: partial(gk.rejection_mask, options={name: (0.8, 1.2) if name.endswith("k1") else 0.02})
        for name in REJECTIONS
    },
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forms_and_types_of_a_batch(name):
    """Packed, empty, in 16 bits, under autocast, with a graph. test_sweep.py has views and torch's defaults."""
    function, (old, rollout, mask) = FUNCTIONS[name], logps(4)
    old, rollout[0, 0] = torch.where(mask, old, math.nan), math.nan  # padding holds anything, and one is unknown
    expected = function(old, rollout, completion_mask=mask)
    offsets = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    flat = function(old[mask], rollout[mask], cu_seqlens=offsets.int())
    torch.testing.assert_close(flat, expected[mask] if expected.shape == old.shape else expected)
    with torch.autocast("cpu", torch.bfloat16):
        found = function(old.clone().requires_grad_(), rollout, completion_mask=mask.int())
    assert torch.equal(found, expected) and not found.requires_grad
    for kind in (torch.float16, torch.bfloat16):
        low = [x.to(kind) for x in (old, rollout)]
        found = function(*low, completion_mask=mask)
        assert torch.equal(found, function(*[x.float() for x in low], completion_mask=mask))
    wide = function(old.double(), rollout.double(), completion_mask=mask)
    assert wide.dtype in (torch.float64, torch.bool)
    torch.testing.assert_close(wide.to(expected.dtype), expected)
    for shape in ((0, 4), (3, 0)):
        assert function(torch.zeros(shape), torch.zeros(shape)).shape[0] == shape[0]
    assert function(torch.zeros(0), torch.zeros(0), cu_seqlens=torch.zeros(3).int()).shape in ((0,), (2,))


# --- metrics ----------------------------------------------------------------------------------------------------------

WEIGHTS = {
    "token": dict(cap=1.2), "raised": dict(cap=1.2, low=0.9), "masked": dict(mode="mask", low=0.8, cap=1.2),
    "product": dict(level="sequence_sum", cap=1.2), "mean": dict(level="sequence", cap=1.1),
    "mean, masked": dict(level="sequence", mode="mask", low=0.9, cap=1.1),
    "whole": dict(mode="sequence_mask", low=0.9, cap=1.1), "none": None,
}  # fmt: skip


def with_rollout(options: dict | None, seed: int = 5):
    batch = off_policy(make_batch(seed, sequences=6, masked=True))
    old = batch.options["old_logps"]
    rollout = old + 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(seed))
    rollout[0, 0] = math.nan
    given = {"rollout_logps": rollout}
    if options is not None:
        given["rollout_weights"] = gk.rollout_weights(
            old, rollout, completion_mask=batch.options["completion_mask"], **options
        )
    return batch.with_options(**given)


def moments(name: str, w: Tensor) -> dict[str, float]:
    square = (w**2).mean()
    size = "rollout_ess" if name == "rollout_weight" else f"{name}/ess"
    return {
        f"{name}/mean": w.mean(), f"{name}/min": w.min(), f"{name}/max": w.max(), f"{name}/mean_square": square,
        size: w.sum() ** 2 / (len(w) * (w**2).sum()), f"{name}/chi_square": square - 1,
    }  # fmt: skip


def expected_metrics(batch, options: dict | None) -> dict[str, float]:
    given = batch.options
    old, rollout, mask = (given[name] for name in ("old_logps", "rollout_logps", "completion_mask"))
    r = torch.where(mask & ~rollout.isnan(), old.double() - rollout.double(), 0.0)
    found = moments("rollout_ratio", r.exp()[mask]) | moments("rollout_ratio_sequence", r.sum(1).exp()[mask.any(1)])
    for name, x in (("old", old), ("rollout", rollout)):
        found[f"nll/{name}"] = -x[mask & ~rollout.isnan()].double().mean()
        found[f"perplexity/{name}"] = found[f"nll/{name}"].exp()
    if options is not None:
        w, level = given["rollout_weights"].double(), options.get("level", "token")
        total = r.sum(1, keepdim=True)
        raw = {"token": r, "sequence_sum": total, "sequence": total / mask.sum(1, keepdim=True).clamp(min=1)}[
            level
        ].exp()
        w, raw = (x.view(len(w), -1).expand_as(r)[mask] for x in (w, raw))
        found |= moments("rollout_weight", w)
        found["rollout_weight/dropped"] = (w == 0).double().mean()
        found["rollout_weight/above"] = ((w < 0.99 * raw) & (w != 0)).double().mean()
        found["rollout_weight/below"] = (w > 1.01 * raw).double().mean()
    return {name: float(x) for name, x in found.items()}


@pytest.mark.parametrize("name", WEIGHTS)
def test_metrics_before_and_after_bounds(name, backend):
    options = WEIGHTS[name]
    batch = with_rollout(options)
    expected = expected_metrics(batch, options)
    if options is not None:
        kinds = [expected[f"rollout_weight/{kind}"] for kind in ("above", "below", "dropped")]
        assert [x > 0 for x in kinds] == [
            options.get("mode") is None,
            name == "raised",
            options.get("mode") is not None,
        ]
    for form in (batch, packed(batch)):
        metrics = call(form, backend=backend).metrics
        for key, x in expected.items():
            assert metrics[key].item() == pytest.approx(x, rel=2e-5, abs=1e-6), key
    names = {name for name in metrics if name.startswith(("rollout_ratio", "rollout_weight", "nll", "perplexity"))}
    assert names == expected.keys() - {"rollout_ess"}
    other = gk.grpo_loss_from_logps(batch.options["old_logps"], batch.advantages, **batch.options).metrics
    assert all(other[key].item() == pytest.approx(metrics[key].item(), rel=1e-5, abs=1e-6) for key in expected)


def test_metrics_equal_verls(verl):
    batch = with_rollout(None)
    old, rollout, mask = (batch.options[name] for name in ("old_logps", "rollout_logps", "completion_mask"))
    mask = mask & ~rollout.isnan()
    rows = mask.any(1)  # verl counts an empty sequence as a ratio of 1
    expected = verl.compute_offpolicy_metrics(*(x[rows] for x in (old, rollout, mask)))
    found = call(batch.with_options(completion_mask=mask)).metrics
    assert found["rollout_ratio/chi_square"].item() == pytest.approx(expected["chi2_token"], rel=1e-4)
    assert found["rollout_ratio_sequence/chi_square"].item() == pytest.approx(expected["chi2_seq"], rel=1e-4)
    weights, numbers = verl.compute_rollout_correction_weights(
        torch.where(mask, old - rollout, 0.0), mask.float(), "token", 1.2
    )
    found = call(batch.with_options(completion_mask=mask, rollout_weights=weights)).metrics
    assert found["rollout_ess"].item() == pytest.approx(numbers["rollout_is_eff_sample_size"], rel=1e-5)
    assert found["rollout_weight/above"].item() == pytest.approx(numbers["rollout_is_ratio_fraction_high"])
    for name in ("mean", "min", "max"):
        assert found[f"rollout_weight/{name}"].item() == pytest.approx(numbers[f"rollout_is_{name}"])


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_the_committed_numbers_and_its_code_runs():
    toy, results = importlib.import_module("corrections"), ROOT / "bench" / "results" / "corrections" / "cpu.json"
    assert toy.table(json.loads(results.read_text())["cases"]) in PAGE
    case = toy.measure(8, 0.2, toy.BATCH)
    assert case["none"]["noise"] > 0.5 and case[toy.EXACT]["bias"] < 0.2 and case["engine"]["mean_difference"] > 0.05
    batch = off_policy(make_batch(2, masked=True))
    names = dict(hidden=batch.hidden, weight=batch.weight, ids=batch.ids, advantages=batch.advantages)
    names |= dict(old_logps=batch.options["old_logps"], mask=batch.options["completion_mask"])
    names["rollout_logps"] = names["old_logps"] + 0.1
    exec(compile(PAGE.split("```python\n")[1].split("```")[0], "corrections.md", "exec"), names)


def test_the_page_has_the_defaults_of_trl_and_verl():
    trl = pytest.importorskip("trl", reason="trl is not installed: make test EXTRAS=dev,peers")
    given = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    names = ("correction", "mode", "clip_max", "clip_min")
    assert [given[f"vllm_importance_sampling_{name}"] for name in names] == [True, "sequence_mask", 3.0, None]
    verl = importlib.util.find_spec("verl")
    assert verl is not None, "verl is not installed: make test EXTRAS=dev,peers"
    folder = Path(verl.submodule_search_locations[0]) / "trainer" / "config"
    by_yaml = yaml.safe_load((folder / "algorithm" / "rollout_correction.yaml").read_text())
    module = ast.parse((folder / "algorithm.py").read_text())
    (config,) = (x for x in module.body if isinstance(x, ast.ClassDef) and x.name == "RolloutCorrectionConfig")
    by_class = {x.target.id: ast.literal_eval(x.value) for x in config.body if isinstance(x, ast.AnnAssign)}
    for found, level in ((by_yaml, None), (by_class, "sequence")):
        expected = {"rollout_is": level, "rollout_is_threshold": 2.0, "rollout_rs": None}
        assert expected.items() <= found.items() and not found["rollout_is_batch_normalize"]

"""GRPOConfig: what each option may be, and which options go together; equality; numbers of NumPy."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from helpers import make_batch

import grpo_kernels as gk
from grpo_kernels.argument import Argument
from grpo_kernels.config import OPTIONS

TENSORS = {
    "temperature": torch.full((4, 6), 0.8),
    "entropy_threshold": torch.tensor([1.0, 2.0]),
    "entropy_coef": torch.tensor(0.1),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_options_are_compared_by_identity(name):
    x = TENSORS[name]
    config, same = gk.GRPOConfig(**{name: x}), gk.GRPOConfig(**{name: x})
    assert config == same and hash(config) == hash(same)
    for other in (gk.GRPOConfig(**{name: x.clone()}), gk.GRPOConfig(), gk.GRPOConfig(**{name: 0.8})):
        assert config != other and other != config
    assert len({config, same, gk.GRPOConfig(**{name: x.clone()})}) == 2


def test_other_options_are_compared_by_value():
    one, other = gk.GRPOConfig(beta=1), gk.GRPOConfig(beta=1.0)
    assert one == other and hash(one) == hash(other)
    assert gk.GRPOConfig() != "dapo"
    assert gk.GRPOConfig(epsilon_low=0.2) == gk.GRPOConfig()  # the default, spelled out
    for options in ({"beta": 0.1}, {"chunk_rows": 7}, {"logits_dtype": torch.float32}, {"score_inactive": False}):
        assert gk.GRPOConfig(**options) != gk.GRPOConfig()


def test_a_cap_below_the_clip_range_computes_with_a_warning():
    """TRL's loss: the cap acts on the ratio, the clip on the ratio without the cap."""
    with pytest.warns(
        UserWarning, match=r"delta=1.1 is below 1 \+ epsilon_high with epsilon_high=0.2: epsilon_high has no"
    ):
        config = gk.GRPOConfig(delta=1.1)
    ratio, advantages = torch.tensor([[0.7, 1.05, 1.15, 1.5]] * 2).double(), torch.tensor([1.0, -1.0]).double()
    logps = (ratio.log() - 1).requires_grad_()
    out = gk.grpo_loss_from_logps(logps, advantages, old_logps=torch.full((2, 4), -1.0).double(), config=config)
    (slope,) = torch.autograd.grad(out.loss, logps)
    expected = torch.tensor([[0.7, 1.05, 1.1, 1.1], [-0.8, -1.05, -1.15, -1.2]]).double()
    assert torch.allclose(out.loss, -expected.mean(), rtol=1e-6)
    assert torch.allclose(
        -8 * slope.float(), torch.tensor([[0.7, 1.05, 0.0, 0.0], [0.0, -1.05, -1.15, 0.0]]), rtol=1e-6
    )


def test_numbers_of_numpy_are_numbers():
    """And those of subclasses, whose text is not a number's. An option is a number of Python from then on."""
    numpy = pytest.importorskip("numpy")
    wanted = gk.GRPOConfig(
        surrogate="sapo", beta=0.25, temperature=0.5, chunk_rows=7, kl_clamp=(2.0, None), score_inactive=False
    )
    name = enum.Enum("Name", {"SAPO": "sapo"}, type=str).SAPO
    found = gk.GRPOConfig(
        surrogate=name, beta=numpy.float32(0.25), temperature=numpy.array(0.5), chunk_rows=numpy.int64(7),
        kl_clamp=[numpy.float64(2.0), None], score_inactive=numpy.bool_(False),
    )  # fmt: skip
    assert (
        found == wanted
        and hash(found) == hash(wanted)
        and found.key == wanted.key
        and type(found.beta) is float
        and type(found.chunk_rows) is int
    )
    with pytest.raises(TypeError, match="beta is a ndarray; expected a number"):
        gk.GRPOConfig(beta=numpy.array([1.0]))
    ids, one, half = numpy.int64, numpy.float32, numpy.float64
    batch, logps = make_batch(0), torch.full((2, 3), -1.0)
    teacher = gk.Teacher(batch.hidden, batch.weight)
    head = batch.hidden, batch.weight
    calls = {
        "normalizer": lambda f, i, b: gk.fused_grpo_loss(*head, batch.ids, batch.advantages, normalizer=f(4)).loss,
        "temperature": lambda f, i, b: gk.fused_logps(
            *head, batch.ids, temperature=f(0.5), logit_softcap=f(2), entropy=b(1)
        )[1],
        "chunk_rows": lambda f, i, b: gk.fused_policy_loss(*head, batch.ids, lambda c: c.logps.sum(), chunk_rows=i(7)),
        "num_generations": lambda f, i, b: gk.group_advantages(
            torch.arange(4.0), num_generations=i(2), eps=f(0.5), ddof=i(0)
        ),
        "cap": lambda f, i, b: gk.rollout_weights(logps, logps - 2, cap=f(2), low=f(0.5), veto=f(0.25)),
        "top": lambda f, i, b: gk.entropy_quantile(torch.arange(8.0), top=f(0.25)),
        "length": lambda f, i, b: gk.SamplingMask.from_lists([[[1]], [[2], [3]]], length=i(3)).counts,
        "teacher": lambda f, i, b: gk.fused_divergence(*head, gk.Teacher(*head, logit_scale=f(0.5))),
        "aggregation": lambda f, i, b: gk.fused_distillation_loss(
            *head, teacher, aggregation="fixed_length", max_completion_length=i(9), temperature=f(0.5)
        ).loss,
    }  # fmt: skip
    for argument, call in calls.items():
        expected = call(float, int, bool)
        for kind in (one, half):
            assert torch.equal(call(kind, ids, numpy.bool_), expected), argument


RANGES = {
    "beta": (-0.1, math.nan, math.inf), "entropy_coef": (-1.0,), "epsilon_low": (-0.1,), "epsilon_high": (-0.1,),
    "delta": (0.0, -1.0), "dual_clip": (1.0, 0.5), "log_ratio_clamp": (0.0,), "kl_clamp": (0.0, (1.0, -1.0), (1.0,)),
    "temperature": (0.0, -1.0, math.nan), "logit_scale": (0.0,), "logit_softcap": (0.0, -3.0),
    "off_policy_mask_threshold": (-0.1,), "chunk_rows": (0, -1, 2.5, True), "advantage_ddof": (2, None, torch.ones(1)),
    "advantage_eps": (-1e-4,), "logits_dtype": (torch.int64,), "distill_coef": (-1.0,),
    "sparse_backward": (0, 0.0, 1, 1.0, -0.1, 2, 10**400, math.nan, math.inf),
}  # fmt: skip
REFUSED = [
    *(({name: x}, ValueError, rf"{name}(\[\d\])?=.*expected") for name, xs in RANGES.items() for x in xs),
    (dict(beta=10**400), ValueError, "beta=an integer of 1331 bits; expected a finite number >= 0"),
    (dict(temperature=1e39), ValueError, "temperature=1e\\+39; expected a finite number > 0"),
    # names
    (dict(surrogate="x"), ValueError, "surrogate='x'; expected one of clip, .*ipo"),
    (dict(kl_estimator="k4"), ValueError, "kl_estimator='k4'; expected one of"),
    (dict(aggregation="mean"), ValueError, "aggregation='mean'; expected one of"),
    (dict(advantage_scale="token"), ValueError, "advantage_scale='token'; expected one of"),
    (dict(advantage_baseline="median"), ValueError, "advantage_baseline='median'; expected one of"),
    (dict(epsilon=0.2), TypeError, "no option 'epsilon': it is TRL's; here set epsilon_low and epsilon_high"),
    (dict(loss_type="grpo"), TypeError, r"no option 'loss_type': it is TRL's; here use GRPOConfig.preset\(name\)"),
    (dict(scale_rewards="group"), TypeError, "no option 'scale_rewards': it is TRL's; here set advantage_scale"),
    (dict(num_iterations=2), TypeError, "no option 'num_iterations': it is TRL's; here pass old_logps=, which more"),
    (dict(entropy_coeff=0.1), TypeError, "no option 'entropy_coeff': it is verl's; here set entropy_coef"),
    # a trainer that ignores an option without a word trains another loss than its user asked for
    (dict(importance_sampling_level="word"), ValueError, "importance_sampling_level='word'; expected one of token"),
    (dict(surrogate="gmpo", importance_sampling_level="token"), ValueError, "importance_sampling_level='token' does"),
    (dict(surrogate="sapo", epsilon_low=0.1), ValueError, "epsilon_low=0.1 has no effect with surrogate='sapo'"),
    (dict(surrogate="reinforce", epsilon_high=0.1), ValueError, "epsilon_high=0.1 has no effect"),
    (dict(surrogate="cispo", delta=2.0), ValueError, "delta=2.0 has no effect"),
    (dict(surrogate="cispo", dual_clip=2.0), ValueError, "dual_clip=2.0 has no effect"),
    (dict(sapo_temperature_pos=1.0), ValueError, "sapo_temperature_pos=1.0 has no effect"),
    (dict(vespo_k_pos=1.0), ValueError, "vespo_k_pos=1.0 has no effect"),
    (dict(dppo_kl_tau=0.1), ValueError, "dppo_kl_tau=0.1 has no effect with surrogate='clip'"),
    (dict(surrogate="cispo", ratio_cap=2.0), ValueError, "ratio_cap=2.0 has no effect"),
    (dict(surrogate="dppo_kl", ratio_cap=0.0), ValueError, "ratio_cap=0.0; expected a finite number > 0"),
    (dict(surrogate="ipo", dppo_kl_tau=-1.0), ValueError, "dppo_kl_tau=-1.0; expected a finite number >= 0"),
    (dict(surrogate="cispo_mask", importance_sampling_level="sequence_token"), ValueError, "'sequence_token' does not"),
    (dict(entropy_aggregation="loss"), ValueError, "entropy_aggregation='loss' has no effect with entropy_coef=0"),
    (dict(entropy_kept_only=True, entropy_coef=0.1), ValueError, "needs an entropy_coef and an entropy_threshold"),
    (
        dict(entropy_kept_only=True, entropy_coef=0.1, entropy_threshold=1.0, entropy_aggregation="loss"),
        ValueError,
        "contradicts entropy_aggregation='loss'",
    ),
    (dict(entropy_aggregation="mean", entropy_coef=0.1), ValueError, "entropy_aggregation='mean'; expected one of"),
    (dict(kl_score_term=True), ValueError, "kl_score_term=True has no effect with beta=0"),
    (
        dict(kl_estimator="k3+", kl_score_term=True, beta=0.1),
        ValueError,
        r"kl_score_term=True with kl_estimator='k3\+'",
    ),
    (
        dict(use_bias_correction_kl=True, kl_score_term=True, beta=0.1),
        ValueError,
        "no bias correction, whose ratio has",
    ),
    (dict(divergence="jsd"), ValueError, "divergence='jsd' has no effect with distill_coef=0"),
    (dict(distill_coef=1.0, divergence_beta=0.5), ValueError, "has no effect with 'reverse_kl'"),
    (dict(distill_coef=1.0, divergence="jsd", divergence_beta=1.0), ValueError, r"divergence_beta=1\.0; exp"),
    (dict(distill_coef=1.0, divergence="jsd", divergence_beta=0.0), ValueError, r"divergence_beta=0\.0; exp"),
    (dict(distill_coef=1.0, divergence="kl"), ValueError, "divergence='kl'; expected one of reverse_kl"),
    (dict(max_completion_length=5), ValueError, "max_completion_length=5 has no effect with"),
    (dict(kl_estimator="none", beta=0.1), ValueError, "kl_estimator='none' contradicts beta"),
    (dict(kl_estimator="none", kl_clamp=1.0), ValueError, "contradicts .*kl_clamp"),
    (dict(kl_estimator="none", use_bias_correction_kl=True), ValueError, "contradicts .*use_bias_correction_kl"),
    (dict(epsilon_low=20), ValueError, r"epsilon_low=20 with surrogate='clip'; expected a number in \[0, 1\]"),
    (dict(surrogate="ipo", epsilon_high=1.5), ValueError, "epsilon_high=1.5 with surrogate='ipo'; expected"),
    # what float32 does not tell from the end of the range, and counts that are no number of items
    (dict(dual_clip=1 + 1e-12), ValueError, "dual_clip=1.0+1; expected a finite number > 1, in float32"),
    (dict(sparse_backward=1e-50), ValueError, r"sparse_backward=1e-50; expected a finite number in \(0, 1\)"),
    (dict(sparse_backward=1 - 1e-12), ValueError, r"expected a finite number in \(0, 1\), in float32"),
    (dict(chunk_rows=10**30), ValueError, "chunk_rows=10+; expected an integer >= 1, and at most 2147483647"),
    (
        dict(aggregation="fixed_length", max_completion_length=10**400),
        ValueError,
        "max_completion_length=an integer of 1331 bits; expected an integer >= 1, and at most",
    ),
]


def refused(row: Argument) -> Iterator[tuple[object, type, str]]:
    """(a value that the row of an option does not allow, its error, words of it)"""
    if row.kind == "number":
        for value in ("0.1", True, [1.0], *[torch.tensor(0.1)] * (not row.takes_tensor)):
            yield value, TypeError, f"is a {type(value).__name__}; expected a number"
        beyond = [-0.1] * (row.low == 0.0) + [x for x in (row.above, row.below) if math.isfinite(x)]
        beyond += [1e-50] * (row.above == 0.0)  # which is 0 in float32
        for value in (*beyond, math.nan, math.inf, -math.inf, 1e39, 10**400):
            yield value, ValueError, "expected a finite number"
    if row.kind == "count":
        least = 1 if row.low < 0 else row.low
        for value in (least - 1, 2.5, True, 10**30, "1", torch.ones(2)):
            yield value, ValueError, "expected "
    if row.kind == "flag":  # the text "False" is true to Python
        for value in ("False", 0, torch.tensor(True)):
            yield value, TypeError, f"is a {type(value).__name__}; expected True or False"
    if row.kind == "choice":
        for value in ("x", 3):
            yield value, ValueError, f"={value!r}; expected one of {row.choices[0]}"
    if row.kind != "other" and not row.optional:
        yield None, ValueError if row.kind in ("choice", "count") else TypeError, ""


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_refuses_what_its_annotation_does_not_allow(name):
    row, tried = OPTIONS[name], 0
    for value, error, words in refused(row):
        with pytest.raises(error, match=f"^{name}.*{re.escape(words)}"):
            gk.GRPOConfig(**{name: value})
        tried += 1
    assert tried or name in ("kl_clamp", "logits_dtype"), "of these two below"


def test_what_does_not_fit_is_refused_by_name():
    for options, error, message in REFUSED:
        for make in (gk.GRPOConfig, partial(gk.GRPOConfig.preset, "ppo")):
            with pytest.raises(error, match=message):
                make(**options)
    with pytest.raises(ValueError, match=r"preset='ppo2'; expected one of grpo, .*verl"):
        gk.GRPOConfig.preset("ppo2")

"""Bad input: a ValueError or TypeError that names the argument, what came and what would be right; nothing was changed."""

# ruff: noqa: E501  (a table: one case per line)
from __future__ import annotations

import math
import re
from functools import partial

import pytest
import torch
from helpers import make_batch, off_policy

import grpo_kernels as gk
from grpo_kernels.checks import arguments as validate
from grpo_kernels.checks.table import NUMBER_ARGUMENTS, TOKEN_ARGUMENTS
from grpo_kernels.config import OPTIONS

CPU = torch.device("cpu")


def arguments() -> dict:
    batch = off_policy(make_batch(0, bias=True))
    return dict(
        hidden=batch.hidden.requires_grad_(), lm_head_weight=batch.weight.requires_grad_(), completion_ids=batch.ids,
        advantages=batch.advantages, lm_head_bias=batch.bias.requires_grad_(),
        completion_mask=torch.ones(4, 6, dtype=torch.bool), **batch.options,
    )  # fmt: skip


def packed_arguments(**changes) -> dict:
    a = arguments()
    a["hidden"] = a["hidden"].detach().flatten(0, 1).requires_grad_()
    a |= {n: a[n].flatten() for n in ("completion_ids", "completion_mask", "old_logps", "ref_logps")}
    return a | {"cu_seqlens": torch.tensor([0, 6, 12, 18, 24])} | changes


def refuses(function, given: dict, error: type, *words: str) -> None:
    """The call raises, its message holds all words, and no tensor was touched."""
    tensors = [x for x in given.values() if isinstance(x, torch.Tensor) and x.device == CPU]
    before = [(x._version, x.detach().clone()) for x in tensors]
    with pytest.raises(error) as caught:
        function(**given)
    assert caught.type is error
    for word in words:
        assert re.search(re.escape(word), str(caught.value)), f"{word!r} is not in: {caught.value}"
    for x, (version, values) in zip(tensors, before, strict=True):
        assert x._version == version and x.grad is None
        assert x.device.type == "meta" or torch.equal(x, values) or values.isnan().any()


def with_changes(**changes) -> dict:
    return arguments() | changes


def corrupted(shape: tuple[int, ...], value: float, *where: int) -> torch.Tensor:
    """Ones with `value` at one place."""
    x = torch.ones(shape)
    x[where] = value
    return x


meta = torch.device("meta")
half = torch.bfloat16
X, W = torch.randn(4, 6, 40), torch.randn(67, 40)  # of a teacher; one that is known at two ids
W24 = torch.zeros(67, 24, requires_grad=True)  # of a policy whose gradient goes into a buffer
TWO_IDS, TWO_LOGPS = torch.tensor([4, 7]).expand(4, 6, 2), torch.full((4, 6, 2), -2.0)


def into(total, weight=W24, **changes) -> dict:
    return with_changes(accumulate_into=total, lm_head_weight=weight, **changes)


def with_teacher(teacher, **changes) -> dict:
    return with_changes(**{"teacher": teacher, "config": gk.GRPOConfig(distill_coef=0.7)} | changes)


def top_k(ids=TWO_IDS, logps=TWO_LOGPS, mode="tail") -> gk.TopKTeacher:
    return gk.TopKTeacher(ids, logps, mode)


FOREIGN = type("GRPOConfig", (), {"__module__": "trl.trainer.grpo_config"})()
CASES = {
    # shapes
    "hidden 1-D": (lambda: with_changes(hidden=torch.rand(24)), ValueError, "hidden", "(24,)", "(B, T, H) or packed (N, H)"),
    "weight width": (lambda: with_changes(lm_head_weight=torch.rand(67, 23)), ValueError, "lm_head_weight", "(67, 23)", "(V, 24)"),
    "weight empty": (lambda: with_changes(lm_head_weight=torch.rand(0, 24)), ValueError, "lm_head_weight", "(0, 24)", "V >= 1"),
    "bias": (lambda: with_changes(lm_head_bias=torch.rand(66)), ValueError, "lm_head_bias", "(66,)", "(67,)"),
    "ids": (lambda: with_changes(completion_ids=torch.zeros(4, 7).long()), ValueError, "completion_ids", "(4, 7)", "(4, 6)"),
    "ids shifted": (lambda: with_changes(hidden=torch.rand(4, 7, 24)), ValueError, "completion_ids", "(4, 6)", "(4, 7)", "[:, :-1]"),
    "rewards": (lambda: with_changes(advantages=None, rewards=torch.rand(5), num_generations=1), ValueError, "rewards", "(5,)", "(4,)"),
    # types
    "weight dtype": (lambda: with_changes(lm_head_weight=torch.rand(67, 24).to(half)), TypeError, "lm_head_weight", "bfloat16", "float32"),
    "bias dtype": (lambda: with_changes(lm_head_bias=torch.rand(67).double()), TypeError, "lm_head_bias", "float64", "float32"),
    "normalizer text": (lambda: with_changes(normalizer="4"), TypeError, "normalizer", "str", "number"),
    "config dict": (lambda: with_changes(config={"beta": 0.1}), TypeError, "config", "dict", "GRPOConfig"),
    "config of TRL": (lambda: with_changes(config=FOREIGN), TypeError, "config is a trl.trainer.grpo_config.GRPOConfig; expected a grpo_kernels", "from_trl(config)"),
    # devices
    "weight elsewhere": (lambda: with_changes(lm_head_weight=torch.rand(67, 24, device=meta)), ValueError, "lm_head_weight", "meta", "cpu"),
    "normalizer elsewhere": (lambda: with_changes(normalizer=torch.ones((), device=meta)), ValueError, "normalizer", "meta", "no values"),
    "everything elsewhere": (lambda: {n: x.to(meta) if isinstance(x, torch.Tensor) else x for n, x in arguments().items()}, ValueError, "hidden is on the meta device"),
    # values
    "id too large": (lambda: with_changes(completion_ids=torch.full((4, 6), 67)), ValueError, "completion_ids[0, 0] = 67", "0 <= id < 67"),
    "advantage NaN": (lambda: with_changes(advantages=corrupted((4,), math.nan, 2)), ValueError, "advantages[2] = nan", "a finite number at every unmasked position"),
    "old NaN": (lambda: with_changes(old_logps=corrupted((4, 6), math.nan, 0, 4)), ValueError, "old_logps[0, 4] = nan", "a number at every unmasked position"),
    "advantage beyond float32": (lambda: with_changes(advantages=torch.tensor([0.0, 1e300, 0.0, 0.0], dtype=torch.float64)), ValueError, "advantages", "a finite number at every unmasked position, in float32"),
    "old above 0": (lambda: with_changes(old_logps=corrupted((4, 6), 5.0, 1, 2) - 2), ValueError, "old_logps[1, 2] = 3.0", "at most 0 nats"),
    "reference above 0": (lambda: with_changes(ref_logps=corrupted((4, 6), 5.0, 1, 2) - 2), ValueError, "ref_logps[1, 2] = 3.0", "at most 0 nats"),
    "reference infinite": (lambda: with_changes(ref_logps=corrupted((4, 6), math.inf, 0, 1) - 2), ValueError, "ref_logps[0, 1] = inf", "at most 0 nats"),
    "rollout above 0": (lambda: with_changes(rollout_logps=corrupted((4, 6), 5.0, 1, 2) - 2), ValueError, "rollout_logps[1, 2] = 3.0", "at most 0 nats, or NaN: unknown"),
    "rollout infinite": (lambda: with_changes(rollout_logps=corrupted((4, 6), math.inf, 1, 2) - 2), ValueError, "rollout_logps[1, 2] = inf", "at most 0 nats"),
    "rollout weight negative": (lambda: with_changes(rollout_weights=corrupted((4, 6), -0.5, 1, 1)), ValueError, "rollout_weights[1, 1] = -0.5", "a finite number", ">= 0"),
    "items 0": (lambda: with_changes(num_items_in_batch=0), ValueError, "num_items_in_batch=0", "global number"),
    "items 0.5": (lambda: with_changes(num_items_in_batch=0.5), ValueError, "num_items_in_batch=0.5; expected the global number of tokens"),
    "items 0.5 in a tensor": (lambda: with_changes(num_items_in_batch=torch.tensor(0.5)), ValueError, "num_items_in_batch=0.5; expected the global number"),
    "items beyond float32": (lambda: with_changes(num_items_in_batch=1e39), ValueError, "num_items_in_batch=1e+39", "a finite number >= 0, in float32"),
    "threshold without a sampler": (lambda: {n: x for n, x in with_changes(config=gk.GRPOConfig(off_policy_mask_threshold=0.1)).items() if n != "old_logps"}, ValueError, "off_policy_mask_threshold", "rollout_logps or old_logps"),
    "reward infinite": (lambda: with_changes(advantages=None, rewards=corrupted((4,), math.inf, 1), num_generations=2), ValueError, "rewards[1] = inf", "a finite number; for completions without a verdict"),
    "reward NaN": (lambda: with_changes(advantages=None, rewards=corrupted((4,), math.nan, 1), num_generations=2), ValueError, "rewards[1] = nan", "pass advantages=group_advantages(rewards, ...)"),
    "temperature that is 0 in float32": (lambda: with_changes(config=gk.GRPOConfig(temperature=torch.tensor(1e-50, dtype=torch.float64))), ValueError, "temperature=1e-50", "a finite number > 0 at every unmasked position, in float32"),
    "normalizer that is 0 in float32": (lambda: with_changes(normalizer=1e-50), ValueError, "normalizer=1e-50; expected a finite number > 0, in float32"),
    "temperature of a token": (lambda: with_changes(config=gk.GRPOConfig(temperature=corrupted((4, 6), 0.0, 1, 3))), ValueError, "temperature[1, 3] = 0.0", "a finite number > 0 at every unmasked position"),
    "normalizer tensor 0": (lambda: with_changes(normalizer=torch.tensor(0.0)), ValueError, "normalizer=0.0", "a finite number > 0"),
    "num_items_in_batch -1": (lambda: with_changes(num_items_in_batch=-1), ValueError, "num_items_in_batch=-1", ">= 0"),
    # combinations
    "both": (lambda: with_changes(rewards=torch.rand(4), num_generations=2), ValueError, "advantages", "rewards", "both"),
    "neither": (lambda: with_changes(advantages=None), ValueError, "advantages", "rewards", "neither"),
    "no groups": (lambda: with_changes(advantages=None, rewards=torch.rand(4)), ValueError, "num_generations", "group_ids", "neither"),
    "two groupings": (lambda: with_changes(num_generations=2, group_ids=torch.zeros(4).long()), ValueError, "num_generations", "group_ids", "both"),
    "indivisible": (lambda: with_changes(advantages=None, rewards=torch.rand(4), num_generations=3), ValueError, "num_generations=3", "4", "group_ids"),
    "group of one": (lambda: with_changes(advantages=None, rewards=torch.rand(4), num_generations=1), ValueError, "group of one", "scale='group'", ">= 2"),
    "group ids": (lambda: with_changes(group_ids=torch.zeros(3).long()), ValueError, "group_ids", "(3,)", "(4,)"),
    "no reference": (lambda: with_changes(ref_logps=None, config=gk.GRPOConfig(beta=0.1)), ValueError, "ref_logps is None", "beta=0.1"),
    "KL clamp alone": (lambda: with_changes(ref_logps=None, config=gk.GRPOConfig(kl_clamp=1.0)), ValueError, "kl_clamp=1.0 has no effect without ref_logps"),
    "KL estimator alone": (lambda: with_changes(ref_logps=None, config=gk.GRPOConfig(kl_estimator="k1")), ValueError, "kl_estimator='k1' has no effect without ref_logps"),
    "KL correction alone": (lambda: with_changes(ref_logps=None, config=gk.GRPOConfig(use_bias_correction_kl=True)), ValueError, "use_bias_correction_kl=True has no effect without ref_logps"),
    "dppo without old": (lambda: with_changes(old_logps=None, config=gk.GRPOConfig(surrogate="dppo_tv")), ValueError, "dppo_tv", "rollout_logps", "old_logps"),
    "two denominators": (lambda: with_changes(num_items_in_batch=3, normalizer=3), ValueError, "num_items_in_batch", "normalizer", "one"),
    "num_items elsewhere": (lambda: with_changes(num_items_in_batch=3, config=gk.GRPOConfig(aggregation="seq_mean")), ValueError, "num_items_in_batch", "seq_mean", "normalizer"),
    "fixed_length": (lambda: with_changes(config=gk.GRPOConfig(aggregation="fixed_length")), ValueError, "fixed_length", "max_completion_length", "None"),
    **{
        f"{aggregation}, no entropy_normalizer": (lambda options={"aggregation": aggregation, **length}: with_changes(normalizer=3, config=gk.GRPOConfig(entropy_coef=0.1, **options)), ValueError, f"normalizer with aggregation='{aggregation}' says nothing of the number of tokens", "give entropy_normalizer, or entropy_aggregation='loss'")
        for aggregation, length in {"seq_mean": {}, "seq_sum": {}, "fixed_length": {"max_completion_length": 6}}.items()
    },
    "entropy_normalizer alone": (lambda: with_changes(entropy_normalizer=3), ValueError, "entropy_normalizer", "entropy_coef=0", "leave it out"),
    "entropy_normalizer": (lambda: with_changes(entropy_normalizer=torch.tensor(0.0), config=gk.GRPOConfig(entropy_coef=0.1)), ValueError, "entropy_normalizer=0.0", "a finite number > 0"),
    "entropy_coef": (lambda: with_changes(config=gk.GRPOConfig(entropy_coef=torch.tensor(-1.0))), ValueError, "entropy_coef=-1.0", ">= 0"),
    "backend": (lambda: with_changes(backend="opencl"), ValueError, "backend='opencl'", "cpu, cuda, triton, torch"),
    "backend type": (lambda: {n: x.detach().double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in with_changes(backend="cpu").items()}, ValueError, "backend='cpu'", "float64", "float32"),
    # packed
    "cu_seqlens beside (B, T)": (lambda: with_changes(cu_seqlens=torch.tensor([0, 24])), ValueError, "cu_seqlens", "(B, T)"),
    "no cu_seqlens": (lambda: packed_arguments(cu_seqlens=None), ValueError, "cu_seqlens is None", "packed"),
    "cu_seqlens float": (lambda: packed_arguments(cu_seqlens=torch.tensor([0.0, 24.0])), ValueError, "cu_seqlens", "float32", "int64"),
    "cu_seqlens short": (lambda: packed_arguments(cu_seqlens=torch.tensor([0, 6, 12, 18, 23])), ValueError, "cu_seqlens", "23", "from 0 to 24"),
    "cu_seqlens back": (lambda: packed_arguments(cu_seqlens=torch.tensor([0, 12, 6, 18, 24])), ValueError, "cu_seqlens", "12, 6", "in order"),
    "one per token or per sequence": (lambda: packed_arguments(advantages=torch.rand(24), cu_seqlens=torch.tensor([0] * 24 + [24])), ValueError, "advantages", "(24,)", "empty", "(24, 1)"),
    # accumulate_into
    "buffer short": (lambda: into(torch.zeros(66, 24)), ValueError, "accumulate_into"),
    "buffer transposed": (lambda: into(torch.zeros(24, 67).T), ValueError, "accumulate_into"),
    "buffer of 16 bits": (lambda: into(torch.zeros(67, 24, dtype=half)), TypeError, "accumulate_into"),
    "buffer elsewhere": (lambda: into(torch.zeros(67, 24, device=meta)), ValueError, "accumulate_into"),
    "buffer with a gradient": (lambda: into(torch.zeros(67, 24, requires_grad=True)), ValueError, "accumulate_into"),
    "buffer list": (lambda: into([0.0]), TypeError, "accumulate_into"),
    "buffer of a frozen weight": (lambda: into(torch.zeros(67, 24), W24.detach()), ValueError, "accumulate_into", "leaf"),
    "buffer of no leaf": (lambda: into(torch.zeros(67, 24), W24 * 1.0), ValueError, "accumulate_into", "leaf"),
    "buffer is the weight": (lambda: into(W24.detach()), ValueError, "accumulate_into", "memory"),
    "buffer float64": (lambda: into(torch.zeros(67, 24), W24.detach().double().requires_grad_(), hidden=torch.rand(4, 6, 24).double(), lm_head_bias=None), TypeError, "accumulate_into", "float64"),
    # teachers
    "no teacher": (lambda: with_teacher(None), ValueError, "teacher is None and distill_coef=0.7"),
    "no coefficient": (lambda: with_teacher(gk.Teacher(X, W), config=gk.GRPOConfig()), ValueError, "teacher has no effect with config.distill_coef=0"),
    "teacher tensor": (lambda: with_teacher(X), TypeError, "teacher is a Tensor; expected a grpo_kernels.Teacher"),
    "teacher rows": (lambda: with_teacher(gk.Teacher(X[:3], W)), ValueError, "Teacher.hidden has shape (3, 6, 40); expected (4, 6, H)"),
    "teacher of more ids": (lambda: with_teacher(gk.Teacher(X, torch.randn(70, 40))), ValueError, "with vocab_parallel_group this rank's rows", "pass Teacher.weight[:67]"),
    "teacher of fewer ids": (lambda: with_teacher(gk.Teacher(X, W[:60])), ValueError, "pass lm_head_weight[:60]"),
    "teacher gradient": (lambda: with_teacher(gk.Teacher(X, W.clone().requires_grad_())), ValueError, "Teacher.weight requires a gradient"),
    "teacher of two types": (lambda: with_teacher(gk.Teacher(X, W.half())), TypeError, "Teacher.weight is torch.float16"),
    "teacher bias dtype": (lambda: with_teacher(gk.Teacher(X.half(), W.half(), W[:, 0])), TypeError, "Teacher.bias is torch.float32"),
    "teacher float64": (lambda: with_teacher(gk.Teacher(X.double(), W.double())), TypeError, "Teacher.hidden is float64"),
    "teacher cuda": (lambda: with_teacher(gk.Teacher(X, W), backend="cuda"), ValueError, "backend='cuda' has no kernels for a teacher"),
    "teacher and sparse": (lambda: with_teacher(gk.Teacher(X, W), config=gk.GRPOConfig(distill_coef=0.7, sparse_backward=0.1)), ValueError, "config.sparse_backward is given with a teacher"),
    "teacher and a mask": (lambda: with_teacher(gk.Teacher(X, W), sampling_mask=gk.SamplingMask.from_lists([[[1]] * 6] * 4)), ValueError, "sampling_mask is given with"),
    "top-k other mask": (lambda: with_teacher(top_k(mode="renormalize"), sampling_mask=gk.SamplingMask.from_lists([[[1]] * 6] * 4)), ValueError, "sampling_mask holds other ids than"),
    "top-k number for a mask": (lambda: with_teacher(top_k(mode="renormalize"), sampling_mask=3), TypeError, "sampling_mask is a int; expected a grpo_kernels.SamplingMask"),
    "top-k cuda, its mask": (lambda: with_teacher(top_k(mode="renormalize"), sampling_mask=top_k().sampling_mask, backend="cuda"), ValueError, "'cuda' has no kernels for a teacher"),
    "top-k mask list": (lambda: with_teacher(top_k(), completion_mask=[[1] * 6] * 4), TypeError, "completion_mask is a list"),
    "top-k no mass": (lambda: with_teacher(top_k(logps=TWO_LOGPS - math.inf, mode="renormalize")), ValueError, "ids[0, 0] has no mass to renormalize"),
    "top-k no id": (lambda: with_teacher(top_k(torch.full((4, 6, 2), -1))), ValueError, "ids[0, 0] has no id"),
    "top-k ids": (lambda: with_teacher(top_k(TWO_IDS + 63)), ValueError, "TopKTeacher.ids holds 70"),
    "own ids, more than there are": (lambda: with_teacher(gk.Teacher(X, W, top_k=68)), ValueError, "Teacher.top_k=68; expected at most 67"),
    "own ids and a mask": (lambda: with_teacher(gk.Teacher(X, W, top_k=2, mode="renormalize"), sampling_mask=top_k().sampling_mask), ValueError, "sampling_mask is given with a teacher"),
    "own ids and sparse": (lambda: with_teacher(gk.Teacher(X, W, top_k=2), config=gk.GRPOConfig(distill_coef=0.7, sparse_backward=0.1)), ValueError, "config.sparse_backward is given with a teacher"),
    "top-k tokens": (lambda: with_teacher(top_k(TWO_IDS[1:], TWO_LOGPS[1:])), ValueError, "TopKTeacher.ids has shape (3, 6, 2); expected (4, 6, K)"),
    "top-k gradient": (lambda: with_teacher(top_k(logps=TWO_LOGPS.clone().requires_grad_())), ValueError, "logps requires a gradient"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_fused_grpo_loss_refuses(name):
    given, error, *words = CASES[name]
    refuses(gk.fused_grpo_loss, given(), error, *words)


CONSTANTS = {
    **{name: torch.full((4, 6), 0.5) for name in TOKEN_ARGUMENTS},
    **{name: torch.tensor(3.0) for name in NUMBER_ARGUMENTS},
    "completion_mask": torch.ones(4, 6),
}


def constant_arguments(name: str, x: torch.Tensor) -> dict:
    if name in OPTIONS:
        return with_changes(config=gk.GRPOConfig(**{name: x}))
    config = gk.GRPOConfig(entropy_coef=0.1 if name == "entropy_normalizer" else 0.0)
    return with_changes(**{name: x, "config": config})


@pytest.mark.parametrize("name", [*CONSTANTS, "rewards"])
def test_what_gets_no_gradient_may_not_ask_for_one(name):
    """Unless there is none at all: under no_grad the loss of a learned temperature, say, is a number like any other."""
    x = torch.arange(4.0) if name == "rewards" else CONSTANTS[name]
    given = partial(constant_arguments, name)
    if name == "rewards":
        given = lambda x: with_changes(advantages=None, rewards=x, num_generations=2)  # noqa: E731
    asks = x.clone().requires_grad_()
    refuses(gk.fused_grpo_loss, given(asks), ValueError, f"{name} requires a gradient, and gets none here", "detach()")
    with torch.no_grad():
        assert torch.equal(gk.fused_grpo_loss(**given(asks)).loss, gk.fused_grpo_loss(**given(x)).loss)
    own = {
        n: y for n, y in given(asks).items() if n not in ("hidden", "lm_head_weight", "lm_head_bias", "completion_ids")
    }
    own |= {"logps": torch.full((4, 6), -1.0), "entropy": torch.ones(4, 6)}
    if name != "temperature":  # which log-probabilities have behind them
        refuses(gk.grpo_loss_from_logps, own, ValueError, f"{name} requires a gradient")
    else:
        for function in (gk.fused_logps, gk.fused_policy_loss, gk.fused_divergence):
            head = {n: y for n, y in HEAD.items() if n != "completion_ids" or function is not gk.fused_divergence}
            head |= {"loss_fn": lambda chunk: chunk.logps.sum()} if function is gk.fused_policy_loss else {}
            head |= {"teacher": gk.Teacher(X, W)} if function is gk.fused_divergence else {}
            refuses(function, head | {"temperature": asks}, ValueError, "temperature requires a gradient")
        for function, options in (
            (gk.fused_top_k, {"k": 2}),
            (gk.sampling_support, {"top_k": 2, "completion_ids": HEAD["completion_ids"]}),
        ):
            function(HEAD["hidden"], HEAD["lm_head_weight"], **options, temperature=asks)  # which have none


def test_rewards_of_group_advantages_get_no_gradient():
    refuses(
        gk.group_advantages, REWARDS | {"rewards": torch.rand(6, requires_grad=True)}, ValueError, "rewards requires"
    )


def test_the_good_call_is_good():
    for given in (arguments(), packed_arguments()):
        gk.fused_grpo_loss(**given).loss.backward()


@pytest.mark.parametrize(("value", "packed"), [(math.nan, False), (math.inf, True)])
def test_the_advantage_of_a_sequence_without_tokens_is_not_looked_at(value, packed):
    """test_sweep.py has the other numbers of masked tokens."""
    given = packed_arguments() if packed else arguments()
    mask = given["completion_mask"].clone()
    mask.view(4, 6)[2] = False
    losses = [
        gk.fused_grpo_loss(**given | {"completion_mask": mask, "advantages": corrupted((4,), x, 2)}).loss
        for x in (0.0, value)
    ]
    assert torch.equal(*losses) and losses[0].isfinite()


def test_unknown_rollout_logps_and_unscored_completions_are_fine():
    given = arguments() | {"rollout_logps": corrupted((4, 6), math.nan, 1, 2)}
    assert gk.fused_grpo_loss(**given).loss.isfinite()
    given["advantages"] = gk.group_advantages(corrupted((4,), math.nan, 2), num_generations=2)
    out = gk.fused_grpo_loss(**given)
    out.loss.backward()
    assert out.advantages[2] == 0 and out.loss.isfinite() and given["hidden"].grad.isfinite().all()


def test_values_are_looked_for_inside_a_compiled_function_too():
    torch._dynamo.reset()
    step = torch.compile(lambda **given: gk.fused_grpo_loss(**given).loss, fullgraph=True, backend="aot_eager")
    given, error, *_ = CASES["advantage NaN"]
    with pytest.raises(error, match=re.escape("advantages[2, 0] = nan; expected a finite number")):  # of a token by now
        step(**given())
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "name",
    [
        *("id too large", "weight width", "bias dtype"),
        *("weight elsewhere", "weight empty", "backend"),
    ],
)
def test_other_entry_points_refuse_the_same(name):
    given, error, *words = CASES[name]
    kept = {n: x for n, x in given().items() if n not in ("advantages", "old_logps", "ref_logps")}
    refuses(gk.fused_logps, kept, error, *words)
    refuses(gk.fused_policy_loss, kept | {"loss_fn": lambda chunk: chunk.logps.sum()}, error, *words)


LOGIT_OPTIONS = [
    (dict(temperature=torch.full((1, 1), -1.0)), ValueError, "temperature", "-1.0", "a finite number > 0"),
    (dict(entropy="yes"), TypeError, "entropy is a str", "True or False"),
    (dict(temperature=torch.ones(5)), ValueError, "temperature", "(5,)", "(4, 6)", "(4, 1)"),
    (dict(temperature=torch.tensor([1.0, 1.0, -1.0, 1.0])), ValueError, "temperature[2, 0] = -1.0", "> 0"),
    (dict(temperature=corrupted((4, 6), -1.0, 2, 3)), ValueError, "temperature[2, 3] = -1.0", "at every unmasked position"),
    (dict(temperature=-1.0), ValueError, "temperature=-1.0"),
    (dict(logit_softcap=0.0), ValueError, "logit_softcap=0.0"),
    (dict(logit_scale="2"), TypeError, "logit_scale", "str", "number"),
    (dict(sparse_backward=2), ValueError, "sparse_backward=2; expected a finite number in (0, 1), in float32"),
    (dict(sparse_backward=True), TypeError, "sparse_backward is a bool"),
]  # fmt: skip


HEAD = {n: x for n, x in arguments().items() if n not in ("advantages", "old_logps", "ref_logps")}
LOGPS = dict(logps=torch.zeros(4, 6), advantages=torch.ones(4), old_logps=torch.zeros(4, 6))
PACKED_LOGPS = dict(logps=torch.zeros(24), old_logps=None)
LOGITS = dict(logits=torch.zeros(4, 6, 7), completion_ids=torch.zeros(4, 6).long(), advantages=torch.ones(4))
REWARDS = dict(rewards=torch.rand(6), num_generations=2)
STEPS = dict(step_rewards=torch.rand(2, 3), step_ends=torch.tensor([[0, 2, 4]] * 2), length=5, num_generations=2)
WEIGHTS = dict(old_logps=torch.zeros(1, 2), rollout_logps=torch.zeros(1, 2))
ENTROPY = dict(entropy=torch.ones(2, 3))
K_IDS = dict(hidden=torch.rand(4, 6, 24), lm_head_weight=torch.rand(67, 24))
OTHERS = [
    (gk.fused_logps, HEAD, LOGIT_OPTIONS),
    (gk.fused_policy_loss, HEAD | dict(loss_fn=lambda c: c.logps.sum()), LOGIT_OPTIONS),
    (gk.grpo_loss_from_logps, LOGPS, [
        (PACKED_LOGPS | dict(cu_seqlens=torch.tensor([0, 6, 12, 18, 23])), ValueError, "cu_seqlens", "23", "from 0 to 24"),
        (PACKED_LOGPS, ValueError, "cu_seqlens is None", "logps is packed"),
        (dict(advantages=None, rewards=corrupted((4,), -math.inf, 3), num_generations=4), ValueError, "rewards[3] = -inf", "for completions without a verdict"),
        (dict(logps=torch.zeros(4, 6, 1), entropy=torch.zeros(4, 6)), ValueError, "logps has shape (4, 6, 1)", "(B, T) or packed (N,)"),
        (dict(logps=torch.zeros(4, 6, device=meta)), ValueError, "logps is on the meta device"),
        (dict(config=gk.GRPOConfig(entropy_coef=0.1)), ValueError, "entropy is None", "entropy_coef"),
        (dict(config=gk.GRPOConfig(entropy_threshold=1.0)), ValueError, "entropy is None", "entropy_threshold"),
    ]),
    (gk.grpo_loss_from_logits, LOGITS, [
        (dict(logits=torch.zeros(7)), ValueError, "logits", "(7,)", "(B, T, V)"),
        (dict(logits=torch.zeros(4, 6, 0)), ValueError, "logits", "(4, 6, 0)", "V >= 1"),
        (dict(completion_ids=torch.zeros(4, 5).long()), ValueError, "completion_ids", "(4, 5)", "(4, 6)"),
        (dict(completion_ids=torch.full((4, 6), 7)), ValueError, "completion_ids[0, 0] = 7", "0 <= id < 7"),
        (dict(ref_logps=corrupted((4, 6), math.nan, 1, 2)), ValueError, "ref_logps[1, 2] = nan", "a number"),
        (dict(config=gk.GRPOConfig(temperature=corrupted((4, 6), 0.0, 1, 3))), ValueError, "temperature[1, 3] = 0.0", "> 0"),
        (dict(inplace=1), TypeError, "inplace is a int", "True or False"),
        (dict(logits=torch.zeros(4, 6, 7, requires_grad=True), inplace=True), ValueError, "inplace=True", "leaf"),
    ]),
    (gk.group_advantages, REWARDS, [
        (dict(rewards=corrupted((6,), math.inf, 2)), ValueError, "rewards[2] = inf", "a finite number, or NaN for no verdict"),
        (dict(rewards=[1.0]), TypeError, "rewards", "list", "torch.Tensor"),
        (dict(rewards=torch.ones(2, 2)), ValueError, "rewards", "(2, 2)", "(B,)"),
        (dict(num_generations=None, group_ids=[0, 0]), TypeError, "group_ids", "list", "torch.Tensor"),
        (dict(num_generations=None, group_ids=torch.zeros(6)), ValueError, "group_ids is torch.float32"),
        (dict(num_generations=None, group_ids=torch.tensor([0, 0, 1, 1, 1, 2])), ValueError, "group of one", "scale='group'"),
        (dict(num_generations=4), ValueError, "num_generations=4 does not divide the batch of 6"),
        (dict(num_generations=0), ValueError, "num_generations=0", "integer >= 1"),
        (dict(scale="std"), ValueError, "scale='std'", "group, batch, mean, none"),
        (dict(baseline="median"), ValueError, "baseline='median'", "mean, leave_one_out, length_weighted, pass_at_k, none"),
        (dict(eps=-1e-4), ValueError, "eps=-0.0001", ">= 0"),
        (dict(eps="0.1"), TypeError, "eps", "str", "number"),
        (dict(ddof=2), ValueError, "ddof=2", "0 or 1"),
    ]),
    (gk.process_advantages, STEPS, [
        (dict(step_rewards=corrupted((2, 3), -math.inf, 1, 2)), ValueError, "step_rewards[1, 2] = -inf", "NaN for no verdict"),
        (dict(step_rewards=torch.ones(2)), ValueError, "step_rewards has shape (2,)", "(B, K)"),
        (dict(step_rewards=torch.ones(2, 3).bool()), TypeError, "step_rewards", "bool", "real"),
        (dict(step_ends=[[0, 2, 4]] * 2), TypeError, "step_ends", "list", "torch.Tensor"),
        (dict(step_ends=STEPS["step_ends"][:1]), ValueError, "step_ends", "(1, 3)", "(2, 3)"),
        (dict(step_ends=STEPS["step_ends"].flip(1)), ValueError, "step_ends must not decrease"),
        (dict(step_ends=STEPS["step_ends"] - 1), ValueError, "step_ends must not decrease and must lie in 0 .. 4, as length=5"),
        (dict(length=0), ValueError, "length=0", "integer >= 1"),
        (dict(gamma=1.01), ValueError, "gamma=1.01", "in [0, 1]"),
    ]),
    (gk.combine_advantages, dict(rewards=torch.zeros(4, 2), num_generations=2), [
        (dict(mode="mean"), ValueError, "mode='mean'; expected one of"),
        (dict(whiten="tokens"), ValueError, "whiten='tokens' with completion_mask=None; expected both"),
        (dict(mode="sum"), ValueError, "num_generations and group_ids have no effect with mode='sum'"),
        (dict(weights=[1.0]), ValueError, "weights has shape (1,); expected (2,)"),
        (dict(num_generations=None), ValueError, "groups come from num_generations or group_ids"),
        (dict(rewards=torch.zeros(4), mode="sum"), ValueError, "rewards has shape (4,); expected (B, K)"),
    ]),
    (gk.fused_policy_loss, dict(hidden=torch.rand(4, 6, 24).requires_grad_(), lm_head_weight=torch.rand(67, 24), completion_ids=torch.zeros(4, 6).long(), loss_fn=lambda c: c.logps.sum()), [
        (dict(loss_fn="clip"), TypeError, "loss_fn is a str"),
        (dict(loss_fn=lambda c: 1.0), ValueError, "loss_fn returned float"),
        (dict(loss_fn=lambda c: c.logps[:2]), ValueError, "loss_fn returned (2,)", "(24,)"),
        (dict(level="batch"), ValueError, "level='batch'; expected one of token, sequence"),
    ]),
    (gk.rollout_weights, WEIGHTS, [
        (dict(mode="sequence_mask", level="sequence"), ValueError, "mode='sequence_mask' with level='sequence'; expected 'token'"),
        (dict(old_logps=torch.zeros(2)), ValueError, "old_logps is packed, 2 tokens", "cu_seqlens is None"),
        (dict(old_logps=torch.zeros(1, 2, 3)), ValueError, "old_logps", "(1, 2, 3)", "(B, T) or packed (N,)"),
        (dict(cu_seqlens=torch.tensor([0, 2])), ValueError, "cu_seqlens is for packed", "old_logps holds a (B, T) batch"),
        (dict(cu_seqlens=torch.tensor([0, 3]), old_logps=torch.zeros(2), rollout_logps=torch.zeros(2)), ValueError, "cu_seqlens = [0, 3]", "from 0 to 2"),
        (dict(batch_normalize=1), TypeError, "batch_normalize is a int; expected True or False"),
        (dict(batch_normalize=True, group="gloo"), TypeError, "group is a str; expected a torch.distributed.ProcessGroup"),
        (dict(old_logps=corrupted((1, 2), math.nan, 0, 1)), ValueError, "old_logps[0, 1] = nan", "a number at every unmasked position"),
        (dict(rollout_logps=torch.zeros(2)), ValueError, "rollout_logps", "(2,)", "(1, 2)"),
        (dict(level="word"), ValueError, "level='word'", "token, sequence, sequence_sum"),
        (dict(mode="clip"), ValueError, "mode='clip'", "truncate, mask"),
        (dict(cap=0), ValueError, "cap=0", "> 0"),
        (dict(low=-0.5), ValueError, "low=-0.5", ">= 0"),
        (dict(low=3.0), ValueError, "low=3.0, cap=2.0", "low < cap"),
    ]),
    (gk.rejection_mask, WEIGHTS | dict(options={"token_k1": (0.5, 2.0)}), [
        (dict(options={}), ValueError, "options={}; expected a dict of bounds such as {'token_k1': (0.5, 2.0)}"),
        (dict(options="token_k1"), ValueError, "options='token_k1'; expected a dict"),
        (dict(options={"seq_max_k1": (0.5, 2.0)}), ValueError, "a key of options='seq_max_k1'; expected one of token_k1, seq_sum_k1"),
        (dict(options={3: 1.0}), ValueError, "a key of options=3; expected one of"),
        (dict(options={"token_k1": 2.0}), ValueError, "options['token_k1']=2.0; expected a pair of ratios (low, high)"),
        (dict(options={"token_k1": (0.5, 2.0, 3.0)}), ValueError, "options['token_k1']=(0.5, 2.0, 3.0); expected a pair"),
        (dict(options={"token_k1": (2.0, 0.5)}), ValueError, "options['token_k1']=(2.0, 0.5); expected low <= high"),
        (dict(options={"token_k1": (0.0, 0.5)}), ValueError, "options['token_k1']=0.0; expected a finite number > 0"),
        (dict(options={"seq_mean_k3": (0.1, 0.2)}), ValueError, "options['seq_mean_k3']=(0.1, 0.2); expected one number"),
        (dict(options={"token_k2": "1"}), TypeError, "options['token_k2'] is a str; expected a number"),
        (dict(options={"token_tv": math.nan}), ValueError, "options['token_tv']=nan; expected a finite number > 0"),
        (dict(old_logps=torch.zeros(2)), ValueError, "old_logps is packed, 2 tokens", "cu_seqlens is None"),
        (dict(rollout_logps=None), TypeError, "rollout_logps is a NoneType; expected a torch.Tensor"),
        (dict(completion_mask=torch.ones(2)), ValueError, "completion_mask has shape (2,); expected (1, 2)"),
    ]),
    (gk.entropy_quantile, ENTROPY, [
        (dict(entropy=corrupted((2, 3), math.nan, 1, 2)), ValueError, "entropy[1, 2] = nan", "a number"),
        (dict(completion_mask=torch.ones(3)), ValueError, "completion_mask", "(3,)", "(2, 3)"),
        (dict(top=1.5), ValueError, "top=1.5", "in (0, 1]"),
        (dict(top=torch.ones(2)), TypeError, "top", "Tensor", "number"),
    ]),
    (gk.Teacher, dict(hidden=X, weight=W), [
        (dict(weight=W[:, 1:]), ValueError, "Teacher.weight has shape (67, 39); expected (V, 40)"),
        (dict(bias=W[:3, 0]), ValueError, "Teacher.bias has shape (3,); expected (67,)"),
        (dict(hidden=X[0, 0]), ValueError, "Teacher.hidden has shape (40,)"),
        (dict(logit_scale=0.0), ValueError, "logit_scale=0.0"),
        (dict(hidden=X.to(meta), weight=W.to(meta)), ValueError, "Teacher.hidden is on the meta device"),
        (dict(weight=torch.nn.Linear(3, 4)), TypeError, "Teacher.weight is a Linear", ", and bias=Teacher.weight.bias"),
        (dict(top_k=0), ValueError, "top_k=0; expected an integer >= 1"),
        (dict(top_k=2.5), ValueError, "top_k=2.5; expected an integer >= 1"),
        (dict(top_k=2, mode="top"), ValueError, "mode='top'; expected one of tail, renormalize"),
        (dict(mode="renormalize"), ValueError, "mode='renormalize' has no effect without top_k"),
    ]),
    (gk.fused_logps, K_IDS | dict(completion_ids=torch.zeros(4, 6, 3).long()), [
        (dict(completion_ids=torch.zeros(4, 5, 3).long()), ValueError, "completion_ids has shape (4, 5, 3); expected (4, 6) or (4, 6, K), K >= 1"),
        (dict(completion_ids=torch.zeros(4, 6, 0).long()), ValueError, "completion_ids has shape (4, 6, 0)"),
        (dict(completion_ids=torch.zeros(4, 6, 1, 1).long()), ValueError, "completion_ids has shape (4, 6, 1, 1)"),
        (dict(completion_ids=corrupted((4, 6, 3), 67, 1, 2, 0).long()), ValueError, "completion_ids[1, 2, 0] = 67; expected 0 <= id < 67"),
        (dict(completion_ids=corrupted((4, 6, 3), -1, 1, 2, 0).long()), ValueError, "completion_ids[1, 2, 0] = -1"),
        (dict(completion_mask=torch.ones(4, 6, 3)), ValueError, "completion_mask has shape (4, 6, 3); expected (4, 6)"),
        (dict(temperature=torch.ones(4, 6, 3)), ValueError, "temperature has shape (4, 6, 3)"),
        (dict(sparse_backward=0.1), ValueError, "sparse_backward is given with 3 completion_ids of each token"),
        (dict(sampling_mask=gk.SamplingMask.from_lists([[[1]] * 6] * 4)), ValueError, "sampling_mask is given with 3 completion_ids"),
    ]),
    (gk.fused_top_k, K_IDS | dict(k=3), [
        (dict(k=0), ValueError, "k=0; expected an integer >= 1"),
        (dict(k=68), ValueError, "k=68; expected at most 67, the rows of the lm_head"),
        (dict(k=torch.tensor(2)[None]), ValueError, "k="),
        (dict(hidden=torch.rand(24)), ValueError, "hidden has shape (24,)"),
        (dict(lm_head_weight=torch.rand(67, 23)), ValueError, "lm_head_weight has shape (67, 23)"),
        (dict(completion_mask=torch.ones(4, 5)), ValueError, "completion_mask has shape (4, 5)"),
        (dict(temperature=0.0), ValueError, "temperature=0.0"),
        (dict(backend="opencl"), ValueError, "backend='opencl'"),
    ]),
    (gk.TopKTeacher, dict(ids=TWO_IDS, logps=TWO_LOGPS), [
        (dict(ids=TWO_IDS[..., :0], logps=TWO_LOGPS[..., :0]), ValueError, "shape (4, 6, 0); expected", "K >= 1"),
        (dict(logps=TWO_LOGPS[..., :1]), ValueError, "TopKTeacher.logps has shape (4, 6, 1)"),
        (dict(ids=TWO_IDS * 0), ValueError, "TopKTeacher.ids repeats an id"),
        (dict(logps=-TWO_LOGPS), ValueError, "TopKTeacher.logps holds 2"),
        (dict(logps=TWO_LOGPS * math.nan), ValueError, "TopKTeacher.logps holds nan"),
        (dict(logps=TWO_LOGPS * 0.1), ValueError, "add up to a mass of 1.6375"),
        (dict(mode="rest"), ValueError, "mode='rest'; expected one of tail, renormalize"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "good", "cases"), OTHERS, ids=[f"{f.__name__}-{len(cases)}" for f, _, cases in OTHERS]
)
def test_other_functions_refuse(function, good, cases):
    function(**good)
    for changes, error, *words in cases:
        refuses(function, good | changes, error, *words)


# --- what reads values, on a GPU ---------------------------------------------------------------------------------------


def test_values_on_a_gpu_are_read_with_the_debug_switch_alone(monkeypatch):
    for device, switch, expected in (("cpu", "", True), ("cuda", "", False), ("cuda", "0", False), ("cuda", "1", True)):
        monkeypatch.setenv("GRPO_KERNELS_DEBUG", switch)
        assert validate.checks_values(torch.device(device)) is expected


def test_without_the_debug_switch_no_number_is_read(monkeypatch):
    """Reading one would make the host wait for the GPU: the checks of numbers are behind the same switch."""
    monkeypatch.setattr(validate, "checks_values", lambda device: False)
    for name in ("advantage NaN", "old NaN", "temperature of a token", "normalizer tensor 0"):
        gk.fused_grpo_loss(**CASES[name][0]())
    assert not gk.group_advantages(corrupted((4,), math.inf, 2), num_generations=2).isfinite().all()


def test_the_package_lists_its_public_names():
    assert set(dir(gk)) == {*gk.__all__, "__version__"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("epsilon", "; it is TRL's; here set epsilon_low and epsilon_high"),
        ("beta", "; this package has config=GRPOConfig(beta=...)"),
        ("nothing", ""),
    ],
)
def test_an_option_of_the_config_that_is_given_to_the_loss(name, hint):
    logps = torch.zeros(2, 3)
    with pytest.raises(TypeError, match=re.escape(f"unexpected keyword argument {name!r}{hint}") + "$"):
        gk.grpo_loss_from_logps(logps, torch.ones(2), **{name: 0.2})

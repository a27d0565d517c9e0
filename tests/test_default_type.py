"""torch.set_default_dtype and torch.set_default_device change nothing: every output and gradient keeps its bits.

`from_pretrained(dtype=torch.bfloat16)` sets the default type for a while, and some trainers leave it so.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers import fused, good_calls, make_batch, off_policy, reference, tensors
from test_teacher import make_teacher
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.config import SURROGATE_RULES
from grpo_kernels.distillation import DistillationOutput

KINDS = ("bfloat16", "float64", "device")
PER_TOKEN = torch.linspace(0.7, 1.3, 24).view(4, 6)
REWARDS, WHOLE_REWARDS = torch.tensor([0.1, 1.0, 0.3, 0.7]), torch.tensor([0, 1, 1, 3])
BATCH = off_policy(make_batch(3, bias=True, masked=True))
MASK, OLD = BATCH.options["completion_mask"], BATCH.options["old_logps"]
ROLLOUT = OLD + torch.linspace(-0.2, 0.2, 24).view(4, 6)
WHOLE = BATCH.with_options(rollout_logps=ROLLOUT, rollout_weights=PER_TOKEN)

# One configuration per way through the engine (4 sequences of 6 tokens) and per place where a number meets a tensor.
CONFIGS: dict[str, gk.GRPOConfig] = {
    "single pass, one chunk": gk.GRPOConfig(beta=0.1, entropy_coef=0.01, temperature=0.9),
    "single pass, many chunks": gk.GRPOConfig.preset("grpo", chunk_rows=3, logit_scale=0.7, logit_softcap=3.1),
    "staged": gk.GRPOConfig.preset("gspo", epsilon_low=0.1, epsilon_high=0.1, entropy_coef=0.01, chunk_rows=12),
    "recompute": gk.GRPOConfig.preset("luspo", beta=0.1, chunk_rows=4),
    "static shapes": gk.GRPOConfig.preset("dr_grpo", max_completion_length=7, static_shapes=True),
    "clamps": gk.GRPOConfig.preset("verl", beta=0.1, kl_clamp=(0.6, 0.3), use_bias_correction_kl=True, delta=1.4),
    "tensor options": gk.GRPOConfig(temperature=PER_TOKEN, entropy_threshold=torch.tensor(3.3)),
    "entropy of the kept tokens": gk.GRPOConfig(entropy_coef=0.1, entropy_threshold=3.3, entropy_kept_only=True),
    "off-policy mask": gk.GRPOConfig(off_policy_mask_threshold=0.02, entropy_threshold=3.3),
}
DENOMINATORS = {"normalizer": 17}, {"normalizer": torch.tensor(17)}, {"num_items_in_batch": 41}


@contextmanager
def default(kind: str) -> Iterator[None]:
    """torch's default type, or its default device, for a while."""
    if kind == "device":
        with torch.device("meta"):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, kind))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def flat(x: object) -> list[Tensor]:
    """All tensors of a nested result, in order."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, (gk.GRPOLossOutput, gk.SamplingMask, DistillationOutput)):
        x = tuple(vars(x).values())
    elif isinstance(x, dict):
        x = tuple(x.values())
    return [t for part in x for t in flat(part)] if isinstance(x, (tuple, list)) else []


def loss_calls(run, dtype: torch.dtype) -> dict:
    """Name -> a call of the loss that gives tensors; run(batch, config) computes it."""
    batch = WHOLE.head_as(dtype)

    def call(batch, config):
        result = run(batch, config)
        return [*tensors(result).values(), *result.metrics.values()]

    surrogates = {name: gk.GRPOConfig(surrogate=name) for name in SURROGATE_RULES} if dtype == torch.float64 else {}
    calls = {name: lambda config=config: call(batch, config) for name, config in {**CONFIGS, **surrogates}.items()}
    for given in DENOMINATORS:
        calls[str(given)] = lambda given=given: call(batch.with_options(**given), gk.GRPOConfig(entropy_coef=0.01))
    return calls


DIFFERENTIABLE = ("hidden", "lm_head_weight", "lm_head_bias", "logits", "logps", "entropy")
STEP_REWARDS = WHOLE_REWARDS[:, None] * torch.tensor([1, 3])
ADJACENT = dict(num_generations=2, group_ids=None)
WAYS: dict[str, list[dict]] = {  # through a function: what is changed in the arguments of its call
    "fused_policy_loss": [
        dict(level=level, chunk_rows=n) for level, n in (("token", 5), ("sequence", 12), ("sequence", 4))
    ],
    "grpo_loss_from_logits": [dict(inplace=inplace) for inplace in (False, True)],
    "group_advantages": [
        dict(rewards=x, scale=scale) | ADJACENT
        for x in (REWARDS, REWARDS.double(), WHOLE_REWARDS)
        for scale in ("group", "batch")
    ],
    "combine_advantages": [{}, ADJACENT | dict(rewards=(REWARDS[:, None] * PER_TOKEN[:, :2]).double())],
    "process_advantages": [dict(gamma=0.9), ADJACENT | dict(gamma=0.9, step_rewards=STEP_REWARDS)],
    "rollout_weights": [dict(level=level, batch_normalize=level == "token") for level in ("token", "sequence")],
    "rejection_mask": [{}, dict(options={"seq_max_k2": 0.5, "token_binary_kl": 0.1, "seq_mean_tv": 0.1})],
    "entropy_quantile": [dict(completion_mask=m, top=0.3) for m in (None, MASK)],
}


def other_calls(backend: str, dtype: torch.dtype) -> dict:
    """Name of a public function -> calls of it, all of which give tensors."""
    ways = WAYS
    if backend != "cuda":  # whose kernels know no whole teacher
        both = [{}, {"teacher": make_teacher((4, 6))}]
        ways = WAYS | {"fused_distillation_loss": both, "fused_divergence": both}

    def results(function, given: dict) -> list[Tensor]:
        leaves, loss = {}, "fused" in function.__name__ or "loss" in function.__name__
        if function is gk.fused_top_k:  # without a gradient
            loss, given = False, given | {"backend": backend}
        if loss:
            tensors = {n: given[n] for n in DIFFERENTIABLE if isinstance(given.get(n), Tensor)}
            leaves = {n: x.to(dtype, copy=True).requires_grad_() for n, x in tensors.items()}
            given = given | {n: x * 1.0 for n, x in leaves.items()} | {"backend": backend}
        out = flat(function(**given))
        if loss:
            (1.5 * out[0].sum() + sum(x.sum() for x in out[1:2] if x.requires_grad)).backward()
        return [x.detach() for x in out] + [x.grad for x in leaves.values()]

    def call(name: str, given: dict):
        return lambda: [x for way in ways.get(name, [{}]) for x in results(getattr(gk, name), given | way)]

    return {name: call(name, given) for name, given in good_calls().items() if name != "fused_grpo_loss"}


def assert_same_with_any_default(calls: dict, kinds: tuple[str, ...] = KINDS) -> None:
    for name, call in calls.items():
        expected = call()
        for kind in kinds:
            with default(kind):
                found = call()
            assert len(found) == len(expected) > 0
            for i, (a, b) in enumerate(zip(found, expected, strict=True)):
                where = f"{name}, default {kind}, tensor {i}"
                assert a.dtype == b.dtype and a.device == b.device, f"{where}: {a.dtype} {a.device}, {b.dtype}"
                assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), where


@pytest.mark.parametrize(("dtype", "kinds"), [(torch.float32, KINDS), (torch.float16, KINDS[1:2])])
def test_fused_grpo_loss(dtype, kinds, backend):
    assert_same_with_any_default(loss_calls(lambda *given: fused(*given, backend), dtype), kinds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_public_functions(dtype, backend):
    assert_same_with_any_default(other_calls(backend, dtype))


def test_float64_and_the_reference():
    assert_same_with_any_default(other_calls("torch", torch.float64))
    for run in (fused, reference):
        assert_same_with_any_default(loss_calls(run, torch.float64))


def test_every_public_function_is_swept():
    functions = {name for name in gk.__all__ if inspect.isfunction(getattr(gk, name))}
    swept = {"fused_grpo_loss", *other_calls("torch", torch.float32)}
    assert functions - {"available_backends", "available_presets"} == swept

"""Tensors that torch.inference_mode made, as rollouts have them: every public function takes them in every place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import good_calls, make_batch, make_sampling_mask, off_policy, packed
from teachers import KINDS, OWN, teacher_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import grpo_kernels as gk

LEAVES = ("hidden", "lm_head_weight", "lm_head_bias", "logps", "logits")  # what gradients go to


def calls() -> dict[str, dict[str, Any]]:
    """Arguments by function and variant: between them all that may be tensors."""
    found = good_calls()
    head = {name: found["fused_logps"][name] for name in ("hidden", "lm_head_weight", "lm_head_bias")}
    masked = {"completion_mask": found["fused_logps"]["completion_mask"]}
    ids, mask = found["fused_logps"]["completion_ids"], make_sampling_mask((4, 6), 67, 1)
    tensors = dict(temperature=torch.full((4, 6), 0.8), entropy_coef=torch.tensor(0.1))
    full = gk.GRPOConfig(beta=0.1, entropy_threshold=torch.tensor(2.0), **tensors)
    options = found["fused_grpo_loss"] | dict(
        config=full, token_weights=torch.rand(4, 6), sampling_mask=mask, entropy_normalizer=torch.tensor(20.0)
    )
    rewarded = options | dict(advantages=None, rewards=torch.tensor([0.1, 1.0, 0.3, 0.7]))
    offsets = packed(off_policy(make_batch(1, masked=True)))
    of_offsets = dict(hidden=offsets.hidden, lm_head_weight=offsets.weight, completion_ids=offsets.ids)
    per_sequence = gk.GRPOConfig(temperature=torch.linspace(0.7, 1.2, 4))
    found |= {
        "fused_grpo_loss, more": options,
        "fused_grpo_loss, rewards": rewarded,
        "fused_grpo_loss, packed": of_offsets
        | dict(advantages=offsets.advantages, config=per_sequence, **offsets.options),
        "fused_logps, sampling_mask": head | masked | dict(completion_ids=ids, sampling_mask=mask, entropy=True),
        "fused_logps, K ids": head | masked | dict(completion_ids=torch.stack([ids, ids // 2], -1), entropy=True),
        "fused_policy_loss, more": found["fused_policy_loss"]
        | dict(sampling_mask=mask, temperature=torch.full((4, 6), 0.8)),
        "fused_policy_loss, packed": of_offsets
        | dict(cu_seqlens=offsets.options["cu_seqlens"], loss_fn=lambda chunk: chunk.logps.exp().sum()),
    }
    for kind in (*KINDS, *OWN):
        with_teacher = head | masked | {"teacher": teacher_of(kind, shape=(4, 6))}
        found[f"fused_divergence, {kind}"] = with_teacher | {"temperature": torch.full((4, 6), 0.8)}
        found[f"fused_distillation_loss, {kind}"] = with_teacher
    return found


def places(given: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yields the names that lead to each tensor among these arguments."""
    for name, x in given.items():
        if isinstance(x, Tensor):
            yield (name,)
        elif dataclasses.is_dataclass(x):
            yield from ((name, field) for field, inner in vars(x).items() if isinstance(inner, Tensor))


def with_inference_tensors(given: dict[str, Any], *chosen: tuple[str, ...]) -> dict[str, Any]:
    """Returns the arguments with what is in these places made in inference mode."""
    found = dict(given)
    with torch.inference_mode():
        for name, *inner in chosen:
            x = found[name]
            found[name] = dataclasses.replace(x, **{inner[0]: getattr(x, inner[0]).clone()}) if inner else x.clone()
    return found


def run(function: str, given: dict[str, Any], frozen: tuple[str, ...] = ()) -> list[Tensor]:
    """Returns the values of a call, and the gradients of what is not frozen."""
    own = {name: given[name].clone().requires_grad_() for name in LEAVES if name in given and name not in frozen}
    out = getattr(gk, function.partition(",")[0])(**given | own)
    if isinstance(out, gk.SamplingMask):
        return [out.ids, out.counts, out.mass, out.added]
    values = out if isinstance(out, tuple) else (getattr(out, "loss", out),)
    differentiable = [x for x in values if x is not None and x.requires_grad]
    if not differentiable:
        return [x for x in values if x is not None]
    total = sum((x * torch.linspace(0.5, 1.5, x.numel()).view(x.shape)).sum() for x in differentiable)
    total.backward()
    return [*(x.detach() for x in differentiable), *(x.grad for x in own.values())]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


CALLS = calls()


@pytest.mark.parametrize("function", CALLS)
def test_every_argument_may_be_of_inference_mode(function):
    """One at a time, all at once, and seen by a dispatch mode, for which a call is an operator."""
    given = CALLS[function]
    others = [place for place in places(given) if place[0] not in LEAVES]
    expected, contexts = run(function, given), (nullcontext, lambda: FlopCounterMode(display=False))
    for chosen in (*((place,) for place in others), others):
        context: Callable[[], Any]
        for context in contexts if len(chosen) == len(others) else contexts[:1]:
            with context():
                assert_same(run(function, with_inference_tensors(given, *chosen)), expected)


@pytest.mark.parametrize("function", [name for name in CALLS if "lm_head_weight" in CALLS[name]])
@pytest.mark.parametrize("frozen", [("hidden",), ("lm_head_weight", "lm_head_bias")])
def test_what_is_frozen_may_be_of_inference_mode(function, frozen):
    """Hidden states of a frozen body, a frozen lm_head."""
    given = CALLS[function]
    chosen = [(name,) for name in frozen if name in given]
    assert_same(run(function, with_inference_tensors(given, *chosen), frozen), run(function, given, frozen))


@pytest.mark.parametrize("function", CALLS)
def test_a_call_inside_inference_mode(function):
    given = CALLS[function]
    expected = run(function, given, LEAVES)
    with torch.inference_mode():
        found = run(function, given, LEAVES)
    assert_same(found, expected)


def test_a_buffer_of_inference_mode_that_would_be_written_is_refused():
    given = CALLS["fused_grpo_loss"] | {"lm_head_weight": CALLS["fused_grpo_loss"]["lm_head_weight"].clone()}
    with torch.inference_mode():
        total = torch.zeros_like(given["lm_head_weight"])
    given["lm_head_weight"].requires_grad_()
    with pytest.raises(ValueError, match="accumulate_into was made in inference mode; expected a buffer that can be"):
        gk.fused_grpo_loss(**given, accumulate_into=total)

"""Every public function on every backend in circumstances that change no result: torch's default type and device,
views, what padding holds, no gradients, tensors of inference mode.

`from_pretrained(dtype=torch.bfloat16)` sets the default type for a while, and some trainers leave it so. Rollouts are
sampled in inference mode.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from helpers import good_calls, make_batch, off_policy, packed, reference, tensors
from teachers import KINDS, OWN, teacher_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import grpo_kernels as gk
from grpo_kernels.config import SURROGATE_RULES
from grpo_kernels.corrections import REJECTIONS
from grpo_kernels.distillation import DistillationOutput
from grpo_kernels.kernels import get_backend
from grpo_kernels.objective.sequences import WEIGHT_LEVELS
from grpo_kernels.teacher import has_full_vocab

Given = dict[str, Any]
FAST = ("cpu", "torch")  # of the backends
PER_TOKEN = torch.linspace(0.7, 1.3, 24).view(4, 6)
REWARDS, WHOLE_REWARDS = torch.tensor([0.1, 1.0, 0.3, 0.7]), torch.tensor([0, 1, 1, 3])
ADJACENT: Given = dict(num_generations=2, group_ids=None)

# --- calls: one per way through a function, and per place where a number or another tensor is read --------------------

EVERYTHING = dict(
    beta=0.1, temperature=PER_TOKEN, entropy_coef=0.01, off_policy_mask_threshold=0.5, use_bias_correction_kl=True,
    entropy_threshold=1.0, kl_clamp=(1.0, 0.5), log_ratio_clamp=0.5,
)  # fmt: skip
# For 4 sequences of 6 tokens.
CONFIGS: dict[str, gk.GRPOConfig] = {
    "one chunk": gk.GRPOConfig(beta=0.1, entropy_coef=0.01, temperature=0.9),
    "many chunks": gk.GRPOConfig.preset("grpo", chunk_rows=3, logit_scale=0.7, logit_softcap=3.1),
    "whole sequences": gk.GRPOConfig.preset(
        "gspo", epsilon_low=0.1, epsilon_high=0.1, entropy_coef=0.01, entropy_aggregation="loss", chunk_rows=12
    ),
    "sequences beyond a chunk": gk.GRPOConfig.preset("luspo", beta=0.1, chunk_rows=4),
    "static shapes": gk.GRPOConfig.preset("dr_grpo", max_completion_length=7, static_shapes=True),
    "clamps": gk.GRPOConfig.preset("verl", beta=0.1, kl_clamp=(0.6, 0.3), use_bias_correction_kl=True, delta=1.4),
    "entropy of the kept tokens": gk.GRPOConfig(entropy_coef=0.1, entropy_threshold=3.3, entropy_kept_only=True),
    "off-policy mask": gk.GRPOConfig(off_policy_mask_threshold=0.02, entropy_threshold=3.3),
    "everything": gk.GRPOConfig(static_shapes=True, importance_sampling_level="sequence_token", **EVERYTHING),
    "everything, vespo": gk.GRPOConfig(
        surrogate="vespo", importance_sampling_level="sequence", chunk_rows=2, **EVERYTHING
    ),
    "everything, ipo": gk.GRPOConfig(surrogate="ipo", static_shapes=True, **EVERYTHING),
}
TENSORS = gk.GRPOConfig(
    beta=0.1, temperature=PER_TOKEN, entropy_coef=torch.tensor(0.1), entropy_threshold=torch.tensor(0.5)
)
KERNELS_SEE = ("one chunk", "many chunks", "static shapes", "everything")  # of the configurations
CHANGES: dict[str, list[Given]] = {
    "fused_grpo_loss": [{"config": CONFIGS[name]} for name in KERNELS_SEE],
    "fused_policy_loss": [dict(level=x, chunk_rows=n) for x, n in (("token", 5), ("sequence", 12), ("sequence", 4))],
    "grpo_loss_from_logits": [dict(inplace=True)],
    "group_advantages": [
        dict(rewards=x, scale=scale) | ADJACENT
        for x in (REWARDS, REWARDS.double(), WHOLE_REWARDS)
        for scale in ("group", "batch")
    ],
    "combine_advantages": [ADJACENT | dict(rewards=(REWARDS[:, None] * PER_TOKEN[:, :2]).double())],
    "process_advantages": [
        dict(gamma=0.9), ADJACENT | dict(gamma=0.9, step_rewards=WHOLE_REWARDS[:, None] * torch.tensor([1, 3]))
    ],
    "rollout_weights": [
        *(dict(level=level, batch_normalize=level == "token", veto=0.3) for level in WEIGHT_LEVELS),
        dict(mode="sequence_mask", low=0.9, cap=1.1),
    ],
    "rejection_mask": [dict(options={x: (0.8, 1.2) if x.endswith("k1") else 0.02}) for x in REJECTIONS],
    "entropy_quantile": [dict(top=0.3)],
}  # fmt: skip
PACKED = packed(off_policy(make_batch(3, masked=True)))
OF_PACKED: Given = dict(hidden=PACKED.hidden, completion_ids=PACKED.ids, completion_mask=None)
OF_PACKED["cu_seqlens"] = PACKED.options["cu_seqlens"]
# Not in the interpreter, nor on the emulator, which are slow: kernels see nothing of it.
FURTHER: dict[str, list[Given]] = {
    "fused_grpo_loss": [
        *({"config": config} for name, config in CONFIGS.items() if name not in KERNELS_SEE),
        *(dict(normalizer=x) for x in (17, torch.tensor(17))),
        dict(normalizer=None, num_items_in_batch=41),
        dict(advantages=None, rewards=REWARDS),
        dict(rollout_logps=None, rollout_weights=None, config=gk.GRPOConfig(temperature=REWARDS + 0.7))
        | OF_PACKED | PACKED.options,
    ],
    "fused_policy_loss": [
        dict(temperature=PER_TOKEN), OF_PACKED | dict(loss_fn=lambda chunk: chunk.logps.exp().sum(), entropy=False)
    ],
    "fused_distillation_loss": [dict(temperature=PER_TOKEN)],
    "fused_divergence": [dict(temperature=PER_TOKEN)],
}  # fmt: skip


def calls(function: str, backend: str, dtype: torch.dtype = torch.float32) -> list[Given]:
    """Arguments of all calls of a function that this backend can take; a whole teacher in `dtype`."""
    given = good_calls()[function]
    is_fast = backend in FAST
    changes: list[Given] = [{}, *CHANGES.get(function, []), *(FURTHER.get(function, []) if is_fast else [])]
    if "completion_mask" in given:
        changes.append({"completion_mask": None})
    if "config" in given:
        changes.append(dict(config=TENSORS, token_weights=PER_TOKEN, entropy_normalizer=torch.tensor(20.0)))
    if function in ("fused_grpo_loss", "fused_logps", "fused_policy_loss"):
        changes.append(dict(sampling_mask=gk.SamplingMask.from_padded(torch.arange(2).expand(4, 6, 2))))
    if function == "fused_logps":
        changes.append(dict(completion_ids=torch.stack([given["completion_ids"]] * 2, -1)))
    if "teacher" in given:
        kinds = (*KINDS, *OWN) if is_fast else ("whole", "own tail")
        changes += [dict(teacher=teacher_of(kind, shape=(4, 6), dtype=dtype)) for kind in kinds]
    if "backend" in inspect.signature(getattr(gk, function)).parameters:
        given["backend"] = backend
    found = [given | change for change in changes]
    return [x for x in found if not has_full_vocab(x.get("teacher")) or get_backend(backend).takes_teachers]


# --- what a call gives ------------------------------------------------------------------------------------------------

DIFFERENTIABLE = ("hidden", "lm_head_weight", "lm_head_bias", "logps", "entropy", "logits")


def flat(x: object) -> list[Tensor]:
    """All tensors of a nested result, in order."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, gk.GRPOLossOutput):
        x = (x.loss, x.logps, x.entropy, x.divergence, x.metrics, x.sequences, x.groups)
    elif isinstance(x, (gk.SamplingMask, DistillationOutput)):
        x = tuple(vars(x).values())
    elif isinstance(x, dict):
        x = tuple(x.values())
    return [t for part in x for t in flat(part)] if isinstance(x, (tuple, list)) else []


def mapped(given: Given, function: Callable[[Tensor], Tensor]) -> Given:
    """The arguments with all tensors changed, those of a teacher, a mask and a configuration too."""

    def of(x: Any) -> Any:
        if isinstance(x, Tensor):
            return function(x)
        if dataclasses.is_dataclass(x):
            fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.init}
            changed = {name: function(y) for name, y in fields.items() if isinstance(y, Tensor)}
            return dataclasses.replace(x, **changed)
        return x

    return {name: of(x) for name, x in given.items()}


def outcome(
    function: str,
    given: Given,
    *,
    dtype: torch.dtype | None = None,
    view: Callable[[Tensor], Tensor] = lambda x: x,
    gradients: bool = True,
    frozen: tuple[str, ...] = (),
) -> tuple[list[Tensor], list[Tensor]]:
    """Results, and gradients of the tensors that the views are of, with those of the head in `dtype`; none of those
    that are `frozen`, which are taken as they are."""
    names = [x for x in DIFFERENTIABLE if x not in frozen] if function != "entropy_quantile" else []
    own = {name: x.to(dtype or x.dtype, copy=True) for name in names if isinstance(x := given.get(name), Tensor)}
    for x in own.values():
        x.requires_grad_(gradients)
    given = mapped(given | own, view)
    if given.get("inplace"):
        given["logits"] = given["logits"] * 1.0
    found = flat(getattr(gk, function)(**given))
    tops = [x for x in found if x.requires_grad]
    factors = [view(torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype, device=x.device).view(x.shape)) for x in tops]
    grads = torch.autograd.grad(tops, list(own.values()), factors, allow_unused=True) if tops else ()
    return [x.detach() for x in found], [x for x in grads if x is not None]


def joined(results: tuple[list[Tensor], list[Tensor]]) -> list[Tensor]:
    return [*results[0], *results[1]]


def assert_same(found: list[Tensor], expected: list[Tensor], where: object, **tolerance: float) -> None:
    """Types, devices and values, to the bit unless there is a tolerance; NaN: an unknown kept mass."""
    assert len(found) == len(expected) > 0, where
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(
            a, b, **tolerance or dict(rtol=0, atol=0), equal_nan=True, msg=lambda m, i=i: f"{where}, tensor {i}: {m}"
        )


# --- circumstances ----------------------------------------------------------------------------------------------------


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


DEFAULTS = ("bfloat16", "float64", "device")


def assert_same_with_any_default(call: Callable[[], tuple[list[Tensor], ...]], where: object, kinds=DEFAULTS) -> None:
    expected = [x for part in call() for x in part]
    for kind in kinds:
        with default(kind):
            found = [x for part in call() for x in part]
        assert_same(found, expected, (where, kind))


OF_HEAD = [name for name, given in good_calls().items() if given.keys() & {"hidden", "logits"}]
TYPES: list[tuple[str, torch.dtype | None, tuple[str, ...]]] = [
    *((name, None, DEFAULTS) for name in good_calls()),
    *((name, torch.bfloat16, DEFAULTS[1:]) for name in OF_HEAD),
    ("fused_grpo_loss", torch.float16, DEFAULTS[1:2]),
]


@pytest.mark.parametrize(("function", "dtype", "kinds"), TYPES)
def test_defaults_of_torch(function, dtype, kinds, backend):
    """The interpreter and the emulator are slow: there each call has another of them in turn."""
    for i, given in enumerate(calls(function, backend)):
        mine = kinds if backend in FAST else (kinds[i % len(kinds)],)
        assert_same_with_any_default(lambda given=given: outcome(function, given, dtype=dtype), function, mine)


@pytest.mark.parametrize("function", OF_HEAD)
def test_defaults_of_torch_beside_float64(function):
    for given in calls(function, "torch", torch.float64):
        assert_same_with_any_default(lambda given=given: outcome(function, given, dtype=torch.float64), function)


@pytest.mark.parametrize("surrogate", SURROGATE_RULES)
def test_defaults_of_torch_beside_the_specification(surrogate):
    """And in float64 beside each surrogate."""
    given, config = good_calls()["fused_grpo_loss"], gk.GRPOConfig(surrogate=surrogate)
    assert_same_with_any_default(
        lambda: outcome("fused_grpo_loss", given | {"config": config}, dtype=torch.float64), surrogate
    )
    batch = off_policy(make_batch(3, bias=True, masked=True))
    for x in (config, *CONFIGS.values()) if surrogate == "clip" else (config,):
        assert_same_with_any_default(lambda x=x: (list(tensors(reference(batch, x)).values()),), surrogate)


VIEWS = {
    # Of floating-point tensors: stored negated, with a bit that says so. As z.conj().imag, but without gaps.
    "negated": lambda x: torch._neg_view(-x) if x.is_floating_point() else x,
    "apart": lambda x: torch.stack([x, x], -1)[..., 0],
    "columns first": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x,
    "rows first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else x,
}
CLOSE = dict(rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("function", good_calls())
def test_views_are_what_they_show(function, backend):
    """With gradients and without, which gives the same results; slow backends have each call in one way of either."""
    for i, given in enumerate(calls(function, backend)):
        results, gradients = outcome(function, given)
        one, other = ("apart", "negated") if i % 2 else ("negated", "apart")
        for name in VIEWS if i == 0 else (one, other) if backend in FAST else (one,):
            found = outcome(function, given, view=VIEWS[name])
            assert_same(joined(found), results + gradients, (function, name), **CLOSE)
        found, _ = outcome(function, given, view=VIEWS[other], gradients=False)
        assert_same(found, results, (function, "without gradients"), **CLOSE)


GARBAGE = (math.nan, math.inf, -math.inf, 3e38)
WRONG_IDS = (-1, 67, 2**62, -(2**62))


def padded(given: Given, value: float, id_: int) -> Given:
    """The arguments with this number, or id, in all tensors wherever the mask is 0."""
    masked = ~given["completion_mask"]

    def fill(x: Tensor) -> Tensor:
        if x.shape[:2] != masked.shape or x.dtype == torch.bool:
            return x
        return x.masked_fill(masked.view(4, 6, *[1] * (x.dim() - 2)), value if x.is_floating_point() else id_)

    known = {name: x for name, x in given.items() if isinstance(x, (gk.TopKTeacher, gk.SamplingMask))}
    return mapped({**given, **dict.fromkeys(known)}, fill) | known


@pytest.mark.parametrize("function", [name for name, given in good_calls().items() if "completion_mask" in given])
def test_padding_reaches_no_result(function, backend):
    """Masked positions hold NaN, infinity or ids outside the vocabulary: a mask that is multiplied in keeps the NaN.
    Where all are masked, as on a rank without tokens, there is a graph all the same, and its gradients are 0."""
    for i, given in enumerate(calls(function, backend)):
        if given["completion_mask"] is None:
            continue
        clean, found = (
            outcome(function, padded(given, *content)) for content in ((0.0, 0), (GARBAGE[i % 4], WRONG_IDS[i % 4]))
        )
        for part, expected in zip(found, clean, strict=True):
            assert_same(part, expected, (function, i)) if expected else None
        masked = ~given["completion_mask"]
        assert all(x.isfinite().all() and not x[masked].any() for x in found[1] if x.shape[:2] == masked.shape)
        _, gradients = outcome(function, given | {"completion_mask": torch.zeros(4, 6)})
        assert len(gradients) == len(found[1]) and not any(x.any() for x in gradients)


# --- inference mode: bits are those of other tensors ------------------------------------------------------------------

LEAVES = tuple(name for name in DIFFERENTIABLE if name != "entropy")  # what gradients go to


def places(given: Given) -> Iterator[tuple[str, ...]]:
    """The names that lead to each tensor among these arguments."""
    for name, x in given.items():
        if isinstance(x, Tensor):
            yield (name,)
        elif dataclasses.is_dataclass(x):
            yield from ((name, field) for field, inner in vars(x).items() if isinstance(inner, Tensor))


def with_inference_tensors(given: Given, *chosen: tuple[str, ...]) -> Given:
    """The arguments with what is in these places made in inference mode."""
    found = dict(given)
    with torch.inference_mode():
        for name, *inner in chosen:
            x = found[name]
            found[name] = dataclasses.replace(x, **{inner[0]: getattr(x, inner[0]).clone()}) if inner else x.clone()
    return found


@pytest.mark.parametrize("function", good_calls())
def test_every_argument_may_be_of_inference_mode(function):
    """One at a time, all at once, and seen by a dispatch mode, for which a call is an operator."""
    for given in calls(function, "cpu"):
        others = [place for place in places(given) if place[0] not in LEAVES]
        expected = joined(outcome(function, given, frozen=("entropy",)))
        for chosen in (*((place,) for place in others), others):
            for context in (nullcontext, lambda: FlopCounterMode(display=False))[: 1 + (chosen is others)]:
                with context():
                    found = outcome(function, with_inference_tensors(given, *chosen), frozen=("entropy",))
                assert_same(joined(found), expected, (function, chosen))


@pytest.mark.parametrize("function", [name for name, given in good_calls().items() if "lm_head_weight" in given])
@pytest.mark.parametrize("frozen", [("hidden",), ("lm_head_weight", "lm_head_bias")])
def test_what_is_frozen_may_be_of_inference_mode(function, frozen):
    """Hidden states of a frozen body, a frozen lm_head."""
    for given in calls(function, "cpu"):
        found = outcome(function, with_inference_tensors(given, *((x,) for x in frozen)), frozen=frozen)
        assert_same(joined(found), joined(outcome(function, given, frozen=frozen)), (function, frozen))


@pytest.mark.parametrize("function", good_calls())
def test_a_call_inside_inference_mode(function):
    for given in calls(function, "cpu"):
        expected, _ = outcome(function, given, gradients=False)
        with torch.inference_mode():
            found, _ = outcome(function, given, gradients=False)
        assert_same(found, expected, function)


def test_a_buffer_of_inference_mode_that_would_be_written_is_refused():
    given = good_calls()["fused_grpo_loss"]
    given["lm_head_weight"].requires_grad_()
    with torch.inference_mode():
        total = torch.zeros(given["lm_head_weight"].shape)
    with pytest.raises(ValueError, match="accumulate_into was made in inference mode; expected a buffer that can be"):
        gk.fused_grpo_loss(**given, accumulate_into=total)


# ----------------------------------------------------------------------------------------------------------------------


def test_compiled_functions_read_negated_views_too():
    given = mapped(good_calls()["fused_grpo_loss"], VIEWS["negated"])
    compiled = torch.compile(lambda: gk.fused_grpo_loss(**given).loss, backend="aot_eager")
    torch.testing.assert_close(compiled(), gk.fused_grpo_loss(**good_calls()["fused_grpo_loss"]).loss)


def test_every_public_function_is_swept():
    functions = {name for name in gk.__all__ if inspect.isfunction(getattr(gk, name))}
    assert functions - {"available_backends", "available_presets"} == {*good_calls()}

"""torch.set_default_dtype and torch.set_default_device change nothing: every output and gradient keeps its bits.

`from_pretrained(dtype=torch.bfloat16)` sets the default type for a while, and some trainers leave it so.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers import make_batch, off_policy
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import reference

BATCH = off_policy(make_batch(3, bias=True, masked=True))
ROLLOUT = BATCH.options["old_logps"] + torch.linspace(-0.2, 0.2, 24).view(4, 6)
REWARDS = torch.tensor([0.1, 1.0, 0.3, 0.7])
WHOLE_REWARDS, STEP_ENDS = torch.tensor([0, 1, 1, 3]), torch.tensor([[1, 3]] * 4)
PER_TOKEN = torch.linspace(0.7, 1.3, 24).view(4, 6)

# One configuration per way through the engine (4 sequences of 6 tokens) and per place where a number meets a tensor.
CONFIGS: dict[str, gk.GRPOConfig] = {
    "fused, one chunk": gk.GRPOConfig(beta=0.1, entropy_coef=0.01, temperature=0.9),
    "fused, many chunks": gk.GRPOConfig.preset("grpo", chunk_rows=3, logit_scale=0.7, logit_softcap=3.1),
    "staged": gk.GRPOConfig.preset("gspo", epsilon_low=0.1, epsilon_high=0.1, entropy_coef=0.01, chunk_rows=12),
    "recompute": gk.GRPOConfig.preset("luspo", beta=0.1, chunk_rows=4),
    "static shapes": gk.GRPOConfig.preset("dapo", static_shapes=True),
    "active tokens alone": gk.GRPOConfig.preset("bnpo", score_inactive=False),
    "fixed_length": gk.GRPOConfig.preset("dr_grpo", max_completion_length=7, entropy_coef=0.01),
    "clamps": gk.GRPOConfig.preset("verl", beta=0.1, kl_clamp=(0.6, 0.3), use_bias_correction_kl=True, delta=1.4),
    "tensor options": gk.GRPOConfig(temperature=PER_TOKEN, entropy_threshold=torch.tensor(3.3)),
    "off-policy mask": gk.GRPOConfig(off_policy_mask_threshold=0.02, entropy_threshold=3.3),
    **{name: gk.GRPOConfig.preset(name) for name in ("cispo", "sapo", "vespo", "rloo", "sft")},
    **{name: gk.GRPOConfig(surrogate=name) for name in ("cispo_two_sided", "gmpo", "dppo_tv", "ipo")},
}
NUM_ITEMS = torch.tensor(41)
DENOMINATORS = {"none": {}, "number": {"normalizer": 17}, "integer tensor": {"normalizer": torch.tensor(17)}}


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
    if isinstance(x, dict):
        x = tuple(x.values())
    elif isinstance(x, gk.GRPOLossOutput):
        x = tuple(vars(x).values())
    return [t for part in x for t in flat(part)] if isinstance(x, (tuple, list)) else []


def head(dtype: torch.dtype) -> tuple[list[Tensor], dict]:
    """(leaves: hidden states, weight, bias; the arguments that name the bias and the mask)."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in (BATCH.hidden, BATCH.weight, BATCH.bias)]
    return leaves, {"lm_head_bias": leaves[2], "completion_mask": BATCH.options["completion_mask"]}


def with_gradients(out: object, loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    (1.5 * loss).backward()
    return [x.detach() for x in flat(out)] + [x.grad for x in leaves if x.grad is not None]


def loss_calls(backend: str, dtype: torch.dtype) -> dict:
    """name -> a call that gives tensors: fused_grpo_loss in every configuration."""
    given = {name: BATCH.options[name] for name in ("old_logps", "ref_logps")}
    given |= {"rollout_logps": ROLLOUT, "rollout_weights": PER_TOKEN}

    def call(config: gk.GRPOConfig, **options):
        leaves, names = head(dtype)
        options = options or {"advantages": BATCH.advantages}
        out = gk.fused_grpo_loss(*leaves[:2], BATCH.ids, **names, **given, **options, config=config, backend=backend)
        return with_gradients(out, out.loss, leaves)

    calls = {name: lambda config=config: call(config) for name, config in CONFIGS.items()}
    calls["from rewards"] = lambda: call(gk.GRPOConfig(entropy_coef=0.01), rewards=REWARDS, num_generations=2)
    for name, options in DENOMINATORS.items():
        config = gk.GRPOConfig(aggregation="seq_mean", entropy_coef=0.01)
        calls[f"normalizer {name}"] = lambda config=config, options=options: call(
            config, advantages=BATCH.advantages, **options
        )
    calls["num_items_in_batch"] = lambda: call(gk.GRPOConfig(), advantages=BATCH.advantages, num_items_in_batch=41)
    return calls


def other_calls(backend: str, dtype: torch.dtype) -> dict:
    """name of a public function -> a call of it that gives tensors."""
    mask, old = BATCH.options["completion_mask"], BATCH.options["old_logps"]
    rest = {"advantages": BATCH.advantages, **BATCH.options, "backend": backend}
    config = gk.GRPOConfig(beta=0.1, entropy_coef=0.01, importance_sampling_level="sequence")

    def fused_logps():
        leaves, names = head(dtype)
        out = gk.fused_logps(*leaves[:2], BATCH.ids, **names, temperature=0.9, entropy=True, backend=backend)
        return with_gradients(out, (out[0] - 0.1 * out[1]).sum(), leaves)

    def fused_policy_loss():
        found = []
        for level, rows in (("token", 5), ("sequence", 12), ("sequence", 4)):
            leaves, names = head(dtype)
            loss = gk.fused_policy_loss(
                *leaves[:2], BATCH.ids, lambda c: (c.logps - c.tokens(old)).exp().sum() - 0.1 * c.entropy.sum(),
                **names, level=level, entropy=True, temperature=0.9, chunk_rows=rows, backend=backend,
            )  # fmt: skip
            found += with_gradients(loss, loss, leaves)
        return found

    def grpo_loss_from_logps():
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (old, PER_TOKEN)]
        out = gk.grpo_loss_from_logps(leaves[0], entropy=leaves[1], **rest, config=config)
        return with_gradients(out, out.loss, leaves)

    def grpo_loss_from_logits():
        found = []
        for inplace in (False, True):
            leaf = (BATCH.hidden @ BATCH.weight.T).to(dtype).requires_grad_()
            out = gk.grpo_loss_from_logits(leaf * 1.0, BATCH.ids, **rest, config=config, inplace=inplace)
            found += with_gradients(out, out.loss, [leaf])
        return found

    return {
        "fused_logps": fused_logps,
        "fused_policy_loss": fused_policy_loss,
        "grpo_loss_from_logps": grpo_loss_from_logps,
        "grpo_loss_from_logits": grpo_loss_from_logits,
        "group_advantages": lambda: [
            gk.group_advantages(x, num_generations=2, scale=scale, baseline=baseline)
            for x in (REWARDS, REWARDS.double(), WHOLE_REWARDS)
            for scale in ("group", "batch", "none")
            for baseline in ("mean", "leave_one_out", "none")
        ],
        "process_advantages": lambda: [
            gk.process_advantages(x, STEP_ENDS, 5, num_generations=2, gamma=0.9)
            for x in (REWARDS[:, None] * PER_TOKEN[:, :2], WHOLE_REWARDS[:, None] * STEP_ENDS)
        ],
        "rollout_weights": lambda: [
            gk.rollout_weights(old, ROLLOUT, completion_mask=mask, level=level, mode=mode)
            for level in ("token", "sequence", "sequence_sum")
            for mode in ("truncate", "mask")
        ],
        "entropy_quantile": lambda: [gk.entropy_quantile(PER_TOKEN, m, top=0.3) for m in (None, mask)],
    }


def reference_calls(dtype: torch.dtype) -> dict:
    given = {name: BATCH.options[name] for name in ("old_logps", "ref_logps", "completion_mask")}
    given |= {"rollout_logps": ROLLOUT, "rollout_weights": PER_TOKEN}

    def call(config: gk.GRPOConfig, **options):
        leaves, _ = head(dtype)
        out = reference.reference_grpo_loss(
            *leaves[:2], BATCH.ids, BATCH.advantages, lm_head_bias=leaves[2], config=config, **given, **options
        )
        return with_gradients(list(out), out.loss, leaves)

    calls = {name: lambda config=config: call(config) for name, config in CONFIGS.items()}
    for aggregation in ("seq_mean", "token_mean"):
        config = gk.GRPOConfig(aggregation=aggregation, entropy_coef=0.01)
        for name, options in DENOMINATORS.items():
            calls[f"{aggregation}, normalizer {name}"] = lambda config=config, options=options: call(config, **options)
    for items in (41, NUM_ITEMS):
        config = gk.GRPOConfig(entropy_coef=0.01)
        calls[f"num_items {type(items)}"] = lambda config=config, items=items: call(config, num_items_in_batch=items)
    return calls


def assert_same_with_any_default(calls: dict, kinds: tuple[str, ...]) -> None:
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


KINDS = ("bfloat16", "float16", "float64", "device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_grpo_loss(dtype, backend):
    assert_same_with_any_default(loss_calls(backend, dtype), KINDS if dtype == torch.float32 else KINDS[-2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_public_functions(dtype, backend):
    assert_same_with_any_default(other_calls(backend, dtype), KINDS)


def test_float64():
    assert_same_with_any_default(loss_calls("torch", torch.float64) | other_calls("torch", torch.float64), KINDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reference_functions(dtype):
    assert_same_with_any_default(reference_calls(dtype), KINDS)


def test_every_public_function_is_swept():
    functions = {name for name in gk.__all__ if inspect.isfunction(getattr(gk, name))}
    swept = {"fused_grpo_loss", *other_calls("torch", torch.float32)}
    assert functions - {"available_backends", "available_presets"} == swept

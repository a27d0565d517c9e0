"""What the tests share: batches, and what they have to hold to, beside the harness of `grpo-kernels check`."""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import kernels
from grpo_kernels.checks.tokens import (
    TOKEN_ARGUMENTS,
    TokenLayout,
    mask_per_token,
    per_token,
)
from grpo_kernels.commands.harness import (
    LEAVES,
    Batch,
    Result,
    call,
    errors,
    fused,
    leaves,
    reference,
    tensors,
    true_logps,
)
from grpo_kernels.commands.harness import relative_error as relative
from grpo_kernels.head import mask_paths
from grpo_kernels.objective.tokens import TokenInputs

__all__ = ["LEAVES", "Result", "fused", "leaves", "reference", "relative", "tensors"]  # which tests import from here


def make_batch(
    seed: int = 0,
    *,
    sequences: int = 4,
    length: int = 6,
    width: int = 24,
    vocab: int = 67,
    bias: bool = False,
    per_token: bool = False,
    masked: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """A (B, T) batch; advantages (B,), or with per_token (B, T); `masked`: right padding, one sequence all masked."""
    g = torch.Generator().manual_seed(seed)
    shape = (sequences, length)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=g).to(dtype)

    hidden, weight = normal(*shape, width), normal(vocab, width) * 0.3
    ids = torch.randint(vocab, shape, generator=g)
    advantages = normal(*shape) if per_token else normal(sequences)
    options = {}
    if masked:
        lengths = torch.randint(1, length + 1, (sequences,), generator=g)
        lengths[seed % sequences] = 0
        options["completion_mask"] = torch.arange(length) < lengths[:, None]
    return Batch(hidden, weight, ids, advantages, normal(vocab) * 0.5 if bias else None, options)


def token_inputs(ids: Tensor, dtype: torch.dtype, **given: Any) -> tuple[TokenInputs, bool]:
    """What the loss functions make of these arguments, for tokens of the shape of ids; whether advantages and rollout
    weights have one value for each sequence."""
    offsets = given.get("cu_seqlens")
    layout = TokenLayout(ids.shape, len(ids) if offsets is None else len(offsets) - 1, offsets, ids, dtype)
    per_sequence = all(given[name].shape != ids.shape for name in ("advantages", "rollout_weights") if name in given)
    expanded = {name: per_token(name, x, layout) for name, x in given.items() if name in TOKEN_ARGUMENTS}
    expanded["completion_mask"] = mask_per_token(given.get("completion_mask"), ids.shape, ids)
    return TokenInputs(**given | expanded), per_sequence


def off_policy(batch: Batch, config: gk.GRPOConfig | None = None, *, seed: int = 1, spread: float = 0.4) -> Batch:
    """The batch with old, reference and rollout log-probabilities around the true ones."""
    config = config or gk.GRPOConfig()
    g = torch.Generator().manual_seed(seed)
    logps, _ = true_logps(batch, config)
    noisy = {name: logps + spread * torch.randn(logps.shape, generator=g) for name in ("old_logps", "ref_logps")}
    return batch.with_options(**{name: x.float() for name, x in noisy.items()})


def gradients_of(loss: Tensor, batch: Batch) -> list[Tensor]:
    """With respect to hidden, weight and bias, which the batch has."""
    return list(torch.autograd.grad(loss, [getattr(batch, name) for name in LEAVES]))


UNCLIPPED = gk.GRPOConfig(epsilon_low=1.0, epsilon_high=1e6)
LOSSES = (
    *("fused_grpo_loss", "fused_logps", "fused_policy_loss", "fused_policy_loss, sequence"),
    *("grpo_loss_from_logits", "grpo_loss_from_logits, inplace"),
)


def loss_by(
    function: str,
    batch: Batch,
    backend: str = "auto",
    *,
    divisor: float = 1.0,
    entropy_coef: float = 0.0,
    chunk_rows: int | None = None,
    **logits: Any,
) -> Tensor:
    """-sum (ratio x advantage + entropy_coef x entropy) / divisor by one of LOSSES: what UNCLIPPED computes with these
    normalizers. `logits`: temperature, sparse_backward and the like."""
    name, _, way = function.partition(", ")
    head, options = (batch.hidden, batch.weight, batch.ids), batch.options
    if name in ("fused_grpo_loss", "grpo_loss_from_logits"):
        config = dataclasses.replace(UNCLIPPED, entropy_coef=entropy_coef, **logits)
        given = dict(normalizer=divisor, entropy_normalizer=divisor if entropy_coef else None)
        if name == "fused_grpo_loss":
            return call(batch, dataclasses.replace(config, chunk_rows=chunk_rows), backend, **given).loss
        z = batch.hidden @ batch.weight.T if batch.bias is None else batch.hidden @ batch.weight.T + batch.bias
        given |= dict(config=config, backend=backend, inplace=bool(way), **options)
        return gk.grpo_loss_from_logits(z, batch.ids, batch.advantages, **given).loss
    by_token = batch.advantages.shape == batch.ids.shape

    def loss_fn(chunk: gk.PolicyChunk) -> Tensor:
        old = chunk.tokens(options["old_logps"]) if "old_logps" in options else chunk.logps.detach()
        gain = (chunk.logps - old).exp() * (chunk.tokens if by_token else chunk.sequences)(batch.advantages)
        return -(gain if chunk.entropy is None else gain + entropy_coef * chunk.entropy).sum() / divisor

    logits |= dict(entropy=entropy_coef != 0.0, backend=backend)
    if name == "fused_logps":
        return loss_fn(whole_chunk(batch, **logits))
    given = {name: x for name, x in options.items() if name in ("completion_mask", "sampling_mask", "cu_seqlens")}
    given |= dict(level=way or "token", lm_head_bias=batch.bias, chunk_rows=chunk_rows, **logits)
    return gk.fused_policy_loss(*head, loss_fn, **given)


def whole_chunk(batch: Batch, **given: Any) -> gk.PolicyChunk:
    """All unmasked tokens, by fused_logps."""
    given |= {name: batch.options.get(name) for name in ("completion_mask", "sampling_mask")}
    found = gk.fused_logps(batch.hidden, batch.weight, batch.ids, lm_head_bias=batch.bias, **given)
    mask, offsets = given["completion_mask"], batch.options.get("cu_seqlens")
    lengths = torch.full(batch.ids.shape[:1], batch.ids.shape[-1]) if offsets is None else offsets.diff()
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    index = torch.arange(len(sequence)) if mask is None else mask.reshape(-1).nonzero()[:, 0]
    logps, entropy = (x if x is None else x.reshape(-1)[index] for x in found)
    return gk.PolicyChunk(logps, entropy, index, sequence[index])


def good_calls() -> dict[str, dict[str, Any]]:
    """Arguments for a call of every public function that takes tensors, by its name: four sequences of six tokens, two
    groups, a teacher that every backend can take."""
    batch = off_policy(make_batch(3, bias=True, masked=True))
    per_token, rewards = torch.linspace(0.7, 1.3, 24).view(4, 6), torch.tensor([0.1, 1.0, 0.3, 0.7])
    mask, old = batch.options["completion_mask"], batch.options["old_logps"]
    masked, groups = {"completion_mask": mask}, {"group_ids": torch.tensor([0, 0, 1, 1])}
    head = {"hidden": batch.hidden, "lm_head_weight": batch.weight, "lm_head_bias": batch.bias}
    of_tokens = head | masked | {"completion_ids": batch.ids}
    config = gk.GRPOConfig(beta=0.1, entropy_coef=0.01, importance_sampling_level="sequence")
    options = batch.options | groups | dict(rollout_logps=old + per_token - 1.0, rollout_weights=per_token)
    options |= dict(advantages=batch.advantages, normalizer=torch.tensor([24.0]), config=config)
    teacher = gk.TopKTeacher(torch.arange(5).expand(4, 6, 5), -per_token[..., None] * torch.arange(2.0, 7.0))
    distilled = head | masked | dict(teacher=teacher, divergence="jsd", temperature=0.9)

    def loss_fn(chunk: gk.PolicyChunk) -> Tensor:
        return (chunk.logps - chunk.tokens(old)).exp().sum() - 0.1 * chunk.entropy.sum()

    return {
        "fused_grpo_loss": of_tokens | options,
        "fused_logps": of_tokens | dict(temperature=per_token, entropy=True),
        "sampling_support": of_tokens | dict(temperature=per_token, top_k=30, top_p=0.9, min_p=0.01),
        "fused_top_k": head | masked | dict(k=5, temperature=per_token),
        "fused_policy_loss": of_tokens | dict(loss_fn=loss_fn, entropy=True, temperature=0.9),
        "fused_distillation_loss": distilled,
        "fused_divergence": distilled,
        "grpo_loss_from_logps": {"logps": old, "entropy": per_token} | options,
        "grpo_loss_from_logits": {"logits": batch.hidden @ batch.weight.T, "completion_ids": batch.ids} | options,
        "group_advantages": {"rewards": rewards} | groups,
        "combine_advantages": dict(rewards=rewards[:, None] * per_token[:, :2], weights=[0.3, 2.0], **groups),
        "process_advantages": dict(
            step_rewards=rewards[:, None] * per_token[:, :2], step_ends=torch.tensor([[1, 3]] * 4), length=6, **groups
        ),
        "rollout_weights": {"old_logps": old, "rollout_logps": old - per_token} | masked,
        "rejection_mask": {
            "old_logps": old,
            "rollout_logps": old - per_token,
            "options": {"token_k1": (0.5, 2.0), "seq_mean_k3": 1.0},
        }
        | masked,
        "entropy_quantile": {"entropy": per_token} | masked,
    }


def assert_within(
    found: dict[str, float], allowed: dict[str, float], slack: float, factor: float = 1.0, of: str = ""
) -> None:
    """Each error whose name begins with `of` is at most `factor` times the allowed one, plus `slack`."""
    bounded = {name: error for name, error in found.items() if name.startswith(of)}
    assert bounded, f"none of {', '.join(found)} begins with {of!r}"
    for name, error in bounded.items():
        bound = factor * allowed[name] + slack
        assert error <= bound < math.inf, (
            f"{name}: error {error:.2e}, allowed {factor} x {allowed[name]:.2e} + {slack:.0e}"
        )


def assert_close(found: Result, exact: Result, tolerance: float = 2e-6) -> None:
    """Each relative error is at most `tolerance`."""
    for name, error in errors(found, exact).items():
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


def assert_same_bits(found: Result, expected: Result) -> None:
    for name, x in tensors(expected).items():
        assert torch.equal(tensors(found)[name], x), name
    assert found.metrics.keys() == expected.metrics.keys()
    for name, x in expected.metrics.items():
        torch.testing.assert_close(found.metrics[name], x, rtol=0, atol=0, equal_nan=True, msg=name)


def packed(batch: Batch, lengths: Tensor | None = None) -> Batch:
    """The batch as packed sequences of these lengths (by default of its unmasked tokens), without any mask."""
    count, length = batch.ids.shape
    keep = batch.options.get("completion_mask")
    if lengths is not None:
        keep = torch.arange(length) < lengths[:, None]
    elif keep is None:
        keep = torch.ones(count, length, dtype=torch.bool)
    options = {}
    for name, x in batch.options.items():
        if name == "sampling_mask":
            options[name] = gk.SamplingMask(x.ids, x.counts.flatten())[keep.flatten()]
        elif name != "completion_mask":
            options[name] = x[keep] if isinstance(x, Tensor) and x.shape == batch.ids.shape else x
    options["cu_seqlens"] = torch.nn.functional.pad(keep.sum(1).cumsum(0), (1, 0))
    advantages = batch.advantages
    if advantages is not None and advantages.shape == batch.ids.shape:
        advantages = advantages[keep]
    return Batch(batch.hidden[keep], batch.weight, batch.ids[keep], advantages, batch.bias, options)


def make_sampling_mask(
    shape: tuple[int, ...], vocab: int, seed: int = 0, *, least: int = 0, most: int = 40
) -> gk.SamplingMask:
    """`least` to `most` kept ids for each token of `shape`, 0 for all of them; some lack their sampled id."""
    g = torch.Generator().manual_seed(seed)
    counts = (
        (torch.rand(shape, generator=g) ** 2 * (min(most, vocab) + 1)).long().clamp(min=least)
    )  # small ones are the most frequent
    rows = [torch.randperm(vocab, generator=g)[:count].tolist() for count in counts.flatten().tolist()]
    return gk.SamplingMask(gk.SamplingMask.from_lists(rows).ids, counts)


MASK_PATHS = ("gathers", "dense", "both")


def use_mask_path(monkeypatch: Any, path: str, vocab: int) -> None:
    """How tokens with a sampling mask get their logits; "both": those with at most an eighth of the ids by gathers;
    "none": there is no mask."""
    if path != "none":
        ratio = {"gathers": 0.5, "dense": vocab + 1, "both": 8}[path]
        monkeypatch.setattr(mask_paths, "DENSE_LOGITS_PER_GATHERED_ID", {"cpu": ratio, "cuda": ratio})


def virtual_rows(rows: int, columns: int, row_stride: int, dtype: torch.dtype) -> Tensor:
    """(rows, columns) zeros, `row_stride` elements apart, in address space that takes memory where it is touched."""
    size = ((rows - 1) * row_stride + columns) * dtype.itemsize
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(memory, dtype=dtype).as_strided((rows, columns), (row_stride, 1))


def with_operations(monkeypatch: Any, backend: str, **operations: Any) -> None:
    """The backend has these operations in place of its own."""
    table, load = dataclasses.replace(kernels.get_backend(backend), **operations), kernels._load
    monkeypatch.setattr(kernels, "_load", lambda name: (table, "") if name == backend else load(name))


def serve_only(monkeypatch: Any, backend: str, served: tuple[str, ...]) -> None:
    """The backend takes of its fused products these alone."""
    serve = kernels.get_backend(backend).fused_products
    with_operations(
        monkeypatch, backend,
        fused_products=lambda hidden, weight: tuple(x for x in serve(hidden, weight) if x in served) if serve else (),
    )  # fmt: skip


def call_counter(monkeypatch: Any, owner: Any, name: str, calls: list[Any], describe: Callable[..., Any]) -> None:
    """Record describe(*args, **kwargs) of every call of owner.name, which still runs."""
    original = getattr(owner, name)

    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append(describe(*args, **kwargs))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, spy)

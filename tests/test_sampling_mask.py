"""Sampling masks: every loss function over the ids that truncated sampling kept, against logits of -inf in float64."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from helpers import (
    LEAVES,
    MASK_WAYS,
    Batch,
    assert_close,
    assert_same_bits,
    errors,
    fused,
    make_batch,
    make_sampling_mask,
    off_policy,
    packed,
    reference,
    relative,
    set_mask_way,
    true_logps,
)
from test_vocab_parallel import run_ranks
from torch import Tensor, distributed

import grpo_kernels as gk
from grpo_kernels import SamplingMask
from grpo_kernels.backends import get_backend
from grpo_kernels.reference import kept_ids, reference_loss_from_logits

B, T, V = 3, 7, 61
TOLERANCE = 2e-5


@pytest.fixture(params=MASK_WAYS)
def way(request, monkeypatch):
    """How the tokens with a mask get their logits."""
    set_mask_way(monkeypatch, request.param, V)
    return request.param


def masked_batch(seed: int = 0, *, least: int = 0, most: int = 40, dtype: torch.dtype = torch.float32) -> Batch:
    """Some tokens without a mask, most without their sampled id; a sequence without an advantage; padding."""
    batch = make_batch(seed, sequences=B, length=T, width=16, vocab=V, bias=True).head_as(dtype)
    batch.advantages = torch.tensor([1.1, 0.0, -0.7])
    padding_mask = torch.arange(T) < torch.tensor([[T], [4], [6]])
    mask = make_sampling_mask((B, T), V, seed, least=least, most=most)
    return off_policy(batch.with_options(sampling_mask=mask, completion_mask=padding_mask))


def call(batch: Batch, **options) -> gk.GRPOLossOutput:
    return gk.fused_grpo_loss(
        batch.hidden, batch.weight, batch.ids, batch.advantages, lm_head_bias=batch.bias, **batch.options, **options
    )


def gradients_of(loss: Tensor, leaves: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(LEAVES, torch.autograd.grad(loss, leaves), strict=True))


def leaves_of(batch: Batch) -> list[Tensor]:
    return [getattr(batch, name).detach().clone().requires_grad_() for name in LEAVES]


CONFIGS = {
    "dapo": {"entropy_coef": 0.01},
    "gspo": {"beta": 0.02},
    "gspo, chunks of one token": {"chunk_rows": 1},  # the dense way computes logits again
    "cispo": {"temperature": 0.7, "entropy_threshold": 0.5, "logit_softcap": 5.0},
    "gmpo": {"surrogate": "gmpo", "score_inactive": False},
}


@pytest.mark.parametrize("preset", CONFIGS)
def test_the_loss_and_its_gradients(backend, preset, way):
    name = "dapo" if preset == "gmpo" else preset.split(",")[0]
    config, batch = gk.GRPOConfig.preset(name, **CONFIGS[preset]), masked_batch()
    found, exact = fused(batch, config, backend), reference(batch, config)
    if not config.score_inactive:  # fewer log-probabilities than the reference has, and metrics
        for x in (found, exact):
            x.logps, x.entropy, x.metrics = x.logps[:1], x.entropy[:1], {}
    assert_close(found, exact, TOLERANCE)


@pytest.mark.parametrize("preset", ["grpo", "gspo"])
def test_tokens_that_all_have_a_mask(preset, way):
    """Nothing, or no whole sequence, is left for the dense products without a mask; with gradients and without."""
    config, batch = gk.GRPOConfig.preset(preset), masked_batch(least=1)
    found = fused(batch, config)
    assert_close(found, reference(batch, config), TOLERANCE)
    scored = call(batch, config=config)
    torch.testing.assert_close(scored.loss, found.loss)
    for name, x in found.metrics.items():
        torch.testing.assert_close(scored.metrics[name], x)


def test_logps(backend, way):
    batch = masked_batch(1)
    leaves, mask = leaves_of(batch), batch.options["completion_mask"]
    options = dict(completion_mask=mask, sampling_mask=batch.options["sampling_mask"], backend=backend)
    found = gk.fused_logps(leaves[0], leaves[1], batch.ids, lm_head_bias=leaves[2], entropy=True, **options)
    with torch.no_grad():
        again = gk.fused_logps(leaves[0], leaves[1], batch.ids, lm_head_bias=leaves[2], **options)
    assert torch.equal(again[0], found[0])
    wide = leaves_of(batch.head_as(torch.float64))
    exact = true_logps(Batch(wide[0], wide[1], batch.ids, None, wide[2], batch.options), gk.GRPOConfig())
    exact = [torch.where(mask, x, 0) for x in exact]
    g = torch.randn(2, B, T, generator=torch.Generator().manual_seed(5))
    for mine, theirs in zip(found, exact, strict=True):
        assert relative(mine.detach(), theirs.detach()) <= TOLERANCE
    mine, theirs = (gradients_of((torch.stack([*x]) * g).sum(), y) for x, y in ((found, leaves), (exact, wide)))
    assert all(relative(mine[name], theirs[name]) <= TOLERANCE for name in LEAVES)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_loss_of_ones_own(backend, level, way):
    """The sum of ratios times advantages is minus the REINFORCE-like loss without clipping."""
    batch, config = masked_batch(2), gk.GRPOConfig(epsilon_low=1.0, epsilon_high=1e6)
    leaves = leaves_of(batch)

    def loss_fn(chunk: gk.PolicyChunk) -> Tensor:
        ratio = (chunk.logps - chunk.tokens(batch.options["old_logps"])).exp()
        return -(ratio * chunk.sequences(batch.advantages)).sum()

    loss = gk.fused_policy_loss(
        leaves[0], leaves[1], batch.ids, loss_fn, level=level, backend=backend, lm_head_bias=leaves[2],
        completion_mask=batch.options["completion_mask"], sampling_mask=batch.options["sampling_mask"],
    )  # fmt: skip
    exact = reference(batch.with_options(normalizer=1), config)
    assert relative(loss.detach(), exact.loss) <= TOLERANCE
    for name, x in gradients_of(loss, leaves).items():
        assert relative(x, exact.grads[name]) <= TOLERANCE, name


@pytest.mark.parametrize(("preset", "inplace"), [("grpo", False), ("grpo", True), ("gspo", True)])
def test_from_logits(backend, preset, inplace):
    batch, config = masked_batch(3), gk.GRPOConfig.preset(preset)
    given = dict(config=config, **batch.options)
    logits = (batch.hidden @ batch.weight.mT + batch.bias).requires_grad_()
    before = logits.detach().clone()
    out = gk.grpo_loss_from_logits(logits * 1.0, batch.ids, batch.advantages, inplace=inplace, backend=backend, **given)
    (found,) = torch.autograd.grad(out.loss, logits)
    with torch.no_grad():
        again = gk.grpo_loss_from_logits(logits, batch.ids, batch.advantages, backend=backend, **given)
    assert torch.equal(logits.detach(), before)
    torch.testing.assert_close(again.loss, out.loss)  # CUDA kernels sum in another order where no gradient follows
    leaf = before.double().requires_grad_()
    exact = reference_loss_from_logits(leaf, batch.ids, batch.advantages.double(), **given)
    assert relative(out.loss.detach(), exact.loss.detach()) <= TOLERANCE
    assert relative(found, torch.autograd.grad(exact.loss, leaf)[0]) <= TOLERANCE


def test_masks_of_the_sampled_id_of_everything_and_of_nothing(backend, way):
    """One id with probability 1: no gradient. The whole vocabulary, or count 0: no mask."""
    batch = masked_batch()
    batch.options.pop("sampling_mask")
    plain = fused(batch, backend=backend)
    alone = fused(batch, backend=backend, sampling_mask=SamplingMask.from_padded(batch.ids[..., None]))
    assert not alone.logps.any() and not alone.entropy.any() and not any(g.any() for g in alone.grads.values())
    everything = SamplingMask.from_padded(torch.arange(V).expand(B, T, V))
    nothing = SamplingMask(torch.empty(0, dtype=torch.int32), torch.zeros(B, T, dtype=torch.int32))
    for mask in (everything, nothing):
        assert_close(fused(batch, backend=backend, sampling_mask=mask), plain, TOLERANCE)


@pytest.mark.parametrize(
    ("dtype", "logits"), [(torch.bfloat16, None), (torch.float16, None), (torch.float16, torch.float16)]
)
def test_16_bit_inputs(backend, dtype, logits, way):
    """Errors no larger than those of eager PyTorch with -inf in 16-bit logits. float16 logits have scaled gradients."""
    batch = masked_batch(dtype=dtype)
    exact = reference(batch)
    eager, found = reference(batch, dtype=dtype), fused(batch, gk.GRPOConfig(logits_dtype=logits), backend)
    for name in LEAVES:
        assert (
            relative(found.grads[name], exact.grads[name])
            <= 1.5 * relative(eager.grads[name], exact.grads[name]) + 1e-6
        ), name
    assert_same_bits(found, fused(batch, gk.GRPOConfig(logits_dtype=logits), backend))


def test_metrics(way):
    batch = masked_batch()
    mask, out = batch.options["sampling_mask"], call(batch)
    scored = batch.options["completion_mask"] & (mask.counts > 0)
    rows = mask.ids.split(mask.counts.reshape(-1).tolist())
    held = torch.tensor([int(i) in row for i, row in zip(batch.ids.reshape(-1), rows, strict=True)])
    missing = (scored & ~held.view(B, T)).sum()
    assert out.metric_sums["sampling_mask/added"] == (missing, scored.sum())
    assert out.metrics["sampling_mask/added"] == missing / scored.sum()
    if way == "dense":
        logits = batch.hidden @ batch.weight.mT + batch.bias
        mass = (logits.softmax(-1) * kept_ids(mask, batch.ids, V)).sum(-1)[scored].mean()
        torch.testing.assert_close(out.metrics["sampling_mask/kept_mass"], mass, rtol=1e-4, atol=1e-5)


def part_of_a_batch(rank: int, group) -> None:
    """In each of two processes: the loss, its gradients and sums of metrics, added up, are those of the whole batch."""
    batch, rows = masked_batch(), slice(0, 2) if rank == 0 else slice(2, 3)
    leaves, config = leaves_of(batch), gk.GRPOConfig.preset("dapo")
    whole = dataclasses.replace(batch, hidden=leaves[0], weight=leaves[1], bias=leaves[2])
    part = dataclasses.replace(
        whole, hidden=leaves[0][rows], ids=batch.ids[rows], advantages=batch.advantages[rows],
        options={name: x[rows] for name, x in batch.options.items()},
    )  # fmt: skip
    tokens = batch.options["completion_mask"].sum()
    found, expected = (
        [out.loss.detach(), *gradients_of(out.loss, leaves).values()]
        + [torch.stack([*out.metric_sums[f"sampling_mask/{name}"]]) for name in ("added", "kept_mass")]
        for out in (call(part, config=config, num_items_in_batch=tokens), call(whole, config=config))
    )
    for share, total in zip(found, expected, strict=True):
        distributed.all_reduce(share)
        torch.testing.assert_close(share, total)


def test_two_ranks_add_up_to_one_process(tmp_path):
    run_ranks(part_of_a_batch, 2, tmp_path)


@pytest.mark.parametrize("strategy", ["linear", "anchored"])
def test_strategies_without_logits_leave_masks_to_rows(strategy, way, monkeypatch):
    """A mask needs the logits, so that tokens without one take the rows too; gathers need no strategy."""
    monkeypatch.setenv("GRPO_KERNELS_STRATEGY", strategy)
    batch = masked_batch(dtype=torch.bfloat16)
    assert strategy in get_backend("triton").strategies(batch.hidden, batch.weight)
    found = errors(fused(batch, backend="triton"), reference(batch))
    assert all(found[name] <= 0.02 for name in ("loss", "logps", *(f"grad {name}" for name in LEAVES))), found


def test_packed_batches_views_and_padding():
    """The same tokens packed; hidden states of a shifted completion; padding that holds anything."""
    batch = masked_batch()
    expected = fused(batch)
    torch.testing.assert_close(fused(packed(batch)).loss, expected.loss)
    shifted = torch.randn(B, T + 1, 16)
    shifted[:, :-1] = batch.hidden
    torch.testing.assert_close(call(dataclasses.replace(batch, hidden=shifted[:, :-1])).loss, expected.loss)
    padding = ~batch.options["completion_mask"]
    dirty = dataclasses.replace(
        batch, hidden=batch.hidden.masked_fill(padding[..., None], torch.nan), ids=batch.ids.masked_fill(padding, -100)
    )
    assert_close(fused(dirty), expected)


def test_under_torch_compile():
    batch = masked_batch()
    leaves, expected = leaves_of(batch), fused(batch)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(hidden: Tensor, weight: Tensor, bias: Tensor, mask: SamplingMask) -> tuple[Tensor, Tensor]:
        out = gk.fused_grpo_loss(
            hidden, weight, batch.ids, batch.advantages, lm_head_bias=bias, **batch.options | {"sampling_mask": mask}
        )
        return out.loss, out.metrics["sampling_mask/added"]

    loss, added = step(*leaves, batch.options["sampling_mask"])
    torch.testing.assert_close(loss, expected.loss)
    assert added == expected.metrics["sampling_mask/added"]
    for name, x in gradients_of(loss, leaves).items():
        torch.testing.assert_close(x, expected.grads[name])


def test_the_bias_that_it_removes():
    """Ratios of a policy to itself under top-p 0.8: 1 over the kept ids alone; the numbers of the library's README."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(1, 4096, 64, generator=g), 0.3 * torch.randn(2048, 64, generator=g)
    logits = (hidden @ weight.T)[0]
    p, order = logits.softmax(-1).sort(-1, descending=True)
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, p.cumsum(-1) - p < 0.8)
    truncated = logits.masked_fill(~kept, -torch.inf)
    ids = torch.multinomial(truncated.softmax(-1), 1, generator=g).T
    rollout_logps = truncated.log_softmax(-1).gather(1, ids.T).T
    mask = SamplingMask(kept.nonzero()[:, 1], kept.sum(1)[None])
    whole, over_kept = (
        (gk.fused_logps(hidden, weight, ids, sampling_mask=used)[0] - rollout_logps).exp() for used in (None, mask)
    )
    assert (over_kept - 1).abs().max() < 1e-3
    readme = (Path(__file__).parents[1] / "grpo_kernels" / "README.md").read_text(encoding="utf-8")
    outside = ((whole < 0.9) | (whole > 1.1)).float().mean()
    assert f"| over the whole vocabulary    |      {whole.mean():.3f} | {outside:.1%}  " in readme

"""Sampling masks: every loss function over the ids that truncated sampling kept, against logits of -inf in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import MASK_WAYS, call_counter, make_sampling_mask, set_mask_way
from test_vocab_parallel import run_ranks
from torch import Tensor, distributed

import grpo_kernels as gk
from grpo_kernels import SamplingMask
from grpo_kernels.backends import get_backend
from grpo_kernels.engine import kept
from grpo_kernels.reference import reference_grpo_loss, reference_logps

B, T, H, V = 3, 7, 16, 61
BACKENDS = ("torch", "cpu", "triton", "cuda")  # the last two interpreted and emulated


@pytest.fixture(params=MASK_WAYS)
def way(request, monkeypatch):
    """How the tokens with a mask get their logits."""
    set_mask_way(monkeypatch, request.param, V)
    return request.param


def make_mask(seed: int = 0, **counts: int) -> SamplingMask:
    """Some tokens without a mask, most without their sampled id."""
    return make_sampling_mask((B, T), V, seed, **counts)


def make_batch(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(B, T, H, generator=g),
        torch.randn(V, H, generator=g),
        torch.randn(V, generator=g),
    )
    ids = torch.randint(0, V, (B, T), generator=g)
    given = {"completion_ids": ids, "advantages": torch.tensor([1.1, 0.0, -0.7])}
    given["completion_mask"] = torch.arange(T) < torch.tensor([[T], [4], [6]])
    for name in ("old_logps", "ref_logps"):
        given[name] = -2 + 0.3 * torch.randn(B, T, generator=g)
    leaves = {"hidden": hidden, "lm_head_weight": weight, "lm_head_bias": bias}
    return given | {name: x.to(dtype).requires_grad_() for name, x in leaves.items()}


def gradients_of(loss: Tensor, batch: dict[str, Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [batch[name] for name in ("hidden", "lm_head_weight", "lm_head_bias")]))


def exact(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        k: x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for k, x in batch.items()
    }


CONFIGS = {
    "grpo": {"beta": 0.04},
    "dapo": {"entropy_coef": 0.01},
    "gspo": {"beta": 0.02},
    "gspo, chunks of one token": {"chunk_rows": 1},  # the dense way computes logits again
    "vespo": {},
    "rloo": {"logit_softcap": 5.0},
    "cispo": {"temperature": 0.7, "entropy_threshold": 0.5},
    "gmpo": {"surrogate": "gmpo", "score_inactive": False},
}


@pytest.mark.parametrize("preset", CONFIGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_and_its_gradients(backend, preset, way):
    name = "dapo" if preset == "gmpo" else preset.split(",")[0]
    config = gk.GRPOConfig.preset(name, **CONFIGS[preset])
    batch, mask = make_batch(), make_mask()
    out = gk.fused_grpo_loss(**batch, config=config, backend=backend, sampling_mask=mask)
    found = gradients_of(out.loss, batch)
    wanted = exact(batch)
    reference = reference_grpo_loss(**wanted, config=config, sampling_mask=mask)
    torch.testing.assert_close(out.loss.double(), reference.loss, rtol=2e-5, atol=1e-6)
    unmasked = batch["completion_mask"]
    if config.score_inactive:
        torch.testing.assert_close(out.logps[unmasked].double(), reference.logps[unmasked], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(out.entropy[unmasked].double(), reference.entropy[unmasked], rtol=2e-5, atol=2e-5)
    for mine, theirs in zip(found, gradients_of(reference.loss, wanted), strict=True):
        atol = max(2e-6, 1e-6 * theirs.abs().max().item())  # entries that are sums of larger numbers
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-4, atol=atol)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logps(backend, way):
    batch, mask = make_batch(), make_mask(1)
    leaves = {name: batch[name] for name in ("hidden", "lm_head_weight", "lm_head_bias")}
    ids, unmasked = batch["completion_ids"], batch["completion_mask"]
    given = leaves | {"completion_ids": ids, "completion_mask": unmasked, "sampling_mask": mask, "backend": backend}
    logps, entropy = gk.fused_logps(**given, entropy=True)
    with torch.no_grad():
        assert torch.equal(gk.fused_logps(**given)[0], logps)
    wanted = exact(batch)
    logits = wanted["hidden"] @ wanted["lm_head_weight"].mT + wanted["lm_head_bias"]
    expected = [torch.where(unmasked, x, 0) for x in reference_logps(logits, ids, sampling_mask=mask)]
    torch.testing.assert_close(logps.double(), expected[0], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=2e-5, atol=2e-5)
    g = torch.randn(2, B, T, generator=torch.Generator().manual_seed(5))
    found = gradients_of((logps * g[0] + entropy * g[1]).sum(), batch)
    theirs = gradients_of((expected[0] * g[0] + expected[1] * g[1]).sum(), wanted)
    for mine, other in zip(found, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_of_ones_own(backend, level, way):
    batch, mask = make_batch(), make_mask(2)
    leaves = {name: batch[name] for name in ("hidden", "lm_head_weight", "lm_head_bias")}
    given = {name: batch[name] for name in ("completion_ids", "completion_mask")}
    old = batch["old_logps"]

    def loss_fn(chunk: gk.PolicyChunk) -> Tensor:
        return ((chunk.logps - chunk.tokens(old)).exp() * chunk.sequences(batch["advantages"])).sum()

    loss = gk.fused_policy_loss(**leaves, **given, loss_fn=loss_fn, level=level, sampling_mask=mask, backend=backend)
    wanted = exact(batch)
    logits = wanted["hidden"] @ wanted["lm_head_weight"].mT + wanted["lm_head_bias"]
    logps, _ = reference_logps(logits, batch["completion_ids"], sampling_mask=mask)
    ratio = (logps - wanted["old_logps"]).exp() * wanted["advantages"][:, None]
    expected = torch.where(batch["completion_mask"], ratio, 0).sum()
    torch.testing.assert_close(loss.double(), expected, rtol=2e-5, atol=2e-5)
    for mine, other in zip(gradients_of(loss, batch), gradients_of(expected, wanted), strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("preset", ["grpo", "gspo"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_from_logits(backend, preset, inplace):
    batch, mask = make_batch(), make_mask(3)
    config = gk.GRPOConfig.preset(preset)
    given = {k: x for k, x in batch.items() if k not in ("hidden", "lm_head_weight", "lm_head_bias")}
    logits = (batch["hidden"] @ batch["lm_head_weight"].mT).detach().requires_grad_()
    kept_logits = logits.detach().clone()
    out = gk.grpo_loss_from_logits(
        logits * 1.0, **given, config=config, sampling_mask=mask, inplace=inplace, backend=backend
    )
    (found,) = torch.autograd.grad(out.loss, logits)
    assert torch.equal(logits.detach(), kept_logits)
    with torch.no_grad():
        again = gk.grpo_loss_from_logits(logits, **given, config=config, sampling_mask=mask, backend=backend)
    assert torch.equal(logits.detach(), kept_logits) and torch.equal(again.loss, out.loss)
    from grpo_kernels.reference import reference_loss_from_logits

    leaf = kept_logits.double().requires_grad_()
    wanted = {k: x.double() if x.is_floating_point() else x for k, x in given.items()}
    reference = reference_loss_from_logits(leaf, **wanted, config=config, sampling_mask=mask)
    torch.testing.assert_close(out.loss.double(), reference.loss, rtol=2e-5, atol=1e-6)
    (theirs,) = torch.autograd.grad(reference.loss, leaf)
    torch.testing.assert_close(found.double(), theirs, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_of_the_sampled_id_alone(backend):
    """One id with probability 1: log-probability 0, entropy 0, no gradient."""
    batch = make_batch()
    mask = SamplingMask.from_padded(batch["completion_ids"][..., None])
    out = gk.fused_grpo_loss(**batch, sampling_mask=mask, backend=backend)
    assert not out.logps.any() and not out.entropy.any()
    assert not any(g.any() for g in gradients_of(out.loss, batch))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_of_everything_and_one_of_nothing_are_no_mask(backend, way):
    batch = make_batch()
    plain = gk.fused_grpo_loss(**batch, backend=backend)
    wanted = gradients_of(plain.loss, batch)
    everything = SamplingMask.from_padded(torch.arange(V).expand(B, T, V))
    nothing = SamplingMask(torch.empty(0, dtype=torch.int32), torch.zeros(B, T, dtype=torch.int32))
    for mask in (everything, nothing):
        out = gk.fused_grpo_loss(**batch, sampling_mask=mask, backend=backend)
        torch.testing.assert_close(out.loss, plain.loss, rtol=1e-5, atol=1e-6)
        for mine, other in zip(gradients_of(out.loss, batch), wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "logits"), [(torch.bfloat16, None), (torch.float16, None), (torch.float16, torch.float16)]
)
def test_16_bit_inputs(backend, dtype, logits, way):
    """Errors no larger than those of eager PyTorch with -inf in 16-bit logits. float16 logits have scaled gradients."""
    batch, mask = make_batch(dtype), make_mask()
    wanted = exact(batch)
    reference = reference_grpo_loss(**wanted, sampling_mask=mask)
    theirs = gradients_of(reference.loss, wanted)
    eager = gradients_of(reference_grpo_loss(**batch, sampling_mask=mask).loss, batch)
    config = gk.GRPOConfig(logits_dtype=logits)
    out = gk.fused_grpo_loss(**batch, config=config, sampling_mask=mask, backend=backend)
    for mine, plain, true in zip(gradients_of(out.loss, batch), eager, theirs, strict=True):
        assert (mine.double() - true).norm() <= 1.5 * (plain.double() - true).norm() + 1e-6


def test_metrics(way):
    batch, mask = make_batch(), make_mask()
    out = gk.fused_grpo_loss(**batch, sampling_mask=mask)
    scored = batch["completion_mask"] & (mask.counts > 0)
    rows = mask.ids.split(mask.counts.reshape(-1).tolist())
    held = torch.tensor([int(i) in row for i, row in zip(batch["completion_ids"].reshape(-1), rows, strict=True)])
    missing = (scored & ~held.view(B, T)).sum()
    total, count = out.metric_sums["sampling_mask/added"]
    assert (total, count) == (missing, scored.sum())
    assert out.metrics["sampling_mask/added"] == missing / scored.sum()
    if way == "dense":
        logits = batch["hidden"] @ batch["lm_head_weight"].mT + batch["lm_head_bias"]
        from grpo_kernels.reference import kept_ids

        mass = (logits.softmax(-1) * kept_ids(mask, batch["completion_ids"], V)).sum(-1)[scored].mean()
        torch.testing.assert_close(out.metrics["sampling_mask/kept_mass"], mass, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("preset", ["grpo", "gspo", "vespo"])
def test_tokens_that_all_have_a_mask(preset, way):
    """Nothing, or no whole sequence, is left for the dense products without a mask; with gradients and without."""
    config, batch, mask = gk.GRPOConfig.preset(preset), make_batch(), make_mask(least=1)
    out = gk.fused_grpo_loss(**batch, config=config, sampling_mask=mask)
    wanted = exact(batch)
    reference = reference_grpo_loss(**wanted, config=config, sampling_mask=mask)
    torch.testing.assert_close(out.loss.double(), reference.loss, rtol=2e-5, atol=1e-6)
    for mine, theirs in zip(gradients_of(out.loss, batch), gradients_of(reference.loss, wanted), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-4, atol=2e-6)
    with torch.no_grad():
        scored = gk.fused_grpo_loss(**batch, config=config, sampling_mask=mask)
    torch.testing.assert_close(scored.loss, out.loss)
    for name, x in out.metrics.items():
        torch.testing.assert_close(scored.metrics[name], x)


def test_kept_ids_marked_by_slices_and_by_indices():
    """The second is that of a GPU."""
    mask = make_sampling_mask((9,), V)
    tokens = kept.TokenMask(mask.ids, mask.counts, mask.counts.cumsum(0) - mask.counts)
    token, here = torch.tensor([7, 2, 4, 5]), torch.tensor([5, 0, 1, 3])
    expected = torch.zeros(6, V, dtype=torch.bool)
    for row, t in zip(here.tolist(), token.tolist(), strict=True):
        expected[row, mask.ids.split(mask.counts.tolist())[t].long()] = True
    for mark in (kept.mark_by_slices, kept.mark_by_indices):
        found = torch.zeros_like(expected)
        outside = mark(found, here, tokens, token)
        assert torch.equal(found, expected) and (outside is None or not outside.any())


def part_of_a_batch(rank: int, group) -> None:
    """In each of two processes: the loss, its gradients and sums of metrics, added up, are those of the whole batch."""
    batch, mask, mine = make_batch(), make_mask(), slice(0, 2) if rank == 0 else slice(2, 3)
    config, tokens = gk.GRPOConfig.preset("dapo"), batch["completion_mask"].sum()
    per_token = {name: x[mine] for name, x in batch.items() if x.shape[0] == B}
    own = per_token["completion_mask"].sum()
    distributed.all_reduce(own)
    assert own == tokens
    whole = gk.fused_grpo_loss(**batch, config=config, sampling_mask=mask)
    part = gk.fused_grpo_loss(**(batch | per_token), config=config, sampling_mask=mask[mine], num_items_in_batch=own)
    found = [part.loss.detach(), *gradients_of(part.loss, batch)]
    found += [torch.stack([*part.metric_sums[name]]) for name in ("sampling_mask/added", "sampling_mask/kept_mass")]
    expected = [whole.loss.detach(), *gradients_of(whole.loss, batch)]
    expected += [torch.stack([*whole.metric_sums[name]]) for name in ("sampling_mask/added", "sampling_mask/kept_mass")]
    for mine_, theirs in zip(found, expected, strict=True):
        distributed.all_reduce(mine_)
        torch.testing.assert_close(mine_, theirs)


def test_two_ranks_add_up_to_one_process(tmp_path):
    run_ranks(part_of_a_batch, 2, tmp_path)


@pytest.mark.parametrize("strategy", ["linear", "anchored"])
def test_strategies_without_logits_leave_masks_to_rows(strategy, way, monkeypatch):
    """A mask needs the logits, so that tokens without one take the rows too; gathers need no strategy."""
    monkeypatch.setenv("GRPO_KERNELS_STRATEGY", strategy)
    batch, mask = make_batch(torch.bfloat16), make_mask()
    assert strategy in get_backend("triton").strategies(batch["hidden"], batch["lm_head_weight"])
    out = gk.fused_grpo_loss(**batch, sampling_mask=mask, backend="triton")
    wanted = exact(batch)
    reference = reference_grpo_loss(**wanted, sampling_mask=mask)
    torch.testing.assert_close(out.loss.double(), reference.loss, rtol=1e-2, atol=1e-3)
    assert (out.logps - reference.logps)[batch["completion_mask"]].abs().max() < 0.1
    for mine, theirs in zip(gradients_of(out.loss, batch), gradients_of(reference.loss, wanted), strict=True):
        assert (mine.double() - theirs).norm() <= 0.02 * theirs.norm()


def test_nothing_is_computed_twice(monkeypatch):
    """Statistics over the whole vocabulary not where logits are computed again, logits of kept ids never again.

    17 tokens are scored, 3 at a time.
    """
    calls = []
    for name in ("statistics", "kept_logits"):
        call_counter(monkeypatch, get_backend("torch"), name, calls, lambda *_, name=name: name)
    batch, mask, config = make_batch(), make_mask(least=1, most=8), gk.GRPOConfig.preset("gspo", chunk_rows=3)
    for way, expected in (("dense", ["statistics"] * 2 * 6), ("gathers", ["kept_logits", "statistics"])):
        set_mask_way(monkeypatch, way, V)
        calls.clear()
        gk.fused_grpo_loss(**batch, config=config, sampling_mask=mask, backend="torch")
        assert calls == expected


def test_a_packed_batch_and_an_lm_head_view():
    """The same tokens packed, hidden states with strides of their own, as those of a shifted completion."""
    batch, mask = make_batch(), make_mask()
    lengths = batch["completion_mask"].sum(1).tolist()
    out = gk.fused_grpo_loss(**batch, sampling_mask=mask)
    unmasked = batch["completion_mask"].reshape(-1)
    rows = mask.ids.split(mask.counts.reshape(-1).tolist())
    packed = SamplingMask.from_lists([row.tolist() for row, used in zip(rows, unmasked, strict=True) if used])
    given = {k: batch[k].reshape(-1)[unmasked] for k in ("completion_ids", "old_logps", "ref_logps")}
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    same = gk.fused_grpo_loss(
        batch["hidden"].reshape(-1, H)[unmasked], batch["lm_head_weight"], **given, advantages=batch["advantages"],
        lm_head_bias=batch["lm_head_bias"], cu_seqlens=offsets, sampling_mask=packed,
    )  # fmt: skip
    torch.testing.assert_close(same.loss, out.loss)
    wide = torch.randn(B, T + 1, H)
    wide[:, :-1] = batch["hidden"].detach()
    shifted = gk.fused_grpo_loss(**(batch | {"hidden": wide.requires_grad_()[:, :-1]}), sampling_mask=mask)
    torch.testing.assert_close(shifted.loss, out.loss)


def test_repeats_have_the_same_bits(way):
    batch, mask = make_batch(), make_mask()
    found = []
    for _ in range(2):
        out = gk.fused_grpo_loss(**batch, sampling_mask=mask)
        found.append([out.loss, *gradients_of(out.loss, batch)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("most", [4, 40])
def test_under_torch_compile(most):
    batch, mask = make_batch(), make_mask(most=most)
    eager = gk.fused_grpo_loss(**batch, sampling_mask=mask)

    @torch.compile(fullgraph=True)
    def step(given: dict[str, Tensor], mask: SamplingMask) -> tuple[Tensor, Tensor]:
        out = gk.fused_grpo_loss(**given, sampling_mask=mask)
        return out.loss, out.metrics["sampling_mask/added"]

    loss, added = step(batch, mask)
    torch.testing.assert_close(loss, eager.loss)
    assert added == eager.metrics["sampling_mask/added"]
    for mine, other in zip(gradients_of(loss, batch), gradients_of(eager.loss, batch), strict=True):
        torch.testing.assert_close(mine, other)


def test_autocast():
    batch, mask = make_batch(), make_mask()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = gk.fused_grpo_loss(**batch, sampling_mask=mask)
    plain = gk.fused_grpo_loss(**batch, sampling_mask=mask)
    torch.testing.assert_close(out.loss, plain.loss, rtol=0.05, atol=0.02)
    found = gradients_of(out.loss, batch)
    assert [g.dtype for g in found] == [torch.float32] * 3


def test_padding_may_hold_anything():
    batch, mask = make_batch(), make_mask()
    wanted = gradients_of(gk.fused_grpo_loss(**batch, sampling_mask=mask).loss, batch)
    padding = ~batch["completion_mask"]
    hidden = batch["hidden"].detach().masked_fill(padding[..., None], torch.nan).requires_grad_()
    dirty = batch | {"hidden": hidden, "completion_ids": batch["completion_ids"].masked_fill(padding, -100)}
    for mine, other in zip(
        gradients_of(gk.fused_grpo_loss(**dirty, sampling_mask=mask).loss, dirty), wanted, strict=True
    ):
        torch.testing.assert_close(mine, other)


def test_the_bias_that_it_removes(monkeypatch):
    """The README's table is what bench/sampling_bias.py prints; and the ratios under the mask are 1."""
    root = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(str(root / "bench"))
    import sampling_bias

    assert sampling_bias.table(0.8, seed=0) in (root / "grpo_kernels" / "README.md").read_text(encoding="utf-8")
    assert (sampling_bias.ratios(0.8, seed=0)["over the kept ids"] - 1).abs().max() < 1e-3

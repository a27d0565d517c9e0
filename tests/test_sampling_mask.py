"""Sampling masks: every loss function over the ids that truncated sampling kept, against logits of -inf in float64."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from helpers import (
    LEAVES,
    LOSSES,
    MASK_PATHS,
    UNCLIPPED,
    Batch,
    assert_close,
    assert_same_bits,
    assert_within,
    call,
    errors,
    fused,
    gradients_of,
    leaves,
    loss_by,
    make_batch,
    make_sampling_mask,
    off_policy,
    packed,
    reference,
    relative,
    use_mask_path,
    whole_chunk,
    with_operations,
)
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import SamplingMask
from grpo_kernels.checks import arguments as validate
from grpo_kernels.head import mask_paths
from grpo_kernels.kernels import get_backend
from grpo_kernels.reference import allowed_ids

pytestmark = pytest.mark.each_value
B, T, V = 3, 7, 61
TOLERANCE = 2e-5


@pytest.fixture(params=MASK_PATHS)
def mask_path(request, monkeypatch):
    """How the tokens with a mask get their logits."""
    use_mask_path(monkeypatch, request.param, V)
    return request.param


def masked_batch(seed: int = 0, *, least: int = 0, most: int = 40, dtype: torch.dtype = torch.float32) -> Batch:
    """Some tokens without a mask, most without their sampled id; a sequence without an advantage; padding."""
    batch = make_batch(seed, sequences=B, length=T, width=16, vocab=V, bias=True).head_as(dtype)
    batch.advantages = torch.tensor([1.1, 0.0, -0.7])
    padding_mask = torch.arange(T) < torch.tensor([[T], [4], [6]])
    mask = make_sampling_mask((B, T), V, seed, least=least, most=most)
    return off_policy(batch.with_options(sampling_mask=mask, completion_mask=padding_mask))


def test_only_tokens_with_a_gradient_are_scored(backend, mask_path):
    """test_variants.py has masks with every other option."""
    config, batch = gk.GRPOConfig(surrogate="gmpo", score_inactive=False), masked_batch()
    found, exact = fused(batch, config, backend), reference(batch, config)
    for x in (found, exact):  # fewer log-probabilities than the reference has, and metrics
        x.logps, x.entropy, x.metrics = x.logps[:1], x.entropy[:1], {}
    assert_close(found, exact, TOLERANCE)


@pytest.mark.parametrize("preset", ["grpo", "gspo"])
def test_tokens_that_all_have_a_mask(preset, mask_path):
    """Nothing, or no whole sequence, is left for the dense products without a mask; with gradients and without."""
    config, batch = gk.GRPOConfig.preset(preset), masked_batch(least=1)
    found = fused(batch, config)
    assert_close(found, reference(batch, config), TOLERANCE)
    scored = call(batch, config)
    torch.testing.assert_close(scored.loss, found.loss)
    for name, x in found.metrics.items():
        torch.testing.assert_close(scored.metrics[name], x, equal_nan=name == "sampling_mask/kept_mass")


@pytest.mark.parametrize(
    ("function", "level"), [*((function, "token") for function in LOSSES[1:]), (LOSSES[-1], "sequence")]
)
def test_other_functions(function, level, backend, mask_path):
    """With an entropy term; fused_logps without gradients has the same bits."""
    batch, given = leaves(masked_batch(2)), dict(entropy_coef=0.1)
    if level == "sequence":
        given["importance_sampling_level"] = level
    loss = loss_by(function, batch, backend, **given)
    with torch.no_grad():
        again = loss_by(function, batch, backend, **given)
    torch.testing.assert_close(again, loss, **(dict(rtol=0, atol=0) if function == "fused_logps" else {}))
    exact = reference(batch.with_options(normalizer=1, entropy_normalizer=1), dataclasses.replace(UNCLIPPED, **given))
    assert relative(loss.detach(), exact.loss) <= TOLERANCE
    for name, x in zip(LEAVES, gradients_of(loss, batch), strict=True):
        assert relative(x, exact.grads[name]) <= TOLERANCE, name


def test_masks_of_the_sampled_id_of_everything_and_of_nothing(backend, mask_path):
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
def test_16_bit_inputs(backend, dtype, logits, mask_path):
    """Errors no larger than those of eager PyTorch with -inf in 16-bit logits. float16 logits have scaled gradients."""
    batch = masked_batch(dtype=dtype)
    exact = reference(batch)
    eager, found = reference(batch, dtype=dtype), fused(batch, gk.GRPOConfig(logits_dtype=logits), backend)
    assert_within(errors(found, exact), errors(eager, exact), 1e-6, 1.5, of="grad")
    assert_same_bits(found, fused(batch, gk.GRPOConfig(logits_dtype=logits), backend))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dweight_of_few_kept_ids_is_written_once(backend, dtype, monkeypatch):
    """In the type of the weight, and handed out as it is."""
    use_mask_path(monkeypatch, "gathers", V)
    batch, written, write = leaves(masked_batch(least=1, dtype=dtype)), [], get_backend(backend).gathered_dweight

    def gathered_dweight(dlogits, hidden, pairs, dweight, *, add):
        written.append((dweight, add))
        write(dlogits, hidden, pairs, dweight, add=add)

    with_operations(monkeypatch, backend, gathered_dweight=gathered_dweight)
    call(batch, backend=backend).loss.backward()
    ((dweight, add),) = written
    assert not add and dweight.dtype == dtype and batch.weight.grad.data_ptr() == dweight.data_ptr()


def test_metrics(mask_path):
    batch = masked_batch()
    mask, out = batch.options["sampling_mask"], call(batch)
    scored = batch.options["completion_mask"] & (mask.counts > 0)
    rows = mask.ids.split(mask.counts.reshape(-1).tolist())
    held = torch.tensor([int(i) in row for i, row in zip(batch.ids.reshape(-1), rows, strict=True)])
    missing = (scored & ~held.view(B, T)).sum()
    assert out.metric_sums["sampling_mask/added"] == (missing, scored.sum())
    assert out.metrics["sampling_mask/added"] == missing / scored.sum()
    logits = batch.hidden @ batch.weight.mT + batch.bias
    mass = (logits.softmax(-1) * allowed_ids(mask, batch.ids, V)).sum(-1)[scored].mean()
    if mask_path != "dense":  # a mean over some of the tokens would be another number
        mass = torch.full_like(mass, torch.nan)
    found = out.metrics["sampling_mask/kept_mass"]
    torch.testing.assert_close(found, mass, rtol=1e-4, atol=1e-5, equal_nan=True)
    given = {name: x for name, x in batch.options.items() if name != "sampling_mask"}
    of_logits = gk.grpo_loss_from_logits(logits, batch.ids, batch.advantages, sampling_mask=mask, **given)
    assert of_logits.metrics["sampling_mask/kept_mass"].isfinite()


def test_the_bias_that_it_removes():
    """Ratios of a policy to itself under top-p 0.8: 1 over the kept ids; the numbers of the library's README."""
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


# --- SamplingMask itself: how it is made, sliced and moved, and what it refuses ---------------------------------------


def integers(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def lists_of(mask: SamplingMask) -> list[list[int]]:
    return [x.tolist() for x in mask.ids.split(mask.counts.reshape(-1).tolist())]


def test_from_lists_and_from_padded():
    mask = SamplingMask.from_lists([[[3, 1], [2]], [[5]]])
    assert mask.shape == (2, 2) and lists_of(mask) == [[1, 3], [2], [5], []]
    assert SamplingMask.from_lists([[[3, 1], [2]], [[5]]], length=3).shape == (2, 3)
    flat = SamplingMask.from_lists([[3, 1], [], [2]])
    assert flat.shape == (3,) and lists_of(flat) == [[1, 3], [], [2]]
    padded = torch.tensor([[[3, -1, 1], [-1, -1, -1]], [[4, 5, 6], [0, -1, -1]]])
    mask = SamplingMask.from_padded(padded)
    assert mask.shape == (2, 2) and lists_of(mask) == [[1, 3], [], [4, 5, 6], [0]]


BOOLS = [True, False, True]


@pytest.mark.parametrize("rows", [slice(1, 3), slice(None, None, -1), [2, 0], [], BOOLS, torch.tensor(BOOLS)])
def test_slices_are_those_of_the_lists(rows):
    lists = [[[3, 1], [2]], [[5], []], [[0, 4, 6], [7]]]
    mask = SamplingMask.from_lists(lists)
    chosen = range(3)[rows] if isinstance(rows, slice) else [0, 2] if len(rows) == 3 else rows
    wanted = [sorted(x) for i in chosen for x in lists[i]]
    assert lists_of(mask[rows]) == wanted and mask[rows].shape == (len(chosen), 2)


def test_it_moves():
    mask = SamplingMask.from_lists([[3, 1]]).to("cpu")
    assert lists_of(mask) == [[1, 3]] and mask.to(torch.device("meta")).ids.device.type == "meta"


MASK, LISTS, PADDED = SamplingMask, SamplingMask.from_lists, SamplingMask.from_padded
WRONG = [
    (lambda: MASK(torch.ones(2), integers(2)), TypeError, r"SamplingMask\.ids is torch\.float32"),
    (lambda: MASK(integers(1, 2).view(1, 2), integers(2)), ValueError, r"ids has shape \(1, 2\)"),
    (lambda: MASK(integers(1), integers(1).view(1, 1, 1)), ValueError, r"counts has shape \(1, 1, 1\)"),
    (lambda: MASK(integers(1), integers(1, 1)), ValueError, "counts add up to 2; expected 1"),
    (lambda: MASK(integers(1), integers(2, -1)), ValueError, "counts holds -1"),
    (lambda: MASK(integers(-3, 1), integers(2)), ValueError, "ids holds -3"),
    (lambda: MASK(integers(1, 4, 4), integers(1, 2).view(1, 2)), ValueError, r"token \[0, 1\] hold 4 after 4"),
    (lambda: LISTS([[[1], [2]]], length=1), ValueError, "length=1; expected at least 2"),
    (lambda: LISTS([[[1]]], length=1.5), TypeError, "length is a float; expected"),
    (lambda: LISTS([[1.5]]), TypeError, r"kept holds 1\.5; expected integers"),
    (lambda: LISTS([[True]]), TypeError, r"kept holds True; expected integers"),
    (lambda: LISTS(None), TypeError, r"kept is or holds None; expected one list of ids"),
    (lambda: LISTS(["12"]), TypeError, r"kept is or holds '12'; expected one list of ids"),
    (lambda: LISTS([[1, [2]]]), TypeError, "ids beside lists of ids"),
    (lambda: LISTS([[2**31]]), ValueError, r"kept holds 2147483648; .* below 2\^31"),
    (lambda: LISTS([[-1]]), ValueError, r"kept holds -1; expected ids >= 0"),
    (lambda: PADDED(integers(1, 2).view(1, 2), None), TypeError, "padding is a NoneType"),
    (lambda: PADDED(torch.ones(2, 3)), ValueError, r"kept is torch\.float32"),
]


def test_what_it_refuses():
    for make, error, message in WRONG:
        with pytest.raises(error, match=message):
            make()


SMALL = make_batch(sequences=2, length=3, width=4, vocab=11)


def masked_call(function: str, mask: object, batch: Batch = SMALL) -> Tensor:
    batch = batch.with_options(sampling_mask=mask)
    return reference(batch).loss if function == "reference" else loss_by(function, batch)


FUNCTIONS = ("fused_grpo_loss", "fused_logps", "fused_policy_loss", "grpo_loss_from_logits")
FITS = [[[1], [2], [10]]] * 2


@pytest.mark.parametrize("function", [*FUNCTIONS, "reference"])
def test_what_a_loss_refuses(function):
    fits = SamplingMask.from_lists(FITS)
    assert masked_call(function, fits).isfinite()
    wrong = [fits[:1], SamplingMask(fits.ids, fits.counts.T), SamplingMask(fits.ids, fits.counts.flatten())]
    for mask in wrong:
        message = f"sampling_mask is of tokens {tuple(mask.shape)}; expected (2, 3)"
        with pytest.raises(ValueError, match=re.escape(message)):
            masked_call(function, mask)
    with pytest.raises(ValueError, match=re.escape("sampling_mask is of tokens (2, 3); expected (6,)")):
        masked_call(function, fits, packed(SMALL))
    with pytest.raises(ValueError, match=r"holds( id)? 11; expected ids < 11"):
        masked_call(function, SamplingMask.from_lists([[[1], [2], [11]]] * 2))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_a_fused_loss_refuses_besides(function):
    fits = SamplingMask.from_lists(FITS)
    with pytest.raises(TypeError, match=r"sampling_mask is a Tensor; expected a grpo_kernels\.SamplingMask"):
        masked_call(function, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"sampling_mask is on meta; expected cpu like the other inputs"):
        masked_call(function, fits.to("meta"))
    # What was put into the tensors after they were looked at.
    mask = SamplingMask.from_lists([[[1, 5], [2], [10]]] * 2)
    mask.ids[0] = 6
    with pytest.raises(ValueError, match=re.escape("SamplingMask.ids of token [0, 0] hold 5 after 6")):
        masked_call(function, mask)
    mask.ids[0], mask.counts[0, 0] = 1, 3
    with pytest.raises(ValueError, match=r"SamplingMask\.counts add up to 9; expected 8"):
        masked_call(function, mask)
    with pytest.raises(ValueError, match=r"sampling_mask was given with static_shapes=True"):
        call(SMALL, gk.GRPOConfig(static_shapes=True), sampling_mask=fits)


@pytest.mark.parametrize("mask_path", MASK_PATHS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_ids_outside_of_the_vocabulary_where_nobody_looks(function, mask_path, monkeypatch):
    """As on a GPU without GRPO_KERNELS_DEBUG: NaN, and no memory outside of the tensors is touched."""
    use_mask_path(monkeypatch, mask_path, 11)
    for module in (validate, mask_paths):
        monkeypatch.setattr(module, "checks_values", lambda device: False)
    batch = make_batch(sequences=1, length=3, width=4, vocab=11)
    for wrong in (11, 10**6, 2**31 - 1, -1, -(2**31)):
        mask = SamplingMask(integers(1, 2, *sorted([3, wrong])), torch.tensor([[1, 1, 2]]))
        assert masked_call(function, mask, batch).isnan()
        if function == "fused_logps":
            assert whole_chunk(batch.with_options(sampling_mask=mask)).logps.isnan().tolist() == [False, False, True]

"""sampling_support: the ids that truncated sampling kept, against the rules of samplers written anew in float64."""

from __future__ import annotations

import re

import pytest
import torch
from helpers import make_batch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import grpo_kernels as gk
from grpo_kernels.head import truncation
from grpo_kernels.head.truncation import Truncation, truncate

RULES = {
    "top_k": dict(top_k=7),
    "top_p": dict(top_p=0.9),
    "min_p": dict(min_p=0.05),
    "top_k, top_p": dict(top_k=20, top_p=0.8),
    "all": dict(top_k=30, top_p=0.95, min_p=0.02),
}


def sampler(z: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, *, min_p_last: bool = False):
    """(C, V) bool: what a sampler leaves of logits (C, V), by a sort of each row in float64; (C,) bool: a row where
    rounding decides, as the mass at the end of top_p is within 1e-6 of it, or a probability within 1e-6 of min_p's."""
    z, close = z.double(), torch.zeros(len(z), dtype=torch.bool)

    def drop_unlikely(z: Tensor) -> Tensor:
        nonlocal close
        p = z.softmax(1)
        least = min_p * p.amax(1, keepdim=True)
        close = close | ((p / least).log().abs() < 1e-6).any(1)
        return z.masked_fill(p < least, -torch.inf)

    if min_p and not min_p_last:
        z = drop_unlikely(z)
    if 0 < top_k < z.shape[1]:
        z = z.masked_fill(z < z.sort(1).values[:, -top_k, None], -torch.inf)
    if top_p < 1:
        ascending, ids = z.sort(dim=1, stable=True)
        mass = ascending.softmax(1).cumsum(1)
        close = close | ((mass - (1 - top_p)).abs() < 1e-6).any(1)
        dropped = mass <= 1 - top_p
        dropped[:, -1] = False
        z = z.masked_fill(torch.zeros_like(dropped).scatter(1, ids, dropped), -torch.inf)
    if min_p and min_p_last:
        z = drop_unlikely(z)
    return z > -torch.inf, close


def random_logits(rows: int, vocab: int, g: torch.Generator) -> Tensor:
    """Rows from nearly uniform to one that decides; of half of them many logits are equal, and some are -inf."""
    z = torch.randn(rows, vocab, generator=g) * (torch.rand(rows, 1, generator=g) * 6 + 0.1)
    z[::2] = (z[::2] * 3).round() / 3
    z[::5, ::7] = -torch.inf
    return z


@pytest.mark.parametrize("min_p_last", [False, True])
@pytest.mark.parametrize("likeliest", [2, 256])  # whether the end of top_p is looked for again and again
def test_the_rules_on_10_000_rows_with_equal_logits(likeliest, min_p_last, monkeypatch):
    monkeypatch.setattr(truncation, "LIKELIEST", likeliest)
    g, decided = torch.Generator().manual_seed(0), 0
    for i in range(50):
        z = random_logits(200, 40 + 5 * i, g)
        rule = dict(
            top_k=(0, 3, 20, 500)[i % 4], top_p=(1.0, 0.9, 0.5, 0.999, 0.05)[i % 5], min_p=(0.0, 0.02, 0.3)[i % 3]
        )
        expected, close = sampler(z, **rule, min_p_last=min_p_last)
        found = truncate(z, Truncation(**rule, min_p_last=min_p_last))
        assert torch.equal(found[~close], expected[~close]), rule
        decided += int((~close).sum())
    assert decided > 9_500


def test_by_hand():
    z = torch.tensor([[0.4, 0.3, 0.1, 0.1, 0.1]]).log()

    def kept(**rule) -> list[int]:
        return truncate(z, Truncation(**rule)).nonzero()[:, 1].tolist()

    assert kept(top_k=1) == [0] and kept(top_k=2) == [0, 1]
    assert kept(top_k=3) == [0, 1, 2, 3, 4]  # equal ones stay together
    assert kept(top_p=0.4 - 1e-6) == [0] and kept(top_p=0.4 + 1e-6) == kept(top_p=0.69) == [0, 1]  # reaches it: kept
    assert kept(top_p=0.75) == [0, 1, 4] and kept(top_p=0.85) == [0, 1, 3, 4]  # the highest of equal ones
    assert kept(min_p=0.74) == [0, 1] and kept(min_p=0.24) == [0, 1, 2, 3, 4] and kept(min_p=1.0) == [0]
    assert kept(top_k=2, top_p=0.55) == [0]  # of what is left, 4/7 and 3/7
    assert kept(top_p=0.72, min_p=0.5) == [0, 1] and kept(top_p=0.56, min_p=0.5) == [0]
    assert kept(top_p=0.56, min_p=0.5, min_p_last=True) == [0, 1]  # 0.4 is less than 0.56 of all


def test_rows_of_nan_keep_nothing_and_float64_is_taken():
    """Nor do rows of -inf alone; ids of -inf are not kept for rounding of a top_p that is nearly 1."""
    z = torch.randn(4, 50, dtype=torch.float64)
    z[1], z[3], z[0, 7:] = torch.nan, -torch.inf, -torch.inf
    for rule in (Truncation(5), Truncation(5, 0.5), Truncation(0, 0.5), Truncation(0, 1.0, 0.5)):
        for last in (False, True):
            found = truncate(z, rule._replace(min_p_last=last))
            assert found.sum(1).gt(0).tolist() == [True, False, True, False]
    z = torch.randn(400, 300, generator=torch.Generator().manual_seed(0))
    for top_p in (1 - 1e-7, 1 - 1e-9, 1 - 1e-12):
        assert truncate(z, Truncation(5, top_p)).sum(1).max() == 5


# --- from hidden states -----------------------------------------------------------------------------------------------

TRANSFORM = dict(temperature=0.7, logit_scale=1.3, logit_softcap=4.0)


def exact_logits(batch, dtype: torch.dtype) -> Tensor:
    """(B, T, V) float64 of inputs as they are in this type."""
    hidden, weight, bias = (x.to(dtype).double() for x in (batch.hidden, batch.weight, batch.bias))
    z = 1.3 * (hidden @ weight.T + bias)
    return 4.0 * (z / 4.0).tanh() / 0.7


def dense(mask: gk.SamplingMask, vocab: int) -> Tensor:
    """(..., V) bool of the kept ids."""
    found = torch.zeros(mask.counts.numel(), vocab, dtype=torch.bool)
    token = torch.arange(len(found)).repeat_interleave(mask.counts.flatten().long())
    found[token, mask.ids.long()] = True
    return found.view(*mask.shape, vocab)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("rule", RULES)
def test_the_ids_and_their_mass(rule, dtype, monkeypatch):
    """In chunks of a few rows; the sampled id is added and counted; padding has no ids, and may hold anything."""
    monkeypatch.setattr("grpo_kernels.head.lm_head.rows_of_chunk", lambda *args, **kwargs: 10)
    batch = make_batch(1, sequences=5, length=9, width=24, vocab=211, bias=True)
    mask = torch.arange(9) < torch.tensor([[9], [0], [4], [1], [9]])
    hidden, weight, bias = (x.detach().to(dtype) for x in (batch.hidden, batch.weight, batch.bias))
    hidden = torch.where(mask[..., None], hidden, torch.nan)
    ids = torch.where(mask, batch.ids, 3)
    logits = torch.promote_types(dtype, torch.float32)  # what the exact ones are compared with
    given = dict(lm_head_bias=bias, completion_mask=mask, logits_dtype=logits, **TRANSFORM)
    found = gk.sampling_support(hidden, weight, ids, **RULES[rule], **given)
    z = exact_logits(batch, dtype)
    kept, close = (x.view(5, 9, *x.shape[1:]) for x in sampler(z.flatten(0, 1), **RULES[rule]))
    sampled = torch.zeros_like(kept).scatter(-1, ids[..., None], True)
    sure = mask & ~close
    assert torch.equal(dense(found, 211)[sure], (kept | sampled)[sure]) and sure.sum() > 20
    assert torch.equal(found.added[sure], ~kept.gather(-1, ids[..., None])[..., 0][sure]) and found.added.any()
    assert not found.counts[~mask].any() and not found.mass[~mask].any() and not found.added[~mask].any()
    mass = torch.where(kept | sampled, z.softmax(-1), 0.0).sum(-1)
    torch.testing.assert_close(found.mass[sure].double(), mass[sure], rtol=0, atol=2e-6)
    assert found.ids.dtype == found.counts.dtype == torch.int32
    assert found.mass.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # The kept mass is the ratio of log-probabilities over all ids to those over the kept ones.
    both = [gk.fused_logps(hidden, weight, ids, sampling_mask=m, **given)[0] for m in (None, found)]
    torch.testing.assert_close((both[0] - both[1]).exp()[mask], found.mass[mask], rtol=2e-6, atol=0)


def test_no_more_than_a_part_of_a_chunk_of_logits(monkeypatch):
    seen = []

    def spy(z: Tensor, rule: Truncation) -> Tensor:
        seen.append(len(z))
        return truncate(z, rule)

    monkeypatch.setattr(truncation, "truncate", spy)
    monkeypatch.setattr("grpo_kernels.head.lm_head.rows_of_chunk", lambda *args, **kwargs: 64)
    hidden, weight = torch.randn(500, 16), torch.randn(90, 16)
    whole = gk.sampling_support(hidden, weight, torch.zeros(500, dtype=torch.long), top_k=5)
    assert sum(seen) == 500 and max(seen) <= 64 // truncation.PARTS
    for some in (slice(0, 200), slice(200, 500)):
        part = gk.sampling_support(hidden[some], weight, torch.zeros(500, dtype=torch.long)[some], top_k=5)
        assert torch.equal(part.ids, whole[some].ids) and torch.equal(part.mass, whole.mass[some])


def test_packed_and_strided_inputs_per_token_temperatures_and_no_tokens():
    batch = make_batch(2, sequences=4, length=6, bias=True)
    temperature = torch.linspace(0.5, 1.5, 24).view(4, 6)
    options = dict(lm_head_bias=batch.bias, top_p=0.9)
    hidden, ids = batch.hidden, batch.ids
    found = gk.sampling_support(hidden, batch.weight, ids, temperature=temperature, **options)
    packed = gk.sampling_support(
        hidden.flatten(0, 1), batch.weight, ids.flatten(), temperature=temperature.flatten(), **options
    )
    assert torch.equal(found.ids, packed.ids) and torch.equal(found.counts.flatten(), packed.counts)
    shifted = torch.cat([torch.zeros_like(hidden[:, :1]), hidden], 1)[:, 1:]
    again = gk.sampling_support(shifted, batch.weight, ids, temperature=temperature, **options)
    assert torch.equal(found.ids, again.ids)
    for empty in (
        gk.sampling_support(hidden[:, :0], batch.weight, ids[:, :0], **options),
        gk.sampling_support(hidden, batch.weight, ids, completion_mask=torch.zeros_like(ids), **options),
    ):
        assert empty.ids.numel() == 0 and not empty.counts.any() and empty.shape[0] == 4


@pytest.mark.parametrize("context", ["no_grad", "inference", "autocast", "flops", "frozen head"])
def test_where_it_is_called(context):
    batch = make_batch(3, bias=True)
    inputs = [x.detach().requires_grad_() for x in (batch.hidden, batch.weight)]
    contexts = {
        "no_grad": torch.no_grad(), "inference": torch.inference_mode(), "flops": FlopCounterMode(display=False),
        "autocast": torch.autocast("cpu", torch.bfloat16), "frozen head": torch.enable_grad(),
    }  # fmt: skip
    if context == "frozen head":
        inputs[1].requires_grad_(False)
    expected = gk.sampling_support(*inputs, batch.ids, top_k=9)
    with contexts[context]:
        found = gk.sampling_support(*inputs, batch.ids, top_k=9)
    assert not found.ids.requires_grad and not found.mass.requires_grad
    if context == "autocast":
        expected = gk.sampling_support(*(x.bfloat16() for x in inputs), batch.ids, top_k=9)
    assert torch.equal(found.ids, expected.ids) and torch.equal(found.mass, expected.mass)


def test_a_mask_carries_mass_and_additions_with_its_rows():
    batch = make_batch(4)
    found = gk.sampling_support(batch.hidden, batch.weight, batch.ids, top_k=3)
    rows = found[[2, 0]].to("cpu")
    assert torch.equal(rows.mass, found.mass[[2, 0]]) and torch.equal(rows.added, found.added[[2, 0]])
    for name in ("mass", "added"):
        with pytest.raises(ValueError, match=rf"SamplingMask\.{name} has shape \(1, 6\); expected \(4, 6\)"):
            gk.SamplingMask(found.ids, found.counts, **{name: getattr(found, name)[:1]})


BAD = {
    "k below 0": (dict(top_k=-1), ValueError, "top_k=-1; expected an integer >= 0"),
    "k of no integer": (dict(top_k=2.5), ValueError, "top_k=2.5; expected an integer"),
    "top_p of 0": (dict(top_p=0.0), ValueError, "top_p=0.0; expected a finite number in (0, 1]"),
    "top_p above 1": (dict(top_p=1.1), ValueError, "top_p=1.1;"),
    "min_p below 0": (dict(min_p=-0.1), ValueError, "min_p=-0.1; expected a finite number in [0, 1]"),
    "min_p above 1": (dict(min_p=1.5), ValueError, "min_p=1.5;"),
    "nothing": (dict(), ValueError, "top_k=0, top_p=1.0 and min_p=0.0 keep all 67 ids; expected one that truncates"),
    "everything": (dict(top_k=67), ValueError, "top_k=67, top_p=1.0 and min_p=0.0 keep all 67 ids"),
    "a mask of one's own": (dict(top_k=3, sampling_mask=None), TypeError, "sampling_mask"),
    "another shape": (
        dict(top_k=3, completion_mask=torch.ones(3, 6)), ValueError, "completion_mask has shape (3, 6); expected (4, 6)"
    ),
    "an id": (dict(top_k=3, completion_ids=torch.full((4, 6), 67)), ValueError, "completion_ids[0, 0] = 67;"),
    "a module": (dict(top_k=3, lm_head_weight=torch.nn.Linear(24, 67)), TypeError, "lm_head_weight is a Linear"),
    "temperature": (dict(top_k=3, temperature=0.0), ValueError, "temperature=0.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, monkeypatch):
    changes, kind, words = BAD[name]
    batch = make_batch(5)
    given = dict(hidden=batch.hidden, lm_head_weight=batch.weight, completion_ids=batch.ids) | changes
    monkeypatch.setattr(truncation, "truncate", None)  # before any work
    with pytest.raises(kind, match=re.escape(words)):
        gk.sampling_support(**given)


def test_a_compiled_call_is_refused():
    batch = make_batch(6)
    compiled = torch.compile(gk.sampling_support, backend="eager")
    with pytest.raises(ValueError, match="sampling_support is given to a call that is traced or compiled"):
        compiled(batch.hidden, batch.weight, batch.ids, top_k=3)


# --- the engine's log-probabilities -----------------------------------------------------------------------------------


def test_before_any_update_ratios_are_1_with_the_support_and_the_kept_mass_without():
    """Tokens are drawn from truncated float32 logits, with the log-probabilities of that distribution."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = 2.0 * torch.randn(2_000, 16, generator=g), torch.randn(300, 16, generator=g)
    rule = dict(top_k=50, top_p=0.9)
    z = hidden @ weight.T
    processed = z.masked_fill(~sampler(z, **rule)[0], -torch.inf).log_softmax(1)
    ids = torch.multinomial(processed.exp(), 1, generator=g)
    support = gk.sampling_support(hidden, weight, ids[:, 0], **rule)
    engine = processed.gather(1, ids)[:, 0]
    ratios = [(gk.fused_logps(hidden, weight, ids[:, 0], sampling_mask=m)[0] - engine).exp() for m in (None, support)]
    outside = [((r < 0.99) | (r > 1.01)).double().mean().item() for r in ratios]
    assert outside[1] == 0 and abs(ratios[1].mean() - 1) < 1e-5 and not support.added.any()
    assert outside[0] > 0.8 and torch.allclose(ratios[0], support.mass, rtol=1e-5)

"""fused_policy_loss: a user's function of log-probabilities gets the gradients of autograd through fused_logps."""

from __future__ import annotations

import pytest
import torch
from helpers import LEAVES, Batch, leaves, make_batch, packed, whole_chunk
from test_launches import LaunchRecorder

import grpo_kernels as gk
from grpo_kernels.policy import PolicyChunk

pytestmark = pytest.mark.each_value
# Atomic additions on a GPU, whose order no two runs share; the backward of a gather has them too.
ATOMIC = ("index_add", "scatter_add", "index_put", "_unsafe_index_put", "embedding_dense_backward", "bincount")


def through_autograd(batch: Batch, loss_fn, **given):
    """The same function over fused_logps, all unmasked tokens in one chunk."""
    own = leaves(batch)
    loss = loss_fn(whole_chunk(own, **given)).sum()
    loss.backward()
    return loss.detach(), own


def token_loss(batch: Batch, entropy: bool):
    old = torch.linspace(-6, -3, batch.ids.numel()).view(batch.ids.shape)
    count = len(batch.options["cu_seqlens"]) - 1 if "cu_seqlens" in batch.options else len(batch.ids)
    advantages = torch.linspace(-1, 2, count)

    def loss_fn(chunk: PolicyChunk):
        ratio = (chunk.logps - chunk.tokens(old)).clamp(max=2).exp()
        loss = -ratio * chunk.sequences(advantages) / 7
        return loss - 0.1 * chunk.entropy if entropy else loss

    return loss_fn


def sequence_loss(batch: Batch, entropy: bool):
    token = token_loss(batch, entropy)

    def loss_fn(chunk: PolicyChunk):
        total = chunk.sequence_sum(chunk.logps * 0.3)
        return (total.exp() * token(chunk)).sum()

    return loss_fn


@pytest.mark.parametrize(
    ("layout", "entropy", "rows"),
    [("batch", False, 7), ("masked", True, 3), ("packed", True, 3), ("packed", True, None)],
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_equals_autograd_through_fused_logps(level, entropy, layout, rows, backend):
    batch = make_batch(2, bias=True, masked=layout != "batch")
    batch = packed(batch) if layout == "packed" else batch
    loss_fn = (token_loss if level == "token" else sequence_loss)(batch, entropy)
    logits = dict(temperature=0.8, logit_softcap=9.0, logit_scale=1.2)
    expected, wanted = through_autograd(batch, loss_fn, entropy=entropy, backend=backend, **logits)
    own = leaves(batch)
    loss = gk.fused_policy_loss(
        own.hidden, own.weight, batch.ids, loss_fn, level=level, entropy=entropy, lm_head_bias=own.bias,
        chunk_rows=rows, backend=backend, **batch.options, **logits,
    )  # fmt: skip
    (3 * loss).backward()
    assert torch.allclose(loss, expected, rtol=1e-5) and loss.shape == ()
    for name in LEAVES:
        found = getattr(own, name).grad
        assert torch.allclose(found, 3 * getattr(wanted, name).grad, rtol=1e-4, atol=1e-6) and found.any(), name


def test_sequence_chunks_hold_whole_sequences():
    batch, seen = make_batch(2, masked=True), []

    def loss_fn(chunk):
        seen.append(chunk)
        return chunk.logps.sum()

    leaf, mask = batch.hidden.requires_grad_(), batch.options["completion_mask"]
    rows = int(mask[:2].sum())
    gk.fused_policy_loss(leaf, batch.weight, batch.ids, loss_fn, level="sequence", chunk_rows=rows, **batch.options)
    assert torch.equal(torch.cat([c.index for c in seen]), mask.reshape(-1).nonzero()[:, 0])
    assert len(seen[0].index) == rows  # two sequences fill it
    for chunk in seen:
        assert torch.equal(chunk.sequence, chunk.index // 6)
        for i in chunk.sequence.unique():
            assert (chunk.sequence == i).sum() == mask[i].sum()
        assert chunk.entropy is None and chunk.logps.requires_grad


GIVES = {
    "a sum": lambda c: c.logps.sum(),
    "a constant": lambda c: torch.tensor(1.0),
    "changed in place": lambda c: c.logps.mul_(c.logps.detach().clone()).sum(),
}


@pytest.mark.parametrize("gives", GIVES.values(), ids=GIVES)
def test_gradients_that_are_expanded_or_0_or_of_values_changed_in_place(gives):
    batch = make_batch(2)
    leaf = batch.hidden.clone().requires_grad_()
    gk.fused_policy_loss(leaf, batch.weight, batch.ids, gives).backward()
    _, wanted = through_autograd(batch, lambda c: gives(c) + 0.0 * c.logps.sum())
    assert torch.allclose(leaf.grad, wanted.hidden.grad, atol=1e-6)


SCALE = torch.nn.Parameter(torch.tensor([0.5, 1.5]))
OUTSIDE = (SCALE * 2).exp()
OTHER_GRADIENTS = {
    "a leaf": lambda c: c.logps.sum() * SCALE.sum(),
    "one of many factors": lambda c: (c.logps * c.logps.exp()).sum() + 0.0 * SCALE[0],
    "through another tensor": lambda c: (c.logps * OUTSIDE[1]).sum(),
    "alone": lambda c: SCALE.sum(),
}


@pytest.mark.parametrize(("name", "level"), [*zip(OTHER_GRADIENTS, ["token", "sequence"] * 2, strict=True)])
def test_a_gradient_that_the_closure_would_lose_is_refused(name, level):
    loss_fn, batch = OTHER_GRADIENTS[name], make_batch(2)
    hidden = batch.hidden.requires_grad_(level == "token")
    given = dict(level=level, chunk_rows=7)
    with pytest.raises(ValueError, match=r"loss_fn depends on a tensor of shape \(2,\) .*detach .*fused_logps"):
        gk.fused_policy_loss(hidden, batch.weight, batch.ids, loss_fn, **given)
    with torch.no_grad():  # nobody asks for a gradient
        assert gk.fused_policy_loss(hidden, batch.weight, batch.ids, loss_fn, **given).isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_sums_over_a_sequence_are_in_a_fixed_order(dtype):
    """Values and derivatives of index_add and a gather, without their atomic additions."""
    sequence = torch.tensor([0, 0, 2, 5, 5, 5, 7])
    x = (torch.arange(7) % 2 if dtype in (torch.int64, torch.bool) else torch.arange(7.0) / 4).to(dtype)
    local = sequence.unique_consecutive(return_inverse=True)[1]
    expected = x.new_zeros(7).index_add(0, local, x)[local]
    chunk = PolicyChunk(torch.zeros(7), None, torch.arange(7), sequence)
    assert torch.equal(chunk.sequence_sum(x), expected)
    if dtype.is_floating_point:
        with LaunchRecorder() as launches:
            leaf = x.clone().requires_grad_()
            (chunk.sequence_sum(leaf) * x).sum().backward()
        assert torch.equal(leaf.grad, expected) and launches.names
        assert not any(name.removesuffix("_") in ATOMIC for name in launches.names), launches.names
    empty = PolicyChunk(torch.zeros(0), None, sequence[:0], sequence[:0])
    assert empty.sequence_sum(x[:0]).shape == (0,)


def test_values_of_another_number_of_tokens_or_sequences_are_refused():
    """A tensor with a token more per row would be read askew."""
    batch = make_batch(2)
    head = batch.hidden, batch.weight, batch.ids
    for name, right, wrong in (("tokens", (4, 6), (4, 7)), ("tokens", (24,), (4,)), ("sequences", (4, 1), (4, 6))):
        gk.fused_policy_loss(*head, lambda chunk, n=name, s=right: chunk.logps * getattr(chunk, n)(torch.ones(s)))
        with pytest.raises(ValueError, match=rf"x has shape \({wrong[0]}.*expected one value for each of "):
            gk.fused_policy_loss(*head, lambda chunk, n=name, s=wrong: chunk.logps * getattr(chunk, n)(torch.ones(s)))

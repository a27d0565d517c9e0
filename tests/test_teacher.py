"""The divergence to a teacher's distribution: values and gradients against the specification, by itself and beside the
GRPO loss; what it costs a call; what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from helpers import (
    assert_close,
    assert_within,
    call,
    errors,
    fused,
    leaves,
    make_batch,
    packed,
    reference,
    relative,
)
from teachers import KINDS, MODES, OWN, VOCAB, batch_of, config_of, make_teacher, make_top_k, teacher_of
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.names import DIVERGENCES
from grpo_kernels.reference import divergence as exact_divergence
from grpo_kernels.reference import top_k_divergence

pytestmark = pytest.mark.each_value
BACKENDS = ("torch", "cpu")
INTERPRETED = "triton"

CASES: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "KL, entropy bonus, in chunks": dict(beta=0.1, entropy_coef=0.05, chunk_rows=5),
    "softcap, scale, temperature": dict(logit_softcap=3.0, logit_scale=0.7, temperature=1.3, chunk_rows=16),
    "whole sequences": dict(importance_sampling_level="sequence", chunk_rows=12, aggregation="seq_mean"),
    "sequences beyond a chunk": dict(importance_sampling_level="sequence", chunk_rows=3),
    "a temperature per token": dict(temperature=torch.linspace(0.5, 2.0, 36).view(6, 6)),
    "every row": dict(static_shapes=True),
    "an entropy mask": dict(entropy_threshold=3.5),
    "only tokens with a gradient": dict(score_inactive=False, chunk_rows=7),
}
FEW = ("softcap, scale, temperature", "sequences beyond a chunk")  # for the interpreter


PLACES = [
    *itertools.product(BACKENDS, CASES, (*KINDS, *OWN)),
    *((INTERPRETED, FEW[0], kind) for kind in (*KINDS, *OWN)),
    (INTERPRETED, FEW[1], "whole"),
    *(("cuda", FEW[0], kind) for kind in (*MODES, *OWN)),
]


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(("backend", "name", "kind"), PLACES)
def test_beside_the_objective(backend, name, kind, divergence):
    config = config_of(divergence, **CASES[name])
    teacher = teacher_of(kind, logit_scale=0.8, logit_softcap=4.0)
    batch, whole = batch_of(config).with_options(teacher=teacher), kind == "whole"
    if kind in MODES:
        teacher.ids[:3][teacher.ids[:3] == batch.ids[:3, :, None]] = -1
        # The sampled id is among those of some tokens, and not of others.
        teacher.ids[:3, :, 0], teacher.logps[:3, :, 0] = batch.ids[:3], -8.0
    exact = reference(batch, config)
    if kind not in MODES:
        teacher.hidden[~batch.options["completion_mask"]] = math.nan
    # Those that are known at K ids: the parts of the loss nearly cancel.
    found = fused(batch, config, backend)
    assert ("divergence/mass" in found.metrics) == (kind not in ("whole", OWN[-1]))
    found = errors(found, exact, loss_scale=0.0 if whole else 1.0)
    assert max(found.values()) <= (2e-6 if whole else 3e-6), found
    if backend == "torch":
        assert_close(fused(batch.cast(torch.float64), config, backend), exact, 1e-12)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(("backend", "kind"), [*itertools.product(BACKENDS, KINDS), (INTERPRETED, "whole")])
def test_16_bits(backend, kind, divergence):
    """At most the error of eager PyTorch beside a whole teacher; a loss scale of float16 reaches the gradient."""
    config = config_of(divergence, chunk_rows=16)
    for dtype in (torch.bfloat16, torch.float16):
        batch = batch_of().head_as(dtype)
        plain = errors(fused(batch, config, "torch"), reference(batch, config))
        batch = batch.with_options(teacher=teacher_of(kind))
        exact, found = reference(batch, config), fused(batch, config, backend)
        if kind == "whole":
            assert_within(errors(found, exact), plain, 1e-5, 1.5)
            narrow = batch.with_options(teacher=make_teacher((6, 6), dtype=dtype))
            assert errors(fused(narrow, config, backend), reference(narrow, config))["gradient of hidden"] < 1e-2
        else:
            assert_within(errors(found, exact), plain, 1e-5, 1.5 if dtype == torch.bfloat16 else 2.0, of="grad")
        scaled = leaves(batch)
        (call(scaled, config, backend).loss * 4096).backward()
        assert relative(scaled.hidden.grad.double() / 4096, exact.grads["hidden"]) < 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_in_float32_from_16_bits(backend):
    """Of both sides: close distributions have a divergence far below the rounding of their logits."""
    batch = make_batch(3).head_as(torch.bfloat16)
    g = torch.Generator().manual_seed(1)
    near = (batch.weight.float() + 0.01 * torch.randn(batch.weight.shape, generator=g)).bfloat16()
    teacher, errors_ = gk.Teacher(batch.hidden, near), []
    exact = gk.fused_distillation_loss(
        batch.hidden.double(), batch.weight.double(), gk.Teacher(batch.hidden.double(), near.double())
    ).divergence
    for dtype in (None, torch.float32):
        out = gk.fused_distillation_loss(batch.hidden, batch.weight, teacher, logits_dtype=dtype, backend=backend)
        errors_.append(relative(out.divergence, exact))
    assert errors_[1] < 1e-3 < errors_[0]


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("backend", [*BACKENDS, INTERPRETED])
def test_a_teacher_like_the_policy(backend, divergence):
    batch = make_batch(3, bias=True)
    teacher, own = gk.Teacher(batch.hidden, batch.weight, batch.bias), leaves(batch)
    out = gk.fused_distillation_loss(
        own.hidden, own.weight, teacher, lm_head_bias=own.bias, divergence=divergence, backend=backend
    )
    out.loss.backward()
    assert out.divergence.abs().max() <= 1e-6
    assert all(x.grad.abs().max() <= 1e-6 for x in (own.hidden, own.weight, own.bias))


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("backend", [*BACKENDS, INTERPRETED])
def test_excluded_ids(backend, divergence):
    """A logit of -inf on both sides, and on the side that weighs: neither NaN nor a share."""
    config = config_of(divergence)
    both, alone = torch.tensor([3, 50, 66]), torch.tensor([4, 65])
    batch = batch_of()
    teacher = batch.options["teacher"]
    policy_bias, bias = batch.bias.clone(), teacher.bias.clone()
    for x in (policy_bias, bias):
        x[both] = -math.inf
    if divergence != "forward_kl":
        policy_bias[alone] = -math.inf
    if divergence != "reverse_kl":
        bias[alone if divergence == "forward_kl" else alone + 1] = -math.inf
    ids = torch.where(torch.isin(batch.ids, torch.cat([both, alone, alone + 1])), 0, batch.ids)
    batch = dataclasses.replace(batch, bias=policy_bias, ids=ids)
    batch = batch.with_options(teacher=dataclasses.replace(teacher, bias=bias))
    found = fused(batch, config, backend)
    assert all(x.isfinite().all() for x in found.grads.values())
    assert_close(found, reference(batch, config), 2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", [*BACKENDS, INTERPRETED])
def test_an_excluded_id_that_nothing_samples(backend, kind):
    """The divergence has no sampled ids; whichever stand in for them, those of a logit of -inf bring no NaN."""
    shape, vocab = (2, 3), 4
    batch = make_batch(3, sequences=2, length=3, vocab=vocab, bias=True)
    ids = (torch.arange(6)[:, None] + torch.arange(2)).view(2, 3, 2) % vocab
    top_k = gk.TopKTeacher(ids, torch.tensor([0.6, 0.3]).log().expand(2, 3, 2), "tail" if kind == "whole" else kind)
    own = make_teacher(shape, vocab) if kind == "whole" else top_k
    for excluded in range(vocab):
        bias = batch.bias.clone()
        bias[excluded] = -math.inf
        config = config_of("jsd")
        log_p = log_softmax(batch.hidden.double(), batch.weight.double(), bias.double())
        if kind == "whole":
            exact = exact_divergence(
                config, log_p, log_softmax(*map(Tensor.double, (own.hidden, own.weight, own.bias)))
            )
        else:
            exact = top_k_divergence(config, log_p, own.ids, own.logps, kind)
        leaves = [x.clone().requires_grad_() for x in (batch.hidden, batch.weight)]
        given = dict(lm_head_bias=bias, divergence="jsd", divergence_beta=0.3, backend=backend)
        out = gk.fused_distillation_loss(*leaves, own, **given)
        per_token = gk.fused_divergence(*leaves, own, **given)
        for found in (out.loss, per_token.mean()):
            assert relative(found.detach(), exact.mean()) < 5e-6
            assert all(x.isfinite().all() for x in torch.autograd.grad(found, leaves))


def test_an_id_that_the_teacher_excludes_makes_the_reverse_kl_infinite():
    batch = make_batch(3)
    teacher = make_teacher((4, 6))
    teacher.bias[5] = -math.inf
    for backend in BACKENDS:
        out = gk.fused_distillation_loss(batch.hidden, batch.weight, teacher, backend=backend)
        assert out.loss == math.inf


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_id(backend):
    batch = make_batch(3, vocab=1)
    out = gk.fused_distillation_loss(batch.hidden, batch.weight, make_teacher((4, 6), 1), backend=backend)
    assert out.loss == 0 and out.entropy.abs().max() == 0


# --- the public functions ---------------------------------------------------------------------------------------------


def log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Any = 1.0) -> Tensor:
    z = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    return (z / temperature).log_softmax(-1)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(  # the first: several blocks of the CPU kernels
    ("kind", "vocab"), [("whole", 5003), *((kind, VOCAB) for kind in KINDS)]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_divergence_alone(backend, kind, vocab, divergence):
    """Padding holds NaN on both sides, or no ids."""
    batch = make_batch(4, bias=True, masked=True, vocab=vocab)
    mask, temperature = batch.options["completion_mask"], torch.tensor([0.7, 1.0, 1.4, 2.0])
    teacher = make_teacher((4, 6), vocab) if kind == "whole" else make_top_k((4, 6), kind)
    options = {"divergence_beta": 0.3} if divergence == "jsd" else {}
    config = config_of(divergence)
    wide = [x.double().requires_grad_() for x in (batch.hidden, batch.weight, batch.bias)]
    log_p = log_softmax(*wide, temperature[:, None, None])
    if isinstance(teacher, gk.Teacher):
        of_teacher = (x.double() for x in (teacher.hidden, teacher.weight, teacher.bias))
        exact = exact_divergence(config, log_p, log_softmax(*of_teacher, temperature[:, None, None]))
        teacher.hidden[~mask] = math.nan
    else:
        exact = top_k_divergence(config, log_p, teacher.ids, teacher.logps, kind)
        teacher.ids[~mask] = -1
    exact = torch.where(mask, exact, 0.0)
    batch.hidden[~mask] = math.nan
    own = [x.requires_grad_() for x in (batch.hidden, batch.weight, batch.bias)]
    given = options | dict(
        completion_mask=mask, lm_head_bias=own[2], divergence=divergence, temperature=temperature, backend=backend
    )

    def check(found: Tensor, expected: Tensor) -> None:
        assert relative(found.detach(), expected.detach()) < 5e-6
        gradients = zip(
            torch.autograd.grad(found, own), torch.autograd.grad(expected, wide, retain_graph=True), strict=True
        )
        assert all(relative(x, y) < (2e-6 if kind == "whole" else 5e-6) for x, y in gradients)

    out = gk.fused_distillation_loss(*own[:2], teacher, **given)
    mean = exact.sum() / mask.sum()
    check(out.loss, mean)
    expected = [(out.divergence, exact), (out.metrics["divergence"], mean)]
    if kind != "renormalize":  # whose entropy is that over the K ids
        expected.append((out.entropy, torch.where(mask, -(log_p.exp() * log_p).sum(-1), 0.0)))
    if kind != "whole":
        masses = torch.where(teacher.ids >= 0, teacher.logps.double().exp(), 0.0)
        expected.append((out.metrics["divergence/mass"], masses.sum() / mask.sum()))
    for x, y in expected:
        assert relative(x, y.detach()) < 2e-6
    outer = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1))
    per_token = gk.fused_divergence(*own[:2], teacher, **given)
    assert relative(per_token.detach(), exact.detach()) < 2e-6
    check((per_token * outer).sum(), (exact * outer.double()).sum())


def test_a_divergence_is_a_tensor_of_its_own():
    """Of a teacher that was computed in inference mode; the result may be changed in place and keeps no table alive."""
    batch = make_batch(4)
    with torch.inference_mode():
        teacher = make_teacher((4, 6))
    for x in (batch.hidden.requires_grad_(), batch.hidden.detach()):
        found = gk.fused_divergence(x, batch.weight, teacher)
        assert found.untyped_storage().nbytes() == 4 * found.numel()
        expected = 2 * found.detach()
        assert torch.equal(found.mul_(2).detach(), expected)
        assert found.requires_grad == x.requires_grad
    assert torch.autograd.grad(gk.fused_divergence(batch.hidden, batch.weight, teacher).sum(), batch.hidden)[0].any()


@pytest.mark.parametrize("kind", ["whole", *OWN])
def test_packed_sequences_and_aggregations(kind):
    batch, teacher = packed(batch_of()), teacher_of(kind)
    padded, mask = batch_of(), batch_of().options["completion_mask"]
    whole = gk.fused_divergence(padded.hidden, batch.weight, teacher, lm_head_bias=batch.bias)[mask]
    teacher = dataclasses.replace(teacher, hidden=teacher.hidden[mask])
    for aggregation in ("seq_mean", "token_mean", "seq_sum"):
        out = gk.fused_distillation_loss(
            batch.hidden, batch.weight, teacher, lm_head_bias=batch.bias, cu_seqlens=batch.options["cu_seqlens"],
            aggregation=aggregation,
        )  # fmt: skip
        lengths = batch.options["cu_seqlens"].diff()
        sums = torch.stack([part.sum() for part in out.divergence.split(lengths.tolist())])
        expected = {"seq_mean": (sums / lengths.clamp(min=1)).mean(), "token_mean": sums.sum() / lengths.sum()}
        assert relative(out.loss, expected.get(aggregation, sums.mean())) < 1e-6
        assert relative(out.divergence, whole) < 2e-6


def test_shares_of_the_loss_and_metrics():
    """The shares of sequences and groups add up; every token has a gradient, those of an advantage of 0 too."""
    batch, config = batch_of(), config_of("reverse_kl", entropy_coef=0.0)
    for backend in BACKENDS:
        out = call(batch, config, backend, num_generations=2)
        for shares in (out.sequences["loss"], out.groups["loss"]):
            assert relative(shares.sum(), out.loss) < 1e-5
        assert out.metrics["zero_gradient"] == 0
        mask = batch.options["completion_mask"]
        assert relative(out.metrics["divergence"], out.divergence.sum() / mask.sum()) < 1e-6
        assert (out.divergence[~mask] == 0).all() and (out.divergence[mask] > 0).all()
        total, count = out.metric_sums["divergence"]
        assert relative(total / count, out.metrics["divergence"]) < 1e-6
        plain = call(batch, backend=backend, teacher=None)
        assert plain.divergence is None and "divergence" not in plain.metrics


@pytest.mark.parametrize("kind", ["whole", *OWN])
@pytest.mark.parametrize("backend", BACKENDS)
def test_accumulated_frozen_and_without_gradients(backend, kind):
    config, scale = config_of("forward_kl"), 0.0 if kind == "whole" else 1.0  # parts of the loss nearly cancel
    batch = batch_of().with_options(teacher=teacher_of(kind))
    exact, total = reference(batch, config), torch.zeros_like(batch.weight)
    own = leaves(batch, "bias")
    call(own, config, backend, accumulate_into=total).loss.backward()
    assert own.weight.grad is None and relative(total, exact.grads["weight"]) < 2e-6
    frozen = leaves(batch, "weight", "bias")
    call(frozen, config, backend).loss.backward()
    assert relative(frozen.hidden.grad, exact.grads["hidden"]) < 2e-6
    with torch.no_grad():
        assert relative(call(own, config, backend).loss, exact.loss, scale) < 2e-6
    with torch.autocast("cpu", torch.bfloat16):
        found = call(own, config, backend).loss
    assert relative(found.float(), exact.loss, scale) < 3e-2


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, *OWN])
def test_a_teacher_narrower_than_a_float64_policy(kind, masked):
    """Its products are in float32: those of the same numbers in float64 but for their rounding. Rows that are all
    visited and rows that are not, in one chunk and in several."""
    batch, results = make_batch(2, dtype=torch.float64, masked=masked), []
    mask = batch.options.get("completion_mask")
    for dtype in (torch.float32, torch.float64):
        own, teacher = leaves(batch), teacher_of(kind, shape=(4, 6))
        names = ("logps",) if isinstance(teacher, gk.TopKTeacher) else ("hidden", "weight", "bias")
        given = dataclasses.replace(teacher, **{n: getattr(teacher, n).to(dtype) for n in names})
        loss = gk.fused_divergence(own.hidden, own.weight, given, completion_mask=mask).sum()
        for rows in (None, 5):
            out = gk.fused_distillation_loss(own.hidden, own.weight, given, completion_mask=mask, chunk_rows=rows)
            loss = loss + out.loss
        config = gk.GRPOConfig(distill_coef=0.5, static_shapes=True)
        loss = loss + call(own, config, teacher=given).loss
        results.append((loss.detach(), *torch.autograd.grad(loss, [own.hidden, own.weight])))
    assert all(relative(x, y) <= 1e-6 and y.any() for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_takes_any_types_of_a_teacher(hidden, weight, top_k):
    """Products are in its type, as the policy's are: those of the converted teacher, to the bit."""
    batch, teacher = leaves(make_batch(2)), make_teacher((4, 6), top_k=top_k)
    teacher = dataclasses.replace(teacher, hidden=teacher.hidden.to(hidden), weight=teacher.weight.to(weight))
    narrow = [x.to(torch.bfloat16) for x in (teacher.hidden, teacher.weight, teacher.bias)]
    results = []
    for given in (teacher, gk.Teacher(*narrow, top_k=top_k)):
        with torch.autocast("cpu", torch.bfloat16):
            out = gk.fused_distillation_loss(batch.hidden, batch.weight, given)
            per_token = gk.fused_divergence(batch.hidden, batch.weight, given)
        grads = torch.autograd.grad(out.loss + per_token.sum(), [batch.hidden, batch.weight])
        results.append([out.divergence, per_token.detach(), *grads])
    assert all(torch.equal(x, y) and x.any() for x, y in zip(*results, strict=True))
    if hidden != weight:
        wide = [x.detach().double() for x in (batch.hidden, batch.weight)]
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=rf"Teacher\.weight is {weight}"):
            gk.fused_distillation_loss(*wide, teacher)  # autocast leaves float64 as it is


# --- bad input: test_bad_input.py has the rest ------------------------------------------------------------------------


def test_where_no_teacher_can_be_given():
    batch, config = make_batch(0).with_options(teacher=make_teacher((4, 6))), gk.GRPOConfig(distill_coef=1.0)
    with pytest.raises(ValueError, match=r"distill_coef=1\.0 has no effect without a teacher"):
        gk.grpo_loss_from_logps(batch.hidden[..., 0], batch.advantages, config=config)

"""Teachers at K ids, known ones or the policy's likeliest: all ids and one, in 16 bits, over the ids of a mask, and
beside TRL's self-distillation. test_teacher.py has the others."""

from __future__ import annotations

import dataclasses
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import (
    Batch,
    assert_close,
    call,
    errors,
    fused,
    gradients_of,
    leaves,
    make_batch,
    reference,
    relative,
    use_mask_path,
)
from teachers import MODES, OWN, VOCAB, batch_of, config_of, exact_log_p, make_teacher, make_top_k, teacher_of

import grpo_kernels as gk
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.integrations.lm_head import lm_head_inputs
from grpo_kernels.names import DIVERGENCES

pytestmark = pytest.mark.each_value
BACKENDS = ("torch", "cpu")
INTERPRETED = "triton"
K = 6


@pytest.mark.parametrize("k", [1, VOCAB])
@pytest.mark.parametrize("kind", [*MODES, *OWN])
def test_one_id_and_all_of_them(kind, k):
    for divergence, backend in itertools.product(DIVERGENCES, BACKENDS):
        config = config_of(divergence, chunk_rows=7)
        batch = batch_of(config).with_options(teacher=teacher_of(kind, k))
        exact = reference(batch, config)
        found = errors(fused(batch, config, backend), exact, loss_scale=0.0 if kind in MODES else 1.0)
        assert max(found.values()) <= 3e-6, (divergence, backend, found)


def test_a_certain_teacher_leaves_the_others_some_mass():
    """Q = 1 in float32: the divergence stays finite."""
    for divergence in DIVERGENCES:
        config = config_of(divergence)
        batch = batch_of(config)
        batch = batch.with_options(teacher=gk.TopKTeacher(batch.ids[..., None], torch.zeros(6, 6, 1)))
        found = fused(batch, config, "cpu")
        assert found.loss.isfinite()
        assert_close(found, reference(batch, config), 3e-6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("backend", [*BACKENDS, INTERPRETED])
def test_a_rest_of_the_policy_below_float32(backend, divergence):
    """All but e^-120 of the policy's mass is on the teacher's ids: the other ids still get their gradient, which is as
    large as what the teacher leaves them."""
    config = config_of(divergence, entropy_coef=0.1)
    batch = batch_of(config)
    bias = torch.full((VOCAB,), -120.0)
    bias[:4] = 0.0
    teacher = gk.TopKTeacher(torch.arange(4).expand(6, 6, 4), torch.full((6, 6, 4), math.log(0.2)))
    weight = batch.weight.clone()
    weight[4:] *= 1e-3
    batch = dataclasses.replace(batch, weight=weight, bias=bias, ids=batch.ids % 4).with_options(teacher=teacher)
    found, exact = errors(fused(batch, config, backend), reference(batch, config)), reference(batch, config)
    assert max(found.values()) <= 3e-6, found
    if divergence == "forward_kl":
        own, other = (x.grads["bias"][4:] for x in (fused(batch, config, backend), exact))
        assert relative(own, other) <= 3e-6 and other.abs().max() > 1e-4


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("backend", [*BACKENDS, INTERPRETED])
@pytest.mark.parametrize("path", ["gathers", "dense", "both"])
def test_the_kept_ids_of_a_mask_are_the_teachers(path, backend, divergence, monkeypatch):
    """A teacher that is renormalised over its ids, and the loss under the same mask: products over only these ids, or
    over all, with temperatures, scale and softcap."""
    use_mask_path(monkeypatch, path, VOCAB)
    config = config_of(divergence, temperature=torch.linspace(0.5, 2.0, 36).view(6, 6), logit_softcap=3.0, chunk_rows=7)
    batch, teacher = batch_of(config), make_top_k((6, 6), "renormalize", 9)
    ids = teacher.ids.amax(-1)
    ids[::2, 1:3] = ((ids + 1) % VOCAB)[::2, 1:3]  # samples that the teacher's list does not have
    assert not (teacher.ids == ids[..., None]).any(-1).all()
    batch = dataclasses.replace(batch, ids=ids).with_options(teacher=teacher, sampling_mask=teacher.sampling_mask)
    exact = reference(batch, config)
    found = errors(fused(batch, config, backend), exact, loss_scale=1.0)
    assert max(found.values()) <= 3e-6, found


def test_the_divergence_over_k_ids_alone_needs_no_other_logits(monkeypatch):
    use_mask_path(monkeypatch, "gathers", VOCAB)
    monkeypatch.setattr(LMHead, "logits", None)
    batch = leaves(make_batch(2, sequences=6, bias=True))
    teacher = make_top_k((6, 6), "renormalize", 9)
    out = gk.fused_distillation_loss(batch.hidden, batch.weight, teacher, lm_head_bias=batch.bias)
    out.loss.backward()
    assert out.loss > 0 and batch.weight.grad.any()


def test_lists_of_sampling_engines():
    """vLLM's dictionaries, of numbers or of objects, SGLang's triples, ragged, None for a token without any."""
    entry = SimpleNamespace(logprob=-0.5)
    lists = [[{3: -0.1, 9: -2.5}, None], [[(-0.2, 7, "text"), (-2.0, 1, None)], {4: entry}, {5: -1.0}]]
    teacher = gk.TopKTeacher.from_lists(lists, length=4, mode="renormalize")
    assert teacher.ids.tolist() == [
        [[3, 9], [-1, -1], [-1, -1], [-1, -1]], [[7, 1], [4, -1], [5, -1], [-1, -1]],
    ]  # fmt: skip
    assert teacher.logps[1, 1, 0] == -0.5 and teacher.mode == "renormalize"
    wrongs: list[tuple[Any, type[Exception]]] = [([[3]], TypeError), ([[[(None, 3)]]], TypeError)]
    for wrong, error in (*wrongs, ([[None]], ValueError), ([[{3: -0.1}] * 5], ValueError)):
        with pytest.raises(error, match=r"entries|length=4"):
            gk.TopKTeacher.from_lists(wrong, length=4)


# --- the policy's own ids -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["cpu", "torch", "triton"])
def test_a_teacher_on_the_policys_ids_in_16_bits(backend, mode):
    """With a teacher of another type; under a loss scale, and under autocast; logits of bfloat16 tie often."""
    cases = list(itertools.product((torch.bfloat16, torch.float16), DIVERGENCES))
    for dtype, divergence in cases[MODES.index(mode) :: len(MODES)] if backend == "triton" else cases:
        config = config_of(divergence, chunk_rows=16)
        batch = batch_of(config).head_as(dtype)
        teacher = dataclasses.replace(make_teacher((6, 6)), top_k=K, mode=mode)
        found = fused(batch.with_options(teacher=teacher), config, backend).grads
        with torch.no_grad():
            ids, _ = gk.fused_top_k(batch.hidden, batch.weight, K, lm_head_bias=batch.bias, backend=backend)
        log_q = exact_log_p(
            Batch(*(x.double() for x in (teacher.hidden, teacher.weight)), ids, None, teacher.bias.double())
        )
        known = gk.TopKTeacher(ids, log_q.gather(-1, ids), mode)
        exact = reference(batch.with_options(teacher=known), config)
        limit = 2e-2 if dtype == torch.bfloat16 else 2e-3
        assert relative(found["hidden"], exact.grads["hidden"]) < limit
        assert relative(found["weight"], exact.grads["weight"]) < limit
        with torch.autocast("cpu", dtype):
            wide = batch.head_as(torch.float32).with_options(teacher=teacher)
            assert relative(call(wide, config, backend).loss, exact.loss, 1.0) < limit
        scaled = leaves(batch.with_options(teacher=teacher))
        (call(scaled, config, backend).loss * 4096).backward()
        assert relative(scaled.hidden.grad.double() / 4096, exact.grads["hidden"]) < limit


def test_policy_logits_of_float32_keep_a_close_teacher_exact():
    """Logits of a 16-bit teacher are gathered as those under its normaliser are rounded: no mass above 1."""
    batch = make_batch(3).head_as(torch.bfloat16)
    weight = batch.weight * 20  # a certain teacher
    teacher = gk.Teacher(batch.hidden, weight, top_k=60, mode="tail")
    out = gk.fused_distillation_loss(batch.hidden, weight, teacher)
    assert out.metrics["divergence/mass"] <= 1 + 1e-5 and out.divergence.abs().max() < 1e-3


SDFT = {"forward_kl": (0.0, {}), "reverse_kl": (1.0, {}), "jsd": (0.3, {"divergence_beta": 0.3})}


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("mode", ["tail", "renormalize"])
def test_equals_the_divergence_of_trls_self_distillation(mode, divergence):
    """Value and gradient of TRL's function on the logits in float64, with a temperature as its trainer divides by."""
    utils = pytest.importorskip("trl.experimental.sdft.loss_utils", reason="trl is not installed: run make test")
    alpha, options = SDFT[divergence]
    batch, teacher = make_batch(2, bias=True), dataclasses.replace(make_teacher((4, 6)), top_k=20, mode=mode)
    own, wide = leaves(batch), leaves(batch.cast(torch.float64))
    of_teacher = teacher.hidden.double() @ teacher.weight.double().T + teacher.bias.double()
    expected = utils.compute_topk_self_distillation_loss(
        (wide.hidden @ wide.weight.T + wide.bias) / 0.8, of_teacher / 0.8, distillation_topk=20,
        distillation_alpha=alpha, distillation_add_tail=mode == "tail",
    )  # fmt: skip
    given = options | dict(divergence=divergence, lm_head_bias=own.bias, temperature=0.8)
    out = gk.fused_distillation_loss(own.hidden, own.weight, teacher, **given)
    assert relative(out.divergence, expected.detach()) < 5e-6
    per_token = gk.fused_divergence(own.hidden, own.weight, teacher, **given)
    assert relative(per_token.detach(), expected.detach()) < 5e-6
    right = gradients_of(expected.mean(), wide)
    for found in (out.loss, per_token.mean()):
        for x, y in zip(gradients_of(found, own), right, strict=True):
            assert relative(x, y) < 5e-6


def test_a_teacher_of_an_adapted_head():
    """The base of a LoRA adapter on lm_head as the teacher of the adapted model; only the adapter is trained."""
    peft = pytest.importorskip("peft", reason="peft is not installed: run make test")
    model = torch.nn.Sequential()
    model.lm_head = torch.nn.Linear(24, VOCAB, bias=False)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["lm_head"]))
    layer, batch = model.base_model.model.lm_head, make_batch(2)
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    head = lm_head_inputs(layer, batch.hidden)
    teacher = gk.Teacher(batch.hidden, layer.base_layer.weight.detach(), top_k=K, mode="renormalize")
    gk.fused_distillation_loss(head.hidden, head.weight, teacher).loss.backward()
    log_p = layer(batch.hidden).log_softmax(-1)
    log_p, ids = log_p.topk(K, -1)
    log_q = layer.base_layer(batch.hidden).gather(-1, ids).log_softmax(-1).detach()
    log_p = log_p.log_softmax(-1)
    trained = [x for x in layer.parameters() if x.requires_grad]
    expected = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(-1).mean(), trained)
    assert len(trained) == 2 and layer.base_layer.weight.grad is None
    for x, y in zip(trained, expected, strict=True):
        assert relative(x.grad, y) < 1e-5

"""Several teachers of one call, each for its own tokens: against one call per teacher, where the tokens of others are
masked."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from helpers import call, call_counter, leaves, packed, relative
from teachers import OWN, VOCAB, batch_of, config_of
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.head.lm_head import LMHead

SHAPE = 6, 6  # sequences, tokens
OF_SEQUENCES = torch.tensor([2, 0, -1, 2, 1, 0])
OF_TOKENS = torch.randint(-1, 3, SHAPE, generator=torch.Generator().manual_seed(3))
KINDS = "whole", *OWN
CASES: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "chunks": dict(chunk_rows=4, beta=0.1),
    "whole sequences": dict(importance_sampling_level="sequence"),
    "every row": dict(static_shapes=True),
}


def make_teachers(kind: str, dtype: torch.dtype = torch.float32) -> list[gk.Teacher]:
    """Of the whole batch: of other widths, the second alone without a bias, and with other scales and softcaps."""
    g = torch.Generator().manual_seed(5)
    own = {} if kind == "whole" else dict(top_k=5, mode=kind.removeprefix("own "))
    teachers = []
    for i, width in enumerate((16, 44, 32)):
        tensors = torch.randn(*SHAPE, width, generator=g), torch.randn(VOCAB, width, generator=g) * 0.3
        bias = None if i == 1 else torch.randn(VOCAB, generator=g).to(dtype)
        options = own | dict(logit_scale=0.6 + 0.2 * i, logit_softcap=(None, 5.0, 3.0)[i])
        teachers.append(gk.Teacher(*(x.to(dtype) for x in tensors), bias, **options))
    return teachers


def own_tokens(teachers: list[gk.Teacher], teacher_of: Tensor) -> list[gk.Teacher]:
    """The same, each with the hidden states of its own tokens."""
    return [dataclasses.replace(x, hidden=x.hidden[teacher_of == i]) for i, x in enumerate(teachers)]


def per_token(teacher_of: Tensor) -> Tensor:
    return teacher_of if teacher_of.dim() == 2 else teacher_of[:, None].expand(SHAPE)


def exact_divergence(batch: Any, kind: str, teacher_of: Tensor, config: gk.GRPOConfig) -> Tensor:
    mask, wide = batch.options["completion_mask"], batch.cast(torch.float64)
    options = dict(divergence=config.divergence, divergence_beta=config.divergence_beta, temperature=config.temperature)
    options |= dict(lm_head_bias=wide.bias, backend="torch")
    masks = [mask & (per_token(teacher_of) == i) for i in range(3)]
    return sum(
        gk.fused_divergence(batch.hidden, batch.weight, teacher, completion_mask=own_mask, **options)
        for teacher, own_mask in zip(make_teachers(kind, torch.float64), masks, strict=True)
    )


@pytest.mark.parametrize("teacher_of", [OF_SEQUENCES, OF_TOKENS], ids=["of sequences", "of tokens"])
@pytest.mark.parametrize(
    ("backend", "kind", "case"),
    [*itertools.product(("torch", "cpu"), KINDS, CASES), ("triton", "whole", "chunks"), ("triton", OWN[0], "chunks")],
)
def test_beside_the_objective(backend, kind, case, teacher_of):
    """The exact loss: that without a teacher, plus the sum of divergences. Tokens of no teacher have none."""
    config, batch = config_of("jsd", temperature=1.3, **CASES[case]), batch_of()
    mask = batch.options["completion_mask"]
    plain = dataclasses.replace(config, distill_coef=0.0, divergence=None, divergence_beta=None)
    exact = leaves(batch.cast(torch.float64))
    divergence = exact_divergence(exact, kind, teacher_of, config)
    loss = call(exact, plain, "torch", teacher=None).loss + config.distill_coef * divergence.sum() / mask.sum()
    expected = [loss, divergence, *torch.autograd.grad(loss, [exact.hidden, exact.weight, exact.bias])]
    own = leaves(batch)
    teachers = own_tokens(make_teachers(kind), teacher_of)
    out = call(own, config, backend, teacher=teachers, teacher_of=teacher_of)
    out.loss.backward()
    found = [out.loss, out.divergence, own.hidden.grad, own.weight.grad, own.bias.grad]
    assert all(relative(x.detach(), y.detach()) < 5e-6 for x, y in zip(found, expected, strict=True))
    assert (out.divergence[per_token(teacher_of) == -1] == 0).all()
    assert ("divergence/mass" in out.metrics) == (kind == OWN[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("teacher_of", [OF_SEQUENCES, OF_TOKENS], ids=["of sequences", "of tokens"])
def test_the_divergence_alone(kind, teacher_of):
    batch, config = leaves(batch_of()), config_of("reverse_kl")
    mask, exact = batch.options["completion_mask"], leaves(batch.cast(torch.float64))
    divergence = exact_divergence(exact, kind, teacher_of, config)
    expected = torch.autograd.grad(divergence.sum() / mask.sum(), [exact.hidden, exact.weight])
    given = dict(teacher_of=teacher_of, lm_head_bias=batch.bias, completion_mask=mask)
    teachers = own_tokens(make_teachers(kind), teacher_of)
    out = gk.fused_distillation_loss(batch.hidden, batch.weight, teachers, **given)
    tokens = gk.fused_divergence(batch.hidden, batch.weight, teachers, **given)
    for found in (out.divergence, tokens):
        assert relative(found.detach(), divergence.detach()) < 5e-6
    for loss in (out.loss, tokens.sum() / mask.sum()):
        gradients = torch.autograd.grad(loss, [batch.hidden, batch.weight])
        assert all(relative(x, y) < 5e-6 for x, y in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_one_teacher_of_all_is_a_teacher(backend, kind):
    """To the bit, beside others that no token has."""
    batch, config, results = batch_of(), config_of("reverse_kl", chunk_rows=8), []
    teachers = make_teachers(kind)
    none = [dataclasses.replace(x, hidden=x.hidden[:0]) for x in teachers[1:]]
    for options in (
        dict(teacher=teachers[0]),
        dict(teacher=[none[0], teachers[0], none[1]], teacher_of=torch.ones(6, dtype=torch.int32)),
    ):
        own = leaves(batch)
        out = call(own, config, backend, **options)
        out.loss.backward()
        results.append([out.loss, out.divergence, own.hidden.grad, own.weight.grad, own.bias.grad])
    assert all(torch.equal(x, y) and x.any() for x, y in zip(*results, strict=True))


def test_a_batch_without_a_teacher():
    """As a rank has it that got none of their samples."""
    batch, teachers = leaves(batch_of()), [dataclasses.replace(x, hidden=x.hidden[:0]) for x in make_teachers("whole")]
    out = call(batch, config_of("jsd"), "cpu", teacher=teachers, teacher_of=torch.full((6,), -1))
    plain = call(batch, backend="cpu", teacher=None)
    gradients = [torch.autograd.grad(x.loss, [batch.hidden, batch.weight]) for x in (out, plain)]
    assert relative(out.loss, plain.loss.detach()) < 1e-6 and not out.divergence.any()
    assert all(relative(x, y) < 1e-6 for x, y in zip(*gradients, strict=True))


def test_packed_sequences():
    batch, of_padded = packed(batch_of()), batch_of()
    teacher_of = OF_SEQUENCES[:, None].expand(SHAPE)[of_padded.options["completion_mask"]]
    teachers = [
        dataclasses.replace(x, hidden=x.hidden[of_padded.options["completion_mask"]][teacher_of == i])
        for i, x in enumerate(make_teachers("whole"))
    ]
    found = [
        gk.fused_distillation_loss(
            batch.hidden, batch.weight, teachers, teacher_of=x, cu_seqlens=batch.options["cu_seqlens"]
        ).divergence
        for x in (OF_SEQUENCES[:, None], teacher_of)
    ]
    expected = gk.fused_distillation_loss(
        of_padded.hidden, batch.weight, own_tokens(make_teachers("whole"), OF_SEQUENCES), teacher_of=OF_SEQUENCES,
        completion_mask=of_padded.options["completion_mask"],
    ).divergence  # fmt: skip
    assert torch.equal(found[0], found[1])
    assert relative(found[0], expected[of_padded.options["completion_mask"]]) < 1e-6


def test_each_product_visits_the_rows_of_its_teacher(monkeypatch):
    rows: list[tuple[int, int]] = []
    call_counter(monkeypatch, LMHead, "logits", rows, lambda head, chunk, *_: (head.hidden.shape[-1], chunk.count))
    batch, teachers = batch_of(), own_tokens(make_teachers("whole"), OF_TOKENS)
    batch.options["completion_mask"] = None
    call(leaves(batch), config_of("jsd", chunk_rows=4), "torch", teacher=teachers, teacher_of=OF_TOKENS)
    of_widths = {width: sum(count for own, count in rows if own == width) for width, _ in rows}
    expected = {x.hidden.shape[-1]: len(x.hidden) for x in teachers}
    assert of_widths.pop(batch.hidden.shape[-1]) == 36 and of_widths == expected


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_and_under_autocast(kind):
    batch, config = leaves(batch_of()), config_of("jsd")
    teachers = own_tokens(make_teachers(kind), OF_SEQUENCES)

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        own = dataclasses.replace(batch, hidden=hidden, weight=weight)
        loss = call(own, config, "cpu", teacher=teachers, teacher_of=OF_SEQUENCES).loss
        given = dict(teacher_of=OF_SEQUENCES, completion_mask=batch.options["completion_mask"])
        return loss + gk.fused_divergence(hidden, weight, teachers, **given).sum()

    def gradients(function: Any) -> list[Tensor]:
        loss = function(batch.hidden, batch.weight)
        return [loss.detach(), *torch.autograd.grad(loss, [batch.hidden, batch.weight])]

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    exact = gradients(step)
    assert all(relative(x, y) < 1e-6 for x, y in zip(gradients(compiled), exact, strict=True))
    if kind == "whole":  # else other ids may be the likeliest in bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            narrow = gradients(step)
        assert all(relative(x.float(), y) < 3e-2 for x, y in zip(narrow, exact, strict=True))


WHOLE = make_teachers("whole")
OTHER_KIND = [WHOLE[0], dataclasses.replace(WHOLE[1], top_k=3)]
BAD = {
    "no teacher_of": (dict(teacher=WHOLE, teacher_of=None), ValueError, "teacher is a list and teacher_of is None"),
    "one teacher": (dict(teacher=WHOLE[0], teacher_of=OF_SEQUENCES), ValueError, "teacher_of has no effect without a"),
    "no teachers": (dict(teacher=[], teacher_of=OF_SEQUENCES), ValueError, "teacher is an empty list"),
    "another type": (dict(teacher=[WHOLE[0], None], teacher_of=OF_SEQUENCES), TypeError, r"teacher\[1\] is a NoneType"),
    "floats": (dict(teacher=WHOLE, teacher_of=OF_SEQUENCES.float()), TypeError, r"teacher_of is torch\.float32"),
    "shape": (dict(teacher=WHOLE, teacher_of=OF_SEQUENCES[1:]), ValueError, r"teacher_of has shape \(5,\)"),
    "index": (dict(teacher=WHOLE[:2], teacher_of=OF_SEQUENCES), ValueError, r"teacher_of\[0, 0\] = 2; expected -1"),
    "below -1": (dict(teacher=WHOLE, teacher_of=OF_SEQUENCES - 1), ValueError, r"teacher_of\[2, 0\] = -2"),
    "tokens": (dict(teacher=WHOLE, teacher_of=OF_SEQUENCES), ValueError, r"teacher\[0\]\.hidden has 36 tokens; .* 12"),
    "kinds": (dict(teacher=OTHER_KIND, teacher_of=OF_SEQUENCES), ValueError, r"teacher\[1\] has top_k, mode and types"),
    "ids": (
        dict(teacher=[dataclasses.replace(WHOLE[0], weight=WHOLE[0].weight[:9], bias=None)], teacher_of=OF_SEQUENCES),
        ValueError, r"teacher\[0\]\.weight has 9 rows and lm_head_weight 67",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    given, error, message = BAD[name]
    batch = leaves(batch_of())
    with pytest.raises(error, match=message):
        call(batch, config_of("jsd"), "cpu", **given)
    with pytest.raises(error, match=message):
        gk.fused_distillation_loss(batch.hidden, batch.weight, given["teacher"], teacher_of=given["teacher_of"])
    with pytest.raises(error, match=message):
        gk.fused_divergence(batch.hidden, batch.weight, given["teacher"], teacher_of=given["teacher_of"])

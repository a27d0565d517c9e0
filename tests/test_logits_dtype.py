"""One type of logits for a loss and for all that stands beside it: `logits_dtype` of every function that computes them,
and of the integrations, which hand it on."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from helpers import call_counter, good_calls, leaves, make_batch, relative, true_logps, use_mask_path
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.head.lm_head import LMHead

DTYPES = [None, torch.float32, torch.bfloat16]  # conftest.py: a CPU that multiplies bfloat16, which None takes then
FUNCTIONS = [
    *("fused_logps", "fused_top_k", "sampling_support", "fused_policy_loss", "fused_divergence"),
    "fused_distillation_loss",
]


@pytest.fixture
def types(monkeypatch) -> list[Any]:
    """The `logits_dtype` that each lm_head of the calls from here on was given."""
    found: list[Any] = []
    call_counter(monkeypatch, LMHead, "__init__", found, lambda *args, **options: options.get("logits_dtype"))
    return found


def bfloat16_batch(vocab: int = 500, sequences: int = 40, length: int = 16, width: int = 32):
    """More tokens than a chunk of a CPU has, and logits that differ by less than bfloat16 resolves."""
    batch = make_batch(0, sequences=sequences, length=length, width=width, vocab=vocab)
    return batch.head_as(torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_likeliest_ids_are_those_that_sampling_keeps(dtype, backend, monkeypatch):
    monkeypatch.setattr("grpo_kernels.inputs.choose_backend", lambda *args, **options: backend)
    batch = bfloat16_batch(sequences=4, length=6, vocab=300)
    given: dict[str, Any] = dict(logits_dtype=dtype)
    ids, logps = gk.fused_top_k(batch.hidden, batch.weight, 5, **given)
    assert torch.equal(gk.fused_logps(batch.hidden, batch.weight, ids, **given)[0], logps)
    support = gk.sampling_support(batch.hidden, batch.weight, ids[..., 0], top_k=5, **given)
    # Those that are equal to the last one are kept too: copies of it, which fill the places that a token has left.
    kept, counts = support.ids.long().split(support.counts.flatten().tolist()), support.counts.max()
    padded = torch.stack([torch.cat([x, x[:1].expand(counts - len(x))]) for x in kept]).view(4, 6, -1)
    of_kept = gk.fused_logps(batch.hidden, batch.weight, padded, **given)[0]
    for row in range(24):
        own, equal = ids.flatten(0, 1)[row], of_kept.flatten(0, 1)[row, : len(kept[row])]
        assert set(own.tolist()) <= set(kept[row].tolist())
        least = logps.flatten(0, 1)[row, -1]
        assert torch.equal(equal[~torch.isin(kept[row], own)], least.expand(len(kept[row]) - 5))
    if dtype == torch.float32:
        assert counts == 5
        assert torch.equal(of_kept.sort(-1, descending=True).values, logps)
    if dtype is None:
        again = gk.sampling_support(batch.hidden, batch.weight, ids[..., 0], top_k=5, logits_dtype=torch.bfloat16)
        assert torch.equal(support.ids, again.ids) and torch.equal(support.mass, again.mass)


@pytest.mark.parametrize("mask_path", [None, "gathers", "dense"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_policy_that_has_not_changed_has_ratios_of_1(dtype, mask_path, monkeypatch):
    batch, mask = bfloat16_batch(sequences=100, vocab=211), None
    if mask_path is not None:
        use_mask_path(monkeypatch, mask_path, 211)
        mask = gk.sampling_support(batch.hidden, batch.weight, batch.ids, top_k=6, logits_dtype=dtype)
    head: Any = batch.hidden.requires_grad_(), batch.weight.requires_grad_(), batch.ids
    old = gk.fused_logps(*head, sampling_mask=mask, logits_dtype=dtype)[0].detach()
    config = gk.GRPOConfig(logits_dtype=dtype)
    out = gk.fused_grpo_loss(*head, batch.advantages, old_logps=old, sampling_mask=mask, config=config)
    assert out.metrics["ratio/min"] == out.metrics["ratio/max"] == 1
    ratios: list[Tensor] = []

    def loss_fn(chunk: gk.PolicyChunk) -> Tensor:
        ratios.append((chunk.logps - chunk.tokens(old)).exp())
        return ratios[-1].sum()

    gk.fused_policy_loss(*head, loss_fn, sampling_mask=mask, logits_dtype=dtype, chunk_rows=320)
    assert all((ratio == 1).all() for ratio in ratios) and sum(map(len, ratios)) == batch.ids.numel()


def test_float32_logits_of_bfloat16_are_exact():
    batch = bfloat16_batch(vocab=2_000, sequences=8, width=128)
    other = batch.hidden.float() + 0.02 * torch.randn(batch.hidden.shape)
    given: dict[str, Any] = dict(logits_dtype=torch.float32)
    right = true_logps(batch, gk.GRPOConfig())[0]
    z, near = (x.detach().double() @ batch.weight.detach().double().T for x in (batch.hidden, other.bfloat16()))
    log_p, log_q = z.log_softmax(-1), near.log_softmax(-1)
    assert (gk.fused_logps(batch.hidden, batch.weight, batch.ids, **given)[0] - right).abs().max() < 4e-6
    total = gk.fused_policy_loss(batch.hidden, batch.weight, batch.ids, lambda chunk: chunk.logps.sum(), **given)
    assert relative(total.detach(), right.sum()) < 1e-6
    assert torch.equal(gk.fused_top_k(batch.hidden, batch.weight, 20, **given)[0], z.topk(20).indices)
    teacher = gk.Teacher(other.bfloat16(), batch.weight.detach())
    found = gk.fused_divergence(batch.hidden, batch.weight, teacher, **given)
    assert relative(found.detach(), (log_p.exp() * (log_p - log_q)).sum(-1)) < 2e-3
    for dtype, error in ((None, 1e-3), (torch.bfloat16, 1e-3)):  # what it is there for
        logps, _ = gk.fused_logps(batch.hidden, batch.weight, batch.ids, logits_dtype=dtype)
        assert (logps - right).abs().max() > error


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_hands_it_on_and_refuses_other_types(function, types, monkeypatch):
    given, call = good_calls()[function], getattr(gk, function)
    if function == "fused_divergence":
        given["teacher"] = gk.Teacher(given["hidden"].detach(), given["lm_head_weight"].detach())
    call(**given, logits_dtype=torch.float32)
    assert types and set(types) == {torch.float32}
    for dtype, message in (
        (torch.bfloat16, r"logits_dtype=torch.bfloat16( with torch.float32 inputs)?; expected torch.float32"),
        (torch.int64, r"logits_dtype=torch.int64"),
        ("float32", r"logits_dtype=float32"),
        ([], r"logits_dtype=\[\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**given, logits_dtype=dtype)


def test_compiled_calls_take_it():
    batch = leaves(bfloat16_batch(sequences=2, vocab=60))

    def step(hidden: Tensor) -> Tensor:
        return gk.fused_logps(hidden, batch.weight, batch.ids, logits_dtype=torch.float32)[0]

    compiled, eager = torch.compile(step, fullgraph=True, backend="aot_eager")(batch.hidden), step(batch.hidden)
    assert torch.equal(compiled.detach(), eager.detach())
    found = [torch.autograd.grad(x.sum(), batch.hidden)[0] for x in (compiled, eager)]
    assert torch.equal(*found)


# --- integrations -----------------------------------------------------------------------------------------------------


def test_trls_trainer_and_patch(types):
    import trl_calls
    import trl_parity as parity

    from grpo_kernels.integrations import trl, trl_distillation

    cls = partial(trl.FusedGRPOTrainer, logits_dtype=torch.float32)
    for quantile in (1.0, 0.4):
        trl_calls.computed(cls, "plain", {"loss_type": "grpo", "top_entropy_quantile": quantile}, "train")
    trainer, inputs = parity.make_trainer(cls, "qwen2", {"loss_type": "grpo"}), trl_calls.crafted_inputs()
    trainer._run(trainer.model, inputs)
    assert len(types) >= 3 and set(types) == {torch.float32}

    hidden, weight = torch.randn(8, 16).bfloat16(), torch.randn(64, 16).bfloat16()
    try:
        for dtype in (torch.float32, None):
            types.clear()
            trl.patch_trl(logits_dtype=dtype)
            trl._FusedLogProbs.apply(hidden, weight, None, torch.zeros(8, dtype=torch.long), 1.0, 4)
            trl_distillation.divergence_loss(
                hidden[None], hidden[None], weight, weight, torch.ones(1, 8, dtype=torch.long), 0.5
            )
            assert len(types) == 3 and set(types) == {dtype}  # one of them the teacher's
    finally:
        trl.unpatch_trl()


def test_ligers_class(types):
    from grpo_kernels.integrations.liger import LigerFusedLinearGRPOLoss

    hidden, weight, ids = torch.randn(2, 6, 8).bfloat16(), torch.randn(50, 8).bfloat16(), torch.randint(50, (2, 6))
    module = LigerFusedLinearGRPOLoss(beta=0.1, loss_type="grpo", logits_dtype=torch.float32)
    module(hidden, weight, ids, torch.ones(2, 6), torch.ones(2), ref_input=hidden, ref_weight=weight)
    assert len(types) == 2 and set(types) == {torch.float32}


def test_the_trainer(types, trained):
    trained(num_iterations=2, beta=0.1, max_steps=2, loss_options={"logits_dtype": "float32"})
    assert len(types) >= 4 and set(types) == {torch.float32}  # of the check at set-up, old, reference, current policy


@pytest.mark.parametrize("dtype", ["float8", "int64", "nn"])
def test_the_trainer_refuses_other_types(dtype, model, data, tmp_path, capsys):
    import training

    assert training.run(model, data, tmp_path / "run", loss_options={"logits_dtype": dtype}) != 0
    assert "logits_dtype=" in capsys.readouterr().err
    options = {"loss": "eager", "loss_options": {"logits_dtype": "float32"}}
    assert training.run(model, data, tmp_path / "run", **options) != 0
    assert "logits_dtype='float32' has no effect without loss=fused" in json.dumps(capsys.readouterr().err)

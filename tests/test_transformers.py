"""fused_forward against transformers' own models and their logits."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from model_calls import ADVANTAGES, LENGTH, NONE, batch, check_against_own_logits, gradients, own_logps, positions_of
from tiny_models import TINY_MODELS, VOCAB, tiny_model

from grpo_kernels import GRPOConfig, fused_logps, fused_policy_loss
from grpo_kernels.integrations import transformers as integration
from grpo_kernels.integrations.alignment import check_alignment
from grpo_kernels.integrations.transformers import fused_forward

VARIANTS = [(family, {}) for family in sorted(TINY_MODELS)] + [
    # The norms after attention, as in the checkpoint of 350M parameters; no projection before the lm_head, as in most.
    ("opt", dict(do_layer_norm_before=False)), ("opt", dict(word_embed_proj_dim=16)),
    # Rows of the vocabulary that no token uses are part of the model's softmax, and of ours.
    ("llama", dict(tie_word_embeddings=True, vocab_size=VOCAB + 32)),
]  # fmt: skip


@pytest.mark.parametrize(("family", "options"), VARIANTS, ids=str)
def test_loss_and_gradients_are_those_of_the_models_own_logits(family, options):
    # In float64 experts do not run, and Gemma 2's attention is NaN at padding on the left.
    single = family in ("gemma2", "granitemoe", "llama4_text", "mixtral", "qwen2_moe")
    found = check_against_own_logits(tiny_model(family, dtype=torch.float32 if single else torch.float64, **options))
    assert any(g.abs().max() > 1e-3 for g in found.values())


@pytest.mark.parametrize("family", sorted(TINY_MODELS))
@pytest.mark.parametrize("masked", [True, False])
def test_shared_prompts_change_neither_loss_nor_gradients(family, masked):
    """Rows 0 and 1 have a prompt, row 2 one that differs in a token, row 3 another. Rows 4 and 5 have the first again,
    under a mask row 5 without its padding."""
    first, near = [0, 0, 5, 6, 7], [0, 0, 5, 9, 7]
    model, prompt = tiny_model(family), torch.tensor([first, first, near, [8] * 5, first, first])
    ids = torch.cat([prompt, torch.randint(3, VOCAB, (6, LENGTH))], dim=1)
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.0, 0.3, -0.2])
    given = dict(input_ids=ids, completion_ids=ids[:, -LENGTH:], advantages=advantages)
    if masked:
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][[0, 1, 2, 4], :2] = given["attention_mask"][1, -3:] = 0
    tokens = []
    counter = model.get_input_embeddings().register_forward_hook(lambda *call: tokens.append(call[1][0].numel()))
    if family == "falcon_h1":  # its states are written in place
        with pytest.raises(ValueError, match="share_prompts=True: the FalconH1ForCausalLM keeps a cache of Linear"):
            fused_forward(model, **given, share_prompts=True)
        return
    fused_forward(model, **given)  # compares the model's own logits
    tokens.clear()
    found = []
    for shared, counts in ((False, [6 * 11]), (True, [(5 if masked else 4) * 5, 6 * 5])):
        out = fused_forward(model, **given, share_prompts=shared)
        out.loss.backward()
        assert tokens == counts
        tokens.clear()
        found.append((out.logps, gradients(model)))
    counter.remove()
    (logps, right), (shared_logps, shared) = found
    torch.testing.assert_close(shared_logps, logps, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(shared, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "words"), [
    ("mamba", "the MambaForCausalLM keeps a cache of LinearAttentionLayer; expected one of keys and values only"),
    ("openai-gpt", "the OpenAIGPTLMHeadModel keeps no cache; expected one of keys and values only"),
])  # fmt: skip
def test_prompts_cannot_be_shared_by_a_model_without_keys_and_values(family, words):
    ids = torch.full((2, 6), 5)
    given = dict(input_ids=ids, completion_ids=ids[:, -2:], advantages=torch.ones(2))
    with pytest.raises(ValueError, match=words):
        fused_forward(tiny_model(family), **given, share_prompts=True)


def test_shared_prompts_and_completions_of_one_token():
    model, inputs = tiny_model("llama"), {"input_ids": torch.tensor([[3, 4, 5], [3, 4, 6]])}
    inputs["completion_ids"] = inputs["input_ids"][:, -1:]
    expected, _ = fused_forward(model, **inputs, loss=fused_logps)
    torch.testing.assert_close(fused_forward(model, **inputs, loss=fused_logps, share_prompts=True)[0], expected)


def test_fused_logps_and_a_loss_of_your_own():
    model, inputs = tiny_model("granite", dtype=torch.float64), batch()
    expected = own_logps(model, inputs) * inputs["attention_mask"][:, -LENGTH:]
    logps, entropy = fused_forward(model, **inputs, loss=fused_logps, entropy=True)
    torch.testing.assert_close(logps, expected)
    assert entropy.shape == logps.shape
    other = {"position_ids": 2 * positions_of(inputs)}
    assert not torch.allclose(fused_forward(model, **inputs, model_inputs=other, loss=fused_logps)[0], logps)
    value = fused_forward(model, **inputs, loss=fused_policy_loss, loss_fn=lambda chunk: chunk.logps.sum())
    torch.testing.assert_close(value, expected.sum())


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_without_an_attention_mask_every_token_is_scored(family):
    model, inputs = tiny_model(family, dtype=torch.float64), batch()
    ones = torch.ones_like(inputs.pop("attention_mask"))
    found, _ = fused_forward(model, **inputs, loss=fused_logps)
    torch.testing.assert_close(found, own_logps(model, {**inputs, "attention_mask": ones}))
    mask = torch.ones(4, LENGTH)
    mask[0, 2:] = 0
    out = fused_forward(model, **inputs, completion_mask=mask, advantages=ADVANTAGES)
    assert (out.logps == 0).sum() == LENGTH - 2


def test_inputs_whose_first_dimension_is_not_the_batch(monkeypatch):
    """Three rows with an image each: pixel_values has a row for each patch, position_ids are (3, B, L)."""
    image, start = 60, 58
    size = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4)
    rope = dict(rope_type="default", mrope_section=[1, 1, 2])
    vision = dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=32, patch_size=4)
    config = transformers.Qwen2_5_VLConfig(
        text_config=dict(size, num_key_value_heads=2, rope_scaling=rope, initializer_range=0.2), vision_config=vision,
        image_token_id=image, video_token_id=61, vision_start_token_id=start, vision_end_token_id=59,
    )  # fmt: skip
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    ids = torch.tensor([[1, start, *[image] * 4, 59, 2, 3, 4, 5]] * 3)
    ids[:, -LENGTH + 2 :] = torch.randint(3, 50, (3, LENGTH - 2))
    given = dict(
        pixel_values=torch.randn(3 * 16, 3 * 2 * 4 * 4), image_grid_thw=torch.tensor([[1, 4, 4]] * 3),
        mm_token_type_ids=(ids == image).int(), position_ids=torch.arange(ids.shape[1]).expand(3, *ids.shape),
    )  # fmt: skip
    monkeypatch.setattr(integration, "_checked", set())
    scored = dict(input_ids=ids, completion_ids=ids[:, -LENGTH:])
    logps, _ = fused_forward(model, **scored, model_inputs=given, loss=fused_logps)
    logits = model(ids, **given).logits[:, -LENGTH - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, ids[:, -LENGTH:, None]).squeeze(-1)
    torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
    assert len(integration._checked) == 1 and check_alignment(model, scored | given, logps).aligned


def test_a_configuration_may_repeat_the_models_scale():
    fused_forward(tiny_model("granite"), **batch(), advantages=ADVANTAGES, config=GRPOConfig(logit_scale=1 / 6.0))


def test_a_model_whose_own_logits_differ_is_refused(monkeypatch):
    """The check of a class of models sees a transform that its configuration does not tell."""
    model, inputs = tiny_model("llama"), batch()
    kind = type("OddForCausalLM", (type(model),), {})
    model.__class__ = kind
    monkeypatch.setattr(integration, "_checked", set())
    fused_forward(model, **inputs, advantages=torch.ones(4))
    assert len(integration._checked) == 1

    def forward(self, *args, **kwargs):
        out = super(kind, self).forward(*args, **kwargs)
        out.logits = out.logits * 1.1
        return out

    kind.forward = forward
    fused_forward(model, **inputs, advantages=torch.ones(4))  # not looked at again
    integration._checked.clear()
    with pytest.raises(ValueError, match="model is a OddForCausalLM whose own logits differ by"):
        fused_forward(model, **inputs, advantages=torch.ones(4))
    other = tiny_model("llama")
    kind.forward = lambda self, *args, logits_to_keep=0, **kwargs: other(*args, **kwargs)
    with pytest.raises(ValueError, match="model is a OddForCausalLM whose forward does not call its LlamaModel"):
        fused_forward(model, **inputs, advantages=torch.ones(4))


def configured(**options):
    """What gives a model's configuration other values."""
    return lambda model: model.config.update(options) or model


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(model=lambda _: torch.nn.Linear(2, 2)), TypeError, "model is a Linear; expected a causal language model"),
        (dict(model=lambda model: model.model), TypeError, "model is a LlamaModel; expected a causal language model,"),
        (dict(model=torch.nn.DataParallel), TypeError, "pass model.module"),
        (dict(model=configured(output_router_logits=True)), ValueError, "config.output_router_logits=True; expected"),
        (dict(model=configured(model_type="no_such")), ValueError, "config.model_type='no_such': no rule"),
        (dict(config=GRPOConfig(logit_scale=0.5)), ValueError, "config.logit_scale=0.5; the model has 1.0"),
        (dict(loss=fused_logps, logit_softcap=3.0), ValueError, "logit_softcap=3.0; the LlamaForCausalLM has None"),
        (dict(config="dapo"), TypeError, "config is a builtins.str; expected a grpo_kernels"),
        (dict(completion_ids=NONE[:, :6]), ValueError, "completion_ids[0, 0] differs from input_ids"),
        (dict(completion_ids=NONE), ValueError, "input_ids has shape (4, 11) and completion_ids (4, 11)"),
        (dict(completion_ids=NONE[:3, :6]), ValueError, "input_ids has shape (4, 11) and completion_ids (3, 6)"),
        (dict(attention_mask=torch.ones(4, 6)), ValueError, "attention_mask has shape (4, 6); expected (4, 11)"),
        (dict(input_ids=None), TypeError, "input_ids is a NoneType; expected a torch.Tensor"),
        (dict(completion_ids=torch.ones(4, 6)), TypeError, "completion_ids is torch.float32; expected integers"),
        (dict(input_ids=NONE[:0], completion_ids=NONE[:0, 5:]), ValueError, "input_ids has shape (0, 11) and"),
        (dict(model_inputs=[1]), TypeError, "model_inputs is a list; expected a dict of arguments"),
        (dict(model_inputs={"input_ids": NONE}), ValueError, "model_inputs has 'input_ids', which would replace"),
        (dict(model_inputs={"adapter_names": ["a"] * 4}), ValueError, "model_inputs has 'adapter_names'"),
        (dict(share_prompts="yes"), TypeError, "share_prompts is a str; expected True or False"),
        (dict(model_inputs={"token_type_ids": NONE}, share_prompts=True), ValueError, "model_inputs of token_type_ids"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, error, message):
    arguments = {"model": lambda model: model, **batch(), "advantages": ADVANTAGES, **change}
    model = arguments.pop("model")(tiny_model("llama"))
    with pytest.raises(error, match=re.escape(message)):
        fused_forward(model, **arguments)

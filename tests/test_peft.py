"""lm_head_inputs and fused_forward with PEFT's adapters, against the model's own logits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from model_calls import ADVANTAGES, batch, check_against_own_logits
from tiny_models import tiny_model

from grpo_kernels import fused_logps
from grpo_kernels.integrations.lm_head import lm_head_inputs

BODY = ["q_proj", "v_proj"]
HIDDEN = torch.zeros(2, 3, 16)


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft", reason="peft is not installed: run make test")


def adapted(peft, dtype=torch.float64, family="llama", kind="LoraConfig", tied=False, **options):
    """A tiny model with an adapter whose weights are not at their start, where LoRA's product is 0."""
    model = tiny_model(family, dtype=dtype, tie_word_embeddings=tied)
    defaults = dict(r=4, lora_alpha=6) if kind == "LoraConfig" else {}
    model = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **defaults, **options))
    shake(model)
    return model


def shake(model):
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.mark.parametrize(
    "options",
    [
        dict(target_modules=BODY),
        dict(target_modules=[*BODY, "lm_head"]),
        dict(target_modules=["lm_head"], use_rslora=True),
        dict(target_modules=BODY, modules_to_save=["lm_head"]),
        dict(target_modules=BODY, trainable_token_indices={"lm_head": [1, 7]}),
        dict(target_modules=BODY, trainable_token_indices=[1, 7], tied=True),
    ],
    ids=["body", "body and head", "head", "modules_to_save", "tokens", "tokens of tied embeddings"],
)
@pytest.mark.parametrize("family", ["llama", "granite", "gemma2"])
def test_loss_and_gradients_are_those_of_the_models_own_logits(peft, family, options):
    model = adapted(peft, torch.float32 if family == "gemma2" else torch.float64, family, **options)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(check_against_own_logits(model)) == trainable  # each of them has a gradient, and nothing else


def test_two_adapters_and_none(peft):
    model = adapted(peft, target_modules=["lm_head"])
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM"))
    model.base_model.set_adapter(["default", "second"])
    shake(model)
    layer, x = model.get_base_model().lm_head, torch.randn(5, 16, dtype=torch.float64)
    head = lm_head_inputs(layer, x)
    assert head.weight.shape == (64, 16 + 4 + 2)
    torch.testing.assert_close(head.hidden @ head.weight.T, layer(x))
    with model.disable_adapter():
        head = lm_head_inputs(layer, x)
        assert head.weight is layer.base_layer.weight and head.hidden is x
        torch.testing.assert_close(head.hidden @ head.weight.T, layer(x))
    frozen = adapted(peft, target_modules=BODY).get_base_model().lm_head
    assert lm_head_inputs(frozen, x).weight is frozen.weight and not frozen.weight.requires_grad
    saved = adapted(peft, target_modules=BODY, modules_to_save=["lm_head"])
    for wrapped in (layer, saved.get_base_model().lm_head):
        with pytest.raises(TypeError, match=r"a layer of PEFT; pass what lm_head_inputs\(lm_head, hidden\) of"):
            fused_logps(HIDDEN.double(), wrapped, torch.zeros(2, 3).long())
    layer = saved.get_base_model().lm_head
    with saved.disable_adapter():
        assert lm_head_inputs(layer, x).weight is layer.original_module.weight
    assert lm_head_inputs(layer, x).weight is layer.modules_to_save["default"].weight


def test_trainable_tokens(peft):
    """Their rows are those of the model; without the adapter the base weight is; as a target of their own, too."""
    x = torch.randn(5, 16, dtype=torch.float64)
    wrapped = adapted(peft, target_modules=BODY, trainable_token_indices={"lm_head": [1, 7]})
    direct = adapted(peft, kind="TrainableTokensConfig", target_modules=["lm_head"], token_indices=[1, 7])
    for model in (wrapped, direct):
        layer = model.get_base_model().lm_head
        base = getattr(layer, "token_adapter", layer).base_layer
        head = lm_head_inputs(layer, x)
        torch.testing.assert_close(x @ head.weight.T, layer(x))
        assert (head.weight != base.weight).any(1).nonzero().flatten().tolist() == [1, 7]
        with model.disable_adapter():
            assert lm_head_inputs(layer, x).weight is base.weight


def test_sixteen_bit_weights_keep_a_small_adapter(peft):
    """W + s B A in bfloat16 would round it away; the longer product does not."""
    model = adapted(peft, torch.bfloat16, target_modules=["lm_head"])
    layer = model.get_base_model().lm_head
    assert layer.lora_B["default"].weight.dtype == torch.float32
    with torch.no_grad():
        layer.base_layer.weight.copy_(torch.where(layer.base_layer.weight > 0, 1.0, -1.0))
        layer.lora_A["default"].weight.fill_(1e-2)
        layer.lora_B["default"].weight.fill_(1e-2)
    x = torch.ones(1, 16, dtype=torch.bfloat16)
    head = lm_head_inputs(layer, x)
    low_rank = (head.hidden.double() @ head.weight.double().T - x.double() @ layer.base_layer.weight.double().T).mean()
    right = 1.5 * 16 * 4 * 1e-4  # s H r a b
    assert abs(low_rank / right - 1) < 0.01
    summed = (layer.base_layer.weight + layer.get_delta_weight("default").bfloat16()).double()
    assert abs((x.double() @ (summed - layer.base_layer.weight.double()).T).mean() / right - 1) > 0.2


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        ("LoraConfig", dict(use_dora=True), TypeError, "adapter 'default' is a variant of LoRA, such as DoRA"),
        ("LoraConfig", dict(lora_bias=True), TypeError, r"adapter 'default' has a bias \(lora_bias\)"),
        ("LoraConfig", dict(lora_dropout=0.1), ValueError, "adapter 'default' has dropout 0.1"),
        ("LoHaConfig", {}, TypeError, "of PEFT's layers only LoRA, modules_to_save and trainable tokens are supported"),
    ],
    ids=["DoRA", "bias", "dropout", "LoHa"],
)
def test_what_is_not_a_product_with_one_weight_is_refused_by_name(peft, kind, options, error, message):
    model = adapted(peft, kind=kind, target_modules=["lm_head"], **options).train()
    with pytest.raises(error, match=f"lm_head (is|has) .*{message}"):
        lm_head_inputs(model.get_base_model().lm_head, HIDDEN.double())
    if "lora_dropout" in options:
        lm_head_inputs(model.eval().get_base_model().lm_head, HIDDEN.double())


def test_adapters_that_act_elsewhere_are_refused_by_name(peft):
    from grpo_kernels.integrations.transformers import fused_forward

    model = adapted(peft, kind="PromptTuningConfig", num_virtual_tokens=2)
    with pytest.raises(TypeError, match="model has the adapter 'default', which adds a prompt"):
        fused_forward(model, **batch(), advantages=ADVANTAGES)
    # PEFT switches it on in its own forward: the body would run without it, and it would get no gradient.
    if "alora_invocation_tokens" not in peft.LoraConfig.__dataclass_fields__:
        pytest.skip("this release of peft has no aLoRA")
    model = adapted(peft, target_modules=BODY, alora_invocation_tokens=[5])
    with pytest.raises(TypeError, match=r"model has the adapter 'default', which acts from its invocation tokens on"):
        fused_forward(model, **batch(), advantages=ADVANTAGES)


@pytest.mark.parametrize("kind", ["LoraConfig", "TrainableTokensConfig"])
def test_merged_adapters_would_get_no_gradient(peft, kind):
    options = {"token_indices": [3]} if kind == "TrainableTokensConfig" else {}
    model = adapted(peft, kind=kind, target_modules=["lm_head"], **options)
    layer, x = model.get_base_model().lm_head, torch.randn(2, 16, dtype=torch.float64)
    expected = layer(x)
    layer.merge()
    with pytest.raises(ValueError, match=r"merged: they would get no gradient; call lm_head\.unmerge\(\) first"):
        lm_head_inputs(layer, x)
    with torch.no_grad():
        torch.testing.assert_close(x @ lm_head_inputs(layer, x).weight.T, expected)


# --- without PEFT -----------------------------------------------------------------------------------------------------


def test_other_layers_are_refused_by_name():
    class Linear4bit(torch.nn.Linear):
        def forward(self, x):
            return x

    four_bit, lora, replaced = Linear4bit(16, 64), torch.nn.Module(), torch.nn.Linear(16, 64)
    four_bit.weight = torch.nn.Parameter(torch.zeros(64 * 8, 1, dtype=torch.uint8), requires_grad=False)
    lora.base_layer = four_bit
    replaced.forward = lambda x: x
    quantised = r"quantised \(Linear4bit, Parameter of torch.uint8\); expected a plain torch\.nn\.Linear"
    for layer, message in (
        (four_bit, quantised),
        (lora, quantised),
        (torch.nn.Embedding(64, 16), r"a torch\.nn\.modules\.sparse\.Embedding; expected a"),
        (torch.nn.Sequential(torch.nn.Linear(16, 64)), r"a torch\.nn\.modules\.container\.Sequential; expected a"),
        (SimpleNamespace(), r"a SimpleNamespace; expected a torch\.nn\.Module"),
        (replaced, r"a torch\.nn\.modules\.linear\.Linear whose forward was replaced"),
    ):
        with pytest.raises(TypeError, match=f"lm_head is {message}"):
            lm_head_inputs(layer, HIDDEN)

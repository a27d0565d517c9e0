"""check_alignment: which mistake log-probabilities look like that are not the model's own."""

from __future__ import annotations

import re

import pytest
import torch
from model_calls import LENGTH, batch, positions_of
from tiny_models import TINY_MODELS, tiny_model

from grpo_kernels import fused_logps
from grpo_kernels.integrations import logit_transform
from grpo_kernels.integrations.alignment import check_alignment


@pytest.mark.parametrize("family", sorted(TINY_MODELS))
def test_fused_forward_is_aligned(family):
    result = check_alignment(tiny_model(family, dtype=torch.bfloat16), batch(), temperature=0.7)
    assert result.aligned and result.message.startswith("aligned: the log-probabilities differ by"), result


def own_call(model, inputs, slip: str = "", temperature: float = 1.0) -> torch.Tensor:
    """What a trainer writes itself, with a mistake of that name."""
    given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    seen = []
    norm = next(m for m in reversed(list(model.base_model.modules())) if "Norm" in type(m).__name__)
    hook = norm.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    with torch.no_grad():
        hidden = model.base_model(**given, position_ids=positions_of(inputs)).last_hidden_state
        hook.remove()
        if slip == "norm":
            hidden = seen[0]
        hidden = {
            "late": hidden[:, -LENGTH:],
            "early": hidden[:, -LENGTH - 2 : -2],
        }.get(slip, hidden[:, -LENGTH - 1 : -1])
        scale, softcap = logit_transform(model.config)
        scale = {"scale": 1.0, "inverted": 1 / scale}.get(slip, scale)
        return fused_logps(
            hidden,
            model.lm_head.weight,
            inputs["completion_ids"],
            lm_head_bias=None if slip == "bias" else model.lm_head.bias,
            logit_scale=scale,
            logit_softcap=None if slip == "softcap" else softcap,
            temperature=1.0 if slip == "temperature" else temperature,
        )[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "slip", "named"),
    [
        ("llama", "", None),
        ("llama", "late", "hidden states one position late"),
        ("llama", "early", "hidden states one position early"),
        ("llama", "norm", "hidden states before the final norm"),
        ("llama", "temperature", "a forgotten temperature"),
        ("granite", "", None),
        ("granite", "scale", "a forgotten logit_scale of 0.166667"),
        ("granite", "inverted", "an inverted logit_scale, 6 for 0.166667"),
        ("gemma3_text", "softcap", "a forgotten logit_softcap of 0.5"),
        ("gptj", "bias", "a forgotten lm_head_bias"),
    ],
)
def test_a_mistake_is_named(family, slip, named, dtype):
    model, inputs = tiny_model(family, dtype=dtype), batch()
    temperature = 0.7 if slip == "temperature" else 1.0
    logps = own_call(model, inputs, slip, temperature)
    logps[inputs["attention_mask"][:, -LENGTH:] == 0] = 100.0  # padding does not count
    result = check_alignment(model, inputs, logps, temperature=temperature)
    assert result.aligned == (named is None), result
    assert named is None or f"it looks like {named}" in result.message, result
    assert "\n" not in result.message


def test_noise_is_none_of_the_usual_mistakes():
    model, inputs = tiny_model("llama"), batch()
    logps = own_call(model, inputs)
    result = check_alignment(model, inputs, logps + torch.randn_like(logps))
    assert not result.aligned and result.message.endswith("it looks like none of the usual mistakes")
    for given, error, message in (
        ((inputs, logps[:, :-1]), ValueError, "logps has shape (4, 5); expected (4, 6) like completion_ids"),
        (
            ({"input_ids": inputs["input_ids"]},),
            ValueError,
            "batch has no 'completion_ids'; expected the tensors of fused",
        ),
        (([inputs["input_ids"]],), TypeError, "batch is a list; expected a dict of the tensors of fused_forward"),
        ((inputs, logps.tolist()), TypeError, "logps is a list; expected a torch.Tensor"),
        (({**inputs, "completion_mask": torch.zeros(4, LENGTH)},), ValueError, "batch has no scored token"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            check_alignment(model, *given)


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "gptj"])
@pytest.mark.parametrize(("made", "told"), [(0.5, 1.0), (0.7, 1.0), (1.3, 1.0), (3.0, 1.0), (0.6, 0.9), (1.0, 0.7)])
def test_a_temperature_that_the_check_is_not_told_is_fitted(family, made, told):
    model, inputs = tiny_model(family), batch()
    result = check_alignment(model, inputs, own_call(model, inputs, temperature=made), temperature=told)
    kind = "a forgotten" if made == 1.0 else "another"
    expected = f"{kind} temperature: they are at {made:g}, where the check was told {told:g}"
    assert not result.aligned and result.message.endswith(f"it looks like {expected}"), result


def test_a_forward_without_the_mask_of_left_padding_is_named():
    model, inputs = tiny_model("llama"), batch()
    ids, mask = inputs["input_ids"].clone(), inputs["attention_mask"].clone()
    mask[0, :3] = 0
    ids[mask == 0] = model.config.pad_token_id
    ids[:, :3][mask[:, :3] == 1] = 7
    inputs |= {"input_ids": ids, "attention_mask": mask, "completion_ids": ids[:, -LENGTH:]}
    bare = inputs | {"attention_mask": torch.ones_like(mask), "completion_mask": mask[:, -LENGTH:]}
    named = "it looks like a forward without an attention_mask, of prompts that are padded on the left"
    logps = own_call(model, bare)
    assert check_alignment(model, inputs).aligned
    assert named in check_alignment(model, inputs, logps).message
    del bare["attention_mask"]
    result = check_alignment(model, bare, logps)
    assert result.aligned and result.message.endswith("config.pad_token_id, and batch has no attention_mask")
    result = check_alignment(model, bare, own_call(model, inputs))
    assert not result.aligned and named in result.message


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [("gpt2", {"embd_pdrop": 0.1}, "drop (p=0.1)"), ("llama", {"attention_dropout": 0.2}, "attention_dropout (0.2)")],
)
def test_dropout_that_is_on_is_named(family, options, named):
    model, inputs = tiny_model(family, **options).train(), batch()
    result = check_alignment(model, inputs)
    assert not result.aligned and result.message.startswith("not compared: the model is in training mode and ")
    assert named in result.message
    assert check_alignment(model.eval(), inputs).aligned


def test_the_base_weight_of_a_head_with_adapters_is_named():
    peft = pytest.importorskip("peft", reason="peft is not installed: run make test")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"], init_lora_weights=False)
    model, inputs = peft.get_peft_model(tiny_model("llama"), config), batch()
    assert check_alignment(model, inputs).aligned
    result = check_alignment(model, inputs, own_call(model.get_base_model(), inputs))
    assert "it looks like the base weight of an lm_head with adapters" in result.message

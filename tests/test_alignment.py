"""check_alignment: what is right passes, and each usual mistake is named."""

from __future__ import annotations

import pytest
import torch
from test_transformers import LENGTH, batch, positions_of
from tiny_models import TINY_MODELS, tiny_model

from grpo_kernels import fused_logps

pytest.importorskip("transformers")
from grpo_kernels.integrations import logit_transform
from grpo_kernels.integrations.alignment import check_alignment

DTYPES = [torch.float32, torch.bfloat16]


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


@pytest.mark.parametrize("dtype", DTYPES)
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
    result = check_alignment(model, inputs, own_call(model, inputs, slip, temperature), temperature=temperature)
    assert result.aligned == (named is None), result
    assert named is None or f"it looks like {named}" in result.message, result
    assert "\n" not in result.message


def test_noise_is_none_of_the_usual_mistakes():
    model, inputs = tiny_model("llama"), batch()
    logps = own_call(model, inputs)
    result = check_alignment(model, inputs, logps + torch.randn_like(logps))
    assert not result.aligned and result.message.endswith("it looks like none of the usual mistakes")
    with pytest.raises(ValueError, match=r"logps has shape \(4, 5\); expected \(4, 6\) like completion_ids"):
        check_alignment(model, inputs, logps[:, :-1])
    with pytest.raises(ValueError, match="batch has no 'completion_ids'; expected the tensors of fused_forward"):
        check_alignment(model, {"input_ids": inputs["input_ids"]})
    with pytest.raises(TypeError, match="batch is a list; expected a dict of the tensors of fused_forward"):
        check_alignment(model, [inputs["input_ids"]])
    with pytest.raises(TypeError, match=r"logps is a list; expected a torch\.Tensor"):
        check_alignment(model, inputs, logps.tolist())
    with pytest.raises(ValueError, match="batch has no scored token"):
        check_alignment(model, {**inputs, "completion_mask": torch.zeros(4, LENGTH)})


def test_padding_does_not_count():
    model, inputs = tiny_model("llama"), batch()
    logps = own_call(model, inputs)
    logps[inputs["attention_mask"][:, -LENGTH:] == 0] = 100.0
    assert check_alignment(model, inputs, logps).aligned


def test_the_base_weight_of_a_head_with_adapters_is_named():
    peft = pytest.importorskip("peft", reason="peft is not installed: run make test")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"], init_lora_weights=False)
    model, inputs = peft.get_peft_model(tiny_model("llama"), config), batch()
    assert check_alignment(model, inputs).aligned
    result = check_alignment(model, inputs, own_call(model.get_base_model(), inputs))
    assert "it looks like the base weight of an lm_head with adapters" in result.message

"""What a model does to the output of its lm_head before the softmax, read from its configuration.

The rules come from the model code of transformers 5.23 (`modeling_<model type>.py`, the class for generation), and
for "minicpm" from its checkpoints. tests/test_logit_transform.py compares them with the installed transformers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class LogitTransform(NamedTuple):
    """z = softcap tanh(scale (h W^T + b) / softcap); without the tanh where softcap is None.

    The numbers are `GRPOConfig(logit_scale=scale, logit_softcap=softcap)`.
    """

    scale: float
    softcap: float | None


class _Rule(NamedTuple):
    """Names of attributes of the text configuration; logits are multiplied by `times` and divided by `over`."""

    times: str = ""
    over: str = ""
    softcap: str = ""
    optional: bool = False  # the attributes may be None


_FAMILIES = {
    _Rule(softcap="final_logit_softcapping", optional=True): (  # "gemma3", with images, does not apply it
        "beam gemma2 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text nanochat "
        "paligemma vaultgemma"
    ),
    _Rule(softcap="final_logit_softcapping"): "mistral_large4",
    _Rule(softcap="logits_soft_cap"): "recurrent_gemma",
    _Rule(softcap="output_logit_soft_cap", optional=True): "xlstm",
    _Rule(over="logits_scaling"): (  # of minicpm3 a property, hidden_size / dim_model_base
        "granite granite4_vision granite_docling granite_swa granitemoe granitemoe_swa granitemoehybrid "
        "granitemoeshared minicpm3"
    ),
    _Rule(times="dim_model_base", over="hidden_size"): "minicpm",
    _Rule(times="logit_scale"): "cohere cohere2 cohere2_moe cohere_compass",
    _Rule(times="logit_scale", optional=True): "cohere_compass_text",
    _Rule(times="logits_scaling"): "hyperclovax hyperclovax_vision_v2",
    _Rule(times="lm_head_multiplier"): "falcon_h1",
    _Rule(times="output_multiplier", softcap="final_logit_softcapping"): "muse_glimmer muse_spark",
}
_RULES = {family: rule for rule, families in _FAMILIES.items() for family in families.split()}

# Families whose logits are lm_head(hidden) and nothing else.
_PLAIN_NAMES = """
afmoe apertus arcee aria aria_text axk1 axk2 bailing_hybrid bamba biogpt bitnet bloom blt codegen cosmos3_edge
cosmos3_omni ctrl cwm dbrx deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl deepseek_vl_hybrid
diffllama doge dots1 dots3_note dots3_note_text emu3 emu3_text_model ernie4_5 ernie4_5_moe ernie4_5_vl_moe exaone4
exaone4_5 exaone_moe falcon falcon_mamba fast_vlm flex_olmo flint fuyu gemma gemma3 glm glm4 glm46v glm4_moe
glm4_moe_lite glm4v glm4v_moe glm5_next glm_moe_dsa glm_ocr glmga got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox
gpt_neox_japanese gpt_oss gptj helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hy_v3 hy_v4 idefics2 idefics3
internlm3 internvl iquestcoder jais2 jamba janus jetmoe kimi_k25 kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm2_vl lfm3
lfm3_vl lighton_ocr llama llama4 llama4_text llava llava_next llava_next_video llava_onevision longcat_flash mamba
mamba2 mellum mimo_v2_flash minicpm_ocr minicpmv4_6 minicpmv4_7 minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text
ministral ministral3 mistral mistral3 mistral4 mixtral mllama molmo2 mpt nemotron nemotron_h olmo olmo2 olmo3
olmo_hybrid olmoe openai-gpt opt ovis2 paddleocr_vl perception_lm persimmon phi phi3 phi4_multimodal phimoe
pp_chart2table qianfan_ocr qwen2 qwen2_5_omni_thinker qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe
qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen4_exp qwen4_exp_text
seed_oss smollm3 smolvlm solar_open stablelm starcoder2 step3p7 unlimited_ocr video_llama_3 video_llava vipllava xglm
youtu zamba zamba2 zaya
"""
_PLAIN_FAMILIES = frozenset(_PLAIN_NAMES.split())

# Attributes by which some family scales or caps its logits.
_SCALES = ("logit_scale", "logits_scaling", "logits_mup_width_multiplier", "lm_head_multiplier", "output_multiplier")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def logit_transform(config: Any) -> LogitTransform:
    """Returns the scale and softcap of a model's logits, from its configuration.

    config: `model.config`, or any object with its attributes: model_type, the model family's own, and for a model
    with images or audio the text_config that holds them.

        transform = logit_transform(model.config)
        config = GRPOConfig.preset("dapo", logit_scale=transform.scale, logit_softcap=transform.softcap)

    Raises:
        ValueError: a family without a rule here; an attribute that is missing or no positive number; an attribute by
            which another family scales or caps its logits, with a value that would change them. The log-probabilities
            would be wrong without any error, so nothing is guessed: pass logit_scale and logit_softcap yourself, and
            compare `fused_logps` with the model's own logits.
    """
    family = getattr(config, "model_type", None)
    if not isinstance(family, str):
        raise ValueError(f"config is a {type(config).__name__} without model_type; expected model.config")
    if family not in _RULES and family not in _PLAIN_FAMILIES:
        raise ValueError(
            f"config.model_type={family!r}: no rule for the logits of this family; pass logit_scale and logit_softcap "
            "yourself, and compare fused_logps with the model's own logits"
        )
    rule = _RULES.get(family, _Rule())
    text = getattr(config, "text_config", None) or config
    _refuse_others(text, family, rule)
    scale = _positive(text, family, rule, rule.times) or 1.0
    scale /= _positive(text, family, rule, rule.over) or 1.0
    return LogitTransform(scale, _positive(text, family, rule, rule.softcap))


def _positive(text: Any, family: str, rule: _Rule, name: str) -> float | None:
    """Returns the value of the attribute `name`; None where the rule has no name, or allows None."""
    value = getattr(text, name, None) if name else None
    if value is None and (rule.optional or not name):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"config.{name}={value!r} of model_type {family!r}; expected a positive number")
    return float(value)


def _refuse_others(text: Any, family: str, rule: _Rule) -> None:
    """Refuses attributes that another family reads, unless their values change nothing."""
    for name in (*_SCALES, *_SOFTCAPS):
        value = getattr(text, name, None)
        if name not in rule and value is not None and not (name in _SCALES and value == 1):
            raise ValueError(
                f"config.{name}={value!r}: the logits of model_type {family!r} do not depend on it in transformers, "
                "other families' logits do; pass logit_scale and logit_softcap yourself, and compare fused_logps with "
                "the model's own logits"
            )

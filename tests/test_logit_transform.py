"""logit_transform: scale and softcap of every family of transformers, from its configuration."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import transformers

from grpo_kernels.integrations import LogitTransform, logit_transform
from grpo_kernels.logit_transform import _PLAIN_FAMILIES, _RULES

as_read = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason="the rules are those of transformers 5.23",
)
# Not in transformers: the code that comes with the checkpoints.
REMOTE = {"minicpm"}


@as_read
@pytest.mark.parametrize("family", sorted((_PLAIN_FAMILIES | set(_RULES)) - REMOTE))
def test_the_default_configuration_of_a_family_has_a_transform(family):
    config = transformers.CONFIG_MAPPING[family]()
    if family == "cohere_compass":  # its class multiplies by a scale that is None
        config.text_config.logit_scale = 0.5
    transform = logit_transform(config)
    if family in _PLAIN_FAMILIES:
        assert transform == (1.0, None)


def test_remote_code_minicpm():
    config = SimpleNamespace(model_type="minicpm", hidden_size=2304, dim_model_base=256)
    assert logit_transform(config) == LogitTransform(256 / 2304, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "no_such"}, "config.model_type='no_such': no rule"),
        ({}, "config is a SimpleNamespace without model_type; expected model.config"),
        ({"model_type": "llama", "logits_scaling": 8.0}, "config.logits_scaling=8.0: the logits of model_type 'llama'"),
        ({"model_type": "qwen3", "final_logit_softcapping": 30.0}, "config.final_logit_softcapping=30.0"),
        ({"model_type": "granite"}, "config.logits_scaling=None of model_type 'granite'; expected a positive number"),
        ({"model_type": "granite", "logits_scaling": 0}, "config.logits_scaling=0 of model_type 'granite'"),
        ({"model_type": "cohere", "logit_scale": True}, "config.logit_scale=True"),
        ({"model_type": "gemma2", "final_logit_softcapping": -1.0}, "config.final_logit_softcapping=-1.0"),
        (
            {"model_type": "gemma3", "text_config": SimpleNamespace(final_logit_softcapping=30.0)},
            "config.final_logit_softcapping=30.0: the logits of model_type 'gemma3' do not depend on it",
        ),
    ],
)
def test_what_cannot_be_vouched_for_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        logit_transform(SimpleNamespace(**config))

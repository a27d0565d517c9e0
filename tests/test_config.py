"""GRPOConfig: what it refuses; equality and hash, with tensor options too."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import get_args

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.checks.arguments import check_config
from grpo_kernels.config import SURROGATE_RULES, Surrogate

TENSORS = {
    "temperature": torch.full((4, 6), 0.8),
    "entropy_threshold": torch.tensor([1.0, 2.0]),
    "entropy_coef": torch.tensor(0.1),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_options_are_compared_by_identity(name):
    x = TENSORS[name]
    config, same = gk.GRPOConfig(**{name: x}), gk.GRPOConfig(**{name: x})
    assert config == same and hash(config) == hash(same)
    for other in (gk.GRPOConfig(**{name: x.clone()}), gk.GRPOConfig(), gk.GRPOConfig(**{name: 0.8})):
        assert config != other and other != config
    assert len({config, same, gk.GRPOConfig(**{name: x.clone()})}) == 2


def test_other_options_are_compared_by_value():
    one, other = gk.GRPOConfig(beta=1), gk.GRPOConfig(beta=1.0)
    assert one == other and hash(one) == hash(other)
    assert gk.GRPOConfig() != "dapo"
    assert gk.GRPOConfig(epsilon_low=0.2) == gk.GRPOConfig()  # the default, spelled out
    for options in ({"beta": 0.1}, {"chunk_rows": 7}, {"logits_dtype": torch.float32}, {"score_inactive": False}):
        assert gk.GRPOConfig(**options) != gk.GRPOConfig()


def test_a_list_of_clamps_is_hashable():
    config = gk.GRPOConfig(beta=0.1, kl_clamp=[0.6, 0.3])
    assert config == gk.GRPOConfig(beta=0.1, kl_clamp=(0.6, 0.3))
    assert hash(config) == hash(gk.GRPOConfig(beta=0.1, kl_clamp=(0.6, 0.3)))


RANGES = {
    "beta": (-0.1, math.nan, math.inf), "entropy_coef": (-1.0,), "epsilon_low": (-0.1,), "epsilon_high": (-0.1,),
    "delta": (0.0, -1.0), "dual_clip": (1.0, 0.5), "log_ratio_clamp": (0.0,), "kl_clamp": (0.0, (1.0, -1.0), (1.0,)),
    "temperature": (0.0, -1.0, math.nan), "logit_scale": (0.0,), "logit_softcap": (0.0, -3.0),
    "off_policy_mask_threshold": (-0.1,), "chunk_rows": (0, -1, 2.5, True), "advantage_ddof": (2, None, torch.ones(1)),
    "advantage_eps": (-1e-4,), "logits_dtype": (torch.int64,),
}  # fmt: skip
NUMBERS = ("beta", "epsilon_low", "temperature", "logit_scale", "delta", "entropy_threshold", "advantage_eps")
FLAGS = ("use_bias_correction_kl", "score_inactive", "static_shapes")
REFUSED = [
    *(({name: x}, ValueError, rf"{name}(\[\d\])?=.*expected") for name, xs in RANGES.items() for x in xs),
    *(
        ({name: x}, TypeError, f"{name} is a {type(x).__name__}; expected a number")
        for name in NUMBERS
        for x in ("0.1", True, [1.0])
    ),
    (dict(advantage_eps=None), TypeError, "advantage_eps is a NoneType; expected a number"),
    *(  # the text "False" is true to Python
        ({name: x}, TypeError, f"{name} is a {type(x).__name__}; expected True or False")
        for name in FLAGS
        for x in ("False", 0, None, torch.tensor(True))
    ),
    (dict(beta=10**400), ValueError, "beta=an integer of 1331 bits; expected a finite number >= 0"),
    (dict(temperature=1e39), ValueError, "temperature=1e\\+39; expected a finite number > 0"),
    # names
    (dict(surrogate="x"), ValueError, "surrogate='x'; expected one of clip, .*ipo"),
    (dict(kl_estimator="k4"), ValueError, "kl_estimator='k4'; expected one of"),
    (dict(aggregation="mean"), ValueError, "aggregation='mean'; expected one of"),
    (dict(advantage_scale="token"), ValueError, "advantage_scale='token'; expected one of"),
    (dict(advantage_baseline="median"), ValueError, "advantage_baseline='median'; expected one of"),
    (dict(epsilon=0.2), TypeError, "no option 'epsilon': this package has epsilon_low and epsilon_high"),
    (dict(loss_type="grpo"), TypeError, r"no option 'loss_type': this package has GRPOConfig.preset\(name\)"),
    (dict(scale_rewards="group"), TypeError, "no option 'scale_rewards': this package has advantage_scale"),
    (dict(num_iterations=2), TypeError, "no option 'num_iterations': this package has old_logps= of the call"),
    (dict(entropy_coeff=0.1), TypeError, "no option 'entropy_coeff': this package has entropy_coef"),
    # a trainer that ignores an option without a word trains another loss than its user asked for
    (dict(importance_sampling_level="word"), ValueError, "importance_sampling_level='word' does not go with"),
    (dict(surrogate="gmpo", importance_sampling_level="token"), ValueError, "importance_sampling_level='token' does"),
    (dict(surrogate="sapo", epsilon_low=0.1), ValueError, "epsilon_low=0.1 has no effect with surrogate='sapo'"),
    (dict(surrogate="reinforce", epsilon_high=0.1), ValueError, "epsilon_high=0.1 has no effect"),
    (dict(surrogate="cispo", delta=2.0), ValueError, "delta=2.0 has no effect"),
    (dict(surrogate="cispo", dual_clip=2.0), ValueError, "dual_clip=2.0 has no effect"),
    (dict(sapo_temperature_pos=1.0), ValueError, "sapo_temperature_pos=1.0 has no effect"),
    (dict(vespo_k_pos=1.0), ValueError, "vespo_k_pos=1.0 has no effect"),
    (dict(max_completion_length=5), ValueError, "max_completion_length has no effect"),
    (dict(kl_estimator="none", beta=0.1), ValueError, "kl_estimator='none' contradicts beta"),
    (dict(kl_estimator="none", use_bias_correction_kl=True), ValueError, "contradicts .*use_bias_correction_kl"),
    (dict(epsilon_low=20), ValueError, r"epsilon_low=20 with surrogate='clip'; expected a number in \[0, 1\]"),
    (dict(surrogate="ipo", epsilon_high=1.5), ValueError, "epsilon_high=1.5 with surrogate='ipo'; expected"),
    (dict(delta=1.1), ValueError, "delta=1.1 is below 1 \\+ epsilon_high = 1.2"),
]


def test_what_does_not_fit_is_refused_by_name():
    for options, error, message in REFUSED:
        for make in (gk.GRPOConfig, partial(gk.GRPOConfig.preset, "ppo")):
            with pytest.raises(error, match=message):
                make(**options)
    with pytest.raises(ValueError, match=r"preset='ppo2'; expected one of grpo, .*verl"):
        gk.GRPOConfig.preset("ppo2")


def test_a_configuration_of_trl_is_named_and_its_way_here():
    foreign = type("GRPOConfig", (), {"__module__": "trl.trainer.grpo_config"})()
    expected = r"config is a trl.trainer.grpo_config.GRPOConfig; expected a grpo_kernels.*from_trl\(config\)"
    with pytest.raises(TypeError, match=expected):
        check_config(foreign)


def test_types_of_the_options_are_the_names_that_are_taken():
    assert get_args(Surrogate) == tuple(SURROGATE_RULES)


def test_the_package_lists_its_public_names():
    assert set(dir(gk)) == {*gk.__all__, "__version__"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("epsilon", "; this package has epsilon_low and epsilon_high"),
        ("beta", "; this package has config=GRPOConfig(beta=...)"),
        ("nothing", ""),
    ],
)
def test_an_option_of_the_config_that_is_given_to_the_loss(name, hint):
    logps = torch.zeros(2, 3)
    with pytest.raises(TypeError, match=re.escape(f"unexpected keyword argument {name!r}{hint}") + "$"):
        gk.grpo_loss_from_logps(logps, torch.ones(2), **{name: 0.2})

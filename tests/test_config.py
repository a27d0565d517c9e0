"""GRPOConfig as a value: equality and hash, with tensor options too."""

from __future__ import annotations

import pytest
import torch

import grpo_kernels as gk

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

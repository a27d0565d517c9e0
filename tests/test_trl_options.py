"""Options of TRL: read, named in a warning, or refused; trainers whose loss would have no effect; versions of TRL."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import tiny_model

pytest.importorskip("trl", reason="trl is not installed: make test EXTRAS=dev,peers")

import trl
import trl_parity as parity

import grpo_kernels as gk
from grpo_kernels.integrations import trl as integration


def test_from_trl_reads_what_the_loss_type_uses(tmp_path):
    def config(**options: Any) -> gk.GRPOConfig:
        overrides = options.pop("overrides", {})
        return gk.GRPOConfig.from_trl(parity.trl_arguments(str(tmp_path), **options), **overrides)

    assert config(loss_type="dapo") == gk.GRPOConfig(
        epsilon_low=0.1, epsilon_high=0.1, temperature=0.9, importance_sampling_level="token"
    )
    assert config(loss_type="cispo", epsilon_high=4.0, delta=2.0).epsilon_high == 4.0
    assert config(loss_type="dr_grpo").max_completion_length == 8
    assert config(loss_type="grpo").max_completion_length is None
    assert config(loss_type="vespo", vespo_lambda_pos=0.0).vespo_lambda_pos == 1e-4
    assert config(beta=0.1).use_bias_correction_kl and not config().use_bias_correction_kl
    assert config(overrides={"beta": 0.5}).beta == 0.5
    granite = SimpleNamespace(model_type="granite", logits_scaling=8.0)
    assert gk.GRPOConfig.from_trl(parity.trl_arguments(str(tmp_path)), granite).logit_scale == 1 / 8
    with pytest.raises(ValueError, match=r"top_entropy_quantile=0.2.*entropy_threshold"):
        config(top_entropy_quantile=0.2)
    with_bonus = config(top_entropy_quantile=0.2, entropy_coef=0.01, overrides={"entropy_threshold": 1.0})
    assert with_bonus.entropy_kept_only and not config(entropy_coef=0.01).entropy_kept_only
    with pytest.raises(ValueError, match=r"use_adaptive_entropy=True.*entropy_coef"):
        config(use_adaptive_entropy=True)
    with pytest.raises(ValueError, match="loss_type='gspo'; expected one of grpo"):
        config(loss_type="gspo")


# Options of TRL and values of them with which `from_trl` gives another loss, or raises: it cannot know a number.
READ: dict[str, Any] = dict(
    loss_type="bnpo", importance_sampling_level="sequence", epsilon=0.3, epsilon_high=0.4, delta=3.0, beta=0.1,
    temperature=0.5, entropy_coef=0.1, off_policy_mask_threshold=0.2, scale_rewards="none", top_entropy_quantile=0.5,
    use_adaptive_entropy=True,
)  # fmt: skip
READ_WITH: dict[str, tuple[dict[str, Any], Any]] = {  # with these options
    "max_completion_length": ({"loss_type": "dr_grpo"}, 9),
    "use_bias_correction_kl": ({"beta": 0.1}, False),
    **{f"sapo_temperature_{side}": ({"loss_type": "sapo"}, 0.7) for side in ("pos", "neg")},
    **{f"vespo_{name}_{side}": ({"loss_type": "vespo"}, 0.7) for name in ("k", "lambda") for side in ("pos", "neg")},
}
# Values with which TRL's trainer does something beside the loss: named in a warning.
BESIDE: dict[str, Any] = dict(
    cast_lm_head_to_fp32=True, disable_dropout=True, mask_truncated_completions=True, neftune_noise_alpha=5.0,
    multi_objective_aggregation="normalize_then_sum", reward_weights=[1.0, 2.0], router_aux_loss_coef=0.1,
    sync_ref_model=True, use_vllm=True, min_p=0.1, top_k=5, top_p=0.9,
)  # fmt: skip
# Neither: which completions there are, numbers of options above, how the loss is accumulated (`normalizer`), optimiser,
# precision, files, logs.
OTHERS = (Path(__file__).with_name("data") / "trl_options.txt").read_text(encoding="utf-8").split()


def test_every_option_of_trl_is_read_or_named_or_changes_no_loss(tmp_path, recwarn):
    """A new one has to be looked at: whether the loss depends on it, and whether `from_trl` has to know it."""
    known = [*READ, *READ_WITH, *BESIDE, *OTHERS]
    assert len(known) == len(set(known))
    assert {field.name for field in dataclasses.fields(trl.GRPOConfig)} == set(known)

    def config(**options: Any) -> gk.GRPOConfig | str:
        try:
            return gk.GRPOConfig.from_trl(parity.trl_arguments(str(tmp_path), **options))
        except ValueError as error:
            return str(error)

    for name, (options, value) in {**{name: ({}, value) for name, value in READ.items()}, **READ_WITH}.items():
        found, before = config(**options, **{name: value}), config(**options)
        assert name in found if isinstance(found, str) else found != before, name
    assert not recwarn
    for name, value in BESIDE.items():
        assert config(**{name: value}) == config()
        assert f"GRPOConfig.from_trl: {name}={value!r} is not part of the loss: " in str(recwarn.pop().message)
    experts = SimpleNamespace(model_type="mixtral", output_router_logits=False, router_aux_loss_coef=0.02)
    with pytest.warns(UserWarning, match=r"router_aux_loss_coef=0\.02 is not part of the loss"):
        gk.GRPOConfig.from_trl(parity.trl_arguments(str(tmp_path)), experts)
    config(use_vllm=True, vllm_importance_sampling_correction=False)
    assert not recwarn
    args = parity.trl_arguments(parity.saved_model("qwen2"), mask_truncated_completions=True)
    given = {"model": tiny_model("qwen2"), "processing_class": parity.tokenizer(), "train_dataset": parity.prompts()}
    integration.FusedGRPOTrainer(args=args, reward_funcs=parity.reward, **given)
    assert not [x for x in recwarn if "from_trl" in str(x.message)]  # TRL's trainer does it


@pytest.mark.parametrize(("name", "value"), [
    ("beta", -0.1), ("entropy_coef", -0.1), ("off_policy_mask_threshold", -0.1), ("torch_compile", True),
    ("loss_type", "gspo"), ("delta", -1.0),
])  # fmt: skip
def test_what_cannot_be_honoured_raises_at_construction(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        parity.make_trainer(integration.FusedGRPOTrainer, "qwen2", {name: value})


def test_a_loss_that_would_have_no_effect_is_refused():
    """TRL's own variants, and a user's; what does not touch the loss works, and an own loss in front."""
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    fused = integration.FusedGRPOTrainer

    class OwnLoss(integration.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) * 2

    class Masks(fused):
        @staticmethod
        def get_off_policy_mask(*args, **kwargs):
            return None

    for base, words in ((GMPOTrainer, "has GMPOTrainer._compute_loss"), (OwnLoss, "OwnLoss._compute_loss")):
        with pytest.raises(TypeError, match=f"{words}, which FusedGRPOTrainer does not call"):
            parity.make_trainer(type("Both", (fused, base), {}), "qwen2", {})
    with pytest.raises(TypeError, match=r"Masks has .*Masks.get_off_policy_mask, which"):
        parity.make_trainer(Masks, "qwen2", {})

    class Logs(integration.GRPOTrainer):
        def log(self, *args, **kwargs):
            self.logged = True
            return super().log(*args, **kwargs)

    for bases in ((fused, Logs), (OwnLoss, fused)):
        parity.make_trainer(type("Both", bases, {}), "qwen2", {})

    @dataclasses.dataclass
    class Config(integration.trl.GRPOConfig):
        of_my_reward: float = 1.0

    given = {"model": tiny_model("qwen2"), "processing_class": parity.tokenizer(), "train_dataset": parity.prompts()}
    given |= {"reward_funcs": parity.reward}
    plain = dict(use_cpu=True, report_to=[], bf16=False)
    for config, words in ((GMPOConfig, "args is a GMPOConfig, of a loss"), (Config, "Config with of_my_reward, which")):
        with pytest.raises(TypeError, match=words):
            fused(args=config(**plain), **given)
    type("Mine", (fused,), {})(args=Config(**plain), **given)


def test_other_versions_of_trl_and_none_are_refused_and_no_verl():
    code = """
import importlib.util, sys, types
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "verl" else find(name, *rest)
sys.modules["trl"] = sys.modules["verl"] = sys.modules["transformers"] = None
other = types.SimpleNamespace(__version__="1.15.2")
for name, trl in (("trl", None), ("trl_distillation", None), ("trl", other), ("verl", None), ("alignment", None)):
    sys.modules["trl"] = trl
    try:
        importlib.import_module(f"grpo_kernels.integrations.{name}")
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    none, distillation, other, verl, alignment = done.stdout.splitlines()
    assert none == distillation == "grpo_kernels.integrations.trl needs TRL: pip install 'trl>=1.16,<1.17'"
    assert alignment == "grpo_kernels.integrations.transformers needs transformers: pip install transformers"
    assert "takes trl>=1.16,<1.17; TRL 1.15.2 is installed" in other
    assert verl == "grpo_kernels.integrations.verl needs verl: pip install verl"

"""What options of TRL 1.16 and verl 0.9.1 are called here; and which of TRL's change its loss outside of the loss
function, where `GRPOConfig.from_trl` cannot put them: in TRL's trainer, whose own loop does it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_SUPPORT = "pass sampling_mask=sampling_support(..., top_k=, top_p=, min_p=) of the policy that sampled"
_WEIGHTS = "pass rollout_weights=rollout_weights(...)"
_VLLM = "pass rollout_weights=rollout_weights(...), as vllm_importance_sampling_mode says"
_ADAPTIVE = "pass entropy_coef=, a number or a tensor of one element that your controller sets"
_REJECTION = "pass completion_mask=rejection_mask(...), or rollout_weights times it"
_OWN_LOSS = "write it with fused_policy_loss, as in examples/losses.py"
_KL_IN_REWARDS = "subtract the KL from the rewards; beta weighs one in the loss"
_KL_LOSS = "set beta, above 0 for a KL term, and pass ref_logps="
# Option of a trainer -> what does the same here, as the end of a sentence.
NAMES: dict[str, dict[str, str]] = {
    "TRL": {
        "cast_lm_head_to_fp32": "pass hidden.float() and lm_head_weight.float(), outside of autocast",
        "disable_dropout": "take the dropout out of the model",
        "entropy_coef_delta": _ADAPTIVE,
        "entropy_coef_max": _ADAPTIVE,
        "entropy_coef_min": _ADAPTIVE,
        "entropy_target": _ADAPTIVE,
        "epsilon": "set epsilon_low and epsilon_high",
        "loss_type": "use GRPOConfig.preset(name), or GRPOConfig.from_trl(args)",
        "mask_truncated_completions": "pass a completion_mask of 0 for completions without an end",
        "min_p": _SUPPORT,
        "multi_objective_aggregation": ("pass advantages=combine_advantages(rewards, weights, num_generations=...)"),
        "neftune_noise_alpha": "add the noise to the embeddings",
        "num_generations": "pass num_generations= with rewards=",
        "num_iterations": "pass old_logps=, which more than one update per batch needs",
        "reward_weights": "weigh each reward before they are added up",
        "router_aux_loss_coef": "add the experts' auxiliary loss times it",
        "scale_rewards": "set advantage_scale",
        "steps_per_generation": "pass old_logps=, which more than one update per batch needs",
        "sync_ref_model": "let the reference model of ref_logps follow",
        "top_entropy_quantile": "set entropy_threshold to entropy_quantile(...)",
        "top_k": _SUPPORT,
        "top_p": _SUPPORT,
        "use_adaptive_entropy": _ADAPTIVE,
        "use_vllm": _VLLM,
        "vllm_importance_sampling_cap": "pass rollout_weights=rollout_weights(..., cap=)",
        "vllm_importance_sampling_clip_max": "pass rollout_weights=rollout_weights(..., cap=)",
        "vllm_importance_sampling_clip_min": "pass rollout_weights=rollout_weights(..., low=)",
        "vllm_importance_sampling_correction": _WEIGHTS,
        "vllm_importance_sampling_mode": "pass rollout_weights=rollout_weights(..., level=, mode=)",
    },
    "verl": {
        # ActorConfig
        "calculate_entropy": "the output's entropy is there in any case",
        "clip_ratio": "set epsilon_low and epsilon_high",
        "clip_ratio_c": "set dual_clip",
        "clip_ratio_high": "set epsilon_high",
        "clip_ratio_low": "set epsilon_low",
        "entropy_coeff": "set entropy_coef",
        "kl_loss_coef": "set beta",
        "kl_loss_type": "set kl_estimator",
        "loss_agg_mode": "set aggregation",
        "loss_scale_factor": "set max_completion_length, with aggregation='fixed_length'",
        "policy_loss": "set surrogate, or use GRPOConfig.preset(name)",
        "ppo_epochs": "pass old_logps=, which more than one update per batch needs",
        "tau_neg": "set sapo_temperature_neg",
        "tau_pos": "set sapo_temperature_pos",
        "use_kl_loss": _KL_LOSS,
        "use_rollout_log_probs": "pass old_logps=rollout_logps",
        # PolicyLossConfig
        "clip_cov_lb": _OWN_LOSS,
        "clip_cov_ratio": _OWN_LOSS,
        "clip_cov_ub": _OWN_LOSS,
        "dro_beta": "set surrogate='reinforce', beta and kl_estimator='k2', and pass ref_logps=old_logps",
        "kl_cov_ratio": _OWN_LOSS,
        "loss_mode": "set surrogate, or use GRPOConfig.preset(name)",
        "ppo_kl_coef": _OWN_LOSS,
        # RolloutCorrectionConfig
        "bypass_mode": "pass old_logps=rollout_logps",
        "rollout_correction": _WEIGHTS,
        "rollout_is": "pass rollout_weights=rollout_weights(..., level=)",
        "rollout_is_batch_normalize": "pass rollout_weights=rollout_weights(..., batch_normalize=)",
        "rollout_is_threshold": "pass rollout_weights=rollout_weights(..., cap=)",
        "rollout_rs": _REJECTION,
        "rollout_rs_threshold": _REJECTION,
        # AlgoConfig
        "adv_estimator": "set advantage_baseline and advantage_scale",
        "kl_coef": _KL_IN_REWARDS,
        "kl_ctrl": _KL_IN_REWARDS,
        "kl_penalty": _KL_IN_REWARDS,
        "norm_adv_by_std_in_grpo": "set advantage_scale, to 'none' for False",
        "use_kl_in_reward": _KL_IN_REWARDS,
    },
}
# Options of TRL with values that change nothing; others change the loss outside of the loss function.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "cast_lm_head_to_fp32": (False,),
    "disable_dropout": (False,),
    "min_p": (None, 0.0),
    "top_k": (0, -1),
    "top_p": (1.0,),
    "mask_truncated_completions": (False,),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "neftune_noise_alpha": (None, 0.0),
    "reward_weights": (None,),
    "sync_ref_model": (False,),
    "use_vllm": (False,),
}


def advice(name: str) -> str | None:
    """Returns what takes the place of another trainer's option, as the end of a sentence that names the trainer."""
    for trainer, names in NAMES.items():
        if name in names:
            return f"it is {trainer}'s; here {names[name]}"
    return None


def left_to_the_loop(trl_options: Mapping[str, Any], model_config: Any = None) -> Iterator[str]:
    """Yields a sentence for each option with which TRL's trainer computes another loss than the loss function does.

    trl_options: vars of a trl.GRPOConfig.
    """
    trl_options = {
        **trl_options,
        "use_vllm": trl_options["use_vllm"] and trl_options["vllm_importance_sampling_correction"],
    }
    for name, neutral in _NEUTRAL.items():
        if trl_options[name] not in neutral:
            yield f"{name}={trl_options[name]!r} is not part of the loss: {NAMES['TRL'][name]}"
    text = getattr(model_config, "get_text_config", lambda: model_config)()
    coefficient = trl_options["router_aux_loss_coef"]
    if coefficient is None and hasattr(text, "output_router_logits"):
        coefficient = getattr(text, "router_aux_loss_coef", None)  # TRL's default
    if coefficient:
        yield f"router_aux_loss_coef={coefficient!r} is not part of the loss: {NAMES['TRL']['router_aux_loss_coef']}"

"""What options of TRL's GRPOConfig do to its loss outside of the loss function, where `GRPOConfig.from_trl` cannot put
it: in TRL's trainer, whose own loop does it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Option -> the values that change nothing; what a loop of one's own has to do with others.
_IN_THE_LOOP: dict[str, tuple[tuple[object, ...], str]] = {
    "cast_lm_head_to_fp32": ((False,), "pass hidden.float() and lm_head_weight.float(), outside of autocast"),
    "disable_dropout": ((False,), "take the dropout out of the model"),
    **{
        name: (off, "pass sampling_mask=sampling_support(..., top_k=, top_p=, min_p=) of the policy that sampled")
        for name, off in (("min_p", (None, 0.0)), ("top_k", (0, -1)), ("top_p", (1.0,)))
    },
    "mask_truncated_completions": ((False,), "pass a completion_mask of 0 for completions without an end"),
    "multi_objective_aggregation": (
        ("sum_then_normalize",), "pass advantages=combine_advantages(rewards, weights, num_generations=...)"
    ),
    "neftune_noise_alpha": ((None, 0.0), "add the noise to the embeddings"),
    "reward_weights": ((None,), "weigh each reward before they are added up"),
    "sync_ref_model": ((False,), "let the reference model of ref_logps follow"),
    "use_vllm": ((False,), "pass rollout_weights=rollout_weights(...), as vllm_importance_sampling_mode says"),
}  # fmt: skip


def left_to_the_loop(given: Mapping[str, Any], model_config: Any = None) -> Iterator[str]:
    """A sentence for each option in `given`, vars of a trl.GRPOConfig, with which TRL's trainer computes another loss
    than the loss function."""
    given = {**given, "use_vllm": given["use_vllm"] and given["vllm_importance_sampling_correction"]}
    for name, (neutral, advice) in _IN_THE_LOOP.items():
        if given[name] not in neutral:
            yield f"{name}={given[name]!r} is not part of the loss: {advice}"
    text = getattr(model_config, "get_text_config", lambda: model_config)()
    coefficient = given["router_aux_loss_coef"]
    if coefficient is None and hasattr(text, "output_router_logits"):
        coefficient = getattr(text, "router_aux_loss_coef", None)  # TRL's default
    if coefficient:
        yield f"router_aux_loss_coef={coefficient!r} is not part of the loss: add the experts' auxiliary loss times it"

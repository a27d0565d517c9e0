"""prime-rl: its output layer, and a loss for `trainer.loss.type = "custom"`. Needs nothing of prime-rl.

[trainer.loss]
type = "custom"
import_path = "grpo_kernels.integrations.prime_rl.policy_loss"
kwargs = { surrogate = "clip", epsilon_high = 0.28 }
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..config import GRPOConfig
from ..logps import fused_logps
from ..loss import grpo_loss_from_logps
from ..objective.surrogates import SURROGATE_RULES


class FusedOutputLinear(nn.Linear):
    """An output layer that returns log-probabilities and entropies in place of logits, as prime-rl's of this name.

    chunk_size is prime-rl's and changes nothing here. logit_scale, logit_softcap: the model's. logits_dtype: as in
    `grpo_kernels.GRPOConfig`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        chunk_size: int | None = None,
        *,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
        logits_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.chunk_size = chunk_size
        self.logit_scale = logit_scale
        self.logit_softcap = logit_softcap
        self.logits_dtype = logits_dtype

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, labels: Tensor | None = None, temperature: Tensor | None = None
    ) -> dict[str, Tensor]:
        """{"logprobs": (B, T), "entropy": (B, T)} in float32, from hidden_states (B, T, H), labels, temperature (B, T).

        The log-probabilities are differentiable; the entropies are not, as in prime-rl.
        """
        for name, given in (("labels", labels), ("temperature", temperature)):
            if given is None:
                raise ValueError(f"{name} is None; expected a tensor with one value per token")
        logps, entropy = fused_logps(
            hidden_states, self.weight, labels, temperature=temperature, logit_scale=self.logit_scale,  # type: ignore[arg-type]
            logit_softcap=self.logit_softcap, logits_dtype=self.logits_dtype, entropy=True,
        )  # fmt: skip
        assert entropy is not None
        return {"logprobs": logps, "entropy": entropy.detach()}


class LossOutputs(NamedTuple):
    """loss (), the sum over the tokens of a sequence, which prime-rl divides; metrics."""

    loss: Tensor
    metrics: dict[str, Tensor]


def policy_loss(inputs: Any, **options: Any) -> LossOutputs:
    """Returns the loss of one sequence, not normalised, from prime-rl's LossInputs.

    inputs: trainer_logprobs, inference_logprobs, advantages and loss_mask, each (T,); ref_logprobs, read where beta is
    not 0; loss_weights, which multiply the surrogate of each token. options: GRPOConfig's, but for aggregation.
    The ratio is one to inference_logprobs, as in prime-rl.

    Raises ValueError for options that need what prime-rl does not pass, by name.
    """
    config = _config(**options)
    weights = getattr(inputs, "loss_weights", None)
    if weights is not None and config.beta != 0.0:
        raise ValueError(f"beta={config.beta} with loss_weights; expected one of them: weights leave out the KL term")
    ref = getattr(inputs, "ref_logprobs", None)
    by_rollout = SURROGATE_RULES[config.surrogate].divides_by_rollout
    out = grpo_loss_from_logps(
        inputs.trainer_logprobs[None], inputs.advantages[None], completion_mask=inputs.loss_mask[None],
        old_logps=None if by_rollout else inputs.inference_logprobs[None],
        rollout_logps=inputs.inference_logprobs[None],
        ref_logps=ref[None] if ref is not None and config.beta != 0.0 else None,
        rollout_weights=None if weights is None else weights[None], normalizer=1.0, config=config,
    )  # fmt: skip
    return LossOutputs(out.loss, {name: value.detach() for name, value in out.metrics.items()})


@lru_cache(maxsize=16)
def _config(**options: Any) -> GRPOConfig:
    for name in ("aggregation", "max_completion_length"):
        if name in options:
            raise ValueError(f"{name}={options[name]!r}: prime-rl divides the sum over the tokens itself; leave it out")
    if options.get("entropy_coef") or options.get("entropy_threshold") is not None:
        raise ValueError("entropy_coef and entropy_threshold need the entropies, which prime-rl does not pass")
    for name in ("sparse_backward", "logits_dtype"):
        if options.get(name) is not None:
            raise ValueError(f"{name} has no effect on a loss from log-probabilities; leave it out")
    return GRPOConfig(aggregation="token_mean", **options)

"""prime-rl: a loss that its configuration names. It needs nothing of prime-rl; this file lies on PYTHONPATH.

[trainer.loss]
type = "custom"
import_path = "prime_rl_loss.policy_loss"
kwargs = { surrogate = "cispo", epsilon_high = 5.0 }
"""

from typing import NamedTuple

from torch import Tensor

from grpo_kernels import GRPOConfig, grpo_loss_from_logps


class LossOutputs(NamedTuple):
    """The sum over the tokens of a sequence, which prime-rl divides; metrics."""

    loss: Tensor
    metrics: dict[str, Tensor]


def policy_loss(inputs, **options):
    """The loss of one sequence, from prime-rl's LossInputs; options: GRPOConfig's, but for aggregation.

    The ratio is one to inference_logprobs. loss_weights multiply the policy term of each token.
    """
    config = GRPOConfig(aggregation="token_mean", **options)
    if inputs.loss_weights is not None and config.beta:
        raise ValueError(f"beta={config.beta} with loss_weights; expected one of them: weights leave out the KL term")
    logps, sampled, ref, advantages, mask, weights = (
        None if x is None else x[None]
        for x in (
            inputs.trainer_logprobs,
            inputs.inference_logprobs,
            inputs.ref_logprobs if config.beta else None,
            inputs.advantages,
            inputs.loss_mask,
            inputs.loss_weights,
        )
    )
    out = grpo_loss_from_logps(
        logps,
        advantages,
        completion_mask=mask,
        old_logps=None if config.surrogate in ("ipo", "dppo_tv", "dppo_kl") else sampled,  # these read rollout_logps
        rollout_logps=sampled,
        ref_logps=ref,
        rollout_weights=weights,
        normalizer=1.0,
        config=config,
    )
    return LossOutputs(out.loss, {name: value.detach() for name, value in out.metrics.items()})

"""verl 0.9.1: put this file on PYTHONPATH of the workers, and give verl

    actor_rollout_ref.model.external_lib=verl_losses
    actor_rollout_ref.model.use_fused_kernels=True
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo_fused

Each worker imports it before the first step. It needs verl.
"""

from grpo_kernels import GRPOConfig
from grpo_kernels.integrations.verl import register

register()  # the loss "grpo_kernels": verl's vanilla loss; and the fused log-probabilities for every loss
register("gspo_fused", GRPOConfig.preset("gspo"))

"""prime-rl: the loss is named in the configuration; the output layer is replaced after the model is built.

    [trainer.loss]
    type = "custom"
    import_path = "grpo_kernels.integrations.prime_rl.policy_loss"
    kwargs = { surrogate = "cispo", epsilon_high = 5.0 }

Call replace_output_layer(model) where prime-rl has put in its own FusedOutputLinear, before FSDP wraps the model.
"""

import torch

from grpo_kernels.integrations import logit_transform
from grpo_kernels.integrations.prime_rl import FusedOutputLinear


def replace_output_layer(model):
    """model.lm_head becomes ours; the weight, which may be tied to the embeddings, is the same parameter."""
    transform = logit_transform(model.config)
    with torch.device("meta"):
        layer = FusedOutputLinear(
            model.lm_head.in_features,
            model.lm_head.out_features,
            logit_scale=transform.scale,
            logit_softcap=transform.softcap,
        )
    layer.weight = model.lm_head.weight
    model.lm_head = layer
    return model

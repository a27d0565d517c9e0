"""prime-rl: an output layer that computes log-probabilities and entropies without logits. It needs nothing of prime-rl.

Call replace_output_layer(model) where prime-rl has put in its own FusedOutputLinear, before FSDP wraps the model.
"""

import torch

from grpo_kernels import fused_logps
from grpo_kernels.integrations import logit_transform


class FusedOutputLinear(torch.nn.Linear):
    """Called as prime-rl's layer of this name; `transform` has the model's logit scale and softcap."""

    def __init__(self, in_features, out_features, transform, **options):
        super().__init__(in_features, out_features, bias=False, **options)
        self.transform = transform

    def forward(self, hidden_states, labels, temperature):
        """logprobs and entropy (B, T) of labels, float32, from hidden_states (B, T, H); temperature is per token. As in
        prime-rl, entropies have no gradient."""
        logps, entropy = fused_logps(
            hidden_states,
            self.weight,
            labels,
            temperature=temperature,
            logit_scale=self.transform.scale,
            logit_softcap=self.transform.softcap,
            entropy=True,
        )
        return {"logprobs": logps, "entropy": entropy.detach()}


def replace_output_layer(model):
    """model.lm_head becomes ours; the weight, which may be tied to the embeddings, is the same parameter."""
    head = model.lm_head
    layer = FusedOutputLinear(head.in_features, head.out_features, logit_transform(model.config), device="meta")
    layer.weight = head.weight
    model.lm_head = layer
    return model

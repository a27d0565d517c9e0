"""OpenRLHF has no hook for the head: patch(Actor) before training. It needs OpenRLHF 0.11.

from openrlhf.models.actor import Actor
patch(Actor)
"""

import torch.nn.functional as F
from transformers.modeling_outputs import CausalLMOutput

from grpo_kernels import fused_logps
from grpo_kernels.integrations.transformers import fused_forward


def patch(actor_class):
    """Actor.forward computes the log-probabilities of the actions without logits; other calls are OpenRLHF's own."""
    original = actor_class.forward

    def forward(self, sequences, action_mask=None, attention_mask=None, return_output=False, **others):
        return_entropy = others.pop("return_entropy", False)
        plain = action_mask is not None and not self.packing_samples and not any(others.values())
        if not plain:
            others["return_entropy"] = return_entropy
            return original(self, sequences, action_mask, attention_mask, return_output, **others)
        length = action_mask.shape[1]
        logps, entropy = fused_forward(
            getattr(self.model, "module", self.model),  # DeepSpeed's engine has the model inside
            input_ids=sequences,
            attention_mask=attention_mask,
            completion_ids=sequences[:, -length:],
            completion_mask=action_mask,
            loss=fused_logps,
            temperature=self.temperature,
            entropy=return_entropy,
        )
        output = CausalLMOutput()
        if return_entropy:  # OpenRLHF reads the last columns
            output.entropy = F.pad(entropy, (sequences.shape[1] - 1 - length, 0))
        return (logps, output) if return_output else logps

    actor_class.forward = forward

"""A step with a causal language model of transformers and nothing else: python examples/plain_transformers.py"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from grpo_kernels import GRPOConfig, fused_logps
from grpo_kernels.integrations.alignment import check_alignment
from grpo_kernels.integrations.transformers import fused_forward

torch.manual_seed(0)
# In place of from_pretrained, so that nothing is downloaded.
shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=512, **shape))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# Two prompts with four completions each: prompts padded on the left, completions on the right.
ids, mask = torch.randint(512, (8, 24)), torch.ones(8, 24, dtype=torch.long)
mask[:4, :3], mask[5, -6:] = 0, 0
batch = dict(input_ids=ids, attention_mask=mask, completion_ids=ids[:, -16:])
rewards = torch.rand(8)

alignment = check_alignment(model, batch)
print(alignment.message)
assert alignment.aligned

with torch.no_grad():
    old_logps, _ = fused_forward(model, **batch, loss=fused_logps)
config = GRPOConfig.preset("dapo")
for _ in range(4):
    out = fused_forward(model, **batch, old_logps=old_logps, rewards=rewards, num_generations=4, config=config)
    optimizer.zero_grad()
    out.loss.backward()
    optimizer.step()
    print(f"loss {out.loss.item():+.4f}, clipped {out.metrics['clip_ratio/region'].item():.1%} of the tokens")

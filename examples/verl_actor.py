"""Updates of a model by what verl 0.9.1's actor calls, on one process: python examples/verl_actor.py MODEL

The model's forward is the one that model.use_fused_kernels=True brings, with verl's default head, FusedLinearForPPO;
the loss is the one that actor.policy_loss.loss_mode=grpo_kernels names. It needs verl; Ray starts nothing.
"""

import sys

import torch
import verl_losses  # noqa: F401  # as external_lib
from transformers import AutoModelForCausalLM
from verl.models.transformers.monkey_patch import patch_forward_with_backends
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=8)
policy_loss = get_policy_loss_fn("grpo_kernels")

# Two prompts of 8 tokens, four responses each, of 9 to 16 tokens.
ids = torch.randint(2, model.config.vocab_size, (8, 24))
response_mask = (torch.arange(16) < torch.arange(9, 17)[:, None]).long()
advantages = torch.randn(8, 1).expand(8, 16)
own = model(input_ids=ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="torch")


def log_probs():
    return model(input_ids=ids, temperature=1.0, return_dict=True).log_probs[:, 7:-1]  # row t predicts token t + 1


with torch.no_grad():
    old_log_probs = log_probs()
print(f"log-probabilities: {(old_log_probs - own[:, 7:]).abs().max().item():.0e} from those of the model's logits")
for _ in range(4):
    loss, metrics = policy_loss(
        old_log_prob=old_log_probs, log_prob=log_probs(), advantages=advantages, response_mask=response_mask,
        config=config,
    )  # fmt: skip
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():+.4f}, clipped {metrics['actor/pg_clipfrac']:.1%} of the tokens")

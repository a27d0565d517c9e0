"""Code that calls Liger's LigerFusedLinearGRPOLoss changes one import: python examples/liger.py"""

import torch

# from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from grpo_kernels.integrations.liger import LigerFusedLinearGRPOLoss

torch.manual_seed(0)
head = torch.nn.Linear(64, 1024, bias=False)
hidden = torch.randn(4, 12, 64, requires_grad=True)  # row t predicts token t of the completion
ids, mask = torch.randint(1024, (4, 12)), torch.ones(4, 12)
ref_logps = torch.full((4, 12), -6.9)

loss_fn = LigerFusedLinearGRPOLoss(beta=0.04, loss_type="dapo", epsilon_high=0.28, temperature=0.9)
loss, (kl, clipped) = loss_fn(
    _input=hidden,
    lin_weight=head.weight,
    selected_token_ids=ids,
    attention_mask=mask,
    advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]),
    ref_per_token_logps=ref_logps,
)
loss.backward()
print(f"loss {loss.item():.4f}, kl {kl.item():.4f}, clipped {clipped.item():.3f}")

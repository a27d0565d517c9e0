"""TOPR, tapered off-policy REINFORCE (arXiv:2503.14286; ROLL's `topr`): completions with a reward above 0 are imitated,
whatever policy sampled them; the others weigh as much as their ratio, at most 1."""

import torch

from grpo_kernels import fused_policy_loss


def topr_loss(hidden, weight, ids, mask, advantages, rewards, old_logps, positive=1.0, negative=1.0, **options):
    """Mean over tokens. hidden (B, T, H), weight (V, H), ids, mask, old_logps (B, T), advantages, rewards (B,)."""
    count = mask.sum().clamp(min=1)

    def loss_fn(chunk):
        ratio = (chunk.logps - chunk.tokens(old_logps)).exp().detach()
        rewarded = chunk.sequences(rewards) > 0
        weights = torch.where(rewarded, positive, negative * ratio.clamp(0.0, 1.0))
        return -(weights * chunk.sequences(advantages) * chunk.logps).sum() / count

    return fused_policy_loss(hidden, weight, ids, loss_fn, completion_mask=mask, **options)


if __name__ == "__main__":
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 10, 32, requires_grad=True), torch.randn(512, 32, requires_grad=True)
    ids, rewards = torch.randint(512, (4, 10)), torch.tensor([1.0, 0.0, 1.0, 0.0])
    loss = topr_loss(hidden, weight, ids, torch.ones(4, 10), rewards - 0.5, rewards, torch.full((4, 10), -6.0))
    loss.backward()
    print(f"loss {loss.item():.4f}")

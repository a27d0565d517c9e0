"""FIPO (ms-swift's loss_type fipo): PPO, where a token weighs more if the policy is likelier now to go on as it did.

The weight is exp of the discounted sum of the log-ratios from the token on, in a range, a constant to the gradient.
With level="sequence" a chunk has all tokens of its sequences, so that one pass is enough.
"""

import torch

from grpo_kernels import fused_policy_loss


def fipo_loss(
    hidden, weight, ids, mask, advantages, old_logps, epsilon=0.2, gamma=2 ** (-1 / 32), clip_range=0.2, safety=4.0,
    **options,
):  # fmt: skip
    """Mean over tokens. hidden (B, T, H), weight (V, H), ids, mask, old_logps (B, T), advantages (B,)."""
    count, length = mask.sum().clamp(min=1), ids.shape[1]
    place = torch.arange(length, device=ids.device)
    distance = place - place[:, None]
    decay = torch.where(distance >= 0, gamma ** distance.clamp(min=0).double(), 0.0)

    def loss_fn(chunk):
        log_ratio, A = chunk.logps - chunk.tokens(old_logps), chunk.sequences(advantages)
        ratio = log_ratio.exp()
        row, column = chunk.sequence - chunk.sequence[0], chunk.index % length
        table = log_ratio.new_zeros(int(row[-1]) + 1, length)
        table[row, column] = log_ratio.detach()
        influence = (table @ decay.T.to(table.dtype))[row, column].exp().clamp(1.0, 1.0 + clip_range)
        influence = torch.where((A < 0) & (ratio > safety), influence.clamp(0.8, 1.0), influence)
        ppo = -torch.minimum(ratio * A, ratio.clamp(1 - epsilon, 1 + epsilon) * A)
        return (influence * ppo).sum() / count

    return fused_policy_loss(hidden, weight, ids, loss_fn, level="sequence", completion_mask=mask, **options)


if __name__ == "__main__":
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 10, 32, requires_grad=True), torch.randn(512, 32, requires_grad=True)
    ids, advantages = torch.randint(512, (4, 10)), torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss = fipo_loss(hidden, weight, ids, torch.ones(4, 10), advantages, torch.full((4, 10), -6.0))
    loss.backward()
    print(f"loss {loss.item():.4f}")

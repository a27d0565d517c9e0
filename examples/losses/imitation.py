"""The log-likelihood of completions that were right, beside a policy loss (VAPO, arXiv:2504.05118), and the KL to a
reference as the advantage of each token (prime-rl's `ref_kl`)."""

import torch

from grpo_kernels import fused_policy_loss


def vapo_loss(hidden, weight, ids, mask, advantages, right, old_logps, low=0.2, high=0.28, coefficient=0.1, **options):
    """PPO, mean over tokens, plus coefficient times -logp, mean over the tokens of completions that are `right` (B,).

    hidden (B, T, H), weight (V, H), ids, mask, advantages, old_logps (B, T)."""
    count, imitated = mask.sum().clamp(min=1), (mask * right[:, None]).sum().clamp(min=1)

    def loss_fn(chunk):
        ratio, A = (chunk.logps - chunk.tokens(old_logps)).exp(), chunk.tokens(advantages)
        ppo = -torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)
        likelihood = chunk.sequences(right.to(chunk.logps.dtype)) * -chunk.logps
        return ppo.sum() / count + coefficient * likelihood.sum() / imitated

    return fused_policy_loss(hidden, weight, ids, loss_fn, completion_mask=mask, **options)


def ref_kl_loss(hidden, weight, ids, mask, ref_logps, rollout_logps, drop=0.2, tau=1e-3, **options):
    """-r A with A = ref_logps - logps, a constant; without tokens whose probability fell by more than `drop` since they
    were sampled, plus tau log(r)^2, mean over tokens. ref_logps, rollout_logps (B, T)."""
    count = mask.sum().clamp(min=1)

    def loss_fn(chunk):
        sampled = chunk.tokens(rollout_logps)
        log_ratio, A = chunk.logps - sampled, (chunk.tokens(ref_logps) - chunk.logps).detach()
        kept = chunk.logps.detach().exp() - sampled.exp() >= -drop
        return (-log_ratio.exp() * A * kept + tau * log_ratio.square()).sum() / count

    return fused_policy_loss(hidden, weight, ids, loss_fn, completion_mask=mask, **options)


if __name__ == "__main__":
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 10, 32, requires_grad=True), torch.randn(512, 32, requires_grad=True)
    ids, right = torch.randint(512, (4, 10)), torch.tensor([True, False, True, False])
    mask, old_logps = torch.ones(4, 10), torch.full((4, 10), -6.0)
    advantages = torch.where(right, 1.0, -1.0)[:, None].expand(4, 10)
    for loss in (
        vapo_loss(hidden, weight, ids, mask, advantages, right, old_logps),
        ref_kl_loss(hidden, weight, ids, mask, old_logps + 0.5, old_logps),
    ):
        loss.backward()
        print(f"loss {loss.item():.4f}")

"""Clip-Cov and KL-Cov (arXiv:2505.22617; verl's `clip_cov`, `kl_cov`): tokens whose log-probability and advantage vary
together make the entropy collapse, so some of them get no loss, or a penalty.

Which ones is known from the whole batch: log-probabilities come first, without gradients.
"""

import torch

from grpo_kernels import fused_logps, fused_policy_loss


def covariances(hidden, weight, ids, mask, advantages, **options):
    """(logps, covariance of each token), (B, T) each."""
    with torch.no_grad():
        logps, _ = fused_logps(hidden, weight, ids, completion_mask=mask, **options)
    count = mask.sum().clamp(min=1)
    means = [(x * mask).sum() / count for x in (advantages, logps)]
    return logps, (advantages - means[0]) * (logps - means[1])


def clip_cov_loss(
    hidden, weight, ids, mask, advantages, old_logps, epsilon=0.2, share=2e-4, low=1.0, high=5.0, generator=None,
    **options,
):  # fmt: skip
    """PPO, mean over tokens, without a random `share` of the tokens whose covariance is between low and high.

    hidden (B, T, H), weight (V, H), ids, mask, advantages, old_logps (B, T)."""
    logps, covariance = covariances(hidden, weight, ids, mask, advantages, **options)
    ratio = (logps - old_logps).exp()
    clipped = -advantages * ratio.clamp(1 - epsilon, 1 + epsilon) > -advantages * ratio
    chosen = ((covariance > low) & (covariance < high) & mask.bool() & ~clipped).flatten().nonzero().squeeze(1)
    number = max(int(share * mask.sum()), 1)
    dropped = chosen[torch.randperm(len(chosen), generator=generator)[:number].to(chosen.device)]
    kept = torch.ones_like(logps).flatten().index_fill(0, dropped, 0.0)

    def token_loss(chunk, ratio, A):
        return chunk.tokens(kept) * -torch.minimum(ratio * A, ratio.clamp(1 - epsilon, 1 + epsilon) * A)

    return _mean(token_loss, hidden, weight, ids, mask, advantages, old_logps, **options)


def kl_cov_loss(hidden, weight, ids, mask, advantages, old_logps, share=2e-4, coefficient=1.0, **options):
    """-r A, mean over tokens, plus coefficient |log r| for the `share` of the tokens with the largest covariance."""
    logps, covariance = covariances(hidden, weight, ids, mask, advantages, **options)
    number = max(int(share * mask.sum()), 1)
    largest = covariance.masked_fill(~mask.bool(), -torch.inf).flatten().topk(number).indices
    penalty = torch.zeros_like(logps).flatten().index_fill(0, largest, coefficient)

    def token_loss(chunk, ratio, A):
        return -ratio * A + chunk.tokens(penalty) * ratio.log().abs()

    return _mean(token_loss, hidden, weight, ids, mask, advantages, old_logps, **options)


def _mean(token_loss, hidden, weight, ids, mask, advantages, old_logps, **options):
    count = mask.sum().clamp(min=1)

    def loss_fn(chunk):
        ratio = (chunk.logps - chunk.tokens(old_logps)).exp()
        return token_loss(chunk, ratio, chunk.tokens(advantages)).sum() / count

    return fused_policy_loss(hidden, weight, ids, loss_fn, completion_mask=mask, **options)


if __name__ == "__main__":
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 10, 32, requires_grad=True), torch.randn(512, 32, requires_grad=True)
    ids, advantages = torch.randint(512, (4, 10)), torch.randn(4, 1).expand(4, 10)
    for function in (clip_cov_loss, kl_cov_loss):
        loss = function(hidden, weight, ids, torch.ones(4, 10), advantages, torch.full((4, 10), -6.0))
        loss.backward()
        print(f"{function.__name__}: loss {loss.item():.4f}")

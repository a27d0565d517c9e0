"""Losses of other trainers through fused_policy_loss, without logits: python examples/losses.py

In all of them hidden is (B, T, H), weight (V, H), ids, mask, old_logps (B, T); advantages are (B, T) where nothing else
is said. options: of fused_policy_loss.
"""

import torch

from grpo_kernels import fused_logps, fused_policy_loss


def mean_over_tokens(token_loss, hidden, weight, ids, mask, **options):
    """The mean of token_loss(chunk), which has one value per token of a PolicyChunk."""
    count = mask.sum().clamp(min=1)
    return fused_policy_loss(
        hidden, weight, ids, lambda chunk: token_loss(chunk).sum() / count, completion_mask=mask, **options
    )


def ppo(ratio, A, low, high):
    return -torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)


def topr_loss(hidden, weight, ids, mask, advantages, rewards, old_logps, positive=1.0, negative=1.0, **options):
    """TOPR, tapered off-policy REINFORCE (arXiv:2503.14286; ROLL's `topr`): completions with a reward above 0 are
    imitated, from any policy; the others weigh as much as their ratio, at most 1. advantages and rewards
    are (B,)."""

    def token_loss(chunk):
        ratio = (chunk.logps - chunk.tokens(old_logps)).exp().detach()
        rewarded = chunk.sequences(rewards) > 0
        weights = torch.where(rewarded, positive, negative * ratio.clamp(0.0, 1.0))
        return -weights * chunk.sequences(advantages) * chunk.logps

    return mean_over_tokens(token_loss, hidden, weight, ids, mask, **options)


def fipo_loss(
    hidden, weight, ids, mask, advantages, old_logps, epsilon=0.2, gamma=2 ** (-1 / 32), clip_range=0.2, safety=4.0,
    **options,
):  # fmt: skip
    """FIPO (ms-swift's fipo): PPO, where a token weighs more if the policy is likelier now to go on as it did.

    The weight is exp of the discounted sum of the log-ratios from the token on, in a range, a constant to the gradient.
    With level="sequence" a chunk has all tokens of its sequences, so that one pass is enough. advantages (B,).
    """
    length = ids.shape[1]
    place = torch.arange(length, device=ids.device)
    distance = place - place[:, None]
    decay = torch.where(distance >= 0, gamma ** distance.clamp(min=0).double(), 0.0)

    def token_loss(chunk):
        log_ratio, A = chunk.logps - chunk.tokens(old_logps), chunk.sequences(advantages)
        ratio = log_ratio.exp()
        row, column = chunk.sequence - chunk.sequence[0], chunk.index % length
        table = log_ratio.new_zeros(int(row[-1]) + 1, length)
        table[row, column] = log_ratio.detach()
        influence = (table @ decay.T.to(table.dtype))[row, column].exp().clamp(1.0, 1.0 + clip_range)
        influence = torch.where((A < 0) & (ratio > safety), influence.clamp(0.8, 1.0), influence)
        return influence * ppo(ratio, A, epsilon, epsilon)

    return mean_over_tokens(token_loss, hidden, weight, ids, mask, level="sequence", **options)


def covariances(hidden, weight, ids, mask, advantages, **options):
    """(logps, covariance of log-probability and advantage), (B, T) each, without gradients: Clip-Cov and KL-Cov
    (arXiv:2505.22617; verl's `clip_cov`, `kl_cov`) take out or penalise some of the tokens where the two vary together,
    which makes the entropy collapse. Which ones is known from the whole batch."""
    with torch.no_grad():
        logps, _ = fused_logps(hidden, weight, ids, completion_mask=mask, **options)
    count = mask.sum().clamp(min=1)
    means = [(x * mask).sum() / count for x in (advantages, logps)]
    return logps, (advantages - means[0]) * (logps - means[1])


def clip_cov_loss(
    hidden, weight, ids, mask, advantages, old_logps, epsilon=0.2, share=2e-4, low=1.0, high=5.0, generator=None,
    **options,
):  # fmt: skip
    """PPO without a random `share` of the tokens whose covariance is between low and high."""
    logps, covariance = covariances(hidden, weight, ids, mask, advantages, **options)
    ratio = (logps - old_logps).exp()
    clipped = -advantages * ratio.clamp(1 - epsilon, 1 + epsilon) > -advantages * ratio
    chosen = ((covariance > low) & (covariance < high) & mask.bool() & ~clipped).flatten().nonzero().squeeze(1)
    number = max(int(share * mask.sum()), 1)
    dropped = chosen[torch.randperm(len(chosen), generator=generator)[:number].to(chosen.device)]
    kept = torch.ones_like(logps).flatten().index_fill(0, dropped, 0.0)

    def token_loss(chunk):
        ratio = (chunk.logps - chunk.tokens(old_logps)).exp()
        return chunk.tokens(kept) * ppo(ratio, chunk.tokens(advantages), epsilon, epsilon)

    return mean_over_tokens(token_loss, hidden, weight, ids, mask, **options)


def kl_cov_loss(hidden, weight, ids, mask, advantages, old_logps, share=2e-4, coefficient=1.0, **options):
    """-r A, plus coefficient |log r| for the `share` of the tokens with the largest covariance."""
    logps, covariance = covariances(hidden, weight, ids, mask, advantages, **options)
    number = max(int(share * mask.sum()), 1)
    largest = covariance.masked_fill(~mask.bool(), -torch.inf).flatten().topk(number).indices
    penalty = torch.zeros_like(logps).flatten().index_fill(0, largest, coefficient)

    def token_loss(chunk):
        log_ratio = chunk.logps - chunk.tokens(old_logps)
        return -log_ratio.exp() * chunk.tokens(advantages) + chunk.tokens(penalty) * log_ratio.abs()

    return mean_over_tokens(token_loss, hidden, weight, ids, mask, **options)


def vapo_loss(hidden, weight, ids, mask, advantages, right, old_logps, low=0.2, high=0.28, coefficient=0.1, **options):
    """PPO, plus coefficient times -logp, mean over the tokens of completions that are `right` (B,): VAPO,
    arXiv:2504.05118."""
    weights = right[:, None] * mask.sum().clamp(min=1) / (mask * right[:, None]).sum().clamp(min=1)

    def token_loss(chunk):
        ratio = (chunk.logps - chunk.tokens(old_logps)).exp()
        return ppo(ratio, chunk.tokens(advantages), low, high) - coefficient * chunk.sequences(weights) * chunk.logps

    return mean_over_tokens(token_loss, hidden, weight, ids, mask, **options)


def ref_kl_loss(hidden, weight, ids, mask, ref_logps, rollout_logps, drop=0.2, tau=1e-3, **options):
    """The KL to a reference as the advantage of each token (prime-rl's `ref_kl`): -r A, A = ref_logps - logps, a
    constant; without tokens whose probability fell by more than `drop` since they were sampled, plus tau log(r)^2.
    ref_logps, rollout_logps (B, T)."""

    def token_loss(chunk):
        sampled = chunk.tokens(rollout_logps)
        log_ratio, A = chunk.logps - sampled, (chunk.tokens(ref_logps) - chunk.logps).detach()
        kept = chunk.logps.detach().exp() - sampled.exp() >= -drop
        return -log_ratio.exp() * A * kept + tau * log_ratio.square()

    return mean_over_tokens(token_loss, hidden, weight, ids, mask, **options)


if __name__ == "__main__":
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 10, 32, requires_grad=True), torch.randn(512, 32, requires_grad=True)
    ids, mask, old_logps = torch.randint(512, (4, 10)), torch.ones(4, 10), torch.full((4, 10), -6.0)
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    advantages = rewards - 0.5
    per_token = advantages[:, None].expand(4, 10)
    for function, *inputs in (
        (topr_loss, advantages, rewards, old_logps),
        (fipo_loss, advantages, old_logps),
        (clip_cov_loss, per_token, old_logps),
        (kl_cov_loss, per_token, old_logps),
        (vapo_loss, per_token, rewards > 0, old_logps),
        (ref_kl_loss, old_logps + 0.5, old_logps),
    ):
        loss = function(hidden, weight, ids, mask, *inputs)
        loss.backward()
        print(f"{function.__name__}: loss {loss.item():.4f}")

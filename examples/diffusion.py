"""Policy optimisation of a masked diffusion language model through fused_policy_loss: python examples/diffusion.py

Such a model has no log-probability of a completion y, but a lower bound of it (ELBO), the mean over views of y in which
a random share t of the tokens is masked, of the log-probabilities of the masked tokens over t. ESPO (arXiv:2512.03759)
takes the bound for the log-probability in GSPO's ratio.
"""

import torch

from grpo_kernels import fused_logps, fused_policy_loss


def elbos(logps, masked, scale):
    return (logps * masked * scale).sum(-1)


def espo_loss(hidden, weight, ids, masked, scale, lengths, advantages, old_elbos, epsilon=0.2, **options):
    """The mean over completions of PPO's loss with the ratio exp((elbo - old_elbo) / length).

    hidden (B, K T, H), of the K views of a completion of T tokens, one after another; ids, masked (B, K T). scale:
    1 / (K t) of each token's view, (B, K T). weight (V, H); lengths, advantages and old_elbos (B,), the bounds in nats,
    of the same views. options: of fused_policy_loss.
    """

    def loss_fn(chunk):
        elbo = chunk.sequence_sum(chunk.tokens(scale) * chunk.logps)  # every token has that of its completion
        ratio = ((elbo - chunk.sequences(old_elbos)) / chunk.sequences(lengths)).exp()
        A = chunk.sequences(advantages)
        loss = -torch.minimum(ratio * A, ratio.clamp(1 - epsilon, 1 + epsilon) * A)
        return (loss / chunk.sequence_sum(torch.ones_like(loss))).sum() / len(ids)

    return fused_policy_loss(hidden, weight, ids, loss_fn, level="sequence", completion_mask=masked, **options)


if __name__ == "__main__":
    torch.manual_seed(0)
    batch, views, length, vocab, width = 8, 4, 12, 64, 32  # the mask is the id `vocab`
    embed = torch.nn.Embedding(vocab + 1, width)
    layer = torch.nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)  # attends both ways
    optimizer = torch.optim.Adam([*embed.parameters(), *layer.parameters()], lr=1e-3)
    completions = torch.randint(vocab, (batch, length))
    advantages = torch.tensor([1.0, -1.0]).repeat(batch // 2)
    t = torch.rand(batch, views, 1) * 0.8 + 0.2
    masked = torch.rand(batch, views, length) < t
    ids = completions[:, None].expand(-1, views, -1)
    flat = [x.expand(batch, views, length).flatten(1) for x in (ids, masked, 1 / (views * t))]
    old = None
    for update in range(4):
        states = layer(embed(torch.where(masked, vocab, ids).flatten(0, 1))).view(batch, views * length, width)
        if old is None:
            with torch.no_grad():
                old = elbos(fused_logps(states, embed.weight[:vocab], flat[0])[0], *flat[1:])
        lengths = torch.full((batch,), float(length))
        loss = espo_loss(states, embed.weight[:vocab], *flat, lengths, advantages, old)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"update {update + 1}: loss {loss.item():.4f}")

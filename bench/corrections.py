"""Bias and noise of a toy's policy gradient, with each correction for an engine that samples from another policy.

    OMP_NUM_THREADS=1 python bench/corrections.py [--sequences 400000] [--output bench/results/corrections/cpu.json]

The policy is a Markov chain over 8 tokens, P = softmax(Z). The reward of a completion is its share of token 0, and
its advantage is the reward minus its expectation under the engine, as in a large group of GRPO. The engine samples from
softmax(Z + noise). The exact gradient of the policy's expected reward with respect to Z is known. For the estimator
g = w A d log p / d Z the table has
- the bias, |E g - exact| / |exact|, without the part that its standard error explains,
- the cosine between E g and exact,
- the noise: its variance over that of samples from the policy itself, or how many times as many completions it needs.
Sequence weights without a bound are unbiased. Where the difference of an estimator to theirs has the smaller standard
error, its mean is taken for the bias.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import rejection_mask, rollout_weights
from grpo_kernels.commands.bench.machine import environment, write

TOKENS, BATCH = 8, 5000
Weights = Callable[[Tensor, Tensor, Tensor], Tensor]  # of old and rollout log-probabilities (B, T) and advantages (B,)


def weighted(rejects: dict[str, Any] | None = None, **options: Any) -> Weights:
    """Returns a function that computes `rollout_weights`, times `rejection_mask` with the thresholds `rejects`."""

    def weights(old: Tensor, rollout: Tensor, advantage: Tensor) -> Tensor:
        values = rollout_weights(old, rollout, **options).view(len(old), -1)
        return values if rejects is None else values * rejection_mask(old, rollout, rejects)

    return weights


def dppo(old: Tensor, rollout: Tensor, advantage: Tensor) -> Tensor:
    """Returns ratios, but 0 where the probability has moved by more than 0.2 to where the advantage pushes it."""
    moved = (old.exp() - rollout.exp()) * torch.where(advantage > 0, 1.0, -1.0)[:, None]
    return torch.where(moved > 0.2, 0.0, (old - rollout).exp())


PRODUCT: dict[str, Any] = dict(level="sequence_sum")
EXACT = "sequence, no bound"
WEIGHTS: dict[str, Weights] = {
    "none": lambda old, sampled, advantage: torch.ones_like(old),
    EXACT: weighted(**PRODUCT, cap=1e30),
    "sequence, at most 2": weighted(**PRODUCT, cap=2.0),
    "sequence, at most 2, batch-normalised": weighted(**PRODUCT, cap=2.0, batch_normalize=True),
    "sequence, 0 above 3": weighted(**PRODUCT, mode="mask", low=0.0, cap=3.0),
    "token, at most 2": weighted(cap=2.0),
    "token, 0 outside [0.5, 5]": weighted(mode="mask", low=0.5, cap=5.0),
    "token, DPPO's mask at 0.2": dppo,
    "token, at most 2; seq_mean_k3 to 0.01": weighted({"seq_mean_k3": 0.01}, cap=2.0),
    "token, at most 2; seq_mean_k1 in [0.99, 1.01]": weighted({"seq_mean_k1": (0.99, 1.01)}, cap=2.0),
    "token, at most 2; seq_mean_binary_kl to 0.005": weighted({"seq_mean_binary_kl": 5e-3}, cap=2.0),
}


def exact(z: Tensor, length: int) -> tuple[float, Tensor]:
    """Returns the expected reward and its gradient with respect to the logits, (64,); the first state is uniform."""
    z = z.clone().requires_grad_()
    distribution, total = torch.full((TOKENS,), 1 / TOKENS, dtype=z.dtype), torch.zeros((), dtype=z.dtype)
    for _ in range(length):
        distribution = distribution @ z.softmax(1)
        total = total + distribution[0] / length
    (gradient,) = torch.autograd.grad(total, z)
    return total.item(), gradient.flatten()


def sample(p: Tensor, length: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns sampled states and tokens, (BATCH, length) int64 each, for transition probabilities p (8, 8)."""
    path, ends = [torch.randint(TOKENS, (BATCH,), generator=g)], p.cumsum(1)
    for _ in range(length):
        above = torch.rand(BATCH, 1, generator=g, dtype=p.dtype) > ends[path[-1]]
        path.append(above.sum(1).clamp(max=TOKENS - 1))
    return torch.stack(path[:-1], 1), torch.stack(path[1:], 1)


def estimates(p: Tensor, states: Tensor, tokens: Tensor, w: Tensor) -> Tensor:
    """Returns w d log p / d Z of each completion, (BATCH, 64), for weights w (BATCH, length)."""
    taken = w.new_zeros(len(w), TOKENS**2).scatter_add_(1, states * TOKENS + tokens, w)
    visits = w.new_zeros(len(w), TOKENS).scatter_add_(1, states, w)
    return taken - (visits[:, :, None] * p).flatten(1)


def measure(length: int, spread: float, sequences: int) -> dict[str, dict[str, float]]:
    """Returns bias, its standard error, cosine, noise, effective share of the samples and share of zeros for each of
    WEIGHTS, and how far the engine is from the policy."""
    g = torch.Generator().manual_seed(0)
    z, noise = torch.randn(2, TOKENS, TOKENS, generator=g, dtype=torch.float64)
    p, engine = z.softmax(1), (z + spread * noise).softmax(1)
    (policy_baseline, exact_gradient), (engine_baseline, _) = exact(z, length), exact(z + spread * noise, length)
    names, batches, mean_difference = list(WEIGHTS), sequences // BATCH, 0.0
    # Means of estimates and of their squared norms. Rows: samples from the policy itself, each of WEIGHTS, and the
    # difference of each to EXACT. For the weights: mean, mean square, share of zeros.
    mean = torch.zeros(1 + 2 * len(names), TOKENS**2, dtype=torch.float64)
    square, moments = mean.new_zeros(len(mean)), mean.new_zeros(len(names), 3)
    for _ in range(batches):
        states, tokens = sample(p, length, g)
        advantage = (tokens == 0).double().mean(1) - policy_baseline
        policy_gradients = estimates(p, states, tokens, advantage[:, None].expand_as(states))
        states, tokens = sample(engine, length, g)
        old, rollout = (x.log()[states, tokens] for x in (p, engine))
        advantage = (tokens == 0).double().mean(1) - engine_baseline
        weights = [WEIGHTS[name](old, rollout, advantage).expand_as(old) for name in names]
        gradients = torch.stack([estimates(p, states, tokens, w * advantage[:, None]) for w in weights])
        gradients = torch.cat([policy_gradients[None], gradients, gradients - gradients[names.index(EXACT)]])
        mean += gradients.mean(1) / batches
        square += gradients.square().sum(2).mean(1) / batches
        moments += torch.tensor([[w.mean(), w.square().mean(), (w == 0).double().mean()] for w in weights]) / batches
        mean_difference += (old - rollout).abs().mean().item() / batches
    variance = square - mean.square().sum(1)
    size, rows = exact_gradient.norm().item(), {"engine": {"mean_difference": mean_difference}}
    for i, name in enumerate(names):
        row, difference_row = 1 + i, 1 + len(names) + i
        uses_difference = name != EXACT and variance[difference_row] < variance[row]
        bias = mean[difference_row] if uses_difference else mean[row] - exact_gradient
        error = (variance[difference_row if uses_difference else row].item() / (batches * BATCH)) ** 0.5
        mean_weight, mean_square, zeros = moments[i].tolist()
        rows[name] = {
            "bias": max(bias.square().sum().item() - error**2, 0.0) ** 0.5 / size,
            "error": error / size,
            "cosine": torch.cosine_similarity(exact_gradient + bias, exact_gradient, dim=0).item(),
            "noise": (variance[row] / variance[0]).item(),
            "effective_sample": mean_weight**2 / mean_square if mean_square else 0.0,
            "zeros": zeros,
        }
    return rows


def table(cases: list[dict[str, Any]]) -> str:
    """Returns a Markdown table of bias, cosine and noise."""
    headings = [f"{c['length']} tokens, {c['rows']['engine']['mean_difference']:.3f} nats" for c in cases]
    lines = ["| weights | " + " | ".join(headings) + " |", "|---" * (len(headings) + 1) + "|"]
    for name in WEIGHTS:
        rows = [case["rows"][name] for case in cases]
        cells = [f"{x['bias']:.1%}, {x['cosine']:.3f}, {x['noise']:.2g}" for x in rows]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measures all cases, prints their table and writes their JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=400_000)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    cases = [
        {"length": length, "spread": spread, "rows": measure(length, spread, arguments.sequences)}
        for length, spread in ((256, 0.02), (256, 0.1), (16, 0.3), (256, 0.3))
    ]
    print(table(cases))
    if arguments.output:
        document = {"environment": environment(torch.device("cpu")), "sequences": arguments.sequences, "cases": cases}
        write(arguments.output, document)


if __name__ == "__main__":
    main()

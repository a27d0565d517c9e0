"""The bias of importance ratios under top-p sampling, with and without the sampling mask, on a toy policy.

    python bench/sampling_bias.py

A policy of random logits samples with top-p; the sampling engine's log-probabilities are those of the kept ids. Nothing
is trained: every ratio of the same policy should be 1. Prints Markdown.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from grpo_kernels import SamplingMask, fused_logps

TOKENS, WIDTH, VOCAB = 4096, 64, 2048


def kept_by_top_p(logits: Tensor, top_p: float) -> Tensor:
    """(N, V) bool: the most probable ids, until their mass reaches top_p."""
    p, order = logits.softmax(-1).sort(-1, descending=True)
    before = p.cumsum(-1) - p
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, before < top_p)


def ratios(top_p: float, seed: int) -> dict[str, Tensor]:
    """Name -> (N,) ratios of the policy's probability to the sampling engine's, of the same policy."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(1, TOKENS, WIDTH, generator=g), 0.3 * torch.randn(VOCAB, WIDTH, generator=g)
    logits = (hidden @ weight.T)[0]
    kept = kept_by_top_p(logits, top_p)
    truncated = logits.masked_fill(~kept, -torch.inf)
    ids = torch.multinomial(truncated.softmax(-1), 1, generator=g).T
    rollout_logps = truncated.log_softmax(-1).gather(1, ids.T).T
    mask = SamplingMask(kept.nonzero()[:, 1], kept.sum(1)[None])
    return {
        "over the whole vocabulary": (fused_logps(hidden, weight, ids)[0] - rollout_logps).exp(),
        "over the kept ids": (fused_logps(hidden, weight, ids, sampling_mask=mask)[0] - rollout_logps).exp(),
    }


def table(top_p: float, seed: int) -> str:
    """Markdown."""
    lines = [f"| log-probabilities, top_p {top_p:g} | mean ratio | outside of [0.9, 1.1] |", "| --- | --- | --- |"]
    for name, r in ratios(top_p, seed).items():
        outside = ((r < 0.9) | (r > 1.1)).float().mean()
        lines.append(f"| {name} | {r.mean():.3f} | {outside:.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top-p", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(table(arguments.top_p, arguments.seed))


if __name__ == "__main__":
    main()

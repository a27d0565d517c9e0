"""The bias of importance ratios under top-p sampling, with and without the sampling mask.

A policy of random logits samples with top-p; the sampling engine's log-probabilities are those of the kept ids. Nothing
is trained: every ratio of the same policy should be 1. Prints Markdown.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels import SamplingMask, fused_logps
from grpo_kernels.benchmarks.show import table as markdown

TOKENS, WIDTH, VOCAB = 4096, 64, 2048


def ratios(top_p: float, seed: int) -> dict[str, Tensor]:
    """Name -> (N,) ratios of the policy's probability to the sampling engine's, of the same policy."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(1, TOKENS, WIDTH, generator=g), 0.3 * torch.randn(VOCAB, WIDTH, generator=g)
    logits = (hidden @ weight.T)[0]
    p, order = logits.softmax(-1).sort(-1, descending=True)
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, p.cumsum(-1) - p < top_p)
    truncated = logits.masked_fill(~kept, -torch.inf)
    ids = torch.multinomial(truncated.softmax(-1), 1, generator=g).T
    rollout_logps = truncated.log_softmax(-1).gather(1, ids.T).T
    mask = SamplingMask(kept.nonzero()[:, 1], kept.sum(1)[None])
    return {
        "over the whole vocabulary": (fused_logps(hidden, weight, ids)[0] - rollout_logps).exp(),
        "over the kept ids": (fused_logps(hidden, weight, ids, sampling_mask=mask)[0] - rollout_logps).exp(),
    }


def table(top_p: float, seed: int) -> str:
    rows = [
        [name, f"{r.mean():.3f}", f"{((r < 0.9) | (r > 1.1)).float().mean():.1%}"]
        for name, r in ratios(top_p, seed).items()
    ]
    return markdown((f"log-probabilities, top_p {top_p:g}", "mean ratio", "outside of [0.9, 1.1]"), rows)


if __name__ == "__main__":
    print(table(0.8, seed=0))

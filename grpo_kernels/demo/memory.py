"""The peak memory that logits cost the loss, against what eager PyTorch would hold of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import GRPOConfig
from ..engine.memory import chunk_sizes
from ..loss import fused_grpo_loss

# Eager's backward holds log_softmax's output, the gradient of that output and the gradient of the logits at once.
EAGER_COPIES = 3


def memory_line(num_tokens: int, weight: Tensor, config: GRPOConfig) -> str:
    """One sentence for num_tokens tokens under an lm_head `weight` (V, H) float32: measured on CUDA, else by size."""
    vocab_size, hidden_size = weight.shape
    size = f"{num_tokens} tokens x {vocab_size} ids"
    if weight.device.type == "cuda":
        hidden = torch.randn(num_tokens, hidden_size, device=weight.device, dtype=weight.dtype)
        ids = torch.randint(vocab_size, (num_tokens,), device=weight.device)
        fused = _measured(hidden, weight, ids, config, eager=False)
        eager = _measured(hidden, weight, ids, config, eager=True)
        how = "measured, beyond inputs and gradients"
    else:
        types = weight.dtype, weight.dtype
        rows = chunk_sizes(num_tokens, vocab_size, *types, weight.device, config.chunk_rows).products
        fused = rows * vocab_size * weight.itemsize
        eager = EAGER_COPIES * num_tokens * vocab_size * weight.itemsize
        how = f"by size: one chunk of {rows} rows of logits against {EAGER_COPIES} copies of all of them"
    return (
        f"memory of the loss ({size}): fused {fused / 2**20:.1f} MiB, eager {eager / 2**20:.1f} MiB, "
        f"{eager / fused:.1f} times as much ({how})"
    )


def _measured(hidden: Tensor, weight: Tensor, ids: Tensor, config: GRPOConfig, *, eager: bool) -> int:
    """Peak bytes of forward and backward on a CUDA device, without the two gradients that either way returns."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    torch.cuda.reset_peak_memory_stats(hidden.device)
    before = torch.cuda.memory_allocated(hidden.device)
    if eager:
        logps = (hidden @ weight.mT).log_softmax(-1).gather(1, ids[:, None])
        (logps - logps.detach()).exp().mean().backward()
    else:
        on_policy = torch.zeros(1, ids.numel(), device=ids.device)
        fused_grpo_loss(
            hidden[None], weight, ids[None], on_policy[:, 0], ref_logps=on_policy, config=config
        ).loss.backward()
    gradients = hidden.nbytes + weight.nbytes
    return torch.cuda.max_memory_allocated(hidden.device) - before - gradients

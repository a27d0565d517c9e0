"""Ranks with their own tokens, under FSDP2 and DDP: the gradients of one process on all tokens.

One of the ranks has no scored token: it has to take part in every collective nevertheless.
"""

from __future__ import annotations

import torch
from test_vocab_parallel import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import grpo_kernels as gk

VOCAB, WIDTH, LENGTH = 50, 16, 6


class Policy(nn.Module):
    """Hidden states of a layer, and where `loss` is given the loss, so that hooks of the module see it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, prompts, loss=None):
        hidden = self.body(self.embedding(prompts)).tanh()
        return hidden if loss is None else loss(hidden, self.lm_head.weight)


def batch_of(ranks: int) -> tuple[torch.Tensor, ...]:
    """(prompts, ids, advantages, mask, old_logps) of two sequences per rank; the last rank has no scored token."""
    g = torch.Generator().manual_seed(1)
    shape = (2 * ranks, LENGTH)
    prompts, ids = (torch.randint(VOCAB, shape, generator=g) for _ in range(2))
    mask = torch.rand(shape, generator=g) < 0.7
    mask[-2:] = False
    return prompts, ids, torch.randn(2 * ranks, generator=g), mask, -4 + 0.3 * torch.randn(shape, generator=g)


def loss_of(ids, advantages, mask, old, tokens):
    config = gk.GRPOConfig.preset("dapo")

    def loss(hidden, weight):
        return gk.fused_grpo_loss(
            hidden, weight, ids, advantages, completion_mask=mask, old_logps=old, num_items_in_batch=tokens,
            config=config,
        ).loss  # fmt: skip

    return loss


def equal_to_one_process(rank: int, group) -> None:
    ranks = group.size()
    prompts, *rest = batch_of(ranks)
    tokens = rest[2].sum()
    one = Policy()
    one(prompts, loss_of(*rest, tokens)).backward()
    mine = slice(2 * rank, 2 * rank + 2)
    own = loss_of(*(x[mine] for x in rest), tokens)

    def check(model: nn.Module) -> None:
        for (name, x), y in zip(model.named_parameters(), one.parameters(), strict=True):
            grad = x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad
            assert torch.allclose(ranks * grad, y.grad, atol=1e-6), name  # ranks are averaged

    inside = fully_shard(Policy())  # the loss inside the module's forward: its weight is whole there
    inside(prompts[mine], own).backward()
    check(inside)
    outside = Policy()  # beside it: the weight is a DTensor
    for part in (outside.embedding, outside.body, outside.lm_head):
        fully_shard(part)
    own(outside(prompts[mine]), outside.lm_head.weight).backward()
    check(outside)
    replicated = DistributedDataParallel(Policy())
    replicated(prompts[mine], own).backward()
    check(replicated.module)


def test_the_gradients_of_one_process(tmp_path):
    run_ranks(equal_to_one_process, 4, tmp_path)  # two ranks: in test_transformers_parallel.py, which starts them

"""fused_forward inside the forward of a module that FSDP2 or DDP wraps: the gradients of one process on all tokens."""

from __future__ import annotations

import pytest
import torch
from test_vocab_parallel import run_ranks
from tiny_models import VOCAB, tiny_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")
from grpo_kernels.integrations.transformers import fused_forward

LENGTH = 6


class Step(nn.Module):
    """A model whose forward is its loss."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.model = tiny_model("llama", tie_word_embeddings=tied)

    def forward(self, **batch):
        return fused_forward(self.model, **batch).loss


def equal_to_one_process(rank: int, group) -> None:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (4, 5 + LENGTH), generator=g)
    mask = torch.ones_like(ids)
    mask[0, :2], mask[1, -2:] = 0, 0
    batch = dict(
        input_ids=ids, attention_mask=mask, completion_ids=ids[:, -LENGTH:], advantages=torch.randn(4, generator=g)
    )
    tokens = mask[:, -LENGTH:].sum()
    mine = {name: x[2 * rank : 2 * rank + 2] for name, x in batch.items()} | {"num_items_in_batch": tokens}
    for tied in (False, True):
        one = Step(tied)
        one(**batch).backward()
        sharded = Step(tied)
        for layer in sharded.model.model.layers:
            fully_shard(layer)
        fully_shard(sharded)
        replicated = DistributedDataParallel(Step(tied))
        for model in (sharded, replicated):
            for _ in range(2):  # the first call compares the model's own logits
                model.zero_grad()
                model(**mine).backward()
            for (name, x), y in zip(model.named_parameters(), one.parameters(), strict=True):
                grad = x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad
                assert torch.allclose(2 * grad, y.grad, atol=1e-6), (name, tied)  # ranks are averaged

    alone = fully_shard(Step(False).model)
    with pytest.raises(TypeError, match=r"lm_head\.weight is a DTensor; expected fused_forward to run inside"):
        fused_forward(alone, **mine)


def test_the_gradients_of_one_process(tmp_path):
    run_ranks(equal_to_one_process, 2, tmp_path)

"""Ranks with a slice of the tokens each: log-probabilities that are gathered for a loss of whole sequences."""

from __future__ import annotations

import pytest
import torch
from helpers import Result, assert_close, packed, reference
from ranks import assert_same_on_all_ranks, run_ranks
from test_vocab_parallel import CASES, batches
from torch import distributed

import grpo_kernels as gk
from grpo_kernels.integrations.sequence_parallel import gather_tokens


def slices_of_the_tokens(rank: int, group) -> None:
    """Log-probabilities of a slice of the packed tokens, gathered for the loss. Sequences lie across the cuts."""
    for name in ("grpo", "gspo", "vespo", "gmpo", "grpo in chunks", "softcap, scale, temperature"):
        config = CASES[name]
        batch = packed(batches(config))
        sizes = 9, len(batch.ids) - 9
        own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        leaves = [x.clone().requires_grad_() for x in (batch.hidden[own], batch.weight, batch.bias)]
        found = gk.fused_logps(
            *leaves[:2], batch.ids[own], lm_head_bias=leaves[2], temperature=config.temperature, entropy=True,
            logit_scale=config.logit_scale, logit_softcap=config.logit_softcap,
        )  # fmt: skip
        logps, entropy = (gather_tokens(x, group) for x in found)
        out = gk.grpo_loss_from_logps(logps, batch.advantages, entropy=entropy, config=config, **batch.options)
        out.loss.backward()
        dhidden, *shares = (x.grad for x in leaves)
        for share in shares:
            distributed.all_reduce(share)
        grads = {"hidden": gather_tokens(dhidden, group), "weight": shares[0], "bias": shares[1]}
        result = Result(out.loss.detach(), out.logps, out.entropy, out.metrics, grads)
        assert_same_on_all_ranks(result, group)
        assert_close(result, reference(batch, config), 2e-5)


def gathered_tokens(rank: int, group) -> None:
    x = torch.arange(3.0 * rank).requires_grad_()  # rank 0 has no token
    found = gather_tokens(x, group)
    assert torch.equal(found, torch.cat([torch.arange(3.0 * r) for r in range(group.size())]))
    (found * torch.arange(len(found))).sum().backward()
    first = sum(3 * r for r in range(rank))
    assert torch.equal(x.grad, torch.arange(first, first + 3.0 * rank))
    fine, only_here = torch.ones(rank + 1), rank == 1
    for wrong in (fine.double(), fine[:, None], fine[0]):
        with pytest.raises(ValueError, match="expected the same type and, but for the number of tokens"):
            gather_tokens(wrong if only_here else fine, group)
    with pytest.raises(ValueError, match=r"x has shape \(\); expected \(N_r, \.\.\.\)"):
        gather_tokens(fine[0], group)
    with pytest.raises(TypeError, match=r"group is a NoneType; expected a torch\.distributed\.ProcessGroup"):
        gather_tokens(fine, None)
    with pytest.raises(TypeError, match=r"x is a NoneType; expected a torch\.Tensor"):
        gather_tokens(None, group)


def all_of_it(rank: int, group) -> None:
    gathered_tokens(rank, group)
    if group.size() == 2:
        slices_of_the_tokens(rank, group)


@pytest.mark.parametrize("ranks", [2, 3])
def test_slices_of_the_tokens(tmp_path, ranks):
    run_ranks(all_of_it, ranks, tmp_path)

"""Packed sequences whose tokens are split over the ranks of a group (Ulysses, ring attention).

Ratios, masks and means of whole sequences need the log-probabilities of all their tokens. These are few numbers: each
rank runs the lm_head for its own tokens, then every rank computes the same loss of all tokens.

    logps, entropy = fused_logps(hidden, weight, completion_ids, entropy=True)  # of this rank's tokens
    logps, entropy = (gather_tokens(x, group) for x in (logps, entropy))  # of all tokens
    out = grpo_loss_from_logps(logps, advantages, entropy=entropy, cu_seqlens=cu_seqlens, config=config, ...)
    out.loss.backward()

advantages, cu_seqlens and everything else of the loss belong to all tokens, the same on every rank; so do the loss and
its metrics. The gradient of hidden covers this rank's tokens. The gradients of the weights are this rank's
shares of a sum over the group: where a reducer averages over its ranks (DDP, FSDP), multiply the loss by the size of
the group.

The lm_head takes 8 N H V operations in all, as in `fused_grpo_loss` where sequences are longer than a chunk. A loss
of single tokens, and whose denominator is known, does without this: pass `normalizer` to
`fused_grpo_loss` with this rank's tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from ..checks.plain import check_plain
from ..head.vocab_parallel import check_group, exchange

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_TEXT = 128  # bytes of type and shape, which are compared as they are


def gather_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """Returns values of the tokens of all ranks (N, ...), in the order of the ranks, from this rank's x (N_r, ...).

    N_r may differ between ranks, type and the other dimensions not. Differentiable, for a loss that is the same on all
    ranks: x gets the gradient of its own tokens, without a sum over the ranks. Where a rank's tokens are not one run of
    the batch (zigzag ring attention), index the result. Two gathers: of the sizes, which are read on the host, at which
    torch.compile breaks the graph, and of the values.

    Raises TypeError or ValueError: x is no plain tensor or has no dimension of tokens, no process group with this rank,
    the capture of a CUDA graph; on every rank where types or shapes differ.
    """
    check_group(group, "group")
    check_plain("x", x)
    description = f"{x.dtype} of shape {tuple(x.shape[1:])} per token" if x.dim() else f"{x.dtype} of shape ()"
    exchanged = exchange(group, x.device, (len(x) if x.dim() else 0, *description.encode().ljust(_TEXT)[:_TEXT]))
    sizes, texts = [size for size, *_ in exchanged], [bytes(text).decode().rstrip() for _, *text in exchanged]
    if len(set(texts)) > 1:
        raise ValueError(
            f"x is {', '.join(texts)} on the ranks of the group, in their order; expected the same type and, but for "
            "the number of tokens, the same shape on all ranks"
        )
    if x.dim() == 0:
        raise ValueError("x has shape (); expected (N_r, ...), one entry per token of this rank")
    with torch.no_grad():
        mine = x.new_zeros((max(sizes), *x.shape[1:]))  # gathers take parts of one size
        mine[: len(x)] = x
        gathered = mine.new_empty((len(sizes), *mine.shape))
        distributed.all_gather(list(gathered), mine, group=group)
    parts = [part[:size] for part, size in zip(gathered, sizes, strict=True)]
    parts[distributed.get_rank(group)] = x  # the one that gets a gradient
    return torch.cat(parts)

"""The three products over a few ids of each token, in torch: gathers of rows of the weight,
batched products, sums over segments.

    sampled dense-dense product    logits_tj = h_t . W_j + b_j              j in K_t
    sparse-dense product           dhidden_t = sum_j dlogits_tj W_j         j in K_t
    its transpose                  dweight_j = sum_t dlogits_tj h_t         t with j in K_t

They gather BLOCK_ELEMENTS numbers at a time. Sums over segments have a fixed order on every device, which index_add
would not have on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..operations import AllowedIdRows, GatheredIds, TokenIdPairs, TokenMask

BLOCK_ELEMENTS = 2**24


def allowed_ids(mask: TokenMask, sampled: Tensor, local_vocab: range, vocab_size: int, out: AllowedIdRows) -> None:
    """Writes `out`: see operations.py."""
    (rows, ids), token_of, columns, added = out
    index = rows.tokens(ids.device)
    first, count, sampled = mask.firsts[index, None], mask.counts[index, None], sampled[index, None]
    allowed, used = padded(mask.ids, first, count, ids.shape[1])
    is_sampled = used & (allowed == sampled)
    wrong = used & ((allowed < 0) | (allowed >= vocab_size))
    is_local = (sampled >= local_vocab.start) & (sampled < local_vocab.stop) & ~wrong.any(1, keepdim=True)
    before = torch.zeros_like(first)
    if len(local_vocab) < vocab_size:
        before = (used & (allowed < local_vocab.start)).sum(1, keepdim=True)
        count = (used & (allowed >= local_vocab.start) & (allowed < local_vocab.stop)).sum(1, keepdim=True)
        allowed, used = padded(mask.ids, first + before, count, ids.shape[1])
    is_added = ~is_sampled.any(1, keepdim=True)
    position = torch.where(is_added, count, is_sampled.int().argmax(1, keepdim=True) - before)
    ids.copy_(torch.where(used, (allowed - local_vocab.start).clamp_(0, len(local_vocab) - 1), -1))
    ids.scatter_(1, count.long(), torch.where(is_added & is_local, sampled - local_vocab.start, -1).to(torch.int32))
    token_of.copy_(index[:, None])
    columns[index] = torch.where(is_local, position, -1).squeeze(1)
    added.copy_(is_added.squeeze(1))


def padded(x: Tensor, first: Tensor, count: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Returns (x[first : first + count] of each row (R, width), whether an entry is used); first, count (R, 1)."""
    position = torch.arange(width, device=x.device)
    return x[(first + position).clamp_(0, len(x) - 1)], position < count


def gathered_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, gathered: GatheredIds, logits: Tensor) -> None:
    """Writes logits (C, K), float32 or better, from hidden (N, H), weight (V, H) and bias (V,); -inf where an entry is
    not used."""
    for block in _blocks(gathered.ids.shape[0], gathered.ids.shape[1] * hidden.shape[1]):
        ids = gathered.ids[block]
        used = ids.clamp(min=0)
        rows = hidden[_tokens(gathered)[block]].to(logits.dtype)
        block_logits = torch.bmm(weight[used].to(logits.dtype), rows[:, :, None]).squeeze(2)
        if bias is not None:
            block_logits += bias[used]
        logits[block] = block_logits.masked_fill_(ids < 0, -torch.inf)


def gathered_dhidden(dlogits: Tensor, weight: Tensor, gathered: GatheredIds, dhidden: Tensor) -> None:
    """Writes the tokens' rows of dhidden (N, H)."""
    for block in _blocks(gathered.ids.shape[0], gathered.ids.shape[1] * weight.shape[1]):
        ids = gathered.ids[block]
        factors, rows = dlogits[block].masked_fill(ids < 0, 0.0), weight[ids.clamp(min=0)].to(dlogits.dtype)
        dhidden[_tokens(gathered)[block]] = torch.bmm(factors[:, None], rows).squeeze(1).to(dhidden.dtype)


def gathered_dweight(dlogits: Tensor, hidden: Tensor, pairs: TokenIdPairs, dweight: Tensor, *, add: bool) -> None:
    """Adds to dweight (V, H), or writes it, 0 for ids that no token has. dlogits (M,) of all pairs.

    No number is read on the host, so that a CUDA graph can record it: a block has as many segments as pairs, and
    entries beyond its last segment repeat that one. An id whose pairs are in two blocks is written again, with the sum
    of both.
    """
    if not add:
        dweight.zero_()
    ids, order = pairs.ids.sort(stable=True)
    last: tuple[Tensor, Tensor, Tensor] | None = None  # the last id of a block: it, its sum, what was there before
    for block in _blocks(len(ids), hidden.shape[1]):
        block_ids, pair = ids[block].long(), order[block]
        segment = block_ids.diff(prepend=block_ids[:1]).ne(0).cumsum(0)
        starts = torch.searchsorted(segment, torch.arange(len(block_ids) + 1, device=block_ids.device))
        terms = dlogits[pair, None] * hidden[pairs.token_of[pair]].to(dlogits.dtype)
        sums = torch.segment_reduce(terms.masked_fill_(block_ids[:, None] < 0, 0.0), "sum", offsets=starts, unsafe=True)
        segment_ids = block_ids[starts[:-1].clamp(max=len(block_ids) - 1)]
        before = dweight[segment_ids.clamp(min=0)].to(sums.dtype)
        if last is not None:
            goes_on = (segment_ids[:1] == last[0])[:, None]
            sums[:1] += torch.where(goes_on, last[1], 0.0)
            before[:1] = torch.where(goes_on, last[2], before[:1])
        end = segment[-1:]
        last = segment_ids[end], sums[end], before[end]
        position = torch.arange(len(block_ids), device=block_ids.device)
        source = torch.where((position > end) | (segment_ids < 0), end, position)
        dweight[segment_ids[source].clamp(min=0)] = (before + sums)[source].to(dweight.dtype)


def _tokens(gathered: GatheredIds) -> Tensor:
    assert gathered.rows.index is not None
    return gathered.rows.index


def _blocks(count: int, elements: int) -> Iterator[slice]:
    size = max(1, BLOCK_ELEMENTS // max(1, elements))
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))

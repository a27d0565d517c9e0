"""Tokens with a sampling mask: which logits they need, before any is computed.

A token that keeps K ids needs K logits, h . W_j for its kept ids j, and nothing else of the vocabulary: its
log-probability, entropy and gradients are those of a row of K logits. Tokens that keep nearly as many ids stand in one
matrix, whose width is a power of two; places that a token does not use hold the logit -inf, probability 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import KeptIds, KeptPairs, Rows

LEAST_WIDTH = 16  # 64 bytes of float32: rows stay aligned, and 8 kept ids cost little more memory than 16


class KeptTokens(NamedTuple):
    """All tokens of a call that have a sampling mask. M places in all buckets, used or not, at most 2 per kept id."""

    buckets: tuple[KeptIds, ...]  # their ids are views of those of `pairs`, one after another
    pairs: KeptPairs
    places: Tensor  # (N,) int64: place of the sampled id in the row of its token
    added: Tensor  # (N,) bool: the sampled id was not among the kept ids


def kept_tokens(mask_ids: Tensor, counts: Tensor, ids: Tensor, index: Tensor, vocab_size: int) -> KeptTokens:
    """Of the tokens `index` (C,), each of which keeps an id. mask_ids (M,), counts (N,) and the sampled ids (N,) are
    those of the whole batch. Sampled ids that are not among the kept ones are added.

    The keys row * V + id are in order, so that one binary search per row finds its sampled id.
    """
    device = index.device
    per_row = counts[index].long()
    first_of_token = counts.cumsum(0) - counts
    row, rank = _rows_of(per_row)
    keys = row * vocab_size + mask_ids[first_of_token[index][row] + rank]
    wanted = torch.arange(index.numel(), device=device) * vocab_size + ids[index]
    place = torch.searchsorted(keys, wanted)
    missing = keys[place.clamp(max=keys.numel() - 1)] != wanted
    if bool(missing.any()):
        keys = torch.cat([keys, wanted[missing]]).sort().values
        per_row = per_row + missing
        row, rank = _rows_of(per_row)
        place = torch.searchsorted(keys, wanted)

    widths = LEAST_WIDTH * 2 ** torch.arange(32, device=device)
    kind = torch.searchsorted(widths, per_row)
    order = kind.sort(stable=True).indices
    width = widths[kind[order]]
    begin = torch.empty_like(width)
    begin[order] = width.cumsum(0) - width
    sizes = torch.bincount(kind, minlength=1).tolist()
    total = sum(size * (LEAST_WIDTH << k) for k, size in enumerate(sizes))

    flat = torch.full((total,), -1, dtype=torch.int32, device=device)
    flat[begin[row] + rank] = (keys - row * vocab_size).to(torch.int32)
    token_of = index[order].to(torch.int32).repeat_interleave(width, output_size=total)
    places = torch.zeros(counts.numel(), dtype=torch.int64, device=device)
    places[index] = place - (per_row.cumsum(0) - per_row)
    added = torch.zeros(counts.numel(), dtype=torch.bool, device=device)
    added[index] = missing

    buckets, first, start = [], 0, 0
    for k, size in enumerate(sizes):
        if size:
            tokens = index[order[first : first + size]]
            slots = LEAST_WIDTH << k
            buckets.append(KeptIds(Rows(0, size, tokens), flat[start : start + size * slots].view(size, slots)))
            first, start = first + size, start + size * slots
    return KeptTokens(tuple(buckets), KeptPairs(flat, token_of), places, added)


def _rows_of(per_row: Tensor) -> tuple[Tensor, Tensor]:
    """(row of each element, its place in that row) of rows with so many elements."""
    row = torch.repeat_interleave(per_row)
    firsts = per_row.cumsum(0) - per_row
    return row, torch.arange(row.numel(), device=row.device) - firsts[row]

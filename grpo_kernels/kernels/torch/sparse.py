"""Rows of d loss / d logits as pairs of an id and a number: systematic sampling, see operations.SparseRule."""

from __future__ import annotations

import torch
from torch import Tensor

from ..operations import SPARSE_ONE, SparseRows, SparseRule

_WORD = 2**32 - 1


def write_pairs(
    dlogits: Tensor, sampled: Tensor, scale: Tensor, start: Tensor, rule: SparseRule, pairs: SparseRows
) -> None:
    """Writes the pairs of dlogits (C, V) that the rule keeps.

    sampled: (C,) columns of the sampled ids, -1 where there is none.
    scale: (C,) of the rows.
    start: (C,) int64, where the running sum begins.
    """
    level = rule.theta * scale
    shares = dlogits.abs() * (SPARSE_ONE / level)[:, None]
    exact = ~(shares < SPARSE_ONE)  # NaN and infinity too
    known = (sampled >= 0).nonzero().squeeze(1)
    exact[known, sampled[known]] = True
    steps = torch.where(exact, 0.0, shares + 0.5).to(torch.int64)
    after = steps.cumsum(1).add_(start[:, None])
    passes = after // SPARSE_ONE > (after - steps) // SPARSE_ONE
    row, column = ((exact | passes) & (scale != 0)[:, None]).nonzero().unbind(1)
    values = torch.where(exact, dlogits, level[:, None].copysign(dlogits))[row, column]
    counts = row.bincount(minlength=len(dlogits))
    position = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    capacity = pairs.ids.shape[1]
    row, column, position, values = (x[position < capacity] for x in (row, column, position, values))
    pairs.ids[row, position], pairs.values[row, position] = column.to(torch.int32), values
    pairs.counts.copy_(counts.clamp(max=capacity + 1))


def start_of_sum(tokens: Tensor, lse: Tensor, first_id: int) -> Tensor:
    """Returns where the running sums of tokens (C,) begin: u in [0, 1), int64 in units of 1 / SPARSE_ONE, from their
    log-sum-exps. csrc/cpu/sparse.cpp has the same."""
    bits = lse.to(torch.float32).view(torch.int32).long() & _WORD
    return _mixed(_mixed(_mixed(tokens) + bits) + first_id) >> 1


def _mixed(x: Tensor) -> Tensor:
    """Returns a hash of 32-bit integers: the last steps of murmur3."""
    x = (x + 0x9E3779B9) & _WORD
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _WORD
    return x ^ (x >> 16)

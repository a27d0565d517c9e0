"""The ids that truncated sampling keeps: of rows of logits, and of tokens from their hidden states, chunk by chunk.

The rules are those of vLLM 0.33's sampler in PyTorch; transformers 5.23 has the same, and min_p at another place.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.operations import Statistics
from ..kernels.torch.transform import transformed
from ..sampling_mask import SamplingMask
from .logps_op import Inputs, LogpsCall, begin_logps, check_call
from .products import pinned_matmul_precision
from .shared import hide_from_dispatch_modes, is_capturing, statistics_dtype

LIKELIEST = 256  # ids of a row among which the end of top_p is looked for first, then among 16 times as many
PARTS = 8  # of a chunk: what stands beside its logits is some times as large as one of them


class Truncation(NamedTuple):
    """The rule by which truncated sampling keeps ids, applied in this order:

        min_p  ids of at least min_p times the probability of the likeliest one
        top_k  the k likeliest of these; 0: all
        top_p  the likeliest of these, until they have mass top_p

    min_p_last: min_p comes after top_p, as in transformers.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_p_last: bool = False

    def truncates(self, vocab_size: int) -> bool:
        """Returns whether the rule can drop an id."""
        return self.top_p < 1 or self.min_p > 0 or 0 < self.top_k < vocab_size


def truncate(z: Tensor, rule: Truncation, width: int = 0) -> Tensor:
    """Returns which ids are kept by logits z (C, V), (C, V) bool: none whose logit is -inf, and none of a row of NaN.

    Where top_p ends among equal logits, the highest ids are kept: a stable ascending sort has them last. Which rows
    need more than `width` ids is read on the host; 0: LIKELIEST.
    """
    width = width or LIKELIEST
    keep, is_known = truncate_within(z, rule, width)
    rows = (~is_known).nonzero().squeeze(1)
    if rows.numel():
        keep[rows] = truncate(z[rows], rule, 16 * width)
    return keep


def truncate_within(z: Tensor, rule: Truncation, width: int) -> tuple[Tensor, Tensor]:
    """Returns the ids that `truncate` keeps, and of which rows that is known, (C,) bool: of those whose top_p ends
    within the `width` likeliest ids. Nothing is read on the host."""
    least, top = z.new_full((1, 1), torch.finfo(z.dtype).min), z.amax(1, keepdim=True)
    floor = torch.maximum(least, top + math.log(rule.min_p)) if rule.min_p else least
    lowest = least if rule.min_p_last else floor
    if 0 < rule.top_k < z.shape[1]:
        lowest = torch.maximum(lowest, z.topk(rule.top_k).values[:, -1:])
    keep, is_known = z >= lowest, z.new_ones(len(z), dtype=torch.bool)
    if rule.top_p < 1:
        left, width = z.masked_fill(~keep, -torch.inf), min(width, z.shape[1])
        enough = rule.top_p * (left - top).exp_().sum(1, keepdim=True).double()
        values, ids = left.topk(width)
        before = ((values - top).exp_().cumsum(1, dtype=torch.float64) < enough).sum(1, keepdim=True)
        end = before.clamp(max=width - 1)
        border = values.gather(1, end)
        if width < z.shape[1]:  # else equal logits may be left out
            is_known = ((before < width) & (values[:, -1:] != border)).squeeze(1)
        number = end + 1 - (values > border).sum(1, keepdim=True)  # of ids that are kept among equal ones
        first = ids.masked_fill_(values != border, -1).sort(1, descending=True).values.gather(1, number - 1)
        keep &= (left > border) | ((left == border) & (torch.arange(z.shape[1], device=z.device) >= first))
    return keep & (z >= floor) if rule.min_p_last else keep, is_known


@hide_from_dispatch_modes
@torch.no_grad()
def recompute_support(inputs: Inputs, call: LogpsCall, rule: Truncation) -> SamplingMask:
    """Returns the kept ids of the call's tokens, with `mass` and `added`."""
    ids, device = call.tokens.completion_ids, inputs[0].device
    if is_capturing(device):
        raise ValueError("sampling_support was called under capture of a CUDA graph; the ids are counted on the host")
    dtype = statistics_dtype(call.compute_dtype or inputs[0].dtype)
    counts = torch.zeros(ids.numel(), dtype=torch.int32, device=device)
    mass, added = torch.zeros_like(counts, dtype=dtype), torch.zeros_like(counts, dtype=torch.bool)
    allowed_ids = [counts[:0]]
    with pinned_matmul_precision(device):
        check_call(call, len(inputs[1]))
        stats = Statistics.empty(0, device, dtype)
        logps_pass = begin_logps(inputs, call, stats)
        head, tokens = logps_pass.head, logps_pass.tokens
        for rows in head.chunks(logps_pass.selection.scored):
            logits = head.logits(rows)
            for part in rows.split(-(-rows.count // PARTS)):
                part_logits = logits[part.start - rows.start : part.stop - rows.start]
                z, _ = transformed(part_logits, head.folded_bias, part.take(tokens.temperature), tokens.transform)
                keep, sampled = truncate(z, rule), part.take(tokens.ids)[:, None]
                part.put(added, ~keep.gather(1, sampled).squeeze(1))
                keep.scatter_(1, sampled, True)
                part.put(counts, keep.sum(1, dtype=counts.dtype))
                part.put(mass, z.softmax(1).masked_fill_(~keep, 0.0).sum(1))
                allowed_ids.append(keep.nonzero()[:, 1].to(counts.dtype))
        head.free()
    return SamplingMask(torch.cat(allowed_ids), *(x.view(ids.shape) for x in (counts, mass, added)))

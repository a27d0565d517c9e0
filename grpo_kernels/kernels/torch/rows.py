"""Row operations and small ones in plain PyTorch: the table that runs on any device, and the one for float64.

Softmax statistics in float32 or better, whatever the type of the logits. Intermediates are as large as the chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operations import HeadChunk, LogitChunk, Rows, RowScales, SparseRows, SparseRule, Statistics
from .sparse import start_of_sum, write_pairs
from .teacher import divergence_gradient, put_divergence, sums
from .transform import minus_lse, transformed

LOWEST_LOG_P = -1e4  # e^x is 0 long before, in float64 too
SCALED_AT_ONCE = 1 << 22  # numbers that `scale` holds in float32, and `divergence` of each side


def statistics(chunk: LogitChunk) -> None:
    rows, temperature = chunk.rows, chunk.rows.take(chunk.temperature)
    z, _ = transformed(chunk.logits, chunk.bias, temperature, chunk.transform)
    computed = _row_statistics(z, rows.take(chunk.ids))
    for destination, x in zip(chunk.stats, computed, strict=True):
        rows.put(destination, x)
    if chunk.teacher is not None:
        log_p, _ = _log_p(chunk, temperature, computed.lse)
        put_divergence(chunk.rows, chunk.teacher, log_p, temperature)


def divergence(chunk: LogitChunk) -> Tensor:
    teacher, parts, done = chunk.teacher, [], 0
    assert teacher is not None
    for rows in chunk.rows.split(max(1, SCALED_AT_ONCE // chunk.logits.shape[1])):
        part_rows, done = slice(done, done + rows.count), done + rows.count
        temperature = rows.take(chunk.temperature)
        log_p, _ = _log_p(chunk._replace(logits=chunk.logits[part_rows]), temperature, rows.take(chunk.stats.lse))
        z, _ = transformed(teacher.logits[part_rows], teacher.bias, temperature, teacher.transform)
        parts.append(torch.stack(sums(log_p, minus_lse(z, rows.take(teacher.lse)), teacher.transform)))
    return torch.cat(parts, 1)


def gradient(chunk: LogitChunk, dlogp: Tensor, dentropy: Tensor, out: Tensor) -> None:
    per_token = chunk.ids, chunk.temperature, chunk.stats.lse, chunk.stats.entropy, dlogp, dentropy
    ids, temperature, lse, entropy, dlogp, dentropy = (chunk.rows.take(x) for x in per_token)
    log_p, softcap_slope = _log_p(chunk, temperature, lse)
    p = log_p.exp()
    known, sampled = (ids >= 0)[:, None], ids.clamp(min=0)[:, None]  # -1: in another rank's slice of the vocabulary
    logp = log_p.gather(1, sampled).squeeze(1)
    d_teacher = None
    if chunk.teacher is not None:
        d_teacher = divergence_gradient(chunk.rows, chunk.teacher, log_p, temperature)
    # Whether any gradient goes through the entropy is stored on the device; to read it would end the capture of a
    # CUDA graph. Where none does, an entropy of NaN must not matter; where p is 0, any finite log p will do.
    entropy = torch.where(dentropy == 0, 0.0, entropy)
    entropy_term = log_p.clamp_(min=LOWEST_LOG_P).add_(entropy[:, None]).mul_(dentropy[:, None])
    dz = p.mul_(entropy_term.add_(dlogp[:, None])).neg_()
    d_sampled = gradient_of_sampled(logp, entropy, dlogp, dentropy)[:, None]
    dz.scatter_(1, sampled, torch.where(known, d_sampled, dz.gather(1, sampled)))
    zero_gradient = (dlogp == 0) & (dentropy == 0)
    if chunk.teacher is not None and d_teacher is not None:
        dz.masked_fill_(zero_gradient[:, None], 0.0).add_(d_teacher)
        zero_gradient &= chunk.rows.take(chunk.teacher.weight) == 0
    dz.mul_((chunk.transform.logit_scale / temperature)[:, None])
    if softcap_slope is not None:
        dz.mul_(softcap_slope)
    out.copy_(dz.masked_fill_(zero_gradient[:, None], 0.0))


def gradient_of_sampled(logp: Tensor, entropy: Tensor, dlogp: Tensor, dentropy: Tensor) -> Tensor:
    """Returns d loss / d z of the sampled id (C,), from its log-probability; exact where p is near 1."""
    entropy_term = dentropy * (logp.clamp(min=LOWEST_LOG_P) + entropy)
    return -dlogp * logp.expm1() - logp.exp() * entropy_term


def sparse_gradient(chunk: LogitChunk, dlogp: Tensor, dentropy: Tensor, rule: SparseRule, out: SparseRows) -> None:
    rows = chunk.rows
    dlogits = torch.empty_like(chunk.logits, dtype=out.values.dtype)
    gradient(chunk, dlogp, dentropy, dlogits)
    steepness = chunk.transform.logit_scale / rows.take(chunk.temperature)
    scale = steepness * (rows.take(dlogp).abs() + rows.take(dentropy).abs())
    start = start_of_sum(rows.tokens(dlogits.device), rows.take(chunk.stats.lse), rule.first_id)
    write_pairs(dlogits, rows.take(chunk.ids), scale, start, rule, out)


def scale(x: Tensor, factor: Tensor) -> None:
    if x.dtype.itemsize > 2:
        x.mul_(factor)
        return
    # On a GPU torch rounds a factor to the 16 bits of x before it multiplies: 65,536 becomes infinite.
    for piece in x.view(-1).split(SCALED_AT_ONCE):
        piece.copy_(piece.float().mul_(factor))


def scale_rows(
    x: Tensor, dlogp: Tensor, scales: RowScales, head: HeadChunk, out: Tensor, *, is_product: bool
) -> None:  # fmt: skip
    rows, ids, dlogp = head.rows, head.rows.take(head.ids), head.rows.take(dlogp)
    values = x.float() * (-dlogp * scales.row_scale)[:, None]
    if is_product:
        known = ((ids >= 0) & (ids < len(head.weight)))[:, None]
        added = (dlogp * scales.sampled)[:, None] * head.weight[torch.where(known[:, 0], ids, 0)]
        values += torch.where(known, added, 0.0)
    else:
        rows = Rows(0, rows.count)
    rows.put(out, values.masked_fill_((dlogp == 0)[:, None], 0.0))


def _row_statistics(z: Tensor, ids: Tensor) -> Statistics:
    """Returns the statistics of z (C, V), which is overwritten; logp is NaN for an id of -1.

    The sampled id is added to the sums of the others last: next to it they would be lost where p is near 1.
    """
    known, sampled = ids[:, None] >= 0, ids.clamp(min=0)[:, None]
    z_id = z.gather(1, sampled)
    z.scatter_(1, sampled, torch.where(known, -torch.inf, z_id))
    top = z.amax(-1, keepdim=True)
    top = torch.where(known & (z_id > top), z_id, top)
    top = torch.where(top.isfinite(), top, 0.0)
    z_id = z_id - top
    e_id = torch.where(known, z_id.exp(), 0.0)
    below = z.sub_(top)
    p = below.exp()
    rest = p.sum(-1, keepdim=True)
    total = rest + e_id
    log_sum = torch.where(known & (z_id == 0), rest.log1p(), total.log())
    # entropy = log S - sum e^(z - m) (z - m) / S: both terms are >= 0, nothing cancels
    moment = p.mul_(below.masked_fill_(p == 0, 0.0)).sum(-1, keepdim=True)
    moment = moment + torch.where(e_id == 0, 0.0, e_id * z_id)
    logp = torch.where(known, z_id, torch.nan) - log_sum
    lse, entropy = top.double() + log_sum.double(), log_sum - moment / total
    return Statistics(logp.squeeze(1), lse.squeeze(1), entropy.squeeze(1))


def _log_p(chunk: LogitChunk, temperature: Tensor, lse: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns (log-probabilities (C, V), the softcap's derivative or None) from the log-sum-exp (C,)."""
    z, softcap_slope = transformed(chunk.logits, chunk.bias, temperature, chunk.transform)
    return minus_lse(z, lse), softcap_slope

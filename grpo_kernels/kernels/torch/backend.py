"""The torch backend: every kernel in plain PyTorch. The fallback on any device, and the one for float64.

Softmax statistics in float32 or better, whatever the type of the logits. Intermediates are as large as the chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...contract import Backend, LogitChunk, PlannedTokens, RowGradients, RowStats, SparseRows, SparseRule, TokenValues
from ...names import FIELD, KernelParams
from . import coefficients, kept
from .plan import plan_tokens
from .sparse import start_of_sum, write_pairs
from .sums import column_sums
from .teacher import divergence_gradient, put_divergence
from .transform import minus_lse, transformed

LOWEST_LOG_P = -1e4  # e^x is 0 long before, in float64 too
SCALED_AT_ONCE = 1 << 22  # numbers that `scale` holds in float32


def add_rows(target: Tensor, ids: Tensor, scale: Tensor, rows: Tensor) -> None:
    found, place = ids.unique(return_inverse=True)
    sums = target[found].to(scale.dtype).index_add_(0, place, scale[:, None] * rows)
    target[found] = sums.to(target.dtype)


def scale_in_pieces(x: Tensor, factor: Tensor) -> None:
    if x.dtype.itemsize > 2:
        x.mul_(factor)
        return
    # On a GPU torch rounds a factor to the 16 bits of x before it multiplies: 65,536 becomes infinite.
    for piece in x.view(-1).split(SCALED_AT_ONCE):
        piece.copy_(piece.float().mul_(factor))


class TorchBackend(Backend):
    name = "torch"
    plan = staticmethod(plan_tokens)
    token_objective = staticmethod(coefficients.token_objective)
    sums = staticmethod(column_sums)
    add_rows = staticmethod(add_rows)
    scale = staticmethod(scale_in_pieces)
    kept_ids = staticmethod(kept.kept_ids)
    kept_logits = staticmethod(kept.kept_logits)
    kept_dhidden = staticmethod(kept.kept_dhidden)
    kept_dweight = staticmethod(kept.kept_dweight)

    def single_pass(self, chunk: LogitChunk, table: Tensor, gradients: RowGradients | None = None) -> None:
        self.statistics(chunk)
        coefficients.token_objective(chunk.rows, table, chunk.values, chunk.params)
        if gradients is not None:
            self.logits_gradient(chunk, chunk.values.g_logp, table[FIELD["weight_entropy"]], gradients)

    def statistics(self, chunk: LogitChunk) -> None:
        rows, values, temperature = chunk.rows, chunk.values, chunk.rows.take(chunk.temperature)
        z, _ = transformed(chunk.logits, chunk.bias, temperature, chunk.params)
        found = _row_statistics(z, rows.take(chunk.ids))
        for destination, x in zip((values.logp, values.lse, values.entropy), found, strict=True):
            rows.put(destination, x)
        if chunk.teacher is not None:
            log_p, _ = _log_p(chunk, temperature, found.lse)
            put_divergence(chunk, chunk.teacher, log_p, temperature)

    def logits_gradient(self, chunk: LogitChunk, g_logp: Tensor, g_entropy: Tensor, gradients: RowGradients) -> None:
        given = chunk.ids, chunk.temperature, chunk.values.lse, chunk.values.entropy, g_logp, g_entropy
        ids, temperature, lse, entropy, g_logp, g_entropy = (chunk.rows.take(x) for x in given)
        log_p, chain = _log_p(chunk, temperature, lse)
        p = log_p.exp()
        of_teacher = None
        if chunk.teacher is not None:
            of_teacher = divergence_gradient(chunk.rows, chunk.teacher, log_p, temperature)
        # Whether any gradient goes through the entropy is stored on the device; to read it would end the capture of a
        # CUDA graph. Where none does, an entropy of NaN must not matter; where p is 0, any finite log p will do.
        entropy = torch.where(g_entropy == 0, 0.0, entropy)
        slope = log_p.clamp_(min=LOWEST_LOG_P).add_(entropy[:, None]).mul_(g_entropy[:, None])
        dz = p.mul_(slope.add_(g_logp[:, None])).neg_()
        known = ids >= 0  # -1: in another rank's slice of the vocabulary
        sampled = ids.clamp(min=0)[:, None]
        dz.scatter_add_(1, sampled, torch.where(known, g_logp, 0.0)[:, None])
        zero_gradient = (g_logp == 0) & (g_entropy == 0)
        if chunk.teacher is not None and of_teacher is not None:
            dz.masked_fill_(zero_gradient[:, None], 0.0).add_(of_teacher)
            zero_gradient &= chunk.rows.take(chunk.teacher.weight) == 0
        dz.mul_((chunk.params.logit_scale / temperature)[:, None])
        if chain is not None:
            dz.mul_(chain)
        dlogits, rounding_error = gradients
        dlogits.copy_(dz.masked_fill_(zero_gradient[:, None], 0.0))
        if rounding_error is not None:
            exact, rounded = (x.gather(1, sampled).squeeze(1) for x in (dz, dlogits))
            rounding_error.copy_(torch.where(known, exact - rounded, 0.0))

    def sparse_gradient(
        self, chunk: LogitChunk, g_logp: Tensor, g_entropy: Tensor, rule: SparseRule, pairs: SparseRows
    ) -> None:
        rows = chunk.rows
        dlogits = torch.empty_like(chunk.logits, dtype=pairs.values.dtype)
        self.logits_gradient(chunk, g_logp, g_entropy, RowGradients(dlogits))
        steepness = chunk.params.logit_scale / rows.take(chunk.temperature)
        scale = steepness * (rows.take(g_logp).abs() + rows.take(g_entropy).abs())
        start = start_of_sum(rows.tokens(dlogits.device), rows.take(chunk.values.lse), rule.first_id)
        write_pairs(dlogits, rows.take(chunk.ids), scale, start, rule, pairs)

    def sequence_objective(
        self, sequences: slice, row_length: int | None, planned: PlannedTokens, params: KernelParams
    ) -> None:
        table, values, scored = planned.table, planned.values, planned.scored
        offsets, lengths = planned.offsets, planned.lengths
        if row_length is not None:
            first, last = sequences.start * row_length, sequences.stop * row_length
            table, scored = table[:, first:last], scored[first:last]
            values = TokenValues(values.columns[:, first:last], values.lse[first:last])
            offsets = offsets[sequences.start : sequences.stop + 1] - first
            lengths = lengths[sequences]
        # Where packed sequences begin is not known on the host: all are computed, those of other chunks once more.
        coefficients.sequence_objective(table, scored, offsets, lengths, values, params)


def _row_statistics(z: Tensor, ids: Tensor) -> RowStats:
    """Of z (C, V), which is overwritten; logp is NaN for an id of -1."""
    top = z.amax(-1, keepdim=True)
    top = torch.where(top.isfinite(), top, 0.0)
    z_id = z.gather(1, ids.clamp(min=0)[:, None]) - top
    z_id = torch.where(ids[:, None] >= 0, z_id, torch.nan)
    below = z.sub_(top)
    p = below.exp()
    total = p.sum(-1, keepdim=True)
    log_sum = total.log()
    # entropy = log S - sum e^(z - m) (z - m) / S: both terms are >= 0, nothing cancels
    moment = p.mul_(below.masked_fill_(p == 0, 0.0)).sum(-1, keepdim=True)
    logp, lse, entropy = z_id - log_sum, top.double() + log_sum.double(), log_sum - moment / total
    return RowStats(logp.squeeze(1), lse.squeeze(1), entropy.squeeze(1))


def _log_p(chunk: LogitChunk, temperature: Tensor, lse: Tensor) -> tuple[Tensor, Tensor | None]:
    """(log-probabilities (C, V), the softcap's derivative or None) from the log-sum-exp (C,)."""
    z, chain = transformed(chunk.logits, chunk.bias, temperature, chunk.params)
    return minus_lse(z, lse), chain

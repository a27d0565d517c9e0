"""The torch backend: every kernel in plain PyTorch. The fallback on any device, and the one for float64.

Softmax statistics in float32 or better, whatever the type of the logits. Intermediates are as large as the chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...contract import COLUMN, COLUMNS, FIELD, KernelParams, RowStats
from . import groups
from .base import GatheringBackend
from .coefficients import own_log_ratio
from .objective import clamp_log_ratio, objective

LOWEST_LOG_P = -1e4  # e^x is 0 long before, in float64 too
SCALED_AT_ONCE = 1 << 22  # numbers that `scale` holds in float32


class TorchBackend(GatheringBackend):
    name = "torch"

    def why_not(self, device: torch.device) -> str:
        return ""

    def strategies(self, hidden: Tensor, weight: Tensor) -> tuple[str, ...]:
        """Those of strategy.py that serve these inputs."""
        return ("rows",)

    def fused(
        self,
        logits: Tensor,
        grad: Tensor,
        ids: Tensor,
        table: Tensor,
        params: KernelParams,
        rounding_error: Tensor | None = None,
    ) -> RowStats:
        """Statistics, objective and gradient of a chunk whose tokens depend on themselves alone."""
        temperature = table[FIELD["temperature"]]
        stats = self.stats(logits, ids, temperature, params)
        result = objective(own_log_ratio(stats.logp, table, params), stats.logp, stats.entropy, table, params)
        g_logp = torch.zeros_like(stats.logp)
        for name, slope in (("weight_ratio", result.d_ratio), ("weight_direct", result.d_direct)):
            weight = table[FIELD[name]]
            g_logp = g_logp + torch.where(weight != 0, weight * slope, 0.0)
        g_entropy = table[FIELD["weight_entropy"]]
        self.gradient(
            logits, grad, ids, temperature, stats.lse, stats.entropy, g_logp, g_entropy, params, rounding_error
        )
        return stats

    def stats(self, logits: Tensor, ids: Tensor, temperature: Tensor, params: KernelParams) -> RowStats:
        """logp of `ids`, log-sum-exp and entropy of every row (C,)."""
        z, _ = _transform(logits, temperature, params)
        top = z.amax(-1, keepdim=True)
        top = torch.where(top.isfinite(), top, 0.0)
        z_id = z.gather(1, ids[:, None]) - top
        below = z.sub_(top)
        p = below.exp()
        total = p.sum(-1, keepdim=True)
        log_sum = total.log()
        # entropy = log S - sum e^(z - m) (z - m) / S: both terms are >= 0, nothing cancels
        moment = p.mul_(below.masked_fill_(p == 0, 0.0)).sum(-1, keepdim=True)
        logp, lse, entropy = z_id - log_sum, top.double() + log_sum.double(), log_sum - moment / total
        return RowStats(logp.squeeze(1), lse.squeeze(1), entropy.squeeze(1))

    def gradient(
        self,
        logits: Tensor,
        grad: Tensor,
        ids: Tensor,
        temperature: Tensor,
        lse: Tensor,
        entropy: Tensor,
        g_logp: Tensor,
        g_entropy: Tensor,
        params: KernelParams,
        rounding_error: Tensor | None = None,
    ) -> None:
        """Write d loss / d logits to `grad` (C, V), which may be the memory of the logits.

        rounding_error (C,) receives what rounding to the type of `grad` took from the sampled id's own entry.
        """
        z, chain = _transform(logits, temperature, params)
        # Two subtractions: lse rounded to the type of z, then what the rounding left.
        rounded = lse.to(z.dtype)
        log_p = z.sub_(rounded[:, None]).sub_((lse - rounded).to(z.dtype)[:, None])
        p = log_p.exp()
        # Only the device knows whether any gradient goes through the entropy; to read that would end the capture of a
        # CUDA graph. Where none does, an entropy of NaN must not matter; where p is 0, any finite log p will do.
        entropy = torch.where(g_entropy == 0, 0.0, entropy)
        slope = log_p.clamp_(min=LOWEST_LOG_P).add_(entropy[:, None]).mul_(g_entropy[:, None])
        dz = p.mul_(slope.add_(g_logp[:, None])).neg_()
        dz[torch.arange(len(ids), device=ids.device), ids] += g_logp
        dz.mul_((params.logit_scale / temperature)[:, None])
        if chain is not None:
            dz.mul_(chain)
        silent = (g_logp == 0) & (g_entropy == 0)
        grad.copy_(dz.masked_fill_(silent[:, None], 0.0))
        if rounding_error is not None:
            exact, rounded = (x.gather(1, ids[:, None]).squeeze(1) for x in (dz, grad))
            rounding_error.copy_(exact - rounded)

    def objective(
        self, log_ratio: Tensor, logp: Tensor, entropy: Tensor, table: Tensor, params: KernelParams
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(value, d_ratio, d_direct, kl) per token."""
        return objective(log_ratio, logp, entropy, table, params)

    def reduce(
        self,
        scored: Tensor,
        log_ratio: Tensor,
        logp: Tensor,
        entropy: Tensor,
        value: Tensor,
        kl: Tensor,
        g_logp: Tensor,
        table: Tensor,
        params: KernelParams,
        cu_seqlens: Tensor,
        group_index: Tensor | None,
        num_groups: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows to sequences (S, K) to groups (num_groups, K) to totals (K,); extrema (3,). K: params.COLUMNS."""
        field = dict(zip(FIELD, table, strict=True))
        ratio = clamp_log_ratio(log_ratio, params)[0].exp()
        bounded, advantage = ratio.clamp(max=params.delta), field["advantage"]
        old = field["old"] if params.has_old else logp
        known = ~field["rollout"].isnan()
        # Of the old policy, or where the ratio divides by the rollout of the current one.
        policy = logp if params.divides_by_rollout else old
        mismatch = torch.where(known, (policy - field["rollout"]).abs(), 0.0)
        one = torch.ones_like(logp)
        columns = {
            "loss": field["weight_direct"] * value + field["weight_entropy"] * entropy,
            "tokens": one,
            "kl": kl,
            "entropy": entropy,
            "ratio": ratio,
            "clip_low": (bounded < 1 - params.epsilon_low) & (advantage < 0),
            "clip_high": (bounded > 1 + params.epsilon_high) & (advantage > 0),
            "cispo_clip": (bounded > params.epsilon_high) & (advantage > 0),
            "approx_kl": old - logp,
            "mismatch": mismatch,
            "mismatch_count": known,
            "rollout_weight": field["rollout_weight"],
            "rollout_weight_sq": field["rollout_weight"] ** 2,
            "zero_gradient": (g_logp == 0) & (field["weight_entropy"] == 0),
        }
        matrix = torch.stack([torch.where(scored, columns[name].to(logp.dtype), 0.0) for name in COLUMNS], dim=1)
        sequences = torch.segment_reduce(matrix, "sum", offsets=cu_seqlens, axis=0, unsafe=True)
        grouped = matrix.new_zeros(num_groups, len(COLUMN))
        if group_index is not None:
            order = group_index.argsort(stable=True)
            # not bincount, which reads the largest index
            sizes = group_index.new_zeros(num_groups).index_add_(0, group_index, torch.ones_like(group_index))
            grouped = torch.segment_reduce(sequences[order], "sum", lengths=sizes, axis=0, unsafe=True)
        extrema = torch.stack(
            [
                torch.where(scored, ratio, torch.inf).min() if len(ratio) else one.new_tensor(torch.inf),
                torch.where(scored, ratio, -torch.inf).max() if len(ratio) else one.new_tensor(-torch.inf),
                torch.where(scored & known, mismatch, -torch.inf).max() if len(ratio) else one.new_tensor(-torch.inf),
            ]
        )
        return sequences, grouped, sequences.sum(0), extrema

    def add_rows(self, target: Tensor, ids: Tensor, scale: Tensor, rows: Tensor) -> None:
        """target[ids] += scale * rows, one sum in float32 per id; target (V, H), ids and scale (C,), rows (C, H)."""
        found, place = ids.unique(return_inverse=True)
        sums = target[found].to(scale.dtype).index_add_(0, place, scale[:, None] * rows)
        target[found] = sums.to(target.dtype)

    def group_statistics(
        self, rewards: Tensor, group_index: Tensor, num_groups: int, scale: str, baseline: str, ddof: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(advantages (B,), mean (num_groups,), std (num_groups,)); NaN rewards are left out and get advantage 0."""
        return groups.group_statistics(rewards, group_index, num_groups, scale, baseline, ddof, eps)

    def scale(self, x: Tensor, factor: Tensor) -> None:
        """x *= factor, float32 () that the host need not know; x is contiguous, a product rounded once."""
        if x.dtype.itemsize > 2:
            x.mul_(factor)
            return
        # On a GPU torch rounds a factor to the 16 bits of x before it multiplies: 65,536 becomes infinite.
        for piece in x.view(-1).split(SCALED_AT_ONCE):
            piece.copy_(piece.float().mul_(factor))


def _transform(logits: Tensor, temperature: Tensor, params: KernelParams) -> tuple[Tensor, Tensor | None]:
    """(z = softcap(scale * logits) / temperature, the softcap's derivative or None); never aliases the logits."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True).mul_(params.logit_scale)
    chain = None
    if params.softcap:
        tanh = z.div_(params.softcap).tanh_()
        chain = 1 - tanh * tanh
        z = tanh.mul_(params.softcap)
    return z.div_(temperature[:, None]), chain

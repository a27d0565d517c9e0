"""Sums of names.COLUMNS in plain torch: of sequences, of groups, of all. csrc/cpu/reduce.cpp is the compiled one."""

from __future__ import annotations

import torch
from torch import Tensor

from ...contract import PlannedTokens, Sums
from ...names import COLUMNS, FIELD, KernelParams
from .coefficients import weighted
from .objective import clamp_log_ratio


def column_sums(planned: PlannedTokens, params: KernelParams, group_index: Tensor | None, num_groups: int) -> Sums:
    """Rows to sequences (S, K) to groups (num_groups, K) to totals (K,); extrema (3,). K: COLUMNS."""
    field = dict(zip(FIELD, planned.table, strict=True))
    logp, entropy, log_ratio, value, kl, g_logp, divergence = planned.values.columns
    scored = planned.scored
    planned.values.columns[:2] = torch.where(scored, planned.values.columns[:2], 0.0)
    ratio = clamp_log_ratio(log_ratio, params)[0].exp()
    bounded, advantage = ratio.clamp(max=params.delta), field["advantage"]
    old = torch.where(field["old"] == torch.inf, logp, field["old"]) if params.has_old else logp
    known = ~field["rollout"].isnan()
    # Of the old policy, or where the ratio divides by the rollout of the current one.
    policy = logp if params.divides_by_rollout else old
    mismatch = torch.where(known, (policy - field["rollout"]).abs(), 0.0)
    one = torch.ones_like(logp)
    columns = {
        "loss": weighted(planned.table, "weight_direct", value) + weighted(planned.table, "weight_entropy", entropy),
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
        "divergence": divergence,
    }
    matrix = torch.stack([torch.where(scored, columns[name].to(logp.dtype), 0.0) for name in COLUMNS], dim=1)
    sequences = torch.segment_reduce(matrix, "sum", offsets=planned.offsets, axis=0, unsafe=True)
    grouped = matrix.new_zeros(0, len(COLUMNS))
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
    numbers = torch.cat([x.reshape(-1) for x in (sequences, grouped, sequences.sum(0), extrema)])
    return Sums(numbers, len(sequences), len(grouped))

"""Corrections where another engine has sampled: importance weights, and which tokens and sequences are rejected."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from .checks.arguments import check_by_table, checks_values, num_sequences_of
from .checks.tokens import check_argument, check_token_tensor
from .config import check_flag, check_number, check_one_of
from .head.vocab_parallel import check_group
from .names import EXPONENT_LIMIT
from .objective.rollout import RATIO_LIMIT, log_ratios, sequences_of
from .objective.sequences import WEIGHT_LEVELS, Sequences

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def rollout_weights(
    old_logps: Tensor,
    rollout_logps: Tensor,
    *,
    completion_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    level: str = "token",
    mode: str = "truncate",
    cap: float = 2.0,
    low: float | None = None,
    veto: float | None = None,
    batch_normalize: bool = False,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Returns weights w = exp(old_logps - rollout_logps), for `fused_grpo_loss(rollout_weights=...)`.

    old_logps, rollout_logps (B, T), or packed (N,) with cu_seqlens (S + 1,), nats; a NaN rollout log-probability counts
    as w = 1. The weights are in float32, or float64 from float64, without a graph.
    level, as GRPOConfig.importance_sampling_level: "token" -> the shape of old_logps; "sequence_sum" (TRL, verl) and
    "sequence": the exponential of the sum or the mean of the log-ratios over unmasked tokens -> (S,).
    mode: "truncate" clamps w to [low, cap], low by default 0 (truncated importance sampling; TRL's clip_min and
    clip_max); "mask" keeps w inside [low, cap], low by default 0.5, and is 0 outside (masked importance sampling,
    IcePop); "sequence_mask" keeps the tokens' w, without a bound, of sequences whose exp(mean log-ratio) is inside.
    veto: a sequence with a token whose own ratio is below it gets 0 (1e-4 in verl and slime); None: none does.
    batch_normalize: divide by the mean of these weights over the unmasked tokens, or over the sequences that have any;
    a mean of 0 divides nothing. It is the mean of all ranks of `group`, by default of torch.distributed where that is
    initialised, as in verl: each of them has to call, with tensors on a device that the group serves.
    """
    check_one_of("level", level, WEIGHT_LEVELS)
    check_one_of("mode", mode, ("truncate", "mask", "sequence_mask"))
    if mode == "sequence_mask" and level != "token":
        raise ValueError(f"mode='sequence_mask' with level={level!r}; expected 'token', whose weights it keeps or not")
    cap = check_number("cap", cap, above=0.0)
    if veto is not None:
        veto = check_number("veto", veto, low=0.0)
    if low is None:
        low = 0.0 if mode == "truncate" else 0.5
    low = check_number("low", low, low=0.0)
    if not low < cap:
        raise ValueError(f"low={low}, cap={cap}; expected 0 <= low < cap")
    batch_normalize = check_flag("batch_normalize", batch_normalize)
    if group is not None:
        check_group(group, "group")
        if not batch_normalize:
            raise ValueError("group has no effect with batch_normalize=False; leave it out")
    sequences, mask = _check_logps(old_logps, rollout_logps, completion_mask, cu_seqlens)
    token_log_ratios, _ = log_ratios(old_logps, rollout_logps, mask)
    lengths, total = sequences.sum(mask.to(token_log_ratios.dtype)), sequences.sum(token_log_ratios)
    mean = total / lengths.clamp(min=1)
    w = {"token": token_log_ratios, "sequence": mean, "sequence_sum": total}[level].clamp(max=EXPONENT_LIMIT).exp()
    if mode == "truncate":
        w = w.clamp(low, cap)
    else:
        judged = w if mode == "mask" else sequences.to_tokens(mean.clamp(max=EXPONENT_LIMIT).exp())
        w = torch.where((judged >= low) & (judged <= cap), w, 0.0)
    if veto is not None:
        refused = sequences.sum((token_log_ratios.exp() < veto).to(token_log_ratios.dtype)) > 0
        w = w.masked_fill(sequences.to_tokens(refused) if level == "token" else refused, 0.0)
    if batch_normalize:
        w = normalized(w, mask if level == "token" else lengths > 0, group)
    return w.view(old_logps.shape) if level == "token" else w


def normalized(weights: Tensor, counted: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Returns weights over the mean of those that are counted, on all ranks of the group or of torch.distributed."""
    sums = torch.stack([torch.where(counted, weights, 0.0).sum(), counted.sum().to(weights.dtype)])
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(sums, group=group)
    mean = sums[0] / sums[1].clamp(min=1)
    return weights / torch.where(mean > 1e-8, mean, 1.0)


def rejection_mask(
    old_logps: Tensor,
    rollout_logps: Tensor,
    options: Mapping[str, float | tuple[float, float]],
    *,
    completion_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Returns bool of the shape of old_logps: the unmasked tokens that every option keeps.

    old_logps, rollout_logps (B, T), or packed (N,) with cu_seqlens (S + 1,), nats; a NaN rollout log-probability counts
    as a ratio of 1, as in `rollout_weights`. options: name -> bounds of a statistic of a token, from its log-ratio
    r = old - rollout within [-20, 20], and its probabilities p in the sampling engine and q in the old policy:

        k1         -r, kept where log low <= k1 <= log high of a pair (low, high): bounds of rollout / old
        k2, k3     r^2 / 2; e^r - 1 - r. These and the next are kept up to the bound, one number
        binary_kl  p log(p/q) + (1 - p) log((1 - p)/(1 - q)); tv: |p - q|; both of p and q within [1e-6, 1 - 1e-6]

    "token_" before the name: each token by itself. "seq_mean_": the mean over the unmasked tokens of a sequence, which
    is kept or rejected as a whole; for k1, k2, k3 also "seq_sum_", for k2 and k3 "seq_max_". A sequence without
    unmasked tokens has 0. An example is {"token_k1": (0.5, 2.0), "seq_mean_k3": 0.01}.

    k1, k2, k3 are verl's (0.9.1, verl/trainer/ppo/rollout_corr_helper.py), binary_kl and tv OpenRLHF's
    is_correction_gating (openrlhf/models/loss.py, pull request 1339; per token, DPPO's: arXiv:2602.04879).

    What is rejected is left out in one of two ways (weights[:, None] of sequences; without weights mask.float()):

        rollout_weights=weights * mask   weight 0: no surrogate, while KL, entropy and denominators stay as they are
        completion_mask=mask             verl's way: no part of the loss, nor of its denominators
    """
    bounds = check_rejections(options)
    sequences, mask = _check_logps(old_logps, rollout_logps, completion_mask, cu_seqlens)
    r, known = log_ratios(old_logps, rollout_logps, mask)
    old, rollout = (x.detach().reshape(-1).to(r.dtype) for x in (old_logps, rollout_logps))
    p, q = (x.exp().clamp(1e-6, 1 - 1e-6) for x in (torch.where(known, rollout, old), old))
    lengths, r, kept = sequences.sum(mask.to(r.dtype)).clamp(min=1), r.clamp(-RATIO_LIMIT, RATIO_LIMIT), mask
    for name, (low, high) in bounds.items():
        level, statistic = REJECTIONS[name]
        x = torch.where(mask, statistic(r, p, q), 0.0)
        if level == "seq_max":  # of k2 and k3, which are at least 0
            x = torch.segment_reduce(x, "max", offsets=sequences.offsets, axis=0, unsafe=True, initial=0.0)
        elif level != "token":
            x = sequences.sum(x) / (lengths if level == "seq_mean" else 1)
        x = x if level == "token" else sequences.to_tokens(x)
        kept = kept & (x >= low) & (x <= high)
    return kept.view(old_logps.shape)


def _binary_kl(r: Tensor, p: Tensor, q: Tensor) -> Tensor:
    return p * (p.log() - q.log()) + (1 - p) * (torch.log1p(-p) - torch.log1p(-q))


_STATISTICS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], tuple[str, ...]]] = {
    "k1": (lambda r, p, q: -r, ("token", "seq_sum", "seq_mean")),
    "k2": (lambda r, p, q: r.square() / 2, ("token", "seq_sum", "seq_mean", "seq_max")),
    "k3": (lambda r, p, q: r.expm1() - r, ("token", "seq_sum", "seq_mean", "seq_max")),
    "binary_kl": (_binary_kl, ("token", "seq_mean")),
    "tv": (lambda r, p, q: (p - q).abs(), ("token", "seq_mean")),
}
REJECTIONS = {f"{level}_{x}": (level, statistic) for x, (statistic, levels) in _STATISTICS.items() for level in levels}


def check_rejections(options: object, name: str = "options") -> dict[str, tuple[float, float]]:
    """Returns the least and the largest value of each option's statistic. name: of the argument, for errors."""
    if not isinstance(options, Mapping) or not options:
        raise ValueError(f"{name}={options!r}; expected a dict of bounds such as {{'token_k1': (0.5, 2.0)}}")
    bounds = {}
    for key, bound in options.items():
        check_one_of(f"a key of {name}", key, tuple(REJECTIONS))
        where, has_pair = f"{name}[{key!r}]", key.endswith("_k1")
        if has_pair != isinstance(bound, (tuple, list)) or (has_pair and len(bound) != 2):
            expected = "a pair of ratios (low, high)" if has_pair else "one number, the upper bound"
            raise ValueError(f"{where}={bound!r}; expected {expected}")
        numbers = [check_number(where, x, above=0.0) for x in (bound if has_pair else [bound])]
        if numbers[0] > numbers[-1]:
            raise ValueError(f"{where}={bound!r}; expected low <= high")
        bounds[key] = (math.log(numbers[0]), math.log(numbers[1])) if has_pair else (-math.inf, numbers[0])
    return bounds


def _check_logps(
    old_logps: Tensor, rollout_logps: Tensor, completion_mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Sequences, Tensor]:
    """Checks what both functions receive, and returns the sequences of the batch and its mask (N,) bool."""
    check_by_table("old_logps", old_logps, {})
    num_sequences_of(old_logps, cu_seqlens, "old_logps")
    mask = torch.ones_like(old_logps, dtype=torch.bool)
    if completion_mask is not None:
        check_token_tensor("completion_mask", completion_mask, old_logps.shape, -1, old_logps)
        mask = completion_mask.bool()
    check_token_tensor("rollout_logps", rollout_logps, old_logps.shape, -1, old_logps)
    if checks_values(old_logps.device):
        check_argument("old_logps", old_logps, mask)
        check_argument("rollout_logps", rollout_logps, mask)
    return sequences_of(old_logps.shape, cu_seqlens, old_logps.device), mask.reshape(-1)

"""Corrections for a sampling engine that is not the trainer: importance weights from its log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks.arguments import check_float, check_number, check_numbers, check_tensor, check_token_tensor
from .names import EXPONENT_LIMIT, LEVELS


def rollout_weights(
    old_logps: Tensor,
    rollout_logps: Tensor,
    *,
    completion_mask: Tensor | None = None,
    level: str = "token",
    mode: str = "truncate",
    cap: float = 2.0,
    low: float | None = None,
) -> Tensor:
    """Weights w = exp(old_logps - rollout_logps), for `fused_grpo_loss(rollout_weights=...)`.

    old_logps, rollout_logps (B, T) nats; a NaN rollout log-probability counts as w = 1.
    level, as GRPOConfig.importance_sampling_level: "token" -> (B, T); "sequence" (OpenRLHF, verl) and "sequence_sum"
    (TRL): the exponential of the mean or the sum of the log-ratios over unmasked tokens -> (B,).
    mode: "truncate" clamps w to [low, cap], low by default 0 (truncated importance sampling; TRL's clip_min and
    clip_max); "mask" keeps w inside [low, cap], low by default 0.5, and is 0 outside (masked importance sampling).
    """
    check_float("old_logps", old_logps)
    if old_logps.dim() != 2:
        raise ValueError(f"old_logps has shape {tuple(old_logps.shape)}; expected (B, T)")
    for name, x in (("rollout_logps", rollout_logps), ("completion_mask", completion_mask)):
        check_token_tensor(name, x, old_logps.shape, old_logps.shape[0], old_logps)
    check_tensor("rollout_logps", rollout_logps)
    if level not in LEVELS:
        raise ValueError(f"level={level!r}; expected one of {', '.join(LEVELS)}")
    if mode not in ("truncate", "mask"):
        raise ValueError(f"mode={mode!r}; expected 'truncate' or 'mask'")
    check_number("cap", cap, 0.0, above=True)
    if low is None:
        low = 0.5 if mode == "mask" else 0.0
    check_number("low", low, 0.0)
    if not low < cap:
        raise ValueError(f"low={low}, cap={cap}; expected 0 <= low < cap")
    mask = torch.ones_like(old_logps, dtype=torch.bool) if completion_mask is None else completion_mask.bool()
    check_numbers("old_logps", old_logps, mask)
    log_w = torch.where(mask & ~rollout_logps.isnan(), (old_logps - rollout_logps).detach(), 0.0)
    if level != "token":
        log_w = log_w.sum(1)
        if level == "sequence":
            log_w = log_w / mask.sum(1).clamp(min=1)
    w = log_w.clamp(max=EXPONENT_LIMIT).exp()
    return w.clamp(low, cap) if mode == "truncate" else torch.where((w >= low) & (w <= cap), w, 0.0)


def entropy_quantile(entropy: Tensor, completion_mask: Tensor | None = None, *, top: float = 0.2) -> Tensor:
    """The entropy () in nats above which the `top` share of the unmasked tokens lies: GRPOConfig.entropy_threshold.

    entropy (B, T) or (N,) of the whole batch, as `fused_logps(..., entropy=True)` returns it under no_grad.
    Data-parallel ranks gather their entropies first, so that all take the same threshold (arXiv:2506.01939, the
    "80/20 rule"). NaN where there is no unmasked token: no entropy is below it.
    """
    check_number("top", top, 0.0, 1.0, above=True)
    check_float("entropy", entropy)
    mask = None
    if completion_mask is not None:
        check_token_tensor("completion_mask", completion_mask, entropy.shape, -1, entropy)
        mask = completion_mask.bool()
    check_numbers("entropy", entropy, mask)
    values = entropy.detach().to(torch.promote_types(entropy.dtype, torch.float32))
    if mask is not None:
        values = values.masked_fill(~mask, torch.nan)
    if values.numel() == 0:
        return values.new_full((), torch.nan)
    # torch.nanquantile takes 2^24 elements at most, which a batch with long padding has.
    ordered = values.reshape(-1).sort().values  # NaN is last
    place = (1 - top) * (ordered.isnan().logical_not().sum() - 1).clamp(min=0).double()
    low, high = ordered.gather(0, torch.stack([place.floor(), place.ceil()]).long())
    return low.lerp(high, place.frac().to(low.dtype))

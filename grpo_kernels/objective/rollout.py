"""What the sampling engine's log-probabilities say beside the old policy's: ratios, their moments, perplexities."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .sequences import Sequences
from .tokens import TokenInputs

RATIO_LIMIT = 20.0  # nats, where log-ratios stop as in verl: float32 holds sums of the squares of their exponentials
NEAR = 0.005  # relative: 16-bit weights are that far from the ratio that they were
Pairs = dict[str, tuple[Tensor, Tensor]]  # metric -> (sum, count)


def sequences_of(shape: torch.Size, cu_seqlens: Tensor | None, device: torch.device) -> Sequences:
    """Returns those of a batch (B, T), or packed (N,)."""
    if cu_seqlens is None:
        return Sequences.padded(shape[0], shape[1], device)
    return Sequences(cu_seqlens.to(device).long(), None, shape[0])


def log_ratios(old_logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (old less rollout log-probability, nats, float32 or float64, 0 where masked or unknown; whether it is
    known), (N,) each. mask (N,): bool. A NaN rollout log-probability is unknown."""
    old, rollout = (_flat(x) for x in (old_logps, rollout_logps))
    known = mask & ~rollout.isnan()
    return torch.where(known, old - rollout, 0.0), known


def rollout_sums(
    inputs: TokenInputs, shape: torch.Size, device: torch.device, dtype: torch.dtype
) -> tuple[Pairs, dict[str, Tensor]]:
    """Returns (metric -> (sum, count), metric -> extreme) over the unmasked tokens, or their sequences, in `dtype`.

    Ratios, old policy to sampling engine, have no bound: of tokens, and products over sequences. A weight of 0 is
    dropped; one that is neither its token's ratio nor the product or geometric mean over its sequence is bounded, from
    above where it is at least 1, else from below.
    """
    old, rollout, weights = inputs.old_logps, inputs.rollout_logps, inputs.rollout_weights
    if weights is None and (old is None or rollout is None):
        return {}, {}
    sequences, given_mask = sequences_of(shape, inputs.cu_seqlens, device), inputs.completion_mask
    mask = torch.ones(shape.numel(), dtype=torch.bool, device=device) if given_mask is None else given_mask.reshape(-1)
    columns, spread = {}, {}  # of tokens
    pairs: Pairs = {}
    extrema: dict[str, Tensor] = {}
    if weights is not None:
        w = _flat(weights).to(dtype)
        spread["rollout_weight"], columns["rollout_weight/dropped"] = w, w == 0
    if old is not None and rollout is not None:
        token_log_ratios, known = log_ratios(old, rollout, mask)
        lengths, total = sequences.sum(mask.to(token_log_ratios.dtype)), sequences.sum(token_log_ratios)
        products, ratios = _ratio(total, dtype), _ratio(token_log_ratios, dtype)
        name = "rollout_ratio_sequence"
        moments = {f"{name}/mean": products, f"{name}/mean_square": products.square()}
        pairs, extrema = _summary(moments, {name: products}, lengths > 0, dtype)
        spread["rollout_ratio"] = ratios
        columns |= {"rollout_ratio/mean": ratios, "rollout_ratio/mean_square": ratios.square(), "known": known}
        columns |= {f"nll/{n}": torch.where(known, -_flat(x), 0.0) for n, x in (("old", old), ("rollout", rollout))}
        if weights is not None:
            means = _ratio(total / lengths.clamp(min=1), dtype)
            levels = torch.stack([ratios, sequences.to_tokens(products), sequences.to_tokens(means)])
            bounded = ((w - levels).abs() > NEAR * levels).all(0)
            columns["rollout_weight/above"] = bounded & (w >= 1)
            columns["rollout_weight/below"] = bounded & (w < 1) & (w != 0)
    of_tokens, of_spread = _summary(columns, spread, mask, dtype)
    if "known" in of_tokens:
        count, _ = of_tokens.pop("known")
        of_tokens |= {name: (of_tokens[name][0], count) for name in ("nll/old", "nll/rollout")}
    return pairs | of_tokens, extrema | of_spread


def _summary(
    columns: dict[str, Tensor], spread: dict[str, Tensor], counted: Tensor, dtype: torch.dtype
) -> tuple[Pairs, dict[str, Tensor]]:
    """Returns (sum, count) of the columns where `counted`, least and largest of what has a spread: 0 without any."""
    count = counted.sum().to(dtype)
    sums = torch.where(counted, torch.stack([x.to(dtype) for x in columns.values()]), 0.0).sum(1)
    x = torch.stack(list(spread.values()))
    low, high = (torch.where(counted, x, end) for end in (torch.inf, -torch.inf))
    ends = torch.cat([low.amin(1), high.amax(1)]) if counted.numel() else x.new_zeros(2 * len(x))
    names = [f"{name}/{end}" for end in ("min", "max") for name in spread]
    extrema = dict(zip(names, torch.where(count > 0, ends, 0.0).unbind(), strict=True))
    return {name: (total, count) for name, total in zip(columns, sums.unbind(), strict=True)}, extrema


def derived_metrics(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Returns what follows from (sum, count) of all ranks and micro-batches, 0 where nothing is counted: perplexities;
    of weights w the effective sample size as a share, (sum w)^2 / (n sum w^2), and chi-square, mean(w^2) - 1."""
    metrics: dict[str, Tensor] = {}
    if kinds := [name.removesuffix("/mean_square") for name in pairs if name.endswith("/mean_square")]:
        total, square = (torch.stack([pairs[f"{kind}/{x}"][0] for kind in kinds]) for x in ("mean", "mean_square"))
        count = torch.stack([pairs[f"{kind}/mean"][1] for kind in kinds])
        sizes = total**2 / torch.where(square == 0, 1.0, count * square)
        distances = torch.where(count > 0, square / count.clamp(min=1) - 1, 0.0)
        names = ["rollout_ess" if kind == "rollout_weight" else f"{kind}/ess" for kind in kinds]
        metrics |= zip(names, sizes.unbind(), strict=True)
        metrics |= zip([f"{kind}/chi_square" for kind in kinds], distances.unbind(), strict=True)
    for engine in ("old", "rollout"):
        if f"nll/{engine}" in pairs:
            total, count = pairs[f"nll/{engine}"]
            metrics[f"perplexity/{engine}"] = torch.where(count > 0, (total / count.clamp(min=1)).exp(), 0.0)
    return metrics


def _flat(x: Tensor) -> Tensor:
    """Returns (N,) or (S,) without a graph, in float32 or float64."""
    return x.detach().reshape(-1).to(torch.promote_types(x.dtype, torch.float32))


def _ratio(log_ratio: Tensor, dtype: torch.dtype) -> Tensor:
    return log_ratio.clamp(-RATIO_LIMIT, RATIO_LIMIT).exp().to(dtype)

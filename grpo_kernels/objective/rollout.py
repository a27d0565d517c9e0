"""What the sampling engine's log-probabilities say beside the old policy's: ratios, their moments, perplexities."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .sequences import Sequences
from .tokens import TokenInputs, is_per_sequence

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
    inputs: TokenInputs, shape: torch.Size, sequences: Sequences, dtype: torch.dtype
) -> tuple[Pairs, dict[str, Tensor]]:
    """Returns (metric -> (sum, count), metric -> extreme) over the unmasked tokens, or their sequences, in `dtype`.

    Ratios, old policy to sampling engine, have no bound: of tokens, and products over sequences. A weight of 0 is
    dropped; one that is neither its token's ratio nor the product or geometric mean over its sequence is bounded, from
    above where it is at least 1, else from below.
    """
    old, rollout, weights = inputs.old_logps, inputs.rollout_logps, inputs.rollout_weights
    pairs: Pairs = {}
    extrema: dict[str, Tensor] = {}
    if weights is None and (old is None or rollout is None):
        return pairs, extrema
    given, device = inputs.completion_mask, sequences.offsets.device
    mask = torch.ones(shape.numel(), dtype=torch.bool, device=device) if given is None else given.reshape(-1) != 0

    def add(name: str, x: Tensor, counted: Tensor) -> None:
        pairs[name] = torch.where(counted, x, 0.0).to(dtype).sum(), counted.sum().to(dtype)

    def add_extrema(name: str, x: Tensor, counted: Tensor) -> None:  # 0 where there is nothing to look at
        for end, sign in (("min", -1), ("max", 1)):
            most = torch.cat([torch.where(counted, sign * x, -torch.inf), x.new_full((1,), -torch.inf)]).max()
            extrema[f"{name}/{end}"] = torch.where(counted.any(), sign * most, 0.0).to(dtype)

    levels = []
    if old is not None and rollout is not None:
        own, known = log_ratios(old, rollout, mask)
        lengths, total = sequences.sum(mask.to(own.dtype)), sequences.sum(own)
        for log_ratio, counted, name in ((own, mask, "rollout_ratio"), (total, lengths > 0, "rollout_ratio_sequence")):
            found = _ratio(log_ratio)
            add(f"{name}/mean", found, counted)
            add(f"{name}/mean_square", found.square(), counted)
            add_extrema(name, found, counted)
        for x, name in ((old, "nll/old"), (rollout, "nll/rollout")):
            add(name, -_flat(x), known)
        levels = [own, sequences.to_tokens(total), sequences.to_tokens(total / lengths.clamp(min=1))]
    if weights is not None:
        w = _flat(weights)
        w = sequences.to_tokens(w) if is_per_sequence(weights, shape, sequences.count) else w
        add_extrema("rollout_weight", w, mask)
        add("rollout_weight/dropped", (w == 0).to(dtype), mask)
        if levels:
            free = torch.stack([torch.isclose(w.to(x.dtype), _ratio(x), rtol=NEAR) for x in levels]).any(0)
            add("rollout_weight/above", (~free & (w >= 1)).to(dtype), mask)
            add("rollout_weight/below", (~free & (w < 1) & (w != 0)).to(dtype), mask)
    return pairs, extrema


def derived_metrics(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Returns what follows from (sum, count) of all ranks and micro-batches, 0 where nothing is counted: perplexities;
    of weights w the effective sample size as a share, (sum w)^2 / (n sum w^2), and chi-square, mean(w^2) - 1."""
    found = {}
    for name, (total, count) in pairs.items():
        (kind, _, last), mean = name.rpartition("/"), total / count.clamp(min=1)
        if last == "mean_square":
            size = "rollout_ess" if kind == "rollout_weight" else f"{kind}/ess"
            found[size] = (pairs[f"{kind}/mean"][0] / count.clamp(min=1)) ** 2 / torch.where(mean == 0, 1.0, mean)
            found[f"{kind}/chi_square"] = torch.where(count > 0, mean - 1, 0.0)
        elif kind == "nll":
            found[f"perplexity/{last}"] = torch.where(count > 0, mean.exp(), 0.0)
    return found


def _flat(x: Tensor) -> Tensor:
    """(N,) or (S,) without a graph, in float32 or float64."""
    return x.detach().reshape(-1).to(torch.promote_types(x.dtype, torch.float32))


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-RATIO_LIMIT, RATIO_LIMIT).exp()

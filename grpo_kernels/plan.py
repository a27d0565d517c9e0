"""The plan of one call: which tokens count, their row table and weights, and the way through the kernels. All O(N).

Ways (the caller never chooses):
    fused      the gradient of a token depends on that token alone: one kernel per chunk of logits
    staged     it depends on the whole sequence and whole sequences fit a chunk: statistics, O(N) torch, gradient
    recompute  longer sequences: statistics of everything first, then the logits again for the gradient
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .aggregation import Counts, token_weights
from .config import SURROGATE_RULES, GRPOConfig
from .params import FIELD, TABLE_FIELDS, KernelParams


class TokenInputs(NamedTuple):
    """What a caller gives besides hidden states, weight and ids. Shapes: (B, T) or packed (N,); "per sequence" (S,).

    advantages and rollout_weights may also be per sequence; temperature a scalar; a field may be None where optional.
    """

    advantages: Tensor
    completion_mask: Tensor | None = None
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    rollout_weights: Tensor | None = None
    rollout_logps: Tensor | None = None
    cu_seqlens: Tensor | None = None  # (S + 1,) int64, packed batches
    normalizer: Tensor | None = None  # scalar, replaces the denominator of the aggregation
    temperature: Tensor | None = None  # one per token, instead of config.temperature
    entropy_threshold: Tensor | None = None  # scalar
    group_index: Tensor | None = None  # (S,) int64 in [0, num_groups)


@dataclass(frozen=True)
class Plan:
    """Everything O(N) that the engine needs. N flattened tokens, S sequences; masked tokens hold neutral values."""

    config: GRPOConfig
    params: KernelParams
    table: Tensor  # (fields, N) float32, or float64 in the torch backend
    mask: Tensor  # (N,) bool
    cu_seqlens: Tensor  # (S + 1,) int64, over the N tokens
    lengths: Tensor  # (S,) unmasked tokens, in the table's dtype
    group_index: Tensor | None
    num_groups: int
    has_rollout: bool
    whole_sequences: bool  # a token's gradient depends on the log-probabilities of its sequence
    active: Tensor  # (N,) bool: may have a gradient
    scored: Tensor  # (N,) bool: logps, entropy and metrics are wanted
    row_length: int | None  # T of a (B, T) batch, None for a packed one

    def field(self, name: str) -> Tensor:
        return self.table[FIELD[name]]

    def sequence_sum(self, x: Tensor) -> Tensor:
        """(N,) -> (S,) sums, in a fixed order on every device."""
        return torch.segment_reduce(x, "sum", offsets=self.cu_seqlens, unsafe=True)

    def per_token(self, x: Tensor) -> Tensor:
        """(S,) -> (N,): every token gets the value of its sequence."""
        return spread(x, self.cu_seqlens, self.row_length, self.mask.numel())

    def take_sequences(self, index: Tensor, counts: Tensor) -> Plan:
        """The plan of a chunk of whole sequences: `index` their unmasked tokens, `counts` tokens per sequence."""
        return dataclasses.replace(
            self,
            table=self.table.index_select(1, index),
            mask=self.mask[index],
            cu_seqlens=torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
            lengths=counts.to(self.table.dtype),
            active=self.active[index],
            scored=self.scored[index],
            row_length=None,
        )

    def slice_sequences(self, sequences: slice) -> Plan:
        """The plan of neighbouring sequences of a (B, T) batch, padding included: views, nothing read on the host."""
        length = self.row_length or 0
        tokens = slice(sequences.start * length, sequences.stop * length)
        count = sequences.stop - sequences.start
        return dataclasses.replace(
            self,
            table=self.table[:, tokens],
            mask=self.mask[tokens],
            cu_seqlens=torch.arange(count + 1, device=self.mask.device) * length,
            lengths=self.lengths[sequences],
            active=self.active[tokens],
            scored=self.scored[tokens],
        )


def build_plan(inputs: TokenInputs, shape: torch.Size, config: GRPOConfig, num_groups: int, dtype: torch.dtype) -> Plan:
    """The plan of a batch whose completion_ids have `shape`, with its row table in `dtype`."""
    device = inputs.advantages.device
    num_tokens = shape.numel()
    cu_seqlens = inputs.cu_seqlens
    if cu_seqlens is None:
        cu_seqlens = torch.arange(shape[0] + 1, device=device) * shape[1]
    cu_seqlens = cu_seqlens.to(device=device, dtype=torch.int64)
    num_sequences = cu_seqlens.numel() - 1
    mask = inputs.completion_mask
    mask = torch.ones(num_tokens, dtype=torch.bool, device=device) if mask is None else mask.reshape(-1).bool()
    row_length = shape[1] if inputs.cu_seqlens is None else None

    def tokens(x: Tensor, fill: float) -> Tensor:
        """(N,) in the table's dtype; padding, whatever it holds, becomes `fill`."""
        if x.dim() == 0:
            x = x.expand(num_tokens)
        elif is_per_sequence(x, shape, num_sequences):
            x = spread(x.reshape(-1), cu_seqlens, row_length, num_tokens)
        x = x.reshape(-1).to(dtype)
        return x if inputs.completion_mask is None else torch.where(mask, x, fill)

    mask_value = mask.to(dtype)
    lengths = torch.segment_reduce(mask_value, "sum", offsets=cu_seqlens, unsafe=True)
    length_of_token = spread(lengths, cu_seqlens, row_length, num_tokens)
    weight, weight_entropy = token_weights(Counts(mask_value, lengths, length_of_token), config, inputs.normalizer)

    table = torch.zeros(len(TABLE_FIELDS), num_tokens, dtype=dtype, device=device)
    table[FIELD["advantage"]] = tokens(inputs.advantages, 0.0)
    table[FIELD["multiplier"]] = 1.0
    table[FIELD["weight_ratio"]] = weight
    table[FIELD["weight_direct"]] = weight
    table[FIELD["weight_entropy"]] = weight_entropy
    table[FIELD["temperature"]] = config.temperature if inputs.temperature is None else tokens(inputs.temperature, 1.0)
    table[FIELD["entropy_threshold"]] = _entropy_threshold(inputs, config)
    table[FIELD["rollout"]] = torch.nan
    table[FIELD["rollout_weight"]] = 1.0
    if inputs.ref_logps is not None:
        table[FIELD["ref"]] = tokens(inputs.ref_logps, 0.0)
    if inputs.rollout_logps is not None:
        table[FIELD["rollout"]] = tokens(inputs.rollout_logps, torch.nan)
    if inputs.rollout_weights is not None:
        table[FIELD["rollout_weight"]] = tokens(inputs.rollout_weights, 1.0)
        if config.surrogate != "vespo":  # VESPO's phi replaces it
            table[FIELD["multiplier"]] = table[FIELD["rollout_weight"]]
    has_base = _fill_base(table, inputs, config, tokens)

    params = config.kernel_params(has_base=has_base)
    if inputs.ref_logps is None:
        params = params._replace(kl="none", bias_correction=False)
    plan = Plan(
        config=config,
        params=params,
        table=table,
        mask=mask,
        cu_seqlens=cu_seqlens,
        lengths=lengths,
        group_index=inputs.group_index,
        num_groups=num_groups,
        has_rollout=inputs.rollout_logps is not None,
        whole_sequences=_needs_whole_sequences(inputs, config, params, shape, num_sequences),
        active=mask,
        scored=mask,
        row_length=row_length,
    )
    if config.importance_sampling_level != "token" and not plan.whole_sequences:
        # On-policy, the ratio of the sequence is 1 and its chain rule is known before any logit is.
        total = plan.per_token(plan.sequence_sum(weight))
        table[FIELD["weight_ratio"]] = sequence_slope(plan) * total
    active = _may_have_gradient(plan)
    return dataclasses.replace(plan, active=active, scored=mask if config.score_inactive else active)


def spread(x: Tensor, cu_seqlens: Tensor, row_length: int | None, num_tokens: int) -> Tensor:
    """(S,) -> (N,): every token gets the value of its sequence. Rows of one length need one kernel instead of four."""
    if row_length is not None:
        return x[:, None].expand(-1, row_length).contiguous().view(-1)
    return x.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)


def is_per_sequence(x: Tensor, shape: torch.Size, num_sequences: int) -> bool:
    """Whether x holds one value per sequence, (S,) or (S, 1), rather than one per token."""
    return x.shape != shape and x.numel() == num_sequences and x.shape[0] == num_sequences


def sequence_slope(plan: Plan) -> Tensor:
    """(N,) d (sequence log-ratio) / d logp_t, before any clamp of a token's own."""
    mask = plan.mask.to(plan.table.dtype)
    if plan.config.importance_sampling_level == "sequence_sum":
        return mask
    return mask / plan.per_token(plan.lengths.clamp(min=1))


def _entropy_threshold(inputs: TokenInputs, config: GRPOConfig) -> Tensor | float:
    if inputs.entropy_threshold is not None:
        return inputs.entropy_threshold
    return -torch.inf if config.entropy_threshold is None else config.entropy_threshold


def _fill_base(
    table: Tensor, inputs: TokenInputs, config: GRPOConfig, tokens: Callable[[Tensor, float], Tensor]
) -> bool:
    """Write the log-probabilities that the ratio divides by; False on-policy, where the ratio is 1 by definition."""
    base = inputs.old_logps
    if config.surrogate in ("dppo_tv", "ipo") and inputs.rollout_logps is not None:
        # They divide by the sampling engine's probability. Unknown (NaN): the old policy's, else no surrogate.
        rollout = tokens(inputs.rollout_logps, 0.0)
        unknown = rollout.isnan()
        fallback = 0.0 if base is None else tokens(base, 0.0)
        table[FIELD["base"]] = torch.where(unknown, fallback, rollout)
        if base is None:
            table[FIELD["multiplier"]] = torch.where(unknown, 0.0, table[FIELD["multiplier"]])
        return True
    if base is not None:
        table[FIELD["base"]] = tokens(base, 0.0)
    return base is not None


def _needs_whole_sequences(
    inputs: TokenInputs, config: GRPOConfig, params: KernelParams, shape: torch.Size, num_sequences: int
) -> bool:
    if config.off_policy_mask_threshold is not None and (params.has_base or inputs.rollout_logps is not None):
        return True
    if config.surrogate == "vespo":
        return params.has_base or inputs.rollout_weights is not None  # otherwise phi is 1
    if config.importance_sampling_level == "token":
        return False
    constant = all(
        x is None or is_per_sequence(x, shape, num_sequences) for x in (inputs.advantages, inputs.rollout_weights)
    )
    thresholded = inputs.entropy_threshold is not None or config.entropy_threshold is not None
    return params.has_base or params.bias_correction or thresholded or not constant


def _may_have_gradient(plan: Plan) -> Tensor:
    """(N,) bool. Exact: a token that is left out has a gradient of exactly zero."""
    active = plan.field("weight_direct") != 0
    if plan.config.beta == 0 or plan.params.kl == "none":
        active &= _moved_by_surrogate(plan)
    if plan.config.entropy_coef != 0:
        active |= plan.field("weight_entropy") != 0
    return plan.mask & active


def _moved_by_surrogate(plan: Plan) -> Tensor:
    config = plan.config
    moved = plan.field("multiplier") != 0
    if not SURROGATE_RULES[config.surrogate].pushes_without_advantage:
        moved &= plan.field("advantage") != 0
    if plan.whole_sequences or config.importance_sampling_level != "token":
        moved = plan.per_token(plan.sequence_sum((moved & plan.mask).to(plan.table.dtype))) > 0
    return moved

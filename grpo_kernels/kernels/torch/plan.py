"""The plan of a call in plain torch: the torch backend's, and what the compiled ones must equal. All O(N)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...contract import PlannedTokens, TokenInputs, is_per_sequence, no_values
from ...names import FIELD, TABLE_FIELDS, PlanRules, shares_ratio


def plan_tokens(
    inputs: TokenInputs, ids: Tensor, rules: PlanRules, dtype: torch.dtype, *, ordered: bool
) -> PlannedTokens:
    """The row table in `dtype`, flags and, with `ordered`, order and counts; ids (B, T) or packed (N,)."""
    shape, device, num_tokens = ids.shape, ids.device, ids.numel()
    offsets = inputs.cu_seqlens
    row_length = None
    if offsets is None:
        offsets, row_length = torch.arange(shape[0] + 1, device=device) * shape[1], shape[1]
    offsets = offsets.to(device=device, dtype=torch.int64)
    num_sequences = offsets.numel() - 1
    mask = inputs.completion_mask
    mask = torch.ones(num_tokens, dtype=torch.bool, device=device) if mask is None else mask.reshape(-1) != 0

    def spread(x: Tensor) -> Tensor:
        """(S,) -> (N,): every token gets the value of its sequence."""
        if row_length is not None:
            return x[:, None].expand(-1, row_length).reshape(-1)
        return x.repeat_interleave(offsets.diff(), output_size=num_tokens)

    def sequence_sum(x: Tensor) -> Tensor:
        """(N,) -> (S,), in a fixed order on every device."""
        return torch.segment_reduce(x, "sum", offsets=offsets, unsafe=True)

    def tokens(x: Tensor, fill: float) -> Tensor:
        """(N,) in `dtype`; padding, whatever it holds, becomes `fill`."""
        if x.dim() == 0:
            x = x.expand(num_tokens)
        elif is_per_sequence(x, shape, num_sequences):
            x = spread(x.reshape(-1))
        return torch.where(mask, x.reshape(-1).to(dtype), fill)

    mask_value = mask.to(dtype)
    lengths = sequence_sum(mask_value)
    length_of_token = spread(lengths)
    weight, weight_entropy = token_weights(mask_value, lengths, length_of_token, rules, inputs.normalizer)

    table = torch.zeros((len(TABLE_FIELDS), num_tokens), dtype=dtype, device=device)

    def put(name: str, value: Tensor | float) -> None:
        table[FIELD[name]] = value

    put("advantage", tokens(inputs.advantages, 0.0))
    put("weight_ratio", weight)
    put("weight_direct", weight)
    put("weight_entropy", weight_entropy)
    put("temperature", rules.temperature if inputs.temperature is None else tokens(inputs.temperature, 1.0))
    threshold = inputs.entropy_threshold
    put("entropy_threshold", rules.entropy_threshold if threshold is None else threshold)
    put("rollout", torch.nan if inputs.rollout_logps is None else tokens(inputs.rollout_logps, torch.nan))
    put("rollout_weight", 1.0 if inputs.rollout_weights is None else tokens(inputs.rollout_weights, 1.0))
    put("multiplier", table[FIELD["rollout_weight"]] if rules.multiplies_rollout_weight else 1.0)
    if inputs.ref_logps is not None:
        put("ref", tokens(inputs.ref_logps, 0.0))
    if inputs.old_logps is not None:
        put("old", tokens(inputs.old_logps, 0.0))
    if rules.divides_by_rollout and inputs.rollout_logps is not None:
        # Where the sampling engine's is unknown (NaN): the old policy's, else a ratio of 1 and no surrogate.
        rollout = tokens(inputs.rollout_logps, 0.0)
        unknown = rollout.isnan()
        put("old", torch.where(unknown, table[FIELD["old"]] if inputs.old_logps is not None else torch.inf, rollout))
        if inputs.old_logps is None:
            put("multiplier", torch.where(unknown, 0.0, table[FIELD["multiplier"]]))
    of_sequence = rules.whole_sequences or shares_ratio(rules.level)
    if shares_ratio(rules.level) and not rules.whole_sequences:
        # On-policy, the ratio of the sequence is 1 and its chain rule is known before any logit is.
        slope = mask_value if rules.level == "sequence_sum" else mask_value / length_of_token.clamp(min=1)
        put("weight_ratio", slope * spread(sequence_sum(weight)))

    active = mask & (table[FIELD["weight_direct"]] != 0)
    if not rules.kl_has_gradient:
        has_gradient = table[FIELD["multiplier"]] != 0
        if rules.needs_advantage:
            has_gradient &= table[FIELD["advantage"]] != 0
        if of_sequence:
            has_gradient = spread(sequence_sum((has_gradient & mask).to(dtype))) > 0
        active &= has_gradient
    if rules.entropy_coef != 0:
        active |= mask & (weight_entropy != 0)
    scored = mask if rules.score_inactive else active

    order = counts = None
    if ordered:
        rest = scored & ~active
        order = torch.where(active, 0, torch.where(rest, 1, 2)).argsort(stable=True)
        counts = torch.stack([active.sum(), rest.sum()])
        if rules.whole_sequences:
            counts = torch.cat([counts, sequence_sum(active.to(dtype)).long()])
    flat = torch.where(mask, ids.reshape(-1), 0).long()
    values = no_values(num_tokens, dtype, device)
    return PlannedTokens(table, values, offsets, lengths, scored, active, flat, order, counts)


def token_weights(
    mask: Tensor, lengths: Tensor, length_of_token: Tensor, rules: PlanRules, normalizer: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(weight of the token's value in the loss, weight of its entropy in the loss), (N,) each.

    mask (N,), its sums of the sequences (S,) and of each token's sequence (N,). Every rule of aggregation is linear, so
    it is a numerator per token over a denominator, which `normalizer` replaces: with a global one micro-batches and
    data-parallel ranks add up to the loss of one big batch. Nothing is all-reduced.

    The entropy bonus is -entropy_coef times the mean entropy of this call's tokens, scaled by this call's share of the
    normaliser (with B sequences of B_total: B / B_total; without a normaliser: 1).
    """
    sequences, tokens = lengths.numel(), lengths.sum().clamp(min=1)
    denominators: dict[str, Tensor | float] = {
        "seq_mean": sequences,  # GRPO, SAPO, GSPO
        "token_mean": tokens,  # BNPO, PPO
        "fixed_length": sequences * rules.max_completion_length,  # Dr. GRPO
        "num_items": tokens,  # DAPO, CISPO, VESPO; num_items_in_batch comes as a normalizer
        "seq_sum": sequences,  # LUSPO, prime-rl
    }
    denominator = denominators[rules.aggregation]
    numerator = mask / length_of_token.clamp(min=1) if rules.aggregation == "seq_mean" else mask
    weight = numerator / (denominator if normalizer is None else normalizer)
    if rules.entropy_coef == 0.0:
        return weight, torch.zeros_like(weight)
    share = 1.0 if normalizer is None else denominator / normalizer
    return weight, -rules.entropy_coef * share / tokens * mask

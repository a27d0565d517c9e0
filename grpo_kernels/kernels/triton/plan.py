"""The plan of a call: lengths of sequences, the table and flags of every token, the order of the rows. See contract.py.

    lengths_kernel     a few sequences per program: offsets, unmasked tokens, and of a surrogate over whole sequences at
                       how many tokens it has a gradient
    table_kernel       a block of tokens per program: everything per token, and how many of the block are active
    order_kernel       a block of tokens per program: places from the numbers of the blocks before and a scan of its
                       own; with them one program per sequence that counts its active tokens

Nothing here depends on the order in which programs run: counts are integers, and every other number is its token's.
A block of tokens adds up the lengths of all sequences, or the counts of all blocks, from the L2 cache: 4 bytes for each
sequence, 8 for each 256 tokens. Per token it reads up to 45 bytes and writes 96; 16,384 tokens are 2.3 MB, and three
launches of a few microseconds on an H200.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import PlannedTokens, TokenInputs, TokenValues, is_per_sequence
from ...names import TABLE_FIELDS, VALUE_FIELDS, PlanRules, shares_ratio
from ..launch import token_launch
from .arguments import Batch
from .layout import (
    ADVANTAGE,
    ENTROPY_THRESHOLD,
    MULTIPLIER,
    OLD,
    REF,
    ROLLOUT,
    ROLLOUT_WEIGHT,
    TEMPERATURE,
    VALUE_COUNT,
    WEIGHT_DIRECT,
    WEIGHT_ENTROPY,
    WEIGHT_RATIO,
)

MASK_BLOCKS = 2  # blocks of tokens that lengths_kernel looks at together: it reads little of each
ADDED_AT_ONCE: tl.constexpr = tl.constexpr(512)  # numbers of sequences or of blocks

SCALAR, PER_SEQUENCE, PER_TOKEN = "scalar", "sequence", "token"  # what an input has one value for

# PlanRules as numbers that are not compiled in. Flags are 0 or 1: Triton specialises integers, but no floats.
_TAKEN = [name for name, default in PlanRules._field_defaults.items() if not isinstance(default, str)]
_FIELDS = (*_TAKEN, "divides_by_length", "counts_tokens", "denominator", "has_slope", "slope_is_mean")
Rules = namedtuple("Rules", _FIELDS)  # type: ignore[misc]


def numbers(rules: PlanRules, sequences: int) -> Any:
    found = rules._asdict() | dict(
        divides_by_length=rules.aggregation == "seq_mean",  # the numerator of the weight
        counts_tokens=rules.aggregation in ("token_mean", "num_items"),  # the denominator is their number; otherwise:
        denominator=sequences * (rules.max_completion_length if rules.aggregation == "fixed_length" else 1),
        # The chain rule of a sequence ratio is known where that is 1.
        has_slope=shares_ratio(rules.level) and not rules.whole_sequences,
        slope_is_mean=rules.level == "sequence",
    )
    return Rules._make(float(found[name]) for name in _FIELDS)


class SurrogateInputs(NamedTuple):
    """What decides about the surrogate of a token."""

    advantages: Tensor | None
    old: Tensor | None
    rollout: Tensor | None
    rollout_weights: Tensor | None


class OtherInputs(NamedTuple):
    """What else is given of tokens or of the batch."""

    mask: Tensor | None
    ids: Tensor | None  # where they are not clean
    ref: Tensor | None
    temperature: Tensor | None
    threshold: Tensor | None
    normalizer: Tensor | None


class SequenceCounts(NamedTuple):
    """What lengths_kernel writes, per sequence."""

    offsets: Tensor  # and the end of the last
    lengths: Tensor
    gradient_counts: Tensor | None  # None where each token has a gradient of its own


@triton.jit
def is_unmasked(mask, token, inside):
    if mask is not None:
        inside = tl.load(mask + token, mask=inside, other=0) != 0
    return inside


@triton.jit
def given(x, token, sequence, wanted, fill, MODE: tl.constexpr):
    """Float32 values of an input of this MODE, absent or not; `fill` where they are not wanted."""
    value = tl.full(token.shape, fill, tl.float32)
    if x is not None:
        place = token
        if MODE == "sequence":
            place = sequence
        elif MODE == "scalar":
            place = tl.zeros_like(token)
        value = tl.where(wanted, tl.load(x + place, mask=wanted, other=0).to(tl.float32), fill)
    return value


@triton.jit
def surrogate_inputs(inputs, token, sequence, unmasked, rules, ADVANTAGES: tl.constexpr, WEIGHTS: tl.constexpr):
    """(advantage, log-probability to divide by, multiplier, rollout weight, whether the surrogate has a gradient)."""
    advantage = given(inputs.advantages, token, sequence, unmasked, 0.0, ADVANTAGES)
    divisor = given(inputs.old, token, sequence, unmasked, 0.0, "token")
    weight = given(inputs.rollout_weights, token, sequence, unmasked, 1.0, WEIGHTS)
    multiplier = tl.where(rules.multiplies_rollout_weight != 0.0, weight, 1.0)
    if inputs.rollout is not None:
        sampled = given(inputs.rollout, token, sequence, unmasked, 0.0, "token")
        divides, known = rules.divides_by_rollout != 0.0, sampled == sampled
        divisor = tl.where(divides & known, sampled, divisor)
        if inputs.old is None:  # nothing to divide by: a ratio of 1, and no surrogate
            divisor = tl.where(divides & ~known, float("inf"), divisor)
            multiplier = tl.where(divides & ~known, 0.0, multiplier)
    has_gradient = unmasked & (multiplier != 0.0) & ((advantage != 0.0) | (rules.needs_advantage == 0.0))
    return advantage, divisor, multiplier, weight, has_gradient


@triton.jit(do_not_specialize=["cu_seqlens", "row_length", "mask", "sequences", "tokens"])
def lengths_kernel(
    cu_seqlens, row_length, mask, surrogate, out, sequences, tokens, rules, ADVANTAGES: tl.constexpr,
    WEIGHTS: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64) * SEQUENCES + tl.arange(0, SEQUENCES)
    live = s < sequences
    if cu_seqlens is None:
        start = s * row_length
        stop = start + row_length
    else:
        # Clamped: on a GPU these offsets have not been checked, and from here on they are addresses.
        start = tl.load(cu_seqlens + s, mask=s <= sequences, other=0).to(tl.int64)
        stop = tl.load(cu_seqlens + s + 1, mask=live, other=0).to(tl.int64)
        start = tl.minimum(tl.maximum(start, 0), tokens)
        stop = tl.minimum(tl.maximum(stop, 0), tokens)
    tl.store(out.offsets + s, start, mask=s <= sequences)
    length = tl.zeros((SEQUENCES,), tl.int32)
    has_gradient = tl.zeros((SEQUENCES,), tl.int32)
    for first in range(0, tl.max(tl.where(live, stop - start, 0), 0), BLOCK):
        t = start[:, None] + first + tl.arange(0, BLOCK)[None, :]
        unmasked = is_unmasked(mask, t, live[:, None] & (t < stop[:, None]))
        length += tl.sum(unmasked.to(tl.int32), 1)
        if out.gradient_counts is not None:
            _, _, _, _, by_itself = surrogate_inputs(
                surrogate, t, tl.broadcast_to(s[:, None], t.shape), unmasked, rules, ADVANTAGES, WEIGHTS
            )
            has_gradient += tl.sum(by_itself.to(tl.int32), 1)
    tl.store(out.lengths + s, length.to(tl.float32), mask=live)
    if out.gradient_counts is not None:
        tl.store(out.gradient_counts + s, has_gradient, mask=live)


@triton.jit
def sequence_of(token, offsets, sequences):
    """The last sequence that does not begin after the token: of those that begin there, the one that is not empty."""
    low = tl.zeros_like(token)
    high = tl.zeros_like(token) + sequences
    left = sequences
    while left > 1:  # low <= answer < high <= low + left
        left = (left + 1) // 2
        middle = (low + high) // 2
        begun = tl.load(offsets + middle) <= token
        low, high = tl.where(begun, middle, low), tl.where(begun, high, middle)
    return low


@triton.jit(do_not_specialize=["row_length", "sequences", "tokens"])
def table_kernel(
    surrogate, others, counts, batch, scored, active, clean_ids, block_counts, row_length, sequences, tokens, rules,
    ADVANTAGES: tl.constexpr, WEIGHTS: tl.constexpr, TEMPERATURES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per token all but the order, and how many are active, or scored alone, of a block.

    `row_length` is absent where sequences are packed, `clean_ids` where the ids are clean.
    """
    block = tl.program_id(0)
    t = tl.multiple_of(block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), [1])
    inside = t < tokens
    unmasked = is_unmasked(others.mask, t, inside)
    m = unmasked.to(tl.float32)
    if row_length is None:
        s = sequence_of(t, counts.offsets, sequences)
    else:
        s = t // row_length
    length = tl.load(counts.lengths + s, mask=inside, other=0.0)
    length = tl.where(length > 1.0, length, 1.0)  # a sequence of none has no token to weigh

    total_sum = tl.zeros((ADDED_AT_ONCE,), tl.float64)
    for first in range(0, sequences, ADDED_AT_ONCE):
        other = first + tl.arange(0, ADDED_AT_ONCE)
        total_sum += tl.load(counts.lengths + other, mask=other < sequences, other=0.0).to(tl.float64)
    total = tl.sum(total_sum, 0).to(tl.float32)
    total = tl.where(total > 1.0, total, 1.0)

    # Divisions are rounded as torch rounds them, by zero too.
    denominator = tl.where(rules.counts_tokens != 0.0, total, rules.denominator)
    divisor = denominator
    share = tl.full((), 1.0, tl.float32)
    if others.normalizer is not None:
        divisor = tl.load(others.normalizer).to(tl.float32)
        share = tl.div_rn(denominator, divisor)
    numerator = tl.where(rules.divides_by_length != 0.0, tl.div_rn(m, length), m)
    weight = tl.div_rn(numerator, divisor)
    slope = tl.where(rules.slope_is_mean != 0.0, tl.div_rn(m, length), m)
    weight_ratio = tl.where(rules.has_slope != 0.0, slope * (length * weight), weight)
    per_token = tl.div_rn(-rules.entropy_coef * share, total) * m
    weight_entropy = tl.where(rules.entropy_coef == 0.0, 0.0, per_token)

    advantage, divisor, multiplier, rollout_weight, has_gradient = surrogate_inputs(
        surrogate, t, s, unmasked, rules, ADVANTAGES, WEIGHTS
    )
    own_temperature = tl.full(t.shape, 1.0, tl.float32) * rules.temperature
    if others.temperature is not None:
        own_temperature = given(others.temperature, t, s, unmasked, 1.0, TEMPERATURES)
    lowest_entropy = tl.full(t.shape, 1.0, tl.float32) * rules.entropy_threshold
    if others.threshold is not None:
        lowest_entropy = tl.zeros_like(lowest_entropy) + tl.load(others.threshold).to(tl.float32)

    column = batch.table + t
    tl.store(column + ADVANTAGE * tokens, advantage, mask=inside)
    tl.store(column + OLD * tokens, divisor, mask=inside)
    tl.store(column + REF * tokens, given(others.ref, t, s, unmasked, 0.0, "token"), mask=inside)
    tl.store(column + MULTIPLIER * tokens, multiplier, mask=inside)
    tl.store(column + WEIGHT_RATIO * tokens, weight_ratio, mask=inside)
    tl.store(column + WEIGHT_DIRECT * tokens, weight, mask=inside)
    tl.store(column + WEIGHT_ENTROPY * tokens, weight_entropy, mask=inside)
    tl.store(column + TEMPERATURE * tokens, own_temperature, mask=inside)
    tl.store(column + ENTROPY_THRESHOLD * tokens, lowest_entropy, mask=inside)
    tl.store(column + ROLLOUT * tokens, given(surrogate.rollout, t, s, unmasked, float("nan"), "token"), mask=inside)
    tl.store(column + ROLLOUT_WEIGHT * tokens, rollout_weight, mask=inside)
    for field in tl.static_range(VALUE_COUNT):
        tl.store(batch.columns + field * tokens + t, tl.zeros(t.shape, tl.float32), mask=inside)
    tl.store(batch.lse + t, tl.zeros(t.shape, tl.float64), mask=inside)
    if clean_ids is not None:
        tl.store(clean_ids + t, tl.load(others.ids + t, mask=unmasked, other=0).to(tl.int64), mask=inside)

    if counts.gradient_counts is not None:
        has_gradient = tl.load(counts.gradient_counts + s, mask=inside, other=0) != 0
    by_value = (weight != 0.0) & (has_gradient | (rules.kl_has_gradient != 0.0))
    is_active = unmasked & (by_value | ((rules.entropy_coef != 0.0) & (weight_entropy != 0.0)))
    is_scored = is_active | (unmasked & (rules.score_inactive != 0.0))
    tl.store(active + t, is_active.to(tl.uint8), mask=inside)
    tl.store(scored + t, is_scored.to(tl.uint8), mask=inside)
    if block_counts is not None:
        tl.store(block_counts + 2 * block, tl.sum(is_active.to(tl.int32), 0))
        tl.store(block_counts + 2 * block + 1, tl.sum((is_scored & ~is_active).to(tl.int32), 0))


@triton.jit
def sum_counts(block_counts, blocks, end):
    """(number of all, number of those before `end`) for one of the two counts of every block."""
    every = tl.zeros((ADDED_AT_ONCE,), tl.int64)
    before = tl.zeros((ADDED_AT_ONCE,), tl.int64)
    for first in range(0, blocks, ADDED_AT_ONCE):
        other = first + tl.arange(0, ADDED_AT_ONCE)
        count = tl.load(block_counts + 2 * other, mask=other < blocks, other=0)
        every += count
        before += tl.where(other < end, count, 0)
    return tl.sum(every, 0), tl.sum(before, 0)


@triton.jit(do_not_specialize=["scored", "active", "offsets", "block_counts", "order", "counts", "blocks", "tokens"])
def order_kernel(scored, active, offsets, block_counts, order, counts, blocks, tokens, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    inner = tl.arange(0, BLOCK).to(tl.int64)
    if program < blocks:
        t = program.to(tl.int64) * BLOCK + inner
        inside = t < tokens
        first = tl.load(active + t, mask=inside, other=0).to(tl.int32)
        rest = (tl.load(scored + t, mask=inside, other=0) != 0).to(tl.int32) - first
        all_active, active_before = sum_counts(block_counts, blocks, program)
        all_rest, rest_before = sum_counts(block_counts + 1, blocks, program)
        tl.store(order + active_before + tl.cumsum(first, 0) - 1, t, mask=first != 0)
        tl.store(order + all_active + rest_before + tl.cumsum(rest, 0) - 1, t, mask=rest != 0)
        if program == 0:
            tl.store(counts, all_active)
            tl.store(counts + 1, all_rest)
    else:
        s = program - blocks
        start, stop = tl.load(offsets + s), tl.load(offsets + s + 1)
        found = tl.zeros((BLOCK,), tl.int64)
        for done in range(start, stop, BLOCK):
            t = done + inner
            found += tl.load(active + t, mask=t < stop, other=0)
        tl.store(counts + 2 + s, tl.sum(found, 0))


# --- launcher -------------------------------------------------------------------------------------------------------


def plan(inputs: TokenInputs, ids: Tensor, rules: PlanRules, dtype: torch.dtype, *, ordered: bool) -> PlannedTokens:
    """What torch/plan.py computes, in float32: two launches, and a third for the order."""
    shape, device, tokens = ids.shape, ids.device, ids.numel()
    offsets = inputs.cu_seqlens
    sequences = shape[0] if offsets is None else offsets.numel() - 1
    row_length = shape[1] if offsets is None else None

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def mode(x: Tensor | None) -> str:
        if x is None or x.dim() == 0:
            return SCALAR
        return PER_SEQUENCE if is_per_sequence(x, shape, sequences) else PER_TOKEN

    temperature = inputs.temperature
    if temperature is not None and temperature.numel() == 1 and temperature.shape != shape:
        temperature = temperature.reshape(())
    modes = mode(inputs.advantages), mode(inputs.rollout_weights)
    mask = inputs.completion_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.contiguous().view(torch.uint8)
    mask, advantages, old, ref, rollout, weights, given_temperature, threshold, normalizer = (
        None if x is None else _aligned(x)
        for x in (
            mask, inputs.advantages, inputs.old_logps, inputs.ref_logps, inputs.rollout_logps, inputs.rollout_weights,
            temperature, inputs.entropy_threshold, inputs.normalizer,
        )
    )  # fmt: skip
    cu_seqlens = None if offsets is None else offsets.contiguous()
    flat = ids.reshape(-1).contiguous()

    values = TokenValues(empty(len(VALUE_FIELDS), tokens), empty(tokens, dtype=torch.float64))
    table = empty(len(TABLE_FIELDS), tokens)
    scored, active = empty(tokens, dtype=torch.bool), empty(tokens, dtype=torch.bool)
    flags = scored.view(torch.uint8), active.view(torch.uint8)
    clean = mask is None and ids.dtype == torch.int64
    clean_ids = flat if clean else empty(tokens, dtype=torch.int64)
    p = numbers(rules, sequences)
    launch = token_launch(device)
    block = launch.sequences * launch.block // 2  # 256 on a GPU; with 512 a thread has 4 tokens, and 254 registers
    blocks = triton.cdiv(tokens, block)
    together = rules.whole_sequences or shares_ratio(rules.level)
    of_sequences = SequenceCounts(
        offsets=empty(sequences + 1, dtype=torch.int64),
        lengths=empty(sequences),
        gradient_counts=empty(sequences, dtype=torch.int32) if together else None,
    )
    block_counts = empty(2 * blocks, dtype=torch.int32) if ordered else None

    surrogate = SurrogateInputs(advantages, old, rollout, weights)
    lengths_kernel[(triton.cdiv(sequences + 1, launch.sequences),)](
        cu_seqlens, row_length, mask, surrogate, of_sequences, sequences, tokens, p,
        *modes, SEQUENCES=launch.sequences, BLOCK=MASK_BLOCKS * launch.block, num_warps=launch.num_warps,
    )  # fmt: skip
    if tokens:
        others = OtherInputs(mask, None if clean else _aligned(flat), ref, given_temperature, threshold, normalizer)
        clean_to = None if clean else clean_ids
        table_kernel[(blocks,)](
            surrogate, others, of_sequences, Batch.of(table, values), *flags, clean_to, block_counts,
            row_length, sequences, tokens, p, *modes, TEMPERATURES=mode(temperature), BLOCK=block,
            num_warps=launch.num_warps,
        )  # fmt: skip
    order = counts = None
    if ordered:
        counted = sequences if rules.whole_sequences else 0
        order, counts = empty(tokens, dtype=torch.int64), empty(2 + counted, dtype=torch.int64)
        if tokens:
            order_kernel[(blocks + counted,)](
                *flags, of_sequences.offsets, block_counts, order, counts, blocks, tokens,
                BLOCK=block, num_warps=launch.num_warps,
            )  # fmt: skip
        else:
            counts.zero_()
    offsets, lengths, _ = of_sequences
    return PlannedTokens(table, values, offsets, lengths, scored, active, clean_ids, order, counts)


def _aligned(x: Tensor) -> Tensor:
    """Contiguous, and on 16 bytes: see arguments.py."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()

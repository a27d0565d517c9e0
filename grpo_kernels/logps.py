"""From hidden states: log-probabilities and entropies, differentiable; the likeliest ids; those that truncated sampling
kept."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from .checks.plain import gather_dtensor
from .config import check_count, check_number
from .head.logps_op import Inputs, LogpsCall, logps_from_hidden
from .head.shared import refuse_when_traced
from .head.truncation import Truncation, recompute_support
from .inputs import agreed, check_logps_inputs
from .sampling_mask import SamplingMask

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def fused_logps(
    hidden: Tensor,
    lm_head_weight: Tensor,
    completion_ids: Tensor,
    *,
    completion_mask: Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    lm_head_bias: Tensor | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    sparse_backward: float | None = None,
    logits_dtype: torch.dtype | None = None,
    entropy: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Computes log-probabilities of completion_ids, and with entropy=True entropies, without (N, V) logits.

        z = softcap(logit_scale * (h W^T + b)) / temperature,  logp = z[id] - logsumexp(z),  entropy = -sum p log p

    Shapes and types as in `fused_grpo_loss`: hidden (B, T, H) or (N, H), lm_head_weight (V, H), completion_ids (B, T)
    or (N,), or K of them per token, (B, T, K) or (N, K), in any order, which may repeat; temperature a number, or a
    tensor with one element, one per token or, for (B, T), one per sequence: (B,) or (B, 1). Returns float32 tensors
    (float64 from float64) in nats, 0 at masked positions: log-probabilities of the shape of completion_ids, entropies
    of the tokens. K ids share the products and the log-sum-exp of one; they go with neither sampling_mask nor
    sparse_backward.

    sampling_mask: only over the ids that truncated sampling kept for each token, as in `fused_grpo_loss`.
    sparse_backward: as in `GRPOConfig`, for the backward.
    logits_dtype: as in `GRPOConfig`. Log-probabilities that a loss divides by are computed with that of the loss, so
    that a policy that has not changed has ratios of 1.
    vocab_parallel_group: of ranks with a slice of the vocabulary each, as in `fused_grpo_loss`; every rank has to run
    the backward. A sharded weight (DTensor) is gathered, as there.

    Differentiable in hidden, weight and bias; the backward computes the logits again (8 N H V operations in all), for
    tokens with a gradient only. Under no_grad nothing but these outputs is made.

    Raises ValueError, TypeError naming the argument that does not fit, as `fused_grpo_loss` does.
    """
    check = partial(
        check_logps_inputs, "fused_logps", hidden, ids=completion_ids, mask=completion_mask,
        transform=(temperature, logit_scale, logit_softcap), backend=backend, entropy=entropy,
        sampling_mask=sampling_mask, sparse_backward=sparse_backward, several_ids=True, logits_dtype=logits_dtype,
    )  # fmt: skip
    weight, bias, call = agreed(vocab_parallel_group, (hidden, lm_head_weight, lm_head_bias), check)
    logps, entropies, *_ = logps_from_hidden(hidden, weight, bias, call)
    return logps, entropies if entropy else None


def fused_top_k(
    hidden: Tensor,
    lm_head_weight: Tensor,
    k: int,
    *,
    completion_mask: Tensor | None = None,
    lm_head_bias: Tensor | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    logits_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Finds the k likeliest ids of each token, without (N, V) logits: one product, and O(N k) memory beside a chunk.

    Arguments as in `fused_logps`; k of [1, V]. Returns (ids, logps), (B, T, k) or (N, k): int64, the likeliest first,
    of equal logits the smaller id, -1 at masked positions; float32 nats (float64 from float64), 0 at masked positions.
    Without a graph: `fused_logps` of these ids is differentiable. logits_dtype: as in `GRPOConfig`; ids whose logits
    become equal where they are rounded to 16 bits count as equal.

    Raises ValueError, TypeError naming the argument that does not fit, as `fused_grpo_loss` does.

    Example:
        >>> hidden, weight = torch.randn(4, 6, 32), torch.randn(100, 32)
        >>> ids, logps = fused_top_k(hidden, weight, 5)
        >>> torch.allclose(fused_logps(hidden, weight, ids)[0], logps)
        True
    """

    def check(weight: Tensor, bias: Tensor | None) -> LogpsCall:
        return check_logps_inputs(
            "fused_top_k", hidden, weight, bias, ids=None, mask=completion_mask, top_k=check_count("k", k),
            transform=(temperature, logit_scale, logit_softcap), backend=backend, logits_dtype=logits_dtype,
        )  # fmt: skip

    with torch.no_grad():
        weight, bias, call = agreed(vocab_parallel_group, (hidden, lm_head_weight, lm_head_bias), check)
        logps, _, _, ids = logps_from_hidden(hidden, weight, bias, call)
    return cast(Tensor, ids), logps


def sampling_support(
    hidden: Tensor,
    lm_head_weight: Tensor,
    completion_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    completion_mask: Tensor | None = None,
    lm_head_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    logits_dtype: torch.dtype | None = None,
) -> SamplingMask:
    """Recomputes the ids that truncated sampling kept for each token, without (N, V) logits, by vLLM 0.33's rules.

    Of z = softcap(logit_scale * (h W^T + b)) / temperature, each on what the one before left:

        min_p   ids with p >= min_p max(p)
        top_k   ids with z >= the top_k-th largest z, equal ones too; 0, or V and more: all
        top_p   the likeliest ids until they have mass top_p, the one that reaches it too. Of equal z at the end the
                highest ids, where an engine may have any of them

    Then the sampled id, where it is missing. hidden and weight are those of the policy that sampled: one call per
    rollout serves old, reference and current log-probabilities. Shapes and types as in `fused_logps`; hidden (B, T, H)
    or (N, H), lm_head_weight (V, H), completion_ids and completion_mask (B, T) or (N,).

    Returns a SamplingMask of int32 ids, without a graph, with `mass`, the probability of the kept ids, and `added`,
    whether the sampled id was missing. Masked positions have count 0. logits_dtype: as in `GRPOConfig`, that of the
    loss; an engine whose logits have another type keeps other ids for some tokens (README.md). Penalties, logit bias,
    banned words and least lengths, which change logits before these rules, cannot be recomputed.

    2 N H V operations; memory: a chunk of logits, about as much again, and 4 bytes per kept id, whose number the host
    waits for, part by part.

    Raises ValueError, TypeError naming the argument that does not fit; also where nothing is truncated.
    """
    rule = check_truncation(top_k, top_p, min_p)
    inputs, transform = (hidden, lm_head_weight, lm_head_bias), (temperature, logit_scale, logit_softcap)
    return support_under(rule, inputs, completion_ids, completion_mask, transform, logits_dtype)


def check_truncation(top_k: object, top_p: object, min_p: object, *, min_p_last: bool = False) -> Truncation:
    """Returns the rule of these options."""
    return Truncation(
        check_count("top_k", top_k, least=0), check_number("top_p", top_p, above=0.0, high=1.0),
        check_number("min_p", min_p, low=0.0, high=1.0), min_p_last,
    )  # fmt: skip


@torch.no_grad()
def support_under(
    rule: Truncation, inputs: Inputs, ids: Tensor, mask: Tensor | None,
    transform: tuple[float | Tensor, float, float | None], logits_dtype: torch.dtype | None = None,
) -> SamplingMask:  # fmt: skip
    """Returns `sampling_support` by any rule. transform: temperature, logit scale and softcap."""
    hidden, weight, bias = inputs[0], gather_dtensor(inputs[1]), gather_dtensor(inputs[2])
    call = check_logps_inputs(
        "sampling_support", hidden, weight, bias, ids=ids, mask=mask, transform=transform, backend="auto",
        logits_dtype=logits_dtype,
    )  # fmt: skip
    if not rule.truncates(len(weight)):
        raise ValueError(
            f"top_k={rule.top_k}, top_p={rule.top_p} and min_p={rule.min_p} keep all {len(weight)} ids; expected one "
            "that truncates: without truncation leave sampling_mask out"
        )
    refuse_when_traced(hidden, "sampling_support", rule)
    return recompute_support((hidden, weight, bias), call, rule)

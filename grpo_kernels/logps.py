"""fused_logps: differentiable log-probabilities and entropies from hidden states. fused_top_k: the likeliest ids."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .checks.plain import full_weight
from .head.logps_op import Inputs, LogpsCall, logps_from_hidden
from .head.shared import requires_grad_flags
from .head.vocab_parallel import broadcast_failure, check_group, exchange_and_check
from .inputs import check_logps_inputs
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
    entropy: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Computes log-probabilities of completion_ids, and with entropy=True entropies, without (N, V) logits.

        z = softcap(logit_scale * (h W^T + b)) / temperature,  logp = z[id] - logsumexp(z),  entropy = -sum p log p

    Shapes and types as in `fused_grpo_loss`: hidden (B, T, H) or (N, H), lm_head_weight (V, H), completion_ids (B, T)
    or (N,), or K of them per token, (B, T, K) or (N, K), in any order, which may repeat; temperature a number, or one
    value per token or, for (B, T), per sequence: (B,) or (B, 1). Returns float32 tensors (float64 from float64) in
    nats, 0 at masked positions: log-probabilities of the shape of completion_ids, entropies of the tokens. K ids share
    the products and the log-sum-exp of one; they go with neither sampling_mask nor sparse_backward.

    sampling_mask: only over the ids that truncated sampling kept for each token, as in `fused_grpo_loss`.
    sparse_backward: as in `GRPOConfig`, for the backward.
    vocab_parallel_group: of ranks with a slice of the vocabulary each, as in `fused_grpo_loss`; every rank has to run
    the backward. A sharded weight (DTensor) is gathered, as there.

    Differentiable in hidden, weight and bias; the backward computes the logits again (8 N H V operations in all), for
    tokens with a gradient only. Under no_grad nothing but these outputs is made.

    Raises ValueError, TypeError naming the argument that does not fit, as `fused_grpo_loss` does.
    """
    weight, bias, call = _checked(
        "fused_logps", (hidden, lm_head_weight, lm_head_bias), vocab_parallel_group, completion_ids, completion_mask,
        (temperature, logit_scale, logit_softcap), backend, entropy=entropy, sampling_mask=sampling_mask,
        sparse_backward=sparse_backward, several_ids=True,
    )  # fmt: skip
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
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Finds the k likeliest ids of each token, without (N, V) logits: one product, and O(N k) memory beside a chunk.

    Arguments as in `fused_logps`; k of [1, V]. Returns (ids, logps), (B, T, k) or (N, k): int64, the likeliest first,
    of equal logits the smaller id, -1 at masked positions; float32 nats (float64 from float64), 0 at masked positions.
    Without a graph: `fused_logps` of these ids is differentiable.

    Raises ValueError, TypeError naming the argument that does not fit, as `fused_grpo_loss` does.

    Example:
        >>> hidden, weight = torch.randn(4, 6, 32), torch.randn(100, 32)
        >>> ids, logps = fused_top_k(hidden, weight, 5)
        >>> torch.allclose(fused_logps(hidden, weight, ids)[0], logps)
        True
    """
    with torch.no_grad():
        weight, bias, call = _checked(
            "fused_top_k", (hidden, lm_head_weight, lm_head_bias), vocab_parallel_group, None, completion_mask,
            (temperature, logit_scale, logit_softcap), backend, entropy=False, top_k=k,
        )  # fmt: skip
        logps, _, _, found = logps_from_hidden(hidden, weight, bias, call)
    return cast(Tensor, found), logps


def _checked(
    function_name: str, inputs: Inputs, group: ProcessGroup | None, *given: Any, **options: Any
) -> tuple[Tensor, Tensor | None, LogpsCall]:
    """Returns weight, bias and the call that `check_logps_inputs` makes, on which the ranks of a group agree."""
    hidden, weight, bias = inputs
    if group is None:
        weight, bias = full_weight(weight), full_weight(bias)
    else:
        check_group(group)
    with nullcontext() if group is None else broadcast_failure(group, hidden):
        call = check_logps_inputs(function_name, (hidden, weight, bias), *given, **options)
    if group is not None:
        wants = requires_grad_flags(hidden, weight, bias)
        call = call._replace(vocab_slice=exchange_and_check(group, hidden, weight, bias, wants, call.description))
    return weight, bias, call

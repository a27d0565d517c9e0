"""fused_logps: differentiable log-probabilities and entropies from hidden states."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from torch import Tensor

from .checks.plain import full_weight
from .head.logps_op import logps_from_hidden
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
    or (N,); temperature a number, or one value per token or, for (B, T), per sequence: (B,) or (B, 1). Returns float32
    tensors (float64 from float64) of the shape of completion_ids, in nats, 0 at masked positions.

    sampling_mask: only over the ids that truncated sampling kept for each token, as in `fused_grpo_loss`.
    sparse_backward: as in `GRPOConfig`, for the backward.
    vocab_parallel_group: of ranks with a slice of the vocabulary each, as in `fused_grpo_loss`; every rank has to run
    the backward. A sharded weight (DTensor) is gathered, as there.

    Differentiable in hidden, weight and bias; the backward computes the logits again (8 N H V operations in all), for
    tokens with a gradient only. Under no_grad nothing but these outputs is made.

    Raises ValueError, TypeError naming the argument that does not fit, as `fused_grpo_loss` does.
    """
    group = vocab_parallel_group
    weight, bias = lm_head_weight, lm_head_bias
    if group is None:
        weight, bias = full_weight(weight), full_weight(bias)
    else:
        check_group(group)
    with nullcontext() if group is None else broadcast_failure(group, hidden):
        call = check_logps_inputs(
            "fused_logps", (hidden, weight, bias), completion_ids, completion_mask,
            (temperature, logit_scale, logit_softcap), backend, entropy=entropy, sampling_mask=sampling_mask,
            sparse_backward=sparse_backward,
        )  # fmt: skip
    if group is not None:
        wants = requires_grad_flags(hidden, weight, bias)
        call = call._replace(vocab_slice=exchange_and_check(group, hidden, weight, bias, wants, call.description))
    logps, entropies, _ = logps_from_hidden(hidden, weight, bias, call)
    return logps, entropies if entropy else None

"""fused_logps: differentiable log-probabilities and entropies from hidden states."""

from __future__ import annotations

from torch import Tensor

from .backends import choose_backend
from .config import check_logit_transform
from .engine.autocast import products_dtype
from .engine.logps_op import LogpsCall, logps_from_hidden
from .sampling_mask import SamplingMask, check_sampling_mask
from .validate import check_flag, check_head, check_token_tensor, refuse_transforms, temperature_per_token


def fused_logps(
    hidden: Tensor,
    lm_head_weight: Tensor,
    completion_ids: Tensor,
    *,
    completion_mask: Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    lm_head_bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    entropy: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of completion_ids, and with entropy=True entropies, without (N, V) logits.

        z = softcap(logit_scale * (h W^T + b)) / temperature,  logp = z[id] - logsumexp(z),  entropy = -sum p log p

    Shapes and types as in `fused_grpo_loss`: hidden (B, T, H) or (N, H), lm_head_weight (V, H), completion_ids (B, T)
    or (N,); temperature a number, or one value per token or, for (B, T), per sequence: (B,) or (B, 1). Returns float32
    tensors (float64 from float64) of the shape of completion_ids, in nats, 0 at masked positions.

    sampling_mask: over the ids that truncated sampling kept for each token alone, as in `fused_grpo_loss`.

    Differentiable in hidden, weight and bias; the backward computes the logits again (8 N H V operations in all), for
    tokens with a gradient only. Under no_grad nothing but these outputs is made.

    Raises ValueError, TypeError naming the argument that does not fit, as `fused_grpo_loss` does.
    """
    check_logit_transform(temperature, logit_scale, logit_softcap)
    check_flag("entropy", entropy)
    refuse_transforms("fused_logps", hidden, lm_head_weight, lm_head_bias)
    compute_dtype = products_dtype(hidden, lm_head_weight, lm_head_bias)
    check_head(hidden, lm_head_weight, lm_head_bias, completion_ids, compute_dtype)
    check_token_tensor("completion_mask", completion_mask, completion_ids.shape, -1, hidden)
    check_sampling_mask(sampling_mask, completion_ids.shape, hidden)
    if isinstance(temperature, Tensor):
        num_sequences = len(completion_ids) if completion_ids.dim() == 2 else -1
        temperature = temperature_per_token(temperature, completion_ids.shape, num_sequences, hidden)
    call = LogpsCall(
        completion_ids=completion_ids, mask=completion_mask, logit_scale=float(logit_scale),
        temperature=temperature.detach().to(hidden.device) if isinstance(temperature, Tensor) else float(temperature),
        softcap=0.0 if logit_softcap is None else float(logit_softcap), want_entropy=entropy,
        backend=choose_backend(backend, hidden.device, compute_dtype or hidden.dtype), compute_dtype=compute_dtype,
        kept_ids=None if sampling_mask is None else sampling_mask.ids,
        kept_counts=None if sampling_mask is None else sampling_mask.counts,
    )  # fmt: skip
    logps, entropies = logps_from_hidden(hidden, lm_head_weight, lm_head_bias, call)
    return logps, entropies if entropy else None

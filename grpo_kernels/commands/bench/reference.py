"""The exact result, in float64 from the same inputs, a few rows at a time; and errors of results against it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..harness import relative_error
from .baselines import Result
from .cases import DIVERGENCES
from .inputs import LOG_RATIOS, Inputs, token_divergences, token_losses

_LOGITS = 2**26  # float64 logits at a time, 0.5 GiB, which autograd holds a few times over
_IDS = 2**14  # whose rows of the weight are in float64 at a time
# Rounding does not explain larger relative errors. That of logits to bfloat16 alone causes about 1.5e-2, and 6e-2 where
# they are as large as a chat model's.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 1e-2}
# The same for a log-probability, in nats: in bfloat16 logits from 4 to 8 are off by up to 2**-6, and those from 16 to
# 32, which sampled ids have, by up to 2**-4.
LOGP_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 4e-1, torch.float16: 2e-2}


@dataclass(frozen=True)
class Reference:
    """In float64: loss, and mean |loss of a token| (the scale of its error); logps (B, T), dhidden (N, H), dweight.

    The gradients are None in mode "forward", dweight (V, H) also in "frozen".
    """

    loss: float
    scale: float
    logps: Tensor
    dhidden: Tensor | None
    dweight: Tensor | None


def off_policy(inputs: Inputs, seed: int = 1) -> Inputs:
    """Returns the batch with old_logps and ref_logps near the policy's log-probabilities, which are computed in
    float32, exactly enough for this."""
    weight, hidden = inputs.weight.detach().float(), inputs.flat_hidden.detach()
    logps_chunks = [_log_p(hidden[rows].float() @ weight.T, inputs, rows)[1] for rows in _chunks(inputs)]
    logps, generator = torch.cat(logps_chunks).view(inputs.ids.shape), torch.Generator().manual_seed(seed)
    choices = torch.randint(len(LOG_RATIOS), logps.shape, generator=generator)
    log_ratio = torch.tensor(LOG_RATIOS, dtype=logps.dtype)[choices].to(logps.device)
    drift = torch.randn(logps.shape, generator=generator).to(logps) * 0.1
    return replace(inputs, old_logps=(logps - log_ratio).float(), ref_logps=(logps + drift).float())


def reference(inputs: Inputs, mode: str, objective: str) -> Reference:
    """Returns the exact result, from one pass over chunks of rows.

    All masks are one, so that a token's share of the loss depends on no other token. `objective`: "grpo", or
    "cross_entropy", the mean of -logp; without effect where the mode is a divergence.
    """
    weight, hidden, count = inputs.weight.detach(), inputs.flat_hidden.detach(), inputs.ids.numel()
    old, ref = (x.reshape(-1).double() for x in (inputs.old_logps, inputs.ref_logps))
    advantages = inputs.advantages.repeat_interleave(inputs.ids.shape[1]).double()
    loss = scale = 0.0
    all_logps, dhidden = [], []
    dweight = None if mode in ("forward", "frozen") else torch.zeros_like(weight, dtype=torch.float64)
    for rows in _chunks(inputs):
        h = hidden[rows].double()
        logits = _logits(h, weight).requires_grad_(mode != "forward")
        log_p, logps = _log_p(logits, inputs, rows)
        all_logps.append(logps.detach())
        if mode in DIVERGENCES:
            losses = token_divergences(log_p, _log_q(inputs, rows), mode)
        elif objective == "grpo":
            losses = token_losses(logps, old[rows], ref[rows], advantages[rows], inputs.beta)
        else:
            losses = -logps
        loss += losses.sum().item() / count
        scale += losses.abs().sum().item() / count
        if mode == "forward":
            continue
        (dlogits,) = torch.autograd.grad(losses.sum() / count, logits)
        dhidden.append(sum(d @ w.double() for d, w in zip(dlogits.split(_IDS, -1), weight.split(_IDS), strict=True)))
        if dweight is not None:
            dweight.addmm_(dlogits.T, h)
    logps = torch.cat(all_logps).view(inputs.ids.shape)
    return Reference(loss, scale, logps, torch.cat(dhidden) if dhidden else None, dweight)


def errors(exact: Reference, result: Result) -> dict[str, float]:
    """Returns the errors of what the result has.

    "loss": relative to a token's mean |loss|; "dhidden", "dweight": in the Euclidean norm, relative; "logps_max" and
    "logps_rms": absolute, in nats.
    """
    named_errors = {}
    if result.loss is not None:
        named_errors["loss"] = abs(result.loss.item() - exact.loss) / (exact.scale or 1.0)
    if result.logps is not None:
        difference = (result.logps.double() - exact.logps).abs()
        named_errors["logps_max"] = difference.max().item()
        named_errors["logps_rms"] = difference.square().mean().sqrt().item()
    for name in ("dhidden", "dweight"):
        value, exact_value = getattr(result, name), getattr(exact, name)
        if value is not None and exact_value is not None:
            named_errors[name] = relative_error(value.view(exact_value.shape), exact_value)
    return named_errors


def why_wrong(exact: Reference, result: Result, errors: dict[str, float], dtype: torch.dtype) -> str | None:
    """Returns what the result lacks, or which errors are larger than rounding explains, or NaN; None if it is right."""
    exact_gradients = {"dhidden": exact.dhidden, "dweight": exact.dweight}
    lacking = [name for name, exact_value in exact_gradients.items() if exact_value is not None and name not in errors]
    if exact.dhidden is None and "logps_max" not in errors:
        lacking.append("logps")
    if lacking:
        return f"gives no {' and no '.join(lacking)}"
    limits = {"logps_max": LOGP_TOLERANCE[dtype], "logps_rms": LOGP_TOLERANCE[dtype]}
    faults = [f"{name} is off by {e:.1e}" for name, e in errors.items() if not e <= limits.get(name, TOLERANCE[dtype])]
    return ", ".join(faults) or None


def _chunks(inputs: Inputs) -> tuple[Tensor, ...]:
    """Returns the indices of all tokens, in chunks that have up to _LOGITS logits."""
    tokens = torch.arange(inputs.ids.numel(), device=inputs.ids.device)
    return torch.split(tokens, max(1, _LOGITS // len(inputs.weight)))


def _log_p(logits: Tensor, inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities of all ids at `rows` (R,), as (R, V) with -inf where a sampling mask leaves them out,
    and of the sampled ids, (R,)."""
    excluded = inputs.masked_out(rows)
    log_p = (logits if excluded is None else logits.masked_fill(excluded, -math.inf)).log_softmax(-1)
    return log_p, log_p.gather(-1, inputs.ids.view(-1)[rows, None]).squeeze(-1)


def _log_q(inputs: Inputs, rows: Tensor) -> Tensor:
    """Returns the teacher's log-probabilities of all ids at `rows` (R,), as (R, V) float64."""
    assert inputs.teacher is not None
    return _logits(inputs.teacher.hidden.flatten(0, 1)[rows].double(), inputs.teacher.weight).log_softmax(-1)


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns logits (R, V) in float64; the weight is converted to it part by part."""
    return torch.cat([hidden @ block.double().T for block in weight.split(_IDS)], -1)

"""The exact result: loss and gradients in float64 from the same inputs, a few rows at a time; errors against it."""

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
_IDS = 2**14  # whose weights are in float64 at a time
# Relative errors beyond these are no rounding. Rounding the logits to bfloat16 alone costs about 1.5e-2.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Of a log-probability, in nats: logits rounded to bfloat16 are off by up to 2**-6 at 4 to 8, and by 2**-4 at 16 to 32,
# which a policy's samples have.
LOGP_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-1, torch.float16: 2e-2}


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
    """The same batch a little off-policy, its true log-probabilities from float32, since near is enough."""
    weight, hidden = inputs.weight.detach().float(), inputs.flat_hidden.detach()
    parts = [_log_p(hidden[rows].float() @ weight.T, inputs, rows)[1] for rows in _chunks(inputs)]
    logps, generator = torch.cat(parts).view(inputs.ids.shape), torch.Generator().manual_seed(seed)
    which = torch.randint(len(LOG_RATIOS), logps.shape, generator=generator)
    log_ratio = torch.tensor(LOG_RATIOS, dtype=logps.dtype)[which].to(logps.device)
    drift = torch.randn(logps.shape, generator=generator).to(logps) * 0.1
    return replace(inputs, old_logps=(logps - log_ratio).float(), ref_logps=(logps + drift).float())


def reference(inputs: Inputs, mode: str, objective: str) -> Reference:
    """One pass over chunks of rows: with all masks one, a token's share of the loss depends on no other token.

    `objective`: "grpo", or "cross_entropy", the mean of -logp; neither counts where the mode is a divergence.
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


def errors(right: Reference, result: Result) -> dict[str, float]:
    """Errors of what the result has.

    "loss": relative to a token's mean |loss|; "dhidden", "dweight": in the Euclidean norm, relative; "logps_max" and
    "logps_rms": absolute, in nats.
    """
    found = {}
    if result.loss is not None:
        found["loss"] = abs(result.loss.item() - right.loss) / (right.scale or 1.0)
    if result.logps is not None:
        difference = (result.logps.double() - right.logps).abs()
        found["logps_max"], found["logps_rms"] = difference.max().item(), difference.square().mean().sqrt().item()
    for name in ("dhidden", "dweight"):
        given, true = getattr(result, name), getattr(right, name)
        if given is not None and true is not None:
            found[name] = relative_error(given.view(true.shape), true)
    return found


def why_wrong(right: Reference, result: Result, found: dict[str, float], dtype: torch.dtype) -> str | None:
    """What is lacking, or off by more than rounding explains; NaN is."""
    wanted = {"dhidden": right.dhidden, "dweight": right.dweight}
    lacking = [name for name, true in wanted.items() if true is not None and name not in found]
    if right.dhidden is None and "logps_max" not in found:
        lacking.append("logps")
    if lacking:
        return f"gives no {' and no '.join(lacking)}"
    limits = {"logps_max": LOGP_TOLERANCE[dtype], "logps_rms": LOGP_TOLERANCE[dtype]}
    wrong = [f"{name} is off by {e:.1e}" for name, e in found.items() if not e <= limits.get(name, TOLERANCE[dtype])]
    return ", ".join(wrong) or None


def _chunks(inputs: Inputs) -> tuple[Tensor, ...]:
    """Tokens, as many at a time as have _LOGITS logits."""
    tokens = torch.arange(inputs.ids.numel(), device=inputs.ids.device)
    return torch.split(tokens, max(1, _LOGITS // len(inputs.weight)))


def _log_p(logits: Tensor, inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of all ids at `rows`, -inf where a sampling mask leaves them out, and of the sampled ids."""
    out = inputs.masked_out(rows)
    log_p = (logits if out is None else logits.masked_fill(out, -math.inf)).log_softmax(-1)
    return log_p, log_p.gather(-1, inputs.ids.view(-1)[rows, None]).squeeze(-1)


def _log_q(inputs: Inputs, rows: Tensor) -> Tensor:
    """Log-probabilities of all ids at `rows` that the teacher gives."""
    assert inputs.teacher is not None
    return _logits(inputs.teacher.hidden.flatten(0, 1)[rows].double(), inputs.teacher.weight).log_softmax(-1)


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """float64, without the whole weight in it."""
    return torch.cat([hidden @ part.double().T for part in weight.split(_IDS)], -1)

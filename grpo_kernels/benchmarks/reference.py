"""The exact result: loss and gradients in float64 from the same inputs, a few rows at a time; errors against it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .implementations import Result
from .inputs import Inputs, token_losses, with_true_ratios

_LOGITS = 2**27  # float64 logits at a time: 1 GiB
# Relative errors beyond these are no rounding. Rounding the logits to bfloat16 alone costs about 1.5e-2.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Of a log-probability, in nats: logits of standard deviation 2 rounded to bfloat16 are off by up to 2**-6 at 4 to 8.
LOGP_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 8e-2, torch.float16: 1e-2}


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


def off_policy(inputs: Inputs) -> Inputs:
    """`inputs` with old and reference log-probabilities near the true ones: in float32, since near is enough."""
    weight = inputs.weight.detach().float()
    rows = _split(torch.arange(inputs.ids.numel(), device=weight.device), weight)
    hidden, all_ids = inputs.flat_hidden.detach(), inputs.ids.view(-1)
    logps = torch.cat([_gather(_log_p(hidden[i].float(), weight, inputs, i), all_ids[i]) for i in rows])
    return with_true_ratios(inputs, logps.view(inputs.ids.shape))


def reference(inputs: Inputs, mode: str, objective: str) -> Reference:
    """One pass over chunks of rows: with all masks one, a token's share of the loss depends on that token alone.

    `objective`: "grpo", or "cross_entropy", the mean of -logp.
    """
    weight = inputs.weight.detach().double()
    per_token = (
        torch.arange(inputs.ids.numel(), device=weight.device),
        inputs.flat_hidden.detach(),
        inputs.ids.reshape(-1),
        inputs.old_logps.reshape(-1),
        inputs.ref_logps.reshape(-1),
        inputs.advantages.repeat_interleave(inputs.ids.shape[1]),
    )
    count = inputs.ids.numel()
    loss = scale = 0.0
    all_logps, dhidden = [], []
    dweight = torch.zeros_like(weight) if mode == "step" else None
    for rows, h, ids, old, ref, advantages in zip(*(_split(x, weight) for x in per_token), strict=True):
        h = h.double()
        log_p = _log_p(h, weight, inputs, rows)
        logps = _gather(log_p, ids).requires_grad_()
        if objective == "grpo":
            losses = token_losses(logps, old.double(), ref.double(), advantages.double(), inputs.beta)
        else:
            losses = -logps
        (coefficient,) = torch.autograd.grad(losses.sum() / count, logps)
        all_logps.append(logps.detach())
        loss += losses.sum().item() / count
        scale += losses.abs().sum().item() / count
        if mode == "forward":
            continue
        dlogits = log_p.exp_().mul_(-coefficient[:, None])  # d logp / d logits = onehot - softmax
        dlogits[torch.arange(ids.numel(), device=ids.device), ids] += coefficient
        dhidden.append(dlogits @ weight)
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


def relative_error(found: Tensor, exact: Tensor, least: float = 0.0) -> float:
    """|found - exact| / max(|exact|, least) in Euclidean norms and float64; 0 where both are 0.

    Piece by piece: neither tensor is held in float64 whole.
    """
    if found.shape != exact.shape:
        raise ValueError(f"found has shape {tuple(found.shape)}; expected that of exact, {tuple(exact.shape)}")
    pairs = list(
        zip(torch.split(found, 4096), torch.split(exact, 4096), strict=True) if exact.dim() else [(found, exact)]
    )
    distance = math.sqrt(math.fsum((a.double() - b.double()).square().sum().item() for a, b in pairs))
    norm = math.sqrt(math.fsum(b.double().square().sum().item() for _, b in pairs))
    return distance / max(norm, least, 1e-30) if distance else 0.0


def _split(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x, max(1, _LOGITS // weight.shape[0]))


def _log_p(hidden: Tensor, weight: Tensor, inputs: Inputs, rows: Tensor) -> Tensor:
    """Log-probabilities of all ids, -inf where a sampling mask leaves them out, at tokens `rows`."""
    logits, out = hidden @ weight.T, inputs.masked_out(rows)
    return (logits if out is None else logits.masked_fill_(out, -math.inf)).log_softmax(-1)


def _gather(log_p: Tensor, ids: Tensor) -> Tensor:
    return log_p.gather(-1, ids[:, None]).squeeze(-1)

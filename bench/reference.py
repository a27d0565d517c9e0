"""What is right: loss and gradients in float64 from the same inputs, a few rows at a time; and errors against that."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from inputs import Inputs, token_losses, with_true_ratios
from torch import Tensor

ROWS = 128  # of float64 logits at a time
# Relative errors beyond these are no rounding. Rounding the logits to bfloat16 alone costs about 1.5e-2.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-9}


@dataclass(frozen=True)
class Reference:
    """loss and mean |loss of a token| (the scale of its error); dhidden (N, H), dweight (V, H) in float64."""

    loss: float
    scale: float
    dhidden: Tensor
    dweight: Tensor


def off_policy(inputs: Inputs) -> Inputs:
    """`inputs` with old and reference log-probabilities near the true ones."""
    weight = inputs.weight.detach().double()
    chunks = zip(torch.split(inputs.flat_hidden.detach(), ROWS), torch.split(inputs.ids.view(-1), ROWS), strict=True)
    logps = torch.cat([_gather((h.double() @ weight.T).log_softmax(-1), ids) for h, ids in chunks])
    return with_true_ratios(inputs, logps.view(inputs.ids.shape))


def reference(inputs: Inputs) -> Reference:
    """One pass over chunks of rows: with all masks one, a token's share of the loss depends on that token alone."""
    weight = inputs.weight.detach().double()
    per_token = (
        inputs.flat_hidden.detach(),
        inputs.ids.reshape(-1),
        inputs.old_logps.reshape(-1),
        inputs.ref_logps.reshape(-1),
        inputs.advantages.repeat_interleave(inputs.ids.shape[1]),
    )
    count = inputs.ids.numel()
    loss = scale = 0.0
    dhidden, dweight = [], torch.zeros_like(weight)
    for h, ids, old, ref, advantages in zip(*(torch.split(x, ROWS) for x in per_token), strict=True):
        h = h.double()
        log_p = (h @ weight.T).log_softmax(-1)
        logps = _gather(log_p, ids).requires_grad_()
        losses = token_losses(logps, old.double(), ref.double(), advantages.double(), inputs.beta)
        (coefficient,) = torch.autograd.grad(losses.sum() / count, logps)
        dlogits = log_p.exp_().mul_(-coefficient[:, None])  # d logp / d logits = onehot - softmax
        dlogits[torch.arange(ids.numel(), device=ids.device), ids] += coefficient
        dhidden.append(dlogits @ weight)
        dweight.addmm_(dlogits.T, h)
        loss += losses.sum().item() / count
        scale += losses.abs().sum().item() / count
    return Reference(loss, scale, torch.cat(dhidden), dweight)


def errors(right: Reference, loss: Tensor, dhidden: Tensor, dweight: Tensor) -> dict[str, float]:
    """Relative errors: of the loss to a token's mean |loss|, of gradients in the Euclidean norm."""
    return {
        "loss": abs(loss.item() - right.loss) / right.scale,
        "dhidden": _relative(dhidden.view(right.dhidden.shape), right.dhidden),
        "dweight": _relative(dweight, right.dweight),
    }


def is_wrong(found: dict[str, float], dtype: torch.dtype) -> bool:
    """Whether any error is larger than rounding explains; NaN is."""
    return not all(error <= TOLERANCE[dtype] for error in found.values())


def _gather(log_p: Tensor, ids: Tensor) -> Tensor:
    return log_p.gather(-1, ids[:, None]).squeeze(-1)


def _relative(x: Tensor, right: Tensor) -> float:
    """|x - right| / |right|, piece by piece: the difference is never held whole."""
    pairs = zip(torch.split(x, 4096), torch.split(right, 4096), strict=True)
    distance = math.fsum((a.double() - b).square().sum().item() for a, b in pairs)
    return math.sqrt(distance) / float(right.norm())

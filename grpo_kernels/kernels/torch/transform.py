"""The transform from logits to the arguments of the softmax, for the policy and for a teacher."""

from __future__ import annotations

import torch
from torch import Tensor

from ..operations import PolicyTransform, TeacherTransform


def transformed(
    logits: Tensor, bias: Tensor | None, temperature: Tensor, params: PolicyTransform | TeacherTransform
) -> tuple[Tensor, Tensor | None]:
    """Returns (z = softcap(scale * (logits + bias)) / temperature (C,), the softcap's derivative or None); z is a
    copy."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    z = logits.to(dtype, copy=True) if bias is None else logits.to(dtype) + bias
    z = z.mul_(params.logit_scale)
    softcap_slope = None
    if params.softcap:
        excluded = z == -torch.inf  # an id that is excluded stays so; the derivative is 0 there
        tanh = z.div_(params.softcap).tanh_()
        softcap_slope = 1 - tanh * tanh
        z = tanh.mul_(params.softcap).masked_fill_(excluded, -torch.inf)
    return z.div_(temperature[:, None]), softcap_slope


def minus_lse(z: Tensor, lse: Tensor) -> Tensor:
    """Subtracts lse (C,) float64 from z (C, V) in place, first lse rounded to the type of z, then what the rounding
    left."""
    rounded = lse.to(z.dtype)
    return z.sub_(rounded[:, None]).sub_((lse - rounded).to(z.dtype)[:, None])

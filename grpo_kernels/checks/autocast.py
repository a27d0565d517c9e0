"""The type of the products, where it is not that of the inputs: torch.autocast's, or that of a float32 head."""

from __future__ import annotations

import torch
from torch import Tensor


def products_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The type in which torch.nn.functional.linear would compute with these under autocast. Else float32 for a float32
    head of 16-bit hidden states, as lm_head(hidden.float()). None where the inputs stay as they are."""
    device = hidden.device.type if isinstance(hidden, Tensor) else "meta"
    if device == "meta":
        return None  # the checks refuse it
    if torch.is_autocast_enabled(device):
        given = [x for x in (hidden, weight, bias) if isinstance(x, Tensor)]
        if all(x.dtype != torch.float64 and x.is_floating_point() for x in given):
            return torch.get_autocast_dtype(device)
        return None  # autocast leaves these alone; the checks then say which types do not fit
    if hidden.dtype in (torch.bfloat16, torch.float16):
        head = {x.dtype for x in (weight, bias) if isinstance(x, Tensor)}
        return torch.float32 if head == {torch.float32} else None
    return None

"""torch.autocast for an operator that autocast does not know."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The type in which torch.nn.functional.linear would compute with these: autocast's; None where they stay."""
    device = hidden.device.type if isinstance(hidden, Tensor) else "meta"
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    for x in (hidden, weight, bias):
        if isinstance(x, Tensor) and (x.dtype == torch.float64 or not x.is_floating_point()):
            return None  # autocast leaves these alone; the checks then say which types do not fit
    return torch.get_autocast_dtype(device)

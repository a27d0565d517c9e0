"""torch.autocast for an operator that autocast does not know."""

from __future__ import annotations

import torch
from torch import Tensor


def settle_types(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The three in autocast's type where it is on, as torch.nn.functional.linear would take them; else as they came."""
    if (
        not isinstance(hidden, Tensor)
        or hidden.device.type == "meta"
        or not torch.is_autocast_enabled(hidden.device.type)
    ):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(hidden.device.type)

    def cast(x: Tensor) -> Tensor:
        castable = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if castable else x

    return cast(hidden), cast(weight), None if bias is None else cast(bias)

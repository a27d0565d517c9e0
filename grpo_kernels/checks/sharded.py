"""A sharded lm_head (DTensor) as one tensor, whose gradient goes back to the shards."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from .plain import PLAIN


def full_weight(x: Any) -> Any:
    """A DTensor gathered from all ranks; anything else as it is.

    Its gradient is averaged over the ranks, as FSDP2 averages those of the other parameters: right where each rank
    computes the loss of its own tokens, and where all compute that of the same tokens (tensor parallelism). One
    all-gather, and in the backward one reduce-scatter, in which every rank has to take part.
    """
    if type(x) in PLAIN or not isinstance(x, Tensor) or not any(c.__name__ == "DTensor" for c in type(x).__mro__):
        return x
    from torch.distributed.tensor import DTensor, Partial

    sharded = cast(DTensor, x)
    return sharded.full_tensor(grad_placements=[Partial("avg")] * sharded.device_mesh.ndim)

"""Which kernels compute a chunk: the vendor's product and a row pass over logits, or a product with a softmax epilogue.

    rows       logits = h W^T into the scratch, then a row kernel
    linear     statistics alone (no gradient wanted yet) come from one kernel, h and W to log-probabilities; else rows
    anchored   linear, and the fused way stores e^(z - z_id) from the product's epilogue: no row pass at all

A backend lists what serves its inputs, best first. GRPO_KERNELS_STRATEGY names another one, for experiments.
"""

from __future__ import annotations

import os
import warnings
from functools import cache

from torch import Tensor

from ..contract import Backend

STRATEGIES = ("rows", "linear", "anchored")
VARIABLE = "GRPO_KERNELS_STRATEGY"


def choose_strategy(backend: Backend, hidden: Tensor, weight: Tensor) -> str:
    """One of STRATEGIES for these hidden states (..., H) and weight (V, H)."""
    served = backend.strategies(hidden, weight)
    wanted = os.environ.get(VARIABLE)
    if not wanted or wanted in served:
        return wanted or served[0]
    if wanted not in STRATEGIES:
        raise ValueError(f"{VARIABLE}={wanted!r}; expected one of {', '.join(STRATEGIES)}")
    _warn_once(
        f"grpo_kernels: {VARIABLE}={wanted} does not serve backend {backend.name!r} with {hidden.dtype} on "
        f"{hidden.device.type}; using {served[0]!r}"
    )
    return served[0]


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)

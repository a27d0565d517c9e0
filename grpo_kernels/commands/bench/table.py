"""The table of implementations: this library's, the bare products, plain PyTorch, peers, whole trainers."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from functools import partial

from . import baselines, peers
from .baselines import Implementation
from .ours import OURS
from .rollouts import ROLLOUTS
from .trainers import TRAINERS

IMPLEMENTATIONS: dict[str, Implementation] = {
    **OURS,
    "floor": Implementation("bare matrix products", baselines.floor, "none"),
    "eager": Implementation("eager PyTorch", baselines.eager),
    "torch": Implementation("torch's linear_cross_entropy", partial(peers.torch_head, chunked=False)),
    "torch-chunked": Implementation("torch's linear_cross_entropy, in chunks", partial(peers.torch_head, chunked=True)),
    "trl": Implementation("TRL", peers.trl),
    "liger": Implementation("Liger", peers.liger),
    "liger-native": Implementation("Liger, CuTe kernels for Hopper", peers.liger_native),
    "verl": Implementation("verl, Triton", peers.verl),
    "verl-torch": Implementation("verl, torch in chunks", peers.verl_torch),
    "cut-cross-entropy": Implementation(
        "Cut Cross-Entropy (plain cross-entropy)", peers.cut_cross_entropy, "cross_entropy"
    ),
    "quack": Implementation("QuACK (plain cross-entropy)", peers.quack, "cross_entropy"),
    **TRAINERS,
    **ROLLOUTS,
    # Those whose first call may take a minute come last.
    "torchtitan": Implementation("torchtitan's chunked loss", peers.torchtitan),
    "compiled": Implementation("compiled eager", baselines.compiled),
}


def select(patterns: Sequence[str], without: Sequence[str] = ()) -> list[str]:
    """Returns the names that match any of the patterns, as in `ours*`, and none of `without`, in the table's order.

    ValueError where one of `patterns` matches no implementation.
    """
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in IMPLEMENTATIONS):
            raise ValueError(f"{pattern!r} is no implementation; there are {', '.join(IMPLEMENTATIONS)}")
    return [
        name
        for name in IMPLEMENTATIONS
        if any(fnmatch(name, pattern) for pattern in patterns)
        and not any(fnmatch(name, pattern) for pattern in without)
    ]

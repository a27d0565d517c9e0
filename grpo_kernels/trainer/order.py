"""The order in which a run visits its prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache


def take(num_prompts: int, position: int, count: int, seed: int, *, shuffle: bool = True) -> list[int]:
    """Indices of the prompts at position, ..., position + count - 1 of an endless order.

    Each epoch is a permutation of its own, made from (seed, epoch); without `shuffle`, it is 0, ..., num_prompts - 1.
    A function of its arguments alone: a run that resumes needs no more than its position.
    """
    if num_prompts < 1 or position < 0 or count < 0:
        raise ValueError(f"num_prompts={num_prompts}, position={position}, count={count}; expected >= 1, >= 0, >= 0")
    epochs = (divmod(i, num_prompts) for i in range(position, position + count))
    return [_permutation(num_prompts, epoch, seed)[i] if shuffle else i for epoch, i in epochs]


@lru_cache(maxsize=2)  # a batch that crosses an epoch's end needs two
def _permutation(size: int, epoch: int, seed: int) -> Sequence[int]:
    order = list(range(size))
    random.Random(f"{seed} {epoch}").shuffle(order)  # text as seed: each pair has a stream of its own
    return order

"""Calls as the documents have them, for mypy: what a user passes fits the signatures. `make lint` checks this file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from grpo_kernels import GRPOConfig, SamplingMask, Teacher, TopKTeacher, fused_divergence, fused_grpo_loss


def kept_ids(completion_ids: Tensor, of_engine: Sequence[Sequence[Sequence[int]]]) -> list[SamplingMask]:
    """Sets of the guide, lists of an engine, packed tokens, tuples, ranges, padded sequences."""
    sets = [[{int(i), 1, 2} for i in row] for row in completion_ids]
    packed: Iterable[Iterable[int]] = ({1, 2} for _ in range(3))
    return [
        SamplingMask.from_lists(sets),
        SamplingMask.from_lists(of_engine, length=4),
        SamplingMask.from_lists(packed),
        SamplingMask.from_lists([(3, 1), (2,)]),
        SamplingMask.from_lists([[range(5), range(2)]]),
    ]


def entries(of_engine: list[list[dict[int, float]]], pairs: list[list[list[tuple[float, int]]]]) -> list[TopKTeacher]:
    return [TopKTeacher.from_lists(of_engine), TopKTeacher.from_lists(pairs, mode="tail")]


def loss(hidden: Tensor, weight: Tensor, ids: Tensor, mask: SamplingMask) -> tuple[Tensor, dict[str, Tensor]]:
    config = GRPOConfig.preset("dapo", temperature=torch.tensor(0.9))
    out = fused_grpo_loss(hidden, weight, ids, torch.ones(len(ids)), sampling_mask=mask, config=config)
    return out.loss, dict(out.metrics)


def divergence(hidden: Tensor, weight: Tensor) -> Tensor:
    return fused_divergence(hidden, weight, Teacher(hidden.detach(), weight.detach(), top_k=4), temperature=0.5)

"""SamplingMask itself: how it is made, sliced and moved, and what it refuses."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import SamplingMask


def integers(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def lists_of(mask: SamplingMask) -> list[list[int]]:
    return [x.tolist() for x in mask.ids.split(mask.counts.reshape(-1).tolist())]


def test_from_lists():
    mask = SamplingMask.from_lists([[[3, 1], [2]], [[5]]])
    assert mask.shape == (2, 2) and lists_of(mask) == [[1, 3], [2], [5], []]
    assert SamplingMask.from_lists([[[3, 1], [2]], [[5]]], length=3).shape == (2, 3)
    packed = SamplingMask.from_lists([[3, 1], [], [2]])
    assert packed.shape == (3,) and lists_of(packed) == [[1, 3], [], [2]]


def test_from_padded():
    padded = torch.tensor([[[3, -1, 1], [-1, -1, -1]], [[4, 5, 6], [0, -1, -1]]])
    mask = SamplingMask.from_padded(padded)
    assert mask.shape == (2, 2) and lists_of(mask) == [[1, 3], [], [4, 5, 6], [0]]


@pytest.mark.parametrize("rows", [slice(1, 3), slice(None, None, -1), [2, 0], torch.tensor([True, False, True])])
def test_slices_are_those_of_the_lists(rows):
    lists = [[[3, 1], [2]], [[5], []], [[0, 4, 6], [7]]]
    mask = SamplingMask.from_lists(lists)
    chosen = torch.arange(3)[rows if not isinstance(rows, slice) else range(3)[rows]].tolist()
    wanted = [sorted(x) for i in chosen for x in lists[i]]
    assert lists_of(mask[rows]) == wanted and mask[rows].shape == (len(chosen), 2)


def test_it_moves():
    mask = SamplingMask.from_lists([[3, 1]]).to("cpu")
    assert lists_of(mask) == [[1, 3]] and mask.to(torch.device("meta")).ids.device.type == "meta"


WRONG = {
    "float ids": (lambda: SamplingMask(torch.ones(2), integers(2)), TypeError, r"SamplingMask\.ids is torch\.float32"),
    "no tensor": (lambda: SamplingMask([1], integers(1)), TypeError, r"SamplingMask\.ids is a list"),
    "two dimensions": (
        lambda: SamplingMask(integers(1, 2).view(1, 2), integers(2)), ValueError, r"ids has shape \(1, 2\)",
    ),
    "counts (B, T, 1)": (
        lambda: SamplingMask(integers(1), integers(1).view(1, 1, 1)), ValueError, r"counts has shape \(1, 1, 1\)",
    ),
    "too few ids": (lambda: SamplingMask(integers(1), integers(1, 1)), ValueError, "counts add up to 2; expected 1"),
    "negative counts": (lambda: SamplingMask(integers(1), integers(2, -1)), ValueError, "counts holds -1"),
    "negative ids": (lambda: SamplingMask(integers(-3, 1), integers(2)), ValueError, "ids holds -3"),
    "descending": (lambda: SamplingMask(integers(1, 4, 2), integers(1, 2)), ValueError, r"token \[1\] hold 2 after 4"),
    "twice": (
        lambda: SamplingMask(integers(1, 4, 4), integers(1, 2).view(1, 2)), ValueError,
        r"token \[0, 1\] hold 4 after 4",
    ),
    "too short": (lambda: SamplingMask.from_lists([[[1], [2]]], length=1), ValueError, "length=1; expected at least 2"),
    "float padding": (lambda: SamplingMask.from_padded(torch.ones(2, 3)), ValueError, r"kept is torch\.float32"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_it_refuses(case):
    make, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        make()


def call(mask: object, **options) -> object:
    hidden, weight = torch.randn(2, 3, 4), torch.randn(11, 4)
    return gk.fused_grpo_loss(hidden, weight, torch.zeros(2, 3).long(), torch.ones(2), sampling_mask=mask, **options)


def test_what_a_loss_refuses():
    fits = SamplingMask.from_lists([[[1], [2], [10]]] * 2)
    call(fits)
    with pytest.raises(TypeError, match=r"sampling_mask is a Tensor; expected a grpo_kernels\.SamplingMask"):
        call(torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=re.escape("sampling_mask is of tokens (1, 3); expected (2, 3)")):
        call(fits[:1])
    with pytest.raises(ValueError, match=r"sampling_mask holds id 11; expected ids < 11"):
        call(SamplingMask.from_lists([[[1], [2], [11]]] * 2))
    with pytest.raises(ValueError, match=r"sampling_mask was given with static_shapes=True"):
        call(fits, config=gk.GRPOConfig(static_shapes=True))

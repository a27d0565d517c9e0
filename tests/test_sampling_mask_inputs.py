"""SamplingMask itself: how it is made, sliced and moved, and what it refuses."""

from __future__ import annotations

import re

import pytest
import torch
from helpers import MASK_WAYS, set_mask_way
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import SamplingMask
from grpo_kernels.checks import arguments as validate
from grpo_kernels.engine import kept
from grpo_kernels.reference import reference_grpo_loss


def integers(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def lists_of(mask: SamplingMask) -> list[list[int]]:
    return [x.tolist() for x in mask.ids.split(mask.counts.reshape(-1).tolist())]


def test_from_lists_and_from_padded():
    mask = SamplingMask.from_lists([[[3, 1], [2]], [[5]]])
    assert mask.shape == (2, 2) and lists_of(mask) == [[1, 3], [2], [5], []]
    assert SamplingMask.from_lists([[[3, 1], [2]], [[5]]], length=3).shape == (2, 3)
    packed = SamplingMask.from_lists([[3, 1], [], [2]])
    assert packed.shape == (3,) and lists_of(packed) == [[1, 3], [], [2]]
    padded = torch.tensor([[[3, -1, 1], [-1, -1, -1]], [[4, 5, 6], [0, -1, -1]]])
    mask = SamplingMask.from_padded(padded)
    assert mask.shape == (2, 2) and lists_of(mask) == [[1, 3], [], [4, 5, 6], [0]]


BOOLS = [True, False, True]


@pytest.mark.parametrize("rows", [slice(1, 3), slice(None, None, -1), [2, 0], [], BOOLS, torch.tensor(BOOLS)])
def test_slices_are_those_of_the_lists(rows):
    lists = [[[3, 1], [2]], [[5], []], [[0, 4, 6], [7]]]
    mask = SamplingMask.from_lists(lists)
    chosen = range(3)[rows] if isinstance(rows, slice) else [0, 2] if len(rows) == 3 else rows
    wanted = [sorted(x) for i in chosen for x in lists[i]]
    assert lists_of(mask[rows]) == wanted and mask[rows].shape == (len(chosen), 2)


def test_it_moves():
    mask = SamplingMask.from_lists([[3, 1]]).to("cpu")
    assert lists_of(mask) == [[1, 3]] and mask.to(torch.device("meta")).ids.device.type == "meta"


MASK, LISTS, PADDED = SamplingMask, SamplingMask.from_lists, SamplingMask.from_padded
WRONG = [
    (lambda: MASK(torch.ones(2), integers(2)), TypeError, r"SamplingMask\.ids is torch\.float32"),
    (lambda: MASK(integers(1, 2).view(1, 2), integers(2)), ValueError, r"ids has shape \(1, 2\)"),
    (lambda: MASK(integers(1), integers(1).view(1, 1, 1)), ValueError, r"counts has shape \(1, 1, 1\)"),
    (lambda: MASK(integers(1), integers(1, 1)), ValueError, "counts add up to 2; expected 1"),
    (lambda: MASK(integers(1), integers(2, -1)), ValueError, "counts holds -1"),
    (lambda: MASK(integers(-3, 1), integers(2)), ValueError, "ids holds -3"),
    (lambda: MASK(integers(1, 4, 4), integers(1, 2).view(1, 2)), ValueError, r"token \[0, 1\] hold 4 after 4"),
    (lambda: LISTS([[[1], [2]]], length=1), ValueError, "length=1; expected at least 2"),
    (lambda: LISTS([[[1]]], length=1.5), TypeError, "length is a float; expected"),
    (lambda: LISTS([[1.5]]), TypeError, r"kept holds 1\.5; expected integers"),
    (lambda: LISTS([[True]]), TypeError, r"kept holds True; expected integers"),
    (lambda: LISTS(None), TypeError, r"kept is or holds None; expected one list of ids"),
    (lambda: LISTS(["12"]), TypeError, r"kept is or holds '12'; expected one list of ids"),
    (lambda: LISTS([[1, [2]]]), TypeError, "ids beside lists of ids"),
    (lambda: LISTS([[2**31]]), ValueError, r"kept holds 2147483648; .* below 2\^31"),
    (lambda: LISTS([[-1]]), ValueError, r"kept holds -1; expected ids >= 0"),
    (lambda: PADDED(integers(1, 2).view(1, 2), None), TypeError, "padding is a NoneType"),
    (lambda: PADDED(torch.ones(2, 3)), ValueError, r"kept is torch\.float32"),
]


def test_what_it_refuses():
    for make, error, message in WRONG:
        with pytest.raises(error, match=message):
            make()


def masked_call(function: str, mask: object, shape: tuple[int, ...] = (2, 3), **options: object) -> Tensor:
    """The first result of a public function, of a vocabulary of 11 ids."""
    hidden, weight, ids = torch.randn(*shape, 4), torch.randn(11, 4), torch.zeros(shape).long()
    if len(shape) == 1 and function != "fused_logps":
        options["cu_seqlens"] = torch.tensor([0, shape[0]])
    options["sampling_mask"], advantages = mask, torch.ones(shape[:1] if len(shape) > 1 else 1)
    if function == "fused_grpo_loss":
        return gk.fused_grpo_loss(hidden, weight, ids, advantages, **options).loss
    if function == "fused_logps":
        return gk.fused_logps(hidden, weight, ids, **options)[0]
    if function == "fused_policy_loss":
        return gk.fused_policy_loss(hidden, weight, ids, lambda chunk: chunk.logps.sum(), **options)
    if function == "grpo_loss_from_logits":
        return gk.grpo_loss_from_logits(hidden @ weight.T, ids, advantages, **options).loss
    return reference_grpo_loss(hidden, weight, ids, advantages, **options).loss


FUNCTIONS = ("fused_grpo_loss", "fused_logps", "fused_policy_loss", "grpo_loss_from_logits")
FITS = [[[1], [2], [10]]] * 2


@pytest.mark.parametrize("function", [*FUNCTIONS, "reference"])
def test_what_a_loss_refuses(function):
    fits = SamplingMask.from_lists(FITS)
    assert masked_call(function, fits).isfinite().all()
    wrong = [fits[:1], SamplingMask(fits.ids, fits.counts.T), SamplingMask(fits.ids, fits.counts.flatten())]
    for mask in wrong:
        message = f"sampling_mask is of tokens {tuple(mask.shape)}; expected (2, 3)"
        with pytest.raises(ValueError, match=re.escape(message)):
            masked_call(function, mask)
    with pytest.raises(ValueError, match=re.escape("sampling_mask is of tokens (2, 3); expected (6,)")):
        masked_call(function, fits, shape=(6,))
    with pytest.raises(ValueError, match=r"holds( id)? 11; expected ids < 11"):
        masked_call(function, SamplingMask.from_lists([[[1], [2], [11]]] * 2))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_a_fused_loss_refuses_besides(function):
    fits = SamplingMask.from_lists(FITS)
    with pytest.raises(TypeError, match=r"sampling_mask is a Tensor; expected a grpo_kernels\.SamplingMask"):
        masked_call(function, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"sampling_mask is on meta; expected cpu like the other inputs"):
        masked_call(function, fits.to("meta"))
    # What was put into the tensors after they were looked at.
    mask = SamplingMask.from_lists([[[1, 5], [2], [10]]] * 2)
    mask.ids[0] = 6
    with pytest.raises(ValueError, match=re.escape("SamplingMask.ids of token [0, 0] hold 5 after 6")):
        masked_call(function, mask)
    mask.ids[0], mask.counts[0, 0] = 1, 3
    with pytest.raises(ValueError, match=r"SamplingMask\.counts add up to 9; expected 8"):
        masked_call(function, mask)
    if function == "fused_grpo_loss":
        with pytest.raises(ValueError, match=r"sampling_mask was given with static_shapes=True"):
            masked_call(function, fits, config=gk.GRPOConfig(static_shapes=True))


@pytest.mark.parametrize("way", MASK_WAYS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_ids_outside_of_the_vocabulary_where_nobody_looks(function, way, monkeypatch):
    """As on a GPU without GRPO_KERNELS_DEBUG: NaN, and no memory outside of the tensors is touched."""
    set_mask_way(monkeypatch, way, 11)
    for module in (validate, kept):
        monkeypatch.setattr(module, "checks_values", lambda device: False)
    for wrong in (11, 10**6, 2**31 - 1, -1, -(2**31)):
        mask = SamplingMask(integers(1, 2, *sorted([3, wrong])), torch.tensor([[1, 1, 2]]))
        found = masked_call(function, mask, shape=(1, 3))
        if function == "fused_logps":
            assert found.isnan().tolist() == [[False, False, True]]
        else:
            assert found.isnan()

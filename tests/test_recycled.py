"""Memory of large tensors on a CPU, which is used again when they are freed."""

from __future__ import annotations

import mmap
import threading
import weakref

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.engine import recycled

CPU = torch.device("cpu")
LARGE = (recycled.LEAST_BYTES // 4 // 64, 64)  # of float32


@pytest.fixture(autouse=True)
def nothing_kept():
    recycled.forget()
    yield
    recycled.forget()


def empty(*shape, dtype=torch.float32):
    return recycled.empty(shape or LARGE, dtype, CPU)


def test_the_memory_of_a_freed_tensor_is_used_again():
    x = empty()
    address = x.data_ptr()
    x.fill_(1.0)
    del x
    y = empty(*LARGE, dtype=torch.int32)
    assert y.data_ptr() == address and y.shape == LARGE and y.dtype == torch.int32 and y.is_contiguous()


def test_not_while_a_view_of_it_is_alive():
    x = empty().fill_(1.0)
    row, columns = x[3], x.T.detach()
    address = x.data_ptr()
    del x
    y = empty().fill_(2.0)
    assert y.data_ptr() != address and (row == 1.0).all() and (columns == 1.0).all()
    del row, columns
    assert empty().data_ptr() == address


def test_two_tensors_never_share_a_block():
    found = [empty() for _ in range(3)]
    addresses = {x.data_ptr() for x in found}
    del found
    again = [empty() for _ in range(3)]
    assert {x.data_ptr() for x in again} == addresses and len(addresses) == 3


def test_a_block_is_for_sizes_near_its_own():
    rows, width = LARGE
    small = empty()
    address = small.data_ptr()
    del small
    assert empty(2 * rows, width).data_ptr() != address, "too small"
    recycled.forget()
    large = empty(3 * rows, width)
    address = large.data_ptr()
    del large
    assert empty().data_ptr() != address, "most of it would lie idle"
    assert empty(2 * rows, width).data_ptr() == address


def test_few_blocks_are_kept():
    for x in [empty() for _ in range(recycled._MOST_BLOCKS + 3)]:
        del x
    assert len(recycled._kept) <= recycled._MOST_BLOCKS


def test_no_more_than_an_eighth_of_the_memory_is_kept(monkeypatch):
    monkeypatch.setattr(recycled, "_machine_memory", lambda: 8 * 2 * recycled.LEAST_BYTES + 9)
    found = [empty() for _ in range(3)]
    latest = {x.data_ptr() for x in found[1:]}
    while found:
        del found[0]
    assert {block.data_ptr() for block in recycled._kept} == latest
    empty(3 * LARGE[0], LARGE[1])
    assert not recycled._kept, "the latest is larger than all that may be kept"


def test_small_tensors_other_devices_and_systems_have_torchs_own_memory(monkeypatch):
    for x in (empty(4, 4), recycled.empty(LARGE, torch.float32, torch.device("meta"))):
        assert x.shape in ((4, 4), LARGE)
        del x
    monkeypatch.delattr(mmap, "MADV_FREE")
    empty()
    assert not recycled._kept


def test_what_is_kept_goes_before_memory_runs_out(monkeypatch):
    empty()
    assert len(recycled._kept) == 1
    original, kept, asked = torch.empty, weakref.ref(recycled._kept[0]), []

    def full(*shape, **options):
        asked.append(kept() is not None)  # no frame may hold it either
        if asked[-1]:
            raise RuntimeError("can't allocate memory")
        return original(*shape, **options)

    monkeypatch.setattr(torch, "empty", full)
    assert empty(4 * LARGE[0], LARGE[1]).shape[0] == 4 * LARGE[0] and asked == [True, False]


def test_from_several_threads():
    """Each fills its tensor, waits for the others, and finds its own number in it."""
    barrier, wrong = threading.Barrier(4), []

    def work(number):
        for i in range(5):
            x = empty().fill_(10 * number + i)
            barrier.wait()
            if not (x == 10 * number + i).all():
                wrong.append(number)
            barrier.wait()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("kept_ids", [0, 3])
def test_gradients_are_ordinary_tensors(kept_ids):
    """However large: their storage can be resized, as FSDP does, and the scratch of the next call is not theirs."""
    vocab, width = 2 * LARGE[0], 32
    hidden, weight = torch.randn(2, 3, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    ids, advantages = torch.randint(vocab, (2, 3)), torch.tensor([1.0, -1.0])
    options = {}
    if kept_ids:
        options["sampling_mask"] = gk.SamplingMask.from_lists([[{int(i), 1, 2} for i in row] for row in ids])
    gk.fused_grpo_loss(hidden, weight, ids, advantages, **options).loss.backward()
    assert weight.grad.data_ptr() not in {block.data_ptr() for block in recycled._kept}
    weight.grad.untyped_storage().resize_(0)

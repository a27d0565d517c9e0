"""The scratch of the engine on a CPU, which the next call uses again, and gradients, which no call does."""

from __future__ import annotations

import threading

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.engine import memory

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_kept():
    memory._last_on_cpu.clear()
    yield
    memory._last_on_cpu.clear()


def scratch(vocab_size=64, rows=8, dtype=torch.float32):
    return memory.Scratch(vocab_size, rows, rows, dtype, dtype, CPU)


def address_of_a_call(**options):
    used = scratch(**options)
    address = used.logits(8).data_ptr()
    used.release()
    return address


def test_the_next_call_uses_the_logits_of_the_last_one_if_they_suffice():
    first = address_of_a_call()
    assert address_of_a_call() == first == address_of_a_call(vocab_size=32) == address_of_a_call(dtype=torch.bfloat16)
    (kept,) = memory._last_on_cpu
    assert address_of_a_call(vocab_size=6400) and kept.nbytes() < memory._last_on_cpu[0].nbytes()


def test_no_two_calls_share_it_at_a_time():
    one, other = scratch(), scratch()
    assert one.logits(8).data_ptr() != other.logits(8).data_ptr()
    one.release(), other.release()
    assert len(memory._last_on_cpu) == 1


def test_a_call_that_fails_keeps_nothing():
    used = scratch()
    used.logits(8)
    del used
    assert not memory._last_on_cpu


def test_after_inference_mode_and_from_several_threads():
    hidden, weight = torch.randn(2, 3, 16), torch.randn(50, 16)
    ids = torch.randint(50, (2, 3))
    with torch.inference_mode():
        expected = gk.fused_logps(hidden, weight, ids)[0].clone()
    found = []

    def work():
        trained = weight.clone().requires_grad_()
        for _ in range(5):
            gk.fused_grpo_loss(hidden, trained, ids, torch.tensor([1.0, -1.0])).loss.backward()
            found.append(gk.fused_logps(hidden, trained, ids)[0].detach())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20 and all(torch.equal(x, expected) for x in found)


@pytest.mark.parametrize("kept_ids", [0, 3])
def test_gradients_are_ordinary_tensors(kept_ids):
    """However large: their storage can be resized, as FSDP does, and the scratch of the next call is not theirs."""
    vocab, width = 2**18, 32
    hidden, weight = torch.randn(2, 3, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    ids, advantages = torch.randint(vocab, (2, 3)), torch.tensor([1.0, -1.0])
    options = {}
    if kept_ids:
        options["sampling_mask"] = gk.SamplingMask.from_lists([[{int(i), 1, 2} for i in row] for row in ids])
    gk.fused_grpo_loss(hidden, weight, ids, advantages, **options).loss.backward()
    assert weight.grad.data_ptr() not in {block.data_ptr() for block in memory._last_on_cpu}
    weight.grad.untyped_storage().resize_(0)

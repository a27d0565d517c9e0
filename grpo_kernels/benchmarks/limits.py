"""What the hardware would allow: FLOPs, bytes and seconds of a dense case on a GPU of DEVICES.

    python -m grpo_kernels.benchmarks.limits --device H200 --shapes llama-3-8b:16384 --mode step

A product takes the longer of its multiply-adds and its memory traffic. A pass over logits is memory traffic. Caches are
ideal, each operand moves once per chunk, parts follow one another, and launches, exponentials and what is O(N) are left
out: a lower limit.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..head.memory import default_logits_dtype, rows_of_chunk
from .cases import DTYPES, MODES, Case, make_case
from .show import table

CUDA = torch.device("cuda")
ROW_RATE = 0.9  # of a copy's bandwidth, which a row kernel reaches: assumed


class Device(NamedTuple):
    """A GPU, with rates of large matrix products and of a copy, which reads and writes."""

    name: str
    half_tflops: float
    single_tflops: float
    terabytes_per_second: float
    multiprocessors: int
    source: str  # where the rates are from


DEVICES = {
    "H200": Device("NVIDIA H200", 790, 54, 4.3, 132, "products and copies measured by others"),
    "H100": Device("NVIDIA H100 80GB HBM3", 790, 54, 3.0, 132, "as an H200; copies 0.9 of the datasheet"),
    "A100": Device("NVIDIA A100-SXM4-80GB", 250, 15.6, 1.6, 108, "datasheet times 0.8"),
    "B200": Device("NVIDIA B200", 1800, 60, 6.4, 148, "datasheet times 0.8"),
}


class Prediction(NamedTuple):
    seconds: float
    flops: int
    bytes: int


class _Part(NamedTuple):
    """A matrix product, or without FLOPs a pass over memory at `rate` of a copy's bandwidth."""

    flops: int
    bytes: int
    rate: float = 1.0


def predict(case: Case, device: Device, way: str = "rows", *, pairs: int = 64, teacher: float = 0.0) -> Prediction:
    """What a case should cost at least: "rows", logits in chunks, a row kernel and two products, as this library does;
    "floor", the bare matrix products over all tokens at once; "sparse", the step with config.sparse_backward where so
    many `pairs` of a token are left. teacher: its width over the policy's; 0: there is none."""
    size, wide = case.torch_dtype.itemsize, default_logits_dtype(case.torch_dtype, CUDA)
    heads = [case, replace(case, hidden_size=int(teacher * case.hidden_size))] if teacher else [case]
    if way == "floor":
        parts = [*(_logits(head, 1, size) for head in heads), *_gradients(case, case.tokens, size)]
    else:
        rows = rows_of_chunk(
            case.tokens, case.hidden_size, case.vocab_size * wide.itemsize * len(heads), case.torch_dtype, CUDA,
            rounds=case.mode == "step" and size == 2, multiprocessors=device.multiprocessors,
        )  # fmt: skip
        parts = [_logits(head, math.ceil(case.tokens / rows), wide.itemsize) for head in heads]
        if way == "sparse":
            parts += _pairs(case, wide.itemsize, pairs)
        else:  # both rows are read for the divergence, and again for the gradient
            passes, written = (1, 0) if case.mode == "forward" else (2 if teacher else 1, size)
            moved = case.tokens * case.vocab_size * (passes * len(heads) * wide.itemsize + written)
            parts += [_Part(0, moved, ROW_RATE), *_gradients(case, rows, size)]
    rate = 1e12 * (device.single_tflops if case.dtype == "float32" else device.half_tflops)
    bandwidth = 1e12 * device.terabytes_per_second
    seconds = sum(max(part.flops / rate, part.bytes / (part.rate * bandwidth)) for part in parts)
    return Prediction(seconds, sum(part.flops for part in parts), sum(part.bytes for part in parts))


def _logits(case: Case, chunks: int, logits_bytes: int) -> _Part:
    """The product of hidden states and weight, which is read once per chunk."""
    width, vocab = case.hidden_size, case.vocab_size
    operands = (case.tokens * width + chunks * width * vocab) * case.torch_dtype.itemsize
    return _Part(2 * case.tokens * width * vocab, case.tokens * vocab * logits_bytes + operands)


def _pairs(case: Case, logits_bytes: int, pairs: int) -> list[_Part]:
    """Two reads of the logits, for statistics and for pairs; each product reads a row of an operand per pair."""
    reads = _Part(0, 2 * case.tokens * case.vocab_size * logits_bytes, ROW_RATE)
    products = {"forward": 0, "frozen": 1, "step": 2}[case.mode]
    written = case.tokens + (case.vocab_size if case.mode == "step" else 0)
    gathered = products * case.tokens * pairs + written
    return [reads, _Part(0, gathered * case.hidden_size * case.torch_dtype.itemsize)]


def _gradients(case: Case, rows: int, dlogits_bytes: int) -> list[_Part]:
    """The products of dhidden and, where the head is trained, dweight, `rows` tokens at a time."""
    if case.mode == "forward":
        return []
    chunks, size, weight = math.ceil(case.tokens / rows), case.torch_dtype.itemsize, case.hidden_size * case.vocab_size
    flops, moved = 2 * case.tokens * weight, case.tokens * (case.vocab_size * dlogits_bytes + case.hidden_size * size)
    dhidden = _Part(flops, moved + chunks * weight * size)
    if case.mode == "frozen":
        return [dhidden]
    if chunks == 1:
        return [dhidden, _Part(flops, moved + weight * size)]
    return [dhidden, _Part(flops, moved + (2 * chunks - 1) * weight * size)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=DEVICES, default="H200")
    parser.add_argument("--shapes", nargs="+", default=["llama-3-8b:16384", "qwen2.5-1.5b:16384"])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--mode", choices=MODES, default="step")
    parser.add_argument("--pairs", type=int, nargs="+", default=[32, 64, 256], help="of a token, with sparse_backward")
    parser.add_argument("--teachers", type=float, nargs="+", default=[1, 4], help="widths, of the policy's")
    chosen = parser.parse_args(argv)
    device = DEVICES[chosen.device]
    for shape in chosen.shapes:
        case = make_case(shape, chosen.dtype, mode=chosen.mode)
        ways: dict[str, dict[str, Any]] = {"floor": {"way": "floor"}, "rows": {}}
        ways |= {f"sparse, {pairs} pairs": {"way": "sparse", "pairs": pairs} for pairs in chosen.pairs}
        for teacher in chosen.teachers:
            ways[f"rows, a teacher of {teacher:g} times the width, of its own floor"] = {"teacher": teacher}
        rows = []
        for name, options in ways.items():
            one = predict(case, device, **options)
            floor = predict(case, device, **(options | {"way": "floor"}))
            cells = one.flops / 1e12, one.bytes / 1e9, one.seconds * 1e3, one.seconds / floor.seconds
            rows.append([name, *(f"{cell:.2f}" for cell in cells)])
        print(f"{case} on {device.name} ({device.source})\n")
        print(table(("", "TFLOP", "GB", "ms", "of floor"), rows), end="\n\n")


if __name__ == "__main__":
    main()

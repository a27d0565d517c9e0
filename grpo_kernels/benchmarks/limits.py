"""What the hardware would allow: FLOPs, bytes and seconds of a case on a GPU of DEVICES.

    python -m grpo_kernels.benchmarks.limits --device H200 --shapes llama-3-8b:16384 --mode step

A product takes the longer of its multiply-adds and its memory traffic. A pass over logits is memory traffic. Caches are
ideal, each operand moves once per chunk, parts follow one another, and launches, exponentials and what is O(N) are left
out: a lower limit.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..engine.memory import chunk_sizes, default_logits_dtype, gpu_capacity
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
    gigabytes: float
    multiprocessors: int
    source: str  # where the rates are from


DEVICES = {
    "H200": Device("NVIDIA H200", 790, 54, 4.3, 141, 132, "products and copies measured by others"),
    "H100": Device("NVIDIA H100 80GB HBM3", 790, 54, 3.0, 80, 132, "as an H200; copies 0.9 of the datasheet"),
    "A100": Device("NVIDIA A100-SXM4-80GB", 250, 15.6, 1.6, 80, 108, "datasheet times 0.8"),
    "B200": Device("NVIDIA B200", 1800, 60, 6.4, 180, 148, "datasheet times 0.8"),
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


def predict(case: Case, device: Device, way: str = "rows") -> Prediction:
    """What a way of `ways` should cost at least."""
    parts = {"floor": _floor, "rows": _rows, "kept": _kept}[way](case, device)
    rate = 1e12 * (device.single_tflops if case.dtype == "float32" else device.half_tflops)
    bandwidth = 1e12 * device.terabytes_per_second
    seconds = sum(max(part.flops / rate, part.bytes / (part.rate * bandwidth)) for part in parts)
    return Prediction(seconds, sum(part.flops for part in parts), sum(part.bytes for part in parts))


def ways(case: Case) -> list[str]:
    """What there is a model of.

    "floor": the matrix products of the mode, over all tokens at once. "rows": this library, logits, a row kernel and
    two products. "kept": this library with a sampling mask, which reads a row of the weight and one of the hidden
    states for each kept id.
    """
    return ["floor", "rows", *(["kept"] if case.kept_ids else [])]


def _floor(case: Case, device: Device) -> list[_Part]:
    size = case.torch_dtype.itemsize
    logits = _logits(case, case.tokens, 1, size)
    return [logits, *_gradients(case, case.tokens, case.tokens, size)]


def _rows(case: Case, device: Device, tokens: int | None = None) -> list[_Part]:
    """Tokens with a gradient, then those that are scored alone."""
    tokens = case.tokens if tokens is None else tokens
    active = 0 if case.mode == "forward" else tokens - idle_tokens(case)
    logits_dtype, grad_dtype = default_logits_dtype(case.torch_dtype, CUDA), case.torch_dtype
    capacity = gpu_capacity(1e9 * device.gigabytes, device.multiprocessors)
    wants, shape = (case.mode != "forward", case.mode == "step", False), (case.vocab_size, case.hidden_size)
    sizes = chunk_sizes(tokens, shape, logits_dtype, grad_dtype, CUDA, wants, capacity=capacity)
    parts = []
    for count, written in ((active, grad_dtype.itemsize), (tokens - active, 0)):
        parts.append(_logits(case, count, math.ceil(count / sizes.logits), logits_dtype.itemsize))
        parts.append(_Part(0, count * case.vocab_size * (logits_dtype.itemsize + written), ROW_RATE))
    return [*parts, *_gradients(case, active, sizes.products, grad_dtype.itemsize)]


def _kept(case: Case, device: Device) -> list[_Part]:
    """Products over kept ids, bound by memory, where each row is read every time; tokens without a mask as `_rows`."""
    masked = round(case.tokens * case.masked_share)
    pairs, products = masked * case.kept_ids, {"step": 3, "frozen": 2, "forward": 1}[case.mode]
    moved = products * (pairs + masked) * case.hidden_size
    moved += case.vocab_size * case.hidden_size * (case.mode == "step")
    kept = _Part(products * 2 * pairs * case.hidden_size, moved * case.torch_dtype.itemsize, ROW_RATE)
    return [kept, *(_rows(case, device, case.tokens - masked) if masked < case.tokens else [])]


def _logits(case: Case, tokens: int, chunks: int, logits_bytes: int) -> _Part:
    """The product of hidden states and weight, which is read once per chunk."""
    width, vocab = case.hidden_size, case.vocab_size
    operands = (tokens * width + chunks * width * vocab) * case.torch_dtype.itemsize
    return _Part(2 * tokens * width * vocab, tokens * vocab * logits_bytes + operands)


def _gradients(case: Case, tokens: int, rows: int, dlogits_bytes: int) -> list[_Part]:
    """The products of dhidden and, where the head is trained, dweight, `rows` tokens at a time."""
    if tokens == 0 or case.mode == "forward":
        return []
    chunks, size, weight = math.ceil(tokens / rows), case.torch_dtype.itemsize, case.hidden_size * case.vocab_size
    flops, moved = 2 * tokens * weight, tokens * (case.vocab_size * dlogits_bytes + case.hidden_size * size)
    dhidden = _Part(flops, moved + chunks * weight * size)
    if case.mode == "frozen":
        return [dhidden]
    if chunks == 1:
        return [dhidden, _Part(flops, moved + weight * size)]
    sums = (2 * chunks - 1) * weight * 4  # in float32, which are rounded in the end
    return [dhidden, _Part(flops, moved + sums), _Part(0, weight * (4 + size))]


def idle_tokens(case: Case) -> int:
    """Zero-gradient tokens: those of prompts with equal rewards, where there is no KL term."""
    per_prompt, share = case.length * case.generations, 1.0 if case.generations == 1 else case.idle_share
    return 0 if case.beta != 0 else round(case.tokens // per_prompt * share) * per_prompt


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=DEVICES, default="H200")
    parser.add_argument("--shapes", nargs="+", default=["llama-3-8b:16384", "qwen2.5-1.5b:16384"])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--mode", choices=MODES, default="step")
    parser.add_argument("--kept-ids", type=int, default=0, help="of a sampling mask, per token; default: no mask")
    chosen = parser.parse_args(argv)
    device = DEVICES[chosen.device]
    for shape in chosen.shapes:
        case = make_case(shape, chosen.dtype, mode=chosen.mode, kept_ids=chosen.kept_ids)
        floor, rows = predict(case, device, "floor"), []
        for way in ways(case):
            one = predict(case, device, way)
            cells = one.flops / 1e12, one.bytes / 1e9, one.seconds * 1e3, one.seconds / floor.seconds
            rows.append([way, *(f"{cell:.2f}" for cell in cells)])
        print(f"{case} on {device.name} ({device.source})\n")
        print(table(("", "TFLOP", "GB", "ms", "of floor"), rows), end="\n\n")


if __name__ == "__main__":
    main()

"""Tiles of hidden weight^T in registers: what kernels with the softmax folded into a matrix product share.

A program owns one tile of tokens and a contiguous part of the vocabulary's tiles. It loops over these, inside over H,
and hands each finished tile to its epilogue, a plain function; what a row has gathered stays in registers until the
part ends. The two loops are flattened into one: the first loads of the next tile travel while the epilogue computes.
Hence no `if` in their bodies, on which that pass of Triton 3.4 and 3.7 fails; nor do these versions specialise warps
for such a loop on sm_90.

On an H200 a tile of 128 x 256 by 8 warps asks the L2 cache for 24 bytes per cycle and multiprocessor at full rate, and
its sums are half of the registers: one program per multiprocessor, whose epilogue no product overlaps. With 128 x 128
by 4 warps two programs take turns, but ask for 32 bytes, about what the cache delivers. `grpo-kernels tune` measures
both.

Programs that run at the same time form a block: token tiles of about GROUP_BYTES by some parts of the vocabulary. The
hidden states of a group stay in the L2 cache; a tile of the weight is read from memory once per group.

Tiles come through tensor descriptors (TMA) or pointers. Past the end they hold zeros, or the last row again: whoever
uses a tile masks it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..launch import MatmulLaunch, matmul_launch
from .maths import softcap

GROUP_BYTES = 16 << 20  # a third to a half of the L2 cache of data-center GPUs
MAX_PARTS = 256  # bounds the memory of partial results
PROGRAM_START = 0.05  # filling the pipeline of a program, in tiles
COMBINED_ROWS, COMBINED_PARTS = 16, 32  # a program that combines parts: its rows, the parts that it loads at once
SINGLE_BLOCKS = (64, 64, 32)  # block_m, block_v, block_h at most, for float32
INTERPRETER_PARTS = 3  # so that the interpreter combines parts too


@triton.jit
def place(token_tiles, parts, group):
    """(token tile, part) of this program: all parts for `group` token tiles, the token tile fastest."""
    program = tl.program_id(0)
    first = program // (group * parts) * group
    tiles = tl.minimum(token_tiles - first, group)
    inside = program - first * parts
    return first + inside % tiles, inside // tiles


@triton.jit
def product(
    hidden, weight, first_row, first_column, count, vocab, width, hidden_row_stride, weight_row_stride,
    TMA: tl.constexpr, EVEN_H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """hidden[first_row :] weight[first_column :]^T, (BLOCK_M, BLOCK_V) float32."""
    tl.assume(width > 0)  # or the flattened loop gets a second copy of the epilogue, for tiles without a product
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    if TMA:
        for first in range(0, width, BLOCK_H):
            h = hidden.load([first_row, first])
            w = weight.load([first_column, first])
            acc = tl.dot(h, w.T, acc, input_precision="ieee")
    else:
        rows = tl.minimum(first_row + tl.arange(0, BLOCK_M), count - 1).to(tl.int64)
        columns = tl.minimum(first_column + tl.arange(0, BLOCK_V), vocab - 1).to(tl.int64)
        inner = tl.arange(0, BLOCK_H)
        h_at = hidden + rows[:, None] * hidden_row_stride + inner[None, :]
        w_at = weight + columns[None, :] * weight_row_stride + inner[:, None]
        for first in range(0, width, BLOCK_H):
            if EVEN_H:
                h = tl.load(h_at + first)
                w = tl.load(w_at + first)
            else:
                left = first + inner < width
                h = tl.load(h_at + first, mask=left[None, :], other=0.0)
                w = tl.load(w_at + first, mask=left[:, None], other=0.0)
            acc = tl.dot(h, w, acc, input_precision="ieee")
    return acc


@triton.jit
def quarters(acc):
    """A tile (BLOCK_M, BLOCK_V) as four, left to right; every column stays in its threads.

    An epilogue takes them in turn: it needs several registers per logit, and a whole tile would spill.
    """
    half: tl.constexpr = acc.shape[1] // 2
    left, right = acc.reshape(acc.shape[0], 2, half).permute(0, 2, 1).split()
    first, second = left.reshape(acc.shape[0], 2, half // 2).permute(0, 2, 1).split()
    third, fourth = right.reshape(acc.shape[0], 2, half // 2).permute(0, 2, 1).split()
    return first, second, third, fourth


@triton.jit
def column_of(ids, vocab):
    """Sampled ids as 32-bit columns, which a tile compares with its own at half the cost; -1 outside the vocabulary."""
    return tl.where((ids >= 0) & (ids < vocab), ids, -1).to(tl.int32)


@triton.jit
def is_id(ids, first_column, WIDTH: tl.constexpr):
    """(BLOCK_M, WIDTH): where the sampled ids are among the columns from `first_column` on."""
    return tl.arange(0, WIDTH)[None, :] == (ids - first_column)[:, None]


@triton.jit
def to_logits(acc, bias, columns, vocab, p, CAPPED: tl.constexpr, EVEN_V: tl.constexpr):
    """(y, slope of the softcap) of a tile; y is -inf past the end of the vocabulary."""
    if bias is not None:
        acc += tl.load(bias + columns, mask=columns < vocab, other=0.0).to(tl.float32)[None, :]
    y, slope = softcap(acc, p.logit_scale, p.softcap, CAPPED)
    if not EVEN_V:
        y = tl.where((columns < vocab)[None, :], y, -float("inf"))
    return y, slope


@triton.jit
def part_block(partials, rows, live, count, first, parts, PARTS: tl.constexpr):
    """(pointers, mask) of parts (PARTS, ROWS) from `first` on, of one plane (parts, count) of partial results."""
    part = first + tl.arange(0, PARTS)
    at = partials + part.to(tl.int64)[:, None] * count + rows[None, :]
    return at, (part < parts)[:, None] & live[None, :]


class Split(NamedTuple):
    """The grid: `programs` of one token tile and up to `per_part` of the vocabulary's tiles each."""

    programs: int
    parts: int
    per_part: int
    group: int


def split(launch: MatmulLaunch, device: torch.device, count: int, vocab: int, row_bytes: int) -> Split:
    """Parts that fill whole waves of programs, and the token tiles that share a group."""
    token_tiles, tiles = triton.cdiv(count, launch.block_m), triton.cdiv(vocab, launch.block_v)
    if device.type == "cpu":
        per_part = triton.cdiv(tiles, INTERPRETER_PARTS)
    else:
        # 128 accumulators per thread leave room for 8 warps on a multiprocessor.
        slots = _multiprocessors(device) * max(1, 8 // launch.num_warps)
        per_part = _tiles_per_part(token_tiles, tiles, slots)
    parts = triton.cdiv(tiles, per_part)
    return Split(token_tiles * parts, parts, per_part, max(1, GROUP_BYTES // (launch.block_m * row_bytes)))


@cache
def _tiles_per_part(token_tiles: int, tiles: int, slots: int) -> int:
    """Least waves x length of a program."""

    def time(per_part: int) -> float:
        return triton.cdiv(token_tiles * triton.cdiv(tiles, per_part), slots) * (per_part + PROGRAM_START)

    return min(range(triton.cdiv(tiles, MAX_PARTS), tiles + 1), key=time)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class Product(NamedTuple):
    """A product hidden weight^T as its kernels are launched."""

    grid: tuple[int]
    operands: tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor]
    numbers: tuple[int, ...]  # count, vocab, width, hidden_row_stride, weight_row_stride, parts, per_part, group
    parts: int
    options: dict[str, int | bool]


def prepare(kernel: str, hidden: Tensor, weight: Tensor) -> Product:
    """Launch arguments of `kernel`, from its entry in the launch table."""
    (count, width), vocab = hidden.shape, weight.shape[0]
    launch = matmul_launch(kernel, hidden.device, width, vocab, hidden.dtype)
    if hidden.dtype == torch.float32:  # no tensor cores: tiles for plain multiply-adds
        m, v, h = (min(given, limit) for given, limit in zip(launch[:3], SINGLE_BLOCKS, strict=True))
        launch = MatmulLaunch(m, v, h, launch.num_warps, num_stages=min(launch.num_stages, 2), tma=False)
    work = split(launch, hidden.device, count, vocab, width * hidden.element_size())
    tma = launch.tma and _describable(hidden) and _describable(weight)
    operands: tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor] = hidden, weight
    if tma:
        operands = (
            TensorDescriptor.from_tensor(hidden, [launch.block_m, launch.block_h]),
            TensorDescriptor.from_tensor(weight, [launch.block_v, launch.block_h]),
        )
    options = dict(
        TMA=tma,
        EVEN_H=width % launch.block_h == 0,
        EVEN_V=vocab % launch.block_v == 0,
        BLOCK_M=launch.block_m,
        BLOCK_V=launch.block_v,
        BLOCK_H=launch.block_h,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    numbers = (count, vocab, width, hidden.stride(0), weight.stride(0), work.parts, work.per_part, work.group)
    return Product((work.programs,), operands, numbers, work.parts, options)


def _describable(x: Tensor) -> bool:
    """What the tensor memory accelerator asks of a matrix."""
    row_stride = x.stride(0) * x.element_size()
    return x.numel() > 0 and x.data_ptr() % 16 == 0 and row_stride % 16 == 0 and x.stride(0) >= x.shape[1]

"""Tiles of hidden weight^T in registers: what kernels with the softmax folded into a matrix product share.

A program owns one tile of tokens and a contiguous part of the vocabulary's tiles. It loops over these, inside over H,
and hands each finished tile to its epilogue, a plain function; what a row has gathered stays in registers until the
part ends. The two loops are flattened into one: the first loads of the next tile travel while the epilogue computes.
Hence no `if` in their bodies, on which that pass of Triton 3.4 and 3.7 fails; nor do these versions specialise warps
for such a loop on sm_90.

On an H200 a tile of 128 x 256 by 8 warps asks the L2 cache for 24 bytes per cycle and multiprocessor at full rate, and
its sums are half of the registers: one program per multiprocessor, whose epilogue no product overlaps. With 128 x 128
by 4 warps two programs take turns, but ask for 32 bytes, about what the cache delivers.

Programs that run at the same time form a block: token tiles of about GROUP_BYTES by some parts of the vocabulary. The
hidden states of a group stay in the L2 cache; a tile of the weight is read from memory once per group.

Tiles come through tensor descriptors (TMA). Past the end they hold zeros: whoever uses a tile masks it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..launch import MatmulLaunch, launch_of
from ..operations import HeadChunk, rows_for_tma
from .maths import INV_LN2, softcap
from .rows import logit_scales

GROUP_BYTES = 16 << 20  # a third to a half of the L2 cache of data-center GPUs
FEWEST_TILES = 2  # of a part: filling the pipeline of a program takes a twentieth of a tile's time
# A program that combines parts: its rows, the parts that it loads at once.
COMBINED_ROWS: tl.constexpr = tl.constexpr(16)
COMBINED_PARTS: tl.constexpr = tl.constexpr(32)
INTERPRETER_PARTS = 3  # so that the interpreter combines parts too


class Head(NamedTuple):
    """What the lm_head determines."""

    bias: Tensor | None
    vocab: int
    width: int
    hidden_row_stride: int
    weight_row_stride: int
    logit_scale: float
    softcap: float


class Tiles(NamedTuple):
    """How a product is compiled."""

    capped: bool  # the logits have a softcap
    even_v: bool  # the vocabulary is a multiple of block_v
    block_m: int
    block_v: int
    block_h: int


class TileRows(NamedTuple):
    """The rows of a tile of tokens, (BLOCK_M,) each."""

    at: Any  # places
    live: Any
    ids: Any  # column_of the sampled ids
    to_z: Any
    to_exponent: Any


@triton.jit
def rows_of_tile(tile, ids, temperature, count, head, TILES: tl.constexpr):
    at = tile * TILES.block_m + tl.arange(0, TILES.block_m)
    live = at < count
    id_ = column_of(tl.load(ids + at, mask=live, other=-1), head.vocab)
    to_z, _dz_du = logit_scales(head, tl.load(temperature + at, mask=live, other=1.0), TILES.capped)
    return TileRows(at, live, id_, to_z, (to_z * INV_LN2).to(tl.float32))


@triton.jit
def tile_of_program(group):
    """Returns (token tile, part) of a program of the grid (token tiles, parts), in the order in which programs start.

    All parts for `group` token tiles, the token tile fastest.
    """
    parts = tl.num_programs(1)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    first = program // (group * parts) * group
    tiles = tl.minimum(tl.num_programs(0) - first, group)
    inside = program - first * parts
    return first + inside % tiles, inside // tiles


@triton.jit
def product(hidden, weight, first_row, first_column, width, TILES: tl.constexpr):
    """Returns hidden[first_row :] weight[first_column :]^T, (BLOCK_M, BLOCK_V) float32."""
    BLOCK_M: tl.constexpr = TILES.block_m
    BLOCK_V: tl.constexpr = TILES.block_v
    tl.assume(width > 0)  # or the flattened loop gets a second copy of the epilogue, for tiles without a product
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for first in range(0, width, TILES.block_h):
        h = hidden.load([first_row, first])
        w = weight.load([first_column, first])
        acc = tl.dot(h, w.T, acc, input_precision="ieee")
    return acc


@triton.jit
def quarters(acc):
    """Returns a tile (BLOCK_M, BLOCK_V) as four, left to right; every column stays in its threads.

    An epilogue takes them in turn: it needs several registers per logit, and a whole tile would spill.
    """
    half: tl.constexpr = acc.shape[1] // 2
    left, right = acc.reshape(acc.shape[0], 2, half).permute(0, 2, 1).split()
    first, second = left.reshape(acc.shape[0], 2, half // 2).permute(0, 2, 1).split()
    third, fourth = right.reshape(acc.shape[0], 2, half // 2).permute(0, 2, 1).split()
    return first, second, third, fourth


@triton.jit
def column_of(ids, vocab):
    """Returns sampled ids as 32-bit columns, -1 outside the vocabulary. A tile compares these with its columns at half
    the cost."""
    return tl.where((ids >= 0) & (ids < vocab), ids, -1).to(tl.int32)


@triton.jit
def is_id(ids, first_column, WIDTH: tl.constexpr):
    """Returns where the sampled ids are among the columns from `first_column` on, (BLOCK_M, WIDTH)."""
    return tl.arange(0, WIDTH)[None, :] == (ids - first_column)[:, None]


@triton.jit
def to_logits(acc, columns, head, TILES: tl.constexpr):
    """Returns (y, slope of the softcap) of a tile; y is -inf past the end of the vocabulary."""
    if head.bias is not None:
        acc += tl.load(head.bias + columns, mask=columns < head.vocab, other=0.0).to(tl.float32)[None, :]
    y, slope = softcap(acc, head.logit_scale, head.softcap, TILES.capped)
    if not TILES.even_v:
        y = tl.where((columns < head.vocab)[None, :], y, -float("inf"))
    return y, slope


@triton.jit
def part_block(partials, rows, live, count, first, parts):
    """Returns (pointers, mask) of COMBINED_PARTS parts of rows from part `first` on, in one plane (parts, count)."""
    part = first + tl.arange(0, COMBINED_PARTS)
    at = partials + part.to(tl.int64)[:, None] * count + rows[None, :]
    return at, (part < parts)[:, None] & live[None, :]


def tiles_per_part(launch: MatmulLaunch, device: torch.device, tiles: int) -> int:
    """Returns how many of the vocabulary's tiles a program has. It follows from the vocabulary and the device alone.

    So whatever batch a row stands in, the same tiles are summed together, in the same order, and its statistics have
    the same bits. One token tile fills all multiprocessors; more of them, whole waves but one.
    """
    if device.type == "cpu":
        return triton.cdiv(tiles, INTERPRETER_PARTS)
    # 128 accumulators per thread leave room for 8 warps on a multiprocessor.
    slots = _multiprocessors(device) * max(1, 8 // launch.num_warps)
    return max(FEWEST_TILES, triton.cdiv(tiles, slots))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class Product(NamedTuple):
    """A product hidden weight^T as its kernels are launched."""

    grid: tuple[int, int]  # token tiles, parts
    hidden: Tensor
    operands: tuple[TensorDescriptor, TensorDescriptor]
    head: Head
    per_part: int
    group: int  # token tiles whose hidden states stay in the L2 cache
    tiles: Tiles
    options: dict[str, int]


def head_of(hidden: Tensor, chunk: HeadChunk) -> Head:
    vocab, width = chunk.weight.shape
    return Head(chunk.bias, vocab, width, hidden.stride(0), chunk.weight.stride(0), *map(float, chunk.transform))


def prepare(kernel: str, chunk: HeadChunk) -> Product:
    """Returns the launch arguments of "fused_logp" or "fused_exponentials". Inputs are 16-bit: others have no tensor
    cores."""
    hidden, weight = rows_for_tma(chunk.hidden), chunk.weight
    (count, width), vocab = hidden.shape, weight.shape[0]
    launch: MatmulLaunch = getattr(launch_of(hidden.device), kernel)
    token_tiles, tiles = triton.cdiv(count, launch.block_m), triton.cdiv(vocab, launch.block_v)
    per_part = tiles_per_part(launch, hidden.device, tiles)
    group = max(1, GROUP_BYTES // (launch.block_m * width * hidden.element_size()))
    operands = (
        TensorDescriptor.from_tensor(hidden, [launch.block_m, launch.block_h]),
        TensorDescriptor.from_tensor(weight, [launch.block_v, launch.block_h]),
    )
    is_even = vocab % launch.block_v == 0
    compiled = Tiles(chunk.transform.softcap != 0.0, is_even, launch.block_m, launch.block_v, launch.block_h)
    grid = token_tiles, triton.cdiv(tiles, per_part)
    options = dict(num_warps=launch.num_warps, num_stages=launch.num_stages)
    return Product(grid, hidden, operands, head_of(hidden, chunk), per_part, group, compiled, options)

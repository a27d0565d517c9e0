"""Time of one matrix product (GEMM) on a GPU beyond FLOPs over rate: tiles, waves, split-K, the epilogue.

A thread block computes one tile of 128 x 256 results and fills a multiprocessor, so the tiles of a GEMM run in waves of
as many as there are multiprocessors. The last wave lasts as long as a full one, and a tile at an edge as long as a
whole one. Where there are fewer tiles than multiprocessors, the library splits K: several blocks compute parts of one
tile, which go through memory in float32 and are added by another kernel.

The library has other tiles too (192 x 192 for example) and may choose one that fills its waves better: the idle time
of a GEMM with poor waves is an upper limit.

A block of this size holds one set of accumulators: while its epilogue moves them, its tensor cores wait. Blocks drift
apart, so some of this traffic runs beside the main loops of other blocks. `EXPOSED` is the share that does not: 1 where
all blocks are in their epilogues at once; about 0.3 where each has the memory nearly for itself, since a multiprocessor
alone moves some 100 GB/s (64 bytes per clock of its L2 port), three times its share of an H200's bandwidth. Both are
assumptions. One measurement is near: nvFuser's issue 3137 has cuBLAS at 0.776 ms for (16384, 1024) x (1024, 16384) in
float16 on an H100 (tiles of 192 x 192), which leaves about a third of its 0.54 GB of results exposed. That epilogue
writes only; one that adds to an accumulator also waits for what it reads.
"""

from __future__ import annotations

from typing import NamedTuple

from ..engine.memory import TILE_COLUMNS, TILE_ROWS
from .devices import Device

EXPOSED_RANGE = (0.3, 1.0)
EXPOSED = sum(EXPOSED_RANGE) / 2
MAX_SPLITS = 16


class Gemm(NamedTuple):
    """(rows, depth) x (depth, columns)."""

    rows: int
    columns: int
    depth: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns * self.depth

    @property
    def tiles(self) -> int:
        return -(-self.rows // TILE_ROWS) * -(-self.columns // TILE_COLUMNS)


def wave_fill(gemm: Gemm, multiprocessors: int, splits: int = 1) -> float:
    """Share of the waves that has a tile to compute, from 0 to 1."""
    blocks = gemm.tiles * splits
    return blocks / (-(-blocks // multiprocessors) * multiprocessors)


def idle_seconds(gemm: Gemm, device: Device, dtype: str) -> float:
    """Seconds beyond FLOPs over rate: waves that are not full, edges of tiles, split-K. 0 where waves are unknown."""
    if not device.multiprocessors:
        return 0.0
    rate = device.flops[dtype]
    whole = 2 * gemm.tiles * TILE_ROWS * TILE_COLUMNS * gemm.depth / rate
    most = MAX_SPLITS if gemm.tiles < device.multiprocessors else 1
    times = []
    for splits in range(1, most + 1):
        parts = 0 if splits == 1 else splits * gemm.rows * gemm.columns * 2 * 4  # bytes, written and read in float32
        added = parts / device.bandwidth + (device.gap if parts else 0.0)
        times.append(whole / wave_fill(gemm, device.multiprocessors, splits) + added)
    return min(times) - gemm.flops / rate

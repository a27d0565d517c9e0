"""Which block computes which part of a product, as csrc/cuda/lm_head.cpp decides it, and sizes that reach every case.

The tests hold this against the schedule of the C++ code. Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS, TILE_COLUMNS, CONSUMER_ROWS = 128, 256, 64
STAGES, DEPTH = 4, 64  # of the ring, and elements of H in a stage
FEWEST_TILES, MANY_ROW_TILES = 2, 16
GROUP_BYTES = 16 << 20
MULTIPROCESSORS = 132  # of an H100 (SXM) and an H200

# (rows, hidden size, vocabulary). Any backend: odd sizes, one program alone, one part of the vocabulary alone.
SMALL = ((1, 8, 2), (33, 64, 200), (129, 72, 257), (300, 24, 1032))
# Row kernels: rows that fit a cluster of blocks, and one too long for it; more rows than a grid of one dimension has.
ROWS = (*SMALL, (4, 16, 151936), (2, 16, 600001), (16800, 16, 300))
# Products: one number of the ring's rounds after another, then all that `cases` names.
PRODUCTS = (
    *SMALL,
    *((130, width, 1000) for width in (64, 256, 320)),
    (2304, 512, 20000),
    (2171, 328, 5000),
    (10240, 136, 1160),
    (260, 4096, 2056),
    (2304, 4096, 1100),
    (16800, 16, 300),
)
# Of Triton's products, each kind of size costs a compilation: the small ones, and more tiles than multiprocessors.
COMPILED = (*SMALL, (1100, 512, 20000), (16800, 16, 300))
SIZES = {
    "cuda/rows": ROWS,
    "cuda/linear": PRODUCTS,
    "cuda/anchored": PRODUCTS,
    "triton/rows": ROWS,
    "triton/linear": COMPILED,
    "triton/anchored": COMPILED,
}


def divide_up(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Schedule:
    """Of one product: blocks per cluster, clusters, blocks of rows, tiles of columns, tiles per part, parts, group."""

    cluster: int
    clusters: int
    row_blocks: int
    tiles: int
    per_part: int
    parts: int
    group: int

    @property
    def items(self) -> int:
        return self.row_blocks * self.parts


def schedule(rows: int, width: int, vocab: int, multiprocessors: int = MULTIPROCESSORS) -> Schedule:
    row_tiles, tiles = divide_up(rows, TILE_ROWS), divide_up(vocab, TILE_COLUMNS)
    cluster = 2 if row_tiles % 2 == 0 or row_tiles >= MANY_ROW_TILES else 1
    row_blocks, clusters = divide_up(row_tiles, cluster), max(1, multiprocessors // cluster)
    per_part = max(FEWEST_TILES, divide_up(tiles, multiprocessors))
    group = min(max(GROUP_BYTES // (cluster * TILE_ROWS * width * 2), 1), row_blocks)
    return Schedule(cluster, clusters, row_blocks, tiles, per_part, divide_up(tiles, per_part), group)


def cases(rows: int, width: int, vocab: int, multiprocessors: int = MULTIPROCESSORS) -> set[str]:
    """What a product of this size exercises."""
    s, row_tiles = schedule(rows, width, vocab, multiprocessors), divide_up(rows, TILE_ROWS)
    steps = divide_up(width, DEPTH)  # stages that a tile takes
    of = "in pairs" if s.cluster == 2 else "single"
    found = {
        f"blocks {of}": True,
        f"several tiles per part, {of}": s.per_part > 1,
        f"several parts, {of}": s.parts > 1,
        f"the last part is shorter, {of}": s.parts > 1 and s.tiles % s.per_part > 0,
        f"several items per cluster, {of}": s.items > s.clusters,
        f"several groups of row blocks, {of}": s.group < s.row_blocks,
        f"one round of the ring does not hold a tile, {of}": steps > STAGES,
        f"tiles begin at several stages of the ring, {of}": s.per_part > 1 and steps % STAGES > 0,
        f"a tile within one stage, {of}": steps == 1,
        f"the last rows are no whole tile, {of}": rows % TILE_ROWS > 0,
        f"the last consumer has no rows, {of}": 0 < rows % TILE_ROWS <= CONSUMER_ROWS,
        f"the last columns are no whole tile, {of}": vocab % TILE_COLUMNS > 0,
        f"half of the last tile has no columns, {of}": 0 < vocab % TILE_COLUMNS <= TILE_COLUMNS // 2,
        f"H is no multiple of a stage, {of}": width % DEPTH > 0,
        "the last block of a pair has no rows": s.cluster == 2 and row_tiles % 2 == 1,
    }
    return {name for name, holds in found.items() if holds}


# What the sizes have to reach, on any split over multiprocessors: everything that the kernels do differently.
WANTED = {
    f"{name}, {of}"
    for of in ("in pairs", "single")
    for name in (
        "several parts",
        "one round of the ring does not hold a tile",
        "the last rows are no whole tile",
        "the last consumer has no rows",
        "the last columns are no whole tile",
        "half of the last tile has no columns",
        "H is no multiple of a stage",
    )
} | {
    "blocks in pairs",
    "blocks single",
    "several tiles per part, in pairs",
    "the last part is shorter, in pairs",
    "several items per cluster, in pairs",
    "several groups of row blocks, in pairs",
    "tiles begin at several stages of the ring, in pairs",
    "the last block of a pair has no rows",
}


def text(size: tuple[int, int, int]) -> str:
    return "x".join(map(str, size))


def parse(size: str) -> tuple[int, int, int]:
    rows, width, vocab = map(int, size.split("x"))
    return rows, width, vocab

"""Where numbers are wrong: which rows and columns, and the part of the machine that alone computes those."""

from __future__ import annotations

from collections.abc import Callable

import gpu_device
import gpu_tiles
import torch
from torch import Tensor

Property = tuple[str, Callable[[Tensor], Tensor]]  # indices of rows or columns to classes


def located(what: str, bad: Tensor, rows: list[Property], columns: list[Property]) -> list[str]:
    r, c = bad.nonzero()[0].tolist()
    moduli = ", ".join(f"{name} {int(of(torch.tensor([at]))[0])}" for at, kinds in ((r, rows), (c, columns))
                       for name, of in kinds)  # fmt: skip
    texts = [*follow(bad.sum(1).float(), rows)[:2], *follow(bad.sum(0).float(), columns)[:2]]
    first = f"{what} in {int(bad.sum())} of {bad.numel()} entries, first row {r}, column {c} ({moduli})"
    return [first, *(f"{what}: {text}" for text in texts)]


def follow(counts: Tensor, kinds: list[Property]) -> list[str]:
    """Properties whose wrong entries are of some classes alone, the most telling first. `counts`: wrong per index."""
    index, texts = torch.arange(len(counts)), []
    for name, of in kinds:
        classes = of(index)
        bad, everything = classes[counts > 0].unique().tolist(), classes.unique().numel()
        if len(bad) < everything:
            shown = ", ".join(map(str, bad[:6])) + (", ..." if len(bad) > 6 else "")
            whole = all(bool((counts[classes == one] > 0).all()) for one in bad[:6])
            share = "every" if whole else "some"
            texts.append(
                (not whole, len(bad) / everything, f"only {name} {shown} of {everything}, {share} index of it")
            )
    return [text for *_, text in sorted(texts, key=lambda found: found[:2])]


def properties(
    backend: str, strategy: str, size: tuple[int, int, int], dtype: torch.dtype
) -> tuple[list[Property], list[Property]]:
    """Of rows and of columns: which part of the machine computes them."""
    count, width, vocab = size
    if strategy == "rows":
        block = 1024 if backend == "cuda" else row_block(vocab, dtype)
        return [modulo("row", 8)], [modulo("column", 4), modulo("column", 32), modulo("column", block), over(block)]
    if backend == "cuda":
        s = gpu_tiles.schedule(count, width, vocab, gpu_device.multiprocessors())
        tile_rows, tile_columns = gpu_tiles.TILE_ROWS, gpu_tiles.TILE_COLUMNS
        return [
            ("consumer warpgroup", lambda r: r % tile_rows // gpu_tiles.CONSUMER_ROWS),
            ("cluster rank", lambda r: r // tile_rows % s.cluster),
            ("warp of a consumer", lambda r: r % gpu_tiles.CONSUMER_ROWS // 16),
            ("row block", lambda r: r // tile_rows // s.cluster),
            ("row tile", lambda r: r // tile_rows),
            modulo("row", tile_rows),
        ], [
            ("half of a tile", lambda c: c % tile_columns // 128),
            ("64 columns of a tile", lambda c: c % tile_columns // 64),
            ("part", lambda c: c // tile_columns // s.per_part),
            ("tile in its part", lambda c: c // tile_columns % s.per_part),
            ("tile", lambda c: c // tile_columns),
            modulo("column", tile_columns),
        ]
    from grpo_kernels.backends.launch import matmul_launch

    name = "linear_logp" if strategy == "linear" else strategy
    launch = matmul_launch(name, torch.device(gpu_device.PLACE), width, vocab, dtype)
    m, v = launch.block_m, launch.block_v
    return (
        [("row tile", lambda r: r // m), modulo("row", m)],
        [("quarter of a tile", lambda c: c % v * 4 // v), ("tile", lambda c: c // v), modulo("column", v)],
    )


def row_block(vocab: int, dtype: torch.dtype) -> int:
    from grpo_kernels.backends.launch import row_launch

    return row_launch("rows", torch.device(gpu_device.PLACE), vocab, dtype).block


def modulo(name: str, size: int) -> Property:
    return f"{name} mod {size}", lambda x: x % size


def over(block: int) -> Property:
    return f"block of {block} columns", lambda c: c // block

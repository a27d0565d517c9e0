"""Launch configurations: block shapes and warps per kernel, from the table launch.json beside this file.

A table of the user (`tuned_path`) comes first. Nothing is tuned at run time.

    {architecture: {kernel: {shape: {field: value}}}}        shape: "H V type" or "V type" as measured, or "*"

`fused_products` of an architecture are those with the softmax in their epilogue that have been measured faster there
than the vendor's product and a row kernel over its logits.
"""

from __future__ import annotations

import json
import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

SHIPPED = Path(__file__).with_suffix(".json")


class RowLaunch(NamedTuple):
    """A program walks `rows` rows in blocks of `block` logits."""

    rows: int
    block: int
    num_warps: int


class MatmulLaunch(NamedTuple):
    """A program computes tiles of `block_m` tokens x `block_v` vocabulary entries, `block_h` hidden dimensions each
    step."""

    block_m: int
    block_v: int
    block_h: int
    num_warps: int
    num_stages: int


class TokenLaunch(NamedTuple):
    """A program owns `sequences` sequences and walks them, or any list of tokens, in blocks of `block` tokens."""

    sequences: int
    block: int
    num_warps: int


def tuned_path() -> Path:
    """Returns the path of the user's own table: in GRPO_KERNELS_CACHE, or in the user's cache folder."""
    folder = os.environ.get("GRPO_KERNELS_CACHE")
    if folder is None:
        folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "grpo_kernels")
    return Path(folder) / "launch.json"


def architecture(device: torch.device) -> str:
    """The row of the table that a device belongs to; devices differ by shared memory and matrix instructions."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx9"
    major, minor = torch.cuda.get_device_capability(device)
    # 8.6, 8.9 and 12.x have 100 KB of shared memory per multiprocessor; 8.0 and 8.7 have 164, 9.0 and 10.x have 228.
    if major == 12 or (major, minor) in ((8, 6), (8, 9)):
        return "sm86"
    return "sm100" if major >= 10 else f"sm{major}0"


def row_launch(device: torch.device, vocab: int, dtype: torch.dtype) -> RowLaunch:
    return RowLaunch(**_find(architecture(device), "rows", shape_key(vocab, dtype=dtype)))


def matmul_launch(kernel: str, device: torch.device, width: int, vocab: int, dtype: torch.dtype) -> MatmulLaunch:
    return MatmulLaunch(**_find(architecture(device), kernel, shape_key(width, vocab, dtype=dtype)))


def token_launch(device: torch.device) -> TokenLaunch:
    """The same on every GPU; in the interpreter, which runs on a CPU, few and small blocks."""
    return TokenLaunch(8, 16, 1) if architecture(device) == "interpreter" else TokenLaunch(1, 512, 4)


def shape_key(*sizes: int, dtype: torch.dtype) -> str:
    return " ".join([*map(str, sizes), str(dtype).removeprefix("torch.")])


def paying_products(device: torch.device) -> tuple[str, ...]:
    """Returns which products with the softmax in their epilogue have been measured faster on such a GPU."""
    return tuple(shipped_table()[architecture(device)]["fused_products"])


@cache
def shipped_table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(SHIPPED.read_text())
    return table


@cache
def _find(arch: str, kernel: str, shape: str) -> dict[str, Any]:
    for table in (_tuned_table(), shipped_table()):
        entries = table.get(arch, {}).get(kernel, {})
        found = entries.get(shape) or entries.get("*")
        if found is not None:
            return dict(found)
    raise KeyError(f"launch.json has no entry for {kernel} on {arch}")


@cache
def _tuned_table() -> dict[str, Any]:
    path = tuned_path()
    try:
        table: dict[str, Any] = json.loads(path.read_text())
        if not isinstance(table, dict):
            raise ValueError("it holds no table")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"grpo_kernels: {path} cannot be read ({error}); the table of the package is used", stacklevel=2)
        return {}
    return table

"""Launch configurations: block shapes and warps per kernel, from the table launch.json beside this file.

A table of the user (`tuned_path`) comes first; bench/tune.py measures candidates. Nothing is tuned at run time.

    {architecture: {kernel: {shape: {field: value}}}}        shape: "H V type" or "V type" as measured, or "*"

Strategies say which kernels compute a chunk: the vendor's product and a row pass over logits, or a product with a
softmax epilogue. A backend lists what serves its inputs, best first, as the table has it. GRPO_KERNELS_STRATEGY names
another one, for experiments.

    rows       logits = h W^T into the scratch, then a row kernel
    linear     statistics alone (no gradient wanted yet) come from one kernel, h and W to log-probabilities; else rows
    anchored   linear, and the fused way stores e^(z - z_id) from the product's epilogue: no row pass at all
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .operations import Backend

STRATEGIES = ("rows", "linear", "anchored")
VARIABLE = "GRPO_KERNELS_STRATEGY"
SHIPPED = Path(__file__).with_suffix(".json")


class RowLaunch(NamedTuple):
    """A program walks `rows` rows in blocks of `block` logits."""

    rows: int
    block: int
    num_warps: int


class MatmulLaunch(NamedTuple):
    """A program computes tiles of `block_m` tokens x `block_v` vocabulary entries, `block_h` hidden dimensions a step.

    `tma`: tiles are fetched through tensor descriptors where strides and alignment allow it.
    """

    block_m: int
    block_v: int
    block_h: int
    num_warps: int
    num_stages: int
    tma: bool


class TokenLaunch(NamedTuple):
    """A program owns `sequences` sequences and walks them, or any list of tokens, in blocks of `block` tokens."""

    sequences: int
    block: int
    num_warps: int


TUNABLE = {
    "rows": RowLaunch,
    "fused_logp": MatmulLaunch,
    "fused_exponentials": MatmulLaunch,
}  # for bench/tune.py

_trials: dict[str, RowLaunch | MatmulLaunch] = {}


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


def row_launch(kernel: str, device: torch.device, vocab: int, dtype: torch.dtype) -> RowLaunch:
    return RowLaunch(**_fields(kernel, device, shape_key(vocab, dtype=dtype)))


def matmul_launch(kernel: str, device: torch.device, width: int, vocab: int, dtype: torch.dtype) -> MatmulLaunch:
    return MatmulLaunch(**_fields(kernel, device, shape_key(width, vocab, dtype=dtype)))


def token_launch(device: torch.device) -> TokenLaunch:
    return TokenLaunch(**_find(architecture(device), "tokens", "*"))


def shape_key(*sizes: int, dtype: torch.dtype) -> str:
    return " ".join([*map(str, sizes), str(dtype).removeprefix("torch.")])


@contextmanager
def trial(kernel: str, launch: RowLaunch | MatmulLaunch) -> Iterator[None]:
    """Inside, this kernel is launched so, whatever the tables say."""
    _trials[kernel] = launch
    try:
        yield
    finally:
        del _trials[kernel]


def choose_strategy(backend: Backend, hidden: Tensor, weight: Tensor) -> str:
    """One of STRATEGIES for these hidden states (..., H) and weight (V, H)."""
    served = backend.strategies(hidden, weight)
    wanted = os.environ.get(VARIABLE)
    if not wanted or wanted in served:
        return wanted or served[0]
    if wanted not in STRATEGIES:
        raise ValueError(f"{VARIABLE}={wanted!r}; expected one of {', '.join(STRATEGIES)}")
    _warn_once(
        f"grpo_kernels: {VARIABLE}={wanted} does not serve backend {backend.name!r} with {hidden.dtype} on "
        f"{hidden.device.type}; using {served[0]!r}"
    )
    return served[0]


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def paying_products(device: torch.device) -> tuple[str, ...]:
    """Returns which products with the softmax in their epilogue have been measured faster on such a GPU."""
    return tuple(shipped_table()[architecture(device)]["fused_products"])


def best_first(entry: str, served: tuple[str, ...], weight: Tensor) -> tuple[str, ...]:
    """The strategies that serve this lm_head (V, H), first the one that the table prefers.

    `entry`: "strategy" of the Triton kernels, "cuda_strategy". What no GPU has measured yet is not preferred.
    """
    shape = shape_key(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    best: str = _find(architecture(weight.device), entry, shape)["name"]
    return (best, *(name for name in served if name != best)) if best in served else served


def shipped_table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(SHIPPED.read_text())
    return table


def _fields(kernel: str, device: torch.device, shape: str) -> dict[str, Any]:
    launch = _trials.get(kernel)
    return _find(architecture(device), kernel, shape) if launch is None else launch._asdict()


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

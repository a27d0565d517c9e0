"""Block shapes and warps of Triton's kernels: a row per architecture. Nothing is tuned at run time."""

from __future__ import annotations

from typing import NamedTuple

import torch


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


class Launch(NamedTuple):
    """What kernels of an architecture are launched with. The products have the softmax in their epilogue; None: there
    is none. products_pay: they have been measured faster than the vendor's product and a row kernel over its logits."""

    rows: RowLaunch = RowLaunch(1, 4096, 8)
    tokens: TokenLaunch = TokenLaunch(1, 512, 4)
    fused_logp: MatmulLaunch | None = None
    fused_exponentials: MatmulLaunch | None = None
    products_pay: bool = False


_HOPPER, _SMALL = MatmulLaunch(128, 256, 64, 8, 4), MatmulLaunch(32, 32, 32, 1, 1)
LAUNCHES = {
    "sm80": Launch(),
    "sm86": Launch(),
    "sm90": Launch(fused_logp=_HOPPER, fused_exponentials=_HOPPER, products_pay=True),
    # Compiled, not yet run: with products_pay=True they serve on both backends.
    "sm100": Launch(fused_logp=_HOPPER, fused_exponentials=_HOPPER._replace(num_stages=3)),
    "gfx9": Launch(),
    # On a CPU, where the time goes by the number of operations.
    "interpreter": Launch(RowLaunch(32, 64, 1), TokenLaunch(8, 16, 1), _SMALL, _SMALL, products_pay=True),
}


def architecture(device: torch.device) -> str:
    """Returns which of LAUNCHES a device has: they differ by shared memory and matrix instructions."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx9"
    major, minor = torch.cuda.get_device_capability(device)
    # 8.6, 8.9 and 12.x have 100 KB of shared memory per multiprocessor; 8.0 and 8.7 have 164, 9.0 and 10.x have 228.
    if major == 12 or (major, minor) in ((8, 6), (8, 9)):
        return "sm86"
    return "sm100" if major >= 10 else f"sm{major}0"


def launch_of(device: torch.device) -> Launch:
    """Returns what kernels on this device are launched with."""
    return LAUNCHES[architecture(device)]

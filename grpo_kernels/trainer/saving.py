"""What would fail at the first checkpoint, found before the first step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import nn
from transformers import GenerationConfig

from .adamw import is_low

MIB = 2**20


def savable(config: GenerationConfig) -> tuple[GenerationConfig, dict[str, Any]]:
    """(config, left): a generation_config without what transformers refuses to save, such as a temperature without
    do_sample, which generate() passes over; and what that is."""
    kept, left = GenerationConfig(), config.to_diff_dict()
    while taken := [name for name, value in left.items() if _takes(kept, name, value)]:
        for name in taken:
            del left[name]
    return kept, left


def _takes(config: GenerationConfig, name: str, value: Any) -> bool:
    """Set it, unless that makes a config that cannot be saved."""
    before = getattr(config, name, None)
    setattr(config, name, value)
    try:
        config.validate(strict=True)
    except ValueError:
        setattr(config, name, before)
        return False
    return True


def bytes_of_checkpoint(policy: nn.Module, *, adapter: bool, reference: bool) -> int:
    """Of weights (adapter: the trained ones alone), AdamW's state and the reference policy; the rest is little."""
    size = 0
    for p in policy.parameters():
        if p.requires_grad:
            size += p.numel() * ((12 if is_low(p) else 8) + p.itemsize * (1 + reference))
        elif not adapter:
            size += p.numel() * p.itemsize
    return size


def check_room(folder: str | Path, size: int) -> None:
    """Raise ValueError where the disk of the folder, or of what it is to be made in, has less than `size` bytes."""
    there = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
    if (free := shutil.disk_usage(there).free) < size:
        raise ValueError(
            f"output_dir={folder}: a checkpoint takes {size / MIB:,.1f} MiB, its disk has {free / MIB:,.1f} MiB left"
        )

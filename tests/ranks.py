"""Processes of the tests: the ranks of a group, over gloo, and what they compare."""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

# How processes start: forked, since imports take seconds. With a GPU autograd has threads, of which a fork has none.
START_METHOD = "spawn" if torch.cuda.is_available() else "fork"
LIMIT = datetime.timedelta(minutes=15)  # a rank that has not come then hangs


def run_ranks(work: Callable[[int, Any], None], ranks: int, folder: Path) -> None:
    """work(rank, group) in `ranks` processes, with what torchrun sets in the environment."""
    given = ranks, str(folder / "store"), work
    torch.multiprocessing.start_processes(_rank, given, nprocs=ranks, start_method=START_METHOD)


def _rank(rank: int, ranks: int, store: str, work: Callable[[int, Any], None]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", ACCELERATE_USE_CPU="true", DS_ACCELERATOR="cpu")
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=LIMIT)
    work(rank, distributed.group.WORLD)
    gc.collect()  # wrappers of modules hold parts of the process group
    distributed.barrier()  # no rank closes a connection that another still uses
    distributed.destroy_process_group()


def on_all_ranks(x: torch.Tensor, group: Any) -> list[torch.Tensor]:
    found = [torch.empty_like(x) for _ in range(group.size())]
    distributed.all_gather(found, x.contiguous(), group=group)
    return found


def assert_same_on_all_ranks(found: Any, group: Any) -> None:
    values = [found.loss, found.logps, found.entropy, found.grads["hidden"], *found.metrics.values()]
    for x in values:
        assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for y in on_all_ranks(x, group))

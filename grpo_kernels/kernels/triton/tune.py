"""`grpo-kernels tune`: which launch configuration is fastest on this GPU for one lm_head.

Every candidate first has to give the results of the shipped configuration; those that do are timed in turn, round by
round, so that a clock that drifts hits all of them. The fastest goes into the user's table, which launches read first.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from ...contract import HeadChunk, LogitChunk, RowGradients, Rows, no_values
from ...names import FIELD, TABLE_FIELDS, KernelParams
from ..launch import TUNABLE, MatmulLaunch, RowLaunch, architecture, forget_tables, shape_key, shipped_table, trial
from . import rows
from .anchored import anchored
from .linear_logp import linear_logp

ROUNDS = 20
WARM_UP_ROUNDS = 3

# What a program may use, in bytes.
SHARED_MEMORY = {"sm80": 163 << 10, "sm86": 99 << 10, "sm90": 227 << 10, "sm100": 227 << 10, "gfx9": 64 << 10}

Launch = RowLaunch | MatmulLaunch


class Head(NamedTuple):
    """The lm_head to tune for, and the rows that a launch gets. Products have tensor cores, so `dtype` has 16 bits."""

    width: int
    vocab: int
    dtype: torch.dtype
    rows: int
    device: torch.device


class Subject(NamedTuple):
    """A kernel of the launch table on given inputs. `prepare` restores what `run` overwrites."""

    kernel: str
    shape: str
    candidates: Sequence[Launch]  # the shipped one first
    prepare: Callable[[], object]
    run: Callable[[], Sequence[Tensor]]


class TableError(ValueError):
    """A file that is no table of launches."""


def tune(head: Head, kernels: Sequence[str], path: Path) -> None:
    """Measure, and extend the table at `path`."""
    read_table(path)  # one that cannot be extended is found now, not after minutes
    for kernel in kernels:
        for subject in SUBJECTS[kernel](head):
            write_choice(path, architecture(head.device), subject, choose(subject))
    print(f"{path} written")


# --- candidates -------------------------------------------------------------------------------------------------------


def row_candidates(arch: str) -> list[Launch]:
    """Blocks of 4 to 32 logits per thread."""
    warp = 64 if arch == "gfx9" else 32
    found: list[Launch] = [
        RowLaunch(1, block, num_warps)
        for block in (2048, 4096, 8192, 16384)
        for num_warps in (4, 8, 16, 32)
        if 4 <= block // (num_warps * warp) <= 32 and num_warps * warp <= 1024
    ]
    return _shipped_first(arch, "rows", found)


def matmul_candidates(arch: str, kernel: str) -> list[Launch]:
    """Tiles whose sums fit the registers and whose stages fit the shared memory: as many as fit, and one fewer."""
    tiles = (64, 128), (64, 256), (128, 128), (128, 256), (256, 128)
    fetches = (False, True) if arch in ("sm90", "sm100") else (False,)
    found: list[Launch] = []
    for (block_m, block_v), block_h, num_warps, tma in itertools.product(tiles, (32, 64, 128), (4, 8), fetches):
        sums_per_thread = block_m * block_v // (32 * num_warps)
        most = min(5, SHARED_MEMORY[arch] // ((block_m + block_v) * block_h * 2))  # 2 bytes per element
        if 32 <= sums_per_thread <= 128:
            for num_stages in range(max(2, most - 1), most + 1):
                found.append(MatmulLaunch(block_m, block_v, block_h, num_warps, num_stages, tma))
    return _shipped_first(arch, kernel, found)


def _shipped_first(arch: str, kernel: str, found: list[Launch]) -> list[Launch]:
    shipped: Launch = TUNABLE[kernel](**shipped_table()[arch][kernel]["*"])
    return [shipped, *(launch for launch in found if launch != shipped)]


# --- subjects ---------------------------------------------------------------------------------------------------------

PARAMS = KernelParams(has_old=False)


def row_subjects(head: Head) -> Iterator[Subject]:
    """Logits in float32, as the engine has them, and in the head's own type, as callers may bring them."""
    return (_row_subject(head, dtype) for dtype in (torch.float32, head.dtype))


def _row_subject(head: Head, dtype: torch.dtype) -> Subject:
    """Statistics, then both sweeps of the fused kernel with the gradient over the logits."""
    source = torch.randn(head.rows, head.vocab, dtype=dtype, device=head.device)
    logits = torch.empty_like(source)
    grad = logits.view(head.dtype)[:, : head.vocab]
    ids, table = _ids(head), _table(head)
    first, second = (no_values(head.rows, torch.float32, head.device) for _ in range(2))
    chunk = LogitChunk(logits, Rows(0, head.rows), ids, table[FIELD["temperature"]], first, PARAMS)

    def run() -> Sequence[Tensor]:
        rows.statistics(chunk)
        rows.single_pass(chunk._replace(values=second), table, RowGradients(grad))
        return *first, *second, grad

    candidates = row_candidates(architecture(head.device))
    return Subject("rows", shape_key(head.vocab, dtype=dtype), candidates, lambda: logits.copy_(source), run)


def matmul_subjects(kernel: str, head: Head) -> Iterator[Subject]:
    """The product of hidden states and weights whose logits are standard normal."""
    hidden = torch.randn(head.rows, head.width, dtype=head.dtype, device=head.device)
    weight = torch.randn(head.vocab, head.width, dtype=head.dtype, device=head.device).mul_(head.width**-0.5)
    ids, table = _ids(head), _table(head)
    chunk = HeadChunk(hidden, weight, None, ids, table[FIELD["temperature"]], PARAMS)
    exps = torch.empty(head.rows * (kernel == "anchored"), head.vocab, dtype=torch.bfloat16, device=head.device)

    def run() -> Sequence[Tensor]:
        if kernel == "linear_logp":
            return linear_logp(chunk, entropy=True)
        stats, scale = anchored(chunk, table, exps)
        return (*stats, scale, exps)

    candidates = matmul_candidates(architecture(head.device), kernel)
    yield Subject(kernel, shape_key(head.width, head.vocab, dtype=head.dtype), candidates, lambda: None, run)


def _ids(head: Head) -> Tensor:
    return torch.randint(0, head.vocab, (head.rows,), device=head.device)


def _table(head: Head) -> Tensor:
    """A row table of tokens that all have a gradient."""
    table = torch.zeros(len(TABLE_FIELDS), head.rows, dtype=torch.float32, device=head.device)
    table[FIELD["advantage"]].normal_()
    for name in ("multiplier", "weight_ratio", "weight_direct", "temperature"):
        table[FIELD[name]] = 1.0
    table[FIELD["entropy_threshold"]] = -float("inf")
    return table


SUBJECTS: dict[str, Callable[[Head], Iterator[Subject]]] = {
    "rows": row_subjects,
    "linear_logp": partial(matmul_subjects, "linear_logp"),
    "anchored": partial(matmul_subjects, "anchored"),
}


# --- measuring --------------------------------------------------------------------------------------------------------


def choose(subject: Subject) -> Launch:
    """The fastest candidate among those whose results are right."""
    shipped, *others = subject.candidates
    print(f"{subject.kernel}, {subject.shape}: {len(subject.candidates)} candidates")
    reference = [result.clone() for result in run(subject, shipped)]
    right = [shipped]
    for i, candidate in enumerate(others, start=2):
        said = "its results are right"
        try:
            if all(map(same, run(subject, candidate), reference)):
                right.append(candidate)
            else:
                said = "left out, its results are WRONG"
        except (RuntimeError, TritonError) as error:
            reason = str(error).partition("\n")[0]
            said = f"left out, it fails: {type(error).__name__}: {reason}"
        print(f"  [{i}/{len(subject.candidates)}] {candidate}: {said}")
    times = gpu_milliseconds(subject, right)
    best = min(range(len(right)), key=lambda i: times[i])
    print(f"  fastest: {right[best]}, {times[best]:.3f} ms; as shipped {times[0]:.3f} ms")
    return right[best]


def run(subject: Subject, launch: Launch) -> Sequence[Tensor]:
    subject.prepare()
    with trial(subject.kernel, launch):
        return subject.run()


def same(result: Tensor, reference: Tensor) -> bool:
    """Equal but for the order of float32 sums, and what rounding to 16 bits makes of it."""
    if reference.dtype.itemsize == 2:
        return torch.allclose(result, reference, rtol=2e-2, atol=0.0)
    return torch.allclose(result, reference, rtol=1e-4, atol=1e-5 * float(reference.abs().max()))


def gpu_milliseconds(subject: Subject, launches: Sequence[Launch]) -> list[float]:
    """Medians over rounds in which every launch has its turn."""
    samples: list[list[float]] = [[] for _ in launches]
    for number in range(WARM_UP_ROUNDS + ROUNDS):
        events = []
        for launch in launches:
            subject.prepare()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            with trial(subject.kernel, launch):
                subject.run()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        if number >= WARM_UP_ROUNDS:
            for sample, (start, end) in zip(samples, events, strict=True):
                sample.append(start.elapsed_time(end))
    return [statistics.median(sample) for sample in samples]


# --- the table --------------------------------------------------------------------------------------------------------


def read_table(path: Path) -> dict[str, Any]:
    """The table as it is, empty where there is none."""
    try:
        table = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        table = None
    if not isinstance(table, dict) or not all(isinstance(entries, dict) for entries in table.values()):
        raise TableError(f"{path} is not a table of launches; remove it, or write elsewhere with --output")
    return table


def write_choice(path: Path, arch: str, subject: Subject, launch: Launch) -> None:
    """Add to the table at `path`; everything else in it stays. Readers see the old file or the new one."""
    table = read_table(path)
    table.setdefault(arch, {}).setdefault(subject.kernel, {})[subject.shape] = launch._asdict()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(json.dumps(table, indent=2) + "\n")
    os.replace(new, path)
    forget_tables()

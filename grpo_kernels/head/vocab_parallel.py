"""Ranks that hold a slice of the vocabulary each: `vocab_parallel_group=`.

The weight (and bias) of a rank are contiguous rows of the whole lm_head, in the order of the ranks; hidden states, ids
and everything per token are the same on every rank. A rank computes the logits of its slice and their statistics. What
follows from them for the whole vocabulary, over ranks r with log-sum-exps lse_r and entropies H_r:

    lse = log sum_r exp(lse_r)    w_r = exp(lse_r - lse)    H = sum_r w_r (H_r - log w_r)    logp = logp_o + lse_o - lse

with o the rank that has the sampled id. For each chunk of rows lse_r, H_r and logp_r are gathered, 24 bytes
per token and rank. Every rank reduces the same numbers in the same order, so loss, metrics and coefficients are the
same bits on all of them. Row kernels take an id of -1 for one that is elsewhere: no logit of the slice is the sampled
one. dweight is the rank's own. dhidden is a sum over the vocabulary: its shares are all-reduced in float32, once per
call.

With a sampling mask (mask_paths.py) these are over the kept ids in the slice, of which a token may have none: then
lse_r is -inf. lse_r over all ids is gathered too, once per call, for the metric of the kept mass.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, distributed

from ..kernels.operations import Rows, Statistics
from .chunk_size import multiprocessors_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_COMPARED = (
    "shape of hidden (its tokens)", "shape of hidden (its width)", "dtype of hidden", "lm_head_bias",
    "inputs that require gradients", "config and other arguments",
)  # fmt: skip


class VocabSlice(NamedTuple):
    """The rows of the lm_head that this rank holds, and what the ranks have agreed on."""

    group: ProcessGroup
    sizes: tuple[int, ...]  # rows of each rank
    rank: int
    multiprocessors: int  # the fewest of all ranks, so that all have the same chunks

    @property
    def vocab_size(self) -> int:
        return sum(self.sizes)

    @property
    def first(self) -> int:
        """Returns the id of the slice's first row."""
        return sum(self.sizes[: self.rank])

    def local_ids(self, ids: Tensor) -> Tensor:
        """Returns ids (N,) as rows of this rank's weight, -1 where another rank has them."""
        local = ids - self.first
        return torch.where((local >= 0) & (local < self.sizes[self.rank]), local, -1)

    def owner(self, ids: Tensor) -> Tensor:
        """Returns the rank that has each id, int32; the first rank for an id below the vocabulary, the last for one
        beyond it."""
        stops = torch.tensor(self.sizes, dtype=ids.dtype, device=ids.device).cumsum(0, dtype=ids.dtype)
        return torch.bucketize(ids, stops, out_int32=True, right=True).clamp_(max=len(self.sizes) - 1)

    def combine(self, rows: Rows, ids: Tensor, stats: Statistics) -> None:
        """Replaces the statistics of the slice by those of the vocabulary. ids (N,) of the whole vocabulary."""
        local_stats = torch.stack([rows.take(x).double() for x in (stats.lse, stats.entropy, stats.logp)])
        lse, entropy, logp = self.gather(local_stats).unbind(1)
        entropy, logp = entropy.to(stats.entropy.dtype), logp.to(stats.logp.dtype)
        total = torch.logsumexp(lse, 0)
        log_rank_mass = lse - total
        rank_mass = log_rank_mass.exp()
        terms = torch.where(rank_mass == 0, 0.0, rank_mass * (entropy - log_rank_mass))
        owner = self.owner(rows.take(ids)).long()[None]
        sampled = (logp.gather(0, owner) + log_rank_mass.gather(0, owner)).squeeze(0)
        rows.put(stats.lse, total)
        rows.put(stats.entropy, terms.sum(0))
        rows.put(stats.logp, sampled)

    def gather(self, x: Tensor) -> Tensor:
        return all_gather(self.group, x)

    def add_up(self, x: Tensor) -> None:
        """Adds up x over the ranks, in place."""
        distributed.all_reduce(x, group=self.group)


def vocab_size_of(weight: Tensor, vocab_slice: VocabSlice | None) -> int:
    """Returns the rows of the whole lm_head, of all ranks."""
    return weight.shape[0] if vocab_slice is None else vocab_slice.vocab_size


def exchange_and_check(
    group: ProcessGroup,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wants: Sequence[bool],
    arguments: object,
) -> VocabSlice:
    """Exchanges the sizes of the slices, and checks that all ranks are about to compute the same: one small all-gather
    and one read.

    arguments: the rest of the call, compared by its repr.

    Raises:
        ValueError: on every rank, where ranks disagree or one has refused its arguments.
    """
    flags = sum(want << i for i, want in enumerate(wants))
    compared = (
        hidden.numel() // hidden.shape[-1], hidden.shape[-1], _DTYPES.index(hidden.dtype), int(bias is not None),
        flags, zlib.crc32(repr(arguments).encode()),
    )  # fmt: skip
    rows = exchange(group, hidden.device, (1, weight.shape[0], multiprocessors_of(hidden.device), *compared))
    refused = [rank for rank, (fine, *_) in enumerate(rows) if not fine]
    if refused:
        raise ValueError(f"vocab_parallel_group: rank {refused[0]} of the group refused its arguments; see its error")
    for name, numbers in zip(_COMPARED, zip(*(row[3:] for row in rows), strict=True), strict=True):
        if len(set(numbers)) > 1:
            what = list(numbers) if name.startswith("shape") else "different ones"
            raise ValueError(f"vocab_parallel_group: {name} must be the same on all ranks of the group, got {what}")
    _, sizes, multiprocessors, *_ = zip(*rows, strict=True)
    return VocabSlice(group, sizes, distributed.get_rank(group), min(multiprocessors))


def signature(*tensors: Tensor | None) -> list[tuple[object, ...] | None]:
    """Returns shapes and types, which ranks compare."""
    return [None if x is None else (tuple(x.shape), x.dtype) for x in tensors]


@contextmanager
def broadcast_failure(group: ProcessGroup, hidden: object) -> Iterator[None]:
    """Tells the other ranks, which wait in `exchange_and_check`, where this one refuses its arguments."""
    try:
        yield
    except Exception:
        if isinstance(hidden, Tensor):
            exchange(group, hidden.device, (0,) * (3 + len(_COMPARED)))
        raise


def check_group(group: object, name: str = "vocab_parallel_group") -> None:
    """Raises where `group` is no process group that this rank belongs to."""
    if not distributed.is_available() or not isinstance(group, distributed.ProcessGroup):
        raise TypeError(f"{name} is a {type(group).__name__}; expected a torch.distributed.ProcessGroup")
    if distributed.get_rank(group) < 0:
        raise ValueError(f"{name} does not contain this rank")
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ValueError(f"{name} is given under the capture of a CUDA graph; it reads sizes back to the host")


def all_gather(group: ProcessGroup, x: Tensor) -> Tensor:
    """Returns x of every rank, in their order: (ranks, ...). x is contiguous."""
    gathered = x.new_empty((distributed.get_world_size(group), *x.shape))
    distributed.all_gather(list(gathered), x, group=group)
    return gathered


def exchange(group: ProcessGroup, device: torch.device, numbers: tuple[int, ...]) -> list[list[int]]:
    """Returns the numbers of all ranks, in their order."""
    return all_gather(group, torch.tensor(numbers, dtype=torch.int64, device=device)).tolist()

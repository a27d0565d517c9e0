"""The ids that truncated sampling (top-p, top-k, min-p) kept for each token (DeepSeek-V3.2, arXiv:2512.02556, 3.1)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from .argument import to_builtin
from .checks.arguments import Sizes, check_allowed_ids, check_by_table
from .checks.plain import check_kind, check_plain


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """ids (M,) int32 or int64: the kept ids of all tokens one after another, ascending and distinct within a token;
    counts (B, T) or packed (N,) int32 or int64: how many each token has. Count 0: the whole vocabulary.
    Of `sampling_support`, like counts: mass, floats, the probability that the kept ids have among all under the policy
    that it was given; added, bool: the sampled id was not among them. Both are 0 at masked positions.

    The sampled id of a token belongs to its kept ids; where rounding in the sampling engine left it out, the loss adds
    it (metric `sampling_mask/added`). old_logps, ref_logps and rollout_logps are log-probabilities under the same mask.

    Raises TypeError or ValueError for tensors of other types or shapes, and on a CPU (on a GPU with
    GRPO_KERNELS_DEBUG=1) for counts that do not add up to the ids, and ids that are negative, descend or repeat.
    """

    ids: Tensor
    counts: Tensor
    mass: Tensor | None = None
    added: Tensor | None = None

    def __post_init__(self) -> None:
        sizes: Sizes = {}
        for name in ("counts", "ids", "mass", "added"):
            if (x := getattr(self, name)) is not None or name in ("counts", "ids"):
                check_by_table(f"SamplingMask.{name}", x, sizes, self.counts)
        check_allowed_ids(self.ids, self.counts)

    @classmethod
    def from_lists(
        cls, kept: Iterable[Iterable[int] | Iterable[Iterable[int]]], *, length: int | None = None
    ) -> SamplingMask:
        """Takes one list of kept ids per token: a list of tokens (packed), or a list of sequences of tokens. Any
        iterables serve as lists: sets, tuples, arrays of NumPy.

        Sequences may differ in length; up to `length`, by default the longest one's, they are padded with count 0.
        The ids of a token are sorted. An empty list stands for the whole vocabulary.
        """
        length = to_builtin(length)
        if length is not None and type(length) is not int:
            raise TypeError(f"length is a {type(length).__name__}; expected an integer or None")
        rows = [_elements(entry) for entry in _elements(kept)]
        shape: tuple[int, ...] = (len(rows),)
        has_sequences = {_is_list(x) for x in _one_of_each_type(rows)}
        if len(has_sequences) == 2:
            raise TypeError("kept holds ids beside lists of ids; expected one list of ids for each token")
        if True in has_sequences:
            longest = max(map(len, rows))
            if length is not None and length < longest:
                raise ValueError(f"length={length}; expected at least {longest}, the tokens of the longest sequence")
            shape = (len(rows), longest if length is None else length)
            rows = [_elements(x) for entry in rows for x in [*entry, *[()] * (shape[1] - len(entry))]]
        elif length is not None:
            raise ValueError(f"length={length} belongs to sequences of tokens; a packed list has one entry per token")
        for x in _one_of_each_type(rows):
            if isinstance(x, bool) or not isinstance(x, Integral):
                raise TypeError(f"kept holds {x!r}; expected integers, one list of them for each token")
        try:
            ids = _int32(chain.from_iterable(map(sorted, rows)))
        except OverflowError:
            ids = None
        if ids is None or (ids.numel() and int(ids.amin()) < 0):
            wrong = next(x for x in chain.from_iterable(rows) if not 0 <= x < 2**31)
            raise ValueError(f"kept holds {wrong}; expected ids >= 0 and below 2^31")
        return cls(ids, _int32(map(len, rows)).view(shape))

    @classmethod
    def from_padded(cls, kept: Tensor, padding: int = -1) -> SamplingMask:
        """Takes ids (B, T, K) or packed (N, K), with `padding` in the places that are not used. They are sorted."""
        check_plain("kept", kept)
        padding = to_builtin(padding)
        if type(padding) is not int:
            raise TypeError(f"padding is a {type(padding).__name__}; expected an integer")
        check_kind("kept", kept, kept.dim() in (2, 3), "int32 or int64 (B, T, K) or (N, K)")
        used = kept != padding
        last = torch.iinfo(kept.dtype).max
        ordered = kept.masked_fill(~used, last).sort(-1).values
        return cls(ordered[ordered != last], used.sum(-1))

    @property
    def shape(self) -> torch.Size:
        """Returns the shape of the tokens: (B, T) or (N,)."""
        return self.counts.shape

    def to(self, device: torch.device | str | int) -> SamplingMask:
        """Returns the same on another device."""
        mass, added = (None if x is None else x.to(device) for x in (self.mass, self.added))
        return SamplingMask(self.ids.to(device), self.counts.to(device), mass, added)

    def __getitem__(self, rows: slice | Tensor | Iterable[int]) -> SamplingMask:
        """Returns sequences of a (B, T) mask, tokens of a packed one: a slice, indices or bools. Reads the device."""
        if not isinstance(rows, Tensor):
            chosen = [*(range(len(self.counts))[rows] if isinstance(rows, slice) else rows)]
            rows = torch.tensor(chosen, dtype=None if chosen else torch.int64)  # bools select, integers index
        wanted = torch.arange(len(self.counts), device=self.counts.device)[rows.to(self.counts.device)]
        counts = self.counts[wanted]
        per_row = self.counts.reshape(len(self.counts), -1).sum(1)
        starts, taken = per_row.cumsum(0) - per_row, per_row[wanted]
        begin = torch.repeat_interleave(starts[wanted] - (taken.cumsum(0) - taken), taken)
        mass, added = (None if x is None else x[wanted] for x in (self.mass, self.added))
        return SamplingMask(self.ids[begin + torch.arange(begin.numel(), device=begin.device)], counts, mass, added)


def _is_list(x: object) -> bool:
    if isinstance(x, Tensor):
        return x.dim() > 0
    return isinstance(x, Iterable) and not isinstance(x, (str, bytes))


def _elements(x: Any) -> Any:
    """Returns the elements of an argument `kept`, or of an entry of it, with a length."""
    if isinstance(x, (list, tuple, set)):
        return x
    if not _is_list(x):
        raise TypeError(f"kept is or holds {x!r}; expected one list of ids for each token, or for each of a sequence")
    return list(x)


def _one_of_each_type(rows: list[Any]) -> list[Any]:
    """Returns elements of the rows, millions of them, that differ in type."""
    kinds = set(map(type, chain.from_iterable(rows)))
    return [next(x for x in chain.from_iterable(rows) if type(x) is kind) for kind in kinds]


def _int32(numbers: Iterable[int]) -> Tensor:
    """Returns a tensor of integers, which `torch.tensor` would look at one by one; OverflowError for larger ones."""
    integers = array("i", numbers)
    return torch.frombuffer(integers, dtype=torch.int32) if integers else torch.empty(0, dtype=torch.int32)


def check_sampling_mask(mask: object, shape: torch.Size, like: Tensor) -> None:
    """Checks that `mask` fits tokens of this shape, on the device of `like`."""
    if not isinstance(mask, SamplingMask):
        raise TypeError(f"sampling_mask is a {type(mask).__name__}; expected a grpo_kernels.SamplingMask")
    if mask.shape != shape:
        raise ValueError(f"sampling_mask is of tokens {tuple(mask.shape)}; expected {tuple(shape)} like completion_ids")
    if mask.ids.device != like.device:
        raise ValueError(f"sampling_mask is on {mask.ids.device}; expected {like.device} like the other inputs")

"""What a head allocates: which rows it visits, how many at a time, what it holds of them, in which type, and the memory
that chunks share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.operations import Rows, chunk_row_stride
from ..objective.sequences import Sequences
from .products import cpu_multiplies, returns_float32

_ALIGNMENT = 64  # bytes
# Bytes of the logits of a chunk on a CPU at most; of a chunk of whole sequences on a GPU, with what its products hold.
_CPU_BYTES, _GPU_SEQUENCE_BYTES = 2**29, 3 * 2**29
_PRODUCT_BYTES = 12  # of each hidden dimension of a row: hidden states, scaled ones in float32 and rounded, dlogits W
# Shares of chunks that are added to a 16-bit dweight at most, where the bytes allow it: each addition rounds, and the
# error grows with the root of their number.
_ROUNDED_CHUNKS = 8
# The result of a product that a thread block computes: what cuBLAS mostly has on Hopper.
TILE_ROWS, TILE_COLUMNS = 128, 256


class GpuChunk(NamedTuple):
    """How many rows of a chunk a GPU takes."""

    most_bytes: int
    fewest_rows: int  # at least so many where the bytes allow it, and at most twice as many
    frozen_rows: int  # fewest_rows of a head without dweight, which each chunk would read and write
    step: int  # rows that thread blocks compute together


# By what a chunk holds: logits, or what a fused product leaves in their place, exponentials or parts of the statistics.
# With logits 2,048 rows take as long per row as all of a batch, 1,024 up to 9 % longer (H100). Clusters of a fused
# product are pairs of tiles, and end together with 1,024 rows too. Nothing follows statistics: as many as fit.
_GPU_CHUNKS = {
    "logits": GpuChunk(2**30, 2048, 2048, TILE_ROWS),
    "exponentials": GpuChunk(2**30, 2048, 1024, 2 * TILE_ROWS),
    "statistics": GpuChunk(2**26, 2**31, 2**31, 2 * TILE_ROWS),
}

# Bytes of a row's statistics. A fused product stores them once for each part of the vocabulary, at most one part per
# multiprocessor, and once for the whole.
STATISTICS_BYTES = 24


def select_rows(index: Tensor | None, num_tokens: int) -> Rows:
    """Returns the tokens of `index`; None: all."""
    if index is None or index.numel() == num_tokens:
        return Rows(0, num_tokens)
    return Rows(0, index.numel(), index)


class Selection(NamedTuple):
    """The tokens that a call computes, as indices; None: all of them, or in `scored_only` none."""

    has_gradient: Tensor | None  # may have one
    scored_only: Tensor | None  # the others that are scored
    scored: Tensor | None  # both
    lengths: list[int] | None  # those with a gradient per sequence, with whole sequences, if known on the host

    @classmethod
    def from_order(cls, order: Tensor, active: int, others: int, lengths: list[int] | None) -> Selection:
        """Returns the selection of tokens in this order (N,): those `active`, `others` that are scored, the rest."""
        total = order.numel()
        first = None if active == total else order[:active]
        both = None if active + others == total else order[: active + others]
        return cls(first, order[active : active + others] if others else None, both, lengths)


def select_tokens(
    scored: Tensor | None, active: Tensor | None, sequences: Sequences | None, *, every_row: bool
) -> Selection:
    """Sorts tokens by one read of their numbers on the host, or without a read where every row is computed.

    scored, active: (N,) bool; None: all.
    sequences: where the loss needs whole ones.
    """
    if every_row or active is None:
        lengths = None
        if sequences is not None and sequences.row_length is not None:  # of packed ones the host does not know lengths
            lengths = [sequences.row_length] * sequences.count
        elif sequences is not None and not every_row:
            lengths = sequences.offsets.diff().tolist()
        return Selection(None, None, None, lengths)
    if not reads_block_host(active.device) and sequences is None:  # two reads cost half of what a sort does
        first, others = active.nonzero().squeeze(1), None
        if scored is not active and len(first) < (len(active) if scored is None else int(scored.count_nonzero())):
            others = (~active if scored is None else scored & ~active).nonzero().squeeze(1)
        both = first if others is None else torch.cat([first, others])
        has_gradient = None if len(first) == len(active) else first
        return Selection(has_gradient, others, None if len(both) == len(active) else both, None)
    flags = torch.stack([active] if scored is None or scored is active else [active, scored])
    numbers = flags.sum(1)
    if sequences is not None:
        numbers = torch.cat([numbers, sequences.sum(active.to(torch.float32)).long()])
    sizes: list[int] = numbers.tolist()
    total = active.numel() if scored is None else sizes[len(flags) - 1]
    order = flags.sum(0, dtype=torch.int8).argsort(descending=True, stable=True)
    return Selection.from_order(order, sizes[0], total - sizes[0], None if sequences is None else sizes[len(flags) :])


def reads_block_host(device: torch.device) -> bool:
    """Returns whether a read of a number makes the host wait for this device."""
    return device.type != "cpu"


def multiprocessors_of(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU; 0 where it is not known."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=256)  # numbers of tokens differ from step to step
def rows_of_chunk(
    num_tokens: int,
    width: int,
    row_bytes: int,
    grad_dtype: torch.dtype,
    device: torch.device,
    *,
    holds: str = "logits",
    dweight_dtype: torch.dtype | None,
    multiprocessors: int = 0,
) -> int:
    """Returns the number of rows of a chunk, for N tokens and H = width.

    holds: what a chunk holds of its rows, a key of _GPU_CHUNKS; row_bytes: of a row of that.
    dweight_dtype: of the sum that the contributions of chunks are added to, whose error grows with their number where
        it has 16 bits; None: a frozen head has none.

    GPU: rows by _GPU_CHUNKS, more for long batches whose dweight rounds. Among these numbers it takes the one whose
    tiles of dlogits W (P, H) need the fewest waves over the multiprocessors for the whole batch, and of equal ones the
    smallest.

    CPU: 512 rows of float32 cost about 2 % of the products; 16-bit rows are worth fewer bytes.
    """
    rounds = dweight_dtype is not None and dweight_dtype.itemsize == 2
    least = -(-num_tokens // _ROUNDED_CHUNKS) if rounds else 1
    if device.type == "cpu":
        return max(
            1, min(max(512 if grad_dtype.itemsize > 2 else 1366, least), max(_CPU_BYTES // row_bytes, 16), num_tokens)
        )
    most_bytes, trained_rows, frozen_rows, step = _GPU_CHUNKS[holds]
    fewest = frozen_rows if dweight_dtype is None else trained_rows
    fit = max(most_bytes // row_bytes, 16)
    first = min(max(fewest, -(-least // step) * step), fit) // step * step
    if first == 0:
        return max(1, min(fit, num_tokens))
    last = min(max(2 * fewest, first), fit)
    columns = -(-width // TILE_COLUMNS)

    def waves(rows: int) -> int:
        full, rest = divmod(num_tokens, rows)
        blocks = (-(-n // TILE_ROWS) * columns for n in (rows, rest))
        waves_per_chunk, waves_of_rest = (-(-n // multiprocessors) for n in blocks)
        return full * waves_per_chunk + waves_of_rest

    rows = min(range(first, last + 1, step), key=waves) if multiprocessors else first
    return max(1, min(rows, num_tokens))


def rows_of_sequences(row_bytes: int, width: int, device: torch.device) -> int:
    """Returns the most rows of a chunk of whole sequences. The logits of a longer sequence are computed a second
    time."""
    if device.type == "cpu":
        return max(_CPU_BYTES // row_bytes, 16)
    return max(_GPU_SEQUENCE_BYTES // (row_bytes + _PRODUCT_BYTES * width), 16)


def default_logits_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns float32 wherever the matrix product can return it. On a CPU with products of bfloat16 float32 is an
    option."""
    if device.type == "cpu" and cpu_multiplies(dtype):
        return dtype
    return torch.float32 if dtype.itemsize == 2 else dtype


class ChunkTypes(NamedTuple):
    """Types of a chunk of 16-bit products; of others both are the type of the products:

                            logits             gradients  over the logits
    a GPU                   float32 or 16 bit  16 bit     yes
    a CPU that has them     16 bit or float32  16 bit     where both are 16 bit
    a CPU that has not      float32            float32    yes
    """

    logits: torch.dtype
    gradients: torch.dtype
    in_place: bool  # gradients lie over the logits
    converts: bool  # the weight is converted in pieces: a CPU has no product of 16 bits that returns float32

    @classmethod
    def of(
        cls, dtype: torch.dtype, device: torch.device, logits_dtype: torch.dtype | None, *, may_have_exponentials: bool
    ) -> ChunkTypes:
        """Returns the types. may_have_exponentials: chunks may be exponentials, which are bfloat16, also on the CPU of
        Triton's interpreter."""
        logits = logits_dtype or default_logits_dtype(dtype, device)
        converts = logits != dtype and not returns_float32(device, dtype)
        has_exponentials = may_have_exponentials and dtype == torch.bfloat16 and logits == torch.float32
        in_16_bits = device.type != "cpu" or not converts or cpu_multiplies(dtype) or has_exponentials
        gradients = dtype if in_16_bits else torch.float32
        # torch's 16-bit product on a CPU with AMX reads up to 31 columns beyond a matrix with gaps between its rows,
        # and spoils its result where those hold NaN (2.13): there narrower gradients never lie over their logits.
        return cls(logits, gradients, gradients == logits or device.type != "cpu", converts)


class Scratch:
    """Buffers of logits and their gradients; each grows to the largest chunk so far.

    What a method returns is valid until its next call.
    rows: of the usual chunk, the least that is allocated.
    teacher_dtype: of the teacher's logits, which are computed with those of a chunk.
    """

    def __init__(
        self,
        vocab_size: int,
        rows: int,
        logits_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        device: torch.device,
        teacher_dtype: torch.dtype | None = None,
    ) -> None:
        self.vocab_size, self.rows = vocab_size, rows
        self.grad_dtype, self.device = grad_dtype, device
        self.logits_dtypes = (logits_dtype,) if teacher_dtype is None else (logits_dtype, teacher_dtype)
        self._logits: list[Tensor] = []
        self._gradients: Tensor | None = None

    def logits(self, count: int) -> Tensor:
        """Returns memory for the logits of a chunk, (count, V)."""
        if not self._logits or self._logits[0].shape[0] < count:
            self._logits = []  # freed before the next one is made
            self._logits = allocate_rows(max(count, self.rows), self.vocab_size, self.logits_dtypes, self.device)
        return self._logits[0] if self._logits[0].shape[0] == count else self._logits[0][:count]

    def teacher_logits(self, count: int) -> Tensor:
        """Returns memory for the teacher's logits of the same rows, (count, V), after `logits`."""
        return self._logits[1][:count]

    def gradients(self, count: int) -> Tensor:
        """Returns memory for the gradients of a chunk, (count, V), where they do not overwrite the logits."""
        if self._gradients is None or self._gradients.shape[0] < count:
            self._gradients = None
            (self._gradients,) = allocate_rows(max(count, self.rows), self.vocab_size, (self.grad_dtype,), self.device)
        return self._gradients[:count]

    def gradient_view(self, logits: Tensor) -> Tensor:
        """Returns the memory of these logits as gradients (count, V); a narrower type takes the front half of each
        row."""
        return logits if self.grad_dtype == logits.dtype else logits.view(self.grad_dtype)[:, : self.vocab_size]

    def free(self) -> None:
        """Frees all buffers; on a CPU the logits are kept for the next call."""
        if self._logits and self.device.type == "cpu":
            _last_on_cpu[:] = [self._logits[0].untyped_storage()]  # in place of what another thread has put there
        self._logits, self._gradients = [], None


def allocate_rows(rows: int, vocab_size: int, dtypes: Sequence[torch.dtype], device: torch.device) -> list[Tensor]:
    """Returns a scratch (rows, V) in each type, of logits or their gradients; on a CPU in one block.

    Where memory does not suffice, the error names the setting that helps.
    """
    row_stride = chunk_row_stride(vocab_size, device)
    offsets, size = [], 0
    for dtype in dtypes:
        offsets.append(size // dtype.itemsize)
        size += -(-rows * row_stride * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    try:
        if device.type != "cpu":
            return [torch.empty((rows, row_stride), dtype=dtype, device=device)[:, :vocab_size] for dtype in dtypes]
        block, scratches = _cpu_block(size), []
        for offset, dtype in zip(offsets, dtypes, strict=True):
            scratch = torch.empty(0, dtype=dtype, device=device)
            scratches.append(scratch.set_(block, offset, (rows, vocab_size), (row_stride, 1)))
        return scratches
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
            raise
        named = " and ".join(map(str, dtypes))
        raise type(error)(
            f"no memory for one chunk of logits, {rows} x {vocab_size} {named} = {size / 2**20:.0f} MiB: "
            f"set GRPOConfig.chunk_rows below {rows}. ({error})"
        ) from error


# The scratch of the last call on a CPU. glibc returns a freed block of 32 MiB or more to the system, whose fresh pages
# cost as much time as the product that fills them; the allocator of torch for GPUs keeps its blocks itself.
_last_on_cpu: list[torch.UntypedStorage] = []


def _cpu_block(size: int) -> torch.UntypedStorage:
    """Returns a block of at least `size` bytes: that of the last call if it suffices, which no other thread gets
    then."""
    with suppress(IndexError):
        block = _last_on_cpu.pop()
        if block.nbytes() >= size:
            return block
        del block  # freed before a larger one is made
    return torch.empty(size, dtype=torch.uint8, device="cpu").untyped_storage()

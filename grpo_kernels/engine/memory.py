"""What the engine allocates: how many rows of logits at a time, in which type, and the memory that chunks share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import Rows, chunk_row_stride
from .products import cpu_multiplies

# 16-bit products on a CPU may add this many chunks to a 16-bit dweight, which rounds once per chunk: what the exact
# entry of the sampled id saves (see lm_head.py) pays for that. Beyond it, sums are kept in float32.
ROUNDED_CHUNKS = 3
_ALIGNMENT = 64  # bytes
_CPU_BUDGET = 512 * 2**20
_LEAST_GPU_BUDGET = 4096 * 2**20
_GPU_SHARE = 1 / 12
# Rows on a GPU.
_LOGITS_ROWS = 2048
_SINGLE_CHUNK_ROWS = 20480  # a batch of 16,384 tokens and some is one product chunk
_FROZEN_ROWS = 1024
_SHORT_LOGITS_ROWS = 768
_SHORT_PRODUCT_TILES = range(20, 45)  # of TILE_ROWS each
# The result of a product that a thread block computes: what cuBLAS mostly has on Hopper.
TILE_ROWS, TILE_COLUMNS = 128, 256
_ACCUMULATED_ROWS = 478  # of dlogits W: what adding to dweight costs beside them on an H200, two thirds of it exposed


def visited(index: Tensor | None, num_tokens: int) -> Rows:
    """The tokens of `index`, or all."""
    if index is None or index.numel() == num_tokens:
        return Rows(0, num_tokens)
    return Rows(0, index.numel(), index)


@dataclass
class Chunk:
    """A product chunk: rows whose gradients go through one pair of products.

    logits_rows: at a time. in_place: gradients lie over the logits, which are those of all rows.
    """

    rows: Rows
    logits_rows: int
    in_place: bool

    def row_chunks(self) -> list[Rows]:
        return self.rows.split(self.logits_rows)

    def place(self, rows: Rows) -> slice:
        """The places of a row chunk among the rows of this one."""
        return slice(rows.start - self.rows.start, rows.stop - self.rows.start)


class ChunkSizes(NamedTuple):
    """Rows at a time. Whole sequences have their gradients over their logits, all of which come first."""

    products: int  # in a pair of products, dlogits W and dlogits^T h
    logits: int  # fewer than `products` only where gradients are narrower than logits, in a buffer of their own
    sequences: int  # of a chunk of whole sequences, at most
    packed: int  # of a chunk of whole sequences, none of which is longer

    def packed_rows(self, longest: int) -> int:
        """Rows of the chunks that whole sequences are packed into, of which the longest has so many."""
        return min(self.sequences, max(longest, self.packed))


class Capacity(NamedTuple):
    """What sizes of chunks follow from."""

    budget: int  # bytes of a chunk at most, logits and their gradients together
    multiprocessors: int = 0  # of a GPU; 0: unknown

    def beside(self, logits_dtype: torch.dtype, teacher_dtype: torch.dtype) -> Capacity:
        """What a teacher's logits leave."""
        share = logits_dtype.itemsize / (logits_dtype.itemsize + teacher_dtype.itemsize)
        return self._replace(budget=int(self.budget * share))


def capacity_of(device: torch.device) -> Capacity:
    if device.type == "cpu":
        return Capacity(_CPU_BUDGET)
    if device.type != "cuda" or not torch.cuda.is_available():
        return gpu_capacity(0)
    found = torch.cuda.get_device_properties(device)
    return gpu_capacity(found.total_memory, found.multi_processor_count)


def gpu_capacity(total_memory: float, multiprocessors: int = 0) -> Capacity:
    """A twelfth of a GPU's bytes, and 4 GiB at least."""
    return Capacity(max(_LEAST_GPU_BUDGET, int(total_memory * _GPU_SHARE)), multiprocessors)


@cache
def chunk_sizes(
    num_rows: int,
    head_shape: tuple[int, int],
    logits_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    device: torch.device,
    wants: tuple[bool, ...],
    chunk_rows: int | None = None,
    capacity: Capacity | None = None,
) -> ChunkSizes:
    """Sizes for N rows and a (V, H) head with gradients for `wants` of (hidden, weight, bias); `chunk_rows` of the
    caller stands for `products` and `sequences`.

    CPU: 512 rows of float32 cost about 2 % of the products; 16-bit rows are worth fewer bytes and round a 16-bit
    dweight, so a chunk holds more of them.

    GPU: a product chunk that adds to dweight reads and writes V H float32, which costs what 184 rows of products do
    (H200), and a last pass rounds the sum. A batch that fits the budget is one product chunk and needs neither. Longer
    ones hold that sum besides, so their chunks are as short as costs little; with a frozen weight there is no sum, and
    chunks are shorter still, however small the batch. Whole sequences, whose logits take more than gradients alone, may
    fit the budget no longer where the rest still does: they are packed into short chunks then.
    """
    on_cpu, (vocab_size, _) = device.type == "cpu", head_shape
    budget, multiprocessors = capacity_of(device) if capacity is None else capacity
    row_bytes, grad_bytes = vocab_size * logits_dtype.itemsize, vocab_size * grad_dtype.itemsize
    # The scale of float16 gradients is found from all rows of a chunk, before the first is written.
    in_place = grad_bytes == row_bytes or grad_dtype == torch.float16

    def bounded(rows: int, most: int) -> int:
        return max(1, min(max(min(rows, most), 16) if chunk_rows is None else chunk_rows, num_rows))

    def cut(longest: int, few: int) -> ChunkSizes:
        together = bounded(budget // row_bytes, longest if grad_bytes == row_bytes or not on_cpu else few)
        if in_place:
            return ChunkSizes(together, together, together, together)
        few = max(16, min(few, budget // 2 // row_bytes))
        products = bounded((budget - few * row_bytes) // grad_bytes, longest)
        if products <= 2 * few:  # a buffer of their own would take as much
            return ChunkSizes(products, products, together, together)
        return ChunkSizes(products, few, together, together)

    if on_cpu:
        return cut(512 if grad_dtype.itemsize > 2 else 1366, 512)
    sizes = cut(_SINGLE_CHUNK_ROWS, _LOGITS_ROWS)
    if not any(wants):
        rows = min(sizes.logits, chunk_rows or _LOGITS_ROWS)
        return sizes._replace(products=rows, logits=rows)
    if chunk_rows is not None or (wants[1] and sizes.sequences == num_rows):
        return sizes
    longest = short_product_rows(head_shape[1], multiprocessors) if wants[1] else _FROZEN_ROWS
    short = cut(longest, _SHORT_LOGITS_ROWS)
    if wants[1] and sizes.products == num_rows:
        return sizes._replace(packed=short.packed)
    return short._replace(sequences=sizes.sequences)


def short_product_rows(hidden_size: int, multiprocessors: int) -> int:
    """Rows of a chunk whose tiles of dlogits W (P, H) fill their waves over the multiprocessors, against what each
    chunk costs by adding to dweight."""
    columns = -(-hidden_size // TILE_COLUMNS)

    def cost(tiles: int) -> float:
        """Time of a row, in units of its product dlogits W with full waves."""
        blocks = tiles * columns
        waves = -(-blocks // multiprocessors) * multiprocessors if multiprocessors else blocks
        return waves / blocks + _ACCUMULATED_ROWS / (tiles * TILE_ROWS)

    return TILE_ROWS * min(_SHORT_PRODUCT_TILES, key=cost)


def default_logits_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """float32 wherever the matrix product can return it; on a CPU that has products of bfloat16 it is a choice."""
    if device.type == "cpu" and cpu_multiplies(dtype):
        return dtype
    return torch.float32 if dtype.itemsize == 2 else dtype


class Scratch:
    """Buffers of logits, their gradients, and the rounding errors of these; each grows to the largest chunk so far.

    What a method returns is valid until its next call. `logits_rows`, `product_rows`: of the usual row chunk and
    product chunk, allocated at least. `most_logits_rows`: allocated at least where the usual ones are too few, so that
    later calls can reuse the buffer. `teacher_dtype`: of the logits of a teacher, which come with those of a chunk.
    """

    def __init__(
        self,
        vocab_size: int,
        logits_rows: int,
        product_rows: int,
        logits_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        device: torch.device,
        most_logits_rows: int = 0,
        teacher_dtype: torch.dtype | None = None,
    ) -> None:
        self.vocab_size, self.logits_rows, self.product_rows = vocab_size, logits_rows, product_rows
        self.most_logits_rows = most_logits_rows
        self.grad_dtype, self.device = grad_dtype, device
        self.logits_dtypes = (logits_dtype,) if teacher_dtype is None else (logits_dtype, teacher_dtype)
        self._logits: list[Tensor] = []
        self._gradients: Tensor | None = None
        self._errors: Tensor | None = None

    def logits(self, count: int) -> Tensor:
        """(count, V) of a row chunk."""
        if not self._logits or self._logits[0].shape[0] < count:
            self._logits = []  # freed before the next one is made
            rows = self.logits_rows if count <= self.logits_rows else max(count, self.most_logits_rows)
            self._logits = allocate_rows(rows, self.vocab_size, self.logits_dtypes, self.device)
        return self._logits[0] if self._logits[0].shape[0] == count else self._logits[0][:count]

    def teacher_logits(self, count: int) -> Tensor:
        """(count, V) for the rows of the last `logits`."""
        return self._logits[1][:count]

    def gradients(self, count: int) -> Tensor:
        """(count, V) of a product chunk, where they do not lie over the logits."""
        if self._gradients is None or self._gradients.shape[0] < count:
            self._gradients = None
            rows = max(count, self.product_rows)
            (self._gradients,) = allocate_rows(rows, self.vocab_size, (self.grad_dtype,), self.device)
        return self._gradients[:count]

    def over(self, logits: Tensor) -> Tensor:
        """(count, V) gradients over these logits: of a narrower type, over the front half of each row."""
        return logits if self.grad_dtype == logits.dtype else logits.view(self.grad_dtype)[:, : self.vocab_size]

    def errors(self, count: int) -> Tensor:
        """(count,) float32 of a product chunk."""
        if self._errors is None or len(self._errors) < count:
            self._errors = torch.empty(max(count, self.product_rows), dtype=torch.float32, device=self.device)
        return self._errors[:count]

    def release(self) -> None:
        """Let go of everything; logits on a CPU stay for the next call."""
        if self._logits and self.device.type == "cpu":
            _keep(self._logits[0].untyped_storage())
        self._logits, self._gradients, self._errors = [], None, None


def allocate_rows(rows: int, vocab_size: int, dtypes: Sequence[torch.dtype], device: torch.device) -> list[Tensor]:
    """A scratch (rows, V) in each type, of logits or their gradients; on a CPU in one block. Out of memory, the error
    names the setting that helps."""
    row_stride = chunk_row_stride(vocab_size, device)
    shape, strides = (rows, vocab_size), (row_stride, 1)
    sizes = [-(-rows * row_stride * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for dtype in dtypes]
    try:
        if device.type != "cpu":
            return [torch.empty((rows, row_stride), dtype=dtype, device=device)[:, :vocab_size] for dtype in dtypes]
        block = _cpu_block(sum(sizes))
        places = [sum(sizes[:i]) // dtype.itemsize for i, dtype in enumerate(dtypes)]
        return [
            torch.empty(0, dtype=dtype, device=device).set_(block, place, shape, strides)
            for place, dtype in zip(places, dtypes, strict=True)
        ]
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
            raise
        named = " and ".join(map(str, dtypes))
        raise type(error)(
            f"no memory for one chunk of logits, {rows} x {vocab_size} {named} = {sum(sizes) / 2**20:.0f} MiB: "
            f"set GRPOConfig.chunk_rows below {rows}. ({error})"
        ) from error


# The scratch of the last call on a CPU. glibc returns a freed block of 32 MiB or more to the system, whose fresh pages
# cost as much time as the product that fills them; the allocator of torch for GPUs keeps its blocks itself.
_last_on_cpu: list[torch.UntypedStorage] = []


def _cpu_block(size: int) -> torch.UntypedStorage:
    """At least `size` bytes: those of the last call where they suffice, which no other thread gets then."""
    with suppress(IndexError):
        block = _last_on_cpu.pop()
        if block.nbytes() >= size:
            return block
        del block  # freed before a larger one is made
    return torch.empty(size, dtype=torch.uint8, device="cpu").untyped_storage()


def _keep(block: torch.UntypedStorage) -> None:
    """For the next call, in place of what another thread has put there."""
    _last_on_cpu[:] = [block]

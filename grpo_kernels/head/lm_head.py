"""The three matrix products of the lm_head, chunk by chunk, by the vendor's library.

    logits  = h W^T (+ b)        (C, V) into one scratch that every chunk reuses
    dhidden = dlogits W          (C, H) per chunk
    dweight += dlogits^T h       (V, H)

The gradient of the logits overwrites them in the scratch. 16-bit inputs with float32 logits put a 16-bit gradient over
the front half of each float32 row (row stride 2V), so that there is no second buffer.

In a row of 16-bit dlogits the entry of the sampled id is as large as all others together, and so is the error of its
rounding. This error is corrected in O(H) per token: dhidden gets what the rounding took, times the id's row of W;
dweight gets the exact entries after the last chunk, so that their sum is rounded once, not once per chunk. Exponentials
come without it, and with its exact value apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks.plain import materialized
from ..kernels.operations import Backend, HeadChunk, Rows, RowScales, TokenIdPairs
from .chunk_size import (
    STATISTICS_BYTES,
    ChunkTypes,
    Scratch,
    multiprocessors_of,
    rows_of_chunk,
    rows_of_sequences,
    select_rows,
)
from .dweight import WeightGradient, row_blocks
from .gradients import PrecomputedGradients, held_dtype, power_of_two_scale
from .products import BLOCK_ROWS, SPLIT_SUM_ELEMENTS, product, returns_float32
from .vocab_parallel import VocabSlice, vocab_size_of


class SampledEntries(NamedTuple):
    """The entries of a chunk's dlogits at the sampled ids, before they were rounded to 16 bits."""

    ids: Tensor  # (C,) int64, -1 where another rank has the column
    values: Tensor  # (C,) float32; 0 where there is no gradient, anything where there is no column

    @property
    def columns(self) -> Tensor:
        """Returns the columns (C, 1), 0 where this rank has none."""
        return self.ids.clamp(min=0)[:, None]

    def rounding_errors(self, dlogits: Tensor) -> Tensor:
        """Returns what rounding took from the sampled entries of dlogits (C, V): (C, 1) float32."""
        rounded = dlogits.gather(1, self.columns).float()
        return torch.where(self.ids[:, None] >= 0, self.values[:, None] - rounded, 0.0)

    def as_rounded(self, dlogits: Tensor) -> SampledEntries:
        """Returns the entries as they are in dlogits (C, V), to which something was added."""
        return self._replace(values=dlogits.gather(1, self.columns)[:, 0].float())

    def take_out(self, dlogits: Tensor) -> None:
        """Sets these entries of dlogits (C, V) to 0."""
        rows, columns = torch.arange(len(dlogits), device=dlogits.device), self.ids.clamp(min=0)
        # scatter_ would copy all of dlogits, whose rows have gaps.
        dlogits[rows, columns] = dlogits[rows, columns].masked_fill(self.ids >= 0, 0.0)


class LMHead:
    """The products with one lm_head. It adds up the gradients of hidden, weight and bias over the chunks of a call.

    inputs: hidden, weight and bias. wants: which of them need gradients, which come back in their types.
    compute_dtype: the type of the products where that is not the inputs' own (autocast).
    chunk_rows: the caller's number of rows of a chunk.
    accumulate_in_fp32: dweight is a float32 sum.
    vocab_slice: the weight is a slice of the vocabulary; all ranks have the same chunks, and dhidden is a float32 sum.
    teacher_dtype: of the logits of a teacher that are computed for each chunk too.

    Attributes:
        row_mask: (N,) bool; padding is computed too, and its hidden states, which may hold anything, count as 0.
        fused_products: which products of the backend include the softmax, of "logp" and "exponentials".
        takes_exponentials: whether the gradient of a chunk may be one scale per row times exponentials.
        gradient_scale: where gradients of logits are float16, the power of two that dlogits, dweight and dbias hold as
            a factor; dhidden does not.
    """

    row_mask: Tensor | None = None
    folded_bias: Tensor | None = None  # (V,) in float32 or better, for the row kernels to add
    dhidden: Tensor | None = None
    dbias: Tensor | None = None
    gradient_scale: Tensor | None = None
    _gathered: tuple[Rows, Tensor] | None = None  # a chunk's hidden states serve two products

    def __init__(
        self,
        inputs: tuple[Tensor, Tensor, Tensor | None],
        backend: Backend,
        *,
        wants: tuple[bool, ...] = (False, False, False),
        compute_dtype: torch.dtype | None = None,
        logits_dtype: torch.dtype | None = None,
        chunk_rows: int | None = None,
        accumulate_in_fp32: bool = False,
        vocab_slice: VocabSlice | None = None,
        teacher_dtype: torch.dtype | None = None,
    ) -> None:
        hidden, weight, bias = materialized(*inputs)
        self.input_dtypes = hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
        if compute_dtype is not None:
            hidden, weight = hidden.to(compute_dtype), weight.to(compute_dtype)
            bias = None if bias is None else bias.to(compute_dtype)
        self.hidden, self.weight, self.bias = hidden, weight, bias
        if bias is not None:
            self.bias = bias.contiguous()  # for kernels that fold it into the product
            self.folded_bias = bias.detach().to(torch.promote_types(bias.dtype, torch.float32)).contiguous()
        device, dtype = hidden.device, hidden.dtype
        self.num_tokens = hidden.numel() // hidden.shape[-1]
        self.flat_hidden: Tensor | None  # (N, H), None where only a copy could be that
        try:
            self.flat_hidden = hidden.view(-1, hidden.shape[-1])
        except RuntimeError:
            self.flat_hidden = None
        self.backend, self.wants, self.vocab_slice = backend, wants, vocab_slice
        self.vocab_size = vocab_size_of(weight, vocab_slice)
        may_have_exponentials = backend.exponentials is not None and vocab_slice is None
        self.types = types = ChunkTypes.of(dtype, device, logits_dtype, may_have_exponentials=may_have_exponentials)
        self.logits_dtype, self.grad_dtype = types.logits, types.gradients
        has_float32_logits = types.logits == torch.float32  # as the fused products have them in registers
        self.fused_products: tuple[str, ...] = ()
        if backend.fused_products is not None and vocab_slice is None and has_float32_logits:
            self.fused_products = backend.fused_products(hidden, weight)
        # Of logits of 16 bits exponentials would be rounded twice.
        self.takes_exponentials = dtype == torch.bfloat16 and vocab_slice is None and has_float32_logits
        self.held_dtypes = [*map(held_dtype, self.input_dtypes)]
        for i, in_fp32 in enumerate((vocab_slice is not None, accumulate_in_fp32)):
            if in_fp32:
                self.held_dtypes[i] = torch.promote_types(self.held_dtypes[i], torch.float32)
        dweight_dtype = self.held_dtypes[1]
        self.dweight = WeightGradient(weight, self.grad_dtype, dweight_dtype, backend, rounds_once=accumulate_in_fp32)
        self._taken_out: list[tuple[Rows, Tensor, Tensor]] = []  # tokens, ids and values of entries, by chunk

        entry_bytes = types.logits.itemsize + (0 if types.in_place else types.gradients.itemsize)
        entry_bytes += 0 if teacher_dtype is None else teacher_dtype.itemsize
        vocab_rows = len(weight) if vocab_slice is None else max(vocab_slice.sizes)
        self._multiprocessors = multiprocessors_of(device) if vocab_slice is None else vocab_slice.multiprocessors
        self._row_bytes = {
            "logits": vocab_rows * entry_bytes,
            "exponentials": vocab_rows * types.gradients.itemsize,
            "statistics": STATISTICS_BYTES * (self._multiprocessors + 1),
        }
        self._chunk_rows = chunk_rows
        shape = len(weight), self._length(self.num_tokens, self.rows_of("logits"))
        self.scratch = Scratch(*shape, self.logits_dtype, self.grad_dtype, device, teacher_dtype)

    @cached_property
    def hidden_matrix(self) -> Tensor:
        """Returns the hidden states (N, H); a copy where no view has this shape."""
        return self.hidden.reshape(-1, self.hidden.shape[-1])

    def local_ids(self, ids: Tensor) -> Tensor:
        """Returns the columns of the sampled ids (N,) in this rank's logits; -1 where another rank has them."""
        return ids if self.vocab_slice is None else self.vocab_slice.local_ids(ids)

    # --- chunks and their buffers ---------------------------------------------------------------------------------

    def rows_of(self, holds: str, *, copies_hidden: bool = False) -> int:
        """Returns the number of rows of a chunk that holds "logits", "exponentials" or "statistics" of them.

        copies_hidden: its hidden states are copied, which is most of what a chunk without logits holds.
        """
        if self._chunk_rows is not None:
            return self._chunk_rows
        row_bytes, width = self._row_bytes[holds], self.weight.shape[1]
        if copies_hidden and holds == "statistics":
            row_bytes += width * self.hidden.itemsize
        return rows_of_chunk(
            self.num_tokens, width, row_bytes, self.grad_dtype, self.hidden.device, holds=holds,
            dweight_dtype=self.held_dtypes[1] if self.wants[1] else None, multiprocessors=self._multiprocessors,
        )  # fmt: skip

    def rows_of_sequences(self, holds: str) -> int:
        """Returns the most rows of a chunk of whole sequences."""
        return self._chunk_rows or rows_of_sequences(self._row_bytes[holds], self.weight.shape[1], self.hidden.device)

    def chunks(self, index: Tensor | None, holds: str = "logits") -> list[Rows]:
        """Returns the tokens `index` (None: all) in chunks; `holds` as in `rows_of`."""
        rows = select_rows(index, self.num_tokens)
        copies_hidden = rows.index is not None or self.flat_hidden is None or self.row_mask is not None
        return rows.split(self._length(rows.count, self.rows_of(holds, copies_hidden=copies_hidden)))

    def reserve(self, holds: str, counts: Sequence[int] = ()) -> None:
        """Prepares for chunks of the usual rows, or of so many."""
        self.scratch.rows = max([self._length(self.num_tokens, self.rows_of(holds)), *counts])

    def _length(self, count: int, max_rows: int) -> int:
        """Returns the rows of the parts that `count` rows are cut into. On a CPU they are nearly equal. A GPU computes
        tiles of many rows, so that only the last part may have a tile that is not full."""
        if count <= max_rows or self.hidden.device.type != "cpu":
            return max(1, min(count, max_rows))
        return -(-count // -(-count // max_rows))

    def row_gradients(self, rows: Rows, logits: Tensor) -> Tensor:
        """Returns the memory for d loss / d logits of a chunk: that of its logits, or a second buffer."""
        return self.scratch.gradient_view(logits) if self.types.in_place else self.scratch.gradients(rows.count)

    def free(self) -> None:
        """Frees all scratch memory."""
        self.scratch.free()
        self._gathered = None

    # --- hidden states and logits -----------------------------------------------------------------------------------

    def hidden_rows(self, rows: Rows) -> Tensor:
        """Returns the hidden states of a chunk, (C, H)."""
        if self._gathered is None or self._gathered[0] is not rows:
            if self.flat_hidden is not None:
                h = rows.take(self.flat_hidden)
            else:  # a strided view (a shifted completion, say) is read chunk by chunk, never copied whole
                index, length = rows.tokens(self.hidden.device), self.hidden.shape[1]
                h = self.hidden[index // length, index % length]
            self._gathered = (
                rows,
                h if self.row_mask is None else torch.where(rows.take(self.row_mask)[:, None], h, 0.0),
            )
        return self._gathered[1]

    def logits(self, rows: Rows, out: Tensor | None = None) -> Tensor:
        """Returns the logits of a chunk, (C, V), in `out`, or in the scratch until the next call."""
        h = self.hidden_rows(rows)
        if out is None:
            out = self.scratch.logits(rows.count)
        if self.types.converts:
            h = h.to(self.logits_dtype)
            for block in row_blocks(self.weight, BLOCK_ROWS):
                torch.mm(h, self.weight[block].to(self.logits_dtype).T, out=out[:, block])
        elif self.logits_dtype != h.dtype:
            torch.mm(h, self.weight.T, out_dtype=self.logits_dtype, out=out)
        else:
            torch.mm(h, self.weight.T, out=out)
        return out

    # --- gradients --------------------------------------------------------------------------------------------------

    def scale_gradients(self, largest: Tensor) -> Tensor:
        """Returns the scale () of the next chunk of dlogits, whose largest entry would be `largest`, and of all sums
        from then on.

        It never grows, so that a chunk with small gradients costs no pass over dweight.
        """
        scale = power_of_two_scale(largest)
        if self.gradient_scale is not None:
            scale = torch.minimum(scale, self.gradient_scale)
            for total in (self.dweight.total, self.dbias):
                if total is not None:
                    self.backend.scale(total, scale / self.gradient_scale)
        self.gradient_scale = scale
        return scale

    def accumulate(self, rows: Rows, dlogits: Tensor, sampled: SampledEntries | None = None) -> None:
        """Adds a chunk's contributions to dhidden, dweight and dbias. dlogits (C, V); its `sampled` entries are set to
        0."""
        if self.wants[0]:
            missing = None
            if sampled is not None:
                missing = sampled.rounding_errors(dlogits) * self.weight[sampled.columns[:, 0]]
            self._put_dhidden(rows, self._times_weight(dlogits, missing))
        if sampled is not None and (self.wants[1] or self.wants[2]):
            sampled.take_out(dlogits)
            self._keep_sampled(rows, sampled)
        if self.wants[2]:
            self.add_dbias(dlogits.sum(0, dtype=torch.promote_types(dlogits.dtype, torch.float32)))
        if self.wants[1]:
            self.dweight.add(dlogits, self.hidden_rows(rows))

    def accumulate_scaled(self, chunk: HeadChunk, exponentials: Tensor, dlogp: Tensor, scales: RowScales) -> None:
        """Does the same for the dlogits that are multiples of exponentials (C, V), which are never formed. dlogp (N,):
        d loss / d logp."""
        rows, dlogp_rows, scale_rows = chunk.rows, chunk.rows.take(dlogp), self.backend.scale_rows
        if self.wants[0]:
            dhidden = self.dhidden_to_write(every_row=rows.index is None)
            scale_rows(product(exponentials, self.weight), dlogp, scales, chunk, dhidden, is_product=True)
        if self.wants[1]:
            scaled = torch.empty_like(chunk.hidden, memory_format=torch.contiguous_format)
            scale_rows(chunk.hidden, dlogp, scales, chunk, scaled, is_product=False)
            self.dweight.add(exponentials, scaled)
        if self.wants[2]:
            scale = torch.where(dlogp_rows == 0, 0.0, -dlogp_rows * scales.row_scale)
            self.add_dbias(torch.mv(exponentials.T, scale.to(exponentials.dtype)).float())
        self._keep_sampled(rows, SampledEntries(rows.take(chunk.ids), dlogp_rows * scales.sampled))

    def _keep_sampled(self, rows: Rows, sampled: SampledEntries) -> None:
        """Keeps the entries that a chunk's dlogits do not have, to be added after the last one."""
        values = sampled.values if self.gradient_scale is None else sampled.values / self.gradient_scale
        self._taken_out.append((rows, sampled.ids, values))

    def _add_sampled(self) -> None:
        if self._taken_out:
            chunks, ids, values = zip(*self._taken_out, strict=True)
            self._taken_out = []
            numbers = torch.arange(self.num_tokens, dtype=torch.int32, device=self.hidden.device)
            tokens = torch.cat([rows.take(numbers) for rows in chunks])
            self.add_pairs(torch.cat(values), TokenIdPairs(torch.cat(ids).to(torch.int32), tokens))

    def add_pairs(self, dlogits: Tensor, pairs: TokenIdPairs) -> None:
        """Adds the contributions of pairs of a token and an id, dlogits (M,), to dweight and dbias. With float16, call
        it after all dense products."""
        scaled = dlogits if self.gradient_scale is None else dlogits * self.gradient_scale
        if self.wants[1]:
            hidden = self.hidden_matrix
            if self.row_mask is not None:
                hidden = torch.where(self.row_mask[:, None], hidden, 0.0)
            self.dweight.add_pairs(scaled, hidden, pairs)
        if self.wants[2]:
            starts, order = pairs.by_id(len(self.weight))
            self.add_dbias(torch.segment_reduce(scaled[order], "sum", offsets=starts, unsafe=True))

    def gradients(self) -> PrecomputedGradients:
        """Returns the gradients of (hidden, weight, bias), in their shapes; zeros where no row contributed."""
        self.free()
        self._add_sampled()  # without the scratch: views of hidden states that are not contiguous are copied for it
        if self.vocab_slice is not None and self.dhidden is not None:
            self.vocab_slice.add_up(self.dhidden)
        totals = self.dhidden, self.dweight.total, self.dbias
        inputs = self.hidden, self.weight, self.bias
        finished: list[Tensor | None] = []
        for want, total, x, dtype in zip(self.wants, totals, inputs, self.held_dtypes, strict=True):
            if not want or x is None:
                finished.append(None)
            elif total is None:
                finished.append(torch.zeros(x.shape, dtype=dtype, device=x.device))
            else:
                finished.append(total.view(x.shape).to(dtype))
        self.dhidden = self.dbias = self.dweight.total = None
        scales = [None, self.gradient_scale, self.gradient_scale]
        return PrecomputedGradients(finished, self.input_dtypes, self.backend, scales)

    def add_dbias(self, contribution: Tensor) -> None:
        self.dbias = contribution if self.dbias is None else self.dbias.add_(contribution)

    def _put_dhidden(self, rows: Rows, values: Tensor) -> None:
        dtype = self.held_dtypes[0]
        is_whole = self.dhidden is None and rows.index is None and rows.count == self.num_tokens
        if self.gradient_scale is not None:
            values = values.to(dtype) / self.gradient_scale
        elif is_whole or rows.index is not None:  # a copy into a range converts by itself
            values = values.to(dtype)
        if is_whole:
            self.dhidden = values
        else:
            rows.put(self.dhidden_to_write(every_row=rows.index is None), values)

    def dhidden_to_write(self, *, every_row: bool) -> Tensor:
        """Returns dhidden (N, H). Rows that nobody has written are 0, or with `every_row`, where all will be written,
        not initialised."""
        if self.dhidden is None:
            shape = (self.num_tokens, self.hidden.shape[-1])
            allocate = torch.empty if every_row else torch.zeros
            self.dhidden = allocate(shape, dtype=self.held_dtypes[0], device=self.hidden.device)
        return self.dhidden

    def _times_weight(self, dlogits: Tensor, missing: Tensor | None = None) -> Tensor:
        """Returns dlogits W + missing (C, H), in float32 where dhidden is, or where the library would round parts of
        the sum to 16 bits."""
        weight, dtype = self.weight, self.weight.dtype
        if dlogits.dtype != dtype:
            total = missing
            if total is None:
                total = torch.zeros(dlogits.shape[0], weight.shape[1], dtype=dlogits.dtype, device=dlogits.device)
            for block in row_blocks(weight, BLOCK_ROWS):
                total.addmm_(dlogits[:, block], weight[block].to(dlogits.dtype))
            return total
        in_fp32 = self.held_dtypes[0] == torch.float32 or dlogits.shape[0] * weight.shape[1] < SPLIT_SUM_ELEMENTS
        if dtype.itemsize == 2 and in_fp32 and returns_float32(weight.device, dtype):
            dhidden = product(dlogits, weight)
            return dhidden if missing is None else dhidden.add_(missing)
        # A product adds to its start in float32, and rounds once.
        return torch.mm(dlogits, weight) if missing is None else missing.to(dtype).addmm_(dlogits, weight)


class HeldLogits:
    """Logits in memory that is not the scratch, with the interface of `LMHead`. Their gradient overwrites them."""

    backend: Backend
    num_tokens: int
    fused_products: tuple[str, ...] = ()
    takes_exponentials = False
    logits_dtype: torch.dtype
    folded_bias: Tensor | None = None
    vocab_slice: VocabSlice | None = None

    def rows_of(self, holds: str) -> int:
        """Returns the number of all rows: all sequences are one chunk."""
        return self.num_tokens

    rows_of_sequences = rows_of

    def reserve(self, holds: str, counts: Sequence[int] = ()) -> None:
        """Does nothing: the logits are in memory already."""

    def row_gradients(self, rows: Rows, logits: Tensor) -> Tensor:
        return logits


class GivenLogits(HeldLogits):
    """The caller's logits (N, V); their gradient may hold the factor `gradient_scale`."""

    gradient_scale: Tensor | None = None

    def __init__(self, logits: Tensor, backend: Backend) -> None:
        self.buffer, self.grad_dtype, self.backend = logits, logits.dtype, backend
        self.num_tokens, self.vocab_size = logits.shape

    def local_ids(self, ids: Tensor) -> Tensor:
        return ids

    def chunks(self, index: Tensor | None, holds: str = "logits") -> list[Rows]:
        """Returns all rows as one chunk; `index` is None."""
        assert index is None
        return [Rows(0, self.num_tokens)] if self.num_tokens else []

    def logits(self, rows: Rows) -> Tensor:
        return rows.take(self.buffer)

    def scale_gradients(self, largest: Tensor) -> Tensor:
        """Returns the scale () of the gradients of all logits, which are one chunk."""
        self.gradient_scale = power_of_two_scale(largest)
        return self.gradient_scale

    def accumulate(self, rows: Rows, dlogits: Tensor) -> None:
        """Does nothing: the gradient has overwritten the logits."""

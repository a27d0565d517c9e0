"""The three matrix products of the lm_head, chunk by chunk, in the vendor's GEMM.

    logits  = h W^T (+ b)        (C, V) into one scratch that every chunk reuses
    dhidden = dlogits W          (C, H) per chunk
    dweight += dlogits^T h       (V, H)

The gradient of the logits takes their place in the scratch. 16-bit inputs with float32 logits put a 16-bit gradient
over the front half of each float32 row (row stride 2V), so that there is no second buffer.

Where there are many rows, that is not enough of them for the other two products, each of which reads or writes a whole
(V, H). Then a product chunk has 16-bit gradients of many rows in a buffer of their own, and the float32 logits in the
scratch are those of a few rows at a time, the row chunks (memory.py has both sizes).

Rounding to 16 bits hurts one entry of a row of dlogits most, that of the sampled id: it carries most of the row's norm,
and without its rounding the error of the other products falls 20-fold. So on a CPU the row kernel reports what the
rounding took, e_t. dhidden starts from e_t W[id]. The product for dweight gets 0 for the sampled ids, whose own shares
g_t h_t, a sum over N rows of length H, are added at the end, in float32: rows of dweight with most of its norm are
rounded once, however many chunks there were.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backends.compiled.cpu import CpuBackend
from ..backends.strategy import choose_strategy
from ..contract import Backend, Rows
from .backward import FinishedGradients, power_of_two_scale, waiting_dtype
from .memory import ROUNDED_CHUNKS, allocate_rows, chunk_sizes, release_rows
from .products import PIECE_ROWS, SPLIT_SUM_ELEMENTS, add_product, product, returns_float32, transposed_columns

# Rows of W in one float32 product of the forward pass on a CPU: 512 hidden rows against 1,024 take up to 9 % less time
# than against all of W at once (H from 576 to 2048, V from 49,152 to 151,936), against 2,048 another 1 to 4 % less.
FORWARD_ROWS = 2048


def visited(index: Tensor | None, num_tokens: int) -> Rows:
    """The tokens of `index`, or all."""
    if index is None or index.numel() == num_tokens:
        return Rows(0, num_tokens)
    return Rows(0, index.numel(), index)


@dataclass(frozen=True)
class Chunk:
    """A product chunk: rows whose gradients go through one pair of products, with logits of `logits_rows` at a time.

    in_place: gradients lie over the logits, which are those of all its rows.
    """

    rows: Rows
    logits_rows: int
    in_place: bool

    def row_chunks(self) -> Iterator[Rows]:
        return self.rows.split(self.logits_rows)


class LMHead:
    """Products with one lm_head; gradients accumulate here.

    `compute_dtype`: the type of the products where that is not the inputs' own (autocast); gradients come back in the
    types of the inputs. `wants` = (hidden, weight, bias) need gradients. `keep` (N,) bool: padding is computed along
    with the rest, and its hidden states, which may hold anything, count as 0. `strategy`: see strategy.py.
    `gradient_scale`: where gradients of logits are float16, the power of two that dlogits, dweight and dbias hold as a
    factor; dhidden does not. `chunk_rows`: see memory.chunk_sizes. `accumulate_into` (V, H) float32: dweight is added
    to what it holds, chunk by chunk and without a factor, and is not among `gradients`.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        logits_dtype: torch.dtype,
        chunk_rows: int | None,
        backend: Backend,
        wants: tuple[bool, ...] = (False, False, False),
        keep: Tensor | None = None,
        compute_dtype: torch.dtype | None = None,
        accumulate_into: Tensor | None = None,
    ) -> None:
        self.given_dtypes = [hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype]
        self.waiting_dtypes = [waiting_dtype(dtype) for dtype in self.given_dtypes]
        if compute_dtype is not None:
            hidden, weight = hidden.to(compute_dtype), weight.to(compute_dtype)
            bias = None if bias is None else bias.to(compute_dtype)
        self.hidden, self.weight, self.bias, self.keep = hidden, weight, bias, keep
        # (V,) in float32 or better, for the row kernels to add.
        self.folded_bias: Tensor | None = None
        if bias is not None:
            self.folded_bias = bias.detach().to(torch.promote_types(bias.dtype, torch.float32)).contiguous()
        self.strategy = choose_strategy(backend, hidden, weight)
        self.num_tokens = hidden.numel() // hidden.shape[-1]
        self.flat_hidden = _flat_view(hidden)
        self.logits_dtype, self.backend, self.wants = logits_dtype, backend, wants
        on_cpu = hidden.device.type == "cpu"
        # A CPU has no usable float16 product, and none that returns float32 from 16-bit inputs: convert W in pieces.
        self.converts = logits_dtype != hidden.dtype and not returns_float32(hidden.device, hidden.dtype)
        self.grad_dtype = torch.float32 if hidden.dtype == torch.float16 and self.converts else hidden.dtype
        self.rounds = on_cpu and self.grad_dtype == torch.bfloat16
        self.accumulate_into = accumulate_into
        if accumulate_into is not None:
            _check_sum(accumulate_into, weight)
        self.sizes = chunk_sizes(
            self.num_tokens, weight.shape[0], logits_dtype, self.grad_dtype, hidden.device, chunk_rows
        )
        # Whole sequences may be packed into more chunks than this, few of them half empty.
        self._expect_chunks(-(-self.num_tokens // self.sizes.sequences))
        self.gradient_scale: Tensor | None = None
        self.scratch: Tensor | None = None  # logits of a row chunk
        self.product_scratch: Tensor | None = None  # their gradients, of a product chunk, unless they lie over them
        self._gathered: tuple[Rows, Tensor] | None = None  # a chunk's hidden states serve two products
        self.errors: Tensor | None = None
        self.own_shares: list[tuple[Rows, Tensor, Tensor]] = []  # rows, sampled ids, d loss / d their logits
        self.dhidden: Tensor | None = None
        self.dweight = self.accumulate_into
        self.dbias: Tensor | None = None

    def chunks(self, index: Tensor | None) -> Iterator[Chunk]:
        """Product chunks of these tokens (None: of all), as long as memory allows and of nearly equal length."""
        pieces = list(visited(index, self.num_tokens).split(self.sizes.products))
        self._expect_chunks(len(pieces))
        return (self._chunk(rows, self.sizes.logits) for rows in pieces)

    def chunk_of(self, rows: Rows) -> Chunk:
        """These rows, at most `sequence_rows`, as a product chunk that is one row chunk."""
        return self._chunk(rows, max(rows.count, 1))

    def _chunk(self, rows: Rows, logits_rows: int) -> Chunk:
        # torch's 16-bit product on a CPU with AMX reads up to 31 columns beyond a matrix with gaps between its rows,
        # and spoils its result where those hold NaN (2.13): there narrower gradients never lie over their logits.
        may = self.grad_dtype == self.logits_dtype or self.hidden.device.type != "cpu"
        return Chunk(rows, logits_rows, may and rows.count <= logits_rows)

    @property
    def sequence_rows(self) -> int:
        """Rows that `chunk_of` may get: what whole sequences have to fit."""
        return self.sizes.sequences

    def _expect_chunks(self, count: int) -> None:
        """Few chunks may add to a 16-bit dweight, on a GPU one alone: its product rounds once. More are summed in
        float32, as is a gradient that is wanted in float32."""
        few = ROUNDED_CHUNKS if self.hidden.device.type == "cpu" else 1
        wide = count > few or self.waiting_dtypes[1] == torch.float32 or self.accumulate_into is not None
        self.sums_in_float32 = self.grad_dtype.itemsize == 2 and wide

    def logits(self, rows: Rows) -> Tensor:
        """(C, V) logits of a chunk, valid until the next call."""
        h = self.hidden_rows(rows)
        out = self._logits_rows(rows.count)
        if self.converts:
            h = h.to(self.logits_dtype)
            for piece in self._pieces(PIECE_ROWS):
                torch.mm(h, self.weight[piece].to(self.logits_dtype).T, out=out[:, piece])
        elif self.logits_dtype != h.dtype:
            torch.mm(h, self.weight.T, out_dtype=self.logits_dtype, out=out)
        elif len(self.weight) > FORWARD_ROWS and h.device.type == "cpu" and h.dtype == torch.float32:
            for piece in self._pieces(FORWARD_ROWS):
                torch.mm(h, self.weight[piece].T, out=out[:, piece])
        else:
            torch.mm(h, self.weight.T, out=out)
        return out

    def exponentials(self, chunk: Chunk) -> Tensor:
        """(P, V) uninitialised, in the type of the gradients, for the anchored strategy; valid until the next call."""
        return self._product_rows(chunk.rows.count)

    def gradient_buffer(self, chunk: Chunk, rows: Rows, logits: Tensor) -> Tensor:
        """Where the row kernel writes d loss / d logits of a row chunk: over the logits, if they are all of a chunk."""
        return self._over(logits) if chunk.in_place else self._product_rows(chunk.rows.count)[_within(chunk, rows)]

    def _over(self, logits: Tensor) -> Tensor:
        return logits if self.grad_dtype == logits.dtype else logits.view(self.grad_dtype)[:, : logits.shape[1]]

    def _logits_rows(self, count: int) -> Tensor:
        if self.scratch is None or len(self.scratch) < count:
            self.scratch = None  # freed before the next one is made
            usual = min(self.sizes.logits, self._usual_chunk)
            rows = usual if count <= usual else max(count, min(self.sizes.sequences, self.num_tokens))
            self.scratch = allocate_rows(rows, self.weight.shape[0], self.logits_dtype, self.hidden.device)
        return self.scratch[:count]

    def _product_rows(self, count: int) -> Tensor:
        if self.product_scratch is None or len(self.product_scratch) < count:
            self.product_scratch = None
            shape = max(count, self._usual_chunk), self.weight.shape[0]
            self.product_scratch = allocate_rows(*shape, self.grad_dtype, self.hidden.device)
        return self.product_scratch[:count]

    @property
    def _usual_chunk(self) -> int:
        """Rows of a product chunk where no token is left out. Where some are, fewer chunks may be a little longer."""
        return -(-self.num_tokens // -(-self.num_tokens // self.sizes.products))

    def scale_gradients(self, largest: Tensor) -> Tensor:
        """() the scale of the next chunk of dlogits, whose largest entry would be `largest`, and of all sums from then
        on. It only ever falls, so that a chunk with small gradients costs no pass over dweight."""
        scale = power_of_two_scale(largest)
        if self.gradient_scale is not None:
            scale = torch.minimum(scale, self.gradient_scale)
            for total in (self.dweight, self.dbias):
                if total is not None and total is not self.accumulate_into:
                    self.backend.scale(total, scale / self.gradient_scale)
        self.gradient_scale = scale
        return scale

    def rounding_error(self, chunk: Chunk, rows: Rows) -> Tensor | None:
        """(C,) to receive what rounding takes from the sampled ids' entries of dlogits; None where it is not used."""
        if not self.rounds:
            return None
        if self.errors is None:
            size = max(self.sizes.products, self.sizes.sequences)
            self.errors = torch.empty(size, dtype=torch.float32, device=self.hidden.device)
        return self.errors[_within(chunk, rows)]

    def accumulate_scaled(self, chunk: Chunk, exponentials: Tensor, scale: Tensor) -> None:
        """`accumulate` of dlogits = scale[:, None] * exponentials, scale (P,) float32, which is never formed."""
        h = self.hidden_rows(chunk.rows)
        if self.wants[0]:
            self._put_dhidden(chunk.rows, scale[:, None] * self._times_weight(exponentials))
        if self.wants[1]:
            self._add_dweight(exponentials, (scale[:, None] * h).to(h.dtype))
        if self.wants[2]:
            total = torch.mv(exponentials.T, scale.to(exponentials.dtype)).float()
            self.dbias = total if self.dbias is None else self.dbias.add_(total)

    def accumulate(self, chunk: Chunk, ids: Tensor) -> None:
        """Add a chunk's share of dhidden, dweight and dbias, once its gradient buffers are full. ids (N,)."""
        rows = chunk.rows
        dlogits = self._over(self._logits_rows(rows.count)) if chunk.in_place else self._product_rows(rows.count)
        error = self.rounding_error(chunk, rows)
        h = self.hidden_rows(rows)
        if error is not None:
            ids = rows.take(ids)
        if self.wants[0]:
            self._add_dhidden(rows, dlogits, ids, error)
        if self.wants[2]:
            total = dlogits.sum(0, dtype=torch.promote_types(dlogits.dtype, torch.float32))
            if error is not None:
                total.index_add_(0, ids, error)
            self.dbias = total if self.dbias is None else self.dbias.add_(total)
        if not self.wants[1]:
            return
        if error is None:
            self._add_dweight(dlogits, h)
            return
        places = torch.arange(rows.count, device=ids.device), ids
        own = dlogits[places] + error
        dlogits[places] = 0.0  # scatter_ would copy all of dlogits
        self._add_dweight(dlogits, h)
        self.own_shares.append((rows, ids, own))

    def gradients(self) -> FinishedGradients:
        """Of (hidden, weight, bias), in their shapes; zeros where no row contributed."""
        self.release()
        self._add_own_shares()
        sums = self.dhidden, self.dweight, self.dbias
        self.dhidden = self.dweight = self.dbias = None
        inputs = self.hidden, self.weight, self.bias
        finished: list[Tensor | None] = [None, None, None]
        for i, (total, x, dtype) in enumerate(zip(sums, inputs, self.waiting_dtypes, strict=True)):
            if self.wants[i] and x is not None and (total is None or total is not self.accumulate_into):
                if total is None:
                    total = torch.zeros(x.shape, dtype=dtype, device=x.device)
                total = total if total.shape == x.shape else total.view(x.shape)
                finished[i] = total if total.dtype is dtype else total.to(dtype)
        scales = [None, self.gradient_scale, self.gradient_scale]
        return FinishedGradients(finished, self.given_dtypes, self.backend, scales)

    def release(self) -> None:
        """Let go of all scratch memory."""
        for scratch in (self.scratch, self.product_scratch):
            release_rows(scratch)
        self.scratch = self.product_scratch = self._gathered = None

    def _add_own_shares(self) -> None:
        """Of the sampled ids in dweight, of all chunks at once."""
        if self.own_shares and self.dweight is not None:
            rows, ids, own = zip(*self.own_shares, strict=True)
            h = [self.hidden_rows(chunk) for chunk in rows]
            self.backend.add_rows(self.dweight, *(x[0] if len(x) == 1 else torch.cat(x) for x in (ids, own, h)))
        self.own_shares.clear()

    def _put_dhidden(self, rows: Rows, values: Tensor) -> None:
        values = values.to(self.waiting_dtypes[0])
        rows.put(self._dhidden(rows), values if self.gradient_scale is None else values / self.gradient_scale)

    def _dhidden(self, rows: Rows) -> Tensor:
        if self.dhidden is None:
            shape = (self.num_tokens, self.hidden.shape[-1])
            # Rows that no chunk visits keep the zero they start with.
            fresh = torch.empty if rows.index is None else torch.zeros
            self.dhidden = fresh(shape, dtype=self.waiting_dtypes[0], device=self.hidden.device)
        return self.dhidden

    def _add_dhidden(self, rows: Rows, dlogits: Tensor, ids: Tensor, error: Tensor | None) -> None:
        if dlogits.dtype != self.weight.dtype:
            shape = dlogits.shape[0], self.hidden.shape[-1]
            total = torch.zeros(shape, dtype=dlogits.dtype, device=dlogits.device)
            for piece in self._pieces(PIECE_ROWS):
                total.addmm_(dlogits[:, piece], self.weight[piece].to(dlogits.dtype))
            self._put_dhidden(rows, total)
        elif error is not None:
            start = (error[:, None] * self.weight[ids]).to(dlogits.dtype)
            self._put_dhidden(rows, start.addmm_(dlogits, self.weight))
        elif self._writes_dhidden(rows):
            self._times_weight(dlogits, out=self._dhidden(rows)[rows.start : rows.stop])
        else:
            self._put_dhidden(rows, self._times_weight(dlogits))

    def _writes_dhidden(self, rows: Rows) -> bool:
        """Whether a product may have its rows of dhidden as its output."""
        same_type = self.waiting_dtypes[0] == self._times_weight_dtype(rows.count)
        return rows.index is None and self.gradient_scale is None and same_type

    def _times_weight_dtype(self, count: int) -> torch.dtype:
        """The type in which dlogits W of `count` rows is computed: float32 where it is wanted or where rounding parts
        of the sum to 16 bits would show."""
        dtype = self.weight.dtype
        if dtype.itemsize > 2 or not returns_float32(self.weight.device, dtype):
            return dtype
        split = count * self.weight.shape[1] < SPLIT_SUM_ELEMENTS
        return torch.float32 if split or self.waiting_dtypes[0] == torch.float32 else dtype

    def _times_weight(self, dlogits: Tensor, out: Tensor | None = None) -> Tensor:
        """dlogits W (C, H)."""
        if self._times_weight_dtype(dlogits.shape[0]) == self.weight.dtype:
            return torch.mm(dlogits, self.weight, out=out)
        return product(dlogits, self.weight, out)

    def _add_dweight(self, dlogits: Tensor, h: Tensor) -> None:
        if self.rounds:
            self._add_rounded_dweight(dlogits, h)
        elif dlogits.dtype.itemsize == 2:
            if self.dweight is not None and self.dweight is self.accumulate_into and self.gradient_scale is not None:
                for piece in self._pieces(PIECE_ROWS):
                    self.dweight[piece] += product(dlogits[:, piece].T, h) / self.gradient_scale
            elif self.dweight is not None:
                self.dweight = self.dweight.float()
                add_product(self.dweight, dlogits.T, h)
            elif self.sums_in_float32:
                self.dweight = product(dlogits.T, h)
            else:
                self.dweight = torch.mm(dlogits.T, h)
        elif self.dweight is None:
            self.dweight = torch.empty(self.weight.shape, dtype=dlogits.dtype, device=h.device)
            torch.mm(dlogits.T, h.to(dlogits.dtype), out=self.dweight)
        else:
            self.dweight.addmm_(dlogits.T, h.to(dlogits.dtype))

    def _add_rounded_dweight(self, dlogits: Tensor, h: Tensor) -> None:
        """In bfloat16 on a CPU."""
        first = self.dweight is None
        if self.dweight is None:
            dtype = torch.float32 if self.sums_in_float32 else h.dtype
            self.dweight = torch.empty(self.weight.shape, dtype=dtype, device=h.device)
        if isinstance(self.backend, CpuBackend):
            columns = min(transposed_columns(h.shape[1]), self.weight.shape[0])
            transposed, scratch = h.T.contiguous(), h.new_empty(h.shape[1] * columns)
            for piece in self._pieces(columns):
                part = scratch[: h.shape[1] * (piece.stop - piece.start)].view(h.shape[1], -1)
                torch.mm(transposed, dlogits[:, piece], out=part)
                self.backend.add_transposed(self.dweight[piece], part, add=not first)
        elif self.sums_in_float32:
            for piece in self._pieces(PIECE_ROWS):
                part = torch.mm(dlogits[:, piece].T, h)
                self.dweight[piece] = part if first else self.dweight[piece] + part
        elif first:
            torch.mm(dlogits.T, h, out=self.dweight)
        else:
            self.dweight.addmm_(dlogits.T, h)

    def hidden_rows(self, rows: Rows) -> Tensor:
        """(C, H) of a chunk."""
        if self._gathered is None or self._gathered[0] is not rows:
            h = self._stored_rows(rows)
            self._gathered = rows, h if self.keep is None else torch.where(rows.take(self.keep)[:, None], h, 0.0)
        return self._gathered[1]

    def _stored_rows(self, rows: Rows) -> Tensor:
        if self.flat_hidden is not None:
            return rows.take(self.flat_hidden)
        # A strided view (a shifted completion, say) is read chunk by chunk, never copied whole.
        index = rows.index
        if index is None:
            index = torch.arange(rows.start, rows.stop, device=self.hidden.device)
        length = self.hidden.shape[1]
        return self.hidden[index // length, index % length]

    def _pieces(self, rows: int) -> Iterator[slice]:
        for start in range(0, self.weight.shape[0], rows):
            yield slice(start, min(start + rows, self.weight.shape[0]))


class GivenLogits:
    """Logits that the caller already holds, behind the interface of `LMHead`: all rows are at hand, in place."""

    def __init__(self, logits: Tensor) -> None:
        """`logits` (N, V) are overwritten with their gradient, which may hold the factor `gradient_scale`."""
        self.buffer = logits
        self.gradient_scale: Tensor | None = None
        self.num_tokens = self.sequence_rows = logits.shape[0]
        self.grad_dtype = logits.dtype
        self.strategy = "rows"
        self.folded_bias: Tensor | None = None

    def chunks(self, index: Tensor | None) -> Iterator[Chunk]:
        """All rows: none is left out, `index` is None."""
        assert index is None
        if self.num_tokens:
            yield self.chunk_of(Rows(0, self.num_tokens))

    def chunk_of(self, rows: Rows) -> Chunk:
        return Chunk(rows, max(rows.count, 1), in_place=True)

    def logits(self, rows: Rows) -> Tensor:
        return rows.take(self.buffer)

    def gradient_buffer(self, chunk: Chunk, rows: Rows, logits: Tensor) -> Tensor:
        return logits

    def scale_gradients(self, largest: Tensor) -> Tensor:
        """() the scale of the gradients of all logits, which are one chunk."""
        self.gradient_scale = power_of_two_scale(largest)
        return self.gradient_scale

    def rounding_error(self, chunk: Chunk, rows: Rows) -> Tensor | None:
        return None

    def accumulate(self, chunk: Chunk, ids: Tensor) -> None:
        """The gradient is where it belongs already."""


def _within(chunk: Chunk, rows: Rows) -> slice:
    """The place of a row chunk in its product chunk."""
    return slice(rows.start - chunk.rows.start, rows.stop - chunk.rows.start)


def _check_sum(total: Tensor, weight: Tensor) -> None:
    dtype = torch.promote_types(weight.dtype, torch.float32)
    if total.shape != weight.shape or total.dtype != dtype or total.device != weight.device:
        raise ValueError(
            f"accumulate_into is {total.dtype} {tuple(total.shape)} on {total.device}; expected {dtype} "
            f"{tuple(weight.shape)} on {weight.device}"
        )
    if not total.is_contiguous():
        raise ValueError(f"accumulate_into has strides {total.stride()}; expected a contiguous matrix")


def _flat_view(hidden: Tensor) -> Tensor | None:
    """(N, H) view of (B, T, H) or (N, H) hidden states, None where only a copy could be that."""
    if hidden.dim() == 2:
        return hidden
    if hidden.is_contiguous():
        return hidden.view(-1, hidden.shape[-1])
    batch, length, width = hidden.shape
    if batch == 1 or hidden.stride(0) == length * hidden.stride(1):
        return hidden.as_strided((batch * length, width), (hidden.stride(1), hidden.stride(2)), hidden.storage_offset())
    return None
